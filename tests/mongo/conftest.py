"""What the tests of the MongoDB backend share: a migrated database, stores on it, and the words of the suite.

Nothing here waits for luck: `until` waits for what must become true.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from servers.mongo import Database, server
from servers.mongo_room import Room, rooms

from durable.model import Names
from durable.settings import Settings
from durable.testing.conformance.scenario import Scene
from durable_mongo import Store, backend

Open = Callable[..., Awaitable[Store]]
PATIENCE = 90.0


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until the condition is true; returns its value. Fails after a long time, saying for what it waited."""
    async with asyncio.timeout(PATIENCE):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)
    pytest.fail(f"waited in vain for {what}")


def fail(room: Room, *commands: str, times: int = 1, **how: Any) -> None:
    """Let the next of these commands fail on the server. Whoever uses it takes the fixture `healed`."""
    data = {"failCommands": list(commands), **how}
    room.db.client.admin.command("configureFailPoint", "failCommand", mode={"times": times}, data=data)


class Bench:
    """A room as the harness of a scene: here time passes, too."""

    name = "mongodb"

    def __init__(self, room: Room) -> None:
        self.room = room

    async def pass_time(self, micros: int, /) -> None:
        """Move every stored instant back."""
        self.room.pass_time(micros)


@pytest.fixture
def room() -> Iterator[Room]:
    """A migrated database that is empty before and after."""
    (made,) = rooms(1)
    made.empty()
    yield made
    made.empty()


@pytest.fixture
def healed(room: Room) -> Iterator[None]:
    """Afterwards no command fails any more."""
    yield
    room.db.client.admin.command("configureFailPoint", "failCommand", mode="off")


@pytest.fixture
def empty() -> Iterator[Database]:
    """A database without collections."""
    made = server().create()
    yield made
    made.drop()


@pytest.fixture
async def opened(room: Room) -> AsyncIterator[Open]:
    """Opens stores on the room; closes them at the end."""
    stores: list[Store] = []

    async def make(query: str = "", **options: Any) -> Store:
        settings = Settings.of(options.pop("settings", {}))
        names = options.pop("names", Names())
        url = options.pop("url", room.url)
        if query:
            url += ("&" if "?" in url else "?") + query
        store = await backend.open(url, settings=settings, names=names, **options)
        stores.append(store)
        return store

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def store(opened: Open) -> Store:
    """A store on the room."""
    return await opened()


@pytest.fixture
async def scene(store: Store, room: Room) -> Scene:
    """The suite's words for it."""
    return Scene(store, Bench(room))  # type: ignore[arg-type]  # a harness of this store alone
