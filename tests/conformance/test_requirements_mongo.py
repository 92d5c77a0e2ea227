"""Every requirement on MongoDB: plain, and with a crash after every third record (`DURABLE_REQUIREMENT_CRASHES=1`: after every one)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from conformance.play import World, check
from conformance.requirement import Requirement, names, requirements
from servers.mongo_room import rooms

import durable
from durable_mongo import Store

EVERY = int(os.environ.get("DURABLE_REQUIREMENT_CRASHES", "3"))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    room = rooms(5)[4]
    room.empty()

    async def opened(clock: Callable[[], int]) -> durable.Client:
        client = await durable.Client(room.url).__aenter__()
        store = client.store
        while not isinstance(store, Store):
            store = store.within  # type: ignore[attr-defined]  # what the client has laid around it
        store._database.clock.manual = clock
        return client

    made = World(opened)
    yield made
    made.close()
    room.empty()


@pytest.mark.parametrize("requirement", requirements(), ids=names())
def test_requirement(world: World, requirement: Requirement) -> None:
    check(world, requirement, every=EVERY)
