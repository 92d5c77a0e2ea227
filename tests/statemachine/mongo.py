"""The same driver on MongoDB, under a clock that the tests move: the store's estimate of the server's clock is put in its place.

Used by `test_statemachine_mongo.py`. With a clock of its own a store writes literals where it otherwise writes `$$NOW`; all else is as it
runs. Instants have milliseconds here, so the lease of the machine is odd by one of those.
"""

from __future__ import annotations

from servers.mongo_room import Room, rooms
from statemachine.driver import START, Driver, now
from statemachine.oracle_upkeep import Oracle

from durable.settings import SECOND, Settings
from durable_mongo import Store, backend

LEASE = 10 * SECOND + 1_000


def room() -> Room:
    """The database of the state machine: not one of those that the conformance suite has."""
    return rooms(3)[2]


class MongoDriver(Driver):
    """A store on an emptied database."""

    def __init__(self) -> None:
        self.room = room()
        self.room.empty()
        self.time = START
        self.settings = Settings()
        store: Store = now(backend.open(self.room.url, settings=self.settings))
        store._database.clock.manual = lambda: self.time
        self.store = store
        self.oracle = Oracle(lambda: self.time, self.settings.keep)
        self.gone = set()
        self.compared = {}
