"""Rows to values: the column lists of the queries and the functions that read them.

Every operation module selects `RUN_COLUMNS` or `STEP_COLUMNS` and maps with `run_record` or `step_record`. Rows are plain tuples;
values are built by position, since a claim of a hundred runs builds a hundred of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from durable.model import ALL, RecordKind, RunRecord, Scope, Status, StepRecord
from durable.storekit import given_key, stored_key, tenant_of, tenant_text

RUN_COLUMNS: Final = (
    "run_id, name, status, tenant_id, input, output, error, error_kind, error_detail, queue, priority, attempts, failures,"
    " reclaims, submitted, created_at, updated_at, started_at, finished_at, available_at, leased_until, lease_owner,"
    " deadline_at, purge_at, cancel_requested_at, cancel_refused_at, idempotency_key, coalesce_key, sequence_key,"
    " concurrency_key, blocked_on, max_attempts, options, version, fingerprint, seed, wake_seq, wake_after, waiting_for,"
    " compensating, parent_run_id, parent_step_id, detached, schedule_id, scheduled_for, forked_from, replay_family,"
    " mismatch_since, progress, keep, tags"
)
"""What `run_record` reads, in its order. Also usable behind an alias: `run_columns("r")`."""

STEP_COLUMNS: Final = "step_id, kind, position, seen, digest, result, created_at, started_at, fence, signal_seq"
"""What `step_record` reads, in its order."""

STEP_ORDER: Final = "position IS NULL, position, created_at, rowid"
"""The order of a journal: by position, attempt rows last."""

_STATUS: Final = {str(status): status for status in Status}
_KIND: Final = {str(kind): kind for kind in RecordKind}


def of_scope(scope: Scope) -> tuple[bool, str | None]:
    """The two parameters of `(? OR tenant_id IS ?)`: everybody, or else whose rows (57, 59)."""
    return (True, None) if scope is ALL else (False, tenant_text(scope))


def run_columns(alias: str) -> str:
    """RUN_COLUMNS of a table that has an alias in its query."""
    return ", ".join(f"{alias}.{column.strip()}" for column in RUN_COLUMNS.split(","))


def run_record(row: Sequence[Any]) -> RunRecord:
    """The run of a row of RUN_COLUMNS."""
    return RunRecord(
        run_id=row[0],
        name=row[1],
        status=_STATUS[row[2]],
        tenant=tenant_of(row[3]),
        input=row[4],
        output=row[5],
        error=row[6],
        error_kind=row[7],
        error_detail=row[8],
        queue=row[9],
        priority=row[10],
        attempts=row[11],
        failures=row[12],
        reclaims=row[13],
        submitted=row[14],
        created_at=row[15],
        updated_at=row[16],
        started_at=row[17],
        finished_at=row[18],
        available_at=row[19],
        leased_until=row[20],
        lease_owner=row[21],
        deadline_at=row[22],
        purge_at=row[23],
        cancel_requested_at=row[24],
        cancel_refused_at=row[25],
        idempotency_key=None if row[26] is None else given_key(row[26]),
        coalesce_key=None if row[27] is None else given_key(row[27]),
        sequence_key=None if row[28] is None else given_key(row[28]),
        concurrency_key=row[29],
        blocked_on=row[30],
        max_attempts=row[31],
        options=row[32],
        version=row[33],
        fingerprint=row[34],
        seed=row[35],
        wake_seq=row[36],
        wake_after=row[37],
        waiting_for=row[38],
        compensating=bool(row[39]),
        parent_run_id=row[40],
        parent_step_id=row[41],
        detached=bool(row[42]),
        schedule_id=None if row[43] is None else given_key(row[43]),
        scheduled_for=row[44],
        forked_from=row[45],
        replay_family=row[46],
        mismatch_since=row[47],
        progress=row[48],
        keep=row[49],
        tags={} if row[50] == "{}" else json.loads(row[50]),
    )


def step_record(row: Sequence[Any]) -> StepRecord:
    """The record of a row of STEP_COLUMNS."""
    return StepRecord(
        step_id=row[0],
        kind=_KIND[row[1]],
        position=row[2],
        seen=row[3],
        digest=row[4],
        result=row[5],
        at=row[6],
        started_at=row[7],
        fence=row[8],
        signal_seq=row[9],
    )


__all__ = [
    "RUN_COLUMNS",
    "STEP_COLUMNS",
    "STEP_ORDER",
    "given_key",
    "of_scope",
    "run_columns",
    "run_record",
    "step_record",
    "stored_key",
    "tenant_of",
    "tenant_text",
]
