"""Reading runs: by id, by page, by count, as children, as a pulse. `store.py` calls these; nothing here writes.

A page is found by its keyset `(created_at, run_id)`, newest first, so a run that comes or goes meanwhile neither shifts nor repeats
one. The statement of a listing is put together from the fixed conditions below; what the caller gave travels as parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from durable.model import ALL, Page, Pulse, RunQuery, RunRecord, Scope
from durable.storekit import cursor_values, page_of, stored_key

from .adapting import At
from .operation import Operation, Work, rows
from .rows import IN_SCOPE, RUN_COLUMNS, of_scope, run_shown, status_shown

PAGE_LIMIT: Final = 1_000

BY_ID: Final = f"SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE {IN_SCOPE} AND r.run_id = ANY ($3::text[])"
CHILDREN: Final = (
    f"SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE {IN_SCOPE} AND r.parent_run_id = $3 ORDER BY r.submitted"
)
PULSE: Final = f"""
SELECT r.run_id, r.status, r.attempts, r.wake_seq, r.updated_at, r.progress FROM durable_run AS r
WHERE {IN_SCOPE} AND r.run_id = ANY ($3::text[])
"""
FIND: Final = f"SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE "
NEWEST_FIRST: Final = " ORDER BY r.created_at DESC, r.run_id DESC LIMIT "
COUNT: Final = "SELECT count(*) FROM durable_run AS r WHERE "

# `{}` is the place of the parameter.
TENANT: Final = "r.tenant_id = {}::uuid"
UNTAGGED: Final = "r.tenant_id IS NULL"
STATUSES: Final = "r.status = ANY ({}::text[])"
NAMES: Final = "r.name = ANY ({}::text[])"
QUEUES: Final = "r.queue = ANY ({}::text[])"
PARENT: Final = "r.parent_run_id = {}"
SCHEDULE: Final = "r.schedule_id = {}"
SCHEDULE_OF_ANY_TENANT: Final = (
    "r.schedule_id IS NOT NULL AND substr(r.schedule_id, strpos(r.schedule_id, ':') + 1) = {}"
)
SINCE: Final = "r.created_at >= {}::timestamptz"
UNTIL: Final = "r.created_at < {}::timestamptz"
TAG: Final = "r.tags ->> {}::text = {}::text"
AFTER: Final = "(r.created_at, r.run_id) < ({}::timestamptz, {}::text)"


class _Conditions:
    """Fixed conditions, and the values for their parameters in the order in which they come."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.values: list[Any] = []

    def add(self, condition: str, *values: Any) -> None:
        places = [f"${len(self.values) + number}" for number in range(1, len(values) + 1)]
        self.parts.append(condition.format(*places))
        self.values += values

    @property
    def text(self) -> str:
        return " AND ".join(self.parts) or "true"


def get(work: Work, run_ids: Sequence[str], scope: Scope) -> Operation[list[RunRecord | None]]:
    """Runs by id, in order; None where the scope sees none."""
    found = yield from rows(BY_ID, *of_scope(scope), list(run_ids))
    runs = {row[0]: run_shown(row) for row in found}
    return [runs.get(run_id) for run_id in run_ids]


def find(work: Work, query: RunQuery, scope: Scope) -> Operation[Page]:
    """A page, newest first, and the cursor of the next one. Raises Conflict for a cursor that is not ours."""
    limit = max(1, min(query.limit, PAGE_LIMIT))
    conditions = _conditions(query, scope)
    if query.cursor is not None:
        created_at, run_id = cursor_values(query.cursor)
        conditions.add(AFTER, At(created_at), run_id)
    statement = f"{FIND}{conditions.text}{NEWEST_FIRST}${len(conditions.values) + 1}"
    found = yield from rows(statement, *conditions.values, limit + 1)
    return page_of([run_shown(row) for row in found[:limit]], more=len(found) > limit)


def count(work: Work, query: RunQuery, scope: Scope) -> Operation[int]:
    """How many runs the query has, whatever its limit and cursor."""
    conditions = _conditions(query, scope)
    ((number,),) = yield from rows(COUNT + conditions.text, *conditions.values)
    return int(number)


def children(work: Work, run_id: str, scope: Scope) -> Operation[list[RunRecord]]:
    """The child runs of a run, in the order of their submission."""
    return [run_shown(row) for row in (yield from rows(CHILDREN, *of_scope(scope), run_id))]


def pulse(work: Work, run_ids: Sequence[str], scope: Scope) -> Operation[list[Pulse | None]]:
    """The little that waiting handles need, in order; None where the scope sees no run."""
    found = yield from rows(PULSE, *of_scope(scope), list(run_ids))
    pulses = {
        row[0]: Pulse(
            run_id=row[0],
            status=status_shown(row[1]),
            attempts=row[2],
            wake_seq=row[3],
            updated_at=row[4],
            progress=row[5],
        )
        for row in found
    }
    return [pulses.get(run_id) for run_id in run_ids]


def _conditions(query: RunQuery, scope: Scope) -> _Conditions:
    made = _Conditions()
    if scope is None:
        made.add(UNTAGGED)
    elif scope is not ALL:
        made.add(TENANT, scope)
    for condition, among in ((STATUSES, query.statuses), (NAMES, query.names), (QUEUES, query.queues)):
        if among:
            made.add(condition, [str(one) for one in among])
    if query.parent_run_id is not None:
        made.add(PARENT, query.parent_run_id)
    if query.schedule_id is not None:
        if scope is ALL:
            made.add(SCHEDULE_OF_ANY_TENANT, query.schedule_id)
        else:
            made.add(SCHEDULE, stored_key(scope, query.schedule_id))
    if query.since is not None:
        made.add(SINCE, At(query.since))
    if query.until is not None:
        made.add(UNTIL, At(query.until))
    for name, value in query.tags.items():
        made.add(TAG, name, value)
    return made


__all__ = ["children", "count", "find", "get", "pulse"]
