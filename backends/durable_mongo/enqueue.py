"""Submitting runs: idempotency, coalescing, sequences, children and graphs (semantics 34 to 42, 75, 77).

`store.py` calls `enqueue` in a transaction or on a caller's session, and `enqueue_fresh` for what is most frequent; the journal calls
`enqueue` for the children of a record, schedules for the runs of a slot. Everything is read and decided before the first write: a
refusal leaves a caller's transaction as it was. It announces ready queues and wakes nobody otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pymongo.errors import PyMongoError

from durable import enqueue as shared
from durable.enqueue import KEY_LENGTH, asked_start, check_function, check_keys, join_key, joined_start
from durable.errors import Conflict, NotFound
from durable.landing import Ending, behind
from durable.model import Disposition, Instant, NewRun, Status, Submitted

from . import faults, landing
from .changes import ENDED, READY
from .operation import Change, Document, Where, Work
from .rows import dated, instant, route, run_record, stored_key, tenant_text
from .times import cut, cut_up, stored, stored_not_before


class Purging(Exception):
    """A run of that id or key is being purged: to be finished first, then the submit finds it free."""

    def __init__(self, run_ids: Sequence[str]) -> None:
        super().__init__(*run_ids)
        self.run_ids = run_ids


class Taken(Exception):
    """An insert without a look met an id or a key that is there."""


def is_fresh(runs: Sequence[NewRun]) -> bool:
    """Whether nothing but the keys of these runs can be in the way: no join, no parent, no line, no graph."""
    return all(
        run.coalesce_key is None and run.parent_run_id is None and run.sequence_key is None and not run.depends_on
        for run in runs
    )


async def enqueue_fresh(work: Work, runs: Sequence[NewRun]) -> list[Submitted]:
    """Insert without looking first. Raises Taken where something is there already: then `enqueue` looks."""
    first = work.clock.order(len(runs))
    documents: list[Document] = []
    keys: list[Document] = []
    for number, run in enumerate(runs):
        check(run)
        deadline_at = _earliest(_own_deadlines(work.now, run))
        documents.append(_document(work.now, run, first + number, deadline_at))
        keys += _key_rows(run)
    try:
        # Keys first: a create and a join of one key meet in this collection (35).
        await work.insert("durable_key", keys)
        await work.insert("durable_run", documents)
    except PyMongoError as error:
        if faults.duplicate(error):
            raise Taken from error
        raise
    for document in documents:
        if document.get("ready"):
            work.announce(f"queue:{document['queue']}")
    return [Submitted(run=run_record(document), disposition="created") for document in documents]


async def enqueue(work: Work, runs: Sequence[NewRun]) -> list[Submitted]:
    """One answer per run, in order; all or none. Raises Conflict or NotFound before anything is written."""
    for run in runs:
        check(run)
    batch = _Batch(work, runs)
    await batch.look()
    answers = [batch.one(run) for run in runs]
    await batch.apply()
    if batch.lost:
        await landing.land(work, batch.lost)
        ids = [ending.run_id for ending in batch.lost]
        landed = {row["_id"]: run_record(row) for row in await work.find("durable_run", {"_id": {"$in": ids}})}
        answers = [
            Submitted(run=landed.get(answer.run.run_id, answer.run), disposition=answer.disposition)
            for answer in answers
        ]
    return answers


def effective_start(now: Instant, start: Instant | None, deadline_at: Instant | None) -> Instant | None:
    """See `durable.enqueue.effective_start`; a start is stored no earlier than it was asked for."""
    return shared.effective_start(now, None if start is None else cut_up(start), deadline_at)


class _Batch:
    """The runs of one call: looked up together, decided in order, written together."""

    def __init__(self, work: Work, runs: Sequence[NewRun]) -> None:
        self.work = work
        self.now = work.now
        self.runs = runs
        self.ids = {run.run_id for run in runs}
        self.known: dict[str, Document] = {}
        self.keys: dict[str, str] = {}
        self.waiting: dict[str, Document] = {}
        """Runs that a submit of the same stored coalesce key joins."""
        self.lines: dict[str, bool] = {}
        """Stored sequence keys, and whether somebody is in line."""
        self.last: dict[str, int] = {}
        """The newest `submitted` that each of these lines has seen: whoever joins comes after it, whatever two clocks say (75)."""
        self.created: dict[str, Document] = {}
        self.joined: dict[str, Document] = {}
        self.new_keys: list[Document] = []
        self.edges: list[Document] = []
        self.lost: list[Ending] = []
        self.touched: dict[str, set[str]] = {}
        """Runs that are there and that this submit counts on: written too, so that they do not end meanwhile unseen."""
        self.next_order = work.clock.order(len(runs))

    # -- looking up --------------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Read all that a decision may need."""
        work, runs = self.work, self.runs
        wanted = set(self.ids)
        for run in runs:
            wanted.update(edge.run_id for edge in run.depends_on)
            if run.parent_run_id is not None:
                wanted.add(run.parent_run_id)
        keys = [stored_key(run.tenant, run.idempotency_key) for run in runs if run.idempotency_key is not None]
        keys += [join_key(run) for run in runs if run.coalesce_key is not None]
        if keys:
            rows = await work.find("durable_key", {"_id": {"$in": sorted(set(keys))}})
            self.keys = {row["_id"]: row["run_id"] for row in rows}
            wanted.update(self.keys.values())
        rows = await work.find("durable_run", {"_id": {"$in": sorted(wanted)}})
        going = [row["_id"] for row in rows if "purging_at" in row]
        self.known = {row["_id"]: row for row in rows if "purging_at" not in row}
        blocking = [run_id for run_id in going if run_id in self.ids or run_id in self.keys.values()]
        if blocking:
            raise Purging(blocking)
        await self._look_for_waiting()
        await self._look_at_lines()

    async def _look_for_waiting(self) -> None:
        by_tenant: dict[str, set[str]] = {}
        for run in self.runs:
            if run.coalesce_key is not None:
                by_tenant.setdefault(tenant_text(run.tenant), set()).add(stored_key(run.tenant, run.coalesce_key))
        for tenant_id, keys in sorted(by_tenant.items()):
            where = {
                "tenant_id": tenant_id,
                "coalesce_key": {"$in": sorted(keys), "$gt": ""},
                "status": "pending",
                "attempts": 0,
            }
            for row in await self.work.find("durable_run", where):
                self.waiting[row["coalesce_key"]] = self.known.setdefault(row["_id"], row)

    async def _look_at_lines(self) -> None:
        keys = sorted({stored_key(run.tenant, run.sequence_key) for run in self.runs if run.sequence_key is not None})
        if keys:
            rows = await self.work.find("durable_permit", {"_id": {"$in": keys}}, fields=["last"])
            self.last = {row["_id"]: int(row.get("last", 0)) for row in rows}
        for key in keys:
            self.lines[key] = await self.work.first("durable_run", {"line": key}, fields=["_id"]) is not None

    # -- one run -----------------------------------------------------------------------------------------------------------

    def one(self, run: NewRun) -> Submitted:
        """The run that the caller now waits for, and what happened."""
        row, disposition = self._one(run)
        return Submitted(run=run_record(row), disposition=disposition)

    def _one(self, run: NewRun) -> tuple[Document, Disposition]:
        known = self.known.get(run.run_id)
        if known is not None:
            if known["name"] != run.name or known["tenant_id"] != tenant_text(run.tenant):
                raise Conflict(f"the run id {run.run_id} belongs to another run", hint="let the SDK make the id")
            return known, "existing"
        key = None
        if run.idempotency_key is not None:
            key = stored_key(run.tenant, run.idempotency_key)
            holder = self.keys.get(key)
            if holder is not None:
                return self._existing(run, self.known[holder], "idempotency", run.idempotency_key), "existing"
        if run.coalesce_key is not None:
            joined = self._coalesce(run, key)
            if joined is not None:
                return joined, "coalesced"
        return self._create(run, key), "created"

    def _existing(self, run: NewRun, found: Document, what: str, key: str) -> Document:
        check_function(run, found["name"], what, key)
        return found

    def _coalesce(self, run: NewRun, key: str | None) -> Document | None:
        assert run.coalesce_key is not None
        before = self.keys.get(join_key(run))
        if before is not None:  # this very submit joined already and its answer was lost (42)
            return self.known[before]
        waiting = self.waiting.get(stored_key(run.tenant, run.coalesce_key))
        if waiting is None:
            return None
        self._existing(run, waiting, "coalesce", run.coalesce_key)
        standing = instant(waiting, "available_at")
        standing = instant(waiting, "release_at") if standing is None else standing
        created_at = instant(waiting, "created_at") or 0
        wanted = joined_start(self.now, run, created_at=created_at, available_at=standing)
        available_at = effective_start(self.now, wanted, instant(waiting, "deadline_at"))
        waiting.pop("available_at", None)
        if available_at is not None:
            waiting["available_at"] = stored(available_at)
        waiting["priority"] = max(waiting["priority"], run.priority)
        waiting["updated_at"] = stored(self.now)
        if run.on_coalesce == "replace":
            waiting["input"] = run.input
        _mark_ready(waiting)
        if waiting["_id"] not in self.created:
            self.joined[waiting["_id"]] = waiting
        for one in [join_key(run)] if key is None else [join_key(run), key]:
            self.keys[one] = waiting["_id"]
            self.new_keys.append(_key_row(one, waiting["_id"], waiting["tenant_id"]))
        return waiting

    def _create(self, run: NewRun, key: str | None) -> Document:
        left = self._dependencies(run)
        document = _document(self.now, run, self.next_order, self._deadline(run), wake_after=left)
        self.next_order += 1
        if run.sequence_key is not None:
            line = stored_key(run.tenant, run.sequence_key)
            document["submitted"] = max(document["submitted"], self.last.get(line, 0) + 1)
            self.last[line] = document["submitted"]
            if self.lines[line]:
                document["blocked_on"] = "sequence"
                _mark_ready(document)
            self.lines[line] = True
        if key is not None:
            self.keys[key] = run.run_id
        self.new_keys += _key_rows(run)
        if "coalesce_key" in document and document["status"] == Status.PENDING:
            self.waiting[document["coalesce_key"]] = document
        self.known[run.run_id] = self.created[run.run_id] = document
        return document

    def _deadline(self, run: NewRun) -> Instant | None:
        candidates = _own_deadlines(self.now, run)
        parent = None if run.parent_run_id is None else self.known.get(run.parent_run_id)
        if parent is not None:
            if parent["tenant_id"] != tenant_text(run.tenant):
                raise NotFound(
                    f"there is no run {run.parent_run_id} to be the parent", hint="a child is of its parent's tenant"
                )
            marks = self.touched.setdefault(parent["_id"], set())
            marks.add("has_children")
            if not run.detached:
                deadline_at = instant(parent, "deadline_at")
                candidates += [] if deadline_at is None else [deadline_at]
                if parent["status"] in ENDED and parent["status"] != Status.COMPLETED:
                    marks.add("cancel_children")
        return _earliest(candidates)

    def _dependencies(self, run: NewRun) -> int:
        """Note the edges; the answer: how many of the runs before it have not completed (77)."""
        left = 0
        for edge in run.depends_on:
            before = self.known.get(edge.run_id)
            if before is None and edge.kind == "end" and edge.run_id not in self.ids:
                left += 1
                self.lost.append(behind(run.run_id, edge.run_id))
                continue
            if edge.run_id == run.run_id or (before is None and edge.run_id not in self.ids):
                raise NotFound(
                    f"there is no run {edge.run_id} for {run.run_id} to depend on", hint="submit a graph as one batch"
                )
            if before is not None and before["tenant_id"] != tenant_text(run.tenant):
                raise NotFound(
                    f"there is no run {edge.run_id} for {run.run_id} to depend on", hint="a graph is of one tenant"
                )
            self.edges.append(
                {
                    "_id": f"{run.run_id}/{edge.run_id}",
                    "run_id": run.run_id,
                    "depends_on": edge.run_id,
                    "tenant_id": tenant_text(run.tenant),
                    "position": edge.position,
                    "kind": edge.kind,
                }
            )
            self.touched.setdefault(edge.run_id, set()).update(("has_dependents", "linked"))
            left += before is None or before["status"] != Status.COMPLETED
            if before is not None and before["status"] in ENDED and before["status"] != Status.COMPLETED:
                self.lost.append(behind(run.run_id, edge.run_id))
        return left

    # -- writing -----------------------------------------------------------------------------------------------------------

    async def apply(self) -> None:
        """Write it all. Rows in the order of their keys, so that two batches meet in one order (40)."""
        work = self.work
        if self.lines:
            await landing.take_turns(work, self.lines, self.last)
        for run_id, marks in self.touched.items():
            if run_id in self.created:
                self.created[run_id].update(dict.fromkeys([*marks, "linked"], True))
        changes: list[tuple[Where, Change]] = [
            ({"_id": run_id}, {"$inc": {"touched": 1}, "$set": dict.fromkeys([*marks, "linked"], True)})
            for run_id, marks in sorted(self.touched.items())
            if run_id not in self.created and run_id in self.known
        ]
        changes += [
            ({"_id": run_id, "status": "pending", "attempts": 0}, _join(row))
            for run_id, row in sorted(self.joined.items())
        ]
        await work.change_each("durable_run", changes)
        # Keys first: a create and a join of one key meet in this collection (35).
        await work.insert("durable_key", sorted(self.new_keys, key=lambda row: row["_id"]))
        await work.insert("durable_run", list(self.created.values()))
        await work.insert("durable_dependency", self.edges)
        for row in [*self.created.values(), *self.joined.values()]:
            if row.get("ready"):
                work.announce(f"queue:{row['queue']}")


