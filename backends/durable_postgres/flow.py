"""Flow control: permits of limited scopes, token buckets, pauses, and the release of what was held back (semantics 73 to 76).

Claim calls `admit` with its candidates, every write by which a run leaves `running` calls `release`, a landing `released`, every landing
calls `next_in_sequence`; upkeep calls `refill` and `free` as nets. Whoever counts permits first locks the rows of the scopes, in order, and
counts in a later statement: so it sees what the one before it has done. Who gives permits back locks these rows before it looks who waits.
Runs that are released are taken as they are free; one that somebody holds is left to the net. Nothing here changes a status, lands a run,
or decides a limit.

What the rows and the texts of scopes mean stands in `durable.flow`; everybody's row has no tenant here, and is known by its queue_id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

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
    owner_of,
    rule_id,
    rule_of,
    scope_text,
    scopes_of,
    split,
    wanted,
)
from durable.model import ALL, ClaimRequest, Instant, QueueRecord, Scope
from durable.storekit import within

from . import locks
from .adapting import at, span
from .operation import Ask, Operation, Row, Work, count, first, rows, together
from .rows import IN_SCOPE, LIVE, of_scope

_RULE: Final = """
SELECT r.queue_id, r.scope_name, r.tenant_id, r.paused, r.max_concurrency, r.rate_count, r.rate_period, r.rate_burst,
    trunc(r.rate_tokens)::text, r.rate_at, r.fair
FROM durable_queue AS r
"""
_EVERYBODYS: Final = f"starts_with(r.queue_id, '{EVERYBODY}:')"
# Only rows that hold something back are locked: those that merely let tenants take turns do not put claims in a line.
_HOLDS: Final = "(r.paused OR r.max_concurrency IS NOT NULL OR r.rate_count IS NOT NULL)"
RULES: Final = f"{_RULE} WHERE r.queue_id = ANY ($1::text[]) AND {_HOLDS} ORDER BY r.queue_id FOR NO KEY UPDATE"
BEFORE: Final = f"{_RULE} WHERE r.queue_id = $1 FOR NO KEY UPDATE"
GATES: Final = f"{_RULE} WHERE r.queue_id = ANY ($1::text[])"
LIST_RULES: Final = f"{_RULE} WHERE {IN_SCOPE} AND ($1 OR NOT {_EVERYBODYS}) ORDER BY r.queue_id"
RATED: Final = f"""
{_RULE} WHERE r.rate_count IS NOT NULL AND ({IN_SCOPE} OR {_EVERYBODYS}) ORDER BY r.queue_id FOR NO KEY UPDATE
"""
PUT_RULE: Final = """
INSERT INTO durable_queue AS q (queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst,
                                rate_tokens, rate_at, fair, updated_at)
VALUES ($1, $2, $3::uuid, $4, $5::integer, $6::integer, $7::interval, $8::integer, $9::text::numeric, $10::timestamptz, $11, now())
ON CONFLICT (queue_id) DO UPDATE SET paused = excluded.paused, max_concurrency = excluded.max_concurrency,
    rate_count = excluded.rate_count, rate_period = excluded.rate_period, rate_burst = excluded.rate_burst,
    rate_tokens = excluded.rate_tokens, rate_at = excluded.rate_at, fair = excluded.fair, updated_at = excluded.updated_at
"""
SPEND: Final = """
UPDATE durable_queue AS q SET rate_tokens = s.tokens::numeric, rate_at = s.at
FROM unnest($1::text[], $2::text[], $3::timestamptz[]) AS s (queue_id, tokens, at) WHERE q.queue_id = s.queue_id
"""
# As the newest permit says, or counted where that leaves no room for all that are wanted; as far as the limit, since what is beyond it
# changes no answer. A permit without a number, which comes first, was taken by a version that gave it none: while one is out, permits are
# counted.
IN_FLIGHT: Final = """
SELECT l.scope, CASE WHEN n.fits THEN n.number ELSE c.number END, CASE WHEN n.fits THEN n.in_flight ELSE c.in_flight END
FROM unnest($1::text[], $2::integer[], $3::integer[]) AS l (scope, wanted, most)
LEFT JOIN LATERAL (
    SELECT p.number, p.in_flight, p.in_flight + l.wanted <= l.most AS fits FROM durable_permit AS p
    WHERE p.scope = l.scope ORDER BY p.number DESC LIMIT 1) AS n ON true
