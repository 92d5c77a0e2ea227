"""The chores (semantics 11, 15, 17, 31, 48, 60 to 62): promote, sweep, the nets, purge, the registry of workers. `store.py` calls them.

Each is one bounded write, safe everywhere at once, and finds its rows by a partial index that holds nothing else. A run that ends
here ends through the landing. Nothing here decides when it is called.
"""

from __future__ import annotations

import json
import sqlite3

from durable.landing import Ending, reclaimed_too_often
from durable.model import ALL, Instant, Promoted, Scope, Swept, WorkerRecord
from durable.settings import Micros
from durable.storekit import tenant_of, tenant_text

from . import cancel, flow, landing
from .connection import announce
from .rows import of_scope

# A node of a graph that is not released waits for its upstream, whatever its start; its time counts from the release.
DUE = """
SELECT submitted, queue FROM durable_run
WHERE status IN ('pending', 'suspended') AND available_at IS NOT NULL AND available_at <= ?
AND (status = 'pending' OR attempts > 0) AND (? OR tenant_id IS ?) ORDER BY available_at, submitted LIMIT ?
"""
PROMOTE = """
UPDATE durable_run SET status = 'pending', available_at = NULL, wake_after = 0, waiting_for = NULL, updated_at = ? WHERE submitted = ?
"""
NEXT_DUE = """
SELECT available_at FROM durable_run
WHERE status IN ('pending', 'suspended') AND available_at IS NOT NULL
AND (status = 'pending' OR attempts > 0) AND (? OR tenant_id IS ?) ORDER BY available_at LIMIT 1
"""

LAPSED = """
SELECT run_id, queue, attempts, reclaims, compensating FROM durable_run
WHERE status = 'running' AND leased_until < ? AND (? OR tenant_id IS ?) ORDER BY leased_until, submitted LIMIT ?
"""
# The newest record tells under which claim the run last got on.
NEWEST_FENCE = "SELECT fence FROM durable_step WHERE rowid = (SELECT max(rowid) FROM durable_step WHERE run_id = ?)"
# The mark goes: a settle of the lapsed claim that comes late must not take this pending run for its own work. So does the replay
# family where there is no record: it belongs to the records.
RECLAIM = """
UPDATE durable_run SET status = 'pending', reclaims = ?, blocked_on = ?, leased_until = NULL, lease_owner = NULL,
    available_at = NULL, updated_at = ?,
    replay_family = CASE WHEN EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = durable_run.run_id) THEN replay_family END
WHERE run_id = ?
"""
COUNT_RECLAIM = "UPDATE durable_run SET reclaims = ? WHERE run_id = ?"
WAIT_ALONE = """
SELECT DISTINCT queue FROM durable_run WHERE status = 'pending' AND blocked_on = 'alone' AND (? OR tenant_id IS ?)
"""

ENDED_PARENTS = """
SELECT submitted, run_id FROM durable_run WHERE cancel_children = 1 AND (? OR tenant_id IS ?) ORDER BY submitted LIMIT ?
"""
UNASKED_CHILDREN = """
SELECT run_id FROM durable_run WHERE parent_run_id = ? AND status IN ('pending', 'running', 'suspended') AND detached = 0
AND cancel_requested_at IS NULL LIMIT ?
"""
NOTHING_TO_CANCEL = "UPDATE durable_run SET cancel_children = 0 WHERE submitted = ?"
# The ends that it waits for can not come any more: fewer of its children live than it counts on.
FORGOTTEN_PARENTS = """
SELECT submitted, queue FROM durable_run AS r WHERE status = 'suspended' AND wake_after > 0 AND attempts > 0
AND (? OR tenant_id IS ?) AND wake_after > (
    SELECT count(*) FROM durable_run AS c WHERE c.parent_run_id = r.run_id AND instr(c.parent_step_id, '@') = 0
    AND c.status IN ('pending', 'running', 'suspended'))
ORDER BY submitted LIMIT ?
"""
WAKE = """
UPDATE durable_run SET status = 'pending', available_at = NULL, wake_after = 0, waiting_for = NULL, wake_seq = wake_seq + 1, updated_at = ?
WHERE submitted = ?
"""

