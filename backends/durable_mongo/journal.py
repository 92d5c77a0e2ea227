"""The journal: fenced appends, reading a history, and the record of an exactly-once transaction (semantics 3, 18 to 26).

`store.py` calls `append` in a transaction. It touches the runs of the batch first, once, by their composite mark (run, claim number,
claim mark): from there to the commit nobody can sweep, claim or settle them, so no record of an old holder lands behind what its
successor has read. Nothing here deletes a record; that is `removal.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pymongo.errors import PyMongoError

from durable.errors import Conflict
from durable.model import Appended, Lease, NewRecord, RecordKind, Scope, StepRecord
from durable.storekit import unknown_run

from . import enqueue, faults
from .changes import Stage, change
from .operation import Change, Document, Where, Work
from .rows import belonging_to, dated, in_order, step_record, tenant_text, visible
from .times import cut, cut_up, stored

RANGES: Final = 50
"""Journals read by one query: the server is slow with an `$or` of more."""

TOUCH: Final[list[Stage]] = [
    {
        "$set": {
            "journaled": {"$add": [{"$ifNull": ["$journaled", 0]}, 1]},
            "record_fence": "$attempts",
            # The family belongs to the records: the first one binds the run to the interpreters that can replay it.
            "replay_family": {"$ifNull": ["$replay_family", "$claim_family"]},
        }
    },
    {"$unset": ["mismatch_since"]},
]
"""What every record does to its run's document: the fence, held until the commit, and what the sweep and the claim need to know. No field
of an index is among them: a change of one costs ten times as much."""


def mark_of(lease: Lease) -> str:
    """The composite mark: the whole fence in one text, unique per run and claim."""
    return composite(lease.run_id, lease.attempts, lease.mark)


def composite(run_id: str, attempts: int, mark: str) -> str:
    """The same from its parts."""
    return f"{run_id}/{attempts}/{mark}"


def held(lease: Lease) -> Document:
    """The filter of a run that this lease holds."""
    return {"_id": lease.run_id, "mark": mark_of(lease), "status": "running"}


async def append(work: Work, records: Sequence[tuple[Lease, NewRecord]], *, look: bool = False) -> list[Appended]:
    """One answer per record, in order. The first try inserts without looking; one that is there raises Taken, then it is to `look`."""
    holding = await _touch(work, {mark_of(lease): lease for lease, _ in records})
    entries = [(lease, record) for lease, record in records if mark_of(lease) in holding]
    known: dict[str, Document] = {}
    if look and entries:
        ids = sorted({record_id(lease, record) for lease, record in entries})
        known = {row["_id"]: row for row in await work.find("durable_step", {"_id": {"$in": ids}})}
        await _refuse_positions(work, entries, known)
    answers: list[Appended] = []
    rows: list[Document] = []
    written: list[tuple[Lease, NewRecord]] = []
    order = work.clock.order(len(records))
    for place, (lease, record) in enumerate(records):
        if mark_of(lease) not in holding:
            answers.append(Appended(state="lost", record=None))
            continue
        there = known.get(record_id(lease, record))
        if there is not None:
            answers.append(Appended(state="recorded", record=step_record(there)))
            continue
        row = _row(work, lease, record, order + place)
        known[row["_id"]] = row
        rows.append(row)
        written.append((lease, record))
        answers.append(Appended(state="appended", record=step_record(row)))
    try:
        await work.insert("durable_step", rows)
    except PyMongoError as error:
        if faults.duplicate(error) and not look:
            raise enqueue.Taken from error
        raise
    await _follow(work, written)
    return answers


async def history(work: Work, run_id: str, scope: Scope) -> list[StepRecord]:
    """The journal by position, attempt rows last. Raises NotFound."""
    row = await work.first("durable_run", {"_id": run_id}, fields=["tenant_id", "purging_at"])
    if not visible(row, scope):
        raise unknown_run(run_id)
    return in_order(await work.find("durable_step", belonging_to(run_id)))


async def histories(work: Work, run_ids: Sequence[str]) -> dict[str, list[Document]]:
    """The records of several runs, as they are stored."""
    found: dict[str, list[Document]] = {run_id: [] for run_id in run_ids}
    parts = [run_ids[start : start + RANGES] for start in range(0, len(run_ids), RANGES)]
    reads = [work.find("durable_step", {"$or": [belonging_to(run_id) for run_id in part]}) for part in parts]
    for rows in await asyncio.gather(*reads):
        for row in rows:
            found[row["run_id"]].append(row)
    return found


def record_id(lease: Lease, record: NewRecord) -> str:
    """The key of a record: unique per run and step."""
    return f"{lease.run_id}/{record.step_id}"


async def _touch(work: Work, leases: Mapping[str, Lease]) -> set[str]:
    """Write the runs that these leases hold; their marks. The others are lost."""
    where: Where = {
        "_id": {"$in": sorted({lease.run_id for lease in leases.values()})},
        "mark": {"$in": sorted(leases)},
        "status": "running",
    }
    if await work.change_many("durable_run", where, TOUCH) == len(leases):
        return set(leases)
    # Read in the same transaction: what was touched above is what is there.
    return {row["mark"] for row in await work.find("durable_run", where, fields=["mark"])}


async def _refuse_positions(
    work: Work, entries: Sequence[tuple[Lease, NewRecord]], known: Mapping[str, Document]
) -> None:
    """Two records of one position would replay in an order that nobody wrote down."""
    places: set[tuple[str, int]] = set()
    tenants = {lease.run_id: tenant_text(lease.tenant) for lease, _ in entries}
    seen = set(known)
    for lease, record in entries:
        key = record_id(lease, record)
        if record.position is None or key in seen:
            continue
        seen.add(key)
        place = (lease.run_id, record.position)
        taken = place in places or await work.first(
            "durable_step",
            {"tenant_id": tenants[lease.run_id], "run_id": lease.run_id, "position": record.position},
            fields=["_id"],
        )
        if taken:
            raise Conflict(
                f"run {lease.run_id} has a record at position {record.position} already",
                hint="a position has one record; append the records one by one to find the bad one",
            )
        places.add(place)


def _row(work: Work, lease: Lease, record: NewRecord, order: int) -> Document:
    row: Document = {
        "_id": record_id(lease, record),
        "run_id": lease.run_id,
        "step_id": record.step_id,
        "tenant_id": tenant_text(lease.tenant),
        "kind": str(record.kind),
        "seen": record.seen,
        "digest": record.digest,
        "fence": lease.attempts,
        "written": order,
        "created_at": stored(max(work.now, cut_up(record.floor))),
        "result": record.result,
        **dated(started_at=None if record.started_at is None else cut(record.started_at)),
    }
    if record.position is not None:
        row["position"] = record.position
    if record.signal_seq is not None:
        row["signal_seq"] = record.signal_seq
    return row


async def _follow(work: Work, records: Sequence[tuple[Lease, NewRecord]]) -> None:
    """What goes with records that were written: children, pivot, saga and progress (46, 48, 49)."""
    changes: list[tuple[Where, Change]] = []
    now = stored(work.now)
    for lease, record in records:
        put: dict[str, Any] = {}
        compute: dict[str, Any] = {}
        if record.kind is RecordKind.PIVOT:
            compute["cancel_refused_at"] = {"$ifNull": ["$cancel_refused_at", {"$literal": now}]}
        elif record.kind is RecordKind.COMPENSATION:
            put["compensating"] = True
        if record.progress is not None:
            put["progress"] = record.progress
            work.announce(f"run:{lease.run_id}")
        if put or compute:
            changes.append(
                ({"_id": lease.run_id}, change(put={**put, "updated_at": now}, compute=compute, ready=False))
            )
    for where, follow in changes:  # in their order: the last progress of a batch counts
        await work.change_one("durable_run", where, follow)
    children = [child for _, record in records for child in record.children]
    if children:
        await enqueue.enqueue(work, children)


__all__ = ["append", "composite", "held", "histories", "history", "mark_of", "record_id"]
