"""Who waits for what: topics (`queue:NAME`, `run:ID`) announced after a commit, and others' commits, by change streams.

`connection.py` calls `announce` after each commit, `store.py` calls `wait` from any loop. A wake-up is a hint (semantics 67): nothing
here decides anything, and losing one costs a poll interval. A stream is open only while somebody waits for what it tells: one for
queues (runs that became claimable), one for runs (ends, wakes, progress). Each reads the whole oplog on the server, so there is one per
process, not one per waiter. It resumes by itself after a step-down; where it can not, it is opened anew, and everybody looks once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

from pymongo.errors import OperationFailure, PyMongoError

from durable.portal import end_tasks
from durable.wakeups import Waiters

GATHER: Final = 0.003
"""Seconds in which the events of a stream are gathered before anybody is woken."""
SPREAD: Final = 0.010
"""At most so many seconds a process waits before it acts on another's news, so that not all claim for one run."""
LINGER: Final = 30.0
"""Seconds that a stream stays open after the last waiter has gone: opening one costs more than that."""
REOPEN: Final = (0.5, 30.0)
"""Seconds before a stream that failed is opened again: the first time, and at the most."""
_HISTORY_LOST: Final = frozenset({136, 222, 280, 286})
_REFUSED: Final = frozenset({13, 18, 40573})

QUEUE: Final = "queue:"
RUN: Final = "run:"
_WATCHED: Final[dict[str, dict[str, Any]]] = {
    QUEUE: {
        "$or": [
            {"operationType": "insert", "fullDocument.ready": True},
            {"operationType": "update", "updateDescription.updatedFields.ready": True},
        ]
    },
    RUN: {
        "operationType": "update",
        "$or": [
            {f"updateDescription.updatedFields.{field}": {"$exists": True}}
            for field in ("finished_at", "wake_seq", "cancel_requested_at", "progress")
        ],
    },
}
_TOLD: Final = {"$project": {"_id": 1, "documentKey": 1, "fullDocument.queue": 1}}  # _id is the token to resume after


class Wakeups:
    """The waiters of one database in this process."""

    def __init__(self, collection: Callable[[], Awaitable[Any]] | None) -> None:
        self._collection = collection
        self._waiters = Waiters()
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._closed = False

    @property
    def watching(self) -> bool:
        """Whether the commits of others are told by the server."""
        return self._collection is not None

    async def wait(self, topics: Sequence[str], timeout: float) -> None:
        """Return when a topic is announced or may have news, or `timeout` seconds have passed."""
        await self._waiters.wait(topics, timeout, lambda _: self._listen(topics))

    def announce(self, topics: Iterable[str]) -> None:
        """A commit brought news of these topics; `queue:` alone is any queue."""
        named = set(topics)
        if QUEUE in named:
            self.announce_all(QUEUE)
        self._waiters.announce(named - {QUEUE})

    def announce_all(self, kind: str) -> None:
        """Any topic of this kind may have news."""
        self._waiters.announce_all(kind)

    def awaited(self, kind: str) -> bool:
        """Whether somebody waits for a topic of this kind."""
        return self._waiters.awaited(kind)

    async def close(self) -> None:
        """End the streams. Waiters are left to their time-outs."""
        with self._lock:
            self._closed = True
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.stop()

    def _listen(self, topics: Sequence[str]) -> None:
        if self._collection is None:
            return
        loop = asyncio.get_running_loop()
        for kind in (QUEUE, RUN):
            if any(topic.startswith(kind) for topic in topics):
                with self._lock:
                    stream = self._streams.get(kind)
                    if self._closed or (stream is not None and stream.alive):
                        continue
                    stream = self._streams[kind] = _Stream(self, kind, self._collection, loop)
                stream.start()


class _Stream:
    """One change stream, on the loop of whoever waited first. It ends with that loop; the next waiter opens another."""

    def __init__(
        self,
        wakeups: Wakeups,
        kind: str,
        collection: Callable[[], Awaitable[Any]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._wakeups = wakeups
        self._kind = kind
        self._collection = collection
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._token: Any = None
        self.opened = 0
        """How often it was opened: for tests."""

    @property
    def alive(self) -> bool:
        return not self._loop.is_closed() and (self._task is None or not self._task.done())

    def start(self) -> None:
        self._task = self._loop.create_task(self._run(), name=f"durable changes {self._kind}")

    async def stop(self) -> None:
        """End it, on its own loop."""
        if self._task is None or self._task.done() or self._loop.is_closed():
            return
        if self._loop is asyncio.get_running_loop():
            await end_tasks([self._task])
        elif self._loop.is_running():
            asyncio.run_coroutine_threadsafe(end_tasks([self._task]), self._loop)

    async def _run(self) -> None:
        pause = REOPEN[0]
        while True:
            try:
                if await self._watch():
                    return
                pause = REOPEN[0]
            except OperationFailure as error:
                if error.code in _REFUSED:
                    return  # polling does without; the check of the doctor says so
                if error.code in _HISTORY_LOST:
                    self._token = None
            except PyMongoError:
                pass  # the token is kept: nothing is lost but time
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause = min(pause * 2, REOPEN[1])

    async def _watch(self) -> bool:
        """Tell what comes until the stream ends. True: nobody has waited for a while."""
        collection = await self._collection()
        stream = collection.watch(
            [{"$match": _WATCHED[self._kind]}, _TOLD], resume_after=self._token, max_await_time_ms=1_000
        )
        if inspect.isawaitable(stream):
            stream = await stream
        self.opened += 1
        idle_since = self._loop.time()
        async with contextlib.aclosing(_Closing(stream)):
            self._wakeups.announce_all(self._kind)  # what came between the look of the waiters and this opening
            while stream.alive:
                if self._wakeups.awaited(self._kind):
                    idle_since = self._loop.time()
                elif self._loop.time() - idle_since > LINGER:
                    return True
                event = await stream.try_next()
                if event is None:
                    self._token = stream.resume_token or self._token
                    continue
                await asyncio.sleep(GATHER + SPREAD * random.random())
                topics: set[str] = set()
                while event is not None:
                    self._token = event["_id"]
                    topics.add(self._topic(event))
                    event = await stream.try_next() if _buffered(stream) else None
                if "" in topics:
                    self._wakeups.announce_all(self._kind)
                self._wakeups.announce(topics - {""})
        return False

    def _topic(self, event: dict[str, Any]) -> str:
        if self._kind == RUN:
            return f"{RUN}{event['documentKey']['_id']}"
        inserted = event.get("fullDocument")
        return f"{QUEUE}{inserted['queue']}" if inserted else ""


class _Closing:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def aclose(self) -> None:
        await self._stream.close()


def _buffered(stream: Any) -> bool:
    """Whether the next event is here already: another one is not waited for while waiters are."""
    cursor = getattr(stream, "_cursor", None)
    return bool(getattr(cursor, "_data", None))


__all__ = ["QUEUE", "RUN", "Wakeups"]
