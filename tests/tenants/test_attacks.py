"""Names, keys, ids, filters and cursors are data (rules 27, 34, 57, 59, 71): whatever stands in them is refused with a typed error or
stored literally, on every store, and reaches nothing beside.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tenants.rows import checksum, everything, of_tenant

import durable
from durable.model import ALL, RunQuery

declared = durable.Registry("tenants_attacks")


@durable.function(registry=declared)
async def attacked_job(ctx: durable.Context, text: str) -> str:
    return text


durable.function(name="attacked_job")(attacked_job.fn)  # where schedules look

TEXTS = [
    "' OR 1=1--",
    '"; DROP TABLE durable_run;--',
    "%",
    "_",
    "\\",
    "$$",
    "$1",
    ":p",
    "?",
    "{}",
    "{0}",
    "%s",
    "%(a)s",
    "${jndi:ldap://x}",
    '{"$gt":""}',
    '{"$where":"1"}',
    '["$ne"]',
    "$set",
    "a.b",
    "__proto__",
    "line\nbreak",
    "\x1b[2J",
    "\u202eevil",
    "e\u0301",
    "\u00e9",
    "CASE",
    "case",
    "trailing ",
    "../../etc/passwd",
    "file:///etc/passwd",
    "durable_run",
    "~engine",
    "a:b",
    "a/b",
    "a#2",
    "a@1",
    "*",
    "*:queue:default",
    "x" * 200,
]
REFUSED = ["", " ", "\0", "a\0b", "\ud800", "x" * 10_000]
NOT_TEXT: list[Any] = [None, 0, 1.5, True, b"bytes", {"$gt": ""}, ["a"], {"$where": "1"}, uuid.UUID(int=0), object]
TYPED = (durable.DurableError, TypeError, ValueError)
WORD = durable.Signal("word", str)


async def outcome(attempt: Awaitable[Any]) -> Any:
    """A value, or the error if it is a typed one of ours; what a driver or the engine's inside raised passes through and fails."""
    try:
        return await attempt
    except TYPED as error:
        return error


async def victim(client: durable.Client) -> uuid.UUID:
    """A tenant with a run, a key, a signal, a schedule."""
    tenant = uuid.uuid4()
    other = client.using(tenant=tenant)
    run = await other.start(attacked_job.using(idempotency_key="k", sequence_key="s", tags={"a": "b"}), "x")
    await other.signal(run.id, WORD, "kept")
    await other.schedules.put("nightly", attacked_job.using(cron="0 0 1 1 *"), "x")
    return tenant


@pytest.mark.timeout(300)
async def test_keys_tags_and_values_are_stored_literally_or_refused(client: durable.Client, url: str) -> None:
    theirs = await victim(client)
    before = checksum(of_tenant(url, theirs))
    wrong: list[str] = []
    stored = 0
    for text in [*TEXTS, *REFUSED]:
        mine = client.using(tenant=uuid.uuid4())
        doors: dict[str, Callable[[], Awaitable[Any]]] = {
            "idempotency_key": lambda: mine.start(attacked_job.using(idempotency_key=text), "x"),  # noqa: B023
            "coalesce_key": lambda: mine.start(attacked_job.using(coalesce_key=text), "x"),  # noqa: B023
            "sequence_key": lambda: mine.start(attacked_job.using(sequence_key=text), "x"),  # noqa: B023
            "concurrency_key": lambda: mine.start(attacked_job.using(concurrency_key=text), "x"),  # noqa: B023
            "tag": lambda: mine.start(attacked_job.using(tags={text: text}), "x"),  # noqa: B023
            "value": lambda: mine.start(attacked_job, text),  # noqa: B023
            "queue": lambda: mine.start(attacked_job.using(queue=text), "x"),  # noqa: B023
        }
        for door, attempt in doors.items():
            try:
                run = await attempt()
            except TYPED as error:
                if text in TEXTS and door in ("value", "tag"):
                    wrong.append(f"{door} {text!r}: {error!r}")
                continue
            stored += 1
            (back,) = await client.store.get([run.id], scope=mine.scope)
            given = {
                "tag": back and back.tags.get(text),
                "value": back and json.loads(back.input)[0] if back and back.input.startswith("[") else None,
            }.get(door, getattr(back, door, None))
            if door != "value" and given != text:
                wrong.append(f"{door} {text!r} came back as {given!r}")
            if door == "value" and text not in _texts(back):
                wrong.append(f"value {text!r} came back as {back and back.input!r}")
    assert not wrong, "\n".join(wrong)
    assert stored > 100, "something was stored"
    assert checksum(of_tenant(url, theirs)) == before
    assert await client.count() == 0, "nothing has slipped to the untagged"


def _texts(record: Any) -> list[str]:
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(one)

    walk(json.loads(record.input))
    return found


