"""Who waits for what, in this process: topics (`queue:NAME`, `run:ID`) announced after a commit, and changes by other processes.

`connection.py` calls `announce` and `changed` from its writer thread after each commit; `store.py` calls `wait` from any loop. A
wake-up is a hint (semantics 67): nothing here decides anything, and losing one costs a poll interval.

A topic that was announced between a caller's look and its `wait` would be missed. So each announcement has a number, and a wait
that has not seen the newest number of its topics returns at once, once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_Key = TypeVar("_Key")

REMEMBERED = 20_000
"""Topics whose last announcement is remembered; the oldest half is forgotten beyond that."""

QUICK = 0.002
"""Seconds between looks at other processes' commits while there were some lately."""
IDLE = 0.020
"""The same when nothing happened for a while: 50 looks of 7 µs a second cost a thousandth of a core."""
LATELY = 0.100


class Wakeups:
    """The waiters of one database in this process."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        self._nudge = nudge  # wakes the writer thread, so that it begins to look at other processes' commits
        self._lock = threading.Lock()
        self._waiters: dict[str, dict[asyncio.Future[None], asyncio.AbstractEventLoop]] = {}
        self._waiting = 0
        self._number = 0
        self._foreign = 0
        self._announced: dict[str, int] = {}
        # By the hash of who waits and for what: a client that awaits a thousand runs waits for another thousand topics each time.
        self._seen: dict[int, int] = {}
        self._last_change = 0.0
        self._interval = IDLE

    async def wait(self, topics: Sequence[str], timeout: float) -> None:
        """Return when a topic is announced, another process commits, or `timeout` seconds have passed."""
        loop = asyncio.get_running_loop()
        key = hash((id(loop), tuple(topics)))
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            newest = self._newest(topics)
            if self._seen.get(key, 0) < newest:
                self._remember(self._seen, key, newest)
                return
            for topic in topics:
                self._waiters.setdefault(topic, {})[future] = loop
            self._waiting += 1
            first = self._waiting == 1
        if first:
            self._nudge()
        timer = loop.call_later(timeout, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            with self._lock:
                self._waiting -= 1
                for topic in topics:
                    waiters = self._waiters.get(topic)
                    if waiters is not None:
                        waiters.pop(future, None)
                        if not waiters:
                            del self._waiters[topic]
                self._remember(self._seen, key, self._newest(topics))

    def announce(self, topics: Iterable[str]) -> None:
        """A commit of this process brought news of these topics."""
        woken: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        with self._lock:
            self._number += 1
            for topic in topics:
                self._remember(self._announced, topic, self._number)
                for future, loop in self._waiters.get(topic, {}).items():
                    woken.setdefault(loop, []).append(future)
        self._deliver(woken)

    def changed(self) -> None:
        """Another connection committed: anything may be new."""
        woken: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        with self._lock:
            self._number += 1
            self._foreign = self._number
            self._last_change = time.monotonic()
            for waiters in self._waiters.values():
                for future, loop in waiters.items():
                    woken.setdefault(loop, []).append(future)
        self._deliver(woken)

    def look_after(self) -> float | None:
        """Seconds until the writer thread should look at other processes' commits; None: nobody waits."""
        if not self._waiting:
            return None
        if time.monotonic() - self._last_change < LATELY:
            self._interval = QUICK
        else:
            self._interval = min(self._interval * 2, IDLE)
        return self._interval

    def _newest(self, topics: Sequence[str]) -> int:
        return max(self._foreign, max((self._announced.get(topic, 0) for topic in topics), default=0))

    @staticmethod
    def _remember(table: dict[_Key, int], key: _Key, number: int) -> None:
        table.pop(key, None)  # to the end: the order of the dict is the order of announcements
        table[key] = number
        if len(table) > REMEMBERED:
            for old in list(table)[: REMEMBERED // 2]:
                del table[old]

    @staticmethod
    def _deliver(woken: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]) -> None:
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
