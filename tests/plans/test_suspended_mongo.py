"""Runs that sleep for a day cost a worker no memory and a claim no look, on MongoDB (10, 30): 5,000, or `DURABLE_SUSPENDED_RUNS`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from mongo.test_plans import TAKEN, examined, fill, request
from plans.sleepers import SLEEPERS, check_memory
from servers.mongo_room import Room, rooms

from durable.model import ALL
from durable.settings import Settings
from durable_mongo import backend

READY = 400
LATER = {"$add": ["$$NOW", {"$add": [86_400_000, "$n"]}]}


@pytest.fixture
def pair() -> Iterator[tuple[Room, Room]]:
    """A room without sleepers, and one with them."""
    without, beside = rooms(5)[3:5]
    for room in (without, beside):
        room.empty()
    fill(beside, "suspended", SLEEPERS, status="suspended", attempts=1, available_at=LATER)
    yield without, beside
    for room in (without, beside):
        room.empty()


@pytest.mark.timeout(900 + SLEEPERS // 50)
def test_sleeping_runs_cost_a_worker_no_memory(pair: tuple[Room, Room]) -> None:
    check_memory(pair[0].url, pair[1].url)


async def _claim(room: Room) -> tuple[int, int]:
    """Keys and documents that the second of two claims examines."""
    store = await backend.open(f"{room.url}{'&' if '?' in room.url else '?'}changes=off", settings=Settings())
    try:
        await store.claim(request())
        claimed, keys, documents, scans = await examined(room, lambda: store.claim(request()))
        assert (len(claimed), scans) == (TAKEN, [])
        promoted, promoted_keys, promoted_documents, scans = await examined(
            room, lambda: store.promote(scope=ALL, limit=500)
        )
        assert (promoted.count, scans) == (0, [])
        assert promoted_documents <= 4, promoted_keys
    finally:
        await store.close()
    return keys, documents


@pytest.mark.timeout(900 + SLEEPERS // 50)
def test_sleeping_runs_cost_a_claim_no_look(pair: tuple[Room, Room]) -> None:
    for room in pair:
        fill(room, "ready", READY, status="pending", ready=True, attempts=0)
    alone, beside = (asyncio.run(_claim(room)) for room in pair)
    print(f"a claim of {TAKEN} examines keys and documents: {alone} alone, {beside} beside {SLEEPERS:,}")
    assert beside <= alone
