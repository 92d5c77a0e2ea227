"""The vocabulary: what runs, records, leases, signals and schedules are. Values, keyword-only, no behaviour.

Everybody above may use them; they know nobody. Instants are integer microseconds since the epoch, UTC (`Instant`), durations
integer microseconds (`Micros`), payloads JSON text (`Json`): one form for three stores. `datetime` appears in the faces only.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias
from uuid import UUID

from .settings import Micros
from .values import value

Instant: TypeAlias = int
Json: TypeAlias = str


class Status(enum.StrEnum):
    """The eight states of a run (semantics 1)."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    FORWARD_INCOMPLETE = "forward_incomplete"

    @property
    def terminal(self) -> bool:
        """True for the five states that only an operator's retry or the purge leaves."""
        return self in TERMINAL


TERMINAL: Final = frozenset(
    {Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.TIMED_OUT, Status.FORWARD_INCOMPLETE}
)

TRANSITIONS: Final[Mapping[tuple[Status | None, Status], frozenset[str]]] = {
    (None, Status.PENDING): frozenset({"enqueue", "fork"}),
    (None, Status.SUSPENDED): frozenset({"enqueue"}),  # an unreleased node of a graph
    (Status.PENDING, Status.RUNNING): frozenset({"claim"}),
    (Status.PENDING, Status.CANCELLED): frozenset({"cancel", "claim"}),  # attempts = 0 · an ask and no record (45)
    (Status.PENDING, Status.FAILED): frozenset({"claim"}),  # unreadable input (9)
    (Status.PENDING, Status.TIMED_OUT): frozenset({"claim"}),  # past its deadline (12)
    (Status.SUSPENDED, Status.PENDING): frozenset({"wake"}),
    (Status.SUSPENDED, Status.CANCELLED): frozenset(
        {"cancel", "upstream"}
    ),  # attempts = 0 · a node behind a failed one
    (Status.RUNNING, Status.PENDING): frozenset({"retry", "hand_back", "sweep"}),
    (Status.RUNNING, Status.SUSPENDED): frozenset({"suspend"}),
    (Status.RUNNING, Status.COMPLETED): frozenset({"settle"}),
    (Status.RUNNING, Status.FAILED): frozenset({"settle", "sweep"}),
    (Status.RUNNING, Status.CANCELLED): frozenset({"settle"}),
    (Status.RUNNING, Status.TIMED_OUT): frozenset({"settle"}),
    (Status.RUNNING, Status.FORWARD_INCOMPLETE): frozenset({"settle"}),
    (Status.FAILED, Status.PENDING): frozenset({"operator_retry"}),
    (Status.CANCELLED, Status.PENDING): frozenset({"operator_retry"}),
    (Status.CANCELLED, Status.SUSPENDED): frozenset({"operator_retry"}),  # a node behind the one that is retried (77)
    (Status.TIMED_OUT, Status.PENDING): frozenset({"operator_retry"}),
    (Status.FORWARD_INCOMPLETE, Status.PENDING): frozenset({"operator_retry"}),
}
"""Every transition that exists, with the doors that lead through it. There is no other (semantics 1)."""


class RecordKind(enum.StrEnum):
    """What a journal record is the end of."""

    STEP = "step"
    ATTEMPT = "attempt"  # a failed try of a step that will be tried again; no position, never delivered (24)
    TIMER = "timer"
    SIGNAL = "signal"
    TIMEOUT = "timeout"  # the end of a body by deadline or time-out (12)
    START = "start"  # a child run was started; its row is written in the same write
    CHILD = "child"  # a child run ended; step_id is "{start}:end"
    CANCEL = "cancel"
    PIVOT = "pivot"  # from here the run refuses a cancel; stamps cancel_refused_at in the same write (46)
    PUBLISH = "publish"
    COMPENSATION = (
        "compensation"  # registered before the step that it undoes; sets `compensating` in the same write (49)
    )
    PATCH = "patch"


class ErrorKind(enum.StrEnum):
    """Why a run did not complete, or why it was handed back."""

    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    RECLAIM_LIMIT = "reclaim_limit"
    PAYLOAD = "payload"
    NON_DETERMINISM = "non_determinism"
    MISUSE = "misuse"
    STUCK = "stuck"
    SPINNING = "spinning"
    UPSTREAM = "upstream"


