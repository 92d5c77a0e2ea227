"""Tables, names and the first contact with them (rules 60, 69): what is published is what is migrated, and what is missing is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from postgres.conftest import Open
from servers.postgres import Database, server

from durable.errors import ConfigurationError, SchemaMismatch
from durable.model import Names, RunQuery
from durable.settings import Settings
from durable.storekit import TABLES
from durable.testing.conformance.scenario import Scene, new_run
from durable_postgres import Store, backend, schema

ROOT = Path(__file__).parents[2]
CATALOG = """
SELECT 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, pg_get_expr(d.adbin, d.adrelid),
    a.attidentity, co.collname
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum LEFT JOIN pg_collation AS co ON co.oid = a.attcollation
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v')
UNION ALL SELECT 'relation', c.relname, c.relkind::text, c.reloptions::text, c.relpersistence = 'p',
    CASE c.relkind WHEN 'v' THEN pg_get_viewdef(c.oid) WHEN 'i' THEN pg_get_indexdef(c.oid) END, '', NULL
FROM pg_class AS c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v', 'i', 'S')
UNION ALL SELECT 'constraint', c.conrelid::regclass::text, c.conname, pg_get_constraintdef(c.oid), true, NULL, '', NULL
FROM pg_constraint AS c WHERE c.connamespace = 'public'::regnamespace AND c.contype <> 'n'
ORDER BY 1, 2, 3
"""
FIXED = {
    "durable_run": {
        "run_id": "text", "name": "text", "status": "text", "idempotency_key": "text", "coalesce_key": "text", "input": "jsonb",
        "output": "jsonb", "error": "text", "tenant_id": "uuid", "attempts": "integer", "leased_until": "timestamp with time zone",
        "available_at": "timestamp with time zone", "created_at": "timestamp with time zone",
        "updated_at": "timestamp with time zone", "cancel_requested_at": "timestamp with time zone",
        "cancel_refused_at": "timestamp with time zone",
    },
    "durable_step": {
        "run_id": "text", "step_id": "text", "result": "jsonb", "tenant_id": "uuid", "created_at": "timestamp with time zone",
    },
    "durable_schedule": {
        "schedule_id": "text", "name": "text", "cron": "text", "tz": "text", "input": "jsonb",
        "next_fire_at": "timestamp with time zone", "enabled": "boolean", "tenant_id": "uuid",
        "created_at": "timestamp with time zone", "updated_at": "timestamp with time zone",
    },
}  # fmt: skip
"""Names and types that applications rely on."""


def catalog(database: Database) -> list[Any]:
    with database.connect() as con:
        return list(con.execute(CATALOG))


def run(database: Database, statement: str) -> list[Any]:
    with database.connect() as con:
        cursor = con.execute(statement)
        return list(cursor) if cursor.description is not None else []


# -- what is there ------------------------------------------------------------------------------------------------------------


def test_the_published_schema_equals_the_migrated_tables(database: Database, empty: Database) -> None:
    """`schemas/postgres.sql`, run by an application that owns its migrations (69)."""
    text = (ROOT / "schemas" / "postgres.sql").read_text(encoding="utf-8")
    assert text == backend.schema(), "make it anew: durable schema --url postgresql:// > schemas/postgres.sql"
    with empty.connect() as con:
        con.execute(text)
    assert catalog(empty) == catalog(database)
    assert run(empty, "SELECT version, checksum FROM durable_schema_version") == run(
        database, "SELECT version, checksum FROM durable_schema_version"
    )


def test_the_columns_that_applications_rely_on_have_their_names_and_types(database: Database) -> None:
    found: dict[str, dict[str, str]] = {}
    for kind, table, column, kind_of, *_ in catalog(database):
        if kind == "column":
            found.setdefault(table, {})[column] = kind_of
    for table, columns in FIXED.items():
        assert {name: found[table].get(name) for name in columns} == columns
    assert set(TABLES) <= set(found)


def test_runs_and_steps_are_vacuumed_often_and_have_room_for_updates(database: Database) -> None:
    options = dict(
        run(database, "SELECT relname, reloptions::text FROM pg_class WHERE relname IN ('durable_run', 'durable_step')")
    )
    assert len(options) == 2
    for text in options.values():
        assert "fillfactor=85" in text or "fillfactor=90" in text
        assert "autovacuum_vacuum_scale_factor=0.02" in text
        assert "autovacuum_vacuum_threshold=1000" in text


async def test_the_four_views_show_what_is_there_and_can_not_be_written_through(
    database: Database, scene: Scene
) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.fail(held)
    await scene.start()
    with database.connect() as con:
        for view, wanted in (("runs", 2), ("steps", 1), ("functions", 1), ("queues", 1)):
            assert len(con.execute(f"SELECT * FROM durable_v_{view}").fetchall()) == wanted
        (queue,) = con.execute(
            "SELECT queue, ready, running, failed, failed_exception FROM durable_v_queues"
        ).fetchall()
        assert queue == ("default", 1, 0, 1, 1)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            con.execute("UPDATE durable_v_runs SET status = 'completed'")


# -- names --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        Names(schema="jobs"),
        Names(
            schema='Odd "schema"; --',
            tables={"durable_run": "order", "durable_step": "user", "durable_queue": "select"},
        ),
        Names(tables={"durable_run": "jobs_run", "durable_key": "durable_run"}),
    ],
    ids=["schema", "reserved", "crosswise"],
)
async def test_schema_and_tables_can_be_called_as_one_likes(empty: Database, names: Names) -> None:
    store = await backend.open(empty.url, settings=Settings(), names=names, auto_migrate=True)
    scene = Scene(store, None)  # type: ignore[arg-type]
    held = await scene.take(idempotency_key="i", coalesce_key="c", sequence_key="s")
    await scene.append(held, "a")
    await scene.send(held.run.run_id)
    await scene.complete(held)
    assert (await store.find(RunQuery(), scope=None)).runs[0].status == "completed"
    assert list(await store.audit(scope=None)) == []
    assert await store.migrate() == await store.schema_status()
    assert [check for check in await store.check() if check.level == "refuse"] == []
    await store.close()
    tables = {
        name
        for (name,) in run(
            empty, "SELECT table_name::text FROM information_schema.tables WHERE table_schema <> 'pg_catalog'"
        )
    }
    assert {names.tables.get(table, table) for table in TABLES} <= tables


@pytest.mark.parametrize(
    "names", [Names(schema=""), Names(schema="x" * 64), Names(schema="a\0b"), Names(tables={"durable_run": 'a"b'})]
)
async def test_a_name_that_is_none_is_refused_before_anything_is_opened(empty: Database, names: Names) -> None:
    with pytest.raises(ConfigurationError):
        await backend.open(empty.url, settings=Settings(), names=names)


async def test_two_installations_in_one_database_do_not_see_each_other(empty: Database) -> None:
    stores = [
        await backend.open(empty.url, settings=Settings(), names=Names(schema=name), auto_migrate=True)
        for name in ("a", "b")
    ]
    await stores[0].enqueue([new_run()])
    assert [await store.count(RunQuery(), scope=None) for store in stores] == [1, 0]
    for store in stores:
        await store.close()


# -- first contact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto_migrate", [None, False])
async def test_a_database_without_tables_is_refused_and_left_empty(empty: Database, auto_migrate: bool | None) -> None:
    with pytest.raises(SchemaMismatch, match="durable migrate"):
        await backend.open(empty.url, settings=Settings(), auto_migrate=auto_migrate)
    assert catalog(empty) == []


@pytest.mark.parametrize(
    "index", ["durable_run_idempotency", "durable_run_coalesce", "durable_step_position", "durable_signal_dedup"]
)
async def test_a_missing_unique_index_refuses_every_handle_and_migrate_builds_it(
    database: Database, opened: Open, index: str
) -> None:
    run(database, f"DROP INDEX {index}")
    with pytest.raises(SchemaMismatch, match=index):
        await opened()
    store = await opened(auto_migrate=True)
    await store.enqueue([new_run()])
    assert (await store.schema_status()).missing == []


async def test_an_invalid_index_is_dropped_and_built_again(database: Database, opened: Open) -> None:
    run(database, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'durable_run_ready'::regclass")
    store = await opened()  # only slow: clients and workers go on
    status = await store.schema_status()
    assert list(status.missing) == ["durable_run_ready"]
    assert ("indexes", "warn") in [(check.name, check.level) for check in await store.check()]
    assert (await store.migrate()).missing == []
    assert run(database, "SELECT indisvalid FROM pg_index WHERE indexrelid = 'durable_run_ready'::regclass") == [
        (True,)
    ]


async def test_a_missing_column_refuses_workers_and_names_the_migration_while_clients_go_on(
    database: Database, opened: Open
) -> None:
    run(database, "ALTER TABLE durable_worker DROP COLUMN family")
    store = await opened()
    scene = Scene(store, None)  # type: ignore[arg-type]
    created = await scene.start()
    assert (await scene.get(created.run_id)).run_id == created.run_id
    with pytest.raises(SchemaMismatch, match=r"durable_worker\.family"):
        await scene.claim()


async def test_tables_of_a_newer_version_are_refused_and_left_alone(database: Database, opened: Open) -> None:
    run(database, "INSERT INTO durable_schema_version (version, name, checksum) VALUES (9999, 'later', 'x')")
    for auto_migrate in (None, True, False):
        with pytest.raises(SchemaMismatch, match="9999"):
            await opened(auto_migrate=auto_migrate)


async def test_a_migration_that_was_applied_with_another_text_is_refused(database: Database, opened: Open) -> None:
    run(database, "UPDATE durable_schema_version SET checksum = 'x' WHERE version = 1")
    with pytest.raises(SchemaMismatch, match="0001_initial"):
        await opened()


# -- as text ------------------------------------------------------------------------------------------------------------------


def test_what_is_wanted_is_read_from_the_migrations(database: Database) -> None:
    """Every table, column and index of the catalog, and no other (69)."""
    wanted = schema.wanted_of(schema.migrations())
    columns = {
        (table, column)
        for kind, table, column, *_ in catalog(database)
        if kind == "column" and not table.startswith("durable_v_")
    }
    assert columns == {(table, column) for table, names in wanted.columns.items() for column in names}
    indexes = {name for kind, name, relkind, *_ in catalog(database) if kind == "relation" and relkind == "i"}
    assert indexes - {f"{table}_pkey" for table in TABLES} == set(wanted.indexes)
    assert set(schema.VIEWS) <= set(wanted.columns)


def test_the_store_of_the_published_schema_works(empty: Database) -> None:
    """An application that ran `schemas/postgres.sql` needs no migration of ours."""
    with empty.connect() as con:
        con.execute(backend.schema())

    async def use() -> None:
        store: Store = await backend.open(empty.url, settings=Settings(), auto_migrate=False)
        scene = Scene(store, None)  # type: ignore[arg-type]
        await scene.complete(await scene.take())
        await store.close()

    asyncio.run(use())
    assert server().version >= 15
