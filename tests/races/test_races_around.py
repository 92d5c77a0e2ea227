"""Conflicting operations around runs: signals, children, graphs, sequences, limits, retry, fork, purge, schedules. See `arena.py`."""

from __future__ import annotations

from typing import Any

import pytest
from races.arena import BROKEN, DONE, SECOND, Arena, Call, Check, Pair, Stage, asleep, call, record

from durable import model as m
from durable.errors import Conflict, NotFound

PAIRS: list[Pair] = []
Made = tuple[Call, Call, Check]


def signal(run_id: str, dedup_id: str = "d") -> m.NewSignal:
    return m.NewSignal(run_id=run_id, name="go", payload="1", dedup_id=dedup_id)


@PAIRS.append
def send_and_suspend_never_lose_the_wake(stage: Stage) -> Made:
    lease = stage.held()

    def check(seq: int, settled: list[str]) -> None:
        assert seq == 1
        run = stage.run(lease.run_id)
        assert (settled, run.status) in ((["landed"], "pending"), (["woken"], "running"))
        held = lease if run.status == "running" else stage.claim()[0]
        assert [one.seq for one in stage.inbox(held).signals] == [1]

    return call("send", signal(lease.run_id), scope=stage.tenant), call("settle", [(lease, asleep())]), check


@PAIRS.append
def send_and_complete_the_signal_is_stored_or_refused(stage: Stage) -> Made:
    lease = stage.held()

    def check(answer: object, settled: list[str]) -> None:
        assert settled == ["landed"]
        assert answer in (1, Conflict)
        assert stage.run(lease.run_id).wake_seq == (answer == 1)

    return call("send", signal(lease.run_id), scope=stage.tenant), call("settle", [(lease, DONE)]), check


@PAIRS.append
def send_and_send_get_two_places_in_one_order(stage: Stage) -> Made:
    lease = stage.held()

    def check(one: int, two: int) -> None:
        assert sorted([one, two]) == [1, 2]
        assert [found.seq for found in stage.inbox(lease).signals] == [1, 2]

    send = [call("send", signal(lease.run_id, dedup_id), scope=stage.tenant) for dedup_id in ("d1", "d2")]
    return send[0], send[1], check


@PAIRS.append
def a_send_that_is_repeated_is_one_signal(stage: Stage) -> Made:
    lease = stage.suspended()

    def check(one: int, two: int) -> None:
        assert one == two == 1
        assert stage.run(lease.run_id).wake_seq == 1
        assert len(stage.inbox(stage.claim()[0]).signals) == 1

    send = call("send", signal(lease.run_id), scope=stage.tenant)
    return send, send, check


@PAIRS.append
def send_and_promote_wake_a_due_run_once(stage: Stage) -> Made:
    lease = stage.suspended(until=stage.arena.now() + SECOND)
    stage.tick(2 * SECOND)

    def check(seq: int, promoted: m.Promoted) -> None:
        assert (seq, promoted.count in (0, 1)) == (1, True)
        assert [claimed.attempts for claimed in stage.claim()] == [2]
        assert stage.run(lease.run_id).wake_seq == 1

    return call("send", signal(lease.run_id), scope=stage.tenant), call("promote", scope=stage.tenant, limit=10), check


@PAIRS.append
def a_child_that_lands_while_its_parent_suspends_wakes_it(stage: Stage) -> Made:
    parent, (child,) = stage.parent(1)

    def check(landed: list[str], settled: list[str]) -> None:
        run = stage.run(parent.run_id)
        assert landed == ["landed"]
        assert run.wake_seq == 1
        assert (settled, run.status) in ((["landed"], "pending"), (["woken"], "running"))

    return call("settle", [(child, DONE)]), call("settle", [(parent, asleep(wake_after=1))]), check


@PAIRS.append
def two_children_that_land_at_once_are_counted_both(stage: Stage) -> Made:
    parent, (one, two) = stage.parent(2)
    assert stage.do(stage.store.settle([(parent, asleep(wake_after=2))])) == ["landed"]

    def check(*answers: list[str]) -> None:
        run = stage.run(parent.run_id)
        assert list(answers) == [["landed"], ["landed"]]
        assert (run.status, run.wake_seq) == ("pending", 2)

    return call("settle", [(one, DONE)]), call("settle", [(two, BROKEN)]), check


