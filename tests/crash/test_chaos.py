"""SIGKILL at random moments: three worker processes on one SQLite file, killed again and again while runs are submitted.

What must hold at the end, and is checked from the store, from a poller that has read the journal through a second connection all
the time, and from the log that the bodies wrote: every run completed with the right value, no record changed or went away, no step was
run after its record was there, and bodies were repeated at most as often as kills can explain. A campaign that killed nobody in the
middle of a body is void. `DURABLE_CHAOS_KILLS` and `DURABLE_CHAOS_RUNS` make it longer.
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
from crash.population import BODY, STEPS, eight_steps, expected, work_until_killed

import durable
from durable import model as m

KILLS = int(os.environ.get("DURABLE_CHAOS_KILLS", "10"))
RUNS = int(os.environ.get("DURABLE_CHAOS_RUNS", str(max(100, 5 * KILLS))))
SEED = int(os.environ.get("DURABLE_CHAOS_SEED", str(random.randrange(1_000_000))))
WORKERS = 3
CONCURRENCY = 10
PATIENCE = 120 + KILLS  # seconds after the last kill: generous, nothing is measured


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


class Campaign:
    def __init__(self, folder: Path) -> None:
        self.path, self.log = folder / "chaos.db", folder / "bodies.log"
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

    def kill_one(self) -> None:
        """Mostly one that is in the middle of a body; now and then any."""
        place = self.random.randrange(WORKERS)
        if self.random.random() < 0.9:
            deadline = time.monotonic() + 10
            while (busy := self.busy()) is None and time.monotonic() < deadline:
                time.sleep(0.005)
            place = place if busy is None else busy
        victim = self.workers[place]
        assert victim.is_alive(), f"a worker ended by itself, with {victim.exitcode}"
        victim.kill()
        victim.join()
        self.killed.append(victim.pid)
        self.workers[place] = self.start()

    def busy(self) -> int | None:
        """The place of a worker that has noted something just now."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4_096))
            lines = log.read().split(b"\n")[1:-1]
        pids = [worker.pid for worker in self.workers]
        recent = [line.split() for line in lines]
        just_now = [int(pid) for at, pid, *_ in recent if int(at) > time.time_ns() // 1000 - 50_000]
        places = [pids.index(pid) for pid in just_now if pid in pids]
        return self.random.choice(places) if places else None

    async def run(self) -> list[m.RunRecord]:
        """Submit in portions, kill after each of them, then wait until every run has ended."""
        async with durable.Client(self.url) as client:
            await self.submit(client, RUNS - (KILLS - 1) * (RUNS // KILLS))
            await self.until(lambda: asyncio.to_thread(self.log.exists))
            for kill in range(KILLS):
                if kill:
                    await self.submit(client, RUNS // KILLS)
                await asyncio.sleep(self.random.uniform(0.05, 0.5))
                await asyncio.to_thread(self.kill_one)
            ids = list(self.numbers)

            async def ended() -> bool:
                pulses = await client.store.pulse(ids, scope=None)
                return all(pulse is not None and pulse.status in m.TERMINAL for pulse in pulses)

            await self.until(ended)
            assert not list(await client.store.audit(scope=m.ALL))
            return [run for run in await client.store.get(ids, scope=None) if run is not None]

    async def submit(self, client: durable.Client, count: int) -> None:
        for number in range(len(self.numbers), len(self.numbers) + count):
            run = await client.start(eight_steps, number)
            self.numbers[run.id] = number

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

    def lines(self) -> list[Line]:
        found = []
        for text in self.log.read_text().splitlines():
            at, pid, run_id, what = text.split(" ")
            found.append(Line(int(at), int(pid), run_id, what))
        return found

    def interrupted(self, lines: list[Line]) -> int:
        """Kills that hit a body: its run was begun anew afterwards by another process."""
        bodies = collections.defaultdict(list)
        for line in lines:
            if line.what == BODY:
                bodies[line.run_id].append(line.pid)
        begun_anew = {pid for pids in bodies.values() for pid, later in itertools.pairwise(pids) if pid != later}
        return sum(pid in begun_anew for pid in self.killed)


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
    lines = campaign.lines()
    _check(campaign, poller, runs, lines)
    hits = campaign.interrupted(lines)
    print(
        f"\n{KILLS} kills, {hits} of them in the middle of a body, over {len(runs)} runs and {len(poller.first)} records"
        f" (seed {SEED}): no violation; 95 % bound on the rate of violations: {3 / KILLS:.4f} per kill, {3 / len(runs):.5f} per run"
    )
    assert hits >= KILLS / 2, f"void: only {hits} of {KILLS} kills hit a running body"


async def _migrated(url: str) -> None:
    async with durable.Client(url) as client:
        await client.store.migrate()


def _check(campaign: Campaign, poller: Poller, runs: list[m.RunRecord], lines: list[Line]) -> None:
    assert poller.error is None, poller.error
    assert poller.rounds > 3
    assert not poller.wrong, f"records changed or went away (seed {SEED}): {poller.wrong[:5]}"
    assert len(runs) == RUNS == len(campaign.numbers)
    ends = collections.Counter(str(run.status) for run in runs)
    assert ends == {"completed": RUNS}, (
        f"(seed {SEED}) {ends}: {[run for run in runs if run.status != 'completed'][:2]}"
    )
    for run in runs:
        assert json.loads(run.output or "null") == expected(campaign.numbers[run.run_id])
    with contextlib.closing(sqlite3.connect(campaign.path)) as con:
        assert con.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        records = con.execute("SELECT run_id, step_id, created_at FROM durable_step WHERE kind = 'step'").fetchall()
    assert len(records) == STEPS * RUNS
    written = {(run_id, step_place(step_id)): at for run_id, step_id, at in records}
    late = [line for line in lines if line.what != BODY and line.at > written[line.run_id, int(line.what)]]
    assert not late, f"steps were run after they were recorded (seed {SEED}): {late[:5]}"
    bodies = sum(line.what == BODY for line in lines)
    assert bodies >= RUNS
    assert bodies - RUNS <= KILLS * CONCURRENCY, f"{bodies - RUNS} bodies were repeated"
    assert len(lines) - bodies - STEPS * RUNS <= KILLS * CONCURRENCY, "more steps were repeated than kills can explain"


def step_place(step_id: str) -> int:
    """`work`, `work#2`, …: the place of the call in the body."""
    _, mark, number = step_id.partition("#")
    return int(number) - 1 if mark else 0
