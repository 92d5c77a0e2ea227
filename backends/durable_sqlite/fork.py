"""The fork (semantics 51): a new run that has the records before a chosen step and does the rest again.

`store.py` calls `fork`. The run that is forked is only read.
"""

from __future__ import annotations

import json
import sqlite3

from durable.errors import Conflict
from durable.model import Instant, RecordKind, RunRecord, Scope
from durable.storekit import tenant_text, unknown_run, within

from . import flow
from .connection import announce
from .rows import RUN_COLUMNS, run_record

RUN = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE run_id = ?"
JOURNAL = "SELECT step_id, kind, position, signal_seq, seen FROM durable_step WHERE run_id = ? ORDER BY position"
# Fresh keys, no parent, no schedule, no signals: a run of its own, with the seed and the start of the old one, so that what is
# replayed reads the same. `attempts = 1`, since a fresh run reads no journal. Signals to come count on from those that are taken.
COPY_RUN = """
INSERT INTO durable_run (run_id, forked_from, status, attempts, wake_seq, compensating, cancel_refused_at, started_at,
    replay_family, deadline_at, deadline_length, created_at, updated_at, blocked_on, name, tenant_id, queue, priority,
    max_attempts, options, version, fingerprint, seed, keep, tags, sequence_key, concurrency_key, input)
SELECT ?, run_id, 'pending', 1, ?, ?, CASE WHEN ? THEN ? END, CASE WHEN ? THEN started_at END, CASE WHEN ? THEN replay_family END,
    ? + deadline_length, deadline_length, ?, ?, ?, name, tenant_id, queue, priority, max_attempts, options,
    version, fingerprint, seed, keep, tags, sequence_key, concurrency_key, input
FROM durable_run WHERE run_id = ?
"""
COPY_RECORDS = """
INSERT INTO durable_step (run_id, step_id, kind, position, seen, digest, fence, tenant_id, created_at, started_at, signal_seq,
    result)
SELECT ?, step_id, kind, position, seen, digest, 1, tenant_id, created_at, started_at, signal_seq, result
FROM durable_step WHERE run_id = ? AND step_id IN (SELECT value FROM json_each(?)) ORDER BY position
"""


def fork(
    con: sqlite3.Connection, now: Instant, run_id: str, scope: Scope, new_run_id: str, from_step: int | str
) -> RunRecord:
    """The new run. Repeated with the same `new_run_id`: the run that is there."""
    origin = _read(con, run_id)
    made = _read(con, new_run_id)
    if made is not None and within(made.tenant, scope):
        if made.forked_from == run_id:
            return made
        raise Conflict(
            f"run {new_run_id} is there already and is no fork of {run_id}", hint="choose a new id for the fork"
        )
    if origin is None or not within(origin.tenant, scope):
        raise unknown_run(run_id)
    if made is not None:
        raise Conflict(f"the id {new_run_id} is taken", hint="choose a new id for the fork")
    kept = _kept(con, run_id, from_step)
    kinds = {kind for _, kind, _ in kept}
    wake_seq = max((seq for _, _, seq in kept if seq is not None), default=0)
    sequence_key = (
        f"{tenant_text(origin.tenant) or ''}:{origin.sequence_key}" if origin.sequence_key is not None else None
    )
    blocked_on = flow.SEQUENCE if flow.must_wait(con, sequence_key) else None
    stamps = (RecordKind.COMPENSATION in kinds, RecordKind.PIVOT in kinds, now, bool(kept), bool(kept))
    con.execute(COPY_RUN, (new_run_id, wake_seq, *stamps, now, now, now, blocked_on, run_id))
    con.execute(COPY_RECORDS, (new_run_id, run_id, json.dumps([step_id for step_id, _, _ in kept])))
    announce(con, f"queue:{origin.queue}")
    made = _read(con, new_run_id)
    assert made is not None
    return made


def _read(con: sqlite3.Connection, run_id: str) -> RunRecord | None:
    row = con.execute(RUN, (run_id,)).fetchone()
    return None if row is None else run_record(row)


def _kept(con: sqlite3.Connection, run_id: str, from_step: int | str) -> list[tuple[str, str, int | None]]:
    """(step id, kind, signal) of the records to be copied: those before the cut, without the starts of children whose end is not
    among them (the fork has no such child, and starts its own) and without what was made after such a start was seen: the body
    could not come to it before it has started a child again, and it starts nothing before the journal is exhausted."""
    rows = [row for row in con.execute(JOURNAL, (run_id,)) if row[2] is not None]
    if isinstance(from_step, str):
        cut = next((position for step_id, _, position, _, _ in rows if step_id == from_step), None)
        if cut is None:
            raise Conflict(f"the journal of run {run_id} has no step {from_step!r}", hint="runs show lists its steps")
    else:
        cut = from_step
        if cut < 0:
            raise Conflict(f"{cut} is no position of a journal", hint="positions count from 0")
    kept = [row for row in rows if row[2] < cut]
    names = {row[0] for row in kept}
    childless = [row[2] for row in kept if row[1] == RecordKind.START and f"{row[0]}:end" not in names]
    first = min(childless, default=cut)
    return [(row[0], row[1], row[3]) for row in kept if row[2] not in childless and row[4] < first]
