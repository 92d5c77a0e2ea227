"""Coalescing (rules 36, 37): submits of one key meet in a run that has not started, and no submit is ever missed by all runs."""

from __future__ import annotations

import asyncio

import pytest

from durable.errors import Conflict
from durable.model import Status
from durable.settings import HOUR, MINUTE, SECOND, Micros

from .scenario import Scene, new_run, rule


@rule(36, 39)
async def test_a_submit_that_finds_a_waiting_run_of_its_key_joins_it(scene: Scene) -> None:
    first = await scene.start(coalesce_key="c", input='{"n":1}')
    second = await scene.submit(coalesce_key="c", input='{"n":2}')
    assert (second.disposition, second.run.run_id, second.run.input) == ("coalesced", first.run_id, '{"n":1}')
    assert len(await scene.runs()) == 1


@rule(36)
async def test_a_delayed_run_admits_joiners_too(scene: Scene) -> None:
    first = await scene.start(coalesce_key="c", delay=HOUR)
    second = await scene.submit(coalesce_key="c", delay=HOUR)
    assert (second.disposition, second.run.run_id) == ("coalesced", first.run_id)


@rule(36)
async def test_admission_ends_at_the_first_claim(scene: Scene) -> None:
    held = await scene.take(coalesce_key="c")
    second = await scene.submit(coalesce_key="c")
    assert second.disposition == "created"
    assert second.run.run_id != held.run.run_id
    third = await scene.submit(coalesce_key="c")
    assert (third.disposition, third.run.run_id) == ("coalesced", second.run.run_id)


@rule(36)
@pytest.mark.parametrize("state", ["handed back", "suspended", "swept", "completed", "failed", "cancelled"])
async def test_a_run_that_has_been_claimed_admits_nobody(scene: Scene, state: str) -> None:
    held = await scene.take(coalesce_key="c")
    if state == "handed back":
        await scene.hand_back(held)
    elif state == "suspended":
        await scene.suspend(held)
    elif state == "swept":
        await scene.lapse()
        await scene.sweep()
    elif state == "completed":
        await scene.complete(held)
    elif state == "failed":
        await scene.fail(held)
    else:
        await scene.cancel(held.run.run_id)
    assert (await scene.submit(coalesce_key="c")).disposition == "created"


@rule(36)
async def test_admission_ends_at_cancel(scene: Scene) -> None:
    first = await scene.start(coalesce_key="c")
    await scene.cancel(first.run_id)
    second = await scene.submit(coalesce_key="c")
    assert second.disposition == "created"
    assert (await scene.get(first.run_id)).status == Status.CANCELLED


@rule(36)
async def test_the_last_submit_is_always_seen_by_a_run_that_starts_after_it(scenes: tuple[Scene, Scene]) -> None:
    """Submits and claims at once: the run that a submit was told of had not been claimed when the submit was stored."""
    submitter, worker = scenes
    for _ in range(20):
        first = await submitter.start(coalesce_key="c")
        answer, claimed = await asyncio.gather(submitter.submit(coalesce_key="c", priority=7), worker.claim(1))
        claimed = claimed or await worker.claim(1)  # a contended claim may return less than there is (8)
        assert [one.run.run_id for one in claimed] == [first.run_id]
        if answer.disposition == "coalesced":
            assert claimed[0].run.priority == 7, "the claim took the run before the submit that it is said to cover"
        await worker.complete(claimed[0])
        for rest in await worker.claim(10):
            await worker.complete(rest)


@rule(36)
async def test_the_same_pending_key_for_another_function_is_a_conflict(scene: Scene) -> None:
    first = await scene.start(coalesce_key="c")
    before = await scene.everything()
    with pytest.raises(Conflict):
        await scene.start(coalesce_key="c", name="other")
    assert await scene.everything() == before
    await scene.take_again(first.run_id)
    assert (await scene.submit(coalesce_key="c", name="other")).disposition == "created"


@rule(37)
@pytest.mark.parametrize(
    ("waiting", "joiner", "expected"),
    [
        (None, None, None),
        (None, HOUR, None),
        (HOUR, None, None),
        (HOUR, MINUTE, MINUTE),
        (MINUTE, HOUR, MINUTE),
        (HOUR, 0, None),
    ],
)
@pytest.mark.parametrize("mode", ["join", "replace"])
async def test_a_joiner_never_delays_the_waiting_run_and_an_earlier_start_wins(
    scene: Scene, waiting: Micros | None, joiner: Micros | None, expected: Micros | None, mode: str
) -> None:
    before = scene.store.clock()
    first = await scene.start(coalesce_key="c", delay=waiting)
    joined = (await scene.submit(coalesce_key="c", delay=joiner, on_coalesce=mode)).run
    if expected is None:
        assert joined.available_at is None
        await scene.take_again(first.run_id)
    else:
        assert joined.available_at is not None
        assert scene.since(before, joined.available_at - expected)


