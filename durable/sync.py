"""The blocking face: one line per verb, each a call of the async client on a thread with an event loop (the portal).

For scripts, notebooks and web applications without an event loop. It decides nothing; what a verb means stands at `client.Client`.
A client may be used from several threads at once; not from inside a coroutine, which it would block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload
from uuid import UUID

from .client import _UNSET, Client, Statuses
from .codec import Keys
from .errors import Misuse
from .function import Function
from .handle import Progress, R_co, Run
from .model import Disposition, Explanation, RunRecord, SchemaStatus, StepRecord
from .portal import Portal
from .settings import Duration
from .signals import Signal

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
T = TypeVar("T")


def run(main: Callable[[], Coroutine[Any, Any, T]], /) -> T:
    """Run an async main function to its end: `durable.run(main)`. Raises Misuse inside a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    raise Misuse("durable.run inside a running event loop would block it", hint="await main()")


class SyncRun(Generic[R_co]):
    """A run, as of the last look; see `handle.Run`."""

    def __init__(self, portal: Portal, run: Run[R_co]) -> None:
        self._portal = portal
        self._run = run

    def __repr__(self) -> str:
        return f"<SyncRun {self.id} {self.function} {self.status}>"

    @property
    def record(self) -> RunRecord:
        """Everything that is stored of the run."""
        return self._run.record

    @property
    def id(self) -> str:
        """The id of the run."""
        return self._run.id

    @property
    def tenant(self) -> UUID | None:
        """The tenant it belongs to."""
        return self._run.tenant

    @property
    def function(self) -> str:
        """The name of its function."""
        return self._run.function

    @property
    def status(self) -> str:
        """Its state."""
        return self._run.status

    @property
    def error(self) -> str | None:
        """Why it did not complete."""
        return self._run.error

    @property
    def error_kind(self) -> str | None:
        """The same for machines."""
        return self._run.error_kind

    @property
    def progress(self) -> Progress | None:
        """What it last reported."""
        return self._run.progress

    @property
    def disposition(self) -> Disposition | None:
        """What `start` did."""
        return self._run.disposition

    def result(self, *, timeout: Duration | None = None) -> R_co:
        """See `Run.result`."""
        return self._portal.call(self._run.result, timeout=timeout)

    def refresh(self) -> Self:
        """See `Run.refresh`."""
        self._portal.call(self._run.refresh)
        return self

    def cancel(self, *, reason: str = "") -> bool:
        """See `Run.cancel`."""
        return self._portal.call(self._run.cancel, reason=reason)

    def retry(self, *, extra_attempts: int = 0) -> Self:
        """See `Run.retry`."""
        self._portal.call(self._run.retry, extra_attempts=extra_attempts)
        return self

    def fork(self, *, from_step: int | str) -> SyncRun[R_co]:
        """See `Run.fork`."""
        return SyncRun(self._portal, self._portal.call(self._run.fork, from_step=from_step))

    def published(self) -> dict[str, Any]:
        """See `Run.published`."""
        return self._portal.call(self._run.published)

    def children(self) -> dict[str, SyncRun[Any]]:
        """See `Run.children`."""
        return {step: SyncRun(self._portal, run) for step, run in self._portal.call(self._run.children).items()}

    def signal(self, signal: Signal[A], value: A, /, *, id: str | None = None) -> None:
        """See `Run.signal`."""
        self._portal.call(self._run.signal, signal, value, id=id)


