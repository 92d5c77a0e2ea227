"""The scheduler on a clock of its own, against the slow reading of rule 54 (semantics 52 to 54).

A schedule of a random expression, zone, catch-up and overlap lives through some days around a change of its zone's clock. The clock
goes on in leaps: mostly shorter than a minute, as a worker polls; now and then of hours, as if every worker had been away. At each
stop the scheduler fires, and what has become a run is exactly what the reference says. `DURABLE_CRON_LIVES` (60; a nox session
takes 3,000) says how many.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from floors.cron_reference import Reference, transitions
from floors.test_cron import ZONES

import durable
from durable._engine.scheduler import Scheduling
from durable.events import Events
from durable.instants import instant, moment
from durable.model import ALL, TERMINAL, ClaimRequest, Completed, RunQuery, RunRecord, new_run_id
from durable.settings import MINUTE, Settings

LIVES = int(os.environ.get("DURABLE_CRON_LIVES", "60"))
ON_TIME = timedelta(seconds=60)
declared = durable.Registry("flow_lives")


@durable.function(name="life", registry=declared)
async def life(ctx: durable.Context) -> None: ...


class Clock:
    """What time it is, in microseconds."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def __call__(self) -> int:
        return instant(self.at)


@dataclasses.dataclass
class Oracle:
    """Which slots a schedule fires, by the words of rule 52 and the reference of rule 54."""

    slots: list[datetime]
    """All that are still to come, the next one first."""
    catch_up: str
    overlap: str
    passed: int = 0

    def fire(self, now: datetime, *, live: bool) -> list[datetime]:
        """What becomes runs at `now`."""
        passed = [slot for slot in self.slots if slot <= now]
        self.slots = self.slots[len(passed) :]
        self.passed += len(passed)
        late = [slot for slot in passed if now.replace(microsecond=0) - slot > ON_TIME]
        made_up = {"none": 0, "latest": 1, "all": Settings().catch_up_limit}[self.catch_up]
        wanted = (late[-made_up:] if made_up else []) + passed[len(late) :]
        if self.overlap != "skip":
            return wanted
        return [] if live else wanted[-1:]


def slots_between(reference: Reference, start: datetime, end: datetime) -> list[datetime]:
    """All slots later than `start`, up to the first one later than `end`."""
    found: list[datetime] = []
    while not found or found[-1] <= end:
        found += reference.first(found[-1] if found else start, 500)
    return [slot for slot in found if slot <= end] + [next(slot for slot in found if slot > end)]


def random_expression(dice: random.Random, local: datetime) -> str:
    """One that has something to do in the hours around a change."""
    minute = dice.choice((0, 15, 30, 45, dice.randint(0, 59)))
    hour = (local.hour + dice.randint(-2, 1)) % 24
    return dice.choice(
        (
            f"{minute} {hour} * * *",
            f"0,30 {','.join(str((hour + shift) % 24) for shift in range(3))} * * *",
            f"{minute} * * * *",
            f"*/20 */{dice.randint(1, 5)} * * *",
            f"{minute} {hour} * * {local.isoweekday()}",
            f"{minute} {hour} {local.day} * *",
            f"*/{dice.randint(7, 40)} {hour} * * *",
            f"{minute} {hour} * * * {dice.choice(('0', '*/30', '5,59'))}",
        )
    )


def leap(dice: random.Random) -> timedelta:
    """Mostly a poll, sometimes an outage."""
    if dice.random() < 0.75:
        return timedelta(seconds=dice.randint(1, 59), microseconds=dice.randint(0, 999_999))
    return timedelta(minutes=dice.choice((1, 2, 10, 45, 90, 300, 1_500)), seconds=dice.randint(0, 59))


@pytest.mark.timeout(60 + LIVES)
async def test_the_scheduler_fires_exactly_what_the_reference_says_over_a_change_of_the_clock() -> None:
    dice = random.Random(5254)
    passed = fired = zones = 0
    for _ in range(LIVES):
        tz, year = dice.choice([zone for zone in ZONES if zone != "UTC"]), dice.randint(1990, 2030)
        for change in transitions(tz, year, year)[:1]:
            told = await _live(dice, tz, change)
            passed, fired, zones = passed + told[0], fired + told[1], zones + 1
    print(f"\n{zones} lives over a change of the clock: {passed} slots, {fired} of them became runs")
    assert zones > LIVES // 4
    assert fired > zones
    assert passed - fired > zones, "void: catch-up and overlap had nothing to decide"


async def _live(dice: random.Random, tz: str, change: datetime) -> tuple[int, int]:
    """One schedule from some hours before the change to some after; how many slots there were, and how many became runs."""
    start, end = change - timedelta(minutes=dice.randint(1, 36 * 60)), change + timedelta(hours=30)
    clock = Clock(start)
    async with durable.Client("sqlite:///:memory:", clock=clock) as client:
        reference = Reference(random_expression(dice, change.astimezone(ZoneInfo(tz))), tz)
        catch_up, overlap = dice.choice(("none", "latest", "all")), dice.choice(("skip", "allow", "queue"))
        oracle = Oracle(slots_between(reference, start, end + timedelta(days=2)), catch_up, overlap)
        cron = durable.Cron(reference.expression, tz=tz, catch_up=catch_up, overlap=overlap)  # type: ignore[arg-type]
        await client.schedules.put("s", life.using(cron=cron))
        expected: list[datetime] = []
        stops: list[datetime] = []
        live = False
        while clock.at < end:
            clock.at += leap(dice)
            stops.append(clock.at)
            expected += oracle.fire(clock.at, live=live)
            await scheduling(client).fire()
            (schedule,) = await client.schedules.all()
            what = f"{reference.expression!r} in {tz}, {catch_up}, {overlap}, from {start} over {stops}"
            assert schedule.next_fire_at == instant(oracle.slots[0]), what
            runs = await _runs(client)
            assert [moment(run.scheduled_for or 0) for run in runs] == expected, what
            assert {run.sequence_key for run in runs} <= {"~schedule:s" if overlap == "queue" else None}, what
            if dice.random() < 0.5:
                await _all_run(client)
                live = False
            else:
                live = bool(runs) and runs[-1].status not in TERMINAL
        return oracle.passed, len(expected)


def scheduling(client: durable.Client) -> Scheduling:
    """A new one each time, as another process would have it."""
    return Scheduling(
        client.store, scope=ALL, events=Events(), settings=client.settings, codec=client.codec, functions=declared
    )


async def _runs(client: durable.Client) -> Sequence[RunRecord]:
    page = await client.store.find(RunQuery(schedule_id="s", limit=1_000), scope=ALL)
    return sorted(page.runs, key=lambda run: run.scheduled_for or 0)


async def _all_run(client: durable.Client) -> None:
    """Everything that can run runs, one after the other where it must."""
    request = ClaimRequest(
        mark="",
        queues={"default": 1_000},
        functions=[(life.name, None)],
        limit=1_000,
        lease=MINUTE,
        family="3.12",
        scope=ALL,
    )
    while claimed := await client.store.claim(dataclasses.replace(request, mark=new_run_id())):
        await client.store.settle([(one.lease, Completed(output="null")) for one in claimed])
