"""The caller's own transaction (rule 41) on every kind of connection, and `client.using(conn=…)` end to end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy
from postgres.conftest import Open
from servers.postgres import Database, server
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import durable
from durable.errors import Conflict, Misuse
from durable.model import ALL, NewSignal, Status, new_run_id
from durable.testing.conformance.scenario import Scene, new_run
from durable_postgres import Store

Verb = Callable[[], Awaitable[None]]
Given = tuple[Any, Verb, Verb, Verb]
"""What is passed as tx; commit; rollback; write a row."""


def awaited(call: Callable[[], Any]) -> Verb:
    async def verb() -> None:
        call()

    return verb


@asynccontextmanager
async def psycopg_async(url: str) -> AsyncIterator[Given]:
    async with await psycopg.AsyncConnection.connect(url) as con:

        async def write() -> None:
            await con.execute("INSERT INTO caller_row VALUES ('row')")

        yield con, con.commit, con.rollback, write


@asynccontextmanager
async def psycopg_blocking(url: str) -> AsyncIterator[Given]:
    with psycopg.connect(url) as con:
        yield (
            con,
            awaited(con.commit),
            awaited(con.rollback),
            awaited(lambda: con.execute("INSERT INTO caller_row VALUES ('row')")),
        )


@asynccontextmanager
async def psycopg_dicts(url: str) -> AsyncIterator[Given]:
    """With a row factory and loaders of the application's own."""
    async with await psycopg.AsyncConnection.connect(
        url, row_factory=psycopg.rows.dict_row, cursor_factory=psycopg.AsyncClientCursor
    ) as con:
        con.adapters.register_loader("jsonb", psycopg.types.string.TextLoader)

        async def write() -> None:
            await con.execute("INSERT INTO caller_row VALUES (%s)", ("row",))

        yield con, con.commit, con.rollback, write


INSERT = sqlalchemy.text("INSERT INTO caller_row VALUES ('row')")


def alchemy(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


@asynccontextmanager
async def alchemy_connection(url: str) -> AsyncIterator[Given]:
    engine = sqlalchemy.create_engine(alchemy(url))
    with engine.connect() as con:
        con.begin()
        yield con, awaited(con.commit), awaited(con.rollback), awaited(lambda: con.execute(INSERT))
    engine.dispose()


@asynccontextmanager
async def alchemy_session(url: str) -> AsyncIterator[Given]:
    engine = sqlalchemy.create_engine(alchemy(url))
    with Session(engine) as session:
        yield session, awaited(session.commit), awaited(session.rollback), awaited(lambda: session.execute(INSERT))
    engine.dispose()


@asynccontextmanager
async def alchemy_scoped_session(url: str) -> AsyncIterator[Given]:
    engine = sqlalchemy.create_engine(alchemy(url))
    session = scoped_session(sessionmaker(engine))
    yield session, awaited(session.commit), awaited(session.rollback), awaited(lambda: session.execute(INSERT))
    session.remove()
    engine.dispose()


@asynccontextmanager
async def alchemy_async_connection(url: str) -> AsyncIterator[Given]:
    engine = create_async_engine(alchemy(url))
    async with engine.connect() as con:
        await con.begin()

        async def write() -> None:
            await con.execute(INSERT)

        yield con, con.commit, con.rollback, write
    await engine.dispose()


@asynccontextmanager
async def alchemy_async_session(url: str) -> AsyncIterator[Given]:
    engine = create_async_engine(alchemy(url))
    async with AsyncSession(engine) as session:

        async def write() -> None:
            await session.execute(INSERT)

        yield session, session.commit, session.rollback, write
    await engine.dispose()


@asynccontextmanager
async def alchemy_async_scoped_session(url: str) -> AsyncIterator[Given]:
    engine = create_async_engine(alchemy(url))
    session = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: url)

    async def write() -> None:
        await session.execute(INSERT)

    yield session, session.commit, session.rollback, write
    await session.remove()
    await engine.dispose()


KINDS = (
    psycopg_async,
    psycopg_blocking,
    psycopg_dicts,
    alchemy_connection,
    alchemy_session,
    alchemy_scoped_session,
    alchemy_async_connection,
    alchemy_async_session,
    alchemy_async_scoped_session,
)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])


@pytest.fixture
def table(database: Database) -> None:
    """A table of the application."""
    with database.connect() as con:
        con.execute("CREATE TABLE caller_row (text text NOT NULL)")


def written(database: Database) -> int:
    with database.connect() as con:
        return len(con.execute("SELECT 1 FROM caller_row").fetchall())