def _join(row: Document) -> Change:
    sets: dict[str, Any] = {
        name: {"$literal": row[name]} for name in ("priority", "available_at", "input", "updated_at") if name in row
    }
    stages: list[dict[str, Any]] = [{"$set": sets}]
    if "available_at" not in row:
        stages.append({"$unset": ["available_at"]})
    return [*stages, READY]


def check(run: NewRun) -> None:
    """Refuse what can not be stored or found again. Raises Conflict."""
    check_keys(run)
    check_id(run.run_id)


def check_id(run_id: str) -> None:
    """Refuse an id under which nothing could be stored: what belongs to a run lies in the range of `_id` that begins with its id."""
    if not run_id or "/" in run_id or len(run_id) > KEY_LENGTH:
        raise Conflict(f"{run_id!r} can not be the id of a run", hint="let the SDK make the id; it has no slash")


def _key_rows(run: NewRun) -> list[Document]:
    if run.idempotency_key is None:
        return []
    return [_key_row(stored_key(run.tenant, run.idempotency_key), run.run_id, tenant_text(run.tenant))]


def _key_row(key: str, run_id: str, tenant_id: str) -> Document:
    return {"_id": key, "run_id": run_id, "tenant_id": tenant_id}


def _own_deadlines(now: Instant, run: NewRun) -> list[Instant]:
    found = [] if run.deadline_at is None else [cut(run.deadline_at)]
    return found if run.deadline_after is None else [*found, cut(now + run.deadline_after)]


