"""`ctx.transaction`: the user's function works on a connection of ours, and its rows commit together with the record, or not at all (26).

`store.py` calls `exactly_once`. The fence is looked at before, so that a function is not called in vain, and matched last, by the append
that locks the run until the commit: a stale worker's rows vanish with it. The connection is lent, see `lending.py`. What the function
raises comes out as it is. A process that is stopped in the middle is cut off by the server after one lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from psycopg import pq

from durable.errors import Misuse
from durable.model import Appended, Lease, NewRecord
from durable.settings import SECOND, Micros

from . import faults, journal
from .connection import BEGIN, PREAMBLE_LENT, Database
from .lending import Lendable, refuse
from .operation import Ask, Operation, Work

MARK: Final = "SELECT set_config('durable.transaction', $1, true)"
MARKED: Final = "SELECT current_setting('durable.transaction', true)"

UserWork = Callable[[Any], Awaitable[NewRecord]]


async def exactly_once(database: Database, lease: Lease, work: UserWork, timeout: Micros) -> Appended:
    """Call `work` with a connection inside a transaction; its rows and its record commit together, or nothing does."""

    def look(_: Work) -> Operation[bool]:
        return (yield from journal.standing(_, lease))

    if not await database.read(look):  # this also finds out whether there is a server
        return Appended(state="lost", record=None)
    async with _connection(database) as con:
        mark = secrets.token_hex(8)
        with faults.mapped():
            await database.ask(con, [Ask(BEGIN), Ask(PREAMBLE_LENT, database.limits), Ask(MARK, (mark,))])
        record = await _called(con, work, timeout)
        with faults.mapped():
            return await _commit(database, con, lease, record, mark)


@contextlib.asynccontextmanager
async def _connection(database: Database) -> AsyncGenerator[Lendable, None]:
    """A connection of the pool, whose transaction is over at the end, whatever happened to it."""
    with faults.mapped():
        pool = await database.pools.of_this_loop()
        con = await pool.getconn()
    try:
        yield con
    finally:
        await database.undo(con)
        with faults.mapped():
            await pool.putconn(con)


async def _called(con: Lendable, work: UserWork, timeout: Micros) -> NewRecord:
    seconds = timeout / SECOND
    limit = asyncio.timeout(seconds)
    con.lend()
    try:
        async with limit:
            return await work(con)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"the transaction took longer than {seconds:g} s and was rolled back") from error
        raise
    finally:
        con.take_back()


async def _commit(database: Database, con: Lendable, lease: Lease, record: NewRecord, mark: str) -> Appended:
    """The record last, under its fence."""
    status = con.pgconn.transaction_status
    if status == pq.TransactionStatus.INERROR:
        raise Misuse(
            "a statement of the transaction failed and its error was swallowed: nothing of it can be committed any more",
            hint="let the error out, or put the statement into `async with connection.transaction():` (a savepoint)",
        )
    if status != pq.TransactionStatus.INTRANS:
        raise refuse("the end of the transaction")
    (marked,) = await database.ask(con, [Ask(MARKED)])
    if marked.rows[0][0] != mark:
        raise refuse("the end of the transaction")
    context = database.work()
    (answer,) = await database.carry(con, journal.append(context, [(lease, record)]))
    if answer.state == "appended":
        await database.ask(con, [Ask("COMMIT")])
        database.tell(context)
    return answer


__all__ = ["exactly_once"]
