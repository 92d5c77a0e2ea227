"""A SQLite file with a large past and a large backlog, written straight into the tables, and a microscope for what a call does.

`test_plans.py` builds it once, large and small, and looks at every hot operation of the store in both. Rows are made by SQLite itself
from a counter, with the indexes put back afterwards: 700,000 rows in seconds. Nothing here checks anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from durable.protocol import Store
from durable.settings import Settings
from durable_sqlite import backend

SECOND = 1_000_000
NOW = 1_800_000_000 * SECOND
TENANT = "9f3f2a52-5d2c-5a6e-8f5b-1f2f30d2c111"
SERIES = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
KINDS = {
    # what it is: (how many in the large one, name, status, attempts, available_at, finished_at, purge_at, error kind)
    "unknown": (50_000, "'unknown'", "'pending'", 0, "NULL", "NULL", "NULL"),
    "ready": (200_000, "'f' || (i % 3)", "'pending'", 0, "NULL", "NULL", "NULL"),
    "delayed": (200_000, "'f' || (i % 3)", "'pending'", 0, f"{NOW} + 3600000000 + i", "NULL", "NULL"),
    "finished": (
        200_000,
        "'f' || (i % 3)",
        "CASE i % 10 WHEN 0 THEN 'failed' ELSE 'completed' END",
        1,
        "NULL",
        f"{NOW} - 2000000000 + i",
        f"{NOW} + 7200000000 + i",
    ),
    "suspended": (50_000, "'f' || (i % 3)", "'suspended'", 1, f"{NOW} + 90000000000 + i", "NULL", "NULL"),
}


def build(path: Path, share: int) -> None:
    """Fill a new file: every kind with its number divided by `share`, but never fewer than 1,000."""
    asyncio.run(_migrate(path))
    con = sqlite3.connect(path, isolation_level=None)
    con.execute("PRAGMA synchronous=OFF")
    con.execute("PRAGMA cache_size=-200000")
    indexes = con.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'durable_run' AND sql <> ''"
    )
    indexes = indexes.fetchall()
    con.execute("BEGIN")
    for name, _ in indexes:
        con.execute(f"DROP INDEX {name}")
    for kind, (count, name, status, attempts, available, finished, purge) in KINDS.items():
        con.execute(f"""
            {SERIES.format(count=max(1_000, count // share))}
            INSERT INTO durable_run (run_id, name, status, tenant_id, attempts, available_at, created_at, updated_at, started_at,
                                     finished_at, purge_at, seed, input, output, error, error_kind, wake_seq, max_attempts)
            SELECT '{kind}-' || i, {name}, {status}, CASE WHEN i % 5 = 0 THEN '{TENANT}' END, {attempts}, {available},
                   {NOW} - 9000000000 + i, {NOW} - 9000000000 + i, NULL, {finished}, {purge}, x'00', '{{"args":[1,2,3]}}',
                   CASE WHEN {status} = 'completed' THEN '1' END, CASE WHEN {status} = 'failed' THEN 'broken' END,
                   CASE WHEN {status} = 'failed' THEN 'exception' END, 0, 1
            FROM n""")
    con.execute("""
        INSERT INTO durable_step (run_id, step_id, kind, position, seen, digest, fence, created_at, result)
        SELECT run_id, 'a', 'step', 0, -1, 'd', 1, created_at, '{"v":1}' FROM durable_run WHERE attempts = 1""")
    for _, text in indexes:
        con.execute(text)
    con.execute("UPDATE durable_run SET replay_family = 'x' WHERE attempts = 1 AND submitted % 2 = 0")
    con.execute("COMMIT")
    con.close()


async def _migrate(path: Path) -> None:
    store = await backend.open(f"sqlite:///{path}", settings=Settings(), clock=lambda: NOW)
    await store.close()


class Microscope:
    """Every statement of the store's connections and the steps of SQLite's machine that it took."""

    GRAIN = 10

    def __init__(self, path: Path) -> None:
        self.path = path
        self.time = NOW
        self.statements: list[str] = []
        self.steps = 0
        self.loop = asyncio.new_event_loop()
        connect = sqlite3.connect

        def watched(target: Any, *args: Any, **options: Any) -> sqlite3.Connection:
            con = connect(target, *args, **options)
            if str(target) == str(path):  # another microscope may look at another file at the same time
                con.set_trace_callback(self.statements.append)
                con.set_progress_handler(self._step, self.GRAIN)
            return con

        # The readers are opened at the first read: the patch stays until the end.
        self.patch = mock.patch("sqlite3.connect", watched)
        self.patch.start()
        self.store: Store = self.do(backend.open(f"sqlite:///{path}", settings=Settings(), clock=lambda: self.time))

    def _step(self) -> int:
        self.steps += self.GRAIN
        return 0

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.do(self.store.close())
        self.patch.stop()
        self.loop.close()

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Forget what was, and see what the calls inside do."""
        self.statements.clear()
        self.steps = 0
        yield

    def plans(self) -> dict[str, list[str]]:
        """Each statement seen, with its plan."""
        with contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as con:
            con.set_trace_callback(None)
            found: dict[str, list[str]] = {}
            for text in dict.fromkeys(self.statements):
                if text.lstrip().upper().startswith(("SELECT", "WITH", "UPDATE", "DELETE", "INSERT")):
                    found[text] = [row[3] for row in con.execute(f"EXPLAIN QUERY PLAN {text}")]
            return found
