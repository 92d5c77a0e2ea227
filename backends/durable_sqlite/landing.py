"""THE landing: the one function through which every write that makes a run terminal goes, with all that follows from it.

`settle`, `claim`, `cancel`, the sweep and this module itself (nodes behind a failed one) call `land`, each after it has checked, in
the same transaction, that the run may end. Nothing else in this package writes a terminal status.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from durable.landing import Ending, behind
from durable.model import Instant, Status

from . import flow
from .connection import announce, settings_of

LANDING_RUNS = """
SELECT run_id, submitted, keep, sequence_key, blocked_on, parent_run_id, schedule_id, status FROM durable_run
WHERE run_id IN (SELECT value FROM json_each(?)) AND status IN ('pending', 'running', 'suspended')
"""
_ENDED: Final = """
    finished_at = ?, updated_at = ?, purge_at = ?, leased_until = NULL, available_at = NULL, blocked_on = NULL,
    mismatch_since = NULL, waiting_for = NULL, wake_after = 0
"""
COMPLETE: Final = f"""
UPDATE durable_run SET status = 'completed', output = ?, error = NULL, error_kind = NULL, error_detail = NULL, error_positions = NULL,
    {_ENDED}
WHERE submitted = ?
"""
# The children of a run that did not complete are cancelled by the net (48). It finds the parents by this mark, so that it need not
# look at every live child.
END: Final = f"""
UPDATE durable_run SET status = ?, failures = failures + ?, output = NULL, error = ?, error_kind = ?, error_detail = ?, error_positions = ?,
    cancel_children = EXISTS (
        SELECT 1 FROM durable_run AS c WHERE c.parent_run_id = durable_run.run_id AND c.detached = 0
        AND c.status IN ('pending', 'running', 'suspended')),
    {_ENDED}
WHERE submitted = ?
"""
PARENT = """
SELECT run_id, submitted, status, queue, attempts, wake_seq, wake_after, wake_delay, wake_on_failure, available_at FROM durable_run
WHERE run_id = ? AND status IN ('pending', 'running', 'suspended')
"""
BUMP = "UPDATE durable_run SET wake_seq = wake_seq + ?, wake_after = ?, available_at = ?, updated_at = ? WHERE submitted = ?"
WAKE = """
UPDATE durable_run SET wake_seq = wake_seq + ?, status = 'pending', wake_after = 0, available_at = NULL, waiting_for = NULL,
    updated_at = ?
WHERE submitted = ?
"""
DEPENDENTS = """
SELECT r.run_id, r.submitted, r.queue, r.wake_after, r.available_at, r.blocked_on, d.depends_on
FROM durable_dependency AS d JOIN durable_run AS r ON r.run_id = d.run_id
WHERE d.depends_on IN (SELECT value FROM json_each(?)) AND +r.status = 'suspended' AND r.attempts = 0
"""
HAS_EDGES = "SELECT 1 FROM durable_dependency LIMIT 1"
COUNT_DOWN = """
UPDATE durable_run SET wake_after = ?, status = CASE WHEN ? > 0 THEN 'suspended' ELSE 'pending' END,
    available_at = CASE WHEN ? > 0 OR available_at > ? THEN available_at END, updated_at = ?
