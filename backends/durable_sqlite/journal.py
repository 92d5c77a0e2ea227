"""The journal: fenced appends, reading a history, and the record of an exactly-once transaction (semantics 3, 18 to 26).

`store.py` calls `append` inside the shared write transaction, `history` on a reader. The fence is matched in the insert itself: a
worker whose lease is gone writes nothing. Nothing here deletes a record; that is `removal.py`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from durable.errors import Conflict
from durable.model import Appended, Instant, Lease, NewRecord, RecordKind, Scope, StepRecord
from durable.storekit import unknown_run

from . import enqueue
from .connection import announce
from .rows import STEP_COLUMNS, STEP_ORDER, of_scope, step_record

INSERT: Final = """
INSERT INTO durable_step (run_id, tenant_id, step_id, kind, position, seen, digest, fence, created_at, started_at, signal_seq, result)
SELECT run_id, tenant_id, ?, ?, ?, ?, ?, attempts, ?, ?, ?, ? FROM durable_run
WHERE run_id = ? AND status = 'running' AND attempts = ? AND lease_owner = ?
ON CONFLICT (run_id, step_id) DO NOTHING
"""
FENCE: Final = "SELECT 1 FROM durable_run WHERE run_id = ? AND status = 'running' AND attempts = ? AND lease_owner = ?"
STORED: Final = f"SELECT {STEP_COLUMNS} FROM durable_step WHERE run_id = ? AND step_id = ?"
SOME_MISMATCH: Final = "SELECT 1 FROM durable_run WHERE mismatch_since IS NOT NULL LIMIT 1"
END_MISMATCH: Final = """
UPDATE durable_run SET mismatch_since = NULL
WHERE run_id IN (SELECT value FROM json_each(?)) AND mismatch_since IS NOT NULL
"""
PIVOT: Final = (
    "UPDATE durable_run SET cancel_refused_at = coalesce(cancel_refused_at, ?), updated_at = ? WHERE run_id = ?"
)
COMPENSATION: Final = "UPDATE durable_run SET compensating = 1, updated_at = ? WHERE run_id = ?"
PROGRESS: Final = "UPDATE durable_run SET progress = ?, updated_at = ? WHERE run_id = ?"
VISIBLE: Final = "SELECT 1 FROM durable_run WHERE run_id = ? AND (? OR tenant_id IS ?)"
HISTORY: Final = f"SELECT {STEP_COLUMNS} FROM durable_step WHERE run_id = ? ORDER BY {STEP_ORDER}"


def append(con: sqlite3.Connection, now: Instant, records: Sequence[tuple[Lease, NewRecord]]) -> list[Appended]:
    """One answer per record, in order. All in one statement; one by one only where somebody's fence is gone or record there."""
    try:
        return _append(con, now, records)
    except sqlite3.IntegrityError as error:
        raise Conflict(
            f"a record can not be stored: {error}",
            hint="a position has one record; append the records one by one to find the bad one",
        ) from error


def _append(con: sqlite3.Connection, now: Instant, records: Sequence[tuple[Lease, NewRecord]]) -> list[Appended]:
    rows = [_row(now, lease, record) for lease, record in records]
    con.execute("SAVEPOINT append")
    if con.executemany(INSERT, rows).rowcount == len(rows):
        con.execute("RELEASE append")
        answers = [Appended(state="appended", record=_stored(now, lease, record)) for lease, record in records]
    else:
        con.execute("ROLLBACK TO append")
        con.execute("RELEASE append")
        answers = [
            _append_one(con, now, lease, record, row) for (lease, record), row in zip(records, rows, strict=True)
        ]
    _follow(con, now, [entry for entry, answer in zip(records, answers, strict=True) if answer.state == "appended"])
    return answers


def history(con: sqlite3.Connection, run_id: str, scope: Scope) -> list[StepRecord]:
    """The journal by position, attempt rows last. Raises NotFound."""
    if con.execute(VISIBLE, (run_id, *of_scope(scope))).fetchone() is None:
        raise unknown_run(run_id)
    return [step_record(row) for row in con.execute(HISTORY, (run_id,))]


def standing(con: sqlite3.Connection, lease: Lease) -> bool:
    """Does this lease still hold its run?"""
    return con.execute(FENCE, (lease.run_id, lease.attempts, lease.mark)).fetchone() is not None


def _row(now: Instant, lease: Lease, record: NewRecord) -> tuple[Any, ...]:
    return (
        record.step_id, str(record.kind), record.position, record.seen, record.digest, max(now, record.floor), record.started_at,
        record.signal_seq, record.result, lease.run_id, lease.attempts, lease.mark,
    )  # fmt: skip


def _append_one(
    con: sqlite3.Connection, now: Instant, lease: Lease, record: NewRecord, row: tuple[Any, ...]
) -> Appended:
    if con.execute(INSERT, row).rowcount == 1:
        return Appended(state="appended", record=_stored(now, lease, record))
    if not standing(con, lease):
        return Appended(state="lost", record=None)
    return Appended(
        state="recorded", record=step_record(con.execute(STORED, (lease.run_id, record.step_id)).fetchone())
    )


def _stored(now: Instant, lease: Lease, record: NewRecord) -> StepRecord:
    return StepRecord(
        step_id=record.step_id,
        kind=record.kind,
        position=record.position,
        seen=record.seen,
        digest=record.digest,
        result=record.result,
        at=max(now, record.floor),
        started_at=record.started_at,
        fence=lease.attempts,
        signal_seq=record.signal_seq,
    )


def _follow(con: sqlite3.Connection, now: Instant, records: Sequence[tuple[Lease, NewRecord]]) -> None:
    """What goes with records that were written: children, pivot, saga, progress, and the end of a mismatch (25, 46, 48, 49)."""
    for lease, record in records:
        if record.kind is RecordKind.PIVOT:
            con.execute(PIVOT, (now, now, lease.run_id))
        elif record.kind is RecordKind.COMPENSATION:
            con.execute(COMPENSATION, (now, lease.run_id))
        if record.children:
            enqueue.enqueue(con, now, record.children)
        if record.progress is not None:
            con.execute(PROGRESS, (record.progress, now, lease.run_id))
            announce(con, f"run:{lease.run_id}")
    if records and con.execute(SOME_MISMATCH).fetchone() is not None:
        con.execute(END_MISMATCH, (json.dumps([lease.run_id for lease, _ in records]),))
