"""`Run`: what a caller holds of a run. Fields as of the last look, and the verbs that concern this one run.

`Client` makes handles. A handle never changes by itself: `refresh`, `watch`, `result` and the verbs look again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, cast
from uuid import UUID

from typing_extensions import TypeVar

from .codec import plain, read_envelope
from .endings import run_error
from .errors import NotFound
from .instants import moment
from .model import Disposition, RecordKind, RunRecord, Status, StepRecord
from .settings import SECOND, Duration, micros
from .waiting import pulse_of

if TYPE_CHECKING:
    from .client import Client
    from .function import Function
    from .signals import Signal

log = logging.getLogger("durable")

R_co = TypeVar("R_co", covariant=True, default=Any)
A = TypeVar("A")


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a run says it is."""

    done: int
    total: int | None = None
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Approval:
    """Something that a run waits to have approved; answer it with `client.approve(approval.run.id, approval.what, True)`."""

    what: str
    run: Run[Any]


class Run(Generic[R_co]):
    """A run, as of the last look."""

    __slots__ = ("_client", "_function", "_record", "disposition")

    def __init__(
        self,
        client: Client,
        record: RunRecord,
        function: Function[..., Any] | None,
        disposition: Disposition | None = None,
    ) -> None:
        self._client = client
        self._record = record
        self._function = function
        self.disposition: Disposition | None = disposition
        """What `start` did: created a run, found an existing one, or joined a waiting one. None on other handles."""

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.function} {self.status}>"

    # -- fields -----------------------------------------------------------------------------------------------------------

    @property
    def record(self) -> RunRecord:
        """Everything that is stored of the run, as the store keeps it."""
        return self._record

    @property
    def id(self) -> str:
        """The id of the run."""
        return self._record.run_id

    @property
    def tenant(self) -> UUID | None:
        """The tenant it belongs to; None: untagged."""
        return self._record.tenant

    @property
    def function(self) -> str:
        """The name of its function."""
        return self._record.name

    @property
    def status(self) -> Status:
        """Its state; a `str` too."""
        return self._record.status

    @property
    def queue(self) -> str:
        """The queue it waits in."""
        return self._record.queue

    @property
    def tags(self) -> Mapping[str, str]:
        """What it was tagged with."""
        return self._record.tags

    @property
    def created_at(self) -> datetime:
        """When it was submitted (UTC)."""
        return moment(self._record.created_at)

    @property
    def finished_at(self) -> datetime | None:
        """When it landed (UTC)."""
        return None if self._record.finished_at is None else moment(self._record.finished_at)

    @property
    def attempts(self) -> int:
        """How often a worker claimed it."""
        return self._record.attempts

    @property
    def failures(self) -> int:
        """How many executions ended in an error."""
        return self._record.failures

    @property
    def error(self) -> str | None:
        """Why it did not complete, in a sentence."""
        return self._record.error

    @property
    def error_kind(self) -> str | None:
        """The same for machines."""
        return self._record.error_kind

    @property
    def idempotency_key(self) -> str | None:
        """As it was passed."""
        return self._record.idempotency_key

    @property
    def coalesce_key(self) -> str | None:
        """As it was passed."""
        return self._record.coalesce_key

    @property
    def progress(self) -> Progress | None:
        """What it last reported."""
        if self._record.progress is None:
            return None
        raw = plain.read(self._record.progress)
        return Progress(done=raw["done"], total=raw.get("total"), message=raw.get("message") or "")

    # -- verbs ------------------------------------------------------------------------------------------------------------

    async def result(self, *, timeout: Duration | None = None) -> R_co:
        """What the body returned, as soon as it has.

        Raises RunFailed (the original error is its `__cause__` where it can be rebuilt), RunCancelled, RunTimeout or
        RunForwardIncomplete by the state in which the run landed; a plain TimeoutError if it has not landed after `timeout`;
        NotFound if it was purged.
        """
        if not self.status.terminal:
            if timeout is None:
                self._record = await self._client._landed(self.id)
            else:
                limit = micros(timeout, what="timeout")
                try:
                    async with asyncio.timeout(limit / SECOND):
                        self._record = await self._client._landed(self.id)
                except TimeoutError:
                    await self.refresh()
                    if not self.status.terminal:
                        raise TimeoutError(
                            f"run {self.id} has not landed after {limit / SECOND:g} s; it is {self.status}"
                        ) from None
        return self._outcome()

    async def refresh(self) -> Self:
        """Look again. Raises NotFound if the run was purged."""
        self._record = await self._client._record(self.id)
        return self

    async def cancel(self, *, reason: str = "") -> bool:
        """Ask it to stop. False: it has landed, or is gone (semantics 43)."""
        return await self._client.cancel(self.id, reason=reason)

    async def retry(self, *, extra_attempts: int = 0) -> Self:
        """Run it again from the records that stand (semantics 50). Raises Conflict unless it landed other than completed."""
        self._record = (await self._client.retry(self.id, extra_attempts=extra_attempts)).record
        return self

    async def fork(self, *, from_step: int | str) -> Run[R_co]:
        """A new run with the records before that step copied (semantics 51)."""
        made = await self._client.fork(self.id, from_step=from_step)
        return Run(self._client, made.record, self._function)

    async def signal(self, signal: Signal[A], value: A, /, *, id: str | None = None) -> None:
        """Send it a signal; with the same `id` again it is the same one (semantics 32)."""
        await self._client.signal(self.id, signal, value, id=id)

    async def published(self) -> dict[str, Any]:
        """What the run has shown with `ctx.publish`, as plain JSON; the last value of each name. Read anew with every call."""
        return published(await self._client._history(self.id))

    async def children(self) -> dict[str, Run[Any]]:
        """The runs that it started, by the step that did; those of a graph by the names of its nodes (semantics 48, 77). Read anew
        with every call. A child that a retry replaced has `@` and a number behind its step."""
        return {str(run.record.parent_step_id): run for run in await self._client._children(self.id, self._function)}

    async def watch(self) -> AsyncIterator[Self]:
        """This handle, again after each change that was seen, until the run has landed. Quick changes may be seen as one."""
        await self.refresh()
        yield self
        while not self.status.terminal:
            self._record = await self._client._changed(self.id, pulse_of(self._record))
            yield self

    def _outcome(self) -> R_co:
        record = self._record
        if record.status is Status.COMPLETED:
            return self._decoded(record)
        raise run_error(record)

    def _decoded(self, record: RunRecord) -> R_co:
        if record.output is None:
            raise NotFound(f"run {record.run_id} is completed, but its output is not stored (any more)")
        codec = self._client.codec
        value: R_co
        if self._function is None:
            value = codec.decode(record.output)
        else:
            value = self._function.decode_result(record.output, codec)
        return value


def published(history: Sequence[StepRecord]) -> dict[str, Any]:
    """The last value of each name that a journal holds."""
    found: dict[str, Any] = {}
    for record in history:
        if record.kind is RecordKind.PUBLISH:
            _, told = read_envelope(record.result)
            found[told["name"]] = told["value"]
    return found


def awaited_signals(run: RunRecord) -> Sequence[str]:
    """The names of the signals that a suspended run waits for; of a damaged row none, with a warning."""
    try:
        waiting: object = json.loads(run.waiting_for or "{}")
    except ValueError:
        waiting = None
    if not isinstance(waiting, dict):
        log.warning("what run %s waits for can not be read: its stored row is damaged", run.run_id)
        return ()
    names: object = cast("dict[str, object]", waiting).get("signals", ())
    return [str(name) for name in cast("list[object]", names)] if isinstance(names, list) else ()


__all__ = ["Approval", "Progress", "Run", "awaited_signals"]
