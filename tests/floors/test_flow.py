"""Rows of flow control at work: buckets, pauses, places, and what they say to a claim (73 to 76), without a store."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import Conflict
from durable.flow import EVERYBODY, Gates, Permit, Rule, gate_ids, gates_of, wanted
from durable.model import ALL, ClaimRequest, QueueRecord, Scope, tenant_id
from durable.settings import MINUTE, SECOND

ACME = tenant_id("acme")


def row(**more: Any) -> QueueRecord:
    return QueueRecord(**{"scope_name": "queue:default", **more})


def rated(count: int, burst: int | None = None) -> QueueRecord:
    return row(rate_count=count, rate_period=SECOND, rate_burst=burst)


def test_a_bucket_counts_no_span_of_time_twice_whoever_waited_for_its_row() -> None:
    """A transaction that began early and got the row late has an earlier now than the one before it."""
    rule = Rule(":queue:default", rated(1, burst=100), 0, 0)
    assert rule.refill(10 * SECOND) == 10 * SECOND
    assert rule.refill(4 * SECOND) == 10 * SECOND
    assert rule.refill(10 * SECOND) == 10 * SECOND, "the six seconds between them were counted again"
    assert rule.refill(11 * SECOND) == 11 * SECOND


def test_a_bucket_lets_start_what_it_has_whole_tokens_for() -> None:
    rule = Rule.put(rated(2, burst=3), None, now=0)
    assert [rule.lets(0, most) for most in (2, 3, 5)] == [2, 3, 3]
    for _ in range(3):
        assert not rule.take("queue:default")
    assert (rule.lets(0), rule.next_token(0)) == (0, SECOND // 2)
    assert (rule.lets(SECOND // 2 - 1), rule.lets(SECOND // 2)) == (0, 1)


def test_a_changed_rate_hands_out_no_new_burst() -> None:
    before = Rule.put(rated(10), None, now=0)
    for _ in range(9):
        before.take("queue:default")
    assert Rule.put(rated(100), before, now=0).lets(0, 100) == 1
    assert Rule.put(rated(100), None, now=0).lets(0, 100) == 100
    assert Rule.put(row(max_concurrency=1), before, now=0).tokens is None


def test_a_scope_has_room_up_to_its_limit_and_none_while_it_is_paused() -> None:
    rule = Rule.put(row(max_concurrency=2), None, now=0)
    assert [rule.room(0, "a", 5) and rule.take("a") for _ in range(3)] == [Permit("a", 1, 1), Permit("a", 2, 2), 0]
    assert rule.room(0, "b", 5) == 2
    assert not Rule.put(row(max_concurrency=2, paused=True), None, now=0).room(0, "a")


def test_permits_go_on_from_the_newest_one_and_from_what_was_counted() -> None:
    rule = Rule.put(row(max_concurrency=10), None, now=0)
    rule.newest["a"] = Permit("a", 7, 9)
    assert (rule.room(0, "a", 5), rule.take("a"), rule.room(0, "a", 5)) == (1, Permit("a", 8, 10), 0)
    rule.newest["a"] = Permit("a", 8, 3)
    assert (rule.room(0, "a", 5), rule.take("a")) == (5, Permit("a", 9, 4))


def test_permits_are_counted_where_the_newest_one_leaves_no_room_for_all() -> None:
    """Or says nothing. A scope that lets nothing start, or that has no limit, is not looked at."""
    limited, free = Rule("l", row(max_concurrency=10)), Rule("f", rated(1), SECOND, 0)
    stopped = Rule("p", row(max_concurrency=10, paused=True))
    (one,) = wanted([(limited, "a"), (free, "b"), (limited, "a"), (stopped, "c")], now=0)
    assert (one.text, one.number, one.limit) == ("a", 2, 10)
    assert [one.fits(number) for number in (0, 8, 9, None)] == [True, True, False, False]


def test_only_a_row_that_limits_or_pauses_can_hold_anything_back() -> None:
    assert [Rule("", one).holds for one in (row(fair=True), row(paused=True), row(max_concurrency=1), rated(1))] == [
        False,
        True,
        True,
        True,
    ]


def test_a_row_that_can_mean_nothing_is_not_put() -> None:
    with pytest.raises(Conflict, match="is no scope"):
        Rule.put(row(scope_name="nowhere"), None, now=0)


def asking(scope: Scope) -> ClaimRequest:
    return ClaimRequest(mark="m", queues={"a": 1, "b": 1}, functions=(), limit=1, lease=MINUTE, family="f", scope=scope)


@pytest.mark.parametrize(
    ("scope", "rows", "gates"),
    [
        (ALL, (), Gates()),
        (ALL, (row(scope_name="queue:a", paused=True),), Gates(closed=frozenset("a"))),
        (ALL, (row(scope_name="queue:b", fair=True),), Gates(fair=frozenset("b"))),
        (ACME, (row(scope_name="queue:b", fair=True),), Gates()),
        (ACME, (row(scope_name="tenant", paused=True),), Gates(closed=frozenset("ab"))),
    ],
    ids=["none", "a paused queue", "turns", "turns of one", "a paused tenant"],
)
def test_rows_close_queues_to_a_claim_or_make_tenants_take_turns(
    scope: Scope, rows: tuple[QueueRecord, ...], gates: Gates
) -> None:
    assert gates_of(rows, asking(scope)) == gates


def test_a_claim_asks_for_the_gates_of_everybody_and_of_its_own_tenant() -> None:
    owners = {one.partition(":")[0] for one in gate_ids(asking(ACME))}
    assert owners == {EVERYBODY, str(ACME)}
    assert {one.partition(":")[0] for one in gate_ids(asking(ALL))} == {EVERYBODY}
