"""Every invariant that stored documents can break, one condition each; an empty answer is a sound store. Only reads, as of one moment.

`store.py` calls `audit`, for the command of that name and after every test of the conformance suite. Conditions of one collection are
looked for together, in one pass over it. A condition gives the run and what is wrong with it; its name is stable, for machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from durable.model import ALL, Finding, Scope

from .changes import ENDED, LIVE, ROUTE, present
from .operation import Document, Work
from .rows import of_scope

MOST: Final = 100
"""Findings of one invariant that are told: where one is broken everywhere, more tell nothing more."""

Stages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Invariant:
    """`stages` leave what breaks it, with `run` and `detail`."""

    name: str
    text: str
    stages: Callable[[Work], Stages]


def _gone(*fields: str) -> list[Document]:
    return [{field: None} for field in fields]


def _there(*fields: str) -> list[Document]:
    return [{field: {"$ne": None}} for field in fields]


def _told(run: Any = "$_id", detail: Any = None) -> Document:
    return {"$project": {"_id": 0, "run": run, "detail": detail if detail is not None else {"$literal": None}}}


def _where(name: str, text: str, where: Mapping[str, Any], detail: Any = "$status") -> _Invariant:
    return _Invariant(name, text, lambda _: [{"$match": where}, _told(detail=detail)])


def _joined(
    work: Work, table: str, local: Any, foreign: str, *more: Mapping[str, Any], name: str = "found"
) -> Document:
    pipeline: list[Mapping[str, Any]] = [*more, {"$limit": 1}]
    lookup = {
        "from": work.name_of(table),
        "localField": local,
        "foreignField": foreign,
        "pipeline": pipeline,
        "as": name,
    }
    return {"$lookup": lookup}


def _records(work: Work, **where: Any) -> list[Document]:
    """Any record of the run, as `found`."""
    within = {"$expr": {"$and": [{"$gte": ["$_id", "$$low"]}, {"$lt": ["$_id", "$$high"]}]}, **where}
    lookup = {
        "from": work.name_of("durable_step"),
        "let": {"low": {"$concat": ["$_id", "/"]}, "high": {"$concat": ["$_id", "0"]}},
        "pipeline": [{"$match": within}, {"$limit": 1}, {"$project": {"_id": 1}}],
        "as": "found",
    }
    return [{"$lookup": lookup}]


_LIVE: Final = {"$in": list(LIVE)}
_ENDED: Final = {"$in": list(ENDED)}
_BAD_ENDS: Final = [status for status in ENDED if status != "completed"]


def _expected_open(work: Work) -> Stages:
    """Unreleased nodes with the runs before them that have not completed."""
    edges = {
        "from": work.name_of("durable_dependency"),
        "let": {"low": {"$concat": ["$_id", "/"]}, "high": {"$concat": ["$_id", "0"]}},
        "pipeline": [
            {"$match": {"$expr": {"$and": [{"$gte": ["$_id", "$$low"]}, {"$lt": ["$_id", "$$high"]}]}}},
            _joined(work, "durable_run", "depends_on", "_id", {"$project": {"status": 1}}, name="before"),
            {"$project": {"status": {"$ifNull": [{"$first": "$before.status"}, "missing"]}}},
        ],
        "as": "edges",
    }
    return [{"$match": {"status": "suspended", "attempts": 0}}, {"$lookup": edges}]


_READY: Final = {
    "$and": [
        {"$eq": ["$status", "pending"]},
        {"$not": present("available_at")},
        {"$not": present("blocked_on")},
    ]
}


def _key_of_other_tenant() -> Document:
    fields = ("idempotency_key", "coalesce_key", "sequence_key", "schedule_id")
    return {
        "$expr": {
            "$or": [
                {
                    "$and": [
                        present(field),
                        {
                            "$ne": [
                                {"$indexOfBytes": [f"${field}", {"$concat": ["$tenant_id", ":"]}]},
                                0,
                            ]
                        },
                    ]
                }
                for field in fields
            ]
        }
    }


RUNS: Final[tuple[_Invariant, ...]] = (
    # -- the state of a run
    _where(
        "output_only_completed",
        "an output although it did not complete",
        {"output": {"$ne": None}, "status": {"$ne": "completed"}},
    ),
    _where(
        "completed_with_output",
        "completed without an output, or with an error",
        {"status": "completed", "$or": [*_gone("output"), *_there("error", "error_kind")]},
    ),
    _where(
        "end_with_error",
        "it did not complete and says no reason",
        {"status": {"$in": _BAD_ENDS}, "$or": _gone("error", "error_kind")},
    ),
    _where(
        "terminal_has_stamps",
        "terminal without finished_at or purge_at",
        {"status": _ENDED, "$or": _gone("finished_at", "purge_at")},
    ),
    _where(
        "live_has_no_stamps",
        "live with finished_at or purge_at",
        {"status": _LIVE, "$or": _there("finished_at", "purge_at")},
    ),
    _where(
        "terminal_waits_for_nothing",
        "terminal, and still due, blocked or waiting",
        {"status": _ENDED, "$or": _there("available_at", "release_at", "blocked_on", "waiting_for", "line", "ready")},
    ),
    _where("known_status", "a status that there is not", {"status": {"$nin": [*LIVE, *ENDED]}}),
    # -- ownership
    _where(
        "lease_only_running",
        "a lease although it is not running",
        {"leased_until": {"$ne": None}, "status": {"$ne": "running"}},
    ),
    _where(
        "running_has_lease",
        "running without a lease, a mark, a claim or a start",
        {
            "status": "running",
            "$or": [*_gone("leased_until", "claim_token", "mark", "started_at"), {"attempts": {"$lt": 1}}],
        },
    ),
    _where(
        "running_is_not_held_back",
        "running, and still due or blocked",
        {"status": "running", "$or": _there("blocked_on", "available_at")},
    ),
    _where(
        "ready_is_true",
        "in the index of what is ready and not ready, or the other way round",
        {"$expr": {"$ne": [_READY, {"$eq": ["$ready", True]}]}},
    ),
    _where(
        "route_fits",
        "claimed by another name, version or family than it has",
        {"status": {"$in": ["pending", "suspended"]}, "$expr": {"$ne": ["$route", ROUTE]}},
        "$route",
    ),
    _where(
        "counters_fit",
        "more failures or reclaims than claims, or a counter below 0",
        {
            "$expr": {
                "$or": [
                    {"$gt": ["$failures", "$attempts"]},
                    {"$gt": ["$reclaims", "$attempts"]},
                    {"$lt": [{"$min": ["$failures", "$reclaims", "$wake_seq", {"$ifNull": ["$wake_after", 0]}]}, 0]},
                ]
            }
        },
        {
            "$concat": [
                *({"$toString": "$attempts"}, " claims, ", {"$toString": "$failures"}, " failures, "),
                *({"$toString": "$reclaims"}, " reclaims"),
            ]
        },
    ),
    _where(
        "due_before_deadline",
        "available later than its deadline",
        {
            "status": _LIVE,
            "deadline_at": {"$ne": None},
            "$expr": {"$gt": [{"$ifNull": ["$available_at", "$release_at"]}, "$deadline_at"]},
        },
    ),
    _Invariant(
        "family_has_records",
        "it is bound to a replay family without a record",
        lambda work: [
            {"$match": {"status": {"$in": ["pending", "suspended"]}, "replay_family": {"$ne": None}}},
            *_records(work),
            {"$match": {"found": []}},
            _told(detail="$replay_family"),
        ],
    ),
    _Invariant(
        "records_have_family",
        "it has records that any interpreter might continue",
        lambda work: [
            {"$match": {"status": {"$in": ["pending", "suspended"]}, "replay_family": None}},
            *_records(work),
            {"$match": {"found": {"$ne": []}}},
            _told(),
        ],
    ),
    _Invariant(
        "compensating_has_record",
        "it has steps to undo, and no record of any",
        lambda work: [
            {"$match": {"compensating": True}},
            *_records(work, kind="compensation"),
            {"$match": {"found": []}},
            _told(),
        ],
    ),
    # -- waiting
    _where(
        "only_suspended_waits",
        "it waits for ends of runs although it is not suspended",
        {"wake_after": {"$gt": 0}, "status": {"$ne": "suspended"}},
    ),
    _Invariant(
        "unreleased_counts",
        "an unreleased node whose count is not that of the open runs before it",
        lambda work: [
            *_expected_open(work),
            {
                "$set": {
                    "open": {"$size": {"$filter": {"input": "$edges", "cond": {"$ne": ["$$this.status", "completed"]}}}}
                }
            },
            {
                "$match": {
                    "$expr": {"$or": [{"$eq": ["$open", 0]}, {"$ne": ["$open", {"$ifNull": ["$wake_after", 0]}]}]}
                }
            },
            _told(detail="$wake_after"),
        ],
    ),
    _Invariant(
        "upstream_lands",
        "an unreleased node behind a run that ended and did not complete",
        lambda work: [*_expected_open(work), {"$match": {"edges.status": {"$in": _BAD_ENDS}}}, _told()],
    ),
    # -- keys and tenants
    _Invariant(
        "key_is_registered",
        "its idempotency key is not registered as its own",
        lambda work: [
            {"$match": {"idempotency_key": {"$ne": None}}},
            {
                "$lookup": {
                    "from": work.name_of("durable_key"),
                    "localField": "idempotency_key",
                    "foreignField": "_id",
                    "as": "found",
                }
            },
            {"$match": {"$expr": {"$not": {"$in": ["$_id", "$found.run_id"]}}}},
            _told(detail="$idempotency_key"),
        ],
    ),
    _where("keys_of_its_tenant", "a key in the form of another tenant", _key_of_other_tenant(), "$tenant_id"),
    _Invariant(
        "coalesce_unique",
        "two runs that a submit of one coalesce key could join",
        lambda _: [
            {"$match": {"coalesce_key": {"$ne": None}, "status": "pending", "attempts": 0}},
            {"$group": {"_id": "$coalesce_key", "count": {"$sum": 1}, "first": {"$min": "$_id"}}},
            {"$match": {"count": {"$gt": 1}}},
            _told("$first", "$_id"),
        ],
    ),
    # -- children and sequences
    _Invariant(
        "child_of_its_tenant",
        "a child of another tenant than its parent",
        lambda work: [
            {"$match": {"parent_run_id": {"$ne": None}}},
            _joined(work, "durable_run", "parent_run_id", "_id", {"$project": {"tenant_id": 1}}),
            {"$match": {"found": {"$ne": []}, "$expr": {"$ne": [{"$first": "$found.tenant_id"}, "$tenant_id"]}}},
            _told(detail="$parent_run_id"),
        ],
    ),
    _where(
        "permit_in_flight",
        "a permit of a run that is not running",
        {"permits.0": {"$exists": True}, "status": {"$ne": "running"}},
    ),
    _Invariant(
        "sequence_one_at_a_time",
        "several runs of one sequence at once",
        lambda _: [
            {"$match": {"sequence_key": {"$ne": None}, "status": _LIVE, "blocked_on": {"$ne": "sequence"}}},
            {"$group": {"_id": "$sequence_key", "count": {"$sum": 1}, "first": {"$min": "$_id"}}},
            {"$match": {"count": {"$gt": 1}}},
            _told("$first", "$_id"),
        ],
    ),
    _Invariant(
        "sequence_has_head",
        "runs of a sequence that all wait for their turn",
        lambda _: [
            {"$match": {"sequence_key": {"$ne": None}, "status": _LIVE}},
            {
                "$group": {
                    "_id": "$sequence_key",
                    "first": {"$min": "$_id"},
                    "blocks": {"$addToSet": {"$ifNull": ["$blocked_on", ""]}},
                }
            },
            {"$match": {"blocks": ["sequence"]}},
            _told("$first", "$_id"),
        ],
    ),
    _where(
        "live_in_line",
        "live, and not in the line of its sequence",
        {"sequence_key": {"$ne": None}, "status": _LIVE, "line": None},
    ),
    _Invariant(
        "slot_fired_once",
        "two runs of one slot of a schedule",
        lambda _: [
            {"$match": {"schedule_id": {"$ne": None}, "scheduled_for": {"$ne": None}}},
            {
                "$group": {
                    "_id": {"id": "$schedule_id", "at": "$scheduled_for"},
                    "count": {"$sum": 1},
                    "first": {"$min": "$_id"},
                }
            },
            {"$match": {"count": {"$gt": 1}}},
            _told("$first", "$_id.id"),
        ],
    ),
)

_RUN_OF_STEP: Final = {"$project": {"attempts": 1, "tenant_id": 1, "wake_seq": 1, "purging_at": 1}}


def _of_a_run(name: str, text: str, condition: Any, detail: Any = "$step_id") -> _Invariant:
    return _Invariant(
        name, text, lambda _: [{"$match": {"run.0": {"$exists": True}, "$expr": condition}}, _told("$run_id", detail)]
    )


def _orphan(what: str) -> _Invariant:
    return _Invariant(
        f"orphan_{what}", f"a {what} of a run that is not there", lambda _: [{"$match": {"run": []}}, _told("$run_id")]
    )


_ATTEMPTS: Final = {"$first": "$run.attempts"}
STEPS: Final[tuple[_Invariant, ...]] = (
    _of_a_run(
        "attempt_has_no_position",
        "an attempt row with a position, or a record without",
        {"$eq": [{"$eq": ["$kind", "attempt"]}, present("position")]},
    ),
    _of_a_run(
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
    _of_a_run(
        "fence_of_a_claim",
        "a record of a claim that there never was",
        {"$or": [{"$lt": ["$fence", 1]}, {"$gt": ["$fence", _ATTEMPTS]}]},
        {"$toString": "$fence"},
    ),
    _of_a_run(
        "record_tenant",
        "a record of another tenant than its run",
        {"$ne": ["$tenant_id", {"$first": "$run.tenant_id"}]},
    ),
    _orphan("record"),
    _Invariant(
        "position_unique",
        "two records at one position",
        lambda _: [
            {"$match": {"position": {"$ne": None}}},
            {"$group": {"_id": {"run": "$run_id", "position": "$position"}, "count": {"$sum": 1}}},
            {"$match": {"count": {"$gt": 1}}},
            _told("$_id.run", {"$toString": "$_id.position"}),
        ],
    ),
    _Invariant(
        "signal_taken_once",
        "two records take one signal",
        lambda _: [
            {"$match": {"signal_seq": {"$ne": None}}},
            {"$group": {"_id": {"run": "$run_id", "seq": "$signal_seq"}, "count": {"$sum": 1}}},
            {"$match": {"count": {"$gt": 1}}},
            _told("$_id.run", {"$toString": "$_id.seq"}),
        ],
    ),
)
SIGNALS: Final[tuple[_Invariant, ...]] = (
    _orphan("signal"),
    _of_a_run(
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
SCHEDULES: Final[tuple[_Invariant, ...]] = (
    _Invariant(
        "schedule_of_its_tenant",
        "a schedule whose id is in the form of another tenant",
        lambda _: [
            {"$match": {"$expr": {"$ne": [{"$indexOfBytes": ["$_id", {"$concat": ["$tenant_id", ":"]}]}, 0]}}},
            _told({"$literal": None}, "$_id"),
        ],
    ),
)


async def audit(work: Work, scope: Scope) -> list[Finding]:
    """Every finding, at most a hundred of each invariant. Runs that are being purged are gone, and what belongs to them goes (61)."""
    of_run: list[Document] = [
        _joined(work, "durable_run", "run_id", "_id", _RUN_OF_STEP, name="run"),
        {"$match": {"run.purging_at": None}},
    ]
    findings: list[Finding] = []
    for table, invariants, before in (
        ("durable_run", RUNS, [{"$match": {"purging_at": None}}]),
        ("durable_step", STEPS, of_run),
        ("durable_signal", SIGNALS, of_run),
        ("durable_key", (_orphan("key"),), of_run),
        ("durable_dependency", (_orphan("edge"),), of_run),
        ("durable_schedule", SCHEDULES, []),
    ):
        findings += await _audit(work, scope, table, invariants, before)
    return findings


async def _audit(
    work: Work, scope: Scope, table: str, invariants: Sequence[_Invariant], before: Sequence[Document]
) -> list[Finding]:
    limit: Document = {"$limit": MOST}
    if scope is not ALL and await work.first(table, of_scope(scope), fields=["_id"]) is None:
        return []
    facets = {invariant.name: [*invariant.stages(work), limit] for invariant in invariants}
    (found,) = await work.aggregate(table, [{"$match": of_scope(scope)}, *before, {"$facet": facets}])
    return [
        Finding(
            invariant=invariant.name,
            run_id=row.get("run"),
            text=invariant.text if row.get("detail") is None else f"{invariant.text}: {row['detail']}",
        )
        for invariant in invariants
        for row in found[invariant.name]
    ]


__all__ = ["audit"]
