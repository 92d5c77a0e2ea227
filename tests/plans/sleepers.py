"""What `test_suspended*.py` share: how many runs sleep for a day, and a worker process that says how much memory it has.

The process works as any does: it lets runs of its own suspend, completes others, and does its chores beside; then it tells its size.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import durable
from durable.model import RunQuery, Status

SLEEPERS = int(os.environ.get("DURABLE_SUSPENDED_RUNS", "5000"))
MIB = 1 << 20
MORE = 5 * MIB
"""What a worker beside them may have more than one without: the noise of two processes, and the bounded caches of a connection."""
OWN = 300
PATIENCE = 300
declared = durable.Registry("sleepers")


@durable.function(name="sleeper", registry=declared)
async def sleeper(ctx: durable.Context, number: int) -> int:
    await ctx.sleep("1d")
    return number


@durable.function(name="quick", registry=declared)
async def quick(ctx: durable.Context, number: int) -> int:
    return number


def _serve(url: str, pipe: Connection) -> None:
    async def main() -> None:
        settings = {"park_after": "0s", "poll": "50ms", "poll_idle": "50ms"}
        async with durable.Client(url, settings=settings) as client:
            before = await client.store.count(RunQuery(statuses=[Status.SUSPENDED]), scope=None)
            async with durable.Worker(client, functions=declared):
                await client.start_many(sleeper, range(OWN))
                while await client.store.count(RunQuery(statuses=[Status.SUSPENDED]), scope=None) < before + OWN:
                    await asyncio.sleep(0.05)
                for run in await client.start_many(quick, range(OWN)):
                    await run.result()
                gc.collect()
                pipe.send((before, _resident()))

    asyncio.run(main())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_of_a_worker(url: str) -> tuple[int, int]:
    """How many runs slept there before it came, and its resident set in bytes at the end of its work."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(url, other), daemon=True)
    process.start()
    other.close()
    try:
        assert pipe.poll(PATIENCE), "the worker does not come to its end"
        told: tuple[int, int] = pipe.recv()
        process.join(60)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
    return told


def check_memory(without: str, beside: str) -> None:
    """A worker on either store: the one beside the sleepers needs no more."""
    (none, alone), (sleeping, crowded) = resident_of_a_worker(without), resident_of_a_worker(beside)
    assert (none, sleeping) == (0, SLEEPERS)
    print(f"resident: {alone / MIB:.1f} MiB alone, {crowded / MIB:.1f} MiB beside {sleeping:,} suspended runs")
    assert crowded - alone < MORE


__all__ = ["OWN", "SLEEPERS", "check_memory"]
