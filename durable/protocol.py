"""The contract that every backend fulfils. The docstrings are the specification: a sentence with a number in brackets is a rule
of `docs/reference/semantics.md`, and the conformance suite has a test with that sentence as its name.

What holds for every method:

* It is one atomic transition of the store: applied whole or not at all, and durable when it returns.
* It runs in a short transaction of its own; only `transaction` and `tx` carry writes of the user (63).
* It may be repeated after a lost answer and makes no second effect (42).
* It takes and gives frozen values; no SQL, row or driver object crosses, but the caller's own transaction (`tx`, typed `object`).
* The backend decides nothing and never calls the engine; the engine decides and never opens a transaction.
* "Now" is the store's clock; callers pass durations, and instants only where a user stated one.
* `scope` says whose rows the call may see, count or change; another tenant's row is the same as none (57, 59).
* Every write of a holder is matched, in the write itself, on run id, `running` and the fence (attempts, mark) (3).
* Errors it raises: StoreUnavailable (repeat it), SchemaMismatch, PayloadTooLarge, NotFound, Conflict, StoreError; no other class.

The engine calls this; backends implement `Store`; nobody else needs to know which one it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable
from uuid import UUID

from .model import (
    Appended,
    Capabilities,
    Check,
    Claimed,
    ClaimRequest,
    Explanation,
    Finding,
    Firing,
    Inbox,
    Instant,
    Lease,
    Names,
    NewRecord,
    NewRun,
    NewSignal,
    Outcome,
    Page,
    Promoted,
    Pulse,
    QueueRecord,
    QueueStats,
    Renewal,
    Renewed,
    RunQuery,
    RunRecord,
    Schedule,
    ScheduleSpec,
    SchemaStatus,
    Scope,
    Settled,
    Signal,
    StepRecord,
    Submitted,
    Swept,
    TenantStats,
    WorkerRecord,
)
from .settings import Micros, Settings


class RunStore(Protocol):
    """Runs, from submit to landing."""

    async def enqueue(self, runs: Sequence[NewRun], *, tx: object | None = None) -> Sequence[Submitted]:
        """Store runs, or join or find those that are there already; one answer per run, in order; all or none (40).

        Keys are stored as `{tenant_id}:{key}`, or `:{key}` untagged; records give the key back as it was passed (34).
        A run id that exists already, with the same name, is an `existing` answer: a submit can be repeated (42).
        One run per idempotency key for as long as the run exists, in any state; a second submit returns that run unchanged;
        the same key for another function is a Conflict (35). Two runs of one batch may share a key: the later one finds the first.
        At most one run per coalesce key is pending with attempts = 0, and a submit that finds it joins it (36).
        The same pending coalesce key for another function is a Conflict (36).
        A joiner never delays the waiting run: the earlier start and the higher priority win (37).
        `on_coalesce="replace"` takes the newest input, and with `max_delay` may postpone up to that long after the first submit (37).
        Idempotency comes first; a join records the joiner's idempotency key for the run it joined (38).
        With `tx` everything happens in the caller's transaction: the run exists if and only if that commits, nobody is woken
        before, and a joined run is locked until its end (41).
        A run that `depends_on` others is suspended with attempts = 0 until all of them have completed; `wake_after` counts the
        rest (77). One that depends on a run that is not there is NotFound; with an edge of kind `end` it lands cancelled, `upstream`,
        at once: what is gone has ended (31). A run with a `sequence_key` waits, `blocked_on = 'sequence'`, while an earlier one of that
        key and tenant has not landed (75). A child (parent_run_id) takes its parent's deadline if that is earlier, unless detached (12).
        `available_at` is never later than the deadline (12).
        """
        ...

    async def claim(self, request: ClaimRequest) -> Sequence[Claimed]:
        """Take up to `limit` claimable runs, each with a new fence and its journal.

        Claimable: pending, due, not blocked. Order inside a queue: priority (higher first), then `submitted` (7).
        Filtered by queue, by name and version, by replay family where the run has records, and by scope (7); a run of a name
        that is not asked for stays pending, untouched. A paused queue gives nothing, nor does a paused tenant.
        In a queue that is `fair`, a claim of ALL takes the tenants in turn and goes on behind the last one with the next claim; the
        order holds among the runs of each (7, 57). Untagged runs have a turn, too, as soon as they are at the front of the queue.
        `attempts` grows by one, in the same write that sets running, the lease and the mark (1).
        Two claims never get one run; the same mark again returns what that claim holds, and claims nothing more (8).
        A run past its deadline lands timed_out instead, unless `compensating` (12); one without a record that carries an ask
        that is not refused lands cancelled (45); these are not returned.
        A run takes a permit of each limited scope (queue, function, key) in this write; one that finds a scope full gets
        `blocked_on` = that scope and is left behind (73, 74).
        `alone` takes at most one run that is blocked on 'alone', together with nothing else (15).
        The work done does not grow with other rows: reads at most twice the rows it takes (10).
        The journal is read after the claim is visible, by position, attempt rows last (3). `started_at` is set by the first claim.
        A run claimed with ALL comes with its own tenant in the lease, and is recorded and settled under it (58).
        """
        ...

    async def renew(self, renewals: Sequence[Renewal], *, lease: Micros) -> Sequence[Renewed]:
        """Prolong leases by `lease` from now, all in one statement; write the progress that comes with them (13, 29a).

        `held` with the cancel ask and the wake counter, `lost`, or `unknown` where a commit under way holds the row (13).
        """
        ...

    async def settle(self, entries: Sequence[tuple[Lease, Outcome]]) -> Sequence[Settled]:
        """The holder's only door out. One answer per entry: landed, woken or lost (5).

        One bad entry never strands its batch (9). A repeated settle whose answer was lost recognises itself: landed (6).
        Every outcome but Cancelled and HandedBack also matches "no ask, or refused", else it answers woken (43).
        Suspended also matches `wake_seq`, else it answers woken (31); its `until` is never later than the deadline (12).
        Terminal states go through the one landing of the backend: `finished_at`, `purge_at` = now + keep, output only with
        completed and error otherwise, permits given back, the next of a sequence and the next blocked run released (73-75),
        dependents released or landed `upstream` (77), the parent's `wake_seq` grown by the number of its children that landed
        and `wake_after` lowered, waking it at 0 (31), schedule failures counted or reset (55).
        Suspended and HandedBack set `reclaims` to 0 (15); Retry and Failed add one to `failures` (2); Retry takes out the failed records
        and all that came after the first of them was seen (50); HandedBack leaves `failures`, and with kind non_determinism
        sets `mismatch_since` if it is not set since the last record (25).
        A landed, suspended or handed-back run has no lease; its mark stays until the next claim (4).
        Leaving `running` gives the permits back (73).
        """
        ...

    async def request_cancel(self, run_ids: Sequence[str], *, scope: Scope, reason: str = "") -> Sequence[bool]:
        """Ask runs to stop. True: the run will end cancelled, or the ask will be refused and said so (43).

        Never claimed (attempts = 0): cancelled at once. Otherwise the ask is stamped (the first stamp wins), `wake_seq` grows,
        and a pending or suspended run becomes claimable now. A run past its pivot keeps the stamp, is not woken, and goes on
        (46). False for terminal, unknown, or another tenant's run.
        """
        ...

    async def retry(self, run_id: str, *, scope: Scope, attempts: int, extra_attempts: int = 0) -> RunRecord:
        """Operator retry: from any terminal state but completed to pending, in one write (50).

        Takes out the failed records that the error carries and all that came after the first of them was seen; for a cancelled
        or timed-out run its cancel or timeout record counts as the failed one. Children among them start anew: the old child
        keeps its row and gets the suffix `@{attempts of the parent}` on `parent_step_id`. `failures` and `reclaims` are 0, the
        cancel stamps and the error are cleared, a deadline starts anew with its old length, `extra_attempts` is added.
        `attempts` is what the caller saw: where the run has moved on since, nothing is done and the run is returned as it is.
        Nodes behind it that landed `upstream` are suspended again, and a graph that landed goes on, and each one around it; for a
        graph all its failed nodes come back, and those of a graph that is such a node (77).
        Conflict: not terminal, completed, or a compensation has run. NotFound: unknown, purged, or another tenant's.
        """
        ...

    async def fork(self, run_id: str, *, scope: Scope, new_run_id: str, from_step: int | str) -> RunRecord:
        """A new run with the records before the chosen step copied (51).

        `from_step`: a position, or a step id (the first record that is not copied). Fresh keys, `forked_from`, the same seed.
        A copied start of a child whose end lies after the cut is dropped, with all that was made after it was seen (a body comes
        to that only behind the child that it has yet to start again). Inserted pending with attempts = 1. Repeated with the
        same `new_run_id` it returns that run. NotFound, or Conflict for a step id that the journal lacks.
        """
        ...

    async def get(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[RunRecord | None]:
        """Runs by id, in order; None for unknown, purged or another tenant's (57).

        Whoever looks at runs, here or by `find`, `children` or `pulse`, sees a damaged row as one: its error says so, the fields
        that can not be read are neutral, an unknown status is shown as failed. It hides no other run (9).
        """
        ...

    async def find(self, query: RunQuery, *, scope: Scope) -> Page:
        """A page of runs, newest first, by keyset: a run that comes or goes meanwhile neither shifts nor repeats a page.

        A cursor that is not ours raises Conflict. `limit` is at most 1,000.
        """
        ...

    async def count(self, query: RunQuery, *, scope: Scope) -> int:
        """How many runs the query has, whatever its limit and cursor."""
        ...

    async def children(self, run_id: str, *, scope: Scope) -> Sequence[RunRecord]:
        """The child runs of a run, by `submitted`; nodes of a graph are children of the graph."""
        ...

    async def pulse(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[Pulse | None]:
        """The little that waiting handles need, for many runs in one read."""
        ...


class StepJournal(Protocol):
    """Records of steps: fenced, unique per (run, step_id), the first writer wins."""

    async def append(self, records: Sequence[tuple[Lease, NewRecord]]) -> Sequence[Appended]:
        """Add records in one write; one answer per record, in order.

        The fence is matched in the write (3). Nothing written tells apart `lost` (fence gone) and `recorded` (a record of that
        step_id is there: the stored one is returned) (20). The stamp `at` is the store's, not lower than `floor` (19).
        `children` are inserted in the same write as their record, linked by (parent, step) (48); a PIVOT stamps
        `cancel_refused_at` (46), a COMPENSATION sets `compensating` (49), `progress` is written beside (29a). One bad entry
        never strands its batch (9).
        """
        ...

    async def history(self, run_id: str, *, scope: Scope) -> Sequence[StepRecord]:
        """The journal by position, attempt rows last. NotFound for an unknown, purged or another tenant's run."""
        ...

    async def transaction(
        self,
        lease: Lease,
        work: Callable[[Any], Awaitable[NewRecord]],
        *,
        timeout: Micros,
    ) -> Appended:
        """Exactly once: call `work` with the store's native connection; what it writes and the record that it returns commit
        together, the fence checked last by a write or lock that holds until the commit (26). A store that was made to roll back by
        another transaction may call `work` once more.

        If `work` raises, nothing is left and its error passes through. A fence that is gone leaves nothing: `lost`. A record that
        is there already: `work` is not called, or its writes are undone, and the stored record is returned: `recorded`.
        Commit and rollback by the caller are refused with Misuse. Over `timeout`: TimeoutError, nothing left.
        """
        ...


