"""`@durable.function` and `@durable.step`: declarations, the options of a start, and the registry by which a worker finds functions.

The client starts a `Function` with its options, the worker looks names up in a `Registry`, an activation opens the body through
`Program`. Everything that can be wrong with a declaration or an option is refused here, at once, with the reason; nothing here
runs a body, and nothing talks to a store.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import hashlib
import inspect
import os
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar, Concatenate, Generic, Literal, ParamSpec, Protocol, overload
from uuid import UUID

from typing_extensions import TypeVar

from .blocking import SyncContext
from .codec import Codec, Signature
from .context import Context
from .cron import Cron
from .errors import Misuse, RegistrationError
from .model import Json, NewRun, new_run_id
from .options import (
    ABSENT,
    Options,
    checked,
    checked_cron,
    checked_priority,
    checked_retry,
    checked_span,
    checked_text,
)
from .retry import Retry
from .settings import Duration, Micros, micros
from .steps import StepPlan, checked_name

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
SEED_BYTES = 16


# -- steps ------------------------------------------------------------------------------------------------------------------


class Step(Generic[P, R_co]):
    """A function that knows how it is tried as a step. Called directly it is the plain function."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.__wrapped__ = plan.fn
        self.__name__ = plan.name
        self.__doc__ = plan.fn.__doc__

    @property
    def name(self) -> str:
        """Its name in the journal."""
        return self.plan.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """The plain function: nothing is recorded."""
        result: R_co = self.plan.fn(*args, **kwargs)
        return result

    def using(
        self, *, name: str = ABSENT, retry: Retry = ABSENT, timeout: Duration | None = ABSENT, every: Duration = ABSENT
    ) -> Step[P, R_co]:
        """The same step under another name, policy or time limit. `timeout=None`: no limit; `every`: see `ctx.wait_until`."""
        return Step(_replan(self.plan, name, retry, timeout, every))

    def __repr__(self) -> str:
        return f"<durable step {self.name}>"


def _replan(plan: StepPlan, name: str, retry: Retry, timeout: Duration | None, every: Duration = ABSENT) -> StepPlan:
    return dataclasses.replace(
        plan,
        name=plan.name if name is ABSENT else checked_name(name, "step"),
        retry=plan.retry if retry is ABSENT else checked_retry(retry),
        timeout=plan.timeout if timeout is ABSENT else None if timeout is None else checked_span(timeout, "timeout"),
        every=plan.every if every is ABSENT else checked_span(every, "every"),
    )


