"""Tenants as a whole (rules 57, 58, 74): counted, paused live, handed out as lines of JSON, erased; and a tenant goes with its runs
wherever their code runs. Each on the three stores.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import pytest
from tenants.commands import ended
from tenants.rows import checksum, everything, of_tenant
from typer.testing import CliRunner

import durable
from durable.cli import app
from durable.model import TERMINAL

declared = durable.Registry("tenants_operations")
WORD = durable.Signal("word", str)
seen: list[tuple[str, uuid.UUID | None]] = []


async def note(what: str, tenant: str | None) -> None:
    seen.append((what, None if tenant is None else uuid.UUID(tenant)))


@durable.function(registry=declared)
async def small(ctx: durable.Context, n: int) -> int:
    return n


@durable.function(registry=declared)
async def told(ctx: durable.Context) -> str:
    return await ctx.wait_signal(WORD)


@durable.function(registry=declared)
def in_a_thread(ctx: durable.SyncContext) -> str | None:
    return None if ctx.tenant is None else str(ctx.tenant)


@durable.function(registry=declared)
async def everywhere(ctx: durable.Context) -> list[str | None]:
    """Where a tenant could get lost: a step, a child, a thread, a compensation, a finalizer."""
    tenant = None if ctx.tenant is None else str(ctx.tenant)
    try:
        async with ctx.saga() as saga:
            await saga.compensate(note, "compensation", tenant)
            await saga.step(note, "step", tenant)
            raise ValueError("undo it")
    except ValueError:
        pass
    finally:
        seen.append(("finalizer", ctx.tenant))
    await ctx.start(told)
    return [tenant, await ctx.run(in_a_thread)]


for one in (small, told):
    durable.function(name=one.name)(one.fn)  # the default registry: schedules look there


def worker(client: durable.Client, *queues: str) -> durable.Worker:
    return durable.Worker(client, functions=declared, queues=queues or ["default"], grace="2s", lease="10s")


async def landed(client: durable.Client) -> None:
    """Wait until every run of a client's tenant has landed."""
    async with asyncio.timeout(60):
        while [run async for run in client.runs(limit=None) if run.status not in TERMINAL]:
            await asyncio.sleep(0.05)


async def something(client: durable.Client, queue: str) -> durable.Client:
    """A tenant that has some of everything; all landed."""
    mine = client.using(tenant=uuid.uuid4())
    runs = await mine.start_many(small.using(queue=queue), [1, 2, 3])
    waiting = await mine.start(told.using(queue=queue, idempotency_key="key", tags={"a": "b"}))
    await waiting.signal(WORD, "grüße")
    async with worker(mine, queue):
        assert [await run.result(timeout="60s") for run in runs] == [1, 2, 3]
        assert await waiting.result(timeout="60s") == "grüße"
    await mine.schedules.put("nightly", small.using(cron="0 0 1 1 *", queue=queue), 7)
    await mine.queues.limit(queue, max_concurrency=2)
    return mine


async def exported(client: durable.Client, tenant: Any) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in client.tenants.export(tenant)]


@pytest.mark.timeout(180)
async def test_a_tenant_is_handed_out_whole_as_lines_of_json(client: durable.Client) -> None:
    mine, other = await something(client, "export"), await something(client, "export")
    tenant = mine.scope
    lines = await exported(client.all_tenants(), tenant)
    kinds = [line["type"] for line in lines]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "schedule": 1,
        "flow_control": 1,
        "run": 4,
        "record": 1,
        "signal": 1,
    }
    assert str(other.scope) not in json.dumps(lines)
    by_kind = {line["type"]: line for line in lines}
    assert by_kind["signal"]["payload"] == "grüße"
    assert by_kind["record"]["result"] == {"v": "grüße"}
    assert by_kind["schedule"]["schedule_id"] == "nightly"
    (run,) = [line for line in lines if line.get("idempotency_key") == "key"]
    assert (run["status"], run["output"], run["tenant"], run["tags"]) == ("completed", "grüße", str(tenant), {"a": "b"})
    assert run["finished_at"].endswith("+00:00")
    place = lines.index(run)
    assert [line["run_id"] for line in lines[place : place + 3]] == [run["run_id"]] * 3, (
        "records and signals follow their run"
    )
    assert await exported(mine, tenant) == lines, "a bound client hands out its own"
    assert await exported(client.all_tenants(), uuid.uuid4()) == []


