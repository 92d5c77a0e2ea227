"""Flow control: permits of limited scopes, token buckets, pauses, and the release of what was held back (semantics 73 to 76).

Claim calls `admit` with its candidates, every write by which a run leaves `running` calls `release`, every landing calls
`next_in_sequence`. These run inside a transaction that writes the row of each scope it counts in (`_lock`): two of them are one after the
other. Claims and settles write it first where they can (`lock_first`), and wait for who has it outside of a transaction (`wait_for`).
Upkeep calls `refill`, `free` and `free_heads` as nets. A permit is a name in the run's own `permits`, so that taking it is the claim and
giving it back the settle. The row says how many of its scope are out, at most (`in_flight`), so that a claim need not count; of a scope
that is spread over keys or tenants it does not. Nothing here changes a status, lands a run, or decides a limit.

What the rows and the texts of scopes mean stands in `durable.flow`; here `tenant_id` of everybody's row is `*`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from durable import flow as texts
from durable.flow import (
    ALONE,
    EVERYBODY,
    RELEASE_BATCH,
    SEQUENCE,
    Gates,
    Permit,
    Rule,
    Wanted,
    gate_ids,
    gates_of,
    is_spread,
    owner_of,
    rule_id,
    rule_of,
    scope_text,
    split,
    wanted,
)
from durable.model import ALL, ClaimRequest, Instant, QueueRecord, Scope

from .changes import change, only_if, plus, present
from .operation import Change, Document, Where, Work
from .rows import dated, instant, of_scope, sees
from .times import stored

_FIRST: Final = (("priority", -1), ("submitted", 1), ("_id", 1))
_HOLDS: Final = {
    "$or": [{"paused": True}, {"max_concurrency": {"$exists": True}}, {"rate_count": {"$exists": True}}],
}
COUNTED_TOGETHER: Final = 100
"""Permits at the most that a look at several scopes reads: each is a document, where the count of one scope reads the index alone."""
# A run that lapsed twice in a row goes back to be taken alone (15), not into the index of what is ready.
UNBLOCK: Final = change(compute={"blocked_on": only_if({"$gte": ["$reclaims", 2]}, ALONE)})


def _rule(row: Document) -> Rule:
    record = QueueRecord(
        scope_name=row["scope_name"],
        tenant=texts.tenant_of(row["tenant_id"]),
        paused=bool(row.get("paused")),
        max_concurrency=_whole(row.get("max_concurrency")),
        rate_count=_whole(row.get("rate_count")),
        rate_period=_whole(row.get("rate_period")),
        rate_burst=_whole(row.get("rate_burst")),
        fair=bool(row.get("fair")),
    )
    rule = Rule(row["_id"], record, _whole(row.get("rate_tokens")), instant(row, "rate_at"))
    if "in_flight" in row and row["in_flight"]["turn"] == row["turn"]:
        text = scope_text(row["tenant_id"], record.scope_name)
        rule.newest[text] = Permit(text, 0, int(row["in_flight"]["most"]))
    return rule


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


# -- the scopes of a run --------------------------------------------------------------------------------------------------


def scopes_of(row: Document) -> list[tuple[str, str]]:
    """(queue_id of the rule, scope text) of every scope that a run is in, whether it is limited or not."""
    return texts.scopes_of(row["tenant_id"], row["queue"], row["name"], row.get("concurrency_key"))


async def _rules(work: Work, queue_ids: Iterable[str]) -> dict[str, Rule]:
    rows = await work.find("durable_queue", {"_id": {"$in": sorted(set(queue_ids))}})
    return {row["_id"]: _rule(row) for row in rows}


async def _lock(work: Work, in_flight: Mapping[str, Any]) -> None:
    """Write these rows: whoever else counts in them meanwhile is before or behind this transaction. With each goes what it says of its
    permits from now on."""
    await work.change_each(
        "durable_queue", [({"_id": queue_id}, _turn(said)) for queue_id, said in sorted(in_flight.items())]
    )


def _turn(in_flight: Any) -> Change:
    return [{"$set": {"turn": plus("turn", 1), "in_flight": in_flight}}]


async def lock_first(work: Work, queue_ids: Iterable[str]) -> None:
    """Write the rows that hold something, of these that there may be, as the first thing that a transaction does: who meets another one
    there is sent back before it has done anything, and who is let through is not sent back any more."""
    if where := _holding(queue_ids):
        await work.change_many("durable_queue", where, _turn(_without(0)))


async def wait_for(work: Work, queue_ids: Iterable[str]) -> None:
    """Wait, outside a transaction, for who is about to count in these rows."""
    if where := _holding(queue_ids):
        await work.wait_for("durable_queue", where)


def _holding(queue_ids: Iterable[str]) -> Document:
    ids = sorted(set(queue_ids))
    return {"_id": {"$in": ids}, **_HOLDS} if ids else {}


def _at_most(number: Any) -> Document:
    """What a row says: so many of its permits are out, at most, as of this turn. Where somebody has had a turn since who did not keep it,
    as one of a version before, it is worth nothing."""
    return {"most": number, "turn": plus("turn", 1)}


def _without(given_back: int) -> Any:
    """What a row says when so many permits were given back, or none."""
    valid = {"$and": [present("in_flight"), {"$eq": ["$in_flight.turn", "$turn"]}]}
    return only_if(valid, _at_most({"$subtract": ["$in_flight.most", given_back]}))


def seen_from(scope: Scope) -> Document:
    """Which rows may hold back the runs of this scope: its own and everybody's."""
    return {} if scope is ALL else {"tenant_id": {"$in": [owner_of(scope), EVERYBODY]}}