def _earliest(instants: Iterable[Instant]) -> Instant | None:
    return min(instants, default=None)


def _document(
    now: Instant, run: NewRun, submitted: int, deadline_at: Instant | None, *, wake_after: int = 0
) -> Document:
    """A new run as it is stored."""
    tenant_id = tenant_text(run.tenant)
    available_at = effective_start(now, asked_start(now, run), deadline_at)
    document: Document = {
        "_id": run.run_id,
        "name": run.name,
        "status": "suspended" if wake_after else "pending",
        "tenant_id": tenant_id,
        "queue": run.queue,
        "route": route(run.name, run.version, None),
        "priority": run.priority,
        "submitted": submitted,
        "attempts": 0,
        "failures": 0,
        "reclaims": 0,
        "wake_seq": 0,
        "created_at": stored(now),
        "updated_at": stored(now),
        "seed": run.seed,
        "input": run.input,
    }
    if deadline_at is not None:
        document["deadline_at"] = stored(deadline_at)
        document["deadline_length"] = max(deadline_at - now, 0)
    if wake_after:
        document["wake_after"] = wake_after
    if available_at is not None:
        # An unreleased node waits for its upstream, whatever its start: outside the index of what is due.
        document["release_at" if wake_after else "available_at"] = stored_not_before(available_at)
    for name in ("idempotency_key", "coalesce_key", "sequence_key", "schedule_id"):
        key = getattr(run, name)
        if key is not None:
            document[name] = stored_key(run.tenant, key)
    if run.sequence_key is not None:
        document["line"] = document["sequence_key"]
    for name in (
        "version",
        "keep",
        "max_attempts",
        "fingerprint",
        "concurrency_key",
        "parent_run_id",
        "parent_step_id",
        "options",
    ):
        value = getattr(run, name)
        if value is not None:
            document[name] = value
    document.update(dated(scheduled_for=run.scheduled_for))
    if run.detached:
        document["detached"] = True
    if run.tags:
        document["tags"] = [{"k": key, "v": value} for key, value in run.tags.items()]
    if run.parent_run_id or run.sequence_key or run.schedule_id or run.depends_on:
        document["linked"] = True
    _mark_ready(document)
    return document


def _mark_ready(document: Document) -> None:
    document.pop("ready", None)
    if document["status"] == Status.PENDING and "available_at" not in document and "blocked_on" not in document:
        document["ready"] = True


__all__ = ["Purging", "Taken", "check_id", "effective_start", "enqueue", "enqueue_fresh", "is_fresh"]
