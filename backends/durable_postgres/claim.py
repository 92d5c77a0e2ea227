"""Claiming: heads of the ready index, the endings that a claim finds, permits, and the fence (semantics 7 to 12, 45, 73).

`store.py` calls `quick` first: one statement that takes what nobody disputes. Where it finds a row of flow control, or heads that end
here, it leaves them to `thorough`, which locks the heads, lands what ends, and asks for permits. The journals that go out with the runs
are read by `histories` after the claim has committed (3). Heads that another claim has locked are skipped, never waited for.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from durable.flow import Turns, concerning, dealt, in_turn, owner_of
from durable.landing import Ending, never_recorded, past_deadline
from durable.model import ALL, Claimed, ClaimRequest, Instant, Lease, RunRecord, StepRecord

from . import flow, landing, locks
from .adapting import Span
from .operation import Ask, Operation, Work, rows, together
from .rows import READY, ROUTE, RUN_COLUMNS, STEP_COLUMNS, STEP_ORDER, run_record, step_record

_FIRST, _LAST = UUID(int=0), (1 << 128) - 1
ROUNDS: Final = 8
"""How often a claim looks again after the heads that it found were landed or held back. What then remains, the next claim takes."""

_TAKEN: Final = """
status = 'running', attempts = r.attempts + 1, leased_until = now() + $5::interval, lease_owner = $4, blocked_on = NULL,
    started_at = coalesce(r.started_at, now()), replay_family = coalesce(r.replay_family, $6), waiting_for = NULL, updated_at = now()
"""
_CLEAN: Final = """
(r.cancel_requested_at IS NULL OR r.cancel_refused_at IS NOT NULL OR r.replay_family IS NOT NULL)
    AND (r.deadline_at IS NULL OR r.deadline_at > now() OR r.compensating)
"""
_LOCKED: Final = "FOR NO KEY UPDATE SKIP LOCKED"


def _of_queue(more: Mapping[str, str], *, which: str, queue: str, room: str, locked: str = _LOCKED) -> str:
    """The heads of one queue over all routes, in order: locked where they are free, and the rest passed over.

    Each route is read as far as its part of the room. Whoever's last row stands among the heads may have others in front of theirs, and is
    read on, by its part of the places behind that row, until there is none: so what is looked at does not grow with the routes.
    """
    head = ("run_id", "priority", "submitted", *more)
    asked = ", ".join(f"{text} AS {name}" for name, text in more.items())

    def free(route: str, share: str, beyond: str = "") -> str:
        return f"""
SELECT r.run_id, r.priority, r.submitted, {asked} FROM durable_run AS r
WHERE {which}r.queue = {queue} AND {ROUTE} = {route} AND {READY}{beyond} ORDER BY r.priority DESC, r.submitted LIMIT {share} {locked}
"""

    # Of a function's two routes, one is rarely used. Who gave as many as the whole room has nothing more to say.
    first = f"((2 * {room} - 1) / greatest(2, cardinality($1::text[])) + 1)"
    further = f"(({room} - o.place - 1) / o.open_routes + 1)"
    # Which one is the last is asked of the rows as they are locked: a submit that joins one may have raised its priority since the scan.
    order = "ORDER BY f.priority DESC, f.submitted"
    # Two scans, since none goes down by the one and up by the other column from a row on; the second begins where the first has ended.
    later = free("o.route", further, " AND r.priority = o.priority AND r.submitted > o.submitted")
    lower = free("o.route", further, " AND r.priority < o.priority")
    return f"""
WITH RECURSIVE look AS (
    SELECT 1 AS round, n.route, h.* FROM unnest($1::text[]) AS n (route) CROSS JOIN LATERAL (
        SELECT f.*, row_number() OVER ({order}) = {first} AS goes_on FROM ({free("n.route", first)}) AS f) AS h
    UNION ALL
    SELECT o.round + 1, o.route, h.* FROM (
        SELECT p.*, count(*) FILTER (WHERE p.open) OVER () AS open_routes FROM (
            SELECT l.*, row_number() OVER w AS place, l.goes_on AND row_number() OVER w < {room} AS open FROM look AS l
            WHERE {first} < {room} WINDOW w AS (ORDER BY l.priority DESC, l.submitted)) AS p
        WHERE p.place <= {room}) AS o
    CROSS JOIN LATERAL (
        SELECT {", ".join(f"o.{name}" for name in head)}, false
        UNION ALL
        SELECT f.*, row_number() OVER ({order}) = {further} FROM (
            SELECT * FROM ({later}) AS a UNION ALL SELECT * FROM ({lower}) AS b LIMIT {further}) AS f WHERE o.open) AS h
    WHERE o.open_routes > 0)
