"""What operators look at: queues in figures, and why a run stands where it stands (semantics 8, 74). Only reads.

`store.py` calls `stats` and `explain` on the slow reader. What is told of what is read stands in `durable.views`.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from durable.flow import SEQUENCE, owner_of, scopes_of
from durable.model import ALL, Explanation, Instant, QueueStats, Scope, Status
from durable.settings import Micros
from durable.storekit import stored_key, unknown_run, within
from durable.views import SHOWN, explained, queue_stats

from . import flow, upkeep
from .rows import RUN_COLUMNS, of_scope, run_record

RUN = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE run_id = ?"
DEPTHS = """
SELECT queue, status, available_at IS NOT NULL, blocked_on IS NOT NULL, error_kind, count(*), min(updated_at) FROM durable_run
WHERE (? OR tenant_id IS ?) GROUP BY 1, 2, 3, 4, 5
"""
PAUSED_QUEUES = """
SELECT scope_name FROM durable_queue
WHERE paused = 1 AND scope_name > 'queue:' AND scope_name < 'queue;' AND (? OR tenant_id IS ? OR tenant_id = '*')
"""
IN_FRONT = """
SELECT run_id, status FROM durable_run WHERE sequence_key = ? AND status IN ('pending', 'running', 'suspended')
AND submitted <> ? AND (submitted < ? OR blocked_on IS NOT 'sequence') ORDER BY submitted LIMIT 1
"""
HOLDERS = f"SELECT run_id FROM durable_permit WHERE scope = ? ORDER BY taken_at, run_id LIMIT {SHOWN}"
UPSTREAM = f"""
SELECT d.depends_on, r.status FROM durable_dependency AS d JOIN durable_run AS r ON r.run_id = d.depends_on
WHERE d.run_id = ? AND r.status <> 'completed' ORDER BY d.position, d.depends_on LIMIT {SHOWN}
"""


def stats(con: sqlite3.Connection, now: Instant, scope: Scope) -> list[QueueStats]:
    """See `durable.views.queue_stats`."""
    paused = con.execute(PAUSED_QUEUES, of_scope(scope))
    return queue_stats(con.execute(DEPTHS, of_scope(scope)), (name.partition(":")[2] for (name,) in paused))


def explain(con: sqlite3.Connection, now: Instant, run_id: str, scope: Scope, lease: Micros) -> Explanation:
    """See `durable.views.explained`. Raises NotFound."""
    row = con.execute(RUN, (run_id,)).fetchone()
    run = None if row is None else run_record(row)
    if run is None or not within(run.tenant, scope):
        raise unknown_run(run_id)
    facts: dict[str, Any] = {}
    if run.status is Status.SUSPENDED and run.attempts == 0:
        facts["upstream"] = con.execute(UPSTREAM, (run_id,)).fetchall()
    elif run.status is Status.PENDING:
        scopes = scopes_of(owner_of(run.tenant), run.queue, run.name, run.concurrency_key)
        facts["rules"] = flow.rules_of(con, scopes)
        facts["workers"] = upkeep.workers(con, now, ALL)
        if run.blocked_on == SEQUENCE:
            key = stored_key(run.tenant, run.sequence_key or "")
            facts["in_front"] = con.execute(IN_FRONT, (key, run.submitted, run.submitted)).fetchone()
        elif run.blocked_on in facts["rules"]:
            facts["holders"] = [holder for (holder,) in con.execute(HOLDERS, (run.blocked_on,))]
    return explained(run, now, lease=lease, **facts)
