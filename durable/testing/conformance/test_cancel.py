"""Cancel (rules 43 to 47): an accepted ask wins over everything but a pivot, and a run that never ran ends at once."""

from __future__ import annotations

import asyncio

import pytest

from durable.model import (
    Cancelled,
    Completed,
    Failed,
    ForwardIncomplete,
    HandedBack,
    Outcome,
    QueueRecord,
    RecordKind,
    Renewal,
    Retry,
    Status,
    TimedOut,
)
from durable.settings import HOUR, SECOND

from .scenario import ACME, BETA, LEASE, Scene, failure, rule


@rule(43)
@pytest.mark.parametrize("state", ["ready", "delayed", "unknown function", "paused queue", "behind a sequence"])
async def test_a_run_that_was_never_claimed_is_cancelled_at_once(scene: Scene, state: str) -> None:
    if state == "paused queue":
        await scene.store.set_queue(QueueRecord(scope_name="queue:default", paused=True))
    if state == "behind a sequence":
        await scene.start(sequence_key="s")
    run = await scene.start(
        delay=HOUR if state == "delayed" else None,
        name="nobody_knows" if state == "unknown function" else "work",
        sequence_key="s" if state == "behind a sequence" else None,
    )
    assert await scene.cancel(run.run_id)
    landed = await scene.get(run.run_id)
    assert (landed.status, landed.attempts, landed.error_kind) == (Status.CANCELLED, 0, "cancelled")
    assert landed.finished_at is not None


@rule(43)
async def test_a_running_run_gets_the_ask_and_goes_on_until_its_holder_hears(scene: Scene) -> None:
    held = await scene.take()
    counter = held.run.wake_seq
    assert await scene.cancel(held.run.run_id)
    run = await scene.get(held.run.run_id)
    assert (run.status, run.wake_seq) == (Status.RUNNING, counter + 1)
    assert run.cancel_requested_at is not None
    assert (await scene.append(held, "a")).state == "appended"
    assert await scene.settle(held, Cancelled(failure=failure(kind="cancelled"))) == "landed"


