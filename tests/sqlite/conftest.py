"""A store in memory under a clock that the tests move, the words of the conformance suite for it, and a way to its rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from durable.settings import SECOND, Micros, Settings
from durable.testing.conformance.scenario import Scene
from durable_sqlite import Store, backend


class Bench:
    """One store, its clock, and its rows."""

    name = "sqlite"

    def __init__(self) -> None:
        self.now = 1_800_000_000 * SECOND
        self.store: Store

    async def open(self, *, shared: bool = False) -> Store:
        assert not shared
        self.store = await backend.open("sqlite:///:memory:", settings=Settings(), clock=lambda: self.now)
        return self.store

    async def pass_time(self, micros: Micros, /) -> None:
        self.now += micros

    async def sql(self, statement: str, *values: Any) -> list[Any]:
        """Run a statement past everything, in a write of its own: what no method does, and what no method shows."""
        return await self.store._database.write(lambda con, now: con.execute(statement, values).fetchall())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    store = await bench.open()
    yield bench
    await store.close()


@pytest.fixture
def scene(bench: Bench) -> Scene:
    return Scene(bench.store, bench)  # type: ignore[arg-type]  # a harness of this store alone
