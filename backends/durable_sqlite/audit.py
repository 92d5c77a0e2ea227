"""Every invariant that stored rows can break, as one query each; an empty answer is a sound store. Only reads.

`store.py` calls `audit` on the slow reader, for the command of that name and after every test of the conformance suite. A query gives
the run and what is wrong with it; its name is stable, for machines.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from typing import Final

from durable.model import Finding, Instant, Scope

from .rows import of_scope

MOST: Final = 100
"""Findings of one invariant that are told: where one is broken everywhere, more tell nothing more."""

_LIVE: Final = "('pending', 'running', 'suspended')"
_TERMINAL: Final = "('completed', 'failed', 'cancelled', 'timed_out', 'forward_incomplete')"
_SCOPE: Final = "(? OR r.tenant_id IS ?)"


@dataclasses.dataclass(frozen=True, slots=True)
class _Invariant:
    """`sql` selects (run_id, detail) of what breaks it, and takes the two parameters of a scope."""

    name: str
    text: str
    sql: str


def _runs(name: str, text: str, condition: str, detail: str = "r.status") -> _Invariant:
    return _Invariant(name, text, f"SELECT r.run_id, {detail} FROM durable_run AS r WHERE ({condition}) AND {_SCOPE}")


def _orphans(table: str, what: str) -> _Invariant:
    # Rows of no run have no tenant that could be asked for: only the unbound scope sees them.
    sql = f"""
SELECT o.run_id, NULL FROM {table} AS o WHERE NOT EXISTS (SELECT 1 FROM durable_run AS r WHERE r.run_id = o.run_id) AND ? AND ? IS NULL
"""
    return _Invariant(f"orphan_{what}", f"a {what} of a run that is not there", sql)


def _steps(name: str, text: str, condition: str, detail: str = "s.step_id") -> _Invariant:
    sql = f"""
SELECT s.run_id, {detail} FROM durable_step AS s JOIN durable_run AS r ON r.run_id = s.run_id WHERE ({condition}) AND {_SCOPE}
"""
    return _Invariant(name, text, sql)


INVARIANTS: Final[tuple[_Invariant, ...]] = (
    # -- the state of a run
    _runs(
        "output_only_completed",
        "an output although it did not complete",
        "r.output IS NOT NULL AND r.status <> 'completed'",
    ),
    _runs(
        "completed_with_output",
        "completed without an output, or with an error",
        "r.status = 'completed' AND (r.output IS NULL OR r.error IS NOT NULL OR r.error_kind IS NOT NULL)",
    ),
    _runs(
        "end_with_error",
        "it did not complete and says no reason",
        "r.status IN ('failed', 'cancelled', 'timed_out', 'forward_incomplete') AND (r.error IS NULL OR r.error_kind IS NULL)",
    ),
    _runs(
        "terminal_has_stamps",
        "terminal without finished_at or purge_at",
        f"r.status IN {_TERMINAL} AND (r.finished_at IS NULL OR r.purge_at IS NULL)",
    ),
    _runs(
        "live_has_no_stamps",
        "live with finished_at or purge_at",
        f"r.status IN {_LIVE} AND (r.finished_at IS NOT NULL OR r.purge_at IS NOT NULL)",
    ),
    _runs(
        "terminal_waits_for_nothing",
        "terminal, and still due, blocked or waiting",
        f"r.status IN {_TERMINAL} AND (r.available_at IS NOT NULL OR r.blocked_on IS NOT NULL OR r.waiting_for IS NOT NULL)",
    ),
    # -- ownership
    _runs(
        "lease_only_running",
        "a lease although it is not running",
        "r.leased_until IS NOT NULL AND r.status <> 'running'",
    ),
    _runs(
        "running_has_lease",
        "running without a lease, a mark, a claim or a start",
        "r.status = 'running' AND (r.leased_until IS NULL OR r.lease_owner IS NULL OR r.attempts < 1 OR r.started_at IS NULL)",
    ),
    _runs(
        "running_is_not_held_back",
        "running, and still due or blocked",
        "r.status = 'running' AND (r.blocked_on IS NOT NULL OR r.available_at IS NOT NULL)",
        "coalesce(r.blocked_on, r.available_at)",
    ),
    _runs(
        "counters_fit",
        "more failures or reclaims than claims, or a counter below 0",
        "r.failures > r.attempts OR r.reclaims > r.attempts OR min(r.failures, r.reclaims, r.wake_seq, r.wake_after) < 0",
        "r.attempts || ' claims, ' || r.failures || ' failures, ' || r.reclaims || ' reclaims'",
    ),
    _runs(
        "due_before_deadline",
        "available later than its deadline",
        f"r.status IN {_LIVE} AND r.available_at > r.deadline_at",
        "r.available_at",
    ),
    _runs(
        "family_has_records",
        "it is bound to a replay family without a record",
        "r.status IN ('pending', 'suspended') AND r.replay_family IS NOT NULL"
        " AND NOT EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = r.run_id)",
        "r.replay_family",
    ),
    _runs(
        "records_have_family",
        "it has records that any interpreter might continue",
        "r.status IN ('pending', 'suspended') AND r.replay_family IS NULL"
        " AND EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = r.run_id)",
    ),
    _runs(
        "compensating_has_record",
        "it has steps to undo, and no record of any",
        "r.compensating = 1 AND NOT EXISTS (SELECT 1 FROM durable_step AS s WHERE s.run_id = r.run_id AND s.kind = 'compensation')",
    ),
    # -- waiting
    _runs(
        "only_suspended_waits",
        "it waits for ends of runs although it is not suspended",
        "r.wake_after > 0 AND r.status <> 'suspended'",
    ),
    _runs(
        "unreleased_counts",
        "an unreleased node whose count is not that of the open runs before it",
        "r.status = 'suspended' AND r.attempts = 0 AND (r.wake_after = 0 OR r.wake_after <> ("
        "SELECT count(*) FROM durable_dependency AS d LEFT JOIN durable_run AS b ON b.run_id = d.depends_on"
        " WHERE d.run_id = r.run_id AND b.status IS NOT 'completed'))",
        "r.wake_after",
    ),
    _runs(
        "upstream_lands",
        "an unreleased node behind a run that ended and did not complete",
        "r.status = 'suspended' AND r.attempts = 0 AND EXISTS (SELECT 1 FROM durable_dependency AS d"
        " JOIN durable_run AS b ON b.run_id = d.depends_on WHERE d.run_id = r.run_id"
        " AND b.status IN ('failed', 'cancelled', 'timed_out', 'forward_incomplete'))",
    ),
    # -- the journal
    _Invariant(
        "position_unique",
        "two records at one position",
        f"""
