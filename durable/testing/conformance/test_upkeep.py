"""The chores and the views (rules 11, 17, 69, 74): stats, explain, audit, the schema, wake-ups and closing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from durable.errors import NotFound, StoreUnavailable
from durable.model import ALL, HandedBack, QueueRecord, WorkerRecord
from durable.settings import HOUR, MINUTE, SECOND

from .scenario import ACME, BETA, FAMILY, OTHER_FAMILY, Scene, failure, new_run, rule


async def register(scene: Scene, **changes: Any) -> None:
    """A live worker that knows the function `work`."""
    values: dict[str, Any] = {
        "worker_id": "w1",
        "tenant": None,
        "bound": False,
        "host": "here",
        "pid": 1,
        "queues": {"default": 10},
        "functions": [("work", None)],
        "family": FAMILY,
        "settings": "{}",
    }
    await scene.store.register(WorkerRecord(**{**values, **changes}))


@rule(74)
async def test_stats_count_what_each_queue_holds(scene: Scene) -> None:
    await scene.store.enqueue([new_run(), new_run(), new_run(delay=HOUR), new_run(queue="other")])
    await scene.start(sequence_key="s", queue="sequences")
    await scene.start(sequence_key="s", queue="sequences")
    held = await scene.take(queue="busy")
    suspended = await scene.take(queue="busy")
    await scene.suspend(suspended)
    failed = await scene.take(queue="busy")
    await scene.fail(failed, kind="misuse")
    stats = {row.queue: row for row in await scene.store.stats(scope=ALL)}
    assert (stats["default"].ready, stats["default"].delayed) == (2, 1)
    assert stats["other"].ready == 1
    assert (stats["sequences"].ready, stats["sequences"].blocked) == (1, 1)
    assert (stats["busy"].running, stats["busy"].suspended, stats["busy"].ready) == (1, 1, 0)
    assert dict(stats["busy"].failed_by_kind) == {"misuse": 1}
    assert stats["default"].oldest_ready_at is not None
    assert stats["busy"].oldest_ready_at is None
    assert held.run.queue == "busy"


@rule(74)
async def test_stats_say_which_queues_are_paused(scene: Scene) -> None:
    await scene.store.enqueue([new_run(queue="a"), new_run(queue="b")])
    await scene.store.set_queue(QueueRecord(scope_name="queue:a", paused=True))
    assert {row.queue: row.paused for row in await scene.store.stats(scope=ALL)} == {"a": True, "b": False}


@rule(57)
async def test_stats_see_their_scope_only(scene: Scene) -> None:
    await scene.store.enqueue([new_run(tenant=tenant) for tenant in (ACME, ACME, BETA, None)])
    for scope, expected in ((ACME, 2), (BETA, 1), (None, 1), (ALL, 4)):
        (row,) = await scene.store.stats(scope=scope)
        assert row.ready == expected


async def ready(scene: Scene) -> str:
    return (await scene.start()).run_id


async def unknown(scene: Scene) -> str:
    return (await scene.start(name="nobody_knows")).run_id


async def other_version(scene: Scene) -> str:
    return (await scene.start(version="7")).run_id


async def delayed(scene: Scene) -> str:
    return (await scene.start(delay=HOUR)).run_id


async def paused(scene: Scene) -> str:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", paused=True))
    return (await scene.start()).run_id


async def limited(scene: Scene) -> str:
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", max_concurrency=1))
    await scene.take()
    run = await scene.start()
    await scene.claim()
    return run.run_id


async def sequenced(scene: Scene) -> str:
    await scene.start(sequence_key="s")
    return (await scene.start(sequence_key="s")).run_id


async def running(scene: Scene) -> str:
    return (await scene.take(queue="busy")).run.run_id


async def suspended(scene: Scene) -> str:
    held = await scene.take(queue="busy")
    await scene.suspend(held)
    return held.run.run_id


async def mismatched(scene: Scene) -> str:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.settle(held, HandedBack(after=HOUR, failure=failure("asked for b", kind="non_determinism")))
    return held.run.run_id


async def other_family(scene: Scene) -> str:
    run = await scene.start()
    held = await scene.take_again(run.run_id, family=OTHER_FAMILY)
    await scene.append(held, "a")
    await scene.hand_back(held)
    return run.run_id


async def lonely(scene: Scene) -> str:
    held = await scene.take()
    for _ in range(2):
        if (await scene.get(held.run.run_id)).status == "pending":
            await scene.claim()
        await scene.lapse()
        await scene.sweep()
    await register(scene)
    return held.run.run_id


async def failed(scene: Scene) -> str:
    held = await scene.take(queue="busy")
    await scene.fail(held)
    return held.run.run_id


STATES = [
    ready,
    unknown,
    other_version,
    delayed,
    paused,
    limited,
    sequenced,
    running,
    suspended,
    mismatched,
    other_family,
    lonely,
    failed,
]


@rule(7, 74)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_no_run_is_without_a_reason_for_where_it_stands(scene: Scene, state: Any) -> None:
    await register(scene)
    run_id = await state(scene)
    explanation = await scene.store.explain(run_id, scope=ALL)
    assert explanation.run == await scene.get(run_id)
    assert explanation.code
    assert explanation.reasons
    assert all(reason.strip() for reason in explanation.reasons)


@rule(7)
async def test_different_states_have_different_codes(scene: Scene) -> None:
    await register(scene)
    codes: dict[str, str] = {}
    for state in (ready, unknown, delayed, sequenced, running, suspended, failed):
        codes[state.__name__] = (await scene.store.explain(await state(scene), scope=ALL)).code
    assert len(set(codes.values())) == len(codes), codes


@rule(57)
async def test_an_unknown_or_foreign_run_is_not_explained(scene: Scene) -> None:
    run = await scene.start(tenant=ACME)
    for run_id, scope in (("unknown", ALL), (run.run_id, BETA), (run.run_id, None)):
        with pytest.raises(NotFound):
            await scene.store.explain(run_id, scope=scope)


@rule(11)
async def test_every_chore_is_bounded(scene: Scene) -> None:
    await scene.store.enqueue([new_run(delay=SECOND) for _ in range(5)])
    held = [await scene.take(queue="q") for _ in range(5)]
    await scene.lapse()
    assert (await scene.promote(limit=2)).count == 2
    assert len((await scene.sweep(limit=2)).returned) == 2
    assert len(held) == 5


@rule(11)
async def test_every_chore_does_nothing_where_there_is_nothing_to_do(scene: Scene) -> None:
    await scene.start()
    await scene.take(queue="q")
    before = await scene.everything()
    assert (await scene.promote()).count == 0
    swept = await scene.sweep()
    assert (list(swept.returned), list(swept.failed), swept.alone) == ([], [], frozenset())
    assert await scene.mend() == 0
    assert await scene.store.purge(scope=ALL, limit=10) == 0
    assert await scene.everything() == before


@rule(15)
async def test_a_sweep_names_the_queues_in_which_a_run_waits_to_be_taken_alone(scene: Scene) -> None:
    run_id = await lonely(scene)
    assert (await scene.get(run_id)).blocked_on == "alone"
    assert (await scene.sweep()).alone == frozenset({"default"})


@rule(69)
async def test_migrate_is_idempotent(scene: Scene) -> None:
    run = await scene.start()
    first = await scene.store.migrate()
    second = await scene.store.migrate()
    assert first == second == await scene.store.schema_status()
    assert (first.found, list(first.missing)) == (first.wanted, [])
    assert await scene.get(run.run_id) == run


@rule(69)
async def test_migrate_is_safe_when_started_many_times_at_once(scenes: tuple[Scene, Scene]) -> None:
    answers = await asyncio.gather(*(scene.store.migrate() for scene in scenes * 4))
    assert {answer.found for answer in answers} == {answers[0].wanted}


@rule(69)
async def test_the_checks_of_a_sound_store_refuse_nothing(scene: Scene) -> None:
    checks = await scene.store.check()
    assert checks
    assert [check for check in checks if check.level == "refuse"] == []


@rule(67)
async def test_waiting_returns_when_a_topic_is_announced(scene: Scene) -> None:
    waiting = asyncio.create_task(scene.store.wait(["queue:default"], HOUR))
    await asyncio.sleep(0)
    while not waiting.done():
        await scene.store.notify(["queue:default"])
        await asyncio.sleep(0.005)
    await waiting


@rule(67)
async def test_waiting_returns_when_a_run_is_submitted_to_the_queue(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    waiting = asyncio.create_task(one.store.wait(["queue:default"], HOUR))
    while not waiting.done():
        await other.start()
        await other.store.notify(["queue:default"])
        await asyncio.wait([waiting], timeout=0.05)
    await waiting


@rule(67)
async def test_waiting_ends_after_its_timeout(scene: Scene) -> None:
    await asyncio.wait_for(scene.store.wait(["run:nothing"], SECOND // 50), timeout=60)


@rule(69)
async def test_a_closed_store_says_so(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    run = await one.start()
    await other.store.close()
    await other.store.close()
    with pytest.raises(StoreUnavailable):
        await other.start()
    with pytest.raises(StoreUnavailable):
        await other.get(run.run_id)
    assert await one.get(run.run_id) == run


@rule(63)
async def test_many_calls_at_once_are_each_answered(scene: Scene) -> None:
    """Engine transactions are short and separate: one that fails does not touch those beside it."""
    await scene.start(idempotency_key="taken", name="other")
    calls = [
        scene.submit(idempotency_key="taken") if number % 5 == 0 else scene.submit(input=str(number))
        for number in range(60)
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, BaseException) for answer in answers] == [number % 5 == 0 for number in range(60)]
    assert len(await scene.runs()) == 1 + 48


@rule(63)
async def test_the_clock_of_the_store_moves_on_with_time(scene: Scene) -> None:
    before = scene.store.clock()
    await scene.later(MINUTE)
    moved = scene.store.clock()
    run = await scene.start()
    assert moved >= before
    assert scene.since(moved, run.created_at)