CROSS JOIN LATERAL (
    SELECT coalesce(max(o.number), 0) AS number, count(*)::integer AS in_flight FROM (
        SELECT p.number FROM durable_permit AS p WHERE p.scope = l.scope AND n.fits IS NOT TRUE LIMIT l.most) AS o) AS c
"""
# A limit counts for what is in flight already (73): the runs that were claimed before there was one take their permits late. Claims
# are held up until the limit is there; runs first and then the row of the limit, in the order of those who land. They are the newest, and
# do not say how many are out: the next claim counts.
NO_CLAIMS: Final = "SELECT pg_advisory_xact_lock($1::bigint)"
_RUNNING: Final = """
WITH flying AS MATERIALIZED (
    SELECT r.run_id, r.concurrency_key, r.tenant_id FROM durable_run AS r
    WHERE r.status = 'running' AND ($4 OR r.tenant_id IS NOT DISTINCT FROM $2::uuid) AND {which} ORDER BY r.run_id FOR SHARE)
INSERT INTO durable_permit (scope, run_id, taken_at, number)
SELECT t.scope, t.run_id, now(), row_number() OVER (PARTITION BY t.scope)
    + coalesce((SELECT max(p.number) FROM durable_permit AS p WHERE p.scope = t.scope), 0)
FROM (SELECT {scope} AS scope, f.run_id FROM flying AS f) AS t ON CONFLICT DO NOTHING
"""
PERMITS_OF_RUNNING: Final = {
    "queue": _RUNNING.format(which="r.queue = $3::text", scope="$1::text"),
    "function": _RUNNING.format(which="r.name = $3::text", scope="$1::text"),
    "key": _RUNNING.format(
        which="r.queue = $3::text AND r.concurrency_key IS NOT NULL", scope="$1::text || ':' || f.concurrency_key"
    ),
    "share": _RUNNING.format(
        which="r.queue = $3::text AND r.tenant_id IS NOT NULL", scope="$1::text || ':' || f.tenant_id::text"
    ),
    "tenant": _RUNNING.format(which="$3::text = ''", scope="$1::text"),
}
# A permit that is being given back is left to who gives it back, and waits for the row of this scope.
DROP_PERMITS: Final = """
WITH free AS MATERIALIZED (
    SELECT p.scope, p.run_id FROM durable_permit AS p WHERE p.scope = $1 OR (p.scope > $2 AND p.scope < $3) FOR UPDATE SKIP LOCKED)
DELETE FROM durable_permit AS p USING free AS f WHERE p.scope = f.scope AND p.run_id = f.run_id
"""
TAKE_PERMITS: Final = """
INSERT INTO durable_permit (scope, run_id, taken_at, number, in_flight)
SELECT t.scope, t.run_id, now(), t.number, t.in_flight
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::integer[]) AS t (scope, run_id, number, in_flight) ON CONFLICT DO NOTHING
"""
GIVE_BACK: Final = """
WITH gone AS (DELETE FROM durable_permit WHERE run_id = ANY ($1::text[]) RETURNING scope)
SELECT g.scope, count(*)::integer FROM gone AS g GROUP BY g.scope ORDER BY g.scope
"""
BLOCK: Final = """
UPDATE durable_run AS r SET blocked_on = b.scope FROM unnest($1::text[], $2::text[]) AS b (run_id, scope)
WHERE r.run_id = b.run_id AND r.status = 'pending'
"""
SOME_BLOCKED: Final = "SELECT 1 FROM durable_run AS r WHERE r.status = 'pending' AND r.blocked_on = $1 LIMIT 1"
# A run that lapsed twice in a row goes back to be taken alone (15), not into the ready index.
UNBLOCK: Final = """
WITH freed AS MATERIALIZED (
    SELECT r.run_id FROM durable_run AS r WHERE r.status = 'pending' AND r.blocked_on = $1
    ORDER BY r.priority DESC, r.submitted LIMIT $2 FOR NO KEY UPDATE SKIP LOCKED)
UPDATE durable_run AS r SET blocked_on = CASE WHEN r.reclaims >= 2 THEN 'alone' END FROM freed
WHERE r.run_id = freed.run_id RETURNING r.queue
"""
NEXT_SCOPE: Final = """
SELECT r.blocked_on FROM durable_run AS r WHERE r.status = 'pending' AND r.blocked_on IS NOT NULL AND r.blocked_on > $1
ORDER BY r.blocked_on LIMIT 1
"""
HEAD_OF_SEQUENCE: Final = f"""
SELECT h.run_id, h.queue, h.blocked_on FROM unnest($1::text[]) AS k (key) CROSS JOIN LATERAL (
    SELECT r.run_id, r.queue, r.blocked_on FROM durable_run AS r
    WHERE r.sequence_key = k.key AND r.status IN {LIVE} ORDER BY r.submitted LIMIT 1) AS h
