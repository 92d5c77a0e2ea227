"""Connections and transactions: one pool per event loop, and the driver that carries out operations on a pooled connection.

`store.py` calls `Database.write` and `Database.read` with operations (see `operation.py`). Each runs in a short transaction of its own,
READ COMMITTED by its own statement (semantics 63, 64), with everything that it asks for at once in one round trip. A connection of
psycopg belongs to the event loop that made it, and the engine calls from several: hence a pool for each loop, opened when it is first
used. One pool in a thread of its own was measured and costs two thread changes for every call. Nothing here knows a table.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import psycopg
from psycopg import AsyncRawCursor, pq
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from durable.clock import boottime, system_micros
from durable.errors import Conflict, StoreUnavailable
from durable.model import Instant, Names
from durable.settings import SECOND, Settings

from . import faults
from .adapting import teach
from .exchange import Exchange
from .lending import Lendable
from .names import Naming
from .opening import Address
from .operation import Again, Answer, Ask, Last, Operation, Row, Work

if TYPE_CHECKING:
    from psycopg.abc import QueryNoTemplate

T = TypeVar("T")
Make = Callable[[Work], Operation[T]]

log = logging.getLogger("durable.postgres")

TRIES: Final = 12
"""How often a transaction is begun anew after a dead-lock, a serialization failure, or a race that another one won."""
PAUSE: Final = 0.002
REPLACEMENTS: Final = 2
"""How often a lost connection, or what was known of a statement, is replaced within one call."""
NO_CONNECTION: Final = (PoolTimeout, PoolClosed)
GET_TIMEOUT: Final = 5.0
"""Seconds that a call waits for a free connection, or for a server that is away."""
CLOSE_TIMEOUT: Final = 5.0
RECONNECT: Final = 2.0
"""Seconds after which the pool forgets a connection that can not be made: the next call that needs one tries at once."""
CLOCK_AGE: Final = 30 * SECOND
"""How long the best sample of the server's clock is kept."""

PREPARE: Final = 1
"""How often a statement of a user's function goes out before the driver prepares it, as `exchange.py` does with ours: a new connection
should not parse and plan each of them five times."""

BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED"
COMMIT: Final = Ask("COMMIT")
BEGIN_READING: Final = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"
# A process that is stopped in the middle of a transaction must not keep its locks for ever, and a row that an application locks must
# not hold up a whole batch. What must be durable stays so where the default of the database is asynchronous. And the server would plan
# a claim anew each time, which costs more than the claim; what is written is found by ids and by the index of its queue, whatever the
# values are, so the generic plan is the right one, and the one that the tests have seen. What limits a statement is a parameter, so the
# server expects a tenth of a backlog where a hundred rows are read, and would compile for a second what runs for a millisecond.
_LIMITS: Final = (
    "now(), set_config('lock_timeout', $1, true), set_config('idle_in_transaction_session_timeout', $2, true)"
)
_DURABLE: Final = """
    set_config('synchronous_commit', CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on'
        ELSE current_setting('synchronous_commit') END, true)
"""
_PLANNED: Final = "set_config('plan_cache_mode', 'force_generic_plan', true), set_config('jit', 'off', true)"
PREAMBLE: Final = f"SELECT {_LIMITS}, {_DURABLE}, {_PLANNED}"
PREAMBLE_ASYNCHRONOUS: Final = f"SELECT {_LIMITS}, set_config('synchronous_commit', 'off', true), {_PLANNED}"
PREAMBLE_LENT: Final = f"SELECT {_LIMITS}, {_DURABLE}"
"""For a transaction in which the statements of others run, too: how they are planned is not ours to say."""
NOW: Final = "SELECT now()"


class _Pool(AsyncConnectionPool[Lendable]):
    """Hands out the connection that came back last. By itself a pool hands out the one that has rested longest, so that each of them has
    to be taught every statement, and their server processes take turns in the caches."""

    async def _get_ready_connection(self, timeout: float | None) -> Lendable | None:
        self._pool.rotate(1)
        return await super()._get_ready_connection(timeout)


