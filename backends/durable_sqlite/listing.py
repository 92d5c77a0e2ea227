"""Reading runs: by id, by page, by count, as children, as a pulse. `store.py` calls these on a reader; nothing here writes.

A page is found by its keyset `(created_at, run_id)`, newest first, so a run that comes or goes meanwhile neither shifts nor repeats
one. The statement of a listing is put together from the fixed conditions below; what the caller gave travels as parameters only.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from durable.model import ALL, Instant, Page, Pulse, RunQuery, RunRecord, Scope
from durable.storekit import cursor_values, given_key, page_of, tenant_text

from . import scopes
from .rows import RUN_COLUMNS, of_scope, rows_shown, run_columns, run_shown, status_shown

PAGE_LIMIT = 1_000

BY_ID = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE run_id = ? AND (? OR tenant_id IS ?)"
CHILDREN = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE parent_run_id = ? AND (? OR tenant_id IS ?) ORDER BY submitted"
PULSE = """
SELECT run_id, status, attempts, wake_seq, updated_at, progress FROM durable_run WHERE run_id = ? AND (? OR tenant_id IS ?)
"""
FIND = f"SELECT {run_columns('r')} FROM durable_run AS r WHERE "
NEWEST_FIRST = " ORDER BY r.created_at DESC, r.run_id DESC LIMIT ?"
COUNT = "SELECT count(*) FROM durable_run AS r WHERE "

EVERYBODY = "TRUE"
TENANT = "r.tenant_id = ?"
UNTAGGED = "r.tenant_id IS NULL"
STATUSES = "r.status IN (SELECT value FROM json_each(?))"
NAMES = "r.name IN (SELECT value FROM json_each(?))"
QUEUES = "r.queue IN (SELECT value FROM json_each(?))"
PARENT = "r.parent_run_id = ?"
SCHEDULE = "r.schedule_id = ?"
SCHEDULES = "r.schedule_id IN (SELECT value FROM json_each(?))"
NEXT_SCHEDULE = """
SELECT schedule_id FROM durable_run WHERE schedule_id IS NOT NULL AND schedule_id > ? ORDER BY schedule_id LIMIT 1
"""
SINCE = "r.created_at >= ?"
UNTIL = "r.created_at < ?"
TAG = "EXISTS (SELECT 1 FROM json_each(r.tags) AS t WHERE t.key = ? AND t.value = ?)"
AFTER = "(r.created_at, r.run_id) < (?, ?)"


def get(con: sqlite3.Connection, now: Instant, run_ids: Sequence[str], scope: Scope) -> list[RunRecord | None]:
    """Runs by id, in order; None where the scope sees none."""
    found = [rows_shown(con, BY_ID, (run_id, *of_scope(scope))) for run_id in run_ids]
    return [run_shown(rows[0]) if rows else None for rows in found]


def find(con: sqlite3.Connection, now: Instant, query: RunQuery, scope: Scope) -> Page:
    """A page, newest first, and the cursor of the next one. Raises Conflict for a cursor that is not ours."""
    limit = max(1, min(query.limit, PAGE_LIMIT))
    conditions, values = _conditions(con, query, scope)
    if query.cursor is not None:
        conditions.append(AFTER)
        values += cursor_values(query.cursor)
    rows = rows_shown(con, FIND + " AND ".join(conditions) + NEWEST_FIRST, (*values, limit + 1))
    return page_of([run_shown(row) for row in rows[:limit]], more=len(rows) > limit)


def count(con: sqlite3.Connection, now: Instant, query: RunQuery, scope: Scope) -> int:
    """How many runs the query has, whatever its limit and cursor."""
    conditions, values = _conditions(con, query, scope)
    found: int = con.execute(COUNT + " AND ".join(conditions), values).fetchone()[0]
    return found


def children(con: sqlite3.Connection, now: Instant, run_id: str, scope: Scope) -> list[RunRecord]:
    """The child runs of a run, in the order of their submission."""
    return [run_shown(row) for row in rows_shown(con, CHILDREN, (run_id, *of_scope(scope)))]


def pulse(con: sqlite3.Connection, now: Instant, run_ids: Sequence[str], scope: Scope) -> list[Pulse | None]:
    """The little that waiting handles need, in order; None where the scope sees no run."""
    rows = [con.execute(PULSE, (run_id, *of_scope(scope))).fetchone() for run_id in run_ids]
    return [
        None
        if row is None
        else Pulse(
            run_id=row[0],
            status=status_shown(row[1]),
            attempts=row[2],
            wake_seq=row[3],
            updated_at=row[4],
            progress=row[5],
        )
        for row in rows
    ]


def _conditions(con: sqlite3.Connection, query: RunQuery, scope: Scope) -> tuple[list[str], list[Any]]:
    tenant_id = None if scope is ALL else tenant_text(scope)
    chosen: list[tuple[str, list[Any]]] = [
        (EVERYBODY, []) if scope is ALL else (UNTAGGED, []) if tenant_id is None else (TENANT, [tenant_id])
    ]
    for condition, among in ((STATUSES, query.statuses), (NAMES, query.names), (QUEUES, query.queues)):
        if among:
            chosen.append((condition, [json.dumps([str(one) for one in among])]))
    if query.parent_run_id is not None:
        chosen.append((PARENT, [query.parent_run_id]))
    if query.schedule_id is not None:
        keys = (
            [scopes.stored(tenant_id, query.schedule_id)]
            if scope is not ALL
            else _of_any_tenant(con, query.schedule_id)
        )
        # One key is read in the order of its index; several are sorted.
        chosen.append((SCHEDULE, keys) if len(keys) == 1 else (SCHEDULES, [json.dumps(keys)]))
    if query.since is not None:
        chosen.append((SINCE, [query.since]))
    if query.until is not None:
        chosen.append((UNTIL, [query.until]))
    chosen += [(TAG, [key, value]) for key, value in query.tags.items()]
    return [condition for condition, _ in chosen], [value for _, values in chosen for value in values]


def _of_any_tenant(con: sqlite3.Connection, schedule_id: str) -> list[str]:
    """The stored form of a schedule's id for every tenant that has runs of one: a step through the index for each schedule, instead
    of one for each run."""
    found: list[str] = []
    last = ""
    while (row := con.execute(NEXT_SCHEDULE, (last,)).fetchone()) is not None:
        last = row[0]
        if given_key(last) == schedule_id:
            found.append(last)
    return found
