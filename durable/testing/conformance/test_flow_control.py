"""Flow control (rules 73 to 76): permits, blocked runs, sequences and rates, taken and given back in the writes that need them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from durable.model import (
    ALL,
    Cancelled,
    Claimed,
    Completed,
    Failed,
    ForwardIncomplete,
    HandedBack,
    Outcome,
    QueueRecord,
    Retry,
    Status,
    Suspended,
    TimedOut,
)
from durable.settings import MINUTE, SECOND

from .scenario import ACME, BETA, Scene, failure, new_run, rule

OUTCOMES: list[Outcome] = [
    Completed(output="1"),
    Failed(failure=failure()),
    Cancelled(failure=failure()),
    TimedOut(failure=failure()),
    ForwardIncomplete(failure=failure()),
    Retry(after=MINUTE, failure=failure()),
    Suspended(until=None, waiting_for="{}", wake_seq=0),
    HandedBack(after=MINUTE),
]

SCOPES: list[tuple[str, dict[str, Any]]] = [
    ("queue:default", {}),
    ("function:work", {}),
    ("key:default", {"concurrency_key": "customer 7"}),
]


async def limit(scene: Scene, scope_name: str, most: int | None, **changes: Any) -> None:
    """Set the limit of a scope."""
    await scene.store.set_queue(QueueRecord(scope_name=scope_name, max_concurrency=most, **changes))


async def running(scene: Scene) -> int:
    """How many runs are running."""
    return sum(run.status == Status.RUNNING for run in await scene.runs())


@rule(73)
@pytest.mark.parametrize(("scope_name", "fields"), SCOPES, ids=[name for name, _ in SCOPES])
async def test_a_run_takes_the_permit_of_each_limited_scope_in_the_write_that_claims_it(
    scene: Scene, scope_name: str, fields: dict[str, Any]
) -> None:
    await limit(scene, scope_name, 2)
    await scene.store.enqueue([new_run(**fields) for _ in range(5)])
    assert len(await scene.claim(10)) == 2
    assert len(await scene.claim(10)) == 0
    assert await running(scene) == 2


@rule(73)
@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)
@pytest.mark.parametrize(("scope_name", "fields"), SCOPES, ids=[name for name, _ in SCOPES])
async def test_a_permit_is_given_back_in_the_write_by_which_the_run_leaves_running(
    scene: Scene, scope_name: str, fields: dict[str, Any], outcome: Outcome
) -> None:
    await limit(scene, scope_name, 1)
    held = await scene.take(max_attempts=9, **fields)
    waiting = await scene.start(**fields)
    assert list(await scene.claim()) == []
    assert await scene.settle(held, outcome) == "landed"
    (claimed,) = await scene.claim(10)
    assert claimed.run.run_id == waiting.run_id


@rule(73)
async def test_a_lost_owner_counts_until_its_lease_ends(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    lost = await scene.take()
    await scene.start()
    assert list(await scene.claim()) == []
    await scene.lapse()
    assert list(await scene.claim()) == []
    await scene.sweep()
    (claimed,) = await scene.claim(10)
    assert claimed.run.run_id == lost.run.run_id
    assert await running(scene) == 1


@rule(73)
async def test_one_key_does_not_limit_another(scene: Scene) -> None:
    await limit(scene, "key:default", 1)
    await scene.store.enqueue([new_run(concurrency_key=key) for key in ("a", "a", "b", "b", "c")])
    await scene.store.enqueue([new_run() for _ in range(2)])
    claimed = await scene.claim(10)
    keys = [one.run.concurrency_key for one in claimed]
    assert sorted(key for key in keys if key is not None) == ["a", "b", "c"]
    assert keys.count(None) == 2


@rule(73)
async def test_the_key_limit_of_one_queue_does_not_count_in_another(scene: Scene) -> None:
    await limit(scene, "key:default", 1)
    await scene.store.enqueue(
        [new_run(concurrency_key="a", queue=queue) for queue in ("default", "default", "free", "free")]
    )
    claimed = await scene.claim(10, queues={"default": 5, "free": 5})
    assert sorted(one.run.queue for one in claimed) == ["default", "free", "free"]


@rule(73)
async def test_a_run_needs_the_permits_of_all_its_scopes(scene: Scene) -> None:
    await limit(scene, "queue:default", 2)
    await limit(scene, "function:work", 1)
    await scene.store.enqueue([new_run(), new_run(), new_run(name="other"), new_run(name="other")])
    claimed = await scene.claim(10, functions=[("work", None), ("other", None)])
    assert sorted(one.run.name for one in claimed) == ["other", "work"]


@rule(73)
async def test_the_limit_holds_over_claims_at_once(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    await limit(one, "queue:default", 3)
    await one.store.enqueue([new_run() for _ in range(20)])
    answers = await asyncio.gather(*(scene.claim(5) for scene in (one, other) * 5))
    assert sum(len(answer) for answer in answers) == 3
    assert await running(one) == 3


@rule(73, 74)
async def test_in_flight_never_exceeds_the_limit_and_everything_ends(scene: Scene) -> None:
    """A random walk of claims, settles and lapses; the limit holds at every step and no run is forgotten."""
    dice = random.Random(4711)
    await limit(scene, "queue:default", 2)
    await limit(scene, "key:default", 1)
    await scene.store.enqueue([new_run(concurrency_key=dice.choice("ab"), max_attempts=None) for _ in range(25)])
    held: list[Claimed] = []
    for _ in range(400):
        if held and dice.random() < 0.5:
            one = held.pop(dice.randrange(len(held)))
            outcome: Outcome = HandedBack() if dice.random() < 0.3 else Completed(output="1")
            await scene.settle(one, outcome)
        else:
            claimed = await scene.claim(dice.randint(1, 3))
            held += claimed
        assert len(held) <= 2
        assert len({one.run.concurrency_key for one in held}) == len(held)
    statuses = [run.status for run in await scene.runs()]
    assert statuses.count(Status.COMPLETED) >= 23


@rule(73)
async def test_the_limit_holds_at_every_step_though_it_is_changed(scene: Scene) -> None:
    """A random walk of claims, settles, lapses and changes of the limits: whoever gets a run is within the limit as it is then."""
    dice = random.Random(73)
    limits: dict[str, int | None] = {"queue:default": None, "key:default": None}
    held: list[Claimed] = []
    for step in range(300):
        draw = dice.random()
        if draw < 0.1:
            scope_name = dice.choice(list(limits))
            limits[scope_name] = dice.choice([None, 2, 5, 9])
            await limit(scene, scope_name, limits[scope_name])
        elif draw < 0.12:
            await scene.lapse()
            await scene.sweep()
            held.clear()
        elif draw < 0.55 and held:
            one = held.pop(dice.randrange(len(held)))
            await scene.settle(one, dice.choice(OUTCOMES))
        else:
            await scene.store.enqueue([new_run(concurrency_key=dice.choice("ab"), max_attempts=None) for _ in range(2)])
            claimed = await scene.claim(dice.randint(1, 4))
            held += claimed
            in_flight = {"queue:default": [*held], "key:default": []}
            for key in {one.run.concurrency_key for one in claimed}:
                of_key = [one for one in held if one.run.concurrency_key == key]
                in_flight["key:default"] = max(in_flight["key:default"], of_key, key=len)
            for scope_name, most in limits.items():
                assert most is None or not claimed or len(in_flight[scope_name]) <= most, (step, scope_name)
        if step % 30 == 29:
            assert list(await scene.store.audit(scope=ALL)) == []


@rule(74)
async def test_a_run_that_finds_its_scope_full_says_on_what_it_is_blocked(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    await scene.take()
    waiting = await scene.start()
    await scene.claim()
    blocked = await scene.get(waiting.run_id)
    assert blocked.status == Status.PENDING
    assert blocked.blocked_on is not None
    assert "default" in blocked.blocked_on
    explanation = await scene.store.explain(waiting.run_id, scope=ALL)
    assert explanation.reasons


@rule(74)
async def test_the_write_that_frees_the_scope_releases_the_next_by_priority_and_submitted(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    held = await scene.take()
    runs = [await scene.start(priority=priority) for priority in (0, 5, 5, 1)]
    for _ in range(3):
        assert list(await scene.claim(10)) == []
    order: list[str] = []
    for _ in runs:
        await scene.complete(held)
        (held,) = await scene.claim(10)
        order.append(held.run.run_id)
    assert order == [runs[index].run_id for index in (1, 2, 3, 0)]


@rule(74)
async def test_blocked_runs_do_not_stand_in_the_way_of_others(scene: Scene) -> None:
    await limit(scene, "key:default", 1)
    await scene.store.enqueue([new_run(concurrency_key="a", priority=9) for _ in range(10)])
    free = await scene.start()
    found: list[str] = []
    for _ in range(12):
        found += [one.run.run_id for one in await scene.claim(2)]
    assert free.run_id in found


@rule(74)
async def test_a_limit_that_is_raised_or_removed_releases_what_it_held(scene: Scene) -> None:
    await limit(scene, "queue:default", 1)
    await scene.store.enqueue([new_run() for _ in range(6)])
    assert len(await scene.claim(10)) == 1
    assert len(await scene.claim(10)) == 0
    await limit(scene, "queue:default", 3)
    await scene.mend()
    assert len(await scene.claim(10)) == 2
    await limit(scene, "queue:default", None)
    await scene.mend()
    assert len(await scene.claim(10)) == 3


@rule(73)
async def test_a_limit_that_is_lowered_counts_for_the_next_claim_and_stops_nobody(scene: Scene) -> None:
    await scene.store.enqueue([new_run() for _ in range(4)])
    held = await scene.claim(3)
    assert len(held) == 3
    await limit(scene, "queue:default", 2)
    for one in held:
        assert (await scene.append(one, "a")).state == "appended"
    await scene.complete(held[0])
    assert len(await scene.claim(10)) == 0, "two that were claimed before are still running"
    await scene.complete(held[1])
    await scene.mend()
    assert len(await scene.claim(10)) == 1


@rule(73, 57)
async def test_the_limit_of_one_tenant_does_not_count_for_another(scene: Scene) -> None:
    await limit(scene, "queue:default", 1, tenant=ACME)
    await scene.store.enqueue([new_run(tenant=tenant) for tenant in (ACME, ACME, BETA, BETA, None)])
    claimed = await scene.claim(10)
    assert sorted(str(one.run.tenant) for one in claimed) == sorted([str(ACME), str(BETA), str(BETA), "None"])


@rule(73)
async def test_flow_control_is_stored_as_it_was_set(scene: Scene) -> None:
    queue = QueueRecord(
        scope_name="queue:q",
        tenant=ALL,
        paused=True,
        max_concurrency=5,
        rate_count=10,
        rate_period=MINUTE,
        rate_burst=20,
        fair=True,
    )
    await scene.store.set_queue(queue)
    assert [found for found in await scene.store.queues(scope=ALL) if found.scope_name == "queue:q"] == [queue]
    await scene.store.set_queue(QueueRecord(scope_name="queue:q", tenant=ALL))
    assert [found.paused for found in await scene.store.queues(scope=ALL) if found.scope_name == "queue:q"] in (
        [False],
        [],
    )


@rule(74)
async def test_a_pause_stops_no_run_that_is_claimed(scene: Scene) -> None:
    held = await scene.take()
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", paused=True))
    assert (await scene.append(held, "a")).state == "appended"
    await scene.complete(held)


@rule(75)
async def test_one_sequence_key_runs_one_at_a_time_in_submitted_order(scene: Scene) -> None:
    runs = [await scene.start(sequence_key="s", priority=priority) for priority in (0, 9, 5)]
    for run in runs:
        (claimed,) = await scene.claim(10)
        assert claimed.run.run_id == run.run_id
        assert list(await scene.claim(10)) == []
        await scene.complete(claimed)


@rule(75)
async def test_a_run_behind_its_sequence_says_so(scene: Scene) -> None:
    head = await scene.start(sequence_key="s")
    behind = await scene.start(sequence_key="s")
    assert (head.blocked_on, behind.blocked_on) == (None, "sequence")


@rule(75)
async def test_sequences_of_other_keys_and_tenants_do_not_wait_for_each_other(scene: Scene) -> None:
    await scene.store.enqueue(
        [new_run(sequence_key=key, tenant=tenant) for key in ("s", "t") for tenant in (None, ACME, BETA)]
    )
    assert len(await scene.claim(10)) == 6


@rule(75)
@pytest.mark.parametrize("state", ["suspended", "back-off", "handed back", "swept", "delayed"])
async def test_the_head_keeps_its_place_through_suspension_and_retry(scene: Scene, state: str) -> None:
    if state == "delayed":
        await scene.start(sequence_key="s", delay=MINUTE)
    else:
        held = await scene.take(sequence_key="s", max_attempts=3)
        if state == "suspended":
            await scene.suspend(held)
        elif state == "back-off":
            await scene.settle(held, Retry(after=MINUTE, failure=failure()))
        elif state == "handed back":
            await scene.settle(held, HandedBack(after=MINUTE))
        else:
            await scene.lapse()
            await scene.sweep()
    behind = await scene.start(sequence_key="s")
    await scene.mend()
    claimed = await scene.claim(10)
    assert behind.run_id not in [one.run.run_id for one in claimed]
    assert (await scene.get(behind.run_id)).blocked_on == "sequence"


@rule(75)
async def test_a_sequence_survives_the_cancel_of_a_run_in_its_middle(scene: Scene) -> None:
    runs = [await scene.start(sequence_key="s") for _ in range(3)]
    assert await scene.cancel(runs[1].run_id)
    assert (await scene.get(runs[2].run_id)).blocked_on == "sequence"
    await scene.complete(await scene.take_again(runs[0].run_id))
    await scene.take_again(runs[2].run_id)


@rule(75)
async def test_a_sequence_in_one_batch_is_in_the_order_of_the_batch(scene: Scene) -> None:
    batch = [new_run(sequence_key="s") for _ in range(4)]
    answers = await scene.store.enqueue(batch)
    assert [answer.run.blocked_on for answer in answers] == [None, "sequence", "sequence", "sequence"]
    for run in batch:
        await scene.complete(await scene.take_again(run.run_id))


@rule(76)
async def test_a_rate_is_a_token_bucket(scene: Scene) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", rate_count=2, rate_period=MINUTE))
    await scene.store.enqueue([new_run() for _ in range(6)])
    first = await scene.claim(10)
    assert len(first) == 2
    for one in first:
        await scene.complete(one)
    assert len(await drain(scene)) == 0
    await scene.later(MINUTE + SECOND)
    assert len(await drain(scene)) == 2
    await scene.later(10 * MINUTE)
    assert len(await drain(scene)) == 2, "what was not used is not saved beyond the burst"


@rule(76)
async def test_a_burst_is_how_much_a_bucket_holds(scene: Scene) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", rate_count=1, rate_period=MINUTE, rate_burst=3))
    await scene.store.enqueue([new_run() for _ in range(9)])
    assert len(await drain(scene)) == 3
    await scene.later(2 * MINUTE + SECOND)
    assert len(await drain(scene)) == 2


async def drain(scene: Scene) -> list[Claimed]:
    """All that can be claimed now, after the chores have run."""
    found: list[Claimed] = []
    for _ in range(3):
        await scene.promote()
        await scene.mend()
        found += await scene.claim(10)
    return found
