"""Tenants (rules 34, 57 to 59): with a tenant no method sees, counts or changes a row of another one, nor with none a tagged row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from durable.errors import NotFound
from durable.model import (
    ALL,
    Firing,
    NewSignal,
    QueueRecord,
    RunQuery,
    Scope,
    Status,
    tenant_id,
)
from durable.settings import DAY, HOUR, MINUTE, SECOND

from .scenario import ACME, BETA, Scene, new_run, rule, schedule


async def belongings(scene: Scene) -> dict[str, str]:
    """Everything that a tenant can own, in every state; all due for every chore. The ids by kind."""
    now = scene.store.clock()
    ids: dict[str, str] = {}
    for kind in ("pending", "running", "suspended", "completed", "failed"):
        run = await scene.start(tenant=ACME, queue=kind, keep=SECOND, idempotency_key=kind)
        ids[kind] = run.run_id
        if kind != "pending":
            held = await scene.take_again(run.run_id)
            await scene.append(held, "a")
            if kind == "suspended":
                await scene.suspend(held, until=now + SECOND)
            elif kind == "completed":
                await scene.complete(held)
            elif kind == "failed":
                await scene.fail(held)
    ids["delayed"] = (await scene.start(tenant=ACME, queue="delayed", delay=SECOND)).run_id
    await scene.store.put_schedule(schedule(next_fire_at=now + SECOND), scope=ACME)
    await scene.lapse()
    return ids


async def get(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list(await scene.store.get(list(ids.values()), scope=scope)) == [None] * len(ids)


async def find(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list((await scene.store.find(RunQuery(), scope=scope)).runs) == []


async def count(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert await scene.store.count(RunQuery(), scope=scope) == 0


async def pulse(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list(await scene.store.pulse(list(ids.values()), scope=scope)) == [None] * len(ids)


async def children(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list(await scene.store.children(ids["running"], scope=scope)) == []


async def history(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    with pytest.raises(NotFound):
        await scene.store.history(ids["running"], scope=scope)


async def explain(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    with pytest.raises(NotFound):
        await scene.store.explain(ids["pending"], scope=scope)


async def claim(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list(await scene.claim(10, queues=dict.fromkeys(ids, 5), scope=scope, alone=True)) == []


async def request_cancel(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list(await scene.store.request_cancel(list(ids.values()), scope=scope)) == [False] * len(ids)


async def retry(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    with pytest.raises(NotFound):
        await scene.store.retry(ids["failed"], scope=scope, attempts=1)


async def fork(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    with pytest.raises(NotFound):
        await scene.store.fork(ids["completed"], scope=scope, new_run_id="forked", from_step=0)


async def send(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    with pytest.raises(NotFound):
        await scene.store.send(NewSignal(run_id=ids["suspended"], name="go", payload="1", dedup_id="d"), scope=scope)


async def promote(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    promoted = await scene.store.promote(scope=scope, limit=100)
    assert (promoted.count, promoted.queues, promoted.next_due) == (0, frozenset(), None)


async def sweep(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    swept = await scene.store.sweep(scope=scope, limit=100, max_reclaims=0)
    assert (list(swept.returned), list(swept.failed)) == ([], [])


async def mend(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert await scene.store.mend(scope=scope, limit=100) == 0


async def purge(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert await scene.store.purge(scope=scope, limit=100) == 0
    assert await scene.store.purge(scope=scope, limit=100, older_than=0) == 0


async def stats(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert [row for row in await scene.store.stats(scope=scope) if row.ready + row.running + row.suspended] == []


async def audit(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list(await scene.store.audit(scope=scope)) == []


async def schedules(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list(await scene.store.schedules(scope=scope)) == []
    assert list(await scene.store.schedules(scope=scope, schedule_ids=["nightly"])) == []


async def due_schedules(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert list((await scene.store.due_schedules(scope=scope, limit=10))[1]) == []


async def pause_schedule(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert not await scene.store.pause_schedule("nightly", scope=scope, paused=True)


async def park_schedule(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert not await scene.store.park_schedule("nightly", scope=scope, reason="x")


async def remove_schedule(scene: Scene, scope: Scope, ids: dict[str, str]) -> None:
    assert not await scene.store.remove_schedule("nightly", scope=scope)


METHODS: list[Callable[[Scene, Scope, dict[str, str]], Awaitable[None]]] = [
    get,
    find,
    count,
    pulse,
    children,
    history,
    explain,
    claim,
    request_cancel,
    retry,
    fork,
    send,
    promote,
    sweep,
    mend,
    purge,
    stats,
    audit,
    schedules,
    due_schedules,
    pause_schedule,
    park_schedule,
    remove_schedule,
]


@rule(57)
@pytest.mark.parametrize("scope", [BETA, None], ids=["another_tenant", "untagged"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
async def test_a_bound_scope_sees_counts_changes_and_waits_on_its_own_rows_only(
    scene: Scene, method: Any, scope: Scope
) -> None:
    ids = await belongings(scene)
    before = await scene.everything()
    await method(scene, scope, ids)
    assert await scene.everything() == before


@rule(57)
async def test_a_scope_of_the_tenant_itself_reaches_everything_of_it(scene: Scene) -> None:
    """Otherwise the tests above would pass for a store that shows nothing to anybody."""
    ids = await belongings(scene)
    assert [run is not None for run in await scene.store.get(list(ids.values()), scope=ACME)] == [True] * len(ids)
    assert await scene.store.count(RunQuery(), scope=ACME) == len(ids)
    assert len(await scene.store.history(ids["running"], scope=ACME)) == 1
    assert (await scene.store.explain(ids["pending"], scope=ACME)).reasons
    assert len((await scene.store.sweep(scope=ACME, limit=10, max_reclaims=5)).returned) == 1
    assert (await scene.store.promote(scope=ACME, limit=10)).count == 2
    assert len((await scene.store.due_schedules(scope=ACME, limit=10))[1]) == 1
    assert list(await scene.store.request_cancel([ids["pending"]], scope=ACME)) == [True]
    assert (await scene.store.retry(ids["failed"], scope=ACME, attempts=1)).status == Status.PENDING
    assert await scene.store.purge(scope=ACME, limit=10) == 1


@rule(57)
async def test_an_unbound_scope_reaches_all_tenants(scene: Scene) -> None:
    await scene.store.enqueue([new_run(tenant=tenant) for tenant in (None, ACME, BETA)])
    assert len(await scene.claim(10, scope=ALL)) == 3


@rule(58)
async def test_a_run_claimed_unbound_is_executed_recorded_and_settled_under_its_own_tenant(scene: Scene) -> None:
    await scene.start(tenant=ACME)
    (held,) = await scene.claim(scope=ALL)
    assert (held.lease.tenant, held.run.tenant) == (ACME, ACME)
    await scene.append(held, "a")
    await scene.complete(held)
    assert (await scene.get(held.run.run_id, scope=ACME)).status == Status.COMPLETED
    assert len(await scene.history(held.run.run_id, scope=ACME)) == 1


@rule(57)
async def test_a_tenants_id_is_a_uuid_that_any_name_gives(scene: Scene) -> None:
    assert tenant_id("acme") == tenant_id("acme") == ACME
    assert tenant_id("acme") != tenant_id("Acme")
    run = await scene.start(tenant=tenant_id("Ünïcode & co."))
    assert (await scene.get(run.run_id)).tenant == tenant_id("Ünïcode & co.")
    with pytest.raises(ValueError, match="name"):
        tenant_id("")


@rule(34, 57)
async def test_the_sequences_and_limits_of_one_tenant_do_not_hold_up_another(scene: Scene) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="key:default", max_concurrency=1))
    for tenant in (ACME, BETA):
        await scene.start(tenant=tenant, sequence_key="s", concurrency_key="k")
        await scene.start(tenant=tenant, sequence_key="s")
    claimed = await scene.claim(10)
    assert sorted(str(one.run.tenant) for one in claimed) == sorted([str(ACME), str(BETA)])


@rule(57)
async def test_a_firing_reaches_the_schedule_of_its_tenant_only(scene: Scene) -> None:
    now = scene.store.clock()
    await scene.store.put_schedule(schedule(next_fire_at=now), scope=ACME)
    foreign = Firing(
        schedule_id="nightly",
        tenant=BETA,
        expected=now,
        next_fire_at=now + DAY,
        runs=(new_run(schedule_id="nightly", scheduled_for=now, tenant=BETA),),
    )
    assert await scene.store.fire(foreign) is None
    assert await scene.runs() == []
    (row,) = await scene.store.schedules(scope=ACME)
    assert row.next_fire_at == now


@rule(57)
async def test_what_is_foreign_is_answered_as_what_is_unknown(scene: Scene) -> None:
    run = await scene.start(tenant=ACME)
    texts: list[str] = []
    for run_id in (run.run_id, new_run().run_id):
        with pytest.raises(NotFound) as caught:
            await scene.store.history(run_id, scope=BETA)
        texts.append(str(caught.value).replace(run_id, "RUN"))
    assert texts[0] == texts[1]


@rule(59)
async def test_none_is_the_untagged_rows_and_never_all_of_them(scene: Scene) -> None:
    await scene.store.enqueue([new_run(tenant=ACME), new_run(tenant=None)])
    await scene.later(MINUTE)
    assert [run.tenant for run in await scene.runs(scope=None)] == [None]
    assert [one.run.tenant for one in await scene.claim(10, scope=None)] == [None]
    assert await scene.store.purge(scope=None, limit=10, older_than=HOUR) == 0
