"""Fires schedules: decides which instants of a due row become runs, and lets the store compare, advance and enqueue in one write.

A chore of every worker; the slot rows and the compare-and-set of the store make it exactly once over any number of them
(semantics 52-56). It fires only what its worker can build a run for; a row that can not be read is parked with the reason.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, cast
from uuid import UUID

from .. import cron
from ..clock import jittered
from ..codec import Codec
from ..errors import RegistrationError
from ..events import Events, ScheduleFired, ScheduleParked, ScheduleUnserved
from ..function import Function
from ..instants import instant, moment
from ..model import ALL, Firing, Instant, QueueRecord, Schedule, ScheduleSpec, Scope
from ..protocol import Store
from ..settings import MINUTE, Micros, Settings
from ..submission import scheduled_run

BATCH = 200


class Scheduling:
    """The schedules of one worker."""

    def __init__(
        self,
        store: Store,
        *,
        scope: Scope,
        events: Events,
        settings: Settings,
        codec: Codec,
        functions: Iterable[Function[..., Any]],
    ) -> None:
        self._store = store
        self._scope = scope
        self._events = events
        self._settings = settings
        self._codec = codec
        self._functions = {function.name: function for function in functions}
        self._unserved: set[str] = set()

    async def declare(self) -> None:
        """Register what the code declares: `cron=` under the worker's tenant, or untagged (56); `max_concurrency=` for the runs that
        the worker serves: everybody's together, or its tenant's (73)."""
        scope = self._scope if isinstance(self._scope, UUID) else None
        now = moment(self._store.clock())
        limits = {
            row.scope_name: row for row in await self._store.queues(scope=self._scope) if row.tenant == self._scope
        }
        for function in self._functions.values():
            declared = function.declared
            if declared.cron is not None:
                await self._store.put_schedule(self._spec(function, declared.cron, now), scope=scope)
            wanted = f"function:{declared.name}"
            row = limits.get(wanted, QueueRecord(scope_name=wanted, tenant=self._scope))
            if row.max_concurrency != declared.max_concurrency:
                await self._store.set_queue(dataclasses.replace(row, max_concurrency=declared.max_concurrency))

    def _spec(self, function: Function[..., Any], declared: cron.Cron, now: datetime) -> ScheduleSpec:
        try:
            payload = function.encode_arguments(self._codec, (), {})
        except TypeError as error:
            raise RegistrationError(
                f"{function.name} is declared with cron= and takes arguments: {error}",
                hint="give them defaults, or register it with client.schedules.put(id, fn.using(cron=...), ...)",
            ) from None
        return ScheduleSpec(
            schedule_id=function.name,
            name=function.name,
            cron=declared.expression,
            tz=declared.tz,
            input=payload,
            queue=function.queue,
            overlap=declared.overlap,
            catch_up=declared.catch_up,
            jitter=declared.jitter,
            next_fire_at=instant(declared.next_after(now)),
            from_code=True,
        )

    async def fire(self) -> Micros:
        """Fire what is due. Returns how long to rest."""
        now, schedules = await self._store.due_schedules(scope=self._scope, limit=BATCH)
        for schedule in schedules:
            if schedule.name in self._functions:
                await self._fire(schedule, now)
            elif schedule.schedule_id not in self._unserved:
                self._unserved.add(schedule.schedule_id)  # once: somebody else may know it
                self._events.emit(ScheduleUnserved(schedule_id=schedule.schedule_id, name=schedule.name))
        return jittered(self._settings.poll, random=random.random())

    async def _fire(self, schedule: Schedule, now: Instant) -> None:
        assert schedule.next_fire_at is not None
        try:
            found = cron.due(
                schedule.cron,
                moment(schedule.next_fire_at),
                moment(now),
                tz=schedule.tz,
                catch_up=cast(Literal["none", "latest", "all"], schedule.catch_up),
                limit=self._settings.catch_up_limit,
            )
            slots = [instant(when) for when in found.fire]
            following: Instant | None = instant(found.following)
            runs = tuple(
                scheduled_run(self._functions[schedule.name], schedule, slot, sequence=schedule.overlap == "queue")
                for slot in self._wanted(schedule, slots)
            )
        except (RegistrationError, KeyError) as error:  # KeyError: a catch_up that this code does not know
            await self._park(schedule, str(error))
            return
        answers = await self._store.fire(
            Firing(
                schedule_id=schedule.schedule_id,
                tenant=schedule.tenant,
                expected=schedule.next_fire_at,
                next_fire_at=following,
                runs=runs,
            )
        )
        if answers is not None and (slots or answers):
            self._events.emit(
                ScheduleFired(
                    schedule_id=schedule.schedule_id,
                    run_ids=tuple(answer.run.run_id for answer in answers),
                    skipped=len(slots) - len(answers),
                )
            )

    @staticmethod
    def _wanted(schedule: Schedule, slots: list[Instant]) -> list[Instant]:
        """`skip` never has two runs at once: none beside a live one, and of several instants only the newest."""
        if schedule.overlap != "skip":
            return slots
        return [] if schedule.last_run_live else slots[-1:]

    async def _park(self, schedule: Schedule, reason: str) -> None:
        """A bad row harms nothing else (55)."""
        assert schedule.next_fire_at is not None
        self._events.emit(ScheduleParked(schedule_id=schedule.schedule_id, reason=reason))
        await self._store.fire(
            Firing(
                schedule_id=schedule.schedule_id,
                tenant=schedule.tenant,
                expected=schedule.next_fire_at,
                next_fire_at=None,
                runs=(),
                parked_reason=reason,
            )
        )

    async def look_after(self) -> Micros:
        """Park schedules of the code whose function no live worker knows any more (56)."""
        known = {name for worker in await self._store.workers(scope=ALL) for name, _ in worker.functions}
        known.update(self._functions)
        for schedule in await self._store.schedules(scope=self._scope):
            if (
                schedule.from_code
                and schedule.enabled
                and schedule.parked_reason is None
                and schedule.name not in known
            ):
                reason = f"no live worker has a function {schedule.name!r}; it was declared in code with cron="
                scope = schedule.tenant
                if await self._store.park_schedule(schedule.schedule_id, scope=scope, reason=reason):
                    self._events.emit(ScheduleParked(schedule_id=schedule.schedule_id, reason=reason))
        return jittered(MINUTE, random=random.random())
