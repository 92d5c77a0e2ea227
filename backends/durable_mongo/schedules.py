"""Cron rows (semantics 52 to 56, 62): register, pause, park, remove, what is due, and the firing. `store.py` calls these.

The engine computes instants; here they are compared, advanced and turned into runs in one transaction. Nothing here parses an
expression or knows a time zone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from durable.errors import Conflict
from durable.model import ALL, Firing, Instant, Schedule, ScheduleSpec, Scope, Submitted
from durable.storekit import given_key

from . import enqueue
from .changes import ENDED, change, only_if
from .operation import Document, Work
from .rows import instant, of_scope, stored_id, tenant, tenant_text
from .times import stored

_FIRES = {"enabled": True, "parked_reason": None}


async def put(work: Work, spec: ScheduleSpec, scope: Scope) -> Schedule:
    """Register or change. Raises Conflict for the unbound scope: a schedule belongs to one tenant, or is untagged."""
    if scope is ALL:
        raise Conflict(
            f"schedule {spec.schedule_id!r}: all tenants can not own one schedule", hint="bind the client to a tenant"
        )
    tenant_id = tenant_text(scope)
    key = stored_id(tenant_id, spec.schedule_id)
    following = "$$REMOVE" if spec.next_fire_at is None else {"$literal": stored(spec.next_fire_at)}
    same = {"$and": [{"$eq": ["$cron", {"$literal": spec.cron}]}, {"$eq": ["$tz", {"$literal": spec.tz}]}]}
    now = {"$literal": stored(work.now)}
    compute: dict[str, Any] = {
        # The same cron and zone leave the instant and the paused state alone; a parked row that is put again is unparked (56).
        "next_fire_at": only_if(same, "$next_fire_at", following),
        "enabled": {"$ifNull": ["$enabled", True]},
        "consecutive_failures": {"$ifNull": ["$consecutive_failures", 0]},
        "created_at": {"$ifNull": ["$created_at", now]},
        "updated_at": now,
    }
    values = {
        "name": spec.name,
        "cron": spec.cron,
        "tz": spec.tz,
        "queue": spec.queue,
        "overlap": spec.overlap,
        "catch_up": spec.catch_up,
        "jitter": spec.jitter,
        "from_code": spec.from_code,
        "tenant_id": tenant_id,
        "input": spec.input,
    }
    stages = change(put=values, compute=compute, drop=("parked_reason",), ready=False)
    await work.change_one("durable_schedule", {"_id": key}, stages, upsert=True)
    (schedule,) = await _schedules(work, {"_id": key})
    return schedule


async def pause(work: Work, schedule_id: str, scope: Scope, paused: bool, next_fire_at: Instant | None) -> bool:
    """Pause, or resume at `next_fire_at`. False where the scope sees no such schedule."""
    key = await _key(work, schedule_id, scope)
    if key is None:
        return False
    sets: Document = {"enabled": not paused, "updated_at": stored(work.now)}
    if not paused and next_fire_at is not None:
        sets["next_fire_at"] = stored(next_fire_at)
    return await work.change_one("durable_schedule", {"_id": key}, {"$set": sets}) == 1


async def park(work: Work, schedule_id: str, scope: Scope, reason: str) -> bool:
    """Take it out of the due scan, with the reason for people. False where the scope sees no such schedule."""
    key = await _key(work, schedule_id, scope)
    sets = {"parked_reason": reason, "updated_at": stored(work.now)}
    return key is not None and await work.change_one("durable_schedule", {"_id": key}, {"$set": sets}) == 1


async def remove(work: Work, schedule_id: str, scope: Scope) -> bool:
    """Remove the row; its slots stay, so that the same schedule put again fires no slot twice. False where the scope sees none."""
    key = await _key(work, schedule_id, scope)
    return key is not None and await work.remove("durable_schedule", {"_id": key}) == 1


async def schedules(work: Work, scope: Scope, schedule_ids: Sequence[str]) -> list[Schedule]:
    """Those with these ids that the scope sees, in their order; without ids all that it sees."""
    if not schedule_ids:
        return await _schedules(work, of_scope(scope))
    keys = [key for schedule_id in schedule_ids for key in await _keys(work, schedule_id, scope)]
    found = {
        stored_id(tenant_text(one.tenant), one.schedule_id): one
        for one in await _schedules(work, {"_id": {"$in": keys}})
    }
    return [found[key] for key in keys if key in found]


async def due(work: Work, scope: Scope, limit: int) -> tuple[Instant, list[Schedule]]:
    """Now, and the schedules that are due, oldest first."""
    where = {
        **_FIRES,
        "next_fire_at": {"$exists": True},
        "$expr": {"$lte": ["$next_fire_at", work.clock.expression()]},
        **of_scope(scope),
    }
    return work.now, await _schedules(work, where, sort=(("next_fire_at", 1), ("_id", 1)), limit=limit)


async def fire(work: Work, firing: Firing) -> list[Submitted] | None:
    """Slot rows, runs and the next instant together, if the schedule still stands at `expected` (53); None if it does not."""
    key = stored_id(tenant_text(firing.tenant), firing.schedule_id)
    stands = {"_id": key, **_FIRES, "next_fire_at": stored(firing.expected)}
    if firing.parked_reason is not None:
        sets = {"parked_reason": firing.parked_reason, "updated_at": stored(work.now)}
        return [] if await work.change_one("durable_schedule", stands, {"$set": sets}) == 1 else None
    # The compare and the advance in one write: whoever finds another instant here has lost the race.
    following = None if firing.next_fire_at is None else stored(firing.next_fire_at)
    advance = change(put={"next_fire_at": following, "updated_at": stored(work.now)}, ready=False)
    if await work.change_one("durable_schedule", stands, advance) == 0:
        return None
    slots = {
        stored(firing.expected if run.scheduled_for is None else run.scheduled_for): run
        for run in reversed(firing.runs)
    }
    row: Document = {"tenant_id": tenant_text(firing.tenant), "schedule_id": key}
    where = {**row, "scheduled_for": {"$in": list(slots)}}
    fired = {one["scheduled_for"] for one in await work.find("durable_schedule_fire", where, fields=["scheduled_for"])}
    open_slots = {slot: run for slot, run in reversed(slots.items()) if slot not in fired}
    if not open_slots:
        return []
    answers = await enqueue.enqueue(work, list(open_slots.values()))
    ids = [answer.run.run_id for answer in answers]
    now = stored(work.now)
    rows = [
        {**row, "scheduled_for": slot, "run_id": run_id, "created_at": now}
        for slot, run_id in zip(open_slots, ids, strict=True)
    ]
    await work.insert("durable_schedule_fire", rows)
    await work.change_one("durable_schedule", {"_id": key}, {"$set": {"last_run_id": ids[-1]}})
    return answers


async def _keys(work: Work, schedule_id: str, scope: Scope) -> list[str]:
    if scope is not ALL:
        return [stored_id(tenant_text(scope), schedule_id)]
    rows = await work.find("durable_schedule", {}, fields=["_id"], sort=[("_id", 1)])
    return [row["_id"] for row in rows if given_key(row["_id"]) == schedule_id]


async def _key(work: Work, schedule_id: str, scope: Scope) -> str | None:
    """The stored key of the one schedule that is meant. Raises Conflict where the unbound scope sees several of that id."""
    keys = await _keys(work, schedule_id, scope)
    there = [row["_id"] for row in await work.find("durable_schedule", {"_id": {"$in": keys}}, fields=["_id"])]
    if len(there) > 1:
        raise Conflict(
            f"{len(there)} tenants have a schedule {schedule_id!r}", hint="bind the client to the tenant that is meant"
        )
    return there[0] if there else None


async def _schedules(
    work: Work, where: Document, *, sort: Sequence[tuple[str, int]] = (("_id", 1),), limit: int = 0
) -> list[Schedule]:
    rows = await work.find("durable_schedule", where, sort=sort, limit=limit)
    ids = [row["last_run_id"] for row in rows if "last_run_id" in row]
    runs = await work.find("durable_run", {"_id": {"$in": ids}, "purging_at": None}, fields=["status"]) if ids else []
    live = {run["_id"] for run in runs if run["status"] not in ENDED}
    return [_schedule(row, live) for row in rows]


def _schedule(row: Document, live: set[str]) -> Schedule:
    return Schedule(
        schedule_id=given_key(row["_id"]),
        tenant=tenant(row["tenant_id"]),
        name=row["name"],
        cron=row["cron"],
        tz=row["tz"],
        input=row["input"],
        queue=row["queue"],
        overlap=row["overlap"],
        catch_up=row["catch_up"],
        jitter=int(row["jitter"]),
        next_fire_at=instant(row, "next_fire_at"),
        enabled=bool(row["enabled"]),
        from_code=bool(row["from_code"]),
        last_run_id=row.get("last_run_id"),
        last_run_live=row.get("last_run_id") in live,
        consecutive_failures=int(row["consecutive_failures"]),
        parked_reason=row.get("parked_reason"),
        created_at=instant(row, "created_at") or 0,
        updated_at=instant(row, "updated_at") or 0,
    )


__all__ = ["due", "fire", "park", "pause", "put", "remove", "schedules"]
