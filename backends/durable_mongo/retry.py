"""The operator's retry (semantics 50, 77): a run that ended, and not well, goes back to pending in one transaction.

`store.py` calls `retry`. The policy's retry is not here: that is the outcome Retry of a settle, with the same `removal.take_out`.
"""

from __future__ import annotations

from typing import Any, Final

from durable.errors import Conflict
from durable.model import ErrorKind, RecordKind, RunRecord, Scope, Status
from durable.storekit import unknown_run

from . import flow, landing, removal
from .changes import ENDED, change, only_if
from .operation import Document, Work
from .rows import belonging_to, run_record, visible
from .times import stored

OPERATOR: Final = "operator-retry"
"""Stands where the claim mark stood until the next claim: by it a repeated retry knows itself. No claim has this mark."""
RETRY_THAT: Final = "retry that one: those behind it come back with it"


async def retry(work: Work, run_id: str, scope: Scope, attempts: int, extra_attempts: int) -> RunRecord:
    """Take the run back to pending; the run as it stands then. A run that has moved on since `attempts` is returned as it is."""
    run = await _read(work, run_id)
    if run is None or not visible(run, scope):
        raise unknown_run(run_id)
    if run["attempts"] != attempts or (run["status"] == Status.PENDING and run.get("claim_token") == OPERATOR):
        return run_record(run)
    retried = [run]
    graphs: set[str] = set()
    for one in retried:  # it grows: a node may be a graph, whose nodes failed
        await _refuse(work, one)
        nodes = await _failed_nodes(work, one)
        retried += nodes
        graphs |= {one["_id"]} if nodes else set()
    back = {one["_id"] for one in retried}
    for one in retried:
        await _again(work, one, 0 if one["_id"] in graphs else extra_attempts, back)
    after = await _read(work, run_id)
    assert after is not None
    return run_record(after)


async def _again(work: Work, run: Document, extra_attempts: int, back: set[str]) -> None:
    """One run, pending again; or suspended, if it is a node that others must still come before."""
    before = await _upstream(work, run["_id"])
    dead = [on for on, status in before.items() if on not in back and status in ENDED and status != Status.COMPLETED]
    if dead:
        raise Conflict(f"run {run['_id']} waits for run {dead[0]}, which did not complete", hint=RETRY_THAT)
    open_ends = sum(status != Status.COMPLETED for status in before.values())
    status = Status.SUSPENDED if open_ends else Status.PENDING
    await removal.take_out(work, run, await _failed(work, run))
    await _revive(work, run, status, extra_attempts=extra_attempts, wake_after=open_ends)
    await _nodes_come_back(work, run)
    work.announce(f"queue:{run['queue']}")
    work.announce(f"run:{run['_id']}")


async def _upstream(work: Work, run_id: str) -> dict[str, str]:
    """The runs that a node depends on, with their states."""
    edges = await work.find("durable_dependency", belonging_to(run_id), fields=["depends_on"])
    statuses = dict.fromkeys((edge["depends_on"] for edge in edges), "")
    if statuses:
        rows = await work.find("durable_run", {"_id": {"$in": list(statuses)}}, fields=["status"])
        statuses.update((row["_id"], row["status"]) for row in rows)
    return statuses


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


# -- graphs: one that is retried, and one whose node is retried --------------------------------------------------------------


async def _nodes(work: Work, run: Document) -> list[Document]:
    """The children that no step of their own started: all nodes of a graph are written with one record of it. A child with '@' was
    parted from its parent (50)."""
    where = {"tenant_id": run["tenant_id"], "parent_run_id": run["_id"]}
    children = [one for one in await work.find("durable_run", where) if "@" not in one["parent_step_id"]]
    steps = [f"{run['_id']}/{one['parent_step_id']}" for one in children]
    starts = await work.find("durable_step", {"_id": {"$in": steps}, "kind": str(RecordKind.START)}, fields=["step_id"])
    started = {row["step_id"] for row in starts}
    nodes = [one for one in children if one["parent_step_id"] not in started and "purging_at" not in one]
    return sorted(nodes, key=lambda one: int(one["submitted"]))


