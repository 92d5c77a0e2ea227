"""Trying again (rules 2, 50): what an operator's retry or a policy's takes out of the journal, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import Conflict, NotFound
from durable.model import (
    ALL,
    Cancelled,
    Failed,
    ForwardIncomplete,
    Outcome,
    RecordKind,
    Retry,
    RunRecord,
    Status,
    TimedOut,
)
from durable.settings import DAY, HOUR, MINUTE, SECOND

from .scenario import ACME, BETA, Scene, failure, new_run, rule

ENDS: list[tuple[Any, Status]] = [
    (Failed, Status.FAILED),
    (Cancelled, Status.CANCELLED),
    (TimedOut, Status.TIMED_OUT),
    (ForwardIncomplete, Status.FORWARD_INCOMPLETE),
]


async def operator_retry(scene: Scene, run_id: str, **changes: Any) -> RunRecord:
    """Retry a run from the state that it is in."""
    run = await scene.get(run_id)
    values: dict[str, Any] = {"scope": ALL, "attempts": run.attempts}
    return await scene.store.retry(run_id, **{**values, **changes})


@rule(50)
@pytest.mark.parametrize(("outcome", "status"), ENDS)
async def test_an_operator_retry_leads_from_any_terminal_state_but_completed_to_pending(
    scene: Scene, outcome: Any, status: Status
) -> None:
    held = await scene.take()
    await scene.settle(held, outcome(failure=failure(kind="misuse", detail='{"a":1}')))
    assert (await scene.get(held.run.run_id)).status == status
    run = await operator_retry(scene, held.run.run_id)
    assert run == await scene.get(held.run.run_id)
    assert (run.status, run.attempts, run.failures, run.reclaims, run.available_at) == (Status.PENDING, 1, 0, 0, None)
    assert (run.error, run.error_kind, run.error_detail, run.finished_at, run.purge_at) == (None,) * 5
    await scene.complete(await scene.take_again(run.run_id))


@rule(50)
@pytest.mark.parametrize("state", ["pending", "running", "suspended", "completed"])
async def test_a_run_that_is_completed_or_not_terminal_is_not_retried(scene: Scene, state: str) -> None:
    run_id = (await scene.start()).run_id
    if state != "pending":
        held = await scene.take_again(run_id)
        if state == "suspended":
            await scene.suspend(held)
        elif state == "completed":
            await scene.complete(held)
    before = await scene.everything()
    with pytest.raises(Conflict):
        await operator_retry(scene, run_id)
    assert await scene.everything() == before


@rule(50, 57)
async def test_an_unknown_foreign_or_purged_run_is_not_found(scene: Scene) -> None:
    held = await scene.take(tenant=ACME, keep=SECOND)
    await scene.fail(held)
    for run_id, scope in (("unknown", ALL), (held.run.run_id, BETA), (held.run.run_id, None)):
        with pytest.raises(NotFound):
            await scene.store.retry(run_id, scope=scope, attempts=1)
    await scene.later(DAY)
    await scene.store.purge(scope=ALL, limit=10)
    with pytest.raises(NotFound):
        await scene.store.retry(held.run.run_id, scope=ACME, attempts=1)


@rule(50)
async def test_a_repeated_operator_retry_does_nothing(scene: Scene) -> None:
    held = await scene.take()
    await scene.fail(held)
    first = await scene.store.retry(held.run.run_id, scope=ALL, attempts=1, extra_attempts=2)
    again = await scene.take_again(held.run.run_id)
    await scene.fail(again, message="second")
    before = await scene.everything()
    late = await scene.store.retry(held.run.run_id, scope=ALL, attempts=1, extra_attempts=2)
    assert (late.status, late.error) == (Status.FAILED, "second")
    assert late.max_attempts == first.max_attempts
    assert await scene.everything() == before


@rule(50)
@pytest.mark.parametrize(("before", "extra", "after"), [(1, 0, 1), (1, 2, 3), (3, 1, 4), (None, 2, None)])
async def test_extra_attempts_is_added_to_max_attempts(
    scene: Scene, before: int | None, extra: int, after: int | None
) -> None:
    held = await scene.take(max_attempts=before)
    await scene.fail(held)
    assert (await operator_retry(scene, held.run.run_id, extra_attempts=extra)).max_attempts == after


@rule(50)
async def test_failures_and_reclaims_start_anew(scene: Scene) -> None:
    held = await scene.take(max_attempts=3)
    await scene.settle(held, Retry(after=0, failure=failure()))
    await scene.take_again(held.run.run_id)
    await scene.lapse()
    await scene.sweep(max_reclaims=0)
    landed = await scene.get(held.run.run_id)
    assert (landed.status, landed.failures) == (Status.FAILED, 1)
    run = await operator_retry(scene, held.run.run_id)
    assert (run.failures, run.reclaims, run.blocked_on) == (0, 0, None)


@rule(50)
async def test_the_cancel_stamps_are_cleared(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, ":pivot", kind=RecordKind.PIVOT)
    await scene.cancel(held.run.run_id)
    await scene.fail(held)
    run = await operator_retry(scene, held.run.run_id)
    assert run.cancel_requested_at is None
    never = await scene.start(queue="q")
    await scene.cancel(never.run_id)
    run = await operator_retry(scene, never.run_id)
    assert (run.status, run.cancel_requested_at, run.attempts) == (Status.PENDING, None, 0)


@rule(50)
async def test_a_deadline_starts_anew_with_its_old_length(scene: Scene) -> None:
    held = await scene.take(deadline_after=HOUR)
    await scene.later(SECOND)
    await scene.fail(held)
    await scene.later(2 * HOUR)
    now = scene.store.clock()
    run = await operator_retry(scene, held.run.run_id)
    assert run.deadline_at is not None
    assert abs(run.deadline_at - now - HOUR) < MINUTE
    await scene.take_again(run.run_id)


async def four_records(scene: Scene, held: Any) -> None:
    """a; b and c at once after a; d after b was seen."""
    await scene.append(held, "a", seen=-1)
    await scene.append(held, "b", seen=0)
    await scene.append(held, "c", seen=0)
    await scene.append(held, "d", seen=1)


TAKEN = [
    ((), "abcd"),
    ((0,), ""),
    ((1,), "ac"),
    ((2,), "abd"),
    ((3,), "abc"),
    ((1, 2), "a"),
    ((3, 1), "ac"),
    ((2, 0), ""),
]


@rule(50)
@pytest.mark.parametrize("door", ["operator", "policy"])
@pytest.mark.parametrize(("positions", "left"), TAKEN)
async def test_a_retry_takes_out_the_failed_records_and_all_that_came_after_the_first_of_them_was_seen(
    scene: Scene, door: str, positions: tuple[int, ...], left: str
) -> None:
    held = await scene.take(max_attempts=3)
    await four_records(scene, held)
    reason = failure(positions=positions)
    if door == "policy":
        assert await scene.settle(held, Retry(after=0, failure=reason)) == "landed"
    else:
        await scene.settle(held, Failed(failure=reason))
        assert await scene.steps(held.run.run_id) == ["a", "b", "c", "d"]
        await operator_retry(scene, held.run.run_id)
    again = await scene.take_again(held.run.run_id)
    assert "".join(record.step_id for record in again.history) == left


@rule(24, 50)
async def test_the_attempt_rows_of_every_step_taken_out_go_with_it(scene: Scene) -> None:
    held = await scene.take()
    for step_id in ("a", "b", "b#2"):
        await scene.append(held, f"{step_id}@1", kind=RecordKind.ATTEMPT, seen=-1)
        await scene.append(held, f"{step_id}@2", kind=RecordKind.ATTEMPT, seen=-1)
        await scene.append(held, step_id, seen=-1)
    await scene.fail(held, positions=(1,))
    await operator_retry(scene, held.run.run_id)
    assert await scene.steps(held.run.run_id) == ["a", "b#2", "a@1", "a@2", "b#2@1", "b#2@2"]


@rule(50)
@pytest.mark.parametrize(
    ("outcome", "kind", "step_id"),
    [(Cancelled, RecordKind.CANCEL, ":cancel"), (TimedOut, RecordKind.TIMEOUT, ":timeout")],
)
async def test_for_a_cancelled_or_timed_out_run_its_cancel_or_timeout_record_counts_as_the_failed_one(
    scene: Scene, outcome: Any, kind: RecordKind, step_id: str
) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.append(held, step_id, kind=kind)
    await scene.append(held, "cleanup")
    await scene.settle(held, outcome(failure=failure()))
    await operator_retry(scene, held.run.run_id)
    assert await scene.steps(held.run.run_id) == ["a"]


@rule(50)
@pytest.mark.parametrize("door", ["operator", "policy"])
async def test_failed_children_start_anew_and_the_old_child_keeps_its_row(scene: Scene, door: str) -> None:
    family = await scene.with_children(1, parent={"max_attempts": 3})
    held = family.parent
    await scene.fail(await scene.take_again(family.children[0]), message="child broke")
    await scene.append(held, "child#1:end", kind=RecordKind.CHILD, seen=0)
    reason = failure(positions=(1,))
    outcome: Outcome = Failed(failure=reason) if door == "operator" else Retry(after=0, failure=reason)
    assert await scene.settle(held, outcome) == "landed"
    if door == "operator":
        await operator_retry(scene, held.run.run_id)
    again = await scene.take_again(held.run.run_id)
    assert [record.step_id for record in again.history] == []
    old = await scene.get(family.children[0])
    assert (old.status, old.error) == (Status.FAILED, "child broke")
    assert (old.parent_run_id, old.parent_step_id) == (held.run.run_id, "child#1@1")
    anew = new_run(**scene.child_of(again, "child#1"))
    assert (await scene.append(again, "child#1", kind=RecordKind.START, children=(anew,))).state == "appended"
    assert (await scene.get(anew.run_id)).parent_step_id == "child#1"


@rule(50)
async def test_a_child_that_succeeded_before_stays(scene: Scene) -> None:
    family = await scene.with_children(1, parent={"max_attempts": 3})
    held = family.parent
    await scene.complete(await scene.take_again(family.children[0]))
    await scene.append(held, "child#1:end", kind=RecordKind.CHILD, seen=0)
    await scene.append(held, "broken", seen=1)
    assert await scene.settle(held, Retry(after=0, failure=failure(positions=(2,)))) == "landed"
    assert await scene.steps(held.run.run_id) == ["child#1", "child#1:end"]
    assert (await scene.get(family.children[0])).parent_step_id == "child#1"


@rule(50)
async def test_a_journal_in_which_a_compensation_has_run_is_not_retried(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "book:compensation", kind=RecordKind.COMPENSATION)
    await scene.append(held, "book")
    await scene.append(held, "undo/1")
    await scene.fail(held)
    before = await scene.everything()
    with pytest.raises(Conflict):
        await operator_retry(scene, held.run.run_id)
    assert await scene.everything() == before


@rule(35, 50)
async def test_a_retried_run_keeps_its_idempotency_key_and_admits_no_joiner(scene: Scene) -> None:
    held = await scene.take(idempotency_key="i", coalesce_key="c")
    await scene.fail(held)
    await operator_retry(scene, held.run.run_id)
    assert (await scene.submit(idempotency_key="i")).run.run_id == held.run.run_id
    assert (await scene.submit(coalesce_key="c")).disposition == "created"


@rule(50)
async def test_a_retried_run_is_not_purged_by_its_old_instant(scene: Scene) -> None:
    held = await scene.take(keep=SECOND)
    await scene.fail(held)
    await operator_retry(scene, held.run.run_id)
    await scene.later(DAY)
    assert await scene.store.purge(scope=ALL, limit=10) == 0
    await scene.take_again(held.run.run_id)


@rule(2)
async def test_a_policys_retry_keeps_the_attempt_number_for_the_fence(scene: Scene) -> None:
    held = await scene.take(max_attempts=3)
    await scene.settle(held, Retry(after=0, failure=failure(positions=(0,))))
    run = await scene.get(held.run.run_id)
    assert (run.attempts, run.failures, run.lease_owner) == (1, 1, held.lease.mark)
