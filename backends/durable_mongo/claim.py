"""Claiming: heads of the index of what is ready, the endings that a claim finds, permits, and the fence (semantics 7 to 12, 45, 73).

`store.py` calls `Claim.make`, which is three round trips where nothing is limited: the ids of the heads, one update of all of them that
takes those still there, and what it took. Other claimers at the same heads cost a batch some of its runs, never a run two holders; a
claimer that meets them looks at more heads than it needs and takes some of those by chance. Where a limit or a pause may count it is a
transaction that writes the row of each scope.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from pymongo.errors import PyMongoError

from durable.flow import Gates, Turns, dealt, in_turn
from durable.landing import Ending, damaged, never_recorded, past_deadline
from durable.model import ALL, Claimed, ClaimRequest, Lease, Scope

from . import faults, flow, journal, landing
from .changes import Stage, change, plus
from .connection import Database
from .operation import Document, Where, Work
from .rows import Damaged, asked, in_order, instant, of_scope, run_record
from .times import milliseconds, stored

ROUNDS: Final = 8
"""How often a claim looks again after the heads that it found were landed or held back. What then remains, the next claim takes."""
HELD_BACK: Final = 100
"""Heads that a round looks at where the one before took none and held some back: most of them are held back, too, each once."""
ROUTES: Final = 180
"""Names (and versions, and families) of one query: beyond 200 the server sorts instead of merging."""
FURTHEST: Final = 16
"""How many times more heads than it needs a claimer looks at, where it meets others."""
_ORDER: Final = (("priority", -1), ("submitted", 1), ("_id", 1))
# By what heads are sorted, and what scopes they are in.
_HEAD: Final = ("priority", "submitted", "tenant_id", "queue", "name", "concurrency_key")
_READY: Final = {"status": "pending", "ready": True}
# An ask and no record (45), or past its deadline (12): such runs end at a claim.
_ENDING: Final = (
    "cancel_requested_at",
    "cancel_refused_at",
    "replay_family",
    "deadline_at",
    "compensating",
    "cancel_reason",
)
_CANDIDATE: Final = (*_HEAD, *_ENDING)


class Claims:
    """What a store remembers from claim to claim: how crowded the heads are, and whose turn it is."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reach = 1
        self.turns = Turns()

    async def claim(self, request: ClaimRequest) -> list[Claimed]:
        """Take up to `limit` claimable runs; the same mark again gives what it holds and takes nothing more (8).

        A run whose document or journal can not be read never strands its batch: it lands failed, kind payload (9).
        """
        one = _Claim(self, request)
        rows = await self._database.write(one.take_in_transaction, in_line=True, look=one.take)
        return await self._handed_out(rows)

    async def _handed_out(self, rows: Sequence[Document]) -> list[Claimed]:
        """Leases, with the journals of those that are replayed: read after the claim is durable (3)."""
        replayed = [row["_id"] for row in rows if "replay_family" in row]
        journals: dict[str, list[Document]] = {}
        if replayed:
            journals = await self._database.plain(lambda work: journal.histories(work, replayed))
        claimed: list[Claimed] = []
        bad: list[Document] = []
        for row in rows:
            try:
                run = run_record(row)
                lease = Lease(
                    run_id=run.run_id,
                    tenant=run.tenant,
                    attempts=run.attempts,
                    mark=run.lease_owner or "",
                    linked=bool(row.get("linked")),
                    permits=tuple(row.get("permits", ())),
                )
                claimed.append(Claimed(lease=lease, run=run, history=tuple(in_order(journals.get(run.run_id, ())))))
            except Damaged:
                bad.append(row)
        if bad:
            await self._database.write(lambda work: _land_damaged(work, bad))
        return claimed


