"""Schedules, keys and retention as users see them, on the three stores (semantics 35 to 39, 52 to 56, 60)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from engine.conftest import until

import durable
from durable.settings import DAY, HOUR, SECOND

YEARLY = "0 0 1 1 *"
SINCE = datetime(2026, 3, 1, 20, 30, tzinfo=UTC)
declared = durable.Registry("flow_faces")


@durable.function(name="flow_face", registry=declared)
async def face(ctx: durable.Context, who: str = "all") -> str:
    return f"{who} {ctx.scheduled_for:%H:%M}" if ctx.scheduled_for else who


@durable.function(name="flow_gone", registry=declared, keep=0)
async def gone(ctx: durable.Context) -> None: ...


durable.function(name="flow_face")(
    face.fn
)  # `trigger` and `backfill` look a schedule's function up among all that are declared


@pytest.fixture
async def client(url: str) -> AsyncIterator[durable.Client]:
    settings = {"poll": "50ms", "poll_idle": "100ms", "purge_every": "200ms"}
    async with durable.Client(url, settings=settings) as opened:
        yield opened


def worker(client: durable.Client) -> durable.Worker:
    return durable.Worker(client, functions=declared, lease="5s")


async def test_the_whole_life_of_a_schedule(client: durable.Client) -> None:
    await client.schedules.put("s", face.using(cron=durable.Cron("0 * * * *", tz="Europe/Berlin")), "ann")
    assert [schedule.schedule_id for schedule in await client.schedules.all()] == ["s"]
    first, second = await client.schedules.next("s", count=2)
    assert (first.minute, second - first) == (0, timedelta(hours=1))
    by_hand = await client.schedules.trigger("s")
    assert by_hand.disposition == "created"
    assert await client.schedules.backfill("s", since=SINCE, until=SINCE + timedelta(hours=3)) == 3
    assert await client.schedules.backfill("s", since=SINCE, until=SINCE + timedelta(hours=4)) == 1
    assert await client.schedules.pause("s")
    assert not (await client.schedules.get("s")).enabled
    assert await client.schedules.backfill("s", since=SINCE, until=SINCE + timedelta(hours=4)) == 0
    assert await client.schedules.resume("s")
    assert (await client.schedules.get("s")).enabled
    async with worker(client):
        assert await by_hand.result(timeout="60s") == "ann"
        made = [run async for run in client.runs(function=face.name) if run.id != by_hand.id]
        made_up = {await run.result(timeout="60s") for run in made}
    assert made_up == {f"ann {hour}:00" for hour in ("21", "22", "23", "00")}
    assert await client.schedules.remove("s")
    assert not await client.schedules.remove("s")
    with pytest.raises(durable.NotFound):
        await client.schedules.trigger("s")


async def test_runs_of_a_schedule_that_queues_go_one_after_the_other_when_they_are_made_up_for_too(
    client: durable.Client,
) -> None:
    await client.schedules.put("s", face.using(cron=durable.Cron("0 * * * *", overlap="queue")))
    assert await client.schedules.backfill("s", since=SINCE, until=SINCE + timedelta(hours=3)) == 3
    runs = sorted([run.record async for run in client.runs()], key=lambda run: run.scheduled_for or 0)
    assert [run.blocked_on for run in runs] == [None, "sequence", "sequence"]


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "2d"},
        {"priority": 3},
        {"retry": durable.Retry(2)},
        {"timeout": None},
        {"delay": "1m"},
        {"tags": {"a": "b"}},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_an_option_that_a_schedule_can_not_keep_is_refused_and_nothing_is_written(
    client: durable.Client, options: dict[str, object]
) -> None:
    with pytest.raises(durable.RegistrationError, match=next(iter(options))):
        await client.schedules.put("s", face.using(cron=YEARLY, **options))  # type: ignore[arg-type]
    assert list(await client.schedules.all()) == []


async def test_each_submit_is_told_what_became_of_it_and_a_join_is_remembered(client: durable.Client) -> None:
    first = await client.start(face.using(coalesce_key="c"))
    joined = await client.start(face.using(coalesce_key="c", idempotency_key="k"))
    again = await client.start(face.using(idempotency_key="k"))
    other = await client.start(face.using(coalesce_key="d", idempotency_key="k"))
    assert [run.disposition for run in (first, joined, again, other)] == [
        "created",
        "coalesced",
        "existing",
        "existing",
    ]
    assert {run.id for run in (first, joined, again, other)} == {first.id}
    async with worker(client):
        await first.result(timeout="60s")
    late = await client.start(face.using(coalesce_key="c"))
    assert (late.disposition, late.id != first.id) == ("created", True)
    assert (await client.start(face.using(idempotency_key="k"))).id == first.id


async def test_replace_takes_the_newest_input_and_postpones_up_to_the_largest_delay(client: durable.Client) -> None:
    debounced = face.using(coalesce_key="c", on_coalesce="replace", max_delay="2h")
    first = await client.start(debounced.using(delay="1h"), "one")
    second = await client.start(debounced.using(delay="90m"), "two")
    third = await client.start(debounced.using(delay="5h"), "three")
    created = first.record.created_at
    waits = [run.record.available_at - created for run in (first, second, third) if run.record.available_at is not None]
    assert [round(wait / HOUR, 1) for wait in waits] == [1.0, 1.5, 2.0]
    assert waits[2] == 2 * HOUR
    last = await client.start(face.using(coalesce_key="c", on_coalesce="replace"), "now")
    assert (last.id, last.record.available_at) == (first.id, None)
    async with worker(client):
        assert await first.result(timeout="60s") == "now"


async def test_a_worker_deletes_by_itself_what_its_function_keeps_no_longer_and_nothing_else(
    client: durable.Client,
) -> None:
    kept, purged = await client.start(face), await client.start(gone)
    async with worker(client):
        await kept.result(timeout="60s")
        await until(lambda: _is_gone(client, purged.id), "the purge")
    run = (await client.get(kept.id)).record
    assert run.finished_at is not None
    assert run.purge_at is not None
    assert abs(run.purge_at - run.finished_at - 30 * DAY) < SECOND


async def _is_gone(client: durable.Client, run_id: str) -> bool:
    try:
        await client.get(run_id)
    except durable.NotFound:
        return True
    return False
