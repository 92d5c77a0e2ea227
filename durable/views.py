"""What operators look at, as values: queues in figures, and why a run stands where it stands, in sentences (semantics 8, 74). Pure.

The `views.py` of each backend reads what is asked for here and hands it over, so that all of them tell the same. Codes are for machines
and do not change; sentences may.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeAlias, cast

from .flow import ALONE, EVERYBODY, SEQUENCE
from .instants import moment
from .model import TERMINAL, Explanation, Instant, QueueRecord, QueueStats, RunRecord, Status, WorkerRecord
from .settings import Micros

SHOWN: Final = 5
"""Runs that a sentence names at the most: so many are read."""

# -- figures ------------------------------------------------------------------------------------------------------------------

Figures: TypeAlias = tuple[str, str, bool, bool, str | None, int, Instant]
"""Of a group of runs: queue, status, whether they are delayed, whether they are blocked, error kind, how many, and the instant of the
oldest one's last change."""


@dataclasses.dataclass(slots=True)
class _Depth:
    ready: int = 0
    delayed: int = 0
    suspended: int = 0
    blocked: int = 0
    running: int = 0
    oldest_ready_at: Instant | None = None
    failed_by_kind: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    def add(self, group: Figures) -> None:
        _, status, delayed, blocked, kind, count, oldest = group
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


def queue_stats(figures: Iterable[Figures], paused: Iterable[str]) -> list[QueueStats]:
    """Depth, age and failures of every queue that has runs or is paused, by name. Ready counts from when a run became ready."""
    closed = set(paused)
    depths = {queue: _Depth() for queue in closed}
    for group in figures:
        depths.setdefault(group[0], _Depth()).add(group)
    return [
        QueueStats(
            queue=queue,
            ready=depth.ready,
            delayed=depth.delayed,
            suspended=depth.suspended,
            blocked=depth.blocked,
            running=depth.running,
            oldest_ready_at=depth.oldest_ready_at,
            paused=queue in closed,
            failed_by_kind=depth.failed_by_kind,
        )
        for queue, depth in sorted(depths.items())
    ]


# -- why a run does not move --------------------------------------------------------------------------------------------------

_Reason: TypeAlias = tuple[str, str]
Neighbour: TypeAlias = tuple[str, str]
"""Another run: its id and its status."""


def explained(
    run: RunRecord,
    now: Instant,
    *,
    lease: Micros,
    upstream: Sequence[Neighbour] = (),
    rules: Mapping[str, QueueRecord] | None = None,
    workers: Sequence[WorkerRecord] = (),
    in_front: Neighbour | None = None,
    holders: Sequence[str] = (),
) -> Explanation:
    """The run, the code of what holds it up first, and every reason in a sentence. A worker is live if it was seen within a `lease`.

    What else is wanted depends on the run. Of a node that is not released (suspended, never claimed): the runs `upstream` that have not
    completed. Of a pending one: the `rules` of its scopes by the text of the scope, and all `workers`; if its sequence blocks it, the run
    `in_front` of it, and if a scope with a rule does, the `holders` of that. At most `SHOWN` of each are told.
    """
    if run.status in TERMINAL:
        return Explanation(run=run, code=str(run.status), reasons=[_ended(run)])
    if run.status is Status.RUNNING:
        reasons = [_running(run, now)]
    elif run.status is Status.SUSPENDED:
        reasons = [_waiting(run, upstream)]
    else:
        rules = rules or {}
        found = (_blocked(run, rules, in_front, holders), _delayed(run, now), *_paused(run, rules))
        reasons = [reason for reason in found if reason is not None]
        worker = _no_worker(run, workers, now, lease)
        if worker is not None:
            reasons.append(worker)
        elif not reasons:
            text = f"It is ready in queue {run.queue!r}: a worker that knows it is live and takes it with its next free slot."
            reasons.append(("ready", text))
    reasons += _also(run)
    return Explanation(run=run, code=reasons[0][0], reasons=[text for _, text in reasons])


def _ended(run: RunRecord) -> str:
    text = f"It landed {run.status} at {_when(run.finished_at)}"
    if run.error is not None:
        text += f" ({run.error_kind}): {run.error}"
    return f"{text}. It is kept until {_when(run.purge_at)}."


def _running(run: RunRecord, now: Instant) -> _Reason:
    until = run.leased_until or 0
    if until < now:
        return (
            "lapsed",
            f"Its lease of the claim {run.lease_owner} lapsed at {_when(until)}: the next sweep returns it.",
        )
    return "running", f"It is leased by the claim {run.lease_owner} until {_when(until)} (claim number {run.attempts})."


def _waiting(run: RunRecord, upstream: Sequence[Neighbour]) -> _Reason:
    if run.attempts == 0:
        before = ", ".join(f"{run_id} ({status})" for run_id, status in upstream)
        return "upstream", f"It waits for {run.wake_after} run(s) before it in its graph: {before}."
    parts = [f"It waits for {_plainly(run.waiting_for)}"]
    if run.wake_after:
        parts.append(f"{run.wake_after} more end(s) of child runs wake it")
    parts.append(
        "nothing wakes it by time" if run.available_at is None else f"at the latest at {_when(run.available_at)}"
    )
    return "waiting", ", ".join(parts) + "."


def _blocked(
    run: RunRecord, rules: Mapping[str, QueueRecord], in_front: Neighbour | None, holders: Sequence[str]
) -> _Reason | None:
    if run.blocked_on is None:
        return None
    if run.blocked_on == ALONE:
        return (
            "alone",
            f"Its lease lapsed {run.reclaims} times in a row: a worker takes it only while it holds nothing else.",
        )
    if run.blocked_on == SEQUENCE:
        whom = "nobody any more (the next mend releases it)"
        if in_front is not None:
            whom = f"run {in_front[0]} ({in_front[1]})"
        return "sequence", f"Of the sequence {run.sequence_key!r} one run goes at a time: it waits for {whom}."
    rule = rules.get(run.blocked_on)
    if rule is None:
        return "limit", f"It was held back by {run.blocked_on}, which has no limit any more: the next mend releases it."
    if rule.paused:
        return "paused", f"{run.blocked_on} is paused."
    if run.blocked_on.startswith(f"{EVERYBODY}/"):  # who is in flight there is another tenant's secret
        return "limit", f"It waits for room in {run.blocked_on}, which all tenants share (at most {_rate(rule)})."
    if rule.max_concurrency is not None and holders:
        return (
            "limit",
            f"{run.blocked_on} lets {rule.max_concurrency} run at once; in flight: {', '.join(holders)}.",
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


def _no_worker(run: RunRecord, workers: Iterable[WorkerRecord], now: Instant, lease: Micros) -> _Reason | None:
    """Why no live worker takes it: the first of the conditions of a claim that leaves none (7)."""
    live = [
        worker
        for worker in workers
        if worker.seen_at >= now - lease and (not worker.bound or worker.tenant == run.tenant)
    ]
    if not live:
        return "no_worker", f"No worker that serves it is live; start one: durable worker MODULE --queue {run.queue}."
    live = [worker for worker in live if run.queue in worker.queues]
    if not live:
        return (
            "no_worker",
            f"No live worker serves the queue {run.queue!r}; start one: durable worker MODULE --queue {run.queue}.",
        )
    live = [worker for worker in live if any(name == run.name for name, _ in worker.functions)]
    if not live:
        text = f"No live worker of the queue {run.queue!r} knows the function {run.name!r}"
        return "unknown_function", f"{text}; start one with the module that declares it."
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
        return moment(instant).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{instant} µs"


__all__ = ["SHOWN", "Figures", "Neighbour", "explained", "queue_stats"]
