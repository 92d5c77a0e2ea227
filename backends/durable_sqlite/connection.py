"""Threads and transactions: one writer thread into which everything that is queued goes as one BEGIN IMMEDIATE … COMMIT
(semantics 66).

`store.py` calls `write` and `read` with operations: plain functions `operation(con, now)`. A write operation runs inside the shared
transaction under a savepoint of its own, so one that fails fails itself and not its batch. `opening.py` makes a `Core` per file
and process; each store holds a `Database`, its handle. Nothing here knows a table.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from durable.errors import Misuse, StoreUnavailable
from durable.model import Instant
from durable.settings import Micros, Settings
from durable.storekit import Renames

from .faults import mapped
from .lanes import Answer, Connection, Item, Lane, Operation, announce, answer, deliver, settings_of
from .timekeeping import Timekeeper
from .wakeups import Wakeups

T = TypeVar("T")


class Closes(Protocol):
    """What a core closes together with itself."""

    def close(self) -> None:
        """Let go of threads and connections."""
        ...


S = TypeVar("S", bound=Closes)

log = logging.getLogger("durable.sqlite")

CHECKPOINT_BYTES: Final = 4 << 20
"""A -wal longer than this is copied back. Copying is ours: SQLite's own trigger lets it grow with every process."""

in_transaction: contextvars.ContextVar[Core | None] = contextvars.ContextVar("durable_sqlite_transaction", default=None)
"""Set while the body of a `ctx.transaction` runs: a write awaited in there would wait for a lock that the same task holds."""


