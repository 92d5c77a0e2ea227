"""Runs that sleep for a day cost a worker no memory and a claim no buffers, on PostgreSQL (10, 30): 5,000, or `DURABLE_SUSPENDED_RUNS`."""

from __future__ import annotations

from unittest import mock

import pytest
from plans.sleepers import SLEEPERS, check_memory
from postgres.conftest import template
from postgres.test_plans import TAKEN, Eye, claim, watched
from servers.postgres import Database, server

READY = 400
INSERT = """
    INSERT INTO durable_run (run_id, name, status, attempts, available_at, created_at, updated_at, started_at, seed, input)
    SELECT '{status}-' || i, 'f0', '{status}', {attempts}, {available}, now(), now(), now(), '\\x00', '[[],{{}}]'
    FROM generate_series(1, {count}) AS i"""


def made(sleepers: int, ready: int = 0) -> Database:
    """A database with so many sleepers, and some that are ready."""
    database = server().create(template())
    with database.connect() as con:
        later = "now() + interval '1 day' + i * interval '1 ms'"
        con.execute(INSERT.format(status="suspended", attempts=1, available=later, count=sleepers))
        con.execute(INSERT.format(status="pending", attempts=0, available="NULL", count=ready))
        con.execute("VACUUM ANALYZE")
    return database


@pytest.mark.timeout(900 + SLEEPERS // 50)
def test_sleeping_runs_cost_a_worker_no_memory() -> None:
    without, beside = made(0), made(SLEEPERS)
    check_memory(without.url, beside.url)
    without.drop()
    beside.drop()


@pytest.mark.timeout(900 + SLEEPERS // 50)
def test_sleeping_runs_cost_a_claim_no_buffers() -> None:
    found = []
    with mock.patch("durable_postgres.connection.teach", watched):
        for sleepers in (0, SLEEPERS):
            eye = Eye(made(sleepers, READY))
            eye.look(claim)
            taken, seen = eye.look(claim)
            assert taken == TAKEN
            found.append((sum(one.searched for one in seen), sum(one.buffers for one in seen)))
            eye.close()
    (searched, buffers), (more_searched, more_buffers) = found
    print(
        f"a claim of {TAKEN}: {searched} rows and {buffers} buffers alone, {more_searched} and {more_buffers} beside {SLEEPERS:,}"
    )
    assert more_searched <= searched
    assert more_buffers <= 1.5 * buffers, "the index of all runs is deeper by a level, and that is all"