async def ruled(work: Work, request: ClaimRequest) -> bool:
    """Is there a row that a claim of these queues and functions may meet? Mostly there is none."""
    names = texts.concerning(request.queues, (name for name, _ in request.functions))
    where = {"scope_name": {"$in": names}, **seen_from(request.scope)}
    return await work.first("durable_queue", where, fields=["_id"]) is not None


async def gates(work: Work, request: ClaimRequest) -> Gates:
    """See `durable.flow.gates_of`."""
    return gates_of([rule.record for rule in (await _rules(work, gate_ids(request))).values()], request)


# -- what claim and landing call --------------------------------------------------------------------------------------------


async def admit(work: Work, candidates: Sequence[Document], most: int) -> tuple[dict[str, list[str]], set[str]]:
    """Those that every scope has room for, in order and so many at the most, with the permits that each takes; tokens are spent. The
    others get `blocked_on` = the scope that is full or paused, and are outside the index of what is ready until it frees (73, 74).
    These scopes are the second answer."""
    if not candidates:
        return {}, set()
    scopes = {row["_id"]: scopes_of(row) for row in candidates}
    found = await _rules(work, (queue_id for pairs in scopes.values() for queue_id, _ in pairs))
    # A row that merely lets tenants take turns is not written: it does not put claims in a line.
    rules = {queue_id: rule for queue_id, rule in found.items() if rule.holds}
    if not rules:
        return {row["_id"]: [] for row in candidates[:most]}, set()
    limited = {
        run_id: [(rules[queue_id], text) for queue_id, text in pairs if queue_id in rules]
        for run_id, pairs in scopes.items()
    }
    asked = wanted((pair for pairs in limited.values() for pair in pairs), work.now)
    await _look(work, asked)
    await _lock(work, {queue_id: _without(0) for queue_id in rules} | _taken(asked))
    admitted: dict[str, list[str]] = {}
    blocked: dict[str, str] = {}
    passed_over: Counter[tuple[str, str]] = Counter()
    for run_id, pairs in limited.items():
        full = next((text for rule, text in pairs if not rule.room(work.now, text)), None)
        if full is None and len(admitted) == most:
            break
        if full is None:
            admitted[run_id] = [permit.scope for rule, text in pairs if (permit := rule.take(text)) is not None]
            continue
        blocked[run_id] = full
        passed_over.update((rule.queue_id, text) for rule, text in pairs if text != full)
    await work.change_each(
        "durable_run",
        [({"_id": run_id, "status": "pending"}, change(put={"blocked_on": text})) for run_id, text in blocked.items()],
    )
    await _write_buckets(work, rules.values())
    # The place that it did not take in its other scopes goes to the next that waits there.
    places = {text: count for (queue_id, text), count in passed_over.items() if rules[queue_id].room(work.now, text)}
    await let_in(work, places)
    return admitted, set(blocked.values())


async def _look(work: Work, scopes: Iterable[Wanted]) -> None:
    """How many are in flight in each, at most: as its row says, or counted where that leaves no room for all."""
    silent = [
        one for one in scopes if (known := one.rule.newest.get(one.text)) is None or not one.fits(known.in_flight)
    ]
    counts = await _counted(work, silent)
    for one in silent:
        one.rule.newest[one.text] = Permit(one.text, 0, counts[one.text])


