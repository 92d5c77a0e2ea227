"""What a `def` body sees of its run: `SyncContext`, with the verbs of `context.Context`, blocking (semantics 28b).

It belongs to the thread of the body and refuses every other (Misuse). Nothing here writes or decides when something happens.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from .children import (
    Fan,
    SyncChildRun,
    ThreadEndCall,
    ThreadMapCall,
    ThreadRunCall,
    ThreadStartCall,
    begin,
    checked_child,
)
from .codec import digest, value_envelope
from .errors import Misuse
from .facts import NO_DEFAULT, Facts, plan_for
from .instants import instant
from .model import RecordKind
from .places import caller
from .results import AWAIT, LOOK, ThreadAwaitCall, answer, begin_wait, look_plan
from .saga import SyncSaga
from .settings import SECOND, Duration, micros
from .signals import Signal, approval
from .threadbody import ThreadBody, ThreadCall

if TYPE_CHECKING:
    from .activation import Activation
    from .function import Function

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
D = TypeVar("D")


class SyncContext(Facts):
    """The context of a `def` body: the same verbs, blocking. It belongs to the thread of the body (28b)."""

    def __init__(self, host: Activation, function: str) -> None:
        super().__init__(host, function)
        assert isinstance(host.body, ThreadBody)
        self._thread = host.body

    def _here(self, verb: str) -> None:
        self._thread.check(f"ctx.{verb}")

    def _called(self, call: ThreadCall, name: str) -> Any:
        return self._thread.call(call, name)

    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a `def` function in this thread, at least once, and record its result once. As `Context.step`."""
        self._here("step")
        call = ThreadCall(self._thread)
        plan = plan_for(fn, self._plans)
        if plan.coroutine:
            raise Misuse(
                f"{plan.name!r} is an async def step in a def body", hint="make the body async def, or the step def"
            )
        self._step(call, plan, args, kwargs)
        call.place = caller(1)
        call.context = contextvars.copy_context()
        result: R = self._called(call, plan.name)
        return result

    def run(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `Context.run`."""
        self._here("run")
        call = ThreadRunCall(self._thread)
        call.host = self._host
        begin(call, self._host, checked_child(fn, "run"), args, kwargs)
        call.place = caller(1)
        call.context = contextvars.copy_context()
        result: R = self._called(call, fn.name)
        return result

    def start(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> SyncChildRun[R]:
        """As `Context.start`."""
        self._here("start")
        call = ThreadStartCall(self._thread)
        begin(call, self._host, checked_child(fn, "start"), args, kwargs)
        call.made = lambda run_id, step_id: SyncChildRun(self, fn, run_id, step_id)
        call.place = caller(1)
        call.context = contextvars.copy_context()
        handle: SyncChildRun[R] = self._called(call, fn.name)
        return handle

    @overload
    def map(
        self,
        fn: Function[[A], R],
        items: Iterable[A],
        /,
        *,
        limit: int | None = None,
        return_exceptions: Literal[False] = False,
    ) -> list[R]: ...
    @overload
    def map(
        self, fn: Function[[A], R], items: Iterable[A], /, *, limit: int | None = None, return_exceptions: Literal[True]
    ) -> list[R | Exception]: ...
    def map(
        self, fn: Any, items: Iterable[Any], /, *, limit: int | None = None, return_exceptions: bool = False
    ) -> Any:
        """As `Context.map`."""
        self._here("map")
        call = ThreadMapCall(self._thread)
        call.place = caller(1)
        call.fan = Fan(self._host, call, checked_child(fn, "map"), items, limit, return_exceptions)
        return self._called(call, f"map:{fn.name}")

    @overload
    def result(self, run_id: str, /) -> Any: ...
    @overload
    def result(self, run_id: str, fn: Function[..., R], /) -> R: ...
    def result(self, run_id: str, fn: Function[..., Any] | None = None, /) -> Any:
        """As `Context.result`."""
        self._here("result")
        plan = look_plan(self._host, run_id, fn)
        place = caller(1)
        while True:
            look = ThreadCall(self._thread)
            self._step(look, plan, (run_id,), {})
            look.place = place
            look.context = contextvars.copy_context()
            found = self._called(look, LOOK)
            if found is not None:
                return answer(self._host, look.step_id, found, fn)
            waiting = ThreadAwaitCall(self._thread)
            begin_wait(waiting, self._host, run_id)
            waiting.place = place
            waiting.context = contextvars.copy_context()
            self._called(waiting, AWAIT)

    def _end_of(self, function: Any, step_id: str) -> Any:
        """`SyncChildRun.result`."""
        self._here("result")
        call = ThreadEndCall(self._thread)
        call.codec = self._host.codec
        call.annotation = function.signature.returns
        call.place = caller(2)
        record = self._host.journal.delivered(step_id)
        if record is None:
            return self._called(call, step_id)
        value, error = call.resolve(record)
        if error is not None:
            raise error
        return value

    def sleep(self, duration: Duration, /) -> None:
        """Wait durably."""
        self._here("sleep")
        call = ThreadCall(self._thread)
        span = micros(duration, what="sleep")
        self._timer(call, self._thread.now + span, span)
        call.place = caller(1)
        self._called(call, "sleep")

    def sleep_until(self, when: datetime, /) -> None:
        """Wait durably until an instant. Raises ConfigurationError for a naive datetime."""
        self._here("sleep_until")
        call = ThreadCall(self._thread)
        due = instant(when, what="sleep_until")
        self._timer(call, due, due)
        call.place = caller(1)
        self._called(call, "sleep_until")

    @overload
    def wait_signal(self, signal: Signal[T], /, *, timeout: Duration | None = None) -> T: ...
    @overload
    def wait_signal(self, signal: Signal[T], /, *, timeout: Duration, default: D) -> T | D: ...
    def wait_signal(self, signal: Signal[Any], /, *, timeout: Duration | None = None, default: Any = NO_DEFAULT) -> Any:
        """As `Context.wait_signal`."""
        self._here("wait_signal")
        call = ThreadCall(self._thread)
        self._await_signal(call, signal, timeout, default)
        call.place = caller(1)
        return self._called(call, f"signal:{signal.name}")

    def progress(self, done: int, total: int | None = None, message: str = "") -> None:
        """As `Context.progress`."""
        self._set_progress(done, total, message)

    def publish(self, name: str, value: Any, /) -> None:
        """As `Context.publish`."""
        self._here("publish")
        call = ThreadCall(self._thread)
        place = self._publish(call, name, value)
        call.place = caller(1)
        self._called(call, place)

    def approve(self, what: str, /, *, expires: Duration | None = None, default: bool | None = None) -> bool:
        """As `Context.approve`."""
        self._here("approve")
        call = ThreadCall(self._thread)
        signal = approval(what)
        self._await_signal(call, signal, expires, NO_DEFAULT if default is None else default)
        call.place = caller(1)
        return bool(self._called(call, f"signal:{signal.name}"))

    def wait_until(self, check: Callable[P, bool], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """As `Context.wait_until`."""
        self._here("wait_until")
        every = plan_for(check, self._plans).every / SECOND
        while not self.step(check, *args, **kwargs):
            self.sleep(every)

    def patched(self, change_id: str) -> bool:
        """As `Context.patched`."""
        self._here("patched")
        decided = self._is_patched(change_id)
        if decided is not None:
            return decided
        call = ThreadCall(self._thread)
        self._bare(call, RecordKind.PATCH, value_envelope("true"))
        call.digest = digest(change_id)
        call.place = caller(1)
        return bool(self._called(call, f"patch:{change_id}"))

    def refuse_cancel(self) -> None:
        """As `Context.refuse_cancel`."""
        self._here("refuse_cancel")
        call = ThreadCall(self._thread)
        self._bare(call, RecordKind.PIVOT, value_envelope("null"))
        call.place = caller(1)
        self._called(call, "refuse_cancel")

    def saga(self) -> SyncSaga:
        """As `Context.saga`: `with ctx.saga() as saga:`."""
        self._here("saga")
        return SyncSaga(self)

    def shield(self) -> AbstractContextManager[None]:
        """Steps inside still run after a cancel or time-out, which takes effect when the shield is left."""
        self._here("shield")
        return self._shield()

    @contextmanager
    def _shield(self) -> Generator[None]:
        self._thread.root.shields += 1
        try:
            yield
        finally:
            self._thread.leave_shield()


__all__ = ["SyncContext"]
