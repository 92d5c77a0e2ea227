"""Rows to values: the column lists of the queries and the functions that read them.

Every operation module selects `RUN_COLUMNS` or `STEP_COLUMNS` and maps with `run_record` or `step_record`. Rows are plain tuples;
values are built by position, since a claim of a hundred runs builds a hundred of them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from durable.model import ALL, RecordKind, RunRecord, Scope, Status, StepRecord
from durable.storekit import UNREADABLE, given_key, maker, shown_run, stored_key, tenant_of, tenant_text

RUN_COLUMNS: Final = (
    "run_id, name, status, tenant_id, input, output, error, error_kind, error_detail, queue, priority, attempts, failures,"
    " reclaims, submitted, created_at, updated_at, started_at, finished_at, available_at, leased_until, lease_owner,"
    " deadline_at, purge_at, cancel_requested_at, cancel_refused_at, idempotency_key, coalesce_key, sequence_key,"
    " concurrency_key, blocked_on, max_attempts, options, version, fingerprint, seed, wake_seq, wake_after, waiting_for,"
    " compensating, parent_run_id, parent_step_id, detached, schedule_id, scheduled_for, forked_from, replay_family,"
    " mismatch_since, progress, keep, tags"
)
"""What `run_record` reads: the fields of a RunRecord, in their order. Behind an alias: `run_columns("r")`."""

_RUN_WIDTH: Final = RUN_COLUMNS.count(",") + 1

STEP_COLUMNS: Final = "step_id, kind, position, seen, digest, result, created_at, started_at, fence, signal_seq"
"""What `step_record` reads: the fields of a StepRecord, in their order."""

STEP_ORDER: Final = "position IS NULL, position, created_at, rowid"
"""The order of a journal: by position, attempt rows last."""

_make_run: Final = maker(RunRecord)
_make_step: Final = maker(StepRecord)
_STATUS: Final = {str(status): status for status in Status}
_KIND: Final = {str(kind): kind for kind in RecordKind}


def of_scope(scope: Scope) -> tuple[bool, str | None]:
    """The two parameters of `(? OR tenant_id IS ?)`: everybody, or else whose rows (57, 59)."""
    return (True, None) if scope is ALL else (False, tenant_text(scope))


def run_columns(alias: str) -> str:
    """RUN_COLUMNS of a table that has an alias in its query."""
    return ", ".join(f"{alias}.{column.strip()}" for column in RUN_COLUMNS.split(","))


def run_record(row: Sequence[Any]) -> RunRecord:
    """The run of a row that begins with RUN_COLUMNS."""
    values = list(row[:_RUN_WIDTH])
    values[2] = _STATUS[row[2]]
    values[3] = tenant_of(row[3])
    for place in (26, 27, 28, 43):  # stored keys
        if row[place] is not None:
            values[place] = given_key(row[place])
    values[39] = bool(row[39])
    values[42] = bool(row[42])
    values[50] = {} if row[50] == "{}" else json.loads(row[50])
    return _make_run(values)


_CONVERTED: Final[Mapping[int, Callable[[Any], Any]]] = {
    2: lambda value: _STATUS[value],
    3: tenant_of,
    **dict.fromkeys((26, 27, 28, 43), lambda value: None if value is None else given_key(value)),
    39: bool,
    42: bool,
    50: json.loads,
}


def run_shown(row: Sequence[Any]) -> RunRecord:
    """The run of such a row for those who look at it, whatever the row holds (see `storekit.shown_run`)."""
    values = list(row[:_RUN_WIDTH])
    for place, convert in _CONVERTED.items():
        try:
            values[place] = convert(values[place])
        except (ValueError, KeyError, TypeError, AttributeError):
            values[place] = UNREADABLE
    return shown_run(values)


def status_shown(text: object) -> Status:
    """The status of stored text; one that is none is shown as `failed`, as by `run_shown`."""
    return _STATUS.get(str(text), Status.FAILED)


def rows_shown(con: sqlite3.Connection, statement: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The rows of a query for those who look; text that is not UTF-8 comes as bytes, which no text field takes."""
    try:
        return con.execute(statement, values).fetchall()
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) is not None:
            raise  # a fault of SQLite's own; text that can not be decoded has no code
        con.text_factory = _text_or_bytes
        try:
            return con.execute(statement, values).fetchall()
        finally:
            con.text_factory = str


def _text_or_bytes(stored: bytes) -> str | bytes:
    try:
        return stored.decode()
    except UnicodeDecodeError:
        return stored


def step_record(row: Sequence[Any]) -> StepRecord:
    """The record of a row that begins with STEP_COLUMNS."""
    return _make_step((row[0], _KIND[row[1]], *row[2:10]))


__all__ = [
    "RUN_COLUMNS",
    "STEP_COLUMNS",
    "STEP_ORDER",
    "given_key",
    "of_scope",
    "rows_shown",
    "run_columns",
    "run_record",
    "run_shown",
    "status_shown",
    "step_record",
    "stored_key",
    "tenant_of",
    "tenant_text",
]
