"""Retention (semantics 60 to 62): landed runs go when they are due, with everything that belongs to them. `store.py` calls `purge`.

Three steps that may end anywhere: runs get a tombstone (`purging_at`, from where on nobody sees them) in one transaction; their records,
signals, keys and edges are deleted; the runs last, so that until then the next purge finds them by the tombstone. Any number of purgers
may do this at once. An operator's retry writes the same document: it comes before the tombstone, or finds no run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from durable.model import Scope
from durable.settings import Micros

from .changes import IS_ENDED, LIVE
from .connection import Database
from .journal import RANGES
from .operation import Document, Where, Work
from .rows import belonging_to, of_scope
from .times import stored


async def purge(database: Database, scope: Scope, limit: int, older_than: Micros | None) -> int:
    """Delete due runs, oldest first, at most `limit`; to how many this call gave their tombstone: from there on they are gone."""
    mine = await database.write(lambda work: bury(work, scope, limit, older_than))
    await database.plain(lambda work: finish(work, mine))
    if len(mine) < limit:  # what an interrupted purge has left, or another one is at just now
        rest = await database.plain(lambda work: interrupted(work, scope, limit - len(mine)))
        await database.plain(lambda work: finish(work, rest))
    await database.plain(lambda work: clean(work, limit))
    return len(mine)


async def bury(work: Work, scope: Scope, limit: int, older_than: Micros | None) -> list[str]:
    """Give due runs their tombstone; which. A run whose parent is not terminal is kept, unless detached."""
    stamp, now = ("purge_at", work.now) if older_than is None else ("finished_at", work.now - older_than)
    due: Document = {
        stamp: {"$exists": True, "$lte": stored(now)},
        "purge_at": {"$exists": True, **({"$lte": stored(now)} if stamp == "purge_at" else {})},
        "purging_at": None,
        **of_scope(scope),
    }
    parent: Document = {
        "from": work.name_of("durable_run"),
        "localField": "parent_run_id",
        "foreignField": "_id",
        "pipeline": [{"$project": {"status": 1}}],
        "as": "parent",
    }
    stages: Sequence[Mapping[str, object]] = [
        {"$match": due},
        {"$sort": {stamp: 1}},
        {"$lookup": parent},
        {"$match": {"$or": [{"detached": True}, {"parent.status": {"$nin": list(LIVE)}}]}},
        {"$limit": limit},
        {"$project": {"parent_run_id": 1, "detached": 1}},
    ]
    rows = await work.aggregate("durable_run", stages)
    ids = [row["_id"] for row in rows]
    parents = sorted({row["parent_run_id"] for row in rows if "parent_run_id" in row and not row.get("detached")})
    if parents:  # a parent that is retried meanwhile is live again, and keeps its children
        await work.change_many("durable_run", {"_id": {"$in": parents}}, {"$inc": {"touched": 1}})
    if ids:
        where: Where = {"_id": {"$in": ids}, "status": IS_ENDED, "purging_at": None}
        await work.change_many("durable_run", where, {"$set": {"purging_at": stored(work.now)}})
    return ids


async def finish(work: Work, run_ids: Sequence[str]) -> None:
    """Delete what belongs to buried runs, and then them."""
    if not run_ids:
        return
    ids = list(run_ids)
    for start in range(0, len(ids), RANGES):
        ranges = [belonging_to(run_id) for run_id in ids[start : start + RANGES]]
        for table in ("durable_step", "durable_signal", "durable_dependency"):
            await work.remove(table, {"$or": ranges})
    await work.remove("durable_dependency", {"depends_on": {"$in": ids}})
    await work.remove("durable_key", {"run_id": {"$in": ids}})
    await work.remove("durable_run", {"_id": {"$in": ids}, "purging_at": {"$exists": True}})


async def interrupted(work: Work, scope: Scope, limit: int) -> list[str]:
    """Runs with a tombstone, the oldest first."""
    where = {"purging_at": {"$exists": True}, **of_scope(scope)}
    rows = await work.find("durable_run", where, fields=["_id"], sort=[("purging_at", 1)], limit=limit)
    return [row["_id"] for row in rows]


async def clean(work: Work, limit: int) -> None:
    """Old slots of schedules (62), workers unseen for a day (17), and rows of marks and sequences that nobody writes any more."""
    ends: tuple[tuple[str, str, Micros], ...] = (
        ("durable_schedule_fire", "created_at", work.settings.slot_keep),
        ("durable_permit", "at", work.settings.worker_keep),
    )
    for table, field, keep in ends:
        old = await work.find(table, {field: {"$lt": stored(work.now - keep)}}, fields=["_id"], limit=limit)
        if old:
            await work.remove(
                table, {"_id": {"$in": [row["_id"] for row in old]}, field: {"$lt": stored(work.now - keep)}}
            )
    await work.remove("durable_worker", {"seen_at": {"$lt": stored(work.now - work.settings.worker_keep)}})


__all__ = ["bury", "clean", "finish", "interrupted", "purge"]
