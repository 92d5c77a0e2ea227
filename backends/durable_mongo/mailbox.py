"""The mailbox (semantics 31, 32): signals and what came to a run from outside. `store.py` calls `send` in a transaction, or on a caller's
session, and `inbox` in plain reads. Nothing here delivers: the holder's records do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from durable.errors import Conflict
from durable.model import ChildEnd, Inbox, Lease, NewSignal, Scope, Signal, Status
from durable.storekit import unknown_run

from .changes import ENDED, IS_ENDED, IS_LIVE, change, only_if, plus
from .journal import mark_of
from .operation import Document, Work
from .rows import asked, belonging_to, instant, visible
from .times import stored

# The counter first, and only of a live run: its new value is the signal's place in the order of everything that came to the run.
# A node of a graph that is not released yet stays where it is; a signal to it is kept.
_SLEEPS = {"$and": [{"$eq": ["$status", "suspended"]}, {"$gt": ["$attempts", 0]}]}


async def send(work: Work, signal: NewSignal, scope: Scope) -> int:
    """Store a signal and wake its run; the signal's seq. Sent before with this dedup id: the first one's seq, and nothing is done."""
    fields = ("status", "tenant_id", "queue", "wake_seq", "purging_at")
    row = await work.first("durable_run", {"_id": signal.run_id}, fields=fields)
    if row is None or not visible(row, scope):
        raise unknown_run(signal.run_id)
    key = f"{signal.run_id}/{signal.dedup_id}"
    before = await work.first("durable_signal", {"_id": key}, fields=["seq"])
    if before is not None:
        return int(before["seq"])
    if row["status"] in ENDED:
        raise Conflict(f"run {signal.run_id} has ended ({row['status']}): nobody would take the signal {signal.name!r}")
    seq = int(row["wake_seq"]) + 1
    gone = {name: only_if(_SLEEPS, "$$REMOVE", f"${name}") for name in ("available_at", "wake_after", "waiting_for")}
    bump = change(
        put={"updated_at": stored(work.now)},
        compute={"wake_seq": plus("wake_seq", 1), "status": only_if(_SLEEPS, "pending", "$status"), **gone},
    )
    # Of two sends at once the second is tried again: both write this document.
    await work.change_one("durable_run", {"_id": signal.run_id, "status": IS_LIVE, "wake_seq": row["wake_seq"]}, bump)
    document: Document = {
        "_id": key,
        "run_id": signal.run_id,
        "name": signal.name,
        "seq": seq,
        "dedup_id": signal.dedup_id,
        "tenant_id": row["tenant_id"],
        "created_at": stored(work.now),
        "payload": signal.payload,
    }
    await work.insert("durable_signal", [document])
    work.announce(f"run:{signal.run_id}")
    if row["status"] == Status.SUSPENDED:
        work.announce(f"queue:{row['queue']}")
    return seq


async def signals(work: Work, run_id: str, scope: Scope) -> list[Signal]:
    """Every signal that is kept of a run, by seq. Raises NotFound."""
    row = await work.first("durable_run", {"_id": run_id}, fields=["tenant_id", "purging_at"])
    if not visible(row, scope):
        raise unknown_run(run_id)
    rows = await work.find("durable_signal", belonging_to(run_id))
    return [_signal(one) for one in sorted(rows, key=lambda one: int(one["seq"]))]


def _signal(row: Document) -> Signal:
    return Signal(name=row["name"], seq=int(row["seq"]), payload=row["payload"], at=instant(row, "created_at") or 0)


async def inbox(work: Work, leases: Sequence[Lease]) -> list[Inbox | None]:
    """For each lease what came from outside and no record holds; None where the fence is gone. The counters are read first: what comes
    after that is a wake that the suspension does not match (31)."""
    where = {"_id": {"$in": [lease.run_id for lease in leases]}, "mark": {"$in": [mark_of(lease) for lease in leases]}}
    fields = (
        "mark",
        "tenant_id",
        "wake_seq",
        "cancel_requested_at",
        "cancel_refused_at",
        "cancel_reason",
        "has_children",
    )
    rows = await work.find("durable_run", {**where, "status": "running"}, fields=fields)
    by_mark = {row["mark"]: row for row in rows}
    boxes = await asyncio.gather(*(_inbox(work, row) for row in rows))
    found = dict(zip(by_mark, boxes, strict=True))
    return [found.get(mark_of(lease)) for lease in leases]


def _reason(row: Document) -> str:
    return str(row.get("cancel_reason") or "")


async def _inbox(work: Work, row: Document) -> Inbox:
    if not row["wake_seq"]:  # nothing ever came
        return Inbox(wake_seq=0, cancel_requested=asked(row), cancel_reason=_reason(row), signals=[], children=[])
    run_id = row["_id"]
    taken, signals, children = await asyncio.gather(
        work.find("durable_step", {"run_id": run_id, "signal_seq": {"$gte": 0}}, fields=["signal_seq"]),
        work.find("durable_signal", belonging_to(run_id)),
        _ended_children(work, row),
    )
    seqs = {one["signal_seq"] for one in taken}
    return Inbox(
        wake_seq=int(row["wake_seq"]),
        cancel_requested=asked(row),
        cancel_reason=_reason(row),
        signals=[_signal(one) for one in sorted(signals, key=lambda one: int(one["seq"])) if one["seq"] not in seqs],
        children=children,
    )


async def _ended_children(work: Work, row: Document) -> list[ChildEnd]:
    """Landed children whose end no record holds. One with '@' in its step was parted from its parent by a retry (50): it answers to
    nobody."""
    if not row.get("has_children"):
        return []
    run_id = row["_id"]
    fields = (
        "parent_step_id",
        "status",
        "output",
        "error",
        "error_kind",
        "error_detail",
        "finished_at",
        "submitted",
        "purging_at",
    )
    where = {"tenant_id": row["tenant_id"], "parent_run_id": run_id, "status": IS_ENDED}
    children = [
        one
        for one in await work.find("durable_run", where, fields=fields)
        if "@" not in one["parent_step_id"] and "purging_at" not in one
    ]
    ends = [f"{run_id}/{one['parent_step_id']}:end" for one in children]
    records = await work.find("durable_step", {"_id": {"$in": ends}}, fields=["_id"]) if ends else []
    recorded = {one["_id"] for one in records}
    return [
        ChildEnd(
            run_id=one["_id"],
            step_id=one["parent_step_id"],
            status=Status(one["status"]),
            output=one.get("output"),
            error=one.get("error"),
            error_kind=one.get("error_kind"),
            error_detail=one.get("error_detail"),
            at=instant(one, "finished_at") or 0,
        )
        for one in sorted(children, key=lambda one: (int(one["finished_at"]), one["submitted"]))
        if f"{run_id}/{one['parent_step_id']}:end" not in recorded
    ]


__all__ = ["inbox", "send", "signals"]