class Pools:
    """The pools of one store, by event loop."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
        self._connections: dict[asyncio.AbstractEventLoop, list[Lendable]] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._pid = os.getpid()
        self.closed = False

    def guard(self) -> None:
        """Refuse a closed store and a fork's child."""
        if self.closed:
            raise StoreUnavailable("the store is closed", hint="open it again")
        if os.getpid() != self._pid:
            raise StoreUnavailable(
                "this store was opened before a fork: its connections belong to the parent",
                hint="open the store in the child process (for example in a post-fork hook)",
            )

    async def of_this_loop(self) -> _Pool:
        """The pool of the running loop."""
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        return pool if pool is not None else await self._open(loop)

    async def _open(self, loop: asyncio.AbstractEventLoop) -> _Pool:
        self.guard()
        self._forget_ended()
        made: list[Lendable] = []

        async def configure(con: Lendable) -> None:
            teach(con)
            con.prepare_threshold = PREPARE if self._address.prepare else None
            made[:] = [other for other in made if not other.closed]
            made.append(con)

        pool = _Pool(
            self._address.conninfo,
            connection_class=Lendable,
            kwargs={"autocommit": True, "row_factory": tuple_row},
            min_size=0,
            max_size=self._address.pool_size,
            open=False,
            configure=configure,
            timeout=GET_TIMEOUT,
            reconnect_timeout=RECONNECT,
            name="durable",
        )
        await pool.open()  # takes no connection yet, and does not let another task run
        with self._lock:
            self._pools[loop], self._connections[loop] = pool, made
            self._keepers[loop] = loop.create_task(_keep(pool))
        return pool

    def _forget_ended(self) -> None:
        """Loops that have ended, as that of a renewal thread: their connections are closed from here."""
        with self._lock:
            ended = [loop for loop in self._pools if loop.is_closed()]
            made = [con for loop in ended for con in self._connections.pop(loop)]
            for loop in ended:
                del self._pools[loop], self._keepers[loop]
        for con in made:
            con.let_go()

    async def close(self) -> None:
        """Let go of every connection, on the loop that it belongs to. Closing twice is nothing."""
        self.closed = True
        if os.getpid() != self._pid:
            return
        self._forget_ended()
        here = asyncio.get_running_loop()
        with self._lock:
            pools, self._pools = dict(self._pools), {}
            made, self._connections = self._connections, {}
            keepers, self._keepers = self._keepers, {}
        for loop in pools:
            if loop is here:
                await _ended(keepers[loop])
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_ended(keepers[loop]), loop))
            for con in made[loop]:
                con.let_go()


async def _keep(pool: _Pool) -> None:
    """Close the pool when this task is cancelled: by the store, or by a loop that ends with all its tasks, as that of a renewal thread
    does. The tasks of a pool do not end with their loop by themselves."""
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await pool.close(timeout=CLOSE_TIMEOUT)


async def _ended(keeper: asyncio.Task[None]) -> None:
    keeper.cancel()
    await asyncio.wait([keeper])


@dataclasses.dataclass(slots=True)
class _Clock:
    """The server's clock as this process last saw it. Each sample is a lower bound, since it is older than its arrival."""

    offset: Instant = dataclasses.field(default_factory=lambda: system_micros() - boottime())
    taken: Instant = 0

    def sample(self, now: Instant) -> None:
        here = boottime()
        offset = now - here
        if not self.taken or offset > self.offset or here - self.taken > CLOCK_AGE:
            self.offset, self.taken = offset, here


class News(Protocol):
    """Where the news of a commit go (`wakeups.py`)."""

    def telling(self, topics: set[str]) -> Sequence[Ask]:
        """What tells other processes these topics, if it is to go out right behind the commit."""
        ...

    def announce(self, topics: set[str], told: set[str]) -> None:
        """The commit is made: who waits in this process is told now, the others soon, but for what they were told behind the commit."""
        ...


