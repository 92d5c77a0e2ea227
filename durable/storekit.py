"""Pure functions for backend authors: payloads, stored keys, page cursors, scopes, table names and the plan of a migration.

Backends import these so that they agree on what they store; `durable.testing` imports them to look at what was stored. Nothing
here does I/O, and nothing here knows a database.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast
from uuid import UUID

from .errors import ConfigurationError, Conflict, NotFound, PayloadTooLarge, SchemaMismatch
from .model import ALL, ErrorKind, Instant, Names, NewRecord, Page, RunRecord, Scope, Status

RECORD_ROOM = 1 << 20
"""Bytes that a record may have beyond `max_payload`: its envelope, and the data of an error, whose size is not the user's choice. A value
that was accepted (a signal, a step's result) must not end its run when it is recorded."""

# -- payloads ---------------------------------------------------------------------------------------------------------------


def weigh(payloads: Iterable[str | None], limit: int) -> int:
    """The bytes of these payloads together. Raises PayloadTooLarge for one above the limit, before it can join a shared batch (70)."""
    total = 0
    for text in payloads:
        if text is None:
            continue
        size = len(text)
        if size * 4 > limit and not text.isascii():
            size = len(text.encode("utf-8", errors="surrogatepass"))
        if size > limit:
            raise PayloadTooLarge(f"a payload of {size} bytes; at most {limit} are stored")
        total += size
    return total


def payloads_of(record: NewRecord) -> Iterator[str | None]:
    """The payloads that are written with a record."""
    yield record.result
    yield record.progress
    for child in record.children:
        yield child.input
        yield child.options


# -- values ---------------------------------------------------------------------------------------------------------------

_Value = TypeVar("_Value")


def maker(kind: type[_Value]) -> Callable[[Sequence[Any]], _Value]:
    """A function that makes a value of `durable.model` from its fields, all of them, in their order: a tenth of the time that their
    names take, and a claim makes a hundred runs of fifty fields."""
    make = cast("Callable[..., _Value]", kind)
    size = len(dataclasses.fields(kind))  # type: ignore[arg-type]

    def made(values: Sequence[Any]) -> _Value:
        if len(values) != size:
            raise ValueError(f"{len(values)} fields for a {kind.__name__}, which has {size}")
        return make(*values)

    return made


UNREADABLE: Any = object()
"""What a backend gives to `shown_run` for a field whose stored value it can not convert."""

_KINDS: Mapping[str, tuple[type, Any]] = {
    "str": (str, ""),
    "Json": (str, ""),
    "int": (int, 0),
    "Instant": (int, 0),
    "Micros": (int, 0),
    "bool": (bool, False),
    "bytes": (bytes, b""),
    "UUID": (UUID, None),
    "Status": (Status, Status.FAILED),
    "Mapping[str, str]": (Mapping, {}),
}


def _kind_of(annotation: str) -> tuple[tuple[type, ...], Any]:
    """The classes that a field of this annotation may have, and what is shown for one that is none of them."""
    base = annotation.removesuffix(" | None")
    kind, neutral = _KINDS[base]
    return ((kind,), neutral) if base == annotation else ((kind, type(None)), None)


_RUN_FIELDS = tuple((field.name, *_kind_of(str(field.type))) for field in dataclasses.fields(RunRecord))
_make_run = maker(RunRecord)


def shown_run(values: Sequence[Any]) -> RunRecord:
    """A run for those who look at it, from its fields in their order, whatever its row holds (9).

    One damaged row must not hide the others of its page. So a field that is not what it should be gets a neutral value, the
    status `failed`, and the error of the run names all of them. A claim does not take such a run: it lands `failed`.
    """
    bad = [
        (place, name, neutral)
        for place, (value, (name, kinds, neutral)) in enumerate(zip(values, _RUN_FIELDS, strict=True))
        if not isinstance(value, kinds)
    ]
    if not bad:
        return _make_run(values)
    shown = list(values)
    for place, _, neutral in bad:
        shown[place] = neutral
    names = ", ".join(name for _, name, _ in bad)
    return dataclasses.replace(
        _make_run(shown),
        error=f"its stored row is damaged: {names} can not be read",
        error_kind=ErrorKind.PAYLOAD,
    )


# -- tenants and keys ---------------------------------------------------------------------------------------------------


def tenant_text(tenant: UUID | None) -> str | None:
    """A tenant as it is stored where there is no uuid type: lower-case text (57)."""
    return None if tenant is None else str(tenant)


@functools.lru_cache(maxsize=10_000)
def _uuid(text: str) -> UUID:
    return UUID(text)


def tenant_of(text: str | None) -> UUID | None:
    """The tenant of stored text."""
    return None if text is None else _uuid(text)


def stored_key(tenant: UUID | str | None, key: str) -> str:
    """A key as it is stored: `{tenant_id}:{key}`, or `:{key}` untagged (34). Two tenants never meet in one key."""
    return f":{key}" if tenant is None else f"{tenant}:{key}"


def given_key(stored: str) -> str:
    """The key as the caller passed it. A tenant's id has no colon, so the first one ends it."""
    return stored.partition(":")[2]


def within(tenant: UUID | None, scope: Scope) -> bool:
    """May a call of this scope touch a row of this tenant (57)? None is the untagged rows, never everybody's (59)."""
    return scope is ALL or tenant == scope


def unknown_run(run_id: str) -> NotFound:
    """For a run that is not there, or is another tenant's: the two are told alike (57)."""
    return NotFound(f"there is no run {run_id}", hint="check the id; a run is visible to its own tenant only")


# -- cursors ------------------------------------------------------------------------------------------------------------


def cursor_of(created_at: Instant, run_id: str) -> str:
    """An opaque cursor that continues after this run."""
    return base64.urlsafe_b64encode(json.dumps([created_at, run_id]).encode()).decode().rstrip("=")


def cursor_values(cursor: str) -> tuple[Instant, str]:
    """What a cursor of ours holds. Raises Conflict for one that is not ours."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        found = None
    parts: Sequence[Any] = cast("Sequence[Any]", found) if isinstance(found, list) else []
    if (
        len(parts) != 2
        or type(parts[0]) is not int
        or not isinstance(parts[1], str)
        or not -(2**63) <= parts[0] < 2**63
    ):
        raise Conflict(
            "the cursor is not one that a listing gave",
            hint="pass back the cursor of the page before, or None for the first page",
        )
    return parts[0], parts[1]


def page_of(runs: Sequence[RunRecord], *, more: bool) -> Page:
    """A page of a listing, and the cursor of the next one. A damaged row may have no instant by which the listing could go
    on: then it does so behind the last sound one, or else with the newest."""
    if not more:
        return Page(runs=runs, cursor=None)
    last = next((run for run in reversed(runs) if run.created_at), None)
    return Page(runs=runs, cursor=cursor_of(2**63 - 1, "") if last is None else cursor_of(last.created_at, last.run_id))


# -- table names --------------------------------------------------------------------------------------------------------

TABLES = (
    "durable_run",
    "durable_step",
    "durable_signal",
    "durable_key",
    "durable_schedule",
    "durable_schedule_fire",
    "durable_queue",
    "durable_permit",
    "durable_worker",
    "durable_dependency",
    "durable_schema_version",
)

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,47}", re.ASCII)
_OURS = re.compile(r"\bdurable_[a-z0-9_]+\b", re.ASCII)


class Renames:
    """Puts the configured table names into statements that were written with the default ones.

    Only whole identifiers that begin with one of our table names are replaced, so `durable_run_ready` (an index) follows its
    table. Raises ConfigurationError for a table that we do not have, a name that is no plain identifier, or one used twice.
    """

    def __init__(self, names: Names) -> None:
        for table, name in names.tables.items():
            if table not in TABLES:
                raise ConfigurationError(
                    f"there is no table {table!r} to be renamed", hint="known: " + ", ".join(TABLES)
                )
            if not _IDENTIFIER.fullmatch(name) or name.startswith("sqlite_"):
                raise ConfigurationError(
                    f"{table}: {name!r} can not be a table name",
                    hint="use a-z, 0-9 and _, at most 48 characters, no digit first",
                )
        used = [names.tables.get(table, table) for table in TABLES]
        twice = {name for name in used if used.count(name) > 1}
        if twice:
            raise ConfigurationError(f"one name for two tables: {', '.join(sorted(twice))}")
        self._names = {table: name for table, name in names.tables.items() if table != name}
        self._longest_first = sorted(TABLES, key=len, reverse=True)
        self._known: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def __call__(self, statement: str) -> str:
        """The statement with the configured names; remembered, since statements are constants."""
        known = self._known.get(statement)
        if known is None:
            known = _OURS.sub(self._replace, statement) if self._names else statement
            if len(self._known) < 1_000:
                self._known[statement] = known
        return known

    def table(self, table: str) -> str:
        """The configured name of a table."""
        return self._names.get(table, table)

    def _replace(self, match: re.Match[str]) -> str:
        word = match.group()
        for table in self._longest_first:
            if word == table or word.startswith(table + "_"):
                return self._names.get(table, table) + word[len(table) :]
        return word


# -- migrations ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Migration:
    """A numbered file of DDL, as it is delivered."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """Over what is executed: comments and white space do not count."""
        return hashlib.sha256("\n".join(statements(self.text)).encode()).hexdigest()


def statements(text: str) -> list[str]:
    """The statements of a migration file: split at a semicolon that ends a line, comments taken out."""
    plain = re.sub(r"[ \t]*--[^\n]*", "", text)
    parts = (re.sub(r"\s+", " ", part).strip() for part in re.split(r";[ \t]*(?:\n|\Z)", plain))
    return [part for part in parts if part]


def migrations_of(files: Iterable[tuple[str, str]]) -> Sequence[Migration]:
    """Migrations from (file name, text), in order. Raises ConfigurationError where the numbers have a gap: a broken installation."""
    found = sorted(
        (
            Migration(version=int(name[:4]), name=name.removesuffix(".sql"), text=text)
            for name, text in files
            if name.endswith(".sql")
        ),
        key=lambda migration: migration.version,
    )
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise ConfigurationError(
            "the migrations of this installation are not complete: " + ", ".join(migration.name for migration in found),
            hint="install the package again",
        )
    return found


def pending(applied: Mapping[int, str], wanted: Sequence[Migration]) -> Sequence[Migration]:
    """What is still to be applied. Raises SchemaMismatch for tables newer than this code or migrated by other files (69)."""
    newest = wanted[-1].version
    beyond = max(applied, default=0)
    if beyond > newest:
        raise SchemaMismatch(
            f"the tables have version {beyond}, this code knows up to {newest}",
            hint="upgrade durable-sdk here to the version that migrated them; nothing was changed",
        )
    for migration in wanted:
        known = applied.get(migration.version)
        if known is not None and known != migration.checksum:
            raise SchemaMismatch(
                f"migration {migration.name} was applied with another text than this installation has",
                hint="the tables were made by a changed or unreleased version; use that one, or move the data to a new database",
            )
    return [migration for migration in wanted if migration.version not in applied]


__all__ = [
    "RECORD_ROOM",
    "TABLES",
    "UNREADABLE",
    "Migration",
    "Renames",
    "cursor_of",
    "cursor_values",
    "given_key",
    "maker",
    "migrations_of",
    "page_of",
    "payloads_of",
    "pending",
    "shown_run",
    "statements",
    "stored_key",
    "tenant_of",
    "tenant_text",
    "unknown_run",
    "weigh",
    "within",
]
