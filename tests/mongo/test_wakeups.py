"""Wake-ups (rule 67): what this process commits, and what others commit, by change streams; polling is the truth."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from mongo.conftest import Open, until
from servers.mongo_room import Room

from durable.model import Completed, HandedBack
from durable.settings import SECOND
from durable.testing.conformance.scenario import Scene, new_run
from durable_mongo import Store
from durable_mongo.wakeups import Wakeups

LONG = 3_600 * SECOND
GENEROUS = 90


async def waiter(store: Store, *topics: str) -> asyncio.Task[None]:
    """A task that waits, and has begun to; news of before are taken."""
    first = asyncio.create_task(store.wait(topics, LONG // 3_600 // 10))
    await first
    task = asyncio.create_task(store.wait(topics, LONG))
    await asyncio.sleep(0.05)
    return task


async def listening(store: Store, *topics: str) -> None:
    """The stream of these topics is open."""
    await store.wait(topics, 1)
    await until(lambda: all(one.opened for one in store._database.wakeups._streams.values()), "the change stream")


async def test_a_submit_of_this_process_wakes_who_waits_for_its_queue(store: Store) -> None:
    task = await waiter(store, "queue:default", "queue:other")
    await store.enqueue([new_run()])
    async with asyncio.timeout(GENEROUS):
        await task


async def test_an_announcement_between_the_look_and_the_wait_is_not_missed(scene: Scene, store: Store) -> None:
    held = await scene.take()
    await scene.settle(held, Completed(output="1"))
    async with asyncio.timeout(GENEROUS):
        await store.wait([f"run:{held.run.run_id}"], LONG)


@pytest.mark.parametrize("news", ["submit", "hand-back", "batch"])
async def test_what_another_process_makes_claimable_wakes_who_waits_for_its_queue(opened: Open, news: str) -> None:
    one, other = await opened(), await opened()
    scene = Scene(other, None)  # type: ignore[arg-type]
    held = await scene.take() if news == "hand-back" else None
    await listening(one, "queue:default")
    task = await waiter(one, "queue:default")
    if held is not None:
        await scene.settle(held, HandedBack())
    else:
        await other.enqueue([new_run() for _ in range(1 if news == "submit" else 20)])
    async with asyncio.timeout(GENEROUS):
        await task


@pytest.mark.parametrize("news", ["end", "signal", "cancel", "progress"])
async def test_what_another_process_does_to_a_run_wakes_who_waits_for_it(opened: Open, news: str) -> None:
    one, other = await opened(), await opened()
    scene = Scene(other, None)  # type: ignore[arg-type]
    held = await scene.take()
    topic = f"run:{held.run.run_id}"
    await listening(one, topic)
    task = await waiter(one, topic)
    acts: dict[str, Any] = {
        "end": lambda: scene.settle(held, Completed(output="1")),
        "signal": lambda: scene.send(held.run.run_id),
        "cancel": lambda: scene.cancel(held.run.run_id),
        "progress": lambda: scene.append(held, "a", progress='"half"'),
    }
    await acts[news]()
    async with asyncio.timeout(GENEROUS):
        await task


async def test_a_stream_that_ends_is_opened_again_where_it_ended(opened: Open, room: Room) -> None:
    one, other = await opened(), await opened()
    await listening(one, "queue:default")
    (stream,) = one._database.wakeups._streams.values()
    admin = room.db.client.admin
    fail = {"failCommands": ["getMore"], "errorCode": 10107, "closeConnection": False}
    admin.command("configureFailPoint", "failCommand", mode={"times": 2}, data=fail)
    for number in range(3):
        task = await waiter(one, "queue:default")
        await other.enqueue([new_run()])
        async with asyncio.timeout(GENEROUS):
            await task
        assert not stream._task.done(), number  # type: ignore[union-attr]
    admin.command("configureFailPoint", "failCommand", mode="off")


async def test_a_stream_is_stopped_though_the_driver_swallows_a_cancel() -> None:
    """`asyncio.wait_for` of Python 3.11 returns what came in the moment of the cancel, and forgets the cancel."""
    swallowed = asyncio.Event()

    class Stream:
        alive, resume_token = True, None

        async def try_next(self) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if swallowed.is_set():
                    raise
                swallowed.set()

        async def close(self) -> None:
            pass

    class Collection:
        def watch(self, *_: Any, **__: Any) -> Stream:
            return Stream()

    async def collection() -> Collection:
        return Collection()

    wakeups = Wakeups(collection)
    await wakeups.wait(["queue:default"], 0.01)
    await until(lambda: all(one.opened for one in wakeups._streams.values()), "the change stream")
    async with asyncio.timeout(30):
        await wakeups.close()
    assert swallowed.is_set()


async def test_without_streams_waiting_ends_with_its_time(opened: Open) -> None:
    one, other = await opened("changes=off"), await opened()
    assert not one.capabilities.push
    await other.enqueue([new_run()])
    await one.wait(["queue:default"], SECOND // 20)
    assert one._database.wakeups._streams == {}


async def test_each_event_loop_has_a_client_of_its_own_that_ends_with_it(store: Store) -> None:
    """The engine renews leases from a thread with a loop of its own (13)."""
    (mine,) = store._database._homes.values()

    def elsewhere() -> None:
        async def work() -> None:
            await store.enqueue([new_run()])
            assert len(store._database._homes) == 2
            theirs = next(home for home in store._database._homes.values() if home is not mine)
            closing.append(theirs)

        asyncio.run(work())

    closing: list[Any] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert closing[0].client._closed
    await store.enqueue([new_run()])
