"""Tenants as a whole (semantics 57): what is stored of each, and erasing one. `store.py` calls both. Nothing here looks into a payload.

Runs are erased as they are purged (61): a tombstone first, the run last, so that an erasure that ends anywhere is finished by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from durable.errors import Conflict
from durable.flow import EVERYBODY, TENANT, rule_id
from durable.model import Scope, TenantStats

from .changes import IS_ENDED, LIVE
from .connection import Database
from .operation import Document, Work
from .purge import finish, interrupted
from .rows import of_scope, tenant, tenant_text
from .times import stored

LAST: Final = ("durable_queue", "durable_worker")


async def tenants(work: Work, scope: Scope) -> list[TenantStats]:
    """What each tenant has, the untagged first. A bound scope sees its own, though there be nothing."""
    whose = of_scope(scope)
    by_state: Sequence[Document] = [
        {"$match": {"purging_at": None, **whose}},
        {"$group": {"_id": {"tenant": "$tenant_id", "status": "$status"}, "count": {"$sum": 1}}},
    ]
    by_tenant: Sequence[Document] = [{"$match": whose}, {"$group": {"_id": "$tenant_id", "count": {"$sum": 1}}}]
    runs: dict[str, dict[str, int]] = {one: {} for one in whose.values()}
    for row in await work.aggregate("durable_run", by_state):
        runs.setdefault(row["_id"]["tenant"], {})[row["_id"]["status"]] = row["count"]
    schedules: dict[str, int] = {
        row["_id"]: row["count"] for row in await work.aggregate("durable_schedule", by_tenant)
    }
    paused: dict[str, bool] = {}
    for row in await work.find("durable_queue", whose, fields=["tenant_id", "scope_name", "paused"]):
        owner = row["tenant_id"]
        if owner != EVERYBODY:
            paused[owner] = paused.get(owner, False) or (row["scope_name"] == TENANT and bool(row.get("paused")))
    return [
        TenantStats(
            tenant=tenant(one), paused=paused.get(one, False), runs=runs.get(one, {}), schedules=schedules.get(one, 0)
        )
        for one in sorted({*runs, *schedules, *paused})
    ]


async def erase(database: Database, owner: UUID, limit: int) -> int:
    """Delete schedules, slots and runs, a batch of each; with nothing left of these, the rest. 0: nothing is left. Raises Conflict where it
    meets a live run."""
    mine = await database.write(lambda work: _bury(work, owner, limit))
    rest = await database.plain(lambda work: interrupted(work, owner, limit))
    buried = sorted({*mine, *rest})
    await database.plain(lambda work: finish(work, buried))
    gone = len(buried) + await database.plain(lambda work: _plans(work, owner, limit))
    return gone or await database.plain(lambda work: _rest(work, owner))


async def _bury(work: Work, owner: UUID, limit: int) -> list[str]:
    """Give the oldest runs their tombstone; which."""
    where = {"purging_at": None, **of_scope(owner)}
    oldest = [("created_at", 1), ("_id", 1)]
    found = await work.find("durable_run", where, fields=["status"], sort=oldest, limit=limit)
    live = [row["_id"] for row in found if row["status"] in LIVE]
    if live:
        raise Conflict(
            f"run {live[0]} of tenant {owner} is live", hint="cancel its runs and let them land; then erase it again"
        )
    ids = [row["_id"] for row in found]
    if ids:
        ended = {"_id": {"$in": ids}, "status": IS_ENDED, "purging_at": None}
        await work.change_many("durable_run", ended, {"$set": {"purging_at": stored(work.now)}})
    return ids


async def _plans(work: Work, owner: UUID, limit: int) -> int:
    """Delete its schedules, and a batch of their slots."""
    gone = await work.remove("durable_schedule", of_scope(owner))
    slots = await work.find("durable_schedule_fire", of_scope(owner), fields=["_id"], limit=limit)
    if slots:
        gone += await work.remove("durable_schedule_fire", {"_id": {"$in": [row["_id"] for row in slots]}})
    return gone


async def _rest(work: Work, owner: UUID) -> int:
    """Delete its rows of flow control, its workers, and what is left of keys and sequences."""
    span = {"_id": {"$gt": rule_id(tenant_text(owner), ""), "$lt": f"{owner};"}}
    for table in ("durable_key", "durable_permit"):
        await work.remove(table, span)
    return sum([await work.remove(table, of_scope(owner)) for table in LAST])


__all__ = ["erase", "tenants"]
