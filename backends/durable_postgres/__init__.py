"""The PostgreSQL backend, on psycopg 3 and its pool. `backend` is what the entry point names; `store.py` has the operations.

URLs: `postgresql://user:password@host:port/database` with everything that libpq knows; `opening.py` has what a URL may say beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from durable.errors import ConfigurationError
from durable.model import Instant, Names
from durable.settings import Settings

from . import opening, schema
from .connection import Database
from .contact import Contact
from .store import Store


class PostgresBackend:
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
        """Open a store. Tables are made and changed by `durable migrate`, or here with `auto_migrate=True`."""
        if clock is not None:
            raise ConfigurationError(
                "the clock of a PostgreSQL store is the server's: leases of many machines are judged by one clock",
                hint="drive time in tests with a SQLite store in memory",
            )
        database = Database(opening.read(url, settings), settings, names)
        contact = Contact(database, auto_migrate)
        database.contact = contact.make
        try:
            await contact.first()
        except BaseException:
            await database.close()
            raise
        return Store(database, contact)

    def schema(self, names: Names = Names()) -> str:
        """The whole schema as text (69)."""
        return schema.published(names)

    def row_security(self, names: Names = Names()) -> str:
        """Policies by which the database itself keeps tenants apart, as text (57)."""
        return schema.row_security(names)


backend: Final = PostgresBackend()

__all__ = ["PostgresBackend", "Store", "backend"]
