"""Tenants (semantics 57-59) through the client and its workers. Every public method is tried across two tenants in tests/tenants."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from engine.conftest import until

import durable
from durable import Registry
from durable.model import ALL

declared = Registry("test_tenants")
ACME, OTHER = durable.tenant_id("acme"), durable.tenant_id("other")


@durable.function(registry=declared)
async def tenant_job(ctx: durable.Context, n: int) -> str:
    if n < 0:
        raise ValueError("negative")
    return f"{ctx.tenant} {n}"


durable.function(name="tenant_job")(tenant_job.fn)  # the default registry: handles and schedules look there


async def test_waiting_for_another_tenants_run_is_not_found(client: durable.Client) -> None:
    other = await client.using(tenant=OTHER).start(tenant_job, 1)
    with pytest.raises(durable.NotFound):
        await client.using(tenant=ACME)._landed(other.id)


@pytest.mark.parametrize("missing", [None, "", "acme", 7, uuid.UUID])
async def test_a_missing_tenant_never_widens_a_filter(client: durable.Client, missing: Any) -> None:
    with pytest.raises(durable.ConfigurationError):
        client.using(tenant=missing)


async def test_all_tenants_sees_everybody_and_starts_nothing(client: durable.Client) -> None:
    for tenant in (ACME, OTHER):
        await client.using(tenant=str(tenant)).start(tenant_job, 1)
    await client.start(tenant_job, 1)
    everybody = client.all_tenants()
    assert {run.tenant async for run in everybody.runs()} == {ACME, OTHER, None}
    assert (await everybody.count(), await client.count()) == (3, 1)
    with pytest.raises(durable.Misuse):
        await everybody.start(tenant_job, 1)
    assert everybody.scope is ALL


async def test_a_bound_worker_takes_only_its_tenants_runs(client: durable.Client) -> None:
    acme, other = client.using(tenant=ACME), client.using(tenant=OTHER)
    waiting = await other.start(tenant_job, 2)
    untagged = await client.start(tenant_job, 3)
    async with durable.Worker(acme, functions=declared, grace="2s"):
        assert await acme.run(tenant_job, 1) == f"{ACME} 1"
        assert (await waiting.refresh()).status == "pending"
    async with durable.Worker(client, functions=declared, grace="2s"):
        assert await waiting.result() == f"{OTHER} 2"
        assert await untagged.result() == "None 3"


async def test_the_same_key_of_two_tenants_is_two_keys(client: durable.Client) -> None:
    keyed = tenant_job.using(idempotency_key="k")
    runs = [await client.using(tenant=tenant).start(keyed, 1) for tenant in (ACME, OTHER)] + [
        await client.start(keyed, 1)
    ]
    assert len({run.id for run in runs}) == 3
    assert {run.idempotency_key for run in runs} == {"k"}


async def test_a_handle_looks_with_the_tenant_it_was_made_with(client: durable.Client) -> None:
    run = await client.using(tenant=ACME).start(tenant_job, 1)
    assert await run.cancel()
    await until(run.refresh)
    assert run.status == "cancelled"
