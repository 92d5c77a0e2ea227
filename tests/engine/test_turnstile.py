"""The answers to one batch are followed through before those to the next are handed out: the order of writes, not how long they take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from engine.conftest import until

import durable
from durable import Registry
from durable._engine import worker
from durable._engine.journal import Lane
from durable._engine.turnstile import TURNS, Turnstile
from durable.events import Events

FOR_EVER = 1e9
declared = Registry("test_turnstile")
log: list[tuple[str, ...]] = []


async def noted(name: str) -> None:
    log.append(("step", name))


@durable.function(registry=declared)
async def twice(ctx: durable.Context, name: str) -> None:
    await ctx.step(noted, name)
    await ctx.step(noted, name)


async def test_runs_write_on_before_those_of_the_next_batch_go_on(
    client: durable.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = client.store
    append = store.append
    both = asyncio.Barrier(2)
    log.clear()

    async def first_two_together(records: Sequence[Any]) -> Any:
        log.append(("append",))
        first = log.count(("append",)) <= 2
        answers = await append(records)
        if first:
            await both.wait()
        return answers

    monkeypatch.setattr(store, "append", first_two_together)
    monkeypatch.setattr(worker, "Turnstile", lambda: Turnstile(longest=FOR_EVER))
    for name in "abcd":
        await client.start(twice, name)
    async with durable.Worker(client, concurrency=4, functions=declared):
        await until(lambda: len(log) == 12, "four runs of two steps")
    pairs = [sorted(log[place : place + 3]) for place in range(0, 12, 3)]
    assert all([kind for kind, *_ in pair] == ["append", "step", "step"] for pair in pairs), log
    assert sorted(pairs[2:]) == sorted(pairs[:2]), log


async def test_what_was_claimed_waits_for_its_turn(client: durable.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    came, may = asyncio.Event(), asyncio.Event()

    class Shut(Turnstile):
        async def passed(self) -> None:
            came.set()
            await may.wait()

    monkeypatch.setattr(worker, "Turnstile", Shut)
    log.clear()
    run = await client.start(twice, "a")
    async with durable.Worker(client, functions=declared):
        await came.wait()
        for _ in range(100):
            await asyncio.sleep(0)
        assert log == []
        may.set()
        await run.result(timeout="60s")


async def test_an_answer_is_told_though_the_lane_is_closed_before_its_turn() -> None:
    turnstile = Turnstile(longest=FOR_EVER)
    await turnstile.passed()
    asked = asyncio.Event()

    async def send(items: Sequence[str]) -> Sequence[str]:
        asked.set()
        return items

    lane: Lane[str, str] = Lane("test", send, events=Events(), turnstile=turnstile)
    written = lane.put("run", "written", alive=lambda: True)
    await asked.wait()
    await lane.close()
    assert await written == "written"


async def test_each_who_waits_passes_in_its_order_and_a_cancelled_one_holds_up_nobody() -> None:
    turnstile = Turnstile(longest=FOR_EVER)
    passed: list[str] = []

    async def pass_it(name: str) -> None:
        await turnstile.passed()
        passed.append(name)

    tasks = {name: asyncio.create_task(pass_it(name)) for name in "abcd"}
    await asyncio.sleep(0)
    assert passed == ["a"]
    tasks["b"].cancel()
    for _ in range(TURNS - 1):
        await asyncio.sleep(0)
    assert passed == ["a"], "the next one passed before its time"
    await asyncio.wait([tasks["d"]])
    assert passed == ["a", "c", "d"]
    assert tasks["b"].cancelled()


async def test_one_that_is_cancelled_when_it_may_pass_holds_up_nobody() -> None:
    turnstile = Turnstile(turns=0, longest=FOR_EVER)
    await turnstile.passed()
    waiting = asyncio.create_task(turnstile.passed())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.wait_for(turnstile.passed(), 10)
    await asyncio.wait_for(turnstile.passed(), 10)


async def test_turns_that_are_long_are_not_counted_to_the_end() -> None:
    turnstile = Turnstile(turns=10**9, longest=0)
    await turnstile.passed()
    await asyncio.wait_for(turnstile.passed(), 10)
