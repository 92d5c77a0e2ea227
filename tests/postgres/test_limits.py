"""What flow control costs on PostgreSQL (rules 10, 73): the same statements without a limit, and what one adds.

The server explains what it carried out, as in `test_plans.py`; among the permits are thousands of other scopes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from unittest import mock

import pytest
from postgres.conftest import Open, template, until
from postgres.test_plans import TAKEN, TENANT, Eye, Seen, claim, watched
from servers.postgres import Database, server
from sqlite.test_flow import SILENT, with_silent_permits

from durable.model import ALL, Completed, HandedBack, QueueRecord
from durable.protocol import Store
from durable.storekit import tenant_of
from durable.testing.conformance.scenario import Scene, new_run
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
            INSERT INTO durable_permit (scope, run_id, taken_at, number, in_flight)
            SELECT '*/queue:other' || i % 500, 'o' || i, now(), i / 500, i / 500 FROM generate_series(1, {OTHERS}) AS i""")
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
    """One row for each run: the permit that a settle gives back. A claim looks at the newest permit of the scope, whatever is in flight."""
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
        assert runs <= without["claim"][0]
        assert permits <= 1
    for work in (complete, hand_back):
        taken, seen = eye.look(work)
        assert taken == TAKEN
        runs, permits = read(seen)
        print(
            f"{work.__name__} of {taken}: {runs} rows of runs, {permits} permits; without a limit {without[work.__name__][0]}"
        )
        assert runs <= without[work.__name__][0]
        assert permits <= TAKEN


@pytest.mark.parametrize("name", ["queue:default", "function:f0", "key:default"])
def test_a_claim_of_one_run_reads_one_permit_however_many_are_in_flight(eye: Eye, name: str) -> None:
    """The newest, which says how many there can be (73): a hundred claims of one run each, beside 400 in flight under a limit of 1,000, of
    which the oldest lands each time; against the same without a limit."""

    def claim_of_one(eye: Eye) -> int:
        return claim(eye, limit=1)

    def completion_of_one(eye: Eye) -> int:
        (answer,) = eye.do(eye.store.settle([(eye.leases.pop(0), Completed(output="1"))]))
        assert answer == "landed"
        return 1

    cost: dict[int | None, dict[str, tuple[int, int]]] = {}
    for most in (None, 1_000):
        if most is not None:
            eye.do(eye.store.settle([(lease, Completed(output="1")) for lease in eye.leases]))
            eye.leases.clear()
            limit(eye, name, most)
        while len(eye.leases) < 400:
            assert claim(eye) == TAKEN
        with eye.database.connect() as con:
            con.execute("VACUUM ANALYZE")  # the plans are those of a database that knows how many are in flight
        cost[most] = {"claim": (0, 0), "settle": (0, 0)}
        for _ in range(100):
            for what, work in (("claim", claim_of_one), ("settle", completion_of_one)):
                taken, seen = eye.look(work)
                assert taken == 1
                (runs, permits), more = cost[most][what], read(seen)
                cost[most][what] = runs + more[0], permits + more[1]
    print(cost)
    free, limited = cost.values()
    assert limited["claim"][0] <= free["claim"][0]
    assert limited["claim"][1] <= 100, "the newest"
    assert limited["settle"][0] <= free["settle"][0]
    assert limited["settle"][1] <= 100, "the one that is given back"


def test_a_claim_counts_no_further_than_the_limit(eye: Eye) -> None:
    """A limit was lowered far below what is in flight."""
    for _ in range(4):
        eye.look(claim)
    limit(eye, "queue:default", 10)
    taken, seen = eye.look(claim)
    assert taken == 0
    _, permits = read(seen)
    assert 0 < permits <= 11 * ROUNDS, "each look at the heads counts as far as the limit"


@pytest.mark.parametrize("whose", SILENT)
async def test_permits_that_do_not_say_how_many_are_out_are_counted(
    scene: Scene, database: Database, whose: str
) -> None:
    """A worker of the version before may go on beside the others, and a limit may come while runs are in flight."""

    async def sql(statement: str) -> None:
        with database.connect() as con:
            con.execute(statement)

    await with_silent_permits(scene, whose, sql)


async def test_permits_from_before_they_said_how_many_are_out_are_counted(database: Database, opened: Open) -> None:
    """A database of version 1 with runs in flight under a limit."""
    scene = Scene(await opened(), None)  # type: ignore[arg-type]
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", max_concurrency=3))
    await scene.store.enqueue([new_run() for _ in range(5)])
    assert len(await scene.claim(2)) == 2
    with database.connect() as con:
        con.execute("ALTER TABLE durable_permit DROP COLUMN number, DROP COLUMN in_flight")
        con.execute("DELETE FROM durable_schema_version WHERE version > 1")
    scene = Scene(await opened(auto_migrate=True), None)  # type: ignore[arg-type]
    assert len(await scene.claim(5)) == 1
    assert list(await scene.store.audit(scope=ALL)) == []


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
