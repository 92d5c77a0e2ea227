"""Leases and recovery (rules 13 to 17): renewal, the sweep, runs that are claimed alone, and the registry of workers."""

from __future__ import annotations

import asyncio

import pytest

from durable.model import ALL, Claimed, RecordKind, Renewal, Retry, Status, WorkerRecord
from durable.settings import DAY, MINUTE, SECOND

from .scenario import ACME, BETA, FAMILY, LEASE, Scene, failure, rule


async def lapse_and_sweep(scene: Scene, run_id: str, times: int) -> None:
    """Let a run lose its lease as often as that, without a record."""
    for _ in range(times):
        run = await scene.get(run_id)
        if run.status == Status.PENDING:
            assert len(await scene.claim(alone=run.blocked_on == "alone")) == 1
        await scene.lapse()
        await scene.sweep()


@rule(13)
async def test_a_renewal_prolongs_all_leases_from_now(scene: Scene) -> None:
    held = [await scene.take() for _ in range(3)]
    await scene.later(LEASE // 2)
    before = scene.store.clock()
    answers = await scene.store.renew([Renewal(lease=one.lease) for one in held], lease=LEASE)
    assert [(answer.state, answer.cancel_requested) for answer in answers] == [("held", False)] * 3
    for one in held:
        assert scene.since(before, ((await scene.get(one.run.run_id)).leased_until or 0) - LEASE)
    await scene.later(LEASE * 2 // 3)
    assert list((await scene.sweep()).returned) == []
    await scene.later(LEASE // 2)
    assert len((await scene.sweep()).returned) == 3


@rule(13)
async def test_a_renewal_answers_per_run_in_order(scene: Scene) -> None:
    kept, lost, asked = await scene.take(), await scene.take(), await scene.take()
    await scene.hand_back(lost)
    await scene.cancel(asked.run.run_id)
    answers = await scene.store.renew([Renewal(lease=one.lease) for one in (kept, lost, asked)], lease=LEASE)
    assert [answer.state for answer in answers] == ["held", "lost", "held"]
    assert [answer.cancel_requested for answer in answers] == [False, False, True]


@rule(13, 31)
async def test_a_renewal_tells_the_wake_counter(scene: Scene) -> None:
    held = await scene.take()
    (before,) = await scene.store.renew([Renewal(lease=held.lease)], lease=LEASE)
    await scene.send(held.run.run_id)
    (after,) = await scene.store.renew([Renewal(lease=held.lease)], lease=LEASE)
    assert after.wake_seq == before.wake_seq + 1


@rule(13)
async def test_a_renewal_may_shorten_a_lease_too(scene: Scene) -> None:
    held = await scene.take()
    await scene.store.renew([Renewal(lease=held.lease)], lease=SECOND)
    await scene.later(2 * SECOND)
    assert list((await scene.sweep()).returned) == [held.run.run_id]


@rule("29a")
async def test_progress_is_written_with_a_renewal(scene: Scene) -> None:
    held = await scene.take()
    await scene.store.renew([Renewal(lease=held.lease, progress='{"done":3}')], lease=LEASE)
    assert (await scene.get(held.run.run_id)).progress == '{"done":3}'
    await scene.store.renew([Renewal(lease=held.lease)], lease=LEASE)
    assert (await scene.get(held.run.run_id)).progress == '{"done":3}'
    (pulse,) = await scene.store.pulse([held.run.run_id], scope=ALL)
    assert pulse is not None
    assert pulse.progress == '{"done":3}'


@rule(15)
async def test_the_sweep_returns_a_run_whose_lease_lapsed_to_pending(scene: Scene) -> None:
    held = await scene.take()
    assert list((await scene.sweep()).returned) == []
    await scene.lapse()
    swept = await scene.sweep()
    assert (list(swept.returned), list(swept.failed), swept.queues) == ([held.run.run_id], [], frozenset({"default"}))
    run = await scene.get(held.run.run_id)
    assert (run.status, run.reclaims, run.failures, run.attempts) == (Status.PENDING, 1, 0, 1)
    assert (run.leased_until, run.available_at) == (None, None)
    await scene.take_again(held.run.run_id)


@rule(15)
async def test_a_sweep_leaves_failures_unchanged(scene: Scene) -> None:
    held = await scene.take(max_attempts=None)
    await scene.settle(held, Retry(after=0, failure=failure()))
    held = await scene.take_again(held.run.run_id)
    await scene.lapse()
    await scene.sweep()
    assert (await scene.get(held.run.run_id)).failures == 1


@rule(15)
async def test_a_record_made_under_the_lapsed_claim_sets_reclaims_to_0(scene: Scene) -> None:
    held = await scene.take()
    await lapse_and_sweep(scene, held.run.run_id, 1)
    held = await scene.take_again(held.run.run_id)
    await scene.append(held, "a")
    await scene.lapse()
    await scene.sweep()
    assert (await scene.get(held.run.run_id)).reclaims == 0


@rule(15)
async def test_a_record_of_an_earlier_claim_does_not_hide_a_lapse(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.hand_back(held)
    await scene.take_again(held.run.run_id)
    await scene.lapse()
    await scene.sweep()
    assert (await scene.get(held.run.run_id)).reclaims == 1


@rule(15, 24)
async def test_an_attempt_row_is_a_record_for_the_sweep(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a@1", kind=RecordKind.ATTEMPT)
    await scene.lapse()
    await scene.sweep()
    assert (await scene.get(held.run.run_id)).reclaims == 0


@rule(15)
@pytest.mark.parametrize("door", ["suspension", "hand-back"])
async def test_a_suspension_or_a_hand_back_sets_reclaims_to_0(scene: Scene, door: str) -> None:
    held = await scene.take()
    await lapse_and_sweep(scene, held.run.run_id, 1)
    held = await scene.take_again(held.run.run_id)
    if door == "suspension":
        assert await scene.suspend(held) == "landed"
    else:
        await scene.hand_back(held)
    assert (await scene.get(held.run.run_id)).reclaims == 0


@rule(15)
async def test_from_reclaims_2_the_sweep_blocks_on_alone(scene: Scene) -> None:
    held = await scene.take()
    await lapse_and_sweep(scene, held.run.run_id, 1)
    assert (await scene.get(held.run.run_id)).blocked_on is None
    await lapse_and_sweep(scene, held.run.run_id, 1)
    run = await scene.get(held.run.run_id)
    assert (run.reclaims, run.blocked_on) == (2, "alone")


@rule(15)
async def test_a_worker_takes_a_run_that_is_blocked_on_alone_only_while_it_holds_no_other(scene: Scene) -> None:
    held = await scene.take()
    await lapse_and_sweep(scene, held.run.run_id, 2)
    assert list(await scene.claim(10)) == []
    (again,) = await scene.claim(10, alone=True)
    assert again.run.run_id == held.run.run_id


@rule(15)
async def test_a_run_that_is_claimed_alone_comes_with_nothing_else(scene: Scene) -> None:
    poison = await scene.take(priority=9)
    await lapse_and_sweep(scene, poison.run.run_id, 2)
    others = {(await scene.start()).run_id for _ in range(3)}
    assert {one.run.run_id for one in await scene.claim(10)} == others
    await scene.start()
    claimed = await scene.claim(10, alone=True)
    assert len({one.run.run_id == poison.run.run_id for one in claimed}) == 1


@rule(15)
async def test_at_most_one_run_is_claimed_alone(scene: Scene) -> None:
    runs = [await scene.take(), await scene.take()]
    for _ in range(2):
        await scene.lapse()
        await scene.sweep()
        for held in runs:
            if (await scene.get(held.run.run_id)).blocked_on is None:
                await scene.claim()
    assert [(await scene.get(held.run.run_id)).blocked_on for held in runs] == ["alone", "alone"]
    assert len(await scene.claim(10, alone=True)) == 1


@rule(15)
async def test_a_worker_that_holds_nothing_and_finds_no_lonely_run_claims_as_ever(scene: Scene) -> None:
    runs = {(await scene.start()).run_id for _ in range(3)}
    assert {one.run.run_id for one in await scene.claim(10, alone=True)} == runs


@rule(15)
async def test_a_record_frees_a_run_from_being_claimed_alone(scene: Scene) -> None:
    held = await scene.take()
    await lapse_and_sweep(scene, held.run.run_id, 2)
    (again,) = await scene.claim(alone=True)
    await scene.append(again, "a")
    await scene.lapse()
    await scene.sweep()
    run = await scene.get(held.run.run_id)
    assert (run.reclaims, run.blocked_on) == (0, None)
    await scene.take_again(run.run_id)


@rule(15)
async def test_past_max_reclaims_a_run_lands_failed_with_reclaim_limit(scene: Scene) -> None:
    held = await scene.take()
    for reclaims in (1, 2):
        await lapse_and_sweep(scene, held.run.run_id, 1)
        assert (await scene.get(held.run.run_id)).reclaims == reclaims
    assert len(await scene.claim(alone=True)) == 1
    await scene.lapse()
    swept = await scene.sweep(max_reclaims=2)
    assert (list(swept.returned), list(swept.failed)) == ([], [held.run.run_id])
    run = await scene.get(held.run.run_id)
    assert (run.status, run.error_kind, run.attempts) == (Status.FAILED, "reclaim_limit", 3)


@rule(15, 49)
async def test_past_max_reclaims_a_compensating_run_goes_on_so_that_it_compensates(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "undo", kind=RecordKind.COMPENSATION)
    await scene.hand_back(held)
    held = await scene.take_again(held.run.run_id)
    await scene.lapse()
    swept = await scene.sweep(max_reclaims=0)
    assert (list(swept.returned), list(swept.failed)) == ([held.run.run_id], [])
    assert (await scene.get(held.run.run_id)).status == Status.PENDING


@rule(11, 15)
async def test_a_sweep_is_bounded_and_a_full_batch_hides_nothing(scene: Scene) -> None:
    unknown = [await scene.take(name="nobody_knows") for _ in range(5)]
    await scene.later(SECOND)
    known = await scene.take()
    await scene.lapse()
    swept: list[str] = []
    for _ in range(3):
        answer = await scene.sweep(limit=2)
        assert len(answer.returned) == 2
        swept += answer.returned
    assert sorted(swept) == sorted([held.run.run_id for held in unknown] + [known.run.run_id])
    await scene.take_again(known.run.run_id)


@rule(11, 15)
async def test_a_sweep_is_safe_everywhere_at_once(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    for _ in range(10):
        await one.take()
    await one.lapse()
    answers = await asyncio.gather(*(scene.sweep() for scene in (one, other) * 3))
    returned = [run_id for answer in answers for run_id in answer.returned]
    assert len(returned) == len(set(returned)) == 10
    assert {run.reclaims for run in await one.runs()} == {1}


@rule(15)
async def test_a_renewed_lease_is_not_swept(scene: Scene) -> None:
    held = await scene.take()
    for _ in range(4):
        await scene.later(LEASE // 2)
        await scene.store.renew([Renewal(lease=held.lease)], lease=LEASE)
        assert list((await scene.sweep()).returned) == []
    await scene.complete(held)


@rule(15, 57)
async def test_a_bound_sweep_returns_its_tenants_runs_only(scene: Scene) -> None:
    mine, theirs = await scene.take(tenant=ACME), await scene.take(tenant=BETA)
    await scene.lapse()
    assert list((await scene.sweep(scope=ACME)).returned) == [mine.run.run_id]
    assert (await scene.get(theirs.run.run_id)).status == Status.RUNNING


@rule(15)
async def test_an_ask_survives_the_sweep_and_reaches_the_next_holder(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    assert await scene.cancel(held.run.run_id)
    await scene.lapse()
    await scene.sweep()
    again = await scene.take_again(held.run.run_id)
    assert (await scene.inbox(again)).cancel_requested


@rule(16)
async def test_a_handed_back_run_is_claimable_now(scene: Scene) -> None:
    held = await scene.take()
    await scene.hand_back(held)
    run = await scene.get(held.run.run_id)
    assert (run.status, run.available_at, run.failures, run.reclaims) == (Status.PENDING, None, 0, 0)
    await scene.take_again(run.run_id)


@rule(16)
async def test_a_handed_back_run_keeps_its_place_in_the_order(scene: Scene) -> None:
    first = await scene.take()
    await scene.start()
    await scene.hand_back(first)
    assert (await scene.claim())[0].run.run_id == first.run.run_id


def worker(worker_id: str = "w1", **changes: object) -> WorkerRecord:
    values: dict[str, object] = {
        "worker_id": worker_id,
        "tenant": None,
        "bound": False,
        "host": "here",
        "pid": 4711,
        "queues": {"default": 100},
        "functions": [("work", None), ("other", "2")],
        "family": FAMILY,
        "settings": "{}",
    }
    return WorkerRecord(**{**values, **changes})  # type: ignore[arg-type]


@rule(17)
async def test_a_worker_registers_itself_and_refreshes_seen_at(scene: Scene) -> None:
    await scene.store.register(worker())
    (first,) = await scene.store.workers(scope=ALL)
    assert (first.worker_id, first.host, first.pid, dict(first.queues)) == ("w1", "here", 4711, {"default": 100})
    assert [tuple(pair) for pair in first.functions] == [("work", None), ("other", "2")]
    assert (first.family, first.settings, first.bound) == (FAMILY, "{}", False)
    await scene.later(MINUTE)
    await scene.store.register(worker())
    (second,) = await scene.store.workers(scope=ALL)
    assert (second.seen_at - first.seen_at) >= MINUTE or second.started_at < second.seen_at


@rule(17)
async def test_a_worker_that_stopped_in_good_order_leaves_the_registry(scene: Scene) -> None:
    await scene.store.register(worker("w1"))
    await scene.store.register(worker("w2"))
    await scene.store.unregister("w1")
    await scene.store.unregister("never seen")
    assert [one.worker_id for one in await scene.store.workers(scope=ALL)] == ["w2"]


@rule(17, 57)
async def test_a_bound_scope_sees_the_workers_that_serve_it(scene: Scene) -> None:
    await scene.store.register(worker("all"))
    await scene.store.register(worker("acme", tenant=ACME, bound=True))
    await scene.store.register(worker("untagged", tenant=None, bound=True))
    for scope, expected in ((ACME, {"all", "acme"}), (BETA, {"all"}), (None, {"all", "untagged"})):
        assert {one.worker_id for one in await scene.store.workers(scope=scope)} == expected


@rule(17, 61)
async def test_worker_rows_unseen_for_a_day_are_deleted_by_the_purge(scene: Scene) -> None:
    await scene.store.register(worker("old"))
    await scene.later(DAY + MINUTE)
    await scene.store.register(worker("new"))
    await scene.store.purge(scope=ALL, limit=100)
    assert [one.worker_id for one in await scene.store.workers(scope=ALL)] == ["new"]


@rule(7, 17)
async def test_a_run_that_no_live_worker_knows_says_so(scene: Scene) -> None:
    run = await scene.start(name="nobody_knows")
    await scene.store.register(worker())
    explanation = await scene.store.explain(run.run_id, scope=ALL)
    assert explanation.run.run_id == run.run_id
    assert any("nobody_knows" in reason for reason in explanation.reasons)


@rule(15)
async def test_a_wake_of_a_lonely_suspended_run_finds_it_free(scene: Scene) -> None:
    """A suspension is progress: the run that is woken is claimed as any other."""
    held = await scene.take()
    await lapse_and_sweep(scene, held.run.run_id, 2)
    (again,) = await scene.claim(alone=True)
    assert isinstance(again, Claimed)
    assert await scene.suspend(again) == "landed"
    await scene.send(held.run.run_id)
    assert (await scene.get(held.run.run_id)).blocked_on is None
    await scene.take_again(held.run.run_id)
