"""Taking records out of a journal (semantics 50): what a retry forgets, so that it is done anew. The rest stays and replays.

`settle` calls `take_out` for the outcome Retry, `retry` for an operator's retry. The one place in which a record is deleted
while its run lives. Positions are left as they are, gaps included: only their order counts.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

from durable.model import Instant, RecordKind

from . import cancel

JOURNAL = "SELECT step_id, kind, position, seen FROM durable_step WHERE run_id = ?"
CHILD = "SELECT run_id, detached FROM durable_run WHERE parent_run_id = ? AND parent_step_id = ?"
DELETE = "DELETE FROM durable_step WHERE run_id = ? AND step_id IN (SELECT value FROM json_each(?))"
RENAME_CHILD = "UPDATE durable_run SET parent_step_id = ? WHERE run_id = ?"
# A journal without a record begins anew: the next claim sets the start and the replay family.
BEGIN_ANEW = "UPDATE durable_run SET started_at = NULL, replay_family = NULL WHERE run_id = ?"
NO_COMPENSATION = "UPDATE durable_run SET compensating = 0 WHERE run_id = ?"
# The run is before its pivot again. An ask that was refused is spent (46): it goes with the refusal.
NO_PIVOT = """
UPDATE durable_run SET cancel_refused_at = NULL,
    cancel_requested_at = CASE WHEN cancel_refused_at IS NULL THEN cancel_requested_at END
WHERE run_id = ?
"""


def take_out(
    con: sqlite3.Connection,
    now: Instant,
    run_id: str,
    attempts: int,
    positions: Iterable[int],
    *,
    keep_children: bool = False,
) -> int:
    """Delete the records at `positions`, every record made after the first of them was seen, and the attempt rows of all of them.

    Children whose failed end is at one of the positions, and those whose start is deleted, start anew: the old child keeps its
    row, its `parent_step_id` gets the suffix `@{attempts}`, and if it is live it is asked to stop. With `keep_children` they go
    on and only their ends are forgotten (a graph whose node is retried, 77). So do children that no step of their own started: the
    nodes of a graph. The answer: how many records are left.
    """
    rows = con.execute(JOURNAL, (run_id,)).fetchall()
    failed = set(positions)
    gone = _doomed(rows, failed)
    if not keep_children:
        ends = [
            (step_id.removesuffix(":end"), position) for step_id, kind, position, _ in rows if kind == RecordKind.CHILD
        ]
        starts = {step_id for step_id, kind, _, _ in rows if kind == RecordKind.START}
        anew = starts & gone
        anew |= {start for start, position in ends if position in failed and start in starts}
        lost = (start for start, _ in ends if f"{start}:end" in gone and start in starts)
        anew |= {start for start in lost if _child(con, run_id, start) is None}
        for start in sorted(anew):
            _part(con, now, run_id, start, attempts)
            gone |= {start, f"{start}:end"}
    gone = _with_attempts(rows, gone)
    if gone:
        con.execute(DELETE, (run_id, json.dumps(sorted(gone))))
    left = [row for row in rows if row[0] not in gone]
    _forget(con, run_id, {kind for step_id, kind, _, _ in rows if step_id in gone}, {kind for _, kind, _, _ in left})
    return len(left)


def _doomed(rows: Iterable[tuple[str, str, int | None, int]], positions: set[int]) -> set[str]:
    if not positions:
        return set()
    first = min(positions)
    return {step_id for step_id, _, position, seen in rows if position in positions or seen >= first}


def _with_attempts(rows: Iterable[tuple[str, str, int | None, int]], gone: set[str]) -> set[str]:
    """Attempt rows go and stay with the record of their step; those of a step that has none go by when they were made."""
    recorded = {step_id for step_id, kind, _, _ in rows if kind != RecordKind.ATTEMPT}
    attempts = {step_id: step_id.rpartition("@")[0] for step_id, kind, _, _ in rows if kind == RecordKind.ATTEMPT}
    going = {attempt for attempt, step in attempts.items() if (step in gone if step in recorded else attempt in gone)}
    return (gone - set(attempts)) | going


def _child(con: sqlite3.Connection, run_id: str, start: str) -> tuple[str, bool] | None:
    """The child that a step started, and whether it is detached. None: purged, so nothing would answer for it any more."""
    row: tuple[str, bool] | None = con.execute(CHILD, (run_id, start)).fetchone()
    return row


def _part(con: sqlite3.Connection, now: Instant, run_id: str, start: str, attempts: int) -> None:
    """Part a child from its parent's step, so that the step can start another."""
    child = _child(con, run_id, start)
    if child is None:
        return
    child_id, detached = child
    con.execute(RENAME_CHILD, (f"{start}@{attempts}", child_id))
    if not detached:
        cancel.ask(con, now, child_id, "its parent was retried and starts another in its place")


def _forget(con: sqlite3.Connection, run_id: str, gone: set[str], left: set[str]) -> None:
    """What the run's row says because of a record that is gone."""
    if not left:
        con.execute(BEGIN_ANEW, (run_id,))
    if RecordKind.COMPENSATION in gone - left:
        con.execute(NO_COMPENSATION, (run_id,))
    if RecordKind.PIVOT in gone - left:
        con.execute(NO_PIVOT, (run_id,))
