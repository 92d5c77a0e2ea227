"""Sections B, C and E of the public fault reports, the rows that a store alone can show; each test is named by its row.

The engine's rows are in test_engine_reports.py, what belongs to a later part or does not apply stands in README.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from durable.errors import Conflict, NotFound
from durable.model import ALL, Cancelled, Completed, Lease, NewRecord, QueueRecord, RecordKind, Renewal, Retry, Status
from durable.settings import HOUR, MINUTE, SECOND, Settings
from durable.testing.conformance.harness import Harness
from durable.testing.conformance.scenario import ACME, LEASE, Scene, failure, new_run, schedule
from durable_sqlite import backend


class Clocked:
    """A database whose clock the test moves; the rows here need nothing else of a harness."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'cases.db'}"
        self.now = 1_800_000_000 * SECOND
        self.clock = lambda: self.now

    async def pass_time(self, micros: int, /) -> None:
        self.now += micros

    async def open(self, *, shared: bool = False) -> object:
        url = self.url if shared else "sqlite:///:memory:"
        return await backend.open(url, settings=Settings(), clock=self.clock)


@pytest.fixture
def harness(tmp_path: Path) -> Clocked:
    return Clocked(tmp_path)


@pytest.fixture
async def scene(harness: Harness) -> AsyncIterator[Scene]:
    store = await harness.open()
    yield Scene(store, harness)
    assert list(await store.audit(scope=ALL)) == []
    await store.close()


async def test_row_20_the_loser_of_a_double_execution_sees_a_clean_loss_and_no_driver_error(scene: Scene) -> None:
    slow = await scene.take()
    await scene.append(slow, "a")
    await scene.lapse()
    await scene.sweep()
    quick = await scene.take_again(slow.run.run_id)
    await scene.append(quick, "b")
    answer = await scene.append(slow, "b")
    assert (answer.state, answer.record) == ("lost", None)
    await scene.complete(quick)
    assert await scene.settle(slow, Completed(output='"slow"')) == "lost"
    run = await scene.get(slow.run.run_id)
    assert (run.status, run.error) == (Status.COMPLETED, None)
    assert await scene.steps(run.run_id) == ["a", "b"]


async def test_row_21_a_delayed_run_is_not_claimed_early_and_held_in_memory(scene: Scene) -> None:
    run = await scene.start(delay=5 * LEASE)
    for _ in range(5):
        await scene.promote()
        assert list(await scene.claim(10)) == []
        assert (await scene.get(run.run_id)).attempts == 0
        await scene.later(LEASE - SECOND)
    await scene.later(5 * SECOND)
    await scene.promote()
    await scene.complete(await scene.take_again(run.run_id))
    assert (await scene.get(run.run_id)).attempts == 1


