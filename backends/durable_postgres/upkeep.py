"""The chores (semantics 11, 15, 17, 31, 48, 60 to 62): promote, sweep, the nets, purge, the registry of workers. `store.py` calls them.

Each is one bounded transaction, safe everywhere at once: it takes rows that are free and skips those that somebody has locked, and finds
them by a partial index that holds nothing else. A run that ends here ends through the landing. Nothing here decides when it is called.
"""

from __future__ import annotations

import json
from typing import Final

from durable.landing import reclaimed_too_often
from durable.model import ALL, Instant, Promoted, Scope, Swept, WorkerRecord
from durable.settings import Micros

from . import cancel, flow, landing, locks
from .adapting import Span
from .operation import Ask, Operation, Row, Work, count, first, rows, together
from .rows import IN_SCOPE, LIVE, of_scope

# A node of a graph that is not released waits for its upstream, whatever its start; its time counts from the release.
PROMOTE: Final = f"""
WITH due AS MATERIALIZED (
    SELECT r.run_id FROM durable_run AS r
    WHERE r.status IN ('pending', 'suspended') AND r.available_at IS NOT NULL AND r.available_at <= now()
    AND (r.status = 'pending' OR r.attempts > 0) AND {IN_SCOPE}
    ORDER BY r.available_at, r.submitted LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE durable_run AS r SET status = 'pending', available_at = NULL, wake_after = 0, waiting_for = NULL, updated_at = now()
FROM due WHERE r.run_id = due.run_id RETURNING r.queue
"""
NEXT_DUE: Final = f"""
SELECT r.available_at FROM durable_run AS r
WHERE r.status IN ('pending', 'suspended') AND r.available_at IS NOT NULL
AND (r.status = 'pending' OR r.attempts > 0) AND {IN_SCOPE} ORDER BY r.available_at LIMIT 1
"""
LAPSED: Final = f"""
SELECT r.run_id, r.queue, r.reclaims, r.compensating FROM durable_run AS r
WHERE r.status = 'running' AND r.leased_until < now() AND {IN_SCOPE}
ORDER BY r.leased_until, r.submitted LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED
"""
# Whether the lapsed claim made a record: the newest by position tells, or an attempt row of its own. Asked after the lock: an append
# that was quicker has committed by then.
PROGRESSED: Final = """
SELECT r.run_id FROM durable_run AS r WHERE r.run_id = ANY ($1::text[]) AND (
    coalesce((SELECT s.fence FROM durable_step AS s WHERE s.run_id = r.run_id AND s.position IS NOT NULL
              ORDER BY s.position DESC LIMIT 1) = r.attempts, false)
    OR EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = r.run_id AND s.position IS NULL AND s.fence = r.attempts))
"""
# The mark goes: a settle of the lapsed claim that comes late must not take this pending run for its own work. So does the replay
# family where there is no record: it belongs to the records.
RECLAIM: Final = """
UPDATE durable_run AS r SET status = 'pending', reclaims = e.reclaims, blocked_on = e.blocked_on, leased_until = NULL, lease_owner = NULL,
    available_at = NULL, updated_at = now(),
    replay_family = CASE WHEN EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = r.run_id) THEN r.replay_family END
FROM unnest($1::text[], $2::integer[], $3::text[]) AS e (run_id, reclaims, blocked_on) WHERE r.run_id = e.run_id
"""
COUNT_RECLAIM: Final = """
UPDATE durable_run AS r SET reclaims = e.reclaims FROM unnest($1::text[], $2::integer[]) AS e (run_id, reclaims) WHERE r.run_id = e.run_id
"""
WAIT_ALONE: Final = f"""
SELECT DISTINCT r.queue FROM durable_run AS r WHERE r.status = 'pending' AND r.blocked_on = 'alone' AND {IN_SCOPE}
"""

ENDED_PARENTS: Final = f"""
SELECT r.run_id FROM durable_run AS r WHERE r.cancel_children AND {IN_SCOPE} ORDER BY r.submitted LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED
"""
UNASKED_CHILDREN: Final = f"""
SELECT r.run_id FROM durable_run AS r WHERE r.parent_run_id = $1 AND r.status IN {LIVE} AND NOT r.detached
AND r.cancel_requested_at IS NULL ORDER BY r.submitted LIMIT $2
"""
NOTHING_TO_CANCEL: Final = "UPDATE durable_run AS r SET cancel_children = false WHERE r.run_id = $1"
# The ends that it waits for can not come any more: fewer of its children live than it counts on.
_FORGOTTEN: Final = f"""
r.status = 'suspended' AND r.wake_after > 0 AND r.attempts > 0 AND r.wake_after > (
    SELECT count(*) FROM durable_run AS c WHERE c.parent_run_id = r.run_id AND strpos(c.parent_step_id, '@') = 0 AND c.status IN {LIVE})
"""
FORGOTTEN_PARENTS: Final = f"""
SELECT r.run_id FROM durable_run AS r WHERE {_FORGOTTEN} AND {IN_SCOPE} ORDER BY r.submitted LIMIT $3
"""
# Looked at again under the lock: a landing that was under way has counted its children by then.
WAKE: Final = f"""
UPDATE durable_run AS r SET status = 'pending', available_at = NULL, wake_after = 0, waiting_for = NULL, wake_seq = r.wake_seq + 1,
    updated_at = now()
WHERE r.run_id = ANY ($1::text[]) AND {_FORGOTTEN} RETURNING r.queue
"""

