"""Taking records out of a journal (semantics 50): what a retry forgets, so that it is done anew. The rest stays and replays.

`settle` calls `take_out` for the outcome Retry, `retry` for an operator's retry. The one place in which a record is deleted
while its run lives. Positions are left as they are, gaps included: only their order counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from durable.model import RecordKind

from . import cancel
from .changes import change, only_if, present
from .operation import Document, Work
from .rows import belonging_to


async def take_out(work: Work, run: Document, positions: Iterable[int], *, keep_children: bool = False) -> int:
    """Delete the records at `positions`, every record made after the first of them was seen, and the attempt rows of all of them.

    Children whose failed end is at one of the positions, and those whose start is deleted, start anew: the old child keeps its
    row, its `parent_step_id` gets the suffix `@{attempts}`, and if it is live it is asked to stop. With `keep_children` they go
    on and only their ends are forgotten (a graph whose node is retried, 77). So do children that no step of their own started: the
    nodes of a graph. The answer: how many records are left.
    """
    fields = ("step_id", "kind", "position", "seen")
    rows = await work.find("durable_step", belonging_to(run["_id"]), fields=fields)
    failed = set(positions)
    gone = _doomed(rows, failed)
    if not keep_children:
        ends = [
            (row["step_id"].removesuffix(":end"), row.get("position"))
            for row in rows
            if row["kind"] == RecordKind.CHILD
        ]
        starts = {row["step_id"] for row in rows if row["kind"] == RecordKind.START}
        ends = [(start, position) for start, position in ends if start in starts]
        anew = starts & gone | {start for start, position in ends if position in failed}
        for start, _ in ends:
            if f"{start}:end" in gone and await _child(work, run, start) is None:
                anew.add(start)
        for start in sorted(anew):
            await _part(work, run, start)
            gone |= {start, f"{start}:end"}
    gone = _with_attempts(rows, gone)
    if gone:
        ids = [row["_id"] for row in rows if row["step_id"] in gone]
        await work.remove("durable_step", {"_id": {"$in": ids}})
    left = [row for row in rows if row["step_id"] not in gone]
    taken = {row["kind"] for row in rows if row["step_id"] in gone}
    await _forget(work, run, taken, {row["kind"] for row in left})
    return len(left)


def _doomed(rows: Iterable[Document], positions: set[int]) -> set[str]:
    if not positions:
        return set()
    first = min(positions)
    return {row["step_id"] for row in rows if row.get("position") in positions or row["seen"] >= first}


def _with_attempts(rows: Sequence[Document], gone: set[str]) -> set[str]:
    """Attempt rows go and stay with the record of their step; those of a step that has none go by when they were made."""
    recorded = {row["step_id"] for row in rows if row["kind"] != RecordKind.ATTEMPT}
    attempts = {row["step_id"]: row["step_id"].rpartition("@")[0] for row in rows if row["kind"] == RecordKind.ATTEMPT}
    going = {attempt for attempt, step in attempts.items() if (step in gone if step in recorded else attempt in gone)}
    return (gone - set(attempts)) | going


async def _child(work: Work, run: Document, start: str) -> Document | None:
    """The child that a step started. None: purged, so nothing would answer for it any more."""
    where = {"tenant_id": run["tenant_id"], "parent_run_id": run["_id"], "parent_step_id": start}
    return await work.first("durable_run", where, fields=["detached"])


async def _part(work: Work, run: Document, start: str) -> None:
    """Part a child from its parent's step, so that the step can start another."""
    child = await _child(work, run, start)
    if child is None:
        return
    await work.change_one(
        "durable_run", {"_id": child["_id"]}, {"$set": {"parent_step_id": f"{start}@{run['attempts']}"}}
    )
    if not child.get("detached"):
        await cancel.ask(work, child["_id"], "its parent was retried and starts another in its place")


async def _forget(work: Work, run: Document, gone: set[str], left: set[str]) -> None:
    """What the run's row says because of a record that is gone."""
    drop: list[str] = []
    compute: dict[str, object] = {}
    if not left:
        # A journal without a record begins anew: the next claim sets the start, the next record the replay family.
        drop += ["started_at", "replay_family"]
    if RecordKind.COMPENSATION in gone - left:
        drop.append("compensating")
    if RecordKind.PIVOT in gone - left:
        # The run is before its pivot again. An ask that was refused is spent (46): it goes with the refusal.
        drop.append("cancel_refused_at")
        compute["cancel_requested_at"] = only_if(present("cancel_refused_at"), "$$REMOVE", "$cancel_requested_at")
    if drop or compute:
        await work.change_one("durable_run", {"_id": run["_id"]}, change(compute=compute, drop=drop))


__all__ = ["take_out"]
