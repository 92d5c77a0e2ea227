"""Each invariant of the audit finds the row that breaks it, and a store that nobody broke has no finding.

Rows are broken, and the audit is read, inside one transaction that is rolled back: so one sound store serves for all of them.
"""

from __future__ import annotations

import psycopg
from servers.postgres import Database
from sqlite.test_audit import populate

from durable.model import ALL, Finding, Scope
from durable.testing.conformance.scenario import ACME, BETA, Scene
from durable_postgres import Store, callers
from durable_postgres.audit import INVARIANTS, audit

LATER = "now() + interval '1 h'"
BREAKERS: dict[str, tuple[str, ...]] = {
    "output_only_completed": ("UPDATE durable_run SET output = '1' WHERE status = 'failed'",),
    "completed_with_output": ("UPDATE durable_run SET output = NULL WHERE status = 'completed'",),
    "end_with_error": ("UPDATE durable_run SET error = NULL WHERE status = 'failed'",),
    "terminal_has_stamps": ("UPDATE durable_run SET purge_at = NULL WHERE status = 'completed'",),
    "live_has_no_stamps": ("UPDATE durable_run SET finished_at = now() WHERE status = 'running'",),
    "terminal_waits_for_nothing": ("UPDATE durable_run SET available_at = now() WHERE status = 'completed'",),
    "lease_only_running": ("UPDATE durable_run SET leased_until = now() WHERE status = 'suspended'",),
    "running_has_lease": ("UPDATE durable_run SET lease_owner = NULL WHERE status = 'running'",),
    "running_is_not_held_back": ("UPDATE durable_run SET blocked_on = 'alone' WHERE status = 'running'",),
    "counters_fit": ("UPDATE durable_run SET failures = attempts + 1 WHERE status = 'running'",),
    "due_before_deadline": (
        f"UPDATE durable_run SET deadline_at = now(), available_at = {LATER} WHERE status = 'suspended'",
    ),
    "family_has_records": ("UPDATE durable_run SET replay_family = '3.12' WHERE name = 'ready'",),
    "records_have_family": ("UPDATE durable_run SET replay_family = NULL WHERE status = 'suspended' AND attempts > 0",),
    "compensating_has_record": ("UPDATE durable_run SET compensating = true WHERE status = 'suspended'",),
    "only_suspended_waits": ("UPDATE durable_run SET wake_after = 1 WHERE status = 'running'",),
    "unreleased_counts": ("UPDATE durable_run SET wake_after = wake_after + 1 WHERE name = 'node'",),
    "upstream_lands": ("UPDATE durable_run SET status = 'failed' WHERE name = 'before'",),
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
    "slot_fired_once": ("UPDATE durable_run SET schedule_id = ':nightly', scheduled_for = now()",),
    "schedule_of_its_tenant": (f"UPDATE durable_schedule SET tenant_id = '{ACME}'",),
}


async def broken(
    store: Store, con: psycopg.AsyncConnection[object], statements: tuple[str, ...], scope: Scope = ALL
) -> list[Finding]:
    """What the audit finds after these statements, none of which stays."""
    async with con.transaction(force_rollback=True):
        for statement in statements:
            touched = await con.execute(statement)  # type: ignore[arg-type]
            assert touched.rowcount != 0, f"nothing to break: {statement}"
        return list(await callers.on_callers(store._database, con, lambda work: audit(work, scope)))


async def test_each_invariant_finds_the_row_that_breaks_it(scene: Scene, store: Store, database: Database) -> None:
    assert set(BREAKERS) == {invariant.name for invariant in INVARIANTS}
    await populate(scene)
    assert list(await store.audit(scope=ALL)) == []
    silent: list[str] = []
    async with await psycopg.AsyncConnection.connect(database.url) as con:
        for invariant, statements in BREAKERS.items():
            found = [one for one in await broken(store, con, statements) if one.invariant == invariant]
            if not found or not all(one.text for one in found):
                silent.append(invariant)
    assert silent == []
    assert list(await store.audit(scope=ALL)) == []


async def test_a_bound_audit_sees_its_tenants_rows_only(scene: Scene, store: Store, database: Database) -> None:
    await populate(scene)
    statements = BREAKERS["output_only_completed"]
    async with await psycopg.AsyncConnection.connect(database.url) as con:
        assert await broken(store, con, statements, ACME) == []
        assert [one.invariant for one in await broken(store, con, statements, None)] == ["output_only_completed"]
