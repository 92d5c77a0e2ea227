"""The mailbox (semantics 31, 32): signals and what came to a run from outside. `store.py` calls `send` in a transaction of ours or of the
caller's, and `inbox` to read. Nothing here delivers: the holder's records do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.errors import Conflict
from durable.model import TERMINAL, ChildEnd, Inbox, Lease, NewSignal, Scope, Signal, Status
from durable.storekit import unknown_run, within

from .operation import Ask, Operation, Row, Work, first, rows, together
from .rows import IN_SCOPE, RUNNING, of_scope

TARGET: Final = """
SELECT r.status, r.tenant_id, r.queue, s.seq FROM durable_run AS r
LEFT JOIN durable_signal AS s ON s.run_id = r.run_id AND s.dedup_id = $2
WHERE r.run_id = $1 FOR NO KEY UPDATE OF r
"""
SENT_BEFORE: Final = "SELECT s.seq FROM durable_signal AS s WHERE s.run_id = $1 AND s.dedup_id = $2"
# The counter first, and only of a live run: its new value is the signal's place in the order of everything that came to the run.
# A node of a graph that is not released yet stays where it is; a signal to it is kept.
SEND: Final = """
WITH bumped AS (
    UPDATE durable_run AS r SET wake_seq = r.wake_seq + 1, updated_at = now(),
        available_at = CASE WHEN r.status = 'suspended' AND r.attempts > 0 THEN NULL ELSE r.available_at END,
        wake_after = CASE WHEN r.status = 'suspended' AND r.attempts > 0 THEN 0 ELSE r.wake_after END,
        waiting_for = CASE WHEN r.status = 'suspended' AND r.attempts > 0 THEN NULL ELSE r.waiting_for END,
        status = CASE WHEN r.status = 'suspended' AND r.attempts > 0 THEN 'pending' ELSE r.status END
    WHERE r.run_id = $1 RETURNING r.run_id, r.wake_seq, r.tenant_id)
INSERT INTO durable_signal (run_id, name, seq, dedup_id, tenant_id, created_at, payload)
SELECT b.run_id, $2, b.wake_seq, $3, b.tenant_id, now(), $4::jsonb FROM bumped AS b RETURNING seq
"""
# The counter is read in the first statement: what a later one shows beyond it wakes the run again (31).
HELD: Final = f"""
SELECT r.run_id, r.attempts, r.lease_owner, r.wake_seq, r.cancel_requested_at IS NOT NULL AND r.cancel_refused_at IS NULL,
    coalesce(r.cancel_reason, '')
FROM durable_run AS r WHERE r.run_id = ANY ($1::text[]) AND {RUNNING}
"""
VISIBLE: Final = f"SELECT 1 FROM durable_run AS r WHERE {IN_SCOPE} AND r.run_id = $3"
KEPT: Final = (
    "SELECT g.name, g.seq, g.payload, g.created_at FROM durable_signal AS g WHERE g.run_id = $1 ORDER BY g.seq"
)
UNTAKEN: Final = """
SELECT g.run_id, g.name, g.seq, g.payload, g.created_at FROM durable_signal AS g WHERE g.run_id = ANY ($1::text[])
AND NOT EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = g.run_id AND s.signal_seq = g.seq) ORDER BY g.run_id, g.seq
"""
# A child with '@' in its step was parted from its parent by a retry (50): it answers to nobody.
ENDED_CHILDREN: Final = """
SELECT c.parent_run_id, c.run_id, c.parent_step_id, c.status, c.output, c.error, c.error_kind, c.error_detail, c.finished_at
FROM durable_run AS c
WHERE c.parent_run_id = ANY ($1::text[]) AND c.status IN ('completed', 'failed', 'cancelled', 'timed_out', 'forward_incomplete')
AND strpos(c.parent_step_id, '@') = 0
AND NOT EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = c.parent_run_id AND s.step_id = c.parent_step_id || ':end')
ORDER BY c.finished_at, c.submitted
"""


def send(work: Work, signal: NewSignal, scope: Scope) -> Operation[int]:
    """Store a signal and wake its run; the signal's seq. Sent before with this dedup id: the first one's seq, and nothing is done."""
    row = yield from first(TARGET, signal.run_id, signal.dedup_id)
    if row is None or not within(row[1], scope):
        raise unknown_run(signal.run_id)
    status, _, queue, seq = row
    if seq is None:  # looked for again now that the run is locked: whoever sent it meanwhile has committed
        before = yield from first(SENT_BEFORE, signal.run_id, signal.dedup_id)
        seq = None if before is None else before[0]
    if seq is not None:
        return int(seq)
    if status in TERMINAL:
        raise Conflict(
            f"run {signal.run_id} has ended ({status}): nobody would take the signal {signal.name!r}",
            hint="look at the state of the run before; a run that has ended can be retried or forked",
        )
    ((number,),) = yield from rows(SEND, signal.run_id, signal.name, signal.dedup_id, signal.payload)
    work.announce(f"run:{signal.run_id}")
    if status == Status.SUSPENDED:
        work.announce(f"queue:{queue}")
    return int(number)


def signals(work: Work, run_id: str, scope: Scope) -> Operation[list[Signal]]:
    """Every signal that is kept of a run, by seq. Raises NotFound."""
    visible, found = yield from together(Ask(VISIBLE, (*of_scope(scope), run_id)), Ask(KEPT, (run_id,)))
    if not visible:
        raise unknown_run(run_id)
    return [Signal(name=name, seq=seq, payload=payload, at=instant) for name, seq, payload, instant in found]


def inbox(work: Work, leases: Sequence[Lease]) -> Operation[list[Inbox | None]]:
    """For each lease what came from outside and no record holds; None where the fence is gone."""
    ids = sorted({lease.run_id for lease in leases})
    held, signals, children = yield from together(Ask(HELD, (ids,)), Ask(UNTAKEN, (ids,)), Ask(ENDED_CHILDREN, (ids,)))
    holders = {row[0]: row for row in held}
    signals_of: dict[str, list[Signal]] = {}
    for run_id, name, seq, payload, instant in signals:
        signals_of.setdefault(run_id, []).append(Signal(name=name, seq=seq, payload=payload, at=instant))
    children_of: dict[str, list[ChildEnd]] = {}
    for row in children:
        children_of.setdefault(row[0], []).append(_child(row))
    answers: list[Inbox | None] = []
    for lease in leases:
        holder = holders.get(lease.run_id)
        if holder is None or holder[1] != lease.attempts or holder[2] != lease.mark:
            answers.append(None)
            continue
        answers.append(
            Inbox(
                wake_seq=holder[3],
                cancel_requested=holder[4],
                cancel_reason=holder[5],
                signals=signals_of.get(lease.run_id, []),
                children=children_of.get(lease.run_id, []),
            )
        )
    return answers


def _child(row: Row) -> ChildEnd:
    return ChildEnd(
        run_id=row[1],
        step_id=row[2],
        status=Status(row[3]),
        output=row[4],
        error=row[5],
        error_kind=row[6],
        error_detail=row[7],
        at=row[8],
    )


__all__ = ["inbox", "send", "signals"]
