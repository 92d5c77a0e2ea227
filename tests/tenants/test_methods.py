"""Every public method is tried across two tenants (rule 57): what is another's is NotFound, or nothing, or False, the same as what never
was; and a checksum of the other's rows, read past the SDK, stays the same.

The methods are listed from the classes themselves: one that is new and has no case here fails.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from tenants.commands import ended
from tenants.rows import checksum, of_tenant
from typer.testing import CliRunner

import durable
from durable.cli import app
from durable.faces import Queues, Schedules
from durable.handle import Run
from durable.model import RunQuery
from durable.sync import SyncRun
from durable.tenants import Tenants

declared = durable.Registry("tenants_methods")
WORD = durable.Signal("word", str)
SINCE, UNTIL = datetime(2030, 1, 1, tzinfo=UTC) - timedelta(days=1), datetime(2030, 1, 2, tzinfo=UTC)
UNKNOWN = str(uuid.UUID(int=7))


async def nothing() -> None: ...


@durable.function(registry=declared)
async def foreign_job(ctx: durable.Context, n: int) -> str:
    await ctx.step(nothing)
    if n < 0:
        raise ValueError("negative")
    return f"{ctx.tenant} {n}"


durable.function(name="foreign_job")(foreign_job.fn)  # the default registry: handles and schedules look there
SCHEDULED = foreign_job.using(cron="0 0 1 1 *")


class Theirs:
    """What the other tenant has: a live and a failed run with a journal, keys, a signal, a schedule, limits, a page's cursor."""

    def __init__(self, tenant: UUID, live: str, dead: str, cursor: str) -> None:
        self.tenant, self.live, self.dead, self.cursor = tenant, live, dead, cursor

    @property
    def unknown(self) -> Theirs:
        """The same shape of nothing."""
        return Theirs(uuid.UUID(int=9), UNKNOWN, UNKNOWN, self.cursor)


async def populated(client: durable.Client) -> Theirs:
    tenant = uuid.uuid4()
    other = client.using(tenant=tenant)
    queue = f"q-{tenant}"
    dead = await other.start(foreign_job.using(queue=queue), -1)
    async with durable.Worker(other, functions=declared, queues=[queue], grace="2s"):
        with pytest.raises(durable.RunFailed):
            await dead.result(timeout="60s")
    keyed = foreign_job.using(
        idempotency_key="k", coalesce_key="c", sequence_key="s", concurrency_key="cc", queue=queue
    )
    live = await other.start(keyed.using(tags={"a": "b"}), 1)
    await other.signal(live.id, WORD, "kept")
    await other.schedules.put("nightly", SCHEDULED, 1)
    await other.queues.limit("default", max_concurrency=7, rate="5/m", per_key=2)
    page = await client.store.find(RunQuery(limit=1), scope=tenant)
    assert page.cursor is not None
    return Theirs(tenant, live.id, dead.id, page.cursor)


async def listed(answer: Awaitable[Any]) -> list[Any]:
    return list(await answer)


async def through(lines: Any) -> list[Any]:
    return [one async for one in lines]


async def page_of(c: durable.Client, cursor: str) -> list[Any]:
    return list((await c.store.find(RunQuery(cursor=cursor), scope=c.scope)).runs)