class _Claim:
    """One claim, through all its tries: a try that brought no answer is repeated with the runs that it had chosen."""

    def __init__(self, claims: Claims, request: ClaimRequest) -> None:
        self._claims = claims
        self._request = request
        self._routes = routes(request)
        self._mine = False
        """Whether this call has written the row of its mark."""
        self._gates = Gates()
        """What it leaves out whole, and where tenants take turns: as of the last look. What was paused since is held back run by run."""
        self._scopes: frozenset[str] = frozenset()
        """The rows of flow control that may count for the heads that the last look found."""

    # -- without limits ----------------------------------------------------------------------------------------------------

    async def take(self, work: Work) -> list[Document] | None:
        """The documents of what it holds. None: a limit or a pause may count, or some head must end here: use a transaction."""
        request = self._request
        await flow.wait_for(work, self._scopes)  # of the last try, which was sent back there
        before, ruled, alone, found = await asyncio.gather(
            held(work, request.mark),
            flow.ruled(work, request),
            self._lonely(work) if request.alone else _nothing(),
            self._heads(work, self._claims.reach),
        )
        if before or request.limit < 1:
            return before
        chosen = self._choose(found, ())
        if not (chosen or alone):
            return []
        if ruled or alone:
            self._gates = await flow.gates(work, request)
            if not alone and all(
                queue in self._gates.closed for queue, rows in zip(request.queues, found, strict=True) if rows
            ):
                return []
            self._scopes = frozenset(
                queue_id for rows in (alone, *found) for row in rows for queue_id, _ in flow.scopes_of(row)
            )
            return None
        self._mine = self._mine or await _first_of_its_mark(work, request.mark, chosen)
        if not self._mine:  # another call has this mark: do what it is about to do, which is done once
            return await self._as_the_first(work)
        rows = await self._until_full(work, chosen)
        if await flow.ruled(work, request):
            await self._claims._database.write(lambda own: flow.take_late(own, [row["_id"] for row in rows]))
        return rows

    async def _until_full(self, work: Work, chosen: Sequence[str]) -> list[Document]:
        """Take the heads; where others were quicker, the next ones; where heads end here, land them and look again."""
        mark = self._request.mark
        for _ in range(ROUNDS):
            got = await self._update(work, chosen)
            ended = await self._land_endings(work, chosen) if got < len(chosen) else 0
            self._learn(got, len(chosen) - ended)
            if got == len(chosen):
                break
            rows = await held(work, mark)
            chosen = self._choose(await self._heads(work, self._claims.reach), rows)
            if not chosen:
                return rows
            await work.change_one("durable_permit", {"_id": ticket(mark)}, {"$addToSet": {"chosen": {"$each": chosen}}})
        return await held(work, mark)

    async def _as_the_first(self, work: Work) -> list[Document]:
        row = await work.noted("durable_permit", ticket(self._request.mark))
        if row is not None and row.get("chosen"):
            await self._update(work, row["chosen"])
        return await held(work, self._request.mark)

    async def _update(self, work: Work, ids: Sequence[str]) -> int:
        going = {
            "$or": [
                {"deadline_at": None},
                {"compensating": True},
                {"$expr": {"$gt": ["$deadline_at", work.clock.expression()]}},
            ],
            "$and": [
                {
                    "$or": [
                        {"cancel_requested_at": None},
                        {"cancel_refused_at": {"$ne": None}},
                        {"replay_family": {"$ne": None}},
                    ]
                }
            ],
        }
        where: Where = {"_id": {"$in": list(ids)}, **_READY, **going}
        return await work.change_many("durable_run", where, taken(work, self._request))

    def _learn(self, got: int, wanted: int) -> None:
        """From what others took of the heads that were there to be taken."""
        if got < 0.7 * wanted:
            self._claims.reach = min(FURTHEST, self._claims.reach * 2)
        elif got == wanted:
            self._claims.reach = max(1, self._claims.reach - 1)

    async def _heads(self, work: Work, reach: int) -> list[list[Document]]:
        """For each queue the heads of what this worker can take, in order."""
        request = self._request
        return [
            await heads(work, queue, self._routes, request.scope, min(most, request.limit) * reach)
            if most > 0 and request.limit > 0
            else []
            for queue, most in request.queues.items()
        ]

    def _choose(self, found: Sequence[Sequence[Document]], taken_already: Sequence[Document]) -> list[str]:
        """Which of these heads to take, within what is left of the limits."""
        request = self._request
        chosen: list[Document] = []
        for (queue, most), rows in zip(request.queues.items(), found, strict=True):
            room = min(
                most - sum(row["queue"] == queue for row in taken_already),
                request.limit - len(taken_already) - len(chosen),
            )
            if room > 0:
                chosen += (
                    rows if len(rows) <= room else random.sample(rows, room) if self._claims.reach > 1 else rows[:room]
                )
        return [row["_id"] for row in chosen]

    async def _lonely(self, work: Work) -> list[Document]:
        request = self._request
        queues = [queue for queue, most in request.queues.items() if most > 0]
        where = {
            "blocked_on": flow.ALONE,
            "status": "pending",
            "available_at": None,
            "queue": {"$in": queues},
            "route": {"$in": self._routes},
            **of_scope(request.scope),
        }
        return await work.find("durable_run", where, fields=_CANDIDATE, sort=_ORDER, limit=1)

    async def _land_endings(self, work: Work, ids: Sequence[str]) -> int:
        """Land those that are still there because they end at a claim; how many."""
        rows = await work.find("durable_run", {"_id": {"$in": list(ids)}, **_READY}, fields=_ENDING)
        ending = [row["_id"] for row in rows if _ending(work, row) is not None]
        if ending:
            await self._claims._database.write(functools.partial(_land_heads, ids=ending))
        return len(ending)

    # -- with limits -------------------------------------------------------------------------------------------------------

    async def take_in_transaction(self, work: Work) -> list[Document]:
        """The same where scopes have limits, where a run is to be taken alone, or where heads end here."""
        await flow.lock_first(work, self._scopes)
        # The row of the mark is written here too: of two claims with one mark the second finds it, and what the first holds.
        row = {"_id": ticket(self._request.mark)}
        if await work.change_one("durable_permit", row, {"$set": {"at": stored(work.now)}}, upsert=True):
            return await held(work, self._request.mark)
        return await self._take_with_care(work)

    async def _take_with_care(self, work: Work) -> list[Document]:
        request = self._request
        gates = self._gates
        if request.alone:
            for _ in range(ROUNDS):
                rows = [row for row in await self._lonely(work) if row["queue"] not in gates.closed]
                if (await self._take_of(work, rows, 1))[0]:
                    return await held(work, request.mark)
                if not rows:
                    break
        count = 0
        for queue, most in request.queues.items():
            room = min(most, request.limit - count)
            if queue not in gates.closed:
                count += await self._from_queue(work, queue, room, fair=queue in gates.fair)
        return await held(work, request.mark) if count else []

    async def _from_queue(self, work: Work, queue: str, room: int, *, fair: bool) -> int:
        """Take from one queue. Those that end here, or that a limit holds back, leave the index: then look again."""
        count = 0
        full: set[str] = set()
        for _ in range(ROUNDS):
            left = room - count
            if left < 1:
                break
            if fair:
                rows = await heads_in_turn(work, queue, self._routes, left, self._claims.turns.last(queue))
                self._claims.turns.served(queue, [row["tenant_id"] for row in rows])
            else:
                most = max(left, HELD_BACK) if full and not count else left
                rows = await heads(work, queue, self._routes, self._request.scope, most, fields=_CANDIDATE)
                if count and all(full.intersection(text for _, text in flow.scopes_of(row)) for row in rows):
                    break  # no place for these either: the next claim holds them back, and this one has what others wait for
            got, held_by = await self._take_of(work, rows, left)
            count, full = count + got, full | held_by
            if got == len(rows):
                break
        return count

    async def _take_of(self, work: Work, rows: Sequence[Document], room: int) -> tuple[int, set[str]]:
        """Take of these what may go, at once: the next round counts the permits that are taken here. The answer: how many, and the scopes
        that hold back the others."""
        endings = {row["_id"]: _ending(work, row) for row in rows}
        await landing.land(work, [ending for ending in endings.values() if ending is not None])
        permits, held_by = await flow.admit(work, [row for row in rows if endings[row["_id"]] is None], room)
        return await self._taken(work, permits), held_by

    async def _taken(self, work: Work, permits: Mapping[str, Sequence[str]]) -> int:
        by_permits: dict[tuple[str, ...], list[str]] = {}
        for run_id, texts in permits.items():
            by_permits.setdefault(tuple(texts), []).append(run_id)
        await work.change_groups(
            "durable_run",
            [
                ({"_id": {"$in": ids}, "status": "pending"}, taken(work, self._request, permits=texts))
                for texts, ids in by_permits.items()
            ],
        )
        return len(permits)


