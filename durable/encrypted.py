"""A store whose payloads are encrypted at rest (semantics 72): the contract of `protocol.py` around any backend's store.

`config.open_store` puts it around every store that it opens; the engine and the backends know nothing of it. On the way in it
encrypts what users pass and what their code returns: inputs, outputs, step results with the digest of their arguments, signals,
progress, error messages with their data, reasons of a cancel, and inputs of schedules. What a store compares, sorts or routes by
stays plain: ids, keys, tags, names of functions, steps, signals, queues and approvals, kinds, states, instants and options.

On the way out it opens what its ring can open. Plain texts pass: those from before the encryption, and those that stores write
themselves. A run that is claimed and can not be opened harms no other: with a key missing it is handed back, for a worker that
has the key; changed or moved it lands `failed`, kind `payload`, as one whose row is damaged (9). Those who only look at runs
get a mark in the place of such a text, and the typed error when they decode it.

Without keys it writes plain texts, and does not touch what others have encrypted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast
from uuid import UUID

from . import model as m
from .codec import KeyRing, error_data, plain
from .codec.encryption import origin_of, origin_of_coalesced, sealed, sealed_size
from .errors import EncryptionError, MissingKey, NotFound, PayloadTooLarge, SerializationError
from .model import ALL, Scope
from .protocol import Store
from .settings import SECOND, Micros, Settings
from .storekit import RECORD_ROOM

log = logging.getLogger("durable.encryption")

HAND_BACK: Micros = 30 * SECOND
"""How long a run stays untouched for which a worker lacks the key: others have it, or it is being rolled out."""

RUN_FIELDS: Final = ("input", "output", "error", "error_detail", "progress")
END_FIELDS: Final = ("output", "error", "error_detail")

_Value = TypeVar("_Value")


def room_for(settings: Settings) -> Settings:
    """The settings of a store within: its limit has to hold the sealed form of the longest payload and of the longest record."""
    longest = sealed_size(settings.max_payload + RECORD_ROOM) - RECORD_ROOM
    return dataclasses.replace(settings, max_payload=longest)


class EncryptedStore:
    """A `Store` that holds encrypted payloads; `settings` are the user's own, `store` was opened with `room_for` them.

    What it does not name goes to the store as it is: those methods carry no payload.
    """

    def __init__(self, store: Store, ring: KeyRing, settings: Settings) -> None:
        self.within = store
        self.settings = settings
        self._ring = ring

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    # -- runs --------------------------------------------------------------------------------------------------------------

    async def enqueue(self, runs: Sequence[m.NewRun], *, tx: object | None = None) -> Sequence[m.Submitted]:
        """See `RunStore.enqueue`. Inputs are encrypted for their run; one that may replace a waiting input for its key (37)."""
        answers = await self.within.enqueue([self._new_run(run) for run in runs], tx=tx)
        return await self._submitted(answers)

    async def claim(self, request: m.ClaimRequest) -> Sequence[m.Claimed]:
        """See `RunStore.claim`. A run that can not be opened is given up and not returned; the others go on (9)."""
        found = await self.within.claim(request)
        if not any(map(_holds_sealed, found)):
            return found
        opened = [await self._claimed(one) for one in found]
        return [one for one in opened if one is not None]

    async def renew(self, renewals: Sequence[m.Renewal], *, lease: Micros) -> Sequence[m.Renewed]:
        """See `RunStore.renew`."""
        return await self.within.renew([self._renewal(one) for one in renewals], lease=lease)

    async def settle(self, entries: Sequence[tuple[m.Lease, m.Outcome]]) -> Sequence[m.Settled]:
        """See `RunStore.settle`."""
        if self._ring:
            entries = [(lease, self._outcome(lease, outcome)) for lease, outcome in entries]
        return await self.within.settle(entries)

    async def request_cancel(self, run_ids: Sequence[str], *, scope: Scope, reason: str = "") -> Sequence[bool]:
        """See `RunStore.request_cancel`. A reason may become a run's error, so each run gets its own text of it. Raises SerializationError
        for one that looks like an encrypted text: it could not be told from one."""
        if reason.startswith((plain.SEALED, plain.UNREADABLE)):
            raise SerializationError(f"a reason that begins with {reason[:19]}, which marks encrypted payloads")
        if not self._ring or not reason:
            return await self.within.request_cancel(run_ids, scope=scope, reason=reason)
        tenants = await self._tenants(run_ids, scope)
        answers: list[bool] = []
        for run_id in run_ids:
            own = self._seal(reason, tenants.get(run_id), run_id, "error")
            answers += await self.within.request_cancel([run_id], scope=scope, reason=own)
        return answers

    async def retry(self, run_id: str, *, scope: Scope, attempts: int, extra_attempts: int = 0) -> m.RunRecord:
        """See `RunStore.retry`."""
        return await self._run(
            await self.within.retry(run_id, scope=scope, attempts=attempts, extra_attempts=extra_attempts)
        )

    async def fork(self, run_id: str, *, scope: Scope, new_run_id: str, from_step: int | str) -> m.RunRecord:
        """See `RunStore.fork`. What is copied stays encrypted for the run it was made for, which `forked_from` leads to."""
        return await self._run(await self.within.fork(run_id, scope=scope, new_run_id=new_run_id, from_step=from_step))

    async def get(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[m.RunRecord | None]:
        """See `RunStore.get`."""
        return [None if run is None else await self._run(run) for run in await self.within.get(run_ids, scope=scope)]

    async def find(self, query: m.RunQuery, *, scope: Scope) -> m.Page:
        """See `RunStore.find`."""
        page = await self.within.find(query, scope=scope)
        return m.Page(runs=[await self._run(run) for run in page.runs], cursor=page.cursor)

    async def children(self, run_id: str, *, scope: Scope) -> Sequence[m.RunRecord]:
        """See `RunStore.children`."""
        return [await self._run(run) for run in await self.within.children(run_id, scope=scope)]

    async def pulse(self, run_ids: Sequence[str], *, scope: Scope) -> Sequence[m.Pulse | None]:
        """See `RunStore.pulse`."""
        pulses = await self.within.pulse(run_ids, scope=scope)
        unread = [pulse.run_id for pulse in pulses if pulse is not None and sealed(pulse.progress)]
        tenants = await self._tenants(unread, scope)
        return [
            pulse
            if pulse is None or not sealed(pulse.progress)
            else self._shown(pulse, ("progress",), tenants.get(pulse.run_id), (pulse.run_id,))
            for pulse in pulses
        ]

    async def explain(self, run_id: str, *, scope: Scope) -> m.Explanation:
        """See `Upkeep.explain`."""
        found = await self.within.explain(run_id, scope=scope)
        run = await self._run(found.run)
        reasons = [
            reason.replace(found.run.error, run.error) if found.run.error and run.error else reason
            for reason in found.reasons
        ]
        return dataclasses.replace(found, run=run, reasons=reasons)

    # -- the journal -------------------------------------------------------------------------------------------------------

    async def append(self, records: Sequence[tuple[m.Lease, m.NewRecord]]) -> Sequence[m.Appended]:
        """See `StepJournal.append`."""
        answers = await self.within.append([(lease, self._new_record(lease, record)) for lease, record in records])
        if not any(answer.record is not None and sealed(answer.record.result) for answer in answers):
            return answers
        return [
            await self._appended(lease, record, answer)
            for (lease, record), answer in zip(records, answers, strict=True)
        ]

    async def history(self, run_id: str, *, scope: Scope) -> Sequence[m.StepRecord]:
        """See `StepJournal.history`."""
        records = await self.within.history(run_id, scope=scope)
        if not any(sealed(record.result) for record in records):
            return records
        (run,) = await self.within.get([run_id], scope=scope)
        if run is None:  # purged between the two reads
            return await self.within.history(run_id, scope=scope)
        origins = await self._origins(run, [record.result for record in records])
        shown: list[m.StepRecord] = []
        for record in records:
            try:
                shown.append(self._record(record, run.tenant, origins))
            except EncryptionError as error:
                shown.append(dataclasses.replace(record, result=plain.unreadable(error)))
        return shown

    async def transaction(
        self, lease: m.Lease, work: Callable[[Any], Awaitable[m.NewRecord]], *, timeout: Micros
    ) -> m.Appended:
        """See `StepJournal.transaction`. The caller's own rows are the caller's own business."""
        made: list[m.NewRecord] = []

        async def encrypted(native: Any) -> m.NewRecord:
            made.append(await work(native))
            return self._new_record(lease, made[-1])

        answer = await self.within.transaction(lease, encrypted, timeout=timeout)
        return await self._appended(lease, made[-1] if made else None, answer)

    # -- schedules ---------------------------------------------------------------------------------------------------------

    async def put_schedule(self, spec: m.ScheduleSpec, *, scope: Scope) -> m.Schedule:
        """See `Scheduler.put_schedule`."""
        tenant = None if scope is ALL else scope
        text = self._seal(spec.input, tenant, spec.schedule_id, "schedule")
        return self._schedule(await self.within.put_schedule(dataclasses.replace(spec, input=text), scope=scope))

    async def schedules(self, *, scope: Scope, schedule_ids: Sequence[str] = ()) -> Sequence[m.Schedule]:
        """See `Scheduler.schedules`."""
        return [self._schedule(one) for one in await self.within.schedules(scope=scope, schedule_ids=schedule_ids)]

    async def due_schedules(self, *, scope: Scope, limit: int) -> tuple[m.Instant, Sequence[m.Schedule]]:
        """See `Scheduler.due_schedules`. One without its key is left to others, one that is damaged is parked (55)."""
        now, due = await self.within.due_schedules(scope=scope, limit=limit)
        readable: list[m.Schedule] = []
        for one in due:
            try:
                readable.append(self._opened_schedule(one))
            except MissingKey as error:
                log.warning("the schedule %s is not fired here: %s", one.schedule_id, error.message)
            except EncryptionError as error:
                log.error("the schedule %s is parked: %s", one.schedule_id, error.message)
                await self.within.park_schedule(one.schedule_id, scope=one.tenant, reason=error.message)
        return now, readable

    async def fire(self, firing: m.Firing) -> Sequence[m.Submitted] | None:
        """See `Scheduler.fire`."""
        runs = tuple(self._new_run(run) for run in firing.runs)
        answers = await self.within.fire(dataclasses.replace(firing, runs=runs))
        return None if answers is None else await self._submitted(answers)

    # -- the mailbox -------------------------------------------------------------------------------------------------------

    async def send(self, signal: m.NewSignal, *, scope: Scope, tx: object | None = None) -> int:
        """See `Mailbox.send`."""
        if self._ring:
            tenants = await self._tenants([signal.run_id], scope)
            if tx is not None and signal.run_id not in tenants:
                raise NotFound(
                    f"run {signal.run_id} is not there outside this transaction, so its tenant is not known",
                    hint="send it with client.using(tenant=..., conn=...), whose tenant it is encrypted for",
                )
            tenant = tenants.get(signal.run_id)
            text = self._seal(signal.payload, tenant, signal.run_id, f"signal/{signal.name}")
            signal = dataclasses.replace(signal, payload=text)
        return await self.within.send(signal, scope=scope, tx=tx)

    async def signals(self, run_id: str, *, scope: Scope) -> Sequence[m.Signal]:
        """See `Mailbox.signals`."""
        signals = await self.within.signals(run_id, scope=scope)
        tenant = (await self._tenants([run_id], scope)).get(run_id)
        return [self._shown(one, ("payload",), tenant, (run_id,), name=f"signal/{one.name}") for one in signals]

    async def inbox(self, leases: Sequence[m.Lease]) -> Sequence[m.Inbox | None]:
        """See `Mailbox.inbox`. A run to which something came that can not be opened is given up: its lease is lost."""
        answers: list[m.Inbox | None] = []
        for lease, inbox in zip(leases, await self.within.inbox(leases), strict=True):
            try:
                answers.append(None if inbox is None else self._inbox(lease, inbox))
            except EncryptionError as error:
                await self._give_up(lease, error)
                answers.append(None)
        return answers

    # -- on the way in -----------------------------------------------------------------------------------------------------

    def _seal(self, text: str, tenant: UUID | None, origin: str, field: str, *, room: int = 0) -> str:
        """The text to store. Raises PayloadTooLarge by its plain length (70), EncryptionError for the mark of an unopened one."""
        plain.refuse_unreadable(text)
        if not self._ring:
            return text
        size, limit = len(text.encode()), self.settings.max_payload + room
        if size > limit:
            raise PayloadTooLarge(f"a payload of {size} bytes; at most {limit} are stored")
        return self._ring.encrypt(text, tenant=tenant, origin=origin, field=field)

    def _new_run(self, run: m.NewRun) -> m.NewRun:
        may_replace = run.coalesce_key is not None and run.on_coalesce == "replace"
        origin = origin_of_coalesced(run.coalesce_key or "") if may_replace else run.run_id
        return _changed(run, input=self._seal(run.input, run.tenant, origin, "input"))

    def _new_record(self, lease: m.Lease, record: m.NewRecord) -> m.NewRecord:
        if not self._ring:
            plain.refuse_unreadable(record.result)
            return record
        text = self._seal(
            f"{record.digest}\n{record.result}",
            lease.tenant,
            lease.run_id,
            f"step/{record.step_id}",
            room=RECORD_ROOM,
        )
        return dataclasses.replace(
            record,
            digest="",
            result=text,
            progress=self._progress(lease, record.progress),
            children=tuple(self._new_run(child) for child in record.children),
        )

    def _progress(self, lease: m.Lease, progress: str | None) -> str | None:
        return None if progress is None else self._seal(progress, lease.tenant, lease.run_id, "progress")

    def _renewal(self, renewal: m.Renewal) -> m.Renewal:
        return _changed(renewal, progress=self._progress(renewal.lease, renewal.progress))

    def _outcome(self, lease: m.Lease, outcome: m.Outcome) -> m.Outcome:
        if isinstance(outcome, m.Completed):
            return m.Completed(output=self._seal(outcome.output, lease.tenant, lease.run_id, "output"))
        if isinstance(outcome, m.Suspended) or outcome.failure is None:
            return outcome
        return dataclasses.replace(outcome, failure=self._failure(lease, outcome.failure))

    def _failure(self, lease: m.Lease, failure: m.Failure) -> m.Failure:
        seal = self._ring.encrypt
        at: dict[str, Any] = {"tenant": lease.tenant, "origin": lease.run_id}
        detail = None if failure.detail is None else seal(failure.detail, **at, field="error_detail")
        return dataclasses.replace(failure, message=seal(failure.message, **at, field="error"), detail=detail)

    # -- on the way out ----------------------------------------------------------------------------------------------------

    async def _claimed(self, one: m.Claimed) -> m.Claimed | None:
        if not _holds_sealed(one):
            return one
        origins = await self._origins(one.run, _texts(one.run, one.history))
        try:
            run = self._opened(one.run, RUN_FIELDS, one.run.tenant, origins)
            history = tuple(self._record(record, one.run.tenant, origins) for record in one.history)
        except EncryptionError as error:
            await self._give_up(one.lease, error)
            return None
        return m.Claimed(lease=one.lease, run=run, history=history)

    async def _give_up(self, lease: m.Lease, error: EncryptionError) -> None:
        """Hand back a run whose key is missing here; land one `failed` that nobody can open (9, 72)."""
        data = error_data(error)
        failure = m.Failure(
            message=f"{data.type_name}: {data.message}", kind=m.ErrorKind.PAYLOAD, detail=data.to_json()
        )
        missing = isinstance(error, MissingKey)
        outcome = m.HandedBack(after=HAND_BACK, failure=failure) if missing else m.Failed(failure=failure)
        (answer,) = await self.within.settle([(lease, outcome)])
        if answer == "woken":  # an ask to cancel came first, and decides (47)
            await self.within.settle([(lease, m.Cancelled(failure=failure))])
        log.log(
            logging.WARNING if missing else logging.ERROR,
            "run %s is %s: %s",
            lease.run_id,
            "handed back" if missing else "failed",
            error.message,
        )

    async def _submitted(self, answers: Sequence[m.Submitted]) -> Sequence[m.Submitted]:
        return [_changed(answer, run=await self._run(answer.run)) for answer in answers]

    async def _run(self, run: m.RunRecord) -> m.RunRecord:
        """The run for those who look: with a mark in the place of what can not be opened."""
        texts = _texts(run)
        if not any(map(sealed, texts)):
            return run
        return self._shown(run, RUN_FIELDS, run.tenant, await self._origins(run, texts))

    async def _appended(self, lease: m.Lease, made: m.NewRecord | None, answer: m.Appended) -> m.Appended:
        stored = answer.record
        if stored is None or not sealed(stored.result):
            return answer
        if answer.state == "appended" and made is not None:
            return dataclasses.replace(answer, record=_changed(stored, result=made.result, digest=made.digest))
        (run,) = await self.within.get([lease.run_id], scope=lease.tenant)
        if run is None:  # purged meanwhile, so the lease is long gone
            return m.Appended(state="lost", record=None)
        try:
            record = self._record(stored, lease.tenant, await self._origins(run, [stored.result]))
        except EncryptionError as error:
            await self._give_up(lease, error)
            return m.Appended(state="lost", record=None)
        return dataclasses.replace(answer, record=record)

    def _record(self, record: m.StepRecord, tenant: UUID | None, origins: Iterable[str]) -> m.StepRecord:
        if not sealed(record.result):
            return record
        text = self._ring.decrypt(record.result, tenant=tenant, origins=tuple(origins), field=f"step/{record.step_id}")
        digest, _, result = text.partition("\n")
        return dataclasses.replace(record, digest=digest, result=result)

    def _inbox(self, lease: m.Lease, inbox: m.Inbox) -> m.Inbox:
        signals = [
            self._opened(one, ("payload",), lease.tenant, (lease.run_id,), name=f"signal/{one.name}")
            for one in inbox.signals
        ]
        children = [self._opened(one, END_FIELDS, lease.tenant, (one.run_id,)) for one in inbox.children]
        # It is the error with which a run lands that never had a record, so it is encrypted as one.
        try:
            told = self._opened(inbox, ("cancel_reason",), lease.tenant, (lease.run_id,), name="error")
        except EncryptionError as error:  # the ask holds, whatever was said with it
            told = dataclasses.replace(inbox, cancel_reason=f"the reason can not be read here: {error.message}")
        return dataclasses.replace(told, signals=signals, children=children)

    def _schedule(self, schedule: m.Schedule) -> m.Schedule:
        return self._shown(schedule, ("input",), schedule.tenant, (schedule.schedule_id,), name="schedule")

    def _opened_schedule(self, schedule: m.Schedule) -> m.Schedule:
        return self._opened(schedule, ("input",), schedule.tenant, (schedule.schedule_id,), name="schedule")

    def _opened(
        self, value: _Value, fields: Sequence[str], tenant: UUID | None, origins: Iterable[str], *, name: str = ""
    ) -> _Value:
        """The value with its sealed fields opened. `name`: what the field was called when it was encrypted, if otherwise.

        Raises MissingKey, EncryptionError."""
        accepted = tuple(origins)
        opened = {
            field: self._ring.decrypt(text, tenant=tenant, origins=accepted, field=name or field)
            for field in fields
            if sealed(text := getattr(value, field))
        }
        return _changed(value, **opened)

    def _shown(
        self, value: _Value, fields: Sequence[str], tenant: UUID | None, origins: Iterable[str], *, name: str = ""
    ) -> _Value:
        """The same, with a mark in the place of each text that can not be opened."""
        for field in fields:
            try:
                value = self._opened(value, (field,), tenant, origins, name=name)
            except EncryptionError as error:
                value = _changed(value, **{field: plain.unreadable(error)})
        return value

    # -- what a text may have been made for ----------------------------------------------------------------------------------

    async def _origins(self, run: m.RunRecord, texts: Iterable[str | None]) -> set[str]:
        """What the texts of a run may be made for: the run itself, its coalesce key, and the runs that it was forked from, as far
        back as these texts ask for and as those runs are kept (a purged one tells of no earlier ones)."""
        wanted = {_origin(text) for text in texts if text is not None and sealed(text)}
        accepted = _own_origins(run)
        while not wanted <= accepted and run.forked_from is not None and run.forked_from not in accepted:
            (source,) = await self.within.get([run.forked_from], scope=run.tenant)
            if source is None:
                return accepted | wanted
            run = source
            accepted |= _own_origins(run)
        return accepted

    async def _tenants(self, run_ids: Sequence[str], scope: Scope) -> Mapping[str, UUID | None]:
        """Whose runs these are."""
        if scope is not ALL:
            return dict.fromkeys(run_ids, scope)
        found = await self.within.get(run_ids, scope=ALL) if run_ids else ()
        return {run.run_id: run.tenant for run in found if run is not None}


def _texts(run: m.RunRecord, history: Sequence[m.StepRecord] = ()) -> list[str | None]:
    return [getattr(run, field) for field in RUN_FIELDS] + [record.result for record in history]


def _holds_sealed(one: m.Claimed) -> bool:
    return any(map(sealed, _texts(one.run, one.history)))


def _own_origins(run: m.RunRecord) -> set[str]:
    own = {run.run_id}
    return own if run.coalesce_key is None else own | {origin_of_coalesced(run.coalesce_key)}


def _origin(text: str) -> str:
    try:
        return origin_of(text)
    except EncryptionError:
        return ""  # of no run: it is refused when it is opened


def _changed(value: _Value, **fields: Any) -> _Value:
    """The value with these fields; the same object if they are what it has already."""
    if all(getattr(value, name) is new for name, new in fields.items()):
        return value
    return cast("_Value", dataclasses.replace(cast("Any", value), **fields))


__all__ = ["EncryptedStore", "room_for"]
