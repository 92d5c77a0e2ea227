"""Submitting runs, as values: what a key may be, when a run starts, and what a joiner changes of it (semantics 34 to 42). Pure.

The `enqueue.py` of each backend decides with these, so that a submit means the same on all of them.
"""

from __future__ import annotations

from typing import Final

from .errors import Conflict
from .model import Instant, NewRun, RunRecord, Status
from .storekit import maker, stored_key

KEY_LENGTH: Final = 1_024
"""Longest key, in characters: the same on every store."""


def check_keys(run: NewRun) -> None:
    """Raise Conflict for a key that is empty or too long."""
    for what in ("idempotency_key", "coalesce_key", "sequence_key", "concurrency_key"):
        key = getattr(run, what)
        if key is not None and not 0 < len(key) <= KEY_LENGTH:
            raise Conflict(
                f"{what}: {len(key)} characters", hint=f"a key has 1 to {KEY_LENGTH} characters; hash longer ones"
            )


def check_function(run: NewRun, holder: str, what: str, key: str) -> None:
    """Raise Conflict where the key of a submit belongs to a run of another function, named `holder` (35, 36)."""
    if holder != run.name:
        raise Conflict(
            f"the {what} key {key!r} belongs to a run of {holder!r}, not of {run.name!r}",
            hint="use another key; a common way is to begin it with the function's name",
        )


def join_key(run: NewRun) -> str:
    """The engine's own key under which a join is remembered: its run id names no row, and the submit may be repeated (34, 42)."""
    return stored_key(run.tenant, f"~join:{run.run_id}")


# -- starts -------------------------------------------------------------------------------------------------------------------


def asked_start(now: Instant, run: NewRun) -> Instant | None:
    """The later one of delay and stated start; None where neither was given."""
    starts = [] if run.delay is None else [now + run.delay]
    if run.start_at is not None:
        starts.append(run.start_at)
    return max(starts, default=None)


def joined_start(now: Instant, run: NewRun, *, created_at: Instant, available_at: Instant | None) -> Instant | None:
    """When a waiting run starts that this submit joins: a joiner never delays it, but a debounce does, up to `max_delay` after the
    first submit (37). None is now, the earliest."""
    start = asked_start(now, run)
    if run.on_coalesce == "replace" and run.max_delay is not None:
        return None if start is None else min(start, created_at + run.max_delay)
    return None if start is None or available_at is None else min(start, available_at)


def effective_start(now: Instant, start: Instant | None, deadline_at: Instant | None) -> Instant | None:
    """When a run is claimable: never later than its deadline (12); what is past is now, and now is None."""
    if start is not None and deadline_at is not None:
        start = min(start, deadline_at)
    return None if start is None or start <= now else start


# -- what was stored ----------------------------------------------------------------------------------------------------------

_make: Final = maker(RunRecord)


def created_run(
    run: NewRun,
    now: Instant,
    *,
    submitted: int,
    status: Status,
    priority: int,
    text: str,
    available_at: Instant | None,
    blocked_on: str | None,
    wake_after: int,
    deadline_at: Instant | None,
) -> RunRecord:
    """The record of a run as it was just inserted, with `text` as its input: reading it back would double the cost of a submit."""
    # By the order of the fields.
    what = (run.run_id, run.name, status, run.tenant, text, None, None, None, None, run.queue, priority)
    counters = (0, 0, 0, submitted)
    times = (now, now, None, None, available_at, None, None, deadline_at, None, None, None)
    keys = (run.idempotency_key, run.coalesce_key, run.sequence_key, run.concurrency_key, blocked_on)
    code = (run.max_attempts, run.options, run.version, run.fingerprint, run.seed)
    waits = (0, wake_after, None, False)
    family = (run.parent_run_id, run.parent_step_id, run.detached, run.schedule_id, run.scheduled_for, None)
    rest = (None, None, None, run.keep, dict(run.tags) if run.tags else {})
    return _make((*what, *counters, *times, *keys, *code, *waits, *family, *rest))


__all__ = [
    "KEY_LENGTH",
    "asked_start",
    "check_function",
    "check_keys",
    "created_run",
    "effective_start",
    "join_key",
    "joined_start",
]
