"""The journal (rules 18 to 26, 29a, 46, 48 to 50): appends, what they answer, and what is written with them."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from durable.errors import DurableError, NotFound
from durable.model import ALL, Claimed, HandedBack, RecordKind, Status
from durable.settings import HOUR, MINUTE, SECOND

from .scenario import ACME, BETA, Scene, failure, new_run, rule


@rule(19)
async def test_a_record_is_stored_as_it_was_given(scene: Scene) -> None:
    held = await scene.take()
    started = scene.store.clock()
    record = await scene.record(
        held.run.run_id, "3/charge#2", digest="abc", result='{"value":null}', started_at=started
    )
    (answer,) = await scene.store.append([(held.lease, record)])
    assert answer.state == "appended"
    (stored,) = await scene.history(held.run.run_id)
    assert answer.record == stored
    assert (stored.step_id, stored.kind, stored.position, stored.seen) == ("3/charge#2", RecordKind.STEP, 0, -1)
    assert (stored.digest, stored.result, stored.started_at, stored.fence) == ("abc", '{"value":null}', started, 1)


@rule(19)
@pytest.mark.parametrize("kind", [kind for kind in RecordKind if kind != RecordKind.ATTEMPT])
async def test_everything_that_a_body_can_wait_for_ends_with_a_record(scene: Scene, kind: RecordKind) -> None:
    held = await scene.take()
    answer = await scene.append(held, "x", kind=kind)
    assert answer.state == "appended"
    assert [record.kind for record in await scene.history(held.run.run_id)] == [kind]


@rule(19)
async def test_the_stamp_is_the_stores_and_comes_back_with_the_append(scene: Scene) -> None:
    held = await scene.take()
    before = scene.store.clock()
    answer = await scene.append(held, "a")
    assert answer.record is not None
    assert scene.since(before, answer.record.at)


@rule(19)
async def test_the_stamp_is_never_lower_than_its_floor(scene: Scene) -> None:
    held = await scene.take()
    floor = scene.store.clock() + HOUR
    answer = await scene.append(held, "timer", kind=RecordKind.TIMER, floor=floor)
    assert answer.record is not None
    assert answer.record.at == floor
    assert (await scene.history(held.run.run_id))[0].at == floor


@rule(19)
async def test_records_of_one_append_keep_their_positions(scene: Scene) -> None:
    held = await scene.take()
    first = await scene.record(held.run.run_id, "a")
    batch = [
        (held.lease, await scene.record(held.run.run_id, name, position=n, seen=-1)) for n, name in ((1, "b"), (2, "c"))
    ]
    answers = await scene.store.append([(held.lease, first), *batch])
    assert [answer.state for answer in answers] == ["appended"] * 3
    assert await scene.steps(held.run.run_id) == ["a", "b", "c"]
    assert [record.seen for record in await scene.history(held.run.run_id)] == [-1, -1, -1]


@rule(19)
async def test_the_history_is_by_position_and_not_by_the_order_of_writing(scene: Scene) -> None:
    held = await scene.take()
    batch = [(held.lease, await scene.record(held.run.run_id, f"s{n}", position=n)) for n in (2, 0, 1)]
    await scene.store.append(batch)
    assert await scene.steps(held.run.run_id) == ["s0", "s1", "s2"]


@rule(20)
async def test_a_repeated_append_whose_answer_was_lost_finds_its_own_record_and_returns_it(scene: Scene) -> None:
    held = await scene.take()
    record = await scene.record(held.run.run_id, "a")
    (first,) = await scene.store.append([(held.lease, record)])
    await scene.later(MINUTE // 4)
    (second,) = await scene.store.append([(held.lease, record)])
    assert second.state == "recorded"
    assert first.record is not None
    assert second.record is not None
    assert second.record == dataclasses.replace(first.record, at=second.record.at)
    assert [second.record] == list(await scene.history(held.run.run_id))


@rule(20)
async def test_the_first_writer_wins(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a", result='{"value":"first"}')
    second = await scene.append(held, "a", result='{"value":"second"}', digest="other")
    assert second.state == "recorded"
    assert second.record is not None
    assert (second.record.result, second.record.digest, second.record.position) == ('{"value":"first"}', "d", 0)
    assert [record.result for record in await scene.history(held.run.run_id)] == ['{"value":"first"}']


@rule(20)
async def test_a_record_of_an_earlier_holder_is_returned_to_the_next_one(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a", result='{"value":"first"}')
    await scene.hand_back(held)
    again = await scene.take_again(held.run.run_id)
    answer = await scene.append(again, "a", result='{"value":"second"}')
    assert answer.state == "recorded"
    assert answer.record is not None
    assert (answer.record.result, answer.record.fence) == ('{"value":"first"}', 1)


@rule(20)
async def test_a_batch_tells_lost_recorded_and_appended_apart(scene: Scene) -> None:
    kept, gone = await scene.take(), await scene.take()
    await scene.append(kept, "a")
    lost = await scene.record(gone.run.run_id, "x")
    await scene.complete(gone)
    known = await scene.record(kept.run.run_id, "a")
    fresh = await scene.record(kept.run.run_id, "b")
    answers = await scene.store.append([(kept.lease, known), (gone.lease, lost), (kept.lease, fresh)])
    assert [answer.state for answer in answers] == ["recorded", "lost", "appended"]


@rule(20)
async def test_the_same_step_twice_in_one_batch_is_recorded_once(scene: Scene) -> None:
    held = await scene.take()
    record = await scene.record(held.run.run_id, "a")
    answers = await scene.store.append([(held.lease, record), (held.lease, record)])
    assert [answer.state for answer in answers] == ["appended", "recorded"]
    assert answers[0].record == answers[1].record


@rule(21)
async def test_concurrent_appends_are_each_durable_when_they_return(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    held = [await one.take() for _ in range(8)]

    async def record(index: int) -> None:
        assert (await one.append(held[index], "a")).state == "appended"
        assert [found.step_id for found in await other.history(held[index].run.run_id)] == ["a"]

    await asyncio.gather(*(record(index) for index in range(8)))


@rule(23)
@pytest.mark.parametrize("result", ['{"value":null}', '{"value":0}', '{"value":""}', '{"value":false}', '{"value":[]}'])
async def test_none_0_and_empty_text_are_recorded_results(scene: Scene, result: str) -> None:
    held = await scene.take()
    await scene.append(held, "a", result=result)
    (record,) = await scene.history(held.run.run_id)
    assert record.result == result
    assert (await scene.append(held, "a", result='{"value":1}')).state == "recorded"


@rule(24)
async def test_a_failed_attempt_is_a_row_without_position_and_does_not_count_again(scene: Scene) -> None:
    held = await scene.take()
    for attempt in (1, 2):
        answer = await scene.append(held, f"a@{attempt}", kind=RecordKind.ATTEMPT, result=f'{{"next":{attempt}}}')
        assert answer.state == "appended"
    await scene.append(held, "a")
    history = await scene.history(held.run.run_id)
    assert [(record.step_id, record.position) for record in history] == [("a", 0), ("a@1", None), ("a@2", None)]
    assert (await scene.append(held, "a@1", kind=RecordKind.ATTEMPT)).state == "recorded"


@rule(25)
async def test_a_record_keeps_the_digest_of_its_call(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a", digest="0123abcd")
    await scene.hand_back(held)
    (record,) = (await scene.take_again(held.run.run_id)).history
    assert record.digest == "0123abcd"


@rule(25)
async def test_a_hand_back_for_a_mismatch_touches_no_record_and_no_failure(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    before = await scene.history(held.run.run_id)
    mismatch = failure("asked for b", kind="non_determinism")
    assert await scene.settle(held, HandedBack(after=MINUTE, failure=mismatch)) == "landed"
    run = await scene.get(held.run.run_id)
    assert (run.status, run.failures, run.error_kind) == (Status.PENDING, 0, "non_determinism")
    assert run.mismatch_since is not None
    assert run.available_at is not None
    assert await scene.history(held.run.run_id) == before


@rule(25)
async def test_mismatch_since_stays_from_the_first_mismatch_until_the_next_record(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    mismatch = HandedBack(failure=failure("asked for b", kind="non_determinism"))
    await scene.settle(held, mismatch)
    first = await _mismatched_after(scene, held)
    await scene.later(MINUTE)
    held = await scene.take_again(held.run.run_id)
    await scene.settle(held, mismatch)
    assert await _mismatched_after(scene, held) == first
    held = await scene.take_again(held.run.run_id)
    await scene.later(SECOND)
    await scene.append(held, "b")
    await scene.later(SECOND)
    await scene.settle(held, mismatch)
    assert await _mismatched_after(scene, held) > first


async def _mismatched_after(scene: Scene, held: Claimed) -> int:
    """Counted from the creation of the run: where the clock is a server's, stored instants move with time."""
    run = await scene.get(held.run.run_id)
    assert run.mismatch_since is not None
    return run.mismatch_since - run.created_at