SELECT {", ".join(f"l.{name}" for name in head)} FROM look AS l WHERE l.round = (SELECT max(l.round) FROM look AS l)
ORDER BY l.priority DESC, l.submitted LIMIT {room}
"""


# Whose runs: everybody's, the untagged, or one tenant's, who is the last parameter.
_WHOSE: Final = {
    "all": "",
    "untagged": "r.tenant_id IS NULL AND {0}::uuid IS NULL AND ",
    "tenant": "r.tenant_id = {0}::uuid AND ",
}
QUICK: Final = {
    whose: f"""
WITH dispute AS MATERIALIZED (
    SELECT EXISTS (SELECT 1 FROM durable_queue AS q WHERE q.scope_name = ANY ($8::text[]))
            OR ($9 AND EXISTS (SELECT 1 FROM durable_run AS r WHERE r.blocked_on = 'alone' AND r.status = 'pending')) AS ruled,
        EXISTS (SELECT 1 FROM durable_run AS r WHERE r.lease_owner = $4 AND r.status = 'running') AS held),
heads AS MATERIALIZED (
    SELECT o.run_id, o.clean FROM unnest($2::text[], $3::integer[]) WITH ORDINALITY AS q (queue, room, place) CROSS JOIN LATERAL (
        {_of_queue({"clean": _CLEAN}, which=which.format("$10"), queue="q.queue", room="q.room")}) AS o
    WHERE NOT (SELECT d.ruled OR d.held FROM dispute AS d) ORDER BY q.place, o.priority DESC, o.submitted LIMIT $7),
taken AS (
    UPDATE durable_run AS r SET {_TAKEN} WHERE r.run_id = ANY (ARRAY(SELECT h.run_id FROM heads AS h WHERE h.clean))
    RETURNING {RUN_COLUMNS})
SELECT d.ruled, d.held, EXISTS (SELECT 1 FROM heads AS h WHERE NOT h.clean), r.* FROM dispute AS d LEFT JOIN taken AS r ON true
"""
    for whose, which in _WHOSE.items()
}
# What is asked of a head: which limits count for it, and whether it ends here.
_ASKED: Final = {
    column: f"r.{column}"
    for column in (
        "name", "queue", "tenant_id", "concurrency_key", "cancel_requested_at", "cancel_refused_at", "replay_family", "deadline_at",
        "compensating", "cancel_reason",
    )
}  # fmt: skip
_HEAD: Final = ", ".join(("r.run_id", "r.priority", "r.submitted", *_ASKED.values()))
HEADS: Final = {
    whose: _of_queue(_ASKED, which=which.format("$4"), queue="$2", room="$3") for whose, which in _WHOSE.items()
}
# Whose turn it is: the first tenant from here on that has something ready, then the next one, each by a look at the index.
_LIVE_ROUTES: Final = f"""
live AS MATERIALIZED (
    SELECT n.route FROM unnest($1::text[]) AS n (route)
    WHERE EXISTS (SELECT 1 FROM durable_run AS r WHERE r.queue = $2 AND {ROUTE} = n.route AND {READY}))
"""
_FIRST_OF: Final = f"""
(SELECT h.tenant_id FROM live CROSS JOIN LATERAL (
    SELECT r.tenant_id FROM durable_run AS r
    WHERE r.queue = $2 AND {ROUTE} = live.route AND r.tenant_id {{beyond}} AND {READY} ORDER BY r.tenant_id LIMIT 1) AS h
ORDER BY h.tenant_id LIMIT 1)
"""
TURNS: Final = f"""
WITH RECURSIVE {_LIVE_ROUTES},
turn (tenant_id, place) AS (
    SELECT {_FIRST_OF.format(beyond=">= $3::uuid")}, 1
    UNION ALL SELECT {_FIRST_OF.format(beyond="> turn.tenant_id")}, turn.place + 1 FROM turn
    WHERE turn.tenant_id IS NOT NULL AND turn.place < $4)
