"""What a body shows to the outside and asks of it: publish, approve, wait_until (semantics 29a), from both kinds of bodies."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from engine.conftest import until

import durable
from durable import Registry, tenant_id
from durable.model import RecordKind

declared = Registry("test_asking")
answers: list[bool] = []
gate = asyncio.Event()


@dataclasses.dataclass
class Offer:
    cents: int


async def pass_the_gate() -> None:
    await gate.wait()


@durable.step(every="1ms")
async def ready(what: str) -> bool:
    return answers.pop(0)


@durable.step(every="1ms")
def blocking_ready(what: str) -> bool:
    return answers.pop(0)


@durable.step(every="1ms")
async def broken() -> bool:
    raise ValueError("no such order")


@durable.function(registry=declared)
async def publishes(ctx: durable.Context) -> None:
    await ctx.publish("offer", Offer(5))
    await ctx.publish("state", "first")
    await ctx.publish("state", None)
    await ctx.step(pass_the_gate)


@durable.function(registry=declared)
def publishes_blocking(ctx: durable.SyncContext) -> None:
    ctx.publish("state", [1, {"a": 2.5}])


@durable.function(registry=declared)
async def publishes_nonsense(ctx: durable.Context) -> None:
    await ctx.publish("state", {object()})


@durable.function(registry=declared)
async def asks(ctx: durable.Context, what: str) -> bool:
    return await ctx.approve(what)


@durable.function(registry=declared)
def asks_blocking(ctx: durable.SyncContext) -> bool:
    return ctx.approve("pay")


@durable.function(registry=declared)
async def asks_for_a_while(ctx: durable.Context, default: bool | None) -> bool:
    return await ctx.approve("pay", expires="10ms", default=default)


@durable.function(registry=declared)
async def polls(ctx: durable.Context) -> str:
    await ctx.wait_until(ready, "order")
    return "ready"


@durable.function(registry=declared)
def polls_blocking(ctx: durable.SyncContext) -> str:
    ctx.wait_until(blocking_ready, "order")
    return "ready"


@durable.function(registry=declared)
async def polls_what_is_broken(ctx: durable.Context) -> None:
    await ctx.wait_until(broken)


@pytest.fixture(autouse=True)
def fresh() -> None:
    global gate
    gate = asyncio.Event()
    answers.clear()


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, functions=declared, grace="2s", **options)


async def test_a_published_value_is_read_from_outside_while_the_run_goes_on(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(publishes)
        await until(lambda: _has(run, 2), "the values")
        assert await run.published() == {"offer": {"cents": 5}, "state": None}
        gate.set()
        await run.result()
        blocking = await client.start(publishes_blocking)
        await blocking.result()
        assert await blocking.published() == {"state": [1, {"a": 2.5}]}


async def _has(run: durable.Run[Any], count: int) -> bool:
    found = await run.published()
    return len(found) == count and found["state"] is None


async def test_what_can_not_be_stored_is_not_published(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(publishes_nonsense)
        with pytest.raises(durable.RunFailed) as caught:
            await run.result()
        assert isinstance(caught.value.__cause__, durable.SerializationError)
        assert await run.published() == {}


@pytest.mark.parametrize("answer", [True, False])
async def test_a_run_waits_for_an_approval(client: durable.Client, answer: bool) -> None:
    async with worker(client):
        run = await client.start(asks, "pay 5 EUR")
        await client.approve(run.id, "pay 5 EUR", answer)
        assert await run.result() is answer
        blocking = await client.start(asks_blocking)
        await client.approve(blocking.id, "pay", answer)
        assert await blocking.result() is answer


async def test_an_approval_that_expires_is_its_default_or_an_error(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(asks_for_a_while, False) is False
        with pytest.raises(durable.RunFailed) as caught:
            await client.run(asks_for_a_while, None)
        assert isinstance(caught.value.__cause__, durable.SignalTimeout)


async def test_open_approvals_are_listed_for_each_tenant() -> None:
    settings = {"poll": "50ms", "poll_idle": "50ms", "park_after": "1ms"}
    async with durable.Client("sqlite:///:memory:", settings=settings) as client, worker(client):
        acme = client.using(tenant=tenant_id("acme"))
        mine = await client.start(asks, "mine")
        theirs = await acme.start(asks, "theirs")
        await until(lambda: _asked(client, [("mine", mine.id)]), "the list")
        await until(lambda: _asked(acme, [("theirs", theirs.id)]), "the other list")
        with pytest.raises(durable.NotFound):
            await client.approve(theirs.id, "theirs", True)
        await acme.approve(theirs.id, "theirs", True)
        assert await theirs.result() is True
        await until(lambda: _asked(acme, []), "the empty list")


async def _asked(client: durable.Client, wanted: list[tuple[str, str]]) -> bool:
    return [(one.what, one.run.id) async for one in client.approvals()] == wanted


async def test_a_name_that_can_not_be_an_approval_is_refused(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(asks, "a:b")
        with pytest.raises(durable.RunFailed) as caught:
            await run.result()
        assert isinstance(caught.value.__cause__, durable.RegistrationError)
        with pytest.raises(durable.RegistrationError):
            await client.approve(run.id, "a:b", True)
        with pytest.raises(durable.ConfigurationError):
            await client.approve(run.id, "a", "yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [polls, polls_blocking])
async def test_a_run_asks_again_until_the_answer_is_true(
    client: durable.Client, function: durable.Function[[], str]
) -> None:
    answers.extend([False, False, True])
    async with worker(client):
        run = await client.start(function)
        assert await run.result() == "ready"
        kinds = [record.kind for record in await client.store.history(run.id, scope=None)]
        assert kinds.count(RecordKind.STEP) == 3
        assert kinds.count(RecordKind.TIMER) == 2


async def test_a_check_that_fails_for_good_is_raised(client: durable.Client) -> None:
    async with worker(client):
        with pytest.raises(durable.RunFailed) as caught:
            await client.run(polls_what_is_broken)
        assert isinstance(caught.value.__cause__, ValueError)
