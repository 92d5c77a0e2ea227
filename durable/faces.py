"""The faces of schedules and queues: `client.schedules` and `client.queues`. One verb, one or two calls of the contract.

`Client` makes them. They compute instants and check values; the store compares and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, ParamSpec
from uuid import UUID

from . import cron
from .errors import ConfigurationError, NotFound, RegistrationError
from .function import Function, default_registry
from .handle import Run
from .instants import instant, moment
from .model import ALL, Firing, Instant, NewRun, QueueRecord, QueueStats, Schedule, ScheduleSpec
from .options import Options, checked_key, given_text
from .settings import Micros, micros
from .steps import checked_name
from .submission import scheduled_run

if TYPE_CHECKING:
    from .client import Client

P = ParamSpec("P")


class Schedules:
    """Cron rows of one client's tenant (semantics 52-56)."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def put(self, id: str, fn: Function[P, Any], /, *args: P.args, **kwargs: P.kwargs) -> Schedule:
        """Register `fn.using(cron=…)` with these arguments, or change what is registered under the id.

        It keeps the cron, the queue and the arguments; all else is taken from the function that fires. The same cron and zone leave
        the next instant and a pause alone (56). Raises RegistrationError for a cron that can not work and for other options,
        SerializationError for arguments that can not be stored.
        """
        checked_key(id, "the id of a schedule")
        _refuse_what_is_not_kept(fn)
        declared = fn.options.cron if fn.options.cron is not None else fn.cron
        if declared is None:
            raise RegistrationError(f"{fn.name} has no cron", hint=f'{fn.name}.using(cron="0 9 * * *")')
        store = self._client.store
        spec = ScheduleSpec(
            schedule_id=id,
            name=fn.name,
            cron=declared.expression,
            tz=declared.tz,
            input=fn.encode_arguments(self._client.codec, args, kwargs),
            queue=fn.options.queue if fn.options.queue is not None else fn.queue,
            overlap=declared.overlap,
            catch_up=declared.catch_up,
            jitter=declared.jitter,
            next_fire_at=instant(declared.next_after(moment(store.clock()))),
        )
        return await self._client._opened.repeated(lambda: store.put_schedule(spec, scope=self._scope))

    async def remove(self, id: str, /) -> bool:
        """Remove it; its runs stay. False: unknown."""
        given_text(id, "the id of a schedule")
        return await self._client._opened.repeated(
            lambda: self._client.store.remove_schedule(id, scope=self._client.scope)
        )

    async def pause(self, id: str, /) -> bool:
        """Fire nothing until `resume`. False: unknown."""
        given_text(id, "the id of a schedule")
        return await self._client._opened.repeated(
            lambda: self._client.store.pause_schedule(id, scope=self._client.scope, paused=True)
        )

    async def resume(self, id: str, /) -> bool:
        """Go on with the first instant after now: what fell into the pause is not made up for. False: unknown."""
        found = await self._find(id)
        if found is None:
            return False
        store = self._client.store
        following = instant(cron.next_after(found.cron, moment(store.clock()), tz=found.tz))
        return await self._client._opened.repeated(
            lambda: store.pause_schedule(id, scope=self._client.scope, paused=False, next_fire_at=following)
        )

    async def all(self) -> Sequence[Schedule]:
        """All of the tenant, by id."""
        return await self._client._opened.repeated(lambda: self._client.store.schedules(scope=self._client.scope))

    async def get(self, id: str, /) -> Schedule:
        """One of them. Raises NotFound."""
        found = await self._find(id)
        if found is None:
            raise NotFound(f"there is no schedule {id!r}")
        return found

    async def next(self, id: str, /, *, count: int = 5) -> list[datetime]:
        """The next instants at which it is to fire, in UTC. Raises NotFound."""
        found = await self.get(id)
        after = moment(self._client.store.clock())
        return list(islice(cron.occurrences(found.cron, after, tz=found.tz), count))

    async def trigger(self, id: str, /) -> Run[Any]:
        """Start a run of it now, beside its plan. Raises NotFound."""
        found = await self.get(id)
        function = self._function(found)
        run = scheduled_run(function, found, None)
        (answer,) = await self._client._opened.repeated(lambda: self._client.store.enqueue([run]))
        return Run(self._client._plain(), answer.run, function, answer.disposition)

    async def backfill(self, id: str, /, *, since: datetime, until: datetime) -> int:
        """Start a run for each instant in (since, until] that has none yet; returns how many. With `overlap="queue"` they run one
        after the other, otherwise side by side. Raises NotFound, and ConfigurationError for more than `start_many_limit` instants."""
        start, end = instant(since, what="since"), instant(until, what="until")
        found = await self.get(id)
        function = self._function(found)
        limit = self._client.settings.start_many_limit
        slots = _between(found, start, end, limit)
        one_by_one = found.overlap == "queue"
        runs = tuple(scheduled_run(function, found, slot, sequence=one_by_one) for slot in slots)
        return await self._backfill(found, runs) if runs else 0

    async def _backfill(self, found: Schedule, runs: tuple[NewRun, ...]) -> int:
        store = self._client.store
        while found.enabled and found.parked_reason is None and found.next_fire_at is not None:
            firing = Firing(
                schedule_id=found.schedule_id,
                tenant=found.tenant,
                expected=found.next_fire_at,
                next_fire_at=found.next_fire_at,
                runs=runs,
            )
            answers = await self._client._opened.repeated(lambda wanted=firing: store.fire(wanted))  # type: ignore[misc]
            if answers is not None:
                return len(answers)
            found = await self.get(found.schedule_id)  # it fired meanwhile: with the instant that it has now
        # A paused schedule has no firing; its runs are kept apart by their keys.
        made = await self._client._opened.repeated(lambda: store.enqueue(runs))
        return sum(answer.disposition == "created" for answer in made)

    @property
    def _scope(self) -> UUID | None:
        return self._client._own_tenant("schedules.put")

    async def _find(self, id: str) -> Schedule | None:
        given_text(id, "the id of a schedule")
        found = await self._client._opened.repeated(
            lambda: self._client.store.schedules(scope=self._client.scope, schedule_ids=[id])
        )
        return found[0] if found else None

    @staticmethod
    def _function(found: Schedule) -> Function[..., Any]:
        function = default_registry.get(found.name)
        if function is None:
            raise RegistrationError(
                f"this process has no function {found.name!r}", hint="import the module that declares it"
            )
        return function


