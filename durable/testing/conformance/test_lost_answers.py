"""Lost answers (rules 6, 8, 20, 32, 42): every write of the protocol, applied but unanswered and repeated, or not applied at all.

Applied, answer lost, repeated: the repetition makes no second effect. Not applied: nothing has changed, and the repetition works.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from durable.errors import StoreUnavailable
from durable.model import (
    ALL,
    Cancelled,
    Completed,
    Dependency,
    Failed,
    Firing,
    ForwardIncomplete,
    HandedBack,
    NewRecord,
    NewSignal,
    Outcome,
    QueueRecord,
    RecordKind,
    Renewal,
    Retry,
    TimedOut,
    WorkerRecord,
    new_run_id,
)
from durable.protocol import Mailbox, RunStore, Scheduler, StepJournal, Upkeep
from durable.settings import DAY, HOUR, MINUTE, SECOND

from .harness import FaultyStore
from .scenario import ACME, FAMILY, LEASE, Scene, failure, new_run, rule, schedule

Call = Callable[[Any], Awaitable[Any]]
Prepare = Callable[[Scene], Awaitable[Call]]
WRITES: dict[str, Prepare] = {}


def write(name: str) -> Callable[[Prepare], Prepare]:
    """Name a write: the function prepares the rows and returns the call that is made, lost and repeated."""

    def note(prepare: Prepare) -> Prepare:
        WRITES[name] = prepare
        return prepare

    return note


def settling(name: str, outcome: Outcome) -> None:
    """A settle with one outcome."""

    async def prepare(scene: Scene) -> Call:
        held = await scene.take(max_attempts=3)
        await scene.append(held, "a")
        return lambda store: store.settle([(held.lease, outcome)])

    WRITES[f"settle {name}"] = prepare


settling("completed", Completed(output="1"))
settling("failed", Failed(failure=failure()))
settling("cancelled", Cancelled(failure=failure()))
settling("timed out", TimedOut(failure=failure()))
settling("forward incomplete", ForwardIncomplete(failure=failure()))
settling("retry", Retry(after=MINUTE, failure=failure(positions=(0,))))
settling("handed back", HandedBack())
settling("mismatch", HandedBack(after=MINUTE, failure=failure(kind="non_determinism")))


@write("settle suspended")
async def _suspend(scene: Scene) -> Call:
    held = await scene.take()
    rest = await scene.rest(held, until=scene.store.clock() + HOUR)
    return lambda store: store.settle([(held.lease, rest)])


@write("settle a child and its suspending parent")
async def _settle_family(scene: Scene) -> Call:
    family = await scene.with_children(2)
    rest = await scene.rest(family.parent, wake_after=2)
    assert await scene.settle(family.parent, rest) == "landed"
    claimed = await scene.claim(2, queues={"children": 2})
    return lambda store: store.settle([(one.lease, Completed(output="1")) for one in claimed])


@write("settle a node of a graph")
async def _settle_node(scene: Scene) -> Call:
    first = new_run()
    behind = [new_run(depends_on=(Dependency(run_id=first.run_id),)) for _ in range(2)]
    await scene.store.enqueue([first, *behind])
    held = await scene.take_again(first.run_id)
    return lambda store: store.settle([(held.lease, Completed(output="1"))])


@write("settle the head of a sequence")
async def _settle_head(scene: Scene) -> Call:
    held = await scene.take(sequence_key="s")
    await scene.store.enqueue([new_run(sequence_key="s") for _ in range(2)])
    return lambda store: store.settle([(held.lease, Completed(output="1"))])


@write("settle a holder of a permit")
async def _settle_permit(scene: Scene) -> Call:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", max_concurrency=1))
    held = await scene.take()
    await scene.store.enqueue([new_run() for _ in range(3)])
    await scene.claim(3)
    return lambda store: store.settle([(held.lease, Completed(output="1"))])


@write("settle a scheduled run")
async def _settle_scheduled(scene: Scene) -> Call:
    now = scene.store.clock()
    await scene.store.put_schedule(schedule(next_fire_at=now), scope=None)
    run = new_run(schedule_id="nightly", scheduled_for=now)
    await scene.store.fire(
        Firing(schedule_id="nightly", tenant=None, expected=now, next_fire_at=now + HOUR, runs=(run,))
    )
    held = await scene.take_again(run.run_id)
    return lambda store: store.settle([(held.lease, Failed(failure=failure()))])


@write("enqueue one")
async def _enqueue(scene: Scene) -> Call:
    run = new_run()
    return lambda store: store.enqueue([run])


@write("enqueue many")
async def _enqueue_many(scene: Scene) -> Call:
    runs = [new_run(priority=n) for n in range(5)]
    return lambda store: store.enqueue(runs)


@write("enqueue with a key")
async def _enqueue_key(scene: Scene) -> Call:
    run = new_run(idempotency_key="i", sequence_key="s")
    return lambda store: store.enqueue([run])


@write("enqueue a joiner")
async def _enqueue_join(scene: Scene) -> Call:
    await scene.start(coalesce_key="c", delay=HOUR)
    run = new_run(coalesce_key="c", idempotency_key="j", delay=MINUTE, priority=3, input="2", on_coalesce="replace")
    return lambda store: store.enqueue([run])


@write("enqueue a graph")
async def _enqueue_graph(scene: Scene) -> Call:
    first = new_run()
    runs = [first, new_run(depends_on=(Dependency(run_id=first.run_id),))]
    return lambda store: store.enqueue(runs)


@write("claim")
async def _claim(scene: Scene) -> Call:
    await scene.store.enqueue([new_run() for _ in range(5)])
    request = scene.request(2)
    return lambda store: store.claim(request)


@write("claim that lands")
async def _claim_landing(scene: Scene) -> Call:
    await scene.store.enqueue([new_run(deadline_after=SECOND) for _ in range(2)])
    await scene.later(2 * SECOND)
    request = scene.request(2)
    return lambda store: store.claim(request)


@write("renew")
async def _renew(scene: Scene) -> Call:
    held = await scene.take()
    return lambda store: store.renew([Renewal(lease=held.lease, progress='"half"')], lease=LEASE)


@write("append")
async def _append(scene: Scene) -> Call:
    held = await scene.take()
    record = await scene.record(held.run.run_id, "a", progress="1")
    return lambda store: store.append([(held.lease, record)])


@write("append many")
async def _append_many(scene: Scene) -> Call:
    held = [await scene.take() for _ in range(3)]
    records = [(one.lease, await scene.record(one.run.run_id, "a")) for one in held]
    return lambda store: store.append(records)


@write("append children")
async def _append_children(scene: Scene) -> Call:
    held = await scene.take()
    children = tuple(new_run(**scene.child_of(held, f"map/{n}")) for n in range(3))
    record = await scene.record(held.run.run_id, "map", kind=RecordKind.START, children=children)
    return lambda store: store.append([(held.lease, record)])


@write("append a pivot")
async def _append_pivot(scene: Scene) -> Call:
    held = await scene.take()
    record = await scene.record(held.run.run_id, ":pivot", kind=RecordKind.PIVOT)
    return lambda store: store.append([(held.lease, record)])


@write("append a compensation")
async def _append_compensation(scene: Scene) -> Call:
    held = await scene.take()
    record = await scene.record(held.run.run_id, "c", kind=RecordKind.COMPENSATION)
    return lambda store: store.append([(held.lease, record)])


@write("append the taking of a signal")
async def _append_signal(scene: Scene) -> Call:
    held = await scene.take()
    seq = await scene.send(held.run.run_id)
    record = await scene.record(held.run.run_id, "wait", kind=RecordKind.SIGNAL, signal_seq=seq)
    return lambda store: store.append([(held.lease, record)])


@write("append an attempt")
async def _append_attempt(scene: Scene) -> Call:
    held = await scene.take()
    record = await scene.record(held.run.run_id, "a@1", kind=RecordKind.ATTEMPT)
    return lambda store: store.append([(held.lease, record)])


@write("send")
async def _send(scene: Scene) -> Call:
    held = await scene.take()
    await scene.suspend(held)
    signal = NewSignal(run_id=held.run.run_id, name="go", payload="1", dedup_id=new_run_id())
    return lambda store: store.send(signal, scope=ALL)


@write("cancel before the first claim")
async def _cancel_fresh(scene: Scene) -> Call:
    run = await scene.start()
    return lambda store: store.request_cancel([run.run_id], scope=ALL)


@write("retry")
async def _retry(scene: Scene) -> Call:
    held = await scene.take(max_attempts=2)
    await scene.append(held, "a")
    await scene.fail(held, positions=(0,))
    return lambda store: store.retry(held.run.run_id, scope=ALL, attempts=1, extra_attempts=3)


@write("fork")
async def _fork(scene: Scene) -> Call:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.append(held, "b")
    await scene.complete(held)
    forked = new_run_id()
    return lambda store: store.fork(held.run.run_id, scope=ALL, new_run_id=forked, from_step="b")


@write("put schedule")
async def _put_schedule(scene: Scene) -> Call:
    spec = schedule(next_fire_at=scene.store.clock() + HOUR)
    return lambda store: store.put_schedule(spec, scope=None)


@write("change schedule")
async def _change_schedule(scene: Scene) -> Call:
    await scene.store.put_schedule(schedule(next_fire_at=scene.store.clock() + HOUR), scope=None)
    spec = schedule(cron="5 5 * * *", input="2", next_fire_at=scene.store.clock() + DAY)
    return lambda store: store.put_schedule(spec, scope=None)


@write("pause schedule")
async def _pause_schedule(scene: Scene) -> Call:
    await scene.store.put_schedule(schedule(), scope=None)
    return lambda store: store.pause_schedule("nightly", scope=None, paused=True)


@write("park schedule")
async def _park_schedule(scene: Scene) -> Call:
    await scene.store.put_schedule(schedule(), scope=None)
    return lambda store: store.park_schedule("nightly", scope=None, reason="unreadable")


@write("remove schedule")
async def _remove_schedule(scene: Scene) -> Call:
    await scene.store.put_schedule(schedule(), scope=None)
    return lambda store: store.remove_schedule("nightly", scope=None)


@write("fire")
async def _fire(scene: Scene) -> Call:
    now = scene.store.clock()
    await scene.store.put_schedule(schedule(next_fire_at=now), scope=None)
    firing = Firing(
        schedule_id="nightly",
        tenant=None,
        expected=now,
        next_fire_at=now + HOUR,
        runs=(new_run(schedule_id="nightly", scheduled_for=now),),
    )
    return lambda store: store.fire(firing)


@write("promote")
async def _promote(scene: Scene) -> Call:
    await scene.store.enqueue([new_run(delay=SECOND) for _ in range(3)])
    await scene.later(2 * SECOND)
    return lambda store: store.promote(scope=ALL, limit=10)


@write("sweep")
async def _sweep(scene: Scene) -> Call:
    for _ in range(3):
        await scene.take()
    await scene.lapse()
    return lambda store: store.sweep(scope=ALL, limit=10, max_reclaims=5)


@write("sweep that lands")
async def _sweep_landing(scene: Scene) -> Call:
    await scene.take()
    await scene.lapse()
    return lambda store: store.sweep(scope=ALL, limit=10, max_reclaims=0)


@write("mend")
async def _mend(scene: Scene) -> Call:
    family = await scene.with_children(3)
    await scene.fail(family.parent)
    return lambda store: store.mend(scope=ALL, limit=10)


@write("purge")
async def _purge(scene: Scene) -> Call:
    for _ in range(3):
        held = await scene.take(keep=0)
        await scene.append(held, "a")
        await scene.complete(held)
    await scene.later(SECOND)
    return lambda store: store.purge(scope=ALL, limit=10)


@write("register")
async def _register(scene: Scene) -> Call:
    worker = WorkerRecord(
        worker_id="w",
        tenant=None,
        bound=False,
        host="here",
        pid=1,
        queues={"default": 1},
        functions=[("work", None)],
        family=FAMILY,
        settings="{}",
    )
    return lambda store: store.register(worker)


@write("unregister")
async def _unregister(scene: Scene) -> Call:
    await (await _register(scene))(scene.store)
    return lambda store: store.unregister("w")


@write("set queue")
async def _set_queue(scene: Scene) -> Call:
    queue = QueueRecord(scope_name="queue:default", max_concurrency=3)
    return lambda store: store.set_queue(queue)


@write("erase")
async def _erase(scene: Scene) -> Call:
    held = await scene.take(tenant=ACME, idempotency_key="i")
    await scene.append(held, "a")
    await scene.complete(held)
    await scene.store.put_schedule(schedule(), scope=ACME)
    return lambda store: store.erase(ACME, limit=100)


READS = {
    "get", "find", "count", "children", "pulse", "history", "schedules", "due_schedules", "signals", "inbox", "stats", "workers", "queues",
    "tenants", "explain", "audit",
}  # fmt: skip


@rule(42)
def test_every_method_of_the_protocol_that_writes_is_among_them() -> None:
    """A method that is added must be named here, as a write or as a read. `transaction` has a test of its own below."""
    protocols = (RunStore, StepJournal, Scheduler, Mailbox, Upkeep)
    methods = {name for protocol in protocols for name in vars(protocol) if not name.startswith("_")}
    called = set(re.findall(r"lambda store: store\.(\w+)\(", inspect.getsource(sys.modules[__name__])))
    assert called == methods - READS - {"transaction"}


every_write = pytest.mark.parametrize("prepare", WRITES.values(), ids=[name.replace(" ", "_") for name in WRITES])

STAMPS = (
    "updated_at",
    "leased_until",
    "seen_at",
    "started_at",
    "created_at",
    "finished_at",
    "purge_at",
    "available_at",
    "at",
)


async def state(scene: Scene) -> Any:
    """All that can be seen, without the stamps: on a server's clock they move on between two repetitions."""
    return without_stamps(await scene.everything())