# -- the pieces -------------------------------------------------------------------------------------------------------------


def routes(request: ClaimRequest) -> list[str]:
    """Name, version and family in one: for each, runs without a record, and runs with records of this interpreter's family.

    A run without a version is taken for its name alone, whatever versions of it the worker registered.
    """
    pairs = {(name, "") for name, _ in request.functions} | {
        (name, version or "") for name, version in request.functions
    }
    return [f"{name}/{version}@{family}" for name, version in sorted(pairs) for family in ("", request.family)]


async def heads(
    work: Work, queue: str, wanted: Sequence[str], scope: Scope, limit: int, *, fields: Sequence[str] = _HEAD
) -> list[Document]:
    """The first runs of a queue that are ready, by priority and `submitted`."""
    parts = [wanted[start : start + ROUTES] for start in range(0, len(wanted), ROUTES)]
    found: list[Document] = []
    for part in parts:
        where: Document = {"queue": queue, "route": {"$in": part}, **_READY, **of_scope(scope)}
        found += await work.find("durable_run", where, fields=fields, sort=_ORDER, limit=limit)
    if len(parts) > 1:
        found.sort(key=_rank)
    return found[:limit]


async def heads_in_turn(work: Work, queue: str, wanted: Sequence[str], room: int, last: str | None) -> list[Document]:
    """The heads of a fair queue: of each tenant in turn, beginning behind the one that was served last. What is read is bounded by the
    tenants and by what is taken, whatever the backlog of one of them (10)."""
    # The untagged have no turn of their own in the index: those at the front of the queue are dealt as one hand.
    front = await heads(work, queue, wanted, ALL, room, fields=_CANDIDATE)
    untagged = [row for row in front if not row["tenant_id"]]
    behind = await _tenants_beyond(work, queue, wanted, last, room) if last else []
    first = await _tenants_beyond(work, queue, wanted, "", room - len(behind))
    tenants = in_turn(last, lambda one, most: (behind if one else first)[:most], room, untagged=bool(untagged))
    share = -(-room // max(1, len(tenants)))
    while True:
        hands = [
            await heads(work, queue, wanted, UUID(one), share, fields=_CANDIDATE) if one else untagged
            for one in tenants
        ]
        dealt_out = dealt(hands, room)
        if len(dealt_out) == room or all(len(hand) < share for one, hand in zip(tenants, hands, strict=True) if one):
            return dealt_out
        share *= 2


async def _tenants_beyond(work: Work, queue: str, wanted: Sequence[str], last: str, most: int) -> list[str]:
    """At most so many tenants that have something ready and come after this one, by a look at the index for each."""
    found: list[str] = []
    while len(found) < most:
        looks: list[str] = []
        for start in range(0, len(wanted), ROUTES):
            routes_of = {"$in": list(wanted[start : start + ROUTES])}
            where: Document = {"queue": queue, "route": routes_of, **_READY, "tenant_id": {"$gt": last}}
            row = await work.first("durable_run", where, fields=["tenant_id"], sort=[("tenant_id", 1)])
            looks += [row["tenant_id"]] if row is not None else []
        if not looks:
            break
        last = min(looks)
        found.append(last)
    return found


def _rank(row: Document) -> tuple[Any, ...]:
    return (-row["priority"], row["submitted"], row["_id"])


def taken(work: Work, request: ClaimRequest, *, permits: Sequence[str] = ()) -> list[Stage]:
    """The change by which runs are claimed: the counter, the mark, the lease by the server's clock, in one write (1)."""
    now = work.clock.expression()
    mark = {"$literal": request.mark}
    compute: dict[str, Any] = {
        "attempts": plus("attempts", 1),
        "leased_until": {"$add": [now, milliseconds(request.lease)]},
        "started_at": {"$ifNull": ["$started_at", now]},
        "updated_at": now,
        "mark": {"$concat": ["$_id", "/", {"$toString": plus("attempts", 1)}, "/", mark]},
    }
    put: dict[str, Any] = {"status": "running", "claim_token": request.mark, "claim_family": request.family}
    if permits:
        put["permits"] = list(permits)
    return change(put=put, compute=compute, drop=("ready", "blocked_on", "waiting_for"), ready=False)


async def held(work: Work, mark: str) -> list[Document]:
    """What a claim holds, in its order."""
    rows = await work.find("durable_run", {"claim_token": mark, "status": "running"})
    return sorted(rows, key=_rank)


def ticket(mark: str) -> str:
    """The key of the row that a claim writes once: of two claims with one mark one is the second (8)."""
    return f"~claim:{mark}"


async def _land_heads(work: Work, ids: Sequence[str]) -> None:
    rows = await work.find("durable_run", {"_id": {"$in": list(ids)}, **_READY}, fields=_ENDING)
    await landing.land(work, [ending for ending in (_ending(work, row) for row in rows) if ending is not None])


async def _first_of_its_mark(work: Work, mark: str, chosen: Sequence[str]) -> bool:
    try:
        await work.note("durable_permit", {"_id": ticket(mark), "chosen": list(chosen), "at": stored(work.now)})
    except PyMongoError as error:
        if faults.duplicate(error):
            return False
        raise
    return True


async def _nothing() -> list[Document]:
    return []


def _ending(work: Work, row: Document) -> Ending | None:
    """How a run ends that should not be called any more: an ask and no record (45), or past its deadline (12)."""
    if asked(row) and "replay_family" not in row:
        return never_recorded(row["_id"], row.get("cancel_reason"))
    deadline_at = instant(row, "deadline_at")
    if deadline_at is not None and deadline_at <= work.now and not row.get("compensating"):
        return past_deadline(row["_id"])
    return None


async def _land_damaged(work: Work, rows: Sequence[Document]) -> None:
    mine = await work.find(
        "durable_run",
        {"_id": {"$in": [row["_id"] for row in rows]}, "mark": {"$in": [row["mark"] for row in rows]}},
        fields=["_id"],
    )
    await landing.land(work, [damaged(row["_id"]) for row in mine])


__all__ = ["Claims", "heads", "held", "routes", "taken"]
