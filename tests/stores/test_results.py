"""Waiting in a body for a run that is no child of it, on the three stores (semantics 30, 31, 50, 57)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engine.conftest import until
from stores.everywhere import SETTINGS

import durable
from durable import Registry
from durable.model import Status, new_run_id

declared = Registry("test_results")
calls: list[str] = []
go = durable.Signal("go", int)


@dataclasses.dataclass
class Parcel:
    weight: int


async def note(what: str) -> None:
    calls.append(what)


@durable.function(registry=declared)
async def packs(ctx: durable.Context) -> Parcel:
    weight = await ctx.wait_signal(go)
    await ctx.step(note, "packed")
    if weight < 0:
        raise ValueError("lighter than air")
    return Parcel(weight)


@durable.function(registry=declared)
async def other(ctx: durable.Context) -> int:
    return 1


@durable.function(registry=declared)
async def awaits(ctx: durable.Context, run_id: str) -> int:
    await ctx.step(note, "before")
    parcel = await ctx.result(run_id, packs)
    await ctx.step(note, "after")
    return parcel.weight


@durable.function(registry=declared)
def awaits_in_a_thread(ctx: durable.SyncContext, run_id: str) -> int:
    return ctx.result(run_id, packs).weight


@durable.function(registry=declared)
async def awaits_untyped(ctx: durable.Context, run_ids: list[str]) -> list[Any]:
    return await asyncio.gather(*(ctx.result(run_id) for run_id in run_ids))


@durable.function(registry=declared)
async def tells_the_error(ctx: durable.Context, run_id: str) -> list[str]:
    try:
        await ctx.result(run_id, packs)
    except (durable.DurableError, ValueError) as error:
        return [type(error).__name__, type(error.__cause__).__name__]
    return []


@durable.function(registry=declared)
async def awaits_itself(ctx: durable.Context) -> None:
    await ctx.result(ctx.run_id)


@durable.function(registry=declared)
async def awaits_for_a_while(ctx: durable.Context, run_id: str) -> str:
    try:
        async with asyncio.timeout(0.3):
            await ctx.result(run_id)
    except TimeoutError:
        return "no answer"
    return "an answer"


@pytest.fixture(autouse=True)
def fresh() -> None:
    calls.clear()


@pytest.fixture
async def client(shared_url: str) -> AsyncIterator[durable.Client]:
    """Bound to a tenant of the test's own: all tests of a store share its database."""
    async with durable.Client(shared_url, settings=SETTINGS) as opened:
        yield opened.using(tenant=durable.tenant_id(new_run_id()))


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, **{"functions": declared, "grace": "2s", **options})


async def suspended(run: durable.Run[Any]) -> bool:
    return (await run.refresh()).status is Status.SUSPENDED


async def test_a_body_gets_what_a_run_returns_that_it_did_not_start_and_holds_no_slot_meanwhile(
    client: durable.Client,
) -> None:
    async with worker(client, concurrency=1):
        awaited = await client.start(packs)
        run = await client.start(awaits, awaited.id)
        await until(lambda: suspended(run), "the wait")
        assert await client.run(other) == 1
        await awaited.signal(go, 7)
        assert await run.result(timeout="60s") == 7
    assert calls == ["before", "packed", "after"]
    steps = [record.step_id for record in await client.journal(run.id)]
    assert steps == ["note", "1/result", "1/await", "1/await:end", "1/result#2", "note#2"]
    assert list(await client.audit()) == []


async def test_a_run_that_has_landed_already_answers_at_once(client: durable.Client) -> None:
    async with worker(client):
        awaited = await client.start(packs)
        await awaited.signal(go, 5)
        await awaited.result(timeout="60s")
        assert await (await client.start(awaits, awaited.id)).result(timeout="60s") == 5
        assert await (await client.start(awaits_in_a_thread, awaited.id)).result(timeout="60s") == 5
        assert await client.count(function="durable.result") == 0


async def test_a_def_body_and_many_bodies_wait_for_one_run(client: durable.Client) -> None:
    async with worker(client):
        awaited = [await client.start(packs) for _ in range(2)]
        runs: list[durable.Run[Any]] = [await client.start(awaits_in_a_thread, awaited[0].id) for _ in range(3)]
        both = await client.start(awaits_untyped, [one.id for one in awaited])
        for one in (*runs, both):
            await until(lambda one=one: suspended(one), "the wait")
        for weight, one in enumerate(awaited):
            await one.signal(go, weight)
        assert [await run.result(timeout="60s") for run in runs] == [0, 0, 0]
        assert await both.result(timeout="60s") == [{"weight": 0}, {"weight": 1}]


