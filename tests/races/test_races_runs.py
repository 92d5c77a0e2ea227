"""Conflicting operations on runs in hand: submit, claim, append, settle, renew, sweep, cancel. See `arena.py` for how a pair is run."""

from __future__ import annotations

import pytest
from races.arena import BROKEN, DONE, LEASE, STOPPED, Arena, Call, Check, Pair, Stage, asleep, call, record

from durable import model as m
from durable.errors import Conflict

PAIRS: list[Pair] = []
Made = tuple[Call, Call, Check]


@PAIRS.append
def claim_and_claim_never_get_one_run(stage: Stage) -> Made:
    ids = stage.submit(6)

    def check(one: list[m.Claimed], two: list[m.Claimed]) -> None:
        taken = [claimed.run.run_id for claimed in [*one, *two]]
        assert sorted(taken) == sorted(ids)
        assert all(run.attempts == 1 for run in stage.all())
        assert len({claimed.lease.mark for claimed in one} & {claimed.lease.mark for claimed in two}) == 0

    return call("claim", stage.request(limit=4)), call("claim", stage.request(limit=4)), check


@PAIRS.append
def a_claim_asked_again_with_its_mark_takes_nothing_more(stage: Stage) -> Made:
    stage.submit(6)
    request = stage.request(limit=3)

    def check(one: list[m.Claimed], two: list[m.Claimed]) -> None:
        assert sorted(c.run.run_id for c in one) == sorted(c.run.run_id for c in two)
        assert sum(run.status == "running" for run in stage.all()) == 3

    return call("claim", request), call("claim", request), check


@PAIRS.append
def claim_and_cancel_of_a_run_never_claimed(stage: Stage) -> Made:
    (run_id,) = stage.submit()

    def check(claimed: list[m.Claimed], answer: list[bool]) -> None:
        run = stage.run(run_id)
        assert answer == [True]
        if claimed:
            assert run.status == "running"
            assert run.cancel_requested_at is not None
        else:
            assert (run.status, run.attempts) == ("cancelled", 0)

    return call("claim", stage.request()), call("request_cancel", [run_id], scope=stage.tenant), check


@PAIRS.append
def submit_and_submit_of_one_idempotency_key_make_one_run(stage: Stage) -> Made:
    one, two = stage.new(idempotency_key="k"), stage.new(idempotency_key="k")

    def check(first: list[m.Submitted], second: list[m.Submitted]) -> None:
        assert sorted([first[0].disposition, second[0].disposition]) == ["created", "existing"]
        assert [run.run_id for run in stage.all()] == [first[0].run.run_id] == [second[0].run.run_id]

    return call("enqueue", [one]), call("enqueue", [two]), check


@PAIRS.append
def submit_and_submit_of_one_key_for_two_functions_is_one_conflict(stage: Stage) -> Made:
    one, two = stage.new(idempotency_key="k"), stage.new(idempotency_key="k", name="g")

    def check(*answers: object) -> None:
        assert sum(answer is Conflict for answer in answers) == 1
        assert len(stage.all()) == 1

    return call("enqueue", [one]), call("enqueue", [two]), check


@PAIRS.append
def submit_repeated_with_its_id_makes_one_run(stage: Stage) -> Made:
    new = stage.new()

    def check(first: list[m.Submitted], second: list[m.Submitted]) -> None:
        assert sorted([first[0].disposition, second[0].disposition]) == ["created", "existing"]
        assert len(stage.all()) == 1

    return call("enqueue", [new]), call("enqueue", [new]), check


@PAIRS.append
def two_batches_with_the_same_keys_in_opposite_order_both_get_their_answer(stage: Stage) -> Made:
    one = [stage.new(idempotency_key=key) for key in "abc"]
    two = [stage.new(idempotency_key=key) for key in "cba"]

    def check(first: list[m.Submitted], second: list[m.Submitted]) -> None:
        assert [a.run.run_id for a in first] == [b.run.run_id for b in reversed(second)]
        assert len(stage.all()) == 3

    return call("enqueue", one), call("enqueue", two), check


@PAIRS.append
def coalesce_and_coalesce_make_one_waiting_run(stage: Stage) -> Made:
    one, two = (stage.new(coalesce_key="c", on_coalesce="replace", idempotency_key=key) for key in "ab")

    def check(first: list[m.Submitted], second: list[m.Submitted]) -> None:
        assert sorted([first[0].disposition, second[0].disposition]) == ["coalesced", "created"]
        (run,) = stage.all()
        assert run.input == (one.input if first[0].disposition == "coalesced" else two.input)

    return call("enqueue", [one]), call("enqueue", [two]), check


