"""Runs that a body starts: their start, the wait for their end, and `map` over many of them (semantics 18, 33, 48).

The contexts make these calls. A start is a record with the child's row in the same write; its end is the record `{start}:end`, chosen
and written by the activation like any other event from outside. What is here decides nothing about delivery, and talks to no store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from .calls import Call, Pending, Place
from .codec import digest, plain, read_envelope, value_envelope
from .endings import end_id
from .errors import Misuse, RegistrationError
from .model import Instant, Json, NewRun, RecordKind, StepRecord
from .threadbody import ThreadCall

if TYPE_CHECKING:
    from .activation import Activation
    from .blocking import SyncContext
    from .context import Context

R_co = TypeVar("R_co", covariant=True, default=Any)


def checked_child(function: Any, verb: str) -> Any:
    """The function, if its runs can be children. Raises RegistrationError, Misuse."""
    if not getattr(function, "__durable_function__", False):
        raise RegistrationError(
            f"ctx.{verb} takes a durable function, not {function!r}",
            hint="decorate it with @durable.function; for a plain function: ctx.step(fn, ...)",
        )
    for key in ("idempotency_key", "coalesce_key"):
        if getattr(function.options, key) is not None:
            raise Misuse(
                f"ctx.{verb}({function.name}) with a {key}: a child belongs to its place in the history of one parent, and can not"
                " be a run that others share",
                hint=f"leave the {key} out: a replay starts no second child. For a shared run call client.start in a step",
            )
    return function


def begin(call: Pending, host: Activation, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Make a call the start of a child. The arguments are encoded and checked here, before anything is written."""
    call.codec = host.codec
    call.kind = RecordKind.START
    call.arguments = function.encode_arguments(host.codec, args, kwargs)
    call.digest = digest(call.arguments)
    call.annotation = function.signature.returns
    call.begins = lambda: _child(host, call, function)


def _child(host: Activation, call: Pending, function: Any) -> tuple[Json, tuple[NewRun, ...]]:
    """What the record of a start holds, and the row that is written with it."""
    parent = host.run_record
    run = dataclasses.replace(
        function.new_run(call.arguments, tenant=parent.tenant),
        parent_run_id=parent.run_id,
        parent_step_id=call.step_id,
        detached=function.options.detached,
    )
    return value_envelope(plain.write({"run_id": run.run_id})), (run,)


def _run_id(record: StepRecord) -> str:
    told: dict[str, str] = read_envelope(record.result)[1]
    return told["run_id"]


def _await_end(host: Activation, call: Pending) -> None:
    """The start of its child is delivered: from now on the call waits for the end."""
    call.kind = RecordKind.CHILD
    call.step_id = end_id(call.step_id)
    call.digest = ""
    host.registered(call, None)


# -- one child: start and wait -------------------------------------------------------------------------------------------------


class RunCall(Call):
    """`ctx.run` of an `async def` body: the start and the end of a child in one call."""

    host: Activation

    def fire(self, record: StepRecord) -> None:
        """The start is delivered: wait for the end. Then the end."""
        if record.kind is not RecordKind.START:
            super().fire(record)
        elif not self.done():
            _await_end(self.host, self)


class ThreadRunCall(ThreadCall):
    """`ctx.run` of a `def` body."""

    host: Activation

    def fire(self, record: StepRecord) -> None:
        """As `RunCall.fire`."""
        if record.kind is not RecordKind.START:
            super().fire(record)
        elif not self.done():
            _await_end(self.host, self)


class StartCall(Call):
    """`ctx.start` of an `async def` body."""

    made: Callable[[str, str], Any]

    def resolve(self, record: StepRecord) -> tuple[Any, BaseException | None]:
        """The handle of the child."""
        return self.made(_run_id(record), record.step_id), None


class ThreadStartCall(ThreadCall):
    """`ctx.start` of a `def` body."""

    made: Callable[[str, str], Any]

    def resolve(self, record: StepRecord) -> tuple[Any, BaseException | None]:
        """The handle of the child."""
        return self.made(_run_id(record), record.step_id), None


class EndWait:
    """The wait for the end of one child; any number of calls of the body stand behind it, and it outlives those that are given up."""

    kind = RecordKind.CHILD
    digest = ""
    due: Instant | None = None
    group: Fan | None = None

    def __init__(self, step_id: str, place: Place | None) -> None:
        self.step_id = step_id
        self.place = place
        self.order = 0
        self.seen = -1
        self.calls: list[Call] = []

    def fire(self, record: StepRecord) -> None:
        """All that wait get the same."""
        for call in self.calls:
            call.fire(record)
        self.calls.clear()


class ChildRun(Generic[R_co]):
    """A child that `ctx.start` started, as the body holds it. Its verbs belong to the body, like those of the context."""

    __slots__ = ("_context", "_end_id", "_function", "_wait", "id")

    def __init__(self, context: Context, function: Any, run_id: str, step_id: str) -> None:
        self._context = context
        self._function = function
        self._end_id = end_id(step_id)
        self._wait: EndWait | None = None
        self.id = run_id
        """The id of its run."""

    @property
    def function(self) -> str:
        """The name of its function."""
        name: str = self._function.name
        return name

    def result(self) -> Coroutine[Any, Any, R_co]:
        """What the child returned, as soon as it has; as often as it is asked for.

        Raises RunFailed (the original error is its `__cause__` where it can be rebuilt), RunCancelled, RunTimeout or
        RunForwardIncomplete. Giving the wait up does not stop the child.
        """
        context = self._context
        call = context._called_for_end(self._function)
        host = context._host
        if call.done() or context._loop.closed:
            return call  # type: ignore[return-value]
        record = host.journal.delivered(self._end_id)
        if record is not None:
            call.fire(record)
        elif host.interruption is not None and not context._loop.scope().shields:
            call.refuse()
        else:
            if self._wait is None:
                self._wait = EndWait(self._end_id, call.place)
                host.registered(self._wait, None)
            self._wait.calls.append(call)
        return call  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<child run {self.id} of {self.function}>"


