"""Retention (rules 60 to 62): landed runs go when they are due, with everything that belongs to them, and nothing else goes."""

from __future__ import annotations

import asyncio

import pytest

from durable.errors import NotFound
from durable.model import (
    ALL,
    Cancelled,
    Completed,
    Dependency,
    Failed,
    ForwardIncomplete,
    Outcome,
    RecordKind,
    Status,
    TimedOut,
)
from durable.settings import DAY, HOUR, MINUTE, SECOND

from .scenario import ACME, BETA, Scene, failure, new_run, rule


async def landed(scene: Scene, **changes: object) -> str:
    """A completed run."""
    held = await scene.take(**changes)
    await scene.complete(held)
    return held.run.run_id


async def purge(scene: Scene, limit: int = 100, **changes: object) -> int:
    """One pass of the purge."""
    return await scene.store.purge(**{"scope": ALL, "limit": limit, **changes})  # type: ignore[arg-type]


@rule(60)
@pytest.mark.parametrize(
    "outcome",
    [
        Completed(output="1"),
        Failed(failure=failure()),
        Cancelled(failure=failure()),
        TimedOut(failure=failure()),
        ForwardIncomplete(failure=failure()),
    ],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_a_terminal_run_is_purged_when_purge_at_has_come_and_not_before(scene: Scene, outcome: Outcome) -> None:
    held = await scene.take(keep=HOUR)
    await scene.settle(held, outcome)
    run = await scene.get(held.run.run_id)
    assert run.finished_at is not None
    assert run.purge_at == run.finished_at + HOUR
    await scene.later(HOUR - MINUTE)
    assert await purge(scene) == 0
    await scene.later(2 * MINUTE)
    assert await purge(scene) == 1
    assert await scene.gone(run.run_id)


@rule(60)
async def test_the_default_keep_is_the_stores_setting(scene: Scene) -> None:
    run = await scene.get(await landed(scene))
    assert run.finished_at is not None
    assert run.purge_at == run.finished_at + scene.store.settings.keep


@rule(60)
async def test_a_run_is_never_purged_by_its_age_but_by_its_landing(scene: Scene) -> None:
    held = await scene.take(keep=HOUR)
    await scene.later(100 * DAY)
    assert await purge(scene) == 0
    await scene.complete(held)
    assert await purge(scene) == 0
    await scene.later(2 * HOUR)
    assert await purge(scene) == 1


@rule(60)
@pytest.mark.parametrize("state", ["pending", "delayed", "running", "suspended", "retried"])
async def test_a_run_that_is_not_terminal_is_never_purged(scene: Scene, state: str) -> None:
    if state == "delayed":
        await scene.start(delay=1000 * DAY, keep=0)
    elif state == "pending":
        await scene.start(keep=0)
    else:
        held = await scene.take(keep=0)
        if state == "suspended":
            await scene.suspend(held)
        elif state == "retried":
            await scene.fail(held)
            await scene.store.retry(held.run.run_id, scope=ALL, attempts=1)
    await scene.later(500 * DAY)
    assert await purge(scene) == 0
    assert await purge(scene, older_than=0) == 0
    assert len(await scene.runs()) == 1


@rule(60)
async def test_the_oldest_go_first_and_a_batch_is_bounded(scene: Scene) -> None:
    runs = [(minutes, await landed(scene, keep=minutes * MINUTE)) for minutes in (3, 1, 2, 5, 4)]
    await scene.later(HOUR)
    for expected in ({3, 4, 5}, {5}, set[int]()):
        await purge(scene, limit=2)
        assert {minutes for minutes, run_id in runs if not await scene.gone(run_id)} == expected


@rule(60)
async def test_older_than_counts_from_the_landing_whatever_keep_says(scene: Scene) -> None:
    old = await landed(scene, keep=1000 * DAY)
    await scene.later(DAY)
    young = await landed(scene, keep=1000 * DAY)
    assert await purge(scene, older_than=2 * DAY) == 0
    assert await purge(scene, older_than=DAY // 2) == 1
    assert await scene.gone(old)
    assert not await scene.gone(young)


@rule(60)
async def test_everything_that_belongs_to_a_run_goes_with_it(scene: Scene) -> None:
    held = await scene.take(keep=SECOND, idempotency_key="i", coalesce_key="c")
    await scene.append(held, "a")
    await scene.append(held, "a@1", kind=RecordKind.ATTEMPT)
    await scene.send(held.run.run_id)
    await scene.complete(held)
    await scene.later(MINUTE)
    assert await purge(scene) == 1
    with pytest.raises(NotFound):
        await scene.history(held.run.run_id)
    with pytest.raises(NotFound):
        await scene.store.explain(held.run.run_id, scope=ALL)
    anew = await scene.submit(run_id=held.run.run_id, idempotency_key="i")
    assert anew.disposition == "created"
    assert list((await scene.take_again(anew.run.run_id)).history) == []


@rule(60)
async def test_keys_go_with_their_run_and_never_before(scene: Scene) -> None:
    run_id = await landed(scene, keep=HOUR, idempotency_key="i")
    await scene.later(HOUR - MINUTE)
    await purge(scene)
    assert (await scene.submit(idempotency_key="i")).run.run_id == run_id


@rule(61)
async def test_any_number_of_purgers_at_once_delete_each_run_once(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    for _ in range(20):
        held = await one.take(keep=SECOND)
        await one.append(held, "a")
        await one.complete(held)
    live = await one.take()
    await one.append(live, "a")
    await one.later(20 * SECOND)
    counts = await asyncio.gather(*(purge(scene, limit=7) for scene in (one, other) * 3))
    assert sum(counts) == 20
    assert [run.run_id for run in await one.runs()] == [live.run.run_id]
    assert await one.steps(live.run.run_id) == ["a"]


@rule(61)
async def test_a_purge_and_a_retry_come_in_one_order(scenes: tuple[Scene, Scene]) -> None:
    """Either the run is gone whole, or it is pending again with its records."""
    one, other = scenes
    for _ in range(10):
        held = await one.take(keep=0)
        await one.append(held, "a")
        await one.fail(held)
        await one.later(SECOND)
        count, retried = await asyncio.gather(
            purge(other),
            one.store.retry(held.run.run_id, scope=ALL, attempts=1),
            return_exceptions=True,
        )
        if isinstance(retried, NotFound):
            assert count == 1
            assert await one.gone(held.run.run_id)
        else:
            assert not isinstance(retried, BaseException)
            assert count == 0
            assert [record.step_id for record in (await one.take_again(held.run.run_id)).history] == ["a"]


@rule(60)
async def test_nodes_of_a_live_graph_are_kept(scene: Scene) -> None:
    graph = await scene.take()
    first = new_run(**scene.child_of(graph, "first"), keep=0)
    second = new_run(**scene.child_of(graph, "second"), keep=0, depends_on=(Dependency(run_id=first.run_id),))
    await scene.store.enqueue([first, second])
    await scene.complete(await scene.take_again(first.run_id))
    await scene.later(DAY)
    assert await purge(scene) == 0
    assert (await scene.get(second.run_id)).status == Status.PENDING


@rule(60, 57)
async def test_a_bound_purge_deletes_its_tenants_runs_only(scene: Scene) -> None:
    mine = await landed(scene, tenant=ACME, keep=0)
    theirs = await landed(scene, tenant=BETA, keep=0)
    await scene.later(SECOND)
    assert await purge(scene, scope=ACME) == 1
    assert await scene.gone(mine)
    assert not await scene.gone(theirs)


@rule(61)
async def test_after_a_purge_the_store_is_sound(scene: Scene) -> None:
    family = await scene.with_children(3, parent={"keep": 0, "sequence_key": "s"}, keep=0)
    for child in family.children:
        await scene.complete(await scene.take_again(child))
    await scene.complete(family.parent)
    await scene.later(SECOND)
    while await purge(scene, limit=2):
        assert list(await scene.store.audit(scope=ALL)) == []
    assert await scene.runs() == []
