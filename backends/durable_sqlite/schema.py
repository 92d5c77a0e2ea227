"""The schema: the numbered migrations of this package, how they are applied, and the whole as text.

`opening.py` calls `prepare` on the first connection of a file and `template` for a store in memory; `durable schema` publishes
`published`. Nothing here runs after a store is open, but `migrate` and `status`.
"""

from __future__ import annotations

import functools
import importlib.resources
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final

from durable.errors import SchemaMismatch
from durable.model import Instant, Names, SchemaStatus
from durable.storekit import Migration, Renames, migrations_of, pending, statements

APPLICATION_ID: Final = 0x64757262
"""Written into the header of a file that we made, so that `file` and a careful operator can tell what it is ("durb")."""

TABLES = "SELECT name FROM sqlite_master WHERE type IN ('table', 'index') AND name NOT LIKE 'sqlite_%'"
APPLIED = "SELECT version, checksum FROM durable_schema_version ORDER BY version"
RECORD = "INSERT INTO durable_schema_version (version, checksum, applied_at) VALUES (?, ?, ?)"
PROBE = "UPDATE durable_schema_version SET applied_at = applied_at WHERE version = 1"


@functools.cache
def migrations() -> Sequence[Migration]:
    """The migrations of this installation, in order."""
    folder = importlib.resources.files(__package__ or "").joinpath("migrations")
    return migrations_of((entry.name, entry.read_text(encoding="utf-8")) for entry in folder.iterdir())


@functools.cache
def _wanted() -> frozenset[str]:
    """Every table and index that the migrations make, by default name."""
    con = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for migration in migrations():
            for statement in statements(migration.text):
                con.execute(statement)
        return frozenset(name for (name,) in con.execute(TABLES))
    finally:
        con.close()


def _found(con: sqlite3.Connection) -> frozenset[str]:
    return frozenset(name for (name,) in con.execute(TABLES))


def _applied(con: sqlite3.Connection, renames: Renames, found: frozenset[str]) -> Mapping[int, str] | None:
    if renames.table("durable_schema_version") not in found:
        return None
    return dict(con.execute(APPLIED).fetchall())


def status(con: sqlite3.Connection, renames: Renames) -> SchemaStatus:
    """What is there, without changing it."""
    found = _found(con)
    applied = _applied(con, renames, found)
    return SchemaStatus(
        found=None if applied is None else max(applied, default=0),
        wanted=migrations()[-1].version,
        missing=sorted(name for name in map(renames, _wanted()) if name not in found),
    )


def migrate(con: sqlite3.Connection, now: Instant, renames: Renames) -> SchemaStatus:
    """Apply what is missing. The caller holds the write lock, so that of many that start at once one does it and the rest find it."""
    applied = _applied(con, renames, _found(con)) or {}
    for migration in pending(applied, migrations()):
        for statement in statements(migration.text):
            con.execute(statement)
        con.execute(RECORD, (migration.version, migration.checksum, now))
    return status(con, renames)


def prepare(con: sqlite3.Connection, now: Instant, renames: Renames, auto_migrate: bool | None, where: str) -> None:
    """Make the tables usable or say why they are not. The caller holds the write lock.

    `auto_migrate` None: our own tables are brought up to date and an empty file is made ours, but tables are not put beside those
    of another application unless that was asked for: the path may be mistyped.
    """
    found = _found(con)
    applied = _applied(con, renames, found)
    if applied is None:
        if found and auto_migrate is None:
            raise SchemaMismatch(
                f"{where} holds tables of another application ({', '.join(sorted(found)[:3])}, …) and none of durable",
                hint="check the path; to keep durable's tables in this database, open it once with auto_migrate=True or run"
                " `durable migrate`",
            )
        if auto_migrate is False:
            raise SchemaMismatch(
                f"{where} has no tables of durable", hint="run `durable migrate`, or open it without auto_migrate=False"
            )
        if not found:
            con.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        migrate(con, now, renames)
        return
    missing = pending(applied, migrations())
    if missing and auto_migrate is False:
        raise SchemaMismatch(
            f"the tables of {where} have version {max(applied, default=0)}, this code needs {migrations()[-1].version}",
            hint="stop the workers of the old version and run `durable migrate`, or open it without auto_migrate=False",
        )
    if missing:
        migrate(con, now, renames)
    lost = status(con, renames).missing
    if lost:
        raise SchemaMismatch(
            f"{where} lacks {', '.join(lost[:5])}: somebody dropped it",
            hint="`durable schema` prints the statements; create what is missing again",
        )
    con.execute(PROBE)  # a file that can not be written says so here, and not at the first run


@functools.lru_cache(maxsize=16)
def _template(tables: tuple[tuple[str, str], ...]) -> bytes:
    con = sqlite3.connect(":memory:", isolation_level=None)
    try:
        renames = Renames(Names(tables=dict(tables)))
        con.execute("BEGIN")
        for migration in migrations():
            for statement in statements(migration.text):
                con.execute(renames(statement))
            con.execute(renames(RECORD), (migration.version, migration.checksum, 0))
        con.execute("COMMIT")
        return con.serialize()
    finally:
        con.close()


def template(names: Names) -> bytes:
    """An empty, migrated database as bytes: a store in memory begins as a copy, a thirtieth of the time of running the DDL."""
    return _template(tuple(sorted(names.tables.items())))


def published(names: Names = Names()) -> str:
    """The whole schema as text, for applications that own their migrations (69)."""
    renames = Renames(names)
    head = "-- The tables of durable on SQLite, made from its migrations by `durable schema sqlite`. Do not edit.\n"
    parts = [head]
    for migration in migrations():
        parts.append(f"-- migration {migration.name}")
        parts.extend(f"{renames(_laid_out(statement))};" for statement in statements(migration.text))
        parts.append(
            renames("INSERT INTO durable_schema_version (version, checksum, applied_at)")
            + f"\n    VALUES ({migration.version}, '{migration.checksum}', CAST(strftime('%s', 'now') AS INTEGER) * 1000000);"
        )
    return "\n".join(parts) + "\n"


def _laid_out(statement: str) -> str:
    """One column a line: a changed schema should be a readable difference."""
    if not statement.startswith("CREATE TABLE"):
        return statement
    opening, _, rest = statement.partition("(")
    body, depth, start = rest[:-1].strip(), 0, 0
    lines: list[str] = []
    for place, letter in enumerate(body):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            lines.append(body[start:place].strip())
            start = place + 1
    lines.append(body[start:].strip())
    return f"{opening.strip()} (\n    " + ",\n    ".join(lines) + "\n)"
