"""A small stage for one run: an in-memory recorder that is durable at once, and a clock that jumps when the run rests.

The tests of contexts and hazards play bodies on it, from an empty journal or from one that they give it. `simulation` is the
other one, with slow and unordered commits, for the fuzzer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from replay.simulation import STARTED, run_record

from durable.activation import Activation
from durable.codec import Codec
from durable.function import Function, Registry, function
from durable.model import Claimed, Inbox, Lease, NewRecord, RunRecord, Signal, StepRecord
from durable.replay import Ending, Raised, Rest, Returned
from durable.settings import SECOND, Settings

LEASE = Lease(run_id="r", tenant=None, attempts=1, mark="m")


@dataclasses.dataclass
class Played:
    """What came of one activation after another."""

    ending: Ending
    records: tuple[StepRecord, ...]
    stage: Stage

    @property
    def ids(self) -> list[str]:
        """The step ids by position, attempt rows last."""
        return [record.step_id for record in self.records]

    @property
    def value(self) -> Any:
        """What the body returned; its error is raised."""
        if isinstance(self.ending, Raised):
            raise self.ending.error
        assert isinstance(self.ending, Returned), self.ending
        return self.stage.codec.decode(self.ending.output)

    def __iter__(self) -> Any:
        return iter((self.ending, self.records))


class Stage:
    """The recorder (`replay.Recorder`) of one run, and its world."""

    def __init__(
        self, *, settings: Settings = Settings(), seed: bytes = b"0123456789abcdef", park: bool = False
    ) -> None:
        self.settings = settings
        self.codec = Codec(settings.max_payload)
        self.seed = seed
        self.now = STARTED
        self.park = park
        """True: a run that rests is suspended and activated again from its journal; False: it stays in memory."""
        self.signals: list[Signal] = []
        self.records: list[StepRecord] = []
        self.progressed: list[str] = []
        self.rests: list[Rest] = []
        self.slots: list[str] = []
        self.activation: Activation | None = None
        self.on_append: Callable[[NewRecord], Awaitable[None]] | None = None
        self.conflicts = 0
        """How often a transaction meets another one at its commit, is rolled back and called again."""
        self.on_conflict: Callable[[], Awaitable[None]] | None = None
        self.frozen = False
        """True: nothing wakes a run at rest."""

    # -- the recorder -----------------------------------------------------------------------------------------------------

    def clock(self) -> int:
        return self.now

    async def append(self, record: NewRecord) -> StepRecord:
        if self.on_append is not None:
            await self.on_append(record)
        known = next((one for one in self.records if one.step_id == record.step_id), None)
        return known or self._keep(record)

    def _keep(self, record: NewRecord) -> StepRecord:
        self.now = max(self.now + 1, record.floor)
        stored = StepRecord(
            step_id=record.step_id,
            kind=record.kind,
            position=record.position,
            seen=record.seen,
            digest=record.digest,
            result=record.result,
            at=self.now,
            started_at=None,
            fence=1,
            signal_seq=record.signal_seq,
        )
        self.records.append(stored)
        return stored

    async def transaction(self, work: Callable[[Any], Awaitable[NewRecord]], timeout: int) -> StepRecord:
        async with asyncio.timeout(timeout / SECOND):
            for _ in range(self.conflicts):
                await work("connection")
                if self.on_conflict is not None:
                    await self.on_conflict()
            return self._keep(await work("connection"))

    async def inbox(self) -> Inbox:
        taken = {record.signal_seq for record in self.records}
        waiting = [signal for signal in self.signals if signal.at <= self.now and signal.seq not in taken]
        return Inbox(wake_seq=len(self.signals), cancel_requested=False, signals=waiting, children=())

    def progress(self, progress: str) -> None:
        self.progressed.append(progress)

    def run_blocking(self, call: Callable[[], Any]) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(None, call)

    def held(self) -> bool:
        return True

    def give_slot(self, rest: Rest) -> None:
        self.slots.append("given")
        self.rests.append(rest)
        if not self.frozen:
            asyncio.get_running_loop().call_soon(self._go_on, self.activation, rest)

    def _go_on(self, activation: Activation, rest: Rest) -> None:
        if activation.rest is None:
            return
        ahead = [signal.at for signal in self.signals if signal.at > self.now]
        if rest.until is not None:
            ahead.append(rest.until)
        self.now = max(self.now, min(ahead, default=self.now))
        activation.news()

    async def take_slot(self) -> None:
        self.slots.append("taken")

    # -- playing ------------------------------------------------------------------------------------------------------------

    def send(self, name: str, payload: str, at: int = 0) -> None:
        """A signal that comes `at` seconds after the start of the run."""
        self.signals.append(Signal(name=name, seq=len(self.signals) + 1, payload=payload, at=STARTED + at * SECOND))

    def begin(
        self, fn: Function[..., Any], *args: Any, history: Sequence[StepRecord] = (), **changes: Any
    ) -> Activation:
        """An activation of the function, not yet running."""
        self.records = list(history)
        run: RunRecord = run_record(
            **{"name": fn.name, "input": fn.encode_arguments(self.codec, args, {}), "seed": self.seed, **changes}
        )
        claimed = Claimed(lease=LEASE, run=run, history=tuple(history))
        self.activation = Activation(fn, claimed, self)
        return self.activation

    async def play(
        self, fn: Function[..., Any], *args: Any, history: Sequence[StepRecord] = (), **changes: Any
    ) -> Played:
        """Run it to its end."""
        activation = self.begin(fn, *args, history=history, **changes)
        ending = await asyncio.wait_for(activation.run(), 30)
        return Played(ending, activation.history, self)


def declared(body: Callable[..., Any], **options: Any) -> Function[..., Any]:
    """The body as a durable function of a registry of its own."""
    made: Function[..., Any] = function(registry=Registry(), **options)(body)
    return made


async def play(
    body: Callable[..., Any], *args: Any, stage: Stage | None = None, history: Sequence[StepRecord] = (), **changes: Any
) -> Played:
    """Play a body on a stage of its own."""
    stage = stage or Stage()
    return await stage.play(declared(body), *args, history=history, **changes)


async def twice(body: Callable[..., Any], *args: Any, **changes: Any) -> Played:
    """Play it, and again from its journal: the second time nothing is written, and the end is the same."""
    first = await play(body, *args, **changes)
    second = await play(body, *args, history=first.records, **changes)
    assert second.records == first.records, "the replay wrote"
    assert _told(second.ending) == _told(first.ending), "the replay ended otherwise"
    return first


def _told(ending: Ending) -> object:
    if isinstance(ending, Raised):
        return type(ending.error), str(ending.error), ending.positions
    return ending if isinstance(ending, Returned) else (type(ending), str(getattr(ending, "error", "")))
