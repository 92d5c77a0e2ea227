"""The mailbox (semantics 31, 32): signals and what came to a run from outside. `store.py` calls `send` in a write, or on a caller's
own transaction, and `inbox` in a read, where one snapshot covers all of it. Nothing here delivers: the holder's records do.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from durable.errors import Conflict
from durable.model import TERMINAL, ChildEnd, Inbox, Instant, Lease, NewSignal, Scope, Signal, Status
from durable.storekit import unknown_run

from . import scopes
from .connection import announce
from .rows import of_scope

TARGET = "SELECT status, tenant_id, queue FROM durable_run WHERE run_id = ?"
SENT_BEFORE = "SELECT seq FROM durable_signal WHERE run_id = ? AND dedup_id = ?"
# The counter first, and only of a live run: its new value is the signal's place in the order of everything that came to the run.
# A node of a graph that is not released yet stays where it is; a signal to it is kept.
BUMP = """
UPDATE durable_run SET wake_seq = wake_seq + 1, updated_at = ?,
    available_at = CASE WHEN status = 'suspended' AND attempts > 0 THEN NULL ELSE available_at END,
    wake_after = CASE WHEN status = 'suspended' AND attempts > 0 THEN 0 ELSE wake_after END,
    waiting_for = CASE WHEN status = 'suspended' AND attempts > 0 THEN NULL ELSE waiting_for END,
    status = CASE WHEN status = 'suspended' AND attempts > 0 THEN 'pending' ELSE status END
WHERE run_id = ? AND status IN ('pending', 'running', 'suspended')
"""
COUNTER = "SELECT wake_seq FROM durable_run WHERE run_id = ?"
INSERT = """
INSERT INTO durable_signal (run_id, name, seq, dedup_id, tenant_id, created_at, payload) VALUES (?, ?, ?, ?, ?, ?, ?)
"""

VISIBLE = "SELECT 1 FROM durable_run WHERE run_id = ? AND (? OR tenant_id IS ?)"
KEPT = "SELECT name, seq, payload, created_at FROM durable_signal WHERE run_id = ? ORDER BY seq"
HELD = """
SELECT wake_seq, cancel_requested_at IS NOT NULL AND cancel_refused_at IS NULL, coalesce(cancel_reason, '') FROM durable_run
WHERE run_id = ? AND status = 'running' AND attempts = ? AND lease_owner = ?
"""
UNTAKEN = """
SELECT name, seq, payload, created_at FROM durable_signal WHERE run_id = ?
AND seq NOT IN (SELECT signal_seq FROM durable_step WHERE run_id = ? AND signal_seq IS NOT NULL) ORDER BY seq
"""
# A child with '@' in its step was parted from its parent by a retry (50): it answers to nobody.
ENDED_CHILDREN = """
SELECT run_id, parent_step_id, status, output, error, error_kind, error_detail, finished_at FROM durable_run AS c
WHERE parent_run_id = ? AND status IN ('completed', 'failed', 'cancelled', 'timed_out', 'forward_incomplete')
AND instr(parent_step_id, '@') = 0
AND NOT EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = c.parent_run_id AND s.step_id = c.parent_step_id || ':end')
ORDER BY finished_at, submitted
"""


def send(con: sqlite3.Connection, now: Instant, signal: NewSignal, scope: Scope) -> int:
    """Store a signal and wake its run; the signal's seq. Sent before with this dedup id: the first one's seq, and nothing is done."""
    row = con.execute(TARGET, (signal.run_id,)).fetchone()
    if row is None or not scopes.sees(scope, row[1]):
        raise unknown_run(signal.run_id)
    before = con.execute(SENT_BEFORE, (signal.run_id, signal.dedup_id)).fetchone()
    if before is not None:
        return int(before[0])
    status, tenant_id, queue = row
    if status in TERMINAL:
        raise Conflict(f"run {signal.run_id} has ended ({status}): nobody would take the signal {signal.name!r}")
    con.execute(BUMP, (now, signal.run_id))
    (seq,) = con.execute(COUNTER, (signal.run_id,)).fetchone()
    con.execute(INSERT, (signal.run_id, signal.name, seq, signal.dedup_id, tenant_id, now, signal.payload))
    announce(con, f"run:{signal.run_id}")
    if status == Status.SUSPENDED:
        announce(con, f"queue:{queue}")
    return int(seq)


def signals(con: sqlite3.Connection, now: Instant, run_id: str, scope: Scope) -> list[Signal]:
    """Every signal that is kept of a run, by seq. Raises NotFound."""
    if con.execute(VISIBLE, (run_id, *of_scope(scope))).fetchone() is None:
        raise unknown_run(run_id)
    return [
        Signal(name=name, seq=seq, payload=payload, at=at) for name, seq, payload, at in con.execute(KEPT, (run_id,))
    ]


def inbox(con: sqlite3.Connection, now: Instant, leases: Sequence[Lease]) -> list[Inbox | None]:
    """For each lease what came from outside and no record holds; None where the fence is gone."""
    return [_inbox(con, lease) for lease in leases]


def _inbox(con: sqlite3.Connection, lease: Lease) -> Inbox | None:
    held = con.execute(HELD, (lease.run_id, lease.attempts, lease.mark)).fetchone()
    if held is None:
        return None
    signals = con.execute(UNTAKEN, (lease.run_id, lease.run_id)).fetchall()
    children = con.execute(ENDED_CHILDREN, (lease.run_id,)).fetchall()
    return Inbox(
        wake_seq=held[0],
        cancel_requested=bool(held[1]),
        cancel_reason=held[2],
        signals=[Signal(name=name, seq=seq, payload=payload, at=at) for name, seq, payload, at in signals],
        children=[
            ChildEnd(
                run_id=child[0],
                step_id=child[1],
                status=Status(child[2]),
                output=child[3],
                error=child[4],
                error_kind=child[5],
                error_detail=child[6],
                at=child[7],
            )
            for child in children
        ],
    )
