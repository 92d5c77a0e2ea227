"""Lost connections, restarts, fail-overs, locked rows (rules 42, 63, 64): every write can be repeated, and the store comes back."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

import psycopg
import pytest
from postgres.conftest import Open, until
from servers.postgres import Database

from durable.errors import Conflict, DurableError, StoreUnavailable
from durable.model import ALL
from durable.settings import SECOND
from durable.testing.conformance.scenario import Scene, new_run
from durable.testing.conformance.test_lost_answers import WRITES, state

OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"


class NoTime:
    """A harness for scenes in which time passes in the database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def pass_time(self, micros: int, /) -> None:
        with self.database.connect() as con:
            tables = con.execute(
                "SELECT table_name, array_agg(column_name::text) FROM information_schema.columns WHERE table_schema = 'public'"
                " AND data_type = 'timestamp with time zone' AND table_name NOT LIKE 'durable\\_v\\_%' GROUP BY 1"
            ).fetchall()
            for table, columns in tables:
                changes = ", ".join(f"{column} = {column} - interval '{micros} microseconds'" for column in columns)  # type: ignore[attr-defined]
                con.execute(f"UPDATE {table} SET {changes}")


CUT = f"SELECT pg_terminate_backend(pid) {OTHERS}"


def cut_all(database: Database) -> None:
    """End every session but the test's own."""
    with database.connect() as con:
        con.execute(CUT)


async def answered(call: Any) -> Any:
    """As the engine does: repeat a call until there is an answer."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.01)


# -- lost connections -----------------------------------------------------------------------------------------------------------


async def test_idle_connections_that_were_cut_off_are_replaced_without_an_error(
    database: Database, scene: Scene
) -> None:
    await asyncio.gather(*(scene.start() for _ in range(20)))
    for _ in range(3):
        cut_all(database)
        await asyncio.gather(*(scene.start() for _ in range(20)))
    assert len(await scene.runs()) == 80


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_whose_connection_is_cut_at_any_moment_makes_one_effect_when_repeated(
    database: Database, opened: Open, name: str
) -> None:
    """The server ends the session while the write is under way, once for each moment that a delay finds; then it is repeated (42)."""
    quiet = Scene(await opened(), NoTime(database))  # type: ignore[arg-type]
    call = await WRITES[name](quiet)
    store = await opened()
    with database.connect() as con:
        writing = asyncio.create_task(answered(lambda: call(store)))
        for _ in range(5):
            await asyncio.sleep(random.uniform(0, 0.004))
            con.execute(CUT)
        await writing
    once = await state(quiet)
    await answered(lambda: call(store))
    assert await state(quiet) == once, name
    assert list(await quiet.store.audit(scope=ALL)) == []


async def test_a_transaction_whose_connection_is_cut_at_any_moment_pays_once(database: Database, scene: Scene) -> None:
    """The caller's rows and the record commit together; repeated after a cut at any moment, there is one of both (26, 42)."""
    with database.connect() as con:
        con.execute("CREATE TABLE paid (run_id text)")
        for _ in range(12):
            held = await scene.take()
            pay = await _payment(scene, held.run.run_id)
            call = functools.partial(scene.store.transaction, held.lease, pay, timeout=5 * SECOND)
            paying = asyncio.create_task(_paid(call))
            for _ in range(3):
                await asyncio.sleep(random.uniform(0, 0.004))
                con.execute(CUT)
            assert (await paying).state in ("appended", "recorded")
            assert con.execute("SELECT count(*) FROM paid WHERE run_id = %s", (held.run.run_id,)).fetchone() == (1,)
            assert [record.step_id for record in await answered(lambda: scene.history(held.run.run_id))] == ["pay"]  # noqa: B023
    assert list(await scene.store.audit(scope=ALL)) == []


async def _payment(scene: Scene, run_id: str) -> Any:
    record = await scene.record(run_id, "pay")

    async def pay(con: Any) -> Any:
        await con.execute("INSERT INTO paid VALUES (%s)", (run_id,))
        return record

    return pay


async def _paid(call: Any) -> Any:
    """Repeat it, as the engine does, also where the user's own statement met the cut: its error passes through as it is (41)."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except (StoreUnavailable, psycopg.OperationalError):
                await asyncio.sleep(0.01)


async def test_a_fail_over_to_a_server_that_can_not_write_is_unavailable_and_ends_with_it(
    database: Database, scene: Scene
) -> None:
    await scene.start()
    with database.connect() as con:
        con.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
        con.execute(CUT)
        with pytest.raises(StoreUnavailable, match="read-only"):
            await scene.start()
        con.execute("SET default_transaction_read_only = off")
        con.execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = off")
    assert (await answered(scene.start)).attempts == 0


async def test_a_row_that_somebody_locks_does_not_hold_up_a_batch_for_ever(database: Database, opened: Open) -> None:
    """An application's transaction sits on one run: the batch answers that it is unavailable, and the others go on without it (9)."""
    scene = Scene(await opened(settings={"lease": "3s"}), None)  # type: ignore[arg-type]
    locked, free = await scene.take(), await scene.take()
    records = [(one.lease, await scene.record(one.run.run_id, "a")) for one in (locked, free)]
    async with await psycopg.AsyncConnection.connect(database.url) as con:
        await con.execute("SELECT 1 FROM durable_run WHERE run_id = %s FOR UPDATE", (locked.run.run_id,))
        with pytest.raises(StoreUnavailable, match="locked"):
            await scene.store.append(records)
        (answer,) = await scene.store.append(records[1:])
        assert answer.state == "appended"
        await con.rollback()
    assert [answer.state for answer in await scene.store.append(records)] == ["appended", "recorded"]


