"""Wake-ups: an event in the process, `data_version` between processes. A hint, but not one that is lost without a reason (67)."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import threading
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from durable.model import ALL, Completed
from durable.settings import SECOND, Settings
from durable.testing.conformance.scenario import Scene, new_run
from durable_sqlite import Store, backend

LONG = 3600 * SECOND
"""Longer than any test runs: who returns was woken."""
GENEROUS = 60


@pytest.fixture(params=["file", "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    store = await backend.open(
        f"sqlite:///{tmp_path}/s.db" if request.param == "file" else "sqlite://", settings=Settings()
    )
    yield store
    await store.close()


async def waiter(store: Store, *topics: str) -> asyncio.Task[None]:
    """A task that waits, and has begun to."""
    task = asyncio.create_task(store.wait(topics, LONG))
    await asyncio.sleep(0.01)
    return task


async def test_a_submit_wakes_who_waits_for_its_queue(store: Store) -> None:
    task = await waiter(store, "queue:default", "queue:other")
    await store.enqueue([new_run()])
    async with asyncio.timeout(GENEROUS):
        await task


async def test_a_landing_wakes_who_waits_for_the_run(store: Store) -> None:
    scene = Scene(store, None)  # type: ignore[arg-type]  # no clock is moved here
    held = await scene.take()
    task = await waiter(store, f"run:{held.run.run_id}")
    await scene.settle(held, Completed(output="1"))
    async with asyncio.timeout(GENEROUS):
        await task


async def test_an_announcement_between_the_look_and_the_wait_is_not_missed(store: Store) -> None:
    scene = Scene(store, None)  # type: ignore[arg-type]  # no clock is moved here
    held = await scene.take()
    await scene.settle(held, Completed(output="1"))
    async with asyncio.timeout(GENEROUS):
        await store.wait([f"run:{held.run.run_id}"], LONG)


async def test_an_announcement_wakes_a_waiter_once_and_not_again_and_again(store: Store) -> None:
    await store.notify(["queue:default"])
    await store.wait(["queue:default"], LONG)
    task = await waiter(store, "queue:default")
    assert not task.done()
    await store.notify(["queue:default"])
    async with asyncio.timeout(GENEROUS):
        await task


async def test_news_of_other_topics_wakes_nobody(tmp_path: Path) -> None:
    store = await backend.open("sqlite://", settings=Settings())
    task = await waiter(store, "queue:mine")
    await store.enqueue([new_run(queue="other")])
    await asyncio.sleep(0.02)
    assert not task.done()
    task.cancel()
    await store.close()


async def test_a_wait_ends_by_itself_and_leaves_nothing_behind(store: Store) -> None:
    await store.wait(["queue:default"], 1)
    found = store._database.core.wakeups._waiters
    assert (found.waiting, found._waiters) == (0, {})


async def test_a_commit_of_another_process_wakes(tmp_path: Path) -> None:
    """Another connection is to SQLite what another process is: its commits change `data_version`, our own do not."""
    store = await backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings())
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    task = await waiter(store, "queue:default")
    await asyncio.sleep(0.1)
    assert not task.done()
    other.execute("INSERT INTO durable_key VALUES ('k', 'x')")
    async with asyncio.timeout(GENEROUS):
        await task
    other.close()
    await store.close()


async def test_own_commits_are_not_taken_for_those_of_another_process(tmp_path: Path) -> None:
    store = await backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings())
    task = await waiter(store, "queue:mine")
    for _ in range(5):
        await store.enqueue([new_run(queue="other")])
        await store.get(["x"], scope=ALL)
    await asyncio.sleep(0.1)
    assert not task.done()
    task.cancel()
    await store.close()


async def test_an_idle_store_that_nobody_waits_on_looks_at_nothing(tmp_path: Path) -> None:
    store = await backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings())
    assert store._database.core.wakeups.look_after() is None
    await store.close()


async def test_a_thread_s_loop_wakes_a_waiter_of_another_loop(store: Store) -> None:
    task = await waiter(store, "queue:default")
    thread = threading.Thread(target=lambda: asyncio.run(_enqueue(store)))
    thread.start()
    async with asyncio.timeout(GENEROUS):
        await task
    thread.join(GENEROUS)


async def _enqueue(store: Store) -> None:
    await store.enqueue([new_run()])


class Topic(str):
    """A topic that can be watched."""

    __slots__ = ("__weakref__",)


async def test_what_was_waited_for_once_is_not_kept(store: Store) -> None:
    kept: list[weakref.ref[Topic]] = []
    for number in range(20):
        topics = [Topic(f"run:{number}-{other}") for other in range(10)]
        kept += [weakref.ref(topic) for topic in topics]
        await store.wait(topics, 1_000)
    del topics
    gc.collect()
    assert [one() for one in kept if one() is not None] == []
