"""Waiting (rules 12, 29 to 33): a suspended run costs nothing, and no wake is ever lost between a look and the suspension."""

from __future__ import annotations

import pytest

from durable.model import ALL, Completed, Failed, Lease, Outcome, RecordKind, Status
from durable.settings import HOUR, MINUTE, SECOND

from .scenario import Family, Scene, failure, new_run, rule


async def wait_for_children(scene: Scene, family: Family, **changes: object) -> None:
    """Suspend the parent until its children have ended."""
    waiting = {"wake_after": len(family.children), "waiting_for": '{"children":"all"}', **changes}
    assert await scene.suspend(family.parent, **waiting) == "landed"


@rule(30)
async def test_a_suspended_run_has_no_worker_no_lease_and_says_on_what_it_waits(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.suspend(held, waiting_for='{"signal":"go"}') == "landed"
    run = await scene.get(held.run.run_id)
    assert (run.status, run.leased_until, run.waiting_for) == (Status.SUSPENDED, None, '{"signal":"go"}')
    await scene.later(HOUR)
    assert list((await scene.sweep()).returned) == []
    assert (await scene.promote()).count == 0
    assert (await scene.get(run.run_id)).status == Status.SUSPENDED


@rule(29)
async def test_the_time_wakes_a_run_that_waits_for_it(scene: Scene) -> None:
    held = await scene.take()
    until = scene.store.clock() + MINUTE
    assert await scene.suspend(held, until=until) == "landed"
    assert (await scene.get(held.run.run_id)).available_at == until
    assert (await scene.promote()).count == 0
    await scene.later(MINUTE + SECOND)
    promoted = await scene.promote()
    assert (promoted.count, promoted.queues) == (1, frozenset({"default"}))
    run = await scene.get(held.run.run_id)
    assert (run.status, run.available_at) == (Status.PENDING, None)
    await scene.take_again(run.run_id)


@rule(29)
async def test_a_wait_whose_instant_has_passed_is_woken_by_the_next_promotion(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.suspend(held, until=scene.store.clock() - SECOND) == "landed"
    await scene.promote()
    await scene.take_again(held.run.run_id)


@rule(12)
async def test_a_waits_end_is_never_later_than_the_deadline(scene: Scene) -> None:
    held = await scene.take(deadline_after=MINUTE)
    assert await scene.suspend(held, until=scene.store.clock() + HOUR) == "landed"
    run = await scene.get(held.run.run_id)
    assert run.available_at == run.deadline_at


@rule(12)
async def test_a_wait_without_an_end_ends_at_the_deadline(scene: Scene) -> None:
    held = await scene.take(deadline_after=MINUTE)
    assert await scene.suspend(held, until=None) == "landed"
    run = await scene.get(held.run.run_id)
    assert run.available_at == run.deadline_at
    await scene.later(MINUTE + SECOND)
    await scene.promote()
    assert list(await scene.claim()) == []
    assert (await scene.get(held.run.run_id)).status == Status.TIMED_OUT


@rule(31)
async def test_a_signal_makes_a_suspended_run_claimable_at_once(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.suspend(held, until=scene.store.clock() + HOUR) == "landed"
    await scene.send(held.run.run_id)
    run = await scene.get(held.run.run_id)
    assert (run.status, run.available_at) == (Status.PENDING, None)
    await scene.take_again(run.run_id)


@rule(31)
async def test_an_ask_makes_a_suspended_run_claimable_at_once(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    assert await scene.suspend(held, until=scene.store.clock() + HOUR) == "landed"
    assert await scene.cancel(held.run.run_id)
    run = await scene.get(held.run.run_id)
    assert (run.status, run.available_at) == (Status.PENDING, None)
    await scene.take_again(run.run_id)


@rule(31)
async def test_a_wake_between_the_look_and_the_suspension_is_not_lost(scene: Scene) -> None:
    """The holder reads its inbox, a signal comes, the holder suspends on what it had read."""
    held = await scene.take()
    rest = await scene.rest(held)
    await scene.send(held.run.run_id)
    assert await scene.settle(held, rest) == "woken"
    assert [signal.name for signal in (await scene.inbox(held)).signals] == ["go"]


@rule(31)
async def test_a_child_that_lands_between_the_look_and_the_suspension_is_not_lost(scene: Scene) -> None:
    family = await scene.with_children(1)
    rest = await scene.rest(family.parent, wake_after=1)
    await scene.complete(await scene.take_again(family.children[0]))
    assert await scene.settle(family.parent, rest) == "woken"
    assert [end.run_id for end in (await scene.inbox(family.parent)).children] == family.children


@rule(31)
async def test_the_wake_counter_grows_with_every_signal_finished_child_and_ask(scene: Scene) -> None:
    family = await scene.with_children(2)
    counter = (await scene.inbox(family.parent)).wake_seq
    await scene.send(family.parent.run.run_id)
    assert (await scene.inbox(family.parent)).wake_seq == counter + 1
    await scene.complete(await scene.take_again(family.children[0]))
    assert (await scene.inbox(family.parent)).wake_seq == counter + 2
    await scene.fail(await scene.take_again(family.children[1]))
    assert (await scene.inbox(family.parent)).wake_seq == counter + 3
    await scene.cancel(family.parent.run.run_id)
    assert (await scene.inbox(family.parent)).wake_seq == counter + 4


@rule(31)
async def test_a_parent_is_woken_when_wake_after_reaches_0(scene: Scene) -> None:
    family = await scene.with_children(3)
    await wait_for_children(scene, family)
    for left, child in zip((2, 1), family.children[:2], strict=True):
        await scene.complete(await scene.take_again(child))
        parent = await scene.get(family.parent.run.run_id)
        assert (parent.status, parent.wake_after) == (Status.SUSPENDED, left)
    await scene.complete(await scene.take_again(family.children[2]))
    parent = await scene.get(family.parent.run.run_id)
    assert (parent.status, parent.available_at) == (Status.PENDING, None)
    again = await scene.take_again(parent.run_id)
    assert [end.run_id for end in (await scene.inbox(again)).children] == family.children


@rule(31)
async def test_a_parent_that_waits_for_one_of_many_is_woken_by_the_first(scene: Scene) -> None:
    family = await scene.with_children(3)
    await wait_for_children(scene, family, wake_after=1)
    await scene.complete(await scene.take_again(family.children[0]))
    assert (await scene.get(family.parent.run.run_id)).status == Status.PENDING


@rule(31)
async def test_one_landing_batch_adds_the_number_of_children_that_landed(scene: Scene) -> None:
    family = await scene.with_children(3)
    await wait_for_children(scene, family)
    counter = (await scene.get(family.parent.run.run_id)).wake_seq
    claimed = await scene.claim(3, queues={"children": 3})
    answers = await scene.store.settle([(one.lease, Completed(output="1")) for one in claimed])
    assert list(answers) == ["landed"] * 3
    parent = await scene.get(family.parent.run.run_id)
    assert (parent.status, parent.wake_seq) == (Status.PENDING, counter + 3)


@rule(31)
@pytest.mark.parametrize("first", ["parent", "child"])
async def test_a_parent_that_suspends_in_the_batch_in_which_its_child_lands_is_not_lost(
    scene: Scene, first: str
) -> None:
    """Suspensions come last and match the counter that the landings of their own batch have made."""
    family = await scene.with_children(1)
    child = await scene.take_again(family.children[0])
    rest = await scene.rest(family.parent, wake_after=1)
    entries: list[tuple[Lease, Outcome]] = [(family.parent.lease, rest), (child.lease, Completed(output="1"))]
    if first == "child":
        entries.reverse()
    answers = list(await scene.store.settle(entries))
    if first == "child":
        answers.reverse()
    assert answers == ["woken", "landed"]
    assert (await scene.get(family.parent.run.run_id)).status == Status.RUNNING
    assert [end.run_id for end in (await scene.inbox(family.parent)).children] == family.children


@rule(31)
async def test_children_that_have_ended_before_the_suspension_do_not_count_again(scene: Scene) -> None:
    """The holder has been given one end; it waits for the other one only."""
    family = await scene.with_children(2)
    await scene.complete(await scene.take_again(family.children[0]))
    await scene.append(family.parent, "child#1:end", kind=RecordKind.CHILD)
    await wait_for_children(scene, family, wake_after=1)
    assert (await scene.get(family.parent.run.run_id)).status == Status.SUSPENDED
    await scene.complete(await scene.take_again(family.children[1]))
    assert (await scene.get(family.parent.run.run_id)).status == Status.PENDING


@rule(31)
async def test_the_net_wakes_suspended_runs_all_of_whose_awaited_children_are_terminal(scene: Scene) -> None:
    """The parent counted one child too many: the wake that it waits for can not come any more."""
    family = await scene.with_children(1)
    await wait_for_children(scene, family, wake_after=2)
    await scene.complete(await scene.take_again(family.children[0]))
    assert (await scene.get(family.parent.run.run_id)).status == Status.SUSPENDED
    assert await scene.mend() == 1
    assert (await scene.get(family.parent.run.run_id)).status == Status.PENDING


@rule(31)
async def test_the_net_leaves_a_parent_alone_while_a_child_lives(scene: Scene) -> None:
    family = await scene.with_children(2)
    await wait_for_children(scene, family)
    await scene.complete(await scene.take_again(family.children[0]))
    assert await scene.mend() == 0
    assert (await scene.get(family.parent.run.run_id)).status == Status.SUSPENDED


@rule(31)
async def test_the_net_leaves_a_run_alone_that_waits_for_a_signal_or_a_time(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.suspend(held, until=scene.store.clock() + HOUR) == "landed"
    other = await scene.take()
    assert await scene.suspend(other) == "landed"
    assert await scene.mend() == 0


@rule(33)
async def test_wake_delay_gathers_the_ends_of_independent_children(scene: Scene) -> None:
    family = await scene.with_children(3)
    await wait_for_children(scene, family, wake_after=1, wake_delay=MINUTE)
    await scene.complete(await scene.take_again(family.children[0]))
    parent = await scene.get(family.parent.run.run_id)
    assert parent.available_at is not None
    assert list(await scene.claim()) == []
    await scene.complete(await scene.take_again(family.children[1]))
    assert (await scene.get(family.parent.run.run_id)).available_at == parent.available_at
    await scene.later(MINUTE + SECOND)
    await scene.promote()
    again = await scene.take_again(family.parent.run.run_id)
    assert len((await scene.inbox(again)).children) == 2


@rule(31, 33)
async def test_a_signal_does_not_wait_for_the_wake_delay(scene: Scene) -> None:
    family = await scene.with_children(1)
    await wait_for_children(scene, family, wake_after=1, wake_delay=HOUR)
    await scene.complete(await scene.take_again(family.children[0]))
    assert list(await scene.claim()) == []
    await scene.send(family.parent.run.run_id)
    await scene.take_again(family.parent.run.run_id)


@rule(33)
@pytest.mark.parametrize("outcome", [Failed(failure=failure()), Completed(output="1")], ids=["failed", "completed"])
async def test_wake_on_failure_wakes_at_the_first_child_that_does_not_complete(
    scene: Scene, outcome: Failed | Completed
) -> None:
    family = await scene.with_children(3)
    await wait_for_children(scene, family, wake_on_failure=True)
    child = await scene.take_again(family.children[0])
    await scene.settle(child, outcome)
    woken = (await scene.get(family.parent.run.run_id)).status == Status.PENDING
    assert woken == isinstance(outcome, Failed)


@rule(31)
async def test_a_second_suspension_matches_what_came_while_the_run_was_awake(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.suspend(held) == "landed"
    await scene.send(held.run.run_id, "one")
    again = await scene.take_again(held.run.run_id)
    rest = await scene.rest(again)
    await scene.send(held.run.run_id, "two")
    assert await scene.settle(again, rest) == "woken"
    assert await scene.settle(again, await scene.rest(again)) == "landed"


@rule(30)
async def test_suspended_runs_wait_without_being_in_the_way_of_others(scene: Scene) -> None:
    for _ in range(5):
        held = await scene.take(priority=9)
        assert await scene.suspend(held) == "landed"
    run = await scene.start()
    assert [one.run.run_id for one in await scene.claim(10)] == [run.run_id]


@rule(31)
async def test_a_run_that_waits_for_a_child_and_a_time_is_woken_by_what_comes_first(scene: Scene) -> None:
    family = await scene.with_children(1)
    until = scene.store.clock() + MINUTE
    await wait_for_children(scene, family, until=until)
    await scene.later(MINUTE + SECOND)
    await scene.promote()
    again = await scene.take_again(family.parent.run.run_id)
    assert list((await scene.inbox(again)).children) == []


@rule(12, 31)
async def test_a_child_of_a_landed_parent_lands_without_waking_anybody(scene: Scene) -> None:
    family = await scene.with_children(1)
    await scene.complete(family.parent)
    before = await scene.get(family.parent.run.run_id)
    await scene.complete(await scene.take_again(family.children[0]))
    after = await scene.get(family.parent.run.run_id)
    assert (after.status, after.output, after.finished_at) == (before.status, before.output, before.finished_at)


@rule(30)
async def test_a_woken_run_does_not_say_any_more_on_what_it_waits(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.suspend(held) == "landed"
    await scene.send(held.run.run_id)
    await scene.complete(await scene.take_again(held.run.run_id))
    assert (await scene.get(held.run.run_id)).waiting_for is None


@rule(12)
async def test_a_child_inherits_the_deadline_of_its_parent_unless_detached(scene: Scene) -> None:
    held = await scene.take(deadline_after=MINUTE)
    child = new_run(**scene.child_of(held, "child"), deadline_after=HOUR)
    detached = new_run(**scene.child_of(held, "free"), deadline_after=HOUR, detached=True)
    earlier = new_run(**scene.child_of(held, "soon"), deadline_after=SECOND)
    for step_id, run in (("child", child), ("free", detached), ("soon", earlier)):
        await scene.append(held, step_id, kind=RecordKind.START, children=(run,))
    deadline = held.run.deadline_at
    assert deadline is not None
    assert (await scene.get(child.run_id)).deadline_at == deadline
    free = (await scene.get(detached.run_id)).deadline_at
    assert free is not None
    assert free > deadline
    soon = (await scene.get(earlier.run_id)).deadline_at
    assert soon is not None
    assert soon < deadline
    assert len(await scene.store.children(held.run.run_id, scope=ALL)) == 3
