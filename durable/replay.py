"""The journal of one run and its cursor, what an activation needs from the engine, and how an activation ends. No I/O.

`activation.Activation` executes a run on these; the engine fulfils `Recorder`, once per run in hand; `function.Function` fulfils
`Program`. The rules are those of `docs/reference/replay.md` (R1 to R15) and of semantics 18 to 30; nothing here opens a
connection, reads a clock or starts a task.

The interface between the engine and an activation, whole:

* `Activation(program, claimed, recorder, inbox=None)`, then `await activation.run()` gives one `Ending`. It holds the slot it was
  started with.
* `recorder.give_slot(rest)` is called when the run comes to rest: its slot is free, and from now on the engine may suspend
  it. Before it goes on, `await recorder.take_slot()` is called. `activation.rest` is the current rest or None, and is replaced when
  a newer inbox was read: take it at the last moment, then `await activation.set_aside()`, then settle `Suspended` with its numbers.
* `activation.ask_cancel(reason)`, `activation.time_out(kind)`, `activation.news()` may be called at any time on the loop's thread.
* `await activation.set_aside()` (28a) returns when the body is dead or dropped and every step of it has ended; `run()` then gives
  `PutAside`. Bound it by a time limit where a step may refuse to die. Idempotent; an ending that was reached before stands.
* `activation.history` is the journal as it stands, durable records by position, attempt rows last: a run that was `woken` is
  activated again with it, without another claim: `dataclasses.replace(claimed, history=activation.history)` and the new inbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .codec import read_envelope
from .errors import NonDeterminismError
from .model import Inbox, Instant, Json, NewRecord, RunRecord, StepRecord
from .settings import Micros, Settings

if TYPE_CHECKING:
    from .codec import Codec

CANCEL_ID = ":cancel"
TIMEOUT_ID = ":timeout"


class Recorder(Protocol):
    """What an activation needs from the engine; one per run in hand. Every call is made on the worker's loop."""

    @property
    def codec(self) -> Codec:
        """Values to JSON and back, with the payload limit of this store."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings of the store."""
        ...

    def clock(self) -> Instant:
        """The store's clock as this process estimates it."""
        ...

    def held(self) -> bool:
        """May this worker still act for the run? Past the end of its lease, by the monotonic clock, no step is begun (14)."""
        ...

    def append(self, record: NewRecord) -> Awaitable[StepRecord]:
        """Durable when it returns. The records of a run go out in the order of the calls. A record that is there already is returned
        as stored. Raises LeaseLost when fenced out; retries StoreUnavailable itself until the lease has ended; any other
        error means that the record was not written."""
        ...

    async def transaction(self, work: Callable[[Any], Awaitable[NewRecord]], timeout: Micros) -> StepRecord:
        """Exactly once (26): what `work` writes on the native connection and the record that it returns commit together. An error of
        `work` passes through and leaves nothing."""
        ...

    async def inbox(self) -> Inbox:
        """What came from outside, in one snapshot that starts after the call. Raises LeaseLost, StoreUnavailable."""
        ...

    async def look(self, run_id: str) -> RunRecord | None:
        """Another run as it stands; None for an unknown, purged or another tenant's (57). Raises StoreUnavailable."""
        ...

    def progress(self, progress: Json) -> None:
        """Keep it for the next renewal or append (29a)."""
        ...

    def run_blocking(self, call: Callable[[], Any]) -> Awaitable[Any]:
        """Call it in the pool of threads for `def` steps. A cancelled wait does not stop the thread."""
        ...

    def give_slot(self, rest: Rest) -> None:
        """The run is at rest: its slot is free, and it may be suspended from now on (30)."""
        ...

    async def take_slot(self) -> None:
        """The run goes on: wait for a slot. Cancelled where the run is put aside meanwhile."""
        ...


