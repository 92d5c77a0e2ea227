"""Who waits for what: topics (`queue:NAME`, `run:ID`) announced in this process, and by others through LISTEN and NOTIFY (semantics 67).

`store.py` calls `wait` and `announce`, `connection.py` passes on the news of each commit. A wake-up is a hint: nothing here decides
anything, and losing one costs a poll interval. News are told after the commit, at once in this process, and to others by one NOTIFY for
many topics, at most one in a few milliseconds, in a transaction of its own: behind the commit, in the same round trip, or a little later
where there was one just before. One connection past any pooler listens for each event loop that waits; when it is lost, everybody is
woken, it comes back with a growing pause, and until then polling goes on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import psycopg
from psycopg import sql

from durable.errors import DurableError
from durable.portal import end_tasks
from durable.wakeups import Waiters

from .connection import Database
from .operation import Ask, Operation, Row, Work, rows

log = logging.getLogger("durable.postgres")

THROTTLE: Final = 0.005
"""Seconds between two notifications of one process (an idle one sends at once)."""
PAYLOAD: Final = 7_900
"""Bytes of one notification; the server takes 8,000."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
# Outside of a transaction block it is one of its own; its commit is not waited for.
NOTIFY: Final = "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, p) FROM unnest($2::text[]) AS p"


class Wakeups:
    """The waiters of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiters = Waiters()
        self._listeners: dict[asyncio.AbstractEventLoop, _Listener] = {}
        self._senders: dict[asyncio.AbstractEventLoop, _Sender] = {}

    async def wait(self, topics: Sequence[str], timeout: float) -> None:
        """Return when a topic is announced, here or elsewhere, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        if self._database.address.listen:
            self._listen(loop)
        await self._waiters.wait(topics, timeout)

    def telling(self, topics: set[str]) -> Sequence[Ask]:
        """The notification that goes out right behind a commit, in its round trip; none if there was one a moment ago."""
        return self._sender().at_once(topics) if topics else ()

    def announce(self, topics: Iterable[str], told: Iterable[str] = ()) -> None:
        """A commit of this process brought news: tell the waiters here at once, and the other processes soon, but for what they were
        told behind the commit. On the loop of the call."""
        found = set(topics)
        self.hear(found)
        self._sender().add(found.difference(told))

    def _sender(self) -> _Sender:
        loop = asyncio.get_running_loop()
        sender = self._senders.get(loop)
        if sender is None:
            sender = self._senders[loop] = _Sender(self._database)
        return sender

    def hear(self, topics: Iterable[str]) -> None:
        """Somebody announced these."""
        self._waiters.announce(topics)

    def anything(self) -> None:
        """Notifications may have been missed: anything may be new."""
        self._waiters.announce_all()

    async def close(self) -> None:
        """End what listens and what sends."""
        here = asyncio.get_running_loop()
        senders, listeners = list(self._senders.items()), list(self._listeners.items())
        self._senders, self._listeners = {}, {}
        for loop, sender in senders:
            await _on(loop, here, sender.close)
        for loop, listener in listeners:
            await _on(loop, here, listener.close)
            listener.let_go()
        self.anything()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        listener = self._listeners.get(loop)
        if listener is None:
            for ended in [other for other in self._listeners if other.is_closed()]:
                self._listeners.pop(ended).let_go()
            self._listeners[loop] = _Listener(self._database, self)


class _Sender:
    """Notifications from one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._pending: set[str] = set()
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def at_once(self, topics: set[str]) -> Sequence[Ask]:
        if self._loop.time() < self._next or self._timer is not None or not self._idle:
            return ()
        self._next = self._loop.time() + THROTTLE
        return (Ask(NOTIFY, (self._database.naming.channel, _payloads(sorted(topics)))),)

    @property
    def _idle(self) -> bool:
        return self._task is None or self._task.done()

    def add(self, topics: set[str]) -> None:
        self._pending |= topics
        if self._pending and self._timer is None and self._idle:
            self._timer = self._loop.call_at(max(self._next, self._loop.time()), self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._task = self._loop.create_task(self._send())

    async def _send(self) -> None:
        topics, self._pending = sorted(self._pending), set()
        channel = self._database.naming.channel

        def notify(work: Work) -> Operation[list[Row]]:
            return (yield from rows(NOTIFY, channel, _payloads(topics)))

        try:
            await self._database.write(notify, durable=False, once=True)
        except DurableError as error:
            log.info("a notification was lost, others find the news with their next poll: %s", error.message)
        self._next = self._loop.time() + THROTTLE
        if self._pending:
            self._timer = self._loop.call_at(self._next, self._begin)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            if not self._database.pools.closed:
                await self._send()
            self._pending = set()
        if self._task is not None:
            await asyncio.wait([self._task])


def _payloads(topics: Sequence[str]) -> list[str]:
    """As few notifications as hold all topics, each once."""
    payloads: list[str] = []
    length = PAYLOAD
    for topic in topics:
        size = len(topic.encode()) + 1
        if size > PAYLOAD:
            continue  # a name of that length is found by polling
        if length + size > PAYLOAD:
            payloads.append(topic)
            length = size
        else:
            payloads[-1] += "\n" + topic
            length += size
    return payloads


class _Listener:
    """The connection that listens for one event loop."""

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self._database = database
        self._wakeups = wakeups
        self._con: psycopg.AsyncConnection[Row] | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                async with self._database.direct() as con:
                    self._con = con
                    await con.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._database.naming.channel)))
                    self._wakeups.anything()  # what was told before this moment was told to nobody
                    pause = FIRST_PAUSE
                    async for notification in con.notifies():
                        self._wakeups.hear(notification.payload.split("\n"))
            except DurableError as error:
                log.info("listening for news stopped and is tried again, polling goes on: %s", error.message)
            self._wakeups.anything()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def close(self) -> None:
        await end_tasks([self._task])

    def let_go(self) -> None:
        """Close the connection from outside, where the loop has ended."""
        if self._con is not None:
            self._con.pgconn.finish()


async def _on(
    loop: asyncio.AbstractEventLoop, here: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    if loop is here:
        await close()
    elif loop.is_running():
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(close(), loop))


__all__ = ["Wakeups"]
