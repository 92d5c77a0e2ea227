"""One program, three stores: nothing but the URL changes, and what it records and returns is the same.

The program waits, fails and is tried again, starts children, takes a signal, undoes what it did, and is started twice under one key;
the demo kills a worker in the middle of a step on each store.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import mongo, postgres

import durable

declared = durable.Registry("one_program")
GO = durable.Signal("go", dict[str, int])
SETTINGS = {"poll": "100ms", "poll_idle": "200ms", "park_after": "200ms"}
ACME = durable.tenant_id("acme")
attempts: list[str] = []
undone: list[str] = []


async def price(sku: str) -> int:
    return len(sku)


@durable.step(retry=durable.Retry(3, initial="10ms"))
def flaky(name: str) -> str:
    attempts.append(name)
    if attempts.count(name) < 3:
        raise ConnectionError("not yet")
    return name.upper()


async def undo(what: str) -> None:
    undone.append(what)


@durable.function(registry=declared)
async def child(ctx: durable.Context, number: int) -> int:
    return number * await ctx.step(price, "abc")


@durable.function(registry=declared)
async def program(ctx: durable.Context, name: str) -> dict[str, Any]:
    prices = await asyncio.gather(ctx.step(price, "tea"), ctx.step(price, "milk"))
    loud = await ctx.step(flaky, name)
    await ctx.sleep("300ms")
    mapped = await ctx.map(child, [1, 2, 3])
    told = await ctx.wait_signal(GO)
    try:
        async with ctx.saga() as saga:
            await saga.compensate(undo, name)
            await saga.step(price, "wine")
            raise ValueError("not sold")
    except ValueError as error:
        ended = str(error)
    return {"prices": prices, "loud": loud, "mapped": mapped, "told": told, "ended": ended}


@pytest.fixture(params=["sqlite", "postgresql", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that nothing has been in."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'one.db'}"
    return (postgres.server() if request.param == "postgresql" else mongo.server()).create().url


def _worker(client: durable.Client) -> durable.Worker:
    return durable.Worker(client, functions=declared, lease="5s")


@pytest.mark.timeout(180)
async def test_one_program_runs_unchanged_whatever_the_url(url: str) -> None:
    attempts.clear()
    undone.clear()
    async with durable.Client(url, settings=SETTINGS, auto_migrate=True) as plain:
        client = plain.using(tenant=ACME)
        async with _worker(plain):
            run = await client.start(program.using(idempotency_key="once"), "ann")
            again = await client.start(program.using(idempotency_key="once"), "bob")
            assert (again.id, again.disposition) == (run.id, "existing")
            await run.signal(GO, {"n": 7})
            result = await run.result(timeout="120s")
        assert result == {"prices": [3, 4], "loud": "ANN", "mapped": [3, 6, 9], "told": {"n": 7}, "ended": "not sold"}
        assert (attempts, undone) == (["ann"] * 3, ["ann"])
        with pytest.raises(durable.NotFound):
            await plain.get(run.id)
        shown = [
            (record.step_id, str(record.kind), json.loads(record.result)) for record in await client.journal(run.id)
        ]
        steps = sorted((step, result["v"]) for step, kind, result in shown if kind == "step")
        assert steps == [("flaky", "ANN"), ("price", 3), ("price#2", 4), ("price#3", 4), ("undo/1", None)]
        assert [step[0] for step in shown if step[1] == "attempt"] == ["flaky@1", "flaky@2"]
        assert (
            sorted(one.status for one in [child async for child in client.runs(function="child")]) == ["completed"] * 3
        )
        assert list(await plain.all_tenants().audit()) == []


@pytest.mark.timeout(180)
async def test_payloads_are_encrypted_on_every_store(url: str) -> None:
    """(72) The same program with a key; who looks without it finds names and states, and not one value."""
    attempts.clear()
    options: dict[str, Any] = {"settings": SETTINGS, "auto_migrate": True}
    async with durable.Client(url, encryption_key=bytes(32), **options) as plain:
        client = plain.using(tenant=ACME)
        async with _worker(plain):
            run = await client.start(program, "annabella")
            await run.signal(GO, {"n": 7})
            result = await run.result(timeout="120s")
        assert (result["loud"], result["told"]) == ("ANNABELLA", {"n": 7})
        assert "annabella" in (await client.get(run.id)).record.input
    async with durable.Client(url, **options) as plain:
        client = plain.using(tenant=ACME)
        found = await client.get(run.id)
        assert (found.status, found.function) == ("completed", "program")
        shown = [found.record.input, found.record.output or ""]
        shown += [record.result for record in await client.journal(run.id)]
        assert len(shown) > 10
        assert ["missing_key" in text for text in shown] == [True] * len(shown)
        with pytest.raises(durable.MissingKey):
            await found.result()
        assert list(await plain.all_tenants().audit()) == []


@pytest.mark.timeout(180)
def test_the_demo_proves_itself_on_every_store(url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "durable", "demo", "--json", "--url", url],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["holds"] is True
