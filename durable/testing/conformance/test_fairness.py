"""Fairness (rules 7, 10, 57): in a fair queue tenants take turns, whatever the backlog of one of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import UUID

import pytest

from durable.model import ALL, Claimed, QueueRecord, tenant_id

from .scenario import ACME, BETA, Scene, new_run, rule

OTHER = tenant_id("other")
BACKLOG = 150


async def fair(scene: Scene, queue: str = "default", *, on: bool = True) -> None:
    """Let tenants take turns in a queue, or not."""
    await scene.store.set_queue(QueueRecord(scope_name=f"queue:{queue}", tenant=ALL, fair=on))


async def backlog(scene: Scene, tenant: UUID | None, count: int = BACKLOG, **changes: object) -> None:
    """So many runs of one tenant."""
    await scene.store.enqueue([new_run(tenant=tenant, **changes) for _ in range(count)])


async def claims(scene: Scene, count: int, limit: int) -> list[Claimed]:
    """What so many claims took, in their order."""
    return [one for claimed in [await scene.claim(limit) for _ in range(count)] for one in claimed]


def by_tenant(claimed: list[Claimed]) -> Counter[UUID | None]:
    """How many each tenant got."""
    return Counter(one.run.tenant for one in claimed)


@rule(7, 57)
@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize("whose", ["first by id", "last by id"])
async def test_a_single_run_behind_the_backlog_of_another_tenant_starts_within_two_claims(
    scene: Scene, whose: str, limit: int
) -> None:
    await fair(scene)
    low, high = sorted([ACME, BETA])
    lonely = {"first by id": low, "last by id": high}[whose]
    await backlog(scene, high if lonely == low else low, priority=9)
    await backlog(scene, None, 20)
    await scene.claim(limit)  # the turn may be anybody's now
    run = await scene.start(tenant=lonely)
    found = [one.run.run_id for one in await claims(scene, 2, limit)]
    assert run.run_id in found
    assert len(found) == 2 * limit, "the room is filled"


@rule(57)
async def test_tenants_get_equal_shares_whatever_their_backlogs(scene: Scene) -> None:
    await fair(scene)
    await backlog(scene, None, 40)
    await backlog(scene, ACME)
    await backlog(scene, BETA, 40)
    claimed: list[Claimed] = []
    for _ in range(15):
        claimed += await scene.claim(4)
    assert by_tenant(claimed) == {ACME: 20, BETA: 20, None: 20}


@rule(57)
async def test_untagged_runs_have_a_turn_when_they_are_at_the_front_of_the_queue(scene: Scene) -> None:
    await fair(scene)
    await backlog(scene, ACME, 40)
    await backlog(scene, None, 40)
    await backlog(scene, BETA, 40)
    first = [one.run.tenant for one in await claims(scene, 3, 1)]
    assert first.count(None) == 0, "forty of ACME's are in front of them"
    urgent = await scene.start(priority=1)
    found = [one.run.run_id for one in await claims(scene, 3, 1)]
    assert urgent.run_id in found, "one of three turns"
    claimed = await claims(scene, 12, 10)
    assert by_tenant(claimed).total() == 120 + 1 - 6, "and nobody is forgotten"


@rule(57)
async def test_each_of_many_tenants_is_served_once_before_any_is_served_twice(scene: Scene) -> None:
    await fair(scene)
    tenants = [tenant_id(f"tenant {number}") for number in range(25)]
    for tenant in tenants:
        await backlog(scene, tenant, 2)
    claimed: list[Claimed] = []
    while len(claimed) < 25:
        claimed += await scene.claim(min(4, 25 - len(claimed)))
    assert by_tenant(claimed) == dict.fromkeys(tenants, 1)


@rule(7)
async def test_a_fair_claim_fills_its_room_from_whoever_has_work(scene: Scene) -> None:
    await fair(scene)
    await backlog(scene, ACME, 1)
    await backlog(scene, BETA, 3)
    await backlog(scene, OTHER)
    assert by_tenant(list(await scene.claim(40))) == {ACME: 1, BETA: 3, OTHER: 36}


@rule(7)
async def test_the_order_holds_among_the_runs_of_each_tenant(scene: Scene) -> None:
    await fair(scene)
    wanted: dict[UUID | None, list[str]] = {}
    for tenant in (ACME, None):
        runs = [await scene.start(tenant=tenant, name=name, priority=p) for name in ("work", "more") for p in (0, 5, 1)]
        wanted[tenant] = [run.run_id for run in sorted(runs, key=lambda run: (-run.priority, run.submitted))]
    found: dict[UUID | None, list[str]] = {ACME: [], None: []}
    for _ in range(6):
        for one in await scene.claim(2, functions=[("work", None), ("more", None)]):
            found[one.run.tenant].append(one.run.run_id)
    assert found == wanted


@rule(7)
async def test_a_queue_that_is_not_fair_goes_by_priority_and_submitted_over_all_tenants(scene: Scene) -> None:
    await fair(scene, "other")
    await fair(scene)
    await fair(scene, on=False)
    await backlog(scene, ACME, 8)
    last = await scene.start(tenant=BETA)
    first = await scene.start(tenant=BETA, priority=1)
    found = [one.run.run_id for one in await claims(scene, 3, 3)]
    assert found[0] == first.run_id
    assert last.run_id not in found


@rule(57)
async def test_a_bound_claim_takes_its_own_in_a_fair_queue_too(scene: Scene) -> None:
    await fair(scene)
    for tenant in (ACME, BETA, None):
        await backlog(scene, tenant, 5)
    for scope in (BETA, None):
        assert by_tenant(list(await scene.claim(9, scope=scope))) == {scope: 5}


@rule(7)
async def test_turns_are_taken_among_what_the_worker_can_take(scene: Scene) -> None:
    await fair(scene)
    await backlog(scene, ACME, 5, name="unknown")
    await backlog(scene, ACME, 5, queue="elsewhere")
    await backlog(scene, ACME, 5, delay=1_000_000_000)
    await backlog(scene, BETA, 5, version="2")
    await backlog(scene, OTHER, 3)
    assert by_tenant(list(await scene.claim(9))) == {OTHER: 3}


@rule(73)
async def test_a_tenant_that_a_limit_holds_back_leaves_its_turn_to_others(scene: Scene) -> None:
    await fair(scene)
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", tenant=ACME, max_concurrency=1))
    await backlog(scene, ACME, 30)
    await backlog(scene, BETA, 30)
    assert by_tenant([*await scene.claim(10), *await scene.claim(10)]) == {ACME: 1, BETA: 19}


@rule(73)
async def test_a_share_holds_in_a_fair_queue(scene: Scene) -> None:
    await fair(scene)
    await scene.store.set_queue(QueueRecord(scope_name="share:default", tenant=ALL, max_concurrency=3))
    for tenant in (ACME, BETA, OTHER):
        await backlog(scene, tenant, 20)
    assert by_tenant([*await scene.claim(20), *await scene.claim(20)]) == {ACME: 3, BETA: 3, OTHER: 3}


@rule(8)
async def test_claims_at_once_in_a_fair_queue_never_get_the_same_run(scenes: tuple[Scene, Scene]) -> None:
    await fair(scenes[0])
    for tenant in (ACME, BETA, None):
        await backlog(scenes[0], tenant, 20)
    answers = await asyncio.gather(*(scene.claim(5) for scene in scenes * 6))
    found = [one.run.run_id for answer in answers for one in answer]
    assert len(set(found)) == len(found)
    for scene in scenes * 12:
        found += [one.run.run_id for one in await scene.claim(9)]
    assert len(set(found)) == len(found) == 60


@rule(8)
async def test_a_fair_claim_that_is_asked_again_returns_what_it_holds(scene: Scene) -> None:
    await fair(scene)
    await backlog(scene, ACME, 5)
    await backlog(scene, BETA, 5)
    request = scene.request(4)
    first = [one.run.run_id for one in await scene.store.claim(request)]
    again = [one.run.run_id for one in await scene.store.claim(request)]
    assert sorted(again) == sorted(first)
    assert len(first) == 4


@rule(12, 45)
async def test_what_ends_at_a_claim_ends_in_a_fair_queue_too(scene: Scene) -> None:
    await fair(scene)
    await backlog(scene, ACME, 6, deadline_after=1_000_000)
    await scene.later(2_000_000)
    await backlog(scene, BETA, 2)
    assert by_tenant([*await scene.claim(4), *await scene.claim(4)]) == {BETA: 2}
    assert [run.status for run in await scene.runs(scope=ACME)] == ["timed_out"] * 6
