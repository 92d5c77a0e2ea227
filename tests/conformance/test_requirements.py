"""Every requirement of `requirements/*.yaml` on SQLite: plain, and with a crash after every record. See `play.py` for what a crash is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from conformance.play import World, check
from conformance.requirement import Requirement, names, requirements

import durable


async def open_sqlite(clock: Callable[[], int]) -> durable.Client:
    """A client on a store in memory."""
    return await durable.Client("sqlite:///:memory:", clock=clock).__aenter__()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World(open_sqlite)
    yield made
    made.close()


@pytest.mark.parametrize("requirement", requirements(), ids=names())
def test_requirement(world: World, requirement: Requirement) -> None:
    crashes = check(world, requirement)
    assert crashes > len(requirement.journal), "a crash before the first record, and one after each"