@PAIRS.append
def a_submit_that_coalesces_is_seen_by_a_run_that_starts_after_it(stage: Stage) -> Made:
    first = stage.new(coalesce_key="c")
    late = stage.new(coalesce_key="c", on_coalesce="replace")
    stage.do(stage.store.enqueue([first]))

    def check(claimed: list[m.Claimed], answers: list[m.Submitted]) -> None:
        if answers[0].disposition == "coalesced":
            # A claim may pass over a row that a submit holds, and find it the next time (8).
            claimed = claimed or stage.do(stage.store.claim(stage.request()))
            assert [one.run.input for one in claimed] == [late.input]
        else:
            assert answers[0].disposition == "created"
            assert late.run_id in [run.run_id for run in stage.all() if run.status in ("pending", "running")]

    return call("claim", stage.request()), call("enqueue", [late]), check


@PAIRS.append
def coalesce_and_cancel_never_lose_the_later_submit(stage: Stage) -> Made:
    first, late = stage.new(coalesce_key="c"), stage.new(coalesce_key="c")
    stage.do(stage.store.enqueue([first]))

    def check(answers: list[m.Submitted], cancelled: list[bool]) -> None:
        assert cancelled == [True]
        assert stage.run(first.run_id).status == "cancelled"
        if answers[0].disposition == "created":
            assert stage.run(late.run_id).status == "pending"

    return call("enqueue", [late]), call("request_cancel", [first.run_id], scope=stage.tenant), check


@PAIRS.append
def complete_and_cancel_one_of_them_wins(stage: Stage) -> Made:
    lease = stage.held()

    def check(settled: list[str], answer: list[bool]) -> None:
        assert (settled, answer) in ((["landed"], [False]), (["woken"], [True]))
        assert stage.run(lease.run_id).status == ("completed" if settled == ["landed"] else "running")

    return call("settle", [(lease, DONE)]), call("request_cancel", [lease.run_id], scope=stage.tenant), check


@PAIRS.append
def hand_back_and_cancel_leave_a_run_that_is_claimable_with_its_ask(stage: Stage) -> Made:
    lease = stage.held()

    def check(settled: list[str], answer: list[bool]) -> None:
        run = stage.run(lease.run_id)
        assert (settled, answer, run.status, run.available_at) == (["landed"], [True], "pending", None)
        assert run.cancel_requested_at is not None

    back = m.HandedBack(after=60_000_000)
    return call("settle", [(lease, back)]), call("request_cancel", [lease.run_id], scope=stage.tenant), check


@PAIRS.append
def suspend_and_cancel_leave_no_sleeping_run(stage: Stage) -> Made:
    lease = stage.held()

    def check(settled: list[str], answer: list[bool]) -> None:
        assert answer == [True]
        run = stage.run(lease.run_id)
        assert run.wake_seq == 1
        assert (settled, run.status) in ((["landed"], "pending"), (["woken"], "running"))

    return call("settle", [(lease, asleep())]), call("request_cancel", [lease.run_id], scope=stage.tenant), check


@PAIRS.append
def cancel_and_cancel_are_one_ask(stage: Stage) -> Made:
    lease = stage.held()

    def check(one: list[bool], two: list[bool]) -> None:
        assert one == two == [True]
        assert stage.inbox(lease).cancel_requested

    ask = call("request_cancel", [lease.run_id], scope=stage.tenant)
    return ask, ask, check


@PAIRS.append
def cancel_and_cancel_of_a_sleeping_run_wake_it(stage: Stage) -> Made:
    lease = stage.suspended()

    def check(one: list[bool], two: list[bool]) -> None:
        assert one == two == [True]
        assert stage.run(lease.run_id).status == "pending"

    ask = call("request_cancel", [lease.run_id], scope=stage.tenant)
    return ask, ask, check


@PAIRS.append
def refuse_and_cancel_a_refused_ask_wakes_nobody(stage: Stage) -> Made:
    lease = stage.held()
    pivot = record("pivot", kind=m.RecordKind.PIVOT)

    def check(appended: list[m.Appended], answer: list[bool]) -> None:
        assert (appended[0].state, answer) == ("appended", [True])
        run = stage.run(lease.run_id)
        assert run.cancel_requested_at is not None
        assert run.cancel_refused_at is not None
        assert stage.do(stage.store.settle([(lease, DONE)])) == ["landed"]

    return call("append", [(lease, pivot)]), call("request_cancel", [lease.run_id], scope=stage.tenant), check


@PAIRS.append
def settle_and_sweep_of_a_lapsed_lease_one_of_them_wins(stage: Stage) -> Made:
    lease = stage.lapsed()

    def check(settled: list[str], swept: m.Swept) -> None:
        assert (settled, list(swept.returned)) in ((["landed"], []), (["lost"], [lease.run_id]))
        run = stage.run(lease.run_id)
        assert (run.status, run.reclaims) == (("completed", 0) if settled == ["landed"] else ("pending", 1))

    return call("settle", [(lease, DONE)]), call("sweep", scope=stage.tenant, limit=10, max_reclaims=5), check


@PAIRS.append
def append_and_sweep_of_a_lapsed_lease_write_no_record_without_its_fence(stage: Stage) -> Made:
    lease = stage.lapsed()

    def check(appended: list[m.Appended], swept: m.Swept) -> None:
        assert stage.returned(swept) == [lease.run_id]
        assert len(stage.journal(lease.run_id)) == (appended[0].state == "appended")
        assert stage.run(lease.run_id).reclaims == (appended[0].state == "lost")

    return call("append", [(lease, record("a"))]), call("sweep", scope=stage.tenant, limit=10, max_reclaims=5), check