class _Everyone(enum.Enum):
    ALL = "all tenants"


ALL: Final = _Everyone.ALL
Scope: TypeAlias = UUID | None | Literal[_Everyone.ALL]
"""Whose rows a call may touch: one tenant's, the untagged ones (None), or everybody's (`ALL`, never by default; 57, 59)."""

_TENANTS: Final = uuid.UUID("6f1c2f0e-52b1-5a5e-9d3a-2f6f0c8f4a11")


def tenant_id(name: str, /) -> UUID:
    """The tenant id of any name: the same name gives the same UUID, always and everywhere (semantics 57)."""
    if not isinstance(name, str) or not name:
        raise ValueError("a tenant's name is text and not empty")
    return uuid.uuid5(_TENANTS, name)


def new_run_id() -> str:
    """A UUIDv7 as text: rows of one time lie together. Order is never read from it (clients' clocks differ)."""
    stamp = time.time_ns() // 1_000_000
    value = (stamp & (1 << 48) - 1) << 80 | 0x7 << 76 | 0b10 << 62
    bits = int.from_bytes(os.urandom(10), "big")
    return str(uuid.UUID(int=value | (bits & 0xFFF) << 64 | bits >> 18))


@value
class Names:
    """How the tables are called: a schema (PostgreSQL) and a new name for any table (`{"durable_run": "jobs_run"}`)."""

    schema: str | None = None
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


# -- runs ---------------------------------------------------------------------------------------------------------------


@value
class Dependency:
    """An edge of a static graph: this run waits until `run_id` has completed."""

    run_id: str
    kind: Literal["control", "data", "end"] = "control"
    """`end`: it waits for the end, however that is; a run that is gone has ended (31)."""
    position: int = 0


@value
class NewRun:
    """A run to be stored. Keys are as the caller passed them; the store prefixes the tenant (34)."""

    run_id: str
    name: str
    input: Json
    seed: bytes
    tenant: UUID | None = None
    queue: str = "default"
    priority: int = 0
    delay: Micros | None = None
    start_at: Instant | None = None
    """Stated by the user; the later one of `delay` and `start_at` counts. Both None, or past: claimable now."""
    deadline_at: Instant | None = None
    deadline_after: Micros | None = None
    idempotency_key: str | None = None
    coalesce_key: str | None = None
    on_coalesce: Literal["join", "replace"] = "join"
    max_delay: Micros | None = None
    sequence_key: str | None = None
    concurrency_key: str | None = None
    max_attempts: int | None = 1
    """Executions that may fail; None: without end."""
    options: Json | None = None
    """Overrides of the function's declaration that the holder needs (retry back-off, timeout)."""
    version: str | None = None
    fingerprint: str | None = None
    keep: Micros | None = None
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    parent_run_id: str | None = None
    parent_step_id: str | None = None
    detached: bool = False
    schedule_id: str | None = None
    scheduled_for: Instant | None = None
    depends_on: tuple[Dependency, ...] = ()


Disposition: TypeAlias = Literal["created", "existing", "coalesced"]


@value
class RunRecord:
    """A run as it stands in the store: what get, find and claim give."""

    run_id: str
    name: str
    status: Status
    tenant: UUID | None
    input: Json
    output: Json | None
    error: str | None
    error_kind: str | None
    error_detail: Json | None
    queue: str
    priority: int
    attempts: int
    failures: int
    reclaims: int
    submitted: int
    created_at: Instant
    updated_at: Instant
    started_at: Instant | None
    finished_at: Instant | None
    available_at: Instant | None
    leased_until: Instant | None
    lease_owner: str | None
    deadline_at: Instant | None
    purge_at: Instant | None
    cancel_requested_at: Instant | None
    cancel_refused_at: Instant | None
    idempotency_key: str | None
    coalesce_key: str | None
    sequence_key: str | None
    concurrency_key: str | None
    blocked_on: str | None
    max_attempts: int | None
    options: Json | None
    version: str | None
    fingerprint: str | None
    seed: bytes
    wake_seq: int
    wake_after: int
    waiting_for: Json | None
    compensating: bool
    parent_run_id: str | None
    parent_step_id: str | None
    detached: bool
    schedule_id: str | None
    scheduled_for: Instant | None
    forked_from: str | None
    replay_family: str | None
    mismatch_since: Instant | None
    progress: Json | None
    keep: Micros | None
    tags: Mapping[str, str]


