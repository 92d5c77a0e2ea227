"""Three generations for `test_families.py`, and the worker process of the two older ones, which stops where the test wants to kill it."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection

import durable
from durable.events import Event, StepRecorded
from durable.model import RecordKind

ELDERS, YOUNG = "elders", "young"
SETTINGS = {"poll": "100ms", "poll_idle": "100ms", "wake_delay": "50ms"}
elders = durable.Registry("family elders")
young = durable.Registry("family young")


async def double(number: int) -> int:
    """What each child does."""
    return number * 2


@durable.function(name="family_child", queue=YOUNG, registry=young)
async def child(ctx: durable.Context, number: int) -> int:
    return await ctx.step(double, number)


@durable.function(name="family_parent", queue=ELDERS, registry=elders)
async def parent(ctx: durable.Context, count: int, limit: int | None) -> int:
    return sum(await ctx.map(child, range(count), limit=limit))


@durable.function(name="family_grandparent", queue=ELDERS, registry=elders)
async def grandparent(ctx: durable.Context, count: int, limit: int | None) -> int:
    return await ctx.run(parent, count, limit)


def serve_elders(url: str, pipe: Connection, records: int | None) -> None:
    """Work on the elders' queue. With `records`: when so many starts and ends of children were recorded here, tell, and do nothing
    more until the kill comes."""
    left = records

    def stop_there(event: Event) -> None:
        nonlocal left
        if left is None or not isinstance(event, StepRecorded) or not event.step_id.startswith("map:"):
            return
        assert event.kind in (RecordKind.START, RecordKind.CHILD)
        left -= 1
        if left == 0:
            pipe.send(event.step_id)
            time.sleep(3_600)

    async def main() -> None:
        async with durable.Client(url, settings=SETTINGS) as client:
            client.events.attach(stop_there)
            await durable.Worker(client, functions=elders, queues=[ELDERS], lease="3s").run()

    asyncio.run(main())
