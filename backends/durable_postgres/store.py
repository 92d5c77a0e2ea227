"""The store: one class, one visible line per method; each hands an operation to a transaction.

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
from durable.settings import SECOND, Micros, Settings
from durable.storekit import RECORD_ROOM, payloads_of, weigh

from . import (
    audit,
    callers,
    cancel,
    checks,
    claim,
    enqueue,
    flow,
    fork,
    journal,
    landing,
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
from .claim import Taken
from .connection import Database
from .contact import Contact
from .wakeups import Wakeups


class Store:
    """Fulfils `durable.protocol.Store`; the docstrings of its methods are the contract."""

    def __init__(self, database: Database, contact: Contact) -> None:
        self._database = database
        self._contact = contact
        self._wakeups = Wakeups(database)
        self._write = database.write
        self._read = database.read
        self._turns = Turns()
        database.news = self._wakeups

    # -- runs --------------------------------------------------------------------------------------------------------------

    async def enqueue(self, runs: Sequence[m.NewRun], *, tx: object | None = None) -> Sequence[m.Submitted]:
        """See `enqueue.plain` and `enqueue.enqueue`."""
        self._weigh(text for run in runs for text in (run.input, run.options))
        if tx is not None:
            return await callers.on_callers(self._database, tx, lambda work: enqueue.enqueue(work, runs))
        if len(runs) == 1 and enqueue.is_plain(runs[0]):
            stored = await self._write(lambda work: enqueue.plain(work, runs[0]), once=True)
            if stored is not None:
                return [stored]
        return await self._write(lambda work: enqueue.enqueue(work, runs, last=True))

    async def claim(self, request: m.ClaimRequest) -> Sequence[m.Claimed]:
        """See `claim.quick` and `claim.thorough`."""
        self._may_claim()
        taken = await self._claim(request)
        replayed = claim.replayed(taken)
        # In a statement that starts after the claim has committed (3).
        journals = await self._read(lambda work: claim.histories(work, replayed)) if replayed else {}
        return claim.claimed(taken, journals)

    async def _claim(self, request: m.ClaimRequest) -> Taken:
        if request.limit < 1:
            return Taken(await self._read(lambda work: claim.held(work, request.mark)), again=True)
        # Should the server lose this commit in a crash, the runs are pending again, and nobody ever has the same fence.
        found = await self._write(lambda work: claim.quick(work, request), durable=False, once=True)
        if found.again:
            return Taken(await self._read(lambda work: claim.held(work, request.mark)), again=True)
        if found.runs and found.ending:
            await self._write(lambda work: claim.land_what_ends(work, request))
        if found.runs or not (found.ruled or found.ending):
            return found
        return await self._write(lambda work: claim.thorough(work, request, self._turns))

    async def renew(self, renewals: Sequence[m.Renewal], *, lease: Micros) -> Sequence[m.Renewed]:
        """See `settle.renew`."""
        self._weigh(renewal.progress for renewal in renewals)
        return await self._write(lambda work: settle.renew(work, renewals, lease), durable=False, once=True)

    async def settle(self, entries: Sequence[tuple[m.Lease, m.Outcome]]) -> Sequence[m.Settled]:
        """See `landing.complete_alone` and `settle.settle`."""
        self._weigh(outcome.output for _, outcome in entries if isinstance(outcome, m.Completed))
        alone = settle.completed(entries)
        landed: set[str] = (
            await self._write(lambda work: landing.complete_alone(work, alone), once=True) if alone else set()
        )
        rest = [entry for entry in entries if entry[0].run_id not in landed]
        told = iter(await self._write(lambda work: settle.settle(work, rest)) if rest else ())
        return ["landed" if lease.run_id in landed else next(told) for lease, _ in entries]

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
        """See `journal.append_plain` and `journal.append`."""
        self._weigh((text for _, record in records for text in payloads_of(record)), room=RECORD_ROOM)
        if journal.changing(records):
            return await self._write(lambda work: journal.append(work, records))
        answers = await self._write(lambda work: journal.append_plain(work, records), once=True)
        left = [place for place, answer in enumerate(answers) if answer is None]
        if left:
            rest = [records[place] for place in left]
            told = await self._write(lambda work: journal.append(work, rest))
            for place, answer in zip(left, told, strict=True):
                answers[place] = answer
        return [answer for answer in answers if answer is not None]

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
        return await self._read(lambda work: schedules.schedules(work, scope, schedule_ids), once=False)

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
            return await callers.on_callers(self._database, tx, lambda work: mailbox.send(work, signal, scope))
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
        return await self._write(lambda work: upkeep.promote(work, scope, limit), durable=False)

    async def sweep(self, *, scope: Scope, limit: int, max_reclaims: int) -> m.Swept:
        """See `upkeep.sweep`."""
        return await self._write(lambda work: upkeep.sweep(work, scope, limit, max_reclaims))

    async def mend(self, *, scope: Scope, limit: int) -> int:
        """See `upkeep.mend`."""
        return await self._write(lambda work: upkeep.mend(work, scope, limit))

    async def purge(self, *, scope: Scope, limit: int, older_than: Micros | None = None) -> int:
        """See `upkeep.purge`."""
        return await self._write(lambda work: upkeep.purge(work, scope, limit, older_than))

    async def stats(self, *, scope: Scope) -> Sequence[m.QueueStats]:
        """See `views.stats`."""
        return await self._read(lambda work: views.stats(work, scope), once=False)

    async def register(self, worker: m.WorkerRecord) -> None:
        """See `upkeep.register`."""
        self._may_claim()
        await self._write(lambda work: upkeep.register(work, worker), once=True)

    async def unregister(self, worker_id: str) -> None:
        """See `upkeep.unregister`."""
        await self._write(lambda work: upkeep.unregister(work, worker_id), once=True)

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
        return await self._write(lambda work: tenants.erase(work, tenant, limit))

    async def explain(self, run_id: str, *, scope: Scope) -> m.Explanation:
        """See `views.explain`."""
        return await self._read(lambda work: views.explain(work, run_id, scope), once=False)

    async def audit(self, *, scope: Scope) -> Sequence[m.Finding]:
        """See `audit.audit`."""
        return await self._read(lambda work: audit.audit(work, scope))

    # -- the store itself --------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> m.Capabilities:
        """Many machines; wake-ups from the server; the caller's transaction."""
        return m.Capabilities(shared=True, push=self._database.address.listen, caller_tx=True)

    @property
    def settings(self) -> Settings:
        """The settings it was opened with."""
        return self._database.settings

    def clock(self) -> m.Instant:
        """The server's clock, as this process estimates it."""
        return self._database.clock()

    async def migrate(self) -> m.SchemaStatus:
        """See `schema.migrate`."""
        self._database.pools.guard()
        found = await schema.migrate(self._database)
        self._contact.for_claims = None
        return found

    async def schema_status(self) -> m.SchemaStatus:
        """See `schema.status`."""
        self._database.pools.guard()
        return await schema.status(self._database)

    async def check(self) -> Sequence[m.Check]:
        """See `checks.check`."""
        self._database.pools.guard()
        return await checks.check(self._database)

    async def wait(self, topics: Sequence[str], timeout: Micros) -> None:
        """See `wakeups.Wakeups.wait`."""
        self._database.pools.guard()
        await self._wakeups.wait(topics, timeout / SECOND)

    async def notify(self, topics: Sequence[str]) -> None:
        """See `wakeups.Wakeups.announce`."""
        self._database.pools.guard()
        self._wakeups.announce(topics)

    async def close(self) -> None:
        """Finish what is under way and let go; a later call raises StoreUnavailable. Closing twice is nothing."""
        await self._wakeups.close()
        await self._database.close()

    def _may_claim(self) -> None:
        if self._contact.for_claims is not None:
            raise self._contact.for_claims

    def _weigh(self, payloads: Iterable[str | None], *, room: int = 0) -> int:
        """See `storekit.weigh`."""
        return weigh(payloads, self.settings.max_payload + room)
