"""`ctx.transaction` on PostgreSQL (rule 26): what the user's function may do with the connection, and what ends it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from servers.postgres import Database

import durable
from durable.errors import Misuse, StepFailed
from durable.model import NewRecord, RecordKind, Renewal
from durable.settings import SECOND
from durable.testing.conformance.scenario import LEASE, Scene

TIMEOUT = 20 * SECOND
ENDINGS = (
    "COMMIT",
    " commit work",
    "/* so */ END",
    "-- yes\nROLLBACK",
    "ABORT",
    "BEGIN",
    "start transaction",
    "PREPARE TRANSACTION 'x'",
)


@pytest.fixture
def table(database: Database) -> None:
    """A table of the application."""
    with database.connect() as con:
        con.execute("CREATE TABLE paid (amount integer NOT NULL CHECK (amount > 0))")


def paid(database: Database) -> list[int]:
    with database.connect() as con:
        return [int(str(amount)) for (amount,) in con.execute("SELECT amount FROM paid ORDER BY 1")]


def record(step_id: str = "pay") -> NewRecord:
    return NewRecord(step_id=step_id, kind=RecordKind.STEP, position=0, seen=-1, digest="d", result='{"v":1}')


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_statement_that_ends_the_transaction_is_refused(
    database: Database, table: None, scene: Scene, ending: str
) -> None:
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        await con.execute("INSERT INTO paid VALUES (1)")
        await con.execute(ending)
        raise AssertionError("it was not refused")

    with pytest.raises(Misuse, match=r"ctx\.transaction"):
        await scene.store.transaction(held.lease, work, timeout=TIMEOUT)
    assert paid(database) == []
    assert await scene.steps(held.run.run_id) == []


async def test_an_end_that_slips_through_is_found_before_the_record(
    database: Database, table: None, scene: Scene
) -> None:
    """A function of the server can not end it; several statements in one text can: the record is not written then."""
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        await con.execute("SELECT 1; COMMIT; BEGIN")
        return record()

    with pytest.raises(Misuse, match="end of the transaction"):
        await scene.store.transaction(held.lease, work, timeout=TIMEOUT)
    assert await scene.steps(held.run.run_id) == []


async def two_rows(con: Any) -> None:
    async with con.transaction():
        await con.execute("INSERT INTO paid VALUES (2)")
        await con.execute("INSERT INTO paid VALUES (-1)")


async def test_the_callers_statements_are_planned_as_ever(database: Database, scene: Scene) -> None:
    held = await scene.take()
    record = await scene.record(held.run.run_id, "pay")
    found: list[Any] = []

    async def pay(con: Any) -> Any:
        found.append(await (await con.execute("SHOW plan_cache_mode")).fetchone())
        found.append(await (await con.execute("SHOW jit")).fetchone())
        return record

    await scene.store.transaction(held.lease, pay, timeout=SECOND)
    with database.connect() as con:
        assert found == [("auto",), con.execute("SHOW jit").fetchone()]


async def test_savepoints_undo_a_part(database: Database, table: None, scene: Scene) -> None:
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        await con.execute("INSERT INTO paid VALUES (1)")
        with pytest.raises(psycopg.errors.CheckViolation):
            await two_rows(con)
        await con.execute("SAVEPOINT mine")
        await con.execute("INSERT INTO paid VALUES (3)")
        await con.execute("ROLLBACK TO SAVEPOINT mine")
        return record()

    assert (await scene.store.transaction(held.lease, work, timeout=TIMEOUT)).state == "appended"
    assert paid(database) == [1]


async def test_an_error_of_the_users_statement_passes_through_as_it_is(
    database: Database, table: None, scene: Scene
) -> None:
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        await con.execute("INSERT INTO paid VALUES (1)")
        await con.execute("INSERT INTO paid VALUES (-1)")
        raise AssertionError("unreachable")

    with pytest.raises(psycopg.errors.CheckViolation):
        await scene.store.transaction(held.lease, work, timeout=TIMEOUT)
    assert paid(database) == []


async def test_an_error_that_was_swallowed_is_told(database: Database, table: None, scene: Scene) -> None:
    """The server has given the transaction up; committing would silently undo it."""
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        await con.execute("INSERT INTO paid VALUES (1)")
        with pytest.raises(psycopg.errors.CheckViolation):
            await con.execute("INSERT INTO paid VALUES (-1)")
        return record()

    with pytest.raises(Misuse, match="swallowed"):
        await scene.store.transaction(held.lease, work, timeout=TIMEOUT)
    assert paid(database) == []


async def test_a_statement_that_is_still_running_at_the_time_out_is_cancelled_in_the_server(
    database: Database, table: None, scene: Scene
) -> None:
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        await con.execute("INSERT INTO paid VALUES (1)")
        await con.execute("SELECT pg_sleep(100)")
        raise AssertionError("it was not stopped")

    with pytest.raises(TimeoutError, match="longer than"):
        await scene.store.transaction(held.lease, work, timeout=SECOND // 5)
    with database.connect() as con:
        sleeping = "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%pg_sleep%' AND state = 'active' AND pid <> pg_backend_pid()"
        assert con.execute(sleeping).fetchone() is None
    assert paid(database) == []
    assert (await scene.append(held, "b")).state == "appended"


async def test_the_fence_is_matched_last_and_holds_until_the_commit(
    database: Database, table: None, scene: Scene
) -> None:
    """The lease goes to another worker while the function works: its rows vanish (3, 26)."""
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        await con.execute("INSERT INTO paid VALUES (1)")
        with database.connect() as other:
            other.execute("UPDATE durable_run SET leased_until = now() - interval '1 s'")
        assert list((await scene.sweep()).returned) == [held.run.run_id]
        return record()

    assert (await scene.store.transaction(held.lease, work, timeout=TIMEOUT)).state == "lost"
    assert paid(database) == []


async def test_a_renewal_of_a_run_whose_commit_is_under_way_is_unknown_not_lost(
    database: Database, scene: Scene
) -> None:
    """The row is locked by somebody: that proves nothing (13)."""
    held, other = await scene.take(), await scene.take()
    async with await psycopg.AsyncConnection.connect(database.url) as con:
        await con.execute("SELECT 1 FROM durable_run WHERE run_id = %s FOR SHARE", (held.run.run_id,))
        answers = await scene.store.renew([Renewal(lease=one.lease) for one in (held, other)], lease=LEASE)
        assert [answer.state for answer in answers] == ["unknown", "held"]
        await con.rollback()
    (answer,) = await scene.store.renew([Renewal(lease=held.lease)], lease=LEASE)
    assert answer.state == "held"


# -- end to end -----------------------------------------------------------------------------------------------------------------

declared = durable.Registry("test_postgres_transactions")


async def pay(con: psycopg.AsyncConnection[Any], amount: int) -> int:
    await con.execute("INSERT INTO paid VALUES (%s)", (amount,))
    return amount


async def pay_and_start(con: psycopg.AsyncConnection[Any], amount: int) -> str:
    await con.execute("INSERT INTO paid VALUES (%s)", (amount,))
    return (await clients[-1].using(conn=con).start(buy, amount + 1)).id


clients: list[durable.Client] = []


@durable.function(registry=declared)
async def buy(ctx: durable.Context, amount: int) -> int:
    return await ctx.transaction(pay, amount)


@durable.function(registry=declared)
async def buy_and_start(ctx: durable.Context, amount: int) -> str:
    return await ctx.transaction(pay_and_start, amount)


@durable.function(registry=declared)
async def buy_for_nothing(ctx: durable.Context) -> str:
    try:
        await ctx.transaction(pay, -1)
    except StepFailed as error:
        return error.type_name
    return "paid"


async def test_a_body_pays_exactly_once_and_starts_what_follows_in_the_same_transaction(
    database: Database, table: None
) -> None:
    functions = [buy, buy_and_start, buy_for_nothing]
    async with (
        durable.Client(database.url, settings={"poll": "200ms"}) as client,
        durable.Worker(client, functions=functions),
    ):
        clients.append(client)
        started = await client.run(buy_and_start, 5)
        assert await (await client.get(started, buy)).result(timeout=30) == 6
        assert (await client.run(buy_for_nothing)).endswith("CheckViolation")
    assert paid(database) == [5, 6]
