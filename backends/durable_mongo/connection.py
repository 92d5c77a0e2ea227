"""The connection to one database: a client for each event loop, transactions and plain calls on it, and the end of all.

`opening.py` makes it, `store.py` calls `write`, `plain` and `read`. A client of this driver belongs to the event loop it was made on,
and the engine calls from several (the worker's, the thread that renews, the portal): each gets one of its own, closed with its loop.
Nothing here knows a collection's meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import pymongo
from pymongo import AsyncMongoClient, ReadPreference
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from durable.clock import boottime
from durable.errors import StoreUnavailable
from durable.settings import Settings
from durable.storekit import Renames

from . import faults
from .operation import MAJORITY, Operation, Tables, Work
from .times import ServerClock
from .wakeups import Wakeups

T = TypeVar("T")
Client = AsyncMongoClient[dict[str, Any]]

PATIENCE: Final = 20.0
"""Seconds after which a call that found no answer, or a conflict again and again, is StoreUnavailable. An election takes up to twelve."""
LONGEST_PAUSE: Final = 0.25
BEFORE_A_LOOK: Final = 0.02
"""The same after a conflict, where the look waits for who was in the way."""
CLASHES: Final = 4
"""How often a key that was there in the write and not in the read is looked for again."""
SNAPSHOT: Final = ReadConcern("snapshot")


class _Home:
    """The client of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Client, tables: Tables) -> None:
        self.loop = loop
        self.client = client
        self.tables = tables
        self.turnstile = asyncio.Lock()
        """Transactions that met another one go one by one: of many at the same document all but one would fail again."""
        self.guard = self._until_the_loop_ends()

    async def _until_the_loop_ends(self) -> AsyncGenerator[None]:
        """An event loop that is closed in good order finalizes its generators: this one closes the client there."""
        try:
            yield
        finally:
            await self.client.close()