class Scheduler(Protocol):
    """Cron rows. The engine computes instants; the store compares, advances and enqueues in one transition."""

    async def put_schedule(self, spec: ScheduleSpec, *, scope: Scope) -> Schedule:
        """Register or change. The same cron and zone leave next instant and paused state alone, a changed one takes the
        spec's `next_fire_at`, changed input alone keeps the instant (56). A parked row that is put again is unparked."""
        ...

    async def pause_schedule(
        self, schedule_id: str, *, scope: Scope, paused: bool, next_fire_at: Instant | None = None
    ) -> bool:
        """Pause or resume; on resume `next_fire_at`, if given, is the new next instant. False: unknown or another tenant's."""
        ...

    async def park_schedule(self, schedule_id: str, *, scope: Scope, reason: str) -> bool:
        """Take a schedule out of the due scan with a visible reason (55, 56)."""
        ...

    async def remove_schedule(self, schedule_id: str, *, scope: Scope) -> bool:
        """Remove the row; its slot rows stay. False: unknown or another tenant's."""
        ...

    async def schedules(self, *, scope: Scope, schedule_ids: Sequence[str] = ()) -> Sequence[Schedule]:
        """Schedules by id; all of the scope without ids."""
        ...

    async def due_schedules(self, *, scope: Scope, limit: int) -> tuple[Instant, Sequence[Schedule]]:
        """Now, and the enabled schedules that are due, oldest first."""
        ...

    async def fire(self, firing: Firing) -> Sequence[Submitted] | None:
        """If the next instant is still `expected`: write slot rows, runs and the next instant together (53).

        A slot that has a row is left out of the answer. None: somebody else fired, or the row is gone, paused or parked.
        """
        ...


