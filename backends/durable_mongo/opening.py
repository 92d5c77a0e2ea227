"""Opening: the URL, what the deployment must be, and the state of its collections.

`__init__.py` calls `open_database`. Beside everything that the driver knows, a URL may have `changes=off`: no change streams, waiting
falls back to polling (67). What the URL says about write concern, read preference and retries counts for the application's own clients;
the handles of this package have theirs whatever it says (65).
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final

from pymongo import MongoClient
from pymongo.errors import ConfigurationError as DriverConfigurationError
from pymongo.errors import InvalidName, InvalidURI, PyMongoError

from durable.errors import ConfigurationError, StoreError
from durable.model import Instant, Names, SchemaStatus
from durable.settings import Settings
from durable.storekit import Renames

from . import faults, schema
from .connection import Database
from .operation import Work

FORM: Final = "mongodb://user:password@host:27017/database?replicaSet=rs0"
LARGEST_PAYLOAD: Final = 3 << 20
"""Bytes: a run's document has room for its input, options, progress and output, each as large as that, and for what else it says. So a
payload that does not fit is refused before the write, and no run grows until its end can not be stored (70)."""
OLDEST: Final = 17
"""The wire version of MongoDB 6.0."""
DEFAULTS: Final[dict[str, Any]] = {
    "appname": "durable",
    "serverselectiontimeoutms": 10_000,
    "connecttimeoutms": 5_000,
    "maxpoolsize": 100,
}


def read(url: str, settings: Settings, names: Names) -> tuple[str, str, dict[str, Any], bool]:
    """The URL for the driver, the database, the options that it leaves open, and whether to watch changes. Raises ConfigurationError,
    never with a password in it."""
    if settings.max_payload > LARGEST_PAYLOAD:
        raise ConfigurationError(
            f"max_payload={settings.max_payload}: MongoDB stores documents of 16 MB, and that of a run has four payloads",
            hint=f"at most {LARGEST_PAYLOAD} here; store larger data elsewhere and pass its address",
        )
    scheme = url.partition(":")[0]
    if scheme not in ("mongodb", "mongodb+srv"):
        raise ConfigurationError(f"{scheme!r} is not MongoDB's scheme", hint=FORM)
    head, mark, query = url.partition("?")
    own: dict[str, str] = {}
    others: list[str] = []
    for pair in query.split("&") if query else ():
        name, _, value = pair.partition("=")
        if name.lower() == "changes":
            own["changes"] = urllib.parse.unquote(value)
        else:
            others.append(pair)
    plain = head + (mark if others else "") + "&".join(others)
    changes = own.get("changes", "on")
    if changes not in ("on", "off"):
        raise ConfigurationError(f"changes={changes!r} is neither on nor off")
    database = names.schema or urllib.parse.unquote(urllib.parse.urlsplit(head).path.lstrip("/"))
    if not database:
        raise ConfigurationError(
            "the URL names no database", hint=f"{FORM}: the database stands before the question mark"
        )
    _check(plain)
    given = {pair.partition("=")[0].lower() for pair in others}
    options = {name: value for name, value in DEFAULTS.items() if name not in given}
    return plain, database, {**options, "retrywrites": True, "retryreads": True}, changes == "on"


def _check(url: str) -> None:
    try:
        MongoClient(url, connect=False).close()  # it reads the URL and connects to nobody
    except (InvalidURI, InvalidName, DriverConfigurationError, ValueError):
        raise ConfigurationError(
            "the URL is not one that the driver reads",
            hint=f"{FORM}; a character of the password that is not a letter or a digit is percent-encoded",
        ) from None


async def open_database(
    url: str,
    *,
    settings: Settings,
    names: Names,
    auto_migrate: bool | None,
    clock: Callable[[], Instant] | None,
) -> Database:
    """Open a URL. Raises ConfigurationError, StoreUnavailable or SchemaMismatch; nothing is left half open."""
    if clock is not None:
        raise ConfigurationError("MongoDB's clock can not be replaced", hint="leave clock= out, or use SQLite")
    plain, name, options, watch = read(url, settings, names)
    database = Database(plain, name, settings=settings, renames=Renames(names), options=options, watch=watch)
    try:
        await _prepare(database, auto_migrate)
    except BaseException:
        await database.close()
        raise
    return database


async def _prepare(database: Database, auto_migrate: bool | None) -> None:
    try:
        home = await database.home()
        refuse_standalone(await database.greet(home.client))
        native = home.client.get_database(database.name)
        found, vital = await schema.status(native, database.renames)
        outdated = found.found is None or found.found < found.wanted or found.missing
        if auto_migrate and outdated and (found.found or 0) <= found.wanted:
            await migrate(database)
            found, vital = await schema.status(native, database.renames)
        schema.refuse(found, vital, f"the database {database.name!r}")
        database.store_id = await schema.store_id(native, database.renames)
    except (PyMongoError, OSError) as error:
        raise faults.mapped(error) from error


async def migrate(database: Database) -> SchemaStatus:
    """Bring the collections to the version of this code."""
    try:
        home = await database.home()
        now = await database.plain(_now)
        native = home.client.get_database(database.name)
        found = await schema.migrate(native, now, database.renames)
        database.store_id = await schema.store_id(native, database.renames)
    except (PyMongoError, OSError) as error:
        raise faults.mapped(error) from error
    return found


async def schema_status(database: Database) -> SchemaStatus:
    """What is there, without changing it."""
    try:
        native = (await database.home()).client.get_database(database.name)
        return (await schema.status(native, database.renames))[0]
    except (PyMongoError, OSError) as error:
        raise faults.mapped(error) from error


async def _now(work: Work) -> Instant:
    return work.now


def refuse_standalone(hello: Mapping[str, Any]) -> None:
    """Raise StoreError for a server on which no transaction can run (65)."""
    if "setName" not in hello and hello.get("msg") != "isdbgrid":
        raise StoreError(faults.STANDALONE[0], hint=faults.STANDALONE[1])
    if int(hello.get("maxWireVersion", 0)) < OLDEST:
        raise StoreError("this MongoDB is older than 6.0", hint="upgrade the server")


__all__ = ["migrate", "open_database", "read", "refuse_standalone", "schema_status"]
