"""What the tests share that run on all three stores: a database per store and module, and settings that make workers quick to notice."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from servers import mongo, postgres

import durable

STORES = ("sqlite", "postgresql", "mongodb")
SETTINGS = {"poll": "100ms", "poll_idle": "200ms", "park_after": "200ms"}


def new_url(store: str, folder: Path) -> str:
    """A database that nothing has been in."""
    if store == "sqlite":
        return f"sqlite:///{folder / 'everywhere.db'}"
    return (postgres.server() if store == "postgresql" else mongo.server()).create().url


@functools.cache
def migrated_url(store: str, folder: Path) -> str:
    """A database with the tables in place."""
    url = new_url(store, folder)

    async def migrate() -> None:
        async with durable.Client(url, auto_migrate=True) as client:
            await client.migrate()

    asyncio.run(migrate())
    return url
