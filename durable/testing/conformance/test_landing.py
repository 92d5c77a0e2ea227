"""Landing (rules 1, 4, 31, 35, 36, 43, 48, 55, 60, 73 to 75, 77): every consequence through every door to a terminal state.

A door is a way by which a run becomes terminal. Each test takes all doors, so that no door can forget a consequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from durable.errors import Conflict
from durable.model import (
    ALL,
    Cancelled,
    Completed,
    Dependency,
    Failed,
    Firing,
    ForwardIncomplete,
    NewRun,
    Outcome,
    QueueRecord,
    RecordKind,
    Status,
    TimedOut,
)
from durable.settings import DAY, HOUR, MINUTE, SECOND

from .scenario import Scene, failure, new_run, rule, schedule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Door:
    """A way to a terminal state: what the run must be like, and what leads it there."""

    name: str
    status: Status
    kind: str | None
    claimed: bool
    """Whether the run was running when it landed."""
    land: Callable[[Scene, str], Awaitable[None]]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    behind: bool = False
    """Whether the run is a node behind one that fails."""

    async def build(self, scene: Scene, **changes: Any) -> NewRun:
        """The run that is to be landed, not stored yet. It has a queue of its own, so that no other is claimed for it."""
        values = {"queue": "door", **self.fields, **changes}
        if self.behind:
            blocker = await scene.start(queue="blocker", tenant=values.get("tenant"))
            values["depends_on"] = (Dependency(run_id=blocker.run_id),)
        return new_run(**values)

    async def stored(self, scene: Scene, **changes: Any) -> str:
        """The run, stored."""
        run = await self.build(scene, **changes)
        await scene.store.enqueue([run])
        return run.run_id


def settled(outcome: Outcome, status: Status, kind: str | None) -> Door:
    """The holder's door."""

    async def land(scene: Scene, run_id: str) -> None:
        assert await scene.settle(await scene.take_again(run_id), outcome) == "landed"

    return Door(name=f"settle {status}", status=status, kind=kind, claimed=True, land=land)


async def by_cancel(scene: Scene, run_id: str) -> None:
    assert await scene.cancel(run_id)


async def by_claim_after_the_deadline(scene: Scene, run_id: str) -> None:
    await scene.later(2 * MINUTE)
    assert list(await scene.claim(queues={"door": 1})) == []


async def by_claim_with_an_ask(scene: Scene, run_id: str) -> None:
    await scene.hand_back(await scene.take_again(run_id))
    assert await scene.cancel(run_id)
    assert list(await scene.claim(queues={"door": 1})) == []


async def by_sweep(scene: Scene, run_id: str) -> None:
    await scene.take_again(run_id)
    await scene.lapse()
    assert list((await scene.sweep(max_reclaims=0)).failed) == [run_id]


async def by_upstream(scene: Scene, run_id: str) -> None:
    (blocker,) = await scene.claim(queues={"blocker": 1})
    await scene.fail(blocker)


DOORS = [
    settled(Completed(output='"out"'), Status.COMPLETED, None),
    settled(Failed(failure=failure(kind="misuse")), Status.FAILED, "misuse"),
    settled(Cancelled(failure=failure(kind="cancelled")), Status.CANCELLED, "cancelled"),
    settled(TimedOut(failure=failure(kind="timeout")), Status.TIMED_OUT, "timeout"),
    settled(ForwardIncomplete(failure=failure()), Status.FORWARD_INCOMPLETE, "exception"),
    Door(
        name="cancel before the first claim", status=Status.CANCELLED, kind="cancelled", claimed=False, land=by_cancel
    ),
    Door(
        name="claim after the deadline",
        status=Status.TIMED_OUT,
        kind="deadline",
        claimed=False,
        land=by_claim_after_the_deadline,
        fields={"deadline_after": MINUTE},
    ),
    Door(
        name="claim with an ask and no record",
        status=Status.CANCELLED,
        kind="cancelled",
        claimed=False,
        land=by_claim_with_an_ask,
    ),
    Door(name="sweep past the reclaim limit", status=Status.FAILED, kind="reclaim_limit", claimed=True, land=by_sweep),
    Door(name="upstream", status=Status.CANCELLED, kind="upstream", claimed=False, land=by_upstream, behind=True),
]

every_door = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name.replace(" ", "_"))
every_door_from_running = pytest.mark.parametrize(
    "door", [door for door in DOORS if door.claimed], ids=lambda door: door.name.replace(" ", "_")
)
every_door_but_completed = pytest.mark.parametrize(
    "door",
    [door for door in DOORS if door.status != Status.COMPLETED],
    ids=lambda door: door.name.replace(" ", "_"),
)