@PAIRS.append
def a_child_that_lands_and_a_cancel_of_its_parent_both_count(stage: Stage) -> Made:
    parent, (child,) = stage.parent(1)
    assert stage.do(stage.store.settle([(parent, asleep(wake_after=1))])) == ["landed"]

    def check(landed: list[str], answer: list[bool]) -> None:
        run = stage.run(parent.run_id)
        assert (landed, answer, run.status, run.wake_seq) == (["landed"], [True], "pending", 2)

    return call("settle", [(child, DONE)]), call("request_cancel", [parent.run_id], scope=stage.tenant), check


@PAIRS.append
def mend_and_mend_cancel_a_childs_run_once(stage: Stage) -> Made:
    parent, (child,) = stage.parent(1)
    assert stage.do(stage.store.settle([(parent, BROKEN)])) == ["landed"]

    def check(*answers: int) -> None:
        run = stage.run(child.run_id)
        assert (run.cancel_requested_at is not None, run.wake_seq) == (True, 1)

    mend = call("mend", scope=stage.tenant, limit=10)
    return mend, mend, check


def graph(stage: Stage, keys: str = "") -> tuple[list[m.Lease], str]:
    """Two nodes in hand and a third one behind both."""
    one, two = stage.new(), stage.new()
    edges = tuple(m.Dependency(run_id=new.run_id, position=at) for at, new in enumerate((one, two)))
    node = stage.new(depends_on=edges)
    stage.do(stage.store.enqueue([one, two, node]))
    return stage.claim(), node.run_id


@PAIRS.append
def the_last_two_nodes_in_front_release_the_node_behind_them(stage: Stage) -> Made:
    (one, two), node = graph(stage)

    def check(*answers: list[str]) -> None:
        assert list(answers) == [["landed"], ["landed"]]
        assert (stage.run(node).status, [lease.run_id for lease in stage.claim()]) == ("pending", [node])

    return call("settle", [(one, DONE)]), call("settle", [(two, DONE)]), check


@PAIRS.append
def a_failed_node_beside_a_completed_one_ends_the_node_behind_both(stage: Stage) -> Made:
    (one, two), node = graph(stage)

    def check(*answers: list[str]) -> None:
        assert list(answers) == [["landed"], ["landed"]]
        assert (stage.run(node).status, stage.run(node).error_kind) == ("cancelled", "upstream")

    return call("settle", [(one, DONE)]), call("settle", [(two, BROKEN)]), check


@PAIRS.append
def a_landing_and_a_submit_of_one_sequence_leave_nobody_in_line_for_nobody(stage: Stage) -> Made:
    lease = stage.held(sequence_key="s")
    late = stage.new(sequence_key="s")

    def check(settled: list[str], answers: list[m.Submitted]) -> None:
        assert (settled, answers[0].disposition) == (["landed"], "created")
        assert [found.run_id for found in stage.claim()] == [late.run_id]

    return call("settle", [(lease, DONE)]), call("enqueue", [late]), check


@PAIRS.append
def submits_of_one_sequence_run_one_at_a_time(stage: Stage) -> Made:
    one, two = stage.new(sequence_key="s"), stage.new(sequence_key="s")

    def check(*answers: list[m.Submitted]) -> None:
        first, second = sorted((answer[0].run for answer in answers), key=lambda run: run.submitted)
        (lease,) = stage.claim()
        assert lease.run_id == first.run_id
        stage.do(stage.store.settle([(lease, BROKEN)]))
        assert [found.run_id for found in stage.claim()] == [second.run_id]

    return call("enqueue", [one]), call("enqueue", [two]), check


@PAIRS.append
def claim_and_claim_never_go_past_a_limit(stage: Stage) -> Made:
    stage.do(
        stage.store.set_queue(m.QueueRecord(scope_name=f"queue:{stage.queue}", tenant=stage.tenant, max_concurrency=2))
    )
    stage.submit(5)

    def check(one: list[m.Claimed], two: list[m.Claimed]) -> None:
        assert len(one) + len(two) == sum(run.status == "running" for run in stage.all()) == 2

    return call("claim", stage.request(limit=2)), call("claim", stage.request(limit=2)), check


