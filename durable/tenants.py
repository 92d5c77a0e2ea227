"""The face of tenants: `client.tenants`. What is stored of each, pausing one, handing out everything of one, and erasing one.

`Client` makes it. Each verb acts on tenants that the client sees: `client.all_tenants()` on any, `client.using(tenant=…)` on its own.
The other one's is NotFound, the same as one that never was (semantics 57).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from .errors import ConfigurationError, Conflict, NotFound
from .flow import TENANT
from .instants import moment
from .model import ALL, Json, QueueRecord, RunQuery, RunRecord, Scope, Status, TenantStats

if TYPE_CHECKING:
    from .client import Client

PAGE: Final = 200
PAYLOADS: Final = frozenset(
    {"input", "output", "error_detail", "options", "waiting_for", "progress", "result", "payload"}
)
INSTANTS: Final = frozenset({"at", "leased_until", "scheduled_for", "mismatch_since"})
LIVE: Final = (Status.PENDING, Status.RUNNING, Status.SUSPENDED)


def tenant_of(tenant: UUID | str | None) -> UUID:
    """The tenant that a caller names. Raises ConfigurationError: a missing or empty one never means everybody's (semantics 59)."""
    if isinstance(tenant, UUID):
        return tenant
    hint = 'a UUID, or durable.tenant_id("acme") for any name; everybody\'s rows are client.all_tenants()'
    if not isinstance(tenant, str) or not tenant:
        raise ConfigurationError(f"tenant={tenant!r}: a missing tenant never means all of them", hint=hint)
    try:
        return UUID(tenant)
    except ValueError:
        raise ConfigurationError(f"tenant={tenant!r}: not a UUID", hint=hint) from None


class Tenants:
    """The tenants that one client sees."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def all(self) -> Sequence[TenantStats]:
        """What is stored of each: runs by state, schedules, whether it is paused. The untagged first, then by id."""
        return await self._stats(self._client.scope)

    async def get(self, tenant: UUID | str, /) -> TenantStats:
        """The same of one tenant. Raises NotFound for one that the client does not see."""
        (found,) = await self._stats(self._seen(tenant))
        return found

    async def pause(self, tenant: UUID | str, /) -> None:
        """Claim none of its runs until `resume`, in any queue; runs in hand go on, and no other tenant notices (semantics 57, 74).
        Raises NotFound."""
        await self._set_paused(tenant, True)

    async def resume(self, tenant: UUID | str, /) -> None:
        """Claim its runs again. Raises NotFound."""
        await self._set_paused(tenant, False)

    async def export(self, tenant: UUID | str, /) -> AsyncIterator[str]:
        """Everything of a tenant as lines of JSON, streamed: schedules, rows of flow control, then its runs, newest first, each followed
        by its records and its signals. `type` says which; instants are ISO 8601 in UTC, durations microseconds.

        Pages are read one after the other: what changes meanwhile is in it as it was, or as it is. Raises NotFound.
        """
        scope = self._seen(tenant)
        store, repeated = self._client.store, self._client._opened.repeated
        for schedule in await repeated(lambda: store.schedules(scope=scope)):
            yield _line("schedule", schedule)
        for row in await repeated(lambda: store.queues(scope=scope)):
            yield _line("flow_control", row)
        query = RunQuery(limit=PAGE)
        while True:
            page = await repeated(lambda wanted=query: store.find(wanted, scope=scope))  # type: ignore[misc]
            for run in page.runs:
                for line in await self._lines_of(run, scope):
                    yield line
            if page.cursor is None:
                return
            query = RunQuery(limit=PAGE, cursor=page.cursor)

    async def erase(self, tenant: UUID | str, /) -> int:
        """Delete everything that is stored of a tenant, and nothing of others, in bounded batches; returns how many runs, schedules, slots
        and rows of flow control that were. Its keys are free again.

        Raises NotFound; Conflict while it has live runs: they may have outside effects to undo, so cancel them and let them land
        first. An erasure that was interrupted is called again.
        """
        scope = self._seen(tenant)
        (found,) = await self._stats(scope)
        live = sum(found.runs.get(state, 0) for state in LIVE)
        if live:
            raise Conflict(
                f"tenant {scope} has {live:,} live runs",
                hint="cancel them and let them land (a paused tenant's do not), then erase it",
            )
        store, batch, total = self._client.store, self._client.settings.purge_batch, 0
        while True:
            gone = await self._client._opened.repeated(lambda: store.erase(scope, limit=batch))
            if not gone:
                return total
            total += gone

    async def _lines_of(self, run: RunRecord, scope: Scope) -> list[str]:
        store, repeated = self._client.store, self._client._opened.repeated
        try:
            records = await repeated(lambda: store.history(run.run_id, scope=scope))
            signals = await repeated(lambda: store.signals(run.run_id, scope=scope))
        except NotFound:
            return []  # it was purged since the page was read
        return [
            _line("run", run),
            *(_line("record", record, run_id=run.run_id) for record in records),
            *(_line("signal", signal, run_id=run.run_id) for signal in signals),
        ]

    async def _set_paused(self, tenant: UUID | str, paused: bool) -> None:
        scope = self._seen(tenant)
        store, repeated = self._client.store, self._client._opened.repeated
        rows = await repeated(lambda: store.queues(scope=scope))
        row = next((row for row in rows if row.scope_name == TENANT), QueueRecord(scope_name=TENANT, tenant=scope))
        changed = dataclasses.replace(row, paused=paused)
        await repeated(lambda: store.set_queue(changed))

    async def _stats(self, scope: Scope) -> Sequence[TenantStats]:
        return await self._client._opened.repeated(lambda: self._client.store.tenants(scope=scope))

    def _seen(self, tenant: UUID | str | None) -> UUID:
        wanted, scope = tenant_of(tenant), self._client.scope
        if scope is not ALL and scope != wanted:
            raise NotFound(f"there is no tenant {wanted}", hint="an operator looks with client.all_tenants().tenants")
        return wanted


def _line(kind: str, value: Any, **more: str) -> str:
    fields: dict[str, Any] = {"type": kind, **more}
    for field in dataclasses.fields(value):
        fields[field.name] = _plain(field.name, getattr(value, field.name))
    return json.dumps(fields, ensure_ascii=False)


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in PAYLOADS:
        return _payload(value)
    if name in INSTANTS or name.endswith("_at"):
        return moment(value).isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return value


def _payload(text: Json) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # what can not be read is handed out as it is


__all__ = ["Tenants", "tenant_of"]