@each_kind
async def test_nothing_is_visible_before_the_commit_and_all_of_it_after(
    database: Database, table: None, scene: Scene, kind: Any
) -> None:
    held = await scene.take()
    run = new_run(idempotency_key="i", sequence_key="s", tags={"a": "b"}, deadline_after=10_000_000)
    async with kind(database.url) as (tx, commit, _, write):
        await write()
        (answer,) = await scene.store.enqueue([run], tx=tx)
        assert (answer.disposition, answer.run.run_id) == ("created", run.run_id)
        seq = await scene.store.send(
            NewSignal(run_id=held.run.run_id, name="go", payload="1", dedup_id="d"), scope=ALL, tx=tx
        )
        assert await scene.gone(run.run_id)
        assert written(database) == 0
        await commit()
    assert await scene.get(run.run_id) == answer.run
    assert [signal.seq for signal in (await scene.inbox(held)).signals] == [seq]
    assert written(database) == 1


@each_kind
async def test_nothing_is_left_by_a_rollback(database: Database, table: None, scene: Scene, kind: Any) -> None:
    held = await scene.take()
    run = new_run(idempotency_key="i", coalesce_key="c")
    async with kind(database.url) as (tx, _, rollback, write):
        await write()
        await scene.store.enqueue([run], tx=tx)
        await scene.store.send(
            NewSignal(run_id=held.run.run_id, name="go", payload="1", dedup_id="d"), scope=ALL, tx=tx
        )
        await rollback()
    assert await scene.gone(run.run_id)
    assert (await scene.get(held.run.run_id)).wake_seq == 0
    assert (await scene.submit(idempotency_key="i", coalesce_key="c")).disposition == "created"
    assert written(database) == 0


@each_kind
async def test_a_refusal_leaves_the_transaction_usable(
    database: Database, table: None, scene: Scene, kind: Any
) -> None:
    await scene.start(idempotency_key="i", name="other")
    async with kind(database.url) as (tx, commit, _, write):
        await write()
        with pytest.raises(Conflict):
            await scene.store.enqueue([new_run(), new_run(idempotency_key="i")], tx=tx)
        await write()
        await scene.store.enqueue([new_run()], tx=tx)
        await commit()
    assert written(database) == 2
    assert len(await scene.runs()) == 2


@each_kind
async def test_a_key_that_another_transaction_takes_meanwhile_is_found(
    database: Database, table: None, scene: Scene, kind: Any
) -> None:
    """The other one has it, uncommitted, when the caller asks: the caller waits, and then finds that run (35)."""
    first = new_run(idempotency_key="i")
    async with await psycopg.AsyncConnection.connect(database.url) as other, kind(database.url) as (tx, commit, _, _):
        await scene.store.enqueue([first], tx=other)
        asking = asyncio.create_task(scene.store.enqueue([new_run(idempotency_key="i")], tx=tx))
        with database.connect() as con:
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            while not con.execute(waiting).fetchone():
                assert not asking.done(), asking.result()
                await asyncio.sleep(0.01)
        await other.commit()
        (answer,) = await asking
        await commit()
    assert (answer.disposition, answer.run.run_id) == ("existing", first.run_id)


async def test_a_connection_in_another_encoding_stores_the_same_text(database: Database, scene: Scene) -> None:
    """Also in lists: on a caller's connection the driver writes them, which knows its encoding."""
    async with await psycopg.AsyncConnection.connect(database.url, client_encoding="LATIN1") as con:
        runs = [
            new_run(input=f'[["größer {number}"],{{}}]', idempotency_key=f"schlüssel {number}") for number in range(2)
        ]
        await scene.store.enqueue(runs, tx=con)
        again = await scene.store.enqueue([dataclasses.replace(run, run_id=new_run_id()) for run in runs], tx=con)
        await con.commit()
    assert [one.run.input for one in again] == [run.input for run in runs]
    stored = await scene.store.get([run.run_id for run in runs], scope=ALL)
    assert [(run.input, run.idempotency_key) for run in stored if run is not None] == [
        (run.input, run.idempotency_key) for run in runs
    ]


async def test_errors_of_the_callers_transaction_pass_through_untouched(database: Database, scene: Scene) -> None:
    async with await psycopg.AsyncConnection.connect(database.url) as con:
        with pytest.raises(psycopg.errors.UndefinedTable):
            await con.execute("SELECT * FROM nowhere")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            await scene.store.enqueue([new_run()], tx=con)


