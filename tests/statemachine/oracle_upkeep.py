"""The second half of the naive model: what acts on runs from outside. Cancel, retry, fork, signals, chores, schedules.

Called like `oracle.py`, by the state machine only, and written in the same way: from the contract, plainly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from types import SimpleNamespace as Row
from typing import Any

from statemachine.oracle import FIELDS, RunOracle, by_position

from durable import model as m
from durable.errors import Conflict


class Oracle(RunOracle):
    # -- cancel, retry, fork ---------------------------------------------------------------------------------------------

    def request_cancel(self, run_ids: Sequence[str], scope: m.Scope, reason: str) -> list[bool]:
        return [self.cancel_one(run_id, scope, reason) for run_id in run_ids]

    def retry(self, run_id: str, scope: m.Scope, attempts: int, extra: int) -> str:
        row = self.seen(run_id, scope)
        if row.attempts != attempts or (row.status == "pending" and row.retried):
            return run_id
        if row.status not in m.TERMINAL:
            raise Conflict("it has not ended")
        nodes = sorted((one for one in self.runs.values() if self.failed_node(one, run_id)), key=lambda one: one.order)
        for one in (row, *nodes):
            undone = any(record.step_id.startswith("undo/") for record in self.journals[one.run_id])
            dead = [on for on in self.front(one) if on not in (row, *nodes) and self.ended_badly(on)]
            if one.status == "completed" or undone or dead or self.lost_nodes(one):
                raise Conflict("only what ended, and not well, can be retried")
        for one in (row, *nodes):
            waits = sum(on.status != "completed" for on in self.front(one))
            self.take_out(one, self.blamed(one))
            self.revive(one, 0 if one is row and nodes else extra)
            one.status, one.wake_after = ("suspended", waits) if waits else ("pending", 0)
            self.nodes_come_back(one)
        return run_id

    def blamed(self, row: Row) -> set[Any]:
        kind = {"cancelled": "cancel", "timed_out": "timeout"}.get(row.status)
        return {*row.positions, *(r.position for r in self.journals[row.run_id] if kind and r.kind == kind)}

    def front(self, row: Row) -> list[Row]:
        """The runs that a node depends on."""
        return [self.runs[on] for run_id, on in self.edges if run_id == row.run_id and on in self.runs]

    def ended_badly(self, row: Row) -> bool:
        return row.status in m.TERMINAL and row.status != "completed"

    def node(self, row: Row) -> bool:
        """A child that no step of its own started is a node of a graph."""
        starts = {r.step_id for r in self.journals.get(row.parent_run_id or "", ()) if r.kind == "start"}
        return row.parent_run_id is not None and "@" not in row.parent_step_id and row.parent_step_id not in starts

    def failed_node(self, row: Row, graph: str) -> bool:
        return row.parent_run_id == graph and self.node(row) and self.ended_badly(row) and row.error_kind != "upstream"

    def lost_nodes(self, row: Row) -> list[str]:
        """Ends of nodes that the error carries and that nobody could tell again."""
        journal = self.journals[row.run_id]
        starts = {r.step_id for r in journal if r.kind == "start"}
        ends = [r.step_id.removesuffix(":end") for r in journal if r.kind == "child" and r.position in self.blamed(row)]
        return [start for start in ends if start not in starts and self.child(row, start) is None]

    def nodes_come_back(self, row: Row) -> None:
        back = [row]
        for node in back:  # it grows while it is read
            for other in self.runs.values():
                upstream = (other.status, other.attempts, other.error_kind) == ("cancelled", 0, "upstream")
                if not upstream or (other.run_id, node.run_id) not in self.edges:
                    continue
                if other.parent_run_id != row.parent_run_id:
                    continue
                front = self.front(other)
                if all(one in back or one.status not in m.TERMINAL or one.status == "completed" for one in front):
                    self.revive(other, 0)
                    other.status, other.wake_after = "suspended", sum(one.status != "completed" for one in front)
                    back.append(other)
        graph = self.runs.get(row.parent_run_id or "")
        if graph is None or not self.node(row) or graph.status in ("completed", "running"):
            return
        ends = {f"{node.parent_step_id}:end" for node in back}
        forgotten: set[Any] = {record.position for record in self.journals[graph.run_id] if record.step_id in ends}
        self.take_out(graph, forgotten | self.blamed(graph), keep_children=True)
        if graph.status in m.TERMINAL:
            self.revive(graph, 0)

    def revive(self, row: Row, extra: int) -> None:
        self.ready(row)
        row.failures = row.reclaims = 0
        row.max_attempts = None if row.max_attempts is None else row.max_attempts + extra
        row.error = row.error_kind = row.error_detail = row.output = row.finished_at = row.purge_at = None
        row.coalesce_key = row.coalesce_key if row.attempts else None
        row.cancel_requested_at = None
        if not any(record.kind == "pivot" for record in self.journals[row.run_id]):
            row.cancel_refused_at = None
        row.deadline_at = None if row.length is None else self.clock() + row.length
        row.orphans, row.lease_owner = False, None
        row.retried, row.blocked_on = True, "sequence" if any(self.line(row)) else None

    def fork(self, run_id: str, scope: m.Scope, new_run_id: str, from_step: int | str) -> str:
        made = self.runs.get(new_run_id)
        if made is not None and (scope is m.ALL or made.tenant == scope):
            return new_run_id
        row, journal = self.seen(run_id, scope), by_position(self.journals[run_id])
        cut = next((r.position for r in journal if r.step_id == from_step), from_step)
        if isinstance(cut, str):
            raise Conflict("the journal has no such step")
        kept = [r for r in journal if r.position is not None and cut is not None and r.position < cut]
        names = {r.step_id for r in kept}
        childless = [r for r in kept if r.kind == "start" and f"{r.step_id}:end" not in names]
        first: Any = min((r.position for r in childless if r.position is not None), default=cut)
        kept = [dataclasses.replace(r, fence=1) for r in kept if r not in childless and r.seen < first]
        self.serial += 1
        copied = "name tenant input queue priority max_attempts options version fingerprint seed keep sequence_key concurrency_key"
        new = Row(
            **dict.fromkeys(FIELDS), positions=(), wake_delay=0, wake_on_failure=False, order=self.serial, retried=False
        )
        vars(new).update({name: getattr(row, name) for name in copied.split()}, length=row.length, orphans=False)
        new.run_id, new.status, new.attempts, new.forked_from = new_run_id, "pending", 1, run_id
        new.failures = new.reclaims = new.wake_after = 0
        new.wake_seq = max((r.signal_seq for r in kept if r.signal_seq is not None), default=0)
        new.created_at, new.detached, new.tags = self.clock(), False, dict(row.tags)
        new.deadline_at = None if row.length is None else self.clock() + row.length
        new.compensating = any(r.kind == "compensation" for r in kept)
        new.cancel_refused_at = self.clock() if any(r.kind == "pivot" for r in kept) else None
        new.replay_family, new.started_at = (row.replay_family, row.started_at) if kept else (None, None)
        if any(self.line(new)):
            new.blocked_on = "sequence"
        self.runs[new_run_id], self.journals[new_run_id], self.signals[new_run_id] = new, kept, []
        return new_run_id

    # -- the mailbox -----------------------------------------------------------------------------------------------------

    def send(self, signal: m.NewSignal, scope: m.Scope) -> int:
        row = self.seen(signal.run_id, scope)
        for old in self.signals[row.run_id]:
            if old.dedup_id == signal.dedup_id:
                return int(old.seq)
        if row.status in m.TERMINAL:
            raise Conflict("the run has ended")
        row.wake_seq += 1
        self.signals[row.run_id].append(Row(**dataclasses.asdict(signal), seq=row.wake_seq, at=self.clock()))
        if row.status == "suspended" and row.attempts:
            self.ready(row)
        return int(row.wake_seq)

    def inbox(self, leases: Sequence[m.Lease]) -> list[m.Inbox | None]:
        answers: list[m.Inbox | None] = []
        for lease in leases:
            row = self.held(lease)
            if row is None:
                answers.append(None)
                continue
            names = {record.step_id for record in self.journals[row.run_id]}
            taken = {record.signal_seq for record in self.journals[row.run_id]}
            fresh = [old for old in self.signals[row.run_id] if old.seq not in taken]
            signals = [m.Signal(name=old.name, seq=old.seq, payload=old.payload, at=old.at) for old in fresh]
            children = [c for c in self.runs.values() if c.parent_run_id == row.run_id and c.status in m.TERMINAL]
            children = [c for c in children if f"{c.parent_step_id}:end" not in names and "@" not in c.parent_step_id]
            ends = [
                m.ChildEnd(
                    run_id=c.run_id,
                    step_id=c.parent_step_id,
                    status=m.Status(c.status),
                    output=c.output,
                    error=c.error,
                    error_kind=c.error_kind,
                    error_detail=c.error_detail,
                    at=c.finished_at,
                )
                for c in sorted(children, key=lambda child: (child.finished_at, child.run_id))
            ]
            answers.append(
                m.Inbox(wake_seq=row.wake_seq, cancel_requested=self.asked(row), signals=signals, children=ends)
            )
        return answers

    # -- chores ----------------------------------------------------------------------------------------------------------

    def due(self, scope: m.Scope) -> list[Row]:
        rows = [row for row in self.mine(scope) if row.available_at is not None]
        rows = [row for row in rows if row.status == "pending" or (row.status == "suspended" and row.attempts)]
        return sorted((row for row in rows if row.available_at <= self.clock()), key=lambda row: row.available_at)

    def promote(self, scope: m.Scope, limit: int, promoted: Iterable[str]) -> None:
        """Check and follow: among runs that are due at one instant a store may choose."""
        due, chosen = self.due(scope), [self.runs[run_id] for run_id in promoted]
        assert len(chosen) == min(limit, len(due)), f"promoted {len(chosen)} of {len(due)} due runs"
        latest = max((row.available_at for row in chosen), default=0)
        assert all(row in due for row in chosen), "promoted what was not due"
        assert all(row.available_at >= latest for row in due if row not in chosen), "the oldest due come first"
        for row in chosen:
            self.ready(row)

    def sweep(self, scope: m.Scope, limit: int, max_reclaims: int) -> tuple[list[str], list[str]]:
        lapsed = [row for row in self.mine(scope) if row.status == "running" and row.leased_until < self.clock()]
        returned, failed = [], []
        for row in sorted(lapsed, key=lambda row: row.leased_until)[:limit]:
            made = any(record.fence == row.attempts for record in self.journals[row.run_id])
            row.reclaims, row.leased_until = 0 if made else row.reclaims + 1, None
            if row.reclaims > max_reclaims and not row.compensating:
                self.land(row, "failed", m.Failure(message="", kind="reclaim_limit"))
                failed.append(row.run_id)
            else:
                self.ready(row)
                row.blocked_on, row.lease_owner = "alone" if row.reclaims >= 2 else None, None
                returned.append(row.run_id)
        self.wake_parents()
        return returned, failed

    def mend(self, scope: m.Scope) -> None:
        """Without a limit: cancel live children of parents that landed in any state but completed (48)."""
        for parent in [row for row in self.mine(scope) if row.orphans]:
            parent.orphans = False
            for row in [row for row in self.runs.values() if row.parent_run_id == parent.run_id and not row.detached]:
                if row.status not in m.TERMINAL and row.cancel_requested_at is None:
                    self.cancel_one(row.run_id, m.ALL, "")

    def purge(self, scope: m.Scope, limit: int, older_than: int | None, purged: Iterable[str]) -> None:
        def since(row: Row) -> int:
            return int(row.purge_at if older_than is None else row.finished_at + older_than)

        def kept(row: Row) -> bool:
            parent = self.runs.get(row.parent_run_id or "")
            return parent is not None and parent.status not in m.TERMINAL and not row.detached

        due = [
            row for row in self.mine(scope) if row.status in m.TERMINAL and since(row) <= self.clock() and not kept(row)
        ]
        chosen = [self.runs[run_id] for run_id in purged]
        assert len(chosen) == min(limit, len(due)), f"purged {len(chosen)} of {len(due)} due runs"
        latest = max((since(row) for row in chosen), default=0)
        assert all(row in due for row in chosen), "purged what was not due"
        assert all(since(row) >= latest for row in due if row not in chosen), "the oldest due are purged first"
        for row in chosen:
            del self.runs[row.run_id], self.journals[row.run_id], self.signals[row.run_id]
            self.keys = {key: run_id for key, run_id in self.keys.items() if run_id != row.run_id}
            self.edges = [edge for edge in self.edges if row.run_id not in edge]

    # -- schedules and queues --------------------------------------------------------------------------------------------

    def put_schedule(self, spec: m.ScheduleSpec, scope: Any) -> None:
        key, values = (scope, spec.schedule_id), dataclasses.asdict(spec)
        old = self.schedules.get(key)
        if old is None:
            fresh = {"enabled": True, "last_run_id": None, "consecutive_failures": 0, "created_at": self.clock()}
            self.schedules[key] = Row(**values, **fresh, tenant=scope, parked_reason=None)
            return
        if (old.cron, old.tz) == (spec.cron, spec.tz):
            values.pop("next_fire_at")
        vars(old).update(values, parked_reason=None)

    def pause_schedule(self, schedule_id: str, scope: Any, *, paused: bool, next_fire_at: int | None) -> bool:
        row = self.schedules.get((scope, schedule_id))
        if row is not None:
            row.enabled = not paused
            row.next_fire_at = row.next_fire_at if paused or next_fire_at is None else next_fire_at
        return row is not None

    def park_schedule(self, schedule_id: str, scope: Any, reason: str) -> bool:
        row = self.schedules.get((scope, schedule_id))
        if row is not None:
            row.parked_reason = reason
        return row is not None

    def remove_schedule(self, schedule_id: str, scope: Any) -> bool:
        return self.schedules.pop((scope, schedule_id), None) is not None

    def due_schedules(self, scope: m.Scope) -> list[str]:
        rows = [row for row in self.schedules.values() if scope is m.ALL or row.tenant == scope]
        rows = [row for row in rows if row.enabled and row.parked_reason is None and row.next_fire_at is not None]
        rows = [row for row in rows if row.next_fire_at <= self.clock()]
        return sorted(row.schedule_id for row in rows)

    def fire(self, firing: m.Firing) -> list[tuple[str, str]] | None:
        row = self.schedules.get((firing.tenant, firing.schedule_id))
        if row is None or not row.enabled or row.parked_reason is not None or row.next_fire_at != firing.expected:
            return None
        if firing.parked_reason is not None:
            row.parked_reason = firing.parked_reason
            return []
        row.next_fire_at = firing.next_fire_at
        answers = []
        for new in firing.runs:
            slot = (firing.tenant, firing.schedule_id, new.scheduled_for or 0)
            if slot not in self.slots:
                self.slots.add(slot)
                answers.append(self.submit(new))
                row.last_run_id = new.run_id
        return answers

    def set_queue(self, queue: m.QueueRecord) -> None:
        self.queues[queue.tenant, queue.scope_name] = queue