class SyncClient:
    """The verbs of `Client`, blocking. Open it with `with`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        schema: str | None = None,
        tables: Mapping[str, str] | None = None,
        auto_migrate: bool | None = None,
        encryption_key: Keys | None = None,
    ) -> None:
        self._client = Client(
            url,
            settings=settings,
            schema=schema,
            tables=tables,
            auto_migrate=auto_migrate,
            encryption_key=encryption_key,
        )
        self._portal = Portal("durable-sync-client")
        self._owner = True

    def __enter__(self) -> Self:
        self._portal.start()
        try:
            self._portal.call(self._client.__aenter__)
        except BaseException:
            self._portal.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._portal.call(self._client.__aexit__, kind, error, trace)
        finally:
            if self._owner:
                self._portal.close()

    def using(self, *, tenant: UUID | str = _UNSET) -> SyncClient:
        """See `Client.using`. A caller's transaction belongs to its thread; it is passed to the async client only."""
        return self._view(self._client.using(tenant=tenant))

    def all_tenants(self) -> SyncClient:
        """See `Client.all_tenants`."""
        return self._view(self._client.all_tenants())

    def _view(self, client: Client) -> SyncClient:
        view = SyncClient.__new__(type(self))
        view._client, view._portal, view._owner = client, self._portal, False
        return view

    def _call(self, verb: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._portal.call(verb, *args, **kwargs)

    def start(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> SyncRun[R]:
        """See `Client.start`."""
        return SyncRun(self._portal, self._call(self._client.start, fn, *args, **kwargs))

    def start_many(self, fn: Function[[A], R], items: Iterable[A], /) -> list[SyncRun[R]]:
        """See `Client.start_many`."""
        return [SyncRun(self._portal, run) for run in self._call(self._client.start_many, fn, items)]

    def run(self, fn: Function[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """See `Client.run`."""
        return self._call(self._client.run, fn, *args, **kwargs)

    @overload
    def get(self, run_id: str, /) -> SyncRun[Any]: ...
    @overload
    def get(self, run_id: str, fn: Function[..., R], /) -> SyncRun[R]: ...
    def get(self, run_id: str, fn: Function[..., Any] | None = None, /) -> SyncRun[Any]:
        """See `Client.get`."""

        async def found() -> Run[Any]:
            return await (self._client.get(run_id) if fn is None else self._client.get(run_id, fn))

        return SyncRun(self._portal, self._call(found))

    def runs(
        self,
        *,
        status: Statuses = None,
        function: str | Sequence[str] | None = None,
        queue: str | Sequence[str] | None = None,
        since: datetime | None = None,
        limit: int | None = 50,
    ) -> Iterator[SyncRun[Any]]:
        """See `Client.runs`; the pages are read as they are needed."""
        pages = self._client.runs(status=status, function=function, queue=queue, since=since, limit=limit)

        async def following() -> Run[Any] | None:
            return await anext(pages, None)

        while (run := self._call(following)) is not None:
            yield SyncRun(self._portal, run)

    def count(self, *, status: Statuses = None, function: str | Sequence[str] | None = None) -> int:
        """See `Client.count`."""
        return self._call(self._client.count, status=status, function=function)

    def journal(self, run_id: str, /) -> Sequence[StepRecord]:
        """See `Client.journal`."""
        return self._call(self._client.journal, run_id)

    def explain(self, run_id: str, /) -> Explanation:
        """See `Client.explain`."""
        return self._call(self._client.explain, run_id)

    def cancel(self, run_id: str, /, *, reason: str = "") -> bool:
        """See `Client.cancel`."""
        return self._call(self._client.cancel, run_id, reason=reason)

    def retry(self, run_id: str, /, *, extra_attempts: int = 0) -> SyncRun[Any]:
        """See `Client.retry`."""
        return SyncRun(self._portal, self._call(self._client.retry, run_id, extra_attempts=extra_attempts))

    def retry_all(self, *, status: Statuses, function: str | None = None, since: datetime | None = None) -> int:
        """See `Client.retry_all`."""
        return self._call(self._client.retry_all, status=status, function=function, since=since)

    def fork(self, run_id: str, /, *, from_step: int | str) -> SyncRun[Any]:
        """See `Client.fork`."""
        return SyncRun(self._portal, self._call(self._client.fork, run_id, from_step=from_step))

    def signal(self, run_id: str, signal: Signal[A], value: A, /, *, id: str | None = None) -> None:
        """See `Client.signal`."""
        self._call(self._client.signal, run_id, signal, value, id=id)

    def approve(self, run_id: str, what: str, answer: bool, /, *, id: str | None = None) -> None:
        """See `Client.approve`."""
        self._call(self._client.approve, run_id, what, answer, id=id)

    def wake(self, queue: str = "default") -> None:
        """See `Client.wake`."""
        self._call(self._client.wake, queue)

    def purge(self, *, older_than: Duration | None = None) -> int:
        """See `Client.purge`."""
        return self._call(self._client.purge, older_than=older_than)

    def migrate(self) -> SchemaStatus:
        """See `Client.migrate`."""
        return self._call(self._client.migrate)


__all__ = ["SyncClient", "SyncRun", "run"]
