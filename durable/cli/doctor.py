"""`durable doctor`: what a store says of itself, and what the workers and the queues say when they are held side by side.

Reads through the client only and changes nothing. Every sentence says what to do. Exit code 1 if a check refuses.
"""

from __future__ import annotations

import json as jsonlib
from collections import Counter
from collections.abc import Iterable, Sequence
from uuid import UUID

import typer

import durable

from ..model import Check, QueueStats, WorkerRecord
from ..settings import MINUTE, SECOND
from .options import AsJson, Everybody, Tenant, Url, with_client
from .output import Output

OLD = 5 * MINUTE
"""A run that is ready for so long finds no worker, or too few."""
LOOKED_AT = 1_000
"""Pending runs that are looked at for functions that nobody knows: the newest ones."""
EQUAL = ("lease", "max_reclaims", "mismatch_limit")
"""What every worker should have the same: they judge each other's runs by it (15, 25)."""
_Waiting = tuple[str, str, UUID | None]
"""Queue, function and tenant of a pending run."""
_ORDER = {"refuse": 0, "warn": 1, "ok": 2}


def doctor(url: Url = None, json: AsJson = False, tenant: Tenant = None, all_tenants: Everybody = False) -> None:
    """Check the store, its workers and its queues."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> Sequence[Check]:
        return await examine(client)

    checks = with_client(url, work, tenant=tenant, everybody=all_tenants)
    rows = [{"level": check.level, "check": check.name, "text": check.text} for check in checks]
    output.table("Doctor", rows, ("level", "check", "text"))
    if any(check.level == "refuse" for check in checks):
        raise typer.Exit(1)


async def examine(client: durable.Client) -> list[Check]:
    """Every check, the worst first."""
    registered, now = await client.workers(), client.store.clock()
    live = [worker for worker in registered if worker.seen_at >= now - max(client.settings.lease, _lease_of(worker))]
    waiting = Counter(
        [(run.queue, run.function, run.record.tenant) async for run in client.runs(status="pending", limit=LOOKED_AT)]
    )
    found = [
        *await client.check(),
        *_workers(live, len(registered) - len(live)),
        *_queues(await client.queues.stats(), now),
        *_unknown(waiting, live),
    ]
    return sorted(found, key=lambda check: _ORDER[check.level])


def _lease_of(worker: WorkerRecord) -> int:
    return int(jsonlib.loads(worker.settings).get("lease", 0))


def _workers(workers: Sequence[WorkerRecord], gone: int) -> Iterable[Check]:
    before = f"; {gone} more were not seen for a lease: they ended without a word" if gone else ""
    if not workers:
        text = f"no worker is live; start one: durable worker MODULE{before}"
        yield Check(name="workers", level="warn", text=text)
        return
    yield Check(name="workers", level="ok", text=f"{len(workers)} live{before}")
    for name in EQUAL:
        values = sorted({str(jsonlib.loads(worker.settings).get(name)) for worker in workers})
        if len(values) > 1:
            text = f"workers have different values of {name} ({', '.join(values)}); give them one"
            yield Check(name=name, level="warn", text=text)
    families = sorted({worker.family for worker in workers})
    if len(families) > 1:
        text = f"workers of the replay families {', '.join(families)}: a run with records stays with its own; use one Python"
        yield Check(name="replay family", level="warn", text=text)


def _queues(stats: Sequence[QueueStats], now: int) -> Iterable[Check]:
    for queue in stats:
        age = 0 if queue.oldest_ready_at is None else now - queue.oldest_ready_at
        if queue.paused:
            yield Check(
                name=f"queue {queue.queue}",
                level="warn",
                text=f"paused, with {queue.ready + queue.blocked} runs waiting",
            )
        elif age > OLD:
            text = f"a run has been ready for {age // SECOND:,} s; add workers for this queue, or see `durable explain`"
            yield Check(name=f"queue {queue.queue}", level="warn", text=text)
        else:
            yield Check(name=f"queue {queue.queue}", level="ok", text=f"{queue.ready} ready, {queue.running} running")
        if queue.failed_by_kind.get("reclaim_limit"):
            text = f"{queue.failed_by_kind['reclaim_limit']} runs killed their workers again and again (reclaim_limit)"
            yield Check(name=f"queue {queue.queue}", level="warn", text=text)


def _unknown(waiting: Counter[_Waiting], workers: Sequence[WorkerRecord]) -> Iterable[Check]:
    """Pending runs that no live worker takes (7)."""
    unknown: Counter[tuple[str, str]] = Counter()
    for (queue, function, tenant), count in waiting.items():
        takers = (
            worker for worker in workers if queue in worker.queues and (not worker.bound or worker.tenant == tenant)
        )
        if not any(name == function for worker in takers for name, _ in worker.functions):
            unknown[queue, function] += count
    for (queue, function), count in sorted(unknown.items()):
        text = f"{count} pending runs of {function!r} on queue {queue!r} that no live worker takes"
        yield Check(name="unknown function", level="warn", text=text)
