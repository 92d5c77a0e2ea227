"""Migrations (rule 69): whoever starts them, however many at once, whenever they are killed, there is one schema, and nobody is held up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from postgres import migrator
from postgres.conftest import until
from postgres.migrator import INDEX, LIVE, apply
from postgres.test_schema import catalog, run
from servers.postgres import Database, server

from durable.errors import ConfigurationError, Conflict
from durable.storekit import Migration, statements
from durable.testing.conformance.scenario import Scene
from durable_postgres import schema

ROUNDS = int(os.environ.get("DURABLE_POSTGRES_MIGRATION_ROUNDS", "2"))
PROCESSES = 8
FIRST = len(statements(schema.migrations()[0].text))
"""Statements of the first migration."""
NEXT = len(schema.migrations()) + 1
VERSION = "SELECT max(version) FROM durable_schema_version"
BUILDING = (
    "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%CONCURRENTLY%' AND wait_event_type = 'Lock'"
    " AND datname = current_database() AND pid <> pg_backend_pid()"
)
# The n-th statement that changes the schema waits, inside the server, for as long as the row is there.
PROBE = """
CREATE SCHEMA probe; CREATE SEQUENCE probe.commands; CREATE TABLE probe.hold AS SELECT 1;
CREATE FUNCTION probe.stop() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
    IF nextval('probe.commands') = {place} THEN
        WHILE EXISTS (SELECT 1 FROM probe.hold) LOOP PERFORM pg_sleep(0.01); END LOOP;
    END IF;
