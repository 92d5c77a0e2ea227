"""What the ending of a body means for its run, as a value (semantics 2, 25, 44-47, 50). Pure: the runner carries it out.

Order of semantics 47: the lease and the ask come before this (the runner and the store see to them); then the deadline or the
cap; then what the body did.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import assert_never, cast

from ..codec import error_data
from ..errors import (
    Misuse,
    NonDeterminismError,
    SerializationError,
    SpinningError,
    StuckError,
)
from ..model import (
    Cancelled,
    Completed,
    ErrorKind,
    Failed,
    Failure,
    ForwardIncomplete,
    HandedBack,
    Instant,
    Outcome,
    RecordKind,
    Retry,
    RunRecord,
    StepRecord,
    TimedOut,
)
from ..replay import (
    BadPayload,
    CancelledEnding,
    Ending,
    Interrupted,
    Mismatch,
    MisuseEnding,
    PutAside,
    Raised,
    Returned,
    Spinning,
    Stuck,
    TimedOutEnding,
)
from ..retry import Retry as Policy
from ..settings import MINUTE, SECOND, Micros

LONGEST_HAND_BACK: Micros = 10 * MINUTE
OVER_THE_LIMIT = "its workers went away too often without a record (max_reclaims); what it had done was undone"


def failure_of(error: BaseException, kind: str, positions: tuple[int, ...] = ()) -> Failure:
    """An error as the data that a landed run keeps (23)."""
    data = error_data(error)
    return Failure(message=f"{data.type_name}: {data.message}", kind=kind, detail=data.to_json(), positions=positions)


def cancelled_by_ask(reason: str = "") -> Cancelled:
    """An ask that is not refused decides, whatever the body did (43, 44)."""
    return Cancelled(failure=Failure(message=reason or "cancelled", kind=ErrorKind.CANCELLED))


def growing_delay(count: int) -> Micros:
    """For a run that is handed back again and again: doubling from a second up to ten minutes."""
    return min(LONGEST_HAND_BACK, SECOND << min(max(count - 1, 0), 20))


def time_limit(run: RunRecord, declared: Micros | None) -> Micros | None:
    """The cap of one execution: what the run was started with, else what the function declares (12)."""
    options = _options(run)
    if "timeout" in options:
        own = options["timeout"]
        return own if isinstance(own, int) else None
    return declared


def policy_of(run: RunRecord, declared: Policy) -> Policy:
    """The back-off of the run's retries: what it was started with, else what the function declares."""
    own = _options(run).get("retry")
    return Policy.from_json(json.dumps(own), like=declared) if own is not None else declared


def _options(run: RunRecord) -> dict[str, object]:
    return {} if run.options is None else cast("dict[str, object]", json.loads(run.options))


def outcome_of(
    ending: Ending,
    *,
    run: RunRecord,
    history: Sequence[StepRecord],
    declared: Policy,
    cancel_asked: bool,
    now: Instant,
    mismatch_limit: Micros,
) -> Outcome:
    """What is to be settled. Past a pivot a run that can not go forward is left incomplete, whatever the reason (49)."""
    outcome = _outcome_of(ending, run, history, declared, cancel_asked, now, mismatch_limit)
    if isinstance(outcome, Failed) and past_a_pivot(history):
        return ForwardIncomplete(failure=outcome.failure)
    return outcome


def _outcome_of(
    ending: Ending,
    run: RunRecord,
    history: Sequence[StepRecord],
    declared: Policy,
    cancel_asked: bool,
    now: Instant,
    mismatch_limit: Micros,
) -> Outcome:
    match ending:
        case Returned(output=output):
            return Completed(output=output)
        case CancelledEnding(reason=reason):
            return cancelled_by_ask(reason)
        case TimedOutEnding(kind=ErrorKind.RECLAIM_LIMIT):
            return Failed(failure=Failure(message=OVER_THE_LIMIT, kind=ErrorKind.RECLAIM_LIMIT))
        case TimedOutEnding(kind=(ErrorKind.STUCK | ErrorKind.SPINNING) as kind, message=message):
            return Failed(failure=Failure(message=message, kind=kind))
        case TimedOutEnding(kind=kind) if past_a_pivot(history):
            return ForwardIncomplete(failure=Failure(message="the run passed its pivot and ran out of time", kind=kind))
        case TimedOutEnding(kind=kind):
            what = "its deadline" if kind == ErrorKind.DEADLINE else "the time limit of one execution"
            return TimedOut(failure=Failure(message=f"the run passed {what}", kind=kind))
        case Raised(error=error, positions=positions):
            return _of_error(error, positions, run, declared, undone=has_undone(history))
        case BadPayload(error=error):
            return Failed(failure=failure_of(error, ErrorKind.PAYLOAD))
        case Stuck(error=error):
            return Failed(failure=failure_of(error, ErrorKind.STUCK))
        case Spinning(error=error):
            return Failed(failure=failure_of(error, ErrorKind.SPINNING))
        case MisuseEnding(error=error):
            return Failed(failure=failure_of(error, ErrorKind.MISUSE))
        case Mismatch(error=error):
            return _of_mismatch(error, run, history, cancel_asked, now, mismatch_limit)
        case Interrupted(error=error):
            return _of_interruption(error, run)
        case PutAside():
            return HandedBack()
        case _:
            assert_never(ending)


