"""Each invariant of the audit finds the row that breaks it, and a store that nobody broke has no finding."""

from __future__ import annotations

from typing import Any

import pytest

from durable.model import ALL, QueueRecord, RecordKind
from durable.settings import MINUTE
from durable.testing.conformance.scenario import ACME, BETA, Scene, new_run, schedule
from durable_sqlite.audit import INVARIANTS

BREAKERS: dict[str, tuple[str, ...]] = {
    "output_only_completed": ("UPDATE durable_run SET output = '1' WHERE status = 'failed'",),
    "completed_with_output": ("UPDATE durable_run SET output = NULL WHERE status = 'completed'",),
    "end_with_error": ("UPDATE durable_run SET error = NULL WHERE status = 'failed'",),
    "terminal_has_stamps": ("UPDATE durable_run SET purge_at = NULL WHERE status = 'completed'",),
    "live_has_no_stamps": ("UPDATE durable_run SET finished_at = 1 WHERE status = 'running'",),
    "terminal_waits_for_nothing": ("UPDATE durable_run SET available_at = 1 WHERE status = 'completed'",),
    "lease_only_running": ("UPDATE durable_run SET leased_until = 1 WHERE status = 'suspended'",),
    "running_has_lease": ("UPDATE durable_run SET lease_owner = NULL WHERE status = 'running'",),
    "running_is_not_held_back": ("UPDATE durable_run SET blocked_on = 'alone' WHERE status = 'running'",),
    "counters_fit": ("UPDATE durable_run SET failures = attempts + 1 WHERE status = 'running'",),
    "due_before_deadline": ("UPDATE durable_run SET deadline_at = 1, available_at = 2 WHERE status = 'suspended'",),
    "family_has_records": ("UPDATE durable_run SET replay_family = '3.12' WHERE name = 'ready'",),
    "records_have_family": ("UPDATE durable_run SET replay_family = NULL WHERE status = 'suspended' AND attempts > 0",),
    "compensating_has_record": ("UPDATE durable_run SET compensating = 1 WHERE status = 'suspended'",),
    "only_suspended_waits": ("UPDATE durable_run SET wake_after = 1 WHERE status = 'running'",),
    "unreleased_counts": ("UPDATE durable_run SET wake_after = wake_after + 1 WHERE name = 'node'",),
    "upstream_lands": (
        "UPDATE durable_run SET status = 'failed' WHERE run_id = (SELECT depends_on FROM durable_dependency)",
    ),
    "position_unique": (
        "DROP INDEX durable_step_position",
        "UPDATE durable_step SET position = 0 WHERE position IS NOT NULL",
    ),
    "attempt_has_no_position": ("UPDATE durable_step SET position = NULL WHERE kind <> 'attempt'",),
    "seen_before_position": ("UPDATE durable_step SET seen = position WHERE position = 1",),
    "fence_of_a_claim": ("UPDATE durable_step SET fence = 9",),
    "record_tenant": (f"UPDATE durable_step SET tenant_id = '{BETA}'",),
    "orphan_record": ("UPDATE durable_step SET run_id = 'nobody' WHERE position = 1",),
    "orphan_signal": ("UPDATE durable_signal SET run_id = 'nobody'",),
    "signal_of_its_run": ("UPDATE durable_signal SET seq = seq + 100",),
    "signal_taken_once": ("UPDATE durable_step SET signal_seq = 1",),
    "orphan_key": ("UPDATE durable_key SET run_id = 'nobody'",),
    "key_is_registered": ("DELETE FROM durable_key",),
    "keys_of_its_tenant": ("UPDATE durable_run SET sequence_key = 'stranger:s' WHERE name = 'ready'",),
    "coalesce_unique": (
        "DROP INDEX durable_run_coalesce",
        "UPDATE durable_run SET coalesce_key = ':c' WHERE status = 'pending' AND attempts = 0",
    ),
    "child_of_its_tenant": (f"UPDATE durable_run SET tenant_id = '{ACME}' WHERE parent_run_id IS NOT NULL",),
    "orphan_edge": ("UPDATE durable_dependency SET run_id = 'nobody'",),
    "permit_in_flight": ("UPDATE durable_run SET status = 'pending', leased_until = NULL WHERE status = 'running'",),
    "permits_within_bound": ("UPDATE durable_permit SET in_flight = 0",),
    "orphan_permit": ("UPDATE durable_permit SET run_id = 'nobody'",),
    "sequence_one_at_a_time": ("UPDATE durable_run SET blocked_on = NULL WHERE blocked_on = 'sequence'",),
    "sequence_has_head": ("UPDATE durable_run SET blocked_on = 'sequence' WHERE sequence_key = ':s'",),
    "slot_fired_once": ("UPDATE durable_run SET schedule_id = ':nightly', scheduled_for = 7",),
    "schedule_of_its_tenant": (f"UPDATE durable_schedule SET tenant_id = '{ACME}'",),
}


async def populate(scene: Scene) -> None:
    """A store with something of everything, sound."""
    await scene.store.set_queue(QueueRecord(scope_name="function:limited", max_concurrency=5))
    await scene.complete(await scene.take(idempotency_key="k"))
    await scene.fail(await scene.take())
    held = await scene.take(name="limited")
    await scene.append(held, "a")
    await scene.append(held, "b@1", kind=RecordKind.ATTEMPT)
    await scene.append(held, "b")
    await scene.send(held.run.run_id)
    parent = await scene.with_children(1)
    assert await scene.suspend(parent.parent, until=scene.store.clock() + MINUTE, wake_after=1) == "landed"
    before = await scene.start(name="before")
    await scene.start(name="node", depends_on=(_edge(before.run_id),))
    await scene.store.enqueue([new_run(name="ready", sequence_key="s") for _ in range(2)])
    await scene.store.put_schedule(schedule(), scope=None)


def _edge(run_id: str) -> Any:
    from durable.model import Dependency

    return Dependency(run_id=run_id)


async def test_a_sound_store_has_no_findings(scene: Scene) -> None:
    await populate(scene)
    assert list(await scene.store.audit(scope=ALL)) == []


@pytest.mark.parametrize("invariant", [invariant.name for invariant in INVARIANTS])
async def test_an_invariant_finds_the_row_that_breaks_it(scene: Scene, bench: Any, invariant: str) -> None:
    await populate(scene)
    for statement in BREAKERS[invariant]:
        await bench.sql(statement)
    found = [finding for finding in await scene.store.audit(scope=ALL) if finding.invariant == invariant]
    assert found, f"{invariant} found nothing"
    assert all(finding.text for finding in found)


async def test_a_bound_audit_sees_its_tenants_rows_only(scene: Scene, bench: Any) -> None:
    await populate(scene)
    await bench.sql("UPDATE durable_run SET output = '1' WHERE status = 'failed'")
    assert list(await scene.store.audit(scope=ACME)) == []
    assert [finding.invariant for finding in await scene.store.audit(scope=None)] == ["output_only_completed"]
