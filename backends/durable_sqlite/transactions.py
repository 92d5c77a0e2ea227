"""Transactions shared with the user: `ctx.transaction` on a connection of ours, and `tx=`, a connection of theirs (26, 41).

`store.py` calls `exactly_once` for the first and `on_callers` for the second. While the user's function has our connection, an
authorizer refuses BEGIN, COMMIT and ROLLBACK, so that the rows and the record can only commit together; savepoints pass.
"""

from __future__ import annotations

import asyncio
import collections
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

from durable.errors import Misuse
from durable.model import Appended, Instant, Lease, NewRecord
from durable.settings import Micros
from durable.storekit import Renames

from . import journal
from .connection import Core, Database, in_transaction
from .lanes import Connection, Lane, Operation, answer, deliver

T = TypeVar("T")

TRANSACTION_ACTION: Final = 22
"""SQLITE_TRANSACTION of sqlite3_set_authorizer: BEGIN, COMMIT and ROLLBACK."""
ABANDONED: Final = 8
"""Connections of functions that ran out of time, kept open until so many newer ones have followed."""


class Turn:
    """One at a time over all loops and threads of the process, in order; waiting blocks no thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: collections.deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = collections.deque()

    async def take(self) -> None:
        """Wait for the turn."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, future))
        try:
            await future
        except asyncio.CancelledError:
            with self._lock:
                waiting = (loop, future) in self._waiting
                if waiting:
                    self._waiting.remove((loop, future))
            if not waiting:
                self.give()  # the turn came together with the cancel: pass it on
            raise

    def give(self) -> None:
        """Let the next have it."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._taken = False
                    return
                loop, future = self._waiting.popleft()
            try:
                loop.call_soon_threadsafe(_begin_turn, future)
                return
            except RuntimeError:
                if not loop.is_closed():
                    raise  # on a closed loop nobody waits: the next one


def _begin_turn(future: asyncio.Future[None]) -> None:
    if not future.done():  # cancelled meanwhile: its own handler finds itself gone from the line and passes the turn on
        future.set_result(None)


class Side:
    """The second connection of a process, on which the functions of `ctx.transaction` work, and its thread."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.turn = Turn()
        self._abandoned: collections.deque[Connection] = collections.deque()
        self.con = self._connect()
        self.lane = Lane("durable-sqlite-transaction", self._process)

    def _connect(self) -> Connection:
        # In memory there is one connection only: the writer's, which the writer leaves alone while the lock is held.
        return self.core.writer if self.core.path is None else self.core.connect()

    def abandon(self) -> None:
        """A function that ran out of time may still have the connection, in a thread that nobody can stop. From here on it is
        refused every statement, and the next transaction gets a new connection."""
        if self.core.path is None:
            return
        self.con.set_authorizer(_refuse_all)
        self.con.interrupt()
        # Closed later, when no statement can be running on it any more: closing beneath one would take the process with it.
        self._abandoned.append(self.con)
        while len(self._abandoned) > ABANDONED:
            self._abandoned.popleft().close()
        self.con = self._connect()

    def close(self) -> None:
        """End the thread and let go of the connection."""
        self.lane.close()
        if self.core.path is not None:
            for con in (*self._abandoned, self.con):
                con.close()

    def _process(self, batch: list[Any]) -> None:
        for item in batch:
            deliver([answer(item, self.con, self.core.now())])


def _refuse_all(*_: Any) -> int:
    return sqlite3.SQLITE_DENY


def _refuse_transactions(action: int, *_: Any) -> int:
    return sqlite3.SQLITE_DENY if action == TRANSACTION_ACTION else sqlite3.SQLITE_OK


async def exactly_once(
    database: Database, lease: Lease, work: Callable[[Any], Awaitable[NewRecord]], timeout: Micros
) -> Appended:
    """Call `work` with a connection inside a transaction; its rows and its record commit together, or nothing does."""
    database.guard_write()
    side = database.core.side(Side)
    await side.turn.take()
    try:
        return await _in_turn(database, side, lease, work, timeout)
    finally:
        side.turn.give()


async def _in_turn(
    database: Database, side: Side, lease: Lease, work: Callable[[Any], Awaitable[NewRecord]], timeout: Micros
) -> Appended:
    begun, cancelled = await _on_lane(database, side, lambda con, now: _begin(side.core, con, lease))
    if not begun:
        if cancelled is not None:
            raise cancelled
        return Appended(state="lost", record=None)
    try:
        if cancelled is not None:
            raise cancelled
        record = await _called(side, work, timeout)
    except BaseException as error:
        abandoned = isinstance(error, (TimeoutError, asyncio.CancelledError))
        await _on_lane(database, side, lambda con, now: _undo(side, con, abandoned))
        raise
    answered, cancelled = await _on_lane(database, side, lambda con, now: _commit(side.core, con, now, lease, record))
    if cancelled is not None:
        raise cancelled
    return answered


async def _on_lane(database: Database, side: Side, operation: Operation[T]) -> tuple[T, asyncio.CancelledError | None]:
    """Run it to its end whatever happens to the caller: a transaction that nobody ends would hold the lock of everybody. A cancel that
    comes meanwhile is given back, to be raised where nothing is left open."""
    future = side.lane.submit(operation, database.settings)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - it is the future's, and is raised from it below
            pass
    return future.result(), cancelled