NOT_FOUND = durable.NotFound
Attempt = tuple[Callable[[durable.Client, Theirs], Awaitable[Any]], Any]
CLIENT: dict[str, Attempt] = {
    "get": (lambda c, t: c.get(t.live), NOT_FOUND),
    "journal": (lambda c, t: c.journal(t.live), NOT_FOUND),
    "explain": (lambda c, t: c.explain(t.live), NOT_FOUND),
    "cancel": (lambda c, t: c.cancel(t.live), False),
    "retry": (lambda c, t: c.retry(t.dead), NOT_FOUND),
    "fork": (lambda c, t: c.fork(t.dead, from_step=0), NOT_FOUND),
    "signal": (lambda c, t: c.signal(t.live, WORD, "x"), NOT_FOUND),
    "approve": (lambda c, t: c.approve(t.live, "it", True), NOT_FOUND),
    "approvals": (lambda c, t: through(c.approvals()), []),
    "runs": (lambda c, t: through(c.runs(limit=None)), []),
    "runs by cursor": (lambda c, t: page_of(c, t.cursor), []),
    "runs by everything": (
        lambda c, t: through(
            c.runs(queue=f"q-{t.tenant}", schedule="nightly", tags={"a": "b"}, function="foreign_job")
        ),
        [],
    ),
    "count": (lambda c, t: c.count(), 0),
    "retry_all": (lambda c, t: c.retry_all(status="failed"), 0),
    "purge": (lambda c, t: c.purge(older_than=0), 0),
    "workers": (lambda c, t: listed(c.workers()), []),
    "audit": (lambda c, t: listed(c.audit()), []),
    "schedules.get": (lambda c, t: c.schedules.get("nightly"), NOT_FOUND),
    "schedules.all": (lambda c, t: listed(c.schedules.all()), []),
    "schedules.pause": (lambda c, t: c.schedules.pause("nightly"), False),
    "schedules.resume": (lambda c, t: c.schedules.resume("nightly"), False),
    "schedules.remove": (lambda c, t: c.schedules.remove("nightly"), False),
    "schedules.next": (lambda c, t: c.schedules.next("nightly"), NOT_FOUND),
    "schedules.trigger": (lambda c, t: c.schedules.trigger("nightly"), NOT_FOUND),
    "schedules.backfill": (lambda c, t: c.schedules.backfill("nightly", since=SINCE, until=UNTIL), NOT_FOUND),
    "queues.stats": (lambda c, t: listed(c.queues.stats()), []),
    "queues.all": (lambda c, t: listed(c.queues.all()), []),
    "queues.fair": (lambda c, t: c.queues.fair("default"), durable.ConfigurationError),
    "tenants.get": (lambda c, t: c.tenants.get(t.tenant), NOT_FOUND),
    "tenants.pause": (lambda c, t: c.tenants.pause(t.tenant), NOT_FOUND),
    "tenants.resume": (lambda c, t: c.tenants.resume(t.tenant), NOT_FOUND),
    "tenants.export": (lambda c, t: through(c.tenants.export(t.tenant)), NOT_FOUND),
    "tenants.erase": (lambda c, t: c.tenants.erase(t.tenant), NOT_FOUND),
}
OWN: dict[str, Callable[[durable.Client, Theirs], Awaitable[Any]]] = {
    # These make rows of one's own under the other's keys, ids and names; the other's stay as they are.
    "start": lambda c, t: c.start(
        foreign_job.using(idempotency_key="k", coalesce_key="c", sequence_key="s", queue=f"q-{t.tenant}"), 5
    ),
    "start_many": lambda c, t: c.start_many(foreign_job.using(queue=f"q-{t.tenant}"), [1, 2]),
    "schedules.put": lambda c, t: c.schedules.put("nightly", SCHEDULED, 9),
    "queues.pause": lambda c, t: c.queues.pause("default"),
    "queues.resume": lambda c, t: c.queues.resume("default"),
    "queues.limit": lambda c, t: c.queues.limit("default", max_concurrency=3, rate="1/m", per_key=1),
    "tenants.all": lambda c, t: c.tenants.all(),
    "wake": lambda c, t: c.wake(),
}
ELSEWHERE = {
    "all_tenants": "the only unbound handle: test_all_tenants_sees_everybody_and_starts_nothing",
    "using": "test_a_missing_tenant_never_widens_a_filter",
    "run": "start, then the result of that run: test_a_bound_worker_takes_only_its_tenants_runs",
    **dict.fromkeys(("migrate", "schema_status", "check"), "the tables and the server are everybody's"),
    **dict.fromkeys(("store", "scope", "serves", "settings", "codec", "events"), "not a method"),
    **dict.fromkeys(("schedules", "queues", "tenants"), "its methods are tried one by one"),
}
HANDLE: dict[str, tuple[Callable[[Any], Awaitable[Any]], Any]] = {
    "result": (lambda run: run.result(timeout="20s"), NOT_FOUND),
    "refresh": (lambda run: run.refresh(), NOT_FOUND),
    "cancel": (lambda run: run.cancel(), False),
    "retry": (lambda run: run.retry(), NOT_FOUND),
    "fork": (lambda run: run.fork(from_step=0), NOT_FOUND),
    "signal": (lambda run: run.signal(WORD, "x"), NOT_FOUND),
    "published": (lambda run: run.published(), NOT_FOUND),
    "children": (lambda run: run.children(), {}),
    "watch": (lambda run: through(run.watch()), NOT_FOUND),
}
FIELDS = {
    *(
        "id",
        "tenant",
        "function",
        "status",
        "queue",
        "tags",
        "created_at",
        "finished_at",
        "attempts",
        "failures",
        "error",
        "error_kind",
    ),
    *("idempotency_key", "coalesce_key", "progress", "record", "disposition"),
}
SYNC_ELSEWHERE = {"using", "all_tenants", "run", "migrate"}


