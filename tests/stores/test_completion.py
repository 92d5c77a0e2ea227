"""A run that is started inside `ctx.transaction` commits with the step, on the three stores (semantics 26, 41)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from stores.everywhere import SETTINGS

import durable
from durable import Registry
from durable.model import new_run_id

declared = Registry("test_completion")
clients: list[durable.Client] = []


@durable.function(registry=declared)
async def follow_up(ctx: durable.Context, text: str) -> str:
    return f"told {text}"


async def start(connection: Any, text: str) -> str:
    run = await clients[-1].using(conn=connection).start(follow_up.using(idempotency_key=text), text)
    return run.id


async def start_and_fail(connection: Any, text: str) -> str:
    await start(connection, text)
    raise ValueError("no sale")


@durable.function(registry=declared)
async def sells(ctx: durable.Context, text: str) -> str:
    return await ctx.transaction(start, text)


@durable.function(registry=declared)
async def sells_nothing(ctx: durable.Context, text: str) -> str:
    try:
        return await ctx.transaction(start_and_fail, text)
    except ValueError as error:
        return str(error)


@pytest.fixture
async def client(shared_url: str) -> AsyncIterator[durable.Client]:
    async with durable.Client(shared_url, settings=SETTINGS) as opened:
        bound = opened.using(tenant=durable.tenant_id(new_run_id()))
        clients.append(bound)
        yield bound
        clients.pop()


async def test_a_run_that_is_started_in_a_steps_transaction_exists_and_runs_when_the_step_is_recorded(
    client: durable.Client,
) -> None:
    async with durable.Worker(client, functions=declared, grace="2s"):
        run = await client.start(sells, "tea")
        started = await client.get(await run.result(timeout="60s"), follow_up)
        assert await started.result(timeout="60s") == "told tea"
        assert (started.tenant, started.record.parent_run_id) == (client.scope, None)
    assert [record.step_id for record in await client.journal(run.id)] == ["start"]


async def test_a_step_that_fails_leaves_no_run_behind(client: durable.Client) -> None:
    async with durable.Worker(client, functions=declared, grace="2s"):
        run = await client.start(sells_nothing, "wine")
        assert await run.result(timeout="60s") == "no sale"
    assert await client.count(function="follow_up") == 0
    assert list(await client.audit()) == []
