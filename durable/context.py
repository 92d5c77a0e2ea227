"""What an `async def` body sees of its run: `Context`. That of a `def` body is `blocking.SyncContext`.

Every verb takes its place in the history when it is called, awaited or not, and refuses (Misuse) to be called anywhere but in the
body it belongs to. The activation is the host; nothing here writes, waits or decides when something happens.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from .bodyloop import BodyLoop
from .branches import BranchTask
from .calls import Call
from .children import (
    ChildRun,
    Fan,
    MapCall,
    RunCall,
    StartCall,
    begin,
    checked_child,
)
from .codec import digest, value_envelope
from .errors import Misuse
from .facts import NO_DEFAULT, Facts, plan_for
from .instants import instant
from .model import RecordKind
from .places import caller
from .results import AWAIT, LOOK, AwaitCall, answer, begin_wait, look_plan
from .saga import Saga
from .settings import SECOND, Duration, micros
from .signals import Signal, approval

if TYPE_CHECKING:
    from .activation import Activation
    from .function import Function

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
D = TypeVar("D")
Tx = TypeVar("Tx")


class Context(Facts):
    """The context of an `async def` body. Its verbs may be awaited, gathered, wrapped in tasks: plain asyncio replays."""

    def __init__(self, host: Activation, function: str) -> None:
        super().__init__(host, function)
        assert isinstance(host.body, BodyLoop)
        self._loop = host.body

    def _here(self, verb: str) -> None:
        loop = self._loop
        if events._get_running_loop() is not loop and not loop.closed:
            raise Misuse(
                f"ctx.{verb} was called outside the body of the run (in a step, a thread, or another run)",
                hint="call it in the body and pass the value on; a step takes values, not the context",
            )

    def _made(self, call: Call, name: str) -> Any:
        host, loop = self._host, self._loop
        if loop.closed:
            return call  # torn down: it never completes (R14)
        if host.interruption is not None and not loop.scope().shields:
            loop.scope().step_id(name)
            call.refuse()
            return call
        host.registered(call, name)
        return call

    @overload
    def step(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    @overload
    def step(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def step(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function at least once and record its result once (21, 26). Returns the decoded form of what was stored (22).

        Raises what the function raised for good: as its class if that can be rebuilt, else StepFailed (23). Arguments and
        result are JSON by their annotations: SerializationError names what can not be stored.
        """
        self._here("step")
        call = Call(loop=self._loop)
        plan = plan_for(fn, self._plans)
        self._step(call, plan, args, kwargs)
        call.place = caller(1)
        return self._made(call, plan.name)

    def transaction(
        self, fn: Callable[Concatenate[Tx, P], Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]:
        """Call `fn(connection, ...)` exactly once: what it writes and the record of its result commit together (26).

        The connection is the store's own; commit and rollback are refused. No context call inside.
        """
        self._here("transaction")
        settings = self._host.recorder.settings
        call = Call(loop=self._loop)
        plan = plan_for(fn, self._plans, skip_first=True)
        if not plan.coroutine:
            raise Misuse(
                f"{plan.name!r} is a def function", hint="a transaction awaits its connection: make it async def"
            )
        self._step(call, plan, args, kwargs)
        call.transaction = min(settings.transaction_timeout, settings.lease // 3)
        call.place = caller(1)
        return self._made(call, plan.name)  # type: ignore[no-any-return]

    def run(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run a durable function as a child and wait for what it returns: once, however often the body replays (48).

        The child has its own journal, queue, retries and worker; it inherits the deadline, and is cancelled when this run lands in
        any state but completed. Raises RunFailed (the original error is its `__cause__` where it can be rebuilt), RunCancelled,
        RunTimeout or RunForwardIncomplete.
        """
        self._here("run")
        call = RunCall(loop=self._loop)
        call.host = self._host
        begin(call, self._host, checked_child(fn, "run"), args, kwargs)
        call.place = caller(1)
        return self._made(call, fn.name)  # type: ignore[no-any-return]

    def start(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, ChildRun[R]]:
        """Start a child without waiting for its end. Its row is written with the record of the start (48).

        `await (await ctx.start(f, x)).result()` is `await ctx.run(f, x)`. With `.using(detached=True)` it outlives this run.
        """
        self._here("start")
        call = StartCall(loop=self._loop)
        begin(call, self._host, checked_child(fn, "start"), args, kwargs)
        call.made = lambda run_id, step_id: ChildRun(self, fn, run_id, step_id)
        call.place = caller(1)
        return self._made(call, fn.name)  # type: ignore[no-any-return]

    @overload
    def map(
        self,
        fn: Function[[A], R],
        items: Iterable[A],
        /,
        *,
        limit: int | None = None,
        return_exceptions: Literal[False] = False,
    ) -> Coroutine[Any, Any, list[R]]: ...
    @overload
    def map(
        self, fn: Function[[A], R], items: Iterable[A], /, *, limit: int | None = None, return_exceptions: Literal[True]
    ) -> Coroutine[Any, Any, list[R | Exception]]: ...
    def map(
        self, fn: Any, items: Iterable[Any], /, *, limit: int | None = None, return_exceptions: bool = False
    ) -> Any:
        """A child for each item, at most `limit` at once; the results in the order of the items. Tells its progress by itself.

        The first failure is raised and the rest is not waited for; with `return_exceptions` failures stand among the results. The
        run is woken when it can go on, not once per child (33).
        """
        self._here("map")
        call = MapCall(loop=self._loop)
        call.place = caller(1)
        call.fan = Fan(self._host, call, checked_child(fn, "map"), items, limit, return_exceptions)
        loop = self._loop
        if loop.closed:
            return call
        scope = loop.scope()
        path = scope.step_id(f"map:{fn.name}")
        if self._host.interruption is not None and not scope.shields:
            call.refuse()
        else:
            call.fan.begin(path, shielded=scope.shields > 0)
        return call

    @overload
    def result(self, run_id: str, /) -> Coroutine[Any, Any, Any]: ...
    @overload
    def result(self, run_id: str, fn: Function[..., R], /) -> Coroutine[Any, Any, R]: ...
    def result(self, run_id: str, fn: Function[..., Any] | None = None, /) -> Any:
        """Wait for what another run returned: one that this body did not start. It holds no slot meanwhile, and the answer is recorded.

        With `fn` the result has its type, and a run of another function raises Conflict. Raises NotFound for an unknown or another
        tenant's run (57), RunFailed, RunCancelled, RunTimeout or RunForwardIncomplete as for a child, Misuse for the run itself. It is a
        branch of the body, so a limit is `asyncio.timeout`.
        """
        self._here("result")
        plan = look_plan(self._host, run_id, fn)
        place = caller(1)

        async def wait() -> Any:
            while True:
                look = Call(loop=self._loop)
                self._step(look, plan, (run_id,), {})
                look.place = place
                found = await self._made(look, LOOK)
                if found is not None:
                    return answer(self._host, look.step_id, found, fn)
                waiting = AwaitCall(loop=self._loop)
                begin_wait(waiting, self._host, run_id)
                waiting.place = place
                await self._made(waiting, AWAIT)

        return self._loop.create_task(wait())

    def _called_for_end(self, function: Any) -> Call:
        """`ChildRun.result`: a call that takes no place of its own."""
        self._here("result")
        call = Call(loop=self._loop)
        call.codec = self._host.codec
        call.annotation = function.signature.returns
        call.place = caller(2)
        return call

    def sleep(self, duration: Duration, /) -> Coroutine[Any, Any, None]:
        """Wait durably: the run leaves memory for long ones. The same as `asyncio.sleep`, with a name of its own (29)."""
        self._here("sleep")
        call = Call(loop=self._loop)
        span = micros(duration, what="sleep")
        self._timer(call, self._loop.now + span, span)
        call.place = caller(1)
        return self._made(call, "sleep")  # type: ignore[no-any-return]

    def sleep_until(self, when: datetime, /) -> Coroutine[Any, Any, None]:
        """Wait durably until an instant. Raises ConfigurationError for a naive datetime."""
        self._here("sleep_until")
        call = Call(loop=self._loop)
        due = instant(when, what="sleep_until")
        self._timer(call, due, due)
        call.place = caller(1)
        return self._made(call, "sleep_until")  # type: ignore[no-any-return]

    @overload
    def wait_signal(self, signal: Signal[T], /, *, timeout: Duration | None = None) -> Coroutine[Any, Any, T]: ...
    @overload
    def wait_signal(self, signal: Signal[T], /, *, timeout: Duration, default: D) -> Coroutine[Any, Any, T | D]: ...
    def wait_signal(self, signal: Signal[Any], /, *, timeout: Duration | None = None, default: Any = NO_DEFAULT) -> Any:
        """The next signal of that kind, in the order of sending, each taken once; one that came before the wait counts (32).

        Raises SignalTimeout, or returns `default`, when the time is over. Raises SerializationError for a value that the type of the
        signal can not read: that signal is taken all the same, so a body that catches the error can wait for a better one.
        """
        self._here("wait_signal")
        call = Call(loop=self._loop)
        self._await_signal(call, signal, timeout, default)
        call.place = caller(1)
        return self._made(call, f"signal:{signal.name}")

    def progress(self, done: int, total: int | None = None, message: str = "") -> Coroutine[Any, Any, None]:
        """Say how far the run is; written with the next record or renewal, silent in replay (29a)."""
        self._set_progress(done, total, message)
        return self._completed(None)  # type: ignore[return-value]

    def publish(self, name: str, value: Any, /) -> Coroutine[Any, Any, None]:
        """Show a value to the outside before the run has ended: `await run.published()`. The last one of a name counts (29a).

        The value is plain JSON, or of a class that pydantic knows. Raises SerializationError, PayloadTooLarge.
        """
        self._here("publish")
        call = Call(loop=self._loop)
        place = self._publish(call, name, value)
        call.place = caller(1)
        return self._made(call, place)  # type: ignore[no-any-return]

    def approve(
        self, what: str, /, *, expires: Duration | None = None, default: bool | None = None
    ) -> Coroutine[Any, Any, bool]:
        """Wait until somebody says yes or no: `client.approve(run_id, what, True)` or `durable approvals`. Kept if it comes first.

        After `expires` it is `default`, or SignalTimeout is raised where there is none.
        """
        self._here("approve")
        call = Call(loop=self._loop)
        signal = approval(what)
        self._await_signal(call, signal, expires, NO_DEFAULT if default is None else default)
        call.place = caller(1)
        return self._made(call, f"signal:{signal.name}")  # type: ignore[no-any-return]

    def wait_until(
        self, check: Callable[P, Awaitable[bool]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, None]:
        """Call `check` as a step again and again until it is true. Between two tries the run waits durably.

        How often: `@durable.step(every="1m")`, or `check.using(every=...)`; 10 s otherwise. It is a branch of the body, so a limit
        is `asyncio.timeout`. What `check` raises for good is raised here.
        """
        self._here("wait_until")
        every = plan_for(check, self._plans).every / SECOND

        async def ask() -> None:
            while not await self.step(check, *args, **kwargs):
                await self.sleep(every)

        return self._loop.create_task(ask())  # type: ignore[return-value]

    def patched(self, change_id: str) -> Awaitable[bool]:
        """True where the run takes the new way: new runs, and old ones that had not come here yet. The answer is kept (25)."""
        self._here("patched")
        decided = self._is_patched(change_id)
        if decided is not None:
            return self._completed(decided)
        call = Call(loop=self._loop)
        self._bare(call, RecordKind.PATCH, value_envelope("true"))
        call.digest = digest(change_id)
        call.place = caller(1)
        return self._made(call, f"patch:{change_id}")  # type: ignore[no-any-return]

    def refuse_cancel(self) -> Coroutine[Any, Any, None]:
        """The pivot: from here on the run refuses to be cancelled and goes forward (46)."""
        self._here("refuse_cancel")
        call = Call(loop=self._loop)
        self._bare(call, RecordKind.PIVOT, value_envelope("null"))
        call.place = caller(1)
        return self._made(call, "refuse_cancel")  # type: ignore[no-any-return]

    def saga(self) -> Saga:
        """Steps that are undone in reverse order if what follows fails: `async with ctx.saga() as saga:` (49)."""
        self._here("saga")
        return Saga(self)

    def shield(self) -> AbstractAsyncContextManager[None]:
        """Steps inside still run after a cancel or time-out of the run, and a cancel of this branch waits for its end (44).

        A time limit that is set inside works inside.
        """
        self._here("shield")
        return _Shield(self._loop)

    def _completed(self, value: T) -> Awaitable[T]:
        call = Call(loop=self._loop)
        call.set_result(value)
        return call


class _Shield:
    def __init__(self, loop: BodyLoop) -> None:
        self._loop = loop

    async def __aenter__(self) -> None:
        task = asyncio.current_task(self._loop)
        if not isinstance(task, BranchTask):
            raise Misuse("ctx.shield() in a callback", hint="enter it in the body, or in a task of the body")
        self._task = task
        task.enter_shield()

    async def __aexit__(self, *_: object) -> None:
        if self._task.leave_shield():
            await _Turn()  # the cancel that was held back is raised here


class _Turn:
    def __await__(self) -> Generator[None, None, None]:
        yield


__all__ = ["Context"]