"""
OCCUPIED: Final = f"""
SELECT k.key FROM unnest($1::text[]) AS k (key)
WHERE EXISTS (SELECT 1 FROM durable_run AS r WHERE r.sequence_key = k.key AND r.status IN {LIVE})
"""
HEADS_IN_LINE: Final = """
UPDATE durable_run AS r SET blocked_on = NULL WHERE r.run_id = ANY ($1::text[]) AND r.blocked_on = 'sequence'
RETURNING r.queue
"""
# The net of 75: a run that waits for its turn although nobody is in front of it and nobody of its key is at work.
STRANDED_HEADS: Final = f"""
SELECT r.run_id, r.sequence_key FROM durable_run AS r WHERE r.status = 'pending' AND r.blocked_on = 'sequence' AND {IN_SCOPE}
AND NOT EXISTS (SELECT 1 FROM durable_run AS o
                WHERE o.sequence_key = r.sequence_key AND o.status IN {LIVE}
                AND o.submitted <> r.submitted AND (o.submitted < r.submitted OR o.blocked_on IS DISTINCT FROM 'sequence'))
ORDER BY r.run_id LIMIT $3
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that a claim is about to take. `concurrency_key` is as the caller passed it."""

    run_id: str
    tenant: UUID | None
    queue: str
    name: str
    concurrency_key: str | None

    @property
    def scopes(self) -> list[tuple[str, str]]:
        """(queue_id of the row, text) of every scope it is in."""
        return scopes_of(owner_of(self.tenant), self.queue, self.name, self.concurrency_key)


def _rule(row: Row) -> Rule:
    queue_id, scope_name, tenant, paused, most, rate, period, burst, tokens, since, fair = row
    record = QueueRecord(
        scope_name=scope_name,
        tenant=ALL if queue_id.startswith(f"{EVERYBODY}:") else tenant,
        paused=paused,
        max_concurrency=most,
        rate_count=rate,
        rate_period=period,
        rate_burst=burst,
        fair=fair,
    )
    return Rule(queue_id, record, None if tokens is None else int(tokens), since)


def _rules(queue_ids: Iterable[str]) -> Operation[dict[str, Rule]]:
    """Lock the rows of these scopes, in order."""
    found = yield from rows(RULES, sorted(set(queue_ids)))
    return {rule.queue_id: rule for rule in map(_rule, found)}


def _look(scopes: Sequence[Wanted]) -> Operation[None]:
    """How many are in flight in each, at most; in a statement after the lock: the holders before us have committed by now."""
    if scopes:
        asked = [one.text for one in scopes], [one.number for one in scopes], [one.limit for one in scopes]
        found = {row[0]: Permit(*row) for row in (yield from rows(IN_FLIGHT, *asked))}
        for one in scopes:
            one.rule.newest[one.text] = found[one.text]


# -- what claim and landing call --------------------------------------------------------------------------------------------


def admit(work: Work, candidates: Sequence[Candidate]) -> Operation[dict[str, bool]]:
    """Those that every scope has room for, in order, and whether they hold permits now; each takes its permits and tokens. The others get
    `blocked_on` = the scope that is full or paused, and are outside the ready index until it frees (73, 74)."""
    if not candidates:
        return {}
    scopes = {candidate.run_id: candidate.scopes for candidate in candidates}
    rules = yield from _rules(queue_id for pairs in scopes.values() for queue_id, _ in pairs)
    if not rules:
        return {candidate.run_id: False for candidate in candidates}
    limited = {
        run_id: [(rules[queue_id], text) for queue_id, text in pairs if queue_id in rules]
        for run_id, pairs in scopes.items()
    }
    yield from _look(wanted((pair for pairs in limited.values() for pair in pairs), work.now))
    admitted: dict[str, bool] = {}
    permits: list[tuple[Permit, str]] = []
    blocked: list[tuple[str, str]] = []
    passed_over: Counter[tuple[str, str]] = Counter()
    for candidate in candidates:
        pairs = limited[candidate.run_id]
        full = next((text for rule, text in pairs if not rule.room(work.now, text)), None)
        if full is None:
            taken = _take(candidate.run_id, pairs)
            permits += taken
            admitted[candidate.run_id] = bool(taken)
            continue
        blocked.append((candidate.run_id, full))
        passed_over.update((rule.queue_id, text) for rule, text in pairs if text != full)
    yield from _write_down(permits, blocked, rules.values())
    for (queue_id, text), number in passed_over.items():
        # The place that it did not take in its other scopes goes to the next that waits there.
        if rules[queue_id].room(work.now, text):
            yield from _unblock(work, text, number)
    return admitted


def _take(run_id: str, limited: Sequence[tuple[Rule, str]]) -> list[tuple[Permit, str]]:
    return [(permit, run_id) for rule, text in limited if (permit := rule.take(text)) is not None]


def _write_down(
    permits: Sequence[tuple[Permit, str]], blocked: Sequence[tuple[str, str]], rules: Iterable[Rule]
) -> Operation[None]:
    asks: list[Ask] = []
    if permits:
        columns = zip(
            *((permit.scope, run_id, permit.number, permit.in_flight) for permit, run_id in permits), strict=True
        )
        asks.append(Ask(TAKE_PERMITS, tuple(map(list, columns))))
    if blocked:
        asks.append(Ask(BLOCK, ([run_id for run_id, _ in blocked], [scope for _, scope in blocked])))
    rated = [rule for rule in rules if rule.record.rate_count is not None]
    if rated:
        asks.append(_spend(rated))
    if asks:
        yield from together(*asks)


def _spend(rated: Sequence[Rule]) -> Ask:
    tokens = [None if rule.tokens is None else str(rule.tokens) for rule in rated]
    return Ask(SPEND, ([rule.queue_id for rule in rated], tokens, [at(rule.at) for rule in rated]))


def release(work: Work, run_ids: Iterable[str]) -> Operation[None]:
    """Runs leave `running`: their permits are given back, and as many of those that wait for them are ready (73, 74)."""
    yield from released(work, dict((yield from rows(GIVE_BACK, sorted(set(run_ids))))))


def released(work: Work, given_back: Mapping[str, int]) -> Operation[None]:
    """So many permits of each scope were given back in this transaction: as many of those that wait for them are ready, by priority and
    `submitted` (74). A claim that counted before the commit counted them as taken, and what it held back for that is seen here, behind
    the lock of the scope's row."""
    if not given_back:
        return
    yield from _rules(rule_of(text) for text in given_back)
    for text, number in sorted(given_back.items()):
        yield from _unblock(work, text, number)


