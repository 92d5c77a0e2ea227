"""Leases, cancels, suspension and stops: semantics 13-17, 28a, 30-32, 43-47, end to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from engine.conftest import Seen, until

import durable
from durable import Registry
from durable._engine.leases import Leases
from durable.activation import Activation
from durable.errors import StoreUnavailable
from durable.events import (
    BodyAbandoned,
    ChoreFailed,
    EngineFault,
    FlushFailed,
    LeaseLapsed,
    RenewalFailed,
    RunSettled,
    RunsReclaimed,
)
from durable.model import ALL, Claimed, ClaimRequest, ErrorKind, HandedBack, Outcome, Renewal, Renewed, Status
from durable.settings import SECOND

declared = Registry("test_holding")
log: list[str] = []
gate: asyncio.Event


@pytest.fixture(autouse=True)
async def _fresh() -> None:
    global gate
    gate = asyncio.Event()
    log.clear()


WORD = durable.Signal("word", str)


async def note(text: str) -> str:
    log.append(text)
    return text


async def at_the_gate(text: str) -> str:
    log.append(f"{text} began")
    await gate.wait()
    log.append(f"{text} ended")
    return text


@durable.function(registry=declared)
async def gated(ctx: durable.Context, text: str) -> str:
    await ctx.step(note, "first")
    return await ctx.step(at_the_gate, text)


@durable.function(registry=declared)
async def sleeps(ctx: durable.Context, length: float) -> str:
    await ctx.step(note, "before")
    await ctx.sleep(length)
    return await ctx.step(note, "after")


@durable.function(registry=declared)
def sleeps_in_a_thread(ctx: durable.SyncContext, length: float) -> str:
    ctx.sleep(length)
    return "awake"


@durable.function(registry=declared)
async def cleans_up(ctx: durable.Context) -> None:
    try:
        await ctx.step(at_the_gate, "work")
    except asyncio.CancelledError:
        async with ctx.shield():
            await ctx.step(note, "cleaned")
        raise


@durable.function(registry=declared)
async def swallows(ctx: durable.Context) -> str:
    try:
        await ctx.step(at_the_gate, "work")
    except asyncio.CancelledError:
        pass
    return "went on"


@durable.function(registry=declared)
async def refuses(ctx: durable.Context) -> str:
    await ctx.refuse_cancel()
    return await ctx.step(at_the_gate, "past the pivot")


@durable.function(registry=declared)
async def listens(ctx: durable.Context) -> str:
    return await ctx.wait_signal(WORD)


@durable.function(registry=declared)
async def blocks_the_loop(ctx: durable.Context, seconds: float) -> str:
    return await ctx.step(hog, seconds)


async def hog(seconds: float) -> str:
    time.sleep(seconds)  # noqa: ASYNC251 -- it is what must not be done, and what must do no harm
    return "done"


STAYS = {"poll": "50ms", "poll_idle": "50ms", "park_after": "2h"}
"""Whatever rests stays in memory, however long it takes."""


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, functions=declared, **{"grace": "2s", **options})


def status_of(run: durable.Run[Any], *wanted: str) -> Any:
    async def found() -> bool:
        return (await run.refresh()).status in wanted

    return found


# -- suspension (30, 31) ------------------------------------------------------------------------------------------------------


async def test_a_run_at_rest_gives_its_slot_back_at_once(url: str) -> None:
    async with durable.Client(url, settings=STAYS) as client, worker(client, concurrency=1):
        resting = await client.start(sleeps, 3_600)
        await until(lambda: "before" in log)
        other = await client.start(sleeps, 0)
        assert await other.result() == "after"
        assert (await resting.refresh()).status == "running"
        assert await resting.cancel()


async def test_a_run_whose_wait_is_long_is_suspended_at_once_and_comes_back(url: str) -> None:
    async with durable.Client(url, settings={"poll": "50ms", "park_after": "100ms"}) as client:
        seen = Seen()
        client.events.attach(seen.append)
        async with worker(client) as working:
            run = await client.start(sleeps, 0.6)
            await until(lambda: seen.of(RunSettled), "the suspension")
            await until(lambda: working.held == 0)
            assert await run.result() == "after"
        assert [event.outcome for event in seen.of(RunSettled)] == ["Suspended", "Completed"]
        assert (log.count("before"), run.attempts) == (1, 2)


async def test_a_short_rest_stays_in_memory_and_needs_no_second_claim(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(sleeps, 0.05)
        assert await run.result() == "after"
        blocking = await client.start(sleeps_in_a_thread, 0.05)
        assert await blocking.result() == "awake"
    assert (run.attempts, blocking.attempts) == (1, 1)


async def test_beyond_max_parked_resting_runs_leave_memory_at_once(url: str) -> None:
    async with durable.Client(url, settings={"poll": "50ms", "max_parked": 1}) as client, worker(client) as working:
        runs = [await client.start(sleeps, 1) for _ in range(4)]
        await until(lambda: log.count("before") == 4)
        await until(lambda: working.held <= 1)
        assert [await run.result() for run in runs] == ["after"] * 4


async def test_a_signal_wakes_a_run_in_memory_and_a_suspended_one(url: str) -> None:
    async with durable.Client(url, settings={"poll": "50ms", "park_after": "300ms"}) as client, worker(client):
        quick = await client.start(listens)
        await until(status_of(quick, "running", "suspended"))
        await client.signal(quick.id, WORD, "now")
        assert await quick.result() == "now"
        slow = await client.start(listens)
        await until(status_of(slow, "suspended"), "the suspension")
        await slow.signal(WORD, "later")
        assert await slow.result() == "later"


async def test_a_signal_before_the_wait_is_not_lost_and_one_to_a_landed_run_is_a_conflict(
    client: durable.Client,
) -> None:
    run = await client.start(listens)
    await client.signal(run.id, WORD, "early", id="one")
    await client.signal(run.id, WORD, "early", id="one")
    async with worker(client):
        assert await run.result() == "early"
    with pytest.raises(durable.Conflict):
        await run.signal(WORD, "too late")
    with pytest.raises(durable.NotFound):
        await client.signal("nothing", WORD, "x")


async def test_a_suspension_that_is_answered_woken_reads_the_news_and_goes_on_without_another_claim(url: str) -> None:
    async with durable.Client(url, settings={"poll": "30s", "park_after": "10ms"}) as client:
        seen = Seen()
        client.events.attach(seen.append)
        settle = client.store.settle
        run = await client.start(listens)

        async def after_a_signal(entries: Sequence[Any]) -> Any:
            if not log:
                log.append("signalled")
                await client.signal(run.id, WORD, "just in time")
            return await settle(entries)

        client.store.settle = after_a_signal  # type: ignore[method-assign]
        async with worker(client):
            assert await run.result() == "just in time"
        assert (run.attempts, [event.outcome for event in seen.of(RunSettled)]) == (1, ["Completed"])


async def test_a_store_that_is_gone_when_a_suspension_is_answered_woken_is_a_lost_lease_and_no_fault_of_the_engine(
    url: str,
) -> None:
    async with durable.Client(url, settings={"poll": "100ms", "park_after": "10ms"}) as client:
        seen = Seen()
        client.events.attach(seen.append)
        settle, inbox = client.store.settle, client.store.inbox
        run = await client.start(listens)
        gone = False

        async def after_a_signal(entries: Sequence[Any]) -> Any:
            nonlocal gone
            if not log:
                log.append("signalled")
                await client.signal(run.id, WORD, "still there")
                gone = True
            return await settle(entries)

        async def no_answer(leases: Sequence[Any]) -> Any:
            if gone:
                raise StoreUnavailable("pulled the plug")
            return await inbox(leases)

        async def no_renewal(renewals: Sequence[Renewal], *, lease: int) -> Sequence[Renewed]:
            raise StoreUnavailable("pulled the plug")

        client.store.settle, client.store.inbox = after_a_signal, no_answer  # type: ignore[method-assign]
        renew, client.store.renew = client.store.renew, no_renewal  # type: ignore[method-assign]
        async with worker(client, lease="1s"):
            await until(lambda: gone and seen.of(RunSettled), "the end of the lease")
            gone = False
            client.store.renew = renew  # type: ignore[method-assign]
            assert await run.result() == "still there"
        assert seen.of(EngineFault) == []


# -- cancel (43-47) -----------------------------------------------------------------------------------------------------------


async def test_a_run_that_was_never_claimed_is_cancelled_at_once(client: durable.Client) -> None:
    run = await client.start(gated, "x")
    assert await run.cancel()
    with pytest.raises(durable.RunCancelled):
        await run.result()
    assert not await run.cancel()
    assert not await client.cancel("nothing")


async def test_a_cancel_reaches_a_running_body_and_its_shielded_steps_still_run(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(cleans_up)
        await until(lambda: "work began" in log)
        assert await run.cancel(reason="enough")
        with pytest.raises(durable.RunCancelled):
            await run.result()
    assert log == ["work began", "cleaned"]
    kinds = [record.kind for record in await client.journal(run.id)]
    assert "cancel" in kinds


async def test_a_body_that_swallows_the_cancel_lands_cancelled(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(swallows)
        await until(lambda: "work began" in log)
        await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result()
    assert run.error_kind == ErrorKind.CANCELLED


async def test_past_its_pivot_a_run_refuses_the_cancel_and_completes(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(refuses)
        await until(lambda: "past the pivot began" in log)
        await run.cancel()
        gate.set()
        assert await run.result() == "past the pivot"
    assert run.record.cancel_refused_at is not None


async def test_a_cancel_wakes_a_suspended_run_which_lands_cancelled(url: str) -> None:
    async with durable.Client(url, settings={"poll": "50ms"}) as client, worker(client):
        run = await client.start(sleeps, 3_600)
        await until(status_of(run, "suspended"), "the suspension")
        assert await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result()
    assert log == ["before"]


async def test_an_ask_that_is_found_when_the_body_has_returned_lands_cancelled(client: durable.Client) -> None:
    settle = client.store.settle
    run = await client.start(sleeps, 0)

    async def after_an_ask(entries: Sequence[Any]) -> Any:
        if "asked" not in log:
            log.append("asked")
            assert await client.cancel(run.id)
        return await settle(entries)

    client.store.settle = after_an_ask  # type: ignore[method-assign]
    async with worker(client):
        with pytest.raises(durable.RunCancelled):
            await run.result()
    assert log == ["before", "after", "asked"]


# -- leases (13-15) -----------------------------------------------------------------------------------------------------------


async def test_a_blocked_event_loop_keeps_its_leases(url: str) -> None:
    async with durable.Client(url, settings={"poll": "50ms"}) as client:
        seen = Seen()
        client.events.attach(seen.append)
        async with worker(client, lease="4s"):
            run = await client.start(blocks_the_loop, 5)
            assert await run.result() == "done"
        assert run.attempts == 1
        assert not seen.of(LeaseLapsed)


async def test_a_lost_lease_puts_the_body_aside_and_writes_nothing(client: durable.Client, seen: Seen) -> None:
    renew = client.store.renew
    lost: list[bool] = []

    async def stolen(renewals: Sequence[Renewal], *, lease: int) -> Sequence[Renewed]:
        if not lost and "x began" in log:
            lost.append(True)
            return [Renewed(state="lost") for _ in renewals]
        return await renew(renewals, lease=lease)

    client.store.renew = stolen  # type: ignore[method-assign]
    async with worker(client, lease="3s") as working:
        run = await client.start(gated, "x")
        await until(lambda: seen.of(LeaseLapsed), "the lost lease")
        await until(lambda: working.held == 0)
        gate.set()
        assert await run.result() == "x"  # swept, and done by the next claim
    assert "x ended" in log
    assert (log.count("first"), log.count("x began"), run.attempts) == (1, 2, 2)
    assert seen.of(RunsReclaimed)


async def test_an_error_of_the_renewal_proves_nothing_until_the_lease_has_ended(
    client: durable.Client, seen: Seen
) -> None:
    renew = client.store.renew
    broken = True

    async def failing(renewals: Sequence[Renewal], *, lease: int) -> Sequence[Renewed]:
        if broken:
            raise StoreUnavailable("no line")
        return await renew(renewals, lease=lease)

    client.store.renew = failing  # type: ignore[method-assign]
    async with worker(client, lease="9s"):
        run = await client.start(gated, "x")
        await until(lambda: len(seen.of(RenewalFailed)) >= 2, "failed renewals")
        broken = False
        gate.set()
        assert await run.result() == "x"
    assert not seen.of(LeaseLapsed)
    assert run.attempts == 1


async def test_a_lease_that_could_not_be_renewed_in_time_is_given_up(client: durable.Client, seen: Seen) -> None:
    renew = client.store.renew

    async def failing(renewals: Sequence[Renewal], *, lease: int) -> Sequence[Renewed]:
        if not seen.of(LeaseLapsed):
            raise StoreUnavailable("no line")
        return await renew(renewals, lease=lease)

    client.store.renew = failing  # type: ignore[method-assign]
    async with worker(client, lease="3s"):
        run = await client.start(gated, "x")
        await until(lambda: seen.of(LeaseLapsed), "the lease given up")
        gate.set()
        assert await run.result() == "x"
    assert run.attempts == 2


async def test_records_and_settles_are_repeated_while_the_store_gives_no_answer(
    client: durable.Client, seen: Seen
) -> None:
    append, settle = client.store.append, client.store.settle
    failed: list[str] = []

    async def late_append(records: Sequence[Any]) -> Any:
        answer = await append(records)
        if failed.count("append") < 3:
            failed.append("append")
            raise StoreUnavailable("the answer was lost")
        return answer

    async def late_settle(entries: Sequence[Any]) -> Any:
        answer = await settle(entries)
        if failed.count("settle") < 3:
            failed.append("settle")
            raise StoreUnavailable("the answer was lost")
        return answer

    client.store.append, client.store.settle = late_append, late_settle  # type: ignore[method-assign]
    async with worker(client):
        assert await client.run(sleeps, 0) == "after"
    assert log == ["before", "after"]
    assert len(seen.of(FlushFailed)) == 6


async def test_a_claim_whose_answer_was_lost_is_asked_again_and_loses_nothing(client: durable.Client) -> None:
    claim = client.store.claim
    failed: list[str] = []

    async def late(request: Any) -> Any:
        answer = await claim(request)
        if answer and len(failed) < 2:
            failed.append(request.mark)
            raise StoreUnavailable("the answer was lost")
        return answer

    client.store.claim = late  # type: ignore[method-assign]
    run = await client.start(sleeps, 0)
    async with worker(client):
        assert await run.result() == "after"
    assert run.attempts == 1
    assert len(failed) == 2
    assert failed[0] == failed[1]


async def test_a_submit_whose_answer_was_lost_makes_one_run(client: durable.Client) -> None:
    enqueue = client.store.enqueue
    failed: list[int] = []

    async def late(runs: Sequence[Any], *, tx: object | None = None) -> Any:
        answer = await enqueue(runs, tx=tx)
        if not failed:
            failed.append(1)
            raise StoreUnavailable("the answer was lost")
        return answer

    client.store.enqueue = late  # type: ignore[method-assign]
    run = await client.start(sleeps, 0)
    assert await client.count() == 1
    assert run.status == "pending"


async def test_a_run_that_kills_its_workers_is_taken_alone_and_lands_failed_past_the_limit(
    client: durable.Client,
) -> None:
    store = client.store
    run = await client.start(gated, "x")
    from durable.model import ClaimRequest

    async def crash(number: int) -> int:
        request = ClaimRequest(
            mark=f"crash {number}", queues={"default": 1}, functions=[("gated", None)], limit=1, lease=1_000, family="3.11",
            scope=ALL, alone=True,
        )  # fmt: skip
        return len(await store.claim(request))

    for number in range(3):
        assert await crash(number) == 1
        await until(lambda: _swept(client), "the sweep")
    record = (await run.refresh()).record
    assert (record.status, record.reclaims, record.blocked_on) == (Status.PENDING, 3, "alone")
    async with worker(client, concurrency=4):
        gate.set()
        assert await run.result() == "x"


async def _swept(client: durable.Client) -> bool:
    return bool((await client.store.sweep(scope=ALL, limit=10, max_reclaims=5)).returned)


async def test_a_worker_that_is_never_idle_makes_room_for_a_run_that_must_be_alone(client: durable.Client) -> None:
    store = client.store
    from durable.model import ClaimRequest

    poison = await client.start(gated, "alone")
    for number in range(2):
        request = ClaimRequest(
            mark=f"crash {number}", queues={"default": 1}, functions=[("gated", None)], limit=1, lease=1_000, family="3.11",
            scope=ALL, alone=True,
        )  # fmt: skip
        assert len(await store.claim(request)) == 1
        await until(lambda: _swept(client), "the sweep")
    assert (await poison.refresh()).record.blocked_on == "alone"
    gate.set()
    stop = False

    async def always_more() -> None:
        while not stop:
            await client.start(sleeps, 0.2)
            await asyncio.sleep(0.02)

    feeding = asyncio.create_task(always_more())
    async with worker(client, concurrency=2, lease="1s"):
        assert await poison.result() == "alone"
        stop = True
        await feeding


# -- stopping (16) ------------------------------------------------------------------------------------------------------------


async def test_a_stop_lets_bodies_finish_within_the_grace_period(client: durable.Client) -> None:
    async with worker(client, grace="20s"):
        run = await client.start(gated, "x")
        await until(lambda: "x began" in log)
        asyncio.get_running_loop().call_later(0.2, gate.set)
    assert (await run.refresh()).status == "completed"


async def test_after_the_grace_period_runs_are_handed_back_claimable_now(client: durable.Client, seen: Seen) -> None:
    async with worker(client, grace="100ms"):
        run = await client.start(gated, "x")
        await until(lambda: "x began" in log)
    record = (await run.refresh()).record
    assert (record.status, record.available_at, record.failures, record.attempts) == (Status.PENDING, None, 0, 1)
    gate.set()
    async with worker(client):
        assert await run.result() == "x"
    assert log.count("first") == 1
    assert not seen.of(BodyAbandoned)


async def test_a_stop_suspends_what_rests(url: str) -> None:
    async with durable.Client(url, settings=STAYS) as client:
        async with worker(client, grace="20s"):
            run = await client.start(sleeps, 3_600)
            await until(lambda: "before" in log)
            await until(status_of(run, "running"))
        assert (await run.refresh()).status in ("suspended", "pending")


async def test_the_renewals_of_a_worker_that_stops_before_they_began_end_at_once(client: durable.Client) -> None:
    async def register() -> None: ...

    leases = Leases(client.store, lease=60 * SECOND, events=client.events, register=register)
    leases.stop()
    async with asyncio.timeout(30):
        await leases.run()


async def test_a_worker_registers_itself_and_leaves_the_registry_when_it_stops(client: durable.Client) -> None:
    async with worker(client) as working:
        (record,) = await client.all_tenants().workers()
        assert (record.worker_id, record.pid) == (working.worker_id, os.getpid())
        assert ("gated", None) in record.functions
        assert working.healthy
    assert list(await client.all_tenants().workers()) == []
    assert not working.healthy or working.held == 0


async def test_a_failing_chore_is_reported_makes_the_health_false_and_recovers(
    client: durable.Client, seen: Seen
) -> None:
    promote = client.store.promote
    broken = True

    async def failing(*, scope: Any, limit: int) -> Any:
        if broken:
            raise StoreUnavailable("no line")
        return await promote(scope=scope, limit=limit)

    client.store.promote = failing  # type: ignore[method-assign]
    async with worker(client) as working:
        await until(lambda: not working.healthy, "bad health")
        assert seen.of(ChoreFailed)[0].chore == "promote"
        assert await client.run(sleeps, 0) == "after"
        broken = False
        await until(lambda: working.healthy, "good health")


async def test_a_sink_that_raises_changes_nothing(client: durable.Client) -> None:
    def broken(_event: object) -> None:
        raise RuntimeError("a bad sink")

    client.events.attach(broken)
    async with worker(client):
        assert await client.run(sleeps, 0) == "after"


PROGRAM = """
import asyncio, sys, durable

