"""What a body sees of its run: `Context` in an `async def` body, `SyncContext` in a `def` body.

Every verb takes its place in the history when it is called, awaited or not, and refuses (Misuse) to be called anywhere but in the
body it belongs to. The activation is the host; nothing here writes, waits or decides when something happens.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import hashlib
import hmac
import logging
import uuid as uuids
from asyncio import events
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload
from uuid import UUID

from . import steps
from .bodyloop import BodyLoop
from .branches import BranchTask
from .calls import Call, Pending
from .children import (
    ChildRun,
    Fan,
    MapCall,
    RunCall,
    StartCall,
    SyncChildRun,
    ThreadEndCall,
    ThreadMapCall,
    ThreadRunCall,
    ThreadStartCall,
    begin,
    checked_child,
)
from .codec import UNTYPED, Signature, digest, plain, value_envelope
from .errors import Misuse, SignalTimeout
from .instants import instant, moment
from .model import Instant, RecordKind
from .places import caller
from .saga import Compensation, Saga, SyncSaga
from .settings import SECOND, Duration, Micros, micros
from .signals import Signal, approval
from .steps import STEP_KEY, Plans, StepPlan, checked_name, plan_of
from .threadbody import ThreadBody, ThreadCall

if TYPE_CHECKING:
    from .activation import Activation
    from .function import Function

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
D = TypeVar("D")
Tx = TypeVar("Tx")
_NO_DEFAULT: Any = object()
_PLAIN = (str, int, float, bool, list, dict)


def _plan(fn: Any, own: Plans, *, skip_first: bool = False) -> StepPlan:
    plan = getattr(fn, "plan", None)
    if isinstance(plan, StepPlan):
        return plan if not skip_first else dataclasses.replace(plan, signature=Signature.of(plan.fn, skip_first=True))
    if getattr(fn, "__durable_function__", False):
        steps.refuse_durable_function(fn)
    return plan_of(fn, skip_first=skip_first, own=own)


class _Log(logging.LoggerAdapter[logging.Logger]):
    """Silent while the body replays; every line knows its run."""

    def __init__(self, host: Activation, function: str, facts: Mapping[str, object]) -> None:
        super().__init__(logging.getLogger(f"durable.run.{function}"), {})
        self._host = host
        self._facts = facts

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name is logging's
        """Not in replay: the line was written when it was new."""
        return not self._host.replaying and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add run_id, function and attempt to the record; what the caller passes as extra stays."""
        kwargs["extra"] = {**self._facts, **(kwargs.get("extra") or {})}
        return msg, kwargs


