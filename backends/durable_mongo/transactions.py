"""Transactions shared with the user: `ctx.transaction` on a session of ours, and `tx=`, a session of theirs (26, 41).

`store.py` calls `exactly_once` for the first and `on_callers` for the second. The user's function gets an `AsyncClientSession`, with which
it writes through `session.client`; ending the transaction is refused, since its documents and the record commit together. The fence is
checked last, by the touch of the append: a run that is touched first could not be renewed, woken or cancelled until the commit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar

from pymongo import AsyncMongoClient, ReadPreference
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError

from durable.errors import Misuse, StoreUnavailable
from durable.model import Appended, Lease, NewRecord
from durable.settings import Micros

from . import enqueue, faults, journal, motor
from .connection import SNAPSHOT, Database, commit
from .operation import MAJORITY, NativeDatabase, Operation, Tables, Work
from .schema import STORE, VERSIONS

T = TypeVar("T")
Function = Callable[[Any], Awaitable[NewRecord]]

LONGEST_PAUSE: Final = 0.1


class LentSession(AsyncClientSession):
    """A session while the user's function has it: all that a session does, but for the end of its transaction."""

    async def commit_transaction(self) -> NoReturn:
        """Refused."""
        raise _refused("commit_transaction()")

    async def abort_transaction(self) -> NoReturn:
        """Refused."""
        raise _refused("abort_transaction()")

    async def end_session(self) -> NoReturn:
        """Refused."""
        raise _refused("end_session()")

    def __getattr__(self, name: str) -> Any:
        # Other databases call it so; whoever tries it here hears why not.
        if name in ("commit", "rollback"):
            raise _refused(f"{name}()")
        raise AttributeError(f"a session has no {name!r}")


def _refused(verb: str) -> Misuse:
    return Misuse(
        f"{verb} inside ctx.transaction: its documents and its record commit together, when the function returns",
        hint="return to commit, raise to roll back",
    )


async def exactly_once(database: Database, lease: Lease, work: Function, timeout: Micros) -> Appended:
    """Call `work` with a session inside a transaction; its documents and its record commit together, or nothing does.

    Where MongoDB says that the transaction met another one, everything is rolled back and `work` is called again, within `timeout`.
    """
    standing = await database.plain(lambda look: look.count("durable_run", journal.held(lease)))
    if not standing:
        return Appended(state="lost", record=None)
    database.in_transaction.add(lease.run_id)
    limit = asyncio.timeout(timeout / 1_000_000)
    try:
        async with limit:
            return await _until_it_commits(database, lease, work, timeout / 1_000_000)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(
                f"the transaction took longer than {timeout / 1_000_000:g} s and was rolled back"
            ) from error
        raise
    finally:
        database.in_transaction.discard(lease.run_id)


async def _until_it_commits(database: Database, lease: Lease, work: Function, seconds: float) -> Appended:
    give_up = time.monotonic() + seconds
    pause, look = 0.005, False
    while True:
        try:
            return await _once(database, lease, work, look)
        except enqueue.Taken:
            look = True
            continue
        except _Ours as raised:
            error = raised.error
            if not faults.transient(error) or time.monotonic() > give_up:
                raise faults.mapped(error) from error
        except PyMongoError as theirs:
            if not theirs.has_error_label(faults.TRANSIENT) or time.monotonic() > give_up:
                raise
        await asyncio.sleep(pause * random.random())
        pause = min(pause * 2, LONGEST_PAUSE)


class _Ours(Exception):
    """A driver's error of our own calls: the user's pass through as they are."""

    def __init__(self, error: PyMongoError) -> None:
        super().__init__(str(error))
        self.error = error


async def _once(database: Database, lease: Lease, work: Function, look: bool) -> Appended:
    home = await database.home()
    session = home.client.start_session()
    try:
        await session.start_transaction(SNAPSHOT, MAJORITY, ReadPreference.PRIMARY)
        session.__class__ = LentSession
        try:
            record = await work(session)
        finally:
            session.__class__ = AsyncClientSession
        try:
            own = Work(home.tables, session, database.clock, database.settings)
            (answer,) = await journal.append(own, [(lease, record)], look=look)
            if answer.state == "appended":
                await commit(session)
            else:
                await session.abort_transaction()  # the user's documents vanish
        except PyMongoError as error:
            raise _Ours(error) from error
    finally:
        await asyncio.shield(
            session.end_session()
        )  # aborts what is open, also for a caller that is cancelled once more
    if answer.state == "appended":
        database.wakeups.announce(own.topics)
    return answer


# -- the caller's own transaction -------------------------------------------------------------------------------------------


async def on_callers(database: Database, tx: object, operation: Operation[T]) -> T:
    """Carry out an operation in the caller's open transaction: its effects stand and fall with it. The driver's own errors pass through
    untouched: their labels tell the caller's loop what to do."""
    native, session = await _checked(database, tx)
    if database.clock.stale:
        await database.plain(_nothing)
    work = Work(Tables(native, database.renames), session, database.clock, database.settings)
    try:
        return await operation(work)
    except enqueue.Purging as going:
        raise StoreUnavailable(
            f"the run {going.run_ids[0]} of that id or key is being purged",
            hint="roll back and begin the transaction anew",
        ) from None


async def _nothing(work: Work) -> None:
    """A plain call takes a sample of the server's clock."""


async def _checked(database: Database, tx: object) -> tuple[NativeDatabase, Any]:
    if isinstance(tx, AsyncClientSession):
        native: NativeDatabase = tx.client.get_database(database.name)
    elif motor.is_session(tx):
        native = motor.database_of(tx, database.name)
    else:
        raise _no_session(tx)
    if not tx.in_transaction:  # type: ignore[attr-defined]
        raise Misuse("the session has no open transaction", hint="await session.start_transaction() first")
    versions = Tables(native, database.renames)[VERSIONS]
    row = await versions.find_one({"_id": STORE}, session=tx)
    if row is None or row["store_id"] != database.store_id:
        raise Misuse(
            f"the session's client does not reach the database {database.name!r} of this store",
            hint="open both on the same deployment; only then they commit together",
        )
    return native, tx


def _no_session(tx: object) -> Misuse:
    what = type(tx).__name__
    if isinstance(tx, AsyncMongoClient) or motor.is_client(tx):
        # Accepting it would write at once what the caller believes to stand and fall with a transaction.
        return Misuse(
            f"tx is a client ({what}): it has no transaction of its own",
            hint="pass the session of your transaction: the one that the client's start_session() gave",
        )
    return Misuse(f"tx is a {what}", hint="pass the AsyncClientSession (or Motor's) on which your transaction is open")


__all__ = ["LentSession", "exactly_once", "on_callers"]
