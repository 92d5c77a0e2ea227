"""The conformance suite on SQLite: in memory where one store is enough, on a file where others must reach the data."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from durable.protocol import Store
from durable.settings import SECOND, Settings
from durable.testing.conformance import *  # noqa: F403
from durable.testing.conformance.harness import CallerTransaction, Harness
from durable_sqlite import backend


class SqliteCaller:
    """The application's own connection, inside a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.native = connection

    async def commit(self) -> None:
        self.native.execute("COMMIT")

    async def rollback(self) -> None:
        self.native.execute("ROLLBACK")


class SqliteHarness:
    """One database under a clock that the tests move."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "shared.db"
        self.now = 1_800_000_000 * SECOND
        self.clock = lambda: self.now  # one object: stores of one file in one process share a writer, and so a clock
        self.stores: list[Store] = []

    async def open(self, *, shared: bool = False) -> Store:
        return await self.open_within(Settings(), shared=shared)

    async def open_within(self, settings: Settings, *, shared: bool) -> Store:
        """Open one with these settings."""
        url = f"sqlite:///{self.path}" if shared else "sqlite:///:memory:"
        store = await backend.open(url, settings=settings, clock=self.clock)
        self.stores.append(store)
        if shared:
            connection = self.connect()
            connection.execute("CREATE TABLE IF NOT EXISTS caller_row (number INTEGER PRIMARY KEY, text TEXT NOT NULL)")
            connection.close()
        return store

    async def pass_time(self, micros: int, /) -> None:
        self.now += micros

    def connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, isolation_level=None, timeout=30)

    @asynccontextmanager
    async def caller_transaction(self) -> AsyncIterator[CallerTransaction]:
        connection = self.connect()
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield SqliteCaller(connection)
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            connection.close()

    async def write_row(self, native: Any, text: str, /) -> None:
        native.execute("INSERT INTO caller_row (text) VALUES (?)", (text,))

    async def rows(self) -> list[str]:
        connection = self.connect()
        try:
            return [text for (text,) in connection.execute("SELECT text FROM caller_row ORDER BY number")]
        finally:
            connection.close()

    async def close(self) -> None:
        for store in self.stores:
            await store.close()


@pytest.fixture
async def backend_harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = SqliteHarness(tmp_path)
    yield harness
    await harness.close()
