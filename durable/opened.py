"""An opened store with what all views of one client share: the submit lane, the hub of waits, the codec, the events.

`Client` makes one and opens it in `async with`; `client.using(...)` gives views on the same one. It belongs to the event loop on which
it was opened. It knows no functions and no tenants.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from ._engine.journal import Lane
from .clock import boottime
from .codec import Codec
from .config import Config, open_store, redacted
from .errors import Misuse, StoreUnavailable
from .events import Events, RunsSubmitted
from .model import Instant, NewRun, Submitted
from .protocol import Store
from .settings import SECOND, Micros
from .waiting import Hub

T = TypeVar("T")

PATIENCE: Micros = 5 * SECOND
"""How long a call is repeated while the store gives no answer, before StoreUnavailable reaches the caller (42)."""
FIRST_PAUSE: Micros = 50_000


class Opened:
    """What the views of a client share."""

    def __init__(self, config: Config, *, clock: Callable[[], Instant] | None) -> None:
        self.config = config
        self.codec = Codec(config.settings.max_payload)
        self.events = Events()
        self._clock = clock
        self._store: Store | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entered = 0
        self._opening: asyncio.Lock | None = None
        self._hub: Hub | None = None
        self._submits: Lane[NewRun, Submitted] | None = None

    async def enter(self) -> None:
        """Open the store, once for all that enter."""
        loop = asyncio.get_running_loop()
        if self._entered and self._loop is not loop:
            raise self._foreign_loop()
        if self._loop is not loop:
            self._loop, self._opening = loop, asyncio.Lock()
        assert self._opening is not None
        async with self._opening:
            if self._store is None:
                store = await open_store(self.config, clock=self._clock)
                self._hub = Hub(store, poll=self.config.settings.poll)
                self._submits = Lane("enqueue", self._enqueue, events=self.events, ordered=False)
                self._store = store
            self._entered += 1

    async def leave(self) -> None:
        """Close the store when the last one leaves."""
        self._entered -= 1
        if self._entered or self._store is None:
            return
        store, hub, submits = self._store, self._hub, self._submits
        assert hub is not None
        assert submits is not None
        self._store = self._hub = self._submits = None
        try:
            await submits.close()
            await hub.close()
        finally:
            await store.close()

    @property
    def store(self) -> Store:
        """The store. Raises Misuse where it is not open, or open on another loop."""
        store = self._store
        if store is None:
            raise Misuse(
                f"the client for {redacted(self.config.url)} is not open",
                hint="use it inside `async with durable.Client(...) as client:` (an application opens it once, at its start)",
            )
        if asyncio.get_running_loop() is not self._loop:
            raise self._foreign_loop()
        return store

    @property
    def hub(self) -> Hub:
        """The waits."""
        self.store  # noqa: B018 -- raises where it is not open
        assert self._hub is not None
        return self._hub

    async def submit(self, run: NewRun) -> Submitted:
        """Store one run, in one write with others that are submitted meanwhile."""
        self.store  # noqa: B018 -- raises where it is not open
        assert self._submits is not None
        until = boottime() + PATIENCE
        return await self._submits.put(run.run_id, run, alive=lambda: boottime() < until, weight=len(run.input))

    async def repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call until there is an answer, for a while: every call of the contract may be repeated."""
        until = boottime() + PATIENCE
        pause = FIRST_PAUSE
        while True:
            try:
                return await call()
            except StoreUnavailable:
                if self._store is None or boottime() >= until:
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.0) / SECOND)
            pause = min(pause * 2, SECOND)

    async def _enqueue(self, runs: Sequence[NewRun]) -> Sequence[Submitted]:
        started = boottime()
        answers = await self.store.enqueue(runs)
        if self.events.wanted:
            self.events.emit(RunsSubmitted(count=len(answers), took=boottime() - started))
        return answers

    def _foreign_loop(self) -> Misuse:
        return Misuse(
            "this client was opened on another event loop",
            hint="open one client per event loop; from threads use durable.SyncClient",
        )


__all__ = ["Opened"]