def without_stamps(value: Any) -> Any:
    """Instants become "set" or None."""
    if isinstance(value, dict):
        fields: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return {key: (inner is not None) if key in STAMPS else without_stamps(inner) for key, inner in fields.items()}
    if isinstance(value, list):
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        return [without_stamps(inner) for inner in items]
    return value


@rule(42)
@every_write
async def test_a_write_whose_answer_was_lost_can_be_repeated_and_makes_no_second_effect(
    scene: Scene, faulty: FaultyStore, prepare: Prepare
) -> None:
    call = await prepare(scene)
    before = await scene.everything()
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await call(faulty)
    assert await scene.everything() != before, "the call had no effect: the test shows nothing"
    once = await state(scene)
    await call(faulty)
    assert await state(scene) == once


@rule(42)
@every_write
async def test_a_write_that_was_not_applied_has_changed_nothing_and_works_when_repeated(
    scene: Scene, faulty: FaultyStore, prepare: Prepare
) -> None:
    call = await prepare(scene)
    before = await scene.everything()
    faulty.fail_next("before")
    with pytest.raises(StoreUnavailable):
        await call(faulty)
    assert await scene.everything() == before
    await call(faulty)
    assert await scene.everything() != before


@rule(6)
@pytest.mark.parametrize("name", [name for name in WRITES if name.startswith("settle")])
async def test_a_settle_whose_answer_was_lost_is_answered_landed_when_repeated(
    scene: Scene, faulty: FaultyStore, name: str
) -> None:
    call = await WRITES[name](scene)
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await call(faulty)
    assert set(await call(faulty)) == {"landed"}


