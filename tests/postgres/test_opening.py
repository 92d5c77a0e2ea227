"""URLs and the first contact (rules 64, 68, 69): what can not work is refused with a sentence that says what to do."""

from __future__ import annotations

import asyncio
import logging
import os
import urllib.parse
from typing import Any

import psycopg
import pytest
from postgres.conftest import pretending
from servers.ports import free_port
from servers.postgres import Database, server

from durable.errors import ConfigurationError, SchemaMismatch, StoreUnavailable
from durable.model import ALL, RunQuery
from durable.settings import HOUR, SECOND, Settings
from durable.storekit import Migration
from durable.testing.conformance.scenario import Scene, new_run
from durable_postgres import Store, backend, schema
from durable_postgres.opening import read

# -- URLs ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@h/d?pool_size=many",
        "postgresql://u:hunter2@h/d?pool_size=9",
        "postgresql://u:hunter2@h/d?listen=maybe",
        "postgresql://u:hunter2@h/d?nonsense=1",
        "postgresql://u:hunter2@h/d?direct_url=postgresql%3A%2F%2Fu%3Ahunter2%40h%2Fd%3Fnonsense%3D1",
        "mysql://u:hunter2@h/d",
    ],
)
async def test_a_url_that_can_not_work_is_refused_and_its_password_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await backend.open(url, settings=Settings())
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_the_pool_is_at_least_the_transaction_slots_and_six() -> None:
    """Claims, records, ends, renewals and chores must never wait for the user's transactions (68)."""
    for slots in (1, 4, 20):
        settings = Settings(transaction_slots=slots)
        assert read("postgresql://h/d", settings).pool_size == slots + 6
        assert read(f"postgresql://h/d?pool_size={slots + 6}", settings).pool_size == slots + 6
        with pytest.raises(ConfigurationError, match=f"{slots + 6}"):
            read(f"postgresql://h/d?pool_size={slots + 5}", settings)


def test_what_libpq_knows_goes_to_libpq_and_what_is_ours_does_not() -> None:
    direct = urllib.parse.quote("postgresql://direct/d", safe="")
    address = read(
        f"postgres://u@h:6432/d?sslmode=require&prepare=off&listen=off&direct_url={direct}&pool_size=12", Settings()
    )
    assert "sslmode=require" in address.conninfo
    assert "pool_size" not in address.conninfo
    assert "keepalives_idle" in address.conninfo
    assert "host=direct" in address.direct
    assert (address.pool_size, address.prepare, address.listen) == (12, False, False)
    assert address.place == "h:6432/d"


async def test_the_clock_of_the_server_can_not_be_replaced(database: Database) -> None:
    with pytest.raises(ConfigurationError, match="clock"):
        await backend.open(database.url, settings=Settings(), clock=lambda: 0)


# -- first contact --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
async def test_another_isolation_default_refuses_to_start_and_says_how_to_reset_it(
    database: Database, level: str
) -> None:
    """Read from a live connection, whatever set it: server, database, role or URL (64)."""
    with database.connect() as con:
        con.execute(f"ALTER DATABASE {database.name} SET default_transaction_isolation = '{level}'")
    with pytest.raises(ConfigurationError, match="RESET default_transaction_isolation"):
        await backend.open(database.url, settings=Settings())
    options = urllib.parse.quote("-c default_transaction_isolation=read\\ committed")
    await (await backend.open(f"{database.url}?options={options}", settings=Settings())).close()


async def test_a_server_that_is_too_old_is_refused(database: Database) -> None:
    """Its version, as a function of the test's that is looked up before the server's own says it."""
    url = pretending(
        database,
        "current_setting(text)",
        "text",
        "CASE $1 WHEN 'server_version_num' THEN '140012' ELSE pg_catalog.current_setting($1) END",
    )
    with pytest.raises(ConfigurationError, match="PostgreSQL 14") as caught:
        await backend.open(url, settings=Settings())
    assert "15" in str(caught.value)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])  # of the second the driver gives every text as bytes
async def test_a_database_that_can_not_hold_every_text_is_refused(encoding: str) -> None:
    name = f"{encoding.lower()}_{os.getpid()}"
    with psycopg.connect(server().url, autocommit=True) as con:
        con.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        with pytest.raises(ConfigurationError, match=encoding) as caught:
            await backend.open(server().url_of(name), settings=Settings())
        assert "UTF8" in str(caught.value)
    finally:
        server().drop(name)


async def test_every_transaction_is_read_committed_by_its_own_statement(database: Database, store: Store) -> None:
    """Also where the default is changed while the store is open (64)."""
    scene = Scene(store, None)  # type: ignore[arg-type]
    options = f"ALTER DATABASE {database.name} SET default_transaction_isolation = 'serializable'"
    with database.connect() as con:
        con.execute(options)
        con.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    held = await scene.take()
    await asyncio.gather(*(scene.append(held, name) for name in "a"), scene.send(held.run.run_id))
    levels: list[str] = []

    async def work(con: Any) -> Any:
        levels.append((await (await con.execute("SHOW transaction_isolation")).fetchone())[0])
        return await scene.record(held.run.run_id, "t")

    await store.transaction(held.lease, work, timeout=5 * SECOND)
    assert levels == ["read committed"]


