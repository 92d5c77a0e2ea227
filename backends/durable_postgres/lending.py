"""The connection class of the pools: an ordinary connection of psycopg, which can be lent to the function of a `ctx.transaction`.

`transactions.py` lends it. While it is lent, whoever has it can write and read and set savepoints; ending the transaction is refused,
by method and by statement, since the caller's rows and the record commit together (semantics 26). Nothing here opens or commits.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.rows import tuple_row

from durable.errors import Misuse

from .operation import Row

ENDING: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(commit|end|abort|begin|start\s+transaction|prepare\s+transaction|rollback(?!\s+(work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)


GRACE: Final = 1.0
"""Seconds that a thread is given to end its statement."""


def refuse(verb: str) -> Misuse:
    """The error for whoever ends a transaction that is not theirs."""
    return Misuse(
        f"{verb} inside ctx.transaction: its rows and its record commit together, when the function returns",
        hint="return to commit, raise to roll back; a SAVEPOINT, or `async with connection.transaction()`, undoes a part",
    )


def refuse_ending(query: Any) -> None:
    """Raise Misuse for a statement that would begin or end a transaction."""
    text = query.decode("utf-8", "replace") if isinstance(query, bytes) else query if isinstance(query, str) else ""
    found = ENDING.match(text)
    if found is not None:
        raise refuse(found.group(1).upper())


class Lendable(AsyncConnection[Row]):
    """A pooled connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.used = False
        """True once something was asked on it: a failure may then be that of an old connection."""
        self.lent = False
        """True while a user's function has it."""
        self._blocking: Blocking | None = None

    def lend(self) -> None:
        """From here on it is the user's, within the limits above."""
        self.lent = True
        self.cursor_factory = LentCursor

    async def take_back(self) -> None:
        """It is ours again. A thread that still uses it is interrupted first."""
        self.lent = False
        self.cursor_factory = AsyncCursor
        blocking, self._blocking = self._blocking, None
        if blocking is not None and not blocking.lock.acquire(blocking=False):
            await asyncio.shield(asyncio.to_thread(blocking.interrupt))
        if blocking is not None:
            blocking.end()

    @property
    def blocking(self) -> Connection[Row]:
        """The same session for a `def` function, which runs in a thread: psycopg's blocking connection. Ours until it is lent."""
        if not self.lent:
            raise refuse("blocking")
        if self._blocking is None:
            self._blocking = Blocking(self)
        return self._blocking

    async def commit(self) -> None:
        """As ever; refused while it is lent."""
        if self.lent:
            raise refuse("commit()")
        await super().commit()

    async def rollback(self) -> None:
        """As ever; refused while it is lent."""
        if self.lent:
            raise refuse("rollback()")
        await super().rollback()

    async def close(self) -> None:
        """As ever; refused while it is lent."""
        if self.lent:
            raise refuse("close()")
        await super().close()

    async def set_autocommit(self, value: bool) -> None:
        """As ever; refused while it is lent."""
        if self.lent:
            raise refuse("set_autocommit()")
        await super().set_autocommit(value)


class LentCursor(AsyncCursor[Row]):
    """A cursor of a lent connection."""

    async def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        """As ever, but for statements that would end the transaction."""
        refuse_ending(query)
        return await super().execute(query, *arguments, **options)


class BlockingCursor(Cursor[Row]):
    """The same for the blocking connection."""

    def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        """As ever, but for statements that would end the transaction."""
        refuse_ending(query)
        return super().execute(query, *arguments, **options)


class Blocking(Connection[Row]):
    """A blocking connection over the session of a lent one, for as long as that is lent."""

    def __init__(self, owner: Lendable) -> None:
        handlers = owner.pgconn.notice_handler, owner.pgconn.notify_handler
        super().__init__(owner.pgconn, row_factory=tuple_row)
        owner.pgconn.notice_handler, owner.pgconn.notify_handler = handlers
        self._autocommit = True
        self.prepare_threshold = None  # the names of prepared statements are counted by the owner
        self.cursor_factory = BlockingCursor
        self._pool = None  # the session is not closed with this object

    def interrupt(self) -> None:
        """End the statement that a thread is in, by a cancel or else by ending the session; returns with the lock taken."""
        if self.lock.acquire(timeout=GRACE):
            return
        self.pgconn.get_cancel().cancel()
        if self.lock.acquire(timeout=GRACE):
            return
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as line:
            line.shutdown(socket.SHUT_RDWR)
        self.lock.acquire()

    def end(self) -> None:
        """The owner, who has the lock, takes the session back: nothing more is done through this object."""
        self.pgconn = _ended()
        self.lock.release()

    def commit(self) -> None:
        """Refused: it is always lent."""
        raise refuse("commit()")

    def rollback(self) -> None:
        """Refused: it is always lent."""
        raise refuse("rollback()")

    def close(self) -> None:
        """Refused: it is always lent."""
        raise refuse("close()")


def _ended() -> psycopg.pq.abc.PGconn:
    """A session that is closed."""
    made = psycopg.pq.PGconn.connect_start(b"")
    made.finish()
    return made


__all__ = ["Blocking", "Lendable", "refuse"]
