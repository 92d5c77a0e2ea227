"""The schema: the numbered migrations of this package, how they are applied, what must be there, and the whole as text (semantics 69).

`store.py` calls `migrate` and `status`, `contact.py` asks `status` before the first operation, `durable schema` publishes `published`.
Migrations run one after the other under an advisory lock that another connection holds in an open transaction: it ends with the
process, works through a pooler, and is asked for again and again instead of waited for, because an index that is built concurrently
waits for everybody who waits. An index of ours that is missing or was left invalid is built again, concurrently.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.resources
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from durable.errors import ConfigurationError, StoreUnavailable
from durable.model import Names, SchemaStatus
from durable.storekit import Migration, migrations_of, pending, statements

from .connection import BEGIN, Database
from .names import VIEWS, Naming
from .operation import Ask, Row

LOCK: Final = 0x6D696772
"""The second half of the advisory lock of migrations; the first is the installation's own number."""
LOCK_PAUSE: Final = 0.05
LOCK_TIMEOUT: Final = "SELECT set_config('lock_timeout', '500ms', true)"
LOCK_PATIENCE: Final = 3_600.0
"""Seconds that a migration waits for another one: an index on a large table takes its time."""

APPLIED: Final = "SELECT version, checksum FROM durable_schema_version ORDER BY version"
RECORD: Final = "INSERT INTO durable_schema_version (version, name, checksum) VALUES ($1, $2, $3)"
COLUMNS: Final = """
SELECT c.relname, a.attname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE n.nspname = $1 AND c.relkind IN ('r', 'p', 'v')
"""
INDEXES: Final = """
SELECT c.relname, i.indisvalid AND i.indisready FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace JOIN pg_catalog.pg_index AS i ON i.indexrelid = c.oid
WHERE n.nspname = $1
"""
SCHEMA_THERE: Final = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1"
TRY_LOCK: Final = "SELECT pg_try_advisory_xact_lock($1, $2)"
# Who holds the lock does nothing meanwhile, for as long as a build takes: no time-out of the role may end that transaction.
NO_TIMEOUTS: Final = """
SELECT set_config(name, '0', true) FROM pg_catalog.pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
"""

