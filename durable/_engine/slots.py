"""The slots of a worker: how many bodies run at once, who waits for one, and the threads for `def` steps.

A run at rest gives its slot back and takes one again before it goes on (semantics 30); first come, first served, and before new
claims. Threads are daemons of our own: a step that never ends must not keep a process alive that was told twice to stop.
"""

from __future__ import annotations

import asyncio
import collections
import queue
import threading
from collections.abc import Callable
from typing import Any


class Slots:
    """Counts the slots in use. On the worker's loop."""

    def __init__(self, limit: int, freed: Callable[[], None]) -> None:
        self.limit = limit
        self.taken = 0
        self._freed = freed
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()

    @property
    def free(self) -> int:
        """Slots that a claim may fill: those who wait come first."""
        return self.limit - self.taken - len(self._waiters)

    def occupy(self) -> None:
        """A claimed run begins; the claim asked for no more runs than there were free slots."""
        self.taken += 1

    async def take(self) -> None:
        """Wait for a slot."""
        if self.taken < self.limit and not self._waiters:
            self.taken += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give()  # the slot was handed over in the same moment
            elif waiter in self._waiters:  # it is not, if a slot that became free meanwhile passed it over
                self._waiters.remove(waiter)
            raise

    def give(self) -> None:
        """A slot is free."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)  # the slot goes on to the next one
                return
        self.taken -= 1
        self._freed()


class Threads:
    """At most `limit` daemon threads, made when needed, each kept for the next call."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._count = 0

    def run(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """Call it in a thread; cancelling the future does not stop the thread."""
        loop = asyncio.get_running_loop()
        work = _Call(call, loop, loop.create_future())
        with self._lock:
            start = self._idle == 0 and self._count < self._limit
            if start:
                self._count += 1
            else:
                self._idle -= 1
            number = self._count
        self._queue.put(work)
        if start:
            threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()
        return work.future

    def close(self) -> None:
        """Let the threads end when their queue is empty."""
        with self._lock:
            count = self._count
            self._limit = self._count = 0
        for _ in range(count):
            self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            with self._lock:
                self._idle += 1


class _Call:
    __slots__ = ("call", "future", "loop")

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
        self.call = call
        self.loop = loop
        self.future = future

    def run(self) -> None:
        if self.future.cancelled():
            return
        value: Any = None
        failure: BaseException | None = None
        try:
            value = self.call()
        except BaseException as error:  # noqa: BLE001 -- it belongs to who waits for the call, whatever it is
            failure = error
        try:
            self.loop.call_soon_threadsafe(self._deliver, value, failure)
        except RuntimeError:
            if not self.loop.is_closed():
                raise  # a closed loop has nobody left who waits

    def _deliver(self, value: Any, failure: BaseException | None) -> None:
        if self.future.done():
            return
        if failure is None:
            self.future.set_result(value)
        elif isinstance(failure, StopIteration):
            self.future.set_exception(RuntimeError("a call in a thread raised StopIteration"))  # a future refuses it
        else:
            self.future.set_exception(failure)


__all__ = ["Slots", "Threads"]