class _StepDecorator(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> Step[P, R]: ...


@overload
def step(fn: Callable[P, R], /) -> Step[P, R]: ...
@overload
def step(
    *, name: str = ..., retry: Retry = ..., timeout: Duration | None = ..., every: Duration = ...
) -> _StepDecorator: ...
def step(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str = ABSENT,
    retry: Retry = ABSENT,
    timeout: Duration | None = ABSENT,
    every: Duration = ABSENT,
) -> Any:
    """Declare how a function is tried when it is a step. Any function is a step without this: one attempt, no time limit.

    `every`: how long `ctx.wait_until` waits before it asks again (default 10 s).
    """
    if fn is None:
        return functools.partial(step_of, name=name, retry=retry, timeout=timeout, every=every)
    return step_of(fn, name, retry, timeout, every)


def step_of(
    fn: Callable[..., Any], name: str, retry: Retry, timeout: Duration | None, every: Duration = ABSENT
) -> Step[Any, Any]:
    """The step of a callable. Raises RegistrationError."""
    if isinstance(fn, (Step, Function)):
        raise RegistrationError(f"{fn.name!r} is declared already", hint="use .using(...) for another policy")
    return Step(_replan(StepPlan.of(fn, name=None if name is ABSENT else name), ABSENT, retry, timeout, every))


# -- functions ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What `@durable.function(...)` says of a function."""

    name: str
    version: str | None
    queue: str
    retry: Retry
    timeout: Micros | None
    priority: int
    max_concurrency: int | None
    cron: Cron | None
    keep: Micros | None


class Function(Generic[P, R_co]):
    """A durable function. Started by `client.start(f, ...)` or `client.run(f, ...)`, never called."""

    __durable_function__: ClassVar[bool] = True

    def __init__(self, fn: Callable[..., Any], declared: Declaration, options: Options | None = None) -> None:
        self.fn = fn
        self.declared = declared
        self.options = options or Options()
        self.signature = Signature.of(fn, skip_first=True)
        self.blocking = not inspect.iscoroutinefunction(fn)
        self.__wrapped__ = fn
        self.__name__ = declared.name
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__

    @property
    def name(self) -> str:
        """The name by which runs find it."""
        return self.declared.name

    @property
    def version(self) -> str | None:
        """Runs of a version are taken only by workers that have it (7)."""
        return self.declared.version

    @property
    def queue(self) -> str:
        """Where its runs wait."""
        return self.declared.queue

    @property
    def retry(self) -> Retry:
        """The policy of its runs (2)."""
        return self.declared.retry

    @property
    def timeout(self) -> Micros | None:
        """The cap of one execution (12)."""
        return self.declared.timeout

    @property
    def cron(self) -> Cron | None:
        """Its own schedule."""
        return self.declared.cron

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 digits of the source. A change alone is a warning, never a gate (25)."""
        return source_fingerprint(self.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a plain call would record nothing."""
        raise Misuse(
            f"{self.name} is a durable function: called directly it would run without a journal",
            hint=f"start it with: await client.run({self.name}, ...), or client.start(...) without waiting for the result."
            f" In a test of the plain body: {self.name}.fn(ctx, ...)",
        )

    def using(
        self,
        *,
        idempotency_key: str = ABSENT,
        coalesce_key: str = ABSENT,
        on_coalesce: Literal["join", "replace"] = ABSENT,
        max_delay: Duration = ABSENT,
        sequence_key: str = ABSENT,
        concurrency_key: str = ABSENT,
        queue: str = ABSENT,
        priority: int = ABSENT,
        delay: Duration = ABSENT,
        at: datetime = ABSENT,
        deadline: datetime | Duration = ABSENT,
        retry: Retry = ABSENT,
        timeout: Duration | None = ABSENT,
        keep: Duration = ABSENT,
        cron: Cron | str = ABSENT,
        tags: Mapping[str, str] = ABSENT,
        detached: bool = ABSENT,
    ) -> Function[P, R_co]:
        """The same function with other options for its next starts. Checked at once: RegistrationError, ConfigurationError."""
        given = {
            "idempotency_key": idempotency_key,
            "coalesce_key": coalesce_key,
            "on_coalesce": on_coalesce,
            "max_delay": max_delay,
            "sequence_key": sequence_key,
            "concurrency_key": concurrency_key,
            "queue": queue,
            "priority": priority,
            "delay": delay,
            "at": at,
            "deadline": deadline,
            "retry": retry,
            "timeout": timeout,
            "keep": keep,
            "cron": cron,
            "tags": tags,
            "detached": detached,
        }
        return self.with_options(checked(given, self.options))

    def with_options(self, options: Options) -> Function[P, R_co]:
        """The same function with these options, whole."""
        self.fingerprint  # noqa: B018 -- reading the source takes milliseconds: once per function, not once per start
        made = copy.copy(self)
        made.options = options
        return made

    # -- for the engine (replay.Program) ----------------------------------------------------------------------------------

    def encode_arguments(self, codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Json:
        """The input of a run. Raises TypeError, SerializationError, PayloadTooLarge."""
        return self.signature.encode_arguments(codec, args, kwargs)

    def new_run(self, payload: Json, *, tenant: UUID | None) -> NewRun:
        """A run with this input, as it is stored: by the declaration, and by the options of this start."""
        declared, options = self.declared, self.options
        retry = options.retry if options.retry is not None else declared.retry
        return NewRun(
            run_id=new_run_id(),
            name=declared.name,
            input=payload,
            seed=os.urandom(SEED_BYTES),
            tenant=tenant,
            queue=options.queue if options.queue is not None else declared.queue,
            priority=options.priority if options.priority is not None else declared.priority,
            delay=options.delay,
            start_at=options.start_at,
            deadline_at=options.deadline_at,
            deadline_after=options.deadline_after,
            idempotency_key=options.idempotency_key,
            coalesce_key=options.coalesce_key,
            on_coalesce=options.on_coalesce,
            max_delay=options.max_delay,
            sequence_key=options.sequence_key,
            concurrency_key=options.concurrency_key,
            max_attempts=retry.max_attempts,
            options=self.start_options(),
            version=declared.version,
            fingerprint=self.fingerprint,
            keep=options.keep if options.keep is not None else declared.keep,
            tags=options.tags,
        )

    def start_options(self) -> Json | None:
        """What the holder of a run must know that the declaration does not say."""
        return self.options.overrides()

    def open(self, host: Any, payload: Json, codec: Codec) -> Callable[[], Any]:
        """Bind the body to a context on `host`. Raises SerializationError for an input that it can not read."""
        args, kwargs = self.signature.decode_arguments(codec, payload)
        context = SyncContext(host, self.name) if self.blocking else Context(host, self.name)
        return lambda: self.fn(context, *args, **kwargs)

    def encode_result(self, value: Any, codec: Codec) -> Json:
        """The output, by the return annotation. Raises SerializationError."""
        return codec.encode(value, self.signature.returns)

    def decode_result(self, output: Json, codec: Codec) -> Any:
        """The result of a run. Raises SerializationError."""
        return codec.decode(output, self.signature.returns)

    def __repr__(self) -> str:
        return f"<durable function {self.name}>"


def source_fingerprint(fn: Callable[..., Any]) -> str:
    """16 digits of the source as it is parsed, so without comments and layout; of the byte code where there is no source."""
    try:
        material = ast.dump(ast.parse(textwrap.dedent(inspect.getsource(fn)))).encode()
    except (OSError, TypeError, SyntaxError):
        code = getattr(inspect.unwrap(fn), "__code__", None)
        material = code.co_code if code is not None else repr(type(fn)).encode()
    return hashlib.blake2b(material, digest_size=8).hexdigest()


class Registry:
    """Functions by name: what a worker knows. `@durable.function` puts a function into the default one."""

    def __init__(self, name: str = "default") -> None:
        self.name = name
        self._functions: dict[tuple[str, str | None], Function[..., Any]] = {}

    def add(self, fn: Function[..., Any]) -> None:
        """Raises RegistrationError for another function of that name and version. The same one again (a module that is
        loaded twice) takes the place of the one before."""
        key = (fn.name, fn.version)
        there = self._functions.get(key)
        if there is not None and _home(there) != _home(fn):
            raise RegistrationError(
                f"there are two durable functions of the name {fn.name!r}: {_home(there)} and {_home(fn)}",
                hint="give one another name: @durable.function(name=...); the name is how stored runs find their code",
            )
        self._functions[key] = fn

    def get(self, name: str, version: str | None = None) -> Function[..., Any] | None:
        """The function for a run: that version, or the one without; for a run without a version any of that name."""
        exact = self._functions.get((name, version)) or self._functions.get((name, None))
        if exact is not None or version is not None:
            return exact
        return next((fn for (known, _), fn in self._functions.items() if known == name), None)

    def __iter__(self) -> Iterator[Function[..., Any]]:
        return iter(list(self._functions.values()))

    def __len__(self) -> int:
        return len(self._functions)

    def __repr__(self) -> str:
        return f"<durable registry {self.name}: {', '.join(sorted(name for name, _ in self._functions)) or 'empty'}>"


def _home(fn: Function[..., Any]) -> str:
    return f"{fn.fn.__module__}.{fn.fn.__qualname__}"


default_registry = Registry()
"""Where `@durable.function` puts functions, unless it is given another."""


class _FunctionDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Function[P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[SyncContext, P], R], /) -> Function[P, R]: ...


@overload
def function(fn: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Function[P, R]: ...
@overload
def function(fn: Callable[Concatenate[SyncContext, P], R], /) -> Function[P, R]: ...
@overload
def function(
    *,
    name: str = ...,
    version: str = ...,
    queue: str = ...,
    retry: Retry = ...,
    timeout: Duration | None = ...,
    priority: int = ...,
    max_concurrency: int | None = ...,
    cron: Cron | str | None = ...,
    keep: Duration | None = ...,
    registry: Registry = ...,
) -> _FunctionDecorator: ...
def function(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str | None = None,
    queue: str = "default",
    retry: Retry = Retry.NEVER,
    timeout: Duration | None = None,
    priority: int = 0,
    max_concurrency: int | None = None,
    cron: Cron | str | None = None,
    keep: Duration | None = None,
    registry: Registry = default_registry,
) -> Any:
    """Declare a durable function: its body replays, its steps are recorded.

    `async def` with a `Context`, or `def` with a `SyncContext`, as the first parameter. `timeout` caps one execution (12), `retry`
    counts executions that fail, `keep` says how long a landed run is kept. Raises RegistrationError, ConfigurationError.
    """

    def declare(body: Callable[..., Any]) -> Function[Any, Any]:
        if isinstance(body, (Function, Step)):
            raise RegistrationError(f"{body.name!r} is declared already", hint="decorate the plain function, once")
        if not inspect.isfunction(body):
            raise RegistrationError(f"{body!r} is not a function that `async def` or `def` made")
        if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
            raise RegistrationError(
                f"{body.__qualname__} yields: a durable function returns once", hint="return a list"
            )
        _check_count(max_concurrency)
        declared = Declaration(
            name=checked_name(body.__name__ if name is None else name, "durable function"),
            version=None if version is None else checked_text(version, "version", 255),
            queue=checked_name(queue, "queue"),
            retry=checked_retry(retry),
            timeout=None if timeout is None else checked_span(timeout, "timeout"),
            priority=checked_priority(priority),
            max_concurrency=max_concurrency,
            cron=None if cron is None else checked_cron(cron),
            keep=None if keep is None else micros(keep, what="keep"),
        )
        made: Function[Any, Any] = Function(body, declared)
        registry.add(made)
        return made

    return declare if fn is None else declare(fn)


def _check_count(value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise RegistrationError(f"max_concurrency is a whole number from 1, or None, not {value!r}")
