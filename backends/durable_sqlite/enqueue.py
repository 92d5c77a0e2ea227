"""Submitting runs: idempotency, coalescing, sequences, children and graphs (semantics 34 to 42, 75, 77).

`store.py` calls `enqueue` inside the shared transaction or on a caller's own connection; the journal calls it for the children of
a record, schedules for the runs of a slot. It announces ready queues and wakes nobody otherwise.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
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
from durable.model import TERMINAL, Instant, NewRun, RunRecord, Status, Submitted

from . import landing
from .connection import announce
from .rows import RUN_COLUMNS, run_record, stored_key, tenant_text

BY_ID = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE run_id IN (SELECT value FROM json_each(?))"
KEYS = "SELECT idempotency_key, run_id FROM durable_key WHERE idempotency_key IN (SELECT value FROM json_each(?))"
WAITING_OF_KEY = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE coalesce_key = ? AND status = 'pending' AND attempts = 0"
JOIN = "UPDATE durable_run SET priority = ?, available_at = ?, input = ?, updated_at = ? WHERE run_id = ?"
PUT_KEY = "INSERT INTO durable_key (idempotency_key, run_id) VALUES (?, ?)"
NEWEST = "SELECT coalesce(max(submitted), 0) FROM durable_run"
IN_LINE = """
SELECT 1 FROM durable_run WHERE sequence_key = ? AND status IN ('pending', 'running', 'suspended') LIMIT 1
"""
PUT_EDGE = "INSERT INTO durable_dependency (run_id, depends_on, position, kind) VALUES (?, ?, ?, ?)"
ORPHANED = "UPDATE durable_run SET cancel_children = 1 WHERE run_id = ?"
_INSERTED: Final = (
    "submitted, run_id, name, status, tenant_id, idempotency_key, coalesce_key, queue, priority, available_at, blocked_on, version,"
    " wake_after, created_at, updated_at, deadline_at, deadline_length, keep, max_attempts, fingerprint, seed, sequence_key,"
    " concurrency_key, parent_run_id, parent_step_id, detached, schedule_id, scheduled_for, tags, options, input"
)
INSERT = f"INSERT INTO durable_run ({_INSERTED}) VALUES ({', '.join('?' * (_INSERTED.count(',') + 1))})"


def enqueue(con: sqlite3.Connection, now: Instant, runs: Sequence[NewRun]) -> list[Submitted]:
    """One answer per run, in order; all or none. Raises Conflict or NotFound before the caller's transaction keeps anything."""
    return _Batch(con, now, runs).submit()