class Database:
    """One database of one deployment, for every loop of this process."""

    def __init__(
        self, url: str, name: str, *, settings: Settings, renames: Renames, options: Mapping[str, Any], watch: bool
    ) -> None:
        self.url = url
        self.name = name
        self.settings = settings
        self.renames = renames
        self.clock = ServerClock()
        self.wakeups = Wakeups(self._watched if watch else None)
        self.store_id: str | None = None
        """Written once by the migration: by it a caller's session is known to be on the same data."""
        self.in_transaction: set[str] = set()
        """Runs whose `ctx.transaction` is under way here: renewing them would make that fail (13, 26)."""
        self._options = options
        self._lock = threading.Lock()
        self._homes: dict[int, _Home] = {}
        self._closed = False

    # -- clients -----------------------------------------------------------------------------------------------------------

    async def home(self) -> _Home:
        """The client of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed", hint="open it again")
            found = self._homes.get(id(loop))
            if found is not None and found.loop is loop:
                return found
            client: Client = AsyncMongoClient(self.url, **self._options)
            found = self._homes[id(loop)] = _Home(loop, client, Tables(client.get_database(self.name), self.renames))
        await anext(found.guard)
        return found

    async def close(self) -> None:
        """Close the clients of all loops, each on its own."""
        with self._lock:
            self._closed = True
            homes, self._homes = list(self._homes.values()), {}
        await self.wakeups.close()
        here = asyncio.get_running_loop()
        for home in homes:
            if home.loop is here:
                await home.guard.aclose()
            elif home.loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(home.guard.aclose(), home.loop))

    async def _watched(self) -> Any:
        """The collection of runs on the running loop's client, for the change stream."""
        return (await self.home()).tables["durable_run"]

    # -- calls -------------------------------------------------------------------------------------------------------------

    async def write(
        self, operation: Operation[T], *, in_line: bool = False, look: Operation[T | None] | None = None
    ) -> T:
        """Carry out an operation in one transaction, as often as it takes. Its news are told after the commit.

        `in_line`: it writes a document that others of this process write all the time, so it waits for them before it begins, and not
        only once it has met one. `look` goes before each try, as a plain call: what it answers is the answer, and only where that is
        None a transaction is begun. Who was sent back mostly finds that others have done what there was to do.
        """
        return await self._tried(operation, self._in_transaction, in_line=in_line, look=look)

    async def plain(self, operation: Operation[T]) -> T:
        """Carry out an operation whose every write is atomic by itself and may be repeated."""
        return await self._tried(operation, self._without)

    read = plain
    """Reading needs no transaction: each rule that needs one snapshot says so and gets one."""

    async def snapshot(self, operation: Operation[T]) -> T:
        """Read everything as of one moment."""
        return await self._tried(operation, self._as_of_one_moment)

    async def _tried(
        self,
        operation: Operation[T],
        once: Callable[[_Home, Operation[T]], Any],
        *,
        in_line: bool = False,
        look: Operation[T | None] | None = None,
        give_up: float | None = None,
    ) -> T:
        give_up = time.monotonic() + PATIENCE if give_up is None else give_up
        pause, clashes, met = 0.002, 0, in_line
        while True:
            try:
                home = await self.home()
                if look is not None:
                    seen: T | None = await self._tried(look, self._without, give_up=give_up)
                    if seen is not None:
                        return seen
                async with home.turnstile if met else contextlib.nullcontext():
                    with pymongo.timeout(max(give_up - time.monotonic(), 1.0)):
                        if self.clock.stale:
                            await self.greet(home.client)
                        value: T = await once(home, operation)
                return value
            except (PyMongoError, OSError, ValueError) as raised:
                error = raised
                if isinstance(error, ValueError) and not isinstance(error, UnicodeEncodeError):
                    raise
                again = faults.transient(error) or faults.passing(error)
                if faults.duplicate(error) and clashes < CLASHES:
                    clashes, again = clashes + 1, True
                met = met or faults.transient(error)
                if faults.passing(error) and not faults.conflict(error):
                    self.clock.doubt()
                if not again or time.monotonic() + pause > give_up:
                    raise faults.mapped(error) from error
            await asyncio.sleep(pause * random.random())
            pause = min(pause * 2, LONGEST_PAUSE if look is None or not faults.conflict(error) else BEFORE_A_LOOK)

    async def greet(self, client: Client) -> Mapping[str, Any]:
        """Ask the primary who it is, and take a sample of its clock."""
        sent = boottime()
        reply: Mapping[str, Any] = await client.admin.command("hello")
        server: datetime = reply["localTime"]
        self.clock.sampled(sent, boottime(), server if server.tzinfo is not None else server.replace(tzinfo=UTC))
        return reply

    async def _without(self, home: _Home, operation: Operation[T]) -> T:
        work = Work(home.tables, None, self.clock, self.settings)
        value = await operation(work)
        self.wakeups.announce(work.topics)
        return value

    async def _as_of_one_moment(self, home: _Home, operation: Operation[T]) -> T:
        async with home.client.start_session(snapshot=True) as session:
            # The concern of the session counts: that of our handles would contradict it.
            tables = Tables(_Unconcerned(home.client.get_database(self.name)), self.renames)
            return await operation(Work(tables, session, self.clock, self.settings))

    async def _in_transaction(self, home: _Home, operation: Operation[T]) -> T:
        async with home.client.start_session() as session:
            await session.start_transaction(SNAPSHOT, MAJORITY, ReadPreference.PRIMARY)
            work = Work(home.tables, session, self.clock, self.settings)
            value = await operation(work)  # what it raises ends the session, and that aborts
            await commit(session)
        self.wakeups.announce(work.topics)
        return value


class _Unconcerned:
    def __init__(self, database: Any) -> None:
        self._database = database

    def get_collection(self, name: str, **options: Any) -> Any:
        return self._database.get_collection(name, codec_options=options["codec_options"])


async def commit(session: AsyncClientSession) -> None:
    """Commit, and ask again for as long as the answer is unknown; the server commits at most once."""
    give_up = time.monotonic() + PATIENCE
    pause = 0.01
    while True:
        try:
            await session.commit_transaction()
        except PyMongoError as error:
            if faults.transient(error) or not faults.unknown_commit(error) or time.monotonic() > give_up:
                raise
            await asyncio.sleep(pause * random.random())
            pause = min(pause * 2, LONGEST_PAUSE)
        else:
            return


__all__ = ["Client", "Database", "commit"]
