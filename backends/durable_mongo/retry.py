"""The operator's retry (semantics 50, 77): a run that ended, and not well, goes back to pending in one transaction.

`store.py` calls `retry`. The policy's retry is not here: that is the outcome Retry of a settle, with the same `removal.take_out`.
"""

from __future__ import annotations

from typing import Any, Final

from durable.errors import Conflict, NotFound
from durable.model import ErrorKind, RecordKind, RunRecord, Scope, Status

from . import flow, landing, removal
from .changes import ENDED, change, only_if
from .operation import Document, Work
from .rows import belonging_to, run_record, visible
from .times import stored

OPERATOR: Final = "operator-retry"
"""Stands where the claim mark stood until the next claim: by it a repeated retry knows itself. No claim has this mark."""


async def retry(work: Work, run_id: str, scope: Scope, attempts: int, extra_attempts: int) -> RunRecord:
    """Take the run back to pending; the run as it stands then. A run that has moved on since `attempts` is returned as it is."""
    run = await _read(work, run_id)
    if run is None or not visible(run, scope):
        raise NotFound(f"there is no run {run_id}")
    if run["attempts"] != attempts or (run["status"] == Status.PENDING and run.get("claim_token") == OPERATOR):
        return run_record(run)
    await _refuse(work, run)
    await removal.take_out(work, run, await _failed(work, run))
    await _revive(work, run, Status.PENDING, extra_attempts=extra_attempts)
    if await work.first("durable_dependency", {"$or": [belonging_to(run_id), {"depends_on": run_id}]}, fields=["_id"]):
        await _graph_goes_on(work, run)
    work.announce(f"queue:{run['queue']}")
    work.announce(f"run:{run_id}")
    after = await _read(work, run_id)
    assert after is not None
    return run_record(after)


async def _read(work: Work, run_id: str) -> Document | None:
    return await work.first("durable_run", {"_id": run_id})


async def _refuse(work: Work, run: Document) -> None:
    run_id, status = run["_id"], run["status"]
    if status not in ENDED:
        raise Conflict(f"run {run_id} has not ended: it is {status}", hint="wait for its end, or cancel it first")
    if status == Status.COMPLETED:
        raise Conflict(f"run {run_id} completed", hint="fork it to do it again from some step")
    undone = {"_id": {"$gte": f"{run_id}/undo/", "$lt": f"{run_id}/undo0"}}
    if await work.first("durable_step", undone, fields=["_id"]) is not None:
        raise Conflict(f"run {run_id} has undone some of its steps", hint="fork it from the start")


async def _failed(work: Work, run: Document) -> set[int]:
    """The positions that its end blames: those that the error carries, and the record of the cancel or time-out itself."""
    positions = set(run.get("error_positions", ()))
    kind = {Status.CANCELLED: RecordKind.CANCEL, Status.TIMED_OUT: RecordKind.TIMEOUT}.get(Status(run["status"]))
    if kind is not None:
        where = {**belonging_to(run["_id"]), "kind": str(kind), "position": {"$gte": 0}}
        positions |= {row["position"] for row in await work.find("durable_step", where, fields=["position"])}
    return positions


