"""Exactly-once steps and the caller's transaction (rules 26, 41, 63): both writes or none, and nobody woken before the commit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from durable.errors import Conflict, DurableError, Misuse, NotFound
from durable.model import ALL, Cancelled, Claimed, NewRecord, NewSignal, RecordKind, Status
from durable.settings import SECOND

from .scenario import ACME, Scene, failure, new_run, rule

TIMEOUT = 5 * SECOND


def writing(scene: Scene, held: Claimed, text: str, step_id: str = "pay", **changes: Any) -> Any:
    """Work that writes one row of the application and returns its record."""

    async def work(native: Any) -> NewRecord:
        await scene.harness.write_row(native, text)
        return record

    values: dict[str, Any] = {
        "step_id": step_id,
        "kind": RecordKind.STEP,
        "position": 0,
        "seen": -1,
        "digest": "d",
        "result": f'{{"value":"{text}"}}',
    }
    record = NewRecord(**{**values, **changes})
    return work


@rule(26)
async def test_the_callers_rows_and_the_record_commit_together(shared_scene: Scene) -> None:
    scene = shared_scene
    held = await scene.take()
    answer = await scene.store.transaction(held.lease, writing(scene, held, "paid"), timeout=TIMEOUT)
    assert answer.state == "appended"
    assert await scene.harness.rows() == ["paid"]
    (record,) = await scene.history(held.run.run_id)
    assert (record.step_id, record.result, record.fence) == ("pay", '{"value":"paid"}', 1)
    assert answer.record == record


@rule(26)
async def test_work_that_raises_leaves_nothing_and_its_error_passes_through(shared_scene: Scene) -> None:
    scene = shared_scene
    held = await scene.take()

    class Sold(Exception):
        pass

    async def work(native: Any) -> NewRecord:
        await scene.harness.write_row(native, "paid")
        raise Sold("out")

    with pytest.raises(Sold, match="out"):
        await scene.store.transaction(held.lease, work, timeout=TIMEOUT)
    assert await scene.harness.rows() == []
    assert list(await scene.history(held.run.run_id)) == []
    answer = await scene.store.transaction(held.lease, writing(scene, held, "paid"), timeout=TIMEOUT)
    assert answer.state == "appended"


@rule(26)
async def test_a_record_that_is_there_leaves_the_callers_rows_undone_and_comes_back(shared_scene: Scene) -> None:
    scene = shared_scene
    held = await scene.take()
    first = await scene.store.transaction(held.lease, writing(scene, held, "first"), timeout=TIMEOUT)
    second = await scene.store.transaction(held.lease, writing(scene, held, "second"), timeout=TIMEOUT)
    assert second.state == "recorded"
    assert second.record == first.record
    assert await scene.harness.rows() == ["first"]


@rule(26)
async def test_a_stale_workers_rows_vanish_with_its_record(shared_scene: Scene) -> None:
    """The lease lapses and another worker claims the run while the work is under way; the fence is checked last."""
    scene = shared_scene
    held = await scene.take()
    await scene.lapse()
    await scene.sweep()
    new = await scene.take_again(held.run.run_id)
    late = await scene.store.transaction(held.lease, writing(scene, held, "stale"), timeout=TIMEOUT)
    assert (late.state, late.record) == ("lost", None)
    good = await scene.store.transaction(new.lease, writing(scene, new, "fresh"), timeout=TIMEOUT)
    assert good.state == "appended"
    assert await scene.harness.rows() == ["fresh"]


@rule(26)
async def test_work_over_its_timeout_leaves_nothing(shared_scene: Scene) -> None:
    scene = shared_scene
    held = await scene.take()

    async def work(native: Any) -> NewRecord:
        await scene.harness.write_row(native, "slow")
        await asyncio.sleep(60)
        raise AssertionError("it was not stopped")

    with pytest.raises(TimeoutError):
        await scene.store.transaction(held.lease, work, timeout=SECOND // 10)
    assert await scene.harness.rows() == []
    assert (await scene.append(held, "pay")).state == "appended"


@rule(26)
async def test_work_that_is_cancelled_leaves_nothing(shared_scene: Scene) -> None:
    scene = shared_scene
    held = await scene.take()
    begun = asyncio.Event()

    async def work(native: Any) -> NewRecord:
        await scene.harness.write_row(native, "cancelled")
        begun.set()
        await asyncio.sleep(60)
        raise AssertionError("it was not cancelled")

    call = asyncio.ensure_future(scene.store.transaction(held.lease, work, timeout=TIMEOUT))
    await asyncio.wait_for(begun.wait(), timeout=60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    answer = await scene.append(held, "pay")
    assert answer.state == "appended"
    assert await scene.harness.rows() == []


@rule(26)
@pytest.mark.parametrize("verb", ["commit", "rollback"])
async def test_commit_and_rollback_by_the_caller_are_refused(shared_scene: Scene, verb: str) -> None:
    scene = shared_scene
    held = await scene.take()

    async def work(native: Any) -> NewRecord:
        await scene.harness.write_row(native, "early")
        answer = getattr(native, verb)()
        if asyncio.iscoroutine(answer):
            await answer
        raise AssertionError("it was not refused")

    with pytest.raises(Misuse):
        await scene.store.transaction(held.lease, work, timeout=TIMEOUT)
    assert await scene.harness.rows() == []
    assert list(await scene.history(held.run.run_id)) == []


@rule(26)
async def test_transactions_at_once_each_count_once(shared_scene: Scene) -> None:
    scene = shared_scene
    held = [await scene.take() for _ in range(6)]
    answers = await asyncio.gather(
        *(
            scene.store.transaction(one.lease, writing(scene, one, f"row {number}"), timeout=60 * SECOND)
            for number, one in enumerate(held * 2)
        )
    )
    assert sorted(answer.state for answer in answers) == ["appended"] * 6 + ["recorded"] * 6
    assert len(await scene.harness.rows()) == 6


@rule(26, 43)
async def test_a_transaction_records_though_an_ask_came(shared_scene: Scene) -> None:
    """The ask is delivered at the frontier; what was under way is recorded first."""
    scene = shared_scene
    held = await scene.take()
    await scene.cancel(held.run.run_id)
    answer = await scene.store.transaction(held.lease, writing(scene, held, "paid"), timeout=TIMEOUT)
    assert answer.state == "appended"
    assert await scene.settle(held, Cancelled(failure=failure(kind="cancelled"))) == "landed"


# -- the caller's transaction -------------------------------------------------------------------------------------------


@rule(41)
async def test_in_the_callers_transaction_the_run_exists_if_that_commits(shared_scene: Scene) -> None:
    scene = shared_scene
    run = new_run(idempotency_key="i")
    async with scene.harness.caller_transaction() as caller:
        await scene.harness.write_row(caller.native, "order")
        (answer,) = await scene.store.enqueue([run], tx=caller.native)
        assert (answer.disposition, answer.run.run_id) == ("created", run.run_id)
        assert await scene.gone(run.run_id)
        await caller.commit()
    assert await scene.harness.rows() == ["order"]
    assert (await scene.get(run.run_id)).idempotency_key == "i"
    await scene.take_again(run.run_id)


@rule(41)
async def test_in_the_callers_transaction_nothing_exists_if_that_is_rolled_back(shared_scene: Scene) -> None:
    scene = shared_scene
    run = new_run(idempotency_key="i", coalesce_key="c")
    async with scene.harness.caller_transaction() as caller:
        await scene.harness.write_row(caller.native, "order")
        await scene.store.enqueue([run], tx=caller.native)
        await caller.rollback()
    assert await scene.harness.rows() == []
    assert await scene.gone(run.run_id)
    assert (await scene.submit(idempotency_key="i", coalesce_key="c")).disposition == "created"


@rule(41)
async def test_work_in_an_open_transaction_is_invisible_to_workers(shared_scene: Scene) -> None:
    scene = shared_scene
    run = new_run()
    async with scene.harness.caller_transaction() as caller:
        await scene.store.enqueue([run], tx=caller.native)
        assert await scene.runs() == []
        (pulse,) = await scene.store.pulse([run.run_id], scope=ALL)
        assert pulse is None
        await caller.commit()
    assert len(await scene.runs()) == 1


@rule(41)
async def test_a_join_in_the_callers_transaction_locks_the_run_it_joins_until_the_end(shared_scene: Scene) -> None:
    """A claim at the same time takes the run after the commit, with the joiner's data, or not at all before it."""
    scene = shared_scene
    first = await scene.start(coalesce_key="c", input="1")
    async with scene.harness.caller_transaction() as caller:
        (answer,) = await scene.store.enqueue(
            [new_run(coalesce_key="c", input="2", on_coalesce="replace")], tx=caller.native
        )
        assert (answer.disposition, answer.run.run_id) == ("coalesced", first.run_id)
        await scene.harness.write_row(caller.native, "data")
        claiming = asyncio.ensure_future(scene.claim())
        await asyncio.sleep(0.02)
        assert not claiming.done() or not claiming.result()
        await caller.commit()
    claimed = list(await claiming) or list(await scene.claim())
    assert [(one.run.run_id, one.run.input) for one in claimed] == [(first.run_id, "2")]
    assert await scene.harness.rows() == ["data"]


