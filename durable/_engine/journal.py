"""Group commit: entries of many runs become one `append`, settles one `settle`, concurrent submits one `enqueue`.

A `Lane` collects what is put while its flushes are under way and sends it with the next one; nobody lingers. The worker has one
lane for records and one for settles, each client one for submits. A lane keeps the entries of one key (a run) in order, repeats
a batch that brought no answer for as long as its entries may live, and splits a batch that failed until the bad entry is alone
(semantics 9, 14, 20, 21). It decides nothing about runs: what an answer means is the caller's business.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ..clock import boottime
from ..errors import LeaseLost, StoreUnavailable, WorkerStopped
from ..events import Events, Flushed, FlushFailed, StepRecorded
from ..model import Appended, Lease, NewRecord, Outcome, Settled, StepRecord
from ..portal import end_tasks
from ..protocol import Store
from .turnstile import Turnstile

Item = TypeVar("Item")
Answer = TypeVar("Answer")

BATCH_ENTRIES = 500
"""Entries of one flush: above it a batch gains nothing more (sqlite: 30,000 rows/s at 100, the same at 500)."""
BATCH_WEIGHT = 2 << 20
"""Bytes of payload in one flush: a larger one holds the store's writer for too long."""
FLIGHTS = 2
"""Flushes of one lane at once: the second one is prepared while the first waits for the disk."""
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0


class Holder(Protocol):
    """Who writes: a lease, and whether it may still be trusted by the monotonic clock (semantics 14)."""

    @property
    def lease(self) -> Lease: ...

    def valid(self) -> bool: ...

    def lose(self, why: str) -> None: ...


class _Entry(Generic[Item, Answer]):
    __slots__ = ("alive", "future", "item", "key", "weight")

    def __init__(
        self, key: str, item: Item, alive: Callable[[], bool], weight: int, future: asyncio.Future[Answer]
    ) -> None:
        self.key = key
        self.item = item
        self.alive = alive
        self.weight = weight
        self.future = future


class Lane(Generic[Item, Answer]):
    """Batches what is put into calls of `send`. Used from one event loop."""

    def __init__(
        self,
        name: str,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        *,
        events: Events,
        ordered: bool = True,
        flights: int = FLIGHTS,
        turnstile: Turnstile | None = None,
    ) -> None:
        self.name = name
        self._send = send
        self._events = events
        self._ordered = ordered
        self._flights = flights
        self._turnstile = turnstile
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Entry[Item, Answer]] = []
        self._busy: set[str] = set()  # keys with an entry in flight
        self._failed: dict[str, BaseException] = {}  # keys whose order is broken: nothing may follow a hole
        self._tasks: dict[asyncio.Task[None], list[_Entry[Item, Answer]]] = {}
        self._queued = False
        self._closed = False

    def put(self, key: str, item: Item, *, alive: Callable[[], bool], weight: int = 0) -> asyncio.Future[Answer]:
        """Send `item` with the next batch. `alive` is asked, after a try that brought no answer, whether to go on trying."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        if self._closed:
            future.set_exception(WorkerStopped(f"the {self.name} lane is closed"))
        elif key in self._failed:
            future.set_exception(self._failed[key])
        else:
            self._waiting.append(_Entry(key, item, alive, weight, future))
            if not self._queued and len(self._tasks) < self._flights:
                self._queued = True
                self._loop.call_soon(self._launch)
        return future

    def forget(self, key: str) -> None:
        """The owner of this key is gone: an error of it is not remembered any more."""
        self._failed.pop(key, None)

    async def drain(self) -> None:
        """Wait until everything that was put has its answer."""
        while self._waiting or self._tasks:
            if self._tasks:
                await asyncio.wait(list(self._tasks))
            else:
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Refuse what is put from now on, and give up what a store that does not answer still holds."""
        self._closed = True
        await end_tasks(list(self._tasks))
        for entry in self._waiting:
            _refuse(entry, WorkerStopped(f"stopped before this {self.name} was answered"))
        self._waiting.clear()

    # -- flushing -------------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        self._queued = False
        while self._waiting and len(self._tasks) < self._flights and not self._closed:
            batch = self._take()
            if not batch:
                return
            task = self._loop.create_task(self._flush(batch))
            self._tasks[task] = batch
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[None]) -> None:
        batch = self._tasks.pop(task)
        self._busy.difference_update([entry.key for entry in batch])
        if task.cancelled():  # by `close`, or by an event loop that ends
            for entry in batch:
                _refuse(entry, WorkerStopped(f"stopped before this {self.name} was answered"))
        if self._waiting and not self._queued:
            self._queued = True
            self._loop.call_soon(self._launch)

    def _take(self) -> list[_Entry[Item, Answer]]:
        """The next batch: in the order of arrival, but no entry of a key that is in flight (its order would be open)."""
        waiting, busy = self._waiting, self._busy
        batch: list[_Entry[Item, Answer]] = []
        rest: list[_Entry[Item, Answer]] = []
        weight = 0
        held: set[str] = set()
        for place, entry in enumerate(waiting):
            if batch and (len(batch) >= BATCH_ENTRIES or weight + entry.weight > BATCH_WEIGHT):
                rest.extend(waiting[place:])
                break
            if entry.key in busy or entry.key in held:
                held.add(entry.key)
                rest.append(entry)
                continue
            batch.append(entry)
            weight += entry.weight
        self._waiting = rest
        busy.update(entry.key for entry in batch)
        return batch

    async def _flush(self, batch: list[_Entry[Item, Answer]]) -> None:
        started = boottime()
        await self._deliver(batch)
        if self._events.wanted:
            self._events.emit(Flushed(lane=self.name, entries=len(batch), took=boottime() - started))

    async def _deliver(self, batch: list[_Entry[Item, Answer]]) -> None:
        pause = FIRST_PAUSE
        while batch:
            try:
                answers = await self._send([entry.item for entry in batch])
                if len(answers) != len(batch):
                    raise RuntimeError(f"{len(batch)} entries, {len(answers)} answers")
            except StoreUnavailable as error:
                # It may or may not have been written: every write may be repeated, and recognises itself (semantics 6, 20, 42).
                self._events.emit(FlushFailed(lane=self.name, entries=len(batch), error=str(error)))
                batch = self._still_alive(batch, error)
                if batch:
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                    pause = min(pause * 2, LONGEST_PAUSE)
            except Exception as error:  # noqa: BLE001 -- whatever it is, it belongs to the entry that it is found with
                await self._split(batch, error)
                return
            else:
                try:
                    if self._turnstile is not None:
                        await self._turnstile.passed()
                finally:  # also where the lane is closed meanwhile: what was written is told
                    for entry, answer in zip(batch, answers, strict=True):
                        if not entry.future.done():
                            entry.future.set_result(answer)
                return

    def _still_alive(self, batch: list[_Entry[Item, Answer]], error: BaseException) -> list[_Entry[Item, Answer]]:
        alive: list[_Entry[Item, Answer]] = []
        for entry in batch:
            if self._ordered and entry.key in self._failed:
                _refuse(entry, self._failed[entry.key])
            elif entry.alive():
                alive.append(entry)
            else:
                self._fail(entry, error)
        return alive

    async def _split(self, batch: list[_Entry[Item, Answer]], error: Exception) -> None:
        """One entry is bad: halve the batch until it is alone (semantics 9). Nothing of its key may follow it."""
        if len(batch) == 1:
            self._fail(batch[0], error)
            return
        self._events.emit(FlushFailed(lane=self.name, entries=len(batch), error=str(error)))
        middle = len(batch) // 2
        await self._deliver(batch[:middle])
        later = batch[middle:]
        if self._ordered and self._failed:
            for entry in later:
                if entry.key in self._failed:
                    _refuse(entry, self._failed[entry.key])
            later = [entry for entry in later if entry.key not in self._failed]
        await self._deliver(later)

    def _fail(self, entry: _Entry[Item, Answer], error: BaseException) -> None:
        _refuse(entry, error)
        if not self._ordered:
            return
        self._failed[entry.key] = error
        for other in self._waiting:
            if other.key == entry.key:
                _refuse(other, error)
        self._waiting = [other for other in self._waiting if other.key != entry.key]


