"""The operator's retry (semantics 50, 77): a run that ended, and not well, goes back to pending in one transaction.

`store.py` calls `retry`. The policy's retry is not here: that is the outcome Retry of a settle, with the same `removal.take_out`.
"""

from __future__ import annotations

import json
from typing import Final

from durable.errors import Conflict
from durable.model import TERMINAL, ErrorKind, RecordKind, RunRecord, Scope, Status
from durable.storekit import unknown_run, within

from . import flow, locks, removal
from .operation import Operation, Row, Work, count, first, rows
from .rows import RUN_COLUMNS, run_record, stored_key

OPERATOR: Final = "operator-retry"
"""Stands where the claim mark stood until the next claim: by it a repeated retry knows itself. No claim has this mark."""
RETRY_THAT: Final = "retry that one: those behind it come back with it"

RUN: Final = f"SELECT {RUN_COLUMNS}, r.error_positions FROM durable_run AS r WHERE r.run_id = $1"
RECORDED_ENDS: Final = (
    "SELECT s.position FROM durable_step AS s WHERE s.run_id = $1 AND s.kind = $2 AND s.position IS NOT NULL"
)
UNDONE: Final = (
    "SELECT 1 FROM durable_step AS s WHERE s.run_id = $1 AND s.step_id >= 'undo/' AND s.step_id < 'undo0' LIMIT 1"
)
# What a cancel or an error left is cleared; a pivot whose record stays keeps its stamp. A run that was never claimed loses its
# coalesce key: it is pending with attempts = 0 again, and such a run admits nobody (36).
REVIVE: Final = """
UPDATE durable_run AS r SET status = $2, wake_after = $3, blocked_on = $4, max_attempts = r.max_attempts + $5, updated_at = now(),
    deadline_at = now() + r.deadline_length, lease_owner = $6,
    coalesce_key = CASE WHEN r.attempts > 0 THEN r.coalesce_key END,
    failures = 0, reclaims = 0, available_at = NULL, leased_until = NULL, waiting_for = NULL,
    output = NULL, error = NULL, error_kind = NULL, error_detail = NULL, error_positions = NULL,
    cancel_requested_at = NULL, cancel_reason = NULL, cancel_children = false, mismatch_since = NULL, finished_at = NULL,
    purge_at = NULL, cancel_refused_at = CASE WHEN EXISTS (
        SELECT 1 FROM durable_step AS s WHERE s.run_id = r.run_id AND s.kind = 'pivot') THEN r.cancel_refused_at END
WHERE r.run_id = $1
"""
# Nodes of the same graph behind one that comes back, which landed only for its sake.
BEHIND: Final = """
SELECT d.run_id FROM durable_dependency AS d JOIN durable_run AS r ON r.run_id = d.run_id
WHERE d.depends_on = $1 AND r.parent_run_id IS NOT DISTINCT FROM $2 AND r.status = 'cancelled' AND r.attempts = 0
    AND r.error_kind = $3
"""
# A node is a child that no step of its own started: all nodes are written with one record of the graph. With '@' it was parted (50).
_IS_NODE: Final = """
r.parent_run_id IS NOT NULL AND strpos(r.parent_step_id, '@') = 0 AND NOT EXISTS (
    SELECT 1 FROM durable_step AS s WHERE s.run_id = r.parent_run_id AND s.step_id = r.parent_step_id AND s.kind = 'start')
"""
IS_NODE: Final = f"SELECT 1 FROM durable_run AS r WHERE r.run_id = $1 AND {_IS_NODE}"
FAILED_NODES: Final = f"""
SELECT {RUN_COLUMNS}, r.error_positions FROM durable_run AS r WHERE r.parent_run_id = $1 AND {_IS_NODE}
AND r.status IN ('failed', 'cancelled', 'timed_out', 'forward_incomplete') AND r.error_kind IS DISTINCT FROM $2 ORDER BY r.submitted
"""
LOST_NODES: Final = """
SELECT s.step_id FROM durable_step AS s WHERE s.run_id = $1 AND s.kind = 'child' AND s.position = ANY ($2::integer[])
AND NOT EXISTS (SELECT 1 FROM durable_step AS b WHERE b.run_id = s.run_id AND b.step_id || ':end' = s.step_id)
AND NOT EXISTS (
    SELECT 1 FROM durable_run AS c WHERE c.parent_run_id = s.run_id AND c.parent_step_id || ':end' = s.step_id)
"""
UPSTREAM: Final = """
SELECT d.depends_on, r.status FROM durable_dependency AS d LEFT JOIN durable_run AS r ON r.run_id = d.depends_on
WHERE d.run_id = $1
"""
NODES: Final = (
    "SELECT r.run_id, r.parent_step_id, r.sequence_key FROM durable_run AS r WHERE r.run_id = ANY ($1::text[])"
)
NODE_ENDS: Final = """
SELECT s.position FROM durable_step AS s WHERE s.run_id = $1 AND s.kind = 'child' AND s.step_id = ANY ($2::text[])
"""