_KEPT: Final = f"""
(r.parent_run_id IS NULL OR r.detached OR NOT EXISTS (
    SELECT 1 FROM durable_run AS p WHERE p.run_id = r.parent_run_id AND p.status IN {LIVE}))
"""
PURGEABLE: Final = f"""
SELECT r.run_id FROM durable_run AS r WHERE r.purge_at IS NOT NULL AND r.purge_at <= now() AND {IN_SCOPE} AND {_KEPT}
ORDER BY r.purge_at, r.submitted LIMIT $3 FOR UPDATE OF r SKIP LOCKED
"""
PURGEABLE_OLDER: Final = f"""
SELECT r.run_id FROM durable_run AS r
WHERE r.purge_at IS NOT NULL AND r.finished_at <= now() - $4::interval AND {IN_SCOPE} AND {_KEPT}
ORDER BY r.finished_at, r.submitted LIMIT $3 FOR UPDATE OF r SKIP LOCKED
"""
PURGE: Final = (
    "DELETE FROM durable_step WHERE run_id = ANY ($1::text[])",
    "DELETE FROM durable_signal WHERE run_id = ANY ($1::text[])",
    "DELETE FROM durable_key WHERE run_id = ANY ($1::text[])",
    "DELETE FROM durable_permit WHERE run_id = ANY ($1::text[])",
    "DELETE FROM durable_dependency WHERE run_id = ANY ($1::text[])",
    "DELETE FROM durable_dependency WHERE depends_on = ANY ($1::text[])",
    "DELETE FROM durable_run WHERE run_id = ANY ($1::text[])",
)
OLD_SLOTS: Final = """
DELETE FROM durable_schedule_fire WHERE ctid = ANY (ARRAY(
    SELECT f.ctid FROM durable_schedule_fire AS f WHERE f.created_at < now() - $1::interval ORDER BY f.created_at LIMIT $2
    FOR UPDATE SKIP LOCKED))
"""
GONE_WORKERS: Final = """
DELETE FROM durable_worker WHERE ctid = ANY (ARRAY(
    SELECT w.ctid FROM durable_worker AS w WHERE w.seen_at < now() - $1::interval FOR UPDATE SKIP LOCKED))
"""

REGISTER: Final = """
INSERT INTO durable_worker (worker_id, tenant_id, bound, host, pid, queues, functions, family, settings, started_at, seen_at)
VALUES ($1, $2::uuid, $3, $4, $5, $6::jsonb, $7::jsonb, $8, $9::jsonb, now(), now())
ON CONFLICT (worker_id) DO UPDATE SET tenant_id = excluded.tenant_id, bound = excluded.bound, host = excluded.host,
    pid = excluded.pid, queues = excluded.queues, functions = excluded.functions, family = excluded.family,
    settings = excluded.settings, seen_at = excluded.seen_at
"""
UNREGISTER: Final = "DELETE FROM durable_worker WHERE worker_id = $1"
WORKERS: Final = """
SELECT w.worker_id, w.tenant_id, w.bound, w.host, w.pid, w.queues, w.functions, w.family, w.settings, w.started_at, w.seen_at
FROM durable_worker AS w WHERE ($1 OR NOT w.bound OR w.tenant_id IS NOT DISTINCT FROM $2::uuid) ORDER BY w.started_at, w.worker_id
"""


# -- promote and sweep ------------------------------------------------------------------------------------------------------


def promote(work: Work, scope: Scope, limit: int) -> Operation[Promoted]:
    """Due runs become claimable, oldest due first; so do runs for which a token of their rate has come in (76)."""
    promoted = yield from rows(PROMOTE, *of_scope(scope), limit)
    queues = frozenset(queue for (queue,) in promoted)
    for queue in queues:
        work.announce(f"queue:{queue}")
    next_token = yield from flow.refill(work, scope, limit)
    found = yield from first(NEXT_DUE, *of_scope(scope))
    instants: list[Instant] = [instant for instant in (next_token, found[0] if found else None) if instant is not None]
    return Promoted(count=len(promoted), queues=queues, next_due=min(instants, default=None))