_TABLE: Final = re.compile(r"CREATE TABLE (\w+) \((.*?)\)( WITH \(.*\))?$")
_VIEW: Final = re.compile(r"CREATE (?:OR REPLACE )?VIEW (\w+)")
_INDEX: Final = re.compile(r"CREATE (UNIQUE )?INDEX (?:CONCURRENTLY )?(?:IF NOT EXISTS )?(\w+) ON (\w+)")
_ADDED: Final = re.compile(r"ALTER TABLE (\w+) ADD COLUMN (?:IF NOT EXISTS )?(\w+)")
_DROPPED: Final = re.compile(r"DROP INDEX (?:CONCURRENTLY )?(?:IF EXISTS )?(\w+)")
_NO_COLUMN: Final = ("PRIMARY KEY", "CONSTRAINT", "CHECK", "UNIQUE", "'")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What the migrations make, by default names."""

    columns: Mapping[str, Sequence[str]]
    """Of each table; none for a view."""
    indexes: Mapping[str, str]
    """Each index with the statement that makes it."""
    unique: frozenset[str]
    """Indexes without which a key could be given twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What is there, by configured names."""

    applied: Mapping[int, str] | None
    """None: there is no version table."""
    missing: Sequence[str]
    """Tables, columns and views."""
    broken: Sequence[str]
    """Indexes that are missing or invalid."""
    broken_unique: Sequence[str]

    @property
    def status(self) -> SchemaStatus:
        """As the contract says it."""
        return SchemaStatus(
            found=None if self.applied is None else max(self.applied, default=0),
            wanted=migrations()[-1].version,
            missing=[*self.missing, *self.broken],
        )


@functools.cache
def migrations() -> Sequence[Migration]:
    """The migrations of this installation, in order."""
    folder = importlib.resources.files(__package__ or "").joinpath("migrations")
    found = migrations_of((entry.name, entry.read_text(encoding="utf-8")) for entry in folder.iterdir())
    for migration in found:
        transactional(migration)
    return found


def transactional(migration: Migration) -> bool:
    """Does it run in one transaction? Its first line says so. Raises ConfigurationError where it does not."""
    mark = migration.text.partition("\n")[0].strip()
    if mark not in ("-- transactional", "-- not transactional"):
        raise ConfigurationError(f"migration {migration.name} does not say whether it is transactional")
    return mark == "-- transactional"


def wanted_of(found: Sequence[Migration]) -> Wanted:
    """What a list of migrations makes, read from their text."""
    columns: dict[str, list[str]] = {}
    indexes: dict[str, str] = {}
    unique: set[str] = set()
    for statement in (one for migration in found for one in statements(migration.text)):
        if match := _TABLE.match(statement):
            columns[match[1]] = [word for word in map(_first_word, _parts(match[2])) if word]
        elif match := _VIEW.match(statement):
            columns[match[1]] = []
        elif match := _INDEX.match(statement):
            indexes[match[2]] = statement
            if match[1]:
                unique.add(match[2])
        elif match := _ADDED.match(statement):
            columns[match[1]].append(match[2])
        elif match := _DROPPED.match(statement):
            indexes.pop(match[1], None)
            unique.discard(match[1])
    return Wanted(columns, indexes, frozenset(unique))


@functools.cache
def _wanted() -> Wanted:
    return wanted_of(migrations())


def _parts(body: str) -> list[str]:
    """The parts of a list at its commas, but not inside brackets."""
    parts: list[str] = []
    depth = start = 0
    for place, letter in enumerate(body):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(body[start:place].strip())
            start = place + 1
    return [*parts, body[start:].strip()]


def _first_word(part: str) -> str:
    return "" if part.startswith(_NO_COLUMN) else part.partition(" ")[0]


# -- what is there ----------------------------------------------------------------------------------------------------------


async def look(database: Database, con: psycopg.AsyncConnection[Row], wanted: Wanted | None = None) -> Found:
    """Compare the catalog with what the migrations make."""
    wanted = wanted or _wanted()
    naming = database.naming
    columns, indexes = await database.ask(con, [Ask(COLUMNS, (naming.schema,)), Ask(INDEXES, (naming.schema,))])
    there: dict[str, set[str]] = {}
    for table, column in columns.rows:
        there.setdefault(table, set()).add(column)
    applied = None
    if naming.plain("durable_schema_version") in there:
        applied = {row[0]: row[1] for row in (await database.ask(con, [Ask(APPLIED)]))[0].rows}
    missing: list[str] = []
    for table, names in wanted.columns.items():
        found = there.get(naming.plain(table))
        if found is None:
            missing.append(naming.plain(table))
        else:
            missing += [f"{naming.plain(table)}.{name}" for name in names if name not in found]
    sound = {name for name, valid in indexes.rows if valid}
    broken = [name for name in wanted.indexes if naming.plain(name) not in sound]
    return Found(
        applied=applied,
        missing=sorted(missing),
        broken=sorted(map(naming.plain, broken)),
        broken_unique=sorted(naming.plain(name) for name in broken if name in wanted.unique),
    )


async def status(database: Database) -> SchemaStatus:
    """What is there, without changing it."""
    async with database.direct() as con:
        return (await look(database, con)).status


# -- migrating --------------------------------------------------------------------------------------------------------------


async def migrate(database: Database, todo: Sequence[Migration] | None = None) -> SchemaStatus:
    """Apply what is missing. Started many times at once, one does it and the others find it; interrupted, the next one goes on."""
    todo = migrations() if todo is None else todo
    async with database.direct() as guard, database.direct() as con, _alone(database, guard):
        await _make_schema(database, con)
        found = await look(database, con, wanted_of(todo))
        for migration in pending(found.applied or {}, todo):
            await guard.execute("SELECT 1")  # who lost the lock stops here
            await _apply(database, con, migration)
        await _rebuild(database, con, wanted_of(todo))
        return (await look(database, con, wanted_of(todo))).status


@asynccontextmanager
async def _alone(database: Database, guard: psycopg.AsyncConnection[Row]) -> AsyncGenerator[None, None]:
    loop = asyncio.get_running_loop()
    until = loop.time() + LOCK_PATIENCE
    while True:
        await database.ask(guard, [Ask(BEGIN)])
        await database.ask(guard, [Ask(NO_TIMEOUTS)])
        (answer,) = await database.ask(guard, [Ask(TRY_LOCK, (database.naming.key, LOCK))])
        if answer.rows[0][0]:
            # By the simple protocol: the extended one keeps the snapshot of its last statement, and a concurrent build would wait for it.
            await guard.execute("SELECT 1")
            break
        await database.ask(guard, [Ask("ROLLBACK")])
        if loop.time() > until:
            raise StoreUnavailable("another migration has not ended in an hour", hint="look for it in pg_stat_activity")
        await asyncio.sleep(LOCK_PAUSE)
    yield
    await database.ask(guard, [Ask("ROLLBACK")])


async def _make_schema(database: Database, con: psycopg.AsyncConnection[Row]) -> None:
    (answer,) = await database.ask(con, [Ask(SCHEMA_THERE, (database.naming.schema,))])
    if not answer.rows:
        await con.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(database.naming.schema)))


async def _apply(database: Database, con: psycopg.AsyncConnection[Row], migration: Migration) -> None:
    record = Ask(RECORD, (migration.version, migration.name, migration.checksum))
    if transactional(migration):
        asks = [Ask(LOCK_TIMEOUT), *map(Ask, statements(migration.text)), record]
        await _patiently(lambda: _in_transaction(database, con, asks))
        return
    for statement in statements(migration.text):
        match = _INDEX.match(statement)
        if match is not None:  # an earlier start of this migration may have left it, whole or invalid
            await _build(database, con, match[2], statement)
        elif _DROPPED.match(statement):
            drop = Ask(_DROPPED.sub(r"DROP INDEX CONCURRENTLY IF EXISTS \1", statement))
            await _patiently(lambda drop=drop: database.ask(con, [drop]))  # type: ignore[misc]
        else:
            asks = [Ask(LOCK_TIMEOUT), Ask(statement)]
            await _patiently(lambda asks=asks: _in_transaction(database, con, asks))  # type: ignore[misc]
    await database.ask(con, [record])


async def _in_transaction(database: Database, con: psycopg.AsyncConnection[Row], asks: Sequence[Ask]) -> None:
    await database.ask(con, [Ask(BEGIN)])
    try:
        for ask in asks:
            await database.ask(con, [ask])
        await database.ask(con, [Ask("COMMIT")])
    except psycopg.Error:
        if not con.closed:
            await con.execute("ROLLBACK")
        raise


async def _patiently(attempt: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """A change of a table waits behind whoever reads it, and everybody else waits behind the change: so it waits a moment only, lets
    the others through, and tries again."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LOCK_PATIENCE
    while True:
        try:
            await attempt()
            return
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if loop.time() > until:
                raise
        await asyncio.sleep(LOCK_PAUSE * 10)