@pytest.mark.parametrize("late", [False, True], ids=["it fails while it is awaited", "it has failed already"])
async def test_a_run_that_fails_raises_its_error_with_the_cause(client: durable.Client, late: bool) -> None:
    async with worker(client):
        awaited = await client.start(packs)
        if late:
            await awaited.signal(go, -1)
            with pytest.raises(durable.RunFailed):
                await awaited.result(timeout="60s")
        run = await client.start(tells_the_error, awaited.id)
        if not late:
            await until(lambda: suspended(run), "the wait")
            await awaited.signal(go, -1)
        assert await run.result(timeout="60s") == ["RunFailed", "ValueError"]


async def test_a_run_that_is_cancelled_raises_it(client: durable.Client) -> None:
    async with worker(client):
        awaited = await client.start(packs)
        run = await client.start(tells_the_error, awaited.id)
        await until(lambda: suspended(run), "the wait")
        await awaited.cancel()
        assert (await run.result(timeout="60s"))[0] == "RunCancelled"


async def test_a_run_of_another_tenant_is_not_found_like_an_unknown_one(client: durable.Client) -> None:
    theirs = client.using(tenant=durable.tenant_id(new_run_id()))
    async with worker(client), worker(theirs):
        foreign = await theirs.start(other)
        await foreign.result(timeout="60s")
        for run_id in (foreign.id, "nobody"):
            run = await client.start(tells_the_error, run_id)
            assert (await run.result(timeout="60s"))[0] == "NotFound"


async def test_a_run_of_another_function_and_the_run_itself_are_refused(client: durable.Client) -> None:
    async with worker(client):
        wrong = await client.start(other)
        assert (await (await client.start(tells_the_error, wrong.id)).result(timeout="60s"))[0] == "Conflict"
        run = await client.start(awaits_itself)
        with pytest.raises(durable.RunFailed, match="wait for ever"):
            await run.result(timeout="60s")
        assert run.error_kind == "misuse"


async def test_the_wait_survives_its_workers(client: durable.Client) -> None:
    awaited = await client.start(packs)
    run = await client.start(awaits, awaited.id)
    async with worker(client, grace="10ms"):
        await until(lambda: "before" in calls, "the body")
    await awaited.signal(go, 3)
    async with worker(client, grace="10ms"):
        await until(lambda: "packed" in calls, "the other run")
    async with worker(client):
        assert await run.result(timeout="60s") == 3
    assert calls.count("after") == 1


async def test_a_wait_may_be_given_up(client: durable.Client) -> None:
    async with worker(client):
        awaited = await client.start(packs)
        run = await client.start(awaits_for_a_while, awaited.id)
        assert await run.result(timeout="60s") == "no answer"
        await awaited.signal(go, 1)
        await awaited.result(timeout="60s")

        async def landed() -> bool:
            (child,) = (await run.children()).values()
            return child.status.terminal

        await until(landed, "the child that waited")
    assert list(await client.audit()) == []


async def test_a_retry_of_the_run_that_failed_does_not_bring_those_back_that_awaited_it(client: durable.Client) -> None:
    async with worker(client):
        awaited = await client.start(packs)
        run = await client.start(tells_the_error, awaited.id)
        await until(lambda: suspended(run), "the wait")
        await awaited.signal(go, -1)
        await run.result(timeout="60s")
        await awaited.retry()
        statuses = {child.status for child in (await run.children()).values()}
        assert statuses == {Status.CANCELLED}
    assert list(await client.audit()) == []


@pytest.mark.parametrize("body", [awaits, awaits_in_a_thread], ids=["async def", "def"])
async def test_a_run_that_is_purged_between_the_look_and_the_wait_is_not_found_and_the_body_is_not_begun_again_and_again(
    client: durable.Client, monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    awaited = await client.start(packs.using(delay="1h", keep="0s"))
    append, purged = client.store.append, 0

    async def late(records: Any) -> Any:
        nonlocal purged
        if any(record.step_id in ("await", "1/await") for _, record in records) and not purged:
            await awaited.cancel()
            purged = await client.store.purge(scope=awaited.tenant, limit=10)
        return await append(records)

    monkeypatch.setattr(client.store, "append", late)
    async with worker(client):
        run = await client.start(body, awaited.id)
        with pytest.raises(durable.RunFailed, match="there is no run") as caught:
            await run.result(timeout="60s")
    assert purged == 1
    assert isinstance(caught.value.__cause__, durable.NotFound)
    assert (await run.refresh()).attempts <= 2, "claimed, and claimed once more when what it waited for had ended"
    assert list(await client.audit()) == []