async def test_what_can_not_commit_together_is_refused(database: Database, empty: Database, scene: Scene) -> None:
    async with await psycopg.AsyncConnection.connect(database.url, autocommit=True) as con:
        with pytest.raises(Misuse, match="no open transaction"):
            await scene.store.enqueue([new_run()], tx=con)
        async with con.transaction():
            (answer,) = await scene.store.enqueue([new_run()], tx=con)
        assert (await scene.get(answer.run.run_id)).status == Status.PENDING
    with pytest.raises(Misuse, match="closed"):
        await scene.store.enqueue([new_run()], tx=con)
    async with await psycopg.AsyncConnection.connect(empty.url) as con:
        with pytest.raises(Misuse, match=empty.name):
            await scene.store.enqueue([new_run()], tx=con)
    engine = sqlalchemy.create_engine(alchemy(database.url))
    with engine.connect() as alone, pytest.raises(Misuse, match="no open transaction"):
        await scene.store.enqueue([new_run()], tx=alone)
    with pytest.raises(Misuse, match="Engine"):
        await scene.store.enqueue([new_run()], tx=engine)
    engine.dispose()
    other = sqlalchemy.create_engine("sqlite://")
    with other.begin() as foreign, pytest.raises(Misuse, match="sqlite3"):
        await scene.store.enqueue([new_run()], tx=foreign)
    other.dispose()
    assert len(await scene.runs()) == 1


async def test_a_join_holds_the_run_that_it_joins_until_the_commit(database: Database, opened: Open) -> None:
    """A claim meanwhile takes others; after the commit it gets the run with the joiner's data (41)."""
    scene = Scene(await opened(), None)  # type: ignore[arg-type]
    first = await scene.start(coalesce_key="c", priority=5)
    other = await scene.start()
    async with await psycopg.AsyncConnection.connect(database.url) as con:
        joiner = new_run(coalesce_key="c", input="2", on_coalesce="replace")
        (answer,) = await scene.store.enqueue([joiner], tx=con)
        assert (answer.disposition, answer.run.run_id) == ("coalesced", first.run_id)
        assert [one.run.run_id for one in await scene.claim(10)] == [other.run_id]
        await con.commit()
    assert [(one.run.run_id, one.run.input) for one in await scene.claim(10)] == [(first.run_id, "2")]


async def test_a_snapshot_that_can_not_see_the_other_run_is_told_so_by_the_server(
    database: Database, scene: Scene
) -> None:
    """REPEATABLE READ of the caller: joining what came after its snapshot is impossible; the caller tries its transaction again."""
    con = await psycopg.AsyncConnection.connect(database.url)
    await con.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
    await con.execute("SELECT 1")
    await scene.start(idempotency_key="i")
    with pytest.raises(psycopg.errors.SerializationFailure):
        await scene.store.enqueue([new_run(idempotency_key="i")], tx=con)
    await con.close()


# -- end to end -----------------------------------------------------------------------------------------------------------------

declared = durable.Registry("test_callers")
GO = durable.Signal("go", str)


@durable.function(registry=declared)
async def greet(ctx: durable.Context, name: str) -> str:
    return f"hello {name}"


@durable.function(registry=declared)
async def listen(ctx: durable.Context) -> str:
    return await ctx.wait_signal(GO)


@each_kind
async def test_a_run_that_is_started_in_the_callers_transaction_runs_after_its_commit(
    database: Database, table: None, kind: Any
) -> None:
    async with (
        durable.Client(database.url, settings={"poll": "200ms"}) as client,
        durable.Worker(client, functions=[greet, listen]),
    ):
        listening = await client.start(listen)
        async with kind(database.url) as (tx, commit, _, write):
            bound = client.using(conn=tx)
            await write()
            run = await bound.start(greet, "you")
            many = await bound.start_many(greet, ["a", "b"])
            await (await bound.get(listening.id)).signal(GO, "there")
            await commit()
        await client.wake()
        assert await run.result(timeout=30) == "hello you"
        assert [await one.result(timeout=30) for one in many] == ["hello a", "hello b"]
        assert await listening.result(timeout=30) == "there"


async def test_nobody_is_woken_before_the_commit(store: Store, database: Database) -> None:
    """Neither by us nor by the server: no NOTIFY rides in the caller's transaction (41, 67)."""
    with database.connect() as con:
        con.execute(f"LISTEN {store._database.naming.channel}")
        async with await psycopg.AsyncConnection.connect(database.url) as caller:
            await store.enqueue([new_run()], tx=caller)
            await caller.commit()
        assert list(con.notifies(timeout=0.5)) == []
    assert server().version >= 15
