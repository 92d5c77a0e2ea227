"""The naive model of a store: the whole contract of `durable/protocol.py` over plain dicts and lists, with a clock moved by hand.

The state machine calls it with the operations that a real store got and compares what both show. It is written from the contract
alone, as plainly as it can be said; it knows no store. Where the contract leaves a store free (which of two queues is served
first, which run of a full scope is passed over) it takes what the store did, checks that it was allowed to, and follows. It never
looks for speed and never repairs what it is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace as Row
from typing import Any

from durable import model as m
from durable.errors import Conflict, NotFound

FIELDS = [field.name for field in dataclasses.fields(m.RunRecord)]
LANDED = {m.Completed: "completed", m.Failed: "failed", m.Cancelled: "cancelled", m.TimedOut: "timed_out"}
LANDED[m.ForwardIncomplete] = "forward_incomplete"


class RunOracle:
    """Runs from submit to landing; `Oracle` in oracle_upkeep.py adds what acts from outside."""

    def __init__(self, clock: Callable[[], int], keep: int) -> None:
        self.clock, self.keep = clock, keep
        self.runs: dict[str, Row] = {}
        self.journals: dict[str, list[m.StepRecord]] = {}
        self.signals: dict[str, list[Row]] = {}
        self.keys: dict[tuple[object, str], str] = {}
        self.edges: list[tuple[str, str]] = []  # (the node, what it depends on)
        self.schedules: dict[tuple[Any, str], Row] = {}
        self.slots: set[tuple[object, str, int]] = set()
        self.queues: dict[tuple[object, str], m.QueueRecord] = {}
        self.serial = 0
        self.landed: list[Row] = []

    # -- what several operations need ------------------------------------------------------------------------------------

    def seen(self, run_id: str, scope: m.Scope) -> Row:
        row = self.runs.get(run_id)
        if row is None or not (scope is m.ALL or row.tenant == scope):
            raise NotFound(run_id)
        return row

    def mine(self, scope: m.Scope) -> list[Row]:
        return [row for row in self.runs.values() if scope is m.ALL or row.tenant == scope]

    def held(self, lease: m.Lease) -> Row | None:
        row = self.runs.get(lease.run_id)
        fence = row and (row.status, row.attempts, row.lease_owner)
        return row if fence == ("running", lease.attempts, lease.mark) else None

    def asked(self, row: Row) -> bool:
        return row.cancel_requested_at is not None and row.cancel_refused_at is None

    def at(self, row: Row, instant: int | None) -> int | None:
        """Not later than the deadline; what is past is now."""
        if instant is not None and row.deadline_at is not None:
            instant = min(instant, row.deadline_at)
        return None if instant is None or instant <= self.clock() else instant

    def ready(self, row: Row) -> None:
        row.status, row.available_at, row.wake_after, row.waiting_for = "pending", None, 0, None

    # -- enqueue ---------------------------------------------------------------------------------------------------------

    def enqueue(self, new_runs: Sequence[m.NewRun]) -> list[tuple[str, str]]:
        before = (dict(self.runs), dict(self.keys), list(self.edges), self.serial)
        saved = {run_id: dict(vars(row)) for run_id, row in self.runs.items()}
        try:
            return [self.submit(new) for new in new_runs]
        except Conflict:
            self.runs, self.keys, self.edges, self.serial = before
            for run_id, values in saved.items():
                vars(self.runs[run_id]).update(values)
            raise

    def submit(self, new: m.NewRun) -> tuple[str, str]:
        found = new.run_id if new.run_id in self.runs else self.keys.get((new.tenant, new.idempotency_key or ""))
        if found is not None:
            if self.runs[found].name != new.name:
                raise Conflict("the id or the key belongs to another function")
            return found, "existing"
        joined = self.keys.get((new.tenant, f"~join:{new.run_id}"))
        if joined is not None and new.coalesce_key is not None:
            return joined, "coalesced"  # this very submit, whose answer was lost
        starts = [self.clock() + new.delay] if new.delay is not None else []
        start = max([*starts, *([new.start_at] if new.start_at is not None else [])], default=None)
        for row in self.runs.values():
            if new.coalesce_key is None or (row.tenant, row.coalesce_key) != (new.tenant, new.coalesce_key):
                continue
            if row.status == "pending" and row.attempts == 0:
                return self.join(row, new, start)
        self.serial += 1
        row = Row(
            **dict.fromkeys(FIELDS), positions=(), wake_delay=0, wake_on_failure=False, order=self.serial, retried=False
        )
        for name in {field.name for field in dataclasses.fields(m.NewRun)} & set(FIELDS):
            setattr(row, name, getattr(new, name))
        row.status, row.created_at, row.submitted = "pending", self.clock(), self.serial
        row.attempts = row.failures = row.reclaims = row.wake_seq = row.wake_after = 0
        row.compensating, row.tags, row.orphans = False, dict(new.tags), False
        if new.deadline_after is not None:
            row.deadline_at = self.clock() + new.deadline_after
        parent = self.runs.get(new.parent_run_id or "")
        if parent is not None and parent.deadline_at is not None and not new.detached:
            row.deadline_at = min(parent.deadline_at, row.deadline_at or parent.deadline_at)
        row.length = None if row.deadline_at is None else row.deadline_at - row.created_at
        row.available_at = self.at(row, start)
        row.wake_after = sum(self.runs[edge.run_id].status != "completed" for edge in new.depends_on)
        self.edges += [(new.run_id, edge.run_id) for edge in new.depends_on]
        if row.wake_after:
            row.status = "suspended"
        if new.sequence_key is not None and any(self.line(row)):
            row.blocked_on = "sequence"
        if new.idempotency_key is not None:
            self.keys[new.tenant, new.idempotency_key] = new.run_id
        self.runs[new.run_id], self.journals[new.run_id], self.signals[new.run_id] = row, [], []
        return new.run_id, "created"

    def join(self, row: Row, new: m.NewRun, start: int | None) -> tuple[str, str]:
        if row.name != new.name:
            raise Conflict("the coalesce key belongs to another function")
        row.priority = max(row.priority, new.priority)
        if new.on_coalesce == "replace":
            row.input = new.input
        if new.on_coalesce == "replace" and new.max_delay is not None:
            row.available_at = None if start is None else self.at(row, min(start, row.created_at + new.max_delay))
        else:
            row.available_at = self.at(row, None if None in (start, row.available_at) else min(start, row.available_at))
        self.keys[new.tenant, f"~join:{new.run_id}"] = row.run_id
        if new.idempotency_key is not None:
            self.keys[new.tenant, new.idempotency_key] = row.run_id
        return row.run_id, "coalesced"

    def line(self, row: Row) -> list[Row]:
        """Live runs of the same sequence, but not this one, in the order of their submission."""
        key = (row.tenant, row.sequence_key)
        others = [
            other for other in self.runs.values() if (other.tenant, other.sequence_key) == key and other is not row
        ]
        live = [other for other in others if row.sequence_key is not None and other.status not in m.TERMINAL]
        return sorted(live, key=lambda other: other.order)

    # -- claim -----------------------------------------------------------------------------------------------------------

    def claimable(self, request: m.ClaimRequest, *, alone: bool = False, paused: bool = False) -> list[Row]:
        """What this request may take, in the order of each queue; limits of concurrency are looked at elsewhere."""
        rows = [row for row in self.mine(request.scope) if row.status == "pending" and row.queue in request.queues]
        rows = [row for row in rows if row.available_at is None and row.blocked_on == ("alone" if alone else None)]
        known, names = set(request.functions), {name for name, _ in request.functions}
        rows = [row for row in rows if (row.name in names if row.version is None else (row.name, row.version) in known)]
        rows = [row for row in rows if not self.journals[row.run_id] or row.replay_family in (None, request.family)]
        rows = [row for row in rows if paused or not any(self.rule(row, scope).paused for scope in self.scopes(row))]
        return sorted(rows, key=lambda row: (row.queue, -row.priority, row.order))

    def ends_at_claim(self, row: Row) -> str | None:
        if self.asked(row) and not self.journals[row.run_id]:
            return "cancelled"
        late = row.deadline_at is not None and row.deadline_at <= self.clock()
        return "timed_out" if late and not row.compensating else None

    def scopes(self, row: Row) -> list[str]:
        key = [f"key:{row.queue}"] if row.concurrency_key is not None else []
        return [f"queue:{row.queue}", f"function:{row.name}", *key]

    def rule(self, row: Row, scope: str) -> m.QueueRecord:
        return self.queues.get((row.tenant, scope)) or m.QueueRecord(scope_name=scope)

    def full(self, row: Row) -> bool:
        """Whether a scope of this run has all its permits out."""
        for scope in self.scopes(row):
            limit = self.rule(row, scope).max_concurrency
            peers = [
                r
                for r in self.runs.values()
                if r.status == "running" and r.tenant == row.tenant and scope in self.scopes(r)
            ]
            if scope.startswith("key:"):
                peers = [peer for peer in peers if peer.concurrency_key == row.concurrency_key]
            if limit is not None and len(peers) >= limit:
                return True
        return False

    def claim(
        self, request: m.ClaimRequest, taken: Sequence[str], ended: Iterable[str], held_up: Iterable[str]
    ) -> None:
        """Check and follow a claim that gave `taken`, landed `ended` and set `blocked_on` of `held_up` to a full scope."""
        again = [row for row in self.runs.values() if row.status == "running" and row.lease_owner == request.mark]
        if again:
            assert sorted(taken) == sorted(row.run_id for row in again), (
                "the same mark gives what it holds, and nothing more"
            )
            return
        lone = self.claimable(request, alone=True) if request.alone else []
        if (
            len(taken) == 1
            and taken[0] in [row.run_id for row in lone]
            and self.ends_at_claim(self.runs[taken[0]]) is None
        ):
            candidates = [self.runs[taken[0]]]
        else:
            candidates = self.claimable(request)
        ids = [row.run_id for row in candidates]
        ending = self.claimable(request, paused=True) + (
            self.claimable(request, alone=True, paused=True) if request.alone else []
        )
        for run_id in ended:
            row = self.runs[run_id]
            assert row in ending, f"a claim may not land {run_id}"
            assert self.ends_at_claim(row), f"a claim may not land {run_id}"
            end = self.ends_at_claim(row) or ""
            self.land(row, end, m.Failure(message="", kind="deadline" if end == "timed_out" else end))
        self.wake_parents()
        # What a landing released, the next in a line, may be taken by the same claim, and need not be.
        released = [row for row in self.claimable(request) if row not in candidates]
        free = [row for row in candidates if self.ends_at_claim(row) is None and row.status == "pending"]
        limited = any(
            rule.paused or rule.max_concurrency is not None or rule.rate_count is not None
            for rule in self.queues.values()
        )
        room = sum(min(most, sum(row.queue == queue for row in free)) for queue, most in request.queues.items())
        if not limited and not list(ended) and candidates == free and not lone:
            assert len(taken) == min(request.limit, room), f"took {len(taken)} of {[row.run_id for row in free]}"
        assert len(taken) <= request.limit
        for queue, most in request.queues.items():
            here = [run_id for run_id in taken if self.runs[run_id].queue == queue]
            waiting = [run_id for run_id in here if self.runs[run_id] not in released]
            assert len(here) <= most, f"more than was asked for of the queue {queue}: {here}"
            assert waiting == sorted(waiting, key=ids.index), f"order inside the queue {queue}: {waiting}"
        for row in free:
            if row.run_id in taken:
                assert not self.full(row), f"{row.run_id} was taken past a limit"
                self.take(row, request)
            elif any(
                self.runs[run_id].queue == row.queue and ids.index(run_id) > ids.index(row.run_id)
                for run_id in taken
                if run_id in ids
            ):
                assert self.full(row) or row.run_id in held_up or limited, f"{row.run_id} was passed over"
        for row in released:
            if row.run_id in taken:
                assert not self.full(row), f"{row.run_id} was taken past a limit"
                self.take(row, request)
        assert all(self.runs[run_id].status == "running" for run_id in taken), "took what may not be claimed"
        for run_id in held_up:
            assert limited, f"{run_id} is held up by a limit that is not set"

    def take(self, row: Row, request: m.ClaimRequest) -> None:
        row.status, row.lease_owner, row.leased_until = "running", request.mark, self.clock() + request.lease
        row.attempts, row.blocked_on, row.retried = row.attempts + 1, None, False
        row.started_at = self.clock() if row.started_at is None else row.started_at
        row.replay_family = row.replay_family if self.journals[row.run_id] else request.family

    # -- the holder ------------------------------------------------------------------------------------------------------

    def append(self, entries: Sequence[tuple[m.Lease, m.NewRecord]]) -> list[tuple[str, m.StepRecord | None]]:
        answers: list[tuple[str, m.StepRecord | None]] = []
        for lease, new in entries:
            row = self.held(lease)
            there = [record for record in self.journals.get(lease.run_id, []) if record.step_id == new.step_id]
            if row is None or there:
                answers.append(("lost", None) if row is None else ("recorded", there[0]))
                continue
            same = {
                name: getattr(new, name)
                for name in ("step_id", "kind", "position", "seen", "digest", "result", "signal_seq")
            }
            at = max(self.clock(), new.floor)
            record = m.StepRecord(**same, at=at, started_at=new.started_at, fence=row.attempts)
            self.journals[row.run_id].append(record)
            row.mismatch_since, row.progress = None, new.progress or row.progress
            row.compensating = row.compensating or new.kind == "compensation"
            if new.kind == "pivot" and row.cancel_refused_at is None:
                row.cancel_refused_at = self.clock()
            for child in new.children:
                self.submit(child)
            answers.append(("appended", record))
        return answers

    def renew(self, renewals: Sequence[m.Renewal], lease: int) -> list[m.Renewed]:
        answers = []
        for renewal in renewals:
            row = self.held(renewal.lease)
            if row is not None:
                row.leased_until, row.progress = self.clock() + lease, renewal.progress or row.progress
            held = row is not None and m.Renewed(state="held", cancel_requested=self.asked(row), wake_seq=row.wake_seq)
            answers.append(held or m.Renewed(state="lost"))
        return answers

    def settle(self, entries: Sequence[tuple[m.Lease, m.Outcome]]) -> list[str]:
        """Terminal states first, suspensions last: each against the wakes that the others of its batch have made."""
        kinds = [0 if type(outcome) in LANDED else 2 if type(outcome) is m.Suspended else 1 for _, outcome in entries]
        answers: dict[int, str] = {}
        for kind in (0, 1, 2):
            answers |= {at: self.settle_one(*entry) for at, entry in enumerate(entries) if kinds[at] == kind}
            self.wake_parents()
        return [answers[at] for at in range(len(entries))]

    def settle_one(self, lease: m.Lease, outcome: m.Outcome) -> str:
        row = self.held(lease)
        if row is None:
            row = self.runs.get(lease.run_id)
            same = row is not None and (row.attempts, row.lease_owner) == (lease.attempts, lease.mark)
            return "landed" if same and row and row.status == self.state_after(outcome) else "lost"
        if not isinstance(outcome, m.Cancelled | m.HandedBack) and self.asked(row):
            return "woken"
        if isinstance(outcome, m.Suspended) and outcome.wake_seq != row.wake_seq:
            return "woken"
        row.leased_until = None
        if isinstance(outcome, m.Completed):
            self.land(row, "completed", None, outcome.output)
        elif isinstance(outcome, m.Suspended):
            row.status, row.waiting_for, row.wake_after, row.reclaims = (
                "suspended",
                outcome.waiting_for,
                outcome.wake_after,
                0,
            )
            row.wake_delay, row.wake_on_failure = outcome.wake_delay, outcome.wake_on_failure
            row.available_at = min([at for at in (outcome.until, row.deadline_at) if at is not None], default=None)
        elif isinstance(outcome, m.Retry):
            row.failures += 1
            self.ready(row)
            self.take_out(row, set(outcome.failure.positions))
            row.available_at = self.at(row, self.clock() + outcome.after)
        elif isinstance(outcome, m.HandedBack):
            self.ready(row)
            row.reclaims, row.available_at = 0, None if self.asked(row) else self.at(row, self.clock() + outcome.after)
            if outcome.failure is not None and outcome.failure.kind == "non_determinism":
                row.mismatch_since = self.clock() if row.mismatch_since is None else row.mismatch_since
        else:
            row.failures += isinstance(outcome, m.Failed)
            self.land(row, LANDED[type(outcome)], outcome.failure)
        return "landed"

    def state_after(self, outcome: m.Outcome) -> str:
        return "suspended" if isinstance(outcome, m.Suspended) else LANDED.get(type(outcome), "pending")

    def land(self, row: Row, status: str, failure: m.Failure | None, output: str | None = None) -> None:
        in_line = row.blocked_on == "sequence"  # it waited for its turn itself: nobody's turn comes by its end
        row.status, row.output, row.finished_at, row.leased_until = status, output, self.clock(), None
        row.purge_at = self.clock() + (self.keep if row.keep is None else row.keep)
        row.blocked_on = row.available_at = row.mismatch_since = None
        row.error, row.error_kind, row.error_detail, row.positions = None, None, None, ()
        if failure is not None:
            row.error, row.error_kind, row.error_detail = failure.message, str(failure.kind), failure.detail
            row.positions = failure.positions
        children = [
            c
            for c in self.runs.values()
            if c.parent_run_id == row.run_id and c.status not in m.TERMINAL and not c.detached
        ]
        row.orphans = status != "completed" and bool(children)
        for other in self.line(row)[:1] if not in_line else []:
            other.blocked_on = None if other.blocked_on == "sequence" else other.blocked_on
        for node in [self.runs[node] for node, on in self.edges if on == row.run_id and node in self.runs]:
            if (node.status, node.attempts) == ("suspended", 0) and status != "completed":
                self.land(node, "cancelled", m.Failure(message="", kind="upstream"))
            elif (node.status, node.attempts) == ("suspended", 0):
                node.wake_after -= 1
                node.status = "suspended" if node.wake_after else "pending"
        schedule = self.schedules.get((row.tenant, row.schedule_id or ""))
        if schedule is not None:
            schedule.consecutive_failures = 0 if status == "completed" else schedule.consecutive_failures + 1
        self.landed.append(row)

    def wake_parents(self) -> None:
        """After all landings of one write: each parent that lives counts those of its children that landed."""
        landed, self.landed = self.landed, []
        for parent in [
            self.runs[run_id]
            for run_id in dict.fromkeys(row.parent_run_id or "" for row in landed)
            if run_id in self.runs
        ]:
            ends = [row for row in landed if row.parent_run_id == parent.run_id]
            if parent.status in m.TERMINAL:
                continue
            parent.wake_seq += len(ends)
            if parent.status != "suspended" or not parent.attempts or not parent.wake_after:
                continue
            parent.wake_after = max(parent.wake_after - len(ends), 0)
            soon = self.clock() + parent.wake_delay
            if parent.wake_on_failure and any(row.status != "completed" for row in ends):
                self.ready(parent)
            elif parent.wake_after == 0 and parent.wake_delay:
                parent.available_at = soon if parent.available_at is None else min(soon, parent.available_at)
            elif parent.wake_after == 0:
                self.ready(parent)

    # -- what a retry takes out ------------------------------------------------------------------------------------------

    def take_out(self, row: Row, failed: set[int], *, keep_children: bool = False) -> None:
        """The failed records and all that were made after the first of them was seen; children among them start anew (50)."""
        journal = self.journals[row.run_id]
        gone = {r.step_id for r in journal if failed and (r.position in failed or r.seen >= min(failed))}
        ends = {r.step_id.removesuffix(":end"): r for r in journal if r.kind == "child"}
        anew = {r.step_id for r in journal if r.kind == "start" and r.step_id in gone}
        starts = {r.step_id for r in journal if r.kind == "start"}
        ends = {
            start: end for start, end in ends.items() if start in starts
        }  # a node of a graph has no start of its own
        anew |= {start for start, end in ends.items() if end.position in failed}
        anew |= {start for start, end in ends.items() if end.step_id in gone and self.child(row, start) is None}
        for start in set() if keep_children else sorted(anew):
            gone |= {start, f"{start}:end"}
            child = self.child(row, start)
            if child is not None:
                child.parent_step_id += f"@{row.attempts}"
                if not child.detached:
                    self.cancel_one(child.run_id, m.ALL, "")
        recorded = {r.step_id for r in journal if r.kind != "attempt"}
        for record in journal:  # attempt rows go and stay with the record of their step
            step = record.step_id.rpartition("@")[0]
            if record.kind == "attempt" and step in recorded:
                gone = gone | {record.step_id} if step in gone else gone - {record.step_id}
        left = self.journals[row.run_id] = [r for r in journal if r.step_id not in gone]
        kinds = {r.kind for r in journal} - {r.kind for r in left}
        row.compensating = row.compensating and "compensation" not in kinds
        if "pivot" in kinds:
            row.cancel_requested_at = None if row.cancel_refused_at is not None else row.cancel_requested_at
            row.cancel_refused_at = None
        if not left:
            row.started_at = row.replay_family = None

    def child(self, row: Row, start: str) -> Row | None:
        """The child that a step started and still answers to; None: it was purged."""
        found = [c for c in self.runs.values() if (c.parent_run_id, c.parent_step_id) == (row.run_id, start)]
        return found[0] if found else None

    def cancel_one(self, run_id: str, scope: m.Scope, reason: str) -> bool:
        row = self.runs.get(run_id)
        if row is None or not (scope is m.ALL or row.tenant == scope) or row.status in m.TERMINAL:
            return False
        if row.attempts == 0:
            self.land(row, "cancelled", m.Failure(message="", kind="cancelled"))
            self.wake_parents()
            return True
        first = row.cancel_requested_at is None
        row.cancel_requested_at = self.clock() if first else row.cancel_requested_at
        if row.cancel_refused_at is None:
            row.wake_seq += 1 if first else 0
            if row.status in ("pending", "suspended"):
                self.ready(row)
        return True


def by_position(journal: list[m.StepRecord]) -> list[m.StepRecord]:
    """The order in which a journal is read: by position, attempt rows last."""
    placed = sorted(
        (record for record in journal if record.position is not None), key=lambda record: record.position or 0
    )
    return placed + [record for record in journal if record.position is None]