@rule(20)
@pytest.mark.parametrize("name", [name for name in WRITES if name.startswith("append")])
async def test_an_append_whose_answer_was_lost_is_answered_with_its_own_record(
    scene: Scene, faulty: FaultyStore, name: str
) -> None:
    call = await WRITES[name](scene)
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await call(faulty)
    for answer in await call(faulty):
        assert answer.state == "recorded"
        assert answer.record.fence == 1


@rule(8)
async def test_a_claim_whose_answer_was_lost_is_answered_with_what_it_holds(scene: Scene, faulty: FaultyStore) -> None:
    await scene.store.enqueue([new_run() for _ in range(5)])
    request = scene.request(3)
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await faulty.claim(request)
    claimed = await faulty.claim(request)
    assert [one.lease.attempts for one in claimed] == [1, 1, 1]
    for one in claimed:
        assert (await scene.append(one, "a")).state == "appended"


@rule(8)
async def test_a_claim_of_a_run_with_records_that_was_lost_hands_out_the_journal_again(
    scene: Scene, faulty: FaultyStore
) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.hand_back(held)
    request = scene.request()
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await faulty.claim(request)
    (claimed,) = await faulty.claim(request)
    assert [record.step_id for record in claimed.history] == ["a"]


@rule(26)
async def test_a_transaction_whose_answer_was_lost_counts_once(shared_scene: Scene) -> None:
    scene = shared_scene
    held = await scene.take()
    faulty = FaultyStore(scene.store)

    async def work(native: Any) -> NewRecord:
        await scene.harness.write_row(native, "paid")
        return NewRecord(step_id="pay", kind=RecordKind.STEP, position=0, seen=-1, digest="d", result='{"value":1}')

    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await faulty.transaction(held.lease, work, timeout=5 * SECOND)
    again = await faulty.transaction(held.lease, work, timeout=5 * SECOND)
    assert again.state == "recorded"
    assert await scene.harness.rows() == ["paid"]