@rule(1)
@every_door
async def test_landing_sets_the_state_with_its_output_or_its_error(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    await door.land(scene, run_id)
    run = await scene.get(run_id)
    assert (run.status, run.error_kind) == (door.status, door.kind)
    assert (run.output is not None) == (run.error is None) == (door.status == Status.COMPLETED)


@rule(60)
@every_door
async def test_landing_sets_finished_at_and_purge_at(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene, keep=3 * HOUR)
    before = scene.store.clock()
    await door.land(scene, run_id)
    run = await scene.get(run_id)
    assert run.finished_at is not None
    assert run.purge_at == run.finished_at + 3 * HOUR
    assert run.updated_at == run.finished_at
    assert scene.since(before, run.finished_at)


@rule(4)
@every_door
async def test_landing_takes_the_lease_and_a_settle_keeps_the_mark(scene: Scene, door: Door) -> None:
    """The mark is what a repeated settle knows itself by; a sweep may take it, so that nobody takes the sweep for his settle."""
    run_id = await door.stored(scene)
    await door.land(scene, run_id)
    run = await scene.get(run_id)
    assert run.leased_until is None
    if door.name.startswith("settle"):
        assert run.lease_owner is not None
    if run.attempts == 0:
        assert run.lease_owner is None
    await scene.later(DAY)
    assert list((await scene.sweep()).returned) == []


@rule(7)
@every_door
async def test_landing_takes_the_run_out_of_every_claim_and_promotion(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    await door.land(scene, run_id)
    await scene.later(DAY)
    await scene.promote()
    await scene.mend()
    assert run_id not in [
        one.run.run_id for one in await scene.claim(10, queues={"door": 10, "blocker": 10}, alone=True)
    ]
    run = await scene.get(run_id)
    assert (run.status, run.available_at, run.blocked_on) == (door.status, None, None)


@rule(31)
@every_door
async def test_landing_counts_the_child_for_its_parent_and_wakes_it(scene: Scene, door: Door) -> None:
    parent = await scene.take()
    run = await door.build(scene, **{**scene.child_of(parent, "child"), "queue": "door"})
    await scene.append(parent, "child", kind=RecordKind.START, children=(run,))
    rest = await scene.rest(parent, wake_after=1)
    assert await scene.settle(parent, rest) == "landed"
    await door.land(scene, run.run_id)
    after = await scene.get(parent.run.run_id)
    assert (after.status, after.wake_after) == (Status.PENDING, 0)
    assert after.wake_seq > rest.wake_seq
    again = await scene.take_again(parent.run.run_id)
    (end,) = (await scene.inbox(again)).children
    assert (end.run_id, end.step_id, end.status, end.error_kind) == (run.run_id, "child", door.status, door.kind)


@rule(31)
@every_door
async def test_landing_bumps_a_parent_that_is_running(scene: Scene, door: Door) -> None:
    parent = await scene.take(queue="parent")
    run = await door.build(scene, **{**scene.child_of(parent, "child"), "queue": "door"})
    await scene.append(parent, "child", kind=RecordKind.START, children=(run,))
    rest = await scene.rest(parent, wake_after=1)
    await door.land(scene, run.run_id)
    if (await scene.get(parent.run.run_id)).status == Status.RUNNING:
        assert await scene.settle(parent, rest) == "woken"
    assert (await scene.get(parent.run.run_id)).wake_seq == rest.wake_seq + 1


@rule(77)
@every_door
async def test_landing_releases_the_dependents_or_lands_them_upstream(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    behind = await scene.start(queue="behind", depends_on=(Dependency(run_id=run_id),))
    last = await scene.start(queue="behind", depends_on=(Dependency(run_id=behind.run_id),))
    assert behind.status == Status.SUSPENDED
    await door.land(scene, run_id)
    after = await scene.get(behind.run_id)
    if door.status == Status.COMPLETED:
        assert after.status == Status.PENDING
        await scene.complete(await scene.take_again(behind.run_id))
        await scene.take_again(last.run_id)
    else:
        assert (after.status, after.error_kind) == (Status.CANCELLED, "upstream")
        assert (await scene.get(last.run_id)).error_kind == "upstream"


@rule(73, 74)
@every_door_from_running
@pytest.mark.parametrize("scope_name", ["queue:door", "function:work", "key:door"])
async def test_landing_gives_the_permits_back_and_releases_the_next(scene: Scene, door: Door, scope_name: str) -> None:
    await scene.store.set_queue(QueueRecord(scope_name=scope_name, max_concurrency=1))
    run_id = await door.stored(scene, concurrency_key="c", priority=9)
    waiting = await scene.start(queue="door", concurrency_key="c")
    await door.land(scene, run_id)
    claimed = await scene.claim(10, queues={"door": 10})
    assert [one.run.run_id for one in claimed] == [waiting.run_id]


@rule(73)
@every_door
async def test_landing_leaves_no_permit_behind(scene: Scene, door: Door) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="queue:door", max_concurrency=2))
    run_id = await door.stored(scene)
    await door.land(scene, run_id)
    await scene.store.enqueue([new_run(queue="door") for _ in range(3)])
    assert len(await scene.claim(10, queues={"door": 10})) == 2


@rule(75)
@every_door
async def test_landing_releases_the_next_of_its_sequence(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene, sequence_key="s")
    following = await scene.start(sequence_key="s")
    last = await scene.start(sequence_key="s")
    assert following.blocked_on == "sequence"
    await door.land(scene, run_id)
    assert (await scene.get(following.run_id)).blocked_on is None
    assert [one.run.run_id for one in await scene.claim(10)] == [following.run_id]
    assert (await scene.get(last.run_id)).blocked_on == "sequence"


@rule(55)
@every_door
async def test_landing_counts_or_resets_the_failures_of_its_schedule(scene: Scene, door: Door) -> None:
    now = scene.store.clock()
    await scene.store.put_schedule(schedule(next_fire_at=now), scope=None)
    for fails in (True, False):
        run = await door.build(scene, schedule_id="nightly", scheduled_for=now) if not fails else None
        slot = run or new_run(schedule_id="nightly", scheduled_for=now, queue="first")
        await scene.store.fire(
            Firing(schedule_id="nightly", tenant=None, expected=now, next_fire_at=now + HOUR, runs=(slot,))
        )
        now += HOUR
        if fails:
            await scene.fail(await scene.take_again(slot.run_id))
        else:
            await door.land(scene, slot.run_id)
    (row,) = await scene.store.schedules(scope=None)
    assert not row.last_run_live
    if door.status == Status.COMPLETED:
        assert row.consecutive_failures == 0
    elif door.status != Status.CANCELLED:
        assert row.consecutive_failures == 2
    else:
        assert row.consecutive_failures in (1, 2), "a cancelled run is no success"


@rule(35)
@every_door
async def test_landing_keeps_the_idempotency_key(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene, idempotency_key="i")
    await door.land(scene, run_id)
    again = await scene.submit(idempotency_key="i")
    assert (again.disposition, again.run.run_id, again.run.status) == ("existing", run_id, door.status)


@rule(36)
@every_door
async def test_landing_frees_the_coalesce_key(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene, coalesce_key="c")
    await door.land(scene, run_id)
    again = await scene.submit(coalesce_key="c", queue="door")
    assert again.disposition == "created"
    assert again.run.run_id != run_id


@rule(48)
@every_door_from_running
async def test_landing_has_its_children_cancelled_unless_completed(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    held = await scene.take_again(run_id)
    child = new_run(**scene.child_of(held, "child"))
    await scene.append(held, "child", kind=RecordKind.START, children=(child,))
    await scene.hand_back(held)
    await door.land(scene, run_id)
    await scene.mend()
    expected = Status.PENDING if door.status == Status.COMPLETED else Status.CANCELLED
    assert (await scene.get(child.run_id)).status == expected


@rule(32)
@every_door
async def test_landing_closes_the_mailbox(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    await scene.send(run_id, dedup_id="early")
    await door.land(scene, run_id)
    with pytest.raises(Conflict):
        await scene.send(run_id)


@rule(43)
@every_door
async def test_landing_makes_every_later_ask_false(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    await door.land(scene, run_id)
    before = await scene.everything()
    assert not await scene.cancel(run_id)
    assert await scene.everything() == before


@rule(60)
@every_door
async def test_landing_lets_the_run_be_purged(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene, keep=SECOND)
    await door.land(scene, run_id)
    await scene.later(MINUTE)
    assert await scene.store.purge(scope=ALL, limit=10) >= 1
    assert await scene.gone(run_id)


@rule(50)
@every_door_but_completed
async def test_every_end_but_completed_can_be_retried(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    await door.land(scene, run_id)
    landed = await scene.get(run_id)
    if door.behind:  # it can not go before what it waits for: the retry of that one brings it back (77)
        with pytest.raises(Conflict, match="did not complete"):
            await scene.store.retry(run_id, scope=ALL, attempts=landed.attempts)
        assert await scene.get(run_id) == landed
        return
    run = await scene.store.retry(run_id, scope=ALL, attempts=landed.attempts)
    assert run.status == Status.PENDING
    assert (run.error, run.error_kind, run.finished_at, run.purge_at) == (None,) * 4


@rule(30)
@every_door
async def test_landing_leaves_nothing_to_wait_for(scene: Scene, door: Door) -> None:
    run_id = await door.stored(scene)
    await door.land(scene, run_id)
    run = await scene.get(run_id)
    assert (run.waiting_for, run.wake_after) == (None, 0)
    (pulse,) = await scene.store.pulse([run_id], scope=ALL)
    assert pulse is not None
    assert (pulse.status, pulse.updated_at) == (door.status, run.updated_at)
