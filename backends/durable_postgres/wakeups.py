"""Who waits for what: topics (`queue:NAME`, `run:ID`) announced in this process, and by others through LISTEN and NOTIFY (semantics 67).

`store.py` calls `wait` and `announce`. A wake-up is a hint: nothing here decides anything, and losing one costs a poll interval. News are
told after the commit, at once in this process, and to others by one NOTIFY for many topics, at most one in a few milliseconds, in a
transaction of its own that nobody waits for. One connection past any pooler listens for each event loop that waits; when it is lost,
everybody is woken, it comes back with a growing pause, and until then polling goes on.

A topic that was announced between a caller's look and its `wait` would be missed. So each announcement has a number, and a wait
that has not seen the newest number of its topics returns at once, once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql

from durable.errors import DurableError

from .connection import Database
from .operation import Operation, Row, Work, rows

_Key = TypeVar("_Key")
log = logging.getLogger("durable.postgres")

REMEMBERED: Final = 20_000
"""Topics whose last announcement is remembered; the oldest half is forgotten beyond that."""
THROTTLE: Final = 0.005
"""Seconds between two notifications of one process (an idle one sends at once)."""
PAYLOAD: Final = 7_900
"""Bytes of one notification; the server takes 8,000."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
NOTIFY: Final = "SELECT pg_notify($1, p) FROM unnest($2::text[]) AS p"
_Woken = dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]


class Wakeups:
    """The waiters of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._waiters: dict[str, dict[asyncio.Future[None], asyncio.AbstractEventLoop]] = {}
        self._number = 0
        self._foreign = 0
        self._announced: dict[str, int] = {}
        # By the hash of who waits and for what: a client that awaits a thousand runs waits for another thousand topics each time.
        self._seen: dict[int, int] = {}
        self._listeners: dict[asyncio.AbstractEventLoop, _Listener] = {}
        self._senders: dict[asyncio.AbstractEventLoop, _Sender] = {}

    async def wait(self, topics: Sequence[str], timeout: float) -> None:
        """Return when a topic is announced, here or elsewhere, or after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        if self._database.address.listen:
            self._listen(loop)
        key = hash((id(loop), tuple(topics)))
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            newest = self._newest(topics)
            if self._seen.get(key, 0) < newest:
                self._remember(self._seen, key, newest)
                return
            for topic in topics:
                self._waiters.setdefault(topic, {})[future] = loop
        timer = loop.call_later(timeout, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            with self._lock:
                for topic in topics:
                    waiters = self._waiters.get(topic)
                    if waiters is not None:
                        waiters.pop(future, None)
                        if not waiters:
                            del self._waiters[topic]
                self._remember(self._seen, key, self._newest(topics))

    def announce(self, topics: Iterable[str]) -> None:
        """A commit of this process brought news: tell the waiters here at once, and the other processes soon. On the loop of the call."""
        found = set(topics)
        self.hear(found)
        loop = asyncio.get_running_loop()
        sender = self._senders.get(loop)
        if sender is None:
            sender = self._senders[loop] = _Sender(self._database)
        sender.add(found)

    def hear(self, topics: Iterable[str]) -> None:
        """Somebody announced these."""
        woken: _Woken = {}
        with self._lock:
            self._number += 1
            for topic in topics:
                self._remember(self._announced, topic, self._number)
                for future, loop in self._waiters.get(topic, {}).items():
                    woken.setdefault(loop, []).append(future)
        _deliver(woken)

    def anything(self) -> None:
        """Notifications may have been missed: anything may be new."""
        woken: _Woken = {}
        with self._lock:
            self._number += 1
            self._foreign = self._number
            for waiters in self._waiters.values():
                for future, loop in waiters.items():
                    woken.setdefault(loop, []).append(future)
        _deliver(woken)

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

    def _newest(self, topics: Sequence[str]) -> int:
        return max(self._foreign, max((self._announced.get(topic, 0) for topic in topics), default=0))

    @staticmethod
    def _remember(table: dict[_Key, int], key: _Key, number: int) -> None:
        table.pop(key, None)  # to the end: the order of the dict is the order of announcements
        table[key] = number
        if len(table) > REMEMBERED:
            for old in list(table)[: REMEMBERED // 2]:
                del table[old]


class _Sender:
    """Notifications from one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._pending: set[str] = set()
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def add(self, topics: set[str]) -> None:
        self._pending |= topics
        if self._pending and self._timer is None and (self._task is None or self._task.done()):
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
        self._task.cancel()
        await asyncio.wait([self._task])

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


def _deliver(woken: _Woken) -> None:
    for loop, futures in woken.items():
        try:
            loop.call_soon_threadsafe(_wake_all, futures)
        except RuntimeError:
            if not loop.is_closed():
                raise  # a closed loop has no waiters any more; anything else is ours to know


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _wake_all(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        _wake(future)


__all__ = ["Wakeups"]
