"""How a run leaves its claim or its life, as values: the state behind each outcome, and the reason in each end (semantics 1, 6). Pure.

The `landing.py` of each backend writes an `Ending`; whoever calls it (settle, claim, cancel, the sweep, a graph) makes one here, so that
an end is told in the same words on all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Final, TypeAlias

from .model import (
    Cancelled,
    Completed,
    ErrorKind,
    Failed,
    Failure,
    ForwardIncomplete,
    Json,
    Outcome,
    Status,
    Suspended,
    TimedOut,
)

LastOutcome: TypeAlias = Completed | Failed | Cancelled | TimedOut | ForwardIncomplete
"""The outcomes that end a run."""
_TERMINAL: Final[dict[type[Outcome], Status]] = {
    Completed: Status.COMPLETED,
    Failed: Status.FAILED,
    Cancelled: Status.CANCELLED,
    TimedOut: Status.TIMED_OUT,
    ForwardIncomplete: Status.FORWARD_INCOMPLETE,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends. Terminal status; output only with completed, failure otherwise."""

    run_id: str
    status: Status
    output: Json | None = None
    failure: Failure | None = None
    counts: bool = False
    """The execution that ends the run ended in an error, and is one more of its `failures` (2)."""


# -- outcomes -----------------------------------------------------------------------------------------------------------------


def state_after(outcome: Outcome) -> Status:
    """The state in which an outcome leaves its run: by it a repeated settle knows itself (6)."""
    return Status.SUSPENDED if isinstance(outcome, Suspended) else _TERMINAL.get(type(outcome), Status.PENDING)


def settled(run_id: str, outcome: LastOutcome) -> Ending:
    """The end that its holder gives it."""
    if isinstance(outcome, Completed):
        return Ending(run_id, Status.COMPLETED, output=outcome.output)
    return Ending(run_id, _TERMINAL[type(outcome)], failure=outcome.failure, counts=isinstance(outcome, Failed))


# -- ends that nobody settles -------------------------------------------------------------------------------------------------


def never_started(run_id: str, reason: str | None) -> Ending:
    """A cancel of a run that was never claimed (43)."""
    return _cancelled(run_id, reason or "cancelled before it was started")


def never_recorded(run_id: str, reason: str | None) -> Ending:
    """A cancel of a run that has no record, found by a claim (45)."""
    return _cancelled(run_id, reason or "cancelled before its first record")


def past_deadline(run_id: str) -> Ending:
    """A claim past the deadline (12)."""
    failure = Failure(message="its deadline passed before it was claimed", kind=ErrorKind.DEADLINE)
    return Ending(run_id, Status.TIMED_OUT, failure=failure)


def reclaimed_too_often(run_id: str, reclaims: int) -> Ending:
    """A sweep past the limit of reclaims (15)."""
    text = f"its lease lapsed {reclaims} times in a row without a new record: it may be what kills its workers"
    return Ending(run_id, Status.FAILED, failure=Failure(message=text, kind=ErrorKind.RECLAIM_LIMIT))


def damaged(run_id: str) -> Ending:
    """A claim of a run that can not be read (9)."""
    failure = Failure(message="its stored row or journal can not be read: it is damaged", kind=ErrorKind.PAYLOAD)
    return Ending(run_id, Status.FAILED, failure=failure)


def behind(run_id: str, before: str) -> Ending:
    """A node of a graph behind one that ended and did not complete (77)."""
    failure = Failure(message=f"a run before it in its graph did not complete: {before}", kind=ErrorKind.UPSTREAM)
    return Ending(run_id, Status.CANCELLED, failure=failure)


def _cancelled(run_id: str, reason: str) -> Ending:
    return Ending(run_id, Status.CANCELLED, failure=Failure(message=reason, kind=ErrorKind.CANCELLED))


__all__ = [
    "Ending",
    "LastOutcome",
    "behind",
    "damaged",
    "never_recorded",
    "never_started",
    "past_deadline",
    "reclaimed_too_often",
    "settled",
    "state_after",
]
