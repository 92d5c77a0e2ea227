"""Claiming: heads of the ready index, the endings that a claim finds, permits, and the fence (semantics 7 to 12, 45, 73).

`store.py` calls `claim` inside the shared write transaction: what it reads nobody else changes before the commit, so the journal
that goes out with a run is complete. Nothing here looks at rows that this worker could not take, beyond those it lands or that a
limit holds back.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any, Final

from durable.flow import Gates, Turns, dealt, in_turn
from durable.landing import Ending, damaged, never_recorded, past_deadline
from durable.model import ALL, Claimed, ClaimRequest, Instant, Lease, RunRecord, StepRecord

from . import flow, landing
from .rows import RUN_COLUMNS, STEP_COLUMNS, STEP_ORDER, run_record, step_record, tenant_text

ROUNDS: Final = 8
"""How often a claim looks again after the heads that it found were landed or held back. What then remains, the next claim takes."""

_READY: Final = "status = 'pending' AND available_at IS NULL AND blocked_on IS NULL"
_ROUTES: Final = "route IN (SELECT value FROM json_each(?))"
HEADS: Final = f"""
SELECT {RUN_COLUMNS}, cancel_reason FROM durable_run INDEXED BY durable_run_ready
WHERE queue = ? AND {_ROUTES} AND {_READY} ORDER BY priority DESC, submitted LIMIT ?
"""
HEADS_UNTAGGED: Final = f"""
SELECT {RUN_COLUMNS}, cancel_reason FROM durable_run INDEXED BY durable_run_ready
WHERE queue = ? AND {_ROUTES} AND {_READY} AND tenant_id IS NULL ORDER BY priority DESC, submitted LIMIT ?
"""
HEADS_OF_TENANT: Final = f"""
SELECT {RUN_COLUMNS}, cancel_reason FROM durable_run INDEXED BY durable_run_ready_tenant
WHERE queue = ? AND {_ROUTES} AND tenant_id = ? AND {_READY} ORDER BY priority DESC, submitted LIMIT ?
"""
# Whose turn it is: the first tenant from here on that has something ready, then the next one, each by a look at the index.
_FIRST_OF: Final = f"""
SELECT min((SELECT t.tenant_id FROM durable_run AS t INDEXED BY durable_run_ready_tenant
            WHERE t.queue = ? AND t.route = n.value AND t.tenant_id {{beyond}} AND {_READY} ORDER BY t.tenant_id LIMIT 1))
FROM json_each(?) AS n
"""
TURNS: Final = f"""
WITH RECURSIVE turn (tenant_id) AS (
    SELECT ({_FIRST_OF.format(beyond="> ?")})
    UNION ALL SELECT ({_FIRST_OF.format(beyond="> turn.tenant_id")}) FROM turn WHERE turn.tenant_id IS NOT NULL LIMIT ?)
SELECT tenant_id FROM turn WHERE tenant_id IS NOT NULL
"""
LIVE_ROUTES: Final = f"""
SELECT n.value FROM json_each(?) AS n
WHERE EXISTS (SELECT 1 FROM durable_run INDEXED BY durable_run_ready WHERE queue = ? AND route = n.value AND {_READY})
"""
HEADS_ALONE: Final = f"""
SELECT {RUN_COLUMNS}, cancel_reason FROM durable_run INDEXED BY durable_run_blocked
WHERE blocked_on = 'alone' AND status = 'pending' AND available_at IS NULL AND (? OR tenant_id IS ?)
AND queue IN (SELECT value FROM json_each(?)) AND {_ROUTES} ORDER BY priority DESC, submitted LIMIT ?
"""
HELD: Final = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE lease_owner = ? AND status = 'running' ORDER BY priority DESC, submitted"
TAKE: Final = """
UPDATE durable_run SET status = 'running', attempts = attempts + 1, leased_until = ?, lease_owner = ?, blocked_on = NULL,
    started_at = coalesce(started_at, ?), replay_family = coalesce(replay_family, ?), waiting_for = NULL, updated_at = ?
