"""Rows to values: the column lists of the statements and the functions that read them.

Every operation module selects `RUN_COLUMNS` or `STEP_COLUMNS` and maps with `run_record` or `step_record`. Rows are plain tuples in the
forms of `adapting.py`; values are built by position, since a claim of a hundred runs builds a hundred of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from durable.model import ALL, RecordKind, RunRecord, Scope, Status, StepRecord
from durable.storekit import UNREADABLE, given_key, maker, shown_run, stored_key

COLUMNS: Final = (
    "run_id", "name", "status", "tenant_id", "input", "output", "error", "error_kind", "error_detail", "queue", "priority",
    "attempts", "failures", "reclaims", "submitted", "created_at", "updated_at", "started_at", "finished_at", "available_at",
    "leased_until", "lease_owner", "deadline_at", "purge_at", "cancel_requested_at", "cancel_refused_at", "idempotency_key",
    "coalesce_key", "sequence_key", "concurrency_key", "blocked_on", "max_attempts", "options", "version", "fingerprint", "seed",
    "wake_seq", "wake_after", "waiting_for", "compensating", "parent_run_id", "parent_step_id", "detached", "schedule_id",
    "scheduled_for", "forked_from", "replay_family", "mismatch_since", "progress", "keep", "tags",
)  # fmt: skip
"""The fields of a RunRecord, in their order."""
RUN_COLUMNS: Final = ", ".join(f"r.{column}" for column in COLUMNS)
"""What `run_record` reads, of a table called r."""
STEP_COLUMNS: Final = (
    "s.step_id, s.kind, s.position, s.seen, s.digest, s.result, s.created_at, s.started_at, s.fence, s.signal_seq"
)
"""What `step_record` reads, of a table called s."""
STEP_ORDER: Final = "s.position NULLS LAST, s.created_at, s.step_id"
"""The order of a journal: by position, attempt rows last."""
LIVE: Final = "('pending', 'running', 'suspended')"
ROUTE: Final = "(r.name || '/' || coalesce(r.version, '') || '@' || coalesce(r.replay_family, ''))"
"""Name, version and replay family in one, as the ready index has them."""
RUNNING: Final = "coalesce(r.status, '') = 'running'"
"""For runs that are looked up by their ids: not a condition by which the server would read all running ones through an index."""
READY: Final = "r.status = 'pending' AND r.available_at IS NULL AND r.blocked_on IS NULL"
IN_SCOPE: Final = "($1 OR r.tenant_id IS NOT DISTINCT FROM $2::uuid)"
"""Everybody's rows, or one tenant's, or the untagged: with the two parameters of `of_scope` first."""

_make_run: Final = maker(RunRecord)
_make_step: Final = maker(StepRecord)
_STATUS: Final = {str(status): status for status in Status}
_KIND: Final = {str(kind): kind for kind in RecordKind}


def of_scope(scope: Scope) -> tuple[bool, UUID | None]:
    """The two parameters of IN_SCOPE: everybody, or else whose rows (57, 59)."""
    return (True, None) if scope is ALL else (False, scope)


def run_record(row: Sequence[Any]) -> RunRecord:
    """The run of a row of RUN_COLUMNS."""
    values = list(row)
    values[2] = _STATUS[row[2]]
    for place in (26, 27, 28, 43):  # stored keys
        if row[place] is not None:
            values[place] = given_key(row[place])
    values[50] = {} if row[50] == "{}" else json.loads(row[50])
    return _make_run(values)


_CONVERTED: Final[Mapping[int, Callable[[Any], Any]]] = {
    2: lambda value: _STATUS[value],
    **dict.fromkeys((26, 27, 28, 43), lambda value: None if value is None else given_key(value)),
    50: json.loads,
}


def run_shown(row: Sequence[Any]) -> RunRecord:
    """The run of such a row for those who look at it, whatever the row holds (see `storekit.shown_run`)."""
    values = list(row)
    for place, convert in _CONVERTED.items():
        try:
            values[place] = convert(values[place])
        except (ValueError, KeyError, TypeError, AttributeError):
            values[place] = UNREADABLE
    return shown_run(values)


def status_shown(text: str) -> Status:
    """The status of stored text; one that is none is shown as `failed`, as by `run_shown`."""
    return _STATUS.get(text, Status.FAILED)


def step_record(row: Sequence[Any]) -> StepRecord:
    """The record of a row that begins with STEP_COLUMNS."""
    return _make_step((row[0], _KIND[row[1]], *row[2:10]))


__all__ = [
    "COLUMNS",
    "IN_SCOPE",
    "LIVE",
    "READY",
    "ROUTE",
    "RUNNING",
    "RUN_COLUMNS",
    "STEP_COLUMNS",
    "STEP_ORDER",
    "given_key",
    "of_scope",
    "run_record",
    "run_shown",
    "status_shown",
    "step_record",
    "stored_key",
]