END $$;
CREATE EVENT TRIGGER stop ON ddl_command_start EXECUTE FUNCTION probe.stop();
"""
HELD = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
LET_GO = "DROP EVENT TRIGGER stop; DELETE FROM probe.hold"
OTHERS = (
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND backend_type = 'client backend'"
)


# -- live tables --------------------------------------------------------------------------------------------------------------


async def test_a_migration_of_live_tables_builds_its_index_concurrently(database: Database, scene: Scene) -> None:
    """A writer that is in the middle of something is waited for, and nobody is made to wait meanwhile."""
    writer = await psycopg.AsyncConnection.connect(database.url)
    await writer.execute("SELECT pg_advisory_lock(4711)")
    await writer.execute("UPDATE durable_run SET priority = 1")
    migrating = asyncio.create_task(apply(database.url, INDEX))
    await until(lambda: migrating.done() or run(database, BUILDING), "the build to wait for the writer")
    assert not migrating.done()
    await scene.take()  # the tables can be written meanwhile
    await writer.commit()
    assert (await migrating).missing == []
    await writer.close()


async def test_a_change_of_a_table_that_somebody_reads_holds_up_nobody(database: Database, scene: Scene) -> None:
    """It would stand in front of everybody who comes after it: so it waits a moment, lets them through, and tries again."""
    reader = await psycopg.AsyncConnection.connect(database.url)
    await reader.execute("SELECT 1 FROM durable_run")
    migrating = asyncio.create_task(apply(database.url, LIVE))
    waiting = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'ALTER%' AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
    await until(lambda: run(database, waiting), "the change to wait for the reader")
    await scene.take()  # waits at most for one moment of the migration
    assert not migrating.done()
    await reader.rollback()
    assert (await migrating).missing == []
    await reader.close()


async def test_an_index_that_a_killed_build_left_invalid_is_dropped_and_built_again(database: Database) -> None:
    run(database, "ALTER TABLE durable_run ADD COLUMN later integer")
    run(database, "CREATE INDEX durable_run_later ON durable_run (later)")
    run(database, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'durable_run_later'::regclass")
    status = await apply(database.url, LIVE)
    assert (status.missing, run(database, VERSION)) == ([], [(NEXT,)])


async def test_an_index_is_swapped_without_holding_up_a_writer(database: Database, scene: Scene) -> None:
    """The new one is built, then the old one dropped, both beside whoever writes. Between them the migration waits for the test."""
    text = (
        "-- not transactional\nCREATE INDEX CONCURRENTLY durable_run_due_2 ON durable_run (available_at, run_id);\n"
        "SELECT pg_advisory_xact_lock(4711);\nDROP INDEX durable_run_due;\n"
    )
    swap = Migration(version=NEXT, name="0900_swap", text=text)
    writer = await psycopg.AsyncConnection.connect(database.url)
    await writer.execute("SELECT pg_advisory_lock(4711)")
    await writer.execute("UPDATE durable_run SET priority = 1")
    migrating = asyncio.create_task(apply(database.url, swap))
    await until(lambda: migrating.done() or run(database, BUILDING), "the build to wait for the writer")
    assert not migrating.done()
    await scene.take()
    await writer.commit()
    between = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory' AND datname = current_database()"
    await until(lambda: run(database, between), "the build to be done")  # a write before that it would wait for, too
    await writer.execute("UPDATE durable_run SET priority = 2")
    await writer.execute("SELECT pg_advisory_unlock(4711)")
    dropping = BUILDING.replace("%CONCURRENTLY%", "DROP INDEX CONCURRENTLY%")
    await until(lambda: migrating.done() or run(database, dropping), "the drop to wait for the writer")
    assert not migrating.done()
    await scene.take()
    await writer.commit()
    assert (await migrating).missing == []
    assert run(database, "SELECT 1 FROM pg_indexes WHERE indexname = 'durable_run_due'") == []
    await writer.close()


async def test_a_unique_index_that_rows_contradict_is_told_and_built_once_they_do_not(
    database: Database, scene: Scene
) -> None:
    text = "-- not transactional\nCREATE UNIQUE INDEX CONCURRENTLY durable_run_one ON durable_run (priority);\n"
    unique = Migration(version=NEXT, name="0900_unique", text=text)
    await scene.start()
    second = await scene.start()
    with pytest.raises(Conflict, match="durable_run_one"):
        await apply(database.url, unique)
    assert run(database, VERSION) == [(NEXT - 1,)]
    run(database, f"UPDATE durable_run SET priority = 1 WHERE run_id = '{second.run_id}'")
    assert (await apply(database.url, unique)).missing == []
    assert run(database, VERSION) == [(NEXT,)]


async def test_time_outs_of_the_role_do_not_end_the_lock_of_a_migration(database: Database) -> None:
    """Who holds the lock does nothing while an index is built, however long that takes."""
    writer = await psycopg.AsyncConnection.connect(database.url)
    await writer.execute("SELECT set_config('idle_in_transaction_session_timeout', '0', false)")
    await writer.execute("UPDATE durable_run SET priority = 1")
    run(database, f"ALTER DATABASE {database.name} SET idle_in_transaction_session_timeout = '100ms'")
    migrating = asyncio.create_task(apply(database.url, INDEX))
    long_idle = (
        "SELECT 1 FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
        " AND state_change < clock_timestamp() - interval '300 ms' AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
    )
    await until(
        lambda: migrating.done() or run(database, long_idle), "the lock to be held for longer than the time-out"
    )
    assert not migrating.done()
    await writer.commit()
    assert (await migrating).missing == []
    await writer.close()


def test_every_migration_says_whether_it_runs_in_one_transaction() -> None:
    """And none builds an index of a table that was there before it inside one: writers would wait for all of it."""
    for migration in schema.migrations():
        assert _faults(migration) == []
    with pytest.raises(ConfigurationError, match="transactional"):
        schema.transactional(Migration(version=1, name="0001_bad", text="CREATE TABLE x (a integer);"))
    on_live = "-- transactional\nCREATE INDEX i ON durable_run (later);\n"
    assert _faults(Migration(version=2, name="0002_bad", text=on_live)) == ["CREATE INDEX i ON durable_run (later)"]
    assert _faults(LIVE) == []


def _faults(migration: Migration) -> list[str]:
    made = schema.wanted_of([migration]) if "ALTER TABLE" not in migration.text else None
    own = set() if made is None else set(made.columns)
    if not schema.transactional(migration):
        return [one for one in statements(migration.text) if one.startswith("CREATE TABLE")]
    found = (one for one in statements(migration.text) if one.startswith(("CREATE INDEX", "CREATE UNIQUE INDEX")))
    return [one for one in found if one.partition(" ON ")[2].partition(" ")[0] not in own]


# -- many at once -------------------------------------------------------------------------------------------------------------


class Migrator:
    """A process that migrates when it is told to."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, migrator.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> Migrator:
        assert self.answer() == "ready", self.process.communicate()
        return self

    def go(self, database: Database, which: str = "own") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{database.url} {which}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        """Let it come to its end; its exit code and what it complained of."""
        _, errors = self.process.communicate(timeout=100)
        return self.process.returncode, errors


@pytest.fixture
def migrators() -> Iterator[Callable[[int], list[Migrator]]]:
    made: list[Migrator] = []

    def start(count: int) -> list[Migrator]:
        new = [Migrator() for _ in range(count)]
        made.extend(new)
        return [one.ready() for one in new]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.kill()


async def test_many_migrations_with_a_concurrent_build_at_once_do_not_wait_for_each_other(database: Database) -> None:
    """Who waited for the lock inside the server would be waited for by the build: both would stand still."""
    answers = await asyncio.gather(*(apply(database.url, LIVE) for _ in range(6)))
    assert [list(answer.missing) for answer in answers] == [[]] * 6


