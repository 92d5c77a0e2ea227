"""What operators look at: queues in figures, and why a run stands where it stands (semantics 8, 74). Only reads.

`store.py` calls `stats` and `explain`. What is told of what is read stands in `durable.views`.
"""

from __future__ import annotations

from typing import Any, Final

from durable.flow import EVERYBODY, SEQUENCE, owner_of, scopes_of
from durable.model import ALL, Explanation, QueueStats, Scope, Status
from durable.storekit import stored_key, unknown_run, within
from durable.views import SHOWN, explained, queue_stats

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
HOLDERS: Final = (
    f"SELECT p.run_id FROM durable_permit AS p WHERE p.scope = $1 ORDER BY p.taken_at, p.run_id LIMIT {SHOWN}"
)
UPSTREAM: Final = f"""
SELECT d.depends_on, r.status FROM durable_dependency AS d JOIN durable_run AS r ON r.run_id = d.depends_on
WHERE d.run_id = $1 AND r.status <> 'completed' ORDER BY d.position, d.depends_on LIMIT {SHOWN}
"""


def stats(work: Work, scope: Scope) -> Operation[list[QueueStats]]:
    """See `durable.views.queue_stats`."""
    figures = yield from rows(DEPTHS, *of_scope(scope))
    paused = yield from rows(PAUSED_QUEUES, *of_scope(scope))
    return queue_stats(figures, (name.partition(":")[2] for (name,) in paused))


def explain(work: Work, run_id: str, scope: Scope) -> Operation[Explanation]:
    """See `durable.views.explained`. Raises NotFound."""
    row = yield from first(RUN, run_id)
    run = None if row is None else run_record(row)
    if run is None or not within(run.tenant, scope):
        raise unknown_run(run_id)
    facts: dict[str, Any] = {}
    if run.status is Status.SUSPENDED and run.attempts == 0:
        facts["upstream"] = yield from rows(UPSTREAM, run_id)
    elif run.status is Status.PENDING:
        facts["rules"] = yield from flow.rules_of(
            scopes_of(owner_of(run.tenant), run.queue, run.name, run.concurrency_key)
        )
        facts["workers"] = yield from upkeep.workers(work, ALL)
        if run.blocked_on == SEQUENCE:
            key = stored_key(run.tenant, run.sequence_key or "")
            facts["in_front"] = yield from first(IN_FRONT, key, run.submitted)
        elif run.blocked_on in facts["rules"]:
            facts["holders"] = [holder for (holder,) in (yield from rows(HOLDERS, run.blocked_on))]
    return explained(run, work.now, lease=work.settings.lease, **facts)


__all__ = ["explain", "stats"]
