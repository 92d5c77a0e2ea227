"""Tenants as a whole (semantics 57): what is stored of each, and erasing one. `store.py` calls `tenants` to read and `erase` in a
transaction of its own. Nothing here looks into a payload.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from durable.errors import Conflict
from durable.flow import EVERYBODY, TENANT, rule_id
from durable.model import ALL, Scope, TenantStats

from .operation import Ask, Operation, Work, count, rows, together
from .rows import IN_SCOPE, LIVE, of_scope
from .upkeep import PURGE

COUNTS: Final = f"""
SELECT r.tenant_id, r.status, count(*)::integer FROM durable_run AS r WHERE {IN_SCOPE} GROUP BY r.tenant_id, r.status
"""
SCHEDULES: Final = f"""
SELECT r.tenant_id, count(*)::integer FROM durable_schedule AS r WHERE {IN_SCOPE} GROUP BY r.tenant_id
"""
RULED: Final = f"""
SELECT r.tenant_id, bool_or(r.paused AND r.scope_name = '{TENANT}') FROM durable_queue AS r
WHERE NOT starts_with(r.queue_id, '{EVERYBODY}:') AND {IN_SCOPE} GROUP BY r.tenant_id
"""

RUNS: Final = f"""
SELECT r.run_id, r.status IN {LIVE} FROM durable_run AS r WHERE r.tenant_id = $1::uuid
ORDER BY r.created_at, r.run_id LIMIT $2 FOR UPDATE
"""
SCHEDULES_OF: Final = "DELETE FROM durable_schedule WHERE tenant_id = $1::uuid"
SLOTS: Final = """
DELETE FROM durable_schedule_fire WHERE ctid = ANY (ARRAY(
    SELECT f.ctid FROM durable_schedule_fire AS f WHERE f.schedule_id > $1 AND f.schedule_id < $2 LIMIT $3 FOR UPDATE))
"""
KEYS: Final = "DELETE FROM durable_key WHERE idempotency_key > $1 AND idempotency_key < $2"
LAST: Final = (
    "DELETE FROM durable_queue WHERE tenant_id = $1::uuid",
    "DELETE FROM durable_worker WHERE tenant_id = $1::uuid",
)


def tenants(work: Work, scope: Scope) -> Operation[list[TenantStats]]:
    """What each tenant has, the untagged first. A bound scope sees its own, though there be nothing."""
    whose = of_scope(scope)
    counts, schedules, ruled = yield from together(Ask(COUNTS, whose), Ask(SCHEDULES, whose), Ask(RULED, whose))
    runs: dict[UUID | None, dict[str, int]] = {} if scope is ALL else {scope: {}}
    for tenant, status, number in counts:
        runs.setdefault(tenant, {})[status] = number
    scheduled: dict[UUID | None, int] = dict(schedules)
    paused: dict[UUID | None, bool] = dict(ruled)
    return [
        TenantStats(
            tenant=tenant,
            paused=paused.get(tenant, False),
            runs=runs.get(tenant, {}),
            schedules=scheduled.get(tenant, 0),
        )
        for tenant in sorted({*runs, *scheduled, *paused}, key=lambda tenant: "" if tenant is None else str(tenant))
    ]


def erase(work: Work, tenant: UUID, limit: int) -> Operation[int]:
    """Delete schedules, slots and runs, a batch of each; with nothing left of these, the rest. 0: nothing is left. Raises Conflict where it
    meets a live run."""
    found = yield from rows(RUNS, tenant, limit)
    live = [run_id for run_id, is_live in found if is_live]
    if live:
        raise Conflict(
            f"run {live[0]} of tenant {tenant} is live", hint="cancel its runs and let them land; then erase it again"
        )
    span = rule_id(str(tenant), ""), f"{tenant};"
    gone = yield from count(SCHEDULES_OF, tenant)
    gone += yield from count(SLOTS, *span, limit)
    if found:
        ids = [run_id for run_id, _ in found]
        yield from together(*(Ask(statement, (ids,)) for statement in PURGE))
    gone += len(found)
    if not gone:
        yield from count(KEYS, *span)
        for statement in LAST:
            gone += yield from count(statement, tenant)
    return gone


__all__ = ["erase", "tenants"]
