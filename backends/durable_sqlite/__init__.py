"""The SQLite backend: nothing but Python is needed. `backend` is what the entry point names; `store.py` has the operations.

URLs: `sqlite:///relative.db`, `sqlite:////absolute/path.db`, `sqlite:///:memory:`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from durable.model import Instant, Names
from durable.settings import Settings

from . import opening, schema
from .store import Store


class SqliteBackend:
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
        """Open a store; a new or older file is brought up to date unless `auto_migrate=False`."""

        def work() -> Store:
            return Store(
                opening.open_database(url, settings=settings, names=names, auto_migrate=auto_migrate, clock=clock)
            )

        if opening.path_of(url) is None:
            return work()  # a fraction of a millisecond: no hop
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def schema(self, names: Names = Names()) -> str:
        """The whole schema as text (69)."""
        return schema.published(names)


backend: Final = SqliteBackend()

__all__ = ["SqliteBackend", "Store", "backend"]