def lasting(url: str) -> list[tuple[str, str]]:
    """All rows but the marks of claims, which MongoDB keeps for a day."""
    return [(table, row) for table, row in everything(url) if '"~claim:' not in row]


@pytest.mark.timeout(180)
async def test_an_erased_tenant_is_gone_and_every_other_row_is_as_it_was(client: durable.Client, url: str) -> None:
    await something(client, "erase")
    before = checksum(lasting(url))
    mine = await something(client, "erase")
    tenant = mine.scope
    assert isinstance(tenant, uuid.UUID)
    assert of_tenant(url, tenant)
    assert await client.all_tenants().tenants.erase(tenant) == 4 + 1 + 1
    assert of_tenant(url, tenant) == []
    assert checksum(lasting(url)) == before
    assert await mine.tenants.erase(tenant) == 0, "again is nothing"
    assert (await mine.start(told.using(idempotency_key="key"))).disposition == "created"
    with pytest.raises(durable.Conflict) as caught:
        await client.all_tenants().tenants.erase(tenant)
    assert "cancel" in caught.value.hint
    assert await mine.count() == 1


@pytest.mark.timeout(180)
async def test_a_tenant_is_paused_and_goes_on_while_workers_run(client: durable.Client) -> None:
    one, two = client.using(tenant=uuid.uuid4()), client.using(tenant=uuid.uuid4())
    operator = client.all_tenants().tenants
    assert isinstance(one.scope, uuid.UUID)
    async with worker(client, "pause"), worker(one, "pause"):
        assert await one.run(small.using(queue="pause"), 1) == 1
        holding = await one.start(told.using(queue="pause"))
        async with asyncio.timeout(60):
            while (await holding.refresh()).status == "pending":
                await asyncio.sleep(0.02)
        await operator.pause(one.scope)
        held = await one.start_many(small.using(queue="pause"), [1, 2, 3])
        await holding.signal(WORD, "x")
        for number in range(20):
            assert await two.run(small.using(queue="pause"), number) == number
        assert {(await run.refresh()).status for run in held} == {"pending"}
        assert (await operator.get(one.scope)).paused
        await operator.resume(one.scope)
        assert [await run.result(timeout="60s") for run in held] == [1, 2, 3]
        assert await holding.result(timeout="60s") == "x"
    stats = await operator.get(one.scope)
    assert (stats.paused, stats.runs, stats.schedules) == (False, {"completed": 5}, 0)
    assert [found.runs for found in await two.tenants.all()] == [{"completed": 20}]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("whose", ["a tenant's", "untagged"])
async def test_the_tenant_goes_with_a_run_into_threads_children_compensations_and_finalizers(
    client: durable.Client, whose: str
) -> None:
    mine = client if whose == "untagged" else client.using(tenant=uuid.uuid4())
    seen.clear()
    async with worker(client):  # unbound: it serves everybody
        run = await mine.start(everywhere)
        expected = None if mine.scope is None else str(mine.scope)
        assert await run.result(timeout="60s") == [expected] * 2
        for child in [one async for one in mine.runs(function="told", limit=None)]:
            await child.signal(WORD, "done")
        await landed(mine)
    assert set(seen) == {(place, mine.scope) for place in ("step", "compensation", "finalizer")}
    assert {one.tenant async for one in mine.runs(limit=None)} == {mine.scope}


@pytest.mark.timeout(180)
async def test_a_scheduled_run_belongs_to_the_tenant_of_its_schedule(client: durable.Client) -> None:
    mine = client.using(tenant=uuid.uuid4())
    await mine.schedules.put("often", small.using(cron="* * * * * *", queue="schedule"), 7)
    async with worker(client, "schedule"):
        async with asyncio.timeout(60):
            while not await mine.count(status="completed"):
                await asyncio.sleep(0.05)
        await mine.schedules.remove("often")
        await landed(mine)
    assert {run.tenant async for run in client.all_tenants().runs(queue="schedule")} == {mine.scope}
    assert await client.count(queue="schedule") == 0


