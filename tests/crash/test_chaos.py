"""SIGKILL at random moments: three worker processes on one SQLite file, killed again and again while runs are submitted.

What must hold at the end, and is checked from the store, from a poller that has read the journal through a second connection all
the time, and from the log that the bodies wrote: every run completed with the right value, no record changed or went away, no step was
run after its record was there, and bodies were repeated at most as often as kills can explain. It goes on until so many kills have met
a body in its middle, and for so long there is always more to do: how many runs that takes, is up to the machine. `DURABLE_CHAOS_KILLS`
and `DURABLE_CHAOS_RUNS` (at least) make it longer.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import sqlite3
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from crash.population import BODY, END, LANDED, STEPS, eight_steps, expected, work_until_killed

import durable
from durable import model as m

KILLS = int(os.environ.get("DURABLE_CHAOS_KILLS", "10"))
RUNS = int(os.environ.get("DURABLE_CHAOS_RUNS", str(max(100, 5 * KILLS))))
SEED = int(os.environ.get("DURABLE_CHAOS_SEED", str(random.randrange(1_000_000))))
WORKERS = 3
CONCURRENCY = 10
READY = 2 * CONCURRENCY  # runs that wait for a worker until the last kill
BETWEEN = 0.3  # seconds: the longest time from a kill to the next, about as long as a body of eight steps
MOST = 20 + 2 * KILLS  # kills in all, those that met nobody included
PATIENCE = 120 + KILLS  # seconds, for one victim and for the end: generous, nothing is measured


@dataclasses.dataclass
class Line:
    at: int
    pid: int
    run_id: str
    what: str


class Poller(threading.Thread):
    """Reads the journal through its own connection, and remembers every record as it was first seen."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.stopping, self.rounds = path, threading.Event(), 0
        self.first: dict[tuple[str, str], tuple[Any, ...]] = {}
        self.wrong: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=30)) as con:
                while not self.stopping.is_set():
                    self.look(con)
                    self.stopping.wait(0.1)
                self.look(con)
        except BaseException as error:
            self.error = error

    def look(self, con: sqlite3.Connection) -> None:
        query = "SELECT run_id, step_id, result, created_at, position, fence FROM durable_step WHERE kind <> 'attempt'"
        now = {(row[0], row[1]): tuple(row[2:]) for row in con.execute(query)}
        for key, row in self.first.items():
            if now.get(key) != row:
                self.wrong.append(f"{key} was {row} and is {now.get(key)}")
        self.first = {**now, **self.first}
        self.rounds += 1


class Bodies:
    """What each process is in the middle of, by the log as far as it is written."""

    def __init__(self, log: Path) -> None:
        self.log, self.read = log, 0
        self.begun: collections.defaultdict[int, set[str]] = collections.defaultdict(set)
        """Runs whose bodies have begun and not ended."""
        self.unlanded: collections.defaultdict[int, set[str]] = collections.defaultdict(set)
        """Runs whose bodies have begun, and that are not known to have landed."""

    def look(self) -> None:
        """Read on."""
        with self.log.open("rb") as log:
            log.seek(self.read)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in map(read, whole.splitlines()):
            if line.what == BODY:
                self.begun[line.pid].add(line.run_id)
                self.unlanded[line.pid].add(line.run_id)
            elif line.what in (END, LANDED):
                (self.begun if line.what == END else self.unlanded)[line.pid].discard(line.run_id)


