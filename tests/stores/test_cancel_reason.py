"""What an ask to cancel says reaches the body and the one who waits, on the three stores (semantics 43, 44)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine.conftest import until
from stores.everywhere import SETTINGS

import durable
from durable import Registry
from durable.model import Status, new_run_id

declared = Registry("test_cancel_reason")
told: list[str] = []
gate = asyncio.Event()


async def tell(what: str) -> None:
    told.append(what)


async def pass_the_gate() -> None:
    told.append("at the gate")
    await gate.wait()


@durable.function(registry=declared)
async def sleeps(ctx: durable.Context) -> None:
    await ctx.publish("begun", True)  # a run without a record is cancelled without its body (45)
    try:
        await ctx.sleep("1d")
    except asyncio.CancelledError as error:
        async with ctx.shield():
            await ctx.step(tell, str(error))
        raise


@durable.function(registry=declared)
async def works(ctx: durable.Context) -> None:
    try:
        await ctx.step(pass_the_gate)
    except asyncio.CancelledError as error:
        async with ctx.shield():
            await ctx.step(tell, str(error))
        raise


@durable.function(registry=declared)
def works_in_a_thread(ctx: durable.SyncContext) -> None:
    ctx.publish("begun", True)
    try:
        ctx.sleep("1d")
    except asyncio.CancelledError as error:
        with ctx.shield():
            ctx.step(told.append, str(error))
        raise


at_its_end, may_return = threading.Event(), threading.Event()


@durable.function(registry=declared)
def returns_late(ctx: durable.SyncContext) -> None:
    ctx.publish("begun", True)
    at_its_end.set()
    may_return.wait(60)


@pytest.fixture(autouse=True)
def fresh() -> None:
    global gate
    gate = asyncio.Event()
    told.clear()


@pytest.fixture
async def client(shared_url: str) -> AsyncIterator[durable.Client]:
    async with durable.Client(shared_url, settings=SETTINGS) as opened:
        yield opened.using(tenant=durable.tenant_id(new_run_id()))


def worker(client: durable.Client) -> durable.Worker:
    return durable.Worker(client, functions=declared, lease="5s", grace="2s")


async def _suspended(run: durable.Run[Any]) -> bool:
    return (await run.refresh()).status is Status.SUSPENDED


@pytest.mark.parametrize("function", [sleeps, works_in_a_thread])
async def test_the_reason_reaches_a_body_that_waits(
    client: durable.Client, function: durable.Function[[], None]
) -> None:
    async with worker(client):
        run = await client.start(function)
        await until(lambda: _suspended(run), "the sleep")
        assert await run.cancel(reason="the customer left")
        await run.cancel(reason="a second one counts for nothing")
        with pytest.raises(durable.RunCancelled, match="the customer left"):
            await run.result(timeout="60s")
    assert told == ["the run is cancelled: the customer left"]
    assert run.error == "the customer left"


async def test_the_reason_reaches_a_body_that_works_and_is_the_same_on_replay(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(works)
        await until(lambda: told, "the step")
        assert await run.cancel(reason="out of stock")
        with pytest.raises(durable.RunCancelled, match="out of stock"):
            await run.result(timeout="60s")
    assert told == ["at the gate", "the run is cancelled: out of stock"]
    (record,) = [one for one in await client.journal(run.id) if one.step_id == ":cancel"]
    assert "out of stock" in record.result


async def test_a_run_whose_body_had_returned_when_the_ask_was_found_lands_with_the_reason(
    client: durable.Client,
) -> None:
    """(44) The worker knows of the ask by a renewal, which does not say why."""
    at_its_end.clear()
    may_return.clear()
    async with worker(client) as working:
        run = await client.start(returns_late)
        await until(at_its_end.is_set, "the end of the body")
        assert await run.cancel(reason="too late")
        try:
            await until(lambda: working._claims.held[run.id]._cancel, "the worker to know")
        finally:
            may_return.set()
        with pytest.raises(durable.RunCancelled, match="too late"):
            await run.result(timeout="60s")
    assert ":cancel" not in [one.step_id for one in await client.journal(run.id)]


async def test_a_run_that_was_never_claimed_lands_with_the_reason(client: durable.Client) -> None:
    run = await client.start(sleeps)
    assert await run.cancel(reason="not today")
    await run.refresh()
    assert (run.status, run.error) == (Status.CANCELLED, "not today")


async def test_an_ask_without_a_reason_says_nothing_more(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(sleeps)
        await until(lambda: _suspended(run), "the sleep")
        assert await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result(timeout="60s")
    assert told == ["the run is cancelled"]
