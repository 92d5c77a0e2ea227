"""Lanes: a thread with a queue of operations, the connections that they run on, and the way of an answer back to its event loop.

`connection.py` makes the writer's lane and the readers' of these, `transactions.py` the one of `ctx.transaction`. What a batch is and
when it commits is theirs to say; a lane only keeps the order and answers everybody.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from durable.errors import Misuse, StoreUnavailable
from durable.model import Instant
from durable.settings import Settings

from .faults import mapped

T = TypeVar("T")
Operation: TypeAlias = Callable[[sqlite3.Connection, Instant], T]

BATCH: Final = 500
"""Operations of one batch: more bring nothing, one commit is shared by enough of them."""
BATCH_BYTES: Final = 2 << 20
"""Payload of one batch: a large one would hold up everybody behind it."""


class Connection(sqlite3.Connection):
    """A connection of ours, with what an operation on it may need from the store that asked for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.announced: set[str] = set()
        """The topics to be announced once the transaction has committed."""
        self.settings = Settings()
        """Those of the store whose operation is running."""
        self.lent = False
        """True while a user's function has it: its transaction is not theirs to end."""

    def commit(self) -> None:
        """As ever; refused while it is lent."""
        self._refuse_while_lent("commit")
        super().commit()

    def rollback(self) -> None:
        """As ever; refused while it is lent."""
        self._refuse_while_lent("rollback")
        super().rollback()

    def close(self) -> None:
        """As ever; refused while it is lent."""
        self._refuse_while_lent("close")
        super().close()

    def _refuse_while_lent(self, verb: str) -> None:
        if self.lent:
            raise Misuse(
                f"{verb}() inside ctx.transaction: its rows and its record commit together, when the function returns",
                hint="return to commit, raise to roll back; a SAVEPOINT undoes a part",
            )


def announce(con: sqlite3.Connection, topic: str) -> None:
    """Announce a topic after the commit. On a caller's own connection: nobody is told before, and we do not see the commit (41)."""
    if isinstance(con, Connection):
        con.announced.add(topic)


def settings_of(con: sqlite3.Connection) -> Settings:
    """The settings of the store whose operation is running."""
    return con.settings if isinstance(con, Connection) else Settings()


class Item(Generic[T]):
    """One operation on its way through a lane, with the future of its answer."""

    __slots__ = ("future", "loop", "operation", "settings", "weight")

    def __init__(self, operation: Operation[T], settings: Settings, weight: int) -> None:
        self.operation = operation
        self.settings = settings
        self.weight = weight
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()


Answer: TypeAlias = tuple[Item[Any], Any, BaseException | None]


def answer(item: Item[Any], con: Connection, now: Instant) -> Answer:
    """Run one operation outside a shared transaction; its error is its own."""
    con.settings = item.settings
    try:
        return item, item.operation(con, now), None
    except Exception as error:  # noqa: BLE001 - the one operation gets it, mapped
        return item, None, mapped(error)


def _resolve(answers: list[Answer]) -> None:
    for item, value, error in answers:
        if item.future.done():
            continue  # the caller stopped waiting; what was written stays written
        if error is None:
            item.future.set_result(value)
        else:
            item.future.set_exception(error)


def deliver(answers: Sequence[Answer]) -> None:
    """One hop per event loop and batch: a hop per item would cost three times as much."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].loop, []).append(answer)
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, own)
        except RuntimeError:
            if not loop.is_closed():
                raise  # on a closed loop nobody waits any more


class Lane:
    """A thread with a queue. `process` gets what is queued, in order, and answers every item."""

    def __init__(
        self,
        name: str,
        process: Callable[[list[Item[Any]]], None],
        *,
        idle: Callable[[], None] = lambda: None,
        look_after: Callable[[], float | None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._process = process
        self._idle = idle
        self._look_after = look_after
        self._at_end = at_end
        self._queue: queue.SimpleQueue[Item[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[T], settings: Settings, weight: int = 0) -> asyncio.Future[T]:
        """Queue an operation; the future belongs to the running loop."""
        item = Item(operation, settings, weight)
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed", hint="open it again")
            self._queue.put(item)
        return item.future

    def nudge(self) -> None:
        """Make the thread look around once."""
        self._queue.put(None)

    def close(self) -> None:
        """Take nothing more, finish what is queued, end the thread. Returns when it has ended."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                batch = self._take()
                if batch:
                    self._process(batch)
                elif self._closed and self._queue.empty():
                    return
                else:
                    self._idle()
        finally:
            self._at_end()

    def _take(self) -> list[Item[Any]]:
        try:
            item = self._queue.get(timeout=self._look_after())
        except queue.Empty:
            return []
        if item is None:
            return []
        batch = [item]
        weight = item.weight
        while len(batch) < BATCH and weight < BATCH_BYTES:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                batch.append(item)
                weight += item.weight
            elif self._closed:
                self._queue.put(None)  # the end comes after what was queued before it
                break
        return batch
