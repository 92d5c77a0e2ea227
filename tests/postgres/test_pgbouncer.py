"""Behind PgBouncer in transaction mode (storage.md, rule 67): no session state on pooled connections, LISTEN past it or not at all."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from postgres.conftest import until
from postgres.migrator import connections
from servers.pgbouncer import Bouncer, bouncer
from servers.postgres import Database

import durable
from durable.model import ALL, Names
from durable.settings import HOUR, Settings
from durable.testing.conformance.scenario import Scene
from durable.testing.conformance.test_lost_answers import WRITES, state
from durable_postgres import Store, backend, schema
from durable_postgres.names import Naming

declared = durable.Registry("test_pgbouncer")
GO = durable.Signal("go", str)


async def pay(con: psycopg.AsyncConnection[tuple[object, ...]], amount: int) -> int:
    await con.execute("INSERT INTO paid VALUES (%s)", (amount,))
    return amount


async def add(number: int) -> int:
    return number + 1


@durable.function(registry=declared)
async def work(ctx: durable.Context, number: int) -> str:
    total = 0
    for _ in range(3):
        total = await ctx.step(add, total)
    paid = await ctx.transaction(pay, number)
    return f"{total} {paid} {await ctx.wait_signal(GO)}"


@pytest.fixture(scope="module")
def pooler() -> Iterator[Bouncer]:
    made = bouncer()
    yield made
    made.close()


def through(pooler: Bouncer, database: Database, query: str = "prepare=off&listen=off") -> str:
    return f"{pooler.url_of(database.name)}?{query}"


def past(database: Database) -> str:
    return "prepare=off&direct_url=" + urllib.parse.quote(database.url, safe="")


@pytest.fixture
async def pooled(pooler: Bouncer, database: Database) -> AsyncIterator[Store]:
    store = await backend.open(through(pooler, database), settings=Settings())
    yield store
    await store.close()


@pytest.mark.parametrize("query", ["direct", "listen=off"])
async def test_workers_and_clients_work_through_it(pooler: Bouncer, database: Database, query: str) -> None:
    with database.connect() as con:
        con.execute("CREATE TABLE paid (amount integer)")
    url = through(pooler, database, past(database) if query == "direct" else "prepare=off&listen=off")
    settings = {"poll": "200ms", "poll_idle": "200ms"}
    async with (
        durable.Client(url, settings=settings) as client,
        durable.Client(url, settings=settings) as other,
        durable.Worker(client, functions=[work]),
        durable.Worker(other, functions=[work]),
    ):
        runs = [await other.start(work, number) for number in range(30)]
        await asyncio.gather(*(run.signal(GO, "there") for run in runs))
        answers = await asyncio.gather(*(run.result(timeout=60) for run in runs))
    assert answers == [f"3 {number} there" for number in range(30)]


@pytest.mark.parametrize("name", WRITES)
async def test_every_write_works_through_it_and_can_be_repeated(pooled: Store, database: Database, name: str) -> None:
    from postgres.test_faults import NoTime

    scene = Scene(pooled, NoTime(database))  # type: ignore[arg-type]
    call = await WRITES[name](scene)
    await call(pooled)
    once = await state(scene)
    await call(pooled)
    assert await state(scene) == once
    assert list(await pooled.audit(scope=ALL)) == []


async def test_a_listener_past_it_hears_the_news(pooler: Bouncer, database: Database) -> None:
    url = through(pooler, database, past(database))
    here, there = [await backend.open(url, settings=Settings()) for _ in range(2)]
    scene = Scene(here, None)  # type: ignore[arg-type]
    waiting = asyncio.create_task(there.wait(["queue:default"], HOUR))

    async def heard() -> bool:
        if waiting.done():
            return True
        await scene.start()
        await asyncio.wait([waiting], timeout=0.2)
        return waiting.done()

    await until(heard, "the news")
    await waiting
    await here.close()
    await there.close()


async def test_nothing_of_ours_stays_on_the_servers_sessions(
    pooled: Store, pooler: Bouncer, database: Database
) -> None:
    """Settings of a transaction end with it, and no lock outlives it: the next client gets a clean session."""
    scene = Scene(pooled, None)  # type: ignore[arg-type]
    await scene.complete(await scene.take(sequence_key="s"))
    async with await psycopg.AsyncConnection.connect(
        pooler.url_of(database.name), autocommit=True, prepare_threshold=None
    ) as con:
        for _ in range(20):
            cursor = await con.execute(
                "SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'),"
                " current_setting('synchronous_commit'), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'),"
                " (SELECT count(*) FROM pg_prepared_statements)"
            )
            assert await cursor.fetchone() == ("0", "0", "on", 0, 0)


async def test_no_connection_prepares_statements_where_the_url_says_so(pooler: Bouncer, database: Database) -> None:
    """Nor that of checks, migrations and LISTEN, which leads through the pooler where no direct URL is given."""
    con = connections(through(pooler, database))
    async with con.direct() as direct:
        assert direct.prepare_threshold is None
    async with (await con.pools.of_this_loop()).connection() as pooled:
        assert pooled.prepare_threshold is None
    await con.close()


ASKED = "SELECT pid, query_start FROM pg_stat_activity WHERE query LIKE '%pg_try_advisory_xact_lock%' AND pid <> pg_backend_pid()"


async def test_migrations_work_through_it(pooler: Bouncer, empty: Database) -> None:
    """Also when they ask for the lock again and again, in sessions that change hands: nothing is prepared there."""
    with empty.connect() as holder, empty.connect() as con:
        holder.execute("SELECT pg_advisory_lock(%s, %s)", (Naming(Names()).key, schema.LOCK))
        opening = [
            asyncio.create_task(backend.open(through(pooler, empty), settings=Settings(), auto_migrate=True))
            for _ in range(4)
        ]
        seen: set[object] = set()
        await until(lambda: seen.update(con.execute(ASKED).fetchall()) or len(seen) > 60, "the lock to be asked for")
        assert not any(task.done() for task in opening)
    for store in await asyncio.gather(*opening):
        assert (await store.schema_status()).missing == []
        await store.close()
