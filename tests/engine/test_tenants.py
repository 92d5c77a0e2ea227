"""Tenants (semantics 57-59): every public method of the client is tried across two tenants, and the other's rows stay as they are."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from engine.conftest import until

import durable
from durable import Registry
from durable.model import ALL

declared = Registry("test_tenants")
ACME, OTHER = durable.tenant_id("acme"), durable.tenant_id("other")
WORD = durable.Signal("word", str)


@durable.function(registry=declared)
async def tenant_job(ctx: durable.Context, n: int) -> str:
    if n < 0:
        raise ValueError("negative")
    return f"{ctx.tenant} {n}"


durable.function(name="tenant_job")(tenant_job.fn)  # the default registry: handles and schedules look there


async def snapshot(client: durable.Client) -> Any:
    """Everything that is stored of the other tenant."""
    store = client.store
    page = await store.find(durable.model.RunQuery(limit=1_000), scope=OTHER)
    journals = [await store.history(run.run_id, scope=OTHER) for run in page.runs]
    return (
        page.runs,
        journals,
        await store.schedules(scope=OTHER),
        [q for q in await store.queues(scope=OTHER) if q.tenant == OTHER],
    )


SCHEDULED = tenant_job.using(cron="0 0 1 1 *")
SINCE, UNTIL = datetime(2030, 1, 1, tzinfo=UTC) - timedelta(days=1), datetime(2030, 1, 2, tzinfo=UTC)

# (method, what acme's client is made to do with the other tenant's id, what must come of it)
Attempt = tuple[Callable[[durable.Client, str, str], Awaitable[Any]], Any]
ATTEMPTS: dict[str, Attempt] = {
    "get": (lambda c, live, dead: c.get(live), durable.NotFound),
    "journal": (lambda c, live, dead: c.journal(live), durable.NotFound),
    "explain": (lambda c, live, dead: c.explain(live), durable.NotFound),
    "cancel": (lambda c, live, dead: c.cancel(live), False),
    "retry": (lambda c, live, dead: c.retry(dead), durable.NotFound),
    "fork": (lambda c, live, dead: c.fork(dead, from_step=0), durable.NotFound),
    "signal": (lambda c, live, dead: c.signal(live, WORD, "x"), durable.NotFound),
    "runs": (lambda c, live, dead: _ids(c), []),
    "count": (lambda c, live, dead: c.count(), 0),
    "retry_all": (lambda c, live, dead: c.retry_all(status="failed"), 0),
    "purge": (lambda c, live, dead: c.purge(older_than=0), 0),
    "workers": (lambda c, live, dead: _bound_workers(c), []),
    "audit": (lambda c, live, dead: _list(c.audit()), []),
    "schedules.get": (lambda c, live, dead: c.schedules.get("nightly"), durable.NotFound),
    "schedules.all": (lambda c, live, dead: _list(c.schedules.all()), []),
    "schedules.pause": (lambda c, live, dead: c.schedules.pause("nightly"), False),
    "schedules.resume": (lambda c, live, dead: c.schedules.resume("nightly"), False),
    "schedules.remove": (lambda c, live, dead: c.schedules.remove("nightly"), False),
    "schedules.next": (lambda c, live, dead: c.schedules.next("nightly"), durable.NotFound),
    "schedules.trigger": (lambda c, live, dead: c.schedules.trigger("nightly"), durable.NotFound),
    "schedules.backfill": (
        lambda c, live, dead: c.schedules.backfill("nightly", since=SINCE, until=UNTIL),
        durable.NotFound,
    ),
    "queues.stats": (lambda c, live, dead: _list(c.queues.stats()), []),
    "queues.all": (lambda c, live, dead: _others(c), []),
    # These make rows of acme's own; the other's must stay as they are.
    "start": (
        lambda c, live, dead: _made(c.start(tenant_job.using(idempotency_key="k", coalesce_key="c"), 5)),
        "created",
    ),
    "start_many": (lambda c, live, dead: _count(c.start_many(tenant_job, [1, 2])), 2),
    "schedules.put": (lambda c, live, dead: _done(c.schedules.put("nightly", SCHEDULED, 9)), None),
    "queues.pause": (lambda c, live, dead: c.queues.pause("default"), None),
    "queues.limit": (lambda c, live, dead: c.queues.limit("default", max_concurrency=3), None),
    "wake": (lambda c, live, dead: c.wake(), None),
}
ELSEWHERE = {
    "all_tenants": "the only unbound handle: test_all_tenants_sees_everybody_and_starts_nothing",
    "using": "test_a_missing_tenant_never_widens_a_filter",
    "run": "start, then the result of that run: test_a_bound_worker_takes_only_its_tenants_runs",
    "approve": "a signal: test_open_approvals_are_listed_for_each_tenant",
    "approvals": "test_open_approvals_are_listed_for_each_tenant",
    "migrate": "the tables are everybody's",
    "schema_status": "the tables are everybody's",
    "check": "the store itself",
    "queues.resume": "as queues.pause",
    "store": "not a method",
    "scope": "not a method",
    "serves": "not a method",
    "settings": "not a method",
    "codec": "not a method",
    "events": "not a method",
    "schedules": "its methods are tried one by one",
    "queues": "its methods are tried one by one",
}


async def _ids(client: durable.Client) -> list[str]:
    return [run.id async for run in client.runs(limit=None)]


async def _list(answer: Awaitable[Any]) -> list[Any]:
    return list(await answer)


async def _bound_workers(client: durable.Client) -> list[Any]:
    return [worker for worker in await client.workers() if worker.tenant == OTHER]


async def _others(client: durable.Client) -> list[Any]:
    return [queue for queue in await client.queues.all() if queue.tenant == OTHER]


async def _made(answer: Awaitable[Any]) -> Any:
    return (await answer).disposition


async def _count(answer: Awaitable[Any]) -> int:
    return len(await answer)


async def _done(answer: Awaitable[Any]) -> None:
    await answer


async def _populated(client: durable.Client) -> tuple[str, str]:
    """A live and a failed run of the other tenant, with keys, a schedule and a queue row."""
    other = client.using(tenant=OTHER)
    dead = await other.start(tenant_job.using(queue="once"), -1)
    async with durable.Worker(other, functions=declared, queues=["once"], grace="2s"):
        with pytest.raises(durable.RunFailed):
            await dead.result()
    live = await other.start(tenant_job.using(idempotency_key="k", coalesce_key="c"), 1)
    await other.signal(live.id, WORD, "kept")
    await other.schedules.put("nightly", SCHEDULED, 1)
    await other.queues.limit("default", max_concurrency=7)
    return live.id, dead.id


def test_every_public_method_is_tried_or_stands_elsewhere() -> None:
    names = {name for name, _ in inspect.getmembers(durable.Client) if not name.startswith("_")}
    for prefix, face in (("schedules", durable.faces.Schedules), ("queues", durable.faces.Queues)):
        names |= {f"{prefix}.{name}" for name, _ in inspect.getmembers(face) if not name.startswith("_")}
    assert names == set(ATTEMPTS) | set(ELSEWHERE)


@pytest.mark.parametrize("method", sorted(ATTEMPTS))
async def test_another_tenants_id_is_the_same_as_an_unknown_one_and_its_rows_stay(
    client: durable.Client, method: str
) -> None:
    live, dead = await _populated(client)
    before = await snapshot(client)
    attempt, expected = ATTEMPTS[method]
    acme = client.using(tenant=ACME)
    if isinstance(expected, type):
        with pytest.raises(expected):
            await attempt(acme, live, dead)
    else:
        assert await attempt(acme, live, dead) == expected
    if method not in ("schedules.put", "start", "start_many"):
        untagged = attempt(client, live, dead)
        try:
            await untagged
        except durable.DurableError:
            pass  # the same as for acme: the untagged client is bound, too
    assert await snapshot(client) == before


async def test_waiting_for_another_tenants_run_is_not_found(client: durable.Client) -> None:
    other = await client.using(tenant=OTHER).start(tenant_job, 1)
    with pytest.raises(durable.NotFound):
        await client.using(tenant=ACME)._landed(other.id)


@pytest.mark.parametrize("missing", [None, "", "acme", 7, uuid.UUID])
async def test_a_missing_tenant_never_widens_a_filter(client: durable.Client, missing: Any) -> None:
    with pytest.raises(durable.ConfigurationError):
        client.using(tenant=missing)


async def test_all_tenants_sees_everybody_and_starts_nothing(client: durable.Client) -> None:
    for tenant in (ACME, OTHER):
        await client.using(tenant=str(tenant)).start(tenant_job, 1)
    await client.start(tenant_job, 1)
    everybody = client.all_tenants()
    assert {run.tenant async for run in everybody.runs()} == {ACME, OTHER, None}
    assert (await everybody.count(), await client.count()) == (3, 1)
    with pytest.raises(durable.Misuse):
        await everybody.start(tenant_job, 1)
    assert everybody.scope is ALL


async def test_a_bound_worker_takes_only_its_tenants_runs(client: durable.Client) -> None:
    acme, other = client.using(tenant=ACME), client.using(tenant=OTHER)
    waiting = await other.start(tenant_job, 2)
    untagged = await client.start(tenant_job, 3)
    async with durable.Worker(acme, functions=declared, grace="2s"):
        assert await acme.run(tenant_job, 1) == f"{ACME} 1"
        assert (await waiting.refresh()).status == "pending"
    async with durable.Worker(client, functions=declared, grace="2s"):
        assert await waiting.result() == f"{OTHER} 2"
        assert await untagged.result() == "None 3"


async def test_the_same_key_of_two_tenants_is_two_keys(client: durable.Client) -> None:
    keyed = tenant_job.using(idempotency_key="k")
    runs = [await client.using(tenant=tenant).start(keyed, 1) for tenant in (ACME, OTHER)] + [
        await client.start(keyed, 1)
    ]
    assert len({run.id for run in runs}) == 3
    assert {run.idempotency_key for run in runs} == {"k"}


async def test_a_handle_looks_with_the_tenant_it_was_made_with(client: durable.Client) -> None:
    run = await client.using(tenant=ACME).start(tenant_job, 1)
    assert await run.cancel()
    await until(run.refresh)
    assert run.status == "cancelled"