async def _counted(work: Work, scopes: Sequence[Wanted]) -> dict[str, int]:
    """Permits that are out, of each no further than its limit. Those of a few small scopes, as of keys, are counted in one look."""
    most = sum(one.limit for one in scopes)
    if len(scopes) > 1 and most <= COUNTED_TOGETHER:
        where = {"permits": {"$in": [one.text for one in scopes]}}
        rows = await work.find("durable_run", where, fields=["permits"], limit=most + 1)
        if len(rows) <= most:  # otherwise a limit was lowered, and this may not be all of every scope
            found = Counter(text for row in rows for text in row["permits"])
            return {one.text: found[one.text] for one in scopes}
    return {one.text: await work.count("durable_run", {"permits": one.text}, most=one.limit) for one in scopes}


def _taken(scopes: Iterable[Wanted]) -> dict[str, Any]:
    """What rows say when all that are wanted are taken, in so far as there is room. Where there is none, counting has stopped at the
    limit, and they go on saying what they said."""
    return {
        one.rule.queue_id: _at_most(min(known + one.number, one.limit))
        for one in scopes
        if not is_spread(one.text) and (known := one.rule.newest[one.text].in_flight) < one.limit
    }


async def _write_buckets(work: Work, rules: Iterable[Rule]) -> None:
    changes: list[tuple[Where, Change]] = [
        ({"_id": rule.queue_id}, {"$set": {"rate_tokens": rule.tokens, **dated(rate_at=rule.at)}})
        for rule in rules
        if rule.record.rate_count is not None
    ]
    await work.change_each("durable_queue", changes)


async def release(work: Work, rows: Iterable[Document]) -> None:
    """Runs have left `running`, and their permits with it: as many of those that wait for them are ready, by priority and `submitted`
    (73, 74). `rows` are as they were before."""
    freed = Counter(text for row in rows for text in row.get("permits", ()))
    await give_back(work, freed)
    await let_in(work, freed)


async def give_back(work: Work, freed: Mapping[str, int]) -> None:
    """So many permits of each scope are given back in this transaction."""
    of_rows = Counter({rule_of(text): 0 for text in freed})
    of_rows.update({rule_of(text): count for text, count in freed.items() if not is_spread(text)})
    await _lock(work, {queue_id: _without(count) for queue_id, count in of_rows.items()})


async def let_in(work: Work, places: Mapping[str, int]) -> int:
    """So many of those that wait for each of these scopes are ready, by priority and `submitted`; how many there were."""
    rows: list[Document] = []
    for text, count in sorted(places.items()):
        waiting = {"status": "pending", "blocked_on": text}
        rows += await work.find("durable_run", waiting, fields=["queue"], sort=_FIRST, limit=count)
    if rows:
        where = {"_id": {"$in": [row["_id"] for row in rows]}, "blocked_on": {"$in": list(places)}}
        await work.change_many("durable_run", where, UNBLOCK)
    for queue in {row["queue"] for row in rows}:
        work.announce(f"queue:{queue}")
    return len(rows)


async def head_of(work: Work, sequence_key: str) -> Document | None:
    """The first in the line of a stored key."""
    return await work.first(
        "durable_run", {"line": sequence_key}, fields=["queue", "blocked_on"], sort=[("submitted", 1), ("_id", 1)]
    )


async def next_in_sequence(work: Work, sequence_keys: Iterable[str]) -> None:
    """Runs of these stored keys have landed: the first in line of each is ready (75). Only for keys of landed runs that were not
    `blocked_on = 'sequence'` themselves: one that is cancelled while it waits for its turn has no turn to pass on."""
    for key in sorted(set(sequence_keys)):
        head = await head_of(work, key)
        if head is not None and head.get("blocked_on") == SEQUENCE:
            await work.change_one(
                "durable_run", {"_id": head["_id"], "blocked_on": SEQUENCE}, change(drop=("blocked_on",))
            )
            work.announce(f"queue:{head['queue']}")


# -- the operator's side ----------------------------------------------------------------------------------------------------


async def rules_of(work: Work, pairs: Sequence[tuple[str, str]]) -> dict[str, QueueRecord]:
    """Of these scopes of a run (queue_id of the row, text) those that have a row, by text."""
    rules = await _rules(work, (queue_id for queue_id, _ in pairs))
    return {text: rules[queue_id].record for queue_id, text in pairs if queue_id in rules}


