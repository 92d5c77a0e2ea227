"""The schema: the numbered migrations of this package, how they are applied, what has drifted, and the whole as text.

A migration is a file of collections and their indexes; later ones add to the earlier. `opening.py` calls `status` and `migrate`, `durable
schema` publishes `published`. Making an index that is there does nothing, so any number of processes may migrate at once; an index that
has our name and other keys or another filter is dropped and built anew (the server builds without locking the collection).
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.resources
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pymongo import ASCENDING, IndexModel
from pymongo.errors import CollectionInvalid, OperationFailure

from durable.errors import SchemaMismatch
from durable.model import Instant, Names, SchemaStatus
from durable.storekit import Migration, Renames, migrations_of, pending

from .operation import MAJORITY
from .times import stored

STORE: Final = "store"
"""The document that names this store, beside those of the versions: a caller's session is known by it to reach the same data."""
VERSIONS: Final = "durable_schema_version"
_EXISTS: Final = 48
_MISSING: Final = 26
_CONFLICTS: Final = frozenset({85, 86})


class Mongo(Migration):
    """A migration whose text is JSON."""

    @property
    def checksum(self) -> str:
        """Over the meaning: the reasons that stand beside an index do not count."""
        plain = {name: [spec_of(one) for one in indexes] for name, indexes in collections_of(self).items()}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def collections_of(migration: Migration) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Collections and their indexes, by default name."""
    found: Mapping[str, Sequence[Mapping[str, Any]]] = json.loads(migration.text)["collections"]
    return found


def spec_of(index: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an index what it is, from our files or from the server's list."""
    pairs: Iterable[tuple[str, Any]] = dict(index["key"]).items()
    return {
        "key": [[field, int(direction)] for field, direction in pairs],
        "unique": bool(index.get("unique")),
        "partial": index.get("partialFilterExpression") or {},
    }


@functools.cache
def migrations() -> Sequence[Mongo]:
    """The migrations of this installation, in order."""
    folder = importlib.resources.files(__name__.rpartition(".")[0]).joinpath("migrations")
    files = [
        (entry.name, entry.read_text(encoding="utf-8")) for entry in folder.iterdir() if entry.name.endswith(".json")
    ]
    found = migrations_of((f"{name.removesuffix('.json')}.sql", text) for name, text in files)
    return [Mongo(version=one.version, name=one.name, text=one.text) for one in found]


