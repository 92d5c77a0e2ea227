"""The examples of the documents on the other stores: nothing but the URL changes. `house/test_docs.py` runs them on SQLite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from house.test_docs import Block, run, runnable
from servers import mongo, postgres

import durable

SERVERS = {"postgresql": postgres.server, "mongodb": mongo.server}
EXAMPLES = [(store, block) for store in SERVERS for block in runnable(store)]


async def migrated(url: str) -> None:
    """What `durable migrate` does: on these stores tables are made by an operator."""
    async with durable.Client(url, auto_migrate=True) as client:
        await client.migrate()


@pytest.mark.parametrize(("store", "block"), EXAMPLES, ids=[f"{store}-{block.place}" for store, block in EXAMPLES])
def test_each_python_block_runs_on(store: str, block: Block, tmp_path: Path) -> None:
    database = SERVERS[store]().create()
    try:
        asyncio.run(migrated(database.url))
        run(block, tmp_path, database.url)
    finally:
        database.drop()