class Core:
    """Everything that one process has open on one database: shared by all its stores on that path."""

    def __init__(
        self,
        *,
        path: Path | None,
        connect: Callable[[], Connection],
        clock: Callable[[], Instant] | None,
        busy_timeout: Micros,
        renames: Renames,
        prepare: Operation[Instant] | None = None,
    ) -> None:
        self.path = path
        self.renames = renames
        self.pid = os.getpid()
        self.clock = clock
        self.lock = threading.Lock()  # flushes, checkpoints and ctx.transaction: one writer in this process
        self.connect = connect
        self._busy_timeout = busy_timeout / 1_000_000
        self._timekeeper = Timekeeper(clock)
        self._failure: str | None = None
        self._checkpoint_pause = 0.0
        self._checkpoint_at = 0.0
        self._readers: dict[str, Lane] = {}
        self._readers_lock = threading.Lock()
        self._sides: dict[Callable[[Core], Closes], Closes] = {}
        self.writer = connect()
        if prepare is not None:
            self._prepare(prepare)
        (self._data_version,) = self.writer.execute("PRAGMA data_version").fetchone()
        found = os.stat(path) if path is not None else None
        self._identity = (found.st_ino, found.st_dev) if found is not None else None
        self._wal = f"{path}-wal"
        self.wakeups = Wakeups(self._nudge)
        self.lane = Lane(
            "durable-sqlite-writer",
            self._flush,
            idle=self.look,
            look_after=self.wakeups.look_after if path is not None else lambda: None,
            at_end=self.writer.close,
        )

    def _nudge(self) -> None:
        self.lane.nudge()

    def _prepare(self, prepare: Operation[Instant]) -> None:
        """The first transaction, before there is a thread: schema and migration; it says at what instant the clock begins.

        Where it fails nothing stays open."""
        try:
            self.begin(self.writer)
            begin_at = prepare(self.writer, self.now())
            self.writer.execute("COMMIT")
            self._timekeeper.begin_at(begin_at)
        except BaseException:
            self.roll_back(self.writer)
            self.writer.close()
            raise

    def now(self) -> Instant:
        """The store's clock, which never runs backwards inside a process."""
        return self._timekeeper.now()

    # -- guards ----------------------------------------------------------------------------------------------------------

    def guard(self) -> None:
        """Refuse what can not be safe: a fork's child, and a file that is not the one that was opened."""
        if os.getpid() != self.pid:
            raise StoreUnavailable(
                "this store was opened before a fork: SQLite's connections do not survive one",
                hint="open the store in the child process (for example in a post-fork hook)",
            )
        if self._failure is not None:
            raise StoreUnavailable(
                self._failure, hint="restart this process, so that it opens the file that is there now"
            )

    @property
    def usable(self) -> bool:
        """False once its file was replaced: a new core must be opened."""
        if self._failure is None and self.path is not None:
            try:
                found = os.stat(self.path)
            except FileNotFoundError:
                return False
            return (found.st_ino, found.st_dev) == self._identity
        return self._failure is None

    def verify_file(self) -> None:
        """SQLite goes on 'succeeding' after its file was unlinked or replaced; what is written then goes nowhere."""
        if self.path is None:
            return
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._failure = f"the database file was removed: {self.path}"
        else:
            if (found.st_ino, found.st_dev) != self._identity:
                self._failure = f"the database file was replaced: {self.path}"
        self.guard()

    # -- the write side --------------------------------------------------------------------------------------------------

    def begin(self, con: sqlite3.Connection) -> None:
        """BEGIN IMMEDIATE, tried again at short uniform pauses: SQLite's own busy handler starves some of many writers."""
        until = time.monotonic() + self._busy_timeout
        while True:
            try:
                con.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
            time.sleep(random.uniform(0.0002, 0.001))

    def _flush(self, batch: list[Item[Any]]) -> None:
        con = self.writer
        with self.lock:
            con.announced.clear()
            try:
                self.verify_file()
                self.begin(con)
                answers = self._apply(con, batch)
                if con.in_transaction:
                    con.execute("COMMIT")
                self.verify_file()
            except BaseException as error:  # noqa: BLE001 - every future of the batch gets it, mapped
                self.roll_back(con)
                answers = [(item, None, mapped(error)) for item in batch]
                con.announced.clear()
        deliver(answers)
        if con.announced:
            self.wakeups.announce(con.announced)
        self.look()
        self._checkpoint(con)

    def _apply(self, con: Connection, batch: list[Item[Any]]) -> list[Answer]:
        now = self.now()
        answers: list[Answer] = []
        alone = len(batch) == 1
        for item in batch:
            if not alone:
                con.execute("SAVEPOINT item")
            con.settings = item.settings
            try:
                value = item.operation(con, now)
            except Exception as error:
                if not con.in_transaction:
                    raise  # SQLite rolled the whole transaction back (disk full): the whole batch failed
                con.execute("ROLLBACK" if alone else "ROLLBACK TO item")
                answers.append((item, None, mapped(error)))
            else:
                answers.append((item, value, None))
            if not alone:
                con.execute("RELEASE item")
        return answers

    @staticmethod
    def roll_back(con: sqlite3.Connection) -> None:
        if con.in_transaction:
            try:
                con.execute("ROLLBACK")
            except sqlite3.Error:
                log.exception("rolling back failed; the next transaction finds out whether the database is usable")

    def look(self) -> None:
        """Has another connection committed? The number changes for others' commits only, so our own wake nobody twice."""
        if self.path is None or self.wakeups.look_after() is None:
            return
        try:
            (found,) = self.writer.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            log.warning(
                "data_version could not be read; waiting callers fall back to their poll interval", exc_info=True
            )
            return
        if found != self._data_version:
            self._data_version = found
            self.wakeups.changed()

    def _checkpoint(self, con: sqlite3.Connection) -> None:
        """Copy a long -wal back, under the write lock: a checkpoint that runs beside another process's writer is what
        the published WAL-reset bug of SQLite before 3.51.3 needs."""
        if self.path is None or time.monotonic() < self._checkpoint_at:
            return
        try:
            if os.stat(self._wal).st_size <= CHECKPOINT_BYTES:
                return
            with self.lock:
                con.execute("PRAGMA busy_timeout=100")
                try:
                    busy, _, _ = con.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                finally:
                    con.execute("PRAGMA busy_timeout=0")
        except (sqlite3.Error, OSError) as error:
            log.warning("the checkpoint failed and is tried again: %s", error)
            busy = 1
        if busy:
            self._checkpoint_pause = min(max(self._checkpoint_pause * 2, 0.05), 5.0)
            self._checkpoint_at = time.monotonic() + self._checkpoint_pause
        else:
            self._checkpoint_pause = 0.0

    def side(self, make: Callable[[Core], S]) -> S:
        """The one object of a kind that belongs to this core (see `transactions.py`), made when it is first wanted."""
        with self._readers_lock:
            found = self._sides.get(make)
            if found is None:
                found = self._sides[make] = make(self)
            return cast(S, found)

    # -- the read side ---------------------------------------------------------------------------------------------------

    def reader(self, name: str) -> Lane:
        """The reader thread of that name; in memory the writer's, since there is one connection only."""
        if self.path is None:
            return self.lane
        lane = self._readers.get(name)
        if lane is None:
            with self._readers_lock:
                lane = self._readers.get(name)
                if lane is None:
                    lane = self._readers[name] = self._open_reader(name)
        return lane

    def _open_reader(self, name: str) -> Lane:
        con = self.connect()
        con.execute("PRAGMA query_only=ON")
        con.execute("PRAGMA busy_timeout=5000")

        def process(batch: list[Item[Any]]) -> None:
            # One snapshot for the batch. It is taken after all of it was queued, so each sees what was acknowledged before.
            answers: list[Answer] = []
            try:
                con.execute("BEGIN")
                now = self.now()
                answers.extend(answer(item, con, now) for item in batch)
            except BaseException as error:  # noqa: BLE001 - the rest of the batch gets it, mapped
                answers.extend((item, None, mapped(error)) for item in batch[len(answers) :])
            finally:
                self.roll_back(con)
            deliver(answers)

        return Lane(f"durable-sqlite-{name}", process, at_end=con.close)

    def close(self) -> None:
        """Finish what is queued, then let go of threads and connections. In a fork's child: touch nothing."""
        if os.getpid() != self.pid:
            return
        with self._readers_lock:
            others: list[Closes] = [*self._sides.values(), *self._readers.values()]
        for other in others:
            other.close()
        self.lane.close()


