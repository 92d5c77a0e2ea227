"""THE landing: the one function through which every write that makes a run terminal goes, with all that follows from it.

`settle`, `claim`, `cancel`, the sweep, `enqueue` (a node behind a failed one) and this module itself call `land`, each after it has
locked the family of the runs in the same transaction and checked that they may end. Nothing else in this package writes a terminal
status.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from durable.landing import Ending, behind
from durable.model import Completed, Instant, Lease, RunRecord, Status

from . import flow, locks
from .adapting import at, span
from .operation import Ask, Last, Operation, Row, Work, count, together
from .rows import RUNNING

_OVER: Final = """
    finished_at = now(), updated_at = now(), leased_until = NULL, available_at = NULL, blocked_on = NULL, mismatch_since = NULL,
    waiting_for = NULL, wake_after = 0
"""
# The children of a run that did not complete are cancelled by the net (48). It finds the parents by this mark, so that it need not
# look at every live child.
LAND: Final = f"""
UPDATE durable_run AS r SET status = e.status, output = e.output, error = e.error, error_kind = e.kind, error_detail = e.detail,
    error_positions = e.positions, purge_at = now() + e.keep, failures = r.failures + e.failures, {_OVER},
    cancel_children = e.status <> 'completed' AND EXISTS (
        SELECT 1 FROM durable_run AS c WHERE c.parent_run_id = r.run_id AND NOT c.detached
        AND c.status IN ('pending', 'running', 'suspended'))
FROM unnest($1::text[], $2::text[], $3::jsonb[], $4::text[], $5::text[], $6::jsonb[], $7::jsonb[], $8::interval[], $9::integer[])
    AS e (run_id, status, output, error, kind, detail, positions, keep, failures)
WHERE r.run_id = e.run_id
"""
# With the fence, since it is not looked at before; and only where nobody is told of the end.
COMPLETE: Final = f"""
UPDATE durable_run AS r SET status = 'completed', output = e.output, error = NULL, error_kind = NULL, error_detail = NULL,
    error_positions = NULL, purge_at = now() + coalesce(r.keep, $5::interval), cancel_children = false, {_OVER}
FROM unnest($1::text[], $2::integer[], $3::text[], $4::jsonb[]) AS e (run_id, attempts, mark, output)
WHERE r.run_id = e.run_id AND r.attempts = e.attempts AND r.lease_owner = e.mark AND {RUNNING}
    AND (r.cancel_requested_at IS NULL OR r.cancel_refused_at IS NOT NULL)
    AND r.parent_run_id IS NULL AND r.sequence_key IS NULL AND r.schedule_id IS NULL
    AND NOT EXISTS (SELECT 1 FROM durable_dependency AS d WHERE d.depends_on = r.run_id)
    AND NOT EXISTS (SELECT 1 FROM durable_permit AS p WHERE p.run_id = r.run_id)
RETURNING r.run_id
"""
EDGES: Final = """
SELECT d.run_id, d.depends_on FROM durable_dependency AS d WHERE d.depends_on = ANY ($1::text[]) ORDER BY d.run_id, d.position
"""
CHANGE: Final = """
UPDATE durable_run AS r SET status = e.status, wake_seq = e.wake_seq, wake_after = e.wake_after, available_at = e.available_at,
    waiting_for = CASE WHEN e.status = 'suspended' THEN r.waiting_for END, updated_at = now()
FROM unnest($1::text[], $2::text[], $3::integer[], $4::integer[], $5::timestamptz[])
    AS e (run_id, status, wake_seq, wake_after, available_at)
WHERE r.run_id = e.run_id
"""
SCHEDULES: Final = """
WITH counted AS MATERIALIZED (
    SELECT s.schedule_id, c.reset, c.failed FROM durable_schedule AS s
    JOIN unnest($1::text[], $2::boolean[], $3::integer[]) AS c (schedule_id, reset, failed) ON c.schedule_id = s.schedule_id
    WHERE c.failed > 0 OR s.consecutive_failures > 0 ORDER BY s.schedule_id FOR NO KEY UPDATE OF s)