async def work(n: int) -> int:
    print("began", n, flush=True)
    await asyncio.sleep(float(sys.argv[2]))
    print("ended", n, flush=True)
    return n

@durable.function
async def job(ctx: durable.Context, n: int) -> int:
    return await ctx.step(work, n)

def tell(event):
    if isinstance(event, durable.events.WorkerDraining):
        print("draining", flush=True)

async def main() -> None:
    async with durable.Client(sys.argv[1]) as client:
        client.events.attach(tell)
        await client.start(job, 7)
        await durable.Worker(client, grace=sys.argv[3]).run()
    print("left in good order", flush=True)

durable.run(main)
"""


def _process(tmp_path: Path, url: str, takes: str, grace: str) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    return _started(program, url, takes, grace)


def _started(program: Path, *arguments: str) -> subprocess.Popen[str]:
    made = subprocess.Popen([sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "began 7\n"
    return made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_sigterm_and_sigint_drain_and_the_process_exits_cleanly(
    tmp_path: Path, url: str, number: signal.Signals
) -> None:
    process = _process(tmp_path, url, "0.5", "20s")
    process.send_signal(number)
    out, _ = await asyncio.to_thread(process.communicate, timeout=60)
    assert (out, process.returncode) == ("draining\nended 7\nleft in good order\n", 0)
    async with durable.Client(url) as client:
        assert [run.status async for run in client.runs()] == ["completed"]


async def test_a_second_signal_ends_the_grace_period_at_once(tmp_path: Path, url: str) -> None:
    process = _process(tmp_path, url, "3600", "3600s")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "draining\n"  # two that come at once are one
    async with durable.Client(url) as client:
        process.send_signal(signal.SIGTERM)
        out, _ = await asyncio.to_thread(process.communicate, timeout=60)
        assert (out, process.returncode) == ("left in good order\n", 0)
        (run,) = [run async for run in client.runs()]
        assert (run.status, run.attempts) == ("pending", 1)


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_signal_that_comes_while_a_worker_starts_stops_it_in_good_order(
    client: durable.Client, signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = client.store.register
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(record: Any) -> None:
        asked.set()
        await answer.wait()
        await register(record)

    monkeypatch.setattr(client.store, "register", slow)
    working = worker(client)
    running = asyncio.ensure_future(working.run())
    await asyncio.wait_for(asked.wait(), 30)
    for _ in range(signals):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
    if signals == 1:  # with two it does not wait for the store any more
        answer.set()
    await asyncio.wait_for(running, 30)
    assert await client.workers() == []


async def test_a_worker_that_can_not_start_leaves_the_registry(client: durable.Client) -> None:
    @durable.function(registry=Registry(), cron="0 9 * * *")
    async def takes_arguments(ctx: durable.Context, missing: int) -> None: ...

    with pytest.raises(durable.RegistrationError, match="missing"):
        await durable.Worker(client, functions=[takes_arguments]).run()
    assert await client.workers() == []


async def test_what_a_killed_worker_held_is_taken_up_by_another(tmp_path: Path, url: str) -> None:
    program = PROGRAM.replace("grace=sys.argv[3]", 'lease="3s"')
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    first = _started(path, url, "3600", "1s")
    first.kill()
    await asyncio.to_thread(first.wait)
    if first.stdout is not None:
        first.stdout.close()

    @durable.function(name="job", registry=Registry("taker"))
    async def job(ctx: durable.Context, n: int) -> int:
        return await ctx.step(work, n)

    async def work(n: int) -> int:
        return n * 10

    async with (
        durable.Client(url, settings={"poll": "50ms"}) as client,
        durable.Worker(client, functions=[job], lease="3s"),
    ):
        (run,) = [run async for run in client.runs()]
        assert await run.result() == 70
        assert run.record.reclaims == 1


async def test_past_the_end_of_its_lease_a_worker_begins_no_step(client: durable.Client, seen: Seen) -> None:
    async with worker(client) as working:
        run = await client.start(sleeps, 3)
        await until(lambda: "before" in log)
        (held,) = working._claims.held.values()
        held.hold.valid_until = 0  # as after a suspend of the machine: nothing has told the worker yet
        await until(lambda: seen.of(LeaseLapsed), "the lease given up")
        await until(lambda: working.held == 0)
    assert log == ["before"]
    assert (await run.refresh()).status == "running"


at_once = most_at_once = 0


async def count() -> None:
    global at_once, most_at_once
    at_once += 1
    most_at_once = max(most_at_once, at_once)
    await asyncio.sleep(0.005)
    at_once -= 1


@durable.function(registry=declared)
async def counts(ctx: durable.Context, nothing: int) -> None:
    await ctx.step(count)


async def test_a_queue_with_a_limit_of_its_own_is_claimed_again_as_soon_as_a_run_of_it_ends(url: str) -> None:
    async with durable.Client(url, settings={"poll": "30s", "poll_idle": "30s"}) as client:
        runs = await client.start_many(counts, range(6))
        async with worker(client, queues={"default": 1}):
            await asyncio.gather(*(run.result() for run in runs))
    assert most_at_once == 1


async def test_a_run_at_rest_gives_the_slot_of_its_queue_back_too_and_takes_it_again_first(
    client: durable.Client,
) -> None:
    async with worker(client, queues={"default": 1}) as working:
        resting = await client.start(sleeps, 4)
        await until(lambda: "before" in log)
        beside = await client.start(gated, "beside")
        await until(lambda: "beside began" in log)
        assert working.slots.taken == 1
        slots = working._claims._own_slots["default"]
        await until(lambda: slots.free < 0, "the end of the rest")  # it is due, but the queue's only slot is taken
        assert "after" not in log
        gate.set()
        assert [await beside.result(), await resting.result()] == ["beside", "after"]


async def test_the_last_free_slots_are_filled_beside_bodies_that_run_for_long(client: durable.Client) -> None:
    async with worker(client, concurrency=8) as working:
        held = [await client.start(gated, str(n)) for n in range(7)]
        await until(lambda: working.held == 7)
        last = await client.start(sleeps, 0)  # one slot of eight is free: less than a quarter
        assert await asyncio.wait_for(last.result(), 30) == "after"
        gate.set()
        assert [await run.result() for run in held] == [str(n) for n in range(7)]


async def test_a_fault_of_the_engine_is_reported_and_hands_the_run_back_with_growing_delay(
    client: durable.Client, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Activation) -> None:
        raise AttributeError("a defect of ours")

    settle = client.store.settle
    settled: list[Outcome] = []

    async def noted(entries: Sequence[tuple[Any, Outcome]]) -> Any:
        settled.extend(outcome for _, outcome in entries)
        return await settle(entries)

    client.store.settle = noted  # type: ignore[method-assign]
    run = await client.start(gated, "x")
    monkeypatch.setattr(Activation, "_proceed", broken)
    async with worker(client):
        await until(lambda: settled and seen.of(EngineFault), "the report")
        assert isinstance(settled[0], HandedBack)
        assert (settled[0].after or 0) >= SECOND // 2, "it would be claimed again at once"
        monkeypatch.undo()
        gate.set()
        assert await run.result() == "x"
    assert run.failures == 0


async def test_no_claim_takes_more_than_half_of_the_slots_so_that_two_groups_of_runs_take_turns(
    client: durable.Client,
) -> None:
    asked: list[int] = []
    claim = client.store.claim

    async def counted(request: ClaimRequest) -> Sequence[Claimed]:
        asked.append(request.limit)
        return await claim(request)

    handles = [await client.start(gated, f"{n}") for n in range(10)]
    with mock.patch.object(client.store, "claim", counted):
        async with durable.Worker(client, functions=declared, concurrency=10):
            await until(lambda: len([line for line in log if line.endswith("began")]) == 10, "all ten at once")
            gate.set()
            for handle in handles:
                await handle.result(timeout=30)
    assert max(asked) == 5
