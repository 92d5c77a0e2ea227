"""The operator's retry (semantics 50, 77): a run that ended, and not well, goes back to pending in one write.

`store.py` calls `retry`. The policy's retry is not here: that is the outcome Retry of a settle, with the same `removal.take_out`.
"""

from __future__ import annotations

import json
import sqlite3

from durable.errors import Conflict
from durable.model import TERMINAL, ErrorKind, Instant, RecordKind, RunRecord, Scope, Status
from durable.storekit import unknown_run, within

from . import flow, removal
from .connection import announce
from .rows import RUN_COLUMNS, run_record

OPERATOR = "operator-retry"
"""Stands where the claim mark stood until the next claim: by it a repeated retry knows itself. No claim has this mark."""
RETRY_THAT = "retry that one: those behind it come back with it"

RUN = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE run_id = ?"
POSITIONS = "SELECT error_positions FROM durable_run WHERE run_id = ?"
RECORDED_ENDS = "SELECT position FROM durable_step WHERE run_id = ? AND kind = ? AND position IS NOT NULL"
UNDONE = "SELECT 1 FROM durable_step WHERE run_id = ? AND step_id >= 'undo/' AND step_id < 'undo0' LIMIT 1"
# What a cancel or an error left is cleared; a pivot whose record stays keeps its stamp. A run that was never claimed loses its
# coalesce key: it is pending with attempts = 0 again, and such a run admits nobody (36).
REVIVE = """
UPDATE durable_run SET status = ?, wake_after = ?, blocked_on = ?, max_attempts = max_attempts + ?, updated_at = ?,
    deadline_at = ? + deadline_length, lease_owner = ?,
    coalesce_key = CASE WHEN attempts > 0 THEN coalesce_key END,
    failures = 0, reclaims = 0, available_at = NULL, leased_until = NULL, waiting_for = NULL,
    output = NULL, error = NULL, error_kind = NULL, error_detail = NULL, error_positions = NULL,
    cancel_requested_at = NULL, cancel_reason = NULL, cancel_children = 0, mismatch_since = NULL, finished_at = NULL,
    purge_at = NULL, cancel_refused_at = CASE WHEN EXISTS (
        SELECT 1 FROM durable_step AS s WHERE s.run_id = durable_run.run_id AND s.kind = 'pivot') THEN cancel_refused_at END
WHERE run_id = ?
"""
# Nodes of the same graph behind one that comes back, which landed only for its sake.
BEHIND = """
SELECT d.run_id FROM durable_dependency AS d JOIN durable_run AS r ON r.run_id = d.run_id
WHERE d.depends_on = ? AND r.parent_run_id IS ? AND r.status = 'cancelled' AND r.attempts = 0 AND r.error_kind = ?
"""
# A node is a child that no step of its own started: all nodes are written with one record of the graph. With '@' it was parted (50).
_IS_NODE = """
c.parent_run_id IS NOT NULL AND instr(c.parent_step_id, '@') = 0 AND NOT EXISTS (
    SELECT 1 FROM durable_step AS s WHERE s.run_id = c.parent_run_id AND s.step_id = c.parent_step_id AND s.kind = 'start')
"""
IS_NODE = f"SELECT 1 FROM durable_run AS c WHERE c.run_id = ? AND {_IS_NODE}"
FAILED_NODES = f"""
SELECT {RUN_COLUMNS} FROM durable_run AS c WHERE c.parent_run_id = ? AND {_IS_NODE}
AND c.status IN ('failed', 'cancelled', 'timed_out', 'forward_incomplete') AND c.error_kind IS NOT ? ORDER BY c.submitted
"""
LOST_NODES = """
SELECT s.step_id FROM durable_step AS s WHERE s.run_id = ? AND s.kind = 'child' AND s.position IN (SELECT value FROM json_each(?))
AND NOT EXISTS (SELECT 1 FROM durable_step AS b WHERE b.run_id = s.run_id AND b.step_id || ':end' = s.step_id)
AND NOT EXISTS (
    SELECT 1 FROM durable_run AS c WHERE c.parent_run_id = s.run_id AND c.parent_step_id || ':end' = s.step_id)
"""
UPSTREAM = """
SELECT d.depends_on, r.status FROM durable_dependency AS d LEFT JOIN durable_run AS r ON r.run_id = d.depends_on
WHERE d.run_id = ?
"""
NODE = "SELECT parent_step_id, sequence_key FROM durable_run WHERE run_id = ?"
NODE_ENDS = """
SELECT position FROM durable_step WHERE run_id = ? AND kind = 'child' AND step_id IN (SELECT value FROM json_each(?))
"""


def retry(
    con: sqlite3.Connection, now: Instant, run_id: str, scope: Scope, attempts: int, extra_attempts: int
) -> RunRecord:
    """Take the run back to pending; the run as it stands then. A run that has moved on since `attempts` is returned as it is."""
    run = _read(con, run_id)
    if run is None or not within(run.tenant, scope):
        raise unknown_run(run_id)
    if run.attempts != attempts or (run.status is Status.PENDING and run.lease_owner == OPERATOR):
        return run
    retried = [run]
    graphs: set[str] = set()
    for one in retried:  # it grows: a node may be a graph, whose nodes failed
        _refuse(con, one)
        nodes = _failed_nodes(con, one)
        retried += nodes
        graphs |= {one.run_id} if nodes else set()
    back = {one.run_id for one in retried}
    for one in retried:
        _again(con, now, one, 0 if one.run_id in graphs else extra_attempts, back)
    after = _read(con, run_id)
    assert after is not None
    return after


