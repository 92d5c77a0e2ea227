"""What operators look at: queues in figures, and why a run stands where it stands, in sentences (semantics 8, 74). Only reads.

`store.py` calls `stats` and `explain`. Codes are for machines and do not change; sentences may.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, cast

from durable.errors import NotFound
from durable.flow import EVERYBODY, owner_of, scopes_of
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
from durable.storekit import stored_key, within

from . import flow, upkeep
from .operation import Operation, Work, first, rows
from .rows import IN_SCOPE, LIVE, RUN_COLUMNS, of_scope, run_record

RUN: Final = f"SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE r.run_id = $1"
DEPTHS: Final = f"""
SELECT r.queue, r.status, r.available_at IS NOT NULL, r.blocked_on IS NOT NULL, r.error_kind, count(*), min(r.updated_at)
FROM durable_run AS r WHERE {IN_SCOPE} GROUP BY 1, 2, 3, 4, 5
"""
PAUSED_QUEUES: Final = f"""
SELECT DISTINCT r.scope_name FROM durable_queue AS r
WHERE r.paused AND r.scope_name > 'queue:' AND r.scope_name < 'queue;' AND ({IN_SCOPE} OR starts_with(r.queue_id, '{EVERYBODY}:'))
"""
IN_FRONT: Final = f"""
SELECT r.run_id, r.status FROM durable_run AS r WHERE r.sequence_key = $1 AND r.status IN {LIVE}
AND r.submitted <> $2 AND (r.submitted < $2 OR r.blocked_on IS DISTINCT FROM 'sequence') ORDER BY r.submitted LIMIT 1
"""
HOLDERS: Final = "SELECT p.run_id FROM durable_permit AS p WHERE p.scope = $1 ORDER BY p.taken_at, p.run_id LIMIT 6"
UPSTREAM: Final = """
SELECT d.depends_on, r.status FROM durable_dependency AS d JOIN durable_run AS r ON r.run_id = d.depends_on
WHERE d.run_id = $1 AND r.status <> 'completed' ORDER BY d.position, d.depends_on LIMIT 6
"""


# -- figures ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Depth:
    ready: int = 0
    delayed: int = 0
    suspended: int = 0
    blocked: int = 0
    running: int = 0
    oldest_ready_at: Instant | None = None
    failed_by_kind: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    def add(self, status: str, delayed: bool, blocked: bool, kind: str | None, count: int, oldest: Instant) -> None:
        if status == Status.RUNNING:
            self.running += count
        elif status == Status.SUSPENDED:
            self.suspended += count
        elif status in (Status.FAILED, Status.TIMED_OUT, Status.FORWARD_INCOMPLETE):
            self.failed_by_kind[kind or status] = self.failed_by_kind.get(kind or status, 0) + count
        elif status != Status.PENDING:
            return  # completed and cancelled runs are no news
        elif delayed:
            self.delayed += count
        elif blocked:
            self.blocked += count
        else:
            self.ready += count
            self.oldest_ready_at = oldest if self.oldest_ready_at is None else min(oldest, self.oldest_ready_at)


def stats(work: Work, scope: Scope) -> Operation[list[QueueStats]]:
    """Depth, age and failures of every queue that has runs or is paused, by name. Ready counts from when a run became ready."""
    depths: dict[str, _Depth] = {}
    for queue, *figures in (yield from rows(DEPTHS, *of_scope(scope))):
        depths.setdefault(queue, _Depth()).add(*figures)
    paused = {name.partition(":")[2] for (name,) in (yield from rows(PAUSED_QUEUES, *of_scope(scope)))}
    for queue in paused:
        depths.setdefault(queue, _Depth())
    return [
        QueueStats(
            queue=queue,
            ready=depth.ready,
            delayed=depth.delayed,
            suspended=depth.suspended,
            blocked=depth.blocked,
            running=depth.running,
            oldest_ready_at=depth.oldest_ready_at,
            paused=queue in paused,
            failed_by_kind=depth.failed_by_kind,
        )
        for queue, depth in sorted(depths.items())
    ]


# -- why a run does not move --------------------------------------------------------------------------------------------------

_Reason = tuple[str, str]


def explain(work: Work, run_id: str, scope: Scope) -> Operation[Explanation]:
    """The run, the code of what holds it up first, and every reason in a sentence. A worker is live if it was seen within a lease.
    Raises NotFound."""
    row = yield from first(RUN, run_id)
    run = None if row is None else run_record(row)
    if run is None or not within(run.tenant, scope):
        raise NotFound(f"there is no run {run_id}", hint="check the id; a run is visible to its own tenant only")
    if run.status in TERMINAL:
        reasons = [_ended(run)]
    elif run.status is Status.RUNNING:
        reasons = [_running(run, work.now)]
    elif run.status is Status.SUSPENDED:
        reasons = [(yield from _waiting(run))]
    else:
        reasons = yield from _pending(work, run)
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


def _waiting(run: RunRecord) -> Operation[_Reason]:
    if run.attempts == 0:
        before = ", ".join(f"{run_id} ({status})" for run_id, status in (yield from rows(UPSTREAM, run.run_id)))
        return "upstream", f"It waits for {run.wake_after} run(s) before it in its graph: {before}."
    parts = [f"It waits for {_plainly(run.waiting_for)}"]
    if run.wake_after:
        parts.append(f"{run.wake_after} more end(s) of child runs wake it")
    parts.append(
        "nothing wakes it by time" if run.available_at is None else f"at the latest at {_when(run.available_at)}"
    )
    return "waiting", ", ".join(parts) + "."


def _pending(work: Work, run: RunRecord) -> Operation[list[_Reason]]:
    rules = yield from flow.rules_of(scopes_of(owner_of(run.tenant), run.queue, run.name, run.concurrency_key))
    found = [(yield from _blocked(run, rules)), _delayed(run, work.now), *_paused(run, rules)]
    reasons = [reason for reason in found if reason is not None]
    held = bool(reasons)
    worker = _no_worker(run, (yield from upkeep.workers(work, ALL)), work.now, work.settings.lease)
    if worker is not None:
        reasons.append(worker)
    elif not held:
        text = (
            f"It is ready in queue {run.queue!r}: a worker that knows it is live and takes it with its next free slot."
        )
        reasons.append(("ready", text))
    return reasons


def _blocked(run: RunRecord, rules: Mapping[str, QueueRecord]) -> Operation[_Reason | None]:
    if run.blocked_on is None:
        return None
    if run.blocked_on == flow.ALONE:
        return (
            "alone",
            f"Its lease lapsed {run.reclaims} times in a row: a worker takes it only while it holds nothing else.",
        )
    if run.blocked_on == flow.SEQUENCE:
        front = yield from first(IN_FRONT, stored_key(run.tenant, run.sequence_key or ""), run.submitted)
        whom = "nobody any more (the next mend releases it)" if front is None else f"run {front[0]} ({front[1]})"
        return "sequence", f"Of the sequence {run.sequence_key!r} one run goes at a time: it waits for {whom}."
    rule = rules.get(run.blocked_on)
    if rule is None:
        return "limit", f"It was held back by {run.blocked_on}, which has no limit any more: the next mend releases it."
    if rule.paused:
        return "paused", f"{run.blocked_on} is paused."
    if run.blocked_on.startswith(f"{EVERYBODY}/"):  # who is in flight there is another tenant's secret
        return "limit", f"It waits for room in {run.blocked_on}, which all tenants share (at most {_rate(rule)})."
    holders = [run_id for (run_id,) in (yield from rows(HOLDERS, run.blocked_on))]
    if rule.max_concurrency is not None and holders:
        return (
            "limit",
            f"{run.blocked_on} lets {rule.max_concurrency} run at once; in flight: {', '.join(holders[:5])}.",
        )
    return "limit", f"It waits for room in {run.blocked_on} (at most {_rate(rule)})."


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


def _paused(run: RunRecord, rules: Mapping[str, QueueRecord]) -> Iterator[_Reason]:
    for text, rule in rules.items():
        if rule.paused and run.blocked_on is None:
            yield "paused", f"{text} is paused."


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
        parts = [
            f"{what} {', '.join(map(str, cast('list[object]', one))) if isinstance(one, list) else one}"
            for what, one in cast("dict[str, object]", found).items()
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