def _begin(core: Core, con: sqlite3.Connection, lease: Lease) -> bool:
    """Take the lock and open the transaction; False, with nothing held, where the fence is gone already."""
    core.lock.acquire()
    held = False
    try:
        core.verify_file()
        core.begin(con)
        held = journal.standing(con, lease)
        if held:
            con.set_authorizer(_refuse_transactions)
            cast(Connection, con).lent = True
        return held
    finally:
        if not held:
            core.roll_back(con)
            core.lock.release()


def _take_back(con: sqlite3.Connection) -> None:
    own = cast(Connection, con)
    own.lent = False
    own.set_authorizer(None)
    own.row_factory, own.text_factory = None, str


def _undo(side: Side, con: sqlite3.Connection, abandoned: bool) -> None:
    try:
        _take_back(con)
        side.core.roll_back(con)
        if abandoned:
            side.abandon()
    finally:
        side.core.lock.release()


def _commit(core: Core, con: sqlite3.Connection, now: Instant, lease: Lease, record: NewRecord) -> Appended:
    """The record last, under its fence: a stale worker's rows vanish with it."""
    try:
        _take_back(con)
        cast(Connection, con).announced.clear()
        (answered,) = journal.append(con, now, [(lease, record)])
        con.execute("COMMIT" if answered.state == "appended" else "ROLLBACK")
        core.verify_file()
        topics = set(cast(Connection, con).announced)
    except BaseException:
        core.roll_back(con)
        raise
    finally:
        core.lock.release()
    core.wakeups.announce(topics)
    return answered


async def _called(side: Side, work: Callable[[Any], Awaitable[NewRecord]], timeout: Micros) -> NewRecord:
    seconds = timeout / 1_000_000
    # A statement that holds up the loop lets no time-out of the loop come through: it is interrupted from outside.
    alarm = threading.Timer(seconds, side.con.interrupt)
    alarm.daemon = True
    alarm.start()
    token = in_transaction.set(side.core)
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work(side.con)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"the transaction took longer than {seconds:g} s and was rolled back") from error
        raise
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code == sqlite3.SQLITE_AUTH:
            raise Misuse(
                "BEGIN, COMMIT or ROLLBACK inside ctx.transaction: its rows and its record commit together",
                hint="return to commit, raise to roll back; a SAVEPOINT undoes a part",
            ) from error
        if code == sqlite3.SQLITE_INTERRUPT and not alarm.is_alive():
            raise TimeoutError(f"the transaction took longer than {seconds:g} s and was rolled back") from error
        raise
    finally:
        in_transaction.reset(token)
        alarm.cancel()


# -- the caller's own transaction -------------------------------------------------------------------------------------------


class _Renamed:
    """A caller's connection, for operations that name tables by default names."""

    def __init__(self, con: sqlite3.Connection, renames: Renames) -> None:
        self._con = con
        self._renames = renames

    def execute(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self._con.execute(self._renames(statement), parameters)

    def executemany(self, statement: str, parameters: Any) -> sqlite3.Cursor:
        return self._con.executemany(self._renames(statement), parameters)


def on_callers(database: Database, tx: object, operation: Operation[T]) -> T:
    """Run an operation in the caller's open transaction: its effects stand and fall with it. On the caller's thread, since the
    connection belongs to it; the connection's settings are left as they were; SQLite's own errors pass through untouched."""
    database.guard()
    con = _checked(database, tx)
    row_factory, text_factory = con.row_factory, con.text_factory
    con.row_factory, con.text_factory = None, str
    target = cast(sqlite3.Connection, _Renamed(con, database.core.renames)) if database.core.renames else con
    try:
        con.execute("SAVEPOINT durable_call")
        try:
            value = operation(target, database.core.now())
        except BaseException:
            if con.in_transaction:
                con.execute("ROLLBACK TO durable_call")
            raise
        finally:
            if con.in_transaction:
                con.execute("RELEASE durable_call")
        return value
    finally:
        con.row_factory, con.text_factory = row_factory, text_factory


def _checked(database: Database, tx: object) -> sqlite3.Connection:
    path = database.core.path
    if not isinstance(tx, sqlite3.Connection):
        raise Misuse(
            f"tx is a {type(tx).__name__}", hint="pass the sqlite3.Connection on which your transaction is open"
        )
    if path is None:
        raise Misuse(
            "a store in memory has no file that your connection could share", hint="use a file: sqlite:///path.db"
        )
    if not tx.in_transaction:
        raise Misuse(
            "the connection has no open transaction",
            hint='execute "BEGIN IMMEDIATE" first; Python\'s sqlite3 opens none by itself before the first INSERT, UPDATE or DELETE',
        )
    files = [row[2] for row in tx.execute("PRAGMA database_list").fetchall()]
    texts = [os.fsdecode(file) for file in files if file]
    if not any(os.path.realpath(file) == str(path) for file in texts):
        raise Misuse(
            f"the connection is open on {', '.join(texts) or 'memory'}, the store on {path}",
            hint="open both on the same file; only then they commit together",
        )
    return tx