@PAIRS.append
def a_child_and_its_start_are_there_both_or_neither_when_the_lease_is_swept(stage: Stage) -> Made:
    lease = stage.lapsed()

    def check(appended: list[m.Appended], swept: m.Swept) -> None:
        children = stage.do(stage.store.children(lease.run_id, scope=stage.tenant))
        assert len(children) == len(stage.journal(lease.run_id)) == (appended[0].state == "appended")
        assert stage.returned(swept) == [lease.run_id]

    return (
        call("append", [(lease, stage.start(lease))]),
        call("sweep", scope=stage.tenant, limit=10, max_reclaims=5),
        check,
    )


@PAIRS.append
def renew_and_sweep_of_a_lapsed_lease_one_of_them_wins(stage: Stage) -> Made:
    lease = stage.lapsed()

    def check(renewed: list[m.Renewed], swept: m.Swept) -> None:
        # Unknown: the renewal met the sweep's commit under way (13).
        assert (renewed[0].state, len(swept.returned)) in (("held", 0), ("lost", 1), ("unknown", 1))

    return (
        call("renew", [m.Renewal(lease=lease)], lease=LEASE),
        call("sweep", scope=stage.tenant, limit=10, max_reclaims=5),
        check,
    )


@PAIRS.append
def renew_and_settle_leave_no_lease_on_a_landed_run(stage: Stage) -> Made:
    lease = stage.held()

    def check(renewed: list[m.Renewed], settled: list[str]) -> None:
        assert renewed[0].state in ("held", "lost", "unknown")  # the last: it met the settle's commit under way (13)
        run = stage.run(lease.run_id)
        assert (settled, run.status, run.leased_until) == (["landed"], "completed", None)

    return call("renew", [m.Renewal(lease=lease)], lease=LEASE), call("settle", [(lease, DONE)]), check


@PAIRS.append
def sweep_and_sweep_return_a_run_once(stage: Stage) -> Made:
    ids = stage.submit(4)
    stage.claim()
    stage.tick(LEASE + 2_000)

    def check(one: m.Swept, two: m.Swept) -> None:
        assert sorted([*one.returned, *two.returned]) == sorted(ids)
        assert all((run.status, run.reclaims) == ("pending", 1) for run in stage.all())

    sweep = call("sweep", scope=stage.tenant, limit=3, max_reclaims=5)
    return sweep, sweep, check


@PAIRS.append
def a_swept_run_and_a_claim_hand_out_a_new_fence(stage: Stage) -> Made:
    lease = stage.lapsed()

    def check(swept: m.Swept, claimed: list[m.Claimed]) -> None:
        assert list(swept.returned) == [lease.run_id]
        assert stage.run(lease.run_id).attempts == 1 + len(claimed)
        assert stage.do(stage.store.settle([(lease, DONE)])) == ["lost"]

    return call("sweep", scope=stage.tenant, limit=9, max_reclaims=5), call("claim", stage.request()), check


@PAIRS.append
def a_settle_that_is_repeated_lands_once(stage: Stage) -> Made:
    parent, (child,) = stage.parent(1)

    def check(one: list[str], two: list[str]) -> None:
        assert one == two == ["landed"]
        assert stage.run(parent.run_id).wake_seq == 1

    settle = call("settle", [(child, DONE)])
    return settle, settle, check


@PAIRS.append
def two_outcomes_of_one_lease_the_first_one_lands(stage: Stage) -> Made:
    lease = stage.held()

    def check(one: list[str], two: list[str]) -> None:
        assert sorted([*one, *two]) == ["landed", "lost"]
        assert stage.run(lease.run_id).status == ("completed" if one == ["landed"] else "failed")

    return call("settle", [(lease, DONE)]), call("settle", [(lease, BROKEN)]), check


@PAIRS.append
def append_and_append_of_one_step_the_first_one_is_recorded(stage: Stage) -> Made:
    lease = stage.held()

    def check(one: list[m.Appended], two: list[m.Appended]) -> None:
        assert sorted([one[0].state, two[0].state]) == ["appended", "recorded"]
        assert [one[0].record] == [two[0].record] == stage.journal(lease.run_id)

    first, second = record("a", result='{"v":1}'), record("a", result='{"v":2}')
    return call("append", [(lease, first)]), call("append", [(lease, second)]), check


@PAIRS.append
def append_and_settle_no_record_is_written_to_a_landed_run(stage: Stage) -> Made:
    lease = stage.held()

    def check(appended: list[m.Appended], settled: list[str]) -> None:
        assert settled == ["landed"]
        assert len(stage.journal(lease.run_id)) == (appended[0].state == "appended")

    return call("append", [(lease, record("a"))]), call("settle", [(lease, STOPPED)]), check


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
def test_pair(arena: Arena, pair: Pair) -> None:
    arena.trials(pair)