async def _failed_nodes(work: Work, run: Document) -> list[Document]:
    """The nodes of a graph that ended badly by themselves: a retry of the graph is a retry of them (77). Raises Conflict where one
    was purged: its end would be waited for in vain."""
    if not run.get("has_children"):
        return []
    nodes = await _nodes(work, run)
    where = {**belonging_to(run["_id"]), "kind": {"$in": [str(RecordKind.CHILD), str(RecordKind.START)]}}
    rows = await work.find("durable_step", where, fields=["step_id", "position", "kind"])
    known = {f"{row['step_id']}:end" for row in rows if row["kind"] == RecordKind.START}
    known |= {f"{node['parent_step_id']}:end" for node in nodes}
    failed = await _failed(work, run)
    ends = [row["step_id"] for row in rows if row["kind"] == RecordKind.CHILD and row["position"] in failed]
    lost = [end for end in ends if end not in known]
    if lost:
        raise Conflict(
            f"a node of the graph {run['_id']} is not stored any more: {lost[0]}", hint="start the graph anew"
        )
    bad = [status for status in ENDED if status != Status.COMPLETED]
    return [node for node in nodes if node["status"] in bad and node.get("error_kind") != ErrorKind.UPSTREAM]


async def _nodes_come_back(work: Work, node: Document) -> None:
    """The nodes that landed because of this one wait for it again, and a graph that landed takes up its work (77)."""
    back = await _nodes_behind(work, node)
    for row, open_ends in back.values():
        await _revive(work, row, Status.SUSPENDED, wake_after=open_ends)
    if "parent_run_id" not in node or "@" in node["parent_step_id"]:
        return
    start = {"_id": f"{node['parent_run_id']}/{node['parent_step_id']}", "kind": str(RecordKind.START)}
    if await work.first("durable_step", start, fields=["_id"]) is not None:
        return  # an ordinary child
    graph = await _read(work, node["parent_run_id"])
    if graph is None or "purging_at" in graph or graph["status"] in (Status.COMPLETED, Status.RUNNING):
        return  # a running graph keeps what it has been given; it lands, and can be retried then
    steps = [row.get("parent_step_id") for row in (node, *(row for row, _ in back.values()))]
    ids = [f"{graph['_id']}/{step}:end" for step in steps]
    where = {"_id": {"$in": ids}, "kind": str(RecordKind.CHILD)}
    ends = {row["position"] for row in await work.find("durable_step", where, fields=["position"])}
    await removal.take_out(work, graph, ends | await _failed(work, graph), keep_children=True)
    if graph["status"] in ENDED:
        await _revive(work, graph, Status.PENDING)
        work.announce(f"queue:{graph['queue']}")
        work.announce(f"run:{graph['_id']}")
        await _nodes_come_back(work, graph)  # it may be a node of another one


async def _nodes_behind(work: Work, retried: Document) -> dict[str, tuple[Document, int]]:
    """Nodes that come back, with how many of those they depend on have not completed. One that also lies behind a node which
    ended badly and stays so does not come back: it could never be released."""
    back: dict[str, tuple[Document, int]] = {}
    returned = {retried["_id"]}
    look = [retried["_id"]]
    while look:
        edges = await work.find("durable_dependency", {"depends_on": look.pop()}, fields=["run_id"])
        where = {
            "_id": {"$in": [edge["run_id"] for edge in edges]},
            "parent_run_id": retried.get("parent_run_id"),
            "status": "cancelled",
            "attempts": 0,
            "error_kind": str(ErrorKind.UPSTREAM),
            "purging_at": None,
        }
        for node in await work.find("durable_run", where):
            statuses = await _upstream(work, node["_id"])
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