@rule(46)
async def test_a_pivot_is_a_record_that_stamps_cancel_refused_at_in_the_same_write(scene: Scene) -> None:
    held = await scene.take()
    assert (await scene.append(held, ":pivot", kind=RecordKind.PIVOT)).state == "appended"
    run = await scene.get(held.run.run_id)
    assert run.cancel_refused_at is not None
    assert [record.kind for record in await scene.history(held.run.run_id)] == [RecordKind.PIVOT]


@rule(46)
async def test_a_repeated_pivot_keeps_its_first_stamp(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, ":pivot", kind=RecordKind.PIVOT)
    first = await scene.get(held.run.run_id)
    assert first.cancel_refused_at is not None
    await scene.later(SECOND)
    assert (await scene.append(held, ":pivot", kind=RecordKind.PIVOT)).state == "recorded"
    run = await scene.get(held.run.run_id)
    assert run.cancel_refused_at == run.created_at + first.cancel_refused_at - first.created_at


@rule(49)
async def test_a_compensation_sets_compensating_in_the_same_write(scene: Scene) -> None:
    held = await scene.take()
    assert not held.run.compensating
    await scene.append(held, "undo/1", kind=RecordKind.COMPENSATION)
    assert (await scene.get(held.run.run_id)).compensating


@rule("29a")
async def test_progress_is_written_beside_an_append(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a", progress='"half"')
    assert (await scene.get(held.run.run_id)).progress == '"half"'
    await scene.append(held, "b")
    assert (await scene.get(held.run.run_id)).progress == '"half"'


@rule(48)
async def test_a_child_is_written_in_one_fenced_write_with_its_parents_record(scene: Scene) -> None:
    family = await scene.with_children(1)
    child = await scene.get(family.children[0])
    assert (child.parent_run_id, child.parent_step_id, child.status) == (
        family.parent.run.run_id,
        "child#1",
        Status.PENDING,
    )
    assert await scene.steps(family.parent.run.run_id) == ["child#1"]


@rule(48)
async def test_a_lost_append_starts_no_child(scene: Scene) -> None:
    held = await scene.take()
    child = new_run(**scene.child_of(held, "child"))
    record = await scene.record(held.run.run_id, "child", kind=RecordKind.START, children=(child,))
    await scene.lapse()
    await scene.sweep()
    (answer,) = await scene.store.append([(held.lease, record)])
    assert answer.state == "lost"
    assert await scene.gone(child.run_id)


@rule(20, 48)
async def test_a_repeated_append_starts_no_second_child(scene: Scene) -> None:
    held = await scene.take()
    record = await scene.record(
        held.run.run_id, "child", kind=RecordKind.START, children=(new_run(**scene.child_of(held, "child")),)
    )
    await scene.store.append([(held.lease, record)])
    (again,) = await scene.store.append([(held.lease, record)])
    assert again.state == "recorded"
    other = await scene.record(
        held.run.run_id, "child", kind=RecordKind.START, children=(new_run(**scene.child_of(held, "child")),)
    )
    (third,) = await scene.store.append([(held.lease, other)])
    assert third.state == "recorded"
    assert [run.run_id for run in await scene.store.children(held.run.run_id, scope=ALL)] == [record.children[0].run_id]


@rule(50)
async def test_a_record_stores_the_highest_position_that_had_been_delivered_when_its_call_was_made(
    scene: Scene,
) -> None:
    held = await scene.take()
    await scene.append(held, "a", seen=-1)
    await scene.append(held, "b", seen=-1)
    await scene.append(held, "c", seen=0)
    await scene.hand_back(held)
    again = await scene.take_again(held.run.run_id)
    assert [record.seen for record in again.history] == [-1, -1, 0]


@rule(9)
async def test_one_bad_entry_of_an_append_never_strands_its_batch(scene: Scene) -> None:
    """Two records of one position are bad data from a holder; the other run's record stands."""
    good, bad = await scene.take(), await scene.take()
    await scene.append(bad, "a")
    twin = await scene.record(bad.run.run_id, "b", position=0)
    fine = await scene.record(good.run.run_id, "a")
    try:
        await scene.store.append([(bad.lease, twin), (good.lease, fine)])
    except DurableError:
        (answer,) = await scene.store.append([(good.lease, fine)])
        assert answer.state in ("appended", "recorded")
    assert await scene.steps(good.run.run_id) == ["a"]
    assert await scene.steps(bad.run.run_id) == ["a"]


@rule(57)
async def test_a_history_of_an_unknown_or_foreign_run_is_not_found(scene: Scene) -> None:
    held = await scene.take(tenant=ACME)
    await scene.append(held, "a")
    for run_id, scope in ((held.run.run_id, BETA), (held.run.run_id, None), ("unknown", ALL)):
        with pytest.raises(NotFound):
            await scene.history(run_id, scope=scope)
    assert len(await scene.history(held.run.run_id, scope=ACME)) == 1