@pytest.mark.timeout(300)
async def test_equal_keys_of_tenants_whose_ids_and_keys_run_together_are_different_keys(client: durable.Client) -> None:
    """A key that looks like another tenant's stored key, with the real separator, is only a key."""
    one, two = uuid.uuid4(), uuid.uuid4()
    keys = ["k", f"{one}:k", f":{one}:k", f"{two}:k", ":k", f"{one}/k", "*:k"]
    ids: set[str] = set()
    for view in (client, client.using(tenant=one), client.using(tenant=two)):
        for key in keys:
            run = await view.start(attacked_job.using(idempotency_key=key, coalesce_key=key, sequence_key=key), "x")
            assert (run.disposition, run.idempotency_key, run.coalesce_key) == ("created", key, key)
            ids.add(run.id)
        for run in [run async for run in view.runs(limit=None)]:
            assert run.record.sequence_key in keys
    assert len(ids) == 3 * len(keys)
    for run in [run async for run in client.runs(limit=None)]:
        await run.cancel()
        await run.refresh()
    await client.purge(older_than=0)


@pytest.mark.timeout(300)
async def test_ids_and_filters_of_any_text_or_type_find_nothing_and_break_nothing(
    client: durable.Client, url: str
) -> None:
    await victim(client)
    mine = client.using(tenant=uuid.uuid4())
    before = checksum(everything(url))
    wrong: list[str] = []
    for thing in [*TEXTS, *REFUSED, *NOT_TEXT]:
        for view in (mine, client.all_tenants()):
            attempts: dict[str, Callable[[], Awaitable[Any]]] = {
                "get": lambda: view.get(thing),  # noqa: B023
                "journal": lambda: view.journal(thing),  # noqa: B023
                "explain": lambda: view.explain(thing),  # noqa: B023
                "cancel": lambda: view.cancel(thing, reason="x"),  # noqa: B023
                "retry": lambda: view.retry(thing),  # noqa: B023
                "fork": lambda: view.fork(thing, from_step=0),  # noqa: B023
                "signal": lambda: view.signal(thing, WORD, "x"),  # noqa: B023
                "approve": lambda: view.approve(thing, "x", True),  # noqa: B023
                "runs by function": lambda: _all(view.runs(function=thing) if thing is not None else _none()),  # noqa: B023
                "runs by queue": lambda: _all(view.runs(queue=thing) if thing is not None else _none()),  # noqa: B023
                "runs by schedule": lambda: _all(view.runs(schedule=thing) if thing is not None else _none()),  # noqa: B023
                "runs by a tag": lambda: _all(view.runs(tags={"a": thing})),  # noqa: B023
                "runs by a tag's name": lambda: _all(view.runs(tags={thing: "b"}) if _hashable(thing) else _none()),  # noqa: B023
                "count": lambda: view.count(function=thing) if thing is not None else _zero(),  # noqa: B023
                "schedules.get": lambda: view.schedules.get(thing),  # noqa: B023
                "schedules.pause": lambda: view.schedules.pause(thing),  # noqa: B023
                "schedules.resume": lambda: view.schedules.resume(thing),  # noqa: B023
                "schedules.remove": lambda: view.schedules.remove(thing),  # noqa: B023
                "schedules.next": lambda: view.schedules.next(thing),  # noqa: B023
                "schedules.trigger": lambda: view.schedules.trigger(thing),  # noqa: B023
            }
            for name, attempt in attempts.items():
                try:
                    answer = await outcome(attempt())
                except Exception as error:
                    answer = f"untyped: {error!r}"
                if name == "runs by queue" and view is not mine and isinstance(answer, list):
                    # what other tests have put into a queue of just this name
                    answer = [run for run in answer if run.queue != thing]
                if answer not in ([], 0, False) and not isinstance(answer, TYPED):
                    wrong.append(f"{name}({thing!r}): {answer!r}")
    assert not wrong, "\n".join(wrong)
    assert checksum(everything(url)) == before


async def _all(runs: Any) -> list[Any]:
    return [run async for run in runs]


async def _none() -> Any:
    for nothing in ():
        yield nothing


async def _zero() -> int:
    return 0


def _hashable(thing: object) -> bool:
    with contextlib.suppress(TypeError):
        return hash(thing) is not None
    return False


NO_UUID = [thing for thing in (*REFUSED, *TEXTS, *NOT_TEXT) if not isinstance(thing, uuid.UUID)]


@pytest.mark.parametrize("thing", NO_UUID, ids=lambda thing: ascii(thing)[:30])
def test_a_tenant_that_is_no_uuid_is_refused_everywhere(thing: Any) -> None:
    client = durable.Client("sqlite://")
    with pytest.raises(durable.ConfigurationError):
        client.using(tenant=thing)
    for verb in ("get", "pause", "resume", "erase"):
        with pytest.raises(durable.ConfigurationError):
            getattr(client.all_tenants().tenants, verb)(thing).send(None)


