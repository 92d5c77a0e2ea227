"""The chores (semantics 11, 15, 17, 31, 48): promote, sweep, the nets, the registry of workers. `store.py` calls them.

Each is bounded, safe everywhere at once, and finds its rows by a partial index that holds nothing else. A run that ends here ends
through the landing. Nothing here decides when it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from durable.landing import Ending, reclaimed_too_often
from durable.model import ALL, Promoted, Scope, Swept, WorkerRecord

from . import cancel, flow, landing
from .changes import IS_LIVE, change, plus
from .operation import Document, Where, Work
from .rows import instant, of_scope, tenant, tenant_text
from .times import stored

PROMOTE = ("available_at", "wake_after", "waiting_for")


async def promote(work: Work, scope: Scope, limit: int) -> Promoted:
    """Due runs become claimable, oldest due first; so do runs for which a token of their rate has come in (76). Without a transaction:
    each is released by itself, and by one of those that promote at once."""
    now = work.clock.expression()
    # An unreleased node of a graph has no `available_at`: it waits for its upstream, whatever its start.
    due = {"available_at": {"$exists": True}, "$expr": {"$lte": ["$available_at", now]}, **of_scope(scope)}
    count = 0
    queues: set[str] = set()
    while count < limit and (
        rows := await work.find("durable_run", due, fields=["queue"], sort=[("available_at", 1)], limit=limit - count)
    ):
        where: Where = {"_id": {"$in": [row["_id"] for row in rows]}, **due}
        stages = change(put={"status": "pending"}, compute={"updated_at": now}, drop=PROMOTE)
        released = await work.change_many("durable_run", where, stages)
        count += released
        queues.update(row["queue"] for row in rows)
        if released == len(rows):
            break  # otherwise somebody was quicker with some of them: there may be more
    for queue in queues:
        work.announce(f"queue:{queue}")
    next_token = await flow.refill(work, scope, limit)
    first = await work.first(
        "durable_run",
        {"available_at": {"$exists": True}, **of_scope(scope)},
        fields=["available_at"],
        sort=[("available_at", 1)],
    )
    instants = [next_token, None if first is None else instant(first, "available_at")]
    return Promoted(
        count=count, queues=frozenset(queues), next_due=min((one for one in instants if one is not None), default=None)
    )


async def sweep(work: Work, scope: Scope, limit: int, max_reclaims: int) -> Swept:
    """Runs whose lease lapsed go back to pending, or land past the limit (15)."""
    lapsed = {"status": "running", "$expr": {"$lt": ["$leased_until", work.clock.expression()]}, **of_scope(scope)}
    fields = ("queue", "attempts", "reclaims", "compensating", "record_fence", "permits", "mark")
    rows = await work.find(
        "durable_run", lapsed, fields=fields, sort=[("leased_until", 1), ("submitted", 1)], limit=limit
    )
    returned: list[Document] = []
    poisoned: list[Ending] = []
    for row in rows:
        # `record_fence`: the claim under which the newest record was made.
        reclaims = 0 if row.get("record_fence") == row["attempts"] else row["reclaims"] + 1
        where = {"_id": row["_id"], "mark": row.get("mark"), "status": "running"}
        if reclaims > max_reclaims and not row.get("compensating"):
            await work.change_one("durable_run", where, {"$set": {"reclaims": reclaims}})
            poisoned.append(reclaimed_too_often(row["_id"], reclaims))
            continue
        put: dict[str, Any] = {"status": "pending", "reclaims": reclaims}
        put["blocked_on"] = flow.ALONE if reclaims >= 2 else None
        # The mark goes: a settle of the lapsed claim that comes late must not take this pending run for its own work.
        drop = ("leased_until", "claim_token", "mark", "available_at", "permits")
        stages = change(put=put, compute={"updated_at": work.clock.expression()}, drop=drop)
        await work.change_one("durable_run", where, stages)
        returned.append(row)
        work.announce(f"queue:{row['queue']}")
    await flow.release(work, returned)
    if poisoned:
        await landing.land(work, poisoned)
    alone = {"status": "pending", "blocked_on": flow.ALONE, **of_scope(scope)}
    lonely = await work.aggregate("durable_run", [{"$match": alone}, {"$group": {"_id": "$queue"}}])
    return Swept(
        returned=[row["_id"] for row in returned],
        failed=[one.run_id for one in poisoned],
        queues=frozenset(row["queue"] for row in returned),
        alone=frozenset(row["_id"] for row in lonely),
    )


# -- the nets -----------------------------------------------------------------------------------------------------------------


async def mend(work: Work, scope: Scope, limit: int, waiting_in_vain: Sequence[str]) -> int:
    """What a lost step of the ordinary way would leave behind, at most `limit` of each kind; how many were mended."""
    return (
        await _cancel_children(work, scope, limit)
        + await _wake_parents(work, waiting_in_vain)
        + await flow.free_heads(work, scope, limit)
    )


async def _cancel_children(work: Work, scope: Scope, limit: int) -> int:
    """Live children of parents that landed in any state but completed are asked to stop (48)."""
    asked = 0
    where = {"cancel_children": True, "purging_at": None, **of_scope(scope)}
    parents = await work.find("durable_run", where, fields=["tenant_id"], sort=[("cancel_children", 1)], limit=limit)
    for parent in parents:
        unasked = {
            "tenant_id": parent["tenant_id"],
            "parent_run_id": parent["_id"],
            "status": IS_LIVE,
            "detached": None,
            "cancel_requested_at": None,
        }
        children = await work.find("durable_run", unasked, fields=["_id"], limit=limit - asked)
        for child in children:
            await cancel.ask(work, child["_id"], f"its parent {parent['_id']} has ended")
        asked += len(children)
        if asked >= limit:
            break  # this parent may have more; its flag stays
        await work.change_one("durable_run", {"_id": parent["_id"]}, {"$unset": {"cancel_children": ""}})
    return asked


_COUNTED = {"status": IS_LIVE, "parent_step_id": {"$not": {"$regex": "@"}}}
"""The children whose end a parent counts: live, and not parted from the step that started them."""
_WAITING = {"wake_after": {"$gt": 0}, "status": "suspended", "attempts": {"$gt": 0}}


async def waiting_in_vain(work: Work, scope: Scope, limit: int) -> list[str]:
    """Runs that wait for more ends than can still come: fewer of their children live than they count on (31). Outside a transaction: a
    sharded collection is not joined in one before MongoDB 8, and `mend` counts again."""
    live: Document = {
        "from": work.name_of("durable_run"),
        "let": {"parent": "$_id", "tenant": "$tenant_id"},
        "pipeline": [
            {
                "$match": {
                    "$expr": {"$and": [{"$eq": ["$tenant_id", "$$tenant"]}, {"$eq": ["$parent_run_id", "$$parent"]}]},
                    "parent_run_id": {"$gt": ""},
                    **_COUNTED,
                }
            },
            {"$count": "count"},
        ],
        "as": "live",
    }
    stages: Sequence[Document] = [
        {"$match": {**_WAITING, **of_scope(scope)}},
        {"$lookup": live},
        {"$match": {"$expr": {"$gt": ["$wake_after", {"$ifNull": [{"$first": "$live.count"}, 0]}]}}},
        {"$sort": {"submitted": 1}},
        {"$limit": limit},
        {"$project": {"_id": 1}},
    ]
    return [row["_id"] for row in await work.aggregate("durable_run", stages)]


async def _wake_parents(work: Work, run_ids: Sequence[str]) -> int:
    """Wake those that still wait in vain."""
    woken = 0
    where = {"_id": {"$in": list(run_ids)}, **_WAITING}
    for row in await work.find("durable_run", where, fields=("queue", "tenant_id", "wake_after")) if run_ids else ():
        children = {"tenant_id": row["tenant_id"], "parent_run_id": row["_id"], **_COUNTED}
        if await work.count("durable_run", children) >= row["wake_after"]:
            continue
        put = {"status": "pending", "updated_at": stored(work.now)}
        stages = change(
            put=put, compute={"wake_seq": plus("wake_seq", 1)}, drop=("available_at", "wake_after", "waiting_for")
        )
        await work.change_one("durable_run", {"_id": row["_id"], "status": "suspended"}, stages)
        work.announce(f"queue:{row['queue']}")
        woken += 1
    return woken


# -- the registry -------------------------------------------------------------------------------------------------------------


async def register(work: Work, worker: WorkerRecord) -> None:
    """Put or refresh a worker's row; `started_at` is that of the first time."""
    row = {
        "tenant_id": tenant_text(worker.tenant),
        "bound": worker.bound,
        "host": worker.host,
        "pid": worker.pid,
        "queues": [[name, most] for name, most in worker.queues.items()],
        "functions": [list(pair) for pair in worker.functions],
        "family": worker.family,
        "settings": worker.settings,
        "seen_at": stored(work.now),
    }
    update = {"$set": row, "$setOnInsert": {"started_at": stored(work.now)}}
    await work.change_one("durable_worker", {"_id": worker.worker_id}, update, upsert=True)


async def unregister(work: Work, worker_id: str) -> None:
    """Remove a worker's row."""
    await work.remove("durable_worker", {"_id": worker_id})


async def workers(work: Work, scope: Scope) -> list[WorkerRecord]:
    """The registry; a bound scope sees those that serve it: its own, and those that serve everybody."""
    where: Where = {} if scope is ALL else {"$or": [{"bound": False}, of_scope(scope)]}
    return [
        WorkerRecord(
            worker_id=row["_id"],
            tenant=tenant(row["tenant_id"]),
            bound=bool(row["bound"]),
            host=row["host"],
            pid=row["pid"],
            queues=dict(row["queues"]),
            functions=[(name, version) for name, version in row["functions"]],
            family=row["family"],
            settings=row["settings"],
            started_at=instant(row, "started_at") or 0,
            seen_at=instant(row, "seen_at") or 0,
        )
        for row in await work.find("durable_worker", where, sort=[("started_at", 1), ("_id", 1)])
    ]


__all__ = ["mend", "promote", "register", "sweep", "unregister", "waiting_in_vain", "workers"]
