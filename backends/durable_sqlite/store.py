"""The store: one class, one visible line per method; each hands an operation to the writer or to a reader.

`backend` in `__init__.py` opens it, the engine and the client call it through `durable.protocol.Store`. What an operation means
stands in the module of its name. Nothing here knows SQL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from durable import model as m
from durable.flow import Turns
from durable.model import Scope
from durable.settings import Micros, Settings
from durable.storekit import RECORD_ROOM, payloads_of, weigh

from . import (
    audit,
    cancel,
    checks,
    claim,
    enqueue,
    flow,
    fork,
    journal,
    listing,
    mailbox,
    retry,
    schedules,
    schema,
    settle,
    tenants,
    transactions,
    upkeep,
    views,
)
from .connection import Database


class Store:
    """Fulfils `durable.protocol.Store`; the docstrings of its methods are the contract."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._write = database.write
        self._read = database.read
        self._turns = Turns()

    # -- runs --------------------------------------------------------------------------------------------------------------

    async def enqueue(self, runs: Sequence[m.NewRun], *, tx: object | None = None) -> Sequence[m.Submitted]:
        """See `enqueue.enqueue`."""
        weight = self._weigh(text for run in runs for text in (run.input, run.options))
        if tx is not None:
            return transactions.on_callers(self._database, tx, lambda con, now: enqueue.enqueue(con, now, runs))
        return await self._write(lambda con, now: enqueue.enqueue(con, now, runs), weight=weight)

    async def claim(self, request: m.ClaimRequest) -> Sequence[m.Claimed]:
        """See `claim.claim`."""
        return await self._write(lambda con, now: claim.claim(con, now, request, self._turns))

    async def renew(self, renewals: Sequence[m.Renewal], *, lease: Micros) -> Sequence[m.Renewed]:
        """See `settle.renew`."""
        self._weigh(renewal.progress for renewal in renewals)
        return await self._write(lambda con, now: settle.renew(con, now, renewals, lease))

    async def settle(self, entries: Sequence[tuple[m.Lease, m.Outcome]]) -> Sequence[m.Settled]:
        """See `settle.settle`."""
        weight = self._weigh(outcome.output for _, outcome in entries if isinstance(outcome, m.Completed))
        return await self._write(lambda con, now: settle.settle(con, now, entries), weight=weight)

    async def request_cancel(self, run_ids: Sequence[str], *, scope: Scope, reason: str = "") -> Sequence[bool]:
        """See `cancel.request_cancel`."""
        return await self._write(lambda con, now: cancel.request_cancel(con, now, run_ids, scope, reason))

    async def retry(self, run_id: str, *, scope: Scope, attempts: int, extra_attempts: int = 0) -> m.RunRecord:
        """See `retry.retry`."""
        return await self._write(lambda con, now: retry.retry(con, now, run_id, scope, attempts, extra_attempts))

    async def fork(self, run_id: str, *, scope: Scope, new_run_id: str, from_step: int | str) -> m.RunRecord:
        """See `fork.fork`."""
        return await self._write(lambda con, now: fork.fork(con, now, run_id, scope, new_run_id, from_step))

    async def get(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[m.RunRecord | None]:
        """See `listing.get`."""
        return await self._read(lambda con, now: listing.get(con, now, run_ids, scope))

    async def find(self, query: m.RunQuery, *, scope: Scope) -> m.Page:
        """See `listing.find`."""
        return await self._read(lambda con, now: listing.find(con, now, query, scope), slow=True)

    async def count(self, query: m.RunQuery, *, scope: Scope) -> int:
        """See `listing.count`."""
        return await self._read(lambda con, now: listing.count(con, now, query, scope), slow=True)

    async def children(self, run_id: str, *, scope: Scope) -> Sequence[m.RunRecord]:
        """See `listing.children`."""
        return await self._read(lambda con, now: listing.children(con, now, run_id, scope))

    async def pulse(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[m.Pulse | None]:
        """See `listing.pulse`."""
        return await self._read(lambda con, now: listing.pulse(con, now, run_ids, scope))

    # -- the journal -------------------------------------------------------------------------------------------------------

    async def append(self, records: Sequence[tuple[m.Lease, m.NewRecord]]) -> Sequence[m.Appended]:
        """See `journal.append`."""
        weight = self._weigh((text for _, record in records for text in payloads_of(record)), room=RECORD_ROOM)
        return await self._write(lambda con, now: journal.append(con, now, records), weight=weight)

    async def history(self, run_id: str, *, scope: Scope) -> Sequence[m.StepRecord]:
        """See `journal.history`."""
        return await self._read(lambda con, now: journal.history(con, run_id, scope))

    async def transaction(
        self, lease: m.Lease, work: Callable[[Any], Awaitable[m.NewRecord]], *, timeout: Micros
    ) -> m.Appended:
        """See `transactions.exactly_once`."""
        return await transactions.exactly_once(self._database, lease, work, timeout)

    # -- schedules ---------------------------------------------------------------------------------------------------------

    async def put_schedule(self, spec: m.ScheduleSpec, *, scope: Scope) -> m.Schedule:
        """See `schedules.put`."""
        self._weigh([spec.input])
        return await self._write(lambda con, now: schedules.put(con, now, spec, scope))

    async def pause_schedule(
        self, schedule_id: str, *, scope: Scope, paused: bool, next_fire_at: m.Instant | None = None
    ) -> bool:
        """See `schedules.pause`."""
        return await self._write(lambda con, now: schedules.pause(con, now, schedule_id, scope, paused, next_fire_at))

    async def park_schedule(self, schedule_id: str, *, scope: Scope, reason: str) -> bool:
        """See `schedules.park`."""
        return await self._write(lambda con, now: schedules.park(con, now, schedule_id, scope, reason))

    async def remove_schedule(self, schedule_id: str, *, scope: Scope) -> bool:
        """See `schedules.remove`."""
        return await self._write(lambda con, now: schedules.remove(con, now, schedule_id, scope))

    async def schedules(self, *, scope: Scope, schedule_ids: Sequence[str] = ()) -> Sequence[m.Schedule]:
        """See `schedules.schedules`."""
        return await self._read(lambda con, now: schedules.schedules(con, now, scope, schedule_ids))

    async def due_schedules(self, *, scope: Scope, limit: int) -> tuple[m.Instant, Sequence[m.Schedule]]:
        """See `schedules.due`."""
        return await self._read(lambda con, now: schedules.due(con, now, scope, limit))

    async def fire(self, firing: m.Firing) -> Sequence[m.Submitted] | None:
        """See `schedules.fire`."""
        return await self._write(lambda con, now: schedules.fire(con, now, firing))

    # -- the mailbox -------------------------------------------------------------------------------------------------------

    async def send(self, signal: m.NewSignal, *, scope: Scope, tx: object | None = None) -> int:
        """See `mailbox.send`."""
        weight = self._weigh([signal.payload])
        if tx is not None:
            return transactions.on_callers(self._database, tx, lambda con, now: mailbox.send(con, now, signal, scope))
        return await self._write(lambda con, now: mailbox.send(con, now, signal, scope), weight=weight)

    async def signals(self, run_id: str, *, scope: Scope) -> Sequence[m.Signal]:
        """See `mailbox.signals`."""
        return await self._read(lambda con, now: mailbox.signals(con, now, run_id, scope))

    async def inbox(self, leases: Sequence[m.Lease]) -> Sequence[m.Inbox | None]:
        """See `mailbox.inbox`."""
        return await self._read(lambda con, now: mailbox.inbox(con, now, leases))

    # -- upkeep ------------------------------------------------------------------------------------------------------------

    async def promote(self, *, scope: Scope, limit: int) -> m.Promoted:
        """See `upkeep.promote`."""
        return await self._write(lambda con, now: upkeep.promote(con, now, scope, limit))

    async def sweep(self, *, scope: Scope, limit: int, max_reclaims: int) -> m.Swept:
        """See `upkeep.sweep`."""
        return await self._write(lambda con, now: upkeep.sweep(con, now, scope, limit, max_reclaims))

    async def mend(self, *, scope: Scope, limit: int) -> int:
        """See `upkeep.mend`."""
        return await self._write(lambda con, now: upkeep.mend(con, now, scope, limit))

    async def purge(self, *, scope: Scope, limit: int, older_than: Micros | None = None) -> int:
        """See `upkeep.purge`."""
        slots, workers = self.settings.slot_keep, self.settings.worker_keep
        return await self._write(
            lambda con, now: upkeep.purge(con, now, scope, limit, older_than, slot_keep=slots, worker_keep=workers)
        )

    async def stats(self, *, scope: Scope) -> Sequence[m.QueueStats]:
        """See `views.stats`."""
        return await self._read(lambda con, now: views.stats(con, now, scope), slow=True)

    async def register(self, worker: m.WorkerRecord) -> None:
        """See `upkeep.register`."""
        await self._write(lambda con, now: upkeep.register(con, now, worker))

    async def unregister(self, worker_id: str) -> None:
        """See `upkeep.unregister`."""
        await self._write(lambda con, now: upkeep.unregister(con, now, worker_id))

    async def workers(self, *, scope: Scope) -> Sequence[m.WorkerRecord]:
        """See `upkeep.workers`."""
        return await self._read(lambda con, now: upkeep.workers(con, now, scope))

    async def queues(self, *, scope: Scope) -> Sequence[m.QueueRecord]:
        """See `flow.queues`."""
        return await self._read(lambda con, now: flow.queues(con, scope))

    async def set_queue(self, queue: m.QueueRecord) -> None:
        """See `flow.set_queue`."""
        await self._write(lambda con, now: flow.set_queue(con, now, queue))

    async def tenants(self, *, scope: Scope) -> Sequence[m.TenantStats]:
        """See `tenants.tenants`."""
        return await self._read(lambda con, now: tenants.tenants(con, now, scope), slow=True)

    async def erase(self, tenant: UUID, *, limit: int) -> int:
        """See `tenants.erase`."""
        return await self._write(lambda con, now: tenants.erase(con, now, tenant, limit))

    async def explain(self, run_id: str, *, scope: Scope) -> m.Explanation:
        """See `views.explain`."""
        return await self._read(lambda con, now: views.explain(con, now, run_id, scope, self.settings.lease))

    async def audit(self, *, scope: Scope) -> Sequence[m.Finding]:
        """See `audit.audit`."""
        return await self._read(lambda con, now: audit.audit(con, now, scope), slow=True)

    # -- the store itself --------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> m.Capabilities:
        """One machine; wake-ups by polling the file; a caller's transaction where there is a file to share."""
        return m.Capabilities(shared=False, push=False, caller_tx=self._database.core.path is not None)

    @property
    def settings(self) -> Settings:
        """The settings it was opened with."""
        return self._database.settings

    def clock(self) -> m.Instant:
        """The clock of this machine, or the one given to `open`."""
        return self._database.core.now()

    async def migrate(self) -> m.SchemaStatus:
        """See `schema.migrate`."""
        return await self._write(lambda con, now: schema.migrate(con, now, self._database.core.renames))

    async def schema_status(self) -> m.SchemaStatus:
        """See `schema.status`."""
        return await self._read(lambda con, now: schema.status(con, self._database.core.renames))

    async def check(self) -> Sequence[m.Check]:
        """See `checks.check`."""
        core = self._database.core
        return await self._read(lambda con, now: checks.check(con, core), slow=True)

    async def wait(self, topics: Sequence[str], timeout: Micros) -> None:
        """See `wakeups.Wakeups.wait`."""
        await self._database.wait(topics, timeout)

    async def notify(self, topics: Sequence[str]) -> None:
        """See `wakeups.Wakeups.announce`."""
        self._database.notify(topics)

    async def close(self) -> None:
        """Finish what is queued and let go; a later call raises StoreUnavailable."""
        await self._database.close()

    def _weigh(self, payloads: Iterable[str | None], *, room: int = 0) -> int:
        """See `storekit.weigh`."""
        return weigh(payloads, self.settings.max_payload + room)
