"""The fence (rules 1 to 6, 20): no write of a holder passes whose claim is not the current one, and nothing is touched by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from durable.model import (
    Cancelled,
    Completed,
    Failed,
    ForwardIncomplete,
    HandedBack,
    Lease,
    NewRecord,
    Outcome,
    RecordKind,
    Renewal,
    Retry,
    Status,
    Suspended,
    TimedOut,
)
from durable.settings import SECOND

from .scenario import ACME, LEASE, Scene, failure, new_run, rule

OUTCOMES: list[Outcome] = [
    Completed(output="1"),
    Failed(failure=failure()),
    Cancelled(failure=failure()),
    TimedOut(failure=failure()),
    ForwardIncomplete(failure=failure()),
    Retry(after=0, failure=failure()),
    Suspended(until=None, waiting_for="{}", wake_seq=0),
    HandedBack(),
]


async def swept(scene: Scene) -> Lease:
    """The lease lapsed and the sweep took the run back."""
    held = await scene.take()
    await scene.append(held, "a")
    await scene.lapse()
    await scene.sweep()
    return held.lease


async def claimed_by_another(scene: Scene) -> Lease:
    """Swept, and another worker has claimed it."""
    lease = await swept(scene)
    await scene.take_again(lease.run_id)
    return lease


async def handed_back(scene: Scene) -> Lease:
    """Its holder gave it back and another worker has claimed it."""
    held = await scene.take()
    await scene.append(held, "a")
    await scene.hand_back(held)
    await scene.take_again(held.run.run_id)
    return held.lease


async def with_a_foreign_mark(scene: Scene) -> Lease:
    """The number of the current claim with a mark that is not its own."""
    held = await scene.take()
    return dataclasses.replace(held.lease, mark="somebody/else")


async def with_an_old_number(scene: Scene) -> Lease:
    """The mark of the current claim with a number that is not its own."""
    held = await scene.take()
    return dataclasses.replace(held.lease, attempts=held.lease.attempts - 1)


async def never_claimed(scene: Scene) -> Lease:
    """A run that nobody holds."""
    run = await scene.start()
    return Lease(run_id=run.run_id, tenant=None, attempts=0, mark="worker/none")


async def of_no_run(scene: Scene) -> Lease:
    """A run that does not exist."""
    return Lease(run_id=new_run().run_id, tenant=None, attempts=1, mark="worker/none")


STALE = [swept, claimed_by_another, handed_back, with_a_foreign_mark, with_an_old_number, never_claimed, of_no_run]
stale_lease = pytest.mark.parametrize("stale", STALE, ids=lambda stale: stale.__name__)


@rule(3)
@stale_lease
@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_settle_without_the_fence_is_lost_and_changes_nothing(
    scene: Scene, stale: Callable[[Scene], Awaitable[Lease]], outcome: Outcome
) -> None:
    lease = await stale(scene)
    before = await scene.everything()
    assert list(await scene.store.settle([(lease, outcome)])) == ["lost"]
    assert await scene.everything() == before


@rule(3)
@stale_lease
async def test_an_append_without_the_fence_is_lost_and_changes_nothing(
    scene: Scene, stale: Callable[[Scene], Awaitable[Lease]]
) -> None:
    lease = await stale(scene)
    before = await scene.everything()
    child = new_run(parent_run_id=lease.run_id, parent_step_id="late")
    (answer,) = await scene.store.append([(lease, step("late", position=1, children=(child,), progress='"x"'))])
    assert (answer.state, answer.record) == ("lost", None)
    assert await scene.everything() == before


@rule(3, 20)
@stale_lease
async def test_an_append_of_a_step_that_is_recorded_is_lost_too_when_the_fence_is_gone(
    scene: Scene, stale: Callable[[Scene], Awaitable[Lease]]
) -> None:
    lease = await stale(scene)
    before = await scene.everything()
    (answer,) = await scene.store.append([(lease, step("a", position=0))])
    assert (answer.state, answer.record) == ("lost", None)
    assert await scene.everything() == before


@rule(3, 13)
@stale_lease
async def test_a_renewal_without_the_fence_is_lost_and_changes_nothing(
    scene: Scene, stale: Callable[[Scene], Awaitable[Lease]]
) -> None:
    lease = await stale(scene)
    before = await scene.everything()
    (answer,) = await scene.store.renew([Renewal(lease=lease, progress='"late"')], lease=LEASE)
    assert answer.state == "lost"
    assert await scene.everything() == before


@rule(3, 31)
@stale_lease
async def test_an_inbox_is_not_shown_without_the_fence(
    scene: Scene, stale: Callable[[Scene], Awaitable[Lease]]
) -> None:
    lease = await stale(scene)
    assert list(await scene.store.inbox([lease])) == [None]


@rule(3, 26)
@stale_lease
async def test_a_transaction_without_the_fence_is_lost_and_changes_nothing(
    shared_scene: Scene, stale: Callable[[Scene], Awaitable[Lease]]
) -> None:
    scene = shared_scene
    lease = await stale(scene)
    before = await scene.everything()

    async def work(native: Any) -> NewRecord:
        await scene.harness.write_row(native, "late")
        return step("late", position=1)

    answer = await scene.store.transaction(lease, work, timeout=5 * SECOND)
    assert (answer.state, answer.record) == ("lost", None)
    assert await scene.everything() == before
    assert await scene.harness.rows() == []


@rule(4)
@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_landed_suspended_or_handed_back_run_has_no_lease_and_keeps_its_mark(
    scene: Scene, outcome: Outcome
) -> None:
    held = await scene.take()
    assert await scene.settle(held, outcome) == "landed"
    run = await scene.get(held.run.run_id)
    assert run.status != Status.RUNNING
    assert run.leased_until is None
    assert (run.lease_owner, run.attempts) == (held.lease.mark, 1)


@rule(6)
@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
async def test_a_repeated_settle_whose_first_answer_was_lost_recognises_itself_as_landed(
    scene: Scene, outcome: Outcome
) -> None:
    held = await scene.take()
    assert await scene.settle(held, outcome) == "landed"
    before = await scene.everything()
    assert await scene.settle(held, outcome) == "landed"
    assert await scene.everything() == before


@rule(6)
@pytest.mark.parametrize(
    "outcome", [Completed(output="1"), HandedBack(), Suspended(until=None, waiting_for="{}", wake_seq=0)]
)
async def test_a_repeated_settle_after_the_next_claim_is_lost(scene: Scene, outcome: Outcome) -> None:
    held = await scene.take()
    await scene.hand_back(held)
    await scene.take_again(held.run.run_id)
    assert await scene.settle(held, outcome) == "lost"


@rule(6)
async def test_another_outcome_after_the_landing_is_lost(scene: Scene) -> None:
    held = await scene.take()
    await scene.complete(held)
    assert await scene.settle(held, Failed(failure=failure())) == "lost"
    run = await scene.get(held.run.run_id)
    assert (run.status, run.error) == (Status.COMPLETED, None)


@rule(3, 9)
async def test_one_stale_entry_never_strands_its_batch(scene: Scene) -> None:
    first, second = await scene.take(), await scene.take()
    stale = dataclasses.replace(first.lease, mark="somebody/else")
    answers = await scene.store.settle(
        [(first.lease, Completed(output="1")), (stale, Completed(output="2")), (second.lease, Completed(output="3"))]
    )
    assert list(answers) == ["landed", "lost", "landed"]
    assert [(await scene.get(held.run.run_id)).output for held in (first, second)] == ["1", "3"]


@rule(3)
async def test_records_of_a_batch_are_matched_each_on_its_own_fence(scene: Scene) -> None:
    first, second = await scene.take(), await scene.take()
    stale = dataclasses.replace(second.lease, attempts=7)
    answers = await scene.store.append(
        [(first.lease, step("a", position=0)), (stale, step("a", position=0)), (second.lease, step("b", position=0))]
    )
    assert [answer.state for answer in answers] == ["appended", "lost", "appended"]
    assert await scene.steps(first.run.run_id) == ["a"]
    assert await scene.steps(second.run.run_id) == ["b"]


@rule(3)
async def test_a_record_of_the_old_holder_never_lands_between_the_claim_of_the_new_one_and_its_history(
    scene: Scene,
) -> None:
    """The scenario behind the fence in the append: sweep, new claim, late record, and what the new holder sees."""
    old = await scene.take()
    await scene.append(old, "a")
    await scene.lapse()
    await scene.sweep()
    new = await scene.take_again(old.run.run_id)
    assert [record.step_id for record in new.history] == ["a"]
    assert (await scene.append(old, "b")).state == "lost"
    assert (await scene.append(new, "b", result='{"value":"new"}')).state == "appended"
    history = await scene.history(old.run.run_id)
    assert [(record.step_id, record.fence) for record in history] == [("a", 1), ("b", 2)]
    assert history[1].result == '{"value":"new"}'


@rule(3, 15)
async def test_a_lapsed_lease_that_nobody_has_swept_still_holds(scene: Scene) -> None:
    """The fence is the claim, not the clock: until the sweep comes, the holder may record and land."""
    held = await scene.take()
    await scene.lapse()
    assert (await scene.append(held, "a")).state == "appended"
    await scene.complete(held)


@rule(57)
async def test_a_settled_run_keeps_its_tenant(scene: Scene) -> None:
    held = await scene.take(tenant=ACME)
    assert held.lease.tenant == ACME
    await scene.append(held, "a")
    await scene.complete(held)
    assert (await scene.get(held.run.run_id, scope=ACME)).status == Status.COMPLETED


def step(step_id: str, *, position: int, **changes: Any) -> NewRecord:
    """A record whose position the test states, since the run may not be there."""
    values: dict[str, Any] = {
        "step_id": step_id,
        "kind": RecordKind.STEP,
        "position": position,
        "seen": position - 1,
        "digest": "d",
        "result": '{"value":1}',
    }
    return NewRecord(**{**values, **changes})
