"""What flow control costs on PostgreSQL (rules 10, 73): the same statements without a limit, and what one adds.

The server explains what it carried out, as in `test_plans.py`; among the permits are thousands of other scopes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest import mock

import pytest
from postgres.conftest import template, until
from postgres.test_plans import TAKEN, TENANT, Eye, Seen, claim, watched
from servers.postgres import Database, server

from durable.model import ALL, Completed, HandedBack, QueueRecord
from durable.protocol import Store
from durable.storekit import tenant_of
from durable.testing.conformance.scenario import Scene
from durable_postgres.claim import ROUNDS

WAITING = (
    "SELECT count(*)::integer FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
READY = 20_000
OTHERS = 50_000


@pytest.fixture
def eye() -> Iterator[Eye]:
    database = server().create(template())
    with database.connect() as con:
        con.execute(f"""
            INSERT INTO durable_run (run_id, name, status, created_at, updated_at, seed, input, concurrency_key, tenant_id)
            SELECT 'r' || i, 'f0', 'pending', now(), now(), '\\x00', '1', 'k', CASE WHEN i % 2 = 0 THEN uuid '{TENANT}' END
            FROM generate_series(1, {READY}) AS i""")
        con.execute(f"""
            INSERT INTO durable_permit (scope, run_id, taken_at)
            SELECT '*/queue:other' || i % 500, 'o' || i, now() FROM generate_series(1, {OTHERS}) AS i""")
        con.execute("VACUUM ANALYZE")
    with mock.patch("durable_postgres.connection.teach", watched):
        made = Eye(database)
        yield made
        made.close()


def complete(eye: Eye) -> int:
    leases, eye.leases = eye.leases[:TAKEN], eye.leases[TAKEN:]
    answers = eye.do(eye.store.settle([(lease, Completed(output="1")) for lease in leases]))
    assert set(answers) == {"landed"}
    return len(answers)


def hand_back(eye: Eye) -> int:
    leases, eye.leases = eye.leases[:TAKEN], eye.leases[TAKEN:]
    answers = eye.do(eye.store.settle([(lease, HandedBack()) for lease in leases]))
    assert set(answers) == {"landed"}
    return len(answers)


def limit(eye: Eye, name: str, most: int) -> None:
    eye.do(eye.store.set_queue(QueueRecord(scope_name=name, tenant=ALL, max_concurrency=most)))


def read(seen: list[Seen]) -> tuple[int, int]:
    """Rows of runs and of permits."""
    return sum(one.searched + one.fetched for one in seen), sum(one.permits for one in seen)


def test_a_queue_without_limits_executes_the_same_statements_whatever_is_limited_elsewhere(eye: Eye) -> None:
    def life() -> list[str]:
        statements: list[str] = []
        for work in (claim, complete, claim, hand_back):
            taken, seen = eye.look(work)
            assert taken == TAKEN
            statements += [one.text for one in seen if "durable_" in one.text]
        return statements

    life()
    before = life()
    for name in ("queue:other", "key:other", "share:other", "function:other"):
        limit(eye, name, 1)
    eye.do(eye.store.set_queue(QueueRecord(scope_name="queue:other", tenant=tenant_of(TENANT), max_concurrency=1)))
    assert life() == before


def test_a_limit_that_is_not_reached_reads_a_permit_for_each_run_that_leaves(eye: Eye) -> None:
    """One row for each run: the permit that a settle gives back. A claim counts what is in flight once, not for each run, in the index of
    the scope."""
    without: dict[str, tuple[int, int]] = {}
    for work in (claim, complete, claim, hand_back):
        _, seen = eye.look(work)
        without[work.__name__] = read(seen)
    assert {permits for _, permits in without.values()} == {0}
    limit(eye, "queue:default", 10 * TAKEN)
    for in_flight in (0, TAKEN, 2 * TAKEN):
        taken, seen = eye.look(claim)
        assert taken == TAKEN
        runs, permits = read(seen)
        print(
            f"claim of {taken} with {in_flight} in flight: {runs} rows of runs, {permits} permits; without a limit {without['claim'][0]}"
        )
        assert runs <= without["claim"][0] + TAKEN
        assert permits == in_flight
    for work in (complete, hand_back):
        taken, seen = eye.look(work)
        assert taken == TAKEN
        runs, permits = read(seen)
        print(
            f"{work.__name__} of {taken}: {runs} rows of runs, {permits} permits; without a limit {without[work.__name__][0]}"
        )
        assert runs <= without[work.__name__][0]
        assert permits <= TAKEN + 1, "each is given back, and one look says whether there are any"


def test_a_claim_counts_no_further_than_the_limit(eye: Eye) -> None:
    """A limit was lowered far below what is in flight."""
    for _ in range(4):
        eye.look(claim)
    limit(eye, "queue:default", 10)
    taken, seen = eye.look(claim)
    assert taken == 0
    _, permits = read(seen)
    assert 0 < permits <= 10 * ROUNDS, "each look at the heads counts as far as the limit"


@pytest.mark.parametrize("held", ["a claim", "a record"])
async def test_a_limit_that_is_set_beside_a_transaction_under_way_counts_its_run(
    held: str, database: Database, store: Store
) -> None:
    """A claim that did not look for the limit, or a record that has the run's row: the limit waits for it, and counts the run (73)."""
    scene = Scene(store, None)  # type: ignore[arg-type]
    run = await scene.start()
    claimed = await scene.take_again(run.run_id) if held == "a record" else None
    with database.connect() as con:
        con.execute(f"""
            CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
            CREATE TRIGGER wait AFTER {"UPDATE ON durable_run" if claimed is None else "INSERT ON durable_step"}
            FOR EACH STATEMENT EXECUTE FUNCTION wait();
            SELECT pg_advisory_lock(4711)""")
        writing = asyncio.create_task(scene.take_again(run.run_id) if claimed is None else scene.append(claimed, "a"))
        await until(lambda: con.execute(WAITING).fetchone() == (1,), "the write to wait for the test")
        setting = asyncio.create_task(
            store.set_queue(QueueRecord(scope_name="queue:default", tenant=ALL, max_concurrency=1))
        )
        await until(
            lambda: con.execute(WAITING).fetchone() == (2,) or setting.done(), "the limit to wait for the write"
        )
        con.execute("SELECT pg_advisory_unlock(4711)")
        await asyncio.gather(writing, setting)
        assert con.execute("SELECT scope, run_id FROM durable_permit").fetchall() == [("*/queue:default", run.run_id)]