WHERE submitted = ?
"""
HISTORIES: Final = f"""
SELECT {STEP_COLUMNS}, run_id FROM durable_step WHERE run_id IN (SELECT value FROM json_each(?)) ORDER BY run_id, {STEP_ORDER}
"""


_COLUMNS: Final = f"{RUN_COLUMNS}, cancel_reason"
ONE: Final = f"SELECT {RUN_COLUMNS} FROM durable_run WHERE submitted = ?"
JOURNAL: Final = f"SELECT {STEP_COLUMNS} FROM durable_step WHERE run_id = ?"


def claim(con: sqlite3.Connection, now: Instant, request: ClaimRequest, turns: Turns) -> list[Claimed]:
    """Take up to `limit` claimable runs; the same mark again gives what it holds and takes nothing more (8).

    A run whose row or journal can not be read never strands its batch: it lands failed, kind payload, and the others go on (9).
    """
    while True:
        con.execute("SAVEPOINT claim")
        try:
            answer = _claim(con, now, request, turns)
        except Exception as error:
            con.execute("ROLLBACK TO claim")
            con.execute("RELEASE claim")
            if not _damaged(error) or not _land_unreadable(con, now, request):
                raise
        else:
            con.execute("RELEASE claim")
            return answer


def _claim(con: sqlite3.Connection, now: Instant, request: ClaimRequest, turns: Turns) -> list[Claimed]:
    held = [run_record(row) for row in con.execute(HELD, (request.mark,))]
    if held:
        return _with_history(con, held, [run.run_id for run in held])  # it may have written since
    if request.limit < 1:
        return []
    routes, before = _routes(request), con.total_changes
    gates = flow.gates(con, request) if flow.ruled(con, request) else None
    if request.alone:
        rows = _alone(con, now, request, routes, gates)
        if rows:
            return _claimed(con, _take(con, now, request, rows, before))
    taken: list[tuple[Any, ...]] = []
    for queue, most in request.queues.items():
        room = min(most, request.limit - len(taken))
        if room > 0 and (gates is None or queue not in gates.closed):
            fair = turns if gates is not None and queue in gates.fair else None
            taken += _from_queue(con, now, request, queue, routes, room, ruled=gates is not None, turns=fair)
    return _claimed(con, _take(con, now, request, taken, before))


def _routes(request: ClaimRequest) -> str:
    """Name, version and family in one: for each, runs without a record, and runs with records of this interpreter's family.

    A run without a version is taken for its name alone, whatever versions of it the worker registered.
    """
    pairs = {(name, "") for name, _ in request.functions} | {
        (name, version or "") for name, version in request.functions
    }
    return json.dumps(
        [f"{name}/{version}@{family}" for name, version in sorted(pairs) for family in ("", request.family)]
    )


def _heads(
    con: sqlite3.Connection, request: ClaimRequest, queue: str, routes: str, limit: int, *, columns: str = _COLUMNS
) -> list[tuple[Any, ...]]:
    if request.scope is ALL:
        return con.execute(HEADS.replace(_COLUMNS, columns), (queue, routes, limit)).fetchall()
    if request.scope is None:
        return con.execute(HEADS_UNTAGGED.replace(_COLUMNS, columns), (queue, routes, limit)).fetchall()
    text = HEADS_OF_TENANT.replace(_COLUMNS, columns)
    return con.execute(text, (queue, routes, tenant_text(request.scope), limit)).fetchall()


def _heads_in_turn(
    con: sqlite3.Connection, queue: str, routes: str, room: int, last: str | None, taken: Collection[str]
) -> list[tuple[Any, ...]]:
    """The heads of a fair queue that are not taken yet: of each tenant in turn, beginning behind the one that was served last. What is
    read is bounded by the tenants and by what is taken, whatever the backlog of one of them (10)."""
    live = json.dumps([route for (route,) in con.execute(LIVE_ROUTES, (routes, queue))])
    # The untagged have no turn of their own in the index: those at the front of the queue are dealt as one hand.
    front = con.execute(HEADS, (queue, live, room + len(taken))).fetchall()
    untagged = [row for row in front if row[3] is None and row[0] not in taken]

    def beyond(tenant: str, most: int) -> list[str]:
        return [found for (found,) in con.execute(TURNS, (queue, tenant, live, queue, live, most))]

    tenants = in_turn(last, beyond, room, untagged=bool(untagged))
    share = -(-room // max(1, len(tenants)))
    while True:
        found = {one: con.execute(HEADS_OF_TENANT, (queue, live, one, share + len(taken))) for one in tenants if one}
        hands = [[row for row in found[one] if row[0] not in taken] if one else untagged for one in tenants]
        heads = dealt(hands, room)
        if len(heads) == room or all(len(hand) < share for one, hand in zip(tenants, hands, strict=True) if one):
            return heads
        share *= 2


def _from_queue(
    con: sqlite3.Connection,
    now: Instant,
    request: ClaimRequest,
    queue: str,
    routes: str,
    room: int,
    *,
    ruled: bool,
    turns: Turns | None,
) -> list[tuple[Any, ...]]:
    """The rows to take from one queue. Those that end here, or that a limit holds back, leave the index: then look again."""
    taken: dict[str, tuple[Any, ...]] = {}
    for _ in range(ROUNDS):
        left = room - len(taken)
        # Rows that were chosen in an earlier round are still in the index; what a landing released since may stand in front of them.
        if turns is None:
            rows = [row for row in _heads(con, request, queue, routes, room) if row[0] not in taken][:left]
        else:
            rows = _heads_in_turn(con, queue, routes, left, turns.last(queue), taken)
            turns.served(queue, [row[3] or "" for row in rows])
        chosen = _admitted(con, now, rows, ruled=ruled)
        taken |= {row[0]: row for row in chosen}
        if len(chosen) == len(rows) or len(taken) >= room:
            break
    return list(taken.values())


def _alone(
    con: sqlite3.Connection, now: Instant, request: ClaimRequest, routes: str, gates: Gates | None
) -> list[tuple[Any, ...]]:
    """At most one run that lapsed twice in a row, and nothing beside it (15)."""
    everybody = request.scope is ALL
    tenant = None if request.scope is ALL else tenant_text(request.scope)
    closed = gates.closed if gates is not None else frozenset[str]()
    queues = json.dumps([queue for queue, most in request.queues.items() if most > 0 and queue not in closed])
    for _ in range(ROUNDS):
        rows = con.execute(HEADS_ALONE, (everybody, tenant, queues, routes, 1)).fetchall()
        chosen = _admitted(con, now, rows, ruled=gates is not None)
        if chosen or not rows:
            return chosen
    return []


def _admitted(
    con: sqlite3.Connection, now: Instant, rows: Sequence[tuple[Any, ...]], *, ruled: bool
) -> list[tuple[Any, ...]]:
    """Land what ends at a claim; of the rest, those for which every scope has room."""
    endings: list[Ending] = []
    going: list[tuple[Any, ...]] = []
    for row in rows:
        ending = _ending(now, row)
        if ending is None:
            going.append(row)
        else:
            endings.append(ending)
    if endings:
        landing.land(con, now, endings)
    if not ruled:
        return going
    candidates = [
        flow.Candidate(run_id=row[0], tenant_id=row[3], queue=row[9], name=row[1], concurrency_key=row[29])
        for row in going
    ]
    admitted = {candidate.run_id for candidate in flow.admit(con, now, candidates)}
    return [row for row in going if row[0] in admitted]


def _ending(now: Instant, row: tuple[Any, ...]) -> Ending | None:
    """How a run ends that should not be called any more: an ask and no record (45), or past its deadline (12)."""
    requested_at, refused_at, family, deadline_at, compensating = row[24], row[25], row[46], row[22], row[39]
    if requested_at is not None and refused_at is None and family is None:
        return never_recorded(row[0], row[-1])
    if deadline_at is not None and deadline_at <= now and not compensating:
        return past_deadline(row[0])
    return None


def _take(
    con: sqlite3.Connection, now: Instant, request: ClaimRequest, rows: Sequence[tuple[Any, ...]], before: int
) -> list[RunRecord]:
    # What this claim landed may have changed what it has chosen: a child that ended here counts in its parent's wakes.
    moved = con.total_changes != before
    until = now + request.lease
    con.executemany(TAKE, [(until, request.mark, now, request.family, now, row[14]) for row in rows])
    if moved:
        return [run_record(row) for row in con.execute(HELD, (request.mark,))]
    runs: list[RunRecord] = []
    for row in rows:  # the row as the statement left it; reading it back would cost as much again
        values = list(row[:-1])  # without the reason of a cancel
        values[2], values[11], values[20], values[21], values[30], values[38] = (
            "running", row[11] + 1, until, request.mark, None, None,
        )  # fmt: skip
        values[17] = now if row[17] is None else row[17]
        values[46] = request.family if row[46] is None else row[46]
        values[16] = now
        runs.append(run_record(values))
    return runs


# -- damaged rows -----------------------------------------------------------------------------------------------------------


def _damaged(error: Exception) -> bool:
    """Whether it is the stored value that can not be read. SQLite's own faults carry a code; undecodable text does not."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", None) is None
    return isinstance(error, (ValueError, KeyError, TypeError))


