"""`durable.clock` and `durable.portal`: the promises of both."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from durable import clock
from durable.errors import Misuse, WorkerStopped
from durable.portal import Portal, end_tasks


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts suspend")
def test_boottime_reads_the_clock_that_counts_suspend() -> None:
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000
    assert before <= clock.boottime() <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000


def test_boottime_is_the_monotonic_clock_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_BOOTTIME", None)
    before = time.monotonic_ns() // 1_000
    assert before <= clock.boottime() <= time.monotonic_ns() // 1_000


def test_boottime_does_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock.boottime()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert clock.boottime() >= before
    assert clock.system_micros() == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**15), st.floats(0.0, 1.0, exclude_max=True), st.floats(0.0, 1.0))
def test_a_jittered_delay_is_a_whole_number_within_its_spread(delay: int, random: float, spread: float) -> None:
    answer = clock.jittered(delay, random, spread=spread)
    assert type(answer) is int
    assert answer >= 0
    assert abs(answer - delay) <= delay * spread + 1


def test_the_ends_of_the_spread_are_reached() -> None:
    assert clock.jittered(1_000, 0.0) == 800
    assert clock.jittered(1_000, 0.5) == 1_000
    assert clock.jittered(1_000, 0.999_999_999) == 1_200


class Ours(Exception):
    pass


async def double(number: int, *, plus: int = 0) -> int:
    await asyncio.sleep(0)
    return number * 2 + plus


async def fail(error: BaseException) -> None:
    raise error


async def forever(started: threading.Event, ended: list[str]) -> None:
    try:
        started.set()
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        ended.append("cancelled")
        raise


def test_a_call_returns_what_the_coroutine_returns() -> None:
    with Portal() as portal:
        assert portal.call(double, 4, plus=1) == 9


def test_what_the_coroutine_raises_comes_out_as_it_is() -> None:
    error = Ours("x")
    with Portal() as portal:
        with pytest.raises(Ours) as caught:
            portal.call(fail, error)
        assert caught.value is error
        with pytest.raises(TimeoutError):
            portal.call(fail, TimeoutError())
        with pytest.raises(asyncio.CancelledError):
            portal.call(fail, asyncio.CancelledError())
        with pytest.raises(SystemExit):
            portal.call(fail, SystemExit())
        assert portal.call(double, 1) == 2  # and it goes on


def test_all_calls_run_on_one_loop_that_is_not_the_callers() -> None:
    async def where() -> tuple[int, asyncio.AbstractEventLoop]:
        return threading.get_ident(), asyncio.get_running_loop()

    with Portal() as portal, concurrent.futures.ThreadPoolExecutor(8) as pool:
        places = {*pool.map(lambda _: portal.call(where), range(40))}
    assert len(places) == 1
    assert threading.get_ident() not in {ident for ident, _ in places}


def test_submit_returns_at_once_and_its_future_can_be_cancelled() -> None:
    started, ended = threading.Event(), list[str]()
    with Portal() as portal:
        future = portal.submit(forever, started, ended)
        assert started.wait(30)
        assert future.cancel()
    assert ended == ["cancelled"]


def test_closing_cancels_and_awaits_what_runs_and_the_waiting_caller_is_told() -> None:
    started, ended, answers = threading.Event(), list[str](), list[BaseException]()
    portal = Portal().start()

    def wait() -> None:
        try:
            portal.call(forever, started, ended)
        except BaseException as error:
            answers.append(error)

    caller = threading.Thread(target=wait)
    caller.start()
    assert started.wait(30)
    portal.close()
    assert ended == ["cancelled"]
    caller.join(30)
    assert [type(answer) for answer in answers] == [WorkerStopped]


def test_a_closed_portal_refuses_calls_may_be_closed_again_and_started_again() -> None:
    portal = Portal()
    with pytest.raises(WorkerStopped):
        portal.call(double, 1)
    portal.start()
    portal.start()
    portal.close()
    portal.close()
    with pytest.raises(WorkerStopped):
        portal.call(double, 1)
    portal.start()
    assert portal.call(double, 1) == 2
    portal.close()


def test_a_blocking_call_or_close_on_the_portals_own_thread_is_misuse() -> None:
    with Portal() as portal:

        async def inside() -> int:
            with pytest.raises(Misuse):
                portal.close()
            return portal.call(double, 1)

        with pytest.raises(Misuse):
            portal.call(inside)
        assert portal.call(double, 1) == 2  # the refused close has closed nothing


def test_threads_that_start_it_at_once_start_it_once() -> None:
    portal = Portal("raced")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda _: portal.start(), range(16)))
    assert [thread.name for thread in threading.enumerate()].count("raced") == 1
    portal.close()


def test_the_thread_ends_with_the_portal() -> None:
    portal = Portal("named").start()
    assert "named" in {thread.name for thread in threading.enumerate()}
    portal.close()
    assert "named" not in {thread.name for thread in threading.enumerate()}


def test_an_interrupt_of_the_waiting_thread_cancels_the_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), list[str]()

    def interrupted(future: concurrent.futures.Future[object], timeout: float | None = None) -> object:
        assert started.wait(30)
        raise KeyboardInterrupt

    with Portal() as portal, monkeypatch.context() as patched:
        patched.setattr(concurrent.futures.Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            portal.call(forever, started, ended)
    assert ended == ["cancelled"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_in_a_forked_child_the_portal_is_closed_instead_of_hanging() -> None:
    with Portal() as portal:
        child = os.fork()
        if child == 0:
            try:
                portal.call(double, 1)
            except WorkerStopped:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert portal.call(double, 1) == 2


async def test_a_task_that_swallows_a_cancel_is_cancelled_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a driver does that is in the middle of something: the loop around it goes on (seen with pymongo, at the stop of a worker)."""
    monkeypatch.setattr("durable.portal.ASK_AGAIN", 0.01)
    swallowed: list[str] = []

    async def loop() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if len(swallowed) == 2:
                    raise
                swallowed.append("once more")

    async def ends() -> None:
        await asyncio.sleep(60)

    tasks = [asyncio.create_task(loop()), asyncio.create_task(ends())]
    await asyncio.sleep(0)
    await end_tasks(tasks)
    assert [task.cancelled() for task in tasks] == [True, True]
    assert len(swallowed) == 2
    await end_tasks([])
