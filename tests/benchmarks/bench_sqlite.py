"""Figures of one worker on one SQLite file: W1 (one-step runs) and W2 (ten-step runs), with a floor beside them.

    python tests/benchmarks/bench_sqlite.py [--rounds 3] [--w1 5000] [--w2 500] [--profile FILE]

The floor is the least that a Python program with group commit does on the same tables' worth of work: one connection, one writer
thread, fenced statements, one commit per batch, `synchronous=FULL`. It runs interleaved with the engine, in the same process and
on the same disk, so that the ratio means something on a noisy machine. Exits 1 if the engine misses its aim: W1 >= 1,500 runs/s and
W2 >= 4,000 steps/s, or 0.35 of the floor.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import queue
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from figures import CONCURRENCY, Aim, Bench, echo, engine, figures, options

AIMS = {"W1": Aim(1_500, 0.35), "W2": Aim(4_000, 0.35)}


async def on_engine(folder: Path, runs: int, steps: int, profile: cProfile.Profile | None) -> float:
    """The engine, on a file of its own."""
    return await engine(f"sqlite:///{folder / 'engine.db'}", runs, steps, profile)


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


async def in_folder(work: Callable[[Path, int, int], Coroutine[Any, Any, float]], runs: int, steps: int) -> float:
    with tempfile.TemporaryDirectory(prefix="durable-bench-") as folder:
        return await work(Path(folder), runs, steps)


def main() -> int:
    chosen = options(__doc__ or "")
    profile = cProfile.Profile() if chosen.profile else None
    bench = Bench(
        lambda runs, steps: in_folder(lambda folder, *size: on_engine(folder, *size, profile), runs, steps),
        lambda runs, steps: in_folder(floor, runs, steps),
        AIMS,
    )
    reached = figures(bench, chosen, f"SQLite {sqlite3.sqlite_version}")
    if profile is not None:
        profile.dump_stats(chosen.profile)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