def _unblock(work: Work, text: str, most: int) -> Operation[int]:
    freed = yield from rows(UNBLOCK, text, most)
    for (queue,) in freed:
        work.announce(f"queue:{queue}")
    return len(freed)


def next_in_sequence(work: Work, sequence_keys: Iterable[str]) -> Operation[None]:
    """Runs of these stored keys have landed: the first in line of each is ready (75). Only for keys of landed runs that were not
    `blocked_on = 'sequence'` themselves: one that is cancelled while it waits for its turn has no turn to pass on."""
    keys = sorted(set(sequence_keys))
    yield from locks.lines(work, keys)
    heads = yield from rows(HEAD_OF_SEQUENCE, keys)
    waiting = sorted(run_id for run_id, _, blocked_on in heads if blocked_on == SEQUENCE)
    if waiting:
        yield from locks.alone(waiting)
        for (queue,) in (yield from rows(HEADS_IN_LINE, waiting)):
            work.announce(f"queue:{queue}")


def occupied(work: Work, sequence_keys: Iterable[str]) -> Operation[set[str]]:
    """Of these stored keys those of which a run has not landed: who joins their line now has to wait (75)."""
    keys = sorted(set(sequence_keys))
    if not keys:
        return set()
    yield from locks.lines(work, keys)
    return {key for (key,) in (yield from rows(OCCUPIED, keys))}


def gates(request: ClaimRequest) -> Operation[Gates]:
    """See `durable.flow.gates_of`."""
    return gates_of([_rule(row).record for row in (yield from rows(GATES, gate_ids(request)))], request)


# -- the operator's side ----------------------------------------------------------------------------------------------------


def queues(work: Work, scope: Scope) -> Operation[list[QueueRecord]]:
    """The rows of flow control that a scope sees."""
    return [_rule(row).record for row in (yield from rows(LIST_RULES, *of_scope(scope)))]


def rules_of(pairs: Sequence[tuple[str, str]]) -> Operation[dict[str, QueueRecord]]:
    """Of these scopes of a run (queue_id of the row, text) those that have a row, by text."""
    found = {row[0]: _rule(row).record for row in (yield from rows(GATES, [queue_id for queue_id, _ in pairs]))}
    return {text: found[queue_id] for queue_id, text in pairs if queue_id in found}


