"""Child runs (rules 12, 31, 48, 57, 60): linked once, their ends brought to the parent, cancelled with it unless detached."""

from __future__ import annotations

import pytest

from durable.model import (
    ALL,
    Cancelled,
    Completed,
    Failed,
    ForwardIncomplete,
    Outcome,
    RecordKind,
    Status,
    TimedOut,
)
from durable.settings import SECOND

from .scenario import ACME, BETA, Scene, failure, new_run, rule

ENDS: list[tuple[Outcome, Status]] = [
    (Completed(output='{"x":1}'), Status.COMPLETED),
    (Failed(failure=failure("broken", detail='{"type":"E"}')), Status.FAILED),
    (Cancelled(failure=failure("stopped", kind="cancelled")), Status.CANCELLED),
    (TimedOut(failure=failure("late", kind="timeout")), Status.TIMED_OUT),
    (ForwardIncomplete(failure=failure("stuck")), Status.FORWARD_INCOMPLETE),
]
UNCOMPLETED = [entry for entry in ENDS if entry[1] != Status.COMPLETED]


@rule(31)
@pytest.mark.parametrize(("outcome", "status"), ENDS, ids=[status for _, status in ENDS])
async def test_the_end_of_a_child_comes_to_its_parent_whatever_it_is(
    scene: Scene, outcome: Outcome, status: Status
) -> None:
    family = await scene.with_children(1)
    child = await scene.take_again(family.children[0])
    await scene.settle(child, outcome)
    (end,) = (await scene.inbox(family.parent)).children
    run = await scene.get(family.children[0])
    assert (end.run_id, end.step_id, end.status, end.at) == (run.run_id, "child#1", status, run.finished_at)
    assert (end.output, end.error, end.error_kind, end.error_detail) == (
        run.output,
        run.error,
        run.error_kind,
        run.error_detail,
    )