_KEPT = """
AND (r.parent_run_id IS NULL OR r.detached = 1 OR NOT EXISTS (
    SELECT 1 FROM durable_run AS p WHERE p.run_id = r.parent_run_id AND p.status IN ('pending', 'running', 'suspended')))
"""
PURGEABLE = f"""
SELECT r.run_id FROM durable_run AS r WHERE r.purge_at IS NOT NULL AND r.purge_at <= ? AND (? OR r.tenant_id IS ?) {_KEPT}
ORDER BY r.purge_at, r.submitted LIMIT ?
"""
PURGEABLE_OLDER = f"""
SELECT r.run_id FROM durable_run AS r WHERE r.purge_at IS NOT NULL AND r.finished_at <= ? AND (? OR r.tenant_id IS ?) {_KEPT}
ORDER BY r.finished_at, r.submitted LIMIT ?
"""
PURGE = (
    "DELETE FROM durable_step WHERE run_id IN (SELECT value FROM json_each(?))",
    "DELETE FROM durable_signal WHERE run_id IN (SELECT value FROM json_each(?))",
    "DELETE FROM durable_key WHERE run_id IN (SELECT value FROM json_each(?))",
    "DELETE FROM durable_permit WHERE run_id IN (SELECT value FROM json_each(?))",
    "DELETE FROM durable_dependency WHERE run_id IN (SELECT value FROM json_each(?))",
    "DELETE FROM durable_dependency WHERE depends_on IN (SELECT value FROM json_each(?))",
    "DELETE FROM durable_run WHERE run_id IN (SELECT value FROM json_each(?))",
)
OLD_SLOTS = """
DELETE FROM durable_schedule_fire WHERE rowid IN (SELECT rowid FROM durable_schedule_fire WHERE created_at < ? ORDER BY created_at LIMIT ?)
"""
GONE_WORKERS = "DELETE FROM durable_worker WHERE seen_at < ?"

REGISTER = """
INSERT INTO durable_worker (worker_id, tenant_id, bound, host, pid, queues, functions, family, settings, started_at, seen_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (worker_id) DO UPDATE SET tenant_id = excluded.tenant_id, bound = excluded.bound, host = excluded.host,
    pid = excluded.pid, queues = excluded.queues, functions = excluded.functions, family = excluded.family,
    settings = excluded.settings, seen_at = excluded.seen_at
"""
UNREGISTER = "DELETE FROM durable_worker WHERE worker_id = ?"
WORKERS = """
SELECT worker_id, tenant_id, bound, host, pid, queues, functions, family, settings, started_at, seen_at FROM durable_worker
WHERE (? OR bound = 0 OR tenant_id IS ?) ORDER BY started_at, worker_id
"""


# -- promote and sweep ------------------------------------------------------------------------------------------------------


