"""Runs that sleep for a day cost a worker no memory and a claim no work, on SQLite (10, 30): 5,000, or `DURABLE_SUSPENDED_RUNS`."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path

import pytest
from plans.bulk import NOW, SERIES, Microscope, _migrate
from plans.sleepers import SLEEPERS, check_memory

from durable import model as m
from durable.settings import SECOND

READY = 400
TAKEN = 100
INSERT = """
    {series} INSERT INTO durable_run (run_id, name, status, attempts, available_at, created_at, updated_at, started_at, seed, input,
        wake_seq, max_attempts)
    SELECT '{status}-' || i, 'f0', '{status}', {attempts}, {available}, {now}, {now}, {now}, x'00', '[[],{{}}]', 0, 1 FROM n"""


def made(path: Path, sleepers: int, now: int, ready: int = 0) -> Path:
    """A file with so many sleepers, and some that are ready."""
    asyncio.run(_migrate(path))
    with contextlib.closing(sqlite3.connect(path)) as con:
        kinds = (("suspended", sleepers, 1, f"{now} + 86400000000 + i"), ("pending", ready, 0, "NULL"))
        for status, count, attempts, available in kinds:
            if count:
                values = {"status": status, "attempts": attempts, "available": available, "now": now}
                con.execute(INSERT.format(series=SERIES.format(count=count), **values))
        con.commit()
    return path


@pytest.mark.timeout(900 + SLEEPERS // 50)
def test_sleeping_runs_cost_a_worker_no_memory(tmp_path: Path) -> None:
    now = time.time_ns() // 1_000
    without, beside = made(tmp_path / "without.db", 0, now), made(tmp_path / "beside.db", SLEEPERS, now)
    check_memory(f"sqlite:///{without}", f"sqlite:///{beside}")


def test_sleeping_runs_cost_a_claim_no_work(tmp_path: Path) -> None:
    steps = []
    for name, sleepers in (("without.db", 0), ("beside.db", SLEEPERS)):
        scope = Microscope(made(tmp_path / name, sleepers, NOW, READY))
        for claim in range(2):
            request = m.ClaimRequest(
                mark=f"mark{claim}",
                queues={"default": TAKEN},
                functions=[("f0", None)],
                limit=TAKEN,
                lease=60 * SECOND,
                family="x",
                scope=m.ALL,
            )
            with scope.looking():
                assert len(scope.do(scope.store.claim(request))) == TAKEN
        steps.append(scope.steps)
        with scope.looking():
            assert scope.do(scope.store.promote(scope=m.ALL, limit=500)).count == 0
        assert scope.steps < 1_000, "an idle promotion looks at the next one that is due, and at no other"
        scope.close()
    print(f"steps of SQLite's machine for a claim of {TAKEN}: {steps[0]} alone, {steps[1]} beside {SLEEPERS:,}")
    assert steps[1] <= 1.05 * steps[0]
