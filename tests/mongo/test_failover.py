"""Fail-overs (rules 3, 42, 65): step-downs and kills of the primary while runs are submitted and worked on; nothing acknowledged is lost.

Three mongods on one machine. `DURABLE_MONGO_FAULTS` (3; the nox session asks for 25: every fifth is a kill -9) says how many faults.
Runs are submitted until the last fault is over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator

import pytest
from mongo.conftest import until
from servers.mongo import Server, start_set

import durable
from durable.errors import DurableError
from durable.model import ALL, RunQuery

FAULTS = int(os.environ.get("DURABLE_MONGO_FAULTS", "3"))
PACE = 0.02
"""Seconds between two submits: fifty a second."""
TOGETHER = 100
PATIENCE = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]

LIVE = [durable.Status.PENDING, durable.Status.RUNNING, durable.Status.SUSPENDED]
declared = durable.Registry("test_failover")


async def count(number: int) -> int:
    return number + 1


@durable.function(registry=declared)
async def three_steps(ctx: durable.Context, key: str) -> int:
    number = 0
    for _ in range(3):
        number = await ctx.step(count, number)
    return number


@pytest.fixture(scope="module")
def members() -> Iterator[Server]:
    made = start_set(3)
    yield made
    assert made.members is not None
    made.members.remove()


def kind_of(fault: int) -> str:
    return "kill" if fault % 5 == 2 else "step down"


async def break_it(server: Server, fault: int) -> None:
    """One fault, and the set whole again."""
    members = server.members
    assert members is not None
    if kind_of(fault) == "kill":
        dead = await asyncio.to_thread(members.kill_primary)
        await asyncio.sleep(1)
        await asyncio.to_thread(dead.start)
    else:
        await asyncio.to_thread(members.step_down)
    await asyncio.sleep(1)


async def test_no_acknowledged_submit_or_record_is_lost_none_counts_twice_and_workers_survive(members: Server) -> None:
    url = members.url.replace("/?", "/failover?")
    settings = {"lease": "10s", "poll": "200ms", "poll_idle": "500ms"}
    acknowledged: list[str] = []
    refused = 0
    over = asyncio.Event()

    async def submit(client: durable.Client, run_key: str) -> None:
        nonlocal refused
        try:
            run = await client.start(three_steps.using(idempotency_key=run_key), run_key)
        except DurableError:
            refused += 1  # not acknowledged: whether it is there or not, it may be submitted again
        else:
            acknowledged.append(run.id)

    async def submit_steadily(client: durable.Client) -> None:
        """At the pace, however long an answer takes."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count(1):
                if over.is_set():
                    return
                group.create_task(submit(client, f"run-{number}"))
                await asyncio.sleep(began + number * PACE - time.monotonic())

    async with (
        durable.Client(url, settings=settings, auto_migrate=True) as client,
        durable.Client(url, settings=settings) as second,
        durable.Worker(client, functions=[three_steps]) as one,
        durable.Worker(second, functions=[three_steps]) as other,
    ):
        began = time.monotonic()
        submitting = asyncio.create_task(submit_steadily(client))
        await until(lambda: len(acknowledged) > 20, "the first submits")
        for fault in range(FAULTS):
            before = len(acknowledged)
            await break_it(members, fault)
            await until(lambda before=before: len(acknowledged) > before + 10, f"submits after fault {fault}")
        over.set()
        await submitting
        took = time.monotonic() - began
        assert len(set(acknowledged)) == len(acknowledged)
        async with asyncio.timeout(PATIENCE):
            while await client.store.count(RunQuery(statuses=LIVE), scope=ALL):
                await asyncio.sleep(0.2)
        for start in range(0, len(acknowledged), TOGETHER):
            part = acknowledged[start : start + TOGETHER]
            for run in await client.store.get(part, scope=ALL):
                assert run is not None
                assert (run.status, run.output) == ("completed", "3"), run
            journals = await asyncio.gather(*(client.store.history(run_id, scope=ALL) for run_id in part))
            for run_id, records in zip(part, journals, strict=True):
                assert [record.position for record in records] == [0, 1, 2], run_id
        assert list(await client.store.audit(scope=ALL)) == []
        assert one.healthy
        assert other.healthy
        assert [check.level for check in await client.store.check() if check.name == "deployment"] == ["ok"]
    print(
        f"{FAULTS} faults in {took:.0f} s, {len(acknowledged)} submits acknowledged ({len(acknowledged) / took:.0f}/s),"
        f" {refused} without an answer"
    )