@rule(43)
async def test_the_first_stamp_wins(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.cancel(held.run.run_id)
    run = await scene.get(held.run.run_id)
    assert run.cancel_requested_at is not None
    first = run.cancel_requested_at - run.created_at
    await scene.later(SECOND)
    assert await scene.cancel(held.run.run_id)
    run = await scene.get(held.run.run_id)
    assert run.cancel_requested_at == run.created_at + first


@rule(43)
@pytest.mark.parametrize(
    "state", ["back-off", "delayed hand-back", "mismatch", "sleeping", "waiting for a signal", "waiting for a child"]
)
async def test_a_pending_or_suspended_run_becomes_claimable_now(scene: Scene, state: str) -> None:
    family = await scene.with_children(1, parent={"max_attempts": 3})
    held = family.parent
    outcome: Outcome
    if state == "back-off":
        outcome = Retry(after=HOUR, failure=failure())
    elif state == "delayed hand-back":
        outcome = HandedBack(after=HOUR)
    elif state == "mismatch":
        outcome = HandedBack(after=HOUR, failure=failure(kind="non_determinism"))
    elif state == "sleeping":
        outcome = await scene.rest(held, until=scene.store.clock() + HOUR)
    elif state == "waiting for a signal":
        outcome = await scene.rest(held)
    else:
        outcome = await scene.rest(held, wake_after=1)
    assert await scene.settle(held, outcome) == "landed"
    assert list(await scene.claim()) == []
    assert await scene.cancel(held.run.run_id)
    run = await scene.get(held.run.run_id)
    assert (run.status, run.available_at) == (Status.PENDING, None)
    again = await scene.take_again(run.run_id)
    assert (await scene.inbox(again)).cancel_requested


@rule(44)
async def test_the_holder_learns_of_an_ask_by_its_renewal(scene: Scene) -> None:
    held = await scene.take()
    await scene.cancel(held.run.run_id)
    (renewed,) = await scene.store.renew([Renewal(lease=held.lease)], lease=LEASE)
    assert (renewed.state, renewed.cancel_requested) == ("held", True)


@rule(43)
@pytest.mark.parametrize(
    "outcome",
    [
        Completed(output="1"),
        Failed(failure=failure()),
        Cancelled(failure=failure()),
        TimedOut(failure=failure()),
        ForwardIncomplete(failure=failure()),
    ],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_an_ask_to_a_terminal_run_is_false_and_changes_nothing(scene: Scene, outcome: Outcome) -> None:
    held = await scene.take()
    await scene.settle(held, outcome)
    before = await scene.everything()
    assert not await scene.cancel(held.run.run_id)
    assert await scene.everything() == before


@rule(43, 57)
async def test_an_ask_to_an_unknown_or_foreign_run_is_false(scene: Scene) -> None:
    run = await scene.start(tenant=ACME)
    before = await scene.everything()
    assert not await scene.cancel("unknown")
    assert not await scene.cancel(run.run_id, scope=BETA)
    assert not await scene.cancel(run.run_id, scope=None)
    assert await scene.everything() == before
    assert await scene.cancel(run.run_id, scope=ACME)


@rule(43)
async def test_many_runs_are_asked_in_one_call_and_answered_in_order(scene: Scene) -> None:
    fresh, held, landed = await scene.start(queue="q"), await scene.take(), await scene.take()
    await scene.complete(landed)
    ids = [landed.run.run_id, fresh.run_id, "unknown", held.run.run_id]
    assert list(await scene.store.request_cancel(ids, scope=None)) == [False, True, False, True]


@rule(46)
async def test_a_run_past_its_pivot_keeps_the_stamp_is_not_woken_and_goes_on(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, ":pivot", kind=RecordKind.PIVOT)
    assert await scene.suspend(held) == "landed"
    refused = (await scene.get(held.run.run_id)).cancel_refused_at
    assert await scene.cancel(held.run.run_id)
    run = await scene.get(held.run.run_id)
    assert (run.status, run.cancel_refused_at) == (Status.SUSPENDED, refused)
    await scene.send(run.run_id)
    again = await scene.take_again(run.run_id)
    assert not (await scene.inbox(again)).cancel_requested
    await scene.complete(again)


@rule(46)
async def test_a_pivot_refuses_an_ask_that_came_before_it(scene: Scene) -> None:
    held = await scene.take()
    await scene.cancel(held.run.run_id)
    await scene.append(held, ":pivot", kind=RecordKind.PIVOT)
    run = await scene.get(held.run.run_id)
    assert run.cancel_requested_at is not None
    assert run.cancel_refused_at is not None
    await scene.complete(held)


@rule(46)
async def test_a_refusal_is_spent_and_not_asked_again_on_the_next_claim(scene: Scene) -> None:
    held = await scene.take()
    await scene.cancel(held.run.run_id)
    await scene.append(held, ":pivot", kind=RecordKind.PIVOT)
    await scene.hand_back(held)
    again = await scene.take_again(held.run.run_id)
    (renewed,) = await scene.store.renew([Renewal(lease=again.lease)], lease=LEASE)
    assert not renewed.cancel_requested
    await scene.complete(again)


@rule(43)
async def test_an_ask_and_the_landing_come_in_one_order(scenes: tuple[Scene, Scene]) -> None:
    """Whoever is told True sees the run end cancelled; a settle that lost to an ask is woken."""
    worker, client = scenes
    for _ in range(20):
        held = await worker.take()
        settled, asked = await asyncio.gather(
            worker.settle(held, Completed(output="1")), client.cancel(held.run.run_id)
        )
        assert (settled, asked) in (("landed", False), ("woken", True))
        if asked:
            assert await worker.settle(held, Cancelled(failure=failure(kind="cancelled"))) == "landed"
        status = (await client.get(held.run.run_id)).status
        assert status == (Status.CANCELLED if asked else Status.COMPLETED)


@rule(43)
async def test_an_ask_and_the_first_claim_come_in_one_order(scenes: tuple[Scene, Scene]) -> None:
    worker, client = scenes
    for _ in range(20):
        run = await client.start()
        claimed, asked = await asyncio.gather(worker.claim(), client.cancel(run.run_id))
        assert asked
        stored = await client.get(run.run_id)
        if claimed:
            assert stored.status == Status.RUNNING
            assert stored.cancel_requested_at is not None
            assert await worker.settle(claimed[0], Cancelled(failure=failure(kind="cancelled"))) == "landed"
        else:
            assert stored.status == Status.CANCELLED


@rule(43)
async def test_the_error_of_a_cancelled_run_says_why(scene: Scene) -> None:
    run = await scene.start()
    (asked,) = await scene.store.request_cancel([run.run_id], scope=None, reason="not needed any more")
    assert asked
    landed = await scene.get(run.run_id)
    assert landed.error is not None
    assert "not needed any more" in landed.error
