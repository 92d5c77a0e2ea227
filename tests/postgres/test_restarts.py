"""Crashes of the server (rules 3, 42, 63): `pg_ctl stop -m immediate` and a start again, while runs of three steps flow.

The workers are processes of their own, and the runs flow until the last fault is over. What must hold is read from the tables, from what
was acknowledged to the client, and from the log that bodies and steps wrote: all runs ended right, nothing that was acknowledged is
lost, no step ran again after its record was acknowledged, no worker ended. It goes on until so many crashes have met a step that was
under way. `DURABLE_POSTGRES_RESTARTS` and `DURABLE_POSTGRES_RESTART_GAP` ("5-20", seconds) make it longer; `nox -s restarts` does.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres import three_steps
from postgres.conftest import until
from postgres.three_steps import SETTINGS, STEPS, expected
from servers.postgres import Database, Process, Server, start_server

import durable
from durable.errors import StoreUnavailable
from durable.model import ALL
from durable.settings import Settings
from durable_postgres import backend

RESTARTS = int(os.environ.get("DURABLE_POSTGRES_RESTARTS", "3"))
SHORTEST, LONGEST = map(float, os.environ.get("DURABLE_POSTGRES_RESTART_GAP", "0.5-1.5").split("-"))
SEED = int(os.environ.get("DURABLE_POSTGRES_RESTART_SEED", str(random.randrange(1_000_000))))
WORKERS = 3
MOST = 3 * RESTARTS  # crashes, those that met no step included
FLOW = 30  # runs that must be acknowledged between two crashes, or the crash hit nothing
ENDS = "SELECT run_id, status, output::text FROM durable_run"
RECORDS = "SELECT run_id, count(*) FROM durable_step WHERE kind = 'step' GROUP BY run_id"


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that may be stopped."""
    made = start_server()
    yield made
    assert made.process is not None
    made.process.remove()


class Campaign:
    """Workers, a client that submits all the time, and a server that is ended and started again."""

    def __init__(self, database: Database, process: Process, folder: Path) -> None:
        self.database, self.process, self.log = database, process, folder / "bodies.log"
        self.random = random.Random(SEED)
        self.acknowledged: dict[str, int] = {}
        self.flowing = True
        self.refused = 0
        self.crashes = 0
        self.hit = 0
        self.workers = [self.worker(folder / f"worker{number}.err") for number in range(WORKERS)]

    def worker(self, errors: Path) -> subprocess.Popen[str]:
        with errors.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, three_steps.__file__, self.database.url, str(self.log)],
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
            )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", errors.read_text()
        return process

    async def submit(self, client: durable.Client) -> None:
        """One after the other, each by its key until it is acknowledged (42)."""
        number = 0
        while self.flowing:
            try:
                run = await client.start(three_steps.three_steps.using(idempotency_key=f"run {number}"), number)
            except StoreUnavailable:
                self.refused += 1
                await asyncio.sleep(0.05)
                continue
            self.acknowledged[run.id] = number
            number += 1
            await asyncio.sleep(0.01)

    async def flow(self, what: str) -> None:
        seen = len(self.acknowledged)
        await until(lambda: len(self.acknowledged) >= seen + FLOW, what)

    def alive(self) -> None:
        assert [worker.poll() for worker in self.workers] == [None] * WORKERS, "a worker ended by itself"

    async def run(self) -> None:
        async with durable.Client(self.database.url, settings=SETTINGS) as client:
            submitting = asyncio.create_task(self.submit(client))
            while self.hit < RESTARTS:
                assert self.crashes < MOST, f"void: {self.hit} of {MOST} crashes met a step that was under way"
                next_one = time.monotonic() + self.random.uniform(SHORTEST, LONGEST)
                await self.flow(f"runs to flow before crash {self.crashes}")
                await asyncio.sleep(max(next_one - time.monotonic(), 0))
                await until(lambda: read(self.log.read_text()).under_way, "a step under way")
                self.alive()
                await asyncio.to_thread(self.process.stop, immediate=True)
                self.crashes += 1
                self.hit += bool(read(self.log.read_text()).under_way)
                await asyncio.sleep(self.random.uniform(0, 1.5))
                await asyncio.to_thread(self.process.start)
            await self.flow("runs to flow after the last crash")
            self.flowing = False
            await submitting
            await self.ended()
            self.alive()
            assert list(await client.store.audit(scope=ALL)) == []

    async def ended(self) -> None:
        """Wait until no run is on its way; what does not move on for a while never will."""
        left, since = -1, time.monotonic()
        while left:
            with self.database.connect() as con:
                row = con.execute("SELECT count(*) FROM durable_run WHERE finished_at IS NULL").fetchone()
            assert row is not None
            now = int(str(row[0]))
            if now != left:
                left, since = now, time.monotonic()
            assert time.monotonic() < since + 60, f"{left} runs do not come to an end (seed {SEED})"
            await asyncio.sleep(0.2)

    def stop(self) -> list[int | None]:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.communicate(timeout=60)
            if worker.poll() is None:
                worker.kill()
                worker.wait(60)
        return [worker.returncode for worker in self.workers]


