"""The caller's own transaction, `tx=` (semantics 41): operations on a connection that the application opened and will commit.

`store.py` calls `on_callers`. Taken are psycopg's connections, blocking or not, and SQLAlchemy's connections and sessions over psycopg,
blocking or not; SQLAlchemy is never imported, its objects are known by where their classes come from. What is done stands in a savepoint,
so that a refusal leaves the transaction usable; errors of the connection itself pass through untouched. A blocking connection is used on a
thread, so that a lock which another task of this loop holds can be given back meanwhile. Nobody is told anything: we do not see the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar, cast

import psycopg
from psycopg import AsyncRawCursor, RawCursor, pq
from psycopg.rows import tuple_row

from durable.errors import Conflict, Misuse

from .adapting import teach
from .connection import TRIES, Database, Make, asked
from .operation import Again, Answer, Ask, Row, Work

if TYPE_CHECKING:
    from psycopg.abc import QueryNoTemplate

T = TypeVar("T")

HERE: Final = Ask("SELECT now(), current_database()")
SAVE: Final = Ask("SAVEPOINT durable_call")
BACK: Final = Ask("ROLLBACK TO SAVEPOINT durable_call")
RELEASE: Final = Ask("RELEASE SAVEPOINT durable_call")
_TAKEN: Final = (
    "pass the psycopg connection on which your transaction is open, or SQLAlchemy's connection or session over psycopg"
    " (postgresql+psycopg://)"
)


async def on_callers(database: Database, tx: object, make: Make[T]) -> T:
    """Carry out an operation in the caller's open transaction: its effects stand and fall with it."""
    con = await _connection_of(tx)
    if con.closed:
        raise Misuse("the connection is closed", hint=_TAKEN)
    if con.autocommit and con.pgconn.transaction_status == pq.TransactionStatus.IDLE:
        raise Misuse(
            "the connection has no open transaction: it is in autocommit",
            hint="`async with connection.transaction():`, or connect without autocommit",
        )
    if isinstance(con, psycopg.AsyncConnection):
        return await _carried_out(database, con, make)
    return await asyncio.to_thread(_carried_out_blocking, database, con, make)


async def _carried_out(database: Database, con: psycopg.AsyncConnection[Any], make: Make[T]) -> T:
    """The same as below; only the waiting differs."""
    work = _work(database, *(await _ask(database, con, HERE)))
    for left in reversed(range(TRIES)):
        await _ask(database, con, SAVE)
        steps = make(work)
        try:
            asks = next(steps)
            while True:
                asks = steps.send([await _ask(database, con, ask) for ask in asks])
        except StopIteration as end:
            await _ask(database, con, RELEASE)
            value: T = end.value
            return value
        except psycopg.Error:
            raise  # the caller's transaction is the caller's to end
        except Again as error:
            await _ask(database, con, BACK)
            _last(error, left)
        except BaseException:
            await _ask(database, con, BACK)
            await _ask(database, con, RELEASE)
            raise
        finally:
            steps.close()
    raise AssertionError("the last try raises")


def _carried_out_blocking(database: Database, con: psycopg.Connection[Any], make: Make[T]) -> T:
    work = _work(database, *_ask_blocking(database, con, HERE))
    for left in reversed(range(TRIES)):
        _ask_blocking(database, con, SAVE)
        steps = make(work)
        try:
            asks = next(steps)
            while True:
                asks = steps.send([_ask_blocking(database, con, ask) for ask in asks])
        except StopIteration as end:
            _ask_blocking(database, con, RELEASE)
            value: T = end.value
            return value
        except psycopg.Error:
            raise
        except Again as error:
            _ask_blocking(database, con, BACK)
            _last(error, left)
        except BaseException:
            _ask_blocking(database, con, BACK)
            _ask_blocking(database, con, RELEASE)
            raise
        finally:
            steps.close()
    raise AssertionError("the last try raises")


def _last(error: Again, left: int) -> None:
    if not left:
        raise Conflict(
            f"it is there already, and this transaction does not see it: {error.what}",
            hint="use READ COMMITTED: a transaction with a fixed snapshot can not join what came after it",
        ) from error


def _work(database: Database, rows: Sequence[Row], _: int) -> Work:
    now, name = rows[0]
    if database.name is not None and name != database.name:
        raise Misuse(
            f"the connection is open on database {name!r}, the store on {database.name!r}",
            hint="open both on the same database; only then they commit together",
        )
    work = database.work()
    work.now = now
    return work


async def _ask(database: Database, con: psycopg.AsyncConnection[Any], ask: Ask) -> Answer:
    cursor: AsyncRawCursor[Row] = AsyncRawCursor(con, row_factory=tuple_row)
    teach(cursor)
    return await asked(cursor, database.naming(ask.text), ask.parameters)


def _ask_blocking(database: Database, con: psycopg.Connection[Any], ask: Ask) -> Answer:
    cursor: RawCursor[Row] = RawCursor(con, row_factory=tuple_row)
    teach(cursor)
    cursor.execute(cast("QueryNoTemplate", database.naming(ask.text)), ask.parameters or None, binary=True)
    return Answer(cursor.fetchall() if cursor.description is not None else [], cursor.rowcount)


# -- what was passed --------------------------------------------------------------------------------------------------------


async def _connection_of(tx: object) -> psycopg.AsyncConnection[Any] | psycopg.Connection[Any]:
    if _is_connection(tx):
        return tx
    kind = next((one.__name__ for one in type(tx).__mro__ if one.__module__.startswith("sqlalchemy.")), None)
    if kind is None:
        raise Misuse(f"tx is a {type(tx).__name__}", hint=_TAKEN)
    found = await _beneath(tx)
    if not _is_connection(found):
        raise Misuse(f"tx is a {type(tx).__name__} over {type(found).__module__}", hint=_TAKEN)
    return found


def _is_connection(one: object) -> TypeGuard[psycopg.AsyncConnection[Any] | psycopg.Connection[Any]]:
    return isinstance(one, (psycopg.AsyncConnection, psycopg.Connection))


async def _beneath(tx: Any) -> object:
    """The driver's connection under one of SQLAlchemy's objects, whose transaction it begins where none is open."""
    for name in ("async_scoped_session", "AsyncSession"):
        if _is(tx, name):
            return await _beneath(await tx.connection())
    for name in ("scoped_session", "Session"):
        if _is(tx, name):
            return await _beneath(tx.connection())
    if not (_is(tx, "AsyncConnection") or _is(tx, "Connection")):
        raise Misuse(f"tx is a {type(tx).__name__}", hint=_TAKEN)
    if not tx.in_transaction():
        raise Misuse("the connection has no open transaction", hint="`with connection.begin():`, or use engine.begin()")
    raw = await tx.get_raw_connection() if _is(tx, "AsyncConnection") else tx.connection
    return raw.driver_connection


def _is(tx: object, name: str) -> bool:
    return any(one.__name__ == name and one.__module__.startswith("sqlalchemy.") for one in type(tx).__mro__)


__all__ = ["on_callers"]
