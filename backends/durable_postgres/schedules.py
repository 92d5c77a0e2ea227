"""Cron rows (semantics 52 to 56, 62): register, pause, park, remove, what is due, and the firing. `store.py` calls these.

The engine computes instants; here they are compared, advanced and turned into runs in one transaction. Nothing here parses an
expression or knows a time zone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.errors import Conflict
from durable.model import ALL, TERMINAL, Firing, Instant, Schedule, ScheduleSpec, Scope, Submitted
from durable.storekit import given_key, stored_key

from . import enqueue
from .adapting import At, at, span
from .operation import Ask, Operation, Row, Work, count, rows, together
from .rows import of_scope

SCHEDULES: Final = """
SELECT s.schedule_id, s.tenant_id, s.name, s.cron, s.tz, s.input, s.queue, s.overlap, s.catch_up, s.jitter, s.next_fire_at,
    s.enabled, s.from_code, s.last_run_id, l.status, s.consecutive_failures, s.parked_reason, s.created_at, s.updated_at
FROM durable_schedule AS s LEFT JOIN durable_run AS l ON l.run_id = s.last_run_id
"""
_IN_SCOPE: Final = "($1 OR s.tenant_id IS NOT DISTINCT FROM $2::uuid)"
BY_KEY: Final = f"{SCHEDULES} WHERE s.schedule_id = ANY ($1::text[])"
ALL_OF_SCOPE: Final = f"{SCHEDULES} WHERE {_IN_SCOPE} ORDER BY s.schedule_id"
DUE: Final = f"""{SCHEDULES} WHERE s.enabled AND s.parked_reason IS NULL AND s.next_fire_at <= now() AND {_IN_SCOPE}
ORDER BY s.next_fire_at, s.schedule_id LIMIT $3
"""
WITH_IDS: Final = f"""
SELECT s.schedule_id FROM durable_schedule AS s
WHERE substr(s.schedule_id, strpos(s.schedule_id, ':') + 1) = ANY ($3::text[]) AND {_IN_SCOPE} ORDER BY s.schedule_id
"""
# The same cron and zone leave the instant and the paused state alone; a parked row that is put again is unparked (56).
PUT: Final = """
INSERT INTO durable_schedule AS s (schedule_id, name, cron, tz, queue, overlap, catch_up, jitter, next_fire_at, from_code, tenant_id,
                                   input, created_at, updated_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::interval, $9::timestamptz, $10, $11::uuid, $12::jsonb, now(), now())
ON CONFLICT (schedule_id) DO UPDATE SET
    next_fire_at = CASE WHEN s.cron = excluded.cron AND s.tz = excluded.tz THEN s.next_fire_at ELSE excluded.next_fire_at END,
    name = excluded.name, cron = excluded.cron, tz = excluded.tz, queue = excluded.queue, overlap = excluded.overlap,
    catch_up = excluded.catch_up, jitter = excluded.jitter, from_code = excluded.from_code, input = excluded.input,
    parked_reason = NULL, updated_at = excluded.updated_at