async def test_an_unreachable_server_only_warns_and_is_checked_on_first_contact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "durable.postgres"):
        store = await backend.open(f"postgresql://postgres@127.0.0.1:{free_port()}/postgres", settings=Settings())
    assert "does not answer" in caplog.text
    with pytest.raises(StoreUnavailable):
        await store.get(["x"], scope=ALL)
    (check,) = await store.check()
    assert (check.name, check.level) == ("server", "refuse")
    await store.close()


async def test_what_would_refuse_at_the_start_refuses_at_first_contact(database: Database) -> None:
    """The server is away at the start, and has a wrong default when it comes."""
    with database.connect() as con:
        con.execute(f"ALTER DATABASE {database.name} SET default_transaction_isolation = 'serializable'")
        con.execute(f"ALTER DATABASE {database.name} CONNECTION LIMIT 0")
        con.execute("CREATE ROLE plain LOGIN") if not con.execute(
            "SELECT 1 FROM pg_roles WHERE rolname = 'plain'"
        ).fetchone() else None
        con.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO plain")
    url = database.url.replace("postgres@", "plain@")
    store = await backend.open(url, settings=Settings())
    with database.connect() as con:
        con.execute(f"ALTER DATABASE {database.name} CONNECTION LIMIT -1")
    with pytest.raises(ConfigurationError, match="isolation"):
        await store.get(["x"], scope=ALL)
    await store.close()


# -- several loops ----------------------------------------------------------------------------------------------------------------


def test_a_store_is_used_from_several_event_loops_and_lets_go_of_all_connections(database: Database) -> None:
    """The worker's loop, the renewal thread's and a blocking client's: connections of psycopg belong to one loop each."""

    async def use(store: Store) -> int:
        await store.enqueue([new_run()])
        return await store.count(RunQuery(), scope=ALL)

    async def main() -> None:
        store = await backend.open(database.url, settings=Settings())
        assert await use(store) == 1
        assert await asyncio.to_thread(lambda: asyncio.run(use(store))) == 2
        assert await asyncio.to_thread(lambda: asyncio.run(use(store))) == 3
        waiting = asyncio.create_task(store.wait(["queue:default"], HOUR))
        await asyncio.sleep(0.05)
        await store.close()
        await waiting
        with pytest.raises(StoreUnavailable):
            await use(store)

    asyncio.run(main(), debug=True)
    with database.connect() as con:
        for _ in range(3_000):
            left = con.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
            if left == (0,):
                break
            con.execute("SELECT pg_sleep(0.02)")
        assert left == (0,)


# -- tables of another version ----------------------------------------------------------------------------------------------------


NEXT = Migration(
    version=len(schema.migrations()) + 1,
    name="0900_later",
    text="-- transactional\nCREATE TABLE durable_worker_note (\n    note text NOT NULL\n);\n",
)


@pytest.fixture
def older(database: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """As if this were the code of the next release, with one more migration: the database has the tables of the one before."""
    found = [*schema.migrations(), NEXT]
    monkeypatch.setattr(schema, "migrations", lambda: found)
    monkeypatch.setattr(schema, "_wanted", lambda: schema.wanted_of(found))
    return database


def version_of(database: Database) -> int:
    with database.connect() as con:
        return int(con.execute("SELECT max(version) FROM durable_schema_version").fetchone()[0])


async def test_an_older_schema_with_auto_migrate_false_is_refused_and_left_as_it_is(older: Database) -> None:
    with pytest.raises(SchemaMismatch, match=NEXT.name) as caught:
        await backend.open(older.url, settings=Settings(), auto_migrate=False)
    assert f"have version {NEXT.version - 1}, this code needs {NEXT.version}" in str(caught.value)
    assert "durable migrate" in str(caught.value.hint)
    assert version_of(older) == NEXT.version - 1


async def test_an_older_schema_serves_clients_and_refuses_workers_until_it_is_migrated(older: Database) -> None:
    """A deployment may begin with either (69); with `auto_migrate` the store brings it up to date, and its rows stay."""
    store = await backend.open(older.url, settings=Settings())
    scene = Scene(store, None)  # type: ignore[arg-type]
    await scene.start()
    with pytest.raises(SchemaMismatch, match=NEXT.name) as caught:
        await scene.claim()
    assert "durable_worker_note" in str(caught.value)
    await store.close()
    assert version_of(older) == NEXT.version - 1
    store = await backend.open(older.url, settings=Settings(), auto_migrate=True)
    assert version_of(older) == NEXT.version
    assert len(await Scene(store, None).claim()) == 1  # type: ignore[arg-type]
    await store.close()
