"""Flow control as values: the scopes that a run is in, how they are written down, what a row says, and whose turn it is.

Backends import these so that they count by the same texts and refuse the same rows (semantics 73 to 76); nothing here does I/O.

A row of flow control belongs to one tenant, to the untagged, or to everybody (ADR 0030). Its key is `OWNER:NAME`, where the owner is a
tenant's id, nothing, or `*`. Permits are counted by, and `blocked_on` says, the text of a scope: `OWNER/NAME`, `NAME` untagged; scopes
that are spread over keys or tenants have that behind: `key:QUEUE:KEY`, `share:QUEUE:TENANT`. Names hold no slash and no colon, so a
slash before the first colon is ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

from .errors import Conflict
from .model import ALL, ClaimRequest, Instant, QueueRecord, Scope

T = TypeVar("T")

EVERYBODY: Final = "*"
TENANT: Final = "tenant"
"""The scope of everything of one tenant."""
KINDS: Final = ("queue", "function", "key", "share")
SPREAD: Final = ("key", "share")
"""Kinds whose row stands for many scopes: one per concurrency key, or per tenant."""
ALONE: Final = "alone"
SEQUENCE: Final = "sequence"
"""What `blocked_on` says where it is no scope: the run is taken by a worker that holds no other (15), or waits for its turn (75)."""
RELEASE_BATCH: Final = 1_000
"""Runs that one change of a row releases at the most; the net releases the rest."""


# -- texts ----------------------------------------------------------------------------------------------------------------


def owner_of(tenant: Scope) -> str:
    """Whom a row belongs to, as text: a tenant's id, nothing, or everybody."""
    return EVERYBODY if tenant is ALL else "" if tenant is None else str(tenant)


def tenant_of(owner: str) -> Scope:
    """The tenant of a row's owner."""
    return ALL if owner == EVERYBODY else UUID(owner) if owner else None


def rule_id(owner: str, scope_name: str) -> str:
    """The key of a row."""
    return f"{owner}:{scope_name}"


def scope_text(owner: str, base: str) -> str:
    """The text of a scope by which permits are counted and which `blocked_on` shows."""
    return f"{owner}/{base}" if owner else base


def split(text: str) -> tuple[str, str]:
    """The owner and the rest of a scope's text."""
    head, colon, tail = text.partition(":")
    owner, _, kind = head.rpartition("/")
    return owner, f"{kind}{colon}{tail}"


def rule_of(text: str) -> str:
    """The key of the row that a scope's text is counted by."""
    owner, base = split(text)
    kind, _, rest = base.partition(":")
    return rule_id(owner, f"{kind}:{rest.partition(':')[0]}" if kind in SPREAD else base)


def is_spread(base: str) -> bool:
    """Does this name or text of a scope stand for one per key, or per tenant?"""
    return base.partition(":")[0].rpartition("/")[2] in SPREAD


def scopes_of(tenant: str, queue: str, name: str, key: str | None) -> list[tuple[str, str]]:
    """(key of the row, text of the scope) of every scope that a run is in, whether it is limited or not. `tenant`: its id, or nothing."""
    found: list[tuple[str, str]] = []
    for owner in (tenant, EVERYBODY):
        found += [(rule_id(owner, base), scope_text(owner, base)) for base in (f"queue:{queue}", f"function:{name}")]
        if key is not None:
            found.append((rule_id(owner, f"key:{queue}"), scope_text(owner, f"key:{queue}:{key}")))
    if tenant:
        found.append((rule_id(tenant, TENANT), scope_text(tenant, TENANT)))
        found.append((rule_id(EVERYBODY, f"share:{queue}"), scope_text(EVERYBODY, f"share:{queue}:{tenant}")))
    return found


