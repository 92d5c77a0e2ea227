"""The three stores, each as a URL that other processes can open too: with the tables in place, and nothing in them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres.conftest import template
from servers import mongo, postgres
from servers.mongo_room import rooms

import durable


@pytest.fixture(params=["sqlite", "postgresql", "mongodb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database of the test's own."""
    if request.param == "sqlite":
        made = f"sqlite:///{tmp_path / 'flow.db'}"
        asyncio.run(_opened_once(made))
        yield made
    elif request.param == "postgresql":
        database = postgres.server().create(template())
        yield database.url
        database.drop()
    else:
        (room,) = rooms(1)
        room.empty()
        with mongo.server().short_transactions():
            yield room.url
        room.empty()


async def _opened_once(url: str) -> None:
    async with durable.Client(url):
        pass
