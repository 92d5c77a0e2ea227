"""The conformance suite on PostgreSQL: one database for all tests, two schemas in it, emptied before each test.

The clock is the server's: time passes by moving every stored instant back, which to the rows is the same.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from servers.postgres import Database, server

from durable.model import Names
from durable.protocol import Store
from durable.settings import Settings
from durable.testing.conformance import *  # noqa: F403
from durable.testing.conformance.harness import CallerTransaction, Harness
from durable_postgres import backend

ALONE, SHARED = "alone", "shared"
INSTANTS = """
SELECT table_schema, table_name, array_agg(column_name::text) FROM information_schema.columns
WHERE table_schema = ANY (%s) AND data_type = 'timestamp with time zone' AND table_name LIKE 'durable\\_%%'
AND table_name NOT LIKE 'durable\\_v\\_%%' AND table_name <> 'durable_schema_version' GROUP BY 1, 2
"""


@functools.cache
def database() -> Database:
    """The database of this process of pytest."""
    return server().create()


@functools.cache
def connection() -> psycopg.Connection[tuple[object, ...]]:
    """The harnesses' own, one for all: the server starts a process for each, which costs as much as many a test."""
    made = database().connect()
    atexit.register(made.close)
    return made


class PostgresCaller:
    """The application's own connection, inside a transaction."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.native = connection

    async def commit(self) -> None:
        await self.native.commit()

    async def rollback(self) -> None:
        await self.native.rollback()


class PostgresHarness:
    """Two schemas of one database."""

    name = "postgres"
    migrated = False
    tables: tuple[tuple[str, str, list[str]], ...] = ()

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.taken = False
        self.url = database().url
        self.connection = connection()

    async def prepare(self) -> None:
        if not PostgresHarness.migrated:
            for schema in (ALONE, SHARED):
                await (await self._open(schema)).close()
            self.connection.execute("CREATE TABLE caller_row (number bigserial PRIMARY KEY, text text NOT NULL)")
            PostgresHarness.tables = tuple(self.connection.execute(INSTANTS, ([ALONE, SHARED],)).fetchall())  # type: ignore[arg-type]
            PostgresHarness.migrated = True
        tables = [sql.Identifier(schema, table) for schema, table, _ in self.tables]
        tables += [
            sql.Identifier(schema, table)
            for schema in (ALONE, SHARED)
            for table in ("durable_key", "durable_dependency")
        ]
        self._execute([sql.SQL("DELETE FROM {}").format(table) for table in (*tables, sql.Identifier("caller_row"))])

    async def open(self, *, shared: bool = False) -> Store:
        assert shared or not self.taken, "the data that nobody else reaches were given away in this test"
        self.taken = self.taken or not shared
        store = await self._open(SHARED if shared else ALONE)
        self.stores.append(store)
        return store

    async def _open(self, schema: str) -> Store:
        return await backend.open(self.url, settings=Settings(), names=Names(schema=schema), auto_migrate=True)

    async def pass_time(self, micros: int, /) -> None:
        back = sql.SQL("interval {}").format(f"{micros} microseconds")
        self._execute(
            [
                sql.SQL("UPDATE {} SET {}").format(
                    sql.Identifier(schema, table),
                    sql.SQL(", ").join(
                        sql.SQL("{0} = {0} - {1}").format(sql.Identifier(column), back) for column in columns
                    ),
                )
                for schema, table, columns in self.tables
            ]
        )

    def _execute(self, statements: list[sql.Composed]) -> None:
        self.connection.execute(sql.SQL("; ").join([sql.SQL("BEGIN"), *statements, sql.SQL("COMMIT")]))

    @asynccontextmanager
    async def caller_transaction(self) -> AsyncIterator[CallerTransaction]:
        connection = await psycopg.AsyncConnection.connect(self.url)
        try:
            yield PostgresCaller(connection)
        finally:
            await connection.rollback()
            await connection.close()

    async def write_row(self, native: Any, text: str, /) -> None:
        await native.execute("INSERT INTO public.caller_row (text) VALUES (%s)", (text,))

    async def rows(self) -> list[str]:
        return [str(text) for (text,) in self.connection.execute("SELECT text FROM caller_row ORDER BY number")]

    async def close(self) -> None:
        for store in self.stores:
            await store.close()


@pytest.fixture
async def backend_harness() -> AsyncIterator[Harness]:
    harness = PostgresHarness()
    await harness.prepare()
    yield harness
    await harness.close()
