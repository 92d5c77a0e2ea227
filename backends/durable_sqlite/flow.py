"""Flow control: permits of limited scopes, token buckets, pauses, and the release of what was held back (semantics 73 to 76).

Claim calls `admit` with its candidates, every write by which a run leaves `running` calls `release`, every landing calls
`next_in_sequence`; upkeep calls `refill` and `free` as nets. All of it runs inside the shared write transaction, which is the
lock of every scope's row. Nothing here changes a status, lands a run, or decides a limit.

A row of flow control counts for the runs of its own tenant (ADR 0030). The scopes of a run are `queue:NAME`, `function:NAME` and,
where it has a concurrency key, `key:QUEUE:KEY`; a tenant's scopes carry the tenant in front, `TENANT/queue:NAME`. That text is
what permits are counted by and what `blocked_on` says.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from durable.errors import Conflict
from durable.model import ALL, Instant, QueueRecord, Scope
from durable.storekit import tenant_of, tenant_text

from . import scopes
from .connection import announce
from .rows import of_scope
from .scopes import stored

ALONE: Final = "alone"
SEQUENCE: Final = "sequence"
KINDS: Final = ("queue", "function", "key")
RELEASE_BATCH: Final = 1_000
"""Runs that one change of a row releases at the most; the net releases the rest."""

ANY_RULE = "SELECT 1 FROM durable_queue LIMIT 1"
RULES = """
SELECT queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst, rate_tokens, rate_at, fair
FROM durable_queue WHERE queue_id IN (SELECT value FROM json_each(?))
"""
LIST_RULES = """
SELECT queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst, rate_tokens, rate_at, fair
FROM durable_queue WHERE (? OR tenant_id IS ?) ORDER BY queue_id
"""
PAUSED = """
SELECT queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst, rate_tokens, rate_at, fair
FROM durable_queue WHERE paused = 1 AND tenant_id IS ?
"""
RATED = """
SELECT queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst, rate_tokens, rate_at, fair
FROM durable_queue WHERE rate_count IS NOT NULL AND (? OR tenant_id IS ?) ORDER BY queue_id
"""
PUT_RULE = """
INSERT INTO durable_queue (queue_id, scope_name, tenant_id, paused, max_concurrency, rate_count, rate_period, rate_burst,
                           rate_tokens, rate_at, fair, updated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (queue_id) DO UPDATE SET paused = excluded.paused, max_concurrency = excluded.max_concurrency,
    rate_count = excluded.rate_count, rate_period = excluded.rate_period, rate_burst = excluded.rate_burst,
    rate_tokens = excluded.rate_tokens, rate_at = excluded.rate_at, fair = excluded.fair, updated_at = excluded.updated_at
"""
SPEND = "UPDATE durable_queue SET rate_tokens = ?, rate_at = ? WHERE queue_id = ?"
IN_FLIGHT = "SELECT count(*) FROM durable_permit WHERE scope = ?"
# A limit counts for what is in flight already (73): the runs that were claimed before there was one take their permits late.
PERMITS_OF_RUNNING = {
    "queue": """
INSERT OR IGNORE INTO durable_permit (scope, run_id, taken_at)
SELECT ?, run_id, ? FROM durable_run WHERE status = 'running' AND tenant_id IS ? AND queue = ?
""",
    "function": """
INSERT OR IGNORE INTO durable_permit (scope, run_id, taken_at)
SELECT ?, run_id, ? FROM durable_run WHERE status = 'running' AND tenant_id IS ? AND name = ?
""",
    "key": """
INSERT OR IGNORE INTO durable_permit (scope, run_id, taken_at)
SELECT ? || ':' || concurrency_key, run_id, ? FROM durable_run
WHERE status = 'running' AND tenant_id IS ? AND queue = ? AND concurrency_key IS NOT NULL
""",
}
DROP_PERMITS = "DELETE FROM durable_permit WHERE scope = ? OR (scope > ? AND scope < ?)"
TAKE_PERMIT = "INSERT OR IGNORE INTO durable_permit (scope, run_id, taken_at) VALUES (?, ?, ?)"
HELD_PERMITS = (
    "SELECT scope, count(*) FROM durable_permit WHERE run_id IN (SELECT value FROM json_each(?)) GROUP BY scope"
)
GIVE_BACK = "DELETE FROM durable_permit WHERE run_id IN (SELECT value FROM json_each(?))"
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


@dataclass(slots=True)
class _Rule:
    """A row of durable_queue at work: what it allows, and what this transaction has used of it."""

    queue_id: str
    record: QueueRecord
    tokens: int | None
    """In parts of a token, of which `rate_period` make one: whole numbers, so that no start is lost to rounding."""
    at: Instant | None
    taken: Counter[str] = field(default_factory=Counter[str])
    """Permits by scope text, once counted."""

    @property
    def burst(self) -> int:
        return (self.record.rate_burst or self.record.rate_count or 0) * (self.record.rate_period or 0)

    def refill(self, now: Instant) -> int | None:
        """Parts in the bucket now; None: there is no rate."""
        count = self.record.rate_count
        if count is None:
            return None
        if self.tokens is None or self.at is None:
            self.tokens = self.burst
        else:
            self.tokens = min(self.burst, self.tokens + max(0, now - self.at) * count)
        self.at = now
        return self.tokens

    def next_token(self, now: Instant) -> Instant:
        """The instant at which a whole token is there."""
        period, count = self.record.rate_period or 0, self.record.rate_count or 1
        missing = period - (self.refill(now) or 0)
        return now + max(0, -(-missing // count))


def _rule(row: tuple[Any, ...]) -> _Rule:
    queue_id, scope_name, tenant, paused, most, count, period, burst, tokens, at, fair = row
    record = QueueRecord(
        scope_name=str(scope_name),
        tenant=tenant_of(tenant),
        paused=bool(paused),
        max_concurrency=_whole(most),
        rate_count=_whole(count),
        rate_period=_whole(period),
        rate_burst=_whole(burst),
        fair=bool(fair),
    )
    return _Rule(str(queue_id), record, _whole(tokens), _whole(at))


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


# -- the scopes of a run --------------------------------------------------------------------------------------------------


def scope_text(tenant_id: str | None, base: str) -> str:
    """The text of a scope by which permits are counted and which `blocked_on` shows."""
    return base if tenant_id is None else f"{tenant_id}/{base}"


def scopes_of(candidate: Candidate) -> list[tuple[str, str]]:
    """(queue_id of the rule, scope text) of every scope that a run is in, whether it is limited or not."""
    bases = [(f"queue:{candidate.queue}",) * 2, (f"function:{candidate.name}",) * 2]
    if candidate.concurrency_key is not None:
        bases.append((f"key:{candidate.queue}", f"key:{candidate.queue}:{candidate.concurrency_key}"))
    tenant = candidate.tenant_id
    return [(stored(tenant, rule), scope_text(tenant, base)) for rule, base in bases]


def _rules(con: sqlite3.Connection, queue_ids: Iterable[str]) -> dict[str, _Rule]:
    rows = con.execute(RULES, (json.dumps(sorted(set(queue_ids))),)).fetchall()
    return {rule.queue_id: rule for rule in map(_rule, rows)}


# -- what claim and landing call --------------------------------------------------------------------------------------------


def admit(con: sqlite3.Connection, now: Instant, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that every scope has room for, in order; each takes its permits and tokens. The others get `blocked_on` = the scope
    that is full or paused, and are outside the ready index until it frees (73, 74)."""
    if not candidates or con.execute(ANY_RULE).fetchone() is None:
        return list(candidates)
    scopes = {candidate.run_id: scopes_of(candidate) for candidate in candidates}
    rules = _rules(con, (queue_id for pairs in scopes.values() for queue_id, _ in pairs))
    if not rules:
        return list(candidates)
    admitted: list[Candidate] = []
    passed_over: Counter[tuple[str, str]] = Counter()
    for candidate in candidates:
        limited = [(rules[queue_id], text) for queue_id, text in scopes[candidate.run_id] if queue_id in rules]
        full = next((text for rule, text in limited if not _room(con, now, rule, text)), None)
        if full is None:
            _take(con, now, candidate.run_id, limited)
            admitted.append(candidate)
            continue
        con.execute(BLOCK, (full, candidate.run_id))
        passed_over.update((rule.queue_id, text) for rule, text in limited if text != full)
    _write_buckets(con, rules.values())
    for (queue_id, text), count in passed_over.items():
        # The place that it did not take in its other scopes goes to the next that waits there.
        if _room(con, now, rules[queue_id], text):
            _unblock(con, text, count)
    return admitted


def _room(con: sqlite3.Connection, now: Instant, rule: _Rule, text: str) -> bool:
    if rule.record.paused:
        return False
    tokens = rule.refill(now)
    if tokens is not None and tokens < (rule.record.rate_period or 0):
        return False
    most = rule.record.max_concurrency
    if most is None:
        return True
    if text not in rule.taken:
        rule.taken[text] = con.execute(IN_FLIGHT, (text,)).fetchone()[0]
    return rule.taken[text] < most


def _take(con: sqlite3.Connection, now: Instant, run_id: str, limited: Sequence[tuple[_Rule, str]]) -> None:
    for rule, text in limited:
        if rule.record.max_concurrency is not None:
            con.execute(TAKE_PERMIT, (text, run_id, now))
            rule.taken[text] += 1
        if rule.tokens is not None:
            rule.tokens -= rule.record.rate_period or 0


def _write_buckets(con: sqlite3.Connection, rules: Iterable[_Rule]) -> None:
    con.executemany(SPEND, [(r.tokens, r.at, r.queue_id) for r in rules if r.record.rate_count is not None])


def release(con: sqlite3.Connection, now: Instant, run_ids: Iterable[str]) -> None:
    """Runs leave `running`: their permits are given back, and as many of those that wait for them are ready, by priority and
    `submitted` (73, 74)."""
    ids = json.dumps(sorted(run_ids))
    freed = con.execute(HELD_PERMITS, (ids,)).fetchall()
    if freed:
        con.execute(GIVE_BACK, (ids,))
        for text, count in freed:
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


def paused(con: sqlite3.Connection, scope: Scope) -> frozenset[str]:
    """Names of paused scopes (`queue:NAME`, `function:NAME`): a claim bound to one tenant leaves them out whole. An unbound claim
    leaves out nothing: what is paused for one tenant goes on for the others, and `admit` holds that one's runs back."""
    if scope is ALL:
        return frozenset()
    return frozenset(rule.record.scope_name for rule in map(_rule, con.execute(PAUSED, (tenant_text(scope),))))


# -- the operator's side ----------------------------------------------------------------------------------------------------


def queues(con: sqlite3.Connection, scope: Scope) -> list[QueueRecord]:
    """The rows of flow control that a scope sees."""
    return [_rule(row).record for row in con.execute(LIST_RULES, of_scope(scope))]


def set_queue(con: sqlite3.Connection, now: Instant, record: QueueRecord) -> None:
    """Put a row; it counts for the next claim. What it held back and no longer holds is ready in the same write, up to a batch.
    Raises Conflict for a row that can mean nothing, before anything is written."""
    _check(record)
    tenant = tenant_text(record.tenant)
    queue_id = stored(tenant, record.scope_name)
    before = _rules(con, [queue_id]).get(queue_id)
    tokens: int | None = None
    at: Instant | None = None
    if record.rate_count is not None:
        fresh = _Rule(queue_id, record, None, None)
        tokens, at = fresh.burst, now
        if before is not None and before.refill(now) is not None:
            # A change of the rate hands out no new burst: what was there, in the new parts.
            had = (before.tokens or 0) * (record.rate_period or 0) // (before.record.rate_period or 1)
            tokens = min(fresh.burst, had)
    values = (record.paused, record.max_concurrency, record.rate_count, record.rate_period, record.rate_burst)
    con.execute(PUT_RULE, (queue_id, record.scope_name, tenant, *values, tokens, at, record.fair, now))
    rule = _rules(con, [queue_id])[queue_id]
    base = scope_text(tenant, record.scope_name)
    kind, _, name = record.scope_name.partition(":")
    if record.max_concurrency is None:
        con.execute(DROP_PERMITS, (base, base, base) if kind != "key" else (base, f"{base}:", f"{base};"))
    else:
        con.execute(PERMITS_OF_RUNNING[kind], (base, now, tenant, name))
    for text in _blocked_scopes(con, base):
        _fill(con, now, rule, text, RELEASE_BATCH)


def _check(record: QueueRecord) -> None:
    kind, _, name = record.scope_name.partition(":")
    if kind not in KINDS or not name:
        raise Conflict(f"{record.scope_name!r} is no scope", hint="queue:NAME, function:NAME, or key:QUEUE")
    if (record.rate_count is None) != (record.rate_period is None):
        raise Conflict(f"{record.scope_name}: a rate is a count and a period", hint="give both, or neither")
    if kind == "key" and record.rate_count is not None:
        raise Conflict("a rate can not be set for each key of a queue", hint="set it on queue:NAME or function:NAME")
    for what in ("max_concurrency", "rate_count", "rate_period", "rate_burst"):
        value = getattr(record, what)
        if value is not None and value < 1:
            raise Conflict(f"{record.scope_name}: {what} = {value}", hint="at least 1; to stop a scope, pause it")


def _blocked_scopes(con: sqlite3.Connection, base: str) -> list[str]:
    """Scope texts on which some run is blocked: the scope itself, or for `key:QUEUE` each of its keys."""
    found: list[str] = []
    last = base if not _is_key(base) else base + ":"
    if not _is_key(base):
        return [base]
    while (row := con.execute(NEXT_SCOPE, (last,)).fetchone()) is not None and row[0].startswith(base + ":"):
        found.append(row[0])
        last = row[0]
    return found


def _is_key(base: str) -> bool:
    return base.rpartition("/")[2].startswith("key:")


def _fill(con: sqlite3.Connection, now: Instant, rule: _Rule | None, text: str, limit: int) -> int:
    """Release as many of those blocked on a scope as it has room for now."""
    room = limit
    if rule is not None:
        if rule.record.paused:
            return 0
        tokens = rule.refill(now)
        if tokens is not None:
            room = min(room, tokens // (rule.record.rate_period or 1))
        if rule.record.max_concurrency is not None:
            in_flight: int = con.execute(IN_FLIGHT, (text,)).fetchone()[0]
            room = min(room, rule.record.max_concurrency - in_flight)
    return _unblock(con, text, room) if room > 0 else 0


# -- the nets ---------------------------------------------------------------------------------------------------------------


def refill(con: sqlite3.Connection, now: Instant, scope: Scope, limit: int) -> Instant | None:
    """Release what waits for tokens that have come in (76). The answer: when the next token comes for which a run waits."""
    soonest: Instant | None = None
    for rule in map(_rule, con.execute(RATED, of_scope(scope)).fetchall()):
        text = scope_text(tenant_text(rule.record.tenant), rule.record.scope_name)
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
        tenant, base = _split(last)
        if not scopes.sees(scope, tenant):
            continue
        kind, _, rest = base.partition(":")
        queue_id = stored(tenant, f"key:{rest.partition(':')[0]}" if kind == "key" else base)
        total += _fill(con, now, _rules(con, [queue_id]).get(queue_id), last, limit - total)
    stranded = con.execute(STRANDED_HEADS, (*of_scope(scope), limit)).fetchall()
    con.executemany(HEAD_IN_LINE, stranded)
    return total + len(stranded)


def _split(text: str) -> tuple[str | None, str]:
    """The tenant and the rest of a scope text. Names hold no slash and no colon, so a slash before the first colon is ours."""
    head, colon, tail = text.partition(":")
    tenant, slash, kind = head.rpartition("/")
    return (tenant if slash else None), f"{kind}{colon}{tail}"


__all__ = [
    "ALONE",
    "SEQUENCE",
    "Candidate",
    "admit",
    "free",
    "must_wait",
    "next_in_sequence",
    "paused",
    "queues",
    "refill",
    "release",
    "scopes_of",
    "set_queue",
]
