"""The five races that waiting runs live by, each carried to the end: no lost wake, one terminal state, a true answer to a cancel.

signal/suspend, child/suspend, cancel/complete, cancel/suspend, retry/purge (semantics 31, 32, 43, 50, 61). The test files of the three
stores run them with `DURABLE_WAIT_RACES` trials, a fifth for each; see `arena.py` for what a trial is.
"""

from __future__ import annotations

import collections
import os

from races.arena import BROKEN, DONE, SECOND, STOPPED, Call, Check, Pair, Stage, asleep, call, record
from races.test_races_around import signal

from durable import model as m
from durable.errors import NotFound

Made = tuple[Call, Call, Check]
WAITS: list[Pair] = []
RACES = int(os.environ.get("DURABLE_WAIT_RACES", "1000"))
EACH = RACES // 5
ORDERS: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
"""How often which of the two came first: printed, so that a race that always goes one way is seen."""


def _holder(stage: Stage, lease: m.Lease) -> m.Lease:
    """Who holds the run after the race: its first holder, or the one that claims it now. Nobody else can."""
    run = stage.run(lease.run_id)
    assert run.status in ("running", "pending"), f"it sleeps: {run}"
    if run.status == "running":
        assert not _every_tenth(stage) or stage.claim() == []
        return lease
    (claimed,) = stage.claim()
    assert stage.do(stage.store.settle([(lease, BROKEN)])) == ["lost"]
    return claimed


def _lands(stage: Stage, lease: m.Lease, outcome: m.Outcome, status: str) -> None:
    """It lands once; nothing that comes later moves it."""
    assert stage.do(stage.store.settle([(lease, outcome)])) == ["landed"]
    assert stage.do(stage.store.settle([(lease, BROKEN)])) == ["lost"]
    assert stage.run(lease.run_id).status == status
    if _every_tenth(stage):
        assert stage.do(stage.store.request_cancel([lease.run_id], scope=stage.tenant)) == [False]
        assert (stage.claim(), stage.run(lease.run_id).status) == ([], status)


def _every_tenth(stage: Stage) -> bool:
    """What no race is about is looked at now and then."""
    return stage.arena.stages % 10 == 0


@WAITS.append
def signal_and_suspend(stage: Stage) -> Made:
    lease = stage.held()

    def check(seq: int, settled: list[str]) -> None:
        ORDERS["signal/suspend"]["suspend first" if settled == ["landed"] else "signal first"] += 1
        assert (seq, settled[0] in ("landed", "woken")) == (1, True)
        holder = _holder(stage, lease)
        assert (holder is lease) == (settled == ["woken"])
        assert [one.seq for one in stage.inbox(holder).signals] == [1]
        _lands(stage, holder, DONE, "completed")

    return call("send", signal(lease.run_id), scope=stage.tenant), call("settle", [(lease, asleep())]), check


@WAITS.append
def child_and_suspend(stage: Stage) -> Made:
    parent, (child,) = stage.parent(1)

    def check(landed: list[str], settled: list[str]) -> None:
        ORDERS["child/suspend"]["suspend first" if settled == ["landed"] else "child first"] += 1
        assert (landed, settled[0] in ("landed", "woken")) == (["landed"], True)
        holder = _holder(stage, parent)
        assert (holder is parent) == (settled == ["woken"])
        assert [one.run_id for one in stage.inbox(holder).children] == [child.run_id]
        _lands(stage, holder, DONE, "completed")

    return call("settle", [(child, DONE)]), call("settle", [(parent, asleep(wake_after=1))]), check


@WAITS.append
def cancel_and_complete(stage: Stage) -> Made:
    lease = stage.held()

    def check(answer: list[bool], settled: list[str]) -> None:
        ORDERS["cancel/complete"]["complete first" if settled == ["landed"] else "cancel first"] += 1
        assert (answer, settled) in (([True], ["woken"]), ([False], ["landed"]))
        if answer == [True]:
            assert stage.inbox(lease).cancel_requested
            _lands(stage, lease, STOPPED, "cancelled")
        else:
            assert stage.run(lease.run_id).cancel_requested_at is None
            assert stage.do(stage.store.settle([(lease, STOPPED)])) == ["lost"]
            assert stage.run(lease.run_id).status == "completed"

    return call("request_cancel", [lease.run_id], scope=stage.tenant), call("settle", [(lease, DONE)]), check


@WAITS.append
def cancel_and_suspend(stage: Stage) -> Made:
    lease = stage.held()

    def check(answer: list[bool], settled: list[str]) -> None:
        ORDERS["cancel/suspend"]["suspend first" if settled == ["landed"] else "cancel first"] += 1
        assert (answer, settled[0] in ("landed", "woken")) == ([True], True)
        if settled == ["landed"]:  # it has no record: the claim that finds the ask lands it (45)
            assert (stage.run(lease.run_id).status, stage.claim()) == ("pending", [])
            assert stage.run(lease.run_id).status == "cancelled"
            assert stage.do(stage.store.settle([(lease, DONE)])) == ["lost"]
        else:
            assert stage.do(stage.store.settle([(lease, DONE)])) == ["woken"]
            _lands(stage, lease, STOPPED, "cancelled")

    return call("request_cancel", [lease.run_id], scope=stage.tenant), call("settle", [(lease, asleep())]), check


@WAITS.append
def retry_and_purge(stage: Stage) -> Made:
    lease = stage.held(keep=SECOND)
    stage.do(stage.store.append([(lease, record("a"))]))
    stage.do(stage.store.settle([(lease, BROKEN)]))
    stage.tick(2 * SECOND)

    def check(retried: object, purged: int) -> None:
        ORDERS["retry/purge"]["purge first" if purged else "retry first"] += 1
        if purged:
            assert (stage.find(lease.run_id), retried) == (None, NotFound)
            return
        assert isinstance(retried, m.RunRecord)
        (claimed,) = stage.claim()
        assert [one.step_id for one in stage.journal(lease.run_id)] == ["a"]
        _lands(stage, claimed, DONE, "completed")

    return (
        call("retry", lease.run_id, scope=stage.tenant, attempts=1),
        call("purge", scope=stage.tenant, limit=10),
        check,
    )


__all__ = ["EACH", "ORDERS", "WAITS"]