WHERE submitted = ?
"""
SUCCESS = "UPDATE durable_schedule SET consecutive_failures = 0 WHERE schedule_id = ? AND consecutive_failures > 0"
FAILURE = "UPDATE durable_schedule SET consecutive_failures = consecutive_failures + 1 WHERE schedule_id = ?"


def land(con: sqlite3.Connection, now: Instant, endings: Sequence[Ending]) -> None:
    """Make runs terminal, with every consequence, in this transaction. A run that is terminal already is left as it is.

    The caller has checked that each of them may end (fence, status, scope). Terminal states first; then the permits, the next in
    line, dependents (which may land in turn), parents by the number of their children that landed, and schedules.
    """
    landed: list[tuple[Ending, tuple[Any, ...]]] = []
    queues: set[str] = set()
    wave: Sequence[Ending] = endings
    while wave:
        found = _write(con, now, wave)
        landed += found
        wave = _dependents(con, now, found, queues)
    if not landed:
        return
    ids = [ending.run_id for ending, _ in landed]
    flow.release(con, now, ids)
    # A run that waited for its turn itself leaves the line without anybody's turn coming.
    freed = {row[3] for _, row in landed if row[3] is not None and row[4] != flow.SEQUENCE}
    if freed:
        flow.next_in_sequence(con, now, freed)
    _wake_parents(con, now, landed, queues)
    for ending, row in landed:
        if row[6] is not None:
            con.execute(SUCCESS if ending.status is Status.COMPLETED else FAILURE, (row[6],))
    for run_id in ids:
        announce(con, f"run:{run_id}")
    for queue in queues:
        announce(con, f"queue:{queue}")


def _write(con: sqlite3.Connection, now: Instant, endings: Sequence[Ending]) -> list[tuple[Ending, tuple[Any, ...]]]:
    ids = json.dumps([ending.run_id for ending in endings])
    rows = {row[0]: row for row in con.execute(LANDING_RUNS, (ids,))}
    default_keep = settings_of(con).keep
    found: list[tuple[Ending, tuple[Any, ...]]] = []
    completed: list[tuple[Any, ...]] = []
    ended: list[tuple[Any, ...]] = []
    for ending in endings:
        row = rows.pop(ending.run_id, None)
        if row is None:
            continue
        found.append((ending, row))
        stamps = (now, now, now + (default_keep if row[2] is None else row[2]), row[1])
        failure = ending.failure
        if ending.status is Status.COMPLETED:
            completed.append((ending.output, *stamps))
            continue
        what: tuple[str | None, ...] = (None, None, None, None)
        if failure is not None:
            positions = json.dumps(failure.positions) if failure.positions else None
            what = (failure.message, str(failure.kind), failure.detail, positions)
        ended.append((str(ending.status), ending.counts, *what, *stamps))
    con.executemany(COMPLETE, completed)
    con.executemany(END, ended)
    return found


def _dependents(
    con: sqlite3.Connection, now: Instant, landed: Iterable[tuple[Ending, tuple[Any, ...]]], queues: set[str]
) -> list[Ending]:
    """Count down the nodes behind completed runs and release those at 0; the answer: the nodes that land `upstream` (77)."""
    if con.execute(HAS_EDGES).fetchone() is None:
        return []
    completed = {ending.run_id: ending.status is Status.COMPLETED for ending, _ in landed}
    counted: Counter[str] = Counter()
    nodes: dict[str, tuple[Any, ...]] = {}
    lost: dict[str, Ending] = {}
    for row in con.execute(DEPENDENTS, (json.dumps(list(completed)),)).fetchall():
        run_id, before = row[0], row[6]
        if completed[before]:
            nodes[run_id] = row
            counted[run_id] += 1
        else:
            lost.setdefault(run_id, behind(run_id, before))
    for run_id, (_, submitted, queue, wake_after, available_at, blocked_on, _) in nodes.items():
        if run_id in lost:
            continue
        left = max(wake_after - counted[run_id], 0)
        con.execute(COUNT_DOWN, (left, left, left, now, now, submitted))
        if left == 0 and blocked_on is None and (available_at is None or available_at <= now):
            queues.add(queue)
    return list(lost.values())


def _wake_parents(
    con: sqlite3.Connection, now: Instant, landed: Iterable[tuple[Ending, tuple[Any, ...]]], queues: set[str]
) -> None:
    """Add to each parent the number of its children that landed, and wake it when it waited for no more (31, 33)."""
    ends: Counter[str] = Counter()
    failed: set[str] = set()
    for ending, row in landed:
        if row[5] is not None:
            ends[row[5]] += 1
            if ending.status is not Status.COMPLETED:
                failed.add(row[5])
    for parent_id, count in sorted(ends.items()):
        row = con.execute(PARENT, (parent_id,)).fetchone()
        if row is None:
            continue
        _, submitted, status, queue, attempts, _, wake_after, wake_delay, wake_on_failure, available_at = row
        announce(con, f"run:{parent_id}")
        if status != Status.SUSPENDED or attempts == 0 or wake_after == 0:
            left = wake_after if status == Status.SUSPENDED else 0
            con.execute(BUMP, (count, left, available_at, now, submitted))
            continue
        left = max(wake_after - count, 0)
        if (wake_on_failure and parent_id in failed) or (left == 0 and not wake_delay):
            con.execute(WAKE, (count, now, submitted))
            queues.add(queue)
            continue
        if left == 0:  # the ends of independent children are gathered for a moment (33)
            soon = now + wake_delay
            available_at = soon if available_at is None else min(soon, available_at)
        con.execute(BUMP, (count, left, available_at, now, submitted))
