"""Retry and fork where the conformance suite does not look: what a removal says about the run's row, and nodes behind two failures."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import Conflict
from durable.model import ALL, Dependency, RecordKind, Retry, Status
from durable.testing.conformance.scenario import Scene, failure, new_run


async def test_positions_are_left_as_they_are_and_the_next_record_comes_behind_them(scene: Scene) -> None:
    held = await scene.take()
    for step_id in ("a", "b", "c"):
        await scene.append(held, step_id, seen=-1)
    await scene.settle(held, Retry(after=0, failure=failure(positions=(1,))))
    again = await scene.take_again(held.run.run_id)
    assert [(record.step_id, record.position) for record in again.history] == [("a", 0), ("c", 2)]
    await scene.append(again, "b")
    assert list(await scene.store.audit(scope=ALL)) == []


async def test_the_attempts_of_a_step_without_a_record_go_by_when_they_were_made(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "early@1", kind=RecordKind.ATTEMPT, seen=-1)
    await scene.append(held, "bad")
    await scene.append(held, "late@1", kind=RecordKind.ATTEMPT, seen=0)
    await scene.settle(held, Retry(after=0, failure=failure(positions=(0,))))
    assert await scene.steps(held.run.run_id) == ["early@1"]


async def test_a_pivot_that_is_taken_out_takes_its_spent_refusal_with_it(scene: Scene) -> None:
    held = await scene.take(max_attempts=3)
    await scene.append(held, "bad")
    await scene.append(held, "pivot", kind=RecordKind.PIVOT)
    assert await scene.cancel(held.run.run_id)
    await scene.settle(held, Retry(after=0, failure=failure(positions=(0,))))
    run = await scene.get(held.run.run_id)
    assert (run.cancel_requested_at, run.cancel_refused_at) == (None, None)
    again = await scene.take_again(held.run.run_id)
    await scene.complete(again)


async def test_a_pivot_that_stays_keeps_its_stamp_through_an_operators_retry(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "pivot", kind=RecordKind.PIVOT)
    await scene.append(held, "bad")
    await scene.fail(held, positions=(1,))
    run = await scene.store.retry(held.run.run_id, scope=ALL, attempts=1)
    assert run.cancel_refused_at is not None
    assert await scene.steps(held.run.run_id) == ["pivot"]


async def test_a_retry_that_leaves_no_record_starts_its_time_anew(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "bad")
    await scene.later(1_000_000)
    await scene.settle(held, Retry(after=0, failure=failure(positions=(0,))))
    again = await scene.take_again(held.run.run_id)
    assert again.run.started_at == scene.store.clock()


async def test_a_child_that_was_purged_is_started_anew_when_its_end_is_taken_out(scene: Scene, bench: Any) -> None:
    family = await scene.with_children(1)
    await scene.append(family.parent, "bad")
    await scene.append(family.parent, "child#1:end", kind=RecordKind.CHILD, seen=1)
    await scene.fail(family.parent, positions=(1,))
    await bench.sql("DELETE FROM durable_run WHERE parent_run_id IS NOT NULL")
    await scene.store.retry(family.parent.run.run_id, scope=ALL, attempts=1)
    assert await scene.steps(family.parent.run.run_id) == []


async def test_a_node_behind_another_node_that_stays_failed_does_not_come_back(scene: Scene) -> None:
    left, right = await scene.start(name="left"), await scene.start(name="right")
    behind_both = new_run(name="both", depends_on=(Dependency(run_id=left.run_id), Dependency(run_id=right.run_id)))
    behind_left = new_run(name="one", depends_on=(Dependency(run_id=left.run_id),))
    await scene.store.enqueue([behind_both, behind_left])
    for run in (left, right):
        await scene.fail(await scene.take_again(run.run_id))
    await scene.store.retry(left.run_id, scope=ALL, attempts=1)
    assert (await scene.get(behind_left.run_id)).status is Status.SUSPENDED
    assert (await scene.get(behind_both.run_id)).status is Status.CANCELLED
    await scene.store.retry(right.run_id, scope=ALL, attempts=1)
    both = await scene.get(behind_both.run_id)
    assert (both.status, both.wake_after) == (Status.SUSPENDED, 2)
    assert list(await scene.store.audit(scope=ALL)) == []


async def test_a_run_that_never_ran_comes_back_without_its_coalesce_key(scene: Scene) -> None:
    run = await scene.start(coalesce_key="c")
    assert await scene.cancel(run.run_id)
    other = await scene.submit(coalesce_key="c")
    assert other.disposition == "created"
    again = await scene.store.retry(run.run_id, scope=ALL, attempts=0)
    assert (again.status, again.coalesce_key) == (Status.PENDING, None)


async def test_a_fork_under_an_id_that_is_taken_is_refused(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    taken = await scene.start()
    with pytest.raises(Conflict):
        await scene.store.fork(held.run.run_id, scope=ALL, new_run_id=taken.run_id, from_step=0)


async def test_signals_of_a_fork_count_on_from_those_that_its_records_took(scene: Scene) -> None:
    held = await scene.take()
    seq = await scene.send(held.run.run_id)
    await scene.append(held, "wait", kind=RecordKind.SIGNAL, signal_seq=seq)
    await scene.append(held, "after")
    fork = await scene.store.fork(held.run.run_id, scope=ALL, new_run_id="fork", from_step="after")
    assert await scene.send("fork") == seq + 1
    again = await scene.take_again(fork.run_id)
    assert [signal.seq for signal in (await scene.inbox(again)).signals] == [seq + 1]
