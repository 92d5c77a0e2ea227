"""Documents to values: how the runs and records of the contract lie in their collections.

Every operation module maps with `run_record` or `step_record` and asks for a scope with `of_scope`. `_id` is the key, `tenant_id` text
(empty: untagged), instants are dates, payloads JSON text. A field that is not there is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from durable.model import ALL, Instant, RecordKind, RunRecord, Scope, Status, StepRecord
from durable.storekit import UNREADABLE, given_key, maker, shown_run, stored_key, tenant_of

from .operation import Document
from .times import MILLI, instant_of, stored

_FIELDS: Final = tuple((field.name, str(field.type)) for field in dataclasses.fields(RunRecord))
_make_run: Final = maker(RunRecord)
_make_step: Final = maker(StepRecord)
_STATUS: Final = {str(status): status for status in Status}
_KIND: Final = {str(kind): kind for kind in RecordKind}
_END: Final = chr(ord("/") + 1)


class Damaged(ValueError):
    """A stored document that can not be read."""


def tenant_text(tenant: UUID | None) -> str:
    """A tenant as it is stored: a unique index counts an absent field like any other value, so untagged is the empty text."""
    return "" if tenant is None else str(tenant)


def tenant(text: str) -> UUID | None:
    """The tenant of stored text."""
    return tenant_of(text) if text else None


def of_scope(scope: Scope) -> Document:
    """The part of a filter that says whose rows (57, 59)."""
    return {} if scope is ALL else {"tenant_id": tenant_text(scope)}


def sees(scope: Scope, tenant_id: str) -> bool:
    """May a call of this scope touch rows of this stored tenant (57, 59)?"""
    return scope is ALL or tenant_text(scope) == tenant_id


def stored_id(tenant_id: str, key: str) -> str:
    """A key in its stored form, from a tenant as it is stored (34)."""
    return f"{tenant_id}:{key}"


def visible(document: Document | None, scope: Scope) -> bool:
    """Is there a run, and may this scope see it? One that is being purged is gone (61)."""
    return document is not None and "purging_at" not in document and sees(scope, document["tenant_id"])


def instant(document: Mapping[str, Any], name: str) -> Instant | None:
    """A stored instant, or None."""
    value = document.get(name)
    return None if value is None else int(value) * MILLI


def dated(**instants: Instant | None) -> Document:
    """Stamps of a document: those that are."""
    return {name: stored(value) for name, value in instants.items() if value is not None}


def asked(document: Mapping[str, Any]) -> bool:
    """Does it carry an ask to stop that is not refused?"""
    return "cancel_requested_at" in document and "cancel_refused_at" not in document


def route(name: str, version: str | None, family: str | None) -> str:
    """What a claim asks for: name, version and replay family in one (10)."""
    return f"{name}/{version or ''}@{family or ''}"


def run_record(row: Document) -> RunRecord:
    """The run of a document. Raises Damaged."""
    try:
        return _make_run(_values(row))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Damaged(f"the document of run {row.get('_id')!r} can not be read: {error!r}") from error


def run_shown(row: Document) -> RunRecord:
    """The run of a document for those who look at it, whatever the document holds (see `storekit.shown_run`)."""
    try:
        return shown_run(_values(row))
    except (KeyError, ValueError, TypeError, AttributeError):
        return shown_run([_value(row, name, annotation) for name, annotation in _FIELDS])


def status_shown(text: object) -> Status:
    """The status of stored text; one that is none is shown as `failed`, as by `run_shown`."""
    return _STATUS.get(str(text), Status.FAILED)


def _value(row: Document, name: str, annotation: str) -> Any:
    """One field of a damaged document, or that it can not be read either."""
    try:
        match name:
            case "run_id":
                return row["_id"]
            case "status":
                return _STATUS[row["status"]]
            case "tenant":
                return tenant(row["tenant_id"])
            case "lease_owner":
                return row.get("claim_token")
            case "wake_after":
                return int(row.get(name, 0))
            case "tags":
                return {tag["k"]: tag["v"] for tag in row.get("tags") or ()}
            case "idempotency_key" | "coalesce_key" | "sequence_key" | "schedule_id":
                return _given(row, name)
            case _ if annotation.startswith("Instant"):
                return instant(row, name)
            case _ if annotation == "int":
                return int(row[name])
            case _ if annotation == "bool":
                return bool(row.get(name))
            case _:
                return row.get(name)
    except (KeyError, ValueError, TypeError, AttributeError):
        return UNREADABLE


def _values(row: Document) -> Sequence[Any]:
    get = row.get
    seed, tags = row["seed"], get("tags")
    if not isinstance(row["input"], str) or not isinstance(seed, bytes):
        raise TypeError("input is text and the seed is bytes")
    available_at = instant(row, "available_at")
    return (
        row["_id"], row["name"], _STATUS[row["status"]], tenant(row["tenant_id"]), row["input"], get("output"), get("error"),
        get("error_kind"), get("error_detail"), row["queue"], int(row["priority"]), row["attempts"], row["failures"],
        row["reclaims"], int(row["submitted"]), int(row["created_at"]) * MILLI, int(row["updated_at"]) * MILLI,
        instant(row, "started_at"), instant(row, "finished_at"),
        instant(row, "release_at") if available_at is None else available_at, instant(row, "leased_until"), get("claim_token"),
        instant(row, "deadline_at"), instant(row, "purge_at"), instant(row, "cancel_requested_at"),
        instant(row, "cancel_refused_at"), _given(row, "idempotency_key"), _given(row, "coalesce_key"),
        _given(row, "sequence_key"), get("concurrency_key"), get("blocked_on"), get("max_attempts"), get("options"),
        get("version"), get("fingerprint"), seed, int(row["wake_seq"]), int(get("wake_after", 0)), get("waiting_for"),
        bool(get("compensating")), get("parent_run_id"), get("parent_step_id"), bool(get("detached")),
        _given(row, "schedule_id"), instant(row, "scheduled_for"), get("forked_from"), get("replay_family"),
        instant(row, "mismatch_since"), get("progress"), get("keep"),
        {tag["k"]: tag["v"] for tag in tags} if tags else {},
    )  # fmt: skip


def _given(row: Document, name: str) -> str | None:
    value = row.get(name)
    return None if value is None else given_key(value)


def step_record(row: Document) -> StepRecord:
    """The record of a document. Raises Damaged."""
    try:
        get = row.get
        return _make_step(
            (
                row["step_id"], _KIND[row["kind"]], get("position"), row["seen"], row["digest"], row["result"],
                int(row["created_at"]) * MILLI, instant(row, "started_at"), row["fence"], get("signal_seq"),
            )
        )  # fmt: skip
    except (KeyError, ValueError, TypeError) as error:
        raise Damaged(f"the record {row.get('_id')!r} can not be read: {error!r}") from error


def in_order(rows: Sequence[Document]) -> list[StepRecord]:
    """A journal: by position, attempt rows last, those as they were made."""
    return [
        step_record(row)
        for row in sorted(
            rows,
            key=lambda row: (
                row.get("position") is None,
                row.get("position") or 0,
                int(row["created_at"]),
                row["written"],
            ),
        )
    ]


def belonging_to(run_id: str) -> Document:
    """The range of `_id` of everything that is stored under a run: its records, its signals."""
    return {"_id": {"$gte": f"{run_id}/", "$lt": f"{run_id}{_END}"}}


__all__ = [
    "Damaged",
    "asked",
    "belonging_to",
    "dated",
    "given_key",
    "in_order",
    "instant",
    "instant_of",
    "of_scope",
    "route",
    "run_record",
    "sees",
    "step_record",
    "stored_id",
    "stored_key",
    "tenant",
    "tenant_text",
    "visible",
]
