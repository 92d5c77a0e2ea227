"""The MongoDB backend, on PyMongo's async client. `backend` is what the entry point names; `store.py` has the operations.

URLs: `mongodb://user:password@host:27017/database?replicaSet=rs0`, `mongodb+srv://…`. See `opening.py` for what is ours in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from durable.model import Instant, Names
from durable.settings import Settings

from . import opening, schema
from .store import Store


class MongoBackend:
    """Fulfils `durable.protocol.Backend`."""

    async def open(
        self,
        url: str,
        *,
        settings: Settings,
        names: Names = Names(),
        auto_migrate: bool | None = None,
        clock: Callable[[], Instant] | None = None,
    ) -> Store:
        """Open a store. The collections are made when told to: by `durable migrate`, or with `auto_migrate=True`."""
        database = await opening.open_database(
            url, settings=settings, names=names, auto_migrate=auto_migrate, clock=clock
        )
        return Store(database)

    def schema(self, names: Names = Names()) -> str:
        """The whole schema as text (69)."""
        return schema.published(names)


backend: Final = MongoBackend()

__all__ = ["MongoBackend", "Store", "backend"]