@PAIRS.append
def a_permit_that_comes_back_during_a_claim_is_not_lost(stage: Stage) -> Made:
    stage.do(
        stage.store.set_queue(m.QueueRecord(scope_name=f"queue:{stage.queue}", tenant=stage.tenant, max_concurrency=1))
    )
    lease = stage.held()
    (waiting,) = stage.submit()

    def check(settled: list[str], claimed: list[m.Claimed]) -> None:
        assert settled == ["landed"]
        got = [one.run.run_id for one in claimed] or [one.run_id for one in stage.claim()]
        assert got == [waiting]

    return call("settle", [(lease, DONE)]), call("claim", stage.request()), check


@PAIRS.append
def a_pause_and_a_claim_either_it_was_taken_before_or_it_waits(stage: Stage) -> Made:
    (run_id,) = stage.submit()
    queue = m.QueueRecord(scope_name=f"queue:{stage.queue}", tenant=stage.tenant, paused=True)

    def check(nothing: None, claimed: list[m.Claimed]) -> None:
        assert stage.run(run_id).status == ("running" if claimed else "pending")
        assert stage.claim() == []
        stage.do(stage.store.set_queue(m.QueueRecord(scope_name=queue.scope_name, tenant=stage.tenant)))
        assert len(stage.claim()) + len(claimed) == 1

    return call("set_queue", queue), call("claim", stage.request()), check


@PAIRS.append
def retry_and_retry_are_one_retry(stage: Stage) -> Made:
    lease = stage.landed(BROKEN)

    def check(*answers: m.RunRecord) -> None:
        run = stage.run(lease.run_id)
        assert (run.status, run.failures, run.max_attempts) == ("pending", 0, 2)

    retry = call("retry", lease.run_id, scope=stage.tenant, attempts=1, extra_attempts=1)
    return retry, retry, check


@PAIRS.append
def retry_and_claim_the_run_is_taken_or_waits(stage: Stage) -> Made:
    lease = stage.landed(BROKEN)

    def check(retried: m.RunRecord, claimed: list[m.Claimed]) -> None:
        assert retried.run_id == lease.run_id
        assert stage.run(lease.run_id).status == ("running" if claimed else "pending")

    return call("retry", lease.run_id, scope=stage.tenant, attempts=1), call("claim", stage.request()), check


@PAIRS.append
def purge_and_retry_the_run_is_gone_whole_or_lives_whole(stage: Stage) -> Made:
    lease = stage.held(keep=SECOND)
    stage.do(stage.store.append([(lease, record("a"))]))
    stage.do(stage.store.settle([(lease, BROKEN)]))
    stage.tick(2 * SECOND)

    def check(purged: int, retried: object) -> None:
        run = stage.find(lease.run_id)
        if purged:
            assert (run, retried) == (None, NotFound)
        else:
            assert run is not None
            assert run.status == "pending"
            assert len(stage.journal(lease.run_id)) == 1

    return (
        call("purge", scope=stage.tenant, limit=10),
        call("retry", lease.run_id, scope=stage.tenant, attempts=1),
        check,
    )


@PAIRS.append
def purge_and_purge_delete_every_due_run_once(stage: Stage) -> Made:
    stage.submit(4, keep=SECOND, idempotency_key=None)
    stage.do(stage.store.settle([(lease, DONE) for lease in stage.claim()]))
    stage.tick(2 * SECOND)

    def check(one: int, two: int) -> None:
        assert one + two == 4
        assert stage.all() == []

    purge = call("purge", scope=stage.tenant, limit=3)
    return purge, purge, check


@PAIRS.append
def purge_and_submit_of_its_key_the_key_goes_with_the_run(stage: Stage) -> Made:
    lease = stage.landed(DONE, keep=SECOND, idempotency_key="k")
    stage.tick(2 * SECOND)
    late = stage.new(idempotency_key="k")

    def check(purged: int, answers: list[m.Submitted]) -> None:
        assert purged == 1
        left = {"existing": [], "created": [late.run_id]}[answers[0].disposition]
        assert [run.run_id for run in stage.all()] == left
        assert answers[0].run.run_id in (lease.run_id, late.run_id)

    return call("purge", scope=stage.tenant, limit=10), call("enqueue", [late]), check