def retry(work: Work, run_id: str, scope: Scope, attempts: int, extra_attempts: int) -> Operation[RunRecord]:
    """Take the run back to pending; the run as it stands then. A run that has moved on since `attempts` is returned as it is."""
    yield from locks.family([run_id])
    run, positions = yield from _read(run_id)
    if run is None or not within(run.tenant, scope):
        raise unknown_run(run_id)
    if run.attempts != attempts or (run.status is Status.PENDING and run.lease_owner == OPERATOR):
        return run
    retried = [(run, positions)]
    graphs: set[str] = set()
    for one, its_positions in retried:  # it grows: a node may be a graph, whose nodes failed
        yield from _refuse(one)
        nodes = yield from _failed_nodes(one, its_positions)
        retried += nodes
        graphs |= {one.run_id} if nodes else set()
    back = {one.run_id for one, _ in retried}
    for one, its_positions in retried:
        yield from _again(work, one, its_positions, 0 if one.run_id in graphs else extra_attempts, back)
    after, _ = yield from _read(run_id)
    assert after is not None
    return after


def _again(work: Work, run: RunRecord, positions: set[int], extra_attempts: int, back: set[str]) -> Operation[None]:
    """One run, pending again; or suspended, if it is a node that others must still come before."""
    before = yield from rows(UPSTREAM, run.run_id)
    dead = [on for on, status in before if on not in back and status in TERMINAL and status != Status.COMPLETED]
    if dead:
        raise Conflict(f"run {run.run_id} waits for run {dead[0]}, which did not complete", hint=RETRY_THAT)
    open_ends = sum(status != Status.COMPLETED for _, status in before)
    status = Status.SUSPENDED if open_ends else Status.PENDING
    failed = yield from _failed(run, positions)
    yield from removal.take_out(work, run.run_id, run.attempts, failed)
    yield from _revive(work, run, status, extra_attempts=extra_attempts, wake_after=open_ends)
    yield from _nodes_come_back(work, run)
    work.announce(f"queue:{run.queue}")
    work.announce(f"run:{run.run_id}")


def _read(run_id: str) -> Operation[tuple[RunRecord | None, set[int]]]:
    row = yield from first(RUN, run_id)
    return (None, set()) if row is None else _record(row)


def _record(row: Row) -> tuple[RunRecord, set[int]]:
    return run_record(row[:-1]), set(json.loads(row[-1])) if row[-1] else set()


def _refuse(run: RunRecord) -> Operation[None]:
    if run.status not in TERMINAL:
        raise Conflict(
            f"run {run.run_id} has not ended: it is {run.status}", hint="wait for its end, or cancel it first"
        )
    if run.status is Status.COMPLETED:
        raise Conflict(f"run {run.run_id} completed", hint="fork it to do it again from some step")
    if (yield from first(UNDONE, run.run_id)) is not None:
        raise Conflict(f"run {run.run_id} has undone some of its steps", hint="fork it from the start")


