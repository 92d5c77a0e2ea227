"""Tenants as a whole (semantics 57): what is stored of each, and erasing one. `store.py` calls `tenants` on the slow reader and `erase`
inside the shared write transaction. Nothing here looks into a payload.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Final
from uuid import UUID

from durable.errors import Conflict
from durable.flow import TENANT, rule_id
from durable.model import ALL, Instant, Scope, TenantStats
from durable.storekit import tenant_of, tenant_text

from .rows import of_scope
from .upkeep import PURGE

COUNTS: Final = (
    "SELECT tenant_id, status, count(*) FROM durable_run WHERE (? OR tenant_id IS ?) GROUP BY tenant_id, status"
)
SCHEDULES: Final = "SELECT tenant_id, count(*) FROM durable_schedule WHERE (? OR tenant_id IS ?) GROUP BY tenant_id"
RULED: Final = "SELECT DISTINCT tenant_id FROM durable_queue WHERE tenant_id IS NOT '*' AND (? OR tenant_id IS ?)"
PAUSED: Final = (
    f"SELECT tenant_id FROM durable_queue WHERE scope_name = '{TENANT}' AND paused = 1 AND (? OR tenant_id IS ?)"
)

RUNS: Final = """
SELECT run_id, status IN ('pending', 'running', 'suspended') FROM durable_run WHERE tenant_id = ? ORDER BY created_at, run_id LIMIT ?
"""
SLOTS: Final = """
DELETE FROM durable_schedule_fire WHERE rowid IN (
    SELECT rowid FROM durable_schedule_fire WHERE schedule_id > ? AND schedule_id < ? LIMIT ?)
"""
SCHEDULES_OF: Final = "DELETE FROM durable_schedule WHERE tenant_id = ?"
LAST: Final = (
    "DELETE FROM durable_queue WHERE tenant_id = ?",
    "DELETE FROM durable_worker WHERE tenant_id = ?",
)
KEYS: Final = "DELETE FROM durable_key WHERE idempotency_key > ? AND idempotency_key < ?"


def tenants(con: sqlite3.Connection, now: Instant, scope: Scope) -> list[TenantStats]:
    """What each tenant has, the untagged first. A bound scope sees its own, though there be nothing."""
    whose = of_scope(scope)
    runs: dict[str | None, dict[str, int]] = {} if scope is ALL else {tenant_text(scope): {}}
    for tenant, status, count in con.execute(COUNTS, whose):
        runs.setdefault(tenant, {})[status] = count
    schedules = dict(con.execute(SCHEDULES, whose).fetchall())
    ruled = {tenant for (tenant,) in con.execute(RULED, whose)}
    paused = {tenant for (tenant,) in con.execute(PAUSED, whose)}
    return [
        TenantStats(
            tenant=tenant_of(tenant),
            paused=tenant in paused,
            runs=runs.get(tenant, {}),
            schedules=schedules.get(tenant, 0),
        )
        for tenant in sorted({*runs, *schedules, *ruled}, key=lambda tenant: tenant or "")
    ]


def erase(con: sqlite3.Connection, now: Instant, tenant: UUID, limit: int) -> int:
    """Delete schedules, slots and runs, a batch of each; with nothing left of these, the rest. 0: nothing is left. Raises Conflict where it
    meets a live run."""
    owner = str(tenant)
    found = con.execute(RUNS, (owner, limit)).fetchall()
    live = [run_id for run_id, is_live in found if is_live]
    if live:
        raise Conflict(
            f"run {live[0]} of tenant {owner} is live", hint="cancel its runs and let them land; then erase it again"
        )
    span = rule_id(owner, ""), f"{owner};"
    gone = con.execute(SCHEDULES_OF, (owner,)).rowcount + con.execute(SLOTS, (*span, limit)).rowcount
    if found:
        ids = json.dumps([run_id for run_id, _ in found])
        for statement in PURGE:
            con.execute(statement, (ids,))
    gone += len(found)
    if not gone:
        con.execute(KEYS, span)
        gone = sum(con.execute(statement, (owner,)).rowcount for statement in LAST)
    return gone


__all__ = ["erase", "tenants"]
