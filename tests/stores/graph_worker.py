"""A graph, and the worker process that a test kills in the middle of it: `python graph_worker.py URL LOG GO`.

Each node appends a line to the log; the second one then waits for the file GO to be there, like a service that does not answer.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import durable

LOG, GO = (Path(one) for one in sys.argv[2:4]) if len(sys.argv) > 3 else (Path("log"), Path("go"))
declared = durable.Registry("graph worker")


async def write(line: str) -> None:
    with LOG.open("a") as log:
        log.write(f"{line}\n")
    while line == "second" and not GO.exists():
        await asyncio.sleep(0.02)


@durable.function(registry=declared)
async def node(ctx: durable.Context, line: str) -> str:
    await ctx.step(write, line)
    return line


@durable.function(registry=declared)
async def named_second(ctx: durable.Context, _: str) -> str:
    await ctx.step(write, "second")
    return "second"


@durable.function(registry=declared)
async def joined(ctx: durable.Context, left: str, right: str) -> str:
    await ctx.step(write, "third")
    return f"{left} {right}"


graph = durable.Graph("killed", registry=declared)
graph.node("first", node)
graph.node("second", named_second, inputs=["first"])
graph.node("third", joined, inputs=["second", "first"])


async def main(url: str) -> None:
    async with durable.Client(url, settings={"poll": "100ms", "poll_idle": "100ms", "park_after": "50ms"}) as client:
        await durable.Worker(client, functions=declared, lease="3s").run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
