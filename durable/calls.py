"""What a body waits for: a call of its context, which has its id, its place in the history and its due time from the moment it is
made (R6), awaited or not.

`Pending` is what the pump knows of every call, `Call` the future that an `async def` body awaits. The thread of a `def` body has its
own form (`threadbody.ThreadCall`). Nothing here decides what happens next; that is the pump's business.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol

from .branches import BodyFuture
from .codec import UNTYPED, Codec, open_envelope, rebuild
from .errors import NonDeterminismError, SerializationError
from .model import Instant, Json, NewRun, RecordKind, StepRecord
from .places import called_at
from .replay import mark_position
from .settings import Micros

if TYPE_CHECKING:
    import asyncio

    from .steps import Attempted, StepPlan

Place = tuple[CodeType, int]
"""Where in the user's code a call was made: turned into file and line only when somebody must be told."""


class Waiter(Protocol):
    """What can be registered under an id: a call, or a timer of the loop."""

    kind: RecordKind
    step_id: str
    order: int
    seen: int

    @property
    def digest(self) -> str:
        """Of its arguments (25)."""
        ...

    @property
    def due(self) -> Instant | None:
        """When it ends by itself."""
        ...

    @property
    def place(self) -> Place | None:
        """Where the code made it."""
        ...

    def fire(self, record: StepRecord) -> None:
        """Its record is delivered."""
        ...


class Gathered(Protocol):
    """Waits for children of which the body needs more than one to go on."""

    def needs(self) -> tuple[int, bool]:
        """How many ends must come, and whether one that is a failure is enough."""
        ...


class Pending:
    """A call, as the pump sees it. The defaults stand on the class: a call sets only what it needs."""

    kind = RecordKind.STEP
    digest = ""
    step_id = ""
    due: Instant | None = None
    order = 0
    seen = -1
    place: Place | None = None
    codec: Codec
    annotation: Any = UNTYPED
    # a step
    plan: StepPlan | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    arguments: str = ""
    context: contextvars.Context | None = None
    transaction: Micros | None = None
    attempted: Attempted | None = None
    runner: asyncio.Task[None] | None = None
    stopping = False
    recording = False
    shielded = False
    retry_at: Instant | None = None
    # a record without work: what its envelope holds
    envelope = '{"v":null}'
    silent = False
    """The body gets None, whatever the record holds."""
    # a signal
    signal: str | None = None
    on_time_out: Callable[[], Any] | None = None
    # a child
    begins: Callable[[], tuple[Json, tuple[NewRun, ...]]] | None = None
    """Makes the row of a child and what the record of its start holds; called when that is written."""
    group: Gathered | None = None
    """Several ends are waited for together (33)."""

    def done(self) -> bool:
        """It has its answer, or the body gave it up."""
        raise NotImplementedError

    def fire(self, record: StepRecord) -> None:
        """Its record is delivered."""
        raise NotImplementedError

    def resolve(self, record: StepRecord) -> tuple[Any, BaseException | None]:
        """What the body gets of a record: a value, or an error that knows its position (50)."""
        if self.signal is not None and record.signal_seq is None:
            return self._timed_out(record)
        if self.silent:
            return None, None
        attempted = self.attempted
        if attempted is not None and attempted.error is None and attempted.envelope == record.result:
            return attempted.value, None  # read back from that very text when it was encoded
        try:
            good, found = open_envelope(self.codec, record.result, self.annotation)
        except SerializationError as error:
            error.add_note(f"this is the recorded result of {record.step_id}, position {record.position}")
            return None, error
        if good:
            return found, None
        failure = rebuild(found, record.step_id)
        if record.position is not None:
            mark_position(failure, record.position)
        return None, failure

    def _timed_out(self, record: StepRecord) -> tuple[Any, BaseException | None]:
        assert self.on_time_out is not None
        value = self.on_time_out()
        if isinstance(value, BaseException):
            if record.position is not None:
                mark_position(value, record.position)
            return None, value
        return value, None


class Call(BodyFuture, Pending):
    """A call of an `async def` body. `gather`, `wait`, `shield` and `wait_for` take it as the future that it is."""

    def cancel(self, msg: Any | None = None) -> bool:
        """The body gives it up: nothing is recorded, a step in flight is cancelled (R12)."""
        if not super().cancel(msg):
            return False
        self.get_loop().host.dropped(self)  # type: ignore[attr-defined]
        return True

    def refuse(self) -> None:
        """It is not made: the run is being cancelled and this is outside a shield (44)."""
        super().cancel()

    def close(self) -> None:
        """Asyncio closes coroutines that it was given and did not start."""

    def fire(self, record: StepRecord) -> None:
        """Its record is delivered; to nobody if the body gave it up."""
        if self.done():
            return
        self.settle(*self.resolve(record))

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Its answer is known."""
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


# -- a mismatch, in words ---------------------------------------------------------------------------------------------------


def _described(record: StepRecord) -> str:
    return f"position {record.position}: {record.kind.value} {record.step_id!r}"


def other_call(record: StepRecord, waiter: Waiter, name: str) -> NonDeterminismError:
    """The code makes another call than the journal holds under its id (25)."""
    asked = f"{waiter.kind.value} {waiter.step_id!r}"
    why = " with other arguments" if record.kind is waiter.kind else ""
    return NonDeterminismError(
        f"the code of {name} has changed under a run\n"
        f"  the journal holds  {_described(record)}\n"
        f"  the code asks for  {asked}{why}\n"
        f"  at                 {called_at(waiter.place)}"
    )


def not_called(
    record: StepRecord, calls: dict[str, Waiter], name: str, *, returned: bool = False
) -> NonDeterminismError:
    """The journal holds the end of a call that the code does not make (25)."""
    open_calls = [f"{w.kind.value} {w.step_id!r} at {called_at(w.place)}" for w in list(calls.values())[:5]]
    asks = "nothing: it has ended" if returned else "; ".join(open_calls) or "nothing: it waits for its own branches"
    return NonDeterminismError(
        f"the code of {name} has changed under a run\n"
        f"  the journal holds  {_described(record)}\n"
        f"  the code asks for  {asks}"
    )
