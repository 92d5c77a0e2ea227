"""What doctor says of the workers beside the runs, on the three stores: by those that are live, and that may take the run (semantics 7)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os

import pytest
from stores.everywhere import STORES, migrated_url

import durable
from durable import Registry
from durable.cli.doctor import examine
from durable.model import WorkerRecord, new_run_id

declared = Registry("test_doctor")


@durable.function(registry=declared)
async def sell(ctx: durable.Context) -> None: ...


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database of its own: workers are everybody's."""
    return migrated_url(request.param, tmp_path_factory.mktemp(request.param))


def record(**changes: object) -> WorkerRecord:
    told = json.dumps({"lease": 1_000_000, "max_reclaims": 5, "mismatch_limit": 1})
    worker = WorkerRecord(
        worker_id=new_run_id(), tenant=None, bound=False, host="here", pid=os.getpid(), queues={"default": 1},
        functions=(("sell", None),), family="cpython-1", settings=told,
    )  # fmt: skip
    return dataclasses.replace(worker, **changes)  # type: ignore[arg-type]


async def told(client: durable.Client) -> dict[str, str]:
    return {check.name: check.text for check in await examine(client)}


async def test_a_function_is_known_by_live_workers_that_may_take_the_run(url: str) -> None:
    async with (
        durable.Client(url, settings={"lease": "1h"}) as client,
        durable.Client(url, settings={"lease": "1s"}) as impatient,
    ):
        await client.start(sell)
        assert "no worker is live" in (await told(client))["workers"]
        bound = record(tenant=durable.tenant_id("other"), bound=True)
        await client.store.register(bound)
        assert "1 pending runs of 'sell'" in (await told(client))["unknown function"]
        await client.store.unregister(bound.worker_id)

        await client.store.register(record())
        found = await told(client)
        assert found["workers"] == "1 live"
        assert "unknown function" not in found
        while "1 live" in (found := await told(impatient))["workers"]:  # it is killed now, and nobody hears of it
            await asyncio.sleep(0.1)
        assert found["workers"].startswith("no worker is live; start one")
        assert "1 more were not seen for a lease" in found["workers"]
        assert "that no live worker takes" in found["unknown function"]


async def test_limits_by_which_workers_judge_each_others_runs_are_compared(url: str) -> None:
    async with durable.Client(url) as client:
        await client.store.register(record())
        other = json.dumps({"lease": 2_000_000, "max_reclaims": 7, "mismatch_limit": 2})
        await client.store.register(record(settings=other))
        found = await told(client)
    assert {"lease", "max_reclaims", "mismatch_limit"} <= found.keys()
