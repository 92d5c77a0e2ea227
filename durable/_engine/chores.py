"""What every worker does beside its runs: promote, sweep, mend, purge, fire schedules. No leader; each is safe everywhere at once.

A `Chore` is a loop around one bounded call: it waits a jittered while, does its work until nothing is left, and survives every
error; repeated errors are reported and make the worker's health false. The store decides what is due; `Chores` only decides
when to ask. The worker is told which queues got work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable

from ..clock import boottime, jittered
from ..events import ChoreDone, ChoreFailed, Events, RunsReclaimed
from ..model import Instant, Scope
from ..portal import end_tasks
from ..protocol import Store
from ..settings import SECOND, Micros, Settings

UNHEALTHY_AFTER = 3
"""Errors in a row after which a chore makes the worker's health false."""
SOONEST: Micros = 1_000
MEND_BATCH = 100


class Chore:
    """One loop. `work` returns how long it may rest at the most; `nudge` ends a rest early."""

    def __init__(self, name: str, work: Callable[[], Awaitable[Micros]], *, events: Events) -> None:
        self.name = name
        self.failures = 0
        self._work = work
        self._events = events
        self._nudge = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """False after several errors in a row."""
        return self.failures < UNHEALTHY_AFTER

    def nudge(self) -> None:
        """There may be work now."""
        self._nudge.set()

    async def run(self, *, first: Micros) -> None:
        """Work and rest for ever. Ends by being cancelled only."""
        await self._rest(round(first * random.random()))
        while True:
            try:
                rest = await self._work()
            except Exception as error:  # noqa: BLE001 -- a chore outlives everything; it is reported and shows in the health
                self.failures += 1
                self._events.emit(
                    ChoreFailed(chore=self.name, error=f"{type(error).__name__}: {error}", in_a_row=self.failures)
                )
                rest = min(SECOND << min(self.failures, 5), 30 * SECOND)
                self._nudge.clear()
            else:
                self.failures = 0
            await self._rest(rest)

    async def _rest(self, length: Micros) -> None:
        try:
            async with asyncio.timeout(max(length, SOONEST) / SECOND):
                await self._nudge.wait()
        except TimeoutError:
            pass  # the usual end of a rest
        self._nudge.clear()


def _jittered(length: Micros) -> Micros:
    return jittered(length, random=random.random())


class Chores:
    """The loops of one worker."""

    def __init__(
        self,
        store: Store,
        *,
        scope: Scope,
        settings: Settings,
        lease: Micros,
        max_reclaims: int,
        events: Events,
        woken: Callable[[Iterable[str]], None],
        alone: Callable[[frozenset[str]], None],
        last_contact: Callable[[], Instant],
        fire: Callable[[], Awaitable[Micros]],
        look_after: Callable[[], Awaitable[Micros]],
    ) -> None:
        self._store = store
        self._scope = scope
        self._settings = settings
        self._lease = lease
        self._max_reclaims = max_reclaims
        self._events = events
        self._woken = woken
        self._alone = alone
        self._last_contact = last_contact
        self._cut_off_until: Instant = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.promote = Chore("promote", self._promote, events=events)
        self.sweep = Chore("sweep", self._sweep, events=events)
        self.mend = Chore("mend", self._mend, events=events)
        self.purge = Chore("purge", self._purge, events=events)
        self.schedules = Chore("schedules", fire, events=events)
        self.care = Chore("schedule care", look_after, events=events)
        self.all = (self.promote, self.sweep, self.mend, self.purge, self.schedules, self.care)

    @property
    def healthy(self) -> bool:
        """False while one of them fails again and again."""
        return all(chore.healthy for chore in self.all)

    def start(self) -> None:
        """Start the loops: promotion and sweep at once, what is heavy after a random while."""
        first = {self.purge: self._settings.purge_every, self.mend: self._lease // 4}
        self._tasks = [
            asyncio.create_task(chore.run(first=first.get(chore, 0)), name=f"durable {chore.name}")
            for chore in self.all
        ]

    async def stop(self) -> None:
        """End the loops; a call under way is left to end in the store."""
        await end_tasks(self._tasks)
        self._tasks = []

    # -- the work -------------------------------------------------------------------------------------------------------

    async def _promote(self) -> Micros:
        batch = self._settings.promote_batch
        while True:
            promoted = await self._store.promote(scope=self._scope, limit=batch)
            if promoted.count:
                self._events.emit(ChoreDone(chore="promote", count=promoted.count))
                self._woken(promoted.queues)
            if promoted.count < batch:
                break
        longest = _jittered(self._settings.poll)
        if promoted.next_due is None:
            return longest
        return max(SOONEST, min(longest, promoted.next_due - self._store.clock()))

    async def _sweep(self) -> Micros:
        rest = _jittered(self._lease // 4)
        now = boottime()
        if now - self._last_contact() > self._lease // 2:
            # This worker itself was cut off, and so perhaps was everybody: the others get one lease to renew first (15).
            self._cut_off_until = now + self._lease
        if now < self._cut_off_until:
            return rest
        while True:
            swept = await self._store.sweep(
                scope=self._scope, limit=self._settings.sweep_batch, max_reclaims=self._max_reclaims
            )
            if swept.returned or swept.failed:
                self._events.emit(RunsReclaimed(returned=tuple(swept.returned), failed=tuple(swept.failed)))
                self._woken(swept.queues)
            if len(swept.returned) + len(swept.failed) < self._settings.sweep_batch:
                break
        self._alone(swept.alone)
        return rest

    async def _mend(self) -> Micros:
        while True:
            count = await self._store.mend(scope=self._scope, limit=MEND_BATCH)
            if count:
                self._events.emit(ChoreDone(chore="mend", count=count))
            if count < MEND_BATCH:
                return _jittered(self._lease // 4)

    async def _purge(self) -> Micros:
        while True:
            count = await self._store.purge(scope=self._scope, limit=self._settings.purge_batch)
            if count:
                self._events.emit(ChoreDone(chore="purge", count=count))
            if count < self._settings.purge_batch:
                return _jittered(self._settings.purge_every)
            await asyncio.sleep(0.05)  # leave the store to others between two batches


__all__ = ["Chore", "Chores"]