@pytest.mark.timeout(180)
async def test_a_limit_of_everybody_holds_over_bound_and_unbound_workers(client: durable.Client) -> None:
    """Two slots for all tenants together; the bodies count themselves, and none ends before two have been at work at once."""
    at_once: list[int] = []
    running = 0
    both = asyncio.Event()

    @durable.function(registry=durable.Registry("counted"))
    async def counted(ctx: durable.Context) -> None:
        nonlocal running
        running += 1
        at_once.append(running)
        if running == 2:
            both.set()
        await ctx.step(both.wait)
        running -= 1

    chosen = counted.using(queue="shared")
    tenants = [client.using(tenant=uuid.uuid4()) for _ in range(3)]
    await client.all_tenants().queues.limit("shared", max_concurrency=2)
    runs = [await mine.start(chosen) for _ in range(6) for mine in tenants]
    workers = [
        durable.Worker(home, functions=[counted], queues=["shared"], grace="2s") for home in (client, tenants[0])
    ]
    async with workers[0], workers[1]:
        for run in runs:
            await run.result(timeout="60s")
    assert max(at_once) == 2
    assert len(at_once) == len(runs)
    await client.all_tenants().queues.limit("shared")
    rows = [row for row in await client.all_tenants().queues.all() if row.scope_name == "queue:shared"]
    assert [row.max_concurrency for row in rows] == [None]


async def test_a_function_that_declares_a_limit_has_it_over_all_tenants(client: durable.Client) -> None:
    @durable.function(registry=durable.Registry("limited"), max_concurrency=3)
    async def limited_by_code(ctx: durable.Context) -> None: ...

    bound = client.using(tenant=uuid.uuid4())
    for home in (client, bound):
        async with durable.Worker(home, functions=[limited_by_code], queues=["nothing"], grace="1s"):
            pass
    rows = [row for row in await client.all_tenants().queues.all() if row.scope_name == "function:limited_by_code"]
    assert {(row.tenant, row.max_concurrency) for row in rows} == {(durable.model.ALL, 3), (bound.scope, 3)}


@pytest.mark.timeout(180)
async def test_the_command_line_does_the_same(client: durable.Client, url: str) -> None:
    mine = await something(client, "cli")
    tenant = str(mine.scope)

    async def command(*words: str, code: int = 0) -> list[Any]:
        result = await asyncio.to_thread(CliRunner().invoke, app, [*words, "--url", url])
        assert ended(result) == code, result.output
        return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]

    def of(rows: list[Any]) -> Any:
        return next((row for row in rows if row.get("tenant") == tenant), None)

    row = of(await command("tenants", "list"))
    assert (row["live"], row["landed"], row["schedules"], row["paused"]) == (0, 4, 1, False)
    await command("tenants", "pause", tenant)
    assert of(await command("tenants", "list"))["paused"] is True
    await command("tenants", "resume", tenant)
    assert of(await command("tenants", "list"))["paused"] is False
    lines = await command("tenants", "export", tenant)
    assert lines == await exported(mine, mine.scope)
    limits = ("--max-concurrency", "5", "--rate", "7/1m", "--per-key", "2", "--per-tenant", "3")
    await command("queues", "limit", "cli", *limits, "--all-tenants")
    await command("queues", "fair", "cli")
    await command("queues", "pause", "cli", "--all-tenants")
    shown = await command("queues", "list", "--all-tenants")
    rules = {row["scope"]: row for row in shown if row.get("tenant") == "all" and "cli" in row["scope"]}
    assert {scope: row["max_concurrency"] for scope, row in rules.items()} == {
        "queue:cli": 5,
        "key:cli": 2,
        "share:cli": 3,
    }
    assert (rules["queue:cli"]["rate"], rules["queue:cli"]["fair"], rules["queue:cli"]["paused"]) == (
        "7/60s",
        True,
        True,
    )
    await command("queues", "resume", "cli", "--all-tenants")
    await command("queues", "limit", "cli", "--all-tenants")
    await command("queues", "fair", "cli", "--off")
    await command("queues", "limit", "cli", "--per-tenant", "3", code=2)
    await command("tenants", "erase", tenant, code=1)  # nobody says yes
    (gone,) = await command("tenants", "erase", tenant, "--yes")
    assert gone["rows"] == 7
    assert of(await command("tenants", "list")) is None
    await command("tenants", "export", "", code=2)
