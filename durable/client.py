"""The client: starts runs, finds them, waits for them, and asks things of them. What users hold; `sync.py` is its blocking face.

Every verb is one call of the contract, made for one tenant. Values are encoded and names are checked before anything is written;
ids are made here, so that a call whose answer was lost can be repeated and does nothing twice. It executes nothing.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeAlias, TypeVar, overload
from uuid import UUID

from .codec import Codec, Keys
from .config import resolve
from .errors import ConfigurationError, Conflict, Misuse, NotFound
from .events import Events
from .faces import Queues, Schedules
from .function import Function, default_registry
from .graph import node_function
from .handle import Approval, Run, awaited_signals
from .instants import instant
from .model import (
    ALL,
    TERMINAL,
    Check,
    Explanation,
    Finding,
    Instant,
    NewRun,
    NewSignal,
    Pulse,
    RunQuery,
    RunRecord,
    SchemaStatus,
    Scope,
    Status,
    StepRecord,
    Submitted,
    WorkerRecord,
    new_run_id,
)
from .opened import Opened
from .options import checked_key, given_text
from .protocol import Store
from .settings import Duration, Settings, micros
from .signals import APPROVAL, Signal, approval
from .steps import checked_name
from .submission import new_run
from .tenants import Tenants, tenant_of

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

PAGE = 200
_UNSET: Any = object()
RunStatus: TypeAlias = Literal[
    "pending", "running", "suspended", "completed", "failed", "cancelled", "timed_out", "forward_incomplete"
]
Statuses: TypeAlias = Status | RunStatus | Sequence[Status | RunStatus] | None


class Client:
    """A handle on a store. Open it with `async with`; one per event loop is enough for a process.

    Everything it does is done for one tenant: a plain client for the untagged runs, `client.using(tenant=…)` for that tenant's,
    `client.all_tenants()` for everybody's (semantics 57). Arguments left out are taken from the environment, a file, or the
    defaults; see `config`. With `encryption_key` (32 bytes, their base64 text, or several of them, of which the first encrypts)
    payloads are encrypted at rest; ids, keys, tags and names are not (semantics 72). Raises ConfigurationError for a key that is none.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        schema: str | None = None,
        tables: Mapping[str, str] | None = None,
        auto_migrate: bool | None = None,
        encryption_key: Keys | None = None,
        clock: Callable[[], Instant] | None = None,
    ) -> None:
        config = resolve(
            url,
            settings=settings,
            schema=schema,
            tables=tables,
            auto_migrate=auto_migrate,
            encryption_key=encryption_key,
        )
        self._opened = Opened(config, clock=clock)
        self._scope: Scope = None
        self._bound = False
        self._conn: Any = None

    async def __aenter__(self) -> Self:
        await self._opened.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.leave()

    def __repr__(self) -> str:
        return f"<Client {self._opened.config!r} scope={self._scope}>"

    # -- views ------------------------------------------------------------------------------------------------------------

    def using(self, *, tenant: UUID | str = _UNSET, conn: Any = _UNSET) -> Client:
        """A view on the same store: bound to a tenant, or writing inside the caller's own transaction (semantics 41, 57).

        An empty or missing tenant is refused: it would otherwise mean everybody's rows (59).
        """
        view = self._view()
        if tenant is not _UNSET:
            view._scope, view._bound = tenant_of(tenant), True
        if conn is not _UNSET:
            if conn is None:
                raise ConfigurationError("using(conn=None): there is no transaction", hint="pass the open connection")
            view._conn = conn
        return view

    def all_tenants(self) -> Client:
        """A view on the rows of all tenants: for operators and tools. Runs are started by a bound client."""
        view = self._view()
        view._scope, view._bound = ALL, False
        return view

    def _view(self) -> Client:
        view = Client.__new__(type(self))
        view._opened, view._scope, view._bound, view._conn = self._opened, self._scope, self._bound, self._conn
        return view

    # -- what the engine and tools need -------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """The store behind it. Raises Misuse outside `async with`."""
        return self._opened.store

    @property
    def scope(self) -> Scope:
        """Whose rows its verbs see."""
        return self._scope

    @property
    def serves(self) -> Scope:
        """Whose runs a worker made with it takes: everybody's, unless it is bound to a tenant (57)."""
        return self._scope if self._bound else ALL

    @property
    def settings(self) -> Settings:
        """The settings that apply."""
        return self._opened.config.settings

    @property
    def codec(self) -> Codec:
        """How values become text."""
        return self._opened.codec

    @property
    def events(self) -> Events:
        """Where events of this client and its workers come out."""
        return self._opened.events

    # -- starting -----------------------------------------------------------------------------------------------------------

    async def start(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Store a run of `fn` and return its handle; it is durable then (semantics 42).

        Raises TypeError or SerializationError for arguments that do not fit or can not be stored, and Conflict for a key that
        means another function, before anything is written.
        """
        run = new_run(fn, args, kwargs, codec=self.codec, tenant=self._own_tenant("start"))
        submitted = await self._submit(run)
        return Run(self._plain(), submitted.run, fn, submitted.disposition)

    async def run(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`start`, then the result."""
        if self._conn is not None:
            raise Misuse(
                "client.run inside a transaction would wait for a run that nobody sees before the commit",
                hint="start it, commit, then await its result",
            )
        return await (await self.start(fn, *args, **kwargs)).result()

    async def start_many(self, fn: Function[[A], R], items: Iterable[A], /) -> list[Run[R]]:
        """One run per item, all stored in one write or none (semantics 40)."""
        tenant = self._own_tenant("start_many")
        runs = [new_run(fn, (item,), {}, codec=self.codec, tenant=tenant) for item in items]
        limit = self.settings.start_many_limit
        if len(runs) > limit:
            raise ConfigurationError(
                f"{len(runs):,} items are more than start_many_limit, {limit:,}", hint="submit them in parts"
            )
        if not runs:
            return []
        if self._conn is not None:  # errors of the caller's transaction pass through untouched (41)
            answers = await self.store.enqueue(runs, tx=self._conn)
        else:
            answers = await self._opened.repeated(lambda: self.store.enqueue(runs))
        return [Run(self._plain(), answer.run, fn, answer.disposition) for answer in answers]

    async def _submit(self, run: NewRun) -> Submitted:
        if self._conn is not None:  # errors of the caller's transaction pass through untouched (41)
            return (await self.store.enqueue([run], tx=self._conn))[0]
        return await self._opened.submit(run)

    def _own_tenant(self, verb: str) -> UUID | None:
        scope = self._scope
        if scope is ALL:
            raise Misuse(
                f"{verb} on all_tenants(): a run belongs to one tenant, or to none",
                hint="use the plain client for untagged runs, or client.using(tenant=...)",
            )
        assert scope is None or isinstance(scope, UUID)
        return scope

    def _plain(self) -> Client:
        """What handles look with: the same scope, outside the caller's transaction."""
        if self._conn is None:
            return self
        view = self._view()
        view._conn = None
        return view

    # -- finding ------------------------------------------------------------------------------------------------------------

    @overload
    async def get(self, run_id: str, /) -> Run[Any]: ...
    @overload
    async def get(self, run_id: str, fn: Function[..., R], /) -> Run[R]: ...
    async def get(self, run_id: str, fn: Function[..., Any] | None = None, /) -> Run[Any]:
        """The handle of a run. Raises NotFound for an unknown, purged or another tenant's; Conflict if it is not of `fn`."""
        record = await self._record(run_id)
        if fn is not None and fn.name != record.name:
            raise Conflict(f"run {run_id} is of {record.name}, not of {fn.name}")
        return self._handle(record, fn)

    async def runs(
        self,
        *,
        status: Statuses = None,
        function: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        schedule: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        tags: Mapping[str, str] | None = None,
        limit: int | None = 50,
    ) -> AsyncIterator[Run[Any]]:
        """Runs, newest first, at most `limit` (None: all). What comes or goes meanwhile neither shifts nor repeats any."""
        left = limit
        cursor: str | None = None
        query = _query(status, function, queue, schedule, since, until, tags)
        while left is None or left > 0:
            page_query = _paged(query, PAGE if left is None else min(PAGE, left), cursor)
            page = await self._opened.repeated(lambda wanted=page_query: self.store.find(wanted, scope=self._scope))  # type: ignore[misc]
            for record in page.runs:
                yield self._handle(record, None)
            if left is not None:
                left -= len(page.runs)
            cursor = page.cursor
            if cursor is None:
                return

    async def count(
        self,
        *,
        status: Statuses = None,
        function: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        schedule: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> int:
        """How many runs there are of this kind."""
        query = _query(status, function, queue, schedule, since, until, tags)
        return await self._opened.repeated(lambda: self.store.count(query, scope=self._scope))

    async def journal(self, run_id: str, /) -> Sequence[StepRecord]:
        """The journal of a run, as it is stored. Raises NotFound."""
        given_text(run_id, "the id of a run")
        return await self._opened.repeated(lambda: self.store.history(run_id, scope=self._scope))

    async def explain(self, run_id: str, /) -> Explanation:
        """Why a run stands where it stands. Raises NotFound."""
        given_text(run_id, "the id of a run")
        return await self._opened.repeated(lambda: self.store.explain(run_id, scope=self._scope))

    async def _record(self, run_id: str) -> RunRecord:
        given_text(run_id, "the id of a run")
        (record,) = await self._opened.repeated(lambda: self.store.get([run_id], scope=self._scope))
        if record is None:
            raise NotFound(f"there is no run {run_id!r}")
        return record

    async def _history(self, run_id: str) -> Sequence[StepRecord]:
        return await self._opened.repeated(lambda: self.store.history(run_id, scope=self._scope))

    async def _children(self, run_id: str, fn: Function[..., Any] | None) -> Sequence[Run[Any]]:
        records = await self._opened.repeated(lambda: self.store.children(run_id, scope=self._scope))
        return [self._handle(record, node_function(fn, record.parent_step_id)) for record in records]

    async def _landed(self, run_id: str) -> RunRecord:
        return await self._opened.hub.landed(run_id, self._scope)

    async def _changed(self, run_id: str, before: Pulse) -> RunRecord:
        return await self._opened.hub.changed(run_id, self._scope, before)

    def _handle(self, record: RunRecord, fn: Function[..., Any] | None) -> Run[Any]:
        return Run(self._plain(), record, fn if fn is not None else default_registry.get(record.name, record.version))

    # -- asking things of runs ------------------------------------------------------------------------------------------------

    async def cancel(self, run_id: str, /, *, reason: str = "") -> bool:
        """Ask a run to stop. True: it will end cancelled, or past its pivot refuse and say so. False: it has landed, is
        unknown, or another tenant's (semantics 43)."""
        given_text(run_id, "the id of a run")
        given_text(reason, "the reason of a cancel")
        (answer,) = await self._opened.repeated(
            lambda: self.store.request_cancel([run_id], scope=self._scope, reason=reason)
        )
        return answer

    async def retry(self, run_id: str, /, *, extra_attempts: int = 0) -> Run[Any]:
        """Run it again from the records that stand: the failed ones and what came after are taken out (semantics 50).

        Of a graph it retries the nodes that did not complete, and with them those behind (77). Raises Conflict unless it landed,
        and not completed; NotFound.
        """
        if isinstance(extra_attempts, bool) or not isinstance(extra_attempts, int) or extra_attempts < 0:
            raise ConfigurationError(f"extra_attempts: {extra_attempts!r} is not a whole number from 0")
        seen = (await self._record(run_id)).attempts
        record = await self._opened.repeated(
            lambda: self.store.retry(run_id, scope=self._scope, attempts=seen, extra_attempts=extra_attempts)
        )
        return self._handle(record, None)

    async def retry_all(self, *, status: Statuses, function: str | None = None, since: datetime | None = None) -> int:
        """`retry` for each run of that kind; returns how many were taken up. Those that moved on meanwhile are left alone."""
        statuses = _statuses(status)
        if not statuses or not set(statuses) <= TERMINAL - {Status.COMPLETED}:
            raise ConfigurationError(
                f"retry_all: {status!r} can not be retried", hint="failed, cancelled, timed_out or forward_incomplete"
            )
        found = [run async for run in self.runs(status=statuses, function=function, since=since, limit=None)]
        count = 0
        for run in found:
            try:
                await self.retry(run.id)
            except (Conflict, NotFound):
                continue  # it moved on, was purged, or has compensated: documented to be left alone
            count += 1
        return count

    async def fork(self, run_id: str, /, *, from_step: int | str) -> Run[Any]:
        """A new run with the records before `from_step` (a position, or a step id) copied (semantics 51)."""
        given_text(run_id, "the id of a run")
        if isinstance(from_step, bool) or not isinstance(from_step, int | str):
            raise ConfigurationError(f"from_step: {from_step!r} is neither a position nor the id of a step")
        made = new_run_id()
        record = await self._opened.repeated(
            lambda: self.store.fork(run_id, scope=self._scope, new_run_id=made, from_step=from_step)
        )
        return self._handle(record, None)

    async def signal(self, run_id: str, signal: Signal[A], value: A, /, *, id: str | None = None) -> None:
        """Send a signal; it is kept until the body takes it, also if it does not wait yet (semantics 32).

        With the same `id` again it is the same signal. Raises NotFound, or Conflict for a run that has landed.
        """
        given_text(run_id, "the id of a run")
        if id is not None:
            checked_key(id, "the id of a signal")
        new = NewSignal(
            run_id=run_id,
            name=signal.name,
            payload=self.codec.encode(value, signal.type),
            dedup_id=id if id is not None else f"~{uuid.uuid4().hex}",
        )
        if self._conn is not None:
            await self.store.send(new, scope=self._scope, tx=self._conn)
        else:
            await self._opened.repeated(lambda: self.store.send(new, scope=self._scope))

    async def approve(self, run_id: str, what: str, answer: bool, /, *, id: str | None = None) -> None:
        """Answer `ctx.approve(what)` of a run. One answer for one question; it is kept if it comes first.

        With the same `id` again it is the same answer. Raises NotFound, or Conflict for a run that has landed.
        """
        if not isinstance(answer, bool):
            raise ConfigurationError(f"an answer is True or False, not {answer!r}")
        await self.signal(run_id, approval(what), answer, id=id)

    async def approvals(self) -> AsyncIterator[Approval]:
        """What suspended runs of this tenant wait to have approved, newest run first."""
        async for run in self.runs(status="suspended", limit=None):
            for name in awaited_signals(run.record):
                if name.startswith(APPROVAL):
                    yield Approval(what=name.removeprefix(APPROVAL), run=run)

    async def wake(self, queue: str = "default") -> None:
        """Tell workers that a queue may have work: after the caller's own transaction has committed (semantics 41)."""
        await self.store.notify([f"queue:{checked_name(queue, 'queue')}"])

    # -- the store itself -----------------------------------------------------------------------------------------------------

    @property
    def schedules(self) -> Schedules:
        """Cron."""
        return Schedules(self)

    @property
    def queues(self) -> Queues:
        """Pauses, limits and depths."""
        return Queues(self)

    @property
    def tenants(self) -> Tenants:
        """What is stored of each tenant; pause, export and erase one."""
        return Tenants(self)

    async def purge(self, *, older_than: Duration | None = None) -> int:
        """Delete runs whose time to be kept is over, or that landed `older_than` ago; returns how many (semantics 60)."""
        age = None if older_than is None else micros(older_than, what="older_than")
        total = 0
        while True:
            count = await self._opened.repeated(
                lambda: self.store.purge(scope=self._scope, limit=self.settings.purge_batch, older_than=age)
            )
            total += count
            if count < self.settings.purge_batch:
                return total

    async def migrate(self) -> SchemaStatus:
        """Bring the tables to the version of this code (semantics 69)."""
        return await self._opened.repeated(self.store.migrate)

    async def schema_status(self) -> SchemaStatus:
        """What tables are there and what this code wants, without changing anything."""
        return await self._opened.repeated(self.store.schema_status)

    async def workers(self) -> Sequence[WorkerRecord]:
        """The registered workers that serve this client's tenant. One that was killed stays for a day: see its `seen_at`."""
        return await self._opened.repeated(lambda: self.store.workers(scope=self._scope))

    async def check(self) -> Sequence[Check]:
        """What a doctor asks of the store."""
        return await self.store.check()

    async def audit(self) -> Sequence[Finding]:
        """Every invariant that the stored rows can show; an empty answer is a sound store."""
        return await self.store.audit(scope=self._scope)


def _statuses(status: Statuses) -> tuple[Status, ...]:
    if status is None:
        return ()
    given = (status,) if isinstance(status, str) else tuple(status)
    try:
        return tuple(Status(one) for one in given)
    except ValueError as error:
        raise ConfigurationError(f"status: {error}", hint="one of: " + ", ".join(Status)) from None


def _texts(value: str | Sequence[str] | None, what: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable):
        raise ConfigurationError(f"{what}: {value!r} is no text")
    return tuple(given_text(one, what) for one in value)


def _query(
    status: Statuses,
    function: str | Sequence[str] | None,
    queue: str | Sequence[str] | None,
    schedule: str | None,
    since: datetime | None,
    until: datetime | None,
    tags: Mapping[str, str] | None,
) -> RunQuery:
    return RunQuery(
        statuses=_statuses(status),
        names=_texts(function, "function"),
        queues=_texts(queue, "queue"),
        schedule_id=None if schedule is None else given_text(schedule, "schedule"),
        since=None if since is None else instant(since, what="since"),
        until=None if until is None else instant(until, what="until"),
        tags={given_text(name, "a tag"): given_text(value, "a tag") for name, value in (tags or {}).items()},
    )


def _paged(query: RunQuery, limit: int, cursor: str | None) -> RunQuery:
    return dataclasses.replace(query, limit=limit, cursor=cursor)


__all__ = ["Client"]
