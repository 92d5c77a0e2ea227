"""Tenants as a whole (rules 57, 32, 61): what is stored of each, all signals of a run, and erasing one."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import Conflict, NotFound
from durable.model import ALL, Dependency, Firing, HandedBack, QueueRecord, RecordKind, TenantStats
from durable.settings import HOUR

from .scenario import ACME, BETA, Scene, new_run, rule, schedule


async def settled(scene: Scene, tenant: Any) -> None:
    """Something of everything of one tenant, all landed: runs with records, signals, keys, children, edges, a schedule with a slot."""
    queue = f"of {tenant}"
    for number in range(3):
        held = await scene.take(tenant=tenant, queue=queue, idempotency_key=f"k{number}", sequence_key="s")
        await scene.append(held, "a")
        await scene.send(held.run.run_id)
        child = new_run(**{**scene.child_of(held, "child"), "queue": queue})
        await scene.append(held, "child", kind=RecordKind.START, children=(child,))
        await scene.complete(await scene.take_again(child.run_id))
        await scene.complete(held)
    first = new_run(tenant=tenant, queue=queue)
    await scene.store.enqueue(
        [first, new_run(tenant=tenant, queue=queue, depends_on=(Dependency(run_id=first.run_id),))]
    )
    for _ in range(2):
        (held,) = await scene.claim(queues={queue: 1})
        await scene.complete(held)
    now = scene.store.clock()
    await scene.store.put_schedule(schedule(next_fire_at=now, queue=queue), scope=tenant)
    run = new_run(tenant=tenant, queue=queue, schedule_id="nightly", scheduled_for=now)
    await scene.store.fire(
        Firing(schedule_id="nightly", tenant=tenant, expected=now, next_fire_at=now + HOUR, runs=(run,))
    )
    await scene.complete(await scene.take_again(run.run_id))
    await scene.store.set_queue(QueueRecord(scope_name=f"queue:{queue}", tenant=tenant, max_concurrency=3))


async def erase(scene: Scene, tenant: Any = ACME, *, limit: int = 2) -> int:
    """Erase it batch by batch; how many batches that took."""
    for batches in range(100):
        if await scene.store.erase(tenant, limit=limit) == 0:
            return batches
    raise AssertionError("it does not come to an end")


@rule(57, 61)
async def test_erasing_a_tenant_leaves_nothing_of_it_and_nothing_of_others_changed(scene: Scene) -> None:
    for tenant in (BETA, None):
        await settled(scene, tenant)
    before = await scene.everything()
    await settled(scene, ACME)
    assert await scene.everything() != before
    assert await erase(scene) > 4, "batches are bounded"
    assert await scene.everything() == before
    (stats,) = await scene.store.tenants(scope=ACME)
    assert stats == TenantStats(tenant=ACME, paused=False, runs={}, schedules=0)
    assert list(await scene.store.audit(scope=ALL)) == []


@rule(35, 62)
async def test_keys_and_slots_of_an_erased_tenant_are_free_again(scene: Scene) -> None:
    await settled(scene, ACME)
    await erase(scene, limit=100)
    assert (await scene.submit(tenant=ACME, idempotency_key="k0")).disposition == "created"
    now = scene.store.clock()
    await scene.store.put_schedule(schedule(next_fire_at=now), scope=ACME)
    run = new_run(tenant=ACME, schedule_id="nightly", scheduled_for=now)
    fired = await scene.store.fire(
        Firing(schedule_id="nightly", tenant=ACME, expected=now, next_fire_at=now + HOUR, runs=(run,))
    )
    assert fired is not None
    assert len(fired) == 1


@rule(57)
@pytest.mark.parametrize("state", ["pending", "running", "suspended", "delayed"])
async def test_a_tenant_with_a_live_run_is_not_erased_and_nothing_is_written(scene: Scene, state: str) -> None:
    await scene.store.put_schedule(schedule(next_fire_at=scene.store.clock() + HOUR), scope=ACME)
    if state in ("running", "suspended"):
        held = await scene.take(tenant=ACME)
        if state == "suspended":
            await scene.suspend(held)
    else:
        await scene.start(tenant=ACME, delay=HOUR if state == "delayed" else None)
    before = await scene.everything()
    with pytest.raises(Conflict) as caught:
        await scene.store.erase(ACME, limit=100)
    assert caught.value.hint
    assert await scene.everything() == before


@rule(57)
async def test_erasing_a_tenant_that_has_nothing_does_nothing(scene: Scene) -> None:
    await settled(scene, BETA)
    before = await scene.everything()
    assert await scene.store.erase(ACME, limit=10) == 0
    assert await scene.everything() == before


@rule(57)
async def test_tenants_are_counted_by_state(scene: Scene) -> None:
    await settled(scene, ACME)
    await scene.start(tenant=BETA, delay=HOUR)
    await scene.take(tenant=BETA)
    await scene.start(tenant=ACME)
    await scene.store.set_queue(QueueRecord(scope_name="tenant", tenant=BETA, paused=True))
    acme = TenantStats(tenant=ACME, paused=False, runs={"completed": 9, "pending": 1}, schedules=1)
    beta = TenantStats(tenant=BETA, paused=True, runs={"pending": 1, "running": 1}, schedules=0)
    assert list(await scene.store.tenants(scope=ALL)) == sorted([acme, beta], key=lambda one: str(one.tenant))
    await scene.start()
    untagged = TenantStats(tenant=None, paused=False, runs={"pending": 1}, schedules=0)
    assert (await scene.store.tenants(scope=ALL))[0] == untagged
    assert list(await scene.store.tenants(scope=BETA)) == [beta]
    assert list(await scene.store.tenants(scope=None)) == [untagged]


@rule(57)
async def test_a_tenant_of_whom_there_is_only_a_schedule_or_a_pause_is_listed(scene: Scene) -> None:
    await scene.store.put_schedule(schedule(next_fire_at=None), scope=ACME)
    await scene.store.set_queue(QueueRecord(scope_name="tenant", tenant=BETA, paused=True))
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", tenant=ALL, fair=True))
    found = {one.tenant: (one.paused, one.schedules) for one in await scene.store.tenants(scope=ALL)}
    assert found == {ACME: (False, 1), BETA: (True, 0)}


@rule(32)
async def test_every_signal_of_a_run_is_shown_taken_or_not_in_order(scene: Scene) -> None:
    held = await scene.take(tenant=ACME)
    seqs = [await scene.send(held.run.run_id, name, payload=f'"{name}"') for name in ("go", "stop", "go")]
    await scene.append(held, "wait", kind=RecordKind.SIGNAL, signal_seq=seqs[0])
    shown = await scene.store.signals(held.run.run_id, scope=ACME)
    assert [(one.name, one.seq, one.payload) for one in shown] == [
        (name, seq, f'"{name}"') for name, seq in zip(("go", "stop", "go"), seqs, strict=True)
    ]
    await scene.complete(held)
    assert len(await scene.store.signals(held.run.run_id, scope=ALL)) == 3


@rule(57)
async def test_the_signals_of_an_unknown_or_foreign_run_are_not_found(scene: Scene) -> None:
    run = await scene.start(tenant=ACME)
    for run_id, scope in ((run.run_id, BETA), (run.run_id, None), (new_run().run_id, ALL)):
        with pytest.raises(NotFound):
            await scene.store.signals(run_id, scope=scope)


@rule(3, 57)
async def test_a_holder_whose_run_was_erased_writes_nothing(scene: Scene) -> None:
    held = await scene.take(tenant=ACME)
    await scene.complete(held)
    await erase(scene)
    assert (await scene.store.append([(held.lease, await _record(scene))]))[0].state == "lost"
    assert await scene.settle(held, HandedBack()) == "lost"
    assert await scene.runs() == []


async def _record(scene: Scene) -> Any:
    other = await scene.take()
    record = await scene.record(other.run.run_id, "late")
    await scene.complete(other)
    await scene.store.purge(scope=ALL, limit=10, older_than=0)
    return record
