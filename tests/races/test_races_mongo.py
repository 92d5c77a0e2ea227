"""The pairs of conflicting operations on MongoDB: two processes on one replica set. See `arena.py` for how a pair is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from races.arena import Arena, Pair
from races.test_races_around import PAIRS as AROUND
from races.test_races_runs import PAIRS as RUNS
from servers.mongo_room import rooms

from durable.protocol import Store
from durable.settings import Settings
from durable_mongo import backend

TRIALS = int(os.environ.get("DURABLE_MONGO_RACE_TRIALS", "5"))

HEAD_START = 8_000_000
"""Nanoseconds. A call here is one command or a transaction of five: with less, the shorter one would always be the first."""


async def open_mongo(url: str, clock: Callable[[], int]) -> Store:
    """A store under the arena's clock."""
    store = await backend.open(url, settings=Settings())
    store._database.clock.manual = clock
    return store


@pytest.fixture(scope="module")
def mongo_arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    room = rooms(4)[3]
    room.empty()
    made = Arena(tmp_path_factory.mktemp("races") / "none", room.url, open_mongo, head_start=HEAD_START)
    yield made
    made.close()
    room.empty()


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*RUNS, *AROUND], ids=lambda pair: pair.__name__)
def test_pair(mongo_arena: Arena, pair: Pair) -> None:
    mongo_arena.trials(pair, TRIALS)