def concerning(queues: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names of all scopes that a claim of these queues and functions may meet, whoever owns the row."""
    spread = [f"{kind}:{queue}" for queue in queues for kind in ("queue", *SPREAD)]
    return [TENANT, *spread, *(f"function:{name}" for name in sorted(set(names)))]


def check(record: QueueRecord) -> None:
    """Raise Conflict for a row that can mean nothing."""
    kind, _, name = record.scope_name.partition(":")
    what = record.scope_name
    if kind == TENANT and not name:
        if not isinstance(record.tenant, UUID):
            raise Conflict("the scope of a tenant needs a tenant", hint="give the row a tenant's id")
    elif kind not in KINDS or not name:
        raise Conflict(
            f"{what!r} is no scope",
            hint="queue:NAME, function:NAME, key:QUEUE, share:QUEUE, or tenant for all of one tenant",
        )
    if kind == "share" and record.tenant is not ALL:
        raise Conflict(
            f"{what}: a share is what each tenant may have of a queue", hint="give the row to everybody (ALL)"
        )
    if record.fair and (kind != "queue" or record.tenant is not ALL):
        raise Conflict(f"{what}: tenants take turns in a queue of everybody's", hint="queue:NAME of everybody (ALL)")
    if (record.rate_count is None) != (record.rate_period is None):
        raise Conflict(f"{what}: a rate is a count and a period", hint="give both, or neither")
    if kind in SPREAD and record.rate_count is not None:
        each = "key" if kind == "key" else "tenant"
        raise Conflict(
            f"a rate can not be set for each {each} of a queue", hint="set it on queue:NAME or function:NAME"
        )
    for limit in ("max_concurrency", "rate_count", "rate_period", "rate_burst"):
        value = getattr(record, limit)
        if value is not None and value < 1:
            raise Conflict(f"{what}: {limit} = {value}", hint="at least 1; to stop a scope, pause it")


# -- rows at work ---------------------------------------------------------------------------------------------------------


class Permit(NamedTuple):
    """A place that a run in flight has in a limited scope.

    All permits of a scope that are out were out when the newest of them was taken: so there are at most as many as that one says, and
    what gives a permit back has nothing to write down (73).
    """

    scope: str
    number: int
    """In the order in which those of its scope were taken."""
    in_flight: int
    """How many were out with it, at most."""


@dataclass(slots=True)
class Rule:
    """A row of flow control at work: what it allows, and what this transaction has used of it."""

    queue_id: str
    record: QueueRecord
    tokens: int | None = None
    """In parts of a token, of which `rate_period` make one: whole numbers, so that no start is lost to rounding."""
    at: Instant | None = None
    newest: dict[str, Permit] = field(default_factory=dict[str, Permit])
    """Of each scope, by its text, the permit that says how many are out; none is there where none is out."""

    @classmethod
    def put(cls, record: QueueRecord, before: Rule | None, now: Instant) -> Rule:
        """The row as it is put in the place of the one before: a change of the rate hands out no new burst. Raises Conflict for a row
        that can mean nothing."""
        check(record)
        rule = cls(rule_id(owner_of(record.tenant), record.scope_name), record)
        if record.rate_count is not None:
            rule.tokens, rule.at = rule.burst, now
            if before is not None and before.refill(now) is not None:
                had = (before.tokens or 0) * (record.rate_period or 0) // (before.record.rate_period or 1)
                rule.tokens = min(rule.burst, had)  # what was there, in the new parts
        return rule

    @property
    def holds(self) -> bool:
        """Can it hold anything back?"""
        record = self.record
        return record.paused or record.max_concurrency is not None or record.rate_count is not None

    @property
    def burst(self) -> int:
        """Parts that the bucket holds when it is full."""
        return (self.record.rate_burst or self.record.rate_count or 0) * (self.record.rate_period or 0)

    def refill(self, now: Instant) -> int | None:
        """Parts in the bucket now; None: there is no rate."""
        rate = self.record.rate_count
        if rate is None:
            return None
        if self.tokens is None or self.at is None:
            self.tokens = self.burst
        else:
            self.tokens = min(self.burst, self.tokens + max(0, now - self.at) * rate)
        # Who waited for the row may have an earlier now: no span of time is counted twice.
        self.at = now if self.at is None else max(now, self.at)
        return self.tokens

    def next_token(self, now: Instant) -> Instant:
        """The instant at which a whole token is there."""
        period, rate = self.record.rate_period or 0, self.record.rate_count or 1
        missing = period - (self.refill(now) or 0)
        return now + max(0, -(-missing // rate))

    def lets(self, now: Instant, most: int = 1) -> int:
        """Of so many starts those that its pause and its tokens allow now."""
        if self.record.paused:
            return 0
        tokens = self.refill(now)
        return most if tokens is None else min(most, tokens // (self.record.rate_period or 1))

    def room(self, now: Instant, text: str, most: int = 1) -> int:
        """Of so many starts those for which the scope, whose newest permit is known, has a token and a place."""
        most = self.lets(now, most)
        limit = self.record.max_concurrency
        return most if limit is None else max(0, min(most, limit - self._newest(text).in_flight))

    def take(self, text: str) -> Permit | None:
        """Use a token and a place; the permit that is to be written for it."""
        if self.tokens is not None:
            self.tokens -= self.record.rate_period or 0
        if self.record.max_concurrency is None:
            return None
        before = self._newest(text)
        self.newest[text] = Permit(text, before.number + 1, before.in_flight + 1)
        return self.newest[text]

    def _newest(self, text: str) -> Permit:
        return self.newest.get(text, Permit(text, 0, 0))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A limited scope of which so many permits are wanted: is what its newest permit says enough, or are they to be counted?"""

    rule: Rule
    text: str
    number: int

    @property
    def limit(self) -> int:
        """How far counting goes: what is beyond it changes no answer."""
        return self.rule.record.max_concurrency or 0

    def fits(self, in_flight: int | None) -> bool:
        """Is there room for all that are wanted, with so many in flight at most? None: nobody has counted."""
        return in_flight is not None and in_flight + self.number <= self.limit


def wanted(pairs: Iterable[tuple[Rule, str]], now: Instant) -> list[Wanted]:
    """The limited ones among the scopes (row, text) of runs that are about to be taken, in order; those that let nothing start are not
    looked at."""
    limited = [(rule, text) for rule, text in pairs if rule.record.max_concurrency is not None]
    numbers = Counter(text for _, text in limited)
    rules = {text: rule for rule, text in limited if rule.lets(now) > 0}
    return [Wanted(rules[text], text, numbers[text]) for text in sorted(rules)]


@dataclass(frozen=True, slots=True)
class Gates:
    """What the rows of queues say to a claim as a whole: which give it nothing, and in which tenants take turns."""

    closed: frozenset[str] = frozenset()
    fair: frozenset[str] = frozenset()


def gate_ids(request: ClaimRequest) -> list[str]:
    """The keys of the rows that may be gates for this claim: those of everybody, and of the tenant that it is bound to."""
    owners = {EVERYBODY, owner_of(request.scope)}
    queues = [rule_id(owner, f"queue:{queue}") for owner in owners for queue in request.queues]
    return queues + [rule_id(owner, TENANT) for owner in owners]


def gates_of(records: Sequence[QueueRecord], request: ClaimRequest) -> Gates:
    """A claim leaves a queue out whole that is paused for everybody, or for the tenant that it is bound to. What is paused for one
    tenant goes on for the others: of an unbound claim that one's runs are held back one by one, once."""
    paused = {record.scope_name for record in records if record.paused}
    if TENANT in paused:
        return Gates(closed=frozenset(request.queues))
    fair = {record.scope_name for record in records if record.fair} if request.scope is ALL else set[str]()
    return Gates(
        frozenset(queue for queue in request.queues if f"queue:{queue}" in paused),
        frozenset(queue for queue in request.queues if f"queue:{queue}" in fair),
    )


# -- turns ----------------------------------------------------------------------------------------------------------------


class Turns:
    """Whose turn it is in each fair queue, for the claims of one store: each goes on behind the tenant that was served last.

    It is a matter of one process: two workers take turns each on its own.
    """

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def last(self, queue: str) -> str | None:
        """The tenant that was served last, as text; None: nobody yet."""
        return self._last.get(queue)

    def served(self, queue: str, tenants: Sequence[str]) -> None:
        """These were served, in this order."""
        if tenants:
            self._last[queue] = tenants[-1]


def in_turn(last: str | None, beyond: Callable[[str, int], Sequence[str]], room: int, *, untagged: bool) -> list[str]:
    """At most `room` tenants in turn, behind the one that was served last; the untagged, as nothing, stand before all others.
    `beyond(tenant, most)` gives so many of those that have something ready and come after that one, in order."""
    found = list(beyond(last, room)) if last is not None else []
    if len(found) < room:
        front = ["", *beyond("", room)] if untagged else beyond("", room)
        found += [one for one in front if last is None or one <= last][: room - len(found)]
    return found


def dealt(hands: Sequence[Sequence[T]], room: int) -> list[T]:
    """One of each, then the next of each, until there is no more or the room is full."""
    longest = max(map(len, hands), default=0)
    return [hand[place] for place in range(longest) for hand in hands if place < len(hand)][:room]


__all__ = [
    "ALONE",
    "EVERYBODY",
    "KINDS",
    "RELEASE_BATCH",
    "SEQUENCE",
    "SPREAD",
    "TENANT",
    "Gates",
    "Permit",
    "Rule",
    "Turns",
    "Wanted",
    "check",
    "concerning",
    "dealt",
    "gate_ids",
    "gates_of",
    "in_turn",
    "is_spread",
    "owner_of",
    "rule_id",
    "rule_of",
    "scope_text",
    "scopes_of",
    "split",
    "tenant_of",
    "wanted",
]
