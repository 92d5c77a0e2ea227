"""Who waits for what in this process: topics (`queue:NAME`, `run:ID`), and the futures that an announcement ends.

The `wakeups.py` of a backend holds a `Waiters` and tells it what its database tells: a commit of this process, a notification, a change
of the file. A wake-up is a hint (semantics 67): nothing here decides anything, and losing one costs a poll interval.

A topic that was announced between a caller's look and its `wait` would be missed. So each announcement has a number, and a wait
that has not seen the newest number of its topics returns at once, once. What was announced for all topics long ago is no news to
somebody who waits for the first time: it would cost every waiter a second look.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias, TypeVar

K = TypeVar("K")
_Futures: TypeAlias = dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]]

REMEMBERED: Final = 20_000
"""Topics whose last announcement is remembered; the oldest half is forgotten beyond that."""
RECENT: Final = 1.0
"""Seconds for which an announcement of all topics is news to a wait that is the first for its topics."""


class Waiters:
    """The waiters of one store in this process. From any thread and any loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[str, dict[asyncio.Future[None], asyncio.AbstractEventLoop]] = {}
        self._count = 0
        self._number = 0
        self._announced: dict[str, int] = {}
        self._prefixes: dict[str, tuple[int, float]] = {}
        # By the hash of who waits and for what: a client that awaits a thousand runs waits for another thousand topics each time.
        self._seen: dict[int, int] = {}

    async def wait(self, topics: Sequence[str], timeout: float, began: Callable[[bool], object] | None = None) -> None:
        """Return when one of the topics is announced, or `timeout` seconds have passed.

        `began(first)` is called once it waits, if it has to; `first`: nobody waited before.
        """
        loop = asyncio.get_running_loop()
        key = hash((id(loop), tuple(topics)))
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            seen = self._seen.get(key)
            newest = self._newest(topics, since=0.0 if seen is not None else time.monotonic() - RECENT)
            if (seen or 0) < newest:
                _remember(self._seen, key, newest)
                return
            for topic in topics:
                self._waiters.setdefault(topic, {})[future] = loop
            self._count += 1
            first = self._count == 1
        timer = loop.call_later(timeout, _wake, [future])
        try:
            if began is not None:
                began(first)
            await future
        finally:
            timer.cancel()
            with self._lock:
                self._count -= 1
                for topic in topics:
                    waiters = self._waiters.get(topic)
                    if waiters is not None:
                        waiters.pop(future, None)
                        if not waiters:
                            del self._waiters[topic]
                _remember(self._seen, key, self._newest(topics))

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._count

    def awaited(self, prefix: str) -> bool:
        """Whether somebody waits for a topic that begins so."""
        with self._lock:
            return any(topic.startswith(prefix) for topic in self._waiters)

    def announce(self, topics: Iterable[str]) -> None:
        """There is news of these topics."""
        woken: _Futures = {}
        with self._lock:
            self._number += 1
            for topic in topics:
                _remember(self._announced, topic, self._number)
                _gather(woken, self._waiters.get(topic, {}))
        _deliver(woken)

    def announce_all(self, prefix: str = "") -> None:
        """There may be news of every topic that begins so."""
        woken: _Futures = {}
        with self._lock:
            self._number += 1
            self._prefixes[prefix] = (self._number, time.monotonic())
            for topic, waiters in self._waiters.items():
                if topic.startswith(prefix):
                    _gather(woken, waiters)
        _deliver(woken)

    def _newest(self, topics: Sequence[str], since: float = 0.0) -> int:
        """The number of the last announcement of these; one of all topics only if it was made after `since`."""
        numbers = [self._announced.get(topic, 0) for topic in topics]
        for prefix, (number, at) in self._prefixes.items():
            if at >= since and any(topic.startswith(prefix) for topic in topics):
                numbers.append(number)
        return max(numbers, default=0)


def _remember(table: dict[K, int], key: K, number: int) -> None:
    table.pop(key, None)  # to the end: the order of the dict is the order of announcements
    table[key] = number
    if len(table) > REMEMBERED:
        for old in list(table)[: REMEMBERED // 2]:
            del table[old]


def _gather(woken: _Futures, waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop]) -> None:
    for future, loop in waiters.items():
        woken.setdefault(loop, []).append(future)


def _deliver(woken: _Futures) -> None:
    for loop, futures in woken.items():
        try:
            loop.call_soon_threadsafe(_wake, futures)
        except RuntimeError:
            if not loop.is_closed():
                raise  # a closed loop has no waiters any more; anything else is ours to know


def _wake(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


__all__ = ["Waiters"]
