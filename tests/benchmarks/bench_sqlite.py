"""Figures of one worker on one SQLite file: W1 (one-step runs) and W2 (ten-step runs), with a floor beside them.

    python tests/benchmarks/bench_sqlite.py [--rounds 3] [--w1 5000] [--w2 500] [--profile FILE]

The floor is the least that a Python program with group commit does on the same tables' worth of work: one connection, one writer
thread, fenced statements, one commit per batch, `synchronous=FULL`. It runs interleaved with the engine, in the same process and
on the same disk, so that the ratio means something on a noisy machine. Exits 1 if the engine misses its aim: W1 >= 1,500 runs/s and
W2 >= 4,000 steps/s, or 0.35 of the floor.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import json
import os
import platform
import queue
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import durable
from durable.cli.work_commands import pace_the_collector

CONCURRENCY = 100
AIMS = {"W1": (1_500.0, 0.35), "W2": (4_000.0, 0.35)}


async def echo(i: int) -> dict[str, int]:
    return {"i": i}


# -- the engine ---------------------------------------------------------------------------------------------------------------

ran = 0
"""Bodies that have come to their end."""


async def all_ran(runs: int) -> None:
    """Wait for the last body."""
    while ran < runs:
        await asyncio.sleep(0.01)


async def engine(folder: Path, runs: int, steps: int, profile: cProfile.Profile | None) -> float:
    """Drain `runs` runs of `steps` steps. Returns the seconds from the worker's start until the store shows all completed."""
    global ran
    ran = 0
    url = f"sqlite:///{folder / 'engine.db'}"
    async with durable.Client(url) as client:
        for start in range(0, runs, 1_000):
            await client.start_many(bench_one if steps == 1 else bench_ten, range(start, min(start + 1_000, runs)))
        if profile is not None:
            profile.enable()
        began = time.perf_counter()
        async with durable.Worker(client, concurrency=CONCURRENCY):
            await all_ran(runs)
            while await client.count(status="completed") < runs:  # asked only now: counting is work, too
                await asyncio.sleep(0.005)
            took = time.perf_counter() - began
        if profile is not None:
            profile.disable()
    return took


@durable.function
async def bench_one(ctx: durable.Context, i: int) -> dict[str, int]:
    global ran
    result = await ctx.step(echo, i)
    ran += 1
    return result


@durable.function
async def bench_ten(ctx: durable.Context, i: int) -> dict[str, int]:
    global ran
    result = {"i": i}
    for _ in range(10):
        result = await ctx.step(echo, i)
    ran += 1
    return result


# -- the floor ----------------------------------------------------------------------------------------------------------------

TABLES = """
CREATE TABLE run (id INTEGER PRIMARY KEY, status TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 0, owner TEXT, leased_until INTEGER,
  input TEXT NOT NULL, output TEXT, updated_at INTEGER);
CREATE INDEX ready ON run (id) WHERE status = 'pending';
CREATE TABLE step (run_id INTEGER, step_id TEXT, result TEXT, at INTEGER, PRIMARY KEY (run_id, step_id));
"""
CLAIM = "SELECT id, attempts, input FROM run WHERE status='pending' ORDER BY id LIMIT ?"
TAKE = "UPDATE run SET status='running', attempts=attempts+1, owner=?, leased_until=? WHERE id=?"
APPEND = """INSERT INTO step SELECT id, ?, ?, ? FROM run WHERE id=? AND attempts=? AND status='running' AND owner=?
  ON CONFLICT DO NOTHING"""
SETTLE = """UPDATE run SET status='completed', output=?, leased_until=NULL, updated_at=?
  WHERE id=? AND status='running' AND attempts=? AND owner=?"""