class SyncChildRun(Generic[R_co]):
    """As `ChildRun`, in a `def` body."""

    __slots__ = ("_context", "_end_id", "_function", "id")

    def __init__(self, context: SyncContext, function: Any, run_id: str, step_id: str) -> None:
        self._context = context
        self._function = function
        self._end_id = end_id(step_id)
        self.id = run_id
        """The id of its run."""

    @property
    def function(self) -> str:
        """The name of its function."""
        name: str = self._function.name
        return name

    def result(self) -> R_co:
        """Wait for what the child returned. As `ChildRun.result`."""
        value: R_co = self._context._end_of(self._function, self._end_id)
        return value

    def __repr__(self) -> str:
        return f"<child run {self.id} of {self.function}>"


class ThreadEndCall(ThreadCall):
    """`SyncChildRun.result`: a wait under an id that is known."""

    kind = RecordKind.CHILD

    def arrive(self, host: Activation, name: str) -> None:
        """It takes no place of its own."""
        self.step_id = name
        host.registered(self, None)
        host.wake()


# -- many children -----------------------------------------------------------------------------------------------------------------


class Fan:
    """The children of one `map`: at most `limit` at once, results in order, progress by itself."""

    def __init__(
        self,
        host: Activation,
        owner: Call | ThreadCall,
        function: Any,
        items: Iterable[Any],
        limit: int | None,
        return_exceptions: bool,
    ) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise Misuse(f"map: limit is a whole number from 1, or None, not {limit!r}", hint="None: all at once")
        self.host = host
        self.owner = owner
        self.return_exceptions = return_exceptions
        self._items = [_Item(self, index, function, item) for index, item in enumerate(items)]
        self._limit = len(self._items) if limit is None else limit
        self._next = 0
        self._open: dict[int, _Item] = {}
        self._ended = 0
        self._results: list[Any] = [None] * len(self._items)

    def begin(self, path: str, *, shielded: bool) -> None:
        """Start the first of them. Every item has its place in the history from here on, started or not."""
        for item in self._items:
            item.step_id = f"{path}/{item.index}"
            item.shielded = shielded
            item.place = self.owner.place
        self._advance()

    def needs(self) -> tuple[int, bool]:
        """How many ends must come before the body can go on, and whether one failure is enough (33)."""
        every = self._next == len(self._items)
        return (len(self._open) if every else 1), not self.return_exceptions

    def ended(self, item: _Item, value: Any, error: BaseException | None) -> None:
        """One of them has landed."""
        del self._open[item.index]
        if self.owner.done():
            return
        if error is not None and not self.return_exceptions:
            self.drop()
            self.owner.settle(None, error)
            return
        self._results[item.index] = value if error is None else error
        self._ended += 1
        host = self.host
        if not (host.replaying or host.over):
            host.recorder.progress(plain.write({"done": self._ended, "total": len(self._items), "message": ""}))
        self._advance()

    def drop(self) -> None:
        """The body gives it up: nothing more is started, the ends are not waited for. What runs goes on with its parent."""
        for item in list(self._open.values()):
            item.dropped = True
            self.host.dropped(item)

    def _advance(self) -> None:
        if self._ended == len(self._items):
            self.owner.settle(self._results, None)
            return
        while self._next < len(self._items) and len(self._open) < self._limit:
            item = self._items[self._next]
            self._next += 1
            self._open[item.index] = item
            self.host.registered(item, None)


class _Item(Pending):
    """One child of a `map`."""

    dropped = False

    def __init__(self, fan: Fan, index: int, function: Any, item: Any) -> None:
        self.fan = fan
        self.group = fan
        self.index = index
        begin(self, fan.host, function, (item,), {})

    def done(self) -> bool:
        """Nobody wants it any more."""
        return self.dropped or self.fan.owner.done()

    def fire(self, record: StepRecord) -> None:
        """Its start, or its end, is delivered."""
        if self.done():
            return
        if record.kind is RecordKind.START:
            _await_end(self.fan.host, self)
        else:
            self.fan.ended(self, *self.resolve(record))


class MapCall(Call):
    """`ctx.map` of an `async def` body."""

    fan: Fan

    def cancel(self, msg: Any | None = None) -> bool:
        """The body gives it up."""
        if not super().cancel(msg):
            return False
        self.fan.drop()
        return True


class ThreadMapCall(ThreadCall):
    """`ctx.map` of a `def` body."""

    fan: Fan

    def arrive(self, host: Activation, name: str) -> None:
        """Its children have their places under its own."""
        root = self.body.root
        self.fan.begin(root.step_id(name), shielded=root.shields > 0)
        host.wake()


__all__ = [
    "ChildRun",
    "Fan",
    "MapCall",
    "RunCall",
    "StartCall",
    "SyncChildRun",
    "ThreadEndCall",
    "ThreadMapCall",
    "ThreadRunCall",
    "ThreadStartCall",
    "begin",
    "checked_child",
]