def _refuse(entry: _Entry[Item, Answer], error: BaseException) -> None:
    if not entry.future.done():
        entry.future.set_exception(error)


class Journal:
    """The two lanes of a worker: records and settles."""

    def __init__(self, store: Store, events: Events, turnstile: Turnstile) -> None:
        self._events = events
        self._records: Lane[tuple[Lease, NewRecord], Appended] = Lane(
            "append", store.append, events=events, turnstile=turnstile
        )
        self._settles: Lane[tuple[Lease, Outcome], Settled] = Lane(
            "settle", store.settle, events=events, turnstile=turnstile
        )

    async def append(self, holder: Holder, record: NewRecord) -> StepRecord:
        """Durable when it returns; a record that was there already is returned as stored (20). Raises LeaseLost."""
        lease = holder.lease
        try:
            answer = await self._records.put(
                lease.run_id, (lease, record), alive=holder.valid, weight=len(record.result)
            )
        except StoreUnavailable as error:
            holder.lose("the store did not answer until the lease had ended")
            raise LeaseLost(f"run {lease.run_id}: the store did not answer until the lease had ended") from error
        if answer.record is None:
            holder.lose("fenced out at an append")
            raise LeaseLost(f"run {lease.run_id}: another worker holds it now; {record.step_id} was not written")
        if not holder.valid():  # it is durable, but no step may start from here (14)
            holder.lose("it could not be renewed before it ended")
            raise LeaseLost(f"run {lease.run_id}: the lease ended while a record was written")
        if self._events.wanted:
            self._events.emit(
                StepRecorded(run_id=lease.run_id, step_id=record.step_id, kind=record.kind, position=record.position)
            )
        return answer.record

    async def settle(self, holder: Holder, outcome: Outcome) -> Settled:
        """The holder's only door out. No answer until the lease has ended counts as lost (5)."""
        lease = holder.lease
        try:
            return await self._settles.put(lease.run_id, (lease, outcome), alive=holder.valid)
        except StoreUnavailable:
            return "lost"  # reported by the lane; the sweep decides what became of the run

    def forget(self, run_id: str) -> None:
        """The run has left this worker."""
        self._records.forget(run_id)
        self._settles.forget(run_id)

    async def drain(self) -> None:
        """Wait until everything has its answer."""
        await self._records.drain()
        await self._settles.drain()

    async def close(self) -> None:
        """Give up what is still without an answer."""
        await self._records.close()
        await self._settles.close()