def set_queue(work: Work, record: QueueRecord) -> Operation[None]:
    """Put a row; it counts for the next claim. What it held back and no longer holds is ready in the same write, up to a batch.
    Raises Conflict for a row that can mean nothing, before anything is written."""
    owner = owner_of(record.tenant)
    queue_id = rule_id(owner, record.scope_name)
    base = scope_text(owner, record.scope_name)
    kind, _, name = record.scope_name.partition(":")
    tenant = None if record.tenant is ALL else record.tenant
    if record.max_concurrency is not None:
        yield from rows(NO_CLAIMS, work.lock_class)
        yield from count(PERMITS_OF_RUNNING[kind], base, tenant, name, record.tenant is ALL)
    row = yield from first(BEFORE, queue_id)
    rule = Rule.put(record, None if row is None else _rule(row), work.now)
    values: tuple[Any, ...] = (
        record.paused,
        record.max_concurrency,
        record.rate_count,
        span(record.rate_period),
        record.rate_burst,
    )
    bucket = (None if rule.tokens is None else str(rule.tokens), at(rule.at), record.fair)
    yield from count(PUT_RULE, queue_id, record.scope_name, tenant, *values, *bucket)
    if record.max_concurrency is None:
        yield from count(DROP_PERMITS, base, *((f"{base}:", f"{base};") if texts.is_spread(base) else (base, base)))
    for text in (yield from _blocked_scopes(base)):
        yield from _fill(work, rule, text, RELEASE_BATCH)


def _blocked_scopes(base: str) -> Operation[list[str]]:
    """Scope texts on which some run is blocked: the scope itself, or each of those that it is spread over."""
    if not texts.is_spread(base):
        return [base]
    found: list[str] = []
    last = f"{base}:"
    while (row := (yield from first(NEXT_SCOPE, last))) is not None and row[0].startswith(f"{base}:"):
        found.append(row[0])
        last = row[0]
    return found


def _fill(work: Work, rule: Rule | None, text: str, most: int) -> Operation[int]:
    """Release as many of those blocked on a scope as it has room for now."""
    room = most
    if rule is not None:
        room = rule.lets(work.now, most)
        if room > 0 and rule.record.max_concurrency is not None:
            yield from _look([Wanted(rule, text, room)])
            room = rule.room(work.now, text, room)
    return (yield from _unblock(work, text, room)) if room > 0 else 0


# -- the nets ---------------------------------------------------------------------------------------------------------------


def refill(work: Work, scope: Scope, most: int) -> Operation[Instant | None]:
    """Release what waits for tokens that have come in (76). The answer: when the next token comes for which a run waits."""
    soonest: Instant | None = None
    for rule in map(_rule, (yield from rows(RATED, *of_scope(scope)))):
        text = scope_text(owner_of(rule.record.tenant), rule.record.scope_name)
        yield from _fill(work, rule, text, most)
        if not rule.record.paused and (yield from first(SOME_BLOCKED, text)) is not None:
            due = rule.next_token(work.now)
            if due > work.now:  # otherwise it waits for a permit, and who gives that back releases it
                soonest = due if soonest is None else min(soonest, due)
    return soonest


def free(work: Work, scope: Scope, most: int) -> Operation[int]:
    """The net of 74 and 75: release blocked runs whose scope has room, or has no row any more, and heads of a sequence that
    wait for nobody. The answer: how many."""
    total, last = 0, ""
    while total < most and (row := (yield from first(NEXT_SCOPE, last))) is not None:
        last = row[0]
        if last in (ALONE, SEQUENCE):
            continue
        owner = split(last)[0]
        if owner != EVERYBODY and not within(UUID(owner) if owner else None, scope):
            continue
        queue_id = rule_of(last)
        rule = (yield from _rules([queue_id])).get(queue_id)
        total += yield from _fill(work, rule, last, most - total)
    stranded = yield from rows(STRANDED_HEADS, *of_scope(scope), most)
    if stranded:
        yield from next_in_sequence(work, (key for _, key in stranded))
    return total + len(stranded)


__all__ = [
    "ALONE",
    "SEQUENCE",
    "Candidate",
    "admit",
    "free",
    "gates",
    "next_in_sequence",
    "occupied",
    "queues",
    "refill",
    "release",
    "released",
    "rules_of",
    "set_queue",
]
