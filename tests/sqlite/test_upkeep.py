"""The chores where the conformance suite can not look: what a lost step would leave behind, and a settle that comes after the sweep."""

from __future__ import annotations

from typing import Any

import pytest

from durable.model import ALL, Failed, HandedBack, Outcome, Retry, Status
from durable.settings import DAY, MINUTE
from durable.testing.conformance.scenario import ACME, Scene, failure, new_run, schedule


async def test_the_net_wakes_a_parent_whose_children_can_not_end_often_enough_any_more(
    scene: Scene, bench: Any
) -> None:
    family = await scene.with_children(2)
    assert await scene.suspend(family.parent, wake_after=2) == "landed"
    await scene.complete(await scene.take_again(family.children[0]))
    assert await scene.mend() == 0
    await bench.sql("UPDATE durable_run SET wake_after = 2 WHERE status = 'suspended'")  # as if that end had been lost
    assert await scene.mend() == 1
    assert (await scene.get(family.parent.run.run_id)).status is Status.PENDING


@pytest.mark.parametrize("outcome", [HandedBack(), Retry(after=0, failure=failure())], ids=["handed back", "retry"])
async def test_a_settle_that_comes_after_the_sweep_does_not_take_the_pending_run_for_its_own_work(
    scene: Scene, outcome: Outcome
) -> None:
    held = await scene.take()
    await scene.lapse()
    await scene.sweep()
    assert await scene.settle(held, outcome) == "lost"


async def test_the_newest_record_tells_whether_the_lapsed_claim_got_on(scene: Scene) -> None:
    held = await scene.take(max_attempts=None)
    await scene.append(held, "a")
    await scene.append(held, "b")
    await scene.settle(held, Retry(after=0, failure=failure(positions=(0,))))
    again = await scene.take_again(held.run.run_id)
    await scene.append(again, "c")
    await scene.lapse()
    await scene.sweep()
    assert (await scene.get(held.run.run_id)).reclaims == 0
    await scene.take_again(held.run.run_id)
    await scene.lapse()
    await scene.sweep()
    assert (await scene.get(held.run.run_id)).reclaims == 1


async def test_a_run_that_lapsed_without_a_record_is_free_for_every_interpreter(scene: Scene, bench: Any) -> None:
    held = await scene.take()
    await scene.lapse()
    await scene.sweep()
    assert await bench.sql("SELECT replay_family FROM durable_run") == [(None,)]
    await scene.take_again(held.run.run_id, family="3.11")


async def test_a_purge_by_age_counts_from_the_landing_and_takes_the_oldest_first(scene: Scene) -> None:
    long_kept = await scene.take(keep=90 * DAY)
    await scene.complete(long_kept)
    await scene.later(MINUTE)
    short_kept = await scene.take(keep=DAY)
    await scene.complete(short_kept)
    await scene.later(3 * MINUTE)
    assert await scene.store.purge(scope=ALL, limit=1, older_than=MINUTE) == 1
    assert await scene.gone(long_kept.run.run_id)
    assert not await scene.gone(short_kept.run.run_id)


async def test_an_unbound_schedule_id_that_two_tenants_have_is_refused(scene: Scene) -> None:
    from durable.errors import Conflict

    await scene.store.put_schedule(schedule(), scope=None)
    await scene.store.put_schedule(schedule(), scope=ACME)
    with pytest.raises(Conflict):
        await scene.store.remove_schedule("nightly", scope=ALL)
    assert await scene.store.remove_schedule("nightly", scope=ACME)
    assert await scene.store.remove_schedule("nightly", scope=ALL)


async def test_a_run_that_never_ran_and_failed_at_its_claim_says_since_when_it_is_kept(scene: Scene) -> None:
    run = new_run(deadline_after=MINUTE)
    await scene.store.enqueue([run])
    await scene.later(2 * MINUTE)
    assert list(await scene.claim()) == []
    landed = await scene.get(run.run_id)
    assert landed.status is Status.TIMED_OUT
    assert landed.purge_at is not None


async def test_figures_count_failures_by_kind_and_leave_out_what_completed(scene: Scene) -> None:
    await scene.complete(await scene.take())
    await scene.fail(await scene.take(), kind="payload")
    assert await scene.settle(await scene.take(), Failed(failure=failure())) == "landed"
    (figures,) = await scene.store.stats(scope=ALL)
    assert figures.failed_by_kind == {"payload": 1, "exception": 1}
    assert (figures.ready, figures.running) == (0, 0)