@PAIRS.append
def purge_and_fork_the_copy_is_whole(stage: Stage) -> Made:
    lease = stage.held(keep=SECOND)
    stage.do(stage.store.append([(lease, record("a")), (lease, record("b", position=1))]))
    stage.do(stage.store.settle([(lease, DONE)]))
    stage.tick(2 * SECOND)
    fork_id = stage.name("fork")

    def check(purged: int, forked: object) -> None:
        # A purge may pass over a row that a fork holds, and find it the next time (61).
        assert purged + stage.do(stage.store.purge(scope=stage.tenant, limit=10)) == 1
        copy = stage.find(fork_id)
        assert (copy is None) == (forked is NotFound)
        assert copy is None or [one.step_id for one in stage.journal(fork_id)] == ["a"]

    fork = call("fork", lease.run_id, scope=stage.tenant, new_run_id=fork_id, from_step="b")
    return call("purge", scope=stage.tenant, limit=10), fork, check


@PAIRS.append
def a_fork_that_is_repeated_is_one_run(stage: Stage) -> Made:
    lease = stage.landed(DONE)
    fork_id = stage.name("fork")

    def check(one: m.RunRecord, two: m.RunRecord) -> None:
        assert (one.run_id, two.run_id, len(stage.all())) == (fork_id, fork_id, 2)

    fork = call("fork", lease.run_id, scope=stage.tenant, new_run_id=fork_id, from_step=0)
    return fork, fork, check


def firing(stage: Stage) -> m.Firing:
    """A schedule that is due, and what fires it."""
    instant = stage.arena.now()
    spec = m.ScheduleSpec(
        schedule_id="s", name="f", cron="* * * * *", tz="UTC", input="1", next_fire_at=instant, queue=stage.queue
    )
    stage.do(stage.store.put_schedule(spec, scope=stage.tenant))
    run = stage.new(schedule_id="s", scheduled_for=instant)
    link: dict[str, Any] = {"schedule_id": "s", "tenant": stage.tenant, "expected": instant}
    return m.Firing(**link, next_fire_at=instant + SECOND, runs=(run,))


@PAIRS.append
def fire_and_fire_make_one_run_of_a_slot(stage: Stage) -> Made:
    one = firing(stage)
    two = m.Firing(
        **{name: getattr(one, name) for name in ("schedule_id", "tenant", "expected", "next_fire_at")}, runs=()
    )
    other = stage.new(schedule_id="s", scheduled_for=one.expected)
    two = m.Firing(
        schedule_id="s", tenant=stage.tenant, expected=one.expected, next_fire_at=one.next_fire_at, runs=(other,)
    )

    def check(*answers: list[m.Submitted] | None) -> None:
        assert sum(answer is not None for answer in answers) == 1
        assert len(stage.all()) == 1

    return call("fire", one), call("fire", two), check


@PAIRS.append
def fire_and_pause_it_fires_before_or_not_at_all(stage: Stage) -> Made:
    one = firing(stage)

    def check(fired: list[m.Submitted] | None, paused: bool) -> None:
        assert paused
        assert len(stage.all()) == (fired is not None)
        _, due = stage.do(stage.store.due_schedules(scope=stage.tenant, limit=10))
        assert list(due) == []

    return call("fire", one), call("pause_schedule", "s", scope=stage.tenant, paused=True), check


@PAIRS.append
def fire_and_remove_leave_a_run_or_none(stage: Stage) -> Made:
    one = firing(stage)

    def check(fired: list[m.Submitted] | None, removed: bool) -> None:
        assert removed
        assert len(stage.all()) == (fired is not None)
        assert list(stage.do(stage.store.schedules(scope=stage.tenant))) == []

    return call("fire", one), call("remove_schedule", "s", scope=stage.tenant), check


@PAIRS.append
def promote_and_promote_make_each_due_run_ready_once(stage: Stage) -> Made:
    ids = stage.submit(6, delay=SECOND)
    stage.tick(2 * SECOND)

    def check(one: m.Promoted, two: m.Promoted) -> None:
        assert one.count + two.count == 6
        assert len(stage.claim()) == len(ids)

    promote = call("promote", scope=stage.tenant, limit=4)
    return promote, promote, check


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.__name__)
def test_pair(arena: Arena, pair: Pair) -> None:
    arena.trials(pair)


def test_64_submitters_of_one_key_get_one_run(arena: Arena) -> None:
    for trial in range(5):
        stage = Stage(arena)
        calls = [call("enqueue", [stage.new(idempotency_key=f"k{trial}")]) for _ in range(64)]
        near, far = arena.race(calls[::2], calls[1::2])
        answers = [one[0] for one in [*near, *far]]
        assert sorted(one.disposition for one in answers) == ["created", *["existing"] * 63]
        assert {one.run.run_id for one in answers} == {run.run_id for run in stage.all()}
