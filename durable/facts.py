"""What both contexts are made of: facts of the run, values that follow from its seed, and how a call of each kind is filled.

`context.Context` and `blocking.SyncContext` derive from `Facts` and add the verbs, each in its own manner of waiting. Nothing here
writes, waits or decides when something happens.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import logging
import uuid as uuids
from collections.abc import Mapping, MutableMapping
from datetime import datetime
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from . import steps
from .calls import Pending
from .codec import UNTYPED, Signature, digest, plain, value_envelope
from .errors import Misuse, SignalTimeout
from .instants import moment
from .model import Instant, RecordKind
from .saga import Compensation
from .settings import Duration, Micros, micros
from .signals import Signal
from .steps import STEP_KEY, Plans, StepPlan, checked_name, plan_of

if TYPE_CHECKING:
    from .activation import Activation

NO_DEFAULT: Any = object()
_PLAIN = (str, int, float, bool, list, dict)


def plan_for(fn: Any, own: Plans, *, skip_first: bool = False) -> StepPlan:
    wrapper = type(fn) is FunctionType
    if wrapper and not fn.__dict__:  # nearly every step is one, and is none of what follows
        return plan_of(fn, skip_first=skip_first, own=own)
    plan = getattr(fn, "plan", None)
    if isinstance(plan, StepPlan):
        if wrapper:  # made by functools.wraps around a step: it is what is called, by the policy of that step
            called = plan_of(fn, own=own)
            plan = dataclasses.replace(plan, fn=fn, signature=called.signature, coroutine=called.coroutine)
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


class Facts:
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
                if default is NO_DEFAULT
                else default
            )

    def _bare(self, call: Pending, kind: RecordKind, envelope: str) -> None:
        call.codec = self._host.codec
        call.kind = kind
        call.envelope = envelope

    def _compensation(self, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Pending) -> Compensation:
        """What a saga registers; numbered over the whole run, in the order of the calls."""
        self._compensations += 1
        return Compensation(self._compensations, plan_for(fn, self._plans), args, kwargs, call)

    def _publish(self, call: Pending, name: str, value: Any) -> str:
        """Make a call the record of a value; the answer is its name in the history."""
        checked_name(name, "published value")
        annotation: Any = UNTYPED if value is None or isinstance(value, _PLAIN) else cast("type[object]", type(value))
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


__all__ = ["NO_DEFAULT", "Facts", "plan_for"]
