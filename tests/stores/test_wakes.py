"""How often a parent of many children is woken, on the three stores: a wake is a claim (semantics 33).

`DURABLE_WAKES` is the number of children: 30 here, 1,000 in a campaign (`python3 dev.py wakes`). The children land at most 100 in a
second. A wake comes `wake_delay` after the first end that it is for, so that a slower machine has more time and more wakes: the bound is
one for each `wake_delay` that went by, which makes 40 of ten seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from stores.everywhere import SETTINGS

import durable
from durable import Registry
from durable.events import Event, RunClaimed
from durable.model import new_run_id
from durable.settings import SECOND

CHILDREN = int(os.environ.get("DURABLE_WAKES", "30"))
PACE = 0.01
declared = Registry("test_wakes")
logger = logging.getLogger(__name__)
"""Shown with -o log_cli=true -o log_cli_level=info."""
turn = asyncio.Semaphore(0)


async def wait_for_its_turn() -> None:
    await turn.acquire()


@durable.function(registry=declared)
async def small(ctx: durable.Context, number: int) -> int:
    await ctx.step(wait_for_its_turn)
    return number


@durable.function(registry=declared)
async def quick(ctx: durable.Context, number: int) -> int:
    return number


@durable.function(registry=declared)
async def independent(ctx: durable.Context, count: int) -> int:
    return sum(await asyncio.gather(*(ctx.run(small, number) for number in range(count))))


@durable.function(registry=declared)
async def mapped(ctx: durable.Context, count: int) -> int:
    return sum(await ctx.map(quick, range(count)))


graph = durable.Graph("wide", registry=declared)
for place in range(min(CHILDREN, 200)):
    graph.node(f"n{place}", quick)


@pytest.fixture
async def client(shared_url: str) -> AsyncIterator[durable.Client]:
    """Its workers let a run leave memory whenever it rests, so that each wake is a claim."""
    settings = {**SETTINGS, "park_after": "0ms", "max_parked": 1}
    async with durable.Client(shared_url, settings=settings) as opened:
        yield opened.using(tenant=durable.tenant_id(new_run_id()))


class Claims:
    """How often each run was claimed."""

    def __init__(self, client: durable.Client) -> None:
        self.seen: list[str] = []
        client.events.attach(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, RunClaimed):
            self.seen.append(event.run_id)


async def finished(client: durable.Client, function: durable.Function[Any, Any], *arguments: Any) -> tuple[Any, int]:
    """The result of a run, and how often it was woken: its claims but the first."""
    claims = Claims(client)
    async with durable.Worker(client, functions=declared, concurrency=CHILDREN + 10, grace="2s"):
        run = await client.start(function, *arguments)
        return await run.result(timeout="280s"), claims.seen.count(run.id) - 1


@pytest.mark.timeout(300)
async def test_the_parent_of_a_map_is_woken_at_most_twice(client: durable.Client) -> None:
    result, wakes = await finished(client, mapped, CHILDREN)
    logger.info("%d wakes", wakes)
    assert result == CHILDREN * (CHILDREN - 1) // 2
    assert wakes <= 2


@pytest.mark.timeout(300)
async def test_a_graph_is_woken_at_most_once(client: durable.Client) -> None:
    result, wakes = await finished(client, graph.function, 1)
    logger.info("%d wakes", wakes)
    assert sum(result.values()) == len(graph.nodes)
    assert wakes <= 1


@pytest.mark.timeout(300)
async def test_the_parent_of_independent_children_is_woken_once_per_delay_at_most(client: durable.Client) -> None:
    global turn
    turn = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    async def pace() -> None:
        for _ in range(CHILDREN):
            turn.release()
            await asyncio.sleep(PACE)

    claims = Claims(client)
    async with durable.Worker(client, functions=declared, concurrency=CHILDREN + 10, grace="2s"):
        run = await client.start(independent, CHILDREN)
        async with asyncio.timeout(120):
            while await client.count(function="small") < CHILDREN or (await run.refresh()).status != "suspended":
                await asyncio.sleep(0.05)  # one that has not come to rest yet needs no wake
        before = claims.seen.count(run.id)
        pacing = asyncio.create_task(pace())
        began = loop.time()
        assert await run.result(timeout="280s") == CHILDREN * (CHILDREN - 1) // 2
        took = loop.time() - began
        await pacing
    wakes = claims.seen.count(run.id) - before
    logger.info("%d wakes for %d children that landed in %.1f s", wakes, CHILDREN, took)
    assert 0 < wakes <= took * SECOND / client.settings.wake_delay + 1
