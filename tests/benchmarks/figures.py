"""What the benchmarks of the stores share: the two workloads on the engine, the comparison with a floor, and the machine.

`bench_sqlite.py`, `bench_postgres.py` and `bench_mongo.py` each bring a floor: the least that a Python program with group commit does on
the same store for the same work. W1 is runs of one step, W2 runs of ten; one worker, a hundred runs at once, in the process that measures.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import durable
from durable.cli.work_commands import pace_the_collector

CONCURRENCY = 100
Work = Callable[[int, int], Coroutine[Any, Any, float]]
"""Does so many runs of so many steps; gives the seconds."""

ran = 0
"""Bodies that have come to their end."""


async def echo(i: int) -> dict[str, int]:
    """The step: what it costs is the engine's."""
    return {"i": i}


@durable.function
async def bench_one(ctx: durable.Context, i: int) -> dict[str, int]:
    """W1."""
    global ran
    result = await ctx.step(echo, i)
    ran += 1
    return result


@durable.function
async def bench_ten(ctx: durable.Context, i: int) -> dict[str, int]:
    """W2."""
    global ran
    result = {"i": i}
    for _ in range(10):
        result = await ctx.step(echo, i)
    ran += 1
    return result


async def engine(url: str, runs: int, steps: int, profile: cProfile.Profile | None = None) -> float:
    """Drain `runs` runs of `steps` steps. Returns the seconds from the worker's start until the store shows all completed."""
    global ran
    ran = 0
    async with durable.Client(url, auto_migrate=True) as client:
        for start in range(0, runs, 1_000):
            await client.start_many(bench_one if steps == 1 else bench_ten, range(start, min(start + 1_000, runs)))
        if profile is not None:
            profile.enable()
        began = time.perf_counter()
        async with durable.Worker(client, concurrency=CONCURRENCY):
            while ran < runs:
                await asyncio.sleep(0.01)
            while await client.count(status="completed") < runs:  # asked only now: counting is work, too
                await asyncio.sleep(0.005)
            took = time.perf_counter() - began
        if profile is not None:
            profile.disable()
    return took


Held = TypeVar("Held")


async def drained(
    claim: Callable[[int], Awaitable[Sequence[Held]]],
    body: Callable[[Held], Coroutine[Any, Any, None]],
    runs: int,
) -> float:
    """Drain a floor as the engine's worker does: it claims once a quarter of its room is free. Returns the seconds."""
    wake = asyncio.Event()
    active = done = 0
    tasks: set[asyncio.Task[None]] = set()

    async def carried_out(run: Held) -> None:
        nonlocal active, done
        await body(run)
        active -= 1
        done += 1
        wake.set()

    began = time.perf_counter()
    while done < runs:
        room = CONCURRENCY - active
        if room >= CONCURRENCY // 4 and done + active < runs:
            for run in await claim(room):
                active += 1
                task = asyncio.create_task(carried_out(run))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        wake.clear()
        if done < runs:
            await wake.wait()
    return time.perf_counter() - began


class Batches:
    """Group commit of a floor: what is put while the flushes are under way goes with the next one; two at once, none with two entries of
    one run."""

    def __init__(self, send: Callable[[list[Any]], Awaitable[None]]) -> None:
        self._send = send
        self._waiting: list[tuple[Any, asyncio.Future[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, item: Any) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        asyncio.get_running_loop().call_soon(self._launch)
        return future

    def _launch(self) -> None:
        if self._waiting and len(self._tasks) < 2:
            batch, self._waiting = self._waiting, []
            task = asyncio.create_task(self._flush(batch))
            self._tasks.add(task)
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        task.result()
        self._launch()

    async def _flush(self, batch: list[tuple[Any, asyncio.Future[None]]]) -> None:
        await self._send([item for item, _ in batch])
        for _, future in batch:
            future.set_result(None)


@dataclasses.dataclass
class Figure:
    """What one measurement gave."""

    rate: float
    cpu: float
    """Microseconds of processor time per unit, all threads: steadier than the rate on a machine that others use too."""
    server: float
    """The same of the server, where there is one."""


@dataclasses.dataclass(frozen=True)
class Aim:
    """Reached by either: so many units a second, or this share of the floor on a slower machine (0: the rate alone counts)."""

    rate: float
    share: float = 0.0


class Bench:
    """One store: how the engine and the floor work on it, and the processor time of its server (seconds; 0 without one)."""

    def __init__(
        self, engine: Work, floor: Work, aims: dict[str, Aim], server: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._engine = engine
        self._floor = floor
        self._aims = aims
        self._server = server

    def compared(self, name: str, runs: int, steps: int, rounds: int) -> bool:
        """Measure both in turn and print. False: the aim was missed."""
        here: list[Figure] = []
        least: list[Figure] = []
        for _ in range(rounds):
            here.append(self._measured(self._engine, runs, steps))
            least.append(self._measured(self._floor, runs, steps))
        ours, floor = _median(here), _median(least)
        aim = self._aims[name]
        ratio = ours.rate / floor.rate
        reached = ours.rate >= aim.rate or (aim.share > 0 and ratio >= aim.share)
        wanted = f"{aim.rate:,.0f}" + (f" or {aim.share} of the floor" if aim.share else "")
        print(
            f"{name}: {ours.rate:,.0f} {'runs' if steps == 1 else 'steps'}/s, {_processor(ours)} each; "
            f"floor {floor.rate:,.0f}/s, {_processor(floor)}; ratio {ratio:.2f}; "
            f"rounds {', '.join(f'{figure.rate:,.0f}' for figure in here)}; load {os.getloadavg()[0]:.1f}; "
            f"aim {wanted}: {'reached' if reached else 'MISSED'}",
            flush=True,
        )
        return reached

    def _measured(self, work: Work, runs: int, steps: int) -> Figure:
        units = runs * steps
        before, server = time.process_time(), self._server()
        took = asyncio.run(work(runs, steps))
        cpu, server = time.process_time() - before, self._server() - server
        return Figure(rate=units / took, cpu=cpu / units * 1e6, server=server / units * 1e6)


def _median(figures: list[Figure]) -> Figure:
    return Figure(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, figures), strict=True)))


def _processor(figure: Figure) -> str:
    own = f"{figure.cpu:.0f} µs of processor"
    return f"{own} and {figure.server:.0f} µs of the server's" if figure.server else own


def options(about: str) -> argparse.Namespace:
    """The command line of each of them."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--w1", type=int, default=5_000)
    parser.add_argument("--w2", type=int, default=500)
    parser.add_argument("--profile", help="write a cProfile of the engine's part to this file")
    return parser.parse_args()


def figures(bench: Bench, chosen: argparse.Namespace, store: str) -> bool:
    """Say what this machine is, and measure both workloads. False: an aim was missed."""
    pace_the_collector()  # as `durable worker` does; the floor has the same
    print(
        f"machine: {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, {store}, "
        f"load {os.getloadavg()[0]:.1f}, fdatasync {_fsync_time():.2f} ms",
        flush=True,
    )
    workloads = (("W1", chosen.w1, 1), ("W2", chosen.w2, 10))
    reached = [
        bench.compared(name, runs, steps, chosen.rounds) for name, runs, steps in workloads
    ]  # both, whatever the first says
    return all(reached)


def _fsync_time() -> float:
    """Milliseconds of one fdatasync after a small write, median of 50."""
    times = []
    with tempfile.TemporaryDirectory(prefix="durable-bench-") as folder, (Path(folder) / "probe").open("wb", 0) as file:
        for _ in range(50):
            file.write(b"x" * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1_000