def _failed(run: RunRecord, positions: set[int]) -> Operation[set[int]]:
    """The positions that its end blames: those that the error carries, and the record of the cancel or time-out itself."""
    ends = {Status.CANCELLED: RecordKind.CANCEL, Status.TIMED_OUT: RecordKind.TIMEOUT}
    if run.status not in ends:
        return positions
    found = yield from rows(RECORDED_ENDS, run.run_id, str(ends[run.status]))
    return positions | {position for (position,) in found}


def _revive(
    work: Work, run: RunRecord, status: Status, *, extra_attempts: int = 0, wake_after: int = 0
) -> Operation[None]:
    key = None if run.sequence_key is None else stored_key(run.tenant, run.sequence_key)
    waits = key is not None and bool((yield from flow.occupied(work, [key])))
    blocked_on = flow.SEQUENCE if waits else None
    yield from count(REVIVE, run.run_id, str(status), wake_after, blocked_on, extra_attempts, OPERATOR)


# -- graphs: one that is retried, and one whose node is retried --------------------------------------------------------------


def _failed_nodes(run: RunRecord, positions: set[int]) -> Operation[list[tuple[RunRecord, set[int]]]]:
    """The nodes of a graph that ended badly by themselves, with the positions that their errors carry: a retry of the graph is a retry
    of them (77). Raises Conflict where one was purged: its end would be waited for in vain."""
    lost = yield from first(LOST_NODES, run.run_id, sorted(positions))
    if lost is not None:
        raise Conflict(
            f"a node of the graph {run.run_id} is not stored any more: {lost[0]}", hint="start the graph anew"
        )
    found = yield from rows(FAILED_NODES, run.run_id, str(ErrorKind.UPSTREAM))
    if found:
        yield from locks.family(str(row[0]) for row in found)
        found = yield from rows(FAILED_NODES, run.run_id, str(ErrorKind.UPSTREAM))
    return [_record(row) for row in found]


def _nodes_come_back(work: Work, node: RunRecord) -> Operation[None]:
    """The nodes that landed because of this one wait for it again, and a graph that landed takes up its work (77)."""
    back = yield from _nodes_behind(node)
    for run_id, open_ends in back.items():
        run, _ = yield from _read(run_id)
        assert run is not None
        yield from _revive(work, run, Status.SUSPENDED, wake_after=open_ends)
    if node.parent_run_id is None or (yield from first(IS_NODE, node.run_id)) is None:
        return
    graph, positions = yield from _read(node.parent_run_id)
    if graph is None or graph.status in (Status.COMPLETED, Status.RUNNING):
        return  # a running graph keeps what it has been given; it lands, and can be retried then
    found = yield from rows(NODES, [node.run_id, *back])
    ends = yield from rows(NODE_ENDS, graph.run_id, [f"{step}:end" for _, step, _ in found])
    forgotten = {position for (position,) in ends} | (yield from _failed(graph, positions))
    yield from removal.take_out(work, graph.run_id, graph.attempts, forgotten, keep_children=True)
    if graph.status in TERMINAL:
        yield from _revive(work, graph, Status.PENDING)
        work.announce(f"queue:{graph.queue}")
        work.announce(f"run:{graph.run_id}")
        yield from locks.family([graph.run_id])
        yield from _nodes_come_back(work, graph)  # it may be a node of another one


def _nodes_behind(node: RunRecord) -> Operation[dict[str, int]]:
    """Nodes that come back, with how many of those they depend on have not completed. One that also lies behind a node which
    ended badly and stays so does not come back: it could never be released."""
    back: dict[str, int] = {}
    returned = {node.run_id}
    look = [node.run_id]
    while look:
        behind = yield from rows(BEHIND, look.pop(), node.parent_run_id, str(ErrorKind.UPSTREAM))
        yield from locks.alone(run_id for (run_id,) in behind)
        for (run_id,) in behind:
            edges = yield from rows(UPSTREAM, run_id)
            dead = [
                on for on, status in edges if on not in returned and status in TERMINAL and status != Status.COMPLETED
            ]
            if run_id not in back and not dead:
                back[run_id] = sum(status != Status.COMPLETED for _, status in edges)
                returned.add(run_id)
                look.append(run_id)
    return back


__all__ = ["OPERATOR", "retry"]
