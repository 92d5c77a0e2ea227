"""Submitting runs: keys, coalescing, sequences, graphs and children (semantics 34 to 42, 48, 75, 77).

`store.py` calls `enqueue` in a transaction of ours or of the caller's, the journal for the children of a record, schedules for the runs of
a slot. It locks in one order: idempotency keys, runs that are joined or depended on, lines of sequences. Where another transaction was
quicker by a moment, what it wrote is found by beginning anew. It announces ready queues and wakes nobody otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from durable.enqueue import (
    asked_start,
    check_function,
    check_keys,
    created_run,
    effective_start,
    join_key,
    joined_start,
)
from durable.errors import Conflict, NotFound
from durable.landing import Ending, behind
from durable.model import TERMINAL, Instant, Json, NewRun, RunRecord, Status, Submitted
from durable.settings import Micros

from . import flow, landing, locks
from .adapting import at, span
from .operation import Again, Ask, Last, Operation, Row, Work, first, rows, together
from .rows import RUN_COLUMNS, run_record, stored_key

BY_ID: Final = f"SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE r.run_id = ANY ($1::text[])"
# A run that others depend on must not land between this look and our commit, unseen.
BEFORE: Final = """
SELECT r.run_id, r.tenant_id, r.status FROM durable_run AS r WHERE r.run_id = ANY ($1::text[]) ORDER BY r.run_id FOR SHARE
"""
KEYS: Final = "SELECT k.idempotency_key, k.run_id FROM durable_key AS k WHERE k.idempotency_key = ANY ($1::text[])"
# From here to the end nobody claims a run that is joined (41); one that was claimed while this waited for it is not found.
WAITING: Final = f"""
SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE r.coalesce_key = ANY ($1::text[]) AND r.status = 'pending' AND r.attempts = 0
ORDER BY r.run_id FOR NO KEY UPDATE
"""
NUMBERS: Final = "SELECT nextval($1::text::regclass) FROM generate_series(1, $2)"
JOIN: Final = """
UPDATE durable_run AS r SET priority = j.priority, available_at = j.available_at, input = j.input, updated_at = now()
FROM unnest($1::text[], $2::integer[], $3::timestamptz[], $4::jsonb[]) AS j (run_id, priority, available_at, input)
WHERE r.run_id = j.run_id
"""
PUT_KEYS: Final = """
INSERT INTO durable_key (idempotency_key, run_id)
SELECT k.key, k.run_id FROM unnest($1::text[], $2::text[]) AS k (key, run_id) ON CONFLICT DO NOTHING RETURNING idempotency_key
"""
_ARRAYS: Final[Sequence[tuple[str, str]]] = (
    ("run_id", "text"), ("name", "text"), ("status", "text"), ("tenant_id", "uuid"), ("idempotency_key", "text"),
    ("coalesce_key", "text"), ("queue", "text"), ("priority", "integer"), ("available_at", "timestamptz"), ("blocked_on", "text"),
    ("version", "text"), ("wake_after", "integer"), ("deadline_at", "timestamptz"), ("deadline_length", "interval"), ("keep", "interval"),
    ("max_attempts", "integer"), ("fingerprint", "text"), ("seed", "bytea"), ("sequence_key", "text"), ("concurrency_key", "text"),
    ("parent_run_id", "text"), ("parent_step_id", "text"), ("detached", "boolean"), ("schedule_id", "text"),
    ("scheduled_for", "timestamptz"), ("tags", "jsonb"), ("options", "jsonb"), ("input", "jsonb"), ("submitted", "bigint"),
)  # fmt: skip
_COLUMNS: Final = ", ".join(column for column, _ in _ARRAYS)
_FROM_ARRAYS: Final = f"""
FROM unnest({", ".join(f"${place}::{kind}[]" for place, (_, kind) in enumerate(_ARRAYS, 1))}) AS n ({_COLUMNS})
ON CONFLICT DO NOTHING RETURNING run_id, submitted
"""
_GIVEN: Final = ", ".join(f"n.{column}" for column, _ in _ARRAYS[:-1])
INSERT: Final = f"""
INSERT INTO durable_run ({_COLUMNS}, created_at, updated_at) SELECT {_GIVEN}, n.submitted, now(), now() {_FROM_ARRAYS}
"""
INSERT_PLAIN: Final = f"""
INSERT INTO durable_run ({_COLUMNS}, created_at, updated_at)
SELECT {_GIVEN}, nextval(${len(_ARRAYS) + 1}::text::regclass), now(), now() {_FROM_ARRAYS}
"""
PUT_EDGES: Final = """
INSERT INTO durable_dependency (run_id, depends_on, position, kind)
SELECT d.run_id, d.depends_on, d.position, d.kind FROM unnest($1::text[], $2::text[], $3::integer[], $4::text[])
    AS d (run_id, depends_on, position, kind)