@functools.cache
def wanted() -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Every collection with its indexes, by default name."""
    whole: dict[str, list[Mapping[str, Any]]] = {}
    for migration in migrations():
        for table, indexes in collections_of(migration).items():
            whole.setdefault(table, []).extend(indexes)
    return whole


async def _indexes(database: Any, name: str) -> dict[str, dict[str, Any]] | None:
    """The indexes of a collection by name; None: there is no such collection."""
    try:
        cursor = await database.get_collection(name).list_indexes()
        # Every collection has the index of `_id`: none at all is no collection, however the driver says that.
        return {index["name"]: spec_of(index) for index in await cursor.to_list(None)} or None
    except OperationFailure as error:
        if error.code == _MISSING:
            return None
        raise


async def _applied(database: Any, renames: Renames) -> dict[int, str]:
    rows = await database.get_collection(renames.table(VERSIONS)).find({"_id": {"$type": "number"}}).to_list(None)
    return {int(row["_id"]): row["checksum"] for row in rows}


async def status(database: Any, renames: Renames) -> tuple[SchemaStatus, list[str]]:
    """What is there, without changing it; and which of what is missing keys and coalescing can not do without."""
    found, applied = await asyncio.gather(
        asyncio.gather(*(_indexes(database, renames.table(table)) for table in wanted())), _applied(database, renames)
    )
    missing: list[str] = []
    vital: list[str] = []
    for (table, indexes), there in zip(wanted().items(), found, strict=True):
        if there is None:
            missing.append(renames.table(table))
            continue
        for index in indexes:
            if there.get(index["name"]) != spec_of(index):
                what = f"{renames.table(table)}.{index['name']}"
                missing.append(what if index["name"] not in there else f"{what} (it has other keys or another filter)")
                if index.get("unique"):
                    vital.append(what)
    newest = max(applied, default=0)
    if all(there is None for there in found):
        return SchemaStatus(found=None, wanted=migrations()[-1].version, missing=missing), vital
    return SchemaStatus(found=newest, wanted=migrations()[-1].version, missing=missing), vital


async def store_id(database: Any, renames: Renames) -> str | None:
    """The name of this store; None before it is migrated."""
    row = await database.get_collection(renames.table(VERSIONS)).find_one({"_id": STORE})
    return None if row is None else str(row["store_id"])


async def migrate(database: Any, now: Instant, renames: Renames) -> SchemaStatus:
    """Make what is missing. Raises SchemaMismatch for tables that are newer than this code, before it changes anything."""
    pending(await _applied(database, renames), migrations())
    there = set(await database.list_collection_names())
    for table in wanted():
        if renames.table(table) not in there:
            await _make_collection(database, renames.table(table))
    for table, indexes in wanted().items():
        if indexes:
            await _make_indexes(database.get_collection(renames.table(table), write_concern=MAJORITY), indexes)
    versions = database.get_collection(renames.table(VERSIONS), write_concern=MAJORITY)
    await _put(versions, STORE, {"store_id": uuid.uuid4().hex})
    for migration in migrations():
        await _put(versions, migration.version, {"checksum": migration.checksum, "applied_at": stored(now)})
    return (await status(database, renames))[0]


async def _put(collection: Any, key: Any, fields: Mapping[str, Any]) -> None:
    await collection.update_one({"_id": key}, {"$setOnInsert": dict(fields)}, upsert=True)


async def _make_collection(database: Any, name: str) -> None:
    try:
        await database.create_collection(name, check_exists=False)
    except CollectionInvalid:
        return  # somebody else was quicker
    except OperationFailure as error:
        if error.code != _EXISTS:
            raise


async def _make_indexes(collection: Any, indexes: Sequence[Mapping[str, Any]]) -> None:
    models = [_model(index) for index in indexes]
    try:
        await collection.create_indexes(models)
    except OperationFailure as error:
        if error.code not in _CONFLICTS:
            raise
    else:
        return
    cursor = await collection.list_indexes()
    there = {index["name"]: spec_of(index) for index in await cursor.to_list(None)}
    for index in indexes:
        ours = spec_of(index)
        for name, theirs in there.items():
            same_keys = theirs["key"] == ours["key"] and theirs["partial"] == ours["partial"]
            if (name == index["name"] and theirs != ours) or (name != index["name"] and same_keys):
                await collection.drop_index(name)
    await collection.create_indexes(models)


def _model(index: Mapping[str, Any]) -> IndexModel:
    options: dict[str, Any] = {"name": index["name"]}
    if index.get("unique"):
        options["unique"] = True
    if index.get("partialFilterExpression"):
        options["partialFilterExpression"] = index["partialFilterExpression"]
    return IndexModel([(field, direction or ASCENDING) for field, direction in index["key"]], **options)


def refuse(found: SchemaStatus, vital: Sequence[str], where: str) -> None:
    """Raise SchemaMismatch for tables that can not be used (69). A missing index that only makes things slow is the doctor's to tell."""
    advice = "run `durable migrate`, or open it with auto_migrate=True"
    if found.found is None:
        raise SchemaMismatch(f"{where} has no collections of durable", hint=advice)
    if found.found > found.wanted:
        raise SchemaMismatch(
            f"the collections of {where} have version {found.found}, this code knows up to {found.wanted}",
            hint="upgrade durable-sdk here to the version that migrated them; nothing was changed",
        )
    if found.found < found.wanted:
        raise SchemaMismatch(
            f"the collections of {where} have version {found.found}, this code needs {found.wanted}", hint=advice
        )
    if vital:
        raise SchemaMismatch(
            f"{where} lacks unique indexes without which one key could mean two runs: {', '.join(vital)}", hint=advice
        )


def published(names: Names = Names()) -> str:
    """The whole schema as text, for applications that own their migrations (69)."""
    renames = Renames(names)
    lines = [
        "{",
        '  "about": "The collections of durable on MongoDB, made from its migrations by `durable schema mongodb`. Do not edit.",',
        '  "collections": {',
    ]
    tables = list(wanted().items())
    for place, (table, indexes) in enumerate(tables):
        ending = "" if place == len(tables) - 1 else ","
        inner = ",\n".join(f"      {json.dumps(index)}" for index in indexes)
        lines.append(
            f"    {json.dumps(renames.table(table))}: [" + (f"\n{inner}\n    ]{ending}" if inner else f"]{ending}")
        )
    lines.append("  },")
    lines.append(f'  "{renames.table(VERSIONS)}": [')
    rows = [json.dumps({"_id": one.version, "checksum": one.checksum}) for one in migrations()]
    rows.append(json.dumps({"_id": STORE, "store_id": "<any text that no other store has>"}))
    lines += [f"    {row}{'' if place == len(rows) - 1 else ','}" for place, row in enumerate(rows)]
    return "\n".join([*lines, "  ]", "}"]) + "\n"


__all__ = ["migrate", "migrations", "published", "refuse", "status", "store_id", "wanted"]