@rule(37)
@pytest.mark.parametrize(("waiting", "joiner", "expected"), [(0, 5, 5), (5, 0, 5), (-5, -9, -5), (3, 3, 3)])
async def test_a_joiner_raises_the_priority_and_never_lowers_it(
    scene: Scene, waiting: int, joiner: int, expected: int
) -> None:
    await scene.start(coalesce_key="c", priority=waiting)
    assert (await scene.submit(coalesce_key="c", priority=joiner)).run.priority == expected


@rule(37)
async def test_join_keeps_the_waiting_input_and_replace_takes_the_newest(scene: Scene) -> None:
    first = await scene.start(coalesce_key="c", input='{"n":1}')
    await scene.submit(coalesce_key="c", input='{"n":2}', on_coalesce="join")
    assert (await scene.get(first.run_id)).input == '{"n":1}'
    await scene.submit(coalesce_key="c", input='{"n":3}', on_coalesce="replace")
    assert (await scene.get(first.run_id)).input == '{"n":3}'
    await scene.submit(coalesce_key="c", input='{"n":4}', on_coalesce="replace")
    assert (await scene.take_again(first.run_id)).run.input == '{"n":4}'


@rule(37)
async def test_replace_without_max_delay_never_postpones(scene: Scene) -> None:
    first = await scene.start(coalesce_key="c", delay=MINUTE)
    await scene.later(MINUTE // 2)
    joined = (await scene.submit(coalesce_key="c", delay=MINUTE, on_coalesce="replace")).run
    due = (await scene.get(first.run_id)).available_at
    assert joined.available_at == due
    await scene.later(MINUTE // 2 + SECOND)
    await scene.promote()
    await scene.take_again(first.run_id)


@rule(37)
async def test_replace_with_max_delay_may_postpone_up_to_that_long_after_the_first_submit(scene: Scene) -> None:
    first = await scene.start(coalesce_key="c", delay=2 * MINUTE, on_coalesce="replace", max_delay=5 * MINUTE)
    runs = [first]
    for turn in range(4):
        await scene.later(MINUTE)
        answer = await scene.submit(
            coalesce_key="c", delay=2 * MINUTE, input=str(turn), on_coalesce="replace", max_delay=5 * MINUTE
        )
        assert (answer.disposition, answer.run.run_id) == ("coalesced", first.run_id)
        runs.append(answer.run)
    offsets = [run.available_at and round((run.available_at - run.created_at) / MINUTE) for run in runs]
    assert offsets == [2, 3, 4, 5, 5]
    await scene.later(2 * MINUTE)
    await scene.promote()
    assert (await scene.take_again(first.run_id)).run.input == "3"


@rule(37)
async def test_a_run_that_is_due_now_is_not_postponed_by_a_joiner_with_max_delay(scene: Scene) -> None:
    """Without a delay of its own the first submit asked for now, and that is where the run stays."""
    first = await scene.start(coalesce_key="c")
    await scene.submit(coalesce_key="c", on_coalesce="replace", max_delay=HOUR)
    await scene.take_again(first.run_id)


@rule(36)
async def test_concurrent_submits_of_one_coalesce_key_leave_one_waiting_run(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    answers = await asyncio.gather(*(scene.submit(coalesce_key="c") for scene in (one, other) * 10))
    assert len({answer.run.run_id for answer in answers}) == 1
    assert sorted({answer.disposition for answer in answers}) == ["coalesced", "created"]
    assert len(await one.runs()) == 1


@rule(36)
async def test_two_runs_of_one_batch_may_share_a_coalesce_key(scene: Scene) -> None:
    answers = await scene.store.enqueue([new_run(coalesce_key="c", priority=n) for n in range(3)])
    assert [answer.disposition for answer in answers] == ["created", "coalesced", "coalesced"]
    assert (await scene.get(answers[0].run.run_id)).priority == 2


@rule(38)
async def test_a_batch_that_joins_a_waiting_run_and_repeats_the_key_of_the_join_waits_for_it(scene: Scene) -> None:
    (waiting,) = await scene.store.enqueue([new_run(coalesce_key="c")])
    answers = await scene.store.enqueue([new_run(coalesce_key="c", idempotency_key="k") for _ in range(2)])
    assert [(answer.run.run_id, answer.disposition) for answer in answers] == [
        (waiting.run.run_id, "coalesced"),
        (waiting.run.run_id, "existing"),
    ]
