"""The fork (semantics 51): a new run that has the records before a chosen step and does the rest again.

`store.py` calls `fork` in a transaction. The run that is forked is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.errors import Conflict
from durable.model import RecordKind, RunRecord, Scope
from durable.storekit import unknown_run

from . import enqueue, flow, landing
from .operation import Document, Work
from .rows import belonging_to, route, run_record, visible
from .times import stored

# Fresh keys, no parent, no schedule, no signals: a run of its own, with the seed and the start of the old one, so that what is
# replayed reads the same.
COPIED: Final = (
    *(
        "name",
        "tenant_id",
        "queue",
        "priority",
        "max_attempts",
        "options",
        "version",
        "fingerprint",
        "seed",
        "keep",
        "tags",
    ),
    *("sequence_key", "concurrency_key", "input", "deadline_length"),
)


async def fork(work: Work, run_id: str, scope: Scope, new_run_id: str, from_step: int | str) -> RunRecord:
    """The new run. Repeated with the same `new_run_id`: the run that is there."""
    origin = await work.first("durable_run", {"_id": run_id})
    made = await work.first("durable_run", {"_id": new_run_id})
    if made is not None and visible(made, scope):
        if made.get("forked_from") == run_id:
            return run_record(made)
        raise Conflict(
            f"run {new_run_id} is there already and is no fork of {run_id}", hint="choose a new id for the fork"
        )
    if origin is None or not visible(origin, scope):
        raise unknown_run(run_id)
    if made is not None:
        raise Conflict(f"the id {new_run_id} is taken", hint="choose a new id for the fork")
    enqueue.check_id(new_run_id)
    kept = _kept(run_id, await work.find("durable_step", belonging_to(run_id)), from_step)
    document = _copy(work, origin, new_run_id, kept)
    if "sequence_key" in origin:
        document["line"] = origin["sequence_key"]
        document["linked"] = True
        await landing.take_turns(work, [origin["sequence_key"]])
        if await flow.head_of(work, origin["sequence_key"]) is not None:
            document["blocked_on"] = flow.SEQUENCE
    if "blocked_on" not in document:
        document["ready"] = True
    await work.insert("durable_run", [document])
    order = work.clock.order(max(len(kept), 1))
    records = [
        {**row, "_id": f"{new_run_id}/{row['step_id']}", "run_id": new_run_id, "fence": 1, "written": order + place}
        for place, row in enumerate(kept)
    ]
    await work.insert("durable_step", records)
    work.announce(f"queue:{origin['queue']}")
    return run_record(document)


def _copy(work: Work, origin: Document, new_run_id: str, kept: Sequence[Document]) -> Document:
    kinds = {row["kind"] for row in kept}
    family = origin.get("replay_family") if kept else None
    document: Document = {
        "_id": new_run_id,
        "forked_from": origin["_id"],
        "status": "pending",
        "attempts": 1,  # since a fresh run reads no journal
        "failures": 0,
        "reclaims": 0,
        # Signals to come count on from those that are taken.
        "wake_seq": max((row["signal_seq"] for row in kept if "signal_seq" in row), default=0),
        "submitted": work.clock.order(1),
        "created_at": stored(work.now),
        "updated_at": stored(work.now),
        "route": route(origin["name"], origin.get("version"), family),
        **{name: origin[name] for name in COPIED if name in origin},
    }
    if RecordKind.COMPENSATION in kinds:
        document["compensating"] = True
    if RecordKind.PIVOT in kinds:
        document["cancel_refused_at"] = stored(work.now)
    if kept and "started_at" in origin:
        document["started_at"] = origin["started_at"]
    if family is not None:
        document["replay_family"] = family
    if "deadline_length" in origin:
        document["deadline_at"] = stored(work.now + origin["deadline_length"])
    return document


def _kept(run_id: str, journal: Sequence[Document], from_step: int | str) -> list[Document]:
    """The records to be copied: those before the cut, without the starts of children whose end is not among them (the fork has no such
    child, and starts its own) and without what was made after such a start was seen: the body could not come to it before it has
    started a child again, and it starts nothing before the journal is exhausted."""
    rows = sorted((row for row in journal if "position" in row), key=lambda row: int(row["position"]))
    if isinstance(from_step, str):
        cut = next((row["position"] for row in rows if row["step_id"] == from_step), None)
        if cut is None:
            raise Conflict(f"the journal of run {run_id} has no step {from_step!r}", hint="runs show lists its steps")
    else:
        cut = from_step
        if cut < 0:
            raise Conflict(f"{cut} is no position of a journal", hint="positions count from 0")
    kept = [row for row in rows if row["position"] < cut]
    names = {row["step_id"] for row in kept}
    childless = [
        row["position"] for row in kept if row["kind"] == RecordKind.START and f"{row['step_id']}:end" not in names
    ]
    first = min(childless, default=cut)
    return [row for row in kept if row["position"] not in childless and row["seen"] < first]


__all__ = ["fork"]
