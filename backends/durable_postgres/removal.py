"""Taking records out of a journal (semantics 50): what a retry forgets, so that it is done anew. The rest stays and replays.

`settle` calls `take_out` for the outcome Retry, `retry` for an operator's retry, both with the run locked. The one place in which a record
is deleted while its run lives. Positions are left as they are, gaps included: only their order counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from durable.model import RecordKind

from . import cancel, locks
from .operation import Ask, Operation, Row, Work, count, rows, together

JOURNAL: Final = "SELECT s.step_id, s.kind, s.position, s.seen FROM durable_step AS s WHERE s.run_id = $1"
CHILDREN: Final = """
SELECT c.parent_step_id, c.run_id, c.detached FROM durable_run AS c
WHERE c.parent_run_id = $1 AND c.parent_step_id = ANY ($2::text[]) ORDER BY c.run_id
"""
DELETE: Final = "DELETE FROM durable_step WHERE run_id = $1 AND step_id = ANY ($2::text[])"
RENAME_CHILDREN: Final = """
UPDATE durable_run AS r SET parent_step_id = c.step_id FROM unnest($1::text[], $2::text[]) AS c (run_id, step_id) WHERE r.run_id = c.run_id
"""
# A journal without a record begins anew: the next claim sets the start and the replay family.
BEGIN_ANEW: Final = "UPDATE durable_run AS r SET started_at = NULL, replay_family = NULL WHERE r.run_id = $1"
NO_COMPENSATION: Final = "UPDATE durable_run AS r SET compensating = false WHERE r.run_id = $1"
# The run is before its pivot again. An ask that was refused is spent (46): it goes with the refusal.
NO_PIVOT: Final = """
UPDATE durable_run AS r SET cancel_refused_at = NULL,
    cancel_requested_at = CASE WHEN r.cancel_refused_at IS NULL THEN r.cancel_requested_at END
WHERE r.run_id = $1
"""
_Children = dict[str, tuple[str, bool]]


def take_out(
    work: Work, run_id: str, attempts: int, positions: Iterable[int], *, keep_children: bool = False
) -> Operation[int]:
    """Delete the records at `positions`, every record made after the first of them was seen, and the attempt rows of all of them.

    Children whose failed end is at one of the positions, and those whose start is deleted, start anew: the old child keeps its
    row, its `parent_step_id` gets the suffix `@{attempts}`, and if it is live it is asked to stop. With `keep_children` they go
    on and only their ends are forgotten (a graph whose node is retried, 77). So do children that no step of their own started: the
    nodes of a graph. The answer: how many records are left.
    """
    found = yield from rows(JOURNAL, run_id)
    failed = set(positions)
    gone = _doomed(found, failed)
    if not keep_children:
        ends = [
            (step_id.removesuffix(":end"), position) for step_id, kind, position, _ in found if kind == RecordKind.CHILD
        ]
        starts = {step_id for step_id, kind, _, _ in found if kind == RecordKind.START}
        ends = [(start, position) for start, position in ends if start in starts]
        candidates = starts & gone | {start for start, _ in ends}
        children = (yield from _children(run_id, candidates)) if candidates else {}
        anew = starts & gone | {start for start, position in ends if position in failed}
        anew |= {start for start, _ in ends if f"{start}:end" in gone and start not in children}
        if anew:
            yield from _part(work, {start: children[start] for start in sorted(anew) if start in children}, attempts)
        for start in anew:
            gone |= {start, f"{start}:end"}
    gone = _with_attempts(found, gone)
    left = [row for row in found if row[0] not in gone]
    asks = [Ask(DELETE, (run_id, sorted(gone)))] if gone else []
    asks += _forget(run_id, {row[1] for row in found if row[0] in gone}, {row[1] for row in left})
    if asks:
        yield from together(*asks)
    return len(left)


def _doomed(found: Iterable[Row], positions: set[int]) -> set[str]:
    if not positions:
        return set()
    least = min(positions)
    return {step_id for step_id, _, position, seen in found if position in positions or seen >= least}


def _with_attempts(found: Sequence[Row], gone: set[str]) -> set[str]:
    """Attempt rows go and stay with the record of their step; those of a step that has none go by when they were made."""
    recorded = {step_id for step_id, kind, _, _ in found if kind != RecordKind.ATTEMPT}
    attempts = {step_id: step_id.rpartition("@")[0] for step_id, kind, _, _ in found if kind == RecordKind.ATTEMPT}
    going = {attempt for attempt, step in attempts.items() if (step in gone if step in recorded else attempt in gone)}
    return (gone - set(attempts)) | going


def _children(run_id: str, starts: Iterable[str]) -> Operation[_Children]:
    """The children that steps started, and whether they are detached. One that is purged is missing: nothing would answer for it."""
    found = yield from rows(CHILDREN, run_id, sorted(starts))
    return {step_id: (child_id, detached) for step_id, child_id, detached in found}


def _part(work: Work, children: _Children, attempts: int) -> Operation[None]:
    """Part children from their parent's steps, so that those can start others."""
    if not children:
        return
    locked = yield from locks.family(child_id for child_id, _ in children.values())
    ids = [child_id for child_id, _ in children.values()]
    yield from count(RENAME_CHILDREN, ids, [f"{start}@{attempts}" for start in children])
    attached = [child_id for child_id, detached in children.values() if not detached]
    yield from cancel.ask(work, locked, attached, "its parent was retried and starts another in its place")


def _forget(run_id: str, gone: set[str], left: set[str]) -> list[Ask]:
    """What the run's row says because of a record that is gone."""
    asks = [] if left else [Ask(BEGIN_ANEW, (run_id,))]
    asks += [Ask(NO_COMPENSATION, (run_id,))] if RecordKind.COMPENSATION in gone - left else []
    asks += [Ask(NO_PIVOT, (run_id,))] if RecordKind.PIVOT in gone - left else []
    return asks


__all__ = ["take_out"]
