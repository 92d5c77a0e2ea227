"""Each invariant of the audit finds the document that breaks it, and a store that nobody broke has no finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servers.mongo_room import Room
from sqlite.test_audit import populate

from durable.model import ALL
from durable.testing.conformance.scenario import ACME, BETA, Scene
from durable_mongo.audit import RUNS
from durable_mongo.invariants import EDGES, KEYS, QUEUES, SCHEDULES, SIGNALS, STEPS
from durable_mongo.store import Store

INVARIANTS = (*RUNS, *STEPS, *SIGNALS, *KEYS, *EDGES, *SCHEDULES, *QUEUES)
RUN, STEP = "durable_run", "durable_step"
Breaker = tuple[str, dict[str, Any], Any]
"""A collection, a filter, and what is done to each document of it."""

BREAKERS: dict[str, Sequence[Breaker]] = {
    "output_only_completed": [(RUN, {"status": "failed"}, {"$set": {"output": "1"}})],
    "completed_with_output": [(RUN, {"status": "completed"}, {"$unset": {"output": ""}})],
    "end_with_error": [(RUN, {"status": "failed"}, {"$unset": {"error": ""}})],
    "terminal_has_stamps": [(RUN, {"status": "completed"}, {"$unset": {"purge_at": ""}})],
    "live_has_no_stamps": [(RUN, {"status": "running"}, [{"$set": {"finished_at": "$$NOW"}}])],
    "terminal_waits_for_nothing": [(RUN, {"status": "completed"}, [{"$set": {"available_at": "$$NOW"}}])],
    "known_status": [(RUN, {"status": "failed"}, {"$set": {"status": "lost"}})],
    "lease_only_running": [(RUN, {"status": "suspended"}, [{"$set": {"leased_until": "$$NOW"}}])],
    "running_has_lease": [(RUN, {"status": "running"}, {"$unset": {"mark": ""}})],
    "running_is_not_held_back": [(RUN, {"status": "running"}, {"$set": {"blocked_on": "alone"}})],
    "ready_is_true": [(RUN, {"ready": True}, {"$unset": {"ready": ""}})],
    "route_fits": [(RUN, {"name": "ready"}, {"$set": {"route": "ready/other@"}})],
    "counters_fit": [(RUN, {"status": "running"}, [{"$set": {"failures": {"$add": ["$attempts", 1]}}}])],
    "due_before_deadline": [(RUN, {"status": "suspended", "attempts": 1}, [{"$set": {"deadline_at": "$created_at"}}])],
    "family_has_records": [(RUN, {"name": "ready"}, {"$set": {"replay_family": "3.12"}})],
    "records_have_family": [(RUN, {"status": "suspended", "attempts": 1}, {"$unset": {"replay_family": ""}})],
    "compensating_has_record": [(RUN, {"status": "suspended"}, {"$set": {"compensating": True}})],
    "only_suspended_waits": [(RUN, {"status": "running"}, {"$set": {"wake_after": 1}})],
    "unreleased_counts": [(RUN, {"name": "node"}, {"$inc": {"wake_after": 1}})],
    "upstream_lands": [(RUN, {"name": "before"}, {"$set": {"status": "failed"}})],
    "key_is_registered": [("durable_key", {}, None)],
    "keys_of_its_tenant": [(RUN, {"name": "ready"}, {"$set": {"sequence_key": "stranger:s"}})],
    "coalesce_unique": [(RUN, {"status": "pending", "attempts": 0}, {"$set": {"coalesce_key": ":c"}})],
    "child_of_its_tenant": [(RUN, {"parent_run_id": {"$ne": None}}, {"$set": {"tenant_id": str(ACME)}})],
    "permit_in_flight": [(RUN, {"name": "ready"}, {"$set": {"permits": ["queue:a"]}})],
    "permits_within_bound": [("durable_queue", {}, {"$set": {"in_flight.most": 0}})],
    "sequence_one_at_a_time": [(RUN, {"blocked_on": "sequence"}, {"$unset": {"blocked_on": ""}})],
    "sequence_has_head": [(RUN, {"sequence_key": ":s"}, {"$set": {"blocked_on": "sequence"}})],
    "live_in_line": [(RUN, {"sequence_key": ":s"}, {"$unset": {"line": ""}})],
    "slot_fired_once": [(RUN, {}, [{"$set": {"schedule_id": ":nightly", "scheduled_for": "$$NOW"}}])],
    "attempt_has_no_position": [(STEP, {"kind": {"$ne": "attempt"}}, {"$unset": {"position": ""}})],
    "seen_before_position": [(STEP, {"position": 1}, {"$set": {"seen": 1}})],
    "fence_of_a_claim": [(STEP, {}, {"$set": {"fence": 9}})],
    "record_tenant": [(STEP, {}, {"$set": {"tenant_id": str(BETA)}})],
    "orphan_record": [(STEP, {}, {"$set": {"run_id": "nobody"}}), (STEP, {"position": 0}, None)],
    "position_unique": [(STEP, {"position": 1}, {"$set": {"position": 0}})],
    "signal_taken_once": [(STEP, {}, {"$set": {"signal_seq": 1}})],
    "orphan_signal": [("durable_signal", {}, {"$set": {"run_id": "nobody"}})],
    "signal_of_its_run": [("durable_signal", {}, {"$inc": {"seq": 100}})],
    "orphan_key": [("durable_key", {}, {"$set": {"run_id": "nobody"}})],
    "orphan_edge": [("durable_dependency", {}, {"$set": {"run_id": "nobody"}})],
    "schedule_of_its_tenant": [("durable_schedule", {}, {"$set": {"tenant_id": str(ACME)}})],
}


def broken(room: Room, breakers: Sequence[Breaker]) -> dict[str, list[dict[str, Any]]]:
    """Break documents; those of each collection as they were."""
    before: dict[str, list[dict[str, Any]]] = {}
    for table, where, change in breakers:
        before.setdefault(table, list(room.db[table].find()))
        if change is None:
            assert room.db[table].delete_many(where).deleted_count > 0, where
        else:
            assert room.db[table].update_many(where, change).modified_count > 0, where
    return before


def mended(room: Room, before: dict[str, list[dict[str, Any]]]) -> None:
    for table, documents in before.items():
        room.db[table].delete_many({})
        room.db[table].insert_many(documents)


async def test_each_invariant_finds_the_document_that_breaks_it(scene: Scene, store: Store, room: Room) -> None:
    assert set(BREAKERS) == {invariant.name for invariant in INVARIANTS}
    await populate(scene)
    for table, index in ((RUN, "coalesce"), (STEP, "position")):  # they would not let it be broken
        room.db[table].drop_index(index)
    silent: list[str] = []
    try:
        for invariant, breakers in BREAKERS.items():
            assert list(await store.audit(scope=ALL)) == [], f"before {invariant}"
            before = broken(room, breakers)
            found = [finding for finding in await store.audit(scope=ALL) if finding.invariant == invariant]
            if not found or not all(finding.text for finding in found):
                silent.append(invariant)
            mended(room, before)
    finally:
        await store.migrate()
    assert silent == []


async def test_a_bound_audit_sees_its_tenants_documents_only(scene: Scene, store: Store, room: Room) -> None:
    await populate(scene)
    before = broken(room, BREAKERS["output_only_completed"])
    assert list(await store.audit(scope=ACME)) == []
    assert [finding.invariant for finding in await store.audit(scope=None)] == ["output_only_completed"]
    mended(room, before)