@rule(41)
async def test_a_run_that_was_claimed_before_the_join_gets_a_new_one_beside_it(shared_scene: Scene) -> None:
    scene = shared_scene
    held = await scene.take(coalesce_key="c")
    async with scene.harness.caller_transaction() as caller:
        (answer,) = await scene.store.enqueue([new_run(coalesce_key="c")], tx=caller.native)
        assert answer.disposition == "created"
        await caller.commit()
    assert answer.run.run_id != held.run.run_id
    await scene.take_again(answer.run.run_id)


@rule(41)
async def test_a_conflict_in_the_callers_transaction_leaves_that_usable(shared_scene: Scene) -> None:
    scene = shared_scene
    await scene.start(idempotency_key="i", name="other")
    async with scene.harness.caller_transaction() as caller:
        await scene.harness.write_row(caller.native, "before")
        with pytest.raises(Conflict):
            await scene.store.enqueue([new_run(), new_run(idempotency_key="i")], tx=caller.native)
        await scene.harness.write_row(caller.native, "after")
        await caller.commit()
    assert await scene.harness.rows() == ["before", "after"]
    assert len(await scene.runs()) == 1


@rule(32, 41)
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_signal_in_the_callers_transaction_is_sent_if_that_commits(shared_scene: Scene, end: str) -> None:
    scene = shared_scene
    held = await scene.take()
    assert await scene.suspend(held) == "landed"
    signal = NewSignal(run_id=held.run.run_id, name="go", payload="1", dedup_id="d")
    async with scene.harness.caller_transaction() as caller:
        await scene.store.send(signal, scope=ALL, tx=caller.native)
        assert (await scene.get(held.run.run_id)).status == Status.SUSPENDED
        await (caller.commit() if end == "commit" else caller.rollback())
    if end == "commit":
        again = await scene.take_again(held.run.run_id)
        assert [found.name for found in (await scene.inbox(again)).signals] == ["go"]
    else:
        assert (await scene.get(held.run.run_id)).status == Status.SUSPENDED


@rule(41, 57)
async def test_a_signal_in_the_callers_transaction_keeps_to_its_tenant(shared_scene: Scene) -> None:
    scene = shared_scene
    run = await scene.start(tenant=ACME)
    async with scene.harness.caller_transaction() as caller:
        with pytest.raises(NotFound):
            await scene.store.send(
                NewSignal(run_id=run.run_id, name="go", payload="1", dedup_id="d"), scope=None, tx=caller.native
            )
        await caller.rollback()
    assert (await scene.get(run.run_id)).wake_seq == 0


@rule(41)
async def test_what_is_no_transaction_is_refused(shared_scene: Scene) -> None:
    scene = shared_scene
    for nothing in (object(), "connection", 1):
        with pytest.raises(DurableError):
            await scene.store.enqueue([new_run()], tx=nothing)
    assert await scene.runs() == []
