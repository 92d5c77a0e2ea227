"""A busy tenant does not starve the others (rules 7, 10, 57): in a fair queue a single run behind a backlog starts within two polls, and a
claim reads what it takes and a little per tenant, whatever the backlog. `DURABLE_FAIR_BACKLOG` sets its size.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import pytest

import durable
from durable.model import ALL, ClaimRequest, NewRun, QueueRecord, new_run_id

BACKLOG = int(os.environ.get("DURABLE_FAIR_BACKLOG", "2000"))
BATCH = 2_000


def new_run(tenant: uuid.UUID | None, queue: str, **changes: Any) -> NewRun:
    values: dict[str, Any] = {
        "run_id": new_run_id(),
        "name": "work",
        "input": "1",
        "seed": b"s",
        "tenant": tenant,
        "queue": queue,
    }
    return NewRun(**{**values, **changes})


def request(number: int, queue: str, limit: int) -> ClaimRequest:
    return ClaimRequest(
        mark=f"{queue}:{number}",
        queues={queue: limit},
        functions=[("work", None)],
        limit=limit,
        lease=60_000_000,
        family="f",
        scope=ALL,
    )


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("limit", [1, 50])
async def test_a_single_run_behind_a_backlog_of_another_tenant_starts_within_two_polls(
    client: durable.Client, limit: int
) -> None:
    queue, busy, quiet = f"fair-{limit}", uuid.uuid4(), uuid.uuid4()
    store = client.store
    await client.all_tenants().queues.fair(queue)
    for start in range(0, BACKLOG, BATCH):
        await store.enqueue([new_run(busy, queue, priority=5) for _ in range(min(BATCH, BACKLOG - start))])
    assert len(await store.claim(request(0, queue, limit))) == limit
    for poll in range(3):  # wherever the turn stands
        lonely = new_run(quiet, queue)
        await store.enqueue([lonely])
        found = [one.run for number in (1, 2) for one in await store.claim(request(10 * poll + number, queue, limit))]
        assert lonely.run_id in [run.run_id for run in found]
        assert len(found) == 2 * limit
    await store.set_queue(QueueRecord(scope_name=f"queue:{queue}", tenant=ALL))
    lonely = new_run(quiet, queue)
    await store.enqueue([lonely])
    found = [one.run for number in (91, 92) for one in await store.claim(request(number, queue, limit))]
    assert lonely.run_id not in [run.run_id for run in found], "it is the flag that does it"


@pytest.mark.timeout(300)
async def test_workers_of_a_busy_tenants_queue_give_the_others_their_share(client: durable.Client) -> None:
    """With real workers: of the starts while both have work, each tenant has at least forty of a hundred."""
    order: list[uuid.UUID | None] = []

    @durable.function(registry=durable.Registry("shares"))
    async def shared_work(ctx: durable.Context) -> None:
        order.append(ctx.tenant)

    queue = "shares"
    await client.all_tenants().queues.fair(queue)
    busy, quiet = client.using(tenant=uuid.uuid4()), client.using(tenant=uuid.uuid4())
    first = [await busy.start(shared_work.using(queue=queue, priority=3)) for _ in range(150)]
    late = [await quiet.start(shared_work.using(queue=queue)) for _ in range(40)]
    async with durable.Worker(client, functions=[shared_work], queues=[queue], concurrency=4, grace="2s"):
        for run in (*late, *first):
            await run.result(timeout="120s")
    last = max(place for place, tenant in enumerate(order) if tenant == quiet.scope)
    assert order[: last + 1].count(quiet.scope) / (last + 1) >= 0.4
