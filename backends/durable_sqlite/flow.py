"""Flow control: permits of limited scopes, token buckets, pauses, and the release of what was held back (semantics 73 to 76).

Claim calls `admit` with its candidates, every write by which a run leaves `running` calls `release`, every landing calls
`next_in_sequence`; upkeep calls `refill` and `free` as nets. All of it runs inside the shared write transaction, which is the
lock of every scope's row. Nothing here changes a status, lands a run, or decides a limit.

What the rows and the texts of scopes mean stands in `durable.flow`; here `tenant_id` of everybody's row is `*`.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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

from . import scopes
from .connection import announce
from .rows import of_scope

_RULE = """
SELECT queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst, rate_tokens, rate_at, fair
FROM durable_queue"""
RULED = "SELECT 1 FROM durable_queue WHERE scope_name IN (SELECT value FROM json_each(?)) LIMIT 1"
RULES = f"{_RULE} WHERE queue_id IN (SELECT value FROM json_each(?))"
LIST_RULES = f"{_RULE} WHERE (? OR tenant_id IS ?) ORDER BY queue_id"
RATED = f"{_RULE} WHERE rate_count IS NOT NULL AND (? OR tenant_id IS ? OR tenant_id = '*') ORDER BY queue_id"
PUT_RULE = """
INSERT INTO durable_queue (queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst,
                           rate_tokens, rate_at, fair, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (queue_id) DO UPDATE SET paused = excluded.paused, max_concurrency = excluded.max_concurrency,
    rate_count = excluded.rate_count, rate_period = excluded.rate_period, rate_burst = excluded.rate_burst,
    rate_tokens = excluded.rate_tokens, rate_at = excluded.rate_at, fair = excluded.fair, updated_at = excluded.updated_at
"""
SPEND = "UPDATE durable_queue SET rate_tokens = ?, rate_at = ? WHERE queue_id = ?"
# A permit without a number was taken by a version that gave it none: while one is out, permits are counted.
NEWEST = "SELECT number, in_flight FROM durable_permit WHERE scope = ? ORDER BY number DESC NULLS FIRST LIMIT 1"
IN_FLIGHT = "SELECT coalesce(max(number), 0), count(*) FROM (SELECT number FROM durable_permit WHERE scope = ? LIMIT ?)"
# A limit counts for what is in flight already (73): the runs that were claimed before there was one take their permits late. They are
# the newest, and do not say how many are out: the next claim counts.
_RUNNING = """
WITH late AS (
    SELECT {scope} AS scope, run_id FROM durable_run WHERE status = 'running' AND (? OR tenant_id IS ?) AND {which})
INSERT OR IGNORE INTO durable_permit (scope, run_id, taken_at, number)
SELECT late.scope, late.run_id, ?, row_number() OVER (PARTITION BY late.scope)
    + coalesce((SELECT max(p.number) FROM durable_permit AS p WHERE p.scope = late.scope), 0) FROM late
"""
PERMITS_OF_RUNNING = {
    "queue": _RUNNING.format(scope="?", which="queue = ?"),
    "function": _RUNNING.format(scope="?", which="name = ?"),
    "key": _RUNNING.format(scope="? || ':' || concurrency_key", which="queue = ? AND concurrency_key IS NOT NULL"),
    "share": _RUNNING.format(scope="? || ':' || tenant_id", which="queue = ? AND tenant_id IS NOT NULL"),
    "tenant": _RUNNING.format(scope="?", which="? = ''"),
}
DROP_PERMITS = "DELETE FROM durable_permit WHERE scope = ? OR (scope > ? AND scope < ?)"
TAKE_PERMIT = "INSERT OR IGNORE INTO durable_permit (scope, run_id, taken_at, number, in_flight) VALUES (?, ?, ?, ?, ?)"
GIVE_BACK = "DELETE FROM durable_permit WHERE run_id IN (SELECT value FROM json_each(?)) RETURNING scope"
BLOCK = "UPDATE durable_run SET blocked_on = ? WHERE run_id = ? AND status = 'pending'"
# A run that lapsed twice in a row goes back to be taken alone (15), not into the ready index.
BLOCKED = """
SELECT submitted, queue FROM durable_run WHERE status = 'pending' AND blocked_on = ? ORDER BY priority DESC, submitted LIMIT ?
"""
UNBLOCK = "UPDATE durable_run SET blocked_on = CASE WHEN reclaims >= 2 THEN 'alone' END WHERE submitted = ?"
NEXT_SCOPE = """
SELECT blocked_on FROM durable_run WHERE status = 'pending' AND blocked_on IS NOT NULL AND blocked_on > ?
ORDER BY blocked_on LIMIT 1
"""
HEAD_OF_SEQUENCE = """
SELECT submitted, queue, blocked_on FROM durable_run
WHERE sequence_key = ? AND status IN ('pending', 'running', 'suspended') ORDER BY submitted LIMIT 1
"""
HEAD_IN_LINE = "UPDATE durable_run SET blocked_on = NULL WHERE submitted = ? AND blocked_on = 'sequence'"
# The net of 75: a run that waits for its turn although nobody is in front of it and nobody of its key is at work.
STRANDED_HEADS = """
SELECT r.submitted FROM durable_run AS r WHERE r.status = 'pending' AND r.blocked_on = 'sequence' AND (? OR r.tenant_id IS ?)
AND NOT EXISTS (SELECT 1 FROM durable_run AS o
                WHERE o.sequence_key = r.sequence_key AND o.status IN ('pending', 'running', 'suspended')
                AND o.submitted <> r.submitted AND (o.submitted < r.submitted OR o.blocked_on IS NOT 'sequence'))
LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that a claim is about to take. `concurrency_key` is as the caller passed it."""

    run_id: str
    tenant_id: str | None
    queue: str
    name: str
    concurrency_key: str | None

    @property
    def scopes(self) -> list[tuple[str, str]]:
        """(queue_id of the row, text) of every scope it is in."""
        return scopes_of(self.tenant_id or "", self.queue, self.name, self.concurrency_key)


def _rule(row: tuple[Any, ...]) -> Rule:
    queue_id, scope_name, tenant, paused, most, count, period, burst, tokens, at, fair = row
    record = QueueRecord(
        scope_name=str(scope_name),
        tenant=texts.tenant_of(tenant or ""),
        paused=bool(paused),
        max_concurrency=_whole(most),
        rate_count=_whole(count),
        rate_period=_whole(period),
        rate_burst=_whole(burst),
        fair=bool(fair),
    )
    return Rule(str(queue_id), record, _whole(tokens), _whole(at))


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


def _rules(con: sqlite3.Connection, queue_ids: Iterable[str]) -> dict[str, Rule]:
    rows = con.execute(RULES, (json.dumps(sorted(set(queue_ids))),)).fetchall()
    return {rule.queue_id: rule for rule in map(_rule, rows)}


# -- what claim and landing call --------------------------------------------------------------------------------------------


def admit(con: sqlite3.Connection, now: Instant, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that every scope has room for, in order; each takes its permits and tokens. The others get `blocked_on` = the scope
    that is full or paused, and are outside the ready index until it frees (73, 74)."""
    if not candidates:
        return []
    scopes = {candidate.run_id: candidate.scopes for candidate in candidates}
    rules = _rules(con, (queue_id for pairs in scopes.values() for queue_id, _ in pairs))
    if not rules:
        return list(candidates)
    limited = {
        run_id: [(rules[queue_id], text) for queue_id, text in pairs if queue_id in rules]
        for run_id, pairs in scopes.items()
    }
    _look(con, wanted((pair for pairs in limited.values() for pair in pairs), now))
    admitted: list[Candidate] = []
    passed_over: Counter[tuple[str, str]] = Counter()
    for candidate in candidates:
        pairs = limited[candidate.run_id]
        full = next((text for rule, text in pairs if not rule.room(now, text)), None)
        if full is None:
            _take(con, now, candidate.run_id, pairs)
            admitted.append(candidate)
            continue
        con.execute(BLOCK, (full, candidate.run_id))
        passed_over.update((rule.queue_id, text) for rule, text in pairs if text != full)
    _write_buckets(con, rules.values())
    for (queue_id, text), count in passed_over.items():
        # The place that it did not take in its other scopes goes to the next that waits there.
        if rules[queue_id].room(now, text):
            _unblock(con, text, count)
    return admitted


def _look(con: sqlite3.Connection, scopes: Iterable[Wanted]) -> None:
    """How many are in flight in each, at most: as the newest permit says, or counted where that leaves no room for all."""
    for one in scopes:
        found = con.execute(NEWEST, (one.text,)).fetchone()
        if found is not None and not one.fits(found[1]):
            found = con.execute(IN_FLIGHT, (one.text, one.limit)).fetchone()
        if found is not None:
            one.rule.newest[one.text] = Permit(one.text, *found)


def _take(con: sqlite3.Connection, now: Instant, run_id: str, limited: Sequence[tuple[Rule, str]]) -> None:
    permits = [permit for rule, text in limited if (permit := rule.take(text)) is not None]
    con.executemany(TAKE_PERMIT, [(one.scope, run_id, now, one.number, one.in_flight) for one in permits])


def _write_buckets(con: sqlite3.Connection, rules: Iterable[Rule]) -> None:
    con.executemany(SPEND, [(r.tokens, r.at, r.queue_id) for r in rules if r.record.rate_count is not None])


def release(con: sqlite3.Connection, now: Instant, run_ids: Iterable[str]) -> None:
    """Runs leave `running`: their permits are given back, and as many of those that wait for them are ready, by priority and
    `submitted` (73, 74)."""
    freed = Counter(text for (text,) in con.execute(GIVE_BACK, (json.dumps(sorted(run_ids)),)).fetchall())
    for text, count in sorted(freed.items()):
        _unblock(con, text, count)


def _unblock(con: sqlite3.Connection, text: str, count: int) -> int:
    rows = con.execute(BLOCKED, (text, count)).fetchall()
    con.executemany(UNBLOCK, [(submitted,) for submitted, _ in rows])
    for queue in {queue for _, queue in rows}:
        announce(con, f"queue:{queue}")
    return len(rows)


def next_in_sequence(con: sqlite3.Connection, now: Instant, sequence_keys: Iterable[str]) -> None:
    """Runs of these stored keys have landed: the first in line of each is ready (75). Only for keys of landed runs that were not
    `blocked_on = 'sequence'` themselves: one that is cancelled while it waits for its turn has no turn to pass on."""
    for key in sorted(set(sequence_keys)):
        head = con.execute(HEAD_OF_SEQUENCE, (key,)).fetchone()
        if head is not None and head[2] == SEQUENCE:
            con.execute(HEAD_IN_LINE, (head[0],))
            announce(con, f"queue:{head[1]}")


def must_wait(con: sqlite3.Connection, sequence_key: str | None) -> bool:
    """True where a run that joins the line of this stored key now has to wait: another one of it has not landed (75)."""
    return sequence_key is not None and con.execute(HEAD_OF_SEQUENCE, (sequence_key,)).fetchone() is not None


def ruled(con: sqlite3.Connection, request: ClaimRequest) -> bool:
    """Is there a row that a claim of these queues and functions may meet? One statement, whatever the rows of others (73)."""
    names = texts.concerning(request.queues, (name for name, _ in request.functions))
    return con.execute(RULED, (json.dumps(names),)).fetchone() is not None


def gates(con: sqlite3.Connection, request: ClaimRequest) -> Gates:
    """See `durable.flow.gates_of`."""
    return gates_of([rule.record for rule in _rules(con, gate_ids(request)).values()], request)


# -- the operator's side ----------------------------------------------------------------------------------------------------


def rules_of(con: sqlite3.Connection, pairs: Sequence[tuple[str, str]]) -> dict[str, QueueRecord]:
    """Of these scopes of a run (queue_id of the row, text) those that have a row, by text."""
    rules = _rules(con, (queue_id for queue_id, _ in pairs))
    return {text: rules[queue_id].record for queue_id, text in pairs if queue_id in rules}


def queues(con: sqlite3.Connection, scope: Scope) -> list[QueueRecord]:
    """The rows of flow control that a scope sees."""
    return [_rule(row).record for row in con.execute(LIST_RULES, of_scope(scope))]


def set_queue(con: sqlite3.Connection, now: Instant, record: QueueRecord) -> None:
    """Put a row; it counts for the next claim. What it held back and no longer holds is ready in the same write, up to a batch.
    Raises Conflict for a row that can mean nothing, before anything is written."""
    owner = owner_of(record.tenant)
    queue_id = rule_id(owner, record.scope_name)
    rule = Rule.put(record, _rules(con, [queue_id]).get(queue_id), now)
    values = (record.paused, record.max_concurrency, record.rate_count, record.rate_period, record.rate_burst)
    bucket = (rule.tokens, rule.at, record.fair)
    con.execute(PUT_RULE, (queue_id, record.scope_name, owner or None, *values, *bucket, now))
    base = scope_text(owner, record.scope_name)
    kind, _, name = record.scope_name.partition(":")
    if record.max_concurrency is None:
        con.execute(DROP_PERMITS, (base, f"{base}:", f"{base};") if texts.is_spread(base) else (base, base, base))
    else:
        con.execute(PERMITS_OF_RUNNING[kind], (base, record.tenant is ALL, owner or None, name, now))
    for text in _blocked_scopes(con, base):
        _fill(con, now, rule, text, RELEASE_BATCH)


def _blocked_scopes(con: sqlite3.Connection, base: str) -> list[str]:
    """Scope texts on which some run is blocked: the scope itself, or each of those that it is spread over."""
    if not texts.is_spread(base):
        return [base]
    found: list[str] = []
    last = f"{base}:"
    while (row := con.execute(NEXT_SCOPE, (last,)).fetchone()) is not None and row[0].startswith(f"{base}:"):
        found.append(row[0])
        last = row[0]
    return found


def _fill(con: sqlite3.Connection, now: Instant, rule: Rule | None, text: str, limit: int) -> int:
    """Release as many of those blocked on a scope as it has room for now."""
    room = limit
    if rule is not None:
        room = rule.lets(now, limit)
        if room > 0 and rule.record.max_concurrency is not None:
            _look(con, [Wanted(rule, text, room)])
            room = rule.room(now, text, room)
    return _unblock(con, text, room) if room > 0 else 0


# -- the nets ---------------------------------------------------------------------------------------------------------------


def refill(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> Instant | None:
    """Release what waits for tokens that have come in (76). The answer: when the next token comes for which a run waits."""
    soonest: Instant | None = None
    for rule in map(_rule, con.execute(RATED, of_scope(scope)).fetchall()):
        text = scope_text(owner_of(rule.record.tenant), rule.record.scope_name)
        _fill(con, now, rule, text, limit)
        if not rule.record.paused and con.execute(BLOCKED, (text, 1)).fetchone() is not None:
            due = rule.next_token(now)
            if due > now:  # otherwise it waits for a permit, and who gives that back releases it
                soonest = due if soonest is None else min(soonest, due)
    return soonest


def free(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> int:
    """The net of 74 and 75: release blocked runs whose scope has room, or has no row any more, and heads of a sequence that
    wait for nobody. The answer: how many."""
    total, last = 0, ""
    while total < limit and (row := con.execute(NEXT_SCOPE, (last,)).fetchone()) is not None:
        last = row[0]
        if last in (ALONE, SEQUENCE):
            continue
        owner = split(last)[0]
        if owner != EVERYBODY and not scopes.sees(scope, owner or None):
            continue
        queue_id = rule_of(last)
        total += _fill(con, now, _rules(con, [queue_id]).get(queue_id), last, limit - total)
    stranded = con.execute(STRANDED_HEADS, (*of_scope(scope), limit)).fetchall()
    con.executemany(HEAD_IN_LINE, stranded)
    return total + len(stranded)


__all__ = [
    "ALONE",
    "SEQUENCE",
    "Candidate",
    "admit",
    "free",
    "gates",
    "must_wait",
    "next_in_sequence",
    "queues",
    "refill",
    "release",
    "ruled",
    "rules_of",
    "set_queue",
]