SELECT turn.tenant_id FROM turn WHERE turn.tenant_id IS NOT NULL ORDER BY turn.place
"""
# The untagged among the first of the queue: only they are locked.
FRONT: Final = f"""
SELECT {_HEAD} FROM durable_run AS r WHERE {READY} AND r.run_id = ANY (ARRAY(
    SELECT o.run_id FROM ({_of_queue({"tenant_id": "r.tenant_id"}, which="", queue="$2", room="$3", locked="")}) AS o
    WHERE o.tenant_id IS NULL)) ORDER BY r.priority DESC, r.submitted {_LOCKED}
"""
HEADS_ALONE: Final = f"""
SELECT {_HEAD} FROM durable_run AS r
WHERE r.blocked_on = 'alone' AND r.status = 'pending' AND r.available_at IS NULL AND ($1 OR r.tenant_id IS NOT DISTINCT FROM $2::uuid)
AND r.queue = ANY ($3::text[]) AND {ROUTE} = ANY ($4::text[]) ORDER BY r.priority DESC, r.submitted LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
"""
TAKE: Final = (
    f"""
UPDATE durable_run AS r SET {_TAKEN} WHERE r.run_id = ANY ($1::text[]) RETURNING {RUN_COLUMNS}
""".replace("$4", "$2")
    .replace("$5", "$3")
    .replace("$6", "$4")
)
HELD: Final = f"""
SELECT {RUN_COLUMNS} FROM durable_run AS r WHERE r.lease_owner = $1 AND r.status = 'running' ORDER BY r.priority DESC, r.submitted
"""
# The second lock is shared by all claims: who sets a limit waits for those under way, which did not look for it.
ONE_AT_A_TIME: Final = "SELECT pg_advisory_xact_lock($1, $2), pg_advisory_xact_lock_shared($1::bigint)"
HISTORIES: Final = f"""
SELECT {STEP_COLUMNS}, s.run_id FROM durable_step AS s WHERE s.run_id = ANY ($1::text[]) ORDER BY s.run_id, {STEP_ORDER}
"""


class _Head(NamedTuple):
    """A ready run that is locked, as far as a claim asks."""

    run_id: str
    priority: int
    submitted: int
    name: str
    queue: str
    tenant: UUID | None
    concurrency_key: str | None
    cancel_requested_at: Instant | None
    cancel_refused_at: Instant | None
    replay_family: str | None
    deadline_at: Instant | None
    compensating: bool
    cancel_reason: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """What a claim has; whether it was held before; and why something was left: flow control has a say, a run waits to be taken alone,
    or runs are to end here."""

    runs: Sequence[RunRecord]
    limited: frozenset[str] = frozenset()
    """Those that hold permits, as far as this claim took them."""
    again: bool = False
    ruled: bool = False
    ending: bool = False


def quick(work: Work, request: ClaimRequest) -> Operation[Taken]:
    """Take what nobody disputes."""
    whose, tenant = _whose(request)
    queues = {queue: place for place, (queue, most) in enumerate(request.queues.items()) if most > 0}
    rooms = [min(request.queues[queue], request.limit) for queue in queues]
    fence = (request.mark, Span(request.lease), request.family)
    names = concerning(request.queues, (name for name, _ in request.functions))
    values = (_routes(request), list(queues), rooms, *fence, request.limit, names, request.alone, *tenant)
    _, found = yield from together(_one_at_a_time(work, request.mark), Ask(QUICK[whose], values))
    ruled, held, unclean = found[0][:3]
    taken = [run_record(row[3:]) for row in found if row[3] is not None]
    taken.sort(key=lambda run: (queues[run.queue], -run.priority, run.submitted))
    return Taken(taken, again=held, ruled=ruled, ending=unclean)


def _one_at_a_time(work: Work, mark: str) -> Ask:
    """A claim that is asked again while the first one is still under way waits for it, and then finds what it holds (8)."""
    return Ask(ONE_AT_A_TIME, (work.lock_class, zlib.crc32(mark.encode()) - (1 << 31)))


def held(work: Work, mark: str) -> Operation[list[RunRecord]]:
    """What the claim of this mark holds (8)."""
    return [run_record(row) for row in (yield from rows(HELD, mark))]


def thorough(work: Work, request: ClaimRequest, turns: Turns) -> Operation[Taken]:
    """Take up to so many of each queue, land what ends here, and hold back what has no permit."""
    yield from together(_one_at_a_time(work, request.mark))
    already = yield from held(work, request.mark)
    if already:
        return Taken(already, again=True)
    gates = yield from flow.gates(request)
    open_queues = {queue: most for queue, most in request.queues.items() if most > 0 and queue not in gates.closed}
    if request.alone:
        alone = yield from _alone(work, request, open_queues)
        if alone:
            return (yield from _take(request, alone))
    chosen: dict[str, bool] = {}
    for queue, most in open_queues.items():
        left = min(most, request.limit - len(chosen))
        if left > 0 and queue in gates.fair:
            chosen |= yield from _in_turn(work, request, queue, left, turns)
        elif left > 0:
            chosen |= yield from _from_queue(work, request, queue, left)
    return (yield from _take(request, chosen))


def land_what_ends(work: Work, request: ClaimRequest) -> Operation[None]:
    """Land the heads that `quick` passed over, so that they are not in front again."""
    for queue, most in request.queues.items():
        if most > 0:
            whose, tenant = _whose(request)
            found = yield from _heads(HEADS[whose], _routes(request), queue, min(most, request.limit), *tenant)
            yield from _land(work, [ending for head in found if (ending := _ending(work, head)) is not None])


def histories(work: Work, run_ids: Sequence[str]) -> Operation[dict[str, list[StepRecord]]]:
    """The journals of runs that are replayed."""
    found: dict[str, list[StepRecord]] = {}
    for row in (yield from rows(HISTORIES, list(run_ids))):
        found.setdefault(row[-1], []).append(step_record(row))
    return found


def replayed(taken: Taken) -> list[str]:
    """Those that have a journal to be read. A run that is claimed for the first time has none, unless it was held already."""
    return [run.run_id for run in taken.runs if taken.again or run.attempts > 1]


def claimed(taken: Taken, journals: dict[str, list[StepRecord]]) -> list[Claimed]:
    """Leases with their journals."""
    return [
        Claimed(
            lease=Lease(
                run_id=run.run_id,
                tenant=run.tenant,
                attempts=run.attempts,
                mark=run.lease_owner or "",
                linked=run.run_id in taken.limited or landing.linked(run),
            ),
            run=run,
            history=tuple(journals.get(run.run_id, ())),
        )
        for run in taken.runs
    ]


def _whose(request: ClaimRequest) -> tuple[str, tuple[Any, ...]]:
    if request.scope is ALL:
        return "all", ()
    return ("untagged" if request.scope is None else "tenant"), (request.scope,)


def _routes(request: ClaimRequest) -> list[str]:
    """Name, version and family in one: for each, runs without a record, and runs with records of this interpreter's family.

    A run without a version is taken for its name alone, whatever versions of it the worker registered.
    """
    pairs = {(name, "") for name, _ in request.functions} | {
        (name, version or "") for name, version in request.functions
    }
    return [f"{name}/{version}@{family}" for name, version in sorted(pairs) for family in ("", request.family)]


def _from_queue(work: Work, request: ClaimRequest, queue: str, room: int) -> Operation[dict[str, bool]]:
    """The runs to take from one queue. Those that end here, or that a limit holds back, leave the index: then look again."""
    whose, tenant = _whose(request)
    chosen: dict[str, bool] = {}
    for _ in range(ROUNDS):
        # Rows that were chosen in an earlier round are still in the index; what a landing released since may stand in front of them.
        found = yield from _heads(HEADS[whose], _routes(request), queue, room, *tenant)
        new = [head for head in found if head.run_id not in chosen][: room - len(chosen)]
        admitted = yield from _admitted(work, new)
        chosen |= admitted
        if len(admitted) == len(new) or len(chosen) >= room:
            break
    return chosen


def _in_turn(work: Work, request: ClaimRequest, queue: str, room: int, turns: Turns) -> Operation[dict[str, bool]]:
    """The runs to take from a fair queue: of each tenant in turn, beginning behind the one that was served last. What is read is bounded by
    the tenants and by what is taken, whatever the backlog of one of them (10)."""
    chosen: dict[str, bool] = {}
    for _ in range(ROUNDS):
        found = yield from _heads_in_turn(_routes(request), queue, room - len(chosen), turns.last(queue), chosen)
        turns.served(queue, [owner_of(head.tenant) for head in found])
        admitted = yield from _admitted(work, found)
        chosen |= admitted
        if len(admitted) == len(found) or len(chosen) >= room:
            break
    return chosen


def _heads_in_turn(
    routes: Sequence[str], queue: str, room: int, last: str | None, chosen: Collection[str]
) -> Operation[list[_Head]]:
    """The heads of a fair queue, dealt out; those that were chosen in an earlier round are still in the index, and in front."""
    behind = UUID(int=min(UUID(last).int + 1, _LAST)) if last else _FIRST
    front, after, before = yield from together(
        Ask(FRONT, (routes, queue, room + len(chosen))),
        Ask(TURNS, (routes, queue, behind, room)),
        Ask(TURNS, (routes, queue, _FIRST, room)),
    )
    # The untagged have no turn of their own in the index: those at the front of the queue are dealt as one hand.
    untagged = [head for head in map(_Head._make, front) if head.run_id not in chosen]
    tenants = in_turn(
        last,
        lambda one, most: [str(row[0]) for row in (after if one else before)][:most],
        room,
        untagged=bool(untagged),
    )
    share = -(-room // max(1, len(tenants)))
    tagged = [UUID(one) for one in tenants if one]
    while True:
        asks = [Ask(HEADS["tenant"], (routes, queue, share + len(chosen), one)) for one in tagged]
        answers = (yield from together(*asks)) if asks else []
        hands = [[head for head in map(_Head._make, found) if head.run_id not in chosen] for found in answers]
        by_tenant = {str(one): hand for one, hand in zip(tagged, hands, strict=True)}
        heads = dealt([by_tenant[one] if one else untagged for one in tenants], room)
        if len(heads) == room or all(len(hand) < share for hand in hands):
            return heads
        share *= 2


def _alone(work: Work, request: ClaimRequest, open_queues: dict[str, int]) -> Operation[dict[str, bool]]:
    """At most one run that lapsed twice in a row, and nothing beside it (15)."""
    everybody, tenant = request.scope is ALL, None if request.scope is ALL else request.scope
    for _ in range(ROUNDS):
        found = yield from _heads(HEADS_ALONE, everybody, tenant, list(open_queues), _routes(request))
        if not found:
            return {}
        admitted = yield from _admitted(work, found)
        if admitted:
            return admitted
    return {}


def _heads(text: str, *values: Any) -> Operation[list[_Head]]:
    return [_Head._make(row) for row in (yield from rows(text, *values))]


def _admitted(work: Work, found: Sequence[_Head]) -> Operation[dict[str, bool]]:
    """Land what ends at a claim; of the rest, those for which every scope has room."""
    endings: list[Ending] = []
    going: list[flow.Candidate] = []
    for head in found:
        ending = _ending(work, head)
        if ending is None:
            going.append(flow.Candidate(head.run_id, head.tenant, head.queue, head.name, head.concurrency_key))
        else:
            endings.append(ending)
    yield from _land(work, endings)
    return (yield from flow.admit(work, going))


def _land(work: Work, endings: Sequence[Ending]) -> Operation[None]:
    if endings:
        yield from landing.land(work, (yield from locks.family(ending.run_id for ending in endings)), endings)


def _ending(work: Work, head: _Head) -> Ending | None:
    """How a run ends that should not be called any more: an ask and no record (45), or past its deadline (12)."""
    if head.cancel_requested_at is not None and head.cancel_refused_at is None and head.replay_family is None:
        return never_recorded(head.run_id, head.cancel_reason)
    if head.deadline_at is not None and head.deadline_at <= work.now and not head.compensating:
        return past_deadline(head.run_id)
    return None


def _take(request: ClaimRequest, chosen: Mapping[str, bool]) -> Operation[Taken]:
    """Set the fence; the runs as they stand then, in the order in which they were chosen."""
    if not chosen:
        return Taken([])
    found = yield from rows(TAKE, list(chosen), request.mark, Span(request.lease), request.family)
    taken = {row[0]: run_record(row) for row in found}
    return Taken([taken[run_id] for run_id in chosen], limited=frozenset(one for one in chosen if chosen[one]))


__all__ = ["Taken", "claimed", "held", "histories", "land_what_ends", "quick", "replayed", "thorough"]
