"""Every requirement on PostgreSQL: plain, and with a crash after every third record (`DURABLE_REQUIREMENT_CRASHES=1`: after every one)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import psycopg
import pytest
from conformance.play import START, World, check
from conformance.requirement import Requirement, names, requirements
from servers.postgres import Database, server
from statemachine.postgres import SET_CLOCK, clocked

import durable

EVERY = int(os.environ.get("DURABLE_REQUIREMENT_CRASHES", "3"))


class PostgresWorld(World):
    """The server is told what time it is."""

    def __init__(self, database: Database) -> None:
        url = clocked(database)
        self.con = psycopg.connect(database.url, autocommit=True)
        self.con.execute(SET_CLOCK, (START,))

        async def opened(clock: Callable[[], int]) -> durable.Client:
            return await durable.Client(url, auto_migrate=True).__aenter__()

        super().__init__(opened)

    def moved(self) -> None:
        self.con.execute(SET_CLOCK, (self.now,))

    def close(self) -> None:
        super().close()
        self.con.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    database = server().create()
    made = PostgresWorld(database)
    yield made
    made.close()
    database.drop()


@pytest.mark.parametrize("requirement", requirements(), ids=names())
def test_requirement(world: World, requirement: Requirement) -> None:
    check(world, requirement, every=EVERY)
