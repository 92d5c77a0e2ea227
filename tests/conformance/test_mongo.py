"""The conformance suite on MongoDB: on two databases of one replica set, emptied after each test; time passes by moving what is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from servers.mongo_room import Room, rooms

from durable.protocol import Store
from durable.settings import Settings
from durable.testing.conformance import *  # noqa: F403
from durable.testing.conformance.harness import CallerTransaction, Harness
from durable_mongo import backend, schema

ask_the_server = schema.status
answers: dict[str, Any] = {}


async def status_of_a_room(native: Any, renames: Any) -> Any:
    """The server is asked for the indexes of each collection once, not at each opening: that is a seventh of the commands of this suite,
    and nothing here changes an index. `mongo/test_opening.py` is about what an opening sees."""
    if native.name not in answers:
        answers[native.name] = await ask_the_server(native, renames)
    return answers[native.name]


class MongoCaller:
    """The application's own session, inside a transaction."""

    def __init__(self, session: AsyncClientSession) -> None:
        self.native = session

    async def commit(self) -> None:
        await self.native.commit_transaction()

    async def rollback(self) -> None:
        await self.native.abort_transaction()


class MongoHarness:
    """Two databases: one that nobody else reaches, and one that all stores of a test share."""

    name = "mongodb"

    def __init__(self, own: Room, shared: Room) -> None:
        self.own = own
        self.shared = shared
        self.stores: list[Store] = []
        self.used: set[Room] = set()
        self.client: AsyncMongoClient[dict[str, Any]] | None = None

    async def open(self, *, shared: bool = False) -> Store:
        room = self.shared if shared else self.own
        self.used.add(room)
        with patch.object(schema, "status", status_of_a_room):
            store = await backend.open(room.url, settings=Settings())
        self.stores.append(store)
        return store

    async def pass_time(self, micros: int, /) -> None:
        for room in self.used:
            room.pass_time(micros)

    def rows_of(self, client: Any) -> Any:
        return client.get_database(self.shared.name).get_collection("caller_row")

    @asynccontextmanager
    async def caller_transaction(self) -> AsyncIterator[CallerTransaction]:
        if self.client is None:
            self.client = AsyncMongoClient(self.shared.url)
        async with self.client.start_session() as session:
            await session.start_transaction()
            yield MongoCaller(session)

    async def write_row(self, native: Any, text: str, /) -> None:
        await self.rows_of(native.client).insert_one({"text": text}, session=native)

    async def rows(self) -> list[str]:
        return self.shared.caller_rows()

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
        for store in self.stores:
            await store.close()


@pytest.fixture
async def backend_harness() -> AsyncIterator[Harness]:
    own, shared = rooms(2)
    harness = MongoHarness(own, shared)
    yield harness
    await harness.close()
    for room in harness.used:
        room.empty()