class Mailbox(Protocol):
    """Signals: ordered, kept until taken, waking in the same write."""

    async def send(self, signal: NewSignal, *, scope: Scope, tx: object | None = None) -> int:
        """Store a signal and wake its run in one write; returns its seq (32).

        The run's `wake_seq` grows first, only if it is not terminal; the new value is the signal's seq. A suspended run becomes
        claimable at once. The same `dedup_id` again returns the first one's seq and does nothing. To a terminal run: Conflict;
        to an unknown or another tenant's: NotFound.
        """
        ...

    async def signals(self, run_id: str, *, scope: Scope) -> Sequence[Signal]:
        """Every signal that was sent to a run and is kept, taken or not, by seq (32). NotFound for an unknown, purged or another
        tenant's run."""
        ...

    async def inbox(self, leases: Sequence[Lease]) -> Sequence[Inbox | None]:
        """What came from outside, read in one snapshot with `wake_seq` (31). None: the lease is lost."""
        ...


class Upkeep(Protocol):
    """Chores: bounded, safe everywhere at once, no leader (11)."""

    async def promote(self, *, scope: Scope, limit: int) -> Promoted:
        """Make due pending and suspended runs claimable, oldest due first, at most `limit` (11)."""
        ...

    async def sweep(self, *, scope: Scope, limit: int, max_reclaims: int) -> Swept:
        """Return runs whose lease lapsed to pending: `reclaims` + 1, or 0 where the lapsed claim made a record (15).

        From reclaims ≥ 2 they are `blocked_on = 'alone'`; past `max_reclaims` they land failed, kind reclaim_limit, unless
        `compensating`, which goes on. `failures` stays. Permits are given back. `alone` names the queues in which such a run waits.
        """
        ...

    async def mend(self, *, scope: Scope, limit: int) -> int:
        """The nets: cancel live children of parents that landed in any state but completed, unless detached (48); wake suspended
        runs all of whose awaited children are terminal (31); release blocked runs whose scope is free (74)."""
        ...

    async def purge(self, *, scope: Scope, limit: int, older_than: Micros | None = None) -> int:
        """Delete at most `limit` terminal runs that are due, oldest first, with everything that belongs to them (60).

        Due: `purge_at` has come, or with `older_than` a landing that long ago. A run whose parent is not terminal is kept, unless
        detached. Keys go with their run, never before. Slot rows are kept 400 days (62). Interrupted anywhere it leaves no live
        run without its records and no record without its run (61). Also worker rows unseen for a day.
        """
        ...

    async def stats(self, *, scope: Scope) -> Sequence[QueueStats]:
        """Depths, oldest ready age and failures by kind, per queue."""
        ...

    async def register(self, worker: WorkerRecord) -> None:
        """Put or refresh a worker's row; `seen_at` is now (17)."""
        ...

    async def unregister(self, worker_id: str) -> None:
        """Remove a worker's row: it stopped in good order."""
        ...

    async def workers(self, *, scope: Scope) -> Sequence[WorkerRecord]:
        """The registry; a bound scope sees the workers that serve it."""
        ...

    async def queues(self, *, scope: Scope) -> Sequence[QueueRecord]:
        """The rows of flow control that belong to the scope; those of everybody together belong to ALL only (57)."""
        ...

    async def set_queue(self, queue: QueueRecord) -> None:
        """Put a row of flow control; it counts for the next claim (73). A row of ALL counts the runs of all tenants together.

        Conflict for a row that can mean nothing, before anything is written.
        """
        ...

    async def tenants(self, *, scope: Scope) -> Sequence[TenantStats]:
        """How many runs of each state and how many schedules each tenant has, the untagged first, then by id (57).

        A tenant is there as soon as it has a run, a schedule or a row of flow control; one that a scope is bound to always is.
        """
        ...

    async def erase(self, tenant: UUID, *, limit: int) -> int:
        """Delete what is stored of a tenant, at most `limit` runs, with everything that belongs to them (57, 61).

        Its schedules go first, so that nothing fires; then slots and runs, the oldest first, with records, signals and keys; behind the
        last of them its rows of flow control. How many of all these went; 0: nothing of the tenant is left.
        Conflict where it meets a live run, which may have outside effects to undo; that call writes nothing.
        """
        ...

    async def explain(self, run_id: str, *, scope: Scope) -> Explanation:
        """Why a run stands where it stands: also that no live worker knows it (7). NotFound as everywhere."""
        ...

    async def audit(self, *, scope: Scope) -> Sequence[Finding]:
        """Check every invariant that rows can show; an empty answer is a sound store."""
        ...