class _Batch:
    """The runs of one call, looked up together, decided in order, and inserted with one statement."""

    def __init__(self, con: sqlite3.Connection, now: Instant, runs: Sequence[NewRun]) -> None:
        self.con = con
        self.now = now
        self.runs = runs
        self.known = self._by_id(
            {run.run_id for run in runs} | {edge.run_id for run in runs for edge in run.depends_on}
        )
        self.parents = self._by_id({run.parent_run_id for run in runs if run.parent_run_id is not None})
        self.ids = {run.run_id for run in runs}
        self.keys = self._stored_keys()
        self.lines: set[str] = set()
        self.rows: list[tuple[Any, ...]] = []
        self.edges: list[tuple[Any, ...]] = []
        self.new_keys: list[tuple[str, str]] = []
        self.lost: list[Ending] = []
        self.waiting: dict[str, str] = {}
        self.newest: int = con.execute(NEWEST).fetchone()[0]

    def submit(self) -> list[Submitted]:
        answers = [self._one(run) for run in self.runs]
        self._insert()
        if self.lost:
            landing.land(self.con, self.now, self.lost)
            landed = self._by_id({ending.run_id for ending in self.lost})
            answers = [
                Submitted(run=landed.get(answer.run.run_id, answer.run), disposition=answer.disposition)
                for answer in answers
            ]
        return answers

    # -- looking up --------------------------------------------------------------------------------------------------------

    def _by_id(self, ids: Iterable[str]) -> dict[str, RunRecord]:
        wanted = sorted(ids)
        if not wanted:
            return {}
        return {row[0]: run_record(row) for row in self.con.execute(BY_ID, (json.dumps(wanted),))}

    def _stored_keys(self) -> dict[str, str]:
        wanted = [stored_key(run.tenant, run.idempotency_key) for run in self.runs if run.idempotency_key is not None]
        wanted += [join_key(run) for run in self.runs if run.coalesce_key is not None]
        if not wanted:
            return {}
        return dict(self.con.execute(KEYS, (json.dumps(wanted),)).fetchall())

    def _get(self, run_id: str) -> RunRecord:
        found = self.known.get(run_id)
        if found is None:
            found = self.known[run_id] = self._by_id([run_id])[run_id]
        return found

    # -- one run -----------------------------------------------------------------------------------------------------------

    def _one(self, run: NewRun) -> Submitted:
        check_keys(run)
        known = self.known.get(run.run_id)
        if known is not None:
            if known.name != run.name or known.tenant != run.tenant:
                raise Conflict(f"the run id {run.run_id} belongs to another run", hint="let the SDK make the id")
            return Submitted(run=known, disposition="existing")
        key = None
        if run.idempotency_key is not None:
            key = stored_key(run.tenant, run.idempotency_key)
            holder = self.keys.get(key)
            if holder is not None:
                return self._existing(run, self._get(holder), "idempotency", run.idempotency_key)
        if run.coalesce_key is not None:
            joined = self._coalesce(run, key)
            if joined is not None:
                return joined
        return self._create(run, key)

    def _existing(self, run: NewRun, found: RunRecord, what: str, key: str) -> Submitted:
        check_function(run, found.name, what, key)
        return Submitted(run=found, disposition="existing")

    def _coalesce(self, run: NewRun, key: str | None) -> Submitted | None:
        assert run.coalesce_key is not None
        before = self.keys.get(join_key(run))
        if before is not None:  # this very submit joined already and its answer was lost (42)
            return Submitted(run=self._get(before), disposition="coalesced")
        coalesce = stored_key(run.tenant, run.coalesce_key)
        if coalesce in self.waiting:
            self._insert()
        row = self.con.execute(WAITING_OF_KEY, (coalesce,)).fetchone()
        if row is None:
            self.waiting[coalesce] = run.run_id
            return None
        waiting = run_record(row)
        self._existing(run, waiting, "coalesce", run.coalesce_key)
        replace = run.on_coalesce == "replace"
        wanted = joined_start(self.now, run, created_at=waiting.created_at, available_at=waiting.available_at)
        available_at = effective_start(self.now, wanted, waiting.deadline_at)
        priority = max(waiting.priority, run.priority)
        text = run.input if replace else waiting.input
        self.con.execute(JOIN, (priority, available_at, text, self.now, waiting.run_id))
        keys = [join_key(run)] if key is None else [join_key(run), key]
        self.con.executemany(PUT_KEY, [(one, waiting.run_id) for one in keys])
        self.keys.update(dict.fromkeys(keys, waiting.run_id))
        if available_at is None and waiting.blocked_on is None:
            announce(self.con, f"queue:{waiting.queue}")
        self.known.pop(waiting.run_id, None)
        return Submitted(run=self._get(waiting.run_id), disposition="coalesced")

    def _create(self, run: NewRun, key: str | None) -> Submitted:
        now = self.now
        deadline_at = self._deadline(run)
        length = None if deadline_at is None else max(deadline_at - now, 0)
        available_at = effective_start(now, asked_start(now, run), deadline_at)
        wake_after = self._dependencies(run)
        status = Status.SUSPENDED if wake_after else Status.PENDING
        sequence = None if run.sequence_key is None else stored_key(run.tenant, run.sequence_key)
        blocked_on = None
        if sequence is not None:
            if sequence in self.lines or self.con.execute(IN_LINE, (sequence,)).fetchone() is not None:
                blocked_on = "sequence"
            self.lines.add(sequence)
        self.newest += 1
        coalesce = None if run.coalesce_key is None else stored_key(run.tenant, run.coalesce_key)
        schedule = None if run.schedule_id is None else stored_key(run.tenant, run.schedule_id)
        tags = json.dumps(dict(run.tags)) if run.tags else "{}"
        self.rows.append(
            (
                self.newest, run.run_id, run.name, str(status), tenant_text(run.tenant), key, coalesce, run.queue, run.priority,
                available_at, blocked_on, run.version, wake_after, now, now, deadline_at, length, run.keep, run.max_attempts,
                run.fingerprint, run.seed, sequence, run.concurrency_key, run.parent_run_id, run.parent_step_id, run.detached,
                schedule, run.scheduled_for, tags, run.options, run.input,
            )
        )  # fmt: skip
        if key is not None:
            self.new_keys.append((key, run.run_id))
            self.keys[key] = run.run_id
        record = self.known[run.run_id] = created_run(
            run,
            now,
            submitted=self.newest,
            status=status,
            priority=run.priority,
            text=run.input,
            available_at=available_at,
            blocked_on=blocked_on,
            wake_after=wake_after,
            deadline_at=deadline_at,
        )
        if status is Status.PENDING and available_at is None and blocked_on is None:
            announce(self.con, f"queue:{run.queue}")
        return Submitted(run=record, disposition="created")

    def _deadline(self, run: NewRun) -> Instant | None:
        candidates = [] if run.deadline_at is None else [run.deadline_at]
        if run.deadline_after is not None:
            candidates.append(self.now + run.deadline_after)
        if run.parent_run_id is not None:
            parent = self.parents.get(run.parent_run_id) or self.known.get(run.parent_run_id)
            if parent is not None:
                if parent.tenant != run.tenant:
                    raise NotFound(
                        f"there is no run {run.parent_run_id} to be the parent",
                        hint="a child is of its parent's tenant",
                    )
                if not run.detached:
                    candidates += [] if parent.deadline_at is None else [parent.deadline_at]
                    if parent.status in TERMINAL and parent.status is not Status.COMPLETED:
                        self.con.execute(ORPHANED, (run.parent_run_id,))
        return min(candidates, default=None)

    def _dependencies(self, run: NewRun) -> int:
        """Write the edges; the answer: how many of the runs before it have not completed (77)."""
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
            if before is not None and before.tenant != run.tenant:
                raise NotFound(
                    f"there is no run {edge.run_id} for {run.run_id} to depend on", hint="a graph is of one tenant"
                )
            self.edges.append((run.run_id, edge.run_id, edge.position, edge.kind))
            left += before is None or before.status is not Status.COMPLETED
            if before is not None and before.status in TERMINAL and before.status is not Status.COMPLETED:
                self.lost.append(behind(run.run_id, edge.run_id))
        return left

    def _insert(self) -> None:
        try:
            # Keys first: a create and a join of one key meet in this table (35).
            self.con.executemany(PUT_KEY, self.new_keys)
            self.con.executemany(INSERT, self.rows)
            self.con.executemany(PUT_EDGE, self.edges)
        except sqlite3.IntegrityError as error:
            raise Conflict(
                f"a run can not be stored: {error}",
                hint="a step of a parent starts one child, a run has one edge to another, and a name, a queue and an input",
            ) from error
        self.new_keys, self.rows, self.edges = [], [], []