UPDATE durable_schedule AS s SET consecutive_failures = c.failed + CASE WHEN c.reset THEN 0 ELSE s.consecutive_failures END
FROM counted AS c WHERE s.schedule_id = c.schedule_id
"""


def land(work: Work, locked: locks.Locked, endings: Sequence[Ending], *, last: bool = False) -> Operation[None]:
    """Make runs terminal, with every consequence, in this transaction. A run that is terminal already is left as it is.

    `last`: nothing is behind these runs, they hold no permit, and the transaction has nothing else to do; where no parent, line or
    schedule is told either, the commit goes out with the landing.

    `locked` holds the family of each of them. Terminal states first; then dependents (which may land in turn), the permits, the next
    in line, parents by the number of their children that landed, and schedules.
    """
    if last and not any(linked(locked[ending.run_id]) for ending in endings):
        yield Last((_landing(work, locked, endings),))
        for ending in endings:
            work.announce(f"run:{ending.run_id}")
        return
    landed: list[Ending] = []
    queues: set[str] = set()
    turns: set[str] = set()
    permits: Counter[str] = Counter()
    wave: Sequence[Ending] = endings
    while wave:
        found = [ending for ending in _once_each(wave) if ending.run_id in locked and locked[ending.run_id].live]
        if not found:
            break
        for ending in found:
            standing = locked[ending.run_id]
            # A run that waited for its turn itself leaves the line without anybody's turn coming.
            if standing.sequence_key is not None and standing.blocked_on != flow.SEQUENCE:
                turns.add(standing.sequence_key)
        edges, given_back = yield from _write(work, locked, found)
        landed += found
        permits.update(given_back)
        wave = (yield from _dependents(work, locked, found, edges, queues)) if edges else ()
        if wave:  # a node that lands has a parent of its own, and nodes behind it
            locked.update((yield from locks.family(ending.run_id for ending in wave)))
    if not landed:
        return
    yield from _wake_parents(work, locked, landed, queues)
    yield from flow.released(work, permits)
    if turns:
        yield from flow.next_in_sequence(work, turns)
    yield from _count_schedules(locked, landed)
    for ending in landed:
        work.announce(f"run:{ending.run_id}")
    for queue in queues:
        work.announce(f"queue:{queue}")


def complete_alone(work: Work, entries: Sequence[tuple[Lease, Completed]]) -> Operation[set[str]]:
    """Complete those of these runs whose fence stands and of whose end nobody is told: no ask, parent, node, line, schedule or permit.
    One round trip; a run is there once. Returns their ids; of the others nothing is written."""
    ids = [lease.run_id for lease, _ in entries]
    for run_id in ids:
        work.announce(f"run:{run_id}")
    fences = (ids, [lease.attempts for lease, _ in entries], [lease.mark for lease, _ in entries])
    outputs = [outcome.output for _, outcome in entries]
    # What is behind a run is written under its lock: it is asked for in a statement that begins when all locks are ours.
    _, landed = yield from together(
        Ask(locks.ALONE, (sorted(ids),)), Ask(COMPLETE, (*fences, outputs, span(work.settings.keep)))
    )
    return {run_id for (run_id,) in landed}


def _once_each(endings: Iterable[Ending]) -> list[Ending]:
    return list({ending.run_id: ending for ending in reversed(list(endings))}.values())[::-1]


def linked(run: RunRecord | locks.Standing) -> bool:
    """Somebody is told when this run lands: a parent, the next in line, a schedule."""
    return not (run.parent_run_id is None and run.sequence_key is None and run.schedule_id is None)


def _write(work: Work, locked: locks.Locked, endings: Sequence[Ending]) -> Operation[tuple[list[Row], dict[str, int]]]:
    """Write terminal states and give permits back. In the same round trip, and after the lock: (node, run) for every node behind one of
    them, and how many permits of each scope they held."""
    ids = [ending.run_id for ending in endings]
    written = _landing(work, locked, endings)
    _, edges, given_back = yield from together(written, Ask(EDGES, (ids,)), Ask(flow.GIVE_BACK, (ids,)))
    return edges, dict(given_back)


def _landing(work: Work, locked: locks.Locked, endings: Sequence[Ending]) -> Ask:
    """The statement that writes terminal states."""
    columns: list[tuple[Any, ...]] = []
    for ending in endings:
        standing = locked[ending.run_id]
        failure, completed = ending.failure, ending.status is Status.COMPLETED
        what: tuple[Any, ...] = (None, None, None, None)
        if failure is not None and not completed:
            positions = json.dumps(failure.positions) if failure.positions else None
            what = (failure.message, str(failure.kind), failure.detail, positions)
        keep = work.settings.keep if standing.keep is None else standing.keep
        output = ending.output if completed else None
        columns.append((ending.run_id, str(ending.status), output, *what, span(keep), int(ending.counts)))
        standing.status, standing.wake_after, standing.available_at = str(ending.status), 0, None
    return Ask(LAND, tuple(map(list, zip(*columns, strict=True))))


def _dependents(
    work: Work, locked: locks.Locked, landed: Sequence[Ending], edges: Sequence[Row], queues: set[str]
) -> Operation[list[Ending]]:
    """Count down the nodes behind completed runs and release those at 0; the answer: the nodes that land `upstream` (77)."""
    missing = {node for node, _ in edges} - locked.keys()
    if missing:  # stored while we waited for a lock, or behind a node that lands with the one before it
        locked.update((yield from locks.family(missing)))
    completed = {ending.run_id: ending.status is Status.COMPLETED for ending in landed}
    counted: Counter[str] = Counter()
    lost: dict[str, Ending] = {}
    for node_id, before in edges:
        node = locked.get(node_id)
        if node is None or node.status != Status.SUSPENDED or node.attempts != 0:
            continue
        if completed[before]:
            counted[node_id] += 1
        else:
            lost.setdefault(node_id, behind(node_id, before))
    changed: list[locks.Standing] = []
    for node_id, number in counted.items():
        if node_id in lost:
            continue
        node = locked[node_id]
        node.wake_after = max(node.wake_after - number, 0)
        if node.wake_after == 0:
            node.status = Status.PENDING
            if node.available_at is not None and node.available_at <= work.now:
                node.available_at = None
            if node.blocked_on is None and node.available_at is None:
                queues.add(node.queue)
        changed.append(node)
    yield from _change(changed)
    return list(lost.values())


def _wake_parents(work: Work, locked: locks.Locked, landed: Iterable[Ending], queues: set[str]) -> Operation[None]:
    """Add to each parent the number of its children that landed, and wake it when it waited for no more (31, 33)."""
    ends: Counter[str] = Counter()
    failed: set[str] = set()
    for ending in landed:
        parent_id = locked[ending.run_id].parent_run_id
        if parent_id is not None:
            ends[parent_id] += 1
            if ending.status is not Status.COMPLETED:
                failed.add(parent_id)
    changed: list[locks.Standing] = []
    for parent_id, number in ends.items():
        parent = locked.get(parent_id)
        if parent is None or not parent.live:
            continue
        work.announce(f"run:{parent_id}")
        changed.append(parent)
        parent.wake_seq += number
        if parent.status != Status.SUSPENDED or parent.attempts == 0 or parent.wake_after == 0:
            if parent.status != Status.SUSPENDED:
                parent.wake_after = 0
            continue
        parent.wake_after = max(parent.wake_after - number, 0)
        if (parent.wake_on_failure and parent_id in failed) or (parent.wake_after == 0 and not parent.wake_delay):
            wake(parent)
            queues.add(parent.queue)
        elif parent.wake_after == 0:  # the ends of independent children are gathered for a moment (33)
            soon: Instant = work.now + parent.wake_delay
            parent.available_at = soon if parent.available_at is None else min(soon, parent.available_at)
    yield from _change(changed)


def wake(standing: locks.Standing) -> None:
    """A suspended run is claimable now."""
    standing.status, standing.wake_after, standing.available_at = Status.PENDING, 0, None


def _change(changed: Sequence[locks.Standing]) -> Operation[None]:
    if not changed:
        return
    yield from count(
        CHANGE,
        [one.run_id for one in changed],
        [str(one.status) for one in changed],
        [one.wake_seq for one in changed],
        [one.wake_after for one in changed],
        [at(one.available_at) for one in changed],
    )


def _count_schedules(locked: locks.Locked, landed: Iterable[Ending]) -> Operation[None]:
    """Failures in a row: counted in the order of the batch, reset by success (55)."""
    counted: dict[str, tuple[bool, int]] = {}
    for ending in landed:
        schedule_id = locked[ending.run_id].schedule_id
        if schedule_id is not None:
            reset, failed = counted.get(schedule_id, (False, 0))
            counted[schedule_id] = (True, 0) if ending.status is Status.COMPLETED else (reset, failed + 1)
    if counted:
        resets, failures = [one[0] for one in counted.values()], [one[1] for one in counted.values()]
        yield from count(SCHEDULES, list(counted), resets, failures)


__all__ = ["complete_alone", "land", "linked", "wake"]
