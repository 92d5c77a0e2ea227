"""The connection class of the pools: an ordinary connection of psycopg, which can be lent to the function of a `ctx.transaction`.

`transactions.py` lends it. While it is lent, whoever has it can write and read and set savepoints; ending the transaction is refused,
by method and by statement, since the caller's rows and the record commit together (semantics 26). Nothing here opens or commits.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final

from psycopg import AsyncConnection, AsyncCursor, OperationalError

from durable.errors import Misuse

from .operation import Row
from .statements import Prepared

ENDING: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(commit|end|abort|begin|start\s+transaction|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)
"""A statement that begins or ends a transaction. `ROLLBACK TO` undoes a part, and passes."""


def refuse(verb: str) -> Misuse:
    """The error for whoever ends a transaction that is not theirs."""
    return Misuse(
        f"{verb} inside ctx.transaction: its rows and its record commit together, when the function returns",
        hint="return to commit, raise to roll back; a SAVEPOINT, or `async with connection.transaction()`, undoes a part",
    )


def end_wait(waiting: asyncio.Future[None], error: Exception | None = None) -> None:
    """It waits no longer."""
    if not waiting.done():
        waiting.set_result(None) if error is None else waiting.set_exception(error)


class Lendable(AsyncConnection[Row]):
    """A pooled connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lent = False
        """True while a user's function has it."""
        self.shared = False
        """A user's function had it: the driver, too, has statements prepared on it."""
        self.prepared = Prepared()
        self.waiting: asyncio.Future[None] | None = None
        """Of the round trip that waits for the server."""

    def lend(self) -> None:
        """From here on it is the user's, within the limits above."""
        self.lent = self.shared = True
        self.cursor_factory = LentCursor

    def take_back(self) -> None:
        """It is ours again, with what they and the driver left of what we had prepared."""
        self.lent = self.prepared.certain = False
        self.cursor_factory = AsyncCursor

    def let_go(self) -> None:
        """Close it from outside, from any thread. A round trip that waits for the server is told, and closes it when the loop has let go of
        its socket."""
        waiting = self.waiting
        if waiting is None or waiting.get_loop().is_closed():
            self.pgconn.finish()
        else:
            waiting.get_loop().call_soon_threadsafe(end_wait, waiting, OperationalError("the connection was closed"))

    def _refuse_while_lent(self, verb: str) -> None:
        if self.lent:
            raise refuse(verb)

    async def commit(self) -> None:
        """As ever; refused while it is lent."""
        self._refuse_while_lent("commit()")
        await super().commit()

    async def rollback(self) -> None:
        """As ever; refused while it is lent."""
        self._refuse_while_lent("rollback()")
        await super().rollback()
        if self.shared:  # the driver may have let go of everything that is prepared
            self.prepared.certain = False

    async def close(self) -> None:
        """As ever; refused while it is lent."""
        self._refuse_while_lent("close()")
        await super().close()

    async def set_autocommit(self, value: bool) -> None:
        """As ever; refused while it is lent."""
        self._refuse_while_lent("set_autocommit()")
        await super().set_autocommit(value)


class LentCursor(AsyncCursor[Row]):
    """A cursor of a lent connection."""

    async def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        """As ever, but for statements that would end the transaction."""
        text = query.decode("utf-8", "replace") if isinstance(query, bytes) else query if isinstance(query, str) else ""
        found = ENDING.match(text)
        if found is not None:
            raise refuse(found.group(1).upper())
        execute: Any = super().execute
        return await execute(query, *arguments, **options)


__all__ = ["Lendable", "end_wait", "refuse"]
