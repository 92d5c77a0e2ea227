"""The journal: fenced appends, reading a history, and the record of an exactly-once transaction (semantics 3, 18 to 26).

`store.py` calls `append` and `history`, `transactions.py` calls `append` as the last thing before its commit. The append first locks its
runs, in order and until the commit, where the fence still stands; a worker whose lease is gone writes nothing. The lock is shared, so
that several commits may write records of one run at once; where the run's own row is written beside, it is not. Nothing here deletes a
record; that is `removal.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from durable.errors import Conflict
from durable.model import Appended, Lease, NewRecord, RecordKind, Scope, StepRecord
from durable.storekit import unknown_run

from . import enqueue
from .adapting import At, at
from .operation import Ask, Operation, Row, Work, count, first, rows, together
from .rows import RUNNING, STEP_COLUMNS, STEP_ORDER, of_scope, step_record

_APPEND: Final = """
WITH held AS MATERIALIZED (
    SELECT r.run_id, r.tenant_id, r.attempts, f.place, r.mismatch_since IS NOT NULL AS mismatch FROM durable_run AS r
    JOIN unnest($1::text[], $2::integer[], $3::text[]) WITH ORDINALITY AS f (run_id, attempts, mark, place)
        ON f.run_id = r.run_id AND f.attempts = r.attempts AND f.mark = r.lease_owner
    WHERE {running} ORDER BY r.run_id FOR {strength} OF r),
added AS (
    INSERT INTO durable_step (run_id, tenant_id, step_id, kind, position, seen, digest, fence, created_at, started_at, signal_seq, result)
    SELECT h.run_id, h.tenant_id, n.step_id, n.kind, n.position, n.seen, n.digest, h.attempts, greatest(now(), n.floor), n.started_at,
        n.signal_seq, n.result
    FROM unnest($4::integer[], $5::text[], $6::text[], $7::integer[], $8::integer[], $9::text[], $10::jsonb[], $11::timestamptz[],
                $12::timestamptz[], $13::integer[])
        AS n (fence, step_id, kind, position, seen, digest, result, floor, started_at, signal_seq)
    JOIN held AS h ON h.place = n.fence{when}
    ON CONFLICT DO NOTHING RETURNING run_id, step_id, created_at)
SELECT a.run_id, a.step_id, a.created_at, h.mismatch FROM added AS a JOIN held AS h ON h.run_id = a.run_id
"""
# All or nothing: where a fence is gone or a mismatch ends, nothing is written, and `append` does what follows.
APPEND_PLAIN: Final = _APPEND.format(
    running=RUNNING,
    strength="SHARE",
    when="\n    WHERE (SELECT count(*) FROM held WHERE NOT held.mismatch) = cardinality($1::text[])",
)
APPEND: Final = _APPEND.format(running=RUNNING, strength="SHARE", when="")
APPEND_AND_CHANGE: Final = _APPEND.format(running=RUNNING, strength="NO KEY UPDATE", when="")
STANDING: Final = f"""
SELECT r.run_id, r.attempts, r.lease_owner FROM durable_run AS r WHERE r.run_id = ANY ($1::text[]) AND {RUNNING}
"""
STORED: Final = f"""
SELECT s.run_id, {STEP_COLUMNS} FROM durable_step AS s JOIN unnest($1::text[], $2::text[]) AS w (run_id, step_id)
    ON w.run_id = s.run_id AND w.step_id = s.step_id