SELECT s.run_id, s.position FROM durable_step AS s JOIN durable_run AS r ON r.run_id = s.run_id
WHERE s.position IS NOT NULL AND {_SCOPE} GROUP BY s.run_id, s.position HAVING count(*) > 1
""",
    ),
    _steps(
        "attempt_has_no_position",
        "an attempt row with a position, or a record without",
        "(s.kind = 'attempt') <> (s.position IS NULL)",
    ),
    _steps(
        "seen_before_position",
        "a record made after a later one was seen",
        "s.seen >= s.position OR s.seen < -1 OR s.position < 0",
    ),
    _steps(
        "fence_of_a_claim", "a record of a claim that there never was", "s.fence < 1 OR s.fence > r.attempts", "s.fence"
    ),
    _steps("record_tenant", "a record of another tenant than its run", "s.tenant_id IS NOT r.tenant_id"),
    _orphans("durable_step", "record"),
    # -- signals
    _orphans("durable_signal", "signal"),
    _Invariant(
        "signal_of_its_run",
        "a signal of another tenant than its run, or beyond its wake counter",
        f"""
SELECT s.run_id, s.seq FROM durable_signal AS s JOIN durable_run AS r ON r.run_id = s.run_id
WHERE (s.tenant_id IS NOT r.tenant_id OR s.seq > r.wake_seq OR s.seq < 1) AND {_SCOPE}
""",
    ),
    _Invariant(
        "signal_taken_once",
        "two records take one signal",
        f"""
