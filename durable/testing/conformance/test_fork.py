"""Forks (rule 51): a new run that begins with the records of an old one up to a chosen step."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import Conflict, NotFound
from durable.model import ALL, Claimed, RecordKind, RunRecord, Status, new_run_id
from durable.settings import HOUR

from .scenario import ACME, BETA, Scene, rule


async def source(scene: Scene, **changes: Any) -> Claimed:
    """A run that holds the records a, b and c."""
    held = await scene.take(**changes)
    for step_id in ("a", "b", "c"):
        await scene.append(held, step_id, result=f'{{"value":"{step_id}"}}')
    return held


async def fork(scene: Scene, run_id: str, from_step: int | str, **changes: Any) -> RunRecord:
    """Fork a run."""
    values: dict[str, Any] = {"scope": ALL, "new_run_id": new_run_id(), "from_step": from_step}
    return await scene.store.fork(run_id, **{**values, **changes})


@rule(51)
@pytest.mark.parametrize(("from_step", "copied"), [(0, ""), (1, "a"), (2, "ab"), ("a", ""), ("b", "a"), ("c", "ab")])
async def test_a_fork_copies_the_records_before_the_chosen_step(
    scene: Scene, from_step: int | str, copied: str
) -> None:
    held = await source(scene)
    await scene.complete(held)
    run = await fork(scene, held.run.run_id, from_step)
    assert "".join(await scene.steps(run.run_id)) == copied
    old = {record.step_id: record for record in await scene.history(held.run.run_id)}
    for record in await scene.history(run.run_id):
        assert (record.result, record.digest, record.kind) == (
            old[record.step_id].result,
            old[record.step_id].digest,
            old[record.step_id].kind,
        )
        assert (record.position, record.at) == (old[record.step_id].position, old[record.step_id].at)


@rule(51)
async def test_a_fork_is_inserted_pending_with_attempts_1_so_that_its_claim_reads_the_journal(scene: Scene) -> None:
    held = await source(scene)
    await scene.fail(held)
    run = await fork(scene, held.run.run_id, "c")
    assert (run.status, run.attempts, run.failures, run.reclaims) == (Status.PENDING, 1, 0, 0)
    claimed = await scene.take_again(run.run_id)
    assert claimed.lease.attempts == 2
    assert [record.step_id for record in claimed.history] == ["a", "b"]


@rule(51)
async def test_a_fork_has_fresh_keys_the_same_seed_and_says_where_it_comes_from(scene: Scene) -> None:
    held = await source(
        scene, idempotency_key="i", coalesce_key="c", seed=b"fedcba9876543210", input='{"x":1}', tags={"a": "b"}
    )
    await scene.complete(held)
    run = await fork(scene, held.run.run_id, 1)
    assert (run.forked_from, run.seed, run.input, run.name) == (held.run.run_id, b"fedcba9876543210", '{"x":1}', "work")
    assert (run.idempotency_key, run.coalesce_key, run.parent_run_id, run.parent_step_id) == (None,) * 4
    assert (run.output, run.error, run.finished_at) == (None, None, None)
    assert (await scene.submit(idempotency_key="i")).run.run_id == held.run.run_id


@rule(51)
async def test_a_fork_leaves_its_source_as_it_is(scene: Scene) -> None:
    held = await source(scene)
    await scene.fail(held)
    before = await scene.get(held.run.run_id), await scene.history(held.run.run_id)
    run = await fork(scene, held.run.run_id, "b")
    await scene.append(await scene.take_again(run.run_id), "b", result='{"value":"other"}')
    assert (await scene.get(held.run.run_id), await scene.history(held.run.run_id)) == before


@rule(51)
async def test_a_run_may_be_forked_while_it_runs(scene: Scene) -> None:
    held = await source(scene)
    run = await fork(scene, held.run.run_id, "c")
    await scene.complete(held)
    await scene.complete(await scene.take_again(run.run_id))


@rule(51)
async def test_a_repeated_fork_with_the_same_id_returns_that_run(scene: Scene) -> None:
    held = await source(scene)
    await scene.complete(held)
    run = await fork(scene, held.run.run_id, "b")
    before = await scene.everything()
    assert await fork(scene, held.run.run_id, "b", new_run_id=run.run_id) == run
    assert await scene.everything() == before


@rule(51)
async def test_a_step_id_that_the_journal_lacks_is_a_conflict(scene: Scene) -> None:
    held = await source(scene)
    await scene.complete(held)
    before = await scene.everything()
    with pytest.raises(Conflict):
        await fork(scene, held.run.run_id, "nothing")
    assert await scene.everything() == before


@rule(51, 57)
async def test_an_unknown_or_foreign_run_is_not_forked(scene: Scene) -> None:
    held = await source(scene, tenant=ACME)
    await scene.complete(held)
    for run_id, scope in (("unknown", ALL), (held.run.run_id, BETA), (held.run.run_id, None)):
        with pytest.raises(NotFound):
            await fork(scene, run_id, 0, scope=scope)
    assert (await fork(scene, held.run.run_id, 0, scope=ACME)).tenant == ACME


@rule(51)
@pytest.mark.parametrize(
    ("from_step", "kept"), [("after", ["child#1", "child#1:end"]), ("child#1:end", []), ("child#1", [])]
)
async def test_a_copied_start_of_a_child_whose_end_lies_after_the_cut_is_dropped(
    scene: Scene, from_step: str, kept: list[str]
) -> None:
    family = await scene.with_children(1)
    held = family.parent
    await scene.complete(await scene.take_again(family.children[0]))
    await scene.append(held, "child#1:end", kind=RecordKind.CHILD)
    await scene.append(held, "after")
    await scene.complete(held)
    run = await fork(scene, held.run.run_id, from_step)
    assert await scene.steps(run.run_id) == kept
    assert list(await scene.store.children(run.run_id, scope=ALL)) == []


@rule(51)
async def test_a_copied_start_of_a_child_that_never_ended_is_dropped(scene: Scene) -> None:
    family = await scene.with_children(1)
    await scene.append(family.parent, "after", seen=-1)
    await scene.append(family.parent, "last", seen=-1)
    run = await fork(scene, family.parent.run.run_id, "last")
    assert await scene.steps(run.run_id) == ["after"]


@rule(51)
async def test_what_was_made_after_a_dropped_start_was_seen_is_dropped_with_it(scene: Scene) -> None:
    """The body comes to such a record only behind the child that it has yet to start again."""
    family = await scene.with_children(1)
    await scene.append(family.parent, "beside", seen=-1)
    await scene.append(family.parent, "behind", seen=0)
    await scene.append(family.parent, "last", seen=-1)
    run = await fork(scene, family.parent.run.run_id, "last")
    assert await scene.steps(run.run_id) == ["beside"]


@rule(51)
async def test_a_fork_is_tried_in_its_own_time(scene: Scene) -> None:
    """Neither the instant nor the deadline of the source is past when the fork begins."""
    held = await source(scene, deadline_after=HOUR)
    await scene.complete(held)
    await scene.later(2 * HOUR)
    run = await fork(scene, held.run.run_id, "b")
    assert run.deadline_at is None or run.deadline_at > scene.store.clock()
    await scene.take_again(run.run_id)


@rule(51)
async def test_a_fork_of_a_fork_is_a_fork(scene: Scene) -> None:
    held = await source(scene)
    await scene.complete(held)
    first = await fork(scene, held.run.run_id, "c")
    second = await fork(scene, first.run_id, "b")
    assert await scene.steps(second.run_id) == ["a"]
    assert second.forked_from == first.run_id