"""
END_MISMATCH: Final = "UPDATE durable_run AS r SET mismatch_since = NULL WHERE r.run_id = ANY ($1::text[]) AND r.mismatch_since IS NOT NULL"
PIVOT: Final = """
UPDATE durable_run AS r SET cancel_refused_at = coalesce(r.cancel_refused_at, now()), updated_at = now() WHERE r.run_id = ANY ($1::text[])
"""
COMPENSATION: Final = (
    "UPDATE durable_run AS r SET compensating = true, updated_at = now() WHERE r.run_id = ANY ($1::text[])"
)
PROGRESS: Final = """
UPDATE durable_run AS r SET progress = p.progress, updated_at = now() FROM unnest($1::text[], $2::jsonb[]) AS p (run_id, progress)
WHERE r.run_id = p.run_id
"""
VISIBLE: Final = (
    "SELECT 1 FROM durable_run AS r WHERE ($1 OR r.tenant_id IS NOT DISTINCT FROM $2::uuid) AND r.run_id = $3"
)
HISTORY: Final = f"SELECT {STEP_COLUMNS} FROM durable_step AS s WHERE s.run_id = $1 ORDER BY {STEP_ORDER}"

Entry = tuple[Lease, NewRecord]


def changing(records: Sequence[Entry]) -> bool:
    """More is written than records: children, progress, or a mark on the run."""
    return any(record.children or record.progress is not None or record.kind in _MARKS for _, record in records)


def append_plain(work: Work, records: Sequence[Entry]) -> Operation[list[Appended | None]]:
    """Records beside which nothing is written, in one statement. None: not written by it; `append` says why, or does more."""
    first_of = _first_of(records)
    found = yield from rows(APPEND_PLAIN, *_arrays(_in_order(records, first_of)))
    return _appended(records, first_of, {(run_id, step_id): stamp for run_id, step_id, stamp, _ in found})


def append(work: Work, records: Sequence[Entry]) -> Operation[list[Appended]]:
    """One answer per record, in order; the repeated ones of one batch find their first."""
    first_of = _first_of(records)
    more = changing(records)
    found = yield from rows(APPEND_AND_CHANGE if more else APPEND, *_arrays(_in_order(records, first_of)))
    stamps = {(run_id, step_id): stamp for run_id, step_id, stamp, _ in found}
    answers = _appended(records, first_of, stamps)
    unanswered = [place for place, answer in enumerate(answers) if answer is None]
    if unanswered:
        yield from _tell(records, unanswered, answers)
    added = [records[place] for key, place in first_of.items() if key in stamps]
    if more:
        yield from _follow(work, added)
    mismatched = sorted({run_id for run_id, _, _, mismatch in found if mismatch})
    if mismatched:
        yield from count(END_MISMATCH, mismatched)
    return [answer for answer in answers if answer is not None]


def history(work: Work, run_id: str, scope: Scope) -> Operation[list[StepRecord]]:
    """The journal by position, attempt rows last. Raises NotFound."""
    visible, found = yield from together(Ask(VISIBLE, (*of_scope(scope), run_id)), Ask(HISTORY, (run_id,)))
    if not visible:
        raise unknown_run(run_id)
    return [step_record(row) for row in found]


def standing(work: Work, lease: Lease) -> Operation[bool]:
    """Does this lease still hold its run?"""
    row = yield from first(STANDING, [lease.run_id])
    return row is not None and _holds(row, lease)


def stored(work: Work, lease: Lease, step_id: str) -> Operation[StepRecord | None]:
    """The record of this step, if there is one."""
    row = yield from first(STORED, [lease.run_id], [step_id])
    return None if row is None else step_record(row[1:])


_MARKS: Final = (RecordKind.PIVOT, RecordKind.COMPENSATION)


def _first_of(records: Sequence[Entry]) -> dict[tuple[str, str], int]:
    """Where each record of the batch stands first."""
    first_of: dict[tuple[str, str], int] = {}
    for place, (lease, record) in enumerate(records):
        first_of.setdefault((lease.run_id, record.step_id), place)
    return first_of


def _in_order(records: Sequence[Entry], first_of: dict[tuple[str, str], int]) -> list[Entry]:
    """In the order of their keys: two appends of one holder, the second asked before the first was answered, do not dead-lock."""
    return [records[first_of[key]] for key in sorted(first_of)]


def _appended(
    records: Sequence[Entry], first_of: dict[tuple[str, str], int], stamps: dict[tuple[str, str], int]
) -> list[Appended | None]:
    answers: list[Appended | None] = [None] * len(records)
    for key, place in first_of.items():
        if key in stamps:
            lease, record = records[place]
            answers[place] = Appended(state="appended", record=_stored(lease, record, stamps[key]))
    return answers


def _holds(row: Row, lease: Lease) -> bool:
    return bool(row[1] == lease.attempts and row[2] == lease.mark)


def _arrays(entries: Sequence[Entry]) -> tuple[list[Any], ...]:
    """The fences, and the records with the place of their fence. A column that few records have is left out where none has it: the server
    takes what is not there for NULL."""
    places: dict[tuple[str, int, str], int] = {}
    fences = [places.setdefault((lease.run_id, lease.attempts, lease.mark), len(places) + 1) for lease, _ in entries]
    records = [record for _, record in entries]
    return (
        [run_id for run_id, _, _ in places],
        [attempts for _, attempts, _ in places],
        [mark for *_, mark in places],
        fences,
        [record.step_id for record in records],
        [record.kind.value for record in records],
        [record.position for record in records],
        [record.seen for record in records],
        [record.digest for record in records],
        [record.result for record in records],
        [At(record.floor) for record in records],
        _if_any([at(record.started_at) for record in records]),
        _if_any([record.signal_seq for record in records]),
    )


def _if_any(values: list[Any]) -> list[Any]:
    return [] if values.count(None) == len(values) else values


def _stored(lease: Lease, record: NewRecord, stamp: int) -> StepRecord:
    return StepRecord(
        step_id=record.step_id,
        kind=record.kind,
        position=record.position,
        seen=record.seen,
        digest=record.digest,
        result=record.result,
        at=stamp,
        started_at=record.started_at,
        fence=lease.attempts,
        signal_seq=record.signal_seq,
    )


def _tell(records: Sequence[Entry], places: Sequence[int], answers: list[Appended | None]) -> Operation[None]:
    """What was not written: the fence is gone, or a record is there (20). In a later statement, which sees who came first."""
    ids = sorted({records[place][0].run_id for place in places})
    steps = [(records[place][0].run_id, records[place][1].step_id) for place in places]
    fences, there = yield from together(
        Ask(STANDING, (ids,)), Ask(STORED, ([run_id for run_id, _ in steps], [step_id for _, step_id in steps]))
    )
    holders = {row[0]: row for row in fences}
    known = {(row[0], row[1]): step_record(row[1:]) for row in there}
    for place in places:
        lease, record = records[place]
        row = holders.get(lease.run_id)
        found = known.get((lease.run_id, record.step_id))
        if row is None or not _holds(row, lease):
            answers[place] = Appended(state="lost", record=None)
        elif found is not None:
            answers[place] = Appended(state="recorded", record=found)
        else:
            raise Conflict(
                f"step {record.step_id} of run {lease.run_id} can not be stored: position {record.position} has a record",
                hint="a position has one record; append the records one by one to find the bad one",
            )


def _follow(work: Work, added: Sequence[Entry]) -> Operation[None]:
    """What goes with records that were written: children, pivot, saga and progress (29a, 46, 48, 49)."""
    pivots = [lease.run_id for lease, record in added if record.kind is RecordKind.PIVOT]
    sagas = [lease.run_id for lease, record in added if record.kind is RecordKind.COMPENSATION]
    asks = [Ask(PIVOT, (pivots,))] if pivots else []
    asks += [Ask(COMPENSATION, (sagas,))] if sagas else []
    progress = {lease.run_id: record.progress for lease, record in added if record.progress is not None}
    if progress:
        asks.append(Ask(PROGRESS, (list(progress), list(progress.values()))))
        for run_id in progress:
            work.announce(f"run:{run_id}")
    if asks:
        yield from together(*asks)
    children = [child for _, record in added for child in record.children]
    if children:
        yield from enqueue.enqueue(work, children)


__all__ = ["append", "append_plain", "changing", "history", "standing", "stored"]
