"""A rehearsal: today's code replays a stored journal and writes nothing (semantics 25). What it finds is what a deploy would meet.

`durable replay` calls it. The body runs to the end of its journal; there no step is begun, nothing is appended and nothing from
outside is read, so it needs no lease and disturbs no worker. It never touches the store: run and journal are arguments.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..activation import Activation
from ..codec import Codec
from ..errors import LeaseLost
from ..model import Claimed, Inbox, Instant, Json, Lease, NewRecord, RunRecord, Status, StepRecord
from ..replay import BadPayload, Ending, Mismatch, MisuseEnding, Program, Raised, Rest, Spinning, Stuck
from ..settings import Settings

LONGEST = 60.0
"""Seconds that one rehearsal may take: a `def` body that computes for ever can not be stopped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rehearsed:
    """What came of one rehearsal. `problem` is None where the code fits the journal."""

    run: RunRecord
    records: int
    problem: str | None


class _ReadOnly:
    """A recorder (`replay.Recorder`) that refuses: a body that asks it has come to the end of its journal."""

    def __init__(self, codec: Codec, settings: Settings, now: Instant) -> None:
        self.codec = codec
        self.settings = settings
        self._now = now
        self.rested = asyncio.Event()

    def clock(self) -> Instant:
        return self._now

    def held(self) -> bool:
        return False

    async def append(self, record: NewRecord) -> StepRecord:
        raise LeaseLost("a rehearsal writes nothing")

    async def transaction(self, work: Callable[[Any], Awaitable[NewRecord]], timeout: int) -> StepRecord:
        raise LeaseLost("a rehearsal writes nothing")

    async def inbox(self) -> Inbox:
        raise LeaseLost("a rehearsal reads nothing from outside")

    async def look(self, run_id: str) -> RunRecord | None:
        raise LeaseLost("a rehearsal begins no step")

    def progress(self, progress: Json) -> None:
        """Not written."""

    def run_blocking(self, call: Callable[[], Any]) -> Awaitable[Any]:
        raise LeaseLost("a rehearsal begins no step")

    def give_slot(self, rest: Rest) -> None:
        self.rested.set()

    async def take_slot(self) -> None:
        raise LeaseLost("a rehearsal does not go on")


async def rehearse(
    program: Program, run: RunRecord, history: Sequence[StepRecord], *, codec: Codec, settings: Settings, now: Instant
) -> Rehearsed:
    """Replay one journal with this code. Raises TimeoutError for a body that does not come to the end of it in a minute."""
    recorder = _ReadOnly(codec, settings, now)
    lease = Lease(run_id=run.run_id, tenant=run.tenant, attempts=run.attempts, mark="rehearsal")
    activation = Activation(program, Claimed(lease=lease, run=run, history=tuple(history)), recorder)
    rested = asyncio.ensure_future(recorder.rested.wait())
    running = asyncio.ensure_future(activation.run())
    try:
        async with asyncio.timeout(LONGEST):
            await asyncio.wait({rested, running}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await activation.set_aside()
            ending = await running
    finally:
        rested.cancel()
        running.cancel()
    return Rehearsed(run, len(history), _problem(ending, run))


def _problem(ending: Ending, run: RunRecord) -> str | None:
    match ending:
        case Mismatch(error=error):
            return error.message
        case BadPayload(error=error):
            return f"a value does not fit its type any more: {error}"
        case MisuseEnding(error=error) | Spinning(error=error) | Stuck(error=error) if run.status is not Status.FAILED:
            return str(error)
        case Raised(error=error) if run.status is Status.COMPLETED or not (run.status.terminal or run.failures):
            return f"the code raises before it comes to the end of the journal: {type(error).__name__}: {error}"
        case _:
            return None


__all__ = ["Rehearsed", "rehearse"]
