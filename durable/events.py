"""What the engine reports: frozen event values, and the dispatcher that hands them to sinks.

The engine and the client emit; sinks are attached at the roof (logs, metrics, traces) and by tests. An event never changes an
outcome: a sink that raises is reported once through `logging` and keeps being called. What is a warning or worse also goes to
the logger `durable`, so that nothing serious is silent in a process without a sink. Nothing here reads a store or waits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import ClassVar, TypeAlias
from uuid import UUID

from .model import Instant, Json
from .settings import Micros

_logger = logging.getLogger("durable")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events. `level` is a level of `logging`; from WARNING on it is logged even where no sink is attached."""

    level: ClassVar[int] = logging.DEBUG

    def text(self) -> str:
        """One line for people."""
        fields = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
        return f"{type(self).__name__}: {fields}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStarted(Event):
    """A worker is registered and claims."""

    level: ClassVar[int] = logging.INFO
    worker_id: str
    queues: tuple[str, ...]
    functions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDraining(Event):
    """A worker was asked to stop: it claims nothing more."""

    level: ClassVar[int] = logging.INFO
    worker_id: str
    held: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStopped(Event):
    """A worker has let go of everything; `abandoned` runs come back when their lease has lapsed."""

    level: ClassVar[int] = logging.INFO
    worker_id: str
    handed_back: int
    abandoned: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunsSubmitted(Event):
    """One write stored or joined these runs."""

    count: int
    took: Micros


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunClaimed(Event):
    """A run is in hand."""

    run_id: str
    name: str
    tenant: UUID | None
    queue: str
    attempts: int
    records: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecorded(Event):
    """A record is durable."""

    run_id: str
    step_id: str
    kind: str
    position: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSettled(Event):
    """A run left this worker. `outcome` is the name of the outcome's class, `answer` the store's (landed, woken, lost)."""

    run_id: str
    name: str
    tenant: UUID | None
    outcome: str
    answer: str
    error_kind: str | None
    took: Micros
    """From the claim to this settle, by this process' clock."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunRested(Event):
    """A body waits for something durable and has given its slot back."""

    run_id: str
    until: Instant | None
    waiting_for: Json


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunMismatched(Event):
    """The code asks for something else than the journal holds; the run is handed back (semantics 25)."""

    level: ClassVar[int] = logging.WARNING
    run_id: str
    name: str
    explanation: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CodeChanged(Event):
    """A run was begun by code with another fingerprint: a warning, never a gate (semantics 25)."""

    level: ClassVar[int] = logging.INFO
    run_id: str
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeaseLapsed(Event):
    """This worker does not hold the run any more: its body was put aside and nothing more is written."""

    level: ClassVar[int] = logging.WARNING
    run_id: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RenewalFailed(Event):
    """A renewal brought no answer; it is repeated until the leases have ended (semantics 14)."""

    level: ClassVar[int] = logging.WARNING
    held: int
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flushed(Event):
    """One batch of a lane was answered."""

    lane: str
    entries: int
    took: Micros


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlushFailed(Event):
    """A batch of a lane failed; it is repeated, or split until the bad entry is alone (semantics 9)."""

    level: ClassVar[int] = logging.WARNING
    lane: str
    entries: int
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClaimFailed(Event):
    """A claim brought no answer; it is asked again with the same mark (semantics 8)."""

    level: ClassVar[int] = logging.WARNING
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChoreFailed(Event):
    """A chore failed `in_a_row` times; it is tried again later."""

    level: ClassVar[int] = logging.WARNING
    chore: str
    error: str
    in_a_row: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChoreDone(Event):
    """A chore found something to do."""

    chore: str
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunsReclaimed(Event):
    """Leases lapsed: runs are pending again, or landed failed past the reclaim limit (semantics 15)."""

    level: ClassVar[int] = logging.WARNING
    returned: tuple[str, ...]
    failed: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFired(Event):
    """Slots of a schedule became runs."""

    level: ClassVar[int] = logging.INFO
    schedule_id: str
    run_ids: tuple[str, ...]
    skipped: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleParked(Event):
    """A schedule can not be read, or its function is gone: it is out of the due scan until it is put again (semantics 55, 56)."""

    level: ClassVar[int] = logging.WARNING
    schedule_id: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleUnserved(Event):
    """A schedule is due whose function this worker does not know; another worker may fire it."""

    level: ClassVar[int] = logging.WARNING
    schedule_id: str
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BodyAbandoned(Event):
    """A body or a step did not end in time; its lease is kept no longer and the sweep returns the run."""

    level: ClassVar[int] = logging.WARNING
    run_id: str
    name: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineFault(Event):
    """Something in the engine raised that should not have: a defect of ours. The run is handed back."""

    level: ClassVar[int] = logging.ERROR
    where: str
    error: str


Sink: TypeAlias = Callable[[Event], None]


class Events:
    """The dispatcher. `wanted` lets hot code skip the making of an event that nobody would see."""

    __slots__ = ("_complained", "_sinks", "wanted")

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = ()
        self._complained: set[int] = set()
        self.wanted = False

    def attach(self, sink: Sink, /) -> Callable[[], None]:
        """Call `sink` with every event from now on, in the thread that emits. Returns a function that detaches it."""
        self._sinks = (*self._sinks, sink)
        self.wanted = True

        def detach() -> None:
            self._sinks = tuple(other for other in self._sinks if other is not sink)
            self.wanted = bool(self._sinks)

        return detach

    def emit(self, event: Event, /) -> None:
        """Hand the event to every sink. Never raises an error of a sink."""
        if event.level >= logging.WARNING:
            _logger.log(event.level, "%s", event.text())
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                if id(sink) not in self._complained:  # once per sink: a broken one must not flood the log
                    self._complained.add(id(sink))
                    _logger.exception("the event sink %r failed; its events are lost, nothing else is", sink)


__all__ = [
    "BodyAbandoned",
    "ChoreDone",
    "ChoreFailed",
    "ClaimFailed",
    "CodeChanged",
    "EngineFault",
    "Event",
    "Events",
    "FlushFailed",
    "Flushed",
    "LeaseLapsed",
    "RenewalFailed",
    "RunClaimed",
    "RunMismatched",
    "RunRested",
    "RunSettled",
    "RunsReclaimed",
    "RunsSubmitted",
    "ScheduleFired",
    "ScheduleParked",
    "ScheduleUnserved",
    "Sink",
    "StepRecorded",
    "WorkerDraining",
    "WorkerStarted",
    "WorkerStopped",
]