def promote(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> Promoted:
    """Due runs become claimable, oldest due first; so do runs for which a token of their rate has come in (76)."""
    rows = con.execute(DUE, (now, *of_scope(scope), limit)).fetchall()
    con.executemany(PROMOTE, [(now, submitted) for submitted, _ in rows])
    queues = frozenset(queue for _, queue in rows)
    for queue in queues:
        announce(con, f"queue:{queue}")
    next_token = flow.refill(con, now, scope, limit)
    found = con.execute(NEXT_DUE, of_scope(scope)).fetchone()
    instants = [instant for instant in (next_token, found[0] if found else None) if instant is not None]
    return Promoted(count=len(rows), queues=queues, next_due=min(instants, default=None))


def sweep(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int, max_reclaims: int) -> Swept:
    """Runs whose lease lapsed go back to pending, or land past the limit (15)."""
    returned: list[str] = []
    poisoned: list[Ending] = []
    queues: set[str] = set()
    for run_id, queue, attempts, before, compensating in con.execute(LAPSED, (now, *of_scope(scope), limit)).fetchall():
        newest = con.execute(NEWEST_FENCE, (run_id,)).fetchone()
        reclaims = 0 if newest is not None and newest[0] == attempts else before + 1
        if reclaims > max_reclaims and not compensating:
            con.execute(COUNT_RECLAIM, (reclaims, run_id))
            poisoned.append(reclaimed_too_often(run_id, reclaims))
        else:
            con.execute(RECLAIM, (reclaims, flow.ALONE if reclaims >= 2 else None, now, run_id))
            returned.append(run_id)
            queues.add(queue)
            announce(con, f"queue:{queue}")
    flow.release(con, now, returned)
    if poisoned:
        landing.land(con, now, poisoned)
    alone = frozenset(queue for (queue,) in con.execute(WAIT_ALONE, of_scope(scope)))
    return Swept(returned=returned, failed=[one.run_id for one in poisoned], queues=frozenset(queues), alone=alone)


# -- the nets -----------------------------------------------------------------------------------------------------------------


def mend(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> int:
    """What a lost step of the ordinary way would leave behind, at most `limit` of each kind; how many were mended."""
    return (
        _cancel_children(con, now, scope, limit)
        + _wake_parents(con, now, scope, limit)
        + flow.free(con, now, scope, limit)
    )


def _cancel_children(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> int:
    """Live children of parents that landed in any state but completed are asked to stop (48)."""
    asked = 0
    for submitted, parent in con.execute(ENDED_PARENTS, (*of_scope(scope), limit)).fetchall():
        children = con.execute(UNASKED_CHILDREN, (parent, limit - asked)).fetchall()
        for (child,) in children:
            cancel.ask(con, now, child, f"its parent {parent} has ended")
        asked += len(children)
        if asked >= limit:
            break  # this parent may have more; its flag stays
        con.execute(NOTHING_TO_CANCEL, (submitted,))
    return asked


def _wake_parents(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> int:
    rows = con.execute(FORGOTTEN_PARENTS, (*of_scope(scope), limit)).fetchall()
    for submitted, queue in rows:
        con.execute(WAKE, (now, submitted))
        announce(con, f"queue:{queue}")
    return len(rows)


# -- purge --------------------------------------------------------------------------------------------------------------------


def purge(
    con: sqlite3.Connection,
    now: Instant,
    scope: Scope,
    limit: int,
    older_than: Micros | None,
    *,
    slot_keep: Micros,
    worker_keep: Micros,
) -> int:
    """Delete due runs, oldest first, with everything that belongs to them; how many. One transaction: whoever comes second finds the
    rest (61). An age counts from the landing, never from the submission (60)."""
    if older_than is None:
        rows = con.execute(PURGEABLE, (now, *of_scope(scope), limit)).fetchall()
    else:
        rows = con.execute(PURGEABLE_OLDER, (now - older_than, *of_scope(scope), limit)).fetchall()
    if rows:
        ids = json.dumps([run_id for (run_id,) in rows])
        for statement in PURGE:
            con.execute(statement, (ids,))
    con.execute(OLD_SLOTS, (now - slot_keep, limit))
    con.execute(GONE_WORKERS, (now - worker_keep,))
    return len(rows)


# -- the registry -------------------------------------------------------------------------------------------------------------


def register(con: sqlite3.Connection, now: Instant, worker: WorkerRecord) -> None:
    """Put or refresh a worker's row; `started_at` is that of the first time."""
    functions = json.dumps([list(function) for function in worker.functions])
    what = (json.dumps(dict(worker.queues)), functions, worker.family, worker.settings)
    con.execute(
        REGISTER,
        (worker.worker_id, tenant_text(worker.tenant), worker.bound, worker.host, worker.pid, *what, now, now),
    )


def unregister(con: sqlite3.Connection, now: Instant, worker_id: str) -> None:
    """Remove a worker's row."""
    con.execute(UNREGISTER, (worker_id,))


def workers(con: sqlite3.Connection, now: Instant, scope: Scope) -> list[WorkerRecord]:
    """The registry; a bound scope sees those that serve it: its own, and those that serve everybody."""
    return [
        WorkerRecord(
            worker_id=row[0],
            tenant=tenant_of(row[1]),
            bound=bool(row[2]),
            host=row[3],
            pid=row[4],
            queues=json.loads(row[5]),
            functions=[(name, version) for name, version in json.loads(row[6])],
            family=row[7],
            settings=row[8],
            started_at=row[9],
            seen_at=row[10],
        )
        for row in con.execute(WORKERS, (scope is ALL, of_scope(scope)[1]))
    ]