class Program(Protocol):
    """What an activation needs from a function: its name, its body, and its types."""

    @property
    def name(self) -> str:
        """The name by which runs find it."""
        ...

    @property
    def blocking(self) -> bool:
        """True for a `def` body, which has a thread of its own (28b)."""
        ...

    def open(self, host: Any, payload: Json, codec: Codec) -> Callable[[], Any]:
        """Decode the input and bind the body to a context on `host`. The answer starts the body: a coroutine, or the result of a
        `def` body. Raises SerializationError for an input that can not be read."""
        ...

    def encode_result(self, value: Any, codec: Codec) -> Json:
        """The output, by the return annotation. Raises SerializationError."""
        ...


# -- how an activation ends -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """A run at rest: no branch is ready, no step in flight, nothing undelivered, and a durable wait open (30)."""

    until: Instant | None
    """The earliest due instant: of a timer, of a wait's time limit, or of the next attempt of a step."""
    waiting_for: Json
    """What it waits for, for people and for `explain`: {"timers": n, "signals": [names], "children": [step ids], "retries": [step ids]}."""
    wake_seq: int
    """The wake counter that was read with the inbox that the body has been given (31)."""
    wake_after: int = 0
    wake_delay: Micros = 0
    wake_on_failure: bool = False
    blocking: bool = False
    """A `def` body: a thread stands still as long as it stays in memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """The body returned; no cancel, no time-out was delivered."""

    output: Json


@dataclasses.dataclass(frozen=True, slots=True)
class Raised:
    """The body raised. `positions`: the failed records that the error carries (50)."""

    error: BaseException
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CancelledEnding:
    """The cancel was delivered and the body is over, whatever it did with it (44); `error` is what it raised last, if anything.
    Or the body returned while an ask lay open: then nothing was delivered."""

    reason: str
    error: BaseException | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TimedOutEnding:
    """The time-out was delivered and the body is over. `kind` is what `time_out` was called with: "timeout", "deadline" or
    "reclaim_limit"; or why the body could not go on, "stuck" or "spinning", with the `message` that says so."""

    kind: str
    error: BaseException | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BadPayload:
    """The input can not be read, or the output can not be stored: the run lands failed, kind payload (9)."""

    error: Exception


@dataclasses.dataclass(frozen=True, slots=True)
class Stuck:
    """At rest with no durable wait (30)."""

    error: Exception


@dataclasses.dataclass(frozen=True, slots=True)
class Spinning:
    """The body never came to rest."""

    error: Exception


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """The code asks for something else than the journal holds (25). The journal was not touched."""

    error: NonDeterminismError


@dataclasses.dataclass(frozen=True, slots=True)
class MisuseEnding:
    """A thread or a foreign loop reached into the body: what it did can not be replayed. (A Misuse that the body itself
    raises and does not catch is `Raised`.)"""

    error: Exception


@dataclasses.dataclass(frozen=True, slots=True)
class PutAside:
    """Put aside by the engine (28a)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interrupted:
    """The recorder gave up: LeaseLost, StoreUnavailable or another store error. Nothing more was written."""

    error: Exception


Ending: TypeAlias = (
    Returned
    | Raised
    | CancelledEnding
    | TimedOutEnding
    | BadPayload
    | Stuck
    | Spinning
    | Mismatch
    | MisuseEnding
    | PutAside
    | Interrupted
)


# -- failures carry the positions of their records -------------------------------------------------------------------------

_POSITION = "__durable_position__"


def mark_position(error: BaseException, position: int) -> None:
    """Keep on a delivered failure where it is recorded (50)."""
    # Not setattr: a class may refuse attributes (a frozen dataclass does).
    object.__setattr__(error, _POSITION, position)


def failed_positions(error: BaseException | None) -> tuple[int, ...]:
    """The positions of all failed records that an error carries, through causes, contexts and groups, in order (50)."""
    found: set[int] = set()
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        position = getattr(current, _POSITION, None)
        if isinstance(position, int):
            found.add(position)
        todo += (current.__cause__, current.__context__)
        parts: Sequence[BaseException] = getattr(current, "exceptions", ()) if _is_group(current) else ()
        todo += parts
    return tuple(sorted(found))