class Campaign:
    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "chaos.db", folder / "bodies.log"
        self.log.touch()
        self.bodies = Bodies(self.log)
        self.url = f"sqlite:///{self.path}"
        self.context = multiprocessing.get_context("forkserver")
        # The fork server imports once what every worker needs, so that a new one is at work within milliseconds. It finds
        # modules by the environment alone.
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*sys.path, os.environ.get("PYTHONPATH", "")]))
        self.context.set_forkserver_preload(["crash.population"])
        self.random = random.Random(SEED)
        self.workers = [self.start() for _ in range(WORKERS)]
        self.killed: list[int] = []
        self.numbers: dict[str, int] = {}

    def start(self) -> Any:
        process = self.context.Process(
            target=work_until_killed, args=(self.url, str(self.log), CONCURRENCY), daemon=True
        )
        process.start()
        return process

    @property
    def hits(self) -> int:
        """Kills that met a body in its middle."""
        self.bodies.look()
        return sum(bool(self.bodies.begun[pid]) for pid in self.killed)

    def kill_one(self) -> None:
        """At a random moment: mostly one that is in the middle of a body, now and then any."""
        anybody = self.random.random() < 0.1
        deadline = time.monotonic() + PATIENCE
        places: list[int] = []
        while not places:
            assert time.monotonic() < deadline, "nobody is in the middle of a body"
            time.sleep(self.random.uniform(0, BETWEEN))
            self.bodies.look()
            places = [place for place, worker in enumerate(self.workers) if anybody or self.bodies.begun[worker.pid]]
        place = self.random.choice(places)
        victim = self.workers[place]
        assert victim.is_alive(), f"a worker ended by itself, with {victim.exitcode}"
        victim.kill()
        victim.join()
        self.killed.append(victim.pid)
        self.workers[place] = self.start()

    async def run(self) -> list[m.RunRecord]:
        """Kill, while there is always more to do, until enough kills have met a body; then wait until every run has ended."""
        async with durable.Client(self.url) as client:
            await self.submit(client, RUNS)
            async with asyncio.TaskGroup() as group:
                over = asyncio.Event()
                group.create_task(self.feed(client, over))
                while self.hits < KILLS:
                    assert len(self.killed) < MOST, f"only {self.hits} of {MOST} kills met a body"
                    await asyncio.to_thread(self.kill_one)
                over.set()
            ids = list(self.numbers)

            async def ended() -> bool:
                pulses = await client.store.pulse(ids, scope=None)
                return all(pulse is not None and pulse.status in m.TERMINAL for pulse in pulses)

            await self.until(ended)
            assert not list(await client.store.audit(scope=m.ALL))
            return [run for run in await client.store.get(ids, scope=None) if run is not None]

    async def feed(self, client: durable.Client, over: asyncio.Event) -> None:
        """However quick the machine is, no worker runs out of work."""
        while not over.is_set():
            if await client.count(status="pending") < READY:
                await self.submit(client, READY)
            await asyncio.sleep(0.02)

    async def submit(self, client: durable.Client, count: int) -> None:
        numbers = range(len(self.numbers), len(self.numbers) + count)
        runs = await asyncio.gather(*(client.start(eight_steps, number) for number in numbers))
        self.numbers.update((run.id, number) for run, number in zip(runs, numbers, strict=True))

    async def until(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not await condition():
            assert time.monotonic() < deadline, "the runs do not come to an end"
            await asyncio.sleep(0.1)

    def stop(self) -> None:
        for process in self.workers:
            process.terminate()
        for process in self.workers:
            process.join(60)
            if process.exitcode is None:
                process.kill()
                process.join()

    def begun_anew(self, lines: list[Line]) -> int:
        """Kills after which a run that was in the middle of its body there was begun anew by another process."""
        bodies = collections.defaultdict(list)
        for line in lines:
            if line.what == BODY:
                bodies[line.run_id].append(line.pid)
        left = {pid for pids in bodies.values() for pid, later in itertools.pairwise(pids) if pid != later}
        return sum(pid in left for pid in self.killed)


def read(line: bytes) -> Line:
    at, pid, run_id, what = line.decode().split()
    return Line(int(at), int(pid), run_id, what)


@pytest.mark.timeout(0)
def test_killed_workers_lose_no_run_change_no_record_and_repeat_no_recorded_step(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    try:
        asyncio.run(_migrated(campaign.url))
        poller = Poller(campaign.path)
        poller.start()
        runs = asyncio.run(campaign.run())
        campaign.stop()
        poller.stopping.set()
        poller.join(60)
    finally:
        campaign.stop()
    lines = [read(line) for line in campaign.log.read_bytes().splitlines()]
    _check(campaign, poller, runs, lines)
    kills = len(campaign.killed)
    print(
        f"\n{kills} kills, {campaign.hits} of them in the middle of a body, over {len(runs)} runs and {len(poller.first)} records"
        f" (seed {SEED}): no violation; 95 % bound on the rate of violations: {3 / kills:.4f} per kill, {3 / len(runs):.5f} per run"
    )


async def _migrated(url: str) -> None:
    async with durable.Client(url) as client:
        await client.store.migrate()


def _check(campaign: Campaign, poller: Poller, runs: list[m.RunRecord], lines: list[Line]) -> None:
    assert poller.error is None, poller.error
    assert poller.rounds > 3
    assert not poller.wrong, f"records changed or went away (seed {SEED}): {poller.wrong[:5]}"
    count = len(campaign.numbers)
    assert len(runs) == count
    ends = collections.Counter(str(run.status) for run in runs)
    assert ends == {"completed": count}, (
        f"(seed {SEED}) {ends}: {[run for run in runs if run.status != 'completed'][:2]}"
    )
    for run in runs:
        assert json.loads(run.output or "null") == expected(campaign.numbers[run.run_id])
    with contextlib.closing(sqlite3.connect(campaign.path)) as con:
        assert con.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        records = con.execute("SELECT run_id, step_id, created_at FROM durable_step WHERE kind = 'step'").fetchall()
    assert len(records) == STEPS * count
    written = {(run_id, step_place(step_id)): at for run_id, step_id, at in records}
    steps = [line for line in lines if line.what.isdigit()]
    late = [line for line in steps if line.at > written[line.run_id, int(line.what)]]
    assert not late, f"steps were run after they were recorded (seed {SEED}): {late[:5]}"
    bodies = sum(line.what == BODY for line in lines)
    cut = sum(len(campaign.bodies.unlanded[pid]) for pid in campaign.killed)
    assert count <= bodies <= count + cut, f"{bodies - count} bodies were repeated, kills explain {cut} (seed {SEED})"
    assert len(steps) <= STEPS * count + cut, f"more steps were repeated than kills explain (seed {SEED})"
    assert campaign.begun_anew(lines) >= campaign.hits >= KILLS, "a body that a kill cut off was not begun anew"


def step_place(step_id: str) -> int:
    """`work`, `work#2`, …: the place of the call in the body."""
    _, mark, number = step_id.partition("#")
    return int(number) - 1 if mark else 0