_SPELLED = {"start_at": "at", "deadline_at": "deadline", "deadline_after": "deadline", "unlimited": "timeout"}


def _refuse_what_is_not_kept(fn: Function[..., Any]) -> None:
    """An option that no row of a schedule has a place for would be forgotten without a word."""
    none = Options()
    given = [
        field.name
        for field in dataclasses.fields(Options)
        if getattr(fn.options, field.name) != getattr(none, field.name)
    ]
    lost = sorted({_SPELLED.get(name, name) for name in given} - {"cron", "queue"})
    if lost:
        raise RegistrationError(
            f"a schedule of {fn.name} can not keep {', '.join(lost)}",
            hint="declare retry, timeout, priority and keep with @durable.function; .using(...) takes cron and queue here",
        )


def _between(found: Schedule, start: Instant, end: Instant, limit: int) -> list[Instant]:
    slots: list[Instant] = []
    for when in cron.occurrences(found.cron, moment(start), tz=found.tz):
        slot = instant(when)
        if slot > end:
            return slots
        if len(slots) == limit:
            raise ConfigurationError(
                f"backfill: more than {limit:,} instants", hint="take a shorter time, several times"
            )
        slots.append(slot)
    return slots


class Queues:
    """Pauses, limits and depths of queues, for the runs of the client's tenant: of a plain client the untagged ones, of
    `client.all_tenants()` everybody's together (semantics 57, 73)."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def pause(self, name: str, /) -> None:
        """Claim nothing from it until `resume`; runs in hand go on."""
        await self._change(f"queue:{_named(name)}", paused=True)

    async def resume(self, name: str, /) -> None:
        """Claim from it again."""
        await self._change(f"queue:{_named(name)}", paused=False)
        await self._client.wake(name)

    async def limit(
        self,
        name: str,
        /,
        *,
        max_concurrency: int | None = None,
        rate: str | None = None,
        per_key: int | None = None,
        per_tenant: int | None = None,
    ) -> None:
        """At most so many runs of the queue at once over all workers; at most `rate` starts, such as "100/1m"; at most `per_key` at once of
        each concurrency key, and `per_tenant` of each tenant (73, 76). What is left out is unlimited.

        `per_tenant` is for `client.all_tenants()`. Raises ConfigurationError before anything is written.
        """
        queue = _named(name)
        for what, value in (("max_concurrency", max_concurrency), ("per_key", per_key), ("per_tenant", per_tenant)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigurationError(f"{what}: {value!r} is not a positive whole number")
        if per_tenant is not None and self._client.scope is not ALL:
            raise ConfigurationError(
                "per_tenant: a client of one tenant can not say what each may have",
                hint="client.all_tenants().queues.limit(...)",
            )
        count, period = _rate(rate)
        await self._change(
            f"queue:{queue}", max_concurrency=max_concurrency, rate_count=count, rate_period=period, rate_burst=count
        )
        await self._change(f"key:{queue}", max_concurrency=per_key)
        if self._client.scope is ALL:
            await self._change(f"share:{queue}", max_concurrency=per_tenant)
        await self._client.wake(queue)

    async def fair(self, name: str, on: bool = True, /) -> None:
        """Let tenants take turns in the queue: a worker that serves everybody takes one run of each before a second of any, whatever the
        backlog of one (7, 57). For `client.all_tenants()`; raises ConfigurationError otherwise."""
        if self._client.scope is not ALL:
            raise ConfigurationError(
                "fair: tenants take turns in a queue of everybody's", hint="client.all_tenants().queues.fair(...)"
            )
        await self._change(f"queue:{_named(name)}", fair=bool(on))

    async def all(self) -> Sequence[QueueRecord]:
        """The rows of flow control."""
        return await self._client._opened.repeated(lambda: self._client.store.queues(scope=self._client.scope))

    async def stats(self) -> Sequence[QueueStats]:
        """Depths, the age of the oldest ready run, failures by kind; per queue."""
        return await self._client._opened.repeated(lambda: self._client.store.stats(scope=self._client.scope))

    async def _change(self, scope_name: str, **changes: Any) -> None:
        scope = self._client.scope
        rows = await self._client._opened.repeated(lambda: self._client.store.queues(scope=scope))
        found = next((row for row in rows if row.scope_name == scope_name and row.tenant == scope), None)
        if found is None and not any(changes.values()):
            return  # nothing is limited, and nothing is to be
        changed = dataclasses.replace(found or QueueRecord(scope_name=scope_name, tenant=scope), **changes)
        await self._client._opened.repeated(lambda: self._client.store.set_queue(changed))


def _named(queue: str) -> str:
    return checked_name(queue, "queue")


def _rate(rate: str | None) -> tuple[int | None, Micros | None]:
    if rate is None:
        return None, None
    if not isinstance(rate, str):
        raise ConfigurationError(f"rate: {rate!r} is no text", hint='a count and a time, such as "100/1m" or "5/s"')
    count, slash, period = rate.partition("/")
    if not slash or not count.strip().isdigit() or int(count) < 1:
        raise ConfigurationError(
            f"rate: {rate!r} can not be read", hint='a count and a time, such as "100/1m" or "5/s"'
        )
    text = period.strip()
    length = micros(f"1{text}" if text.isalpha() else text, what="rate")
    if length == 0:
        raise ConfigurationError(f"rate: {rate!r} has no time", hint='such as "100/1m"')
    return int(count), length


__all__ = ["Queues", "Schedules"]