async def test_a_cursor_of_another_tenants_listing_shows_ones_own_rows_and_an_altered_one_is_refused(
    client: durable.Client,
) -> None:
    one, two = client.using(tenant=uuid.uuid4()), client.using(tenant=uuid.uuid4())
    for view in (one, two):
        await view.start_many(attacked_job, ["a", "b", "c", "d"])
    page = await client.store.find(RunQuery(limit=2), scope=two.scope)
    assert page.cursor is not None
    shown = await client.store.find(RunQuery(cursor=page.cursor), scope=one.scope)
    assert [run.tenant for run in shown.runs] == [one.scope] * 4, "all of its own are older than that page"
    for altered in (*TEXTS[:20], "", "e30", page.cursor[:-3], page.cursor + "AAAA", page.cursor.swapcase()):
        for scope in (one.scope, ALL):
            try:
                found = await client.store.find(RunQuery(cursor=altered), scope=scope)
            except durable.Conflict:
                continue
            assert {run.tenant for run in found.runs} <= {one.scope} or scope is ALL, altered


@pytest.mark.timeout(300)
async def test_schedules_and_flow_control_take_only_names_and_leave_others_alone(
    client: durable.Client, url: str
) -> None:
    theirs = await victim(client)
    before = checksum(of_tenant(url, theirs))
    mine = client.using(tenant=uuid.uuid4())
    wrong: list[str] = []
    for thing in [*TEXTS, *REFUSED, *NOT_TEXT]:
        yearly = attacked_job.using(cron="0 0 1 1 *")
        attempts: dict[str, Callable[[], Awaitable[Any]]] = {
            "schedules.put": lambda: mine.schedules.put(thing, yearly, "x"),  # noqa: B023
            "queues.pause": lambda: mine.queues.pause(thing),  # noqa: B023
            "queues.limit": lambda: mine.queues.limit(thing, max_concurrency=1),  # noqa: B023
            "queues.resume": lambda: mine.queues.resume(thing),  # noqa: B023
            "queues.fair": lambda: client.all_tenants().queues.fair(thing, False),  # noqa: B023
            "rate": lambda: mine.queues.limit("q", rate=thing) if thing is not None else _zero(),  # noqa: B023
            "wake": lambda: mine.wake(thing),  # noqa: B023
            "signal id": lambda: mine.signal(str(uuid.uuid4()), WORD, "x", id=thing),  # noqa: B023
            "reason": lambda: mine.cancel(str(uuid.uuid4()), reason=thing),  # noqa: B023
        }
        for name, attempt in attempts.items():
            try:
                answer = await outcome(attempt())
            except Exception as error:
                wrong.append(f"{name}({thing!r}): {error!r}")
                continue
            if name == "schedules.put" and not isinstance(answer, TYPED):
                (row,) = [one for one in await mine.schedules.all() if one.schedule_id == thing]
                assert row.tenant == mine.scope
                assert await mine.schedules.remove(thing)
            named = name in ("schedules.put", "queues.pause", "queues.limit", "queues.resume", "wake")
            if named and not isinstance(thing, str) and not isinstance(answer, TYPED):
                wrong.append(f"{name}({thing!r}) was accepted")
    assert not wrong, "\n".join(wrong)
    assert checksum(of_tenant(url, theirs)) == before
    await client.tenants.all()


@pytest.mark.parametrize(
    "text", [*TEXTS, *REFUSED, "* " * 10_000, "0 " * 5, "R R R R R"], ids=lambda text: ascii(text)[:30]
)
def test_the_text_of_a_schedule_is_an_expression_or_refused(text: str) -> None:
    with pytest.raises(durable.RegistrationError):
        durable.Cron(text)
    with pytest.raises(durable.DurableError):
        durable.Cron("0 0 * * *", tz=text or "/")


@pytest.mark.parametrize("text", [*TEXTS, *REFUSED], ids=lambda text: ascii(text)[:30])
def test_names_that_are_parts_of_ids_are_refused_when_declared(text: str) -> None:
    """Names hold no separators and nothing that can not be printed; what they may hold is data."""
    bad = any(letter in "/#:@" or not letter.isprintable() for letter in text) or not text.strip() or len(text) > 255
    for declare in (
        lambda: durable.function(name=text, registry=durable.Registry("names"))(attacked_job.fn),
        lambda: durable.Signal(text, str),
        lambda: attacked_job.using(queue=text),
    ):
        if bad:
            with pytest.raises(durable.DurableError):
                declare()
        else:
            declare()


async def test_a_payload_of_five_megabytes_is_refused_before_it_is_sent(client: durable.Client) -> None:
    mine = client.using(tenant=uuid.uuid4())
    with pytest.raises(durable.PayloadTooLarge):
        await mine.start(attacked_job, "x" * 5_000_000)
    assert await mine.count() == 0