def past_a_pivot(history: Sequence[StepRecord]) -> bool:
    """A saga has passed its pivot: the run goes forward, or is left incomplete (49).

    A pivot that was on its way when a branch failed, and that the body had given up, is none: what it did is undone after it, by
    calls that were made before it was there."""
    if not any(record.kind is RecordKind.COMPENSATION for record in history):
        return False
    undone = [
        (one.seen, one.position) for one in history if one.position is not None and one.step_id.startswith("undo/")
    ]
    pivots = [one.position for one in history if one.position is not None and one.kind is RecordKind.PIVOT]
    return any(not any(seen < pivot < position for seen, position in undone) for pivot in pivots)


def given_up(run: RunRecord, history: Sequence[StepRecord], max_reclaims: int) -> Outcome | None:
    """The outcome of a run with a saga that took its workers away too often, where its body is not to be called any more (15, 49).

    Past the limit a run is called once more, to undo. If that takes workers away, too, it is left as it is: a person must look. Past
    a pivot there is nothing to be undone."""
    if not run.compensating or run.reclaims <= max_reclaims:
        return None
    if run.cancel_refused_at is not None:
        text = (
            f"past its pivot its lease lapsed {run.reclaims} times in a row without a new record: it can not go forward"
        )
        return ForwardIncomplete(failure=Failure(message=text, kind=ErrorKind.RECLAIM_LIMIT))
    if not any(record.kind in (RecordKind.TIMEOUT, RecordKind.CANCEL) for record in history):
        return None
    done = sum(record.step_id.startswith("undo/") for record in history)
    wanted = sum(record.kind is RecordKind.COMPENSATION for record in history)
    text = (
        f"what undoes it took its workers away {run.reclaims} times in a row: {done} of {wanted} compensations are recorded,"
        " the rest must be undone by hand"
    )
    asked = run.cancel_requested_at is not None
    failure = Failure(message=text, kind=ErrorKind.RECLAIM_LIMIT)
    return Cancelled(failure=failure) if asked else Failed(failure=failure)


def has_undone(history: Sequence[StepRecord]) -> bool:
    """A compensation has run: the journal tells of what does not hold any more, and is not gone on with (50)."""
    return any(record.step_id.startswith("undo/") for record in history)


def _of_error(
    error: BaseException, positions: tuple[int, ...], run: RunRecord, declared: Policy, *, undone: bool
) -> Outcome:
    failure = failure_of(error, _kind_of(error), positions)
    attempt = run.failures + 1
    if undone:
        return Failed(failure=failure)
    if run.max_attempts is not None and attempt >= run.max_attempts:
        return Failed(failure=failure)
    policy = policy_of(run, declared)
    # How often is the run's own number (an operator may have added some); which errors and after how long is the policy's.
    if not _unlimited(policy).decides(error, attempt):
        return Failed(failure=failure)
    return Retry(after=policy.delay(attempt, random=random.random()), failure=failure)


def _unlimited(policy: Policy) -> Policy:
    return Policy(
        None,
        initial=policy.initial / SECOND,
        factor=policy.factor,
        maximum=policy.maximum / SECOND,
        jitter=policy.jitter,
        on=policy.on,
        give_up_on=policy.give_up_on,
    )


def _kind_of(error: BaseException) -> str:
    match error:
        case Misuse():
            return ErrorKind.MISUSE
        case SerializationError():
            return ErrorKind.PAYLOAD
        case StuckError():
            return ErrorKind.STUCK
        case SpinningError():
            return ErrorKind.SPINNING
        case _:
            return ErrorKind.EXCEPTION


def _of_mismatch(
    error: NonDeterminismError,
    run: RunRecord,
    history: Sequence[StepRecord],
    cancel_asked: bool,
    now: Instant,
    limit: Micros,
) -> Outcome:
    """Handed back with growing delay, so that one bad rolling deploy ends nothing (25)."""
    if cancel_asked:
        return cancelled_by_ask()
    failure = failure_of(error, ErrorKind.NON_DETERMINISM)
    since = run.mismatch_since
    if since is not None and any(record.at > since for record in history):
        since = None  # there was progress since: the limit starts anew
    if since is None:
        return HandedBack(after=SECOND, failure=failure)
    if now - since >= limit:
        return Failed(failure=failure)
    return HandedBack(after=min(max(now - since, SECOND), LONGEST_HAND_BACK), failure=failure)


def _of_interruption(error: Exception, run: RunRecord) -> Outcome:
    """The store refused a record. A value that it can not hold will not become one that it can; all else may pass, an error that nobody
    foresaw included: it is no failure of the body, which might have something to undo (49)."""
    if isinstance(error, SerializationError):
        return Failed(failure=failure_of(error, ErrorKind.PAYLOAD))
    return HandedBack(after=growing_delay(run.attempts), failure=failure_of(error, ErrorKind.EXCEPTION))


__all__ = ["cancelled_by_ask", "failure_of", "given_up", "growing_delay", "outcome_of", "policy_of", "time_limit"]
