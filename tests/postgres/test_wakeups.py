"""LISTEN and NOTIFY as a hint (rule 67): told after the commit, throttled, come back after a loss, and never needed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from postgres.conftest import Open, until
from servers.postgres import Database

import durable
from durable.errors import StoreUnavailable
from durable.model import ALL, new_run_id
from durable.settings import HOUR, SECOND
from durable.testing.conformance.scenario import Scene, new_run
from durable_postgres import Store, wakeups
from durable_postgres.names import Naming
from durable_postgres.wakeups import PAYLOAD, Wakeups, _Listener, _payloads

LISTENING = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"

declared = durable.Registry("test_wakeups")


@durable.function(registry=declared)
async def greet(ctx: durable.Context, name: str) -> str:
    return f"hello {name}"


async def settled(here: Store, there: Store, topics: list[str]) -> asyncio.Task[None]:
    """A wait there that has nothing old to hear any more: not that its listener has come, nor what was told before it had."""
    while True:
        waiting = asyncio.create_task(there.wait(topics, HOUR))
        await told(here, there)
        if not waiting.done():
            return waiting


async def told(here: Store, there: Store) -> None:
    """What was told here before has been heard there: news come in the order in which they are told."""
    queue = new_run_id()
    marker = asyncio.create_task(there.wait([f"queue:{queue}"], HOUR))
    while not marker.done():
        await here.enqueue([new_run(queue=queue)])
        await asyncio.wait([marker], timeout=0.3)


def listeners(database: Database) -> list[object]:
    with database.connect() as con:
        return [pid for (pid,) in con.execute(LISTENING)]


async def test_a_submit_in_one_process_wakes_a_waiter_in_another(opened: Open, database: Database) -> None:
    here, there = await opened(), await opened()
    waiting = await settled(here, there, ["queue:default"])
    await here.enqueue([new_run(queue="elsewhere")])
    await told(here, there)
    assert not waiting.done()
    await here.enqueue([new_run()])
    await asyncio.wait_for(waiting, 60)


async def test_the_end_of_a_run_wakes_who_waits_for_it(opened: Open) -> None:
    here, there = await opened(), await opened()
    scene = Scene(here, None)  # type: ignore[arg-type]
    held = await scene.take()
    waiting = await settled(here, there, [f"run:{held.run.run_id}"])
    await scene.complete(held)
    await asyncio.wait_for(waiting, 60)


async def test_a_listener_that_is_cut_off_wakes_everybody_and_comes_back(opened: Open, database: Database) -> None:
    here, there = await opened(), await opened()
    waiting = await settled(here, there, ["queue:default"])
    (before,) = listeners(database)
    with database.connect() as con:
        con.execute("SELECT pg_terminate_backend(%s)", (before,))  # type: ignore[arg-type]
    await asyncio.wait_for(waiting, 60)  # news may have been missed
    await until(lambda: listeners(database) not in ([], [before]), "the listener to come back")
    waiting = await settled(here, there, ["queue:default"])
    await here.enqueue([new_run()])
    await asyncio.wait_for(waiting, 60)


async def test_many_commits_in_a_moment_are_told_in_few_notifications(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment is a second here, so that as many commits fit into it on any machine."""
    monkeypatch.setattr(wakeups, "THROTTLE", 1.0)
    with database.connect() as con:
        con.execute(f"LISTEN {store._database.naming.channel}")
        await asyncio.gather(*(store.enqueue([new_run()]) for _ in range(200)))
        heard = list(con.notifies(timeout=3, stop_after=None))
    assert 1 <= len(heard) < 100
    assert {topic for one in heard for topic in one.payload.split("\n")} == {"queue:default"}


async def test_a_commit_whose_notification_fails_is_a_commit(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes out behind the commit, in the same round trip: a hint that the server refuses takes nothing back (67)."""
    monkeypatch.setattr(Naming, "channel", "c" * 64)  # the server knows no name of that length
    caplog.set_level(logging.INFO, "durable.postgres")
    (answer,) = await store.enqueue([new_run()])
    assert answer.disposition == "created"
    assert "a notification was lost" in caplog.text
    (found,) = await store.get([answer.run.run_id], scope=ALL)
    assert found == answer.run


async def test_many_topics_are_told_in_as_few_notifications_as_hold_them() -> None:
    topics = [f"run:{number:036}" for number in range(1_000)]
    payloads = _payloads([*topics, "queue:" + "x" * 9_000])
    assert [topic for payload in payloads for topic in payload.split("\n")] == topics
    assert all(len(payload.encode()) <= PAYLOAD for payload in payloads)
    assert len(payloads) == 6


async def test_without_listen_nobody_listens_and_polling_finds_the_work(opened: Open, database: Database) -> None:
    store = await opened("listen=off")
    assert not store.capabilities.push
    await asyncio.wait_for(store.wait(["queue:default"], SECOND // 20), 60)
    settings = {"poll": "100ms", "poll_idle": "100ms"}
    async with (
        durable.Client(f"{database.url}?listen=off", settings=settings) as client,
        durable.Client(f"{database.url}?listen=off", settings=settings) as other,
        durable.Worker(client, functions=[greet]),
    ):
        assert await other.run(greet, "you") == "hello you"
    assert listeners(database) == []


async def test_one_connection_listens_however_many_wait(store: Store, database: Database) -> None:
    waits = [asyncio.create_task(store.wait([f"run:{number}"], HOUR)) for number in range(50)]
    await until(lambda: listeners(database), "the listener")
    assert len(listeners(database)) == 1
    await store.close()
    await asyncio.gather(*waits)
    await until(lambda: not listeners(database), "the listener to go")


async def test_a_listener_is_closed_though_the_driver_swallows_a_cancel() -> None:
    """`asyncio.wait_for` of Python 3.11 returns what came in the moment of the cancel, and forgets the cancel."""
    began, swallowed = asyncio.Event(), asyncio.Event()

    class Away:
        @contextlib.asynccontextmanager
        async def direct(self) -> AsyncIterator[None]:
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if swallowed.is_set():
                    raise
                swallowed.set()
            raise StoreUnavailable("no line")
            yield

    listener = _Listener(Away(), Wakeups(Away()))  # type: ignore[arg-type]
    async with asyncio.timeout(30):
        await began.wait()
        await listener.close()
    assert swallowed.is_set()
