"""The fork (semantics 51): a new run that has the records before a chosen step and does the rest again.

`store.py` calls `fork`. The run that is forked is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.errors import Conflict
from durable.model import RecordKind, RunRecord, Scope
from durable.storekit import unknown_run, within

from . import flow
from .operation import Again, Ask, Operation, Row, Work, first, together
from .rows import RUN_COLUMNS, run_record, stored_key

RUN: Final = f"SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE r.run_id = $1"
ORIGIN: Final = f"{RUN} FOR KEY SHARE"
"""A purge of the run that is forked waits, or has taken all of it."""
JOURNAL: Final = "SELECT s.step_id, s.kind, s.position, s.signal_seq, s.seen FROM durable_step AS s WHERE s.run_id = $1 ORDER BY s.position"
# Fresh keys, no parent, no schedule, no signals: a run of its own, with the seed and the start of the old one, so that what is
# replayed reads the same. `attempts = 1`, since a fresh run reads no journal. Signals to come count on from those that are taken.
COPY_RUN: Final = """
INSERT INTO durable_run (run_id, forked_from, status, attempts, wake_seq, compensating, cancel_refused_at, started_at,
    replay_family, deadline_at, deadline_length, created_at, updated_at, blocked_on, name, tenant_id, queue, priority,
    max_attempts, options, version, fingerprint, seed, keep, tags, sequence_key, concurrency_key, input)
SELECT $1, r.run_id, 'pending', 1, $3, $4, CASE WHEN $5 THEN now() END, CASE WHEN $6 THEN r.started_at END,
    CASE WHEN $6 THEN r.replay_family END, now() + r.deadline_length, r.deadline_length, now(), now(), $7, r.name, r.tenant_id, r.queue,
    r.priority, r.max_attempts, r.options, r.version, r.fingerprint, r.seed, r.keep, r.tags, r.sequence_key, r.concurrency_key, r.input
FROM durable_run AS r WHERE r.run_id = $2
ON CONFLICT DO NOTHING RETURNING run_id
"""
COPY_RECORDS: Final = """
INSERT INTO durable_step (run_id, step_id, kind, position, seen, digest, fence, tenant_id, created_at, started_at, signal_seq, result)
SELECT $1, s.step_id, s.kind, s.position, s.seen, s.digest, 1, s.tenant_id, s.created_at, s.started_at, s.signal_seq, s.result
FROM durable_step AS s WHERE s.run_id = $2 AND s.step_id = ANY ($3::text[]) ORDER BY s.position
ON CONFLICT DO NOTHING
"""


def fork(work: Work, run_id: str, scope: Scope, new_run_id: str, from_step: int | str) -> Operation[RunRecord]:
    """The new run. Repeated with the same `new_run_id`: the run that is there."""
    origins, others, journal = yield from together(
        Ask(ORIGIN, (run_id,)), Ask(RUN, (new_run_id,)), Ask(JOURNAL, (run_id,))
    )
    origin = run_record(origins[0]) if origins else None
    made = run_record(others[0]) if others else None
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
    kept = _kept(journal, run_id, from_step)
    kinds = {row[1] for row in kept}
    wake_seq = max((row[3] for row in kept if row[3] is not None), default=0)
    key = None if origin.sequence_key is None else stored_key(origin.tenant, origin.sequence_key)
    waits = key is not None and bool((yield from flow.occupied(work, [key])))
    stamps = (RecordKind.COMPENSATION in kinds, RecordKind.PIVOT in kinds, bool(kept), flow.SEQUENCE if waits else None)
    copied, _ = yield from together(
        Ask(COPY_RUN, (new_run_id, run_id, wake_seq, *stamps)),
        Ask(COPY_RECORDS, (new_run_id, run_id, [row[0] for row in kept])),
    )
    if not copied:
        raise Again(f"fork {new_run_id}")
    work.announce(f"queue:{origin.queue}")
    row = yield from first(RUN, new_run_id)
    assert row is not None
    return run_record(row)


def _kept(journal: Sequence[Row], run_id: str, from_step: int | str) -> list[Row]:
    """The records to be copied: those before the cut, without the starts of children whose end is not among them (the fork has no such
    child, and starts its own) and without what was made after such a start was seen: the body could not come to it before it has started
    a child again, and it starts nothing before the journal is exhausted."""
    found = [row for row in journal if row[2] is not None]
    if isinstance(from_step, str):
        cut = next((position for step_id, _, position, _, _ in found if step_id == from_step), None)
        if cut is None:
            raise Conflict(f"the journal of run {run_id} has no step {from_step!r}", hint="runs show lists its steps")
    else:
        cut = from_step
        if cut < 0:
            raise Conflict(f"{cut} is no position of a journal", hint="positions count from 0")
    kept = [row for row in found if row[2] < cut]
    names = {row[0] for row in kept}
    childless = [row[2] for row in kept if row[1] == RecordKind.START and f"{row[0]}:end" not in names]
    least = min(childless, default=cut)
    return [row for row in kept if row[2] not in childless and row[4] < least]


__all__ = ["fork"]