async def _revive(work: Work, run: Document, status: Status, *, extra_attempts: int = 0, wake_after: int = 0) -> None:
    # What a cancel or an error left is cleared; a pivot whose record stays keeps its stamp. A run that was never claimed loses its
    # coalesce key: it is pending with attempts = 0 again, and such a run admits nobody (36).
    pivot = {**belonging_to(run["_id"]), "kind": str(RecordKind.PIVOT)}
    past_pivot = await work.first("durable_step", pivot, fields=["_id"]) is not None
    put: dict[str, Any] = {
        "status": str(status),
        "claim_token": OPERATOR,
        "updated_at": stored(work.now),
        "failures": 0,
        "reclaims": 0,
        "wake_after": wake_after or None,
        "blocked_on": None,
    }
    compute: dict[str, Any] = {"coalesce_key": only_if({"$gt": ["$attempts", 0]}, "$coalesce_key")}
    key = run.get("sequence_key")
    if key is not None:
        await landing.take_turns(work, [key])
        put["line"] = key
        put["blocked_on"] = flow.SEQUENCE if await flow.head_of(work, key) is not None else None
    if "deadline_length" in run:
        put["deadline_at"] = stored(work.now + run["deadline_length"])
    if extra_attempts and "max_attempts" in run:
        put["max_attempts"] = run["max_attempts"] + extra_attempts
    drop = [
        *(
            "available_at",
            "release_at",
            "leased_until",
            "mark",
            "waiting_for",
            "output",
            "error",
            "error_kind",
            "error_detail",
        ),
        *(
            "error_positions",
            "cancel_requested_at",
            "cancel_reason",
            "cancel_children",
            "mismatch_since",
            "finished_at",
            "purge_at",
        ),
        *([] if past_pivot else ["cancel_refused_at"]),
    ]
    await work.change_one("durable_run", {"_id": run["_id"]}, change(put=put, compute=compute, drop=drop))


# -- the graph that a retried run is a node of -------------------------------------------------------------------------------


async def _graph_goes_on(work: Work, node: Document) -> None:
    """The nodes that landed because of this one wait for it again, and a graph that landed takes up its work (77)."""
    back = await _nodes_behind(work, node["_id"])
    for row, open_ends in back.values():
        await _revive(work, row, Status.SUSPENDED, wake_after=open_ends)
    if "parent_run_id" not in node:
        return
    graph = await _read(work, node["parent_run_id"])
    if graph is None or "purging_at" in graph or graph["status"] in (Status.COMPLETED, Status.RUNNING):
        return  # a running graph keeps what it has been given; it lands, and can be retried then
    steps = [row.get("parent_step_id") for row in (node, *(row for row, _ in back.values()))]
    ids = [f"{graph['_id']}/{step}:end" for step in steps]
    where = {"_id": {"$in": ids}, "kind": str(RecordKind.CHILD)}
    ends = {row["position"] for row in await work.find("durable_step", where, fields=["position"])}
    await removal.take_out(work, graph, ends, keep_children=True)
    if graph["status"] in ENDED:
        await _revive(work, graph, Status.PENDING)
        work.announce(f"queue:{graph['queue']}")
        work.announce(f"run:{graph['_id']}")


async def _nodes_behind(work: Work, run_id: str) -> dict[str, tuple[Document, int]]:
    """Nodes that come back, with how many of those they depend on have not completed. One that also lies behind a node which
    ended badly and stays so does not come back: it could never be released."""
    back: dict[str, tuple[Document, int]] = {}
    returned = {run_id}
    look = [run_id]
    while look:
        edges = await work.find("durable_dependency", {"depends_on": look.pop()}, fields=["run_id"])
        where = {
            "_id": {"$in": [edge["run_id"] for edge in edges]},
            "status": "cancelled",
            "attempts": 0,
            "error_kind": str(ErrorKind.UPSTREAM),
            "purging_at": None,
        }
        for node in await work.find("durable_run", where):
            before = await work.find("durable_dependency", belonging_to(node["_id"]), fields=["depends_on"])
            ids = [edge["depends_on"] for edge in before]
            statuses = dict.fromkeys(ids, "")
            rows = await work.find("durable_run", {"_id": {"$in": ids}}, fields=["status"])
            statuses.update((row["_id"], row["status"]) for row in rows)
            dead = [
                on
                for on, status in statuses.items()
                if on not in returned and status in ENDED and status != Status.COMPLETED
            ]
            if node["_id"] not in back and not dead:
                back[node["_id"]] = node, sum(status != Status.COMPLETED for status in statuses.values())
                returned.add(node["_id"])
                look.append(node["_id"])
    return back


__all__ = ["OPERATOR", "retry"]