class Database:
    """A store's way to its server. Usable from any number of event loops."""

    def __init__(self, address: Address, settings: Settings, names: Names) -> None:
        self.address = address
        self.settings = settings
        self.naming = Naming(names)
        self.pools = Pools(address)
        self.exchange = Exchange(self.naming)
        self.news: News | None = None
        """Where the news of a commit go (`wakeups.py`)."""
        self.contact: Callable[[], Coroutine[Any, Any, None]] | None = None
        """What is checked before anything else is done, until it has passed once (69)."""
        self.name: str | None = None
        """The database, as the server calls it."""
        self._clock = _Clock()
        self.limits = (f"{settings.lease // 6 // 1_000 or 1}ms", f"{settings.lease // 1_000 or 1}ms")

    def work(self) -> Work:
        """What an operation is given."""
        return Work(self.settings, lock_class=self.naming.key, sequence=self.naming.sequence)

    def see_clock(self, now: Instant) -> None:
        """The server said what time it is."""
        self._clock.sample(now)

    def clock(self) -> Instant:
        """The server's clock, as this process estimates it."""
        return boottime() + self._clock.offset

    # -- operations --------------------------------------------------------------------------------------------------------

    async def write(self, make: Make[T], *, durable: bool = True, once: bool = False) -> T:
        """Carry out an operation in a transaction and commit it; then tell its news. `durable=False`: the commit may be lost in a
        crash of the server, together with everything that has seen it (storage.md says where that is safe). `once`: it asks for
        statements a single time, so that beginning, statements and commit are one round trip."""
        opening = (Ask(BEGIN), Ask(PREAMBLE if durable else PREAMBLE_ASYNCHRONOUS, self.limits))
        return await self._repeated(lambda con: self._transaction(con, make, opening, once))

    async def read(self, make: Make[T], *, once: bool = True) -> T:
        """Carry out an operation that only reads, in a transaction of its own; each statement sees what is committed by then."""
        return await self._repeated(lambda con: self._transaction(con, make, (Ask(BEGIN_READING), Ask(NOW)), once))

    async def _repeated(self, attempt: Callable[[Lendable], Coroutine[Any, Any, T]]) -> T:
        """Begin anew where another transaction was in the way, or where a pooled connection turned out to be dead."""
        self.pools.guard()
        if self.contact is not None:
            await self.contact()
        pause, replacements = PAUSE, REPLACEMENTS
        for left in reversed(range(TRIES)):
            with faults.mapped():
                pool = await self.pools.of_this_loop()
                try:
                    con = await pool.getconn()
                    try:
                        return await attempt(con)
                    finally:
                        await pool.putconn(con)
                except Again as error:
                    if not left:
                        raise Conflict(f"others changed it again and again: {error.what}", hint="try again") from error
                except psycopg.Error as error:
                    if error.sqlstate in faults.AGAIN and left:
                        pass
                    elif error.sqlstate in faults.STALE and replacements:  # it is forgotten by now
                        replacements -= 1
                        continue
                    elif faults.lost(error) and not isinstance(error, NO_CONNECTION) and replacements:
                        # As a rule it broke while nobody used it, and so did its neighbours. Every write may be repeated (42).
                        replacements -= 1
                        await pool.drain()
                        continue
                    else:
                        raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 0.2)
        raise AssertionError("the last try raises")

    async def _transaction(self, con: Lendable, make: Make[T], opening: Sequence[Ask], once: bool) -> T:
        work = self.work()
        steps = make(work)
        try:
            asks = next(steps)
            before = [*opening, *asks]
            answers = await (self._commit(con, before, work) if once else self.ask(con, before))
            work.now = answers[1].rows[0][0]
            self._clock.sample(work.now)
            value, committed = await self._to_the_end(con, steps, answers[2:], once, work)
            if not committed:
                await self._commit(con, [], work)
        except BaseException:
            await self.undo(con)
            raise
        finally:
            steps.close()
        self.tell(work)
        return value

    async def _to_the_end(
        self, con: Lendable, steps: Operation[T], answers: list[Answer], committed: bool, work: Work
    ) -> tuple[T, bool]:
        """Go on with these answers; the commit goes out with the statements that an operation calls its last. And: has it?"""
        try:
            while True:
                asks = steps.send(answers)
                if committed:
                    raise RuntimeError(f"an operation asks for more after its last statement: {asks[0].text}")
                committed = isinstance(asks, Last)
                answers = await (self._commit(con, asks, work) if committed else self.ask(con, asks))
        except StopIteration as end:
            value: T = end.value
            return value, committed

    async def _commit(self, con: Lendable, asks: Sequence[Ask], work: Work) -> list[Answer]:
        """Send these with the commit and, behind it, what tells other processes its news: a hint, that may fail. The answers to these."""
        telling = self.news.telling(work.topics) if self.news is not None else ()
        work.told = set(work.topics) if telling else work.told
        return (await self.ask(con, [*asks, COMMIT], hints=telling))[: len(asks)]

    def tell(self, work: Work) -> None:
        """The commit is made: pass on its news."""
        if work.topics and self.news is not None:
            self.news.announce(work.topics, work.told)

    async def carry(self, con: psycopg.AsyncConnection[Row], steps: Operation[T]) -> T:
        """Carry an operation to its end inside the transaction that is open, and leave it open."""
        try:
            asks = next(steps)
            while True:
                asks = steps.send(await self.ask(con, asks))
        except StopIteration as end:
            value: T = end.value
            return value

    async def undo(self, con: Lendable) -> None:
        """Roll back what is open, or let go of a connection that can not be asked any more."""
        if con.closed or con.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            return
        if con.pgconn.transaction_status in (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR):
            try:
                # The driver's own, not a statement: only this forgets what it takes for prepared. The rest of a user's pipeline that
                # failed never reached the server, and it would ask for that by name for as long as the connection lives.
                await con.rollback()
                return
            except psycopg.Error as error:
                log.info("rolling back failed, the connection is closed: %s", error)
        con.pgconn.finish()

    async def ask(
        self, con: psycopg.AsyncConnection[Row], asks: Sequence[Ask], hints: Sequence[Ask] = ()
    ) -> list[Answer]:
        """Send statements and gather their answers; on a connection of the pool in one round trip. Hints go out behind them, outside of
        their transaction, and may fail."""
        if isinstance(con, Lendable):
            return await self.exchange.ask(con, asks, hints)
        return [
            await asked(AsyncRawCursor(con, row_factory=tuple_row), self.naming(one.text), one.parameters)
            for one in asks
        ]

    @asynccontextmanager
    async def direct(self) -> AsyncGenerator[psycopg.AsyncConnection[Row], None]:
        """A connection of its own past any pooler, in autocommit; closed at the end."""
        with faults.mapped():
            con = await psycopg.AsyncConnection.connect(self.address.direct, autocommit=True, row_factory=tuple_row)
            teach(con)
            if not self.address.prepare:  # without a direct URL this, too, leads through the pooler
                con.prepare_threshold = None
            try:
                yield con
            finally:
                con.pgconn.finish()

    async def close(self) -> None:
        """Let go of everything."""
        await self.pools.close()


async def asked(cursor: AsyncRawCursor[Row], text: str, parameters: Sequence[Any]) -> Answer:
    """One statement in the driver's own way."""
    await cursor.execute(cast("QueryNoTemplate", text), parameters or None, binary=True)
    return Answer(await cursor.fetchall() if cursor.description is not None else [], cursor.rowcount)


__all__ = ["BEGIN", "PREAMBLE", "PREAMBLE_LENT", "TRIES", "Database", "Make", "Pools", "asked"]
