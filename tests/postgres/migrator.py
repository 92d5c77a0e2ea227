"""A process that migrates: for each line of its input, the URL of a database and which migrations, it applies them and prints the version.

`test_migrations.py` starts several, lets them go at once, and kills them. `LIVE` and `INDEX` are migrations of tables that are in use: a
column and an index of it, and an index alone.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from durable.model import Names, SchemaStatus
from durable.settings import Settings
from durable.storekit import Migration
from durable_postgres import backend, schema
from durable_postgres.connection import Database as Connections
from durable_postgres.opening import read

LIVE = Migration(
    version=len(schema.migrations()) + 1,
    name="0900_live",
    text="-- not transactional\nALTER TABLE durable_run ADD COLUMN IF NOT EXISTS later integer;\n"
    "CREATE INDEX CONCURRENTLY durable_run_later ON durable_run (later);\n",
)

INDEX = Migration(
    version=LIVE.version,
    name="0900_index",
    text="-- not transactional\nCREATE INDEX CONCURRENTLY durable_run_later ON durable_run (forked_from);\n",
)
ADDED = {"live": LIVE, "index": INDEX}


def connections(url: str) -> Connections:
    return Connections(read(url, Settings()), Settings(), Names())


async def apply(url: str, *added: Migration) -> SchemaStatus:
    """All migrations of the package and the added ones."""
    con = connections(url)
    todo: Sequence[Migration] = [*schema.migrations(), *added]
    try:
        return await schema.migrate(con, todo)
    finally:
        await con.close()


async def whole(url: str) -> SchemaStatus:
    """As an application does it: by opening a store, and by asking for it again."""
    store = await backend.open(url, settings=Settings(), auto_migrate=True)
    try:
        return await store.migrate()
    finally:
        await store.close()


if __name__ == "__main__":
    print("ready", flush=True)
    for line in sys.stdin:
        target, which = line.split()
        print(asyncio.run(apply(target, ADDED[which]) if which in ADDED else whole(target)).found, flush=True)
