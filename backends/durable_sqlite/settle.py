"""Leaving a claim: the outcomes of a settle, and the renewal of leases (semantics 4 to 6, 13, 15, 16, 25, 31, 43).

`store.py` calls `settle` and `renew` inside the shared write transaction, which is what holds between the reading of a fence and
the writing under it. Terminal outcomes go through the landing, first; suspensions come last, each against the wakes that the
others of its batch have made.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from durable.enqueue import effective_start
from durable.landing import Ending, settled, state_after
from durable.model import (
    Cancelled,
    ErrorKind,
    Failure,
    HandedBack,
    Instant,
    Lease,
    Outcome,
    Renewal,
    Renewed,
    Retry,
    Settled,
    Suspended,
)
from durable.settings import Micros

from . import flow, landing, removal
from .connection import announce

STATES: Final = """
SELECT run_id, status, attempts, lease_owner, cancel_requested_at IS NOT NULL AND cancel_refused_at IS NULL, wake_seq, deadline_at,
    submitted, queue
FROM durable_run WHERE run_id IN (SELECT value FROM json_each(?))
"""
# The family belongs to the records: without one, any interpreter may take the run.
_FAMILY: Final = """
    replay_family = CASE WHEN EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = durable_run.run_id) THEN replay_family END
"""
TO_PENDING: Final = f"""
UPDATE durable_run SET status = 'pending', leased_until = NULL, available_at = ?, failures = failures + ?,
    reclaims = CASE WHEN ? THEN 0 ELSE reclaims END,
    mismatch_since = CASE WHEN ? THEN coalesce(mismatch_since, ?) ELSE mismatch_since END,
    error = coalesce(?, error), error_kind = coalesce(?, error_kind), error_detail = ?, error_positions = NULL,
    wake_after = 0, waiting_for = NULL, updated_at = ?, {_FAMILY}
WHERE submitted = ?
"""
TO_SUSPENDED: Final = f"""
UPDATE durable_run SET status = 'suspended', leased_until = NULL, available_at = ?, waiting_for = ?, wake_after = ?, wake_delay = ?,
    wake_on_failure = ?, reclaims = 0, updated_at = ?, {_FAMILY}
WHERE submitted = ? AND wake_seq = ?
"""
RENEW: Final = "UPDATE durable_run SET leased_until = ? WHERE submitted = ?"
PROGRESS: Final = "UPDATE durable_run SET progress = ?, updated_at = ? WHERE submitted = ?"

_Row = tuple[Any, ...]


def settle(con: sqlite3.Connection, now: Instant, entries: Sequence[tuple[Lease, Outcome]]) -> list[Settled]:
    """One answer per entry, in order."""
    rows = _states(con, [lease.run_id for lease, _ in entries])
    answers: list[Settled] = []
    endings: list[Ending] = []
    pending: list[tuple[_Row, Retry | HandedBack]] = []
    suspended: list[tuple[int, _Row, Suspended]] = []
    for place, (lease, outcome) in enumerate(entries):
        row = rows.get(lease.run_id)
        if row is None or not _held(row, lease):
            answers.append("landed" if row is not None and _recognised(row, lease, outcome) else "lost")
            continue
        if row[4] and not isinstance(outcome, (Cancelled, HandedBack)):
            answers.append("woken")
            continue
        answers.append("landed")
        rows[lease.run_id] = _left(row, outcome)  # a second entry of one run in this batch is a repeated one
        if isinstance(outcome, Suspended):
            suspended.append((place, row, outcome))
        elif isinstance(outcome, (Retry, HandedBack)):
            pending.append((row, outcome))
        else:
            endings.append(settled(lease.run_id, outcome))
    if endings:
        landing.land(con, now, endings)
    for row, retried in pending:
        _to_pending(con, now, row, retried)
    left = [row[0] for row, _ in pending]
    for place, row, outcome in suspended:
        until = min((at for at in (outcome.until, row[6]) if at is not None), default=None)
        values = (until, outcome.waiting_for, outcome.wake_after, outcome.wake_delay, outcome.wake_on_failure)
        if con.execute(TO_SUSPENDED, (*values, now, row[7], outcome.wake_seq)).rowcount == 1:
            left.append(row[0])
        else:
            answers[place] = "woken"
    if left:
        flow.release(con, now, left)
    return answers


def renew(con: sqlite3.Connection, now: Instant, renewals: Sequence[Renewal], lease: Micros) -> list[Renewed]:
    """Prolong what is held; a lease that lapsed and that nobody swept is held (13)."""
    rows = _states(con, [renewal.lease.run_id for renewal in renewals])
    answers: list[Renewed] = []
    held: list[tuple[Instant, int]] = []
    for renewal in renewals:
        row = rows.get(renewal.lease.run_id)
        if row is None or not _held(row, renewal.lease):
            answers.append(Renewed(state="lost"))
            continue
        held.append((now + lease, row[7]))
        answers.append(Renewed(state="held", cancel_requested=bool(row[4]), wake_seq=row[5]))
        if renewal.progress is not None:
            con.execute(PROGRESS, (renewal.progress, now, row[7]))
            announce(con, f"run:{row[0]}")
    con.executemany(RENEW, held)
    return answers


def _states(con: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, _Row]:
    return {row[0]: row for row in con.execute(STATES, (json.dumps(run_ids),))}


def _held(row: _Row, lease: Lease) -> bool:
    return bool(row[1] == "running" and row[2] == lease.attempts and row[3] == lease.mark)


def _recognised(row: _Row, lease: Lease, outcome: Outcome) -> bool:
    """A repeated settle whose first answer was lost: the same fence and mark, already in that state (6)."""
    return bool(row[2] == lease.attempts and row[3] == lease.mark and row[1] == state_after(outcome))


def _left(row: _Row, outcome: Outcome) -> _Row:
    return (row[0], str(state_after(outcome)), *row[2:])


def _to_pending(con: sqlite3.Connection, now: Instant, row: _Row, outcome: Retry | HandedBack) -> None:
    run_id, _, attempts, _, asked, _, deadline_at, submitted, queue = row
    retried = isinstance(outcome, Retry)
    failure: Failure | None = outcome.failure
    if isinstance(outcome, Retry):
        removal.take_out(con, now, run_id, attempts, outcome.failure.positions)
    mismatch = not retried and failure is not None and failure.kind == ErrorKind.NON_DETERMINISM
    what = (None, None, None) if failure is None else (failure.message, str(failure.kind), failure.detail)
    # An ask that came before the hand-back makes it claimable now, as one that comes after it does (43).
    available_at = None if asked else effective_start(now, now + outcome.after, deadline_at)
    con.execute(TO_PENDING, (available_at, int(retried), not retried, mismatch, now, *what, now, submitted))
    if available_at is None:
        announce(con, f"queue:{queue}")
