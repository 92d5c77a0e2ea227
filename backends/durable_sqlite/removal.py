"""Taking records out of a journal (semantics 50): what a retry forgets, so that it is done anew. The rest stays and replays.

`settle` calls `take_out` for the outcome Retry, `retry` for an operator's retry. The one place in which a record is deleted
while its run lives. Positions are left as they are, gaps included: only their order counts.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

from durable.model import TERMINAL, Instant, RecordKind, Status

from . import cancel

JOURNAL = "SELECT step_id, kind, position, seen FROM durable_step WHERE run_id = ?"
CHILD = "SELECT run_id, status, detached FROM durable_run WHERE parent_run_id = ? AND parent_step_id = ?"
DELETE = "DELETE FROM durable_step WHERE run_id = ? AND step_id IN (SELECT value FROM json_each(?))"
RENAME_CHILD = "UPDATE durable_run SET parent_step_id = ? WHERE run_id = ?"
# A journal without a record begins anew: the next claim sets the start and the replay family. A pivot or a compensation counts
# for as long as its record is there.
SETTLE_RUN = """
UPDATE durable_run SET
    started_at = CASE WHEN ? THEN started_at END,
    replay_family = CASE WHEN ? THEN replay_family END,
    compensating = CASE WHEN ? THEN compensating ELSE 0 END,
    cancel_refused_at = CASE WHEN ? THEN cancel_refused_at END
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
    """Delete the records at `positions`, every record made after the first of them was seen, and the attempt rows of all of
    them. Children that failed, and those whose start is deleted, start anew: the old child keeps its row, its `parent_step_id` gets
    the suffix `@{attempts}`, and if it is live it is asked to stop. The answer: how many records are left.

    `keep_children`: the children themselves go on, only their ends are forgotten (a graph whose node is retried, 77).
    """
    rows = con.execute(JOURNAL, (run_id,)).fetchall()
    gone = _doomed(rows, set(positions))
    started = {step_id for step_id, kind, _, _ in rows if kind == RecordKind.START and step_id in gone}
    if not keep_children:
        ended = {
            step_id.removesuffix(":end") for step_id, kind, _, _ in rows if kind == RecordKind.CHILD and step_id in gone
        }
        for start in sorted(started | ended):
            if _start_anew(con, now, run_id, start, attempts, always=start in started):
                gone |= {start, f"{start}:end"}
    gone |= {
        step_id for step_id, kind, _, _ in rows if kind == RecordKind.ATTEMPT and step_id.rpartition("@")[0] in gone
    }
    if gone:
        con.execute(DELETE, (run_id, json.dumps(sorted(gone))))
    left = [row for row in rows if row[0] not in gone]
    kinds = {kind for _, kind, _, _ in left}
    recorded = any(position is not None for _, _, position, _ in left)
    con.execute(SETTLE_RUN, (recorded, bool(left), RecordKind.COMPENSATION in kinds, RecordKind.PIVOT in kinds, run_id))
    return len(left)


def _doomed(rows: Iterable[tuple[str, str, int | None, int]], positions: set[int]) -> set[str]:
    if not positions:
        return set()
    first = min(positions)
    return {step_id for step_id, _, position, seen in rows if position in positions or seen >= first}


def _start_anew(con: sqlite3.Connection, now: Instant, run_id: str, start: str, attempts: int, *, always: bool) -> bool:
    """Part a child from its parent's step, so that the step can start another. False for one that completed and whose start stays:
    its end is read again from the inbox."""
    child = con.execute(CHILD, (run_id, start)).fetchone()
    if child is None:
        return True  # purged meanwhile: nothing would ever answer for it
    child_id, status, detached = child
    if not always and (status == Status.COMPLETED or status not in TERMINAL):
        return False
    con.execute(RENAME_CHILD, (f"{start}@{attempts}", child_id))
    if not detached:
        cancel.ask(con, now, child_id, "its parent was retried and starts another in its place")
    return True