def _land_unreadable(con: sqlite3.Connection, now: Instant, request: ClaimRequest) -> bool:
    """Look at the heads one by one and land those that can not be read. False: there are none, so the fault lies elsewhere."""
    everybody, routes, limit = request.scope is ALL, _routes(request), request.limit
    tenant = None if request.scope is ALL else tenant_text(request.scope)
    suspects: list[tuple[int, str]] = []
    for queue in request.queues:
        suspects += _heads(con, request, queue, routes, limit, columns="submitted, run_id")
    alone = HEADS_ALONE.replace(_COLUMNS, "submitted, run_id")
    suspects += con.execute(alone, (everybody, tenant, json.dumps(list(request.queues)), routes, limit)).fetchall()
    bad = [damaged(run_id) for submitted, run_id in suspects if not _readable(con, submitted, run_id)]
    if bad:
        landing.land(con, now, bad)
    return bool(bad)


def _readable(con: sqlite3.Connection, submitted: int, run_id: str) -> bool:
    try:
        run_record(con.execute(ONE, (submitted,)).fetchone())
        for row in con.execute(JOURNAL, (run_id,)):
            step_record(row)
    except Exception as error:
        if _damaged(error):
            return False
        raise
    return True


# -- what goes out ----------------------------------------------------------------------------------------------------------


def _claimed(con: sqlite3.Connection, runs: Sequence[RunRecord]) -> list[Claimed]:
    """A run that is claimed for the first time has no journal to read."""
    return _with_history(con, runs, [run.run_id for run in runs if run.attempts > 1])


def _with_history(con: sqlite3.Connection, runs: Sequence[RunRecord], replayed: Sequence[str]) -> list[Claimed]:
    """Leases, with the journals of those that are replayed."""
    histories: dict[str, list[StepRecord]] = {}
    if replayed:
        for row in con.execute(HISTORIES, (json.dumps(replayed),)):
            histories.setdefault(row[-1], []).append(step_record(row))
    return [
        Claimed(
            lease=Lease(run_id=run.run_id, tenant=run.tenant, attempts=run.attempts, mark=run.lease_owner or ""),
            run=run,
            history=tuple(histories.get(run.run_id, ())),
        )
        for run in runs
    ]
