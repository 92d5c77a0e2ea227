"""What `durable doctor` finds on PostgreSQL (rules 8, 64, 68, 69): each finding made to appear, with the sentence that says what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from postgres.conftest import Open, pretending, until
from servers.postgres import Database

import durable
from durable.model import WorkerRecord
from durable.testing.conformance.scenario import new_run
from durable_postgres import Store, checks

WORKER: dict[str, Any] = {
    "worker_id": "w1",
    "tenant": None,
    "bound": False,
    "host": "here",
    "pid": 1,
    "queues": {"default": 1},
    "functions": [("work", None)],
    "family": "3.12",
    "settings": '{"transaction_slots":4,"max_reclaims":5}',
}


async def found(store: Store, name: str) -> tuple[str, str]:
    """Level and words of what the doctor says under this name."""
    ((level, text),) = [(check.level, check.text) for check in await store.check() if check.name == name]
    return level, text


async def test_it_finds_nothing_wrong_with_a_sound_store(store: Store) -> None:
    levels = {check.name: check.level for check in await store.check()}
    assert {*levels} == {
        "server", "schema", "indexes", "isolation", "durability", "clock", "connections", "dead rows", "ready", "functions", "limits",
    }  # fmt: skip
    assert {name for name, level in levels.items() if level != "ok"} <= {"durability"}  # tests turn fsync off


# -- the server ---------------------------------------------------------------------------------------------------------------

SETTING = "CASE $1 WHEN '{name}' THEN '{value}' ELSE pg_catalog.current_setting($1) END"


@pytest.mark.parametrize(
    ("function", "returns", "body", "name", "level", "words"),
    [
        ("clock_timestamp()", "timestamptz", "pg_catalog.clock_timestamp() + interval '5 s'", "clock", "warn", "s off the server's"),
        ("clock_timestamp()", "timestamptz", "pg_catalog.clock_timestamp() - interval '5 s'", "clock", "warn", "s off the server's"),
        ("pg_is_in_recovery()", "boolean", "true", "primary", "refuse", "connect to the primary"),
        ("current_setting(text)", "text", SETTING.format(name="fsync", value="off"), "durability", "warn", "turn it on"),
        ("current_setting(text)", "text", SETTING.format(name="fsync", value="on"), "durability", "ok", "fsync is on"),
        ("current_setting(text)", "text", SETTING.format(name="max_connections", value="12"), "connections", "warn", "raise max"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_the_server(
    database: Database, opened: Open, function: str, returns: str, body: str, name: str, level: str, words: str
) -> None:
    """What the server says of itself is said by a function of the test's."""
    store = await opened(url=pretending(database, function, returns, body))
    said, text = await found(store, name)
    assert said == level, text
    assert words in text


async def test_an_isolation_that_was_changed_since_the_start(database: Database, store: Store) -> None:
    with database.connect() as con:
        con.execute(f"ALTER DATABASE {database.name} SET default_transaction_isolation = 'serializable'")
        con.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    level, text = await found(store, "isolation")
    assert (level, "ALTER ROLE … RESET" in text) == ("refuse", True)


@pytest.mark.parametrize(
    ("damage", "name", "level", "words"),
    [
        ("ALTER TABLE durable_worker DROP COLUMN family", "schema", "refuse", "durable_worker.family"),
        ("DROP VIEW durable_v_queues", "schema", "refuse", "durable_v_queues"),
        ("DROP TABLE durable_schema_version", "schema", "refuse", "no tables"),
        ("DELETE FROM durable_schema_version WHERE version = 1", "schema", "refuse", "0001_initial"),
        ("UPDATE durable_schema_version SET checksum = 'x'", "schema", "refuse", "another text"),
        ("INSERT INTO durable_schema_version (version, name, checksum) VALUES (999, 'x', 'x')", "schema", "refuse", "upgrade"),
        ("DROP INDEX durable_run_coalesce", "indexes", "refuse", "given twice"),
        ("DROP INDEX durable_run_purge", "indexes", "warn", "durable_run_purge"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_the_tables(
    database: Database, store: Store, damage: str, name: str, level: str, words: str
) -> None:
    """All of it came about after the store was opened."""
    with database.connect() as con:
        con.execute(damage)
    said, text = await found(store, name)
    assert said == level, text
    assert words in text


async def test_tables_full_of_dead_rows(database: Database, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DEAD", 100)
    await store.enqueue([new_run() for _ in range(50)])
    with database.connect() as con:
        con.execute("ALTER TABLE durable_run SET (autovacuum_enabled = false)")
        for _ in range(4):
            con.execute("UPDATE durable_run SET priority = priority + 1")

    async def told() -> bool:
        level, text = await found(store, "dead rows")
        return level == "warn" and "durable_run 2" in text and "VACUUM" in text

    await until(told, "the server to count its dead rows")


# -- the workers --------------------------------------------------------------------------------------------------------------


async def test_all_workers_are_added_up_against_the_servers_limit(store: Store) -> None:
    """Each may have its transactions, six more, a renewal thread and a listener (68)."""
    for number in range(30):
        await store.register(WorkerRecord(**{**WORKER, "worker_id": str(number)}))
    level, text = await found(store, "connections")
    assert (level, "30 live worker(s) may open 360 connections" in text) == ("warn", True), text


async def test_a_worker_registers_what_it_may_open(database: Database) -> None:
    async with (
        durable.Client(database.url, settings={"transaction_slots": 9}) as client,
        durable.Worker(client, functions=durable.Registry("test_doctor")),
    ):
        (worker,) = await client.all_tenants().workers()
        assert json.loads(worker.settings)["transaction_slots"] == 9
        checks = {check.name: check.text for check in await client.check()}
        assert "1 live worker(s) may open 17 connections" in checks["connections"]


async def test_runs_that_no_live_worker_knows(store: Store) -> None:
    await store.enqueue([new_run(name="unknown") for _ in range(2)])
    await store.register(WorkerRecord(**WORKER))
    await store.enqueue([new_run()])
    level, text = await found(store, "functions")
    assert (level, "'unknown' in queue 'default' (2)" in text, "'work'" in text) == ("warn", True, False), text


async def test_a_worker_that_was_not_seen_for_a_lease_knows_nothing(database: Database, store: Store) -> None:
    await store.register(WorkerRecord(**WORKER))
    await store.enqueue([new_run()])
    assert (await found(store, "functions"))[0] == "ok"
    with database.connect() as con:
        con.execute("UPDATE durable_worker SET seen_at = seen_at - interval '1 hour'")
    level, text = await found(store, "functions")
    assert (level, "'work' in queue 'default' (1)" in text) == ("warn", True), text


@pytest.mark.parametrize("limit", ["max_reclaims", "lease", "mismatch_limit"])
async def test_limits_on_which_workers_disagree(store: Store, limit: str) -> None:
    for worker, value in (("w1", 5), ("w2", 3)):
        await store.register(WorkerRecord(**{**WORKER, "worker_id": worker, "settings": json.dumps({limit: value})}))
    level, text = await found(store, "limits")
    assert (level, f"{limit}: 3, 5" in text) == ("warn", True), text


async def test_work_that_has_been_ready_for_long(database: Database, store: Store) -> None:
    await store.enqueue([new_run()])
    with database.connect() as con:
        con.execute("UPDATE durable_run SET updated_at = updated_at - interval '1 hour'")
    level, text = await found(store, "ready")
    assert (level, "1:0" in text, "add workers" in text) == ("warn", True, True), text