@rule(43)
async def test_an_ask_whose_answer_was_lost_is_asked_again_without_harm(scene: Scene, faulty: FaultyStore) -> None:
    held = await scene.take()
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await faulty.request_cancel([held.run.run_id], scope=ALL)
    stamp = (await scene.get(held.run.run_id)).cancel_requested_at
    assert list(await faulty.request_cancel([held.run.run_id], scope=ALL)) == [True]
    assert (await scene.get(held.run.run_id)).cancel_requested_at == stamp


@rule(32)
async def test_a_send_whose_answer_was_lost_is_answered_with_the_first_seq(scene: Scene, faulty: FaultyStore) -> None:
    held = await scene.take()
    signal = NewSignal(run_id=held.run.run_id, name="go", payload="1", dedup_id="d")
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await faulty.send(signal, scope=ALL)
    seq = await faulty.send(signal, scope=ALL)
    assert [found.seq for found in (await scene.inbox(held)).signals] == [seq]


@rule(53)
async def test_a_firing_whose_answer_was_lost_fires_once(scene: Scene, faulty: FaultyStore) -> None:
    call = await WRITES["fire"](scene)
    faulty.fail_next("after")
    with pytest.raises(StoreUnavailable):
        await call(faulty)
    assert await call(faulty) is None
    assert len(await scene.runs()) == 1
