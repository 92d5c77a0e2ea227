"""How SQLite keeps what it has acknowledged (semantics 66): WAL, BEGIN IMMEDIATE, one writer for all, a commit on the disk."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from durable.model import ALL, RunQuery
from durable.settings import Settings
from durable.testing.conformance.scenario import new_run
from durable_sqlite import Store, backend


@pytest.fixture
async def on_file(tmp_path: Path) -> AsyncIterator[Store]:
    store = await backend.open(f"sqlite:///{tmp_path / 'kept.db'}", settings=Settings())
    yield store
    await store.close()


async def test_the_journal_is_a_wal_and_a_commit_waits_for_the_disk(on_file: Store) -> None:
    def ask(con: sqlite3.Connection, now: int) -> tuple[str, int]:
        return con.execute("PRAGMA journal_mode").fetchone()[0], con.execute("PRAGMA synchronous").fetchone()[0]

    assert await on_file._database.write(ask) == ("wal", 2)


async def test_every_writing_transaction_begins_immediate_and_many_calls_share_one(on_file: Store) -> None:
    """Group commit (21): forty calls at once need fewer transactions than calls, and none that would have to be upgraded."""
    statements: list[str] = []

    def watch(con: sqlite3.Connection, now: int) -> None:
        con.set_trace_callback(statements.append)

    def look_away(con: sqlite3.Connection, now: int) -> None:
        con.set_trace_callback(None)

    held, queued = threading.Event(), threading.Event()

    def hold(con: sqlite3.Connection, now: int) -> None:
        held.set()
        assert queued.wait(60)  # however quick the disk is, the calls come together

    await on_file._database.write(watch)
    holding = asyncio.create_task(on_file._database.write(hold))
    assert await asyncio.to_thread(held.wait, 60)  # the batch that has it has nothing else
    calls = [asyncio.create_task(on_file.enqueue([new_run()])) for _ in range(40)]
    async with asyncio.timeout(60):
        while on_file._database.core.lane._queue.qsize() < len(calls):
            await asyncio.sleep(0.001)
    queued.set()
    await asyncio.gather(holding, *calls)
    await on_file._database.write(look_away)
    begun = [statement for statement in statements if statement.startswith("BEGIN")]
    assert begun
    assert set(begun) == {"BEGIN IMMEDIATE"}
    assert len(begun) < 40
    assert await on_file.count(RunQuery(), scope=ALL) == 40


async def test_what_was_acknowledged_is_seen_by_a_connection_that_knows_nothing_of_us(
    on_file: Store, tmp_path: Path
) -> None:
    (answer,) = await on_file.enqueue([new_run()])
    other = sqlite3.connect(tmp_path / "kept.db")
    try:
        assert other.execute("SELECT run_id FROM durable_run").fetchall() == [(answer.run.run_id,)]
    finally:
        other.close()