@value
class Submitted:
    """The answer to one submit (39). `run` is the run that the caller now waits for."""

    run: RunRecord
    disposition: Disposition


@value
class Pulse:
    """What a waiting handle needs to see again and again."""

    run_id: str
    status: Status
    attempts: int
    wake_seq: int
    updated_at: Instant
    progress: Json | None


@value
class RunQuery:
    """A listing, newest first. Empty sequences mean no filter; `cursor` is what the page before gave back, opaque."""

    statuses: Sequence[Status] = ()
    names: Sequence[str] = ()
    queues: Sequence[str] = ()
    parent_run_id: str | None = None
    schedule_id: str | None = None
    since: Instant | None = None
    until: Instant | None = None
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    limit: int = 50
    cursor: str | None = None


@value
class Page:
    """A page of a listing; `cursor` is None at the end."""

    runs: Sequence[RunRecord]
    cursor: str | None


# -- leases and claims --------------------------------------------------------------------------------------------------


@value
class Lease:
    """What a holder shows with every write: the run and the fence, which is the pair (attempts, mark) (1)."""

    run_id: str
    tenant: UUID | None
    attempts: int
    mark: str
    linked: bool = dataclasses.field(default=False, compare=False)
    """A hint of the store that gave it: somebody is told when the run ends (a parent, the next in line, a schedule, a limit)."""
    permits: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """A hint, too: the permits that it was claimed with, of a store whose settle gives them back without looking (73)."""


@value
class ClaimRequest:
    """One claim. `mark` is new for every claim call; the same mark again asks for the answer of a claim that was lost (8)."""

    mark: str
    queues: Mapping[str, int]
    """How many of each queue at the most."""
    functions: Sequence[tuple[str, str | None]]
    """(name, version) of all that the worker registered. A run without a version is taken for its name alone; a run with one
    only by a worker that registered just that pair (7)."""
    limit: int
    lease: Micros
    family: str
    """The replay family of this interpreter; a run with records of another one is not taken."""
    scope: Scope
    alone: bool = False
    """True: the worker holds no other run, so it may take one run that is blocked on 'alone' (15), and then only that."""


@value
class Claimed:
    """A run in hand: the lease, the run, its journal by position (attempt rows last). Fresh runs have an empty one."""

    lease: Lease
    run: RunRecord
    history: Sequence[StepRecord] = ()


@value
class Renewal:
    """One lease to be prolonged, with the progress to be written beside it, if any."""

    lease: Lease
    progress: Json | None = None


@value
class Renewed:
    """The answer for one lease (13). `unknown`: a commit under way held the row; it proves nothing."""

    state: Literal["held", "lost", "unknown"]
    cancel_requested: bool = False
    """An ask that is not refused."""
    wake_seq: int = 0


# -- the journal --------------------------------------------------------------------------------------------------------


@value
class NewRecord:
    """A record to be appended by the holder. `children` are inserted in the same write (48)."""

    step_id: str
    kind: RecordKind
    position: int | None
    """Numbered by the holder from 0, without gaps; None for an attempt row."""
    seen: int
    """The highest position that had been delivered when the call was made; -1: none (50)."""
    digest: str
    result: Json
    """An envelope: the value, or the error as data (codec)."""
    floor: Instant = 0
    """The stamp is never lower than this: the record before, and the due time of a timer."""
    started_at: Instant | None = None
    children: tuple[NewRun, ...] = ()
    progress: Json | None = None
    signal_seq: int | None = None
    """SIGNAL: the `seq` of the signal that this record takes. A signal is taken while a record names it (32)."""


