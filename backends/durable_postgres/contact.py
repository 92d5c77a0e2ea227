"""The first contact: what must be true of a server before this store works on it, looked at once, before the first operation (64, 68, 69).

`__init__.py` makes one for each store and asks it at once; where the server does not answer then, it only warns, and the first operation
asks again. It refuses with a sentence that says what to do: a wrong isolation default, tables that are newer than this code or not there,
a missing unique index refuse everybody; a missing table or column refuses those who claim. Nothing here changes anything, but a migration
that was asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import weakref
from typing import Final

from durable.errors import ConfigurationError, SchemaMismatch, StoreUnavailable
from durable.storekit import pending

from . import schema
from .connection import Database
from .operation import Ask

log = logging.getLogger("durable.postgres")

OLDEST: Final = 150_000
"""PostgreSQL 15 is the oldest that the tests run on."""
SESSION: Final = """
SELECT current_setting('server_encoding'), current_setting('default_transaction_isolation'),
    current_setting('server_version_num')::integer, current_database(), clock_timestamp()
"""


@dataclasses.dataclass(slots=True)
class Contact:
    """The checks of one store."""

    database: Database
    auto_migrate: bool | None
    for_claims: SchemaMismatch | None = None
    """Why this store may not claim, where others may use it."""
    made: bool = False
    locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]
    )

    async def first(self) -> None:
        """At the start of a store: an unreachable server only warns."""
        try:
            await self.make()
        except StoreUnavailable as error:
            log.warning(
                "the server at %s does not answer; it is checked when it does: %s",
                self.database.address.place,
                error.message,
            )

    async def make(self) -> None:
        """Look, once. Raises ConfigurationError, SchemaMismatch or StoreUnavailable, and is then asked again."""
        if self.made:
            return
        lock = self.locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            if not self.made:
                await self._look()
                self.made = True
                self.database.contact = None

    async def _look(self) -> None:
        database = self.database
        async with database.direct() as con:
            (answer,) = await database.ask(con, [Ask(SESSION)])
            encoding, isolation, version, name, now = answer.rows[0]
            if encoding != "UTF8":  # first of all: of a database in SQL_ASCII the driver gives every text as bytes
                raise ConfigurationError(
                    f"the database is encoded in {encoding if isinstance(encoding, str) else encoding.decode()}",
                    hint="create it with ENCODING 'UTF8' TEMPLATE template0; a server that was set up without a locale has SQL_ASCII",
                )
            if isolation != "read committed":
                raise ConfigurationError(
                    f"default_transaction_isolation is {isolation!r} for this role and database; durable needs 'read committed'",
                    hint="ALTER ROLE … RESET default_transaction_isolation (or ALTER DATABASE …), then connect anew",
                )
            if version < OLDEST:
                raise ConfigurationError(
                    f"the server is PostgreSQL {version // 10_000}", hint="use PostgreSQL 15 or newer"
                )
            found = await schema.look(database, con)
        database.name = name
        database.see_clock(now)
        if self.auto_migrate and (found.status.found != found.status.wanted or found.status.missing):
            pending(found.applied or {}, schema.migrations())  # tables of a newer version are left alone
            await schema.migrate(database)
            async with database.direct() as con:
                found = await schema.look(database, con)
        self._judge(found)

    def _judge(self, found: schema.Found) -> None:
        place = self.database.address.place
        if found.applied is None:
            raise SchemaMismatch(
                f"{place} has no tables of durable", hint="run `durable migrate`, or open it with auto_migrate=True"
            )
        todo = pending(found.applied, schema.migrations())
        names = ", ".join(migration.name for migration in todo)
        if found.broken_unique:
            raise SchemaMismatch(
                f"{place} lacks a unique index: {', '.join(found.broken_unique)}; without it one key could be given twice",
                hint="run `durable migrate`: it builds what is missing or invalid",
            )
        if self.auto_migrate is False and todo:
            raise SchemaMismatch(
                f"the tables of {place} have version {found.status.found}, this code needs {found.status.wanted} ({names})",
                hint="run `durable migrate`, or open it without auto_migrate=False",
            )
        if found.missing:
            self.for_claims = SchemaMismatch(
                f"{place} lacks {', '.join(found.missing[:5])}" + (f" (migration {names})" if names else ""),
                hint="run `durable migrate` before workers of this version start; clients that do not need it go on",
            )
        elif found.broken:
            log.warning("%s lacks the index %s: run `durable migrate`", place, ", ".join(found.broken))


__all__ = ["OLDEST", "Contact"]
