"""THE landing: the one function through which every write that makes a run terminal goes, with all that follows from it.

`settle`, `claim`, `cancel`, the sweep and this module itself (nodes behind a failed one) call `land`, each after it has checked, in the
same transaction, that the run may end. Beside it only the quick settle of `settle.py` writes a terminal status, with `ended` from here,
for runs that nothing else hangs on (`linked` is not set). Nothing else in this package does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from durable.landing import Ending, behind
from durable.model import Json, Status

from . import flow
from .changes import IS_LIVE, Stage, change, plus
from .operation import Change, Document, Where, Work
from .rows import instant
from .times import milliseconds, stored

FAREWELL: Final = (
    *(
        "leased_until",
        "available_at",
        "release_at",
        "blocked_on",
        "mismatch_since",
        "waiting_for",
        "wake_after",
        "wake_delay",
    ),
    *("wake_on_failure", "line", "permits", "ready"),
)
"""What a terminal run has no more."""
NEEDED: Final = (
    *("status", "keep", "sequence_key", "blocked_on", "parent_run_id", "schedule_id", "permits", "has_children"),
    *("has_dependents", "tenant_id"),
)
"""What a landing reads of a run."""


def ended(
    work: Work, ending: Ending, *, cancel_children: bool = False, outputs: Mapping[str, Json] | None = None
) -> list[Stage]:
    """The change by which a run ends, stamped by the server's clock. With `outputs` it is one change for many completed runs, each with
    its own."""
    now = work.clock.expression()
    put: dict[str, Any] = {"status": str(ending.status)}
    failure, completed = ending.failure, ending.status is Status.COMPLETED
    if completed:
        put["output"] = ending.output
    put.update(dict.fromkeys(("error", "error_kind", "error_detail", "error_positions")))
    if failure is not None and not completed:
        put.update(error=failure.message, error_kind=str(failure.kind), error_detail=failure.detail)
        put["error_positions"] = list(failure.positions) or None
    put["cancel_children"] = True if cancel_children else None
    kept = {"$ceil": {"$divide": [{"$ifNull": ["$keep", work.settings.keep]}, 1_000]}}
    compute: dict[str, Any] = {"finished_at": now, "updated_at": now, "purge_at": {"$add": [now, {"$toLong": kept}]}}
    if outputs is not None:
        place = {"$indexOfArray": [{"$literal": list(outputs)}, "$_id"]}
        put.pop("output")
        compute["output"] = {"$arrayElemAt": [{"$literal": list(outputs.values())}, place]}
    if ending.counts:
        compute["failures"] = plus("failures", 1)
    return change(put=put, compute=compute, drop=FAREWELL, ready=False)


async def land(work: Work, endings: Sequence[Ending], *, read: Mapping[str, Document] | None = None) -> None:
    """Make runs terminal, with every consequence, in this transaction. A run that is terminal already is left as it is.

    The caller has checked that each of them may end (fence, status, scope). `read`: their documents, live and with all that is `NEEDED`,
    where it has read them in this transaction; otherwise they are read here. Terminal states first; then the permits, the next in
    line, dependents (which may land in turn), parents by the number of their children that landed, and schedules.
    """
    landed: list[tuple[Ending, Document]] = []
    queues: set[str] = set()
    wave: Sequence[Ending] = endings
    while wave:
        found = await _write(work, wave, read)
        landed += found
        read = None
        wave = await _dependents(work, found, queues)
    if not landed:
        return
    await flow.release(work, [row for _, row in landed])
    # A run that waited for its turn itself leaves the line without anybody's turn coming.
    freed = {
        row["sequence_key"] for _, row in landed if "sequence_key" in row and row.get("blocked_on") != flow.SEQUENCE
    }
    if freed:
        await take_turns(work, freed)
        await flow.next_in_sequence(work, freed)
    await _wake_parents(work, landed, queues)
    await _count_for_schedules(work, landed)
    for ending, _ in landed:
        work.announce(f"run:{ending.run_id}")
    for queue in queues:
        work.announce(f"queue:{queue}")


async def take_turns(work: Work, sequence_keys: Iterable[str], last: Mapping[str, int] | None = None) -> None:
    """Write the row of each sequence: whoever joins or leaves its line meanwhile is before or behind this, never beside it (75)."""
    for key in sorted(set(sequence_keys)):
        update: Document = {"$inc": {"turn": 1}, "$set": {"at": stored(work.now)}}
        if last is not None and key in last:
            update["$max"] = {"last": last[key]}
        await work.change_one("durable_permit", {"_id": key}, update, upsert=True)


async def _write(
    work: Work, endings: Sequence[Ending], read: Mapping[str, Document] | None
) -> list[tuple[Ending, Document]]:
    if read is None:
        where = {"_id": {"$in": [ending.run_id for ending in endings]}, "status": IS_LIVE}
        read = {row["_id"]: row for row in await work.find("durable_run", where, fields=NEEDED)}
    rows = dict(read)
    found: list[tuple[Ending, Document]] = []
    changes: list[tuple[Where, Change]] = []
    for ending in endings:
        row = rows.pop(ending.run_id, None)
        if row is None:
            continue
        orphans = ending.status is not Status.COMPLETED and await _has_live_children(work, row)
        changes.append(({"_id": ending.run_id}, ended(work, ending, cancel_children=orphans)))
        found.append((ending, row))
    await work.change_each("durable_run", changes)
    return found


async def _has_live_children(work: Work, row: Document) -> bool:
    """The children of a run that did not complete are cancelled by the net (48). It finds the parents by a mark, so that it need not
    look at every live child."""
    if not row.get("has_children"):
        return False
    where = {"tenant_id": row["tenant_id"], "parent_run_id": row["_id"], "status": IS_LIVE, "detached": None}
    return await work.first("durable_run", where, fields=["_id"]) is not None


async def _dependents(work: Work, landed: Iterable[tuple[Ending, Document]], queues: set[str]) -> list[Ending]:
    """Count down the nodes behind completed runs and release those at 0; the answer: the nodes that land `upstream` (77)."""
    completed = {row["_id"]: ending.status is Status.COMPLETED for ending, row in landed if row.get("has_dependents")}
    if not completed:
        return []
    edges = await work.find("durable_dependency", {"depends_on": {"$in": list(completed)}})
    where = {"_id": {"$in": sorted({edge["run_id"] for edge in edges})}, "status": "suspended", "attempts": 0}
    fields = ("queue", "wake_after", "release_at", "blocked_on")
    nodes = {row["_id"]: row for row in await work.find("durable_run", where, fields=fields)}
    counted: Counter[str] = Counter()
    lost: dict[str, Ending] = {}
    for edge in sorted(edges, key=lambda edge: edge["_id"]):
        run_id, before = edge["run_id"], edge["depends_on"]
        if run_id not in nodes:
            continue
        if completed[before]:
            counted[run_id] += 1
        else:
            lost.setdefault(run_id, behind(run_id, before))
    changes: list[tuple[Where, Change]] = []
    for run_id, count in counted.items():
        if run_id not in lost:
            changes.append(({"_id": run_id}, _counted_down(work, nodes[run_id], count, queues)))
    await work.change_each("durable_run", changes)
    return list(lost.values())


def _counted_down(work: Work, node: Document, count: int, queues: set[str]) -> Change:
    left = max(int(node.get("wake_after", 0)) - count, 0)
    if left:
        return change(put={"wake_after": left, "updated_at": stored(work.now)})
    start = instant(node, "release_at")
    start = None if start is None or start <= work.now else start
    if start is None and "blocked_on" not in node:
        queues.add(node["queue"])
    put = {
        "status": "pending",
        "available_at": None if start is None else stored(start),
        "updated_at": stored(work.now),
    }
    return change(put=put, drop=("wake_after", "release_at"))


async def _wake_parents(work: Work, landed: Iterable[tuple[Ending, Document]], queues: set[str]) -> None:
    """Add to each parent the number of its children that landed, and wake it when it waited for no more (31, 33)."""
    ends: Counter[str] = Counter()
    failed: set[str] = set()
    for ending, row in landed:
        parent = row.get("parent_run_id")
        if parent is not None:
            ends[parent] += 1
            if ending.status is not Status.COMPLETED:
                failed.add(parent)
    if not ends:
        return
    fields = (
        "status",
        "queue",
        "attempts",
        "wake_after",
        "wake_delay",
        "wake_on_failure",
        "available_at",
        "blocked_on",
    )
    where = {"_id": {"$in": sorted(ends)}, "status": IS_LIVE}
    changes: list[tuple[Where, Change]] = []
    for row in sorted(await work.find("durable_run", where, fields=fields), key=lambda row: str(row["_id"])):
        work.announce(f"run:{row['_id']}")
        changes.append(({"_id": row["_id"]}, _child_ended(work, row, ends[row["_id"]], row["_id"] in failed, queues)))
    await work.change_each("durable_run", changes)


def _child_ended(work: Work, parent: Document, count: int, failed: bool, queues: set[str]) -> Change:
    now = stored(work.now)
    seq: dict[str, Any] = {"wake_seq": plus("wake_seq", count)}
    waits = int(parent.get("wake_after", 0))
    if parent["status"] != Status.SUSPENDED or parent["attempts"] == 0 or waits == 0:
        return change(put={"updated_at": now}, compute=seq)
    left = max(waits - count, 0)
    if (parent.get("wake_on_failure") and failed) or (left == 0 and not parent.get("wake_delay")):
        queues.add(parent["queue"])
        return change(
            put={"status": "pending", "updated_at": now},
            compute=seq,
            drop=("wake_after", "available_at", "waiting_for"),
        )
    put: dict[str, Any] = {"wake_after": left or None, "updated_at": now}
    if left == 0:  # the ends of independent children are gathered for a moment (33)
        soon = stored(work.now + milliseconds(parent["wake_delay"]) * 1_000)
        standing = parent.get("available_at")
        put["available_at"] = soon if standing is None else min(soon, standing)
    return change(put=put, compute=seq)


async def _count_for_schedules(work: Work, landed: Iterable[tuple[Ending, Document]]) -> None:
    for ending, row in landed:
        if "schedule_id" not in row:
            continue
        if ending.status is Status.COMPLETED:
            where: Where = {"_id": row["schedule_id"], "consecutive_failures": {"$gt": 0}}
            await work.change_one("durable_schedule", where, {"$set": {"consecutive_failures": 0}})
        else:
            await work.change_one(
                "durable_schedule", {"_id": row["schedule_id"]}, {"$inc": {"consecutive_failures": 1}}
            )


__all__ = ["NEEDED", "ended", "land", "take_turns"]