SELECT s.run_id, s.signal_seq FROM durable_step AS s JOIN durable_run AS r ON r.run_id = s.run_id
WHERE s.signal_seq IS NOT NULL AND {_SCOPE} GROUP BY s.run_id, s.signal_seq HAVING count(*) > 1
""",
    ),
    # -- keys and tenants
    _orphans("durable_key", "key"),
    _runs(
        "key_is_registered",
        "its idempotency key is not registered as its own",
        "r.idempotency_key IS NOT NULL AND NOT EXISTS ("
        "SELECT 1 FROM durable_key AS k WHERE k.idempotency_key = r.idempotency_key AND k.run_id = r.run_id)",
        "r.idempotency_key",
    ),
    _runs(
        "keys_of_its_tenant",
        "a key in the form of another tenant",
        " OR ".join(
            f"substr(r.{column}, 1, instr(r.{column}, ':')) <> coalesce(r.tenant_id, '') || ':'"
            for column in ("idempotency_key", "coalesce_key", "sequence_key", "schedule_id")
        ),
        "coalesce(r.idempotency_key, r.coalesce_key, r.sequence_key, r.schedule_id)",
    ),
    _Invariant(
        "coalesce_unique",
        "two runs that a submit of one coalesce key could join",
        f"""
SELECT min(r.run_id), r.coalesce_key FROM durable_run AS r
WHERE r.coalesce_key IS NOT NULL AND r.status = 'pending' AND r.attempts = 0 AND {_SCOPE}
GROUP BY r.coalesce_key HAVING count(*) > 1
""",
    ),
    # -- children and graphs
    _runs(
        "child_of_its_tenant",
        "a child of another tenant than its parent",
        "EXISTS (SELECT 1 FROM durable_run AS p WHERE p.run_id = r.parent_run_id AND p.tenant_id IS NOT r.tenant_id)",
        "r.parent_run_id",
    ),
    _orphans("durable_dependency", "edge"),
    # -- flow control
    _Invariant(
        "permit_in_flight",
        "a permit of a run that is not running",
        f"""
SELECT p.run_id, p.scope FROM durable_permit AS p JOIN durable_run AS r ON r.run_id = p.run_id
WHERE r.status <> 'running' AND {_SCOPE}
""",
    ),
    _Invariant(
        "permits_within_bound",
        "more permits of its scope are out than the newest one says",
        f"""
SELECT p.run_id, p.scope FROM durable_permit AS p JOIN durable_run AS r ON r.run_id = p.run_id
WHERE NOT EXISTS (SELECT 1 FROM durable_permit AS n WHERE n.scope = p.scope AND (n.number IS NULL OR n.number > p.number))
AND p.in_flight < (SELECT count(*) FROM durable_permit AS o WHERE o.scope = p.scope) AND {_SCOPE}
""",
    ),
    _orphans("durable_permit", "permit"),
    _Invariant(
        "sequence_one_at_a_time",
        "several runs of one sequence at once",
        f"""
SELECT min(r.run_id), r.sequence_key FROM durable_run AS r
WHERE r.sequence_key IS NOT NULL AND r.status IN {_LIVE} AND r.blocked_on IS NOT 'sequence' AND {_SCOPE}
GROUP BY r.sequence_key HAVING count(*) > 1
""",
    ),
    _Invariant(
        "sequence_has_head",
        "runs of a sequence that all wait for their turn",
        f"""
SELECT min(r.run_id), r.sequence_key FROM durable_run AS r
WHERE r.sequence_key IS NOT NULL AND r.status IN {_LIVE} AND {_SCOPE}
GROUP BY r.sequence_key HAVING min(r.blocked_on IS 'sequence') = 1
""",
    ),
    # -- schedules
    _Invariant(
        "slot_fired_once",
        "two runs of one slot of a schedule",
        f"""
SELECT min(r.run_id), r.schedule_id || ' at ' || r.scheduled_for FROM durable_run AS r
WHERE r.schedule_id IS NOT NULL AND r.scheduled_for IS NOT NULL AND {_SCOPE}
GROUP BY r.schedule_id, r.scheduled_for HAVING count(*) > 1
""",
    ),
    _Invariant(
        "schedule_of_its_tenant",
        "a schedule whose id is in the form of another tenant",
        f"""
SELECT NULL, r.schedule_id FROM durable_schedule AS r
WHERE substr(r.schedule_id, 1, instr(r.schedule_id, ':')) <> coalesce(r.tenant_id, '') || ':' AND {_SCOPE}
""",
    ),
)


def audit(con: sqlite3.Connection, now: Instant, scope: Scope) -> list[Finding]:
    """Every finding, at most a hundred of each invariant."""
    findings: list[Finding] = []
    for invariant in INVARIANTS:
        for run_id, detail in con.execute(f"{invariant.sql} LIMIT {MOST}", of_scope(scope)).fetchall():
            text = invariant.text if detail is None else f"{invariant.text}: {detail}"
            findings.append(Finding(invariant=invariant.name, run_id=run_id, text=text))
    return findings
