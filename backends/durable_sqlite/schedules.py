"""Cron rows (semantics 52 to 56, 62): register, pause, park, remove, what is due, and the firing. `store.py` calls these.

The engine computes instants; here they are compared, advanced and turned into runs in one write. Nothing here parses an expression
or knows a time zone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from durable.errors import Conflict
from durable.model import ALL, TERMINAL, Firing, Instant, Schedule, ScheduleSpec, Scope, Submitted
from durable.storekit import given_key, tenant_of, tenant_text

from . import enqueue
from .rows import of_scope
from .scopes import stored

SCHEDULES = """
SELECT s.schedule_id, s.tenant_id, s.name, s.cron, s.tz, s.input, s.queue, s.overlap, s.catch_up, s.jitter, s.next_fire_at,
    s.enabled, s.from_code, s.last_run_id, r.status, s.consecutive_failures, s.parked_reason, s.created_at, s.updated_at
FROM durable_schedule AS s LEFT JOIN durable_run AS r ON r.run_id = s.last_run_id
"""
ONE = SCHEDULES + "WHERE s.schedule_id = ?"
ALL_OF_SCOPE = SCHEDULES + "WHERE (? OR s.tenant_id IS ?) ORDER BY s.schedule_id"
DUE = (
    SCHEDULES
    + """
WHERE s.enabled = 1 AND s.parked_reason IS NULL AND s.next_fire_at IS NOT NULL AND s.next_fire_at <= ?
AND (? OR s.tenant_id IS ?) ORDER BY s.next_fire_at, s.schedule_id LIMIT ?
"""
)
WITH_ID = """
SELECT schedule_id FROM durable_schedule WHERE substr(schedule_id, instr(schedule_id, ':') + 1) = ? AND (? OR tenant_id IS ?)
"""
# The same cron and zone leave the instant and the paused state alone; a parked row that is put again is unparked (56).
PUT = """
INSERT INTO durable_schedule (schedule_id, name, cron, tz, queue, overlap, catch_up, jitter, next_fire_at, from_code, tenant_id,
                              created_at, updated_at, input)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (schedule_id) DO UPDATE SET
    next_fire_at = CASE WHEN durable_schedule.cron = excluded.cron AND durable_schedule.tz = excluded.tz
                        THEN durable_schedule.next_fire_at ELSE excluded.next_fire_at END,
    name = excluded.name, cron = excluded.cron, tz = excluded.tz, queue = excluded.queue, overlap = excluded.overlap,
    catch_up = excluded.catch_up, jitter = excluded.jitter, from_code = excluded.from_code, input = excluded.input,
    parked_reason = NULL, updated_at = excluded.updated_at