@value
class StepRecord:
    """A record as it stands in the journal."""

    step_id: str
    kind: RecordKind
    position: int | None
    seen: int
    digest: str
    result: Json
    at: Instant
    started_at: Instant | None
    fence: int
    """The `attempts` of the holder that wrote it."""
    signal_seq: int | None = None
    """SIGNAL: the `seq` of the signal that it takes."""


@value
class Appended:
    """The answer for one record (20). `recorded`: one of that step_id was there; `record` is the stored one."""

    state: Literal["appended", "recorded", "lost"]
    record: StepRecord | None
    """None only when the fence is gone."""


# -- outcomes -----------------------------------------------------------------------------------------------------------


@value
class Failure:
    """Why a run ends or is tried again, as data. `positions`: the failed records that the error carries (50)."""

    message: str
    kind: str = ErrorKind.EXCEPTION
    detail: Json | None = None
    positions: tuple[int, ...] = ()


@value
class Completed:
    """The body returned."""

    output: Json


@value
class Failed:
    """The body raised for the last time, or can not go on."""

    failure: Failure


@value
class Cancelled:
    """An ask that was not refused was carried out."""

    failure: Failure


@value
class TimedOut:
    """The deadline, or the cap of one execution."""

    failure: Failure


@value
class ForwardIncomplete:
    """Past its pivot, and could not go forward."""

    failure: Failure


@value
class Retry:
    """The body raised and is tried again `after`; `failure.positions` and what came after them is taken out (50)."""

    after: Micros
    failure: Failure


@value
class Suspended:
    """At rest, waiting for something durable. Matches the `wake_seq` that was read before the inbox (31)."""

    until: Instant | None
    waiting_for: Json
    wake_seq: int
    wake_after: int = 0
    """Ends of children that must still come before they wake the run; 0: no child is waited for."""
    wake_delay: Micros = 0
    """How long after `wake_after` was reached: the ends of independent children are gathered (33)."""
    wake_on_failure: bool = False
    """A child that lands in any state but completed wakes at once."""


@value
class HandedBack:
    """Given up by a worker that stops, or by one whose code does not match. `failures` stays (16, 25)."""

    after: Micros = 0
    failure: Failure | None = None


Outcome: TypeAlias = Completed | Failed | Cancelled | TimedOut | ForwardIncomplete | Retry | Suspended | HandedBack
Settled: TypeAlias = Literal["landed", "woken", "lost"]
"""`woken`: a wake or a cancel ask came first and the fence is intact: read it and go on (5)."""


# -- mailbox ------------------------------------------------------------------------------------------------------------


@value
class NewSignal:
    """A signal to be sent. `dedup_id` makes a repeated send the same one (32)."""

    run_id: str
    name: str
    payload: Json
    dedup_id: str


@value
class Signal:
    """A stored signal: kept until a record names its `seq`, which is the `wake_seq` that its send produced."""

    name: str
    seq: int
    payload: Json
    at: Instant


@value
class ChildEnd:
    """How a child of a run landed."""

    run_id: str
    step_id: str
    status: Status
    output: Json | None
    error: str | None
    error_kind: str | None
    error_detail: Json | None
    at: Instant


@value
class Inbox:
    """What came to a run from outside, read in one snapshot with its `wake_seq` (31)."""

    wake_seq: int
    cancel_requested: bool
    """An ask that is not refused."""
    signals: Sequence[Signal]
    """Those that no record names, by seq."""
    children: Sequence[ChildEnd]
    """Landed children whose end no record holds, in the order of their landing."""
    cancel_reason: str = ""
    """What the first ask to cancel said (43)."""


# -- schedules ----------------------------------------------------------------------------------------------------------


@value
class ScheduleSpec:
    """A schedule as it is registered. `schedule_id` is as the caller passed it."""

    schedule_id: str
    name: str
    cron: str
    tz: str
    input: Json
    next_fire_at: Instant | None
    """What the registration computed; kept only where cron or zone is new or changed (56). None: never again."""
    queue: str = "default"
    overlap: Literal["skip", "queue", "allow"] = "skip"
    catch_up: Literal["none", "latest", "all"] = "latest"
    jitter: Micros = 0
    from_code: bool = False


