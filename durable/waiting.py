"""Waiting for runs: one hub per client, so that a thousand awaited handles cost one read and not a thousand polls.

Handles ask `landed` and `changed`; the hub waits on the runs' topics and, when one may have news or a poll interval has passed,
reads the pulse of all awaited runs at once. It only reads. Wake-ups are hints: a lost one costs a poll interval.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

from .clock import jittered
from .errors import NotFound, StoreUnavailable, WorkerStopped
from .model import Pulse, RunRecord, Scope
from .portal import end_tasks
from .protocol import Store
from .settings import SECOND, Micros

BATCH = 500
FEW = 4
"""So few runs are read at once, without a look at their pulse before: one way to the store less between a landing and its waiter."""
PER_RUN: Micros = 20
"""Pause between two reads for each awaited run: with thousands of them every commit would wake the hub."""
SHORTEST_PAUSE: Micros = 1_000
"""An event loop counts in milliseconds: a shorter pause would be none, and cost one."""
LONGEST_PAUSE: Micros = 250_000


@dataclasses.dataclass(eq=False, slots=True)
class _Wait:
    """One caller who waits for one run."""

    scope: Scope
    run_id: str
    before: Pulse | None
    """None: waits for the landing; else for any change of this."""
    future: asyncio.Future[RunRecord]


class Hub:
    """All waits of one client."""

    def __init__(self, store: Store, *, poll: Micros) -> None:
        self._store = store
        self._poll = poll
        self._waits: set[_Wait] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def landed(self, run_id: str, scope: Scope) -> RunRecord:
        """The run, as soon as it is terminal. Raises NotFound for one that is gone."""
        return await self._wait(run_id, scope, None)

    async def changed(self, run_id: str, scope: Scope, before: Pulse) -> RunRecord:
        """The run, as soon as its pulse is not `before` any more."""
        return await self._wait(run_id, scope, before)

    async def close(self) -> None:
        """End the waits: their callers get WorkerStopped."""
        self._closed = True
        if self._task is not None:
            await end_tasks([self._task])
        for wait in self._waits:
            _fail(wait, WorkerStopped("the client was closed while a run was awaited; the run itself goes on"))
        self._waits.clear()

    async def _wait(self, run_id: str, scope: Scope, before: Pulse | None) -> RunRecord:
        if self._closed:
            raise WorkerStopped("the client is closed")
        wait = _Wait(scope, run_id, before, asyncio.get_running_loop().create_future())
        self._waits.add(wait)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen(), name="durable waits")
        try:
            return await wait.future
        finally:
            self._waits.discard(wait)

    async def _listen(self) -> None:
        pause = 50_000
        waiting: asyncio.Future[Any] | None = None
        changed: asyncio.Future[Any] | None = None
        try:
            while self._waits:
                self._changed.clear()
                try:
                    topics = sorted({f"run:{wait.run_id}" for wait in self._waits})
                    waiting = asyncio.ensure_future(
                        self._store.wait(topics, jittered(self._poll, random=random.random()))
                    )
                    changed = asyncio.ensure_future(self._changed.wait())
                    await asyncio.sleep(0)  # the wait is registered before the look, so that nothing falls between
                    await self._look()
                    await asyncio.wait([waiting, changed], return_when=asyncio.FIRST_COMPLETED)
                    if waiting.done():
                        waiting.result()
                    pause = 50_000
                    if (rest := len(self._waits) * PER_RUN) >= SHORTEST_PAUSE:
                        await asyncio.sleep(min(rest, LONGEST_PAUSE) / SECOND)
                except StoreUnavailable:
                    # Whoever waits has set a limit, or wants to wait: the store may come back.
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0) / SECOND)
                    pause = min(pause * 2, SECOND)
                finally:
                    await _drop(waiting, changed)
        except Exception as error:  # noqa: BLE001 -- those who wait get it
            for wait in list(self._waits):
                _fail(wait, error)

    async def _look(self) -> None:
        by_scope: dict[Scope, list[_Wait]] = {}
        for wait in self._waits:
            by_scope.setdefault(wait.scope, []).append(wait)
        for scope, waits in by_scope.items():
            for start in range(0, len(waits), BATCH):
                await self._look_at(waits[start : start + BATCH], scope)

    async def _look_at(self, waits: list[_Wait], scope: Scope) -> None:
        if len(waits) <= FEW:
            await self._read(waits, scope)
            return
        pulses = await self._store.pulse([wait.run_id for wait in waits], scope=scope)
        ready: list[_Wait] = []
        for wait, pulse in zip(waits, pulses, strict=True):
            if pulse is None:
                _fail(wait, NotFound(f"run {wait.run_id} does not exist (any more)"))
            elif pulse.status.terminal if wait.before is None else pulse != wait.before:
                ready.append(wait)
        if ready:
            await self._read(ready, scope)

    async def _read(self, waits: list[_Wait], scope: Scope) -> None:
        records = await self._store.get([wait.run_id for wait in waits], scope=scope)
        for wait, record in zip(waits, records, strict=True):
            if record is None:
                _fail(wait, NotFound(f"run {wait.run_id} does not exist (any more)"))
            elif _has_news(wait, record) and not wait.future.done():
                wait.future.set_result(record)


def _has_news(wait: _Wait, record: RunRecord) -> bool:
    return record.status.terminal if wait.before is None else pulse_of(record) != wait.before


def pulse_of(record: RunRecord) -> Pulse:
    """What the hub would read now, for a record that is in hand."""
    return Pulse(
        run_id=record.run_id,
        status=record.status,
        attempts=record.attempts,
        wake_seq=record.wake_seq,
        updated_at=record.updated_at,
        progress=record.progress,
    )


def _fail(wait: _Wait, error: Exception) -> None:
    if not wait.future.done():
        wait.future.set_exception(error)


async def _drop(*futures: asyncio.Future[Any] | None) -> None:
    left: list[asyncio.Future[Any]] = []
    for future in futures:
        if future is not None and not future.done():
            future.cancel()
            left.append(future)
    if left:
        await asyncio.wait(left)


__all__ = ["Hub", "pulse_of"]