"""
PAUSE = "UPDATE durable_schedule SET enabled = 0, updated_at = ? WHERE schedule_id = ?"
RESUME = """
UPDATE durable_schedule SET enabled = 1, next_fire_at = coalesce(?, next_fire_at), updated_at = ? WHERE schedule_id = ?
"""
PARK_IF = """
UPDATE durable_schedule SET parked_reason = ?, updated_at = ?
WHERE schedule_id = ? AND enabled = 1 AND parked_reason IS NULL AND next_fire_at = ?
"""
PARK = "UPDATE durable_schedule SET parked_reason = ?, updated_at = ? WHERE schedule_id = ?"
REMOVE = "DELETE FROM durable_schedule WHERE schedule_id = ?"
# The compare and the advance in one statement: whoever finds another instant here has lost the race.
ADVANCE = """
UPDATE durable_schedule SET next_fire_at = ?, updated_at = ?
WHERE schedule_id = ? AND enabled = 1 AND parked_reason IS NULL AND next_fire_at = ?
"""
FIRED = "SELECT 1 FROM durable_schedule_fire WHERE schedule_id = ? AND scheduled_for = ?"
SLOT = "INSERT INTO durable_schedule_fire (schedule_id, scheduled_for, run_id, created_at) VALUES (?, ?, ?, ?)"
LAST_RUN = "UPDATE durable_schedule SET last_run_id = ? WHERE schedule_id = ?"


def put(con: sqlite3.Connection, now: Instant, spec: ScheduleSpec, scope: Scope) -> Schedule:
    """Register or change. Raises Conflict for the unbound scope: a schedule belongs to one tenant, or is untagged."""
    if scope is ALL:
        raise Conflict(
            f"schedule {spec.schedule_id!r}: all tenants can not own one schedule", hint="bind the client to a tenant"
        )
    tenant_id = tenant_text(scope)
    key = stored(tenant_id, spec.schedule_id)
    how = (
        spec.name,
        spec.cron,
        spec.tz,
        spec.queue,
        spec.overlap,
        spec.catch_up,
        spec.jitter,
        spec.next_fire_at,
        spec.from_code,
    )
    con.execute(PUT, (key, *how, tenant_id, now, now, spec.input))
    return _schedule(con.execute(ONE, (key,)).fetchone())


def pause(
    con: sqlite3.Connection, now: Instant, schedule_id: str, scope: Scope, paused: bool, next_fire_at: Instant | None
) -> bool:
    """Pause, or resume at `next_fire_at`. False where the scope sees no such schedule."""
    key = _key(con, schedule_id, scope)
    if key is None:
        return False
    if paused:
        con.execute(PAUSE, (now, key))
    else:
        con.execute(RESUME, (next_fire_at, now, key))
    return True


def park(con: sqlite3.Connection, now: Instant, schedule_id: str, scope: Scope, reason: str) -> bool:
    """Take it out of the due scan, with the reason for people. False where the scope sees no such schedule."""
    key = _key(con, schedule_id, scope)
    return key is not None and con.execute(PARK, (reason, now, key)).rowcount == 1


def remove(con: sqlite3.Connection, now: Instant, schedule_id: str, scope: Scope) -> bool:
    """Remove the row; its slots stay, so that the same schedule put again fires no slot twice. False where the scope sees none."""
    key = _key(con, schedule_id, scope)
    return key is not None and con.execute(REMOVE, (key,)).rowcount == 1


def schedules(con: sqlite3.Connection, now: Instant, scope: Scope, schedule_ids: Sequence[str]) -> list[Schedule]:
    """Those with these ids that the scope sees, in their order; without ids all that it sees."""
    if not schedule_ids:
        return [_schedule(row) for row in con.execute(ALL_OF_SCOPE, of_scope(scope))]
    keys = [key for schedule_id in schedule_ids for key in _keys(con, schedule_id, scope)]
    rows = (con.execute(ONE, (key,)).fetchone() for key in keys)
    return [_schedule(row) for row in rows if row is not None]


def due(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> tuple[Instant, list[Schedule]]:
    """Now, and the schedules that are due, oldest first."""
    return now, [_schedule(row) for row in con.execute(DUE, (now, *of_scope(scope), limit))]


def fire(con: sqlite3.Connection, now: Instant, firing: Firing) -> list[Submitted] | None:
    """Slot rows, runs and the next instant together, if the schedule still stands at `expected` (53); None if it does not."""
    key = stored(tenant_text(firing.tenant), firing.schedule_id)
    if firing.parked_reason is not None:
        return [] if con.execute(PARK_IF, (firing.parked_reason, now, key, firing.expected)).rowcount == 1 else None
    if con.execute(ADVANCE, (firing.next_fire_at, now, key, firing.expected)).rowcount == 0:
        return None
    answers: list[Submitted] = []
    for run in firing.runs:
        slot = firing.expected if run.scheduled_for is None else run.scheduled_for
        if con.execute(FIRED, (key, slot)).fetchone() is not None:
            continue
        (answer,) = enqueue.enqueue(con, now, [run])
        con.execute(SLOT, (key, slot, answer.run.run_id, now))
        con.execute(LAST_RUN, (answer.run.run_id, key))
        answers.append(answer)
    return answers


def _keys(con: sqlite3.Connection, schedule_id: str, scope: Scope) -> list[str]:
    if scope is not ALL:
        return [stored(tenant_text(scope), schedule_id)]
    return [key for (key,) in con.execute(WITH_ID, (schedule_id, *of_scope(scope)))]


def _key(con: sqlite3.Connection, schedule_id: str, scope: Scope) -> str | None:
    """The stored key of the one schedule that is meant. Raises Conflict where the unbound scope sees several of that id."""
    keys = [key for key in _keys(con, schedule_id, scope) if con.execute(ONE, (key,)).fetchone() is not None]
    if len(keys) > 1:
        raise Conflict(
            f"{len(keys)} tenants have a schedule {schedule_id!r}", hint="bind the client to the tenant that is meant"
        )
    return keys[0] if keys else None


def _schedule(row: Sequence[Any]) -> Schedule:
    return Schedule(
        schedule_id=given_key(row[0]),
        tenant=tenant_of(row[1]),
        name=row[2],
        cron=row[3],
        tz=row[4],
        input=row[5],
        queue=row[6],
        overlap=row[7],
        catch_up=row[8],
        jitter=row[9],
        next_fire_at=row[10],
        enabled=bool(row[11]),
        from_code=bool(row[12]),
        last_run_id=row[13],
        last_run_live=row[14] is not None and row[14] not in TERMINAL,
        consecutive_failures=row[15],
        parked_reason=row[16],
        created_at=row[17],
        updated_at=row[18],
    )
