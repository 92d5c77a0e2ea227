"""Sagas: steps that are undone, in reverse order, when what follows fails (semantics 49).

`ctx.saga()` makes one. A compensation is a record of its own, durable before the step that it undoes may start; undoing is a step
`undo/{n}` like any other, with its retries, run under a shield, so that a cancel or a time-out does not stop it. The saga is open as
long as its `with` block; nothing here decides how the run lands (`outcomes.py` does).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from .calls import Call, Pending
from .codec import digest, plain, value_envelope
from .errors import Misuse
from .model import RecordKind
from .places import caller
from .steps import StepPlan
from .threadbody import ThreadCall

if TYPE_CHECKING:
    from .activation import Activation
    from .blocking import SyncContext
    from .context import Context

P = ParamSpec("P")
R = TypeVar("R")


class Compensation:
    """One that was registered: how to undo, and the call that registers it."""

    def __init__(
        self, number: int, plan: StepPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Pending
    ) -> None:
        self.number = number
        self.plan = plan
        self.args = args
        self.kwargs = kwargs
        self.call = call
        self.recorded = False


def _register(host: Activation, compensation: Compensation) -> None:
    """Make the call the record of a compensation: the name of the function, and its encoded arguments."""
    call, plan = compensation.call, compensation.plan
    text = plan.signature.encode_arguments(host.codec, compensation.args, compensation.kwargs)
    call.codec = host.codec
    call.kind = RecordKind.COMPENSATION
    call.digest = digest(text)
    call.silent = True
    call.envelope = value_envelope(
        f'{{"undo":{compensation.number},"step":{plain.write(plan.name)},"arguments":{text}}}'
    )


class _Ledger:
    """What both kinds of sagas keep."""

    def __init__(self) -> None:
        self.compensations: list[Compensation] = []
        self.open = False
        self._entered = -1

    def enter(self, host: Activation) -> None:
        """The block begins."""
        self.open = True
        self._entered = host.journal.cursor

    def check(self, verb: str) -> None:
        """Raises Misuse outside of the `with` block, and where a compensation is not durable yet."""
        if not self.open:
            raise Misuse(f"saga.{verb} outside of its with block", hint="async with ctx.saga() as saga: ...")

    def check_registered(self) -> None:
        """Raises Misuse: a step must not start before what undoes it is durable."""
        waiting = next((one for one in self.compensations if not one.recorded), None)
        if waiting is not None:
            raise Misuse(
                f"the compensation {waiting.plan.name!r} is not registered yet",
                hint="await saga.compensate(...) before the step that it undoes",
            )

    def due(self, error: BaseException | None, host: Activation) -> list[Compensation]:
        """What is to be undone when the block is left, the last one first. Nothing if the body was given a pivot in it, whichever verb
        asked for that, and whether or not a branch still waits for the answer (46)."""
        self.open = False
        given = host.journal.records[self._entered : host.journal.cursor]
        if error is None or any(record.kind is RecordKind.PIVOT for record in given):
            return []
        return [one for one in reversed(self.compensations) if one.recorded]


def _note(error: BaseException, compensation: Compensation, failure: Exception) -> None:
    text = f"undo/{compensation.number} ({compensation.plan.name}) failed too: {type(failure).__name__}: {failure}"
    # Not add_note: a class that refuses attributes (a frozen dataclass) refuses that, too.
    object.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), text])


class _RegisterCall(Call):
    compensation: Compensation

    def settle(self, value: Any, error: BaseException | None) -> None:
        self.compensation.recorded = error is None
        super().settle(value, error)


class _ThreadRegisterCall(ThreadCall):
    compensation: Compensation

    def settle(self, value: Any, error: BaseException | None) -> None:
        self.compensation.recorded = error is None
        super().settle(value, error)


class _ThreadUndoCall(ThreadCall):
    """An undo of a `def` body: its id is known."""

    def arrive(self, host: Activation, name: str) -> None:
        self.step_id = name
        self.shielded = True
        host.registered(self, None)
        host.wake()


class Saga:
    """A saga of an `async def` body: `async with ctx.saga() as saga:`.

    Before the pivot an error, a cancel or a time-out that leaves the block runs the compensations in reverse order, each once, and
    goes on outwards. After `pivot()` nothing is undone and the run refuses a cancel: if it can not go forward it lands
    `forward_incomplete`. A run that has undone something is not tried again.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ledger = _Ledger()

    async def __aenter__(self) -> Self:
        self._ledger.enter(self._context._host)
        return self

    async def __aexit__(
        self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        due = self._ledger.due(error, self._context._host)
        if not due:
            return
        assert error is not None
        async with self._context.shield():
            for compensation in due:
                try:
                    await self._undo(compensation)
                except Exception as failure:  # noqa: BLE001 - the others are undone all the same, and the run's error tells of it
                    _note(error, compensation, failure)

    def _undo(self, compensation: Compensation) -> Call:
        context = self._context
        call = Call(loop=context._loop)
        context._step(call, compensation.plan, compensation.args, compensation.kwargs)
        call.place = caller(2)
        if not context._loop.closed:
            call.step_id = f"undo/{compensation.number}"
            call.shielded = True
            context._host.registered(call, None)
        return call

    @overload
    def step(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def step(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As `ctx.step`. Raises Misuse while a compensation is not registered yet."""
        self._ledger.check("step")
        self._ledger.check_registered()
        return self._context.step(fn, *args, **kwargs)

    def compensate(self, fn: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, None]:
        """Register what undoes the next step: `await` it before that step. It is called as a step, so it may have run before."""
        context, ledger = self._context, self._ledger
        context._here("saga.compensate")
        ledger.check("compensate")
        call = _RegisterCall(loop=context._loop)
        call.compensation = compensation = context._compensation(fn, args, kwargs, call)
        _register(context._host, compensation)
        ledger.compensations.append(compensation)
        call.place = caller(1)
        return context._made(call, f"compensation:{compensation.plan.name}")  # type: ignore[no-any-return]

    async def pivot(self) -> None:
        """From here the run goes forward only: nothing is undone, no cancel is taken (46)."""
        self._ledger.check("pivot")
        self._ledger.check_registered()
        await self._context.refuse_cancel()


class SyncSaga:
    """As `Saga`, in a `def` body: `with ctx.saga() as saga:`."""

    def __init__(self, context: SyncContext) -> None:
        self._context = context
        self._ledger = _Ledger()

    def __enter__(self) -> Self:
        self._ledger.enter(self._context._host)
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        due = self._ledger.due(error, self._context._host)
        if not due:
            return
        assert error is not None
        with self._context.shield():
            for compensation in due:
                try:
                    self._undo(compensation)
                except Exception as failure:  # noqa: BLE001 - as in Saga
                    _note(error, compensation, failure)

    def _undo(self, compensation: Compensation) -> None:
        context = self._context
        call = _ThreadUndoCall(context._thread)
        context._step(call, compensation.plan, compensation.args, compensation.kwargs)
        call.place = caller(2)
        context._called(call, f"undo/{compensation.number}")

    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `ctx.step`."""
        self._ledger.check("step")
        return self._context.step(fn, *args, **kwargs)

    def compensate(self, fn: Callable[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Register what undoes the next step."""
        context, ledger = self._context, self._ledger
        context._here("saga.compensate")
        ledger.check("compensate")
        call = _ThreadRegisterCall(context._thread)
        call.compensation = compensation = context._compensation(fn, args, kwargs, call)
        _register(context._host, compensation)
        ledger.compensations.append(compensation)
        call.place = caller(1)
        context._called(call, f"compensation:{compensation.plan.name}")

    def pivot(self) -> None:
        """From here the run goes forward only."""
        self._ledger.check("pivot")
        self._context.refuse_cancel()


__all__ = ["Saga", "SyncSaga"]
