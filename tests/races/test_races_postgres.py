"""The pairs of conflicting operations on PostgreSQL: two processes on one database. See `arena.py` for how a pair is run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from races.arena import Arena, Pair
from races.test_races_around import PAIRS as AROUND
from races.test_races_runs import PAIRS as RUNS
from servers.postgres import server
from statemachine.postgres import SET_CLOCK, clocked

from durable.protocol import Store
from durable.settings import Settings
from durable_postgres import backend

TRIALS = int(os.environ.get("DURABLE_POSTGRES_RACE_TRIALS", "10"))


class Clocked:
    """A store that sets the clock of its database before a call, where the arena's has moved on."""

    def __init__(self, store: Store, url: str, clock: Callable[[], int]) -> None:
        self._store, self._clock = store, clock
        self._con = psycopg.connect(url.partition("?")[0], autocommit=True)
        self._at = 0

    def __getattr__(self, name: str) -> Any:
        now = self._clock()
        if now != self._at:
            self._con.execute(SET_CLOCK, (now,))
            self._at = now
        return getattr(self._store, name)

    async def close(self) -> None:
        self._con.close()
        await self._store.close()


async def open_postgres(url: str, clock: Callable[[], int]) -> Any:
    """A store under the arena's clock."""
    return Clocked(await backend.open(url, settings=Settings(), auto_migrate=True), url, clock)


@pytest.fixture(scope="module")
def postgres_arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    database = server().create()
    made = Arena(tmp_path_factory.mktemp("races") / "none", clocked(database), open_postgres)
    yield made
    made.close()
    database.drop()


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*RUNS, *AROUND], ids=lambda pair: pair.__name__)
def test_pair(postgres_arena: Arena, pair: Pair) -> None:
    postgres_arena.trials(pair, TRIALS)
