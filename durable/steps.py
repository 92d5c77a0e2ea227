"""What a step is, and one attempt at it: call the function, encode what it returns, or make its error data.

The contexts make a `StepPlan` of whatever callable they are given; the activation calls `attempt` in a task of the worker's loop.
It knows no journal and no retries; it never delivers anything to a body.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from .codec import Codec, Signature, error_data, error_envelope, lasting, value_envelope
from .errors import Misuse, RegistrationError, SerializationError, StepTimeout
from .retry import Retry
from .settings import SECOND, Micros

STEP_KEY: contextvars.ContextVar[str] = contextvars.ContextVar("durable_step_key")
"""Inside a step: `run_id:step_id`, the key to pass to outside services (27)."""

InThread: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls something in a thread."""
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_FORBIDDEN = frozenset("/#:@")


def checked_name(name: object, what: str) -> str:
    """A name as rule 27 wants it. Raises RegistrationError."""
    if not isinstance(name, str) or not name or not name.strip():
        raise RegistrationError(f"the name of a {what} is text and not empty, not {name!r}")
    bad = sorted({letter for letter in name if letter in _FORBIDDEN or not letter.isprintable()})
    if bad or len(name) > 255:
        told = "more than 255 characters" if not bad else "the characters " + " ".join(map(repr, bad))
        raise RegistrationError(
            f"{name[:80]!r} can not be the name of a {what}: it has {told}",
            hint="ids are made of names with / # : and @ between them; use letters, digits, spaces, '.', '-' or '_'",
        )
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """A callable as a step: its name in the journal, its policy, and what it takes and returns."""

    name: str
    fn: Callable[..., Any]
    retry: Retry
    timeout: Micros | None
    signature: Signature
    coroutine: bool
    every: Micros = 10 * SECOND
    """How long `ctx.wait_until` waits before it asks again."""

    @classmethod
    def of(cls, fn: Callable[..., Any], *, name: str | None = None, retry: Retry = Retry.NEVER, timeout: Micros | None = None,
           skip_first: bool = False) -> StepPlan:  # fmt: skip
        """The plan of a callable. Raises RegistrationError for a name or a signature that can not be one."""
        if not callable(fn):
            raise RegistrationError(
                f"{fn!r} is not a function", hint="pass the function itself and its arguments: ctx.step(fn, a, b)"
            )
        return cls(
            name=checked_name(name if name is not None else _name_of(fn), "step"),
            fn=fn,
            retry=retry,
            timeout=timeout,
            signature=Signature.of(fn, skip_first=skip_first),
            coroutine=_is_coroutine_function(fn),
        )


@functools.lru_cache(maxsize=4_096)
def _cached_plan(fn: Callable[..., Any], skip_first: bool) -> StepPlan:
    return StepPlan.of(fn, skip_first=skip_first)


Plans: TypeAlias = dict[tuple[Callable[..., Any], bool], StepPlan]
"""Plans that one body has made: they go when it goes."""


def plan_of(fn: Callable[..., Any], *, skip_first: bool = False, own: Plans | None = None) -> StepPlan:
    """The plan of a plain callable: one attempt, no time limit. Kept for ever where the callable stays anyway, else in `own`."""
    if lasting(fn):
        return _cached_plan(fn, skip_first)
    if own is None:
        return StepPlan.of(fn, skip_first=skip_first)
    try:
        plan = own.get((fn, skip_first))
    except TypeError:  # it can not be hashed
        return StepPlan.of(fn, skip_first=skip_first)
    if plan is None:
        plan = own[fn, skip_first] = StepPlan.of(fn, skip_first=skip_first)
    return plan


def _name_of(fn: Callable[..., Any]) -> str:
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    return getattr(inner, "__name__", None) or type(inner).__name__


def _is_coroutine_function(fn: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


class Attempted(NamedTuple):
    """How an attempt ended: the envelope to be stored; the value as it will be read from it, or the error."""

    envelope: str
    value: Any = None
    error: BaseException | None = None


def isolated(plan: StepPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any], text: str, codec: Codec) -> Arguments:
    """The arguments as their decoded copy, unless nothing in them can change: a step that alters a list of the body would alter it
    live and not in replay."""
    for value in args:
        if type(value) not in _SCALARS:
            return plan.signature.decode_arguments(codec, text)
    for value in kwargs.values():
        if type(value) not in _SCALARS:
            return plan.signature.decode_arguments(codec, text)
    return args, kwargs


