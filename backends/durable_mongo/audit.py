"""Every invariant that stored documents can break, one condition each; an empty answer is a sound store. Only reads, as of one moment.

`store.py` calls `audit`, for the command of that name and after every test of the conformance suite. Conditions of one collection are
looked for together, in one pass over it. A condition gives the run and what is wrong with it; its name is stable, for machines. Here
are those of runs; the words they are written in, and the others, are in `invariants.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.model import ALL, Finding, Scope

from .changes import ENDED, LIVE, ROUTE, present
from .invariants import (
    EDGES,
    KEYS,
    QUEUES,
    SCHEDULES,
    SIGNALS,
    STEPS,
    Invariant,
    Stages,
    gone,
    joined,
    records,
    there,
    told,
    where,
)
from .operation import Document, Work
from .rows import of_scope

MOST: Final = 100
"""Findings of one invariant that are told: where one is broken everywhere, more tell nothing more."""

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
            joined(work, "durable_run", "depends_on", "_id", {"$project": {"status": 1}}, name="before"),
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


RUNS: Final[tuple[Invariant, ...]] = (
    # -- the state of a run
    where(
        "output_only_completed",
        "an output although it did not complete",
        {"output": {"$ne": None}, "status": {"$ne": "completed"}},
    ),
    where(
        "completed_with_output",
        "completed without an output, or with an error",
        {"status": "completed", "$or": [*gone("output"), *there("error", "error_kind")]},
    ),
    where(
        "end_with_error",
        "it did not complete and says no reason",
        {"status": {"$in": _BAD_ENDS}, "$or": gone("error", "error_kind")},
    ),
    where(
        "terminal_has_stamps",
        "terminal without finished_at or purge_at",
        {"status": _ENDED, "$or": gone("finished_at", "purge_at")},
    ),
    where(
        "live_has_no_stamps",
        "live with finished_at or purge_at",
        {"status": _LIVE, "$or": there("finished_at", "purge_at")},
    ),
    where(
        "terminal_waits_for_nothing",
        "terminal, and still due, blocked or waiting",
        {"status": _ENDED, "$or": there("available_at", "release_at", "blocked_on", "waiting_for", "line", "ready")},
    ),
    where("known_status", "a status that there is not", {"status": {"$nin": [*LIVE, *ENDED]}}),
    # -- ownership
    where(
        "lease_only_running",
        "a lease although it is not running",
        {"leased_until": {"$ne": None}, "status": {"$ne": "running"}},
    ),
    where(
        "running_has_lease",
        "running without a lease, a mark, a claim or a start",
        {
            "status": "running",
            "$or": [*gone("leased_until", "claim_token", "mark", "started_at"), {"attempts": {"$lt": 1}}],
        },
    ),
    where(
        "running_is_not_held_back",
        "running, and still due or blocked",
        {"status": "running", "$or": there("blocked_on", "available_at")},
    ),
    where(
        "ready_is_true",
        "in the index of what is ready and not ready, or the other way round",
        {"$expr": {"$ne": [_READY, {"$eq": ["$ready", True]}]}},
    ),
    where(
        "route_fits",
        "claimed by another name, version or family than it has",
        {"status": {"$in": ["pending", "suspended"]}, "$expr": {"$ne": ["$route", ROUTE]}},
        "$route",
    ),
    where(
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
    where(
        "due_before_deadline",
        "available later than its deadline",
        {
            "status": _LIVE,
            "deadline_at": {"$ne": None},
            "$expr": {"$gt": [{"$ifNull": ["$available_at", "$release_at"]}, "$deadline_at"]},
        },
    ),
    Invariant(
        "family_has_records",
        "it is bound to a replay family without a record",
        lambda work: [
            {"$match": {"status": {"$in": ["pending", "suspended"]}, "replay_family": {"$ne": None}}},
            *records(work),
            {"$match": {"found": []}},
            told(detail="$replay_family"),
        ],
    ),
    Invariant(
        "records_have_family",
        "it has records that any interpreter might continue",
        lambda work: [
            {"$match": {"status": {"$in": ["pending", "suspended"]}, "replay_family": None}},
            *records(work),
            {"$match": {"found": {"$ne": []}}},
            told(),
        ],
    ),
    Invariant(
        "compensating_has_record",
        "it has steps to undo, and no record of any",
        lambda work: [
            {"$match": {"compensating": True}},
            *records(work, kind="compensation"),
            {"$match": {"found": []}},
            told(),
        ],
    ),
    # -- waiting
    where(
        "only_suspended_waits",
        "it waits for ends of runs although it is not suspended",
        {"wake_after": {"$gt": 0}, "status": {"$ne": "suspended"}},
    ),
    Invariant(
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
            told(detail="$wake_after"),
        ],
    ),
    Invariant(
        "upstream_lands",
        "an unreleased node behind a run that ended and did not complete",
        lambda work: [*_expected_open(work), {"$match": {"edges.status": {"$in": _BAD_ENDS}}}, told()],
    ),
    # -- keys and tenants
    Invariant(
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
            told(detail="$idempotency_key"),
        ],
    ),
    where("keys_of_its_tenant", "a key in the form of another tenant", _key_of_other_tenant(), "$tenant_id"),
    Invariant(
        "coalesce_unique",
        "two runs that a submit of one coalesce key could join",
        lambda _: [
            {"$match": {"coalesce_key": {"$ne": None}, "status": "pending", "attempts": 0}},
            {"$group": {"_id": "$coalesce_key", "count": {"$sum": 1}, "first": {"$min": "$_id"}}},
            {"$match": {"count": {"$gt": 1}}},
            told("$first", "$_id"),
        ],
    ),
    # -- children and sequences
    Invariant(
        "child_of_its_tenant",
        "a child of another tenant than its parent",
        lambda work: [
            {"$match": {"parent_run_id": {"$ne": None}}},
            joined(work, "durable_run", "parent_run_id", "_id", {"$project": {"tenant_id": 1}}),
            {"$match": {"found": {"$ne": []}, "$expr": {"$ne": [{"$first": "$found.tenant_id"}, "$tenant_id"]}}},
            told(detail="$parent_run_id"),
        ],
    ),
    where(
        "permit_in_flight",
        "a permit of a run that is not running",
        {"permits.0": {"$exists": True}, "status": {"$ne": "running"}},
    ),
    Invariant(
        "sequence_one_at_a_time",
        "several runs of one sequence at once",
        lambda _: [
            {"$match": {"sequence_key": {"$ne": None}, "status": _LIVE, "blocked_on": {"$ne": "sequence"}}},
            {"$group": {"_id": "$sequence_key", "count": {"$sum": 1}, "first": {"$min": "$_id"}}},
            {"$match": {"count": {"$gt": 1}}},
            told("$first", "$_id"),
        ],
    ),
    Invariant(
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
            told("$first", "$_id"),
        ],
    ),
    where(
        "live_in_line",
        "live, and not in the line of its sequence",
        {"sequence_key": {"$ne": None}, "status": _LIVE, "line": None},
    ),
    Invariant(
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
            told("$first", "$_id.id"),
        ],
    ),
)

_RUN_OF_STEP: Final = {"$project": {"attempts": 1, "tenant_id": 1, "wake_seq": 1, "purging_at": 1}}


async def audit(work: Work, scope: Scope) -> list[Finding]:
    """Every finding, at most a hundred of each invariant. Runs that are being purged are gone, and what belongs to them goes (61)."""
    of_run: list[Document] = [
        joined(work, "durable_run", "run_id", "_id", _RUN_OF_STEP, name="run"),
        {"$match": {"run.purging_at": {"$exists": False}}},  # None would not match where there is no run at all
    ]
    findings: list[Finding] = []
    for table, invariants, before in (
        ("durable_run", RUNS, [{"$match": {"purging_at": None}}]),
        ("durable_step", STEPS, of_run),
        ("durable_signal", SIGNALS, of_run),
        ("durable_key", KEYS, of_run),
        ("durable_dependency", EDGES, of_run),
        ("durable_schedule", SCHEDULES, []),
        ("durable_queue", QUEUES, []),
    ):
        findings += await _audit(work, scope, table, invariants, before)
    return findings


async def _audit(
    work: Work, scope: Scope, table: str, invariants: Sequence[Invariant], before: Sequence[Document]
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
