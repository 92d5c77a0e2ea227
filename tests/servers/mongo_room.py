"""Databases of the test server that have durable's collections already: making them takes longer than most tests.

`rooms(n)` gives the same ones to every test of this process; whoever used one empties it. The server's clock can not be moved: to the
stored documents it is the same when every instant in them is moved back.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pymongo import MongoClient
from pymongo.write_concern import WriteConcern
from servers.mongo import Database, server

from durable.settings import Settings
from durable_mongo import backend

DATES: Mapping[str, Sequence[str]] = {
    "durable_run": (
        *(
            "available_at",
            "release_at",
            "leased_until",
            "created_at",
            "updated_at",
            "started_at",
            "finished_at",
            "deadline_at",
        ),
        *("purge_at", "purging_at", "cancel_requested_at", "cancel_refused_at", "scheduled_for", "mismatch_since"),
    ),
    "durable_step": ("created_at", "started_at"),
    "durable_signal": ("created_at",),
    "durable_schedule": ("next_fire_at", "created_at", "updated_at"),
    "durable_schedule_fire": ("created_at", "scheduled_for"),
    "durable_queue": ("rate_at", "updated_at"),
    "durable_permit": ("at",),
    "durable_worker": ("started_at", "seen_at"),
}
EMPTIED = (*sorted({*json.loads(backend.schema())["collections"]} - {"durable_schema_version"}), "caller_row")


class Room:
    """A migrated database."""

    def __init__(self, database: Database, client: MongoClient[dict[str, Any]]) -> None:
        self.url = database.url
        self.name = database.name
        self.db = client.get_database(database.name, write_concern=WriteConcern("majority"))

    def empty(self) -> None:
        """Delete every document but the version's. Most tests write to few collections, so the server is asked once which have any.
        Only the last command waits for the majority, and with it for all before."""
        found = self._with_documents()
        for name in found:
            last = name == found[-1]
            self.db.get_collection(name, write_concern=WriteConcern("majority" if last else 1)).delete_many({})

    def _with_documents(self) -> list[str]:
        def probe(name: str) -> list[dict[str, Any]]:
            return [{"$limit": 1}, {"$project": {"_id": 0, "name": {"$literal": name}}}]

        first, *others = EMPTIED
        unions = [{"$unionWith": {"coll": name, "pipeline": probe(name)}} for name in others]
        return [row["name"] for row in self.db[first].aggregate([*probe(first), *unions])]

    def pass_time(self, micros: int, **which: Any) -> None:
        """Move every stored instant back; with `which`, those of such runs alone. What is due by so much is due to the server itself,
        whatever this process takes its clock for."""
        if micros % 1_000:
            raise ValueError("the server's clock has milliseconds")
        for name, fields in DATES.items() if not which else [("durable_run", DATES["durable_run"])]:
            moved = {
                field: {
                    "$cond": [
                        {"$eq": [{"$type": f"${field}"}, "date"]},
                        {"$subtract": [f"${field}", micros // 1_000]},
                        "$$REMOVE",
                    ]
                }
                for field in fields
            }
            self.db[name].update_many(which, [{"$set": moved}])

    def caller_rows(self) -> list[str]:
        """The application's committed rows, in the order of writing."""
        return [row["text"] for row in self.db["caller_row"].find(sort=[("_id", 1)])]


@functools.cache
def _client() -> MongoClient[dict[str, Any]]:
    client = server().client()
    atexit.register(client.close)
    return client


@functools.cache
def _room(number: int) -> Room:
    database = server().create()
    with ThreadPoolExecutor(1) as aside:  # a loop of its own, whoever runs one here
        aside.submit(asyncio.run, migrated(database.url)).result()
    atexit.register(database.drop)
    room = Room(database, _client())
    room.db.create_collection("caller_row")
    return room


def rooms(count: int) -> list[Room]:
    """The first rooms of this process."""
    return [_room(number) for number in range(count)]


async def migrated(url: str) -> None:
    """Make the collections."""
    store = await backend.open(url, settings=Settings(), auto_migrate=True)
    await store.close()


__all__ = ["Room", "migrated", "rooms"]