class Floor:
    """One writer thread; what is queued while a commit runs goes into the next."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")
        self.connection.executescript(TABLES)
        self.loop = loop
        self.items: queue.SimpleQueue[tuple[str, Any, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.write)

    def put(self, kind: str, row: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.loop.create_future()
        self.items.put((kind, row, future))
        return future

    def write(self) -> None:
        while (item := self.items.get()) is not None:
            batch = [item]
            while len(batch) < 500 and not self.items.empty():
                more = self.items.get()
                if more is None:
                    self.items.put(None)
                    break
                batch.append(more)
            now = time.time_ns() // 1_000
            execute = self.connection
            answers: list[tuple[asyncio.Future[Any], Any]] = []
            execute.execute("BEGIN IMMEDIATE")
            for kind, statement in (("append", APPEND), ("settle", SETTLE)):
                rows = [(row, future) for name, row, future in batch if name == kind]
                if rows:
                    execute.executemany(statement, [row for row, _ in rows])
                    answers += [(future, None) for _, future in rows]
            for kind, limit, future in batch:
                if kind == "claim":
                    found = execute.execute(CLAIM, (limit,)).fetchall()
                    execute.executemany(TAKE, [("w", now + 30_000_000, row[0]) for row in found])
                    answers.append((future, found))
            execute.execute("COMMIT")
            self.loop.call_soon_threadsafe(deliver, answers)


def deliver(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, answer in answers:
        future.set_result(answer)


async def floor(folder: Path, runs: int, steps: int) -> float:
    """The same work without an engine."""
    store = Floor(folder / "floor.db", asyncio.get_running_loop())
    store.connection.execute("BEGIN")
    rows = [(json.dumps({"i": i}),) for i in range(runs)]
    store.connection.executemany("INSERT INTO run (status, input) VALUES ('pending', ?)", rows)
    store.connection.execute("COMMIT")
    store.thread.start()
    wake = asyncio.Event()
    active = done = 0
    tasks: set[asyncio.Task[None]] = set()

    async def body(run_id: int, attempts: int, text: str) -> None:
        nonlocal active, done
        i = json.loads(text)["i"]
        result = json.dumps(await echo(i))
        for n in range(steps):
            result = json.dumps(await echo(i))
            await store.put("append", (f"echo#{n}", result, time.time_ns() // 1_000, run_id, attempts, "w"))
        await store.put("settle", (result, time.time_ns() // 1_000, run_id, attempts, "w"))
        active -= 1
        done += 1
        wake.set()

    began = time.perf_counter()
    while done < runs:
        room = CONCURRENCY - active
        if room >= CONCURRENCY // 4 and done + active < runs:
            for run_id, attempts, text in await store.put("claim", room):
                active += 1
                task = asyncio.create_task(body(run_id, attempts + 1, text))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        wake.clear()
        if done < runs:
            await wake.wait()
    took = time.perf_counter() - began
    store.items.put(None)
    store.thread.join()
    store.connection.close()
    return took


# -- the report ---------------------------------------------------------------------------------------------------------------


def fsync_time(folder: Path) -> float:
    """Milliseconds of one fdatasync after a small write, median of 50."""
    times = []
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(50):
            file.write(b"x" * 4096)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1_000


def in_folder(work: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="durable-bench-") as folder:
        return work(Path(folder))


@dataclasses.dataclass
class Figure:
    """What one measurement gave."""

    rate: float
    cpu: float
    """Microseconds of processor time per unit, all threads: steadier than the rate on a machine that others use too."""


def measured(work: Callable[[Path], Coroutine[Any, Any, float]], units: int) -> Figure:
    took, cpu = in_folder(lambda folder: _timed(work, folder))
    return Figure(rate=units / took, cpu=cpu / units * 1e6)


def _timed(work: Callable[[Path], Coroutine[Any, Any, float]], folder: Path) -> tuple[float, float]:
    before = time.process_time()
    took = asyncio.run(work(folder))
    return took, time.process_time() - before


def compared(name: str, runs: int, steps: int, rounds: int, profile: cProfile.Profile | None) -> bool:
    """Measure both in turn and print. False: the aim was missed."""
    here: list[Figure] = []
    least: list[Figure] = []
    for _ in range(rounds):
        here.append(measured(lambda folder: engine(folder, runs, steps, profile), runs * steps))
        least.append(measured(lambda folder: floor(folder, runs, steps), runs * steps))
    rate, floor_rate = (statistics.median(figure.rate for figure in part) for part in (here, least))
    cpu, floor_cpu = (statistics.median(figure.cpu for figure in part) for part in (here, least))
    aim, share = AIMS[name]
    reached = rate >= aim or rate / floor_rate >= share
    print(
        f"{name}: {rate:,.0f} {'runs' if steps == 1 else 'steps'}/s, {cpu:.0f} µs of processor each; floor {floor_rate:,.0f}/s, "
        f"{floor_cpu:.0f} µs; ratio {rate / floor_rate:.2f}; rounds {', '.join(f'{figure.rate:,.0f}' for figure in here)}; "
        f"aim {aim:,.0f} or {share} of the floor: {'reached' if reached else 'MISSED'}"
    )
    return reached


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--w1", type=int, default=5_000)
    options.add_argument("--w2", type=int, default=500)
    options.add_argument("--profile", help="write a cProfile of the engine's part to this file")
    chosen = options.parse_args()
    profile = cProfile.Profile() if chosen.profile else None
    pace_the_collector()  # as `durable worker` does; the floor has the same
    print(
        f"machine: {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, load {os.getloadavg()[0]:.1f}, fdatasync {in_folder(fsync_time):.2f} ms"
    )
    workloads = (("W1", chosen.w1, 1), ("W2", chosen.w2, 10))
    reached = [compared(name, runs, steps, chosen.rounds, profile) for name, runs, steps in workloads]
    if profile is not None:
        profile.dump_stats(chosen.profile)
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