async def attempt(
    plan: StepPlan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    step_id: str,
    codec: Codec,
    run_blocking: InThread,
    interruptible: bool,
) -> Attempted:
    """One attempt. Raises CancelledError only if the task itself was cancelled, and KeyboardInterrupt; every other error is data.

    A result that can not be stored is an error of the step like any other: recorded, so that replay raises it too (22).
    """
    try:
        if plan.timeout is None:
            value = await _called(plan, args, kwargs, run_blocking)
        elif interruptible:
            value = await _interrupted(plan, plan.timeout, args, kwargs, step_id, run_blocking)
        else:
            value = await _measured(plan, plan.timeout, args, kwargs, step_id, run_blocking)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return failed(error)  # raised from within, asked by nobody: a failure like any other (23)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit and the rest of what code can raise are data here (23)
        return failed(error)
    try:
        text, back = codec.roundtrip(value, plan.signature.returns)
    except (SerializationError, RegistrationError) as error:
        error.add_note(f"this is the result of the step {step_id}")
        return failed(error)
    return Attempted(value_envelope(text), value=back)


def failed(error: BaseException) -> Attempted:
    """An attempt that ended in this error."""
    return Attempted(error_envelope(error_data(error)), error=error)


async def _interrupted(
    plan: StepPlan, limit: Micros, args: tuple[Any, ...], kwargs: Mapping[str, Any], step_id: str, in_thread: InThread
) -> Any:
    timeout = asyncio.timeout(limit / SECOND)
    try:
        async with timeout:
            return await _called(plan, args, kwargs, in_thread)
    except TimeoutError as error:
        if timeout.expired():
            raise _timed_out(limit, step_id) from error
        raise


async def _measured(
    plan: StepPlan, limit: Micros, args: tuple[Any, ...], kwargs: Mapping[str, Any], step_id: str, in_thread: InThread
) -> Any:
    """A step in the thread of its body: it can not be interrupted, the time limit takes effect when it returns (28b)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    value = await _called(plan, args, kwargs, in_thread)
    if loop.time() - began > limit / SECOND:
        raise _timed_out(limit, step_id)
    return value


def _timed_out(limit: Micros, step_id: str) -> StepTimeout:
    return StepTimeout(
        f"ran longer than its timeout of {limit / SECOND:g} s",
        step_id=step_id,
        type_name="durable.errors.StepTimeout",
    )


def _called(plan: StepPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any], run_blocking: InThread) -> Awaitable[Any]:
    if plan.coroutine:
        return plan.fn(*args, **kwargs)  # type: ignore[no-any-return]
    return _in_thread(plan, args, kwargs, run_blocking)


async def _in_thread(plan: StepPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any], run_blocking: InThread) -> Any:
    context = contextvars.copy_context()
    value, error = await run_blocking(lambda: _guarded(context, plan, args, kwargs))
    if error is not None:
        raise _as_raised(error)
    return await value if inspect.isawaitable(value) else value


def _guarded(
    context: contextvars.Context, plan: StepPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, BaseException | None]:
    """In the thread: an error is handed over as a value, since a future can not carry every class (StopIteration)."""
    try:
        return context.run(plan.fn, *args, **kwargs), None
    except BaseException as error:  # noqa: BLE001 - it is raised again by who waits
        return None, error


def _as_raised(error: BaseException) -> BaseException:
    if isinstance(
        error, (StopIteration, StopAsyncIteration, GeneratorExit)
    ):  # a coroutine can not raise these as they are
        wrapped = _Carried(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped
    return error


class _Carried(RuntimeError):
    """StopIteration from a `def` step."""


def refuse_durable_function(fn: object) -> None:
    """Raised where a durable function is passed as a step."""
    raise Misuse(
        f"{getattr(fn, 'name', fn)!r} is a durable function, not a step",
        hint="start it as a run of its own: await client.run(fn, ...)",
    )