@pytest.mark.timeout(120 + 20 * ROUNDS)
def test_eight_processes_that_migrate_an_empty_database_at_once_make_one_schema(
    database: Database, migrators: Callable[[int], list[Migrator]]
) -> None:
    wanted = catalog(database)
    processes = migrators(PROCESSES)
    for _ in range(ROUNDS):
        target = server().create()
        for process in processes:
            process.go(target)
        answers = [process.answer() for process in processes]
        assert answers == [str(NEXT - 1)] * PROCESSES, [process.end() for process in processes]
        assert catalog(target) == wanted
        assert len(run(target, "SELECT 1 FROM durable_schema_version")) == NEXT - 1
        target.drop()
    assert [process.end() for process in processes] == [(0, "")] * PROCESSES


# -- killed -------------------------------------------------------------------------------------------------------------------


def wait_for(database: Database, condition: str, what: str, *, absent: bool = False) -> None:
    limit = time.monotonic() + 60
    while bool(run(database, condition)) is absent:
        assert time.monotonic() < limit, f"waited in vain for {what}"
        time.sleep(0.01)


@pytest.mark.parametrize("place", [1, FIRST // 2, FIRST])
def test_a_migration_that_is_killed_in_the_middle_is_resumed(
    database: Database, empty: Database, migrators: Callable[[int], list[Migrator]], place: int
) -> None:
    """kill -9 while the server carries out its first, middle or last statement: nothing of it is left, and another process that came
    meanwhile does all of it."""
    run(empty, PROBE.format(place=place))
    first, second = migrators(2)
    first.go(empty)
    wait_for(empty, HELD, "the migration to come to its place")
    second.go(empty)
    first.kill()
    run(empty, LET_GO)
    assert second.answer() == str(NEXT - 1), second.end()
    run(empty, "DROP SCHEMA probe CASCADE")
    assert catalog(empty) == catalog(database)


@pytest.mark.parametrize("place", [1, 2], ids=["before the column", "before the index"])
def test_a_migration_of_live_tables_that_is_killed_between_two_statements_is_resumed(
    database: Database, migrators: Callable[[int], list[Migrator]], place: int
) -> None:
    run(database, PROBE.format(place=place))
    (process,) = migrators(1)
    process.go(database, "live")
    wait_for(database, HELD, "the migration to come to its place")
    process.kill()
    run(database, LET_GO)
    assert asyncio.run(apply(database.url, LIVE)).missing == []
    assert run(database, VERSION) == [(NEXT,)]


@pytest.mark.parametrize("goes_on", [False, True], ids=["the server ends it", "the server goes on with it"])
def test_a_concurrent_build_whose_process_is_killed_is_built_again(
    database: Database, migrators: Callable[[int], list[Migrator]], goes_on: bool
) -> None:
    """The server does not notice at once that its client is gone: the build may still be under way when the next migration comes."""
    writer = psycopg.connect(database.url)
    writer.execute("UPDATE durable_run SET priority = 1")
    first, second = migrators(2)
    first.go(database, "index")
    wait_for(database, BUILDING, "the build to wait for the writer")
    first.kill()
    if not goes_on:
        run(database, BUILDING.replace("SELECT 1", "SELECT pg_terminate_backend(pid)"))
        wait_for(database, BUILDING, "the build to be gone", absent=True)
    second.go(database, "index")
    both = f"SELECT 1 FROM ({BUILDING}) AS b HAVING count(*) = {1 + goes_on}"
    wait_for(database, both, "the second migration to come to the index")
    writer.commit()
    assert second.answer() == str(NEXT), second.end()
    invalid: Any = run(database, "SELECT indexrelid::regclass FROM pg_index WHERE NOT indisvalid")
    assert (invalid, run(database, VERSION)) == ([], [(NEXT,)])
    writer.close()


def test_a_migration_that_is_killed_before_it_is_recorded_is_resumed(
    database: Database, migrators: Callable[[int], list[Migrator]]
) -> None:
    blocker = psycopg.connect(database.url)
    blocker.execute("LOCK TABLE durable_schema_version IN SHARE MODE")  # it can be read, not written
    (process,) = migrators(1)
    process.go(database, "live")
    waiting = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT INTO%schema_version%'"
        " AND pid <> pg_backend_pid()"
    )
    wait_for(database, waiting, "the record to wait")
    process.kill()
    run(database, waiting.replace("SELECT 1", "SELECT pg_terminate_backend(pid)"))
    blocker.rollback()
    blocker.close()
    wait_for(database, OTHERS, "the killed one's sessions to end", absent=True)
    assert run(database, VERSION) == [(NEXT - 1,)]
    assert asyncio.run(apply(database.url, LIVE)).missing == []
    assert run(database, VERSION) == [(NEXT,)]