async def queues(work: Work, scope: Scope) -> list[QueueRecord]:
    """The rows of flow control that a scope sees."""
    return [_rule(row).record for row in await work.find("durable_queue", of_scope(scope), sort=[("_id", 1)])]


async def set_queue(work: Work, record: QueueRecord) -> None:
    """Put a row; it counts for the next claim. What it held back and no longer holds is ready in the same write, up to a batch.
    Raises Conflict for a row that can mean nothing, before anything is written."""
    owner = owner_of(record.tenant)
    queue_id = rule_id(owner, record.scope_name)
    rule = Rule.put(record, (await _rules(work, [queue_id])).get(queue_id), work.now)
    await work.change_one("durable_queue", {"_id": queue_id}, _row_of(work, rule, owner), upsert=True)
    base = scope_text(owner, record.scope_name)
    await _adjust_permits(work, record, base)
    for text in await _blocked_scopes(work, base):
        await _fill(work, rule, text, RELEASE_BATCH)


def _row_of(work: Work, rule: Rule, tenant_id: str) -> Change:
    record = rule.record
    values: Mapping[str, Any] = {
        "scope_name": record.scope_name,
        "tenant_id": tenant_id,
        "paused": record.paused,
        "max_concurrency": record.max_concurrency,
        "rate_count": record.rate_count,
        "rate_period": record.rate_period,
        "rate_burst": record.rate_burst,
        "rate_tokens": rule.tokens,
        "rate_at": None if rule.at is None else stored(rule.at),
        "fair": record.fair,
        "updated_at": stored(work.now),
    }
    there = {name: value for name, value in values.items() if value is not None}
    gone = {name: "" for name, value in values.items() if value is None}
    # A turn that keeps nothing of what the row said: of the permits that a limit counts late it knew nothing.
    return {"$set": there, "$inc": {"turn": 1}, **({"$unset": gone} if gone else {})}


async def _adjust_permits(work: Work, record: QueueRecord, base: str) -> None:
    """A limit counts for what is in flight already (73): the runs that were claimed before there was one take their permits late."""
    kind, _, name = record.scope_name.partition(":")
    spread = texts.is_spread(base)
    if record.max_concurrency is None:
        in_use = {text for text in await _permits_in_use(work, base) if text == base or spread}
        for text in sorted(in_use):
            await work.change_many("durable_run", {"permits": text}, {"$pull": {"permits": text}})
        return
    where: Document = {"status": "running", **of_scope(record.tenant)}
    if name:
        where["name" if kind == "function" else "queue"] = name
    if kind == "key":
        where["concurrency_key"] = {"$exists": True}
    if kind == "share":
        where["tenant_id"] = {"$gt": ""}
    running = await work.find("durable_run", where, fields=["concurrency_key", "tenant_id"])
    of_what = "tenant_id" if kind == "share" else "concurrency_key"
    texts_of = {row["_id"]: f"{base}:{row[of_what]}" if spread else base for row in running}
    await work.change_each(
        "durable_run",
        [
            ({"_id": run_id}, {"$addToSet": {"permits": text}, "$set": {"linked": True}})
            for run_id, text in texts_of.items()
        ],
    )


async def take_late(work: Work, run_ids: Sequence[str]) -> None:
    """A limit came while these were claimed without looking: they count in it, in so far as they still run."""
    rows = await work.find("durable_run", {"_id": {"$in": list(run_ids)}, "status": "running"})
    scopes = {row["_id"]: scopes_of(row) for row in rows}
    rules = await _rules(work, {queue_id for pairs in scopes.values() for queue_id, _ in pairs})
    changes: list[tuple[Where, Change]] = []
    for run_id, pairs in scopes.items():
        permits = [
            text for queue_id, text in pairs if queue_id in rules and rules[queue_id].record.max_concurrency is not None
        ]
        if permits:
            changes.append(({"_id": run_id}, {"$addToSet": {"permits": {"$each": permits}}, "$set": {"linked": True}}))
    await _lock(work, dict.fromkeys(rules, "$$REMOVE"))
    await work.change_each("durable_run", changes)


def _under(base: str) -> Document:
    """A scope, or each of those that it is spread over."""
    if not texts.is_spread(base):
        return {"$eq": base}
    return {"$gt": f"{base}:", "$lt": f"{base};"}


