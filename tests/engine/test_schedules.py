"""Schedules through the faces and the chore of the worker (semantics 52-56). Time is the store's manual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from engine.conftest import Seen, until

import durable
from durable import Registry
from durable._engine.scheduler import Scheduling
from durable.events import ScheduleFired, ScheduleParked, ScheduleUnserved
from durable.instants import instant, moment
from durable.model import ALL, RunQuery, ScheduleSpec
from durable.settings import HOUR, MINUTE, SECOND

declared = Registry("test_schedules")
START = instant(datetime(2030, 1, 1, 0, 30, tzinfo=UTC))


@durable.function(name="hourly_report", registry=declared, retry=durable.Retry(4), keep="2d")
async def report(ctx: durable.Context, who: str = "all") -> str:
    assert ctx.scheduled_for is not None
    return f"{who} {ctx.scheduled_for:%H:%M}"


durable.function(name="hourly_report", retry=durable.Retry(4), keep="2d")(report.fn)
HOURLY = report.using(cron=durable.Cron("0 * * * *"))


class Clock:
    now = START

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def client(clock: Clock) -> AsyncIterator[durable.Client]:
    async with durable.Client("sqlite:///:memory:", clock=clock) as opened:
        yield opened


def scheduling(client: durable.Client) -> Scheduling:
    return Scheduling(
        client.store, scope=ALL, events=client.events, settings=client.settings, codec=client.codec, functions=declared
    )


async def fired(client: durable.Client) -> list[datetime]:
    page = await client.store.find(RunQuery(schedule_id="s", limit=1_000), scope=None)
    return sorted(moment(run.scheduled_for) for run in page.runs if run.scheduled_for is not None)


async def test_a_due_instant_becomes_one_run_with_the_functions_options(client: durable.Client, clock: Clock) -> None:
    await client.schedules.put("s", HOURLY, "x")
    await scheduling(client).fire()
    assert await fired(client) == []
    clock.now += 31 * MINUTE
    for _ in range(3):
        await scheduling(client).fire()
    (run,) = [run async for run in client.runs()]
    assert (run.record.schedule_id, run.record.max_attempts, run.record.keep) == ("s", 4, 48 * HOUR)
    assert await fired(client) == [datetime(2030, 1, 1, 1, tzinfo=UTC)]
    async with durable.Worker(client, functions=declared):
        assert await run.result() == "x 01:00"


@pytest.mark.parametrize(("catch_up", "count"), [("none", 0), ("latest", 1), ("all", 5)])
async def test_missed_instants_are_made_up_for_as_declared(
    client: durable.Client, clock: Clock, catch_up: str, count: int
) -> None:
    cron = durable.Cron("0 * * * *", overlap="allow", catch_up=catch_up)  # type: ignore[arg-type]
    await client.schedules.put("s", report.using(cron=cron))
    clock.now += 5 * HOUR
    await scheduling(client).fire()
    assert len(await fired(client)) == count
    (schedule,) = await client.schedules.all()
    assert schedule.next_fire_at == instant(datetime(2030, 1, 1, 6, tzinfo=UTC))


async def test_skip_fires_nothing_beside_a_live_run(client: durable.Client, clock: Clock) -> None:
    await client.schedules.put("s", HOURLY)
    for _ in range(3):
        clock.now += HOUR
        await scheduling(client).fire()
    assert len(await fired(client)) == 1


async def test_allow_fires_beside_a_live_run_and_queue_keeps_them_in_order(
    client: durable.Client, clock: Clock
) -> None:
    await client.schedules.put("s", report.using(cron=durable.Cron("0 * * * *", overlap="queue")))
    for _ in range(3):
        clock.now += HOUR
        await scheduling(client).fire()
    runs = [run.record async for run in client.runs()]
    assert len(runs) == 3
    assert len({run.sequence_key for run in runs}) == 1
    assert [run.blocked_on for run in runs] == ["sequence", "sequence", None]


async def test_a_row_that_can_not_be_read_is_parked_and_harms_nothing_else(
    client: durable.Client, clock: Clock
) -> None:
    seen = Seen()
    client.events.attach(seen.append)
    await client.schedules.put("s", HOURLY)
    bad = ScheduleSpec(
        schedule_id="bad", name="hourly_report", cron="61 * * * *", tz="UTC", input="[[],{}]", next_fire_at=START + 1
    )
    await client.store.put_schedule(bad, scope=None)
    clock.now += HOUR
    await scheduling(client).fire()
    assert len(await fired(client)) == 1
    assert (await client.schedules.get("bad")).parked_reason is not None
    assert [event.schedule_id for event in seen.of(ScheduleParked)] == ["bad"]


async def test_a_schedule_of_an_unknown_function_is_left_to_others_and_reported_once(
    client: durable.Client, clock: Clock
) -> None:
    seen = Seen()
    client.events.attach(seen.append)
    spec = ScheduleSpec(
        schedule_id="u", name="elsewhere", cron="0 * * * *", tz="UTC", input="[[],{}]", next_fire_at=START + 1
    )
    await client.store.put_schedule(spec, scope=None)
    clock.now += HOUR
    one = scheduling(client)
    await one.fire()
    await one.fire()
    assert [event.name for event in seen.of(ScheduleUnserved)] == ["elsewhere"]
    assert await client.count() == 0


async def test_a_code_schedule_is_registered_by_its_worker_and_parked_when_its_function_is_gone(
    client: durable.Client,
) -> None:
    own = Registry("own")
    durable.function(name="nightly", registry=own, cron="0 3 * * *")(report.fn)
    async with durable.Worker(client, functions=own):
        (schedule,) = await client.schedules.all()
        assert (schedule.schedule_id, schedule.from_code) == ("nightly", True)
    await scheduling(client).look_after()
    (schedule,) = await client.schedules.all()
    assert schedule.parked_reason is not None
    async with durable.Worker(client, functions=own):
        (schedule,) = await client.schedules.all()
        assert schedule.parked_reason is None


async def test_a_code_schedule_whose_function_needs_arguments_is_refused(client: durable.Client) -> None:
    own = Registry("own")

    @durable.function(registry=own, cron="0 3 * * *")
    async def needs(ctx: durable.Context, who: str) -> None: ...

    with pytest.raises(durable.RegistrationError, match="arguments"):
        async with durable.Worker(client, functions=own):
            pass


async def test_pause_resume_next_trigger_and_remove(client: durable.Client, clock: Clock) -> None:
    await client.schedules.put("s", HOURLY)
    assert await client.schedules.pause("s")
    clock.now += 5 * HOUR
    await scheduling(client).fire()
    assert await fired(client) == []
    assert await client.schedules.resume("s")
    await scheduling(client).fire()
    assert await fired(client) == []  # what fell into the pause is not made up for
    assert (await client.schedules.next("s", count=2))[1] == datetime(2030, 1, 1, 7, tzinfo=UTC)
    run = await client.schedules.trigger("s")
    assert run.record.scheduled_for is None
    assert await client.schedules.remove("s")
    assert not await client.schedules.remove("s")
    with pytest.raises(durable.NotFound):
        await client.schedules.get("s")


async def test_backfill_starts_each_instant_once(client: durable.Client, clock: Clock) -> None:
    await client.schedules.put("s", HOURLY)
    since = datetime(2029, 12, 31, 20, tzinfo=UTC)
    assert await client.schedules.backfill("s", since=since, until=since + timedelta(hours=3)) == 3
    assert await client.schedules.backfill("s", since=since, until=since + timedelta(hours=4)) == 1
    await client.schedules.pause("s")
    assert await client.schedules.backfill("s", since=since, until=since + timedelta(hours=5)) == 1


async def test_a_worker_fires_by_itself(tmp_path: object) -> None:
    async with durable.Client("sqlite:///:memory:", settings={"poll": "50ms"}) as client:
        await client.schedules.put("s", report.using(cron=durable.Cron("* * * * * *", overlap="allow")))
        seen = Seen()
        client.events.attach(seen.append)
        async with durable.Worker(client, functions=declared):
            await until(lambda: len(seen.of(ScheduleFired)) >= 2)
        assert await client.count() >= 2


def test_the_jitter_of_a_slot_is_the_same_whoever_fires_it() -> None:
    from durable.submission import _jitter

    class Row:
        tenant, schedule_id, jitter = None, "s", 10 * SECOND

    found = {_jitter(Row(), slot) for slot in range(50)}  # type: ignore[arg-type]
    assert len(found) > 40
    assert all(isinstance(delay, int) and 0 <= delay <= 10 * SECOND for delay in found)
    assert _jitter(Row(), 7) == _jitter(Row(), 7)  # type: ignore[arg-type]
