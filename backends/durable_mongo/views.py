"""What operators look at: queues in figures, and why a run stands where it stands (semantics 8, 74). Only reads.

`store.py` calls `stats` and `explain`. What is told of what is read stands in `durable.views`.
"""

from __future__ import annotations

from typing import Any

from durable.flow import SEQUENCE, owner_of, scopes_of
from durable.model import ALL, Explanation, QueueStats, RunRecord, Scope, Status
from durable.settings import Micros
from durable.storekit import stored_key, unknown_run
from durable.views import SHOWN, Figures, explained, queue_stats

from . import flow, upkeep
from .changes import present
from .operation import Document, Work
from .rows import belonging_to, instant_of, of_scope, run_record, visible


async def stats(work: Work, scope: Scope) -> list[QueueStats]:
    """See `durable.views.queue_stats`."""
    by = {
        "queue": "$queue",
        "status": "$status",
        "delayed": present("available_at"),
        "blocked": present("blocked_on"),
        "kind": "$error_kind",
    }
    stages: list[Document] = [
        {"$match": {"purging_at": None, **of_scope(scope)}},
        {"$group": {"_id": by, "count": {"$sum": 1}, "oldest": {"$min": "$updated_at"}}},
    ]
    figures = [_figures(row) for row in await work.aggregate("durable_run", stages)]
    where = {"scope_name": {"$gt": "queue:", "$lt": "queue;"}, "paused": True, **flow.seen_from(scope)}
    paused = await work.find("durable_queue", where, fields=["scope_name"])
    return queue_stats(figures, (row["scope_name"].partition(":")[2] for row in paused))


def _figures(row: Document) -> Figures:
    of = row["_id"]
    how = (of["queue"], of["status"], of["delayed"], of["blocked"], of.get("kind"))
    return (*how, row["count"], instant_of(row["oldest"]))


async def explain(work: Work, run_id: str, scope: Scope, lease: Micros) -> Explanation:
    """See `durable.views.explained`. Raises NotFound."""
    row = await work.first("durable_run", {"_id": run_id})
    if row is None or not visible(row, scope):
        raise unknown_run(run_id)
    run = run_record(row)
    facts: dict[str, Any] = {}
    if run.status is Status.SUSPENDED and run.attempts == 0:
        facts["upstream"] = await _upstream(work, run_id)
    elif run.status is Status.PENDING:
        scopes = scopes_of(owner_of(run.tenant), run.queue, run.name, run.concurrency_key)
        facts["rules"] = await flow.rules_of(work, scopes)
        facts["workers"] = await upkeep.workers(work, ALL)
        if run.blocked_on == SEQUENCE:
            facts["in_front"] = await _in_front(work, run)
        elif run.blocked_on in facts["rules"]:
            facts["holders"] = await _holders(work, run.blocked_on)
    return explained(run, work.now, lease=lease, **facts)


async def _upstream(work: Work, run_id: str) -> list[tuple[str, str]]:
    edges = await work.find("durable_dependency", belonging_to(run_id), sort=[("position", 1), ("depends_on", 1)])
    where = {"_id": {"$in": [edge["depends_on"] for edge in edges]}, "status": {"$ne": "completed"}}
    statuses = {row["_id"]: row["status"] for row in await work.find("durable_run", where, fields=["status"])}
    return [(edge["depends_on"], statuses[edge["depends_on"]]) for edge in edges if edge["depends_on"] in statuses][
        :SHOWN
    ]


async def _in_front(work: Work, run: RunRecord) -> tuple[str, str] | None:
    where: Document = {
        "line": stored_key(run.tenant, run.sequence_key or ""),
        "_id": {"$ne": run.run_id},
        "$or": [{"submitted": {"$lt": run.submitted}}, {"blocked_on": {"$ne": SEQUENCE}}],
    }
    front = await work.first("durable_run", where, fields=["status"], sort=[("submitted", 1)])
    return None if front is None else (front["_id"], front["status"])


async def _holders(work: Work, scope: str | None) -> list[str]:
    rows = await work.find("durable_run", {"permits": scope}, fields=["_id"], sort=[("submitted", 1)], limit=SHOWN)
    return [row["_id"] for row in rows]


__all__ = ["explain", "stats"]
