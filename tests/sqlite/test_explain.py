"""Why a run stands where it stands: one code per reason, and the sentence names what an operator would look for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from durable.model import ALL, Dependency, HandedBack, QueueRecord, Retry, WorkerRecord
from durable.settings import HOUR, MINUTE
from durable.testing.conformance.scenario import ACME, BETA, FAMILY, OTHER_FAMILY, Scene, failure


async def register(scene: Scene, **changes: Any) -> None:
    """A live worker that knows `work` and `versioned`."""
    values: dict[str, Any] = {
        "worker_id": "w",
        "tenant": None,
        "bound": False,
        "host": "here",
        "pid": 1,
        "queues": {"default": 10},
        "functions": [("work", None), ("versioned", "2")],
        "family": FAMILY,
        "settings": "{}",
    }
    await scene.store.register(WorkerRecord(**{**values, **changes}))


async def told(scene: Scene, run_id: str) -> tuple[str, str]:
    """The code, and all sentences."""
    explanation = await scene.store.explain(run_id, scope=ALL)
    assert explanation.run.run_id == run_id
    return explanation.code, " ".join(explanation.reasons)


async def test_a_ready_run_is_ready(scene: Scene) -> None:
    await register(scene)
    run = await scene.start()
    assert (await told(scene, run.run_id))[0] == "ready"


@pytest.mark.parametrize(
    ("worker", "run", "code", "word"),
    [
        (None, {}, "no_worker", "No worker"),
        ({"queues": {"other": 1}}, {}, "no_worker", "--queue default"),
        ({"bound": True, "tenant": ACME}, {"tenant": BETA}, "no_worker", "No worker"),
        ({}, {"name": "nobody_knows"}, "unknown_function", "nobody_knows"),
        ({}, {"name": "versioned", "version": "1"}, "other_version", "'1'"),
    ],
    ids=["none", "queue", "tenant", "function", "version"],
)
async def test_a_run_that_no_live_worker_takes_says_why(
    scene: Scene, worker: dict[str, Any] | None, run: dict[str, Any], code: str, word: str
) -> None:
    if worker is not None:
        await register(scene, **worker)
    started = await scene.start(**run)
    found, text = await told(scene, started.run_id)
    assert (found, word in text) == (code, True), text


async def test_a_worker_that_was_not_seen_within_a_lease_is_not_live(scene: Scene) -> None:
    await register(scene)
    run = await scene.start()
    await scene.later(MINUTE)
    assert (await told(scene, run.run_id))[0] == "no_worker"


async def test_a_run_of_another_replay_family_says_so(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    await scene.settle(held, HandedBack())
    await register(scene, family=OTHER_FAMILY)
    code, text = await told(scene, held.run.run_id)
    assert code == "other_family"
    assert FAMILY in text
    assert OTHER_FAMILY in text


async def test_a_run_behind_a_full_scope_names_who_is_in_flight(scene: Scene) -> None:
    await register(scene)
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", max_concurrency=1))
    held = await scene.take()
    waiting = await scene.start()
    await scene.claim()
    code, text = await told(scene, waiting.run_id)
    assert code == "limit"
    assert held.run.run_id in text


async def test_a_run_of_a_paused_queue_says_so_whether_it_was_looked_at_or_not(scene: Scene) -> None:
    await register(scene)
    await scene.store.set_queue(QueueRecord(scope_name="queue:default", paused=True))
    run = await scene.start()
    assert (await told(scene, run.run_id))[0] == "paused"
    assert list(await scene.claim()) == []
    assert (await told(scene, run.run_id))[0] == "paused"


async def test_a_run_behind_its_sequence_names_the_one_in_front(scene: Scene) -> None:
    first = await scene.start(sequence_key="s")
    second = await scene.start(sequence_key="s")
    code, text = await told(scene, second.run_id)
    assert code == "sequence"
    assert first.run_id in text


async def test_delays_leases_waits_and_ends_are_told_with_their_instants(scene: Scene) -> None:
    await register(scene)
    delayed = await scene.start(delay=HOUR)
    assert (await told(scene, delayed.run_id))[0] == "delayed"
    held = await scene.take(max_attempts=3)
    code, text = await told(scene, held.run.run_id)
    assert code == "running"
    assert held.lease.mark in text
    await scene.lapse()
    assert (await told(scene, held.run.run_id))[0] == "lapsed"
    await scene.settle(held, Retry(after=HOUR, failure=failure("no route to host")))
    code, text = await told(scene, held.run.run_id)
    assert code == "delayed"
    assert "no route to host" in text
    waiting = await scene.take()
    await scene.suspend(waiting, waiting_for=json.dumps({"signals": ["paid"], "timers": 0}))
    code, text = await told(scene, waiting.run.run_id)
    assert code == "waiting"
    assert "paid" in text
    failed = await scene.take()
    await scene.fail(failed, message="kaboom")
    code, text = await told(scene, failed.run.run_id)
    assert code == "failed"
    assert "kaboom" in text


async def test_an_unreleased_node_names_what_is_before_it(scene: Scene) -> None:
    before = await scene.start()
    node = await scene.start(depends_on=(Dependency(run_id=before.run_id),))
    code, text = await told(scene, node.run_id)
    assert code == "upstream"
    assert before.run_id in text


async def test_a_run_that_lapsed_twice_says_that_it_is_taken_alone(scene: Scene) -> None:
    held = await scene.take()
    for _ in range(2):
        await scene.lapse()
        await scene.sweep()
        if (await scene.get(held.run.run_id)).blocked_on is None:
            await scene.take_again(held.run.run_id)
    code, text = await told(scene, held.run.run_id)
    assert code == "alone"
    assert "2 times" in text


async def test_a_mismatch_and_an_ask_are_told_beside_the_reason(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    mismatch = failure("the journal holds a, the code asks for b", kind="non_determinism")
    await scene.settle(held, HandedBack(after=MINUTE, failure=mismatch))
    await scene.cancel(held.run.run_id)
    _, text = await told(scene, held.run.run_id)
    assert "the code asks for b" in text
    assert "cancel" in text
