"""Leaving a claim: the outcomes of a settle, and the renewal of leases (semantics 4 to 6, 13, 15, 16, 25, 31, 43).

`store.py` calls both. Completed runs of whose end nobody is told go first, in one round trip (`landing.complete_alone`). The rest is one
transaction: it locks the runs with their families, in order; terminal outcomes go through the landing, first; suspensions come last,
each against the wakes that the others of its batch have made. A renewal waits for nobody: a row that a commit under way holds is
`unknown`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from durable.enqueue import effective_start
from durable.landing import Ending, settled, state_after
from durable.model import (
    Cancelled,
    Completed,
    ErrorKind,
    Failure,
    HandedBack,
    Lease,
    Outcome,
    Renewal,
    Renewed,
    Retry,
    Settled,
    Status,
    Suspended,
)
from durable.settings import Micros

from . import flow, landing, locks, removal
from .adapting import Span, at, span
from .operation import Operation, Work, count, rows
from .rows import RUNNING

# The family belongs to the records: without one, any interpreter may take the run.
_FAMILY: Final = """
    replay_family = CASE WHEN EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = r.run_id) THEN r.replay_family END
"""
TO_PENDING: Final = f"""
UPDATE durable_run AS r SET status = 'pending', leased_until = NULL, available_at = e.available_at, failures = r.failures + e.failed,
    reclaims = CASE WHEN e.failed = 1 THEN r.reclaims ELSE 0 END,
    mismatch_since = CASE WHEN e.mismatch THEN coalesce(r.mismatch_since, now()) ELSE r.mismatch_since END,
    error = coalesce(e.error, r.error), error_kind = coalesce(e.kind, r.error_kind), error_detail = e.detail, error_positions = NULL,
    wake_after = 0, waiting_for = NULL, updated_at = now(), {_FAMILY}
FROM unnest($1::text[], $2::timestamptz[], $3::integer[], $4::boolean[], $5::text[], $6::text[], $7::jsonb[])
    AS e (run_id, available_at, failed, mismatch, error, kind, detail)
WHERE r.run_id = e.run_id
"""
TO_SUSPENDED: Final = f"""
UPDATE durable_run AS r SET status = 'suspended', leased_until = NULL, available_at = e.until, waiting_for = e.waiting_for,
    wake_after = e.wake_after, wake_delay = e.wake_delay, wake_on_failure = e.wake_on_failure, reclaims = 0, updated_at = now(), {_FAMILY}
FROM unnest($1::text[], $2::timestamptz[], $3::jsonb[], $4::integer[], $5::interval[], $6::boolean[])
    AS e (run_id, until, waiting_for, wake_after, wake_delay, wake_on_failure)
WHERE r.run_id = e.run_id
"""
# What was asked for and not renewed is compared with the row as it is committed: the fence stands and somebody holds the row, or not.
RENEW: Final = f"""
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::integer[], $3::text[], $4::jsonb[]) WITH ORDINALITY
        AS f (run_id, attempts, mark, progress, place)),
held AS MATERIALIZED (
    SELECT r.run_id, f.progress FROM durable_run AS r JOIN asked AS f
        ON f.run_id = r.run_id AND f.attempts = r.attempts AND f.mark = r.lease_owner
    WHERE {RUNNING} ORDER BY r.run_id FOR NO KEY UPDATE OF r SKIP LOCKED),
renewed AS (
    UPDATE durable_run AS r SET leased_until = now() + $5::interval, progress = coalesce(h.progress, r.progress),
        updated_at = CASE WHEN h.progress IS NULL THEN r.updated_at ELSE now() END
    FROM held AS h WHERE r.run_id = h.run_id
    RETURNING r.run_id, r.attempts, r.lease_owner, r.cancel_requested_at IS NOT NULL AND r.cancel_refused_at IS NULL AS asked, r.wake_seq)
SELECT n.run_id IS NOT NULL, coalesce(n.asked, false), coalesce(n.wake_seq, 0),
    r.status = 'running' AND r.attempts = f.attempts AND r.lease_owner = f.mark