def _again(con: sqlite3.Connection, now: Instant, run: RunRecord, extra_attempts: int, back: set[str]) -> None:
    """One run, pending again; or suspended, if it is a node that others must still come before."""
    before = con.execute(UPSTREAM, (run.run_id,)).fetchall()
    dead = [on for on, status in before if on not in back and status in TERMINAL and status != Status.COMPLETED]
    if dead:
        raise Conflict(f"run {run.run_id} waits for run {dead[0]}, which did not complete", hint=RETRY_THAT)
    open_ends = sum(status != Status.COMPLETED for _, status in before)
    status = Status.SUSPENDED if open_ends else Status.PENDING
    removal.take_out(con, now, run.run_id, run.attempts, _failed(con, run))
    _revive(con, now, run.run_id, status, extra_attempts=extra_attempts, wake_after=open_ends)
    _nodes_come_back(con, now, run)
    announce(con, f"queue:{run.queue}")
    announce(con, f"run:{run.run_id}")


def _read(con: sqlite3.Connection, run_id: str) -> RunRecord | None:
    row = con.execute(RUN, (run_id,)).fetchone()
    return None if row is None else run_record(row)


def _refuse(con: sqlite3.Connection, run: RunRecord) -> None:
    if run.status not in TERMINAL:
        raise Conflict(
            f"run {run.run_id} has not ended: it is {run.status}", hint="wait for its end, or cancel it first"
        )
    if run.status is Status.COMPLETED:
        raise Conflict(f"run {run.run_id} completed", hint="fork it to do it again from some step")
    if con.execute(UNDONE, (run.run_id,)).fetchone() is not None:
        raise Conflict(f"run {run.run_id} has undone some of its steps", hint="fork it from the start")


def _failed(con: sqlite3.Connection, run: RunRecord) -> set[int]:
    """The positions that its end blames: those that the error carries, and the record of the cancel or time-out itself."""
    (text,) = con.execute(POSITIONS, (run.run_id,)).fetchone()
    positions: set[int] = set(json.loads(text)) if text else set()
    ends = {Status.CANCELLED: RecordKind.CANCEL, Status.TIMED_OUT: RecordKind.TIMEOUT}
    if run.status in ends:
        positions |= {position for (position,) in con.execute(RECORDED_ENDS, (run.run_id, ends[run.status]))}
    return positions


def _revive(
    con: sqlite3.Connection, now: Instant, run_id: str, status: Status, *, extra_attempts: int = 0, wake_after: int = 0
) -> None:
    _, sequence_key = con.execute(NODE, (run_id,)).fetchone()
    blocked_on = flow.SEQUENCE if flow.must_wait(con, sequence_key) else None
    con.execute(REVIVE, (status, wake_after, blocked_on, extra_attempts, now, now, OPERATOR, run_id))


# -- graphs: one that is retried, and one whose node is retried --------------------------------------------------------------


def _failed_nodes(con: sqlite3.Connection, run: RunRecord) -> list[RunRecord]:
    """The nodes of a graph that ended badly by themselves: a retry of the graph is a retry of them (77). Raises Conflict where one
    was purged: its end would be waited for in vain."""
    lost = con.execute(LOST_NODES, (run.run_id, json.dumps(sorted(_failed(con, run))))).fetchone()
    if lost is not None:
        raise Conflict(
            f"a node of the graph {run.run_id} is not stored any more: {lost[0]}", hint="start the graph anew"
        )
    return [run_record(row) for row in con.execute(FAILED_NODES, (run.run_id, ErrorKind.UPSTREAM)).fetchall()]


def _nodes_come_back(con: sqlite3.Connection, now: Instant, node: RunRecord) -> None:
    """The nodes that landed because of this one wait for it again, and a graph that landed takes up its work (77)."""
    back = _nodes_behind(con, node)
    for run_id, open_ends in back.items():
        _revive(con, now, run_id, Status.SUSPENDED, wake_after=open_ends)
    if node.parent_run_id is None or con.execute(IS_NODE, (node.run_id,)).fetchone() is None:
        return
    graph = _read(con, node.parent_run_id)
    if graph is None or graph.status in (Status.COMPLETED, Status.RUNNING):
        return  # a running graph keeps what it has been given; it lands, and can be retried then
    steps = [con.execute(NODE, (run_id,)).fetchone()[0] for run_id in (node.run_id, *back)]
    ends = con.execute(NODE_ENDS, (graph.run_id, json.dumps([f"{step}:end" for step in steps]))).fetchall()
    forgotten = {position for (position,) in ends} | _failed(con, graph)
    removal.take_out(con, now, graph.run_id, graph.attempts, forgotten, keep_children=True)
    if graph.status in TERMINAL:
        _revive(con, now, graph.run_id, Status.PENDING)
        announce(con, f"queue:{graph.queue}")
        announce(con, f"run:{graph.run_id}")
        _nodes_come_back(con, now, graph)  # it may be a node of another one


def _nodes_behind(con: sqlite3.Connection, node: RunRecord) -> dict[str, int]:
    """Nodes that come back, with how many of those they depend on have not completed. One that also lies behind a node which
    ended badly and stays so does not come back: it could never be released."""
    back: dict[str, int] = {}
    returned = {node.run_id}
    look = [node.run_id]
    while look:
        for (run_id,) in con.execute(BEHIND, (look.pop(), node.parent_run_id, ErrorKind.UPSTREAM)).fetchall():
            edges = con.execute(UPSTREAM, (run_id,)).fetchall()
            dead = [
                on for on, status in edges if on not in returned and status in TERMINAL and status != Status.COMPLETED
            ]
            if run_id not in back and not dead:
                back[run_id] = sum(status != Status.COMPLETED for _, status in edges)
                returned.add(run_id)
                look.append(run_id)
    return back
