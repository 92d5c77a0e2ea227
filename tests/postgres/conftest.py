"""What the tests of the PostgreSQL backend share: a migrated database of their own, stores on it, and the words of the suite.

A database is a copy of one that was migrated once in this process. Nothing here waits for luck: `until` waits for what must become true.
"""

from __future__ import annotations

import asyncio
import functools
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from servers.postgres import Database, server

from durable.model import Names
from durable.settings import Settings
from durable.testing.conformance.scenario import Scene
from durable_postgres import Store, backend

Open = Callable[..., Awaitable[Store]]
PATIENCE = 60.0


@functools.cache
def template() -> str:
    """The name of a database with the tables in place."""
    made = server().create()

    async def migrate() -> None:
        await (await backend.open(made.url, settings=Settings(), auto_migrate=True)).close()

    asyncio.run(migrate())
    return made.name


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


def pretending(database: Database, function: str, returns: str, body: str) -> str:
    """The URL of a database in which a function of the test's is found before the server's own."""
    with database.connect() as con:
        con.execute("CREATE SCHEMA IF NOT EXISTS pretended")
        con.execute(
            f"CREATE FUNCTION pretended.{function} RETURNS {returns} LANGUAGE sql STABLE AS $pretended$ SELECT {body} $pretended$"
        )
    return f"{database.url}?options={urllib.parse.quote('-c search_path=pretended,pg_catalog,public')}"


@pytest.fixture(scope="session")
def _template() -> str:
    return template()  # outside of any event loop


@pytest.fixture
def database(_template: str) -> Iterator[Database]:
    """A migrated database of the test's own."""
    made = server().create(_template)
    yield made
    made.drop()


@pytest.fixture
def empty() -> Iterator[Database]:
    """A database without tables."""
    made = server().create()
    yield made
    made.drop()


@pytest.fixture
async def opened(database: Database) -> AsyncIterator[Open]:
    """Opens stores on the database; closes them at the end."""
    stores: list[Store] = []

    async def make(query: str = "", **options: Any) -> Store:
        settings = Settings.of(options.pop("settings", {}))
        names = options.pop("names", Names())
        url = options.pop("url", database.url)
        store = await backend.open(url + (f"?{query}" if query else ""), settings=settings, names=names, **options)
        stores.append(store)
        return store

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def store(opened: Open) -> Store:
    """A store on the database."""
    return await opened()


@pytest.fixture
async def scene(store: Store) -> Scene:
    """The suite's words for it; time does not pass here."""
    return Scene(store, None)  # type: ignore[arg-type]