FROM asked AS f LEFT JOIN renewed AS n ON n.run_id = f.run_id AND n.attempts = f.attempts AND n.lease_owner = f.mark
LEFT JOIN durable_run AS r ON r.run_id = f.run_id ORDER BY f.place
"""


Entry = tuple[Lease, Outcome]


def completed(entries: Sequence[Entry]) -> list[tuple[Lease, Completed]]:
    """Those that are tried with `landing.complete_alone`: completed, the only entry of their run, and not known to be linked."""
    once = Counter(lease.run_id for lease, _ in entries)
    return [
        (lease, outcome)
        for lease, outcome in entries
        if isinstance(outcome, Completed) and once[lease.run_id] == 1 and not lease.linked
    ]


def settle(work: Work, entries: Sequence[Entry]) -> Operation[list[Settled]]:
    """One answer per entry, in order."""
    ids = [lease.run_id for lease, _ in entries]
    if any(lease.linked for lease, _ in entries):
        locked, followed = (yield from locks.family(ids)), True
    else:
        locked, followed = yield from locks.family_and_followers(ids)
    answers: list[Settled] = []
    endings: list[Ending] = []
    pending: list[tuple[locks.Standing, Retry | HandedBack]] = []
    suspended: list[tuple[int, locks.Standing, Suspended]] = []
    left: dict[str, Outcome] = {}
    for place, (lease, outcome) in enumerate(entries):
        standing = locked.get(lease.run_id)
        if standing is None or lease.run_id in left or not _held(standing, lease):
            # A second entry of one run in this batch is a repeated one.
            answers.append("landed" if standing is not None and _recognised(standing, lease, outcome, left) else "lost")
            continue
        if standing.cancel_open and not isinstance(outcome, (Cancelled, HandedBack)):
            answers.append("woken")
            continue
        answers.append("landed")
        left[lease.run_id] = outcome
        if isinstance(outcome, Suspended):
            suspended.append((place, standing, outcome))
        elif isinstance(outcome, (Retry, HandedBack)):
            pending.append((standing, outcome))
        else:
            endings.append(settled(lease.run_id, outcome))
    if endings:
        last = not (followed or pending or suspended)
        yield from landing.land(work, locked, endings, last=last)
    if pending:
        yield from _to_pending(work, pending)
    going = [standing.run_id for standing, _ in pending]
    if suspended:
        for place, standing, outcome in suspended:
            if standing.wake_seq != outcome.wake_seq:
                answers[place] = "woken"
        resting = [(standing, outcome) for place, standing, outcome in suspended if answers[place] == "landed"]
        yield from _to_suspended(resting)
        going += [standing.run_id for standing, _ in resting]
    if going:
        yield from flow.release(work, going)
    return answers


def renew(work: Work, renewals: Sequence[Renewal], lease: Micros) -> Operation[list[Renewed]]:
    """Prolong what is held; a lease that lapsed and that nobody swept is held (13)."""
    leases = [renewal.lease for renewal in renewals]
    progress = [renewal.progress for renewal in renewals]
    fences = ([one.run_id for one in leases], [one.attempts for one in leases], [one.mark for one in leases])
    found = yield from rows(RENEW, *fences, progress, Span(lease))
    answers: list[Renewed] = []
    for renewal, (renewed, asked, wake_seq, stands) in zip(renewals, found, strict=True):
        if renewed:
            answers.append(Renewed(state="held", cancel_requested=asked, wake_seq=wake_seq))
            if renewal.progress is not None:
                work.announce(f"run:{renewal.lease.run_id}")
        else:
            answers.append(Renewed(state="unknown" if stands else "lost"))
    return answers


def _held(standing: locks.Standing, lease: Lease) -> bool:
    return (
        standing.status == Status.RUNNING and standing.attempts == lease.attempts and standing.lease_owner == lease.mark
    )


def _recognised(standing: locks.Standing, lease: Lease, outcome: Outcome, left: dict[str, Outcome]) -> bool:
    """A repeated settle whose first answer was lost: the same fence and mark, already in that state (6)."""
    before = left.get(lease.run_id)
    state = standing.status if before is None else state_after(before)
    return bool(
        standing.attempts == lease.attempts and standing.lease_owner == lease.mark and state == state_after(outcome)
    )


def _to_pending(work: Work, pending: Sequence[tuple[locks.Standing, Retry | HandedBack]]) -> Operation[None]:
    columns: list[tuple[Any, ...]] = []
    for standing, outcome in pending:
        retried = isinstance(outcome, Retry)
        failure: Failure | None = outcome.failure
        if isinstance(outcome, Retry):
            yield from removal.take_out(work, standing.run_id, standing.attempts, outcome.failure.positions)
        mismatch = not retried and failure is not None and failure.kind == ErrorKind.NON_DETERMINISM
        what = (None, None, None) if failure is None else (failure.message, str(failure.kind), failure.detail)
        available_at = effective_start(work.now, work.now + outcome.after, standing.deadline_at)
        if standing.cancel_open:
            available_at = None  # whoever asked is not kept waiting by a back-off (43)
        columns.append((standing.run_id, at(available_at), int(retried), mismatch, *what))
        if available_at is None:
            work.announce(f"queue:{standing.queue}")
    yield from count(TO_PENDING, *map(list, zip(*columns, strict=True)))


def _to_suspended(resting: Sequence[tuple[locks.Standing, Suspended]]) -> Operation[None]:
    if not resting:
        return
    columns: list[tuple[Any, ...]] = []
    for standing, outcome in resting:
        until = min((instant for instant in (outcome.until, standing.deadline_at) if instant is not None), default=None)
        waits = (outcome.waiting_for, outcome.wake_after, span(outcome.wake_delay), outcome.wake_on_failure)
        columns.append((standing.run_id, at(until), *waits))
    yield from count(TO_SUSPENDED, *map(list, zip(*columns, strict=True)))


__all__ = ["completed", "renew", "settle"]