"""
PAUSE: Final = "UPDATE durable_schedule AS s SET enabled = false, updated_at = now() WHERE s.schedule_id = $1"
RESUME: Final = """
UPDATE durable_schedule AS s SET enabled = true, next_fire_at = coalesce($2::timestamptz, s.next_fire_at), updated_at = now()
WHERE s.schedule_id = $1
"""
PARK: Final = "UPDATE durable_schedule AS s SET parked_reason = $2, updated_at = now() WHERE s.schedule_id = $1"
_STANDS: Final = (
    "WHERE s.schedule_id = $1 AND s.enabled AND s.parked_reason IS NULL AND s.next_fire_at = $3::timestamptz"
)
PARK_IF: Final = f"UPDATE durable_schedule AS s SET parked_reason = $2, updated_at = now() {_STANDS}"
# The compare and the advance in one statement: whoever finds another instant here has lost the race.
ADVANCE: Final = f"UPDATE durable_schedule AS s SET next_fire_at = $2::timestamptz, updated_at = now() {_STANDS}"
REMOVE: Final = "DELETE FROM durable_schedule WHERE schedule_id = $1"
FIRED: Final = """
SELECT f.scheduled_for FROM durable_schedule_fire AS f WHERE f.schedule_id = $1 AND f.scheduled_for = ANY ($2::timestamptz[])
"""
SLOTS: Final = """
INSERT INTO durable_schedule_fire (schedule_id, scheduled_for, run_id, created_at)
SELECT $1, f.slot, f.run_id, now() FROM unnest($2::timestamptz[], $3::text[]) AS f (slot, run_id)
"""
LAST_RUN: Final = "UPDATE durable_schedule AS s SET last_run_id = $2 WHERE s.schedule_id = $1"


def put(work: Work, spec: ScheduleSpec, scope: Scope) -> Operation[Schedule]:
    """Register or change. Raises Conflict for the unbound scope: a schedule belongs to one tenant, or is untagged."""
    if scope is ALL:
        raise Conflict(
            f"schedule {spec.schedule_id!r}: all tenants can not own one schedule", hint="bind the client to a tenant"
        )
    key = stored_key(scope, spec.schedule_id)
    how = (
        spec.name,
        spec.cron,
        spec.tz,
        spec.queue,
        spec.overlap,
        spec.catch_up,
        span(spec.jitter),
        at(spec.next_fire_at),
    )
    asked = Ask(PUT, (key, *how, spec.from_code, scope, spec.input))
    _, found = yield from together(asked, Ask(BY_KEY, ([key],)))
    return _schedule(found[0])


def pause(work: Work, schedule_id: str, scope: Scope, paused: bool, next_fire_at: Instant | None) -> Operation[bool]:
    """Pause, or resume at `next_fire_at`. False where the scope sees no such schedule."""
    key = yield from _key(schedule_id, scope)
    if key is None:
        return False
    touched = (yield from count(PAUSE, key)) if paused else (yield from count(RESUME, key, at(next_fire_at)))
    return touched == 1


def park(work: Work, schedule_id: str, scope: Scope, reason: str) -> Operation[bool]:
    """Take it out of the due scan, with the reason for people. False where the scope sees no such schedule."""
    key = yield from _key(schedule_id, scope)
    return key is not None and (yield from count(PARK, key, reason)) == 1


def remove(work: Work, schedule_id: str, scope: Scope) -> Operation[bool]:
    """Remove the row; its slots stay, so that the same schedule put again fires no slot twice. False where the scope sees none."""
    key = yield from _key(schedule_id, scope)
    return key is not None and (yield from count(REMOVE, key)) == 1


def schedules(work: Work, scope: Scope, schedule_ids: Sequence[str]) -> Operation[list[Schedule]]:
    """Those with these ids that the scope sees, in their order; without ids all that it sees."""
    if not schedule_ids:
        return [_schedule(row) for row in (yield from rows(ALL_OF_SCOPE, *of_scope(scope)))]
    keys = yield from _keys(schedule_ids, scope)
    found = {row[0]: row for row in (yield from rows(BY_KEY, keys))}
    return [_schedule(found[key]) for one in schedule_ids for key in keys if given_key(key) == one and key in found]


def due(work: Work, scope: Scope, limit: int) -> Operation[tuple[Instant, list[Schedule]]]:
    """Now, and the schedules that are due, oldest first."""
    found = yield from rows(DUE, *of_scope(scope), limit)
    return work.now, [_schedule(row) for row in found]


def fire(work: Work, firing: Firing) -> Operation[list[Submitted] | None]:
    """Slot rows, runs and the next instant together, if the schedule still stands at `expected` (53); None if it does not."""
    key = stored_key(firing.tenant, firing.schedule_id)
    if firing.parked_reason is not None:
        return [] if (yield from count(PARK_IF, key, firing.parked_reason, At(firing.expected))) == 1 else None
    if (yield from count(ADVANCE, key, at(firing.next_fire_at), At(firing.expected))) == 0:
        return None
    slots = {firing.expected if run.scheduled_for is None else run.scheduled_for: run for run in reversed(firing.runs)}
    fired = {slot for (slot,) in (yield from rows(FIRED, key, [At(slot) for slot in slots]))}
    open_slots = {slot: run for slot, run in reversed(slots.items()) if slot not in fired}
    if not open_slots:
        return []
    answers = yield from enqueue.enqueue(work, list(open_slots.values()))
    ids = [answer.run.run_id for answer in answers]
    yield from together(Ask(SLOTS, (key, [At(slot) for slot in open_slots], ids)), Ask(LAST_RUN, (key, ids[-1])))
    return answers


def _keys(schedule_ids: Sequence[str], scope: Scope) -> Operation[list[str]]:
    if scope is not ALL:
        return [stored_key(scope, schedule_id) for schedule_id in schedule_ids]
    return [key for (key,) in (yield from rows(WITH_IDS, *of_scope(scope), list(schedule_ids)))]


def _key(schedule_id: str, scope: Scope) -> Operation[str | None]:
    """The stored key of the one schedule that is meant. Raises Conflict where the unbound scope sees several of that id."""
    keys = yield from _keys([schedule_id], scope)
    if len(keys) > 1:
        raise Conflict(
            f"{len(keys)} tenants have a schedule {schedule_id!r}", hint="bind the client to the tenant that is meant"
        )
    return keys[0] if keys else None


def _schedule(row: Row) -> Schedule:
    return Schedule(
        schedule_id=given_key(row[0]),
        tenant=row[1],
        name=row[2],
        cron=row[3],
        tz=row[4],
        input=row[5],
        queue=row[6],
        overlap=row[7],
        catch_up=row[8],
        jitter=row[9],
        next_fire_at=row[10],
        enabled=row[11],
        from_code=row[12],
        last_run_id=row[13],
        last_run_live=row[14] is not None and row[14] not in TERMINAL,
        consecutive_failures=row[15],
        parked_reason=row[16],
        created_at=row[17],
        updated_at=row[18],
    )


__all__ = ["due", "fire", "park", "pause", "put", "remove", "schedules"]