class _Facts:
    """What both contexts know without asking: facts of the run, and values that follow from its seed and the place of the call."""

    def __init__(self, host: Activation, function: str) -> None:
        run = host.run_record
        self._host = host
        self._plans: Plans = {}
        self._compensations = 0
        self.function = function
        self.run_id: str = run.run_id
        self.tenant: UUID | None = run.tenant
        self.attempt: int = run.failures + 1
        self.tags: Mapping[str, str] = run.tags
        self.scheduled_for: datetime | None = None if run.scheduled_for is None else moment(run.scheduled_for)

    @functools.cached_property
    def log(self) -> _Log:
        """For lines about the run: silent in replay, each with run_id, function and attempt."""
        facts = {"run_id": self.run_id, "function": self.function, "attempt": self.attempt}
        return _Log(self._host, self.function, facts)

    @property
    def replaying(self) -> bool:
        """The body has not yet come to where the journal ends. For logs and metrics only: never decide by it."""
        return self._host.replaying

    @property
    def step_key(self) -> str:
        """Inside a step: `run_id:step_id`, the same in every attempt; pass it to outside services as their idempotency key (27).
        Raises Misuse outside of a step."""
        try:
            return STEP_KEY.get()
        except LookupError:
            raise Misuse(
                "ctx.step_key outside of a step", hint="read it in the function that is passed to ctx.step"
            ) from None

    def _here(self, verb: str) -> None:
        raise NotImplementedError

    def _drawn(self, verb: str) -> bytes:
        self._here(verb)
        step_id = self._host.body.scope().step_id(verb)
        return hmac.digest(self._host.run_record.seed, step_id.encode(), hashlib.sha256)

    def now(self) -> datetime:
        """The instant of the last delivered record, UTC: the same live and in replay (R8)."""
        self._here("now")
        return moment(self._host.body.now)

    def random(self) -> float:
        """A number in [0, 1) that is the same in replay."""
        return (int.from_bytes(self._drawn("random")[:8], "big") >> 11) / (1 << 53)

    def uuid(self) -> UUID:
        """A UUID (version 4) that is the same in replay."""
        return uuids.UUID(bytes=self._drawn("uuid")[:16], version=4)

    def _set_progress(self, done: int, total: int | None, message: str) -> None:
        self._here("progress")
        text = self._host.codec.within_limit(plain.write({"done": done, "total": total, "message": message}))
        if not self._host.replaying and not self._host.over:
            self._host.recorder.progress(text)

    def _step(self, call: Pending, plan: StepPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        codec = self._host.codec
        call.codec = codec
        call.plan = plan
        call.args = args
        call.kwargs = kwargs
        call.arguments = plan.signature.encode_arguments(codec, args, kwargs)
        call.digest = digest(call.arguments)
        call.annotation = plan.signature.returns

    def _timer(self, call: Pending, due: Instant, told: Micros) -> None:
        call.codec = self._host.codec
        call.kind = RecordKind.TIMER
        call.due = due
        call.digest = digest(str(told))

    def _await_signal(self, call: Pending, signal: Signal[Any], timeout: Duration | None, default: Any) -> None:
        span = None if timeout is None else micros(timeout, what=f"timeout of the signal {signal.name!r}")
        call.codec = self._host.codec
        call.kind = RecordKind.SIGNAL
        call.annotation = signal.type
        call.signal = signal.name
        call.digest = digest(f"{signal.name}:{span}")
        if span is not None:
            call.due = self._host.body.now + span
            call.on_time_out = lambda: (
                SignalTimeout(
                    f"no signal {signal.name!r} came within {timeout}", hint="pass default=... to go on without it"
                )
                if default is _NO_DEFAULT
                else default
            )

    def _bare(self, call: Pending, kind: RecordKind, envelope: str) -> None:
        call.codec = self._host.codec
        call.kind = kind
        call.envelope = envelope

    def _compensation(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Pending) -> Compensation:
        """What a saga registers; numbered over the whole run, in the order of the calls."""
        self._compensations += 1
        return Compensation(self._compensations, _plan(fn, self._plans), args, kwargs, call)

    def _publish(self, call: Pending, name: str, value: Any) -> str:
        """Make a call the record of a value; the answer is its name in the history."""
        checked_name(name, "published value")
        annotation = UNTYPED if value is None or isinstance(value, _PLAIN) else type(value)
        text = self._host.codec.encode(value, annotation)
        self._bare(call, RecordKind.PUBLISH, value_envelope(f'{{"name":{plain.write(name)},"value":{text}}}'))
        call.digest = digest(text)
        call.silent = True
        return f"publish:{name}"

    def _is_patched(self, change_id: str) -> bool | None:
        """True or False if the journal decides; None: the change is to be recorded (25)."""
        checked_name(change_id, "change")
        journal = self._host.journal
        scope = self._host.body.scope()
        name = f"patch:{change_id}"
        count = scope.names.get(name, 0)
        step_id = f"{scope.path}{name}" if count == 0 else f"{scope.path}{name}#{count + 1}"
        if step_id in journal.by_id or not self._host.replaying:
            return None
        scope.step_id(name)
        return False


class Context(_Facts):
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
        plan = _plan(fn, self._plans)
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
        plan = _plan(fn, self._plans, skip_first=True)
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
    def wait_signal(
        self, signal: Signal[Any], /, *, timeout: Duration | None = None, default: Any = _NO_DEFAULT
    ) -> Any:
        """The next signal of that kind, in the order of sending, each taken once; one that came before the wait counts (32).

        Raises SignalTimeout, or returns `default`, when the time is over.
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
        self._await_signal(call, signal, expires, _NO_DEFAULT if default is None else default)
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
        every = _plan(check, self._plans).every / SECOND

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


class SyncContext(_Facts):
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
        plan = _plan(fn, self._plans)
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
    def wait_signal(
        self, signal: Signal[Any], /, *, timeout: Duration | None = None, default: Any = _NO_DEFAULT
    ) -> Any:
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
        self._await_signal(call, signal, expires, _NO_DEFAULT if default is None else default)
        call.place = caller(1)
        return bool(self._called(call, f"signal:{signal.name}"))

    def wait_until(self, check: Callable[P, bool], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """As `Context.wait_until`."""
        self._here("wait_until")
        every = _plan(check, self._plans).every / SECOND
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


__all__ = ["Context", "SyncContext"]
