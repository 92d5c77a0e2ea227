"""The worker: claims runs as it has slots, runs each in one task, keeps their leases, does its chores, and stops in good order.

Users make one with a client and call `run()` (a process of its own: SIGTERM and SIGINT drain) or use it in `async with` (embedded
in an application). It decides when to claim and how many; what may be claimed is the store's decision. It never executes a body:
that is `runner.Running`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, Self

from ..clock import boottime
from ..codec import Codec
from ..errors import ConfigurationError, StoreUnavailable
from ..events import EngineFault, Events, WorkerDraining, WorkerStarted, WorkerStopped
from ..function import Function, Registry, default_registry
from ..model import ALL, Inbox, Instant, Lease, Scope, WorkerRecord
from ..portal import Portal, end_tasks
from ..protocol import Store
from ..replay import Rest
from ..settings import SECOND, Duration, Micros, Settings, micros
from .awaited import awaited
from .chores import Chores
from .claiming import Claims
from .journal import Journal, Lane
from .leases import Leases
from .listening import RunListener
from .runner import TEARDOWN_LIMIT, Running
from .scheduler import Scheduling
from .slots import Slots, Threads
from .turnstile import Turnstile

REPLAY_FAMILY: Final = "3.11" if sys.version_info < (3, 12) else "3.12"
"""Interpreters of one family order the branches of a body alike; a run with records stays inside its family (replay rules)."""


class Home(Protocol):
    """What a worker needs from the client that it is made with."""

    @property
    def store(self) -> Store: ...
    @property
    def serves(self) -> Scope: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def events(self) -> Events: ...


class Worker:
    """Executes runs of the functions that this process knows.

    `queues`: names, or names with the most runs of each at once (None: no limit of its own). `functions`: all that are declared,
    unless given. `lease`: how long a crash of this worker goes unnoticed; `grace`: how long bodies may go on after a stop was
    asked for; `max_reclaims`: after how many crashes in a row a run lands failed. Unset ones are taken from the client's settings.
    """

    def __init__(
        self,
        client: Home,
        *,
        queues: Sequence[str] | Mapping[str, int | None] = ("default",),
        concurrency: int | None = None,
        functions: Iterable[Function[..., Any]] | None = None,
        lease: Duration | None = None,
        grace: Duration | None = None,
        max_reclaims: int | None = None,
    ) -> None:
        self._home = client
        self._queue_limits = _queue_limits(queues)
        self._concurrency = concurrency
        self._given_functions = list(functions) if functions is not None else None
        self._lease = None if lease is None else micros(lease, what="lease")
        self._grace = None if grace is None else micros(grace, what="grace")
        self._max_reclaims = max_reclaims
        for name, value in (("concurrency", concurrency), ("max_reclaims", max_reclaims)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{name}: {value!r} is not a positive whole number")
        if self._lease is not None and self._lease < SECOND // 2:
            raise ConfigurationError("a lease shorter than half a second can not be renewed in time")
        self.worker_id = uuid.uuid4().hex
        self.draining = False
        self.ended = False
        self._asked, self._hurry = asyncio.Event(), asyncio.Event()
        self._started = False
        self._stopped = False

    # -- the life of a worker -------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def run(self) -> None:
        """Work until SIGTERM, SIGINT or `stop()`, then drain and return. A second signal ends the grace period at once."""
        restore = self._catch_signals()  # first of all: a signal that comes while it starts asks for the same
        try:
            if await self._started_before_hurry():
                await self._until_asked()
        finally:
            restore()

    async def _started_before_hurry(self) -> bool:
        """Start. False: a second signal came first (a store that does not answer); nothing is held yet."""
        starting = asyncio.ensure_future(self._start())
        hurried = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait([starting, hurried], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                return True
            return False
        finally:
            hurried.cancel()
            if starting.cancel():
                await asyncio.wait([starting])

    async def _until_asked(self) -> None:
        ended = asyncio.ensure_future(self._asked.wait())
        try:
            waits: list[asyncio.Future[Any]] = [ended, self._crashed]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            await self.stop()
        if self._crashed.done():
            self._crashed.result()

    def ask_to_stop(self) -> None:
        """What a signal does: the first asks for a drain, the second ends the grace period. On the worker's loop."""
        if self._asked.is_set():
            self._hurry.set()
        self._asked.set()

    @property
    def healthy(self) -> bool:
        """False when the store has not answered for a lease, a chore fails again and again, or the claim loop has ended."""
        if not self._started or self._crashed.done():
            return False
        return self._chores.healthy and boottime() - self.leases.last_contact < self.lease

    @property
    def held(self) -> int:
        """Runs in hand, resting ones included."""
        return len(self._claims.held) if self._started else 0

    async def _start(self) -> None:
        if self._started:
            raise ConfigurationError("this worker has been started before", hint="make a new Worker")
        home = self._home
        store = self.store = home.store
        self._started = True
        self.settings, self.codec, self.events = home.settings, home.codec, home.events
        self.lease = self._lease if self._lease is not None else self.settings.lease
        self.max_reclaims = self._max_reclaims if self._max_reclaims is not None else self.settings.max_reclaims
        self._registry = Registry(f"worker {self.worker_id}")
        for function in default_registry if self._given_functions is None else self._given_functions:
            self._registry.add(function)
        self._own_functions = tuple(sorted({function.name for function in self._registry}))
        self._registry.add(awaited)
        loop = asyncio.get_running_loop()
        self._crashed: asyncio.Future[None] = loop.create_future()
        self._resting = 0
        limit = self._concurrency if self._concurrency is not None else self.settings.concurrency
        self.slots = Slots(limit, self._slot_freed)
        self._record = self._make_record()
        self.threads = Threads(limit, "durable-step")
        self.transactions = asyncio.Semaphore(self.settings.transaction_slots)
        turnstile = Turnstile()
        self.journal = Journal(store, self.events, turnstile)
        self.inboxes: Lane[Lease, Inbox | None] = Lane("inbox", store.inbox, events=self.events, ordered=False)
        self.leases = Leases(store, lease=self.lease, events=self.events, register=self._register)
        scheduling = Scheduling(
            store,
            scope=home.serves,
            events=self.events,
            settings=self.settings,
            codec=self.codec,
            functions=self._registry,
        )
        self._claims = Claims(
            self,
            worker_id=self.worker_id,
            scope=home.serves,
            family=REPLAY_FAMILY,
            registry=self._registry,
            queues=self._queue_limits,
            grace=self._grace if self._grace is not None else self.settings.grace,
            turnstile=turnstile,
        )
        self._chores = Chores(
            store,
            scope=home.serves,
            settings=self.settings,
            lease=self.lease,
            max_reclaims=self.max_reclaims,
            events=self.events,
            woken=self._claims.queues_woken,
            alone=self._claims.alone_waits,
            last_contact=lambda: self.leases.last_contact,
            fire=scheduling.fire,
            look_after=scheduling.look_after,
        )
        self._listener = RunListener(
            store,
            scope=home.serves,
            poll=self.settings.poll,
            events=self.events,
            held=lambda: list(self._claims.held.values()),
        )
        await self._register()
        try:
            await scheduling.declare()
        except BaseException:  # it does not work after all: nobody should wait for it
            await self._unregister()
            raise
        self._portal = Portal("durable-leases").start()
        self._renewing = self._portal.submit(self.leases.run)
        self._chores.start()
        self._claim_loop = loop.create_task(self._claims.run(), name="durable claims")
        self._loops = [
            loop.create_task(self._claims.listen(), name="durable queues"),
            loop.create_task(self._listener.run(), name="durable runs"),
        ]
        for task in (self._claim_loop, *self._loops):
            task.add_done_callback(self._loop_ended)
        self.events.emit(
            WorkerStarted(
                worker_id=self.worker_id,
                queues=tuple(self._queue_limits),
                functions=self._own_functions,
            )
        )

    async def stop(self) -> None:
        """Claim nothing more, let bodies finish within the grace period, hand the rest back, let go of everything (16)."""
        if not self._started or self._stopped:
            return
        self._stopped = True
        self.draining = True
        self._asked.set()
        self._claims.stop()
        self.events.emit(WorkerDraining(worker_id=self.worker_id, held=len(self._claims.held)))
        grace = self._grace if self._grace is not None else self.settings.grace
        handed_back = abandoned = 0
        try:
            await asyncio.wait([self._claim_loop])
            for running in list(self._claims.held.values()):
                running.suspend()
            await self._bodies_end(grace, self._hurry)
            self.ended = True
            left = list(self._claims.held.values())
            for running in left:
                running.set_aside("hand_back")
            await self._bodies_end(TEARDOWN_LIMIT + 2 * SECOND, None)
            for running in list(self._claims.held.values()):
                running.abandon("the worker stopped before it had ended")
            await self._bodies_end(SECOND, None)
            handed_back = sum(running.handed_back for running in left)
            abandoned = sum(running.abandoned for running in left)
        finally:
            await self._let_go()
        self.events.emit(WorkerStopped(worker_id=self.worker_id, handed_back=handed_back, abandoned=abandoned))

    async def _bodies_end(self, limit: Micros, hurry: asyncio.Event | None) -> None:
        """Wait until no body is left, for `limit` at the most, or until `hurry`."""
        until = boottime() + limit
        hurried = asyncio.ensure_future(hurry.wait()) if hurry is not None else None
        try:
            while self._claims.tasks and (left := until - boottime()) > 0:
                waits: set[asyncio.Future[Any]] = set(self._claims.tasks)
                if hurried is not None:
                    waits.add(hurried)
                await asyncio.wait(waits, timeout=left / SECOND, return_when=asyncio.FIRST_COMPLETED)
                if hurried is not None and hurried.done():
                    return
        finally:
            if hurried is not None:
                hurried.cancel()

    async def _let_go(self) -> None:
        await self._chores.stop()
        await end_tasks([self._claim_loop, *self._loops])
        await self.inboxes.close()
        await self.journal.close()
        self.leases.stop()
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._renewing), 5)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            self.events.emit(EngineFault(where="leases", error=f"the renewals did not end: {error!r}"))
        await asyncio.to_thread(self._portal.close)
        self.threads.close()
        await self._unregister()

    def _catch_signals(self) -> Callable[[], None]:
        """SIGTERM and SIGINT ask to stop. Returns what puts the old handlers back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        loop = asyncio.get_running_loop()

        def asked(_number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self.ask_to_stop)

        before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """A loop of ours ended by an error: a defect. `run()` raises it; in `async with` the health shows it."""
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        assert error is not None
        self.events.emit(EngineFault(where=task.get_name(), error=f"{type(error).__name__}: {error}"))
        if not self._crashed.done():
            self._crashed.set_exception(error)
            self._crashed.exception()  # seen: it is raised by run(), and shown by `healthy`

    # -- what a running body asks for (Host) --------------------------------------------------------------------------------

    def rests(self, running: Running, rest: Rest | None) -> bool:
        """The run came to rest, or goes on. True: let it leave memory at once (30)."""
        self._resting += 1 if rest is not None else -1
        self._listener.rests(running, rest)
        return rest is not None and (self.draining or self._resting > self.settings.max_parked)

    def _slot_freed(self) -> None:
        self._claims.slot_freed()

    def recorded(self, running: Running) -> None:
        """A run that was taken alone makes a record: others may be claimed beside it."""
        self._claims.no_longer_alone(running)

    def due(self, instant: Instant) -> None:
        """The promotion should look then."""
        delay = max(0, instant - self.store.clock())
        if delay < self.settings.poll:
            asyncio.get_running_loop().call_later((delay + 500) / SECOND, self._chores.promote.nudge)

    # -- the registry -----------------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        await self.store.register(self._record)

    async def _unregister(self) -> None:
        try:
            await self.store.unregister(self.worker_id)
        except StoreUnavailable as error:
            self.events.emit(EngineFault(where="unregister", error=str(error)))  # the row is deleted after a day

    def _make_record(self) -> WorkerRecord:
        serves = self._home.serves
        limit = self.slots.limit
        return WorkerRecord(
            worker_id=self.worker_id,
            tenant=serves if isinstance(serves, uuid.UUID) else None,
            bound=serves is not ALL,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues={name: limit if own is None else own for name, own in self._queue_limits.items()},
            functions=tuple((function.name, function.version) for function in self._registry),
            family=REPLAY_FAMILY,
            settings=json.dumps(
                {
                    "lease": self.lease,
                    "concurrency": limit,
                    "max_reclaims": self.max_reclaims,
                    "mismatch_limit": self.settings.mismatch_limit,
                    "transaction_slots": self.settings.transaction_slots,
                }
            ),
        )


def _queue_limits(queues: Sequence[str] | Mapping[str, int | None]) -> dict[str, int | None]:
    """Each queue with the most runs of it at once; None: as many as there are slots."""
    if isinstance(queues, str) or not queues:
        raise ConfigurationError(
            f"queues: {queues!r} is not a list of names", hint='pass a list, such as queues=["default", "images"]'
        )
    if not isinstance(queues, Mapping):
        return dict.fromkeys(queues, None)
    for name, limit in queues.items():
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ConfigurationError(f"queues: the limit of {name!r} is {limit!r}, not a positive whole number")
    return dict(queues)


__all__ = ["REPLAY_FAMILY", "Home", "Worker"]