"""
ORPHANED: Final = "UPDATE durable_run AS r SET cancel_children = true WHERE r.run_id = ANY ($1::text[])"
CHILD_THERE: Final = """
SELECT r.run_id FROM durable_run AS r JOIN unnest($1::text[], $2::text[]) AS c (parent_run_id, parent_step_id)
    ON c.parent_run_id = r.parent_run_id AND c.parent_step_id = r.parent_step_id
"""


def enqueue(work: Work, runs: Sequence[NewRun], *, last: bool = False) -> Operation[list[Submitted]]:
    """One answer per run, in order; all or none. Raises Conflict or NotFound before anything is kept. `last`: the transaction has
    nothing else to do."""
    for run in runs:
        check_keys(run)
    return (yield from _Batch(work, runs, last).submit())


def is_plain(run: NewRun) -> bool:
    """Claimable at once, and alone: nothing but a repeated submit of itself can be in its way."""
    keys = (run.idempotency_key, run.coalesce_key, run.sequence_key)
    times = (run.delay, run.start_at, run.deadline_at, run.deadline_after)
    return run.parent_run_id is None and not run.depends_on and all(one is None for one in (*keys, *times))


def plain(work: Work, run: NewRun) -> Operation[Submitted | None]:
    """Store a plain run, in one statement. None: there is one of this id; `enqueue` says what that means."""
    check_keys(run)
    work.announce(f"queue:{run.queue}")
    draft = _Draft(run, None, run.priority, None, run.input, work.now, None, run.name)
    row = yield from first(INSERT_PLAIN, *_arrays([draft]), work.sequence)
    if row is None:
        return None
    draft.submitted = row[1]
    return Submitted(run=_created(run, draft, work.now), disposition="created")


@dataclasses.dataclass(slots=True)
class _Draft:
    """A run that this batch stores, or one that waits in the store and is joined: what a joiner may still change of it."""

    run: NewRun | None
    found: RunRecord | None
    priority: int
    available_at: Instant | None
    text: Json
    created_at: Instant
    deadline_at: Instant | None
    name: str
    joined: bool = False
    status: Status = Status.PENDING
    blocked_on: str | None = None
    wake_after: int = 0
    length: Micros | None = None
    submitted: int = 0


class _Batch:
    """The runs of one call, looked up together, decided in order, and inserted with one statement."""

    def __init__(self, work: Work, runs: Sequence[NewRun], last: bool) -> None:
        self.work = work
        self.last = last
        self.runs = runs
        self.ids = {run.run_id for run in runs}
        self.known: dict[str, RunRecord] = {}
        self.before: dict[str, Row] = {}
        self.keys: dict[str, str] = {}
        self.waiting: dict[str, _Draft] = {}
        self.drafts: dict[str, _Draft] = {}
        self.new_keys: dict[str, str] = {}
        self.lines: set[str] = set()
        self.occupied: set[str] = set()
        self.edges: list[tuple[str, str, int, str]] = []
        self.orphaned: set[str] = set()
        self.lost: list[Ending] = []

    def submit(self) -> Operation[list[Submitted]]:
        yield from self._look_up()
        answers = [self._one(run) for run in self.runs]
        yield from self._insert()
        if self.lost:
            locked = yield from locks.family(ending.run_id for ending in self.lost)
            yield from landing.land(self.work, locked, self.lost)
            landed = yield from rows(BY_ID, [ending.run_id for ending in self.lost])
            self.known.update({row[0]: run_record(row) for row in landed})
        return [Submitted(run=self._record(run_id), disposition=how) for run_id, how in answers]  # type: ignore[arg-type]

    # -- looking up --------------------------------------------------------------------------------------------------------

    def _look_up(self) -> Operation[None]:
        keys = [stored_key(run.tenant, run.idempotency_key) for run in self.runs if run.idempotency_key is not None]
        keys += [join_key(run) for run in self.runs if run.coalesce_key is not None]
        wanted = self.ids | {run.parent_run_id for run in self.runs if run.parent_run_id is not None}
        asks = [Ask(BY_ID, (sorted(wanted),)), Ask(NUMBERS, (self.work.sequence, len(self.runs)))]
        asks += [Ask(KEYS, (sorted(set(keys)),))] if keys else []
        found, numbers, *stored = yield from together(*asks)
        self.numbers = iter([number for (number,) in numbers])
        self.known = {row[0]: run_record(row) for row in found}
        self.keys = dict(stored[0]) if stored else {}
        yield from self._look_closer()

    def _look_closer(self) -> Operation[None]:
        """What is locked: runs that may be joined and runs that are depended on, in one order; then the lines of sequences."""
        coalesce = {stored_key(run.tenant, run.coalesce_key) for run in self.runs if run.coalesce_key is not None}
        before = {edge.run_id for run in self.runs for edge in run.depends_on} - self.ids
        holders = {run_id for run_id in self.keys.values() if run_id not in self.known}
        asks = [Ask(WAITING, (sorted(coalesce),))] if coalesce else []
        asks += [Ask(BEFORE, (sorted(before),))] if before else []
        asks += [Ask(BY_ID, (sorted(holders),))] if holders else []
        if asks:
            answers = iter((yield from together(*asks)))
            for row in next(answers) if coalesce else ():
                waiting = self.known[row[0]] = run_record(row)
                self.waiting[row[27]] = _Draft(
                    None, waiting, waiting.priority, waiting.available_at, waiting.input, waiting.created_at, waiting.deadline_at,
                    waiting.name,
                )  # fmt: skip
            self.before = {row[0]: row for row in (next(answers) if before else ())}
            self.known.update({row[0]: run_record(row) for row in (next(answers) if holders else ())})
        lines = {stored_key(run.tenant, run.sequence_key) for run in self.runs if run.sequence_key is not None}
        if lines:
            # Who is later in a line has a higher number: those drawn before the line was ours may be older than that.
            self.occupied = yield from flow.occupied(self.work, lines)
            numbers = yield from rows(NUMBERS, self.work.sequence, len(self.runs))
            self.numbers = iter([number for (number,) in numbers])

    # -- one run -----------------------------------------------------------------------------------------------------------

    def _one(self, run: NewRun) -> tuple[str, str]:
        """(the run that the caller now waits for, what happened)."""
        known = self._named(run.run_id)
        if known is not None:
            name, tenant = known
            if name != run.name or tenant != run.tenant:
                raise Conflict(f"the run id {run.run_id} belongs to another run", hint="let the SDK make the id")
            return run.run_id, "existing"
        key = None
        if run.idempotency_key is not None:
            key = stored_key(run.tenant, run.idempotency_key)
            holder = self.keys.get(key)
            if holder is not None:
                self._same_function(run, holder, "idempotency", run.idempotency_key)
                return holder, "existing"
        if run.coalesce_key is not None:
            joined = self._coalesce(run, key)
            if joined is not None:
                return joined, "coalesced"
        self._create(run, key)
        return run.run_id, "created"

    def _named(self, run_id: str) -> tuple[str, Any] | None:
        draft, known = self.drafts.get(run_id), self.known.get(run_id)
        if draft is not None and draft.run is not None:
            return draft.run.name, draft.run.tenant
        return None if known is None else (known.name, known.tenant)

    def _same_function(self, run: NewRun, holder: str, what: str, key: str) -> None:
        named = self._named(holder)
        if named is None:
            raise Again(f"{what} key {key!r}")  # it was purged between two looks
        check_function(run, named[0], what, key)

    def _coalesce(self, run: NewRun, key: str | None) -> str | None:
        assert run.coalesce_key is not None
        before = self.keys.get(join_key(run))
        if before is not None:  # this very submit joined already and its answer was lost (42)
            return before
        coalesce = stored_key(run.tenant, run.coalesce_key)
        waiting = self.waiting.get(coalesce)
        if waiting is None:
            return None
        run_id = waiting.run.run_id if waiting.run is not None else waiting.found.run_id  # type: ignore[union-attr]
        check_function(run, waiting.name, "coalesce", run.coalesce_key)
        now = self.work.now
        wanted = joined_start(now, run, created_at=waiting.created_at, available_at=waiting.available_at)
        waiting.available_at = effective_start(now, wanted, waiting.deadline_at)
        waiting.priority = max(waiting.priority, run.priority)
        waiting.text = run.input if run.on_coalesce == "replace" else waiting.text
        waiting.joined = True
        for one in (join_key(run), key):
            if one is not None:
                self.keys[one] = self.new_keys[one] = run_id
        queue = waiting.run.queue if waiting.run is not None else waiting.found.queue  # type: ignore[union-attr]
        blocked_on = waiting.blocked_on if waiting.found is None else waiting.found.blocked_on
        if waiting.available_at is None and blocked_on is None:
            self.work.announce(f"queue:{queue}")
        return run_id

    def _create(self, run: NewRun, key: str | None) -> None:
        now = self.work.now
        deadline_at = self._deadline(run)
        available_at = effective_start(now, asked_start(now, run), deadline_at)
        wake_after = self._dependencies(run)
        blocked_on = None
        if run.sequence_key is not None:
            sequence = stored_key(run.tenant, run.sequence_key)
            if sequence in self.lines or sequence in self.occupied:
                blocked_on = flow.SEQUENCE
            self.lines.add(sequence)
        draft = self.drafts[run.run_id] = _Draft(
            run, None, run.priority, available_at, run.input, now, deadline_at, run.name,
            status=Status.SUSPENDED if wake_after else Status.PENDING,
            blocked_on=blocked_on,
            wake_after=wake_after,
            length=None if deadline_at is None else max(deadline_at - now, 0),
            submitted=next(self.numbers),
        )  # fmt: skip
        if key is not None:
            self.new_keys[key] = self.keys[key] = run.run_id
        if run.coalesce_key is not None and draft.status is Status.PENDING:
            self.waiting[stored_key(run.tenant, run.coalesce_key)] = draft
        if draft.status is Status.PENDING and available_at is None and blocked_on is None:
            self.work.announce(f"queue:{run.queue}")

    def _deadline(self, run: NewRun) -> Instant | None:
        candidates = [] if run.deadline_at is None else [run.deadline_at]
        if run.deadline_after is not None:
            candidates.append(self.work.now + run.deadline_after)
        if run.parent_run_id is not None:
            draft, known = self.drafts.get(run.parent_run_id), self.known.get(run.parent_run_id)
            if draft is not None and draft.run is not None:
                tenant, deadline_at, status = draft.run.tenant, draft.deadline_at, draft.status
            elif known is not None:
                tenant, deadline_at, status = known.tenant, known.deadline_at, known.status
            else:
                return min(candidates, default=None)
            if tenant != run.tenant:
                raise NotFound(
                    f"there is no run {run.parent_run_id} to be the parent", hint="a child is of its parent's tenant"
                )
            if not run.detached:
                candidates += [] if deadline_at is None else [deadline_at]
                if status in TERMINAL and status is not Status.COMPLETED:
                    self.orphaned.add(run.parent_run_id)
        return min(candidates, default=None)

    def _dependencies(self, run: NewRun) -> int:
        """Note the edges; the answer: how many of the runs before it have not completed (77)."""
        left = 0
        for edge in run.depends_on:
            found = self._before(edge.run_id)
            if found is None and edge.kind == "end" and edge.run_id not in self.ids:
                left += 1
                self.lost.append(behind(run.run_id, edge.run_id))
                continue
            if edge.run_id == run.run_id or (found is None and edge.run_id not in self.ids):
                raise NotFound(
                    f"there is no run {edge.run_id} for {run.run_id} to depend on", hint="submit a graph as one batch"
                )
            if found is not None and found[0] != run.tenant:
                raise NotFound(
                    f"there is no run {edge.run_id} for {run.run_id} to depend on", hint="a graph is of one tenant"
                )
            self.edges.append((run.run_id, edge.run_id, edge.position, edge.kind))
            status = Status.PENDING if found is None else found[1]
            left += status != Status.COMPLETED
            if status in TERMINAL and status != Status.COMPLETED:
                self.lost.append(behind(run.run_id, edge.run_id))
        return left

    def _before(self, run_id: str) -> tuple[Any, Any] | None:
        draft = self.drafts.get(run_id)
        if draft is not None and draft.run is not None:
            return draft.run.tenant, draft.status
        if run_id in self.before:
            return self.before[run_id][1], self.before[run_id][2]
        known = self.known.get(run_id)
        return None if known is None else (known.tenant, known.status)

    # -- writing -----------------------------------------------------------------------------------------------------------

    def _insert(self) -> Operation[None]:
        """Keys first: a create and a join of one key meet in this table (35). In the order of the keys, whatever that of the batch."""
        if self.new_keys:
            keys = sorted(self.new_keys)
            put = yield from rows(PUT_KEYS, keys, [self.new_keys[key] for key in keys])
            if len(put) < len(keys):
                raise Again(f"idempotency key {min(set(keys) - {key for (key,) in put})!r}")
        joined = [draft for draft in self.waiting.values() if draft.joined and draft.found is not None]
        asks: list[Ask] = []
        if joined:
            ids = [draft.found.run_id for draft in joined if draft.found is not None]
            changes = (
                [draft.priority for draft in joined],
                [at(draft.available_at) for draft in joined],
                [draft.text for draft in joined],
            )
            asks.append(Ask(JOIN, (ids, *changes)))
        drafts = sorted(self.drafts.values(), key=_order)
        if drafts:
            asks.append(Ask(INSERT, _arrays(drafts)))
        if self.edges:
            asks.append(Ask(PUT_EDGES, tuple(map(list, zip(*self._edges(), strict=True)))))
        if self.orphaned:
            asks.append(Ask(ORPHANED, (sorted(self.orphaned),)))
        if not asks:
            return
        if self.last and self._plain(asks):
            (inserted,) = yield Last(asks)
            if not inserted.rows:  # and nothing of it was committed
                raise Again(f"run {drafts[0].run.run_id}")  # type: ignore[union-attr]
            return
        answers = yield from together(*asks)
        if drafts and len(answers[bool(joined)]) < len(drafts):
            yield from self._refused(drafts)

    def _plain(self, asks: Sequence[Ask]) -> bool:
        """A single run, and nothing else is written: a statement that is all or nothing by itself."""
        (draft, *others) = self.drafts.values() if self.drafts else (None,)
        if draft is None or others or len(asks) > 1 or self.new_keys or self.lost:
            return False
        return draft.run is not None and draft.run.parent_run_id is None

    def _edges(self) -> list[tuple[str, str, int, str]]:
        if len({(run_id, on) for run_id, on, _, _ in self.edges}) < len(self.edges):
            raise Conflict(
                "a run can not be stored: it depends on another one twice", hint="a run has one edge to another"
            )
        return self.edges

    def _refused(self, drafts: Sequence[_Draft]) -> Operation[None]:
        """Something unique was there: for ever, where a step of the parent has a child; else another submit was quicker."""
        children = [draft.run for draft in drafts if draft.run is not None and draft.run.parent_run_id is not None]
        pairs = [(run.parent_run_id, run.parent_step_id) for run in children]
        there = yield from rows(CHILD_THERE, [parent for parent, _ in pairs], [step for _, step in pairs])
        taken = {run_id for (run_id,) in there} - self.ids
        if taken or len(set(pairs)) < len(pairs):
            raise Conflict(
                f"a run can not be stored: a step of its parent has started {min(taken, default='another')} already",
                hint="a step of a parent starts one child",
            )
        raise Again("a key of the batch")

    # -- the answers -------------------------------------------------------------------------------------------------------

    def _record(self, run_id: str) -> RunRecord:
        joined = next(
            (one for one in self.waiting.values() if one.joined and one.found and one.found.run_id == run_id), None
        )
        if joined is not None and joined.found is not None:
            changed: dict[str, Any] = {
                "priority": joined.priority,
                "available_at": joined.available_at,
                "input": joined.text,
            }
            return dataclasses.replace(joined.found, updated_at=self.work.now, **changed)
        known = self.known.get(run_id)
        if known is not None:
            return known
        if run_id not in self.drafts:
            raise Again(f"run {run_id}")  # it was purged between two looks
        draft = self.drafts[run_id]
        assert draft.run is not None
        return _created(draft.run, draft, self.work.now)


def _created(run: NewRun, draft: _Draft, now: Instant) -> RunRecord:
    return created_run(
        run,
        now,
        submitted=draft.submitted,
        status=draft.status,
        priority=draft.priority,
        text=draft.text,
        available_at=draft.available_at,
        blocked_on=draft.blocked_on,
        wake_after=draft.wake_after,
        deadline_at=draft.deadline_at,
    )


def _order(draft: _Draft) -> tuple[str, int]:
    """Rows are written in the order of their stored keys (40); `submitted` keeps that of the batch."""
    assert draft.run is not None
    run = draft.run
    return ("" if run.coalesce_key is None else stored_key(run.tenant, run.coalesce_key)), draft.submitted


def _stored(run: NewRun, key: str | None) -> str | None:
    return None if key is None else stored_key(run.tenant, key)


def _tags(tags: Mapping[str, str]) -> str:
    return json.dumps(dict(tags)) if tags else "{}"


def _arrays(drafts: Iterable[_Draft]) -> tuple[list[Any], ...]:
    columns: tuple[list[Any], ...] = tuple([] for _ in _ARRAYS)
    for draft in drafts:
        run = draft.run
        assert run is not None
        values = (
            run.run_id, run.name, str(draft.status), run.tenant, _stored(run, run.idempotency_key), _stored(run, run.coalesce_key),
            run.queue, draft.priority, at(draft.available_at), draft.blocked_on, run.version, draft.wake_after, at(draft.deadline_at),
            span(draft.length), span(run.keep), run.max_attempts, run.fingerprint, run.seed, _stored(run, run.sequence_key),
            run.concurrency_key, run.parent_run_id, run.parent_step_id, run.detached, _stored(run, run.schedule_id),
            at(run.scheduled_for), _tags(run.tags), run.options, draft.text, draft.submitted,
        )  # fmt: skip
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    return columns


__all__ = ["enqueue", "is_plain", "plain"]
