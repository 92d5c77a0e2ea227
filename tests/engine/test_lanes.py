"""Group commit by itself (semantics 9, 14, 20, 21): batches, order, splitting, patience."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from engine.conftest import until

from durable._engine.journal import BATCH_WEIGHT, Lane
from durable._engine.slots import Slots, Threads
from durable.errors import Conflict, StoreUnavailable, WorkerStopped
from durable.events import Events


class Store:
    """Takes batches, one by one when told to, and keeps what it took."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.bad: set[Any] = set()
        self.unavailable = 0
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, items: Sequence[Any]) -> Sequence[Any]:
        await self.open.wait()
        if self.unavailable:
            self.unavailable -= 1
            raise StoreUnavailable("no line")
        if any(item in self.bad for item in items):
            raise Conflict("bad")
        self.batches.append(list(items))
        return [f"answer {item}" for item in items]


def always() -> bool:
    return True


async def test_what_arrives_while_a_flush_is_under_way_goes_into_the_next() -> None:
    store = Store()
    lane: Lane[Any, Any] = Lane("test", store.send, events=Events(), flights=1)
    store.open.clear()
    first = lane.put("a", 1, alive=always)
    await asyncio.sleep(0.01)
    rest = [lane.put(str(n), n, alive=always) for n in range(2, 50)]
    store.open.set()
    assert await first == "answer 1"
    await asyncio.gather(*rest)
    assert store.batches == [[1], list(range(2, 50))]


async def test_two_flushes_may_be_in_flight_but_never_two_of_one_key() -> None:
    store = Store()
    lane: Lane[Any, Any] = Lane("test", store.send, events=Events(), flights=2)
    store.open.clear()
    waits = [lane.put("a", 1, alive=always)]
    await asyncio.sleep(0.01)
    waits += [lane.put("a", 2, alive=always), lane.put("b", 3, alive=always)]
    await asyncio.sleep(0.01)
    waits += [lane.put("a", 4, alive=always)]
    store.open.set()
    await asyncio.gather(*waits)
    assert store.batches == [[1], [3], [2, 4]]


async def test_a_bad_entry_is_split_off_until_it_is_alone_and_nothing_of_its_key_follows_it() -> None:
    store = Store()
    store.bad = {5}
    lane: Lane[Any, Any] = Lane("test", store.send, events=Events())
    waits = [lane.put("x" if n in (5, 9) else str(n), n, alive=always) for n in range(12)]
    answers = await asyncio.gather(*waits, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Conflict)] == [5, 9]
    assert sorted(item for batch in store.batches for item in batch) == [n for n in range(12) if n not in (5, 9)]
    with pytest.raises(Conflict):
        await lane.put("x", 20, alive=always)
    lane.forget("x")
    assert await lane.put("x", 21, alive=always) == "answer 21"


async def test_no_answer_is_repeated_as_long_as_an_entry_may_live() -> None:
    store = Store()
    store.unavailable = 3
    lane: Lane[Any, Any] = Lane("test", store.send, events=Events())
    dead = lane.put("dead", 1, alive=lambda: store.unavailable > 1)
    assert await lane.put("alive", 2, alive=always) == "answer 2"
    with pytest.raises(StoreUnavailable):
        await dead


async def test_a_heavy_batch_is_cut() -> None:
    store = Store()
    lane: Lane[Any, Any] = Lane("test", store.send, events=Events(), flights=1)
    await asyncio.gather(*(lane.put(str(n), n, alive=always, weight=BATCH_WEIGHT // 2) for n in range(5)))
    assert store.batches == [[0, 1], [2, 3], [4]]


async def test_a_closed_lane_refuses_and_gives_up_what_it_has() -> None:
    store = Store()
    store.open.clear()
    lane: Lane[Any, Any] = Lane("test", store.send, events=Events(), flights=1)
    waits = [lane.put(str(n), n, alive=always) for n in range(3)]
    await asyncio.sleep(0.01)
    waits.append(lane.put("later", 4, alive=always))
    await lane.close()
    waits.append(lane.put("too late", 5, alive=always))
    answers = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(answer, WorkerStopped) for answer in answers)


async def test_a_lane_closes_though_the_driver_swallows_a_cancel_and_the_store_is_away() -> None:
    sent: list[int] = []

    async def send(items: Sequence[Any]) -> Sequence[Any]:
        sent.append(len(items))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if len(sent) > 1:
                raise
        raise StoreUnavailable("no line")

    lane: Lane[Any, Any] = Lane("test", send, events=Events(), flights=1)
    answer = lane.put("a", 1, alive=always)
    await until(lambda: bool(sent), "the flush")
    async with asyncio.timeout(30):
        await lane.close()
    with pytest.raises(WorkerStopped):
        await answer


async def test_who_waits_for_a_slot_comes_before_new_claims() -> None:
    freed: list[int] = []
    slots = Slots(2, lambda: freed.append(1))
    slots.occupy()
    slots.occupy()
    first, second = asyncio.create_task(slots.take()), asyncio.create_task(slots.take())
    await asyncio.sleep(0)
    assert slots.free == -2
    second.cancel()
    await asyncio.sleep(0)
    slots.give()
    await first
    assert (slots.taken, slots.free, freed) == (2, 0, [])
    slots.give()
    assert (slots.taken, slots.free, freed) == (1, 1, [1])


async def test_a_slot_that_is_handed_to_a_cancelled_waiter_is_not_lost() -> None:
    slots = Slots(1, lambda: None)
    slots.occupy()
    waiter = asyncio.create_task(slots.take())
    await asyncio.sleep(0)
    slots.give()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    await until(lambda: slots.taken == 0)


async def test_a_waiter_that_was_cancelled_before_a_slot_became_free_is_passed_over() -> None:
    slots = Slots(1, lambda: None)
    slots.occupy()
    waiter = asyncio.create_task(slots.take())
    await asyncio.sleep(0)
    waiter.cancel()
    slots.give()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (slots.taken, slots.free) == (0, 1)


async def test_threads_deliver_results_and_errors_and_are_kept_for_the_next_call() -> None:
    threads = Threads(2, "test")
    assert await asyncio.gather(*(threads.run(lambda n=n: n) for n in range(20))) == list(range(20))  # type: ignore[misc]

    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await threads.run(fails)

    def stops() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError):
        await threads.run(stops)
    threads.close()
