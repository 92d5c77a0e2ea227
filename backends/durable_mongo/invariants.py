"""The words in which invariants of stored documents are written, and those of what is beside runs: records, signals, keys, edges, limits.

Those of the runs themselves are in `audit.py`, which looks for all of them. An invariant is written as what breaks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .changes import present
from .operation import Document, Work

Stages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Invariant:
    """`stages` leave what breaks it, with `run` and `detail`."""

    name: str
    text: str
    stages: Callable[[Work], Stages]


def gone(*fields: str) -> list[Document]:
    """One of these fields is absent."""
    return [{field: None} for field in fields]


def there(*fields: str) -> list[Document]:
    """One of these fields is there."""
    return [{field: {"$ne": None}} for field in fields]


def told(run: Any = "$_id", detail: Any = None) -> Document:
    """The stage that leaves what a finding says."""
    return {"$project": {"_id": 0, "run": run, "detail": detail if detail is not None else {"$literal": None}}}


def where(name: str, text: str, broken: Mapping[str, Any], detail: Any = "$status") -> Invariant:
    """An invariant that a filter finds broken."""
    return Invariant(name, text, lambda _: [{"$match": broken}, told(detail=detail)])


def joined(work: Work, table: str, local: Any, foreign: str, *more: Mapping[str, Any], name: str = "found") -> Document:
    """The stage that brings the one document of another collection."""
    pipeline: list[Mapping[str, Any]] = [*more, {"$limit": 1}]
    lookup = {
        "from": work.name_of(table),
        "localField": local,
        "foreignField": foreign,
        "pipeline": pipeline,
        "as": name,
    }
    return {"$lookup": lookup}


def records(work: Work, **more: Any) -> list[Document]:
    """Any record of the run, as `found`."""
    within = {"$expr": {"$and": [{"$gte": ["$_id", "$$low"]}, {"$lt": ["$_id", "$$high"]}]}, **more}
    lookup = {
        "from": work.name_of("durable_step"),
        "let": {"low": {"$concat": ["$_id", "/"]}, "high": {"$concat": ["$_id", "0"]}},
        "pipeline": [{"$match": within}, {"$limit": 1}, {"$project": {"_id": 1}}],
        "as": "found",
    }
    return [{"$lookup": lookup}]


# -- what belongs to runs ----------------------------------------------------------------------------------------------------


def of_a_run(name: str, text: str, condition: Any, detail: Any = "$step_id") -> Invariant:
    """An invariant of what belongs to a run that is there."""
    return Invariant(
        name, text, lambda _: [{"$match": {"run.0": {"$exists": True}, "$expr": condition}}, told("$run_id", detail)]
    )


def orphan(what: str) -> Invariant:
    """Nothing outlives its run."""
    return Invariant(
        f"orphan_{what}", f"a {what} of a run that is not there", lambda _: [{"$match": {"run": []}}, told("$run_id")]
    )


_ATTEMPTS: Final = {"$first": "$run.attempts"}
STEPS: Final[tuple[Invariant, ...]] = (
    of_a_run(
        "attempt_has_no_position",
        "an attempt row with a position, or a record without",
        {"$eq": [{"$eq": ["$kind", "attempt"]}, present("position")]},
    ),
    of_a_run(
        "seen_before_position",
        "a record made after a later one was seen",
        {
            "$or": [
                {"$and": [present("position"), {"$gte": ["$seen", "$position"]}]},
                {"$lt": ["$seen", -1]},
                {"$and": [present("position"), {"$lt": ["$position", 0]}]},
            ]
        },
    ),
    of_a_run(
        "fence_of_a_claim",
        "a record of a claim that there never was",
        {"$or": [{"$lt": ["$fence", 1]}, {"$gt": ["$fence", _ATTEMPTS]}]},
        {"$toString": "$fence"},
    ),
    of_a_run(
        "record_tenant",
        "a record of another tenant than its run",
        {"$ne": ["$tenant_id", {"$first": "$run.tenant_id"}]},
    ),
    orphan("record"),
    Invariant(
        "position_unique",
        "two records at one position",
        lambda _: [
            {"$match": {"position": {"$ne": None}}},
            {"$group": {"_id": {"run": "$run_id", "position": "$position"}, "count": {"$sum": 1}}},
            {"$match": {"count": {"$gt": 1}}},
            told("$_id.run", {"$toString": "$_id.position"}),
        ],
    ),
    Invariant(
        "signal_taken_once",
        "two records take one signal",
        lambda _: [
            {"$match": {"signal_seq": {"$ne": None}}},
            {"$group": {"_id": {"run": "$run_id", "seq": "$signal_seq"}, "count": {"$sum": 1}}},
            {"$match": {"count": {"$gt": 1}}},
            told("$_id.run", {"$toString": "$_id.seq"}),
        ],
    ),
)
SIGNALS: Final[tuple[Invariant, ...]] = (
    orphan("signal"),
    of_a_run(
        "signal_of_its_run",
        "a signal of another tenant than its run, or beyond its wake counter",
        {
            "$or": [
                {"$ne": ["$tenant_id", {"$first": "$run.tenant_id"}]},
                {"$gt": ["$seq", {"$first": "$run.wake_seq"}]},
                {"$lt": ["$seq", 1]},
            ]
        },
        {"$toString": "$seq"},
    ),
)
SCHEDULES: Final[tuple[Invariant, ...]] = (
    Invariant(
        "schedule_of_its_tenant",
        "a schedule whose id is in the form of another tenant",
        lambda _: [
            {"$match": {"$expr": {"$ne": [{"$indexOfBytes": ["$_id", {"$concat": ["$tenant_id", ":"]}]}, 0]}}},
            told({"$literal": None}, "$_id"),
        ],
    ),
)
_SCOPE: Final = {"$cond": [{"$eq": ["$tenant_id", ""]}, "$scope_name", {"$concat": ["$tenant_id", "/", "$scope_name"]}]}
QUEUES: Final[tuple[Invariant, ...]] = (
    Invariant(
        "permits_within_bound",
        "more permits are out than its row says",
        lambda work: [
            {"$match": {"in_flight": {"$exists": True}, "$expr": {"$eq": ["$in_flight.turn", "$turn"]}}},
            {"$set": {"scope": _SCOPE}},
            {
                "$lookup": {
                    "from": work.name_of("durable_run"),
                    "localField": "scope",
                    "foreignField": "permits",
                    "pipeline": [{"$count": "out"}],
                    "as": "found",
                }
            },
            {"$match": {"$expr": {"$gt": [{"$first": "$found.out"}, "$in_flight.most"]}}},
            told({"$literal": None}, "$scope"),
        ],
    ),
)
KEYS: Final = (orphan("key"),)
EDGES: Final = (orphan("edge"),)

__all__ = [
    "EDGES",
    "KEYS",
    "QUEUES",
    "SCHEDULES",
    "SIGNALS",
    "STEPS",
    "Invariant",
    "Stages",
    "gone",
    "joined",
    "records",
    "there",
    "told",
    "where",
]