@dataclasses.dataclass(frozen=True)
class Witness:
    """What the log says."""

    repeated: int
    """Steps that ran more often than once; each must have been cut off before its record was acknowledged."""
    after: list[str]
    """Steps that ran although their record had been acknowledged before."""
    under_way: int
    """Steps that ran and whose record was not acknowledged yet."""


def read(log: str) -> Witness:
    """Read the log in its order."""
    acknowledged: set[tuple[str, str]] = set()
    ran: collections.Counter[tuple[str, str]] = collections.Counter()
    after: list[str] = []
    for line in log.splitlines():
        run_id, what, place = line.split(" ")
        if what == "got":
            acknowledged.add((run_id, place))
        else:
            ran[run_id, place] += 1
            if (run_id, place) in acknowledged:
                after.append(line)
    return Witness(sum(ran.values()) - len(ran), after, len(ran.keys() - acknowledged))


def test_the_log_tells_a_step_that_ran_after_its_record_was_acknowledged() -> None:
    assert read("a ran 0\na got 0\na ran 1\na got 0\na ran 1\na got 1") == Witness(1, [], 0)
    assert read("a ran 0\na got 0\nb ran 0\na ran 0") == Witness(1, ["a ran 0"], 1)


@pytest.mark.slow
@pytest.mark.timeout(180 + MOST * (30 + int(LONGEST)))
async def test_crashes_of_the_server_lose_nothing_repeat_no_recorded_step_and_end_no_worker(
    own_server: Server, tmp_path: Path
) -> None:
    assert own_server.process is not None
    database = own_server.create()
    await (await backend.open(database.url, settings=Settings(), auto_migrate=True)).close()
    campaign = Campaign(database, own_server.process, tmp_path)
    try:
        await campaign.run()
        with database.connect() as con:
            ends = {str(run_id): (status, output) for run_id, status, output in con.execute(ENDS)}
            records = dict(con.execute(RECORDS).fetchall())
    finally:
        codes = campaign.stop()
    assert codes == [0] * WORKERS
    wanted = {run_id: ("completed", str(expected(number))) for run_id, number in campaign.acknowledged.items()}
    assert ends == wanted, f"seed {SEED}"  # neither lost nor there twice
    assert records == dict.fromkeys(wanted, STEPS)
    witness = read(campaign.log.read_text())
    assert witness.after == [], f"seed {SEED}"
    print(
        f"\n{campaign.crashes} crashes, {campaign.hit} of them in the middle of steps, {len(wanted)} runs, {campaign.refused} submits"
        f" repeated, {witness.repeated} steps cut off before their record and run again (seed {SEED}): no violation"
    )


@durable.function(name="nothing_to_do", registry=durable.Registry("test_restarts"))
async def nothing_to_do(ctx: durable.Context) -> str:
    return "done"


LISTENERS = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"


async def test_a_worker_is_not_healthy_while_the_server_is_away_and_recovers_with_its_listener(
    own_server: Server,
) -> None:
    """Long after its lease the worker is still there; when the server is, it works, and is woken instead of polling (14, 67)."""
    assert own_server.process is not None
    database = own_server.create()
    settings = {"poll": "60s", "poll_idle": "60s"}  # what is found at once, was told
    async with (
        durable.Client(database.url, settings=settings, auto_migrate=True) as client,
        durable.Worker(client, functions=[nothing_to_do], lease="1s") as worker,
    ):
        assert await client.run(nothing_to_do) == "done"
        await until(lambda: worker.healthy, "good health")
        await asyncio.to_thread(own_server.process.stop, immediate=True)
        await until(lambda: not worker.healthy, "bad health")
        await asyncio.to_thread(own_server.process.start)
        await until(lambda: worker.healthy, "good health")
        with database.connect() as con:
            await until(lambda: con.execute(LISTENERS).fetchall(), "the listener")
        assert [await client.run(nothing_to_do) for _ in range(3)] == ["done"] * 3