async def _permits_in_use(work: Work, base: str) -> list[str]:
    rows = await work.find(
        "durable_run", {"permits": {"$exists": True, "$elemMatch": _under(base)}}, fields=["permits"]
    )
    return sorted({text for row in rows for text in row["permits"] if text == base or text.startswith(f"{base}:")})


async def _blocked_scopes(work: Work, base: str) -> list[str]:
    """Scope texts on which some run is blocked: the scope itself, or each of those that it is spread over."""
    if not texts.is_spread(base):
        return [base]
    found: list[str] = []
    last = f"{base}:"
    while (text := await _next_scope(work, last)) is not None and text.startswith(f"{base}:"):
        found.append(text)
        last = text
    return found


async def _next_scope(work: Work, after: str) -> str | None:
    where = {"status": "pending", "blocked_on": {"$gt": after}}
    row = await work.first("durable_run", where, fields=["blocked_on"], sort=[("blocked_on", 1)])
    return None if row is None else str(row["blocked_on"])


async def _fill(work: Work, rule: Rule | None, text: str, limit: int) -> int:
    """Release as many of those blocked on a scope as it has room for now."""
    room = limit
    if rule is not None:
        room = rule.lets(work.now, limit)
        if room > 0 and rule.record.max_concurrency is not None:
            await _look(work, [Wanted(rule, text, room)])
            room = rule.room(work.now, text, room)
    return await let_in(work, {text: room}) if room > 0 else 0


# -- the nets ---------------------------------------------------------------------------------------------------------------
# They release what a claim holds back again where it must: so `refill` and `free` need no transaction, and write no row.


async def refill(work: Work, scope: Scope, limit: int) -> Instant | None:
    """Release what waits for tokens that have come in (76). The answer: when the next token comes for which a run waits."""
    soonest: Instant | None = None
    where = {"rate_count": {"$exists": True}, **seen_from(scope)}
    for rule in map(_rule, await work.find("durable_queue", where, sort=[("_id", 1)])):
        text = scope_text(owner_of(rule.record.tenant), rule.record.scope_name)
        await _fill(work, rule, text, limit)
        if not rule.record.paused and await work.first(
            "durable_run", {"status": "pending", "blocked_on": text}, fields=["_id"]
        ):
            due = rule.next_token(work.now)
            if due > work.now:  # otherwise it waits for a permit, and who gives that back releases it
                soonest = due if soonest is None else min(soonest, due)
    return soonest


async def free(work: Work, scope: Scope, limit: int) -> int:
    """The net of 74: release blocked runs whose scope has room, or has no row any more. The answer: how many."""
    total, last = 0, ""
    while total < limit and (text := await _next_scope(work, last)) is not None:
        last = text
        owner = split(text)[0]
        if text in (ALONE, SEQUENCE) or (owner != EVERYBODY and not sees(scope, owner)):
            continue
        queue_id = rule_of(text)
        total += await _fill(work, (await _rules(work, [queue_id])).get(queue_id), text, limit - total)
    return total


async def free_heads(work: Work, scope: Scope, limit: int) -> int:
    """The net of 75: release runs that wait for their turn although nobody is in front of them and nobody of their key is at work. In a
    transaction."""
    stages: list[Document] = [
        {"$match": {"status": "pending", "blocked_on": SEQUENCE, **of_scope(scope)}},
        {"$group": {"_id": "$line"}},
        {"$sort": {"_id": 1}},
    ]
    freed = 0
    for row in await work.aggregate("durable_run", stages):
        key = row["_id"]
        if key is None or await work.first(
            "durable_run", {"line": key, "blocked_on": {"$ne": SEQUENCE}}, fields=["_id"]
        ):
            continue
        head = await head_of(work, key)
        if head is not None and freed < limit:
            await work.change_one("durable_permit", {"_id": key}, {"$inc": {"turn": 1}})
            await work.change_one("durable_run", {"_id": head["_id"]}, change(drop=("blocked_on",)))
            freed += 1
    return freed


__all__ = [
    "ALONE",
    "SEQUENCE",
    "admit",
    "free",
    "free_heads",
    "gates",
    "give_back",
    "head_of",
    "let_in",
    "lock_first",
    "next_in_sequence",
    "queues",
    "refill",
    "release",
    "rule_of",
    "ruled",
    "rules_of",
    "scopes_of",
    "seen_from",
    "set_queue",
    "take_late",
    "wait_for",
]
