"""Waiting in a body for the end of a run that is no child of it: `ctx.result` (semantics 30, 31, 57).

Two kinds of records. A step, `result`, looks at the run: it holds how the run landed, or nothing if it has not. Then `await` starts a
child that depends on the run as a node of a graph does: the store releases it, or ends it, in the write by which the run lands (or in its
own, where the run was purged meanwhile), and so wakes the body, which looks again. Nothing is polled, no slot is held, and a crash anywhere
leaves a journal that goes on.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .calls import Pending
from .children import RunCall, ThreadRunCall
from .codec import UNTYPED, digest, open_envelope, plain, rebuild, value_envelope
from .endings import end_envelope
from .errors import Conflict, MissingKey, Misuse, NotFound, RegistrationError, StoreUnavailable
from .model import Dependency, Json, NewRun, RecordKind, StepRecord, new_run_id
from .replay import mark_position
from .retry import Retry
from .steps import StepPlan

if TYPE_CHECKING:
    from .activation import Activation

AWAITED = "durable.result"
"""The function of the children that wait. Every worker knows it; it does nothing."""
LOOK = "result"
AWAIT = "await"


def look_plan(host: Activation, run_id: object, function: Any) -> StepPlan:
    """The step that looks. Raises Misuse for a run that waits for itself, RegistrationError for what is no function.

    The step fails with NotFound for an unknown or another tenant's run, with Conflict for a run of another function."""
    if not isinstance(run_id, str):
        raise Misuse(f"ctx.result takes the id of a run, not {run_id!r}", hint="ctx.result(run.id, function)")
    if run_id == host.run_record.run_id:
        raise Misuse("ctx.result of the run itself: it would wait for ever", hint="return what you have")
    if function is not None and not getattr(function, "__durable_function__", False):
        raise RegistrationError(f"{function!r} is not a durable function", hint="ctx.result(run_id, function)")
    name = None if function is None else function.name

    async def result(run_id: str) -> Any:
        record = await host.recorder.look(run_id)
        if record is None:
            raise NotFound(f"there is no run {run_id!r}", hint="a run sees those of its own tenant only")
        if name is not None and record.name != name:
            raise Conflict(f"run {run_id} is of {record.name}, not of {name}")
        return plain.read(end_envelope(record)) if record.status.terminal else None

    return StepPlan.of(result, name=LOOK, retry=Retry(None, on=(StoreUnavailable, MissingKey), maximum="30s"))


def answer(host: Activation, step_id: str, found: Any, function: Any) -> Any:
    """What the body gets of a run that has landed: its result, or its error, which knows where it is recorded (50)."""
    annotation = UNTYPED if function is None else function.signature.returns
    good, value = open_envelope(host.codec, plain.write(found), annotation)
    if good:
        return value
    error = rebuild(value, step_id)
    position = host.journal.by_id[step_id].position
    if position is not None:
        mark_position(error, position)
    raise error


def begin_wait(call: AwaitCall | ThreadAwaitCall, host: Activation, run_id: str) -> None:
    """Make a call the start of the child that waits, and the wait for its end."""
    call.host = host
    call.codec = host.codec
    call.kind = RecordKind.START
    call.digest = digest(run_id)
    call.begins = lambda: _waiter(host, call, run_id)


def _waiter(host: Activation, call: Pending, run_id: str) -> tuple[Json, tuple[NewRun, ...]]:
    parent = host.run_record
    run = NewRun(
        run_id=new_run_id(),
        name=AWAITED,
        input="[[],{}]",
        seed=os.urandom(16),
        tenant=parent.tenant,
        queue=parent.queue,
        priority=parent.priority,
        keep=0,  # with its parent
        parent_run_id=parent.run_id,
        parent_step_id=call.step_id,
        depends_on=(Dependency(run_id=run_id, kind="end"),),
    )
    return value_envelope(plain.write({"run_id": run.run_id})), (run,)


class AwaitCall(RunCall):
    """The wait of an `async def` body."""

    def resolve(self, record: StepRecord) -> tuple[Any, BaseException | None]:
        """However it ended: the body looks again."""
        return None, None


class ThreadAwaitCall(ThreadRunCall):
    """The wait of a `def` body."""

    def resolve(self, record: StepRecord) -> tuple[Any, BaseException | None]:
        """As `AwaitCall.resolve`."""
        return None, None


__all__ = ["AWAIT", "AWAITED", "LOOK", "AwaitCall", "ThreadAwaitCall", "answer", "begin_wait", "look_plan"]