@rule(31)
async def test_ends_come_in_the_order_of_landing_until_a_record_holds_them(scene: Scene) -> None:
    family = await scene.with_children(3)
    order = [family.children[index] for index in (2, 0, 1)]
    for child in order:
        await scene.complete(await scene.take_exactly(child))
        await scene.later(SECOND // 10)
    assert [end.run_id for end in (await scene.inbox(family.parent)).children] == order
    await scene.append(family.parent, "child#1:end", kind=RecordKind.CHILD)
    left = [child for child in order if child != family.children[0]]
    assert [end.run_id for end in (await scene.inbox(family.parent)).children] == left


@rule(48)
async def test_a_child_is_linked_once_per_parent_and_step(scene: Scene) -> None:
    family = await scene.with_children(2)
    children = await scene.store.children(family.parent.run.run_id, scope=ALL)
    assert [child.run_id for child in children] == family.children
    assert [child.parent_step_id for child in children] == ["child#1", "child#2"]


@rule(48)
async def test_many_children_start_with_one_record(scene: Scene) -> None:
    held = await scene.take()
    children = tuple(new_run(**scene.child_of(held, f"map/{n}")) for n in range(50))
    await scene.append(held, "map", kind=RecordKind.START, children=children)
    found = await scene.store.children(held.run.run_id, scope=ALL)
    assert [child.run_id for child in found] == [child.run_id for child in children]


@rule(48)
@pytest.mark.parametrize(("outcome", "status"), UNCOMPLETED, ids=[status for _, status in UNCOMPLETED])
async def test_landing_in_any_state_but_completed_cancels_the_children_that_are_not_detached(
    scene: Scene, outcome: Outcome, status: Status
) -> None:
    family = await scene.with_children(2)
    running = await scene.take_again(family.children[0])
    free = new_run(**scene.child_of(family.parent, "free"), detached=True)
    await scene.append(family.parent, "free", kind=RecordKind.START, children=(free,))
    await scene.settle(family.parent, outcome)
    await scene.mend()
    assert (await scene.get(family.children[1])).status == Status.CANCELLED
    assert (await scene.inbox(running)).cancel_requested
    assert (await scene.get(free.run_id)).status == Status.PENDING
    assert (await scene.get(free.run_id)).cancel_requested_at is None
    assert await scene.mend() == 0


@rule(48)
async def test_children_that_were_submitted_together_with_their_parent_are_its_children(scene: Scene) -> None:
    parent = new_run(queue="parents")
    child = new_run(queue="children", parent_run_id=parent.run_id, parent_step_id="child")
    await scene.store.enqueue([parent, child])
    (held,) = await scene.claim(1, queues={"parents": 1})
    await scene.fail(held)
    await scene.mend()
    assert (await scene.get(child.run_id)).status == Status.CANCELLED


@rule(48)
async def test_a_completed_parent_cancels_nobody(scene: Scene) -> None:
    family = await scene.with_children(1)
    await scene.complete(family.parent)
    assert await scene.mend() == 0
    assert (await scene.get(family.children[0])).status == Status.PENDING


@rule(48)
async def test_a_parent_that_is_tried_again_cancels_nobody(scene: Scene) -> None:
    family = await scene.with_children(1)
    await scene.hand_back(family.parent)
    assert await scene.mend() == 0
    assert (await scene.get(family.children[0])).status == Status.PENDING


@rule(48)
async def test_the_chore_that_cancels_children_is_bounded_and_reaches_all(scene: Scene) -> None:
    family = await scene.with_children(5)
    await scene.fail(family.parent)
    for _ in range(10):
        await scene.mend(limit=2)
    assert {(await scene.get(child)).status for child in family.children} == {Status.CANCELLED}


@rule(48)
async def test_grandchildren_are_cancelled_in_turn(scene: Scene) -> None:
    family = await scene.with_children(1)
    child = await scene.take_again(family.children[0])
    grandchild = new_run(**scene.child_of(child, "grandchild"))
    await scene.append(child, "grandchild", kind=RecordKind.START, children=(grandchild,))
    await scene.fail(family.parent)
    await scene.mend()
    assert await scene.settle(child, Cancelled(failure=failure(kind="cancelled"))) == "landed"
    await scene.mend()
    assert (await scene.get(grandchild.run_id)).status == Status.CANCELLED


@rule(58)
async def test_children_stay_inside_their_tenant(scene: Scene) -> None:
    family = await scene.with_children(1, parent={"tenant": ACME})
    assert (await scene.get(family.children[0])).tenant == ACME
    assert len(await scene.store.children(family.parent.run.run_id, scope=ACME)) == 1
    assert list(await scene.store.children(family.parent.run.run_id, scope=BETA)) == []


@rule(60)
async def test_a_child_whose_parent_is_not_terminal_is_kept(scene: Scene) -> None:
    family = await scene.with_children(1, keep=SECOND)
    await scene.complete(await scene.take_again(family.children[0]))
    await scene.later(10 * SECOND)
    assert await scene.store.purge(scope=ALL, limit=10) == 0
    await scene.complete(family.parent)
    await scene.later(SECOND)
    assert await scene.store.purge(scope=ALL, limit=10) == 1
    assert await scene.gone(family.children[0])


@rule(60)
async def test_a_detached_child_goes_on_its_own(scene: Scene) -> None:
    family = await scene.with_children(1, keep=SECOND, detached=True)
    await scene.complete(await scene.take_again(family.children[0]))
    await scene.later(10 * SECOND)
    assert await scene.store.purge(scope=ALL, limit=10) == 1


@rule(31)
async def test_a_detached_childs_end_is_still_seen_by_a_parent_that_asks(scene: Scene) -> None:
    family = await scene.with_children(1, detached=True)
    await scene.complete(await scene.take_again(family.children[0]))
    assert [end.run_id for end in (await scene.inbox(family.parent)).children] == family.children