def _is_group(error: BaseException) -> bool:
    return isinstance(error, BaseExceptionGroup)


# -- the journal ------------------------------------------------------------------------------------------------------------


class Journal:
    """The records of a run by position, a cursor, and the positions that were given out and are not durable yet.

    It is the only delivery queue, live and in replay (R1). Positions may lack in the middle (a crash between two commits): order
    is all that counts (R13).
    """

    __slots__ = (
        "_attempts",
        "_landed",
        "_open",
        "attempted_at",
        "by_id",
        "cursor",
        "records",
        "replayed",
        "seen",
        "tries",
    )

    def __init__(self, history: Sequence[StepRecord]) -> None:
        self.records: list[StepRecord] = sorted((r for r in history if r.position is not None), key=_position)
        self.by_id: dict[str, StepRecord] = {record.step_id: record for record in self.records}
        self.tries: dict[str, tuple[int, Instant]] = {}
        """Per step: how many attempts have failed, and the instant of the next one (24)."""
        self._attempts: dict[str, StepRecord] = {}
        self.attempted_at: Instant = 0
        """The stamp of the last attempt row: the next one's is later, also where a clock goes back."""
        for record in history:
            if record.position is None:
                self.attempted(record)
        self.cursor = 0
        """Index of the next record to be delivered."""
        self.seen = -1
        """The highest position that was delivered; -1: none."""
        self.replayed = len(self.records)
        """How many records there were when the activation began."""
        self._open: dict[int, None] = {}
        self._landed: dict[int, StepRecord] = {}

    @property
    def exhausted(self) -> bool:
        """Everything that is durable has been delivered."""
        return self.cursor == len(self.records)

    @property
    def settled(self) -> bool:
        """The frontier: everything that has a position has been delivered. Only here external events are chosen."""
        return self.cursor == len(self.records) and not self._open

    def deliver(self, record: StepRecord) -> None:
        """The body is given the next record, which is this one."""
        self.cursor += 1
        self.seen = _position(record)

    def delivered(self, step_id: str) -> StepRecord | None:
        """The record of this id, if the body has been given it already."""
        record = self.by_id.get(step_id)
        return record if record is not None and _position(record) <= self.seen else None

    def assign(self) -> int:
        """The next position. It is in flight until it lands or is given up."""
        last = next(reversed(self._open)) if self._open else _position(self.records[-1]) if self.records else -1
        self._open[last + 1] = None
        return last + 1

    def land(self, position: int, record: StepRecord) -> None:
        """The record of this position is durable. It is delivered after all that have a lower one (R13)."""
        self._landed[position] = record
        self._release()

    def give_up(self, position: int) -> None:
        """The record of this position was certainly not written: the position stays empty."""
        if self._open.pop(position, 0) is None:
            self._release()

    def attempted(self, record: StepRecord) -> None:
        """An attempt row is durable."""
        step_id, _, number = record.step_id.rpartition("@")
        _, told = read_envelope(record.result)
        known = self.tries.get(step_id, (0, 0))
        self.tries[step_id] = max(known, (int(number), int(told["next_at"])))
        self._attempts[record.step_id] = record
        self.attempted_at = max(self.attempted_at, record.at)

    def history(self) -> tuple[StepRecord, ...]:
        """All durable records by position, attempt rows last."""
        return (*self.records, *self._attempts.values())

    def _release(self) -> None:
        while self._open:
            first = next(iter(self._open))
            record = self._landed.pop(first, None)
            if record is None:
                return
            del self._open[first]
            self.records.append(record)
            self.by_id[record.step_id] = record


def _position(record: StepRecord) -> int:
    assert record.position is not None
    return record.position