async def test_a_process_that_stops_inside_a_transaction_is_cut_off_after_a_lease(
    database: Database, opened: Open
) -> None:
    """Its locks would keep the sweep from its runs: the server ends the session."""
    store = await opened(settings={"lease": "3s"})
    scene = Scene(store, None)  # type: ignore[arg-type]
    held = await scene.take()
    async with store._database.pools._pools[asyncio.get_running_loop()].connection() as con:
        await store._database.ask(con, _opening(store))
        await con.execute("SELECT 1 FROM durable_run WHERE run_id = %s FOR UPDATE", (held.run.run_id,))
        await until(lambda: _lapsed_and_free(database, held.run.run_id), "the server to end the session")
        con.pgconn.finish()
    assert list((await scene.sweep()).returned) == [held.run.run_id]


def _opening(store: Any) -> Any:
    from durable_postgres.connection import BEGIN, PREAMBLE
    from durable_postgres.operation import Ask

    return [Ask(BEGIN), Ask(PREAMBLE, store._database.limits)]


def _lapsed_and_free(database: Database, run_id: str) -> bool:
    with database.connect() as con:
        con.execute(
            "UPDATE durable_run SET leased_until = now() - interval '1 s' WHERE run_id = ANY (ARRAY(SELECT run_id FROM durable_run"
            " WHERE run_id = %s FOR UPDATE SKIP LOCKED))",
            (run_id,),
        )
        return con.execute("SELECT 1 FROM durable_run WHERE leased_until < now()").fetchone() is not None


async def test_dead_locks_and_serialization_failures_are_tried_again(database: Database, opened: Open) -> None:
    """A trigger of the test makes two of three transactions fail as the server would; often enough on one connection that the driver
    prepares the statements, of which those behind the failing one never reach the server."""
    with database.connect() as con:
        con.execute(
            "CREATE SEQUENCE unlucky; CREATE FUNCTION unlucky() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF nextval('unlucky') % 3 <> 0 THEN RAISE EXCEPTION 'unlucky' USING ERRCODE = CASE WHEN currval('unlucky') % 3 = 1"
            " THEN '40001' ELSE '40P01' END; END IF; RETURN NULL; END $$;"
            " CREATE TRIGGER unlucky AFTER INSERT OR UPDATE ON durable_run FOR EACH STATEMENT EXECUTE FUNCTION unlucky()"
        )
    scene = Scene(await opened(), None)  # type: ignore[arg-type]
    for _ in range(20):
        held = await scene.take()
        assert (await scene.append(held, "a")).state == "appended"
        await scene.complete(held)


async def test_what_never_ends_well_is_told_after_many_tries(database: Database, opened: Open) -> None:
    with database.connect() as con:
        con.execute(
            "CREATE FUNCTION unlucky() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$;"
            " CREATE TRIGGER unlucky BEFORE INSERT ON durable_run FOR EACH STATEMENT EXECUTE FUNCTION unlucky()"
        )
    store = await opened()
    with pytest.raises(StoreUnavailable, match="again and again"):
        await store.enqueue([new_run()])


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("SELECT 1/0", "StoreError", "22012"),
        ("SELECT * FROM nowhere", "SchemaMismatch", "durable migrate"),
        ("SELECT nothing", "SchemaMismatch", "durable migrate"),
        ("SELECT '{'::jsonb", "StoreError", "no JSON"),
        ("INSERT INTO durable_key VALUES ('a', 'b'), ('a', 'b')", "Conflict", "already"),
        ("SET ROLE nobody_at_all", "StoreError", "nobody_at_all"),
    ],
)
async def test_errors_of_the_server_come_out_as_ours_with_the_cause(
    opened: Open, statement: str, kind: str, words: str
) -> None:
    from durable_postgres.operation import rows

    store = await opened()
    with pytest.raises(DurableError, match=words) as caught:
        await store._database.write(lambda work: rows(statement))
    assert type(caught.value).__name__ == kind
    assert isinstance(caught.value.__cause__, psycopg.Error)
    await store.enqueue([new_run()])


async def test_text_that_the_server_can_not_hold_is_refused_in_words(store: Any) -> None:
    with pytest.raises(DurableError, match="NUL"):
        await store.enqueue([new_run(name="a\0b")])
    with pytest.raises(DurableError, match="NUL"):
        await store.enqueue([new_run(input='"\\u0000"')])
    with pytest.raises(Conflict):
        await store.enqueue([new_run(idempotency_key="x" * 1_025)])
    await store.enqueue([new_run()])
