"""Learns of signals, ends of children and cancel asks for the runs in hand, without waiting for the next renewal.

The worker runs one `RunListener`. It waits on the topics of runs that rest for something from outside, and looks at the wake
counters of all runs that have been in hand for a while once per poll interval: what a lost wake-up costs (semantics 44, 67). It
reads only; a run is told through its `Running`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..clock import boottime, jittered
from ..errors import LeaseLost, StoreUnavailable
from ..events import ChoreFailed, Events
from ..model import Scope
from ..protocol import Store
from ..replay import Rest
from ..settings import SECOND, Micros
from .runner import Running

SETTLE_DOWN: Micros = 5_000
"""Runs that come to rest one after another are gathered before the topics are waited for anew."""
YOUNG: Micros = 500_000
"""Runs in hand for less than this are not looked at: most have left by then."""
PULSE_BATCH = 500


class RunListener:
    """News for the runs in hand. On the worker's loop."""

    def __init__(
        self, store: Store, *, scope: Scope, poll: Micros, events: Events, held: Callable[[], Iterable[Running]]
    ) -> None:
        self._store = store
        self._scope = scope
        self._poll = poll
        self._events = events
        self._held = held
        self._expectant: dict[str, Running] = {}
        self._changed = asyncio.Event()
        self._failures = 0

    def rests(self, running: Running, rest: Rest | None) -> None:
        """A run came to rest, or goes on."""
        run_id = running.hold.lease.run_id
        if rest is not None and waits_for_others(rest):
            self._expectant[run_id] = running
            self._changed.set()
        else:
            self._expectant.pop(run_id, None)  # its topic stays in the wait under way: a needless wake-up is harmless

    async def run(self) -> None:
        """Listen for ever; ends by being cancelled."""
        looked_at_all = boottime()
        while True:
            self._changed.clear()
            try:
                await self._wait()
                # The topics are waited for anew before the look, so that nothing falls between.
                if boottime() - looked_at_all >= self._poll // 2:
                    looked_at_all = boottime()
                    await self._look(self._grown_up())
                await self._look(list(self._expectant.values()))
            except Exception as error:  # noqa: BLE001 -- it costs a wake-up, never a run
                self._failures += 1
                self._events.emit(
                    ChoreFailed(chore="listen", error=f"{type(error).__name__}: {error}", in_a_row=self._failures)
                )
                await asyncio.sleep(min(self._failures, 10) * 0.1)
            else:
                self._failures = 0

    def _grown_up(self) -> Sequence[Running]:
        born = boottime() - YOUNG
        return [running for running in self._held() if running.since <= born]

    async def _wait(self) -> None:
        poll = jittered(self._poll, random=random.random())
        topics = [f"run:{run_id}" for run_id in self._expectant]
        changed = asyncio.ensure_future(self._changed.wait())
        waits: list[asyncio.Future[Any]] = [changed]
        if topics:
            waits.append(asyncio.ensure_future(self._store.wait(topics, poll)))
        try:
            done, _ = await asyncio.wait(waits, timeout=poll / SECOND, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()
            if changed in done:
                await asyncio.sleep(SETTLE_DOWN / SECOND)
        finally:
            for future in waits:
                future.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _look(self, runs: Sequence[Running]) -> None:
        for start in range(0, len(runs), PULSE_BATCH):
            part = runs[start : start + PULSE_BATCH]
            pulses = await self._store.pulse([running.hold.lease.run_id for running in part], scope=self._scope)
            behind = [
                running
                for running, pulse in zip(part, pulses, strict=True)
                if pulse is not None and pulse.wake_seq > running.hold.wake_seq
            ]
            if behind:
                await asyncio.gather(*(self._tell(running) for running in behind))

    async def _tell(self, running: Running) -> None:
        try:
            await running.inbox()  # finds out about an ask, and notes the wake counter
        except (LeaseLost, StoreUnavailable) as error:
            running.hold.lose(error.message)
            return
        running.news()


def waits_for_others(rest: Rest) -> bool:
    """Does the run wait for a signal or a child, and not only for a time?"""
    waiting = json.loads(rest.waiting_for)
    return bool(waiting.get("signals") or waiting.get("children"))


__all__ = ["RunListener", "waits_for_others"]
