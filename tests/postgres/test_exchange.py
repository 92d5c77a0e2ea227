"""One round trip on a pooled connection: what is sent arrives, what fails is told, and no connection is left in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import psycopg
import pytest
import uvloop
from postgres.conftest import Open, until
from servers.postgres import Database

from durable.errors import StoreUnavailable
from durable.model import ALL, NewRecord, RecordKind
from durable.settings import SECOND
from durable.testing.conformance.scenario import Scene
from durable_postgres import Store, exchange
from durable_postgres.adapting import At, Span
from durable_postgres.connection import BEGIN, COMMIT
from durable_postgres.lending import Lendable
from durable_postgres.operation import Answer, Ask, rows
from durable_postgres.statements import MOST

BROKEN = Ask("SELECT 1 / $1::integer", (0,))
MEGABYTES = "äx" * 4_000_000


class Line:
    """A pooled connection of a store, and its exchange."""

    def __init__(self, store: Store, con: Lendable) -> None:
        self.store, self.con = store, con

    async def ask(self, *asks: Ask, hints: tuple[Ask, ...] = ()) -> list[Answer]:
        return await self.store._database.ask(self.con, asks, hints)

    async def one(self, text: str, *parameters: Any) -> Any:
        (answer,) = await self.ask(Ask(text, parameters))
        return answer.rows[0][0]

    async def prepared(self) -> list[str]:
        (answer,) = await self.ask(Ask("SELECT statement FROM pg_prepared_statements ORDER BY prepare_time"))
        return [text for (text,) in answer.rows]


@contextlib.asynccontextmanager
async def line_of(store: Store) -> AsyncIterator[Line]:
    pool = await store._database.pools.of_this_loop()
    con = await pool.getconn()
    try:
        yield Line(store, con)
    finally:
        await store._database.undo(con)
        await pool.putconn(con)


@pytest.fixture
async def line(store: Store) -> AsyncIterator[Line]:
    async with line_of(store) as made:
        yield made


def watched_sockets() -> set[int]:
    loop: Any = asyncio.get_running_loop()
    return set(loop._selector.get_map())


# -- what is sent arrives ---------------------------------------------------------------------------------------------------

VALUES: list[tuple[str, Any]] = [
    ("text", "ü\n'\"\\"),
    ("text", None),
    ("integer", -(2**31)),
    ("smallint", 7),
    ("bigint", 2**63 - 1),
    ("boolean", False),
    ("bytea", b"\0\xff"),
    ("jsonb", '{"v":"a, b"}'),
    ("uuid", uuid.UUID(int=5)),
    ("name", "durable"),
    ("timestamptz", At(1_700_000_000_000_001)),
    ("interval", Span(90_000_001)),
    ("text[]", []),
    ("text[]", ["a", "", None, "ü" * 300]),
    ("text[]", [None, None]),
    ("text[]", [None, "a"]),
    ("text[]", ["x" * 70_000]),
    ("integer[]", [1, 40_000, -5]),
    ("integer[]", [1, None]),
    ("bigint[]", [2**40, 1]),
    ("bigint[]", [None]),
    ("boolean[]", [True, None, False]),
    ("bytea[]", [b"", b"\0"]),
    ("jsonb[]", ['{"v":1}', None, "[]"]),
    ("jsonb[]", ["1", "[]"]),
    ("jsonb[]", ["1", "1"]),
    ("jsonb", '"größer"'),
    ("jsonb[]", ['"größer"', '"kleiner"']),
    ("uuid[]", [uuid.UUID(int=1), uuid.UUID(int=2)]),
    ("timestamptz[]", [At(1), At(2**50)]),
    ("timestamptz[]", [At(1), None]),
    ("interval[]", [Span(1), Span(2)]),
    ("numeric[]", [1, 2]),  # a type that only the driver writes
]


@pytest.mark.parametrize(("kind", "value"), VALUES)
@pytest.mark.parametrize("query", ["", "prepare=off", "client_encoding=latin1"])
async def test_a_parameter_arrives_however_often_its_statement_was_sent(
    opened: Open, kind: str, value: Any, query: str
) -> None:
    async with line_of(await opened(query)) as line:
        for _ in range(4):
            assert await line.one(f"SELECT $1::{kind}", value) == value


async def test_a_value_of_another_type_than_the_first_one_is_the_drivers_to_write(line: Line) -> None:
    for value in ("5", 5, "6", None, 2**15):
        assert await line.one("SELECT $1::integer", value) == (None if value is None else int(value))
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        await line.one("SELECT $1::integer", 2**31)
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        await line.one("SELECT $1::integer", "five")


async def test_a_statement_has_one_plan_whatever_the_size_of_its_values(line: Line) -> None:
    text = "SELECT count(*) FROM unnest($1::integer[], $2::text[]) AS one (number, words)"
    for numbers in ([1], [40_000], [None], [], [1, None], [2**31 - 1]):
        assert await line.one(text, numbers, ["a" if one else None for one in numbers]) == len(numbers)
    assert [one for one in await line.prepared() if "unnest" in one] == [text]


async def test_rows_and_counts_come_as_from_the_driver(line: Line) -> None:
    answers = await line.ask(
        Ask("CREATE TEMP TABLE few (number integer)"),
        Ask("INSERT INTO few SELECT generate_series(1, $1)", (3,)),
        Ask("SELECT number FROM few WHERE number > $1 ORDER BY 1", (1,)),
        Ask("DELETE FROM few WHERE number = $1 RETURNING number", (9,)),
        Ask("DROP TABLE few"),
    )
    assert answers == [Answer([], -1), Answer([], 3), Answer([(2,), (3,)], 2), Answer([], 0), Answer([], -1)]


@pytest.mark.timeout(60)
async def test_megabytes_go_both_ways_at_once(line: Line) -> None:
    """The server writes the first answer while it has yet to read the next statement: neither waits for the other one to read."""
    for _ in range(2):
        answers = await line.ask(*[Ask("SELECT $1::text, $2::text[]", (MEGABYTES, [MEGABYTES])) for _ in range(3)])
        assert [answer.rows for answer in answers] == [[(MEGABYTES, [MEGABYTES])]] * 3


async def test_notices_are_passed_on(line: Line) -> None:
    seen: list[str | None] = []
    line.con.add_notice_handler(lambda diagnostic: seen.append(diagnostic.message_primary))
    await line.ask(Ask("DO $$ BEGIN RAISE NOTICE 'look'; END $$"), Ask("SELECT 1"))
    assert seen == ["look"]


def test_it_works_on_uvloop(database: Database) -> None:
    from durable.settings import Settings
    from durable_postgres import backend

    async def work() -> None:
        store = await backend.open(database.url, settings=Settings())
        async with line_of(store) as line:
            for _ in range(3):
                assert await line.one("SELECT $1::text", MEGABYTES) == MEGABYTES
            waiting = asyncio.create_task(line.one("SELECT pg_sleep($1)::text", 60))
            await until(lambda: _active(database), "the statement")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await line.one("SELECT $1::text", "a") == "a"
        await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


# -- what fails -------------------------------------------------------------------------------------------------------------


async def test_the_first_error_is_raised_as_the_drivers_and_the_rest_is_skipped(line: Line) -> None:
    await line.ask(Ask("CREATE TEMP TABLE few (number integer PRIMARY KEY)"), Ask("INSERT INTO few VALUES (1)"))
    for _ in range(3):  # unknown, known, prepared
        with pytest.raises(psycopg.errors.UniqueViolation) as caught:
            await line.ask(
                Ask(BEGIN),
                Ask("INSERT INTO few VALUES ($1)", (2,)),
                Ask("INSERT INTO few VALUES ($1) RETURNING number + 0", (1,)),
                BROKEN,
                COMMIT,
            )
        assert caught.value.sqlstate == "23505"
        assert caught.value.diag.constraint_name == "few_pkey"
        assert line.con.pgconn.transaction_status == psycopg.pq.TransactionStatus.INERROR
        await line.store._database.undo(line.con)
        assert await line.one("SELECT count(*) FROM few") == 1


async def test_what_the_server_did_not_get_to_prepare_is_not_taken_for_prepared(line: Line) -> None:
    late = "SELECT $1::integer + 40"
    assert await line.one(late, 1) == 41
    for _ in range(3):
        with pytest.raises(psycopg.errors.DivisionByZero):
            await line.ask(BROKEN, Ask(late, (1,)))
    assert late not in await line.prepared()
    for _ in range(2):
        assert await line.one(late, 2) == 42


async def test_a_statement_that_the_server_can_not_read_is_an_error_each_time(line: Line) -> None:
    for _ in range(3):
        with pytest.raises(psycopg.errors.UndefinedColumn):
            await line.one("SELECT nothing + $1::integer", 1)
        with pytest.raises(psycopg.DataError):
            await line.one("SELECT $1::text", "a\0b")
    assert await line.one("SELECT $1::integer", 1) == 1


async def test_a_commit_that_fails_is_an_error(line: Line) -> None:
    await line.ask(Ask("CREATE TEMP TABLE few (number integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
    twice = Ask("INSERT INTO few VALUES ($1), ($1)", (1,))
    for _ in range(3):
        with pytest.raises(psycopg.errors.UniqueViolation):
            await line.ask(Ask(BEGIN), twice, COMMIT, hints=(Ask("SELECT 1"),))
        assert line.con.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert await line.one("SELECT count(*) FROM few") == 0


async def test_a_hint_that_fails_does_not_hurt_the_commit(line: Line) -> None:
    await line.ask(Ask("CREATE TEMP TABLE few (number integer)"))
    write = Ask("INSERT INTO few VALUES ($1)", (1,))
    for number in range(1, 4):
        answers = await line.ask(Ask(BEGIN), write, COMMIT, hints=(BROKEN,))
        assert answers[1].touched == 1
        assert await line.one("SELECT count(*) FROM few") == number
    with pytest.raises(psycopg.errors.DivisionByZero):
        await line.ask(Ask(BEGIN), write, BROKEN, COMMIT, hints=(Ask("SELECT 1"),))


# -- connections that end ---------------------------------------------------------------------------------------------------


def _active(database: Database) -> bool:
    with database.connect() as con:
        return bool(
            con.execute(
                "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' AND query LIKE '%pg_sleep($1)%'"
                " AND pid <> pg_backend_pid()"
            ).fetchall()
        )


def _cut(database: Database) -> None:
    with database.connect() as con:
        con.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


async def test_a_connection_that_is_cut_in_the_middle_is_told_and_replaced(database: Database, store: Store) -> None:
    before = watched_sockets()
    for _ in range(3):
        async with line_of(store) as line:
            waiting = asyncio.create_task(line.ask(Ask(BEGIN), Ask("SELECT pg_sleep($1)::text", (60,)), COMMIT))
            await until(lambda: _active(database), "the statement")
            _cut(database)
            with pytest.raises(psycopg.OperationalError):
                await waiting
            assert line.con.closed
        assert await store._database.read(lambda work: rows("SELECT $1::integer", 1)) == [(1,)]
    await store.close()
    assert watched_sockets() <= before


async def test_a_connection_that_was_cut_while_it_rested_says_why(database: Database, line: Line) -> None:
    await line.one("SELECT 1")
    _cut(database)
    await until(lambda: not _there(database, line), "its end")
    before = watched_sockets()
    with pytest.raises(psycopg.OperationalError):
        await line.one("SELECT 1")
    assert watched_sockets() == before
    with pytest.raises(psycopg.OperationalError):
        await line.one("SELECT 1")


def _there(database: Database, line: Line) -> bool:
    with database.connect() as con:
        pid = line.con.pgconn.backend_pid
        return bool(con.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchall())


async def test_a_store_that_is_closed_leaves_nobody_waiting(database: Database, store: Store) -> None:
    await store._database.read(lambda work: rows("SELECT 1"))
    waiting = asyncio.create_task(store._database.read(lambda work: rows("SELECT pg_sleep($1)::text", 60)))
    await until(lambda: _active(database), "the statement")
    await store.close()
    async with asyncio.timeout(20):
        with pytest.raises(StoreUnavailable, match="closed"):
            await waiting
    _cut(database)


async def test_who_is_cancelled_ends_the_statement_and_the_connection_goes_on(database: Database, line: Line) -> None:
    before = watched_sockets()
    for _ in range(3):
        waiting = asyncio.create_task(line.ask(Ask(BEGIN), Ask("SELECT pg_sleep($1)::text", (60,)), COMMIT))
        await until(lambda: _active(database), "the statement")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not _active(database)
        assert watched_sockets() == before
        assert line.con.pgconn.transaction_status == psycopg.pq.TransactionStatus.INERROR
        await line.store._database.undo(line.con)
        assert await line.one("SELECT $1::integer", 1) == 1


async def test_where_the_statement_can_not_be_ended_the_connection_is_closed(database: Database, line: Line) -> None:
    waiting = asyncio.create_task(line.one("SELECT pg_sleep($1)::text", 60))
    await until(lambda: _active(database), "the statement")
    before = watched_sockets()
    deaf = mock.patch.object(Lendable, "cancel_safe", mock.AsyncMock())
    with deaf, mock.patch.object(exchange, "PATIENCE", 0.01):
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert line.con.closed
    assert len(watched_sockets()) < len(before)
    _cut(database)


async def test_who_is_cancelled_at_any_moment_leaves_a_connection_that_answers_what_it_is_asked(store: Store) -> None:
    for number in range(60):
        async with line_of(store) as line:
            asks = [Ask("SELECT $1::text", (f"{number}/{place}",)) for place in range(20)]
            waiting = asyncio.create_task(line.ask(Ask(BEGIN), *asks, COMMIT))
            for _ in range(number % 6):
                await asyncio.sleep(0)
            if number % 2:
                await asyncio.sleep(number / 30_000)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        async with line_of(store) as line:
            assert await line.one("SELECT $1::text", f"{number}") == f"{number}"


# -- what is prepared -------------------------------------------------------------------------------------------------------


async def test_what_is_prepared_is_bounded(line: Line) -> None:
    for _ in range(2):
        for number in range(MOST + 30):
            assert await line.one(f"SELECT $1::integer + {number}", 1) == number + 1
            assert await line.one(f"SELECT $1::integer + {number}", 2) == number + 2
            assert await line.one("SELECT $1::text", "often") == "often"
    prepared = await line.prepared()
    assert len(prepared) <= MOST + 1
    assert "SELECT $1::text" in prepared


async def test_a_table_that_gets_another_column_fails_once_at_most(database: Database, line: Line) -> None:
    with database.connect() as con:
        con.execute("CREATE TABLE wide (number integer)")
        text = "SELECT * FROM wide WHERE number = $1"
        for _ in range(3):
            await line.ask(Ask(text, (1,)))
        con.execute("ALTER TABLE wide ADD COLUMN more text; INSERT INTO wide VALUES (1, 'a')")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        await line.ask(Ask(text, (1,)))
    for _ in range(3):
        (answer,) = await line.ask(Ask(text, (1,)))
        assert answer.rows == [(1, "a")]


def record(number: int) -> NewRecord:
    return NewRecord(
        step_id=f"pay#{number}", kind=RecordKind.STEP, position=number, seen=number - 1, digest="d", result='{"v":"ü"}'
    )


async def fails(con: Any) -> None:
    async with con.transaction():
        await con.execute("SELECT 1 / 0")


@pytest.mark.parametrize(
    "what", ["nothing", "DEALLOCATE ALL", "a part that fails", "SET LOCAL client_encoding = latin1"]
)
@pytest.mark.parametrize("end", ["commits", "raises"])
async def test_users_statements_and_ours_do_not_get_in_each_others_way(
    opened: Open, scene: Scene, what: str, end: str
) -> None:
    """Theirs are prepared by the driver, ours by us, on one connection; they or the driver may let go of either."""
    store: Any = scene.store
    held = await scene.take()

    prepare = False if what == "DEALLOCATE ALL" else None  # the oldest of the drivers does not notice it itself

    async def work(con: Any) -> NewRecord:
        for _ in range(3):
            assert await (await con.execute("SELECT 1 + %s", (1,), prepare=prepare)).fetchone() == (2,)
        if what == "a part that fails":
            with pytest.raises(psycopg.errors.DivisionByZero):
                await fails(con)
        elif what != "nothing":
            await con.execute(what, prepare=prepare)
        for _ in range(3):
            assert await (await con.execute("SELECT 2 + %s", (1,), prepare=prepare)).fetchone() == (3,)
        if end == "raises":
            raise LookupError
        return record(number)

    for number in range(4):
        if end == "raises":
            with pytest.raises(LookupError):
                await store.transaction(held.lease, work, timeout=20 * SECOND)
            (answer,) = await store.append([(held.lease, record(number))])
        else:
            answer = await store.transaction(held.lease, work, timeout=20 * SECOND)
        assert answer.state == "appended"
        for _ in range(3):
            assert [found.result for found in await scene.history(held.run.run_id)] == ['{"v":"ü"}'] * (number + 1)
    async with line_of(store) as line:
        prepared = await line.prepared()
    assert len(set(prepared)) == len(prepared)


async def test_what_was_prepared_before_is_used_after_a_users_function(line: Line) -> None:
    for _ in range(3):
        await line.one("SELECT $1::integer + 7", 1)
    line.con.lend()
    await line.con.execute("SELECT 8")
    line.con.take_back()
    for _ in range(3):
        assert await line.one("SELECT $1::integer + 7", 1) == 8
    assert (await line.prepared()).count("SELECT $1::integer + 7") == 1


async def test_a_record_that_was_there_leaves_ours_usable_after_users_statements(scene: Scene) -> None:
    """The transaction is rolled back by the driver, which may let go of all that is prepared."""
    store: Any = scene.store
    held = await scene.take()

    async def work(con: Any) -> NewRecord:
        for _ in range(3):
            await con.execute("SELECT 1 + %s", (1,))
        return record(0)

    states = [(await store.transaction(held.lease, work, timeout=20 * SECOND)).state for _ in range(3)]
    assert states == ["appended", "recorded", "recorded"]
    for _ in range(3):
        assert len(await scene.history(held.run.run_id)) == 1


async def test_a_store_goes_on_where_everything_prepared_was_discarded(scene: Scene, store: Store) -> None:
    run = await scene.start()
    for _ in range(3):
        await store.get([run.run_id], scope=ALL)
    async with line_of(store) as line:
        await line.ask(Ask("DISCARD ALL"))
    for _ in range(2):
        assert [found.run_id for found in await store.get([run.run_id], scope=ALL) if found] == [run.run_id]


async def test_a_store_goes_on_where_a_parameter_has_another_type_by_now(database: Database, store: Store) -> None:
    text = "SELECT count(*) FROM told WHERE one = $1"
    with database.connect() as con:
        con.execute("CREATE TABLE told (one text)")
        for _ in range(3):
            await store._database.read(lambda work: rows(text, str(uuid.UUID(int=5))))
        con.execute("ALTER TABLE told ALTER one TYPE uuid USING one::uuid")
    for _ in range(3):
        assert await store._database.read(lambda work: rows(text, uuid.UUID(int=5))) == [(0,)]


async def test_one_text_several_times_in_a_round_trip_leaves_one_statement(line: Line) -> None:
    ask = Ask("SELECT $1::integer + 9", (1,))
    for _ in range(4):
        await line.ask(ask, ask, ask)
    assert (await line.prepared()).count(ask.text) == 1


# -- answers belong to what was asked -----------------------------------------------------------------------------------------


async def test_a_commit_of_a_transaction_that_failed_is_an_error(line: Line) -> None:
    await line.ask(Ask(BEGIN))
    with pytest.raises(psycopg.errors.DivisionByZero):
        await line.ask(BROKEN)
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        await line.ask(COMMIT)


async def test_a_connection_that_somebody_left_in_the_middle_is_closed(line: Line) -> None:
    """What they asked would be answered first, and taken for what was asked now."""
    line.con.pgconn.enter_pipeline_mode()
    line.con.pgconn.send_query_params(b"SELECT 'theirs'", None)
    line.con.pgconn.pipeline_sync()
    with pytest.raises(psycopg.OperationalError):
        await line.one("SELECT 'ours'")
    assert line.con.closed


async def test_more_answers_than_questions_are_no_answers(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = exchange._receive

    async def one_more(con: Lendable, results: list[Any]) -> None:
        await receive(con, results)
        results.append(results[-1])

    monkeypatch.setattr(exchange, "_receive", one_more)
    with pytest.raises(psycopg.OperationalError, match="2 answers came for 1 statements"):
        await line.one("SELECT 1")
    assert line.con.closed
