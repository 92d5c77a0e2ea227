"""Retention (semantics 60 to 62): landed runs go when they are due, with everything that belongs to them. `store.py` calls `purge`.

Due runs are looked for first. Then three steps that may end anywhere: those that may still go get a tombstone (`purging_at`, from where on
nobody sees them) in one transaction; their records, signals, keys and edges are deleted; the runs last, so that until then the next
purge finds them by the tombstone. Any number of purgers may do this at once. An operator's retry writes the same document: it comes
before the tombstone, or finds no run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from durable.model import Scope
from durable.settings import Micros

from .changes import IS_ENDED, IS_LIVE, LIVE
from .connection import Database
from .journal import RANGES
from .operation import Document, Where, Work
from .rows import belonging_to, of_scope
from .times import stored


async def purge(database: Database, scope: Scope, limit: int, older_than: Micros | None) -> int:
    """Delete due runs, oldest first, at most `limit`; to how many this call gave their tombstone: from there on they are gone."""
    mine: list[str] = []
    while len(mine) < limit:  # another purger may have been quicker with what was found: then there may be more
        look = functools.partial(due, scope=scope, limit=limit - len(mine), older_than=older_than)
        if not (found := await database.plain(look)):
            break
        mine += await database.write(functools.partial(bury, run_ids=found, older_than=older_than))
    await database.plain(lambda work: finish(work, mine))
    if len(mine) < limit:  # what an interrupted purge has left, or another one is at just now
        rest = await database.plain(lambda work: interrupted(work, scope, limit - len(mine)))
        await database.plain(lambda work: finish(work, rest))
    await database.plain(lambda work: clean(work, limit))
    return len(mine)


async def due(work: Work, scope: Scope, limit: int, older_than: Micros | None) -> list[str]:
    """Due runs, the oldest first, without those that their parents keep. Outside a transaction: a sharded collection is not joined in
    one before MongoDB 8, and what is found here is looked at again by `bury`."""
    parent: Document = {
        "from": work.name_of("durable_run"),
        "localField": "parent_run_id",
        "foreignField": "_id",
        "pipeline": [{"$project": {"status": 1}}],
        "as": "parent",
    }
    stages: Sequence[Mapping[str, object]] = [
        {"$match": {**_is_due(work, older_than), **of_scope(scope)}},
        {"$sort": {"purge_at" if older_than is None else "finished_at": 1}},
        {"$lookup": parent},
        {"$match": {"$or": [{"detached": True}, {"parent.status": {"$nin": list(LIVE)}}]}},
        {"$limit": limit},
        {"$project": {"_id": 1}},
    ]
    return [row["_id"] for row in await work.aggregate("durable_run", stages)]


def _is_due(work: Work, older_than: Micros | None) -> Document:
    """The filter of runs whose time has come: by what their end has said, or by when that was."""
    if older_than is None:
        return {"purge_at": {"$exists": True, "$lte": stored(work.now)}, "purging_at": None}
    before = stored(work.now - older_than)
    return {"finished_at": {"$exists": True, "$lte": before}, "purge_at": {"$exists": True}, "purging_at": None}


async def bury(work: Work, run_ids: Sequence[str], older_than: Micros | None) -> list[str]:
    """Give those that are still due their tombstone; which. A run whose parent is not terminal is kept, unless detached."""
    fields = ("parent_run_id", "detached")
    found = await work.find("durable_run", {"_id": {"$in": list(run_ids)}, **_is_due(work, older_than)}, fields=fields)
    bound = {row["_id"]: row["parent_run_id"] for row in found if "parent_run_id" in row and not row.get("detached")}
    parents = sorted(set(bound.values()))
    live: set[str] = set()
    if parents:
        rows = await work.find("durable_run", {"_id": {"$in": parents}, "status": IS_LIVE}, fields=["_id"])
        live = {row["_id"] for row in rows}
        # A parent that is retried meanwhile is live again, and keeps its children.
        await work.change_many("durable_run", {"_id": {"$in": parents}}, {"$inc": {"touched": 1}})
    ids = [row["_id"] for row in found if bound.get(row["_id"]) not in live]
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


__all__ = ["bury", "clean", "due", "finish", "interrupted", "purge"]
