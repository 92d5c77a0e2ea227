"""Flow control of everybody together, of each tenant's share, and of one tenant as a whole (rules 57, 73 to 76; ADR 0030)."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

import pytest

from durable.errors import Conflict
from durable.model import ALL, QueueRecord, Scope, Status
from durable.settings import MINUTE, SECOND

from .scenario import ACME, BETA, Scene, new_run, rule

TENANTS = (ACME, BETA, None)


async def limit(scene: Scene, scope_name: str, most: int | None = None, *, tenant: Scope = ALL, **changes: Any) -> None:
    """Put a row."""
    await scene.store.set_queue(QueueRecord(scope_name=scope_name, tenant=tenant, max_concurrency=most, **changes))


async def three_of_each(scene: Scene, **changes: Any) -> None:
    """Three runs of each tenant and three untagged ones."""
    await scene.store.enqueue([new_run(tenant=tenant, **changes) for _ in range(3) for tenant in TENANTS])


async def tenants(scene: Scene, **changes: Any) -> Counter[UUID | None]:
    """Whose runs two claims took."""
    claimed = [*await scene.claim(20, **changes), *await scene.claim(20, **changes)]
    return Counter(one.run.tenant for one in claimed)


@rule(73)
@pytest.mark.parametrize(
    ("scope_name", "fields"),
    [("queue:default", {}), ("function:work", {}), ("key:default", {"concurrency_key": "printer"})],
    ids=["queue", "function", "key"],
)
async def test_a_limit_of_everybody_counts_the_runs_of_all_tenants_together(
    scene: Scene, scope_name: str, fields: dict[str, Any]
) -> None:
    await limit(scene, scope_name, 4)
    await three_of_each(scene, **fields)
    held = [*await scene.claim(20), *await scene.claim(20)]
    assert len(held) == 4
    await scene.complete(held[0])
    await scene.complete(held[1])
    assert len(await scene.claim(20)) == 2
    await limit(scene, scope_name)
    await scene.mend()
    assert len(await scene.claim(20)) == 3


@rule(73, 57)
async def test_bound_claims_count_in_the_limit_of_everybody_and_free_the_next_whoever_owns_it(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    held = await scene.take(tenant=ACME)
    waiting = await scene.start(tenant=BETA)
    assert list(await scene.claim(scope=BETA)) == []
    assert (await scene.get(waiting.run_id)).blocked_on == "*/queue:default"
    await scene.complete(held)
    assert [one.run.run_id for one in await scene.claim(scope=BETA)] == [waiting.run_id]


@rule(74)
async def test_the_next_of_everybody_is_released_by_priority_over_all_tenants(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    held = await scene.take(tenant=ACME)
    runs = [await scene.start(tenant=tenant, priority=p) for tenant, p in ((ACME, 0), (BETA, 2), (None, 1))]
    assert list(await scene.claim(9)) == []
    order: list[str] = []
    for _ in runs:
        await scene.complete(held)
        (held,) = await scene.claim(9)
        order.append(held.run.run_id)
    assert order == [runs[place].run_id for place in (1, 2, 0)]


@rule(73)
@pytest.mark.parametrize("scope_name", ["queue:default", "function:work", "key:default"])
async def test_a_limit_of_everybody_counts_what_was_in_flight_before_it_was_set(scene: Scene, scope_name: str) -> None:
    await three_of_each(scene, concurrency_key="k")
    assert len(await scene.claim(4)) == 4
    await limit(scene, scope_name, 5)
    assert sum((await tenants(scene)).values()) == 1


@rule(73)
async def test_a_limit_of_everybody_and_one_of_a_tenant_hold_together(scene: Scene) -> None:
    await limit(scene, "queue:default", 4)
    await limit(scene, "queue:default", 1, tenant=ACME)
    await three_of_each(scene)
    found = await tenants(scene)
    assert found[ACME] == 1
    assert found.total() == 4


@rule(73)
async def test_a_share_is_what_each_tenant_may_have_of_a_queue(scene: Scene) -> None:
    await three_of_each(scene)
    assert len(await scene.claim(1, scope=ACME)) == 1
    await limit(scene, "share:default", 2)
    await three_of_each(scene, queue="free")
    assert await tenants(scene) == {ACME: 1, BETA: 2, None: 3}, (
        "one of ACME's was in flight; the untagged are no tenant"
    )
    assert await tenants(scene, queues={"free": 20}) == {ACME: 3, BETA: 3, None: 3}
    await limit(scene, "share:default")
    await scene.mend()
    assert await tenants(scene) == {ACME: 1, BETA: 1}


@rule(76)
async def test_a_rate_of_everybody_is_one_bucket(scene: Scene) -> None:
    await limit(scene, "queue:default", rate_count=2, rate_period=MINUTE)
    await three_of_each(scene)
    assert (await tenants(scene)).total() == 2
    await scene.later(MINUTE + SECOND)
    await scene.promote(scope=BETA)  # a worker of one tenant keeps it going, too
    assert (await tenants(scene)).total() == 2


@rule(7, 74)
async def test_a_pause_of_everybody_gives_nothing_to_anybody_and_holds_nobody_back(scene: Scene) -> None:
    await three_of_each(scene)
    await limit(scene, "queue:default", paused=True)
    for scope in (ALL, *TENANTS):
        assert list(await scene.claim(9, scope=scope)) == []
    assert {run.blocked_on for run in await scene.runs()} == {None}
    assert {row.queue: row.paused for row in await scene.store.stats(scope=ACME)} == {"default": True}
    explained = await scene.store.explain((await scene.runs())[0].run_id, scope=ALL)
    assert explained.code == "paused"
    await limit(scene, "queue:default")
    assert await tenants(scene) == dict.fromkeys(TENANTS, 3)


@rule(57, 74)
async def test_a_paused_tenant_is_not_claimed_and_no_other_notices(scene: Scene) -> None:
    await three_of_each(scene)
    await three_of_each(scene, queue="bulk")
    held = list(await scene.claim(1, scope=ACME))
    await limit(scene, "tenant", tenant=ACME, paused=True)
    both = {"default": 20, "bulk": 20}
    assert list(await scene.claim(20, queues=both, scope=ACME)) == []
    assert await tenants(scene, queues=both) == {BETA: 6, None: 6}
    assert (await scene.append(held[0], "a")).state == "appended", "what is in hand goes on"
    await scene.complete(held[0])
    await limit(scene, "tenant", tenant=ACME)
    await scene.mend()
    assert await tenants(scene, queues=both) == {ACME: 5}


@rule(57, 73)
async def test_a_limit_of_a_tenant_counts_over_all_its_queues(scene: Scene) -> None:
    await three_of_each(scene)
    await three_of_each(scene, queue="bulk")
    assert len(await scene.claim(1, scope=ACME)) == 1
    await limit(scene, "tenant", 2, tenant=ACME)
    assert await tenants(scene, queues={"default": 20, "bulk": 20}) == {ACME: 1, BETA: 6, None: 6}


@rule(57)
async def test_the_rows_of_everybody_are_seen_by_the_unbound_scope_only(scene: Scene) -> None:
    rows = [
        QueueRecord(scope_name="queue:default", tenant=tenant, max_concurrency=n)
        for n, tenant in enumerate((ALL, *TENANTS), 1)
    ]
    for row in rows:
        await scene.store.set_queue(row)
    assert sorted(row.max_concurrency or 0 for row in await scene.store.queues(scope=ALL)) == [1, 2, 3, 4]
    for scope in TENANTS:
        assert [row.tenant for row in await scene.store.queues(scope=scope)] == [scope]


@rule(57, 8)
async def test_why_a_run_waits_tells_a_tenant_nothing_of_another(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    held = await scene.take(tenant=BETA)
    waiting = await scene.start(tenant=ACME)
    assert list(await scene.claim()) == []
    explained = await scene.store.explain(waiting.run_id, scope=ACME)
    assert explained.code == "limit"
    assert held.run.run_id not in " ".join(explained.reasons)
    assert str(BETA) not in " ".join(explained.reasons)


@rule(73)
async def test_a_row_of_everybody_is_stored_as_it_was_set(scene: Scene) -> None:
    for name in ("queue:q", "function:f", "key:q"):
        row = QueueRecord(scope_name=name, tenant=ALL, paused=True, max_concurrency=3)
        await scene.store.set_queue(row)
        assert row in await scene.store.queues(scope=ALL)


@rule(73)
@pytest.mark.parametrize(
    "record",
    [
        QueueRecord(scope_name="default"),
        QueueRecord(scope_name="queue:"),
        QueueRecord(scope_name="room:a"),
        QueueRecord(scope_name="queue:a", max_concurrency=0),
        QueueRecord(scope_name="queue:a", rate_count=5),
        QueueRecord(scope_name="queue:a", rate_count=0, rate_period=SECOND),
        QueueRecord(scope_name="key:a", rate_count=5, rate_period=SECOND),
        QueueRecord(scope_name="share:a", tenant=ALL, rate_count=5, rate_period=SECOND),
        QueueRecord(scope_name="share:a", max_concurrency=1),
        QueueRecord(scope_name="share:a", tenant=ACME, max_concurrency=1),
        QueueRecord(scope_name="tenant", paused=True),
        QueueRecord(scope_name="tenant", tenant=ALL, paused=True),
        QueueRecord(scope_name="tenant:a", tenant=ACME, paused=True),
        QueueRecord(scope_name="queue:a", fair=True),
        QueueRecord(scope_name="queue:a", tenant=ACME, fair=True),
        QueueRecord(scope_name="function:a", tenant=ALL, fair=True),
    ],
    ids=repr,
)
async def test_a_row_that_can_mean_nothing_is_a_conflict_and_nothing_is_written(
    scene: Scene, record: QueueRecord
) -> None:
    with pytest.raises(Conflict) as caught:
        await scene.store.set_queue(record)
    assert caught.value.hint
    assert list(await scene.store.queues(scope=ALL)) == []


@rule(73, 74)
async def test_a_lost_owner_of_any_tenant_counts_in_the_limit_of_everybody(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    lost = await scene.take(tenant=ACME)
    await scene.start(tenant=BETA)
    assert list(await scene.claim()) == []
    await scene.lapse()
    assert list(await scene.claim()) == []
    await scene.sweep()
    assert len(await scene.claim(9)) == 1
    assert sum(run.status == Status.RUNNING for run in await scene.runs()) == 1
    assert lost.run.tenant == ACME
