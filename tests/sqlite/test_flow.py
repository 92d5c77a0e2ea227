"""Flow control where the conformance suite does not look: token arithmetic, scopes with strange keys, and the nets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from durable.errors import Conflict
from durable.model import ALL, QueueRecord
from durable.settings import MINUTE, SECOND
from durable.testing.conformance.scenario import ACME, Scene, new_run
from durable_sqlite import flow


async def test_a_limit_counts_what_was_in_flight_before_it_was_set(scene: Scene) -> None:
    await scene.store.enqueue([new_run(concurrency_key="k") for _ in range(4)])
    assert len(await scene.claim(2)) == 2
    for scope_name in ("queue:default", "function:work", "key:default"):
        await scene.store.set_queue(QueueRecord(scope_name=scope_name, max_concurrency=2))
        assert list(await scene.claim(2)) == []
        await scene.store.set_queue(QueueRecord(scope_name=scope_name))
    assert len(await scene.claim(2)) == 2


SILENT = ["of a version before", "of a limit that came late", "of a limit that came late beside others"]
"""Permits that do not say how many are out: whose they are."""


async def with_silent_permits(scene: Scene, whose: str, sql: Callable[[str], Awaitable[Any]]) -> None:
    """Under a limit of five: four runs in flight, of which three have a silent permit, and ready ones. No more than five are claimed, then
    and when those three have landed."""
    limit = QueueRecord(scope_name="queue:default", max_concurrency=5)
    await scene.store.enqueue([new_run() for _ in range(9)])
    if whose == "of a limit that came late":
        silent = await scene.claim(3)
        await scene.store.set_queue(limit)
        (first,) = await scene.claim(1)
    else:
        await scene.store.set_queue(limit)
        (first,) = await scene.claim(1)
        silent = await scene.claim(3)
        theirs = f"run_id <> '{first.run.run_id}'"
        if whose == "of a version before":
            await sql(f"UPDATE durable_permit SET number = NULL, in_flight = NULL WHERE {theirs}")
        else:
            await sql(f"DELETE FROM durable_permit WHERE {theirs}")
            await sql("UPDATE durable_permit SET number = 100")
            await scene.store.set_queue(limit)
    assert len(await scene.claim(3)) == 1
    for one in silent:
        await scene.complete(one)
    assert len(await scene.claim(5)) == 3
    assert list(await scene.store.audit(scope=ALL)) == []


@pytest.mark.parametrize("whose", SILENT)
async def test_permits_that_do_not_say_how_many_are_out_are_counted(scene: Scene, bench: Any, whose: str) -> None:
    """A worker of the version before may go on beside the others, and a limit may come while runs are in flight."""
    await with_silent_permits(scene, whose, bench.sql)


async def test_a_change_of_the_rate_hands_out_no_new_burst(scene: Scene) -> None:
    await scene.store.enqueue([new_run() for _ in range(9)])
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", rate_count=4, rate_period=MINUTE))
    assert len(await scene.claim(3)) == 3
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", rate_count=4, rate_period=2 * MINUTE))
    assert len(await scene.claim(3)) == 1


async def test_tokens_come_in_to_the_microsecond(scene: Scene) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", rate_count=7, rate_period=MINUTE, rate_burst=1))
    await scene.store.enqueue([new_run() for _ in range(9)])
    assert len(await scene.claim(9)) == 1
    for _ in range(7):
        assert list(await scene.claim(9)) == []
        promoted = await scene.promote()
        assert promoted.next_due is not None
        await scene.later(promoted.next_due - scene.store.clock() - 1)
        await scene.promote()
        assert list(await scene.claim(9)) == [], "a microsecond too early"
        await scene.later(1)
        await scene.promote()
        assert len(await scene.claim(9)) == 1


async def test_a_run_held_back_by_one_scope_leaves_its_place_in_another_to_the_next(scene: Scene) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", max_concurrency=1))
    held = await scene.take(name="other")
    known = [("work", None), ("other", None), ("third", None)]
    first = await scene.start(priority=9)
    second = await scene.start(name="third")
    assert list(await scene.claim(9, functions=known)) == []
    await scene.store.set_queue(QueueRecord(scope_name="function:work", max_concurrency=1))
    busy = await scene.start(queue="elsewhere")
    assert len(await scene.claim(9, queues={"elsewhere": 1})) == 1
    await scene.complete(held)
    (claimed,) = await scene.claim(9, functions=known) or await scene.claim(9, functions=known)
    assert claimed.run.run_id == second.run_id
    assert (await scene.get(first.run_id)).blocked_on == "function:work"
    assert busy.queue == "elsewhere"


@pytest.mark.parametrize("key", ["a/b", "a:b", "a@b", "/", ":", f"{ACME}:k"])
async def test_a_key_that_looks_like_a_scope_is_only_a_key(scene: Scene, key: str) -> None:
    await scene.store.set_queue(QueueRecord(scope_name="key:default", max_concurrency=1))
    await scene.store.set_queue(QueueRecord(scope_name="key:default", max_concurrency=1, tenant=ACME))
    await scene.store.enqueue(
        [new_run(concurrency_key=key, tenant=tenant) for tenant in (None, ACME) for _ in range(2)]
    )
    claimed = await scene.claim(9)
    assert {one.run.tenant for one in claimed} == {None, ACME}
    assert len(claimed) == 2
    for one in claimed:
        await scene.complete(one)
    await scene.mend()
    assert len(await scene.claim(9)) == 2


async def test_a_run_to_be_taken_alone_is_released_to_be_taken_alone(scene: Scene, bench: Any) -> None:
    run = await scene.start()
    await bench.sql("UPDATE durable_run SET attempts = 2, reclaims = 2, blocked_on = 'queue:default'")
    await scene.mend()
    assert (await scene.get(run.run_id)).blocked_on == flow.ALONE


async def test_the_net_releases_blocked_runs_whose_scope_is_free(scene: Scene, bench: Any) -> None:
    await scene.store.enqueue([new_run(), new_run(tenant=ACME), new_run(concurrency_key="k")])
    await bench.sql("UPDATE durable_run SET blocked_on = 'queue:default' WHERE tenant_id IS NULL")
    await bench.sql("UPDATE durable_run SET blocked_on = tenant_id || '/function:work' WHERE tenant_id IS NOT NULL")
    assert await scene.mend(scope=ACME) == 1
    assert await scene.mend() == 2
    assert len(await scene.claim(9)) == 3


async def test_the_net_releases_the_head_of_a_sequence_that_waits_for_nobody(scene: Scene, bench: Any) -> None:
    await scene.store.enqueue([new_run(sequence_key="s") for _ in range(3)])
    await bench.sql("UPDATE durable_run SET blocked_on = 'sequence'")
    assert await scene.mend() == 1
    assert len(await scene.claim(9)) == 1
    assert await scene.mend() == 0


async def test_a_cancel_of_a_waiting_run_passes_no_turn_on_while_a_retried_one_is_ahead(scene: Scene) -> None:
    first = await scene.take(sequence_key="s")
    second = await scene.start(sequence_key="s")
    third = await scene.start(sequence_key="s")
    await scene.fail(first)
    await scene.take_again(second.run_id)
    retried = await scene.store.retry(first.run.run_id, scope=ALL, attempts=1)
    assert retried.blocked_on == "sequence", "another one of its key is at work"
    assert await scene.cancel(third.run_id)
    assert (await scene.get(first.run.run_id)).blocked_on == "sequence"
    assert list(await scene.store.audit(scope=ALL)) == []


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
    ],
    ids=repr,
)
async def test_a_row_that_can_mean_nothing_is_refused_before_anything_is_written(
    scene: Scene, record: QueueRecord
) -> None:
    with pytest.raises(Conflict) as caught:
        await scene.store.set_queue(record)
    assert caught.value.hint
    assert list(await scene.store.queues(scope=ALL)) == []
