"""The claim loop of a worker: when to claim, how many, and what a claim begins.

The worker makes one `Claims` and runs its two loops. It claims ahead of need and in few, large calls; a claim whose answer was lost
is asked again with the same mark (semantics 8); a run that must be alone gets its room (15). What may be claimed is the store's
decision, and what becomes of a run is `runner.Running`'s.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence

from ..clock import boottime, jittered
from ..errors import StoreUnavailable
from ..events import ClaimFailed, EngineFault, RunClaimed
from ..function import Registry
from ..model import Claimed, ClaimRequest, Instant, Scope
from ..settings import MINUTE, SECOND, Micros
from .leases import Hold
from .runner import Host, Running
from .slots import Slots
from .turnstile import Turnstile

FIRST_PAUSE: Micros = 50_000
RECHECK: Micros = 100_000
"""A claim that found less than it asked for is repeated soon: a contended batch may return fewer while work remains (8)."""
GATHER: Micros = 50_000
"""Few free slots are gathered for this long after a claim, so that claims are few and large; then they are filled all the same: beside
bodies that run for hours no slot stays empty while there is work."""
WHEN_FULL: Micros = 2_000
"""Pause between two wake-ups while there is no free slot: one is as good as many."""


class Claims:
    """What one worker claims and holds. On its loop."""

    def __init__(
        self,
        host: Host,
        *,
        worker_id: str,
        scope: Scope,
        family: str,
        registry: Registry,
        queues: Mapping[str, int | None],
        grace: Micros,
        turnstile: Turnstile,
    ) -> None:
        self.held: dict[str, Running] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._host = host
        self._worker_id = worker_id
        self._scope = scope
        self._family = family
        self._registry = registry
        self._functions = tuple((function.name, function.version) for function in registry)
        self._queues = queues
        self._grace = grace
        self._turnstile = turnstile
        self._own_slots = {
            name: Slots(limit, self._own_slot_freed) for name, limit in queues.items() if limit is not None
        }
        self._alone: set[Running] = set()  # taken alone, and no record made yet
        self._count = 0
        self._hungry = True  # there may be more than the last claim brought
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._last_work = boottime()
        self._last_claim: Instant = 0
        self._gathering: asyncio.TimerHandle | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self._room_for_alone_until: Instant = 0
        self._no_room_for_alone_before: Instant = 0

    async def run(self) -> None:
        """Claim until `stop`."""
        while not self._stopping.is_set():
            self._wake.clear()
            room = self._room()
            if not (self._hungry and room > 0):
                await self._wake.wait()
                continue
            self._hungry = False  # before the claim: news that comes meanwhile counts
            found = await self._claim(room)
            if found:
                self._last_work = boottime()
            if found >= room:
                self._hungry = True
            elif found:
                if self._recheck is not None:  # this claim was it
                    self._recheck.cancel()
                self._recheck = asyncio.get_running_loop().call_later(RECHECK / SECOND, self._news)

    def stop(self) -> None:
        """Claim nothing more; a claim under way is still begun, so that none of its runs is lost."""
        self._stopping.set()
        self._wake.set()

    async def listen(self) -> None:
        """Wake the claim loop by the queues' topics, and once per poll interval whatever happens."""
        topics = [f"queue:{name}" for name in self._queues]
        settings = self._host.settings
        pause = FIRST_PAUSE
        while True:
            idle = boottime() - self._last_work > MINUTE
            poll = jittered(settings.poll_idle if idle else settings.poll, random=random.random())
            try:
                await self._host.store.wait(topics, poll)
                pause = FIRST_PAUSE
            except Exception as error:  # noqa: BLE001 -- it costs a wake-up: the claim below is the poll
                self._host.events.emit(ClaimFailed(error=f"waiting for wake-ups: {type(error).__name__}: {error}"))
                await asyncio.sleep(pause / SECOND)
                pause = min(pause * 2, SECOND)
            self._news()
            if self._host.slots.free <= 0:
                await asyncio.sleep(WHEN_FULL / SECOND)

    # -- wake-ups ---------------------------------------------------------------------------------------------------------

    def slot_freed(self) -> None:
        """A body ended or came to rest."""
        if self._hungry and not self._wake.is_set() and self._room() > 0:
            self._wake.set()

    def _own_slot_freed(self) -> None:
        self._hungry = True  # the queue's own limit may have held others back; the worker's slot is given back next

    def queues_woken(self, queues: Iterable[str]) -> None:
        """Runs of these queues became claimable."""
        if any(name in self._queues for name in queues):
            self._news()

    def alone_waits(self, queues: frozenset[str]) -> None:
        """Some run must be taken alone: claim nothing for a grace period, so that this worker becomes empty (15)."""
        now = boottime()
        if self.held and now >= self._no_room_for_alone_before and any(name in self._queues for name in queues):
            self._room_for_alone_until = now + self._grace
            self._no_room_for_alone_before = now + 3 * self._grace
            asyncio.get_running_loop().call_later(self._grace / SECOND, self._news)

    def no_longer_alone(self, running: Running) -> None:
        """A run that was taken alone makes a record: others may be claimed beside it."""
        self._alone.discard(running)
        self._news()

    def _news(self) -> None:
        self._hungry = True
        self._wake.set()

    # -- claiming ---------------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """How many runs to ask for now. Less than a quarter of the slots is left to grow for a moment, and no claim takes more than half
        of them: runs that begin together write together, and while the store is busy with one half the loop is with the other."""
        slots = self._host.slots
        free = slots.free
        if free <= 0:
            return 0
        if self.held:
            now = boottime()
            if self._alone or now < self._room_for_alone_until:
                return 0
            if free < max(1, slots.limit // 4) and (left := self._last_claim + GATHER - now) > 0:
                if self._gathering is None:
                    self._gathering = asyncio.get_running_loop().call_later(left / SECOND, self._gathered)
                return 0
        return min(free, max(1, slots.limit // 2))

    def _gathered(self) -> None:
        self._gathering = None
        self._wake.set()

    async def _claim(self, room: int) -> int:
        queues: dict[str, int] = {}
        for name in self._queues:
            own = self._own_slots.get(name)
            left = room if own is None else min(room, own.free)
            if left > 0:
                queues[name] = left
        if not queues:
            return 0
        self._count += 1
        request = ClaimRequest(
            mark=f"{self._worker_id}:{self._count}",
            queues=queues,
            functions=self._functions,
            limit=room,
            lease=self._host.lease,
            family=self._family,
            scope=self._scope,
            alone=not self.held,
        )
        self._last_claim = sent = boottime()
        claimed = await self._ask(request, sent)
        if claimed:
            await self._turnstile.passed()
        if not self.held:
            self._room_for_alone_until = 0
        for one in claimed:
            self._begin(one, sent)
        return len(claimed)

    async def _ask(self, request: ClaimRequest, sent: Instant) -> Sequence[Claimed]:
        """A claim whose answer was lost is asked again with the same mark and returns what it holds (8)."""
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._host.store.claim(request)
            except Exception as error:  # noqa: BLE001 -- reported; what it may hold comes back when the lease has lapsed
                self._host.events.emit(ClaimFailed(error=f"{type(error).__name__}: {error}"))
                unanswered = isinstance(error, StoreUnavailable)
            self._hungry = True
            await self._pause(pause if unanswered else SECOND)
            pause = min(pause * 2, SECOND)
            if not unanswered or self._stopping.is_set() or boottime() - sent > self._host.lease // 2:
                return ()

    async def _pause(self, length: Micros) -> None:
        try:
            async with asyncio.timeout(length * random.uniform(0.5, 1.0) / SECOND):
                await self._stopping.wait()
        except TimeoutError:
            pass  # the usual end

    def _begin(self, claimed: Claimed, sent: Instant) -> None:
        host, run = self._host, claimed.run
        function = self._registry.get(run.name, run.version)
        if function is None:  # a defect of the store; the sweep returns the run
            host.events.emit(
                EngineFault(where=f"run {run.run_id}", error=f"{run.name} {run.version} was not asked for")
            )
            return
        hold = Hold(claimed.lease, sent=sent, length=host.lease, wake_seq=run.wake_seq)
        host.leases.add(hold)
        own = self._own_slots.get(run.queue)
        slots = (host.slots,) if own is None else (own, host.slots)
        for held in slots:
            held.occupy()
        running = Running(host, claimed, function, hold, slots)
        self.held[run.run_id] = running
        if running.alone:
            self._alone.add(running)
        if host.events.wanted:
            host.events.emit(
                RunClaimed(
                    run_id=run.run_id,
                    name=run.name,
                    tenant=run.tenant,
                    queue=run.queue,
                    attempts=run.attempts,
                    records=len(claimed.history),
                )
            )
        task = asyncio.get_running_loop().create_task(running.run())
        self.tasks.add(task)
        task.add_done_callback(lambda done: self._over(running, done))

    def _over(self, running: Running, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        run = running.claimed.run
        if self.held.get(run.run_id) is running:
            del self.held[run.run_id]
        self._alone.discard(running)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._host.events.emit(EngineFault(where=f"run {run.run_id}", error=f"{type(error).__name__}: {error}"))
        self.slot_freed()


__all__ = ["Claims"]
