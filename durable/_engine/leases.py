"""Keeps the leases of a worker: renews all of them in one call every third of a lease, and knows which may still be trusted.

The worker starts `Leases.run` on a thread with a loop of its own, so that a body that blocks the worker's loop does not lose
its neighbours' leases (semantics 13). A lease that the store calls lost is given up at once; an error or `unknown` proves
nothing and is asked again soon; one that could not be renewed in time by the clock that counts suspend is given up then (14).
The registry row of the worker is refreshed beside (17). Nothing here touches a body: a hold tells its listener, on the worker's
loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ..clock import boottime
from ..events import ChoreFailed, Events, RenewalFailed
from ..model import Instant, Json, Lease, Renewal, Renewed
from ..portal import end_tasks
from ..protocol import Store
from ..settings import SECOND, Micros

FIRST_PAUSE: Micros = 50_000
LONGEST_PAUSE: Micros = SECOND


class Listener(Protocol):
    """Who runs the body of a hold. Called on the worker's loop."""

    def lease_lost(self, why: str) -> None: ...

    def news(self) -> None: ...

    def cancel_asked(self) -> None: ...


class Hold:
    """One lease in hand. `valid()` may be asked from any thread; the rest belongs to the worker's loop."""

    __slots__ = ("cancel_seen", "gone", "lease", "listener", "progress", "valid_until", "wake_seq")

    def __init__(self, lease: Lease, *, sent: Instant, length: Micros, wake_seq: int) -> None:
        self.lease = lease
        self.valid_until = sent + length
        self.wake_seq = wake_seq
        self.cancel_seen = False
        self.progress: Json | None = None
        self.gone: str | None = None
        self.listener: Listener | None = None

    def valid(self) -> bool:
        """May this worker still act for the run? Past this no step starts and nothing is written (14)."""
        return self.gone is None and boottime() < self.valid_until

    def lose(self, why: str) -> None:
        """Give it up, once. On the worker's loop."""
        if self.gone is None:
            self.gone = why
            self._tell_lost(why)

    def _tell_lost(self, why: str) -> None:
        if self.listener is not None:
            self.listener.lease_lost(why)

    def _tell_news(self, cancel: bool) -> None:
        if self.listener is None or self.gone is not None:
            return
        if cancel:
            self.listener.cancel_asked()
        else:
            self.listener.news()


class Leases:
    """All holds of one worker."""

    def __init__(
        self,
        store: Store,
        *,
        lease: Micros,
        events: Events,
        register: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._lease = lease
        self._events = events
        self._register = register
        self._home = asyncio.get_running_loop()
        self._holds: dict[str, Hold] = {}
        self._thread_loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stopped = False
        self.last_contact = boottime()
        """When the store last answered a renewal or a registration: a worker that was cut off sweeps a lease later (15)."""

    def add(self, hold: Hold) -> None:
        """Keep this lease from now on. On the worker's loop."""
        self._holds[hold.lease.run_id] = hold

    def remove(self, hold: Hold) -> None:
        """The run has left this worker."""
        if self._holds.get(hold.lease.run_id) is hold:
            del self._holds[hold.lease.run_id]

    def __len__(self) -> int:
        return len(self._holds)

    # -- on the thread's loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Renew and watch until `stop`. On a thread of its own."""
        self._thread_loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        if self._stopped:  # before this thread came to it
            return
        loops = [asyncio.ensure_future(work) for work in (self._renewing(), self._watching(), self._registering())]
        try:
            await self._stop.wait()
        finally:
            await end_tasks(loops)

    def stop(self) -> None:
        """End `run`, also if it has not begun yet. From any thread."""
        self._stopped = True
        loop, stop = self._thread_loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    async def _renewing(self) -> None:
        third = self._lease // 3
        pause = third
        back_off = FIRST_PAUSE
        again: Sequence[Hold] | None = None
        while True:
            await asyncio.sleep(pause / SECOND)
            holds = [hold for hold in again or list(self._holds.values()) if hold.gone is None]
            again = await self._renew(holds) if holds else None
            if again:  # no answer, or `unknown`: asked again soon, and only those
                pause, back_off = round(back_off * random.uniform(0.5, 1.0)), min(back_off * 2, LONGEST_PAUSE)
                again = [hold for hold in again if self._holds.get(hold.lease.run_id) is hold]
            else:
                pause, back_off = round(third * random.uniform(0.8, 1.0)), FIRST_PAUSE

    async def _renew(self, holds: Sequence[Hold]) -> Sequence[Hold]:
        """One call for all. Returns those that have no answer yet."""
        sent = boottime()
        progress = [hold.progress for hold in holds]
        try:
            answers = await self._store.renew(
                [Renewal(lease=hold.lease, progress=text) for hold, text in zip(holds, progress, strict=True)],
                lease=self._lease,
            )
        except Exception as error:  # noqa: BLE001 -- whatever it was, it proves nothing about a lease (14)
            self._events.emit(RenewalFailed(held=len(holds), error=str(error)))
            return holds
        self.last_contact = boottime()
        unknown: list[Hold] = []
        for hold, answer, text in zip(holds, answers, progress, strict=True):
            if answer.state == "unknown":
                unknown.append(hold)
                continue
            if self._holds.get(hold.lease.run_id) is not hold:
                continue  # settled meanwhile: `lost` only means that it is not running any more
            if answer.state == "lost":
                self._give_up(hold, "the store says that another worker holds it, or that it has landed")
                continue
            hold.valid_until = max(hold.valid_until, sent + self._lease)
            if hold.progress is text:
                hold.progress = None
            self._pass_news(hold, answer)
        return unknown

    def _pass_news(self, hold: Hold, answer: Renewed) -> None:
        if answer.cancel_requested and not hold.cancel_seen:
            hold.cancel_seen = True
            self._tell(hold._tell_news, True)
        if answer.wake_seq > hold.wake_seq:
            hold.wake_seq = answer.wake_seq
            self._tell(hold._tell_news, False)

    async def _watching(self) -> None:
        """Give up what could not be renewed in time, also while a renewal hangs (14)."""
        longest = max(self._lease // 10, 10_000)
        pause = longest
        while True:
            await asyncio.sleep(pause / SECOND)
            now = boottime()
            pause = longest
            for hold in list(self._holds.values()):
                if hold.gone is not None:
                    continue
                left = hold.valid_until - now
                if left <= 0:
                    self._give_up(hold, "it could not be renewed before it ended")
                elif left < pause:
                    pause = left

    async def _registering(self) -> None:
        """Refresh the worker's row (17)."""
        failures = 0
        pause = self._lease // 3
        while True:
            await asyncio.sleep(pause / SECOND)
            try:
                await self._register()
            except Exception as error:  # noqa: BLE001 -- reported, and tried again
                failures += 1
                self._events.emit(ChoreFailed(chore="register", error=str(error), in_a_row=failures))
            else:
                failures = 0
                self.last_contact = boottime()

    def _give_up(self, hold: Hold, why: str) -> None:
        if hold.gone is None:
            hold.gone = (
                why  # at once and from this thread: no step starts any more, even if the worker's loop is blocked
            )
            self._tell(hold._tell_lost, why)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        if not self._home.is_closed():
            self._home.call_soon_threadsafe(callback, *arguments)


__all__ = ["Hold", "Leases", "Listener"]