class Database:
    """A store's handle on a `Core`. Usable from any number of event loops and threads."""

    def __init__(self, core: Core, settings: Settings, release: Callable[[Core], None]) -> None:
        self.core = core
        self.settings = settings
        self._release = release
        self._closed = False

    def guard(self) -> None:
        """Refuse a closed store, a fork's child, and a file that was replaced."""
        if self._closed:
            raise StoreUnavailable("the store is closed", hint="open it again")
        self.core.guard()

    def guard_write(self) -> None:
        """Refuse also a write that would wait for a lock which its own task holds."""
        self.guard()
        if in_transaction.get() is self.core:
            raise Misuse(
                "a write to the store inside ctx.transaction would wait for the lock that this transaction holds",
                hint="write through the connection that the transaction gives you, or after the transaction",
            )

    async def write(self, operation: Operation[T], *, weight: int = 0) -> T:
        """Run `operation(con, now)` in the next shared transaction; returns when it is durable. `weight`: its payload in bytes."""
        self.guard_write()
        return await self.core.lane.submit(operation, self.settings, weight)

    async def read(self, operation: Operation[T], *, slow: bool = False) -> T:
        """Run `operation(con, now)` in a snapshot that holds all that was acknowledged before. `slow`: beside the quick ones."""
        self.guard()
        return await self.core.reader("slow-reader" if slow else "reader").submit(operation, self.settings)

    async def wait(self, topics: Sequence[str], timeout: Micros) -> None:
        """See `Wakeups.wait`."""
        self.guard()
        await self.core.wakeups.wait(topics, timeout / 1_000_000)

    def notify(self, topics: Sequence[str]) -> None:
        """See `Wakeups.announce`."""
        self.guard()
        self.core.wakeups.announce(topics)

    async def close(self) -> None:
        """Let go; the last handle on a core ends its threads after what is queued. Closing twice is nothing."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._release, self.core)


__all__ = ["Connection", "Core", "Database", "Lane", "Operation", "announce", "in_transaction", "settings_of"]
