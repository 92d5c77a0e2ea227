"""Many schedulers and one schedule (semantics 52, 53): every slot becomes one run, whoever is killed.

Processes of workers with nothing but an every-second schedule to do, killed now and then. `DURABLE_FLOW_SLOTS` (4; a nox session
takes 120) and `DURABLE_FLOW_SCHEDULERS` (2; 6) make it longer. The other test kills one scheduler at every single write of a firing.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from flow.dying import fire_and_die, scheduling, tenant_of
from flow.fleet import Fleet
from flow.population import LEASE, QUICK, tick, work

import durable
from durable.instants import moment
from durable.model import ALL, RunQuery, RunRecord, Status
from durable.settings import DAY, SECOND

SLOTS = int(os.environ.get("DURABLE_FLOW_SLOTS", "4"))
SCHEDULERS = int(os.environ.get("DURABLE_FLOW_SCHEDULERS", "2"))
KILL_EVERY = 3  # slots
EVERY_SECOND = tick.using(cron=durable.Cron("* * * * * *", catch_up="all", overlap="allow"))


@pytest.mark.timeout(300 + 4 * SLOTS)
def test_every_slot_of_an_every_second_schedule_becomes_one_run_over_many_schedulers_that_are_killed(
    url: str, tmp_path: Path
) -> None:
    with Fleet(tmp_path, SCHEDULERS, work, url, 10) as fleet:
        first, runs = asyncio.run(_campaign(url, fleet))
        fleet.stop()
        bodies = Counter(int(line.words[1]) for line in fleet.lines("tick"))
    slots = [run.scheduled_for for run in runs]
    assert len(slots) >= SLOTS
    assert slots == [first + number * SECOND for number in range(len(slots))], "a slot is missing, or there twice"
    assert {run.status for run in runs} == {Status.COMPLETED}
    assert set(bodies) == {slot // SECOND for slot in slots if slot is not None}
    assert sum(bodies.values()) - len(slots) <= len(fleet.killed) * 10, "more bodies were begun anew than kills explain"
    print(f"\n{len(slots)} slots, {len(runs)} runs, {SCHEDULERS} schedulers, {len(fleet.killed)} kills")


async def _campaign(url: str, fleet: Fleet) -> tuple[int, list[RunRecord]]:
    """Let the schedule fire until there are enough slots, killing meanwhile; the first slot, and all runs by their slots."""
    async with durable.Client(url) as client:
        schedule = await client.schedules.put("s", EVERY_SECOND)
        assert schedule.next_fire_at is not None
        dice = random.Random(53)
        deadline = time.monotonic() + 120 + 3 * SLOTS
        while (count := len(await _runs(client))) < SLOTS or len(fleet.killed) < SLOTS // KILL_EVERY:
            assert time.monotonic() < deadline, f"{count} of {SLOTS} slots"
            if count // KILL_EVERY > len(fleet.killed):
                await asyncio.to_thread(fleet.kill, dice.randrange(SCHEDULERS))
            await asyncio.sleep(0.1)
        await client.schedules.pause("s")
        while not all(run.status == Status.COMPLETED for run in await _runs(client)):
            assert time.monotonic() < deadline + 10 * LEASE, "the runs do not end"
            await asyncio.sleep(0.1)
        runs = await _runs(client)
        # Each slot has its row, too: to make up for them starts nothing.
        first, last = schedule.next_fire_at, runs[-1].scheduled_for
        assert last is not None
        since = moment(first) - timedelta(seconds=1)
        assert await client.schedules.backfill("s", since=since, until=moment(last)) == 0
        assert list(await client.audit()) == []
        return first, runs


async def _runs(client: durable.Client) -> list[RunRecord]:
    page = await client.store.find(RunQuery(schedule_id="s", limit=1_000), scope=ALL)
    return sorted(page.runs, key=lambda run: run.scheduled_for or 0)


def test_a_scheduler_killed_between_any_two_writes_loses_no_slot_and_fires_none_twice(url: str, tmp_path: Path) -> None:
    """Three slots are due. Who fires them dies in front of the first write, of the second, …, of the commit; then another one fires.
    Each of them has a tenant of its own, so that one needs not wait for what another has left open on the server."""
    died, survived = 0, False
    while not survived:
        with Fleet(tmp_path, 1, fire_and_die, url, died) as fleet:
            (process,) = fleet.processes
            process.join(60)
            assert process.exitcode in (0, -9), f"the scheduler ended with {process.exitcode}"
        survived = process.exitcode == 0
        died += not survived
    assert died >= 4, "a firing has at least the advance, the slots, the runs and a commit to die at"
    asyncio.run(_fired_by_another(url, died))
    print(f"\nkilled in front of each of {died} writes")


async def _fired_by_another(url: str, died: int) -> None:
    async with durable.Client(url, settings=QUICK) as client:
        assert len(await _slots(client, tenant_of(died))) == 3, "nobody killed the last one"
        for place in range(died):
            tenant = tenant_of(place)
            assert len(await _slots(client, tenant)) in (0, 3), f"killed in front of write {place}: not all or none"
            await scheduling(client, tenant).fire()
            slots = await _slots(client, tenant)
            assert [slot - slots[0] for slot in slots] == [0, DAY, 2 * DAY]
            (schedule,) = await client.store.schedules(scope=tenant)
            assert schedule.next_fire_at == slots[-1] + DAY
            (last,) = await client.store.get([schedule.last_run_id or ""], scope=tenant)
            assert last is not None
            assert last.scheduled_for == slots[-1]
        assert list(await client.all_tenants().audit()) == []


async def _slots(client: durable.Client, tenant: UUID) -> list[int]:
    page = await client.store.find(RunQuery(limit=10), scope=tenant)
    return sorted(run.scheduled_for or 0 for run in page.runs)