@value
class Schedule:
    """A schedule as it stands in the store."""

    schedule_id: str
    tenant: UUID | None
    name: str
    cron: str
    tz: str
    input: Json
    queue: str
    overlap: str
    catch_up: str
    jitter: Micros
    next_fire_at: Instant | None
    enabled: bool
    from_code: bool
    last_run_id: str | None
    last_run_live: bool
    consecutive_failures: int
    parked_reason: str | None
    created_at: Instant
    updated_at: Instant


@value
class Firing:
    """One compare, advance and enqueue: carried out only if the schedule's next instant is still `expected` (53)."""

    schedule_id: str
    tenant: UUID | None
    expected: Instant
    next_fire_at: Instant | None
    runs: tuple[NewRun, ...]
    """One per slot, with `scheduled_for`; a slot that exists already is left out."""
    parked_reason: str | None = None
    """Set: the row can not be read; it is parked with this text and harms nothing else (55)."""


# -- upkeep -------------------------------------------------------------------------------------------------------------


@value
class Promoted:
    """Due runs made claimable. `next_due`: the next instant at which there is something to promote."""

    count: int
    queues: frozenset[str]
    next_due: Instant | None


@value
class Swept:
    """Lapsed leases: runs returned to pending, and runs past the reclaim limit that landed failed."""

    returned: Sequence[str]
    failed: Sequence[str]
    queues: frozenset[str]
    alone: frozenset[str] = frozenset()
    """Queues of the scope in which some run is blocked on 'alone', whoever put it there: a worker that is never without work
    makes room for one such run (15)."""


@value
class WorkerRecord:
    """A worker in the registry (17)."""

    worker_id: str
    tenant: UUID | None
    bound: bool
    """False: it serves every tenant."""
    host: str
    pid: int
    queues: Mapping[str, int]
    functions: Sequence[tuple[str, str | None]]
    family: str
    settings: Json
    started_at: Instant = 0
    seen_at: Instant = 0
    """Both are the store's stamps; ignored when registering."""


@value
class QueueRecord:
    """Flow control of one scope: `queue:NAME`, `function:NAME`, `key:QUEUE` for each concurrency key of that queue, `share:QUEUE` for
    each tenant in that queue, or `tenant` for everything of one tenant."""

    scope_name: str
    tenant: Scope = None
    """Whose runs it counts and holds back: one tenant's, the untagged (None), or everybody's together (ALL)."""
    paused: bool = False
    max_concurrency: int | None = None
    rate_count: int | None = None
    rate_period: Micros | None = None
    rate_burst: int | None = None
    fair: bool = False
    """Tenants take turns in this queue, whatever the backlog of one: `queue:NAME` of ALL only."""


@value
class QueueStats:
    """One queue as it stands: how much, how old, how bad."""

    queue: str
    ready: int
    delayed: int
    suspended: int
    blocked: int
    running: int
    oldest_ready_at: Instant | None
    paused: bool
    failed_by_kind: Mapping[str, int]


@value
class TenantStats:
    """What is stored of one tenant, or of the untagged (None)."""

    tenant: UUID | None
    paused: bool
    runs: Mapping[str, int]
    """How many in each state; a state without runs is left out."""
    schedules: int


@value
class Explanation:
    """Why a run stands where it stands, in sentences for people; `code` is for machines."""

    run: RunRecord
    code: str
    reasons: Sequence[str]


@value
class Finding:
    """An invariant that the stored rows break (audit)."""

    invariant: str
    run_id: str | None
    text: str


@value
class Check:
    """One check of a store (doctor): ok, warn or refuse, with the sentence that says what to do."""

    name: str
    level: Literal["ok", "warn", "refuse"]
    text: str


@value
class SchemaStatus:
    """What version the tables have, what version this code wants, and whether `migrate` would do something."""

    found: int | None
    """None: there are no tables of ours."""
    wanted: int
    missing: Sequence[str] = ()
    """Tables, columns or indexes that are not there."""


@value
class Capabilities:
    """What a store can do beyond the contract."""

    shared: bool
    """Several machines may open it at once."""
    push: bool
    """Wake-ups come from the store itself, not only by polling."""
    caller_tx: bool
    """`enqueue` and `send` take the caller's transaction."""
