"""Leaving a claim: the outcomes of a settle, and the renewal of leases (semantics 4 to 6, 13, 15, 16, 25, 31, 43).

`store.py` calls `settle`, which tries `settle_quickly` first: one write of fenced updates, for runs that nothing else hangs on. Where
not all of them match, and for runs that are known to be linked, it is `settle_with_care` in a transaction: terminal outcomes go through
the landing, first; suspensions come last, each against the wakes that the others of its batch have made. What the quick write has done,
the careful one recognises.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pymongo.errors import PyMongoError

from durable.landing import Ending, settled, state_after
from durable.model import (
    TERMINAL,
    Cancelled,
    Completed,
    ErrorKind,
    Failure,
    HandedBack,
    Instant,
    Lease,
    Outcome,
    Renewal,
    Renewed,
    Retry,
    Settled,
    Status,
    Suspended,
)
from durable.settings import Micros

from . import flow, landing, removal
from .changes import Stage, change, only_if, plus, present
from .connection import Database
from .enqueue import effective_start
from .journal import held, mark_of
from .operation import Change, Document, Operation, Where, Work
from .rows import asked, instant
from .times import milliseconds, stored, stored_not_before

_STATE: Final = (
    *("attempts", "mark", "cancel_requested_at", "cancel_refused_at", "wake_seq", "deadline_at", "queue"),
    *("name", "version"),
    *landing.NEEDED,
)
NOBODY_ASKED: Final = {"$or": [{"cancel_requested_at": None}, {"cancel_refused_at": {"$ne": None}}]}
TOGETHER: Final = 3 << 20
"""Characters of output in one write, of at most four bytes each: a command is no larger than a document may be."""
LOCKED_FOR: Final = 2.0
LOCKED_FOR_ONE: Final = 0.5
"""Seconds that a renewal waits for documents that a commit under way holds: all together, then each, before it is `unknown`."""


# -- settling -----------------------------------------------------------------------------------------------------------------


async def settle(database: Database, entries: Sequence[tuple[Lease, Outcome]]) -> list[Settled]:
    """One answer per entry, in order."""
    with_care = [lease.linked for lease, _ in entries]
    alone = [entry for entry in entries if not (entry[0].linked or entry[0].permits)]
    limited = [entry for entry in entries if entry[0].permits and not entry[0].linked]
    done = not alone or await database.plain(lambda work: settle_quickly(work, alone))
    if not (done and (not limited or await _settle_limited(database, limited))):
        with_care = [True] * len(entries)
    left = [entry for entry, care in zip(entries, with_care, strict=True) if care]
    answers = iter(await _settle_left(database, left) if left else [])
    return [next(answers) if care else "landed" for care in with_care]


class _NotAsBelievedError(Exception):
    """Rolls a transaction back, for another one that looks."""


async def _settle_limited(database: Database, entries: Sequence[tuple[Lease, Outcome]]) -> bool:
    """The same for runs that hold permits, on which nothing else hangs: in one transaction, which gives those back first. A permit that
    a run took late it has not told its lease, but such a run is linked; one that was taken away has left a row that says nothing."""
    freed = _permits_of(entries)

    async def settle_and_release(work: Work) -> None:
        await flow.give_back(work, freed)
        if not await settle_quickly(work, entries):
            raise _NotAsBelievedError
        await flow.let_in(work, freed)

    try:
        await database.write(settle_and_release, in_line=True, look=_behind_others(freed))
    except _NotAsBelievedError:
        return False
    return True


async def _settle_left(database: Database, entries: Sequence[tuple[Lease, Outcome]]) -> list[Settled]:
    limited = _permits_of(entries)

    async def settle_behind_others(work: Work) -> list[Settled]:
        await flow.lock_first(work, map(flow.rule_of, limited))
        return await settle_with_care(work, entries)

    look = _behind_others(limited) if limited else None
    return await database.write(settle_behind_others, in_line=bool(limited), look=look)


def _behind_others(permits: Iterable[str]) -> Operation[None]:
    """Before each try but the first: it was sent back at the rows of these."""
    tries = itertools.count()

    async def wait(work: Work) -> None:
        if next(tries):
            await flow.wait_for(work, map(flow.rule_of, permits))

    return wait


def _permits_of(entries: Sequence[tuple[Lease, Outcome]]) -> Counter[str]:
    """How many of each scope these were claimed with."""
    return Counter(text for lease, _ in entries for text in lease.permits)


async def settle_quickly(work: Work, entries: Sequence[tuple[Lease, Outcome]]) -> bool:
    """Settle all of them where each is an only one, unlinked, and as its holder believes. False: some are not, look with care."""
    if len({lease.run_id for lease, _ in entries}) < len(entries):
        return False
    changes: list[tuple[Where, Change]] = []
    completed: dict[Lease, str] = {}
    weight = 0
    for lease, outcome in entries:
        if isinstance(outcome, Completed) and weight + len(outcome.output) < TOGETHER:
            completed[lease] = outcome.output
            weight += len(outcome.output)
            continue
        where: Document = {**held(lease), "linked": {"$ne": True}}
        if isinstance(outcome, Retry) and outcome.failure.positions:
            return False
        if not isinstance(outcome, (Cancelled, HandedBack)):
            where.update(NOBODY_ASKED)
        if isinstance(outcome, HandedBack):
            where["cancel_requested_at"] = None  # an ask makes it claimable now: with care
        if isinstance(outcome, (Retry, HandedBack)) and outcome.after:
            where["deadline_at"] = None  # so does a deadline
        if isinstance(outcome, Suspended):
            where.update(wake_seq=outcome.wake_seq, deadline_at=None)
        changes.append((where, _left(work, outcome, {})))
    if await _complete(work, completed) + await work.change_each("durable_run", changes) < len(entries):
        return False
    for lease, outcome in entries:
        if state_after(outcome) in TERMINAL:
            work.announce(f"run:{lease.run_id}")
        elif not isinstance(outcome, Suspended):
            work.announce("queue:")  # its queue was not read
    return True


async def _complete(work: Work, outputs: Mapping[Lease, str]) -> int:
    """Most runs just complete: one write for all of them costs the server half of one for each."""
    if not outputs:
        return 0
    where: Where = {
        "_id": {"$in": [lease.run_id for lease in outputs]},
        "mark": {"$in": [mark_of(lease) for lease in outputs]},
        "status": "running",
        "linked": {"$ne": True},
        **NOBODY_ASKED,
    }
    ending = Ending("", Status.COMPLETED)
    by_id = {lease.run_id: output for lease, output in outputs.items()}
    return await work.change_many("durable_run", where, landing.ended(work, ending, outputs=by_id))


async def settle_with_care(work: Work, entries: Sequence[tuple[Lease, Outcome]]) -> list[Settled]:
    """One answer per entry, in order."""
    ids = sorted({lease.run_id for lease, _ in entries})
    rows = {row["_id"]: row for row in await work.find("durable_run", {"_id": {"$in": ids}}, fields=_STATE)}
    read = dict(rows)
    answers: list[Settled] = []
    endings: list[Ending] = []
    leaving: list[tuple[int, Lease, Document, Retry | HandedBack | Suspended]] = []
    for place, (lease, outcome) in enumerate(entries):
        row = rows.get(lease.run_id)
        if row is None or not (row["status"] == Status.RUNNING and row.get("mark") == mark_of(lease)):
            answers.append("landed" if row is not None and _recognised(row, lease, outcome) else "lost")
            continue
        if asked(row) and not isinstance(outcome, (Cancelled, HandedBack)):
            answers.append("woken")
            continue
        answers.append("landed")
        rows[lease.run_id] = {
            **row,
            "status": str(state_after(outcome)),
        }  # a second entry of one run is a repeated one
        if isinstance(outcome, (Retry, HandedBack, Suspended)):
            leaving.append((place, lease, row, outcome))
        else:
            endings.append(settled(lease.run_id, outcome))
    if endings:
        await landing.land(work, endings, read={ending.run_id: read[ending.run_id] for ending in endings})
    left: list[Document] = []
    for place, lease, row, outcome in sorted(leaving, key=lambda entry: isinstance(entry[3], Suspended)):
        if isinstance(outcome, Retry):
            await removal.take_out(work, row, outcome.failure.positions)
        where: Document = held(lease)
        if isinstance(outcome, Suspended):
            where["wake_seq"] = outcome.wake_seq
        if await work.change_one("durable_run", where, _left(work, outcome, row)) == 1:
            left.append(row)
            if not isinstance(outcome, Suspended):
                work.announce(f"queue:{row['queue']}")
        else:
            answers[place] = "woken"
    await flow.release(work, left)
    return answers


def _recognised(row: Document, lease: Lease, outcome: Outcome) -> bool:
    """A repeated settle whose first answer was lost: the same fence and mark, already in that state (6)."""
    return bool(row.get("mark") == mark_of(lease) and row["status"] == state_after(outcome))


def _left(work: Work, outcome: Outcome, row: Document) -> list[Stage]:
    """The change by which a run leaves its claim. `row` is as it was read: where that was not, the filter has made sure of it."""
    if isinstance(outcome, Suspended):
        return _suspended(work, outcome, instant(row, "deadline_at"))
    if isinstance(outcome, (Retry, HandedBack)):
        return _to_pending(work, outcome, instant(row, "deadline_at"), asked(row))
    return landing.ended(work, settled("", outcome))


def _suspended(work: Work, outcome: Suspended, deadline_at: Instant | None) -> list[Stage]:
    until = None if outcome.until is None else stored_not_before(outcome.until)
    if deadline_at is not None:
        until = stored(deadline_at) if until is None else min(until, stored(deadline_at))
    put: dict[str, Any] = {
        "status": "suspended",
        "waiting_for": outcome.waiting_for,
        "wake_after": outcome.wake_after or None,
        "wake_delay": outcome.wake_delay or None,
        "wake_on_failure": outcome.wake_on_failure or None,
        "reclaims": 0,
        "available_at": until,
    }
    return change(put=put, compute={"updated_at": work.clock.expression()}, drop=("leased_until", "permits"))


def _to_pending(
    work: Work, outcome: Retry | HandedBack, deadline_at: Instant | None, asked_to_stop: bool
) -> list[Stage]:
    failure: Failure | None = outcome.failure
    retried = isinstance(outcome, Retry)
    # An ask that came before the hand-back makes it claimable now, as one that comes after it does (43).
    start = None if asked_to_stop else effective_start(work.now, work.now + outcome.after, deadline_at)
    put: dict[str, Any] = {
        "status": "pending",
        "available_at": None if start is None else stored_not_before(start),
        "error_detail": None if failure is None else failure.detail,
    }
    compute: dict[str, Any] = {"updated_at": work.clock.expression()}
    if failure is not None:
        put.update(error=failure.message, error_kind=str(failure.kind))
    if retried:
        compute["failures"] = plus("failures", 1)
        # A run that has no record begins anew: its next claim is its start.
        compute["started_at"] = only_if(present("replay_family"), "$started_at")
    else:
        put["reclaims"] = 0
        if failure is not None and failure.kind == ErrorKind.NON_DETERMINISM:
            compute["mismatch_since"] = {"$ifNull": ["$mismatch_since", work.clock.expression()]}
    drop = ("leased_until", "permits", "error_positions", "wake_after", "waiting_for")
    return change(put=put, compute=compute, drop=drop)


# -- renewing -----------------------------------------------------------------------------------------------------------------


async def renew(work: Work, renewals: Sequence[Renewal], lease: Micros, skip: frozenset[str]) -> list[Renewed]:
    """Prolong what is held; a lease that lapsed and that nobody swept is held (13). `skip`: runs whose `ctx.transaction` is under way
    here; a write to one would make that fail at its end, so they are `unknown` for its few seconds."""
    going = [renewal for renewal in renewals if renewal.lease.run_id not in skip]
    unknown = set(skip)
    try:
        await _prolong(work, going, lease, LOCKED_FOR)
    except PyMongoError as error:
        if not error.timeout:
            raise
        # Some document is held by a commit under way, and the write stopped half way: each for itself.
        tries = [_prolong(work, [renewal], lease, LOCKED_FOR_ONE) for renewal in going]
        for renewal, answer in zip(going, await asyncio.gather(*tries, return_exceptions=True), strict=True):
            if isinstance(answer, PyMongoError) and answer.timeout:
                unknown.add(renewal.lease.run_id)
            elif isinstance(answer, BaseException):
                raise answer from error
    ids = sorted({renewal.lease.run_id for renewal in renewals})
    rows = {row["_id"]: row for row in await work.find("durable_run", {"_id": {"$in": ids}}, fields=_STATE)}
    answers: list[Renewed] = []
    for renewal in renewals:
        row = rows.get(renewal.lease.run_id)
        if row is None or row["status"] != Status.RUNNING or row.get("mark") != mark_of(renewal.lease):
            answers.append(Renewed(state="lost"))
            continue
        answers.append(
            Renewed(
                state="unknown" if renewal.lease.run_id in unknown else "held",
                cancel_requested=asked(row),
                wake_seq=int(row["wake_seq"]),
            )
        )
        if renewal.progress is not None:
            work.announce(f"run:{renewal.lease.run_id}")
    return answers


async def _prolong(work: Work, renewals: Sequence[Renewal], lease: Micros, within: float) -> None:
    until = {"$add": [work.clock.expression(), milliseconds(lease)]}
    plain = [renewal.lease for renewal in renewals if renewal.progress is None]
    if plain:
        where = {
            "_id": {"$in": sorted(one.run_id for one in plain)},
            "mark": {"$in": sorted(mark_of(one) for one in plain)},
            "status": "running",
        }
        await work.change_many(
            "durable_run", where, change(compute={"leased_until": until}, ready=False), within=within
        )
    await work.change_each(
        "durable_run",
        [
            (
                held(renewal.lease),
                change(
                    put={"progress": renewal.progress},
                    compute={"leased_until": until, "updated_at": work.clock.expression()},
                    ready=False,
                ),
            )
            for renewal in renewals
            if renewal.progress is not None
        ],
    )


__all__ = ["renew", "settle", "settle_quickly", "settle_with_care"]
