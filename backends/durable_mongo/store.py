"""The store: one class, one visible line per method; each hands an operation to a transaction, a plain call or a reader.

`backend` in `__init__.py` opens it, the engine and the client call it through `durable.protocol.Store`. What an operation means
stands in the module of its name. Nothing here knows a collection.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from durable import model as m
from durable.model import Scope
from durable.settings import SECOND, Micros, Settings
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
    opening,
    purge,
    retry,
    schedules,
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
        self._claims = claim.Claims(database)
        self._write = database.write
        self._plain = database.plain
        self._read = database.read

    # -- runs --------------------------------------------------------------------------------------------------------------

    async def enqueue(self, runs: Sequence[m.NewRun], *, tx: object | None = None) -> Sequence[m.Submitted]:
        """See `enqueue.enqueue`."""
        self._weigh(text for run in runs for text in (run.input, run.options))
        if tx is not None:
            return await transactions.on_callers(self._database, tx, lambda work: enqueue.enqueue(work, runs))
        if runs and enqueue.is_fresh(runs):
            alone = len(runs) == 1 and runs[0].idempotency_key is None
            try:
                return await (self._plain if alone else self._write)(lambda work: enqueue.enqueue_fresh(work, runs))
            except enqueue.Taken:
                pass  # some id or key is there: look what it means
        while True:
            try:
                return await self._write(lambda work: enqueue.enqueue(work, runs))
            except enqueue.Purging as going:
                await self._plain(functools.partial(purge.finish, run_ids=going.run_ids))

    async def claim(self, request: m.ClaimRequest) -> Sequence[m.Claimed]:
        """See `claim.Claims.claim`."""
        return await self._claims.claim(request)

    async def renew(self, renewals: Sequence[m.Renewal], *, lease: Micros) -> Sequence[m.Renewed]:
        """See `settle.renew`."""
        self._weigh(renewal.progress for renewal in renewals)
        skip = frozenset(self._database.in_transaction)
        return await self._plain(lambda work: settle.renew(work, renewals, lease, skip))

    async def settle(self, entries: Sequence[tuple[m.Lease, m.Outcome]]) -> Sequence[m.Settled]:
        """See `settle.settle`."""
        self._weigh(outcome.output for _, outcome in entries if isinstance(outcome, m.Completed))
        return await settle.settle(self._database, entries)

    async def request_cancel(self, run_ids: Sequence[str], *, scope: Scope, reason: str = "") -> Sequence[bool]:
        """See `cancel.request_cancel`."""
        return await self._write(lambda work: cancel.request_cancel(work, run_ids, scope, reason))

    async def retry(self, run_id: str, *, scope: Scope, attempts: int, extra_attempts: int = 0) -> m.RunRecord:
        """See `retry.retry`."""
        return await self._write(lambda work: retry.retry(work, run_id, scope, attempts, extra_attempts))

    async def fork(self, run_id: str, *, scope: Scope, new_run_id: str, from_step: int | str) -> m.RunRecord:
        """See `fork.fork`."""
        return await self._write(lambda work: fork.fork(work, run_id, scope, new_run_id, from_step))

    async def get(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[m.RunRecord | None]:
        """See `listing.get`."""
        return await self._read(lambda work: listing.get(work, run_ids, scope))

    async def find(self, query: m.RunQuery, *, scope: Scope) -> m.Page:
        """See `listing.find`."""
        return await self._read(lambda work: listing.find(work, query, scope))

    async def count(self, query: m.RunQuery, *, scope: Scope) -> int:
        """See `listing.count`."""
        return await self._read(lambda work: listing.count(work, query, scope))

    async def children(self, run_id: str, *, scope: Scope) -> Sequence[m.RunRecord]:
        """See `listing.children`."""
        return await self._read(lambda work: listing.children(work, run_id, scope))

    async def pulse(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[m.Pulse | None]:
        """See `listing.pulse`."""
        return await self._read(lambda work: listing.pulse(work, run_ids, scope))

    # -- the journal -------------------------------------------------------------------------------------------------------

    async def append(self, records: Sequence[tuple[m.Lease, m.NewRecord]]) -> Sequence[m.Appended]:
        """See `journal.append`."""
        self._weigh((text for _, record in records for text in payloads_of(record)), room=RECORD_ROOM)
        try:
            return await self._write(lambda work: journal.append(work, records))
        except enqueue.Taken:
            return await self._write(lambda work: journal.append(work, records, look=True))

    async def history(self, run_id: str, *, scope: Scope) -> Sequence[m.StepRecord]:
        """See `journal.history`."""
        return await self._read(lambda work: journal.history(work, run_id, scope))

    async def transaction(
        self, lease: m.Lease, work: Callable[[Any], Awaitable[m.NewRecord]], *, timeout: Micros
    ) -> m.Appended:
        """See `transactions.exactly_once`."""
        return await transactions.exactly_once(self._database, lease, work, timeout)

    # -- schedules ---------------------------------------------------------------------------------------------------------

    async def put_schedule(self, spec: m.ScheduleSpec, *, scope: Scope) -> m.Schedule:
        """See `schedules.put`."""
        self._weigh([spec.input])
        return await self._write(lambda work: schedules.put(work, spec, scope))

    async def pause_schedule(
        self, schedule_id: str, *, scope: Scope, paused: bool, next_fire_at: m.Instant | None = None
    ) -> bool:
        """See `schedules.pause`."""
        return await self._write(lambda work: schedules.pause(work, schedule_id, scope, paused, next_fire_at))

    async def park_schedule(self, schedule_id: str, *, scope: Scope, reason: str) -> bool:
        """See `schedules.park`."""
        return await self._write(lambda work: schedules.park(work, schedule_id, scope, reason))

    async def remove_schedule(self, schedule_id: str, *, scope: Scope) -> bool:
        """See `schedules.remove`."""
        return await self._write(lambda work: schedules.remove(work, schedule_id, scope))

    async def schedules(self, *, scope: Scope, schedule_ids: Sequence[str] = ()) -> Sequence[m.Schedule]:
        """See `schedules.schedules`."""
        return await self._read(lambda work: schedules.schedules(work, scope, schedule_ids))

    async def due_schedules(self, *, scope: Scope, limit: int) -> tuple[m.Instant, Sequence[m.Schedule]]:
        """See `schedules.due`."""
        return await self._read(lambda work: schedules.due(work, scope, limit))

    async def fire(self, firing: m.Firing) -> Sequence[m.Submitted] | None:
        """See `schedules.fire`."""
        return await self._write(lambda work: schedules.fire(work, firing))

    # -- the mailbox -------------------------------------------------------------------------------------------------------

    async def send(self, signal: m.NewSignal, *, scope: Scope, tx: object | None = None) -> int:
        """See `mailbox.send`."""
        self._weigh([signal.payload])
        if tx is not None:
            return await transactions.on_callers(self._database, tx, lambda work: mailbox.send(work, signal, scope))
        return await self._write(lambda work: mailbox.send(work, signal, scope))

    async def signals(self, run_id: str, *, scope: Scope) -> Sequence[m.Signal]:
        """See `mailbox.signals`."""
        return await self._read(lambda work: mailbox.signals(work, run_id, scope))

    async def inbox(self, leases: Sequence[m.Lease]) -> Sequence[m.Inbox | None]:
        """See `mailbox.inbox`."""
        return await self._read(lambda work: mailbox.inbox(work, leases))

    # -- upkeep ------------------------------------------------------------------------------------------------------------

    async def promote(self, *, scope: Scope, limit: int) -> m.Promoted:
        """See `upkeep.promote`."""
        return await self._plain(lambda work: upkeep.promote(work, scope, limit))

    async def sweep(self, *, scope: Scope, limit: int, max_reclaims: int) -> m.Swept:
        """See `upkeep.sweep`."""
        return await self._write(lambda work: upkeep.sweep(work, scope, limit, max_reclaims))

    async def mend(self, *, scope: Scope, limit: int) -> int:
        """See `upkeep.mend` and `flow.free`."""
        in_vain = await self._plain(lambda work: upkeep.waiting_in_vain(work, scope, limit))
        freed = await self._plain(lambda work: flow.free(work, scope, limit))
        return freed + await self._write(lambda work: upkeep.mend(work, scope, limit, in_vain))

    async def purge(self, *, scope: Scope, limit: int, older_than: Micros | None = None) -> int:
        """See `purge.purge`."""
        return await purge.purge(self._database, scope, limit, older_than)

    async def stats(self, *, scope: Scope) -> Sequence[m.QueueStats]:
        """See `views.stats`."""
        return await self._read(lambda work: views.stats(work, scope))

    async def register(self, worker: m.WorkerRecord) -> None:
        """See `upkeep.register`."""
        await self._write(lambda work: upkeep.register(work, worker))

    async def unregister(self, worker_id: str) -> None:
        """See `upkeep.unregister`."""
        await self._write(lambda work: upkeep.unregister(work, worker_id))

    async def workers(self, *, scope: Scope) -> Sequence[m.WorkerRecord]:
        """See `upkeep.workers`."""
        return await self._read(lambda work: upkeep.workers(work, scope))

    async def queues(self, *, scope: Scope) -> Sequence[m.QueueRecord]:
        """See `flow.queues`."""
        return await self._read(lambda work: flow.queues(work, scope))

    async def set_queue(self, queue: m.QueueRecord) -> None:
        """See `flow.set_queue`."""
        await self._write(lambda work: flow.set_queue(work, queue))

    async def tenants(self, *, scope: Scope) -> Sequence[m.TenantStats]:
        """See `tenants.tenants`."""
        return await self._read(lambda work: tenants.tenants(work, scope))

    async def erase(self, tenant: UUID, *, limit: int) -> int:
        """See `tenants.erase`."""
        return await tenants.erase(self._database, tenant, limit)

    async def explain(self, run_id: str, *, scope: Scope) -> m.Explanation:
        """See `views.explain`."""
        return await self._read(lambda work: views.explain(work, run_id, scope, self.settings.lease))

    async def audit(self, *, scope: Scope) -> Sequence[m.Finding]:
        """See `audit.audit`."""
        return await self._database.snapshot(lambda work: audit.audit(work, scope))

    # -- the store itself --------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> m.Capabilities:
        """Any machine; wake-ups from the server; a caller's session."""
        return m.Capabilities(shared=True, push=self._database.wakeups.watching, caller_tx=True)

    @property
    def settings(self) -> Settings:
        """The settings it was opened with."""
        return self._database.settings

    def clock(self) -> m.Instant:
        """The server's clock, as this process estimates it."""
        return self._database.clock.now()

    async def migrate(self) -> m.SchemaStatus:
        """See `schema.migrate`."""
        return await opening.migrate(self._database)

    async def schema_status(self) -> m.SchemaStatus:
        """See `schema.status`."""
        return await opening.schema_status(self._database)

    async def check(self) -> Sequence[m.Check]:
        """See `checks.check`."""
        return await checks.check(self._database)

    async def wait(self, topics: Sequence[str], timeout: Micros) -> None:
        """See `wakeups.Wakeups.wait`."""
        await self._database.wakeups.wait(topics, timeout / SECOND)

    async def notify(self, topics: Sequence[str]) -> None:
        """See `wakeups.Wakeups.announce`."""
        self._database.wakeups.announce(topics)

    async def close(self) -> None:
        """Let go of all clients; a later call raises StoreUnavailable."""
        await self._database.close()

    def _weigh(self, payloads: Iterable[str | None], *, room: int = 0) -> int:
        """See `storekit.weigh`."""
        return weigh(payloads, self.settings.max_payload + room)
