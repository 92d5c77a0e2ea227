"""Reading runs: by id, by page, by count, as children, as a pulse. `store.py` calls these; nothing here writes.

A page is found by its keyset `(created_at, _id)`, newest first, so a run that comes or goes meanwhile neither shifts nor repeats one.
What the caller gave stands in a filter as a value, never as an operator. A run that is being purged is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bson.datetime_ms import DatetimeMS

from durable.model import ALL, Instant, Page, Pulse, RunQuery, RunRecord, Scope
from durable.storekit import cursor_of, cursor_values, given_key, page_of

from .operation import Document, Work
from .rows import instant, of_scope, run_shown, status_shown, stored_id, tenant_text, visible
from .times import stored_not_before

PAGE_LIMIT = 1_000
_UNDATED: Final[Instant] = -(2**63)
"""In a cursor: the dated ones are through."""
# Before and behind all dates in the order of values of any type, which is that of the index.
_NO_DATE: Final[Document] = {
    "$or": [
        {"$expr": {"$lt": ["$created_at", DatetimeMS(-(2**63))]}},
        {"$expr": {"$gt": ["$created_at", DatetimeMS(2**63 - 1)]}},
    ]
}
_PULSE = ("status", "attempts", "wake_seq", "updated_at", "progress", "tenant_id", "purging_at")


async def get(work: Work, run_ids: Sequence[str], scope: Scope) -> list[RunRecord | None]:
    """Runs by id, in order; None where the scope sees none."""
    rows = {
        row["_id"]: row
        for row in await work.find("durable_run", {"_id": {"$in": list(run_ids)}})
        if visible(row, scope)
    }
    return [run_shown(rows[run_id]) if run_id in rows else None for run_id in run_ids]


async def find(work: Work, query: RunQuery, scope: Scope) -> Page:
    """A page, newest first, and the cursor of the next one; damaged documents without an instant come last, by their ids. Raises Conflict
    for a cursor that is not ours."""
    limit = max(1, min(query.limit, PAGE_LIMIT))
    conditions = await _conditions(work, query, scope)
    created_at, run_id = (None, "") if query.cursor is None else cursor_values(query.cursor)
    rows = [] if created_at == _UNDATED else await _dated(work, conditions, created_at, run_id, limit + 1)
    dated = len(rows)
    if dated <= limit and query.since is None and query.until is None:
        after = run_id if created_at == _UNDATED else None
        rows += await _undated(work, conditions, after, limit + 1 - dated)
    runs = [run_shown(row) for row in rows[:limit]]
    if len(rows) > limit > dated:
        return Page(runs=runs, cursor=cursor_of(_UNDATED, rows[limit - 1]["_id"]))
    return page_of(runs, more=len(rows) > limit)


async def _dated(
    work: Work, conditions: Sequence[Document], created_at: Instant | None, run_id: str, most: int
) -> list[Document]:
    """Runs behind this one, newest first."""
    if created_at is None:
        beyond: Document = {"created_at": {"$type": "date"}}
    else:
        at = DatetimeMS(created_at // 1_000)
        beyond = {"$or": [{"created_at": {"$lt": at}}, {"created_at": at, "_id": {"$lt": run_id}}]}
    sort = [("created_at", -1), ("_id", -1)]
    return await work.find("durable_run", {"$and": [*conditions, beyond]}, sort=sort, limit=most)


async def _undated(work: Work, conditions: Sequence[Document], after: str | None, most: int) -> list[Document]:
    """Damaged documents whose created_at is no date: an ordinary comparison sees values of its own type only, so they are in no page of
    the others."""
    where = [*conditions, _NO_DATE, *([] if after is None else [{"_id": {"$lt": after}}])]
    return await work.find("durable_run", {"$and": where}, sort=[("_id", -1)], limit=most)


async def count(work: Work, query: RunQuery, scope: Scope) -> int:
    """How many runs the query has, whatever its limit and cursor."""
    return await work.count("durable_run", {"$and": await _conditions(work, query, scope)})


async def children(work: Work, run_id: str, scope: Scope) -> list[RunRecord]:
    """The child runs of a run, in the order of their submission."""
    where = {**await _of_parent(work, run_id, scope), "purging_at": None}
    rows = await work.find("durable_run", where, sort=[("submitted", 1), ("_id", 1)])
    return [run_shown(row) for row in rows]


async def pulse(work: Work, run_ids: Sequence[str], scope: Scope) -> list[Pulse | None]:
    """The little that waiting handles need, in order; None where the scope sees no run."""
    found = await work.find("durable_run", {"_id": {"$in": list(run_ids)}}, fields=_PULSE)
    rows = {row["_id"]: row for row in found if visible(row, scope)}
    return [
        None
        if run_id not in rows
        else Pulse(
            run_id=run_id,
            status=status_shown(rows[run_id]["status"]),
            attempts=rows[run_id]["attempts"],
            wake_seq=int(rows[run_id]["wake_seq"]),
            updated_at=instant(rows[run_id], "updated_at") or 0,
            progress=rows[run_id].get("progress"),
        )
        for run_id in run_ids
    ]


async def _of_parent(work: Work, run_id: str, scope: Scope) -> Document:
    """The filter of a run's children. They are of its tenant, which leads the index; the unbound scope asks the run for it."""
    if scope is not ALL:
        return {"parent_run_id": run_id, **of_scope(scope)}
    parent = await work.first("durable_run", {"_id": run_id}, fields=["tenant_id"])
    # The children of a purged run, seen by all tenants: a scan, since nobody knows whose they are.
    return {"parent_run_id": run_id} if parent is None else {"parent_run_id": run_id, "tenant_id": parent["tenant_id"]}


async def _conditions(work: Work, query: RunQuery, scope: Scope) -> list[Document]:
    chosen: list[Document] = [{"purging_at": None, **of_scope(scope)}]
    for field, among in (("status", query.statuses), ("name", query.names), ("queue", query.queues)):
        if among:
            chosen.append({field: {"$in": [str(one) for one in among]}})
    if query.parent_run_id is not None:
        chosen.append(await _of_parent(work, query.parent_run_id, scope))
    if query.schedule_id is not None:
        if scope is ALL:
            chosen.append({"schedule_id": {"$in": await _of_any_tenant(work, query.schedule_id), "$gt": ""}})
        else:
            chosen.append({"schedule_id": stored_id(tenant_text(scope), query.schedule_id)})
    if query.since is not None:
        chosen.append({"created_at": {"$gte": stored_not_before(query.since)}})
    if query.until is not None:
        chosen.append({"created_at": {"$lt": stored_not_before(query.until)}})
    if query.tags:
        chosen.append({"tags": {"$all": [{"k": key, "v": value} for key, value in query.tags.items()]}})
    return chosen


async def _of_any_tenant(work: Work, schedule_id: str) -> list[str]:
    """The stored form of a schedule's id for every tenant that has runs of one: a step through the index for each schedule, instead
    of one for each run."""
    found: list[str] = []
    last = ""
    while True:
        row = await work.first(
            "durable_run", {"schedule_id": {"$gt": last}}, fields=["schedule_id"], sort=[("schedule_id", 1)]
        )
        if row is None:
            return found
        last = row["schedule_id"]
        if given_key(last) == schedule_id:
            found.append(last)


__all__ = ["children", "count", "find", "get", "pulse"]