def public(kind: type, prefix: str = "") -> set[str]:
    return {prefix + name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


def test_every_public_method_is_tried_or_stands_elsewhere() -> None:
    faces = public(Schedules, "schedules.") | public(Queues, "queues.") | public(Tenants, "tenants.")
    tried = {name.partition(" ")[0] for name in CLIENT} | set(OWN) | set(ELSEWHERE)
    assert public(durable.Client) | faces == tried
    assert public(Run) == set(HANDLE) | FIELDS
    assert public(SyncRun) <= set(HANDLE) | FIELDS
    assert public(durable.SyncClient) <= tried


async def told(attempt: Awaitable[Any]) -> Any:
    """What came of it: a value, or the class of an error and its text."""
    try:
        return await attempt
    except durable.DurableError as error:
        return type(error), str(error)


def without_ids(answer: Any, *things: object) -> Any:
    if not isinstance(answer, tuple):
        return answer
    text = answer[1]
    for thing in things:
        text = text.replace(str(thing), "…")
    return answer[0], text


def verdict(name: str, answer: Any, expected: Any) -> str | None:
    got = answer[0] if isinstance(answer, tuple) else answer
    return None if got == expected and isinstance(got, bool) == isinstance(expected, bool) else f"{name}: {answer!r}"


@pytest.mark.timeout(180)
async def test_another_tenants_things_are_the_same_as_unknown_ones_and_its_rows_stay(
    client: durable.Client, url: str
) -> None:
    theirs = await populated(client)
    before = of_tenant(url, theirs.tenant)
    whole = {"durable_run", "durable_step", "durable_signal", "durable_key", "durable_schedule", "durable_queue"}
    assert {table for table, _ in before} >= whole, "there is something that could change"
    wrong: list[str] = []
    for scope in ("tenant", "untagged"):
        mine = client.using(tenant=uuid.uuid4()) if scope == "tenant" else client
        for name, (attempt, expected) in CLIENT.items():
            answer = await told(attempt(mine, theirs))
            if (bad := verdict(f"{scope} {name}", answer, expected)) is not None:
                wrong.append(bad)
            unknown = without_ids(await told(attempt(mine, theirs.unknown)), UNKNOWN, theirs.unknown.tenant)
            if without_ids(answer, theirs.live, theirs.dead, theirs.tenant) != unknown:
                wrong.append(f"{scope} {name}: {answer!r} tells more than {unknown!r}")
            if checksum(of_tenant(url, theirs.tenant)) != checksum(before):
                wrong.append(f"{scope} {name} changed rows of the other tenant")
                before = of_tenant(url, theirs.tenant)
    assert not wrong, "\n".join(wrong)


async def test_rows_of_ones_own_under_anothers_keys_ids_and_names_leave_the_others_alone(
    client: durable.Client, url: str
) -> None:
    theirs = await populated(client)
    before = of_tenant(url, theirs.tenant)
    for mine in (client.using(tenant=uuid.uuid4()), client):
        for name, attempt in OWN.items():
            await attempt(mine, theirs)
            kept = set(of_tenant(url, theirs.tenant))
            assert set(before) <= kept, name
        assert {run.tenant async for run in mine.runs(limit=None)} == {mine.scope}
        started = await mine.start(foreign_job.using(idempotency_key="k"), 5)
        assert (started.disposition, started.tenant) == ("existing", mine.scope)
    for run in [run async for run in client.runs(limit=None)]:
        await run.cancel()
    await client.queues.limit("default")
    await client.schedules.remove("nightly")


async def test_a_handle_of_another_tenants_run_sees_and_changes_nothing(client: durable.Client, url: str) -> None:
    """However it was come by: a record that was shown once is no permission."""
    theirs = await populated(client)
    before = checksum(of_tenant(url, theirs.tenant))
    records = await client.store.get([theirs.live, theirs.dead], scope=theirs.tenant)
    wrong: list[str] = []
    for mine in (client.using(tenant=uuid.uuid4()), client):
        for name, (attempt, expected) in HANDLE.items():
            record = records[1] if name in ("retry", "fork") else records[0]
            assert record is not None
            bad = verdict(name, await told(attempt(Run(mine, record, foreign_job))), expected)
            wrong += [] if bad is None else [bad]
    assert not wrong, "\n".join(wrong)
    assert checksum(of_tenant(url, theirs.tenant)) == before


async def test_the_blocking_client_keeps_tenants_apart_too(client: durable.Client, url: str) -> None:
    theirs = await populated(client)
    before = checksum(of_tenant(url, theirs.tenant))
    (record,) = await client.store.get([theirs.live], scope=theirs.tenant)
    assert record is not None
    tried = public(durable.SyncClient) - SYNC_ELSEWHERE

    def attempts() -> list[str]:
        wrong: list[str] = []
        with durable.SyncClient(url) as plain:
            mine = plain.using(tenant=uuid.uuid4())
            assert list(mine.runs(limit=None)) == []
            for name in sorted(tried & set(CLIENT) - {"runs"}):
                attempt, expected = CLIENT[name]
                try:
                    answer: Any = attempt(mine, theirs)  # type: ignore[arg-type]
                except durable.DurableError as error:
                    answer = type(error), str(error)
                wrong += [bad for bad in [verdict(name, answer, expected)] if bad is not None]
            handle = SyncRun(mine._portal, Run(mine._client, record, foreign_job))
            for name in sorted(public(SyncRun) & set(HANDLE)):
                try:
                    answer = HANDLE[name][0](handle)
                except durable.DurableError as error:
                    answer = type(error), str(error)
                expected = NOT_FOUND if name in ("retry", "fork") else HANDLE[name][1]
                wrong += [bad for bad in [verdict(f"run.{name}", answer, expected)] if bad is not None]
        return wrong

    assert await asyncio.to_thread(attempts) == []
    assert checksum(of_tenant(url, theirs.tenant)) == before


# -- the command line -----------------------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[list[str], int | None]] = {
    # words, and the exit code; None: a listing, which must be empty. {live}, {dead}: the other tenant's runs.
    "runs list": ([], None),
    "runs show": (["{live}"], 3),
    "runs cancel": (["{live}"], 1),
    "runs retry": (["{dead}"], 3),
    "approvals list": ([], None),
    "approvals answer": (["{live}", "it", "--yes"], 3),
    "signal": (["{live}", "word", '"x"'], 3),
    "explain": (["{live}"], 3),
    "replay": (["durable.cli.demo", "--run", "{dead}"], 3),
    "purge": (["--older-than", "0s"], 0),
    "audit": ([], 0),
    "queues list": ([], None),
}
COMMANDS_ELSEWHERE = {
    "demo": "makes a store of its own",
    "worker": "test_a_bound_worker_takes_only_its_tenants_runs",
    "start": "makes a run of one's own",
    **dict.fromkeys(("migrate", "schema", "doctor"), "the tables and the server are everybody's"),
    **dict.fromkeys(("queues pause", "queues resume", "queues limit", "queues fair"), "rows of one's own: OWN"),
    **dict.fromkeys(
        ("tenants list", "tenants pause", "tenants resume", "tenants export", "tenants erase"),
        "for operators, who see everybody",
    ),
}


def commands() -> set[str]:
    found = {command.name or "" for command in app.registered_commands}
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found |= {f"{group.name} {command.name}" for command in group.typer_instance.registered_commands}
    return found


def test_every_command_is_tried_or_stands_elsewhere() -> None:
    assert commands() == set(COMMANDS) | set(COMMANDS_ELSEWHERE)


async def test_a_command_of_one_tenant_reaches_nothing_of_another(client: durable.Client, url: str) -> None:
    theirs = await populated(client)
    before = checksum(of_tenant(url, theirs.tenant))
    wrong: list[str] = []

    def run(name: str, words: list[str]) -> tuple[int, str]:
        arguments = [word.format(live=theirs.live, dead=theirs.dead) for word in words]
        result = CliRunner().invoke(app, [*name.split(), *arguments, "--url", url, "--tenant", str(uuid.uuid4())])
        return ended(result), result.output

    for name, (words, expected) in COMMANDS.items():
        code, output = await asyncio.to_thread(run, name, words)
        if code != (expected or 0):
            wrong.append(f"{name}: {code} {output}")
        if expected is None and output.strip():
            wrong.append(f"{name} shows {output}")
    assert not wrong, "\n".join(wrong)
    assert checksum(of_tenant(url, theirs.tenant)) == before