async def _rebuild(database: Database, con: psycopg.AsyncConnection[Row], wanted: Wanted) -> None:
    """Indexes that somebody dropped, or that a build which was interrupted left invalid."""
    broken = (await look(database, con, wanted)).broken
    for name, statement in wanted.indexes.items():
        if database.naming.plain(name) in broken:
            await _build(database, con, name, statement)


async def _build(database: Database, con: psycopg.AsyncConnection[Row], name: str, statement: str) -> None:
    """Concurrently. A build whose process was killed may go on in the server: who meets it in a dead-lock looks again."""
    await _patiently(lambda: _build_once(database, con, name, statement))


async def _build_once(database: Database, con: psycopg.AsyncConnection[Row], name: str, statement: str) -> None:
    (answer,) = await database.ask(con, [Ask(INDEXES, (database.naming.schema,))])
    there = {row[0]: row[1] for row in answer.rows}.get(database.naming.plain(name))
    if there is True:
        return
    if there is False:
        there_name = sql.Identifier(database.naming.schema, database.naming.plain(name))
        await con.execute(sql.SQL("DROP INDEX CONCURRENTLY {}").format(there_name))
    await database.ask(
        con, [Ask(re.sub(r"INDEX (?:CONCURRENTLY )?(?:IF NOT EXISTS )?", "INDEX CONCURRENTLY ", statement, count=1))]
    )


# -- the whole as text --------------------------------------------------------------------------------------------------------


def published(names: Names = Names()) -> str:
    """The whole schema as text, for applications that own their migrations. Run it in one transaction with the schema in place."""
    naming = Naming(names)
    parts = ["-- The tables of durable on PostgreSQL, made from its migrations by `durable schema`. Do not edit.\n"]
    for migration in migrations():
        parts.append(f"-- migration {migration.name}")
        for statement in statements(migration.text):
            plain = re.sub(r"INDEX CONCURRENTLY (?:IF NOT EXISTS )?", "INDEX ", statement)
            parts.append(f"{naming(_laid_out(plain))};")
        parts.append(
            naming("INSERT INTO durable_schema_version (version, name, checksum)")
            + f"\n    VALUES ({migration.version}, '{migration.name}', '{migration.checksum}');"
        )
    return "\n".join(parts) + "\n"


def row_security(names: Names = Names()) -> str:
    """The policies by which the database refuses another tenant's rows to a role that is bound to one, as text: an option (57)."""
    naming = Naming(names)
    schema = sql.Identifier(naming.schema).as_string()
    text = importlib.resources.files(__package__ or "").joinpath("row_security.sql").read_text(encoding="utf-8")
    return f"SET LOCAL search_path = {schema}, pg_temp;\n\n{naming(text).replace('@schema', schema)}"


def _laid_out(statement: str) -> str:
    """One column a line: a changed schema should be a readable difference."""
    match = _TABLE.match(statement)
    if match is None:
        return statement
    return f"CREATE TABLE {match[1]} (\n    " + ",\n    ".join(_parts(match[2])) + f"\n){match[3] or ''}"


__all__ = [
    "VIEWS",
    "Found",
    "Wanted",
    "look",
    "migrate",
    "migrations",
    "published",
    "status",
    "transactional",
    "wanted_of",
]
