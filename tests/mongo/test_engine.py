"""The engine on MongoDB: a program as users write it, with a transaction, a signal, children and a schedule of sleeps, on a real worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from servers.mongo_room import Room

import durable

declared = durable.Registry("test_mongo_engine")
go = durable.Signal("go", int)
SETTINGS = {"poll": "200ms", "poll_idle": "500ms", "park_after": "100ms"}


async def add(a: int, b: int) -> int:
    return a + b


def blocking_add(a: int, b: int) -> int:
    return a + b


@durable.function(registry=declared)
async def child(ctx: durable.Context, number: int) -> int:
    return await ctx.step(add, number, 100)


@durable.function(registry=declared)
async def whole(ctx: durable.Context, number: int) -> list[int]:
    first = await ctx.step(add, number, 1)
    await ctx.sleep(0.3)
    second = await ctx.step(blocking_add, first, 1)
    third = await ctx.run(child, second)
    word = await ctx.wait_signal(go)
    return [first, second, third, word]


async def pay(session: Any, database: str, text: str) -> str:
    await session.client[database]["caller_row"].insert_one({"text": text}, session=session)
    return text.upper()


@durable.function(registry=declared)
async def paying(ctx: durable.Context, database: str, text: str) -> str:
    return await ctx.transaction(pay, database, text)


@durable.function(registry=declared)
async def failing(ctx: durable.Context) -> None:
    raise ValueError("broken")


@pytest.mark.timeout(180)
async def test_a_program_runs_as_it_does_on_the_other_stores(room: Room) -> None:
    room.empty()
    async with (
        durable.Client(room.url, settings=SETTINGS) as client,
        durable.Worker(client, functions=[whole, child, paying, failing]),
    ):
        runs = [await client.start(whole, number) for number in range(5)]
        for number, run in enumerate(runs):
            await run.signal(go, number)
        results = [await run.result(timeout=120) for run in runs]
        assert results == [[n + 1, n + 2, n + 102, n] for n in range(5)]
        assert await client.run(paying, room.name, "paid") == "PAID"
        assert room.caller_rows() == ["paid"]
        with pytest.raises(durable.RunFailed):
            await client.run(failing)
    async with durable.Client(room.url) as client:
        assert list(await client.all_tenants().audit()) == []


@pytest.mark.timeout(180)
def test_the_blocking_client_works_through_its_own_loop(room: Room) -> None:
    with durable.SyncClient(room.url, settings=SETTINGS) as client:
        run = client.start(whole, 1)
        assert client.get(run.id).status == "pending"
        assert run.cancel()


async def hear(session: Any, database: str, run_id: str) -> int:
    """In its first call somebody sends its run a signal: the commit meets that, and MongoDB rolls all of it back."""
    rows = session.client[database]["caller_row"]
    if not heard:
        heard.append(run_id)
        async with durable.Client(room_url[0], settings=SETTINGS) as other:
            await rows.insert_one({"text": "rolled back"}, session=session)
            await other.signal(run_id, go, 7)
    await rows.insert_one({"text": "heard"}, session=session)
    return 1


heard: list[str] = []
room_url: list[str] = []


@durable.function(registry=declared)
async def hearing(ctx: durable.Context, database: str) -> list[int]:
    both = await asyncio.gather(ctx.transaction(hear, database, ctx.run_id), ctx.wait_signal(go))
    return [*both, await ctx.step(add, 1, 1)]


@pytest.mark.timeout(180)
async def test_a_run_goes_on_after_a_transaction_that_was_rolled_back_and_called_again(room: Room) -> None:
    """(19, 26) The record of the first call was never there: it holds nothing up."""
    room.empty()
    heard.clear()
    room_url[:] = [room.url]
    async with (
        durable.Client(room.url, settings=SETTINGS) as client,
        durable.Worker(client, functions=[hearing]),
    ):
        run = await client.start(hearing, room.name)
        assert await run.result(timeout=60) == [1, 7, 2]
    assert room.caller_rows() == ["heard"]
