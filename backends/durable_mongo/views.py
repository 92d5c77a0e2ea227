"""What operators look at: queues in figures, and why a run stands where it stands, in sentences (semantics 8, 74). Only reads.

`store.py` calls `stats` and `explain`. Codes are for machines and do not change; sentences may.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from durable.errors import NotFound
from durable.flow import EVERYBODY, scopes_of
from durable.model import (
    ALL,
    TERMINAL,
    Explanation,
    Instant,
    QueueRecord,
    QueueStats,
    RunRecord,
    Scope,
    Status,
    WorkerRecord,
)
from durable.settings import Micros
from durable.storekit import stored_key

from . import flow, upkeep
from .changes import present
from .operation import Document, Work
from .rows import belonging_to, instant_of, of_scope, run_record, tenant_text, visible

# -- figures ------------------------------------------------------------------------------------------------------------------


async def stats(work: Work, scope: Scope) -> list[QueueStats]:
    """Depth, age and failures of every queue that has runs or is paused, by name. Ready counts from when a run became ready."""
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
    depths: dict[str, dict[str, Any]] = {}
    for row in await work.aggregate("durable_run", stages):
        _add(depths.setdefault(row["_id"]["queue"], _nothing()), row["_id"], row["count"], row["oldest"])
    names = {"scope_name": {"$gt": "queue:", "$lt": "queue;"}, "paused": True, **flow.seen_from(scope)}
    paused = {
        row["scope_name"].partition(":")[2] for row in await work.find("durable_queue", names, fields=["scope_name"])
    }
    for queue in paused:
        depths.setdefault(queue, _nothing())
    return [QueueStats(queue=queue, paused=queue in paused, **depth) for queue, depth in sorted(depths.items())]


def _nothing() -> dict[str, Any]:
    counts = dict.fromkeys(("ready", "delayed", "suspended", "blocked", "running"), 0)
    return {**counts, "oldest_ready_at": None, "failed_by_kind": {}}


def _add(depth: dict[str, Any], what: Mapping[str, Any], count: int, oldest: Any) -> None:
    status = what["status"]
    if status in (Status.RUNNING, Status.SUSPENDED):
        depth[status] += count
    elif status in (Status.FAILED, Status.TIMED_OUT, Status.FORWARD_INCOMPLETE):
        kind = what.get("kind") or status
        depth["failed_by_kind"][kind] = depth["failed_by_kind"].get(kind, 0) + count
    elif status != Status.PENDING:
        return  # completed and cancelled runs are no news
    elif what["delayed"]:
        depth["delayed"] += count
    elif what["blocked"]:
        depth["blocked"] += count
    else:
        depth["ready"] += count
        at = instant_of(oldest)
        depth["oldest_ready_at"] = at if depth["oldest_ready_at"] is None else min(at, depth["oldest_ready_at"])


# -- why a run does not move --------------------------------------------------------------------------------------------------

_Reason = tuple[str, str]


async def explain(work: Work, run_id: str, scope: Scope, lease: Micros) -> Explanation:
    """The run, the code of what holds it up first, and every reason in a sentence. A worker is live if it was seen within a lease.
    Raises NotFound."""
    row = await work.first("durable_run", {"_id": run_id})
    if row is None or not visible(row, scope):
        raise NotFound(f"there is no run {run_id}", hint="check the id; a run is visible to its own tenant only")
    run, now = run_record(row), work.now
    if run.status in TERMINAL:
        reasons = [_ended(run)]
    elif run.status is Status.RUNNING:
        reasons = [_running(run, now)]
    elif run.status is Status.SUSPENDED:
        reasons = [await _waiting(work, run)]
    else:
        reasons = [reason async for reason in _pending(work, run, now, lease)]
    if run.status not in TERMINAL:
        reasons += _also(run)
    return Explanation(run=run, code=reasons[0][0], reasons=[text for _, text in reasons])


def _ended(run: RunRecord) -> _Reason:
    text = f"It landed {run.status} at {_when(run.finished_at)}"
    if run.error is not None:
        text += f" ({run.error_kind}): {run.error}"
    return str(run.status), f"{text}. It is kept until {_when(run.purge_at)}."


def _running(run: RunRecord, now: Instant) -> _Reason:
    until = run.leased_until or 0
    if until < now:
        return (
            "lapsed",
            f"Its lease of the claim {run.lease_owner} lapsed at {_when(until)}: the next sweep returns it.",
        )
    return "running", f"It is leased by the claim {run.lease_owner} until {_when(until)} (claim number {run.attempts})."


async def _waiting(work: Work, run: RunRecord) -> _Reason:
    if run.attempts == 0:
        before = ", ".join(f"{run_id} ({status})" for run_id, status in await _upstream(work, run.run_id))
        return "upstream", f"It waits for {run.wake_after} run(s) before it in its graph: {before}."
    parts = [f"It waits for {_plainly(run.waiting_for)}"]
    if run.wake_after:
        parts.append(f"{run.wake_after} more end(s) of child runs wake it")
    parts.append(
        "nothing wakes it by time" if run.available_at is None else f"at the latest at {_when(run.available_at)}"
    )
    return "waiting", ", ".join(parts) + "."


async def _upstream(work: Work, run_id: str) -> list[tuple[str, str]]:
    edges = await work.find("durable_dependency", belonging_to(run_id), sort=[("position", 1), ("depends_on", 1)])
    where = {"_id": {"$in": [edge["depends_on"] for edge in edges]}, "status": {"$ne": "completed"}}
    statuses = {row["_id"]: row["status"] for row in await work.find("durable_run", where, fields=["status"])}
    return [(edge["depends_on"], statuses[edge["depends_on"]]) for edge in edges if edge["depends_on"] in statuses][:6]


async def _pending(work: Work, run: RunRecord, now: Instant, lease: Micros) -> AsyncIterator[_Reason]:
    held = False
    for reason in (await _blocked(work, run), _delayed(run, now), *await _paused(work, run)):
        if reason is not None:
            held = True
            yield reason
    worker = _no_worker(run, await upkeep.workers(work, ALL), now, lease)
    if worker is not None:
        yield worker
    elif not held:
        yield (
            "ready",
            f"It is ready in queue {run.queue!r}: a worker that knows it is live and takes it with its next free slot.",
        )


async def _blocked(work: Work, run: RunRecord) -> _Reason | None:
    if run.blocked_on is None:
        return None
    if run.blocked_on == flow.ALONE:
        return (
            "alone",
            f"Its lease lapsed {run.reclaims} times in a row: a worker takes it only while it holds nothing else.",
        )
    if run.blocked_on == flow.SEQUENCE:
        key = stored_key(run.tenant, run.sequence_key or "")
        in_front = {
            "line": key,
            "_id": {"$ne": run.run_id},
            "$or": [{"submitted": {"$lt": run.submitted}}, {"blocked_on": {"$ne": flow.SEQUENCE}}],
        }
        front = await work.first("durable_run", in_front, fields=["status"], sort=[("submitted", 1)])
        whom = (
            "nobody any more (the next mend releases it)"
            if front is None
            else f"run {front['_id']} ({front['status']})"
        )
        return "sequence", f"Of the sequence {run.sequence_key!r} one run goes at a time: it waits for {whom}."
    rule = (await _rules_of(work, run)).get(run.blocked_on)
    if rule is None:
        return "limit", f"It was held back by {run.blocked_on}, which has no limit any more: the next mend releases it."
    if rule.paused:
        return "paused", f"{run.blocked_on} is paused."
    if run.blocked_on.startswith(f"{EVERYBODY}/"):  # who is in flight there is another tenant's secret
        return "limit", f"It waits for room in {run.blocked_on}, which all tenants share (at most {_rate(rule)})."
    rows = await work.find("durable_run", {"permits": run.blocked_on}, fields=["_id"], sort=[("submitted", 1)], limit=6)
    holders = [row["_id"] for row in rows]
    if rule.max_concurrency is not None and holders:
        return (
            "limit",
            f"{run.blocked_on} lets {rule.max_concurrency} run at once; in flight: {', '.join(holders[:5])}.",
        )
    return "limit", f"It waits for room in {run.blocked_on} (at most {_rate(rule)})."


async def _rules_of(work: Work, run: RunRecord) -> dict[str, QueueRecord]:
    """The rows that count for a run, by the text of the scope."""
    return await flow.rules_of(work, scopes_of(tenant_text(run.tenant), run.queue, run.name, run.concurrency_key))


def _rate(rule: QueueRecord) -> str:
    if rule.rate_count is None or rule.rate_period is None:
        return f"{rule.max_concurrency} at once"
    return f"{rule.rate_count} per {timedelta(microseconds=rule.rate_period)}"


def _delayed(run: RunRecord, now: Instant) -> _Reason | None:
    if run.available_at is None:
        return None
    if run.available_at <= now:
        return "due", f"It was due at {_when(run.available_at)}: the next promotion makes it ready."
    why = f", after: {run.error}" if run.error is not None else ""
    return "delayed", f"It is delayed until {_when(run.available_at)}{why}."


async def _paused(work: Work, run: RunRecord) -> list[_Reason]:
    return [
        ("paused", f"{text} is paused.")
        for text, rule in (await _rules_of(work, run)).items()
        if rule.paused and run.blocked_on is None
    ]


def _no_worker(run: RunRecord, workers: list[WorkerRecord], now: Instant, lease: Micros) -> _Reason | None:
    """Why no live worker takes it: the first of the conditions of a claim that leaves none (7)."""
    live = [
        worker
        for worker in workers
        if worker.seen_at >= now - lease and (not worker.bound or worker.tenant == run.tenant)
    ]
    if not live:
        return "no_worker", "No worker that serves it is live."
    live = [worker for worker in live if run.queue in worker.queues]
    if not live:
        return "no_worker", f"No live worker serves the queue {run.queue!r}."
    live = [worker for worker in live if any(name == run.name for name, _ in worker.functions)]
    if not live:
        return "unknown_function", f"No live worker of the queue {run.queue!r} knows the function {run.name!r}."
    if run.version is not None:
        live = [worker for worker in live if (run.name, run.version) in worker.functions]
        if not live:
            return "other_version", f"No live worker has version {run.version!r} of {run.name!r}."
    if run.replay_family is not None:
        families = sorted({worker.family for worker in live})
        if run.replay_family not in families:
            text = (
                f"It has records of replay family {run.replay_family}; the live workers are of {', '.join(families)}."
            )
            return "other_family", text
    return None


def _also(run: RunRecord) -> list[_Reason]:
    """What is worth knowing beside the reason itself."""
    found: list[_Reason] = []
    if run.mismatch_since is not None:
        text = f"Since {_when(run.mismatch_since)} its code asks for something else than its journal holds: {run.error}"
        found.append(("non_determinism", text))
    if run.cancel_requested_at is not None:
        state = "it refused, being past its pivot" if run.cancel_refused_at is not None else "its holder carries it out"
        found.append(("cancel", f"A cancel was asked for at {_when(run.cancel_requested_at)}; {state}."))
    if run.deadline_at is not None:
        found.append(("deadline", f"Its deadline is {_when(run.deadline_at)}."))
    return found


def _plainly(waiting_for: str | None) -> str:
    """What a run waits for, from the holder's own words; those are for people, so any JSON will do."""
    try:
        found = json.loads(waiting_for or "null")
    except ValueError:
        return waiting_for or "something"
    if isinstance(found, dict):
        fields: dict[str, Any] = found  # pyright: ignore[reportUnknownVariableType]
        parts = [
            f"{what} {', '.join(map(str, one)) if isinstance(one, list) else one}"  # pyright: ignore[reportUnknownArgumentType]
            for what, one in fields.items()
            if one
        ]
        return "; ".join(parts) or "something"
    return "something" if found is None else str(found)


def _when(instant: Instant | None) -> str:
    if instant is None:
        return "never"
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=instant)).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{instant} µs"


__all__ = ["explain", "stats"]