class Store(RunStore, StepJournal, Scheduler, Mailbox, Upkeep, Protocol):
    """All state of a run shares one transaction domain, so one class implements the five."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond the contract."""
        ...

    @property
    def settings(self) -> Settings:
        """The settings it was opened with."""
        ...

    def clock(self) -> Instant:
        """The store's clock as this process estimates it: for pacing, never for a decision that a write takes."""
        ...

    async def migrate(self) -> SchemaStatus:
        """Bring the tables to the version of this code: idempotent, resumable, safe when many start it at once (69)."""
        ...

    async def schema_status(self) -> SchemaStatus:
        """What is there, without changing it."""
        ...

    async def check(self) -> Sequence[Check]:
        """What doctor asks of a store: settings, schema, clock, room."""
        ...

    async def wait(self, topics: Sequence[str], timeout: Micros) -> None:
        """Return when one of the topics (`queue:NAME`, `run:ID`) may have news, after `timeout`, or for no reason (67)."""
        ...

    async def notify(self, topics: Sequence[str]) -> None:
        """Announce topics: a hint, never needed for correctness (67)."""
        ...

    async def close(self) -> None:
        """Finish what is under way and let go of threads and connections. A later call raises StoreUnavailable."""
        ...


@runtime_checkable
class Backend(Protocol):
    """What an entry point of the group `durable.backends` names: one object per URL scheme."""

    async def open(
        self,
        url: str,
        *,
        settings: Settings,
        names: Names = Names(),
        auto_migrate: bool | None = None,
        clock: Callable[[], Instant] | None = None,
    ) -> Store:
        """Open a store. `auto_migrate=None` is the backend's own default. `clock` drives time in tests (ConfigurationError where
        the server's clock can not be replaced). Raises ConfigurationError, StoreUnavailable or SchemaMismatch; nothing is
        half open."""
        ...

    def schema(self, names: Names = Names()) -> str:
        """The whole schema as text, for applications that own their migrations (69)."""
        ...


@runtime_checkable
class RowSecurity(Protocol):
    """A backend whose database can keep tenants apart by itself."""

    def row_security(self, names: Names = Names()) -> str:
        """The policies as text: with them, a role that is bound to a tenant reaches no row of another (57)."""
        ...


__all__ = ["Backend", "Mailbox", "RowSecurity", "RunStore", "Scheduler", "StepJournal", "Store", "Upkeep"]