def sweep(work: Work, scope: Scope, limit: int, max_reclaims: int) -> Operation[Swept]:
    """Runs whose lease lapsed go back to pending, or land past the limit (15)."""
    returned: dict[str, tuple[int, str | None]] = {}
    poisoned: dict[str, int] = {}
    queues: set[str] = set()
    lapsed = yield from rows(LAPSED, *of_scope(scope), limit)
    found = (yield from rows(PROGRESSED, [row[0] for row in lapsed])) if lapsed else []
    progressed = {run_id for (run_id,) in found}
    for run_id, queue, before, compensating in lapsed:
        reclaims = 0 if run_id in progressed else before + 1
        if reclaims > max_reclaims and not compensating:
            poisoned[run_id] = reclaims
        else:
            returned[run_id] = reclaims, flow.ALONE if reclaims >= 2 else None
            queues.add(queue)
            work.announce(f"queue:{queue}")
    if returned:
        changes = [reclaims for reclaims, _ in returned.values()], [blocked_on for _, blocked_on in returned.values()]
        yield from count(RECLAIM, list(returned), *changes)
        yield from flow.release(work, returned)
    if poisoned:
        yield from count(COUNT_RECLAIM, list(poisoned), list(poisoned.values()))
        locked = yield from locks.family(poisoned)
        yield from landing.land(
            work, locked, [reclaimed_too_often(run_id, reclaims) for run_id, reclaims in poisoned.items()]
        )
    alone = frozenset(queue for (queue,) in (yield from rows(WAIT_ALONE, *of_scope(scope))))
    return Swept(returned=list(returned), failed=list(poisoned), queues=frozenset(queues), alone=alone)


# -- the nets -----------------------------------------------------------------------------------------------------------------


def mend(work: Work, scope: Scope, limit: int) -> Operation[int]:
    """What a lost step of the ordinary way would leave behind, at most `limit` of each kind; how many were mended."""
    cancelled = yield from _cancel_children(work, scope, limit)
    woken = yield from _wake_parents(work, scope, limit)
    return cancelled + woken + (yield from flow.free(work, scope, limit))


def _cancel_children(work: Work, scope: Scope, limit: int) -> Operation[int]:
    """Live children of parents that landed in any state but completed are asked to stop (48)."""
    asked = 0
    for (parent,) in (yield from rows(ENDED_PARENTS, *of_scope(scope), limit)):
        children = [child for (child,) in (yield from rows(UNASKED_CHILDREN, parent, limit - asked))]
        if children:
            locked = yield from locks.family(children)
            yield from cancel.ask(work, locked, children, f"its parent {parent} has ended")
        asked += len(children)
        if asked >= limit:
            break  # this parent may have more; its flag stays
        yield from count(NOTHING_TO_CANCEL, parent)
    return asked


def _wake_parents(work: Work, scope: Scope, limit: int) -> Operation[int]:
    forgotten = [run_id for (run_id,) in (yield from rows(FORGOTTEN_PARENTS, *of_scope(scope), limit))]
    if not forgotten:
        return 0
    yield from locks.alone(forgotten)
    woken = yield from rows(WAKE, forgotten)
    for (queue,) in woken:
        work.announce(f"queue:{queue}")
    return len(woken)


# -- purge --------------------------------------------------------------------------------------------------------------------


def purge(work: Work, scope: Scope, limit: int, older_than: Micros | None) -> Operation[int]:
    """Delete due runs, oldest first, with everything that belongs to them; how many. One transaction: whoever comes second finds the
    rest (61). An age counts from the landing, never from the submission (60)."""
    if older_than is None:
        found = yield from rows(PURGEABLE, *of_scope(scope), limit)
    else:
        found = yield from rows(PURGEABLE_OLDER, *of_scope(scope), limit, Span(older_than))
    ids = [run_id for (run_id,) in found]
    asks = [Ask(statement, (ids,)) for statement in PURGE] if ids else []
    asks.append(Ask(OLD_SLOTS, (Span(work.settings.slot_keep), limit)))
    asks.append(Ask(GONE_WORKERS, (Span(work.settings.worker_keep),)))
    yield from together(*asks)
    return len(ids)


# -- the registry -------------------------------------------------------------------------------------------------------------


def register(work: Work, worker: WorkerRecord) -> Operation[None]:
    """Put or refresh a worker's row; `started_at` is that of the first time."""
    functions = json.dumps([list(function) for function in worker.functions])
    what = (json.dumps(dict(worker.queues)), functions, worker.family, worker.settings)
    yield from count(REGISTER, worker.worker_id, worker.tenant, worker.bound, worker.host, worker.pid, *what)


def unregister(work: Work, worker_id: str) -> Operation[None]:
    """Remove a worker's row."""
    yield from count(UNREGISTER, worker_id)


def workers(work: Work, scope: Scope) -> Operation[list[WorkerRecord]]:
    """The registry; a bound scope sees those that serve it: its own, and those that serve everybody."""
    return [_worker(row) for row in (yield from rows(WORKERS, scope is ALL, of_scope(scope)[1]))]


def _worker(row: Row) -> WorkerRecord:
    return WorkerRecord(
        worker_id=row[0],
        tenant=row[1],
        bound=row[2],
        host=row[3],
        pid=row[4],
        queues=json.loads(row[5]),
        functions=[(name, version) for name, version in json.loads(row[6])],
        family=row[7],
        settings=row[8],
        started_at=row[9],
        seen_at=row[10],
    )


__all__ = ["mend", "promote", "purge", "register", "sweep", "unregister", "workers"]
