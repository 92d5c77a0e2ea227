"""Claiming (rules 1, 2, 7 to 12, 45): who gets which runs, in which order, and what a claim does to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from durable.model import (
    ALL,
    Cancelled,
    Completed,
    Failed,
    ForwardIncomplete,
    QueueRecord,
    RecordKind,
    Retry,
    Status,
    TimedOut,
)
from durable.settings import HOUR, MINUTE, SECOND

from .scenario import ACME, BETA, FAMILY, LEASE, OTHER_FAMILY, Scene, failure, new_run, rule


@rule(1)
async def test_attempts_starts_at_0_and_a_claim_adds_one_with_running_the_lease_and_the_mark(scene: Scene) -> None:
    run = await scene.start()
    assert (run.attempts, run.status, run.lease_owner, run.leased_until) == (0, Status.PENDING, None, None)
    request = scene.request()
    before = scene.store.clock()
    (claimed,) = await scene.store.claim(request)
    assert (claimed.run.status, claimed.run.attempts, claimed.run.lease_owner) == (Status.RUNNING, 1, request.mark)
    assert (claimed.lease.run_id, claimed.lease.attempts, claimed.lease.mark) == (run.run_id, 1, request.mark)
    stored = await scene.get(run.run_id)
    assert (stored.status, stored.attempts, stored.lease_owner) == (Status.RUNNING, 1, request.mark)
    assert stored.leased_until is not None
    assert scene.since(before, stored.leased_until - LEASE)


@rule(1)
async def test_attempts_grows_by_one_on_every_claim_and_is_never_lowered(scene: Scene) -> None:
    held = await scene.take()
    for expected in (2, 3, 4):
        await scene.hand_back(held)
        held = await scene.take_again(held.run.run_id)
        assert held.lease.attempts == expected


@rule(1)
async def test_an_operator_retry_neither_lowers_nor_reuses_the_fence(scene: Scene) -> None:
    held = await scene.take()
    await scene.fail(held)
    run = await scene.store.retry(held.run.run_id, scope=ALL, attempts=1)
    assert run.attempts == 1
    again = await scene.take_again(run.run_id)
    assert again.lease.attempts == 2
    assert again.lease.mark != held.lease.mark


@rule(2)
async def test_attempts_counts_claims_failures_counts_errors_reclaims_counts_lapses(scene: Scene) -> None:
    held = await scene.take(max_attempts=None)
    assert await scene.settle(held, Retry(after=0, failure=failure())) == "landed"
    held = await scene.take_again(held.run.run_id)
    await scene.hand_back(held)
    held = await scene.take_again(held.run.run_id)
    await scene.lapse()
    await scene.sweep()
    run = await scene.get(held.run.run_id)
    assert (run.attempts, run.failures, run.reclaims) == (3, 1, 1)


@rule(7)
@pytest.mark.parametrize("delay", [{"delay": MINUTE}, {"start_at": "later"}])
async def test_a_delayed_run_is_not_claimed_before_it_is_due_and_promoted_then(
    scene: Scene, delay: dict[str, Any]
) -> None:
    if "start_at" in delay:
        delay = {"start_at": scene.store.clock() + MINUTE}
    run = await scene.start(**delay)
    assert run.status == Status.PENDING
    assert run.available_at is not None
    assert list(await scene.claim()) == []
    await scene.promote()
    assert list(await scene.claim()) == []
    await scene.later(MINUTE + SECOND)
    await scene.promote()
    assert (await scene.take_again(run.run_id)).run.run_id == run.run_id


@rule(7)
@pytest.mark.parametrize("changes", [{}, {"delay": 0}, {"start_at": 1}, {"delay": 0, "start_at": 1}])
async def test_available_at_is_null_for_a_run_that_is_claimable_now(scene: Scene, changes: dict[str, Any]) -> None:
    run = await scene.start(**changes)
    assert run.available_at is None
    await scene.take_again(run.run_id)


@rule(7)
async def test_the_later_one_of_delay_and_start_at_counts(scene: Scene) -> None:
    run = await scene.start(delay=HOUR, start_at=scene.store.clock() + MINUTE)
    assert run.available_at is not None
    assert run.available_at > scene.store.clock() + 50 * MINUTE


@rule(7)
async def test_a_suspended_or_running_run_is_not_claimed(scene: Scene) -> None:
    held = await scene.take()
    assert list(await scene.claim()) == []
    assert await scene.suspend(held) == "landed"
    assert list(await scene.claim()) == []


@rule(7)
@pytest.mark.parametrize(
    "outcome",
    [
        Completed(output="1"),
        Failed(failure=failure()),
        TimedOut(failure=failure()),
        Cancelled(failure=failure()),
        ForwardIncomplete(failure=failure()),
    ],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_a_terminal_run_is_not_claimed(scene: Scene, outcome: Any) -> None:
    held = await scene.take()
    assert await scene.settle(held, outcome) == "landed"
    assert list(await scene.claim()) == []


@rule(7)
async def test_higher_priority_comes_first_then_submitted(scene: Scene) -> None:
    order = [await scene.start(priority=priority) for priority in (0, 5, -3, 5, 0)]
    expected = [order[index].run_id for index in (1, 3, 0, 4, 2)]
    assert [one.run.run_id for one in await scene.claim(10)] == expected


@rule(7)
async def test_submitted_is_the_stores_own_sequence_and_not_a_clients_clock(scene: Scene) -> None:
    first = await scene.start(run_id="zzz-first")
    second = await scene.start(run_id="aaa-second")
    assert first.submitted < second.submitted
    assert [one.run.run_id for one in await scene.claim(10)] == ["zzz-first", "aaa-second"]


@rule(7)
async def test_a_batch_is_submitted_in_its_order(scene: Scene) -> None:
    runs = [new_run() for _ in range(20)]
    await scene.store.enqueue(runs)
    assert [one.run.run_id for one in await scene.claim(20)] == [run.run_id for run in runs]


@rule(7)
async def test_a_claim_is_bounded_by_limit(scene: Scene) -> None:
    await scene.store.enqueue([new_run() for _ in range(5)])
    assert len(await scene.claim(3, queues={"default": 10})) == 3
    assert len(await scene.claim(3, queues={"default": 10})) == 2


@rule(7)
async def test_a_claim_is_bounded_by_queue(scene: Scene) -> None:
    for queue in ("a", "b", "c"):
        await scene.store.enqueue([new_run(queue=queue) for _ in range(4)])
    claimed = await scene.claim(10, queues={"a": 1, "b": 3})
    assert sorted(one.run.queue for one in claimed) == ["a", "b", "b", "b"]


@rule(7)
async def test_the_limit_holds_over_all_queues_together(scene: Scene) -> None:
    for queue in ("a", "b"):
        await scene.store.enqueue([new_run(queue=queue) for _ in range(4)])
    assert len(await scene.claim(3, queues={"a": 3, "b": 3})) == 3


@rule(7)
async def test_a_run_of_a_name_that_is_not_asked_for_stays_pending_untouched(scene: Scene) -> None:
    unknown = await scene.start(name="nobody_knows", priority=9)
    known = await scene.start()
    assert [one.run.run_id for one in await scene.claim(10)] == [known.run_id]
    assert await scene.get(unknown.run_id) == unknown


@rule(7)
async def test_a_worker_without_functions_gets_nothing(scene: Scene) -> None:
    await scene.start()
    assert list(await scene.claim(functions=[])) == []


@rule(7)
async def test_many_names_are_claimed_in_one_order(scene: Scene) -> None:
    runs = [await scene.start(name=name) for name in ("c", "a", "b", "a", "c")]
    claimed = await scene.claim(10, functions=[("a", None), ("b", None), ("c", None)])
    assert [one.run.run_id for one in claimed] == [run.run_id for run in runs]


@rule(7)
@pytest.mark.parametrize(
    ("version", "functions", "taken"),
    [
        (None, [("work", None)], True),
        (None, [("work", "2")], True),
        ("1", [("work", None)], False),
        ("1", [("work", "2")], False),
        ("1", [("work", "1")], True),
        ("1", [("work", "2"), ("work", "1")], True),
        ("1", [("other", "1")], False),
        ("1", [("other", "1"), ("work", "2")], False),
    ],
)
async def test_a_run_with_a_version_is_taken_only_by_a_worker_that_registered_just_that_pair(
    scene: Scene, version: str | None, functions: list[tuple[str, str | None]], taken: bool
) -> None:
    await scene.start(version=version)
    assert len(await scene.claim(functions=functions)) == int(taken)


@rule(7)
async def test_a_run_with_records_of_another_replay_family_is_not_taken(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.hand_back(held)
    run = await scene.get(held.run.run_id)
    assert run.replay_family == FAMILY
    assert list(await scene.claim(family=OTHER_FAMILY)) == []
    assert (await scene.get(held.run.run_id)).attempts == 1
    await scene.take_again(held.run.run_id)


@rule(7)
async def test_a_run_without_records_is_taken_by_any_replay_family(scene: Scene) -> None:
    held = await scene.take()
    await scene.hand_back(held)
    again = await scene.take_again(held.run.run_id, family=OTHER_FAMILY)
    await scene.append(again, "a")
    await scene.hand_back(again)
    assert list(await scene.claim(family=FAMILY)) == []
    await scene.take_again(held.run.run_id, family=OTHER_FAMILY)


@rule(7, 57)
async def test_a_claim_is_filtered_by_tenant_for_a_bound_worker(scene: Scene) -> None:
    for tenant in (None, ACME, BETA):
        await scene.start(tenant=tenant)
    assert [one.run.tenant for one in await scene.claim(10, scope=ACME)] == [ACME]
    assert [one.run.tenant for one in await scene.claim(10, scope=None)] == [None]
    assert [one.run.tenant for one in await scene.claim(10, scope=ALL)] == [BETA]


@rule(8)
async def test_two_workers_never_get_the_same_run_at_once(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    await one.store.enqueue([new_run() for _ in range(30)])
    answers = await asyncio.gather(*(scene.claim(5) for scene in (one, other) * 4))
    taken = [claimed.run.run_id for answer in answers for claimed in answer]
    assert len(taken) == len(set(taken))
    while rest := await one.claim(30):
        taken += [claimed.run.run_id for claimed in rest]
    assert len(taken) == len(set(taken)) == 30


@rule(8)
async def test_the_same_mark_again_returns_what_the_claim_holds_and_claims_nothing_more(scene: Scene) -> None:
    await scene.store.enqueue([new_run() for _ in range(5)])
    request = scene.request(2)
    first = await scene.store.claim(request)
    again = await scene.store.claim(request)
    assert [one.lease for one in again] == [one.lease for one in first]
    assert [one.run.attempts for one in again] == [1, 1]
    assert sum(run.status == Status.RUNNING for run in await scene.runs()) == 2


@rule(8)
async def test_a_mark_that_was_asked_again_gives_only_what_is_still_held(scene: Scene) -> None:
    await scene.store.enqueue([new_run() for _ in range(4)])
    request = scene.request(2)
    first, second = await scene.store.claim(request)
    await scene.complete(first)
    assert [one.lease for one in await scene.store.claim(request)] == [second.lease]


@rule(9)
async def test_one_bad_run_never_strands_its_batch(scene: Scene) -> None:
    asked = await scene.take(priority=8)
    await scene.hand_back(asked)
    late = await scene.start(deadline_after=SECOND, priority=9)
    assert await scene.cancel(asked.run.run_id)
    good = await scene.start()
    await scene.later(2 * SECOND)
    assert [one.run.run_id for one in await scene.claim(10)] == [good.run_id]
    assert (await scene.get(late.run_id)).status == Status.TIMED_OUT
    assert (await scene.get(asked.run.run_id)).status == Status.CANCELLED


@rule(8)
@pytest.mark.parametrize("fair", [False, True])
async def test_what_a_claim_releases_by_landing_another_costs_nobody_a_place(scene: Scene, fair: bool) -> None:
    """The next ones in the lines of runs that end here stand in front of those that this claim has chosen: it takes each run once, and no
    more than it was asked for."""
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", tenant=ALL, fair=fair))
    for line in "ab":
        await scene.start(sequence_key=line, deadline_after=SECOND, priority=9)
        await scene.start(sequence_key=line, priority=9)
    plain = [await scene.start() for _ in range(2)]
    await scene.later(2 * SECOND)
    taken = [one.run.run_id for one in await scene.claim(3)]
    assert len(taken) == len(set(taken)) <= 3
    assert plain[0].run_id in taken
    assert {(await scene.get(run_id)).attempts for run_id in taken} == {1}


@rule(12)
async def test_a_claim_past_the_deadline_lands_timed_out_and_is_not_returned(scene: Scene) -> None:
    run = await scene.start(deadline_after=MINUTE)
    await scene.later(MINUTE + SECOND)
    assert list(await scene.claim()) == []
    landed = await scene.get(run.run_id)
    assert (landed.status, landed.error_kind, landed.attempts) == (Status.TIMED_OUT, "deadline", 0)


@rule(12)
async def test_the_deadline_spans_queueing_waiting_and_all_attempts(scene: Scene) -> None:
    held = await scene.take(deadline_after=MINUTE, max_attempts=None)
    deadline = held.run.deadline_at
    assert deadline is not None
    await scene.append(held, "a")
    await scene.settle(held, Retry(after=0, failure=failure()))
    held = await scene.take_again(held.run.run_id)
    assert held.run.deadline_at == deadline
    assert await scene.suspend(held) == "landed"
    await scene.send(held.run.run_id)
    await scene.later(2 * MINUTE)
    assert list(await scene.claim()) == []
    assert (await scene.get(held.run.run_id)).status == Status.TIMED_OUT


@rule(12, 49)
async def test_a_compensating_run_past_its_deadline_is_claimed_so_that_it_compensates(scene: Scene) -> None:
    held = await scene.take(deadline_after=MINUTE)
    assert (await scene.append(held, "undo", kind=RecordKind.COMPENSATION)).state == "appended"
    assert (await scene.get(held.run.run_id)).compensating
    await scene.hand_back(held)
    await scene.later(2 * MINUTE)
    again = await scene.take_again(held.run.run_id)
    assert again.run.compensating


@rule(12)
async def test_available_at_is_never_later_than_the_deadline(scene: Scene) -> None:
    run = await scene.start(delay=HOUR, deadline_after=MINUTE)
    assert run.available_at == run.deadline_at


@rule(12)
async def test_a_deadline_that_has_come_wakes_a_delayed_run_to_land_it(scene: Scene) -> None:
    run = await scene.start(delay=HOUR, deadline_after=MINUTE)
    await scene.later(MINUTE + SECOND)
    await scene.promote()
    assert list(await scene.claim()) == []
    assert (await scene.get(run.run_id)).status == Status.TIMED_OUT


@rule(12)
async def test_the_earlier_one_of_deadline_at_and_deadline_after_counts(scene: Scene) -> None:
    now = scene.store.clock()
    early = await scene.start(deadline_at=now + HOUR, deadline_after=MINUTE)
    late = await scene.start(deadline_at=now + MINUTE, deadline_after=HOUR)
    for run in (early, late):
        assert run.deadline_at is not None
        assert run.deadline_at < now + 2 * MINUTE


@rule(45)
async def test_a_claim_of_a_run_that_has_no_record_and_carries_an_unrefused_ask_lands_it_without_calling_the_body(
    scene: Scene,
) -> None:
    held = await scene.take()
    await scene.hand_back(held)
    assert await scene.cancel(held.run.run_id)
    assert list(await scene.claim()) == []
    run = await scene.get(held.run.run_id)
    assert (run.status, run.attempts) == (Status.CANCELLED, 1)


@rule(45)
async def test_a_run_that_has_a_record_and_carries_an_ask_is_claimed_so_that_its_body_hears_of_it(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.hand_back(held)
    assert await scene.cancel(held.run.run_id)
    again = await scene.take_again(held.run.run_id)
    assert again.run.cancel_requested_at is not None


@rule(3)
async def test_a_claim_hands_out_the_journal_by_position_and_the_attempt_rows_last(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "c")
    await scene.append(held, "b@1", kind=RecordKind.ATTEMPT)
    await scene.append(held, "b")
    await scene.append(held, "a")
    await scene.hand_back(held)
    again = await scene.take_again(held.run.run_id)
    assert [record.step_id for record in again.history] == ["c", "b", "a", "b@1"]
    assert [record.position for record in again.history] == [0, 1, 2, None]


@rule(3)
async def test_a_fresh_run_has_an_empty_journal(scene: Scene) -> None:
    assert list((await scene.take()).history) == []


@rule(7)
async def test_started_at_is_set_by_the_first_claim_and_stays(scene: Scene) -> None:
    held = await scene.take()
    assert held.run.started_at is not None
    started = held.run.started_at - held.run.created_at
    await scene.append(held, "a")
    await scene.hand_back(held)
    await scene.later(MINUTE)
    again = (await scene.take_again(held.run.run_id)).run
    assert again.started_at == again.created_at + started


@rule(7, 73)
async def test_a_paused_queue_gives_nothing_until_it_is_resumed(scene: Scene) -> None:
    run = await scene.start()
    await scene.start(queue="open")
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", paused=True))
    claimed = await scene.claim(10, queues={"default": 5, "open": 5})
    assert [one.run.queue for one in claimed] == ["open"]
    assert (await scene.get(run.run_id)).attempts == 0
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", paused=False))
    await scene.take_again(run.run_id)


@rule(11)
async def test_promotion_moves_due_runs_oldest_first_and_is_bounded(scene: Scene) -> None:
    runs = [await scene.start(delay=minutes * MINUTE) for minutes in (3, 1, 2)]
    assert (await scene.promote()).count == 0
    await scene.later(5 * MINUTE)
    promoted = await scene.promote(limit=2)
    assert promoted.count == 2
    assert promoted.queues == frozenset({"default"})
    ready = [run.run_id for run in runs if (await scene.get(run.run_id)).available_at is None]
    assert ready == [runs[1].run_id, runs[2].run_id]
    assert (await scene.promote(limit=2)).count == 1


@rule(11)
async def test_a_promotion_says_when_there_is_something_to_promote_again(scene: Scene) -> None:
    assert (await scene.promote()).next_due is None
    run = await scene.start(delay=HOUR)
    await scene.start(delay=2 * HOUR)
    assert (await scene.promote()).next_due == run.available_at


@rule(11)
async def test_a_promotion_is_safe_everywhere_at_once(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    await one.store.enqueue([new_run(delay=SECOND) for _ in range(20)])
    await one.later(2 * SECOND)
    answers = await asyncio.gather(*(scene.promote(limit=20) for scene in (one, other) * 3))
    assert sum(answer.count for answer in answers) == 20
    assert len(await one.claim(30)) == 20


@rule(11, 57)
async def test_a_bound_promotion_moves_its_tenants_runs_only(scene: Scene) -> None:
    mine = await scene.start(tenant=ACME, delay=SECOND)
    theirs = await scene.start(tenant=BETA, delay=SECOND)
    await scene.later(2 * SECOND)
    assert (await scene.promote(scope=ACME)).count == 1
    assert (await scene.get(mine.run_id)).available_at is None
    assert (await scene.get(theirs.run_id)).available_at is not None