async def test_row_22_a_run_that_is_renewed_in_time_is_never_taken_from_its_worker(scene: Scene) -> None:
    held = [await scene.take() for _ in range(10)]
    for _ in range(15):
        await scene.later(LEASE // 3)
        answers = await scene.store.renew([Renewal(lease=one.lease) for one in held], lease=LEASE)
        assert {answer.state for answer in answers} == {"held"}
        assert list((await scene.sweep()).returned) == []
        assert list(await scene.claim(10)) == []
    for one in held:
        await scene.complete(one)
    assert {run.attempts for run in await scene.runs()} == {1}


async def test_row_24_a_run_whose_heartbeats_stop_is_taken_over_and_the_old_worker_is_refused(scene: Scene) -> None:
    old = await scene.take()
    await scene.later(4 * LEASE)
    await scene.sweep()
    new = await scene.take_again(old.run.run_id)
    assert await scene.settle(old, Completed(output="1")) == "lost"
    run = await scene.get(old.run.run_id)
    assert (run.lease_owner, run.status) == (new.lease.mark, Status.RUNNING)
    await scene.complete(new)


async def test_row_27_a_finished_run_is_not_resurrected_by_an_expired_lock(scene: Scene) -> None:
    held = await scene.take()
    await scene.complete(held)
    for _ in range(4):
        await scene.lapse()
        swept = await scene.sweep()
        assert (list(swept.returned), list(swept.failed)) == ([], [])
        assert list(await scene.claim(10)) == []
    run = await scene.get(held.run.run_id)
    assert (run.status, run.attempts, run.leased_until) == (Status.COMPLETED, 1, None)


async def test_row_28_a_full_batch_of_runs_that_nobody_knows_does_not_hide_the_rest_from_the_sweep(
    scene: Scene,
) -> None:
    await scene.store.enqueue([new_run(name="nobody_knows") for _ in range(500)])
    assert len(await scene.claim(500, functions=[("nobody_knows", None)])) == 500
    known = await scene.take()
    await scene.lapse()
    swept: set[str] = set()
    for _ in range(6):
        swept |= set((await scene.sweep(limit=100)).returned)
    assert len(swept) == 501
    assert (await scene.take_again(known.run.run_id)).run.attempts == 2


async def test_row_29_lapsed_leases_are_swept_by_any_worker_there_is(harness: Harness) -> None:
    first = await harness.open(shared=True)
    others = [Scene(await harness.open(shared=True), harness) for _ in range(3)]
    dead = Scene(first, harness)
    held = await dead.take()
    await first.close()
    await harness.pass_time(LEASE + SECOND)
    returned = [run_id for scene in others for run_id in (await scene.sweep()).returned]
    assert returned == [held.run.run_id]
    assert [run for run in await others[0].runs() if run.status == Status.RUNNING] == []
    for scene in others:
        await scene.store.close()


async def test_row_30_a_dead_run_gives_its_place_in_the_limit_back(scene: Scene) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", max_concurrency=1))
    dead = await scene.take()
    await scene.start()
    assert list(await scene.claim(5)) == []
    await scene.lapse()
    await scene.sweep()
    (again,) = await scene.claim(5)
    assert again.run.run_id == dead.run.run_id
    await scene.complete(again)
    assert len(await scene.claim(5)) == 1


async def test_row_34_a_running_run_is_not_purged_and_a_run_that_is_gone_is_lost_once(scene: Scene) -> None:
    held = await scene.take(keep=0)
    assert await scene.store.purge(scope=ALL, limit=10, older_than=0) == 0
    await scene.complete(held)
    await scene.later(SECOND)
    assert await scene.store.purge(scope=ALL, limit=10) == 1
    assert (await scene.store.append([(held.lease, gone_record())]))[0].state == "lost"
    assert (await scene.store.renew([Renewal(lease=held.lease)], lease=LEASE))[0].state == "lost"
    assert await scene.settle(held, Completed(output="1")) == "lost"
    assert list(await scene.store.inbox([held.lease])) == [None]
    await scene.take()


def gone_record() -> NewRecord:
    """A record of a run whose journal can not be read any more."""
    return NewRecord(step_id="a", kind=RecordKind.STEP, position=0, seen=-1, digest="d", result='{"value":1}')


async def test_row_35_a_run_that_kills_its_host_lands_failed_and_charges_no_neighbour(scene: Scene) -> None:
    """The store's half: the count, the isolation and the end. Killed processes are in tests/crash."""
    poison = await scene.take()
    neighbours = [await scene.take() for _ in range(3)]
    lapses = 0
    while (await scene.get(poison.run.run_id)).status != Status.FAILED:
        await scene.lapse()
        await scene.sweep(max_reclaims=3)
        lapses += 1
        await scene.claim(10)
        lonely = await scene.claim(10, alone=True)
        if poison.run.run_id not in [one.run.run_id for one in lonely]:
            for one in lonely:
                await scene.complete(one)
        for neighbour in neighbours:
            run = await scene.get(neighbour.run.run_id)
            if run.status == Status.RUNNING and run.attempts > 1:
                lease = Lease(run_id=run.run_id, tenant=None, attempts=run.attempts, mark=run.lease_owner or "")
                answer = await scene.store.settle([(lease, Completed(output="1"))])
                assert list(answer) == ["landed"]
        assert lapses < 20
    run = await scene.get(poison.run.run_id)
    assert (run.error_kind, run.reclaims) == ("reclaim_limit", 4)
    assert {(await scene.get(one.run.run_id)).status for one in neighbours} == {Status.COMPLETED}


async def test_row_37_a_worker_that_slept_alone_may_go_on_and_one_that_was_replaced_may_not(scene: Scene) -> None:
    alone = await scene.take()
    await scene.later(3 * LEASE)
    (renewed,) = await scene.store.renew([Renewal(lease=alone.lease)], lease=LEASE)
    assert renewed.state == "held"
    await scene.complete(alone)
    slept = await scene.take()
    await scene.later(3 * LEASE)
    await scene.sweep()
    other = await scene.take_again(slept.run.run_id)
    assert (await scene.store.renew([Renewal(lease=slept.lease)], lease=LEASE))[0].state == "lost"
    assert (await scene.append(slept, "a")).state == "lost"
    await scene.complete(other)


async def test_row_43_a_cancel_that_meets_a_retry_ends_cancelled_without_another_attempt(scene: Scene) -> None:
    held = await scene.take(max_attempts=5)
    await scene.append(held, "a")
    assert await scene.cancel(held.run.run_id)
    assert await scene.settle(held, Retry(after=SECOND, failure=failure())) == "woken"
    assert await scene.settle(held, Cancelled(failure=failure(kind="cancelled"))) == "landed"
    run = await scene.get(held.run.run_id)
    assert (run.status, run.failures) == (Status.CANCELLED, 0)
    await scene.take()


@pytest.mark.parametrize(
    "state", ["pending", "delayed", "back-off", "sleeping", "waiting for a signal", "waiting for a child"]
)
async def test_row_44_a_cancel_reaches_a_run_in_every_waiting_state_at_once(scene: Scene, state: str) -> None:
    if state in ("pending", "delayed"):
        run = await scene.start(delay=HOUR if state == "delayed" else None)
        assert await scene.cancel(run.run_id)
        assert (await scene.get(run.run_id)).status == Status.CANCELLED
        return
    family = await scene.with_children(1, parent={"max_attempts": 5})
    held = family.parent
    if state == "back-off":
        await scene.settle(held, Retry(after=HOUR, failure=failure()))
    elif state == "sleeping":
        assert await scene.suspend(held, until=scene.store.clock() + HOUR) == "landed"
    else:
        assert await scene.suspend(held, wake_after=int(state == "waiting for a child")) == "landed"
    assert list(await scene.claim(10)) == []
    assert await scene.cancel(held.run.run_id)
    again = await scene.take_again(held.run.run_id)
    assert (await scene.inbox(again)).cancel_requested


async def test_row_48_a_deadline_is_not_set_anew_by_a_recovery_and_children_have_it_too(scene: Scene) -> None:
    family = await scene.with_children(1, parent={"deadline_after": 3 * MINUTE})
    held = family.parent
    free = new_run(**scene.child_of(held, "free"), detached=True)
    await scene.append(held, "free", kind=RecordKind.START, children=(free,))
    deadline = held.run.deadline_at
    await scene.lapse()
    await scene.sweep()
    again = await scene.take_again(held.run.run_id)
    assert again.run.deadline_at == deadline
    assert (await scene.get(family.children[0])).deadline_at == deadline
    assert (await scene.get(free.run_id)).deadline_at is None
    await scene.hand_back(again)
    await scene.later(3 * MINUTE)
    claimed = await scene.claim(10, queues={"default": 5, "children": 5})
    assert [one.run.run_id for one in claimed] == [free.run_id]
    assert (await scene.get(held.run.run_id)).status == Status.TIMED_OUT
    assert (await scene.get(family.children[0])).status == Status.TIMED_OUT


async def test_row_63_clients_of_one_key_get_one_run_and_no_error(harness: Harness) -> None:
    scenes = [Scene(await harness.open(shared=True), harness) for _ in range(4)]
    for key in range(5):
        answers = await asyncio.gather(*(scenes[n % 4].submit(idempotency_key=f"k{key}") for n in range(64)))
        assert len({answer.run.run_id for answer in answers}) == 1
    assert len(await scenes[0].runs()) == 5
    for scene in scenes:
        await scene.store.close()


async def test_row_64_a_key_means_one_thing(scene: Scene) -> None:
    first = await scene.start(idempotency_key="k", input="1")
    other_input = await scene.submit(idempotency_key="k", input="2")
    assert (other_input.disposition, other_input.run.input) == ("existing", "1")
    with pytest.raises(Conflict):
        await scene.start(idempotency_key="k", name="other")
    assert (await scene.submit(idempotency_key="k", tenant=ACME)).disposition == "created"
    await scene.complete(await scene.take_again(first.run_id))
    await scene.later(100 * 24 * HOUR)
    assert await scene.store.purge(scope=None, limit=10) == 1
    assert (await scene.submit(idempotency_key="k", name="other")).disposition == "created"


async def test_row_66_a_debounce_that_never_ends_still_runs(scene: Scene) -> None:
    """A call every 0.4 s for 12 s, each pushing the start a second away, at most 3 s after the first of its run."""
    tenth = SECOND // 10
    inputs: list[str] = []
    starts: list[int] = []
    for tick in range(0, 121, 4):
        await scene.submit(
            coalesce_key="c", input=str(tick), delay=10 * tenth, max_delay=30 * tenth, on_coalesce="replace"
        )
        for _ in range(4):
            await scene.later(tenth)
            await scene.promote()
            for one in await scene.claim(10):
                starts.append(scene.store.clock())
                inputs.append(one.run.input)
                await scene.complete(one)
    for _ in range(30):
        await scene.later(tenth)
        await scene.promote()
        for one in await scene.claim(10):
            starts.append(scene.store.clock())
            inputs.append(one.run.input)
            await scene.complete(one)
    assert inputs[-1] == "120"
    assert len(starts) <= 5
    assert all(later - earlier <= 35 * tenth for earlier, later in pairwise(starts))


async def test_row_9_a_bad_schedule_in_the_store_is_parked_and_the_healthy_one_goes_on(scene: Scene) -> None:
    now = scene.store.clock()
    for name, cron in (("bad", "0 0 31 2 *"), ("good", "* * * * *")):
        await scene.store.put_schedule(schedule(name, cron=cron, next_fire_at=now), scope=None)
    assert await scene.store.park_schedule("bad", scope=None, reason="it never fires")
    _, due = await scene.store.due_schedules(scope=ALL, limit=10)
    assert [row.schedule_id for row in due] == ["good"]
    (bad,) = await scene.store.schedules(scope=None, schedule_ids=["bad"])
    assert bad.parked_reason == "it never fires"


async def test_row_19_the_tries_of_a_step_are_counted_on_after_a_crash(scene: Scene) -> None:
    """The store's half: the rows of the failed tries come back with the claim."""
    held = await scene.take()
    for attempt in (1, 2):
        await scene.append(held, f"step@{attempt}", kind=RecordKind.ATTEMPT)
    await scene.lapse()
    await scene.sweep()
    again = await scene.take_again(held.run.run_id)
    assert [record.step_id for record in again.history] == ["step@1", "step@2"]


async def test_row_18_an_id_that_is_not_there_is_not_found_whatever_it_looks_like(scene: Scene) -> None:
    await scene.start()
    for odd in ("", " ", "%", "a/b", "a" * 10_000, "' OR 1=1 --"):
        assert list(await scene.store.get([odd], scope=ALL)) == [None]
        with pytest.raises(NotFound):
            await scene.store.history(odd, scope=ALL)
        assert not await scene.cancel(odd)
