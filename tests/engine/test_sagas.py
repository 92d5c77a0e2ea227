"""How a run with a saga lands (semantics 49, 50): failed, cancelled or timed out with all undone, or forward_incomplete."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest
from engine.conftest import Seen, until

import durable
from durable import Registry
from durable._engine.worker import REPLAY_FAMILY
from durable.events import RunClaimed, RunRested
from durable.model import ClaimRequest, Status
from durable.settings import HOUR

declared = Registry("test_sagas")
done: list[str] = []
gate = asyncio.Event()


async def book(what: str) -> str:
    done.append(f"book {what}")
    return what


async def unbook(what: str) -> None:
    done.append(f"unbook {what}")


async def fail() -> None:
    raise ValueError("no seat")


async def pass_the_gate() -> None:
    await gate.wait()


@durable.function(registry=declared, retry=durable.Retry(3, initial="1ms"))
async def fails(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await ctx.step(fail)


@durable.function(registry=declared)
async def fails_past_the_pivot(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await saga.pivot()
        await ctx.step(pass_the_gate)
        await ctx.step(fail)


@durable.function(registry=declared)
async def gives_its_pivot_up(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        async with (
            asyncio.TaskGroup() as branches
        ):  # both are recorded in one write, and the failure is delivered first
            branches.create_task(ctx.step(fail))
            branches.create_task(saga.pivot())


@durable.function(registry=declared)
async def refuses_in_its_saga(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await ctx.refuse_cancel()
        await ctx.step(fail)


@durable.function(registry=declared)
def refuses_in_its_saga_in_a_thread(ctx: durable.SyncContext) -> None:
    def note(what: str) -> None:
        done.append(what)

    def stop() -> None:
        raise ValueError("no")

    with ctx.saga() as saga:
        saga.compensate(note, "unbook car")
        saga.step(note, "book car")
        ctx.refuse_cancel()
        ctx.step(stop)


@durable.function(registry=declared)
async def waits(ctx: durable.Context) -> str:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await ctx.sleep("1d")
    return "there"


@durable.function(registry=declared)
async def holds(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await ctx.step(pass_the_gate)


@durable.step(retry=durable.Retry(None, initial="300ms", factor=1))
async def unbook_late(what: str) -> None:
    done.append(f"try to unbook {what}")
    if not gate.is_set():
        raise ConnectionError("the garage does not answer")


@durable.function(registry=declared)
async def undoes_late(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook_late, "car")
        await saga.step(book, "car")
        await ctx.sleep("1d")


@durable.function(registry=declared)
async def rests_in_a_shield(ctx: durable.Context) -> None:
    await ctx.step(book, "car")
    try:
        await ctx.sleep("1d")
    finally:
        async with ctx.shield():
            await ctx.sleep("300ms")
            await ctx.step(unbook, "car")


@durable.function(registry=declared)
async def stands_still(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await asyncio.Event().wait()


@durable.function(registry=declared)
async def goes_round_and_round(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        while True:
            await asyncio.sleep(0)


@durable.function(registry=declared)
async def stands_still_past_the_pivot(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await saga.pivot()
        await asyncio.Event().wait()


async def unbook_at_last(what: str) -> None:
    done.append(f"try to unbook {what}")
    await gate.wait()


@durable.function(registry=declared)
async def undoes_with_trouble(ctx: durable.Context, pivot: bool) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook_at_last, "car")
        await saga.step(book, "car")
        if pivot:
            await saga.pivot()
        await ctx.step(pass_the_gate)


@pytest.fixture(autouse=True)
def fresh() -> None:
    global gate
    gate = asyncio.Event()
    done.clear()


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, **{"functions": declared, "grace": "2s", **options})


async def test_a_run_that_has_undone_lands_failed_and_is_not_tried_again(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(fails)
        with pytest.raises(durable.RunFailed):
            await run.result()
        assert done == ["book car", "unbook car"]
        assert run.failures == 1
        with pytest.raises(durable.Conflict):
            await run.retry()


async def _is(run: durable.Run[Any], status: Status) -> bool:
    return (await run.refresh()).status is status


async def test_a_run_that_fails_past_its_pivot_lands_forward_incomplete_and_refuses_a_cancel(
    client: durable.Client,
) -> None:
    async with worker(client):
        run = await client.start(fails_past_the_pivot)
        await until(lambda: _has(client, run, "refuse_cancel"), "the pivot")
        await run.cancel()
        gate.set()
        with pytest.raises(durable.RunForwardIncomplete):
            await run.result()
        assert run.status is Status.FORWARD_INCOMPLETE
        assert done == ["book car"]
        await run.retry()
        with pytest.raises(durable.RunForwardIncomplete):
            await run.result()
        assert done == ["book car"]


async def test_a_run_that_gave_its_pivot_up_and_has_undone_is_not_called_incomplete(client: durable.Client) -> None:
    """(49) The failure cancels the branch of the pivot while its record is on its way: it is there, but nothing went forward."""
    async with worker(client):
        run = await client.start(gives_its_pivot_up)
        with pytest.raises(durable.RunFailed):
            await run.result()
    kinds = [record.step_id for record in await client.store.history(run.id, scope=None)]
    assert kinds == ["compensation:unbook", "book", "fail", "2/refuse_cancel", "undo/1"]
    assert done == ["book car", "unbook car"]
    assert run.status is Status.FAILED


@pytest.mark.parametrize("fn", [refuses_in_its_saga, refuses_in_its_saga_in_a_thread])
async def test_whoever_refuses_a_cancel_in_a_saga_has_passed_its_pivot_and_undoes_nothing(
    client: durable.Client, fn: durable.Function[[], None]
) -> None:
    """(46, 49) `ctx.refuse_cancel()` is the pivot, whichever verb asks for it: it was undone, and called incomplete all the same."""
    async with worker(client):
        run = await client.start(fn)
        with pytest.raises(durable.RunForwardIncomplete):
            await run.result()
    assert done == ["book car"]
    assert run.status is Status.FORWARD_INCOMPLETE


async def _has(client: durable.Client, run: durable.Run[Any], step_id: str) -> bool:
    return any(record.step_id == step_id for record in await client.store.history(run.id, scope=None))


async def test_an_error_of_the_store_that_nobody_foresaw_ends_no_run(
    client: durable.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(9, 49) A defect at an append is not the body's failure: landed with it, the run would leave what it has done as it is."""
    store: Any = client.store
    append, broken = store.within.append, [True]

    async def append_badly(records: Any) -> Any:
        if broken and any(record.step_id == "fail" for _, record in records):
            broken.clear()
            raise ZeroDivisionError("a defect")
        return await append(records)

    monkeypatch.setattr(store.within, "append", append_badly)
    async with worker(client):
        run = await client.start(fails.using(retry=durable.Retry.NEVER))
        with pytest.raises(durable.RunFailed, match="no seat"):
            await run.result(timeout="30s")
    assert not broken
    assert done == ["book car", "unbook car"]


async def test_a_cancelled_run_undoes_and_lands_cancelled(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(waits)
        await until(lambda: _has(client, run, "book"), "the booking")
        await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result()
        assert done == ["book car", "unbook car"]


@pytest.mark.parametrize(
    "function", [holds.using(timeout="300ms"), holds.using(deadline="300ms"), waits.using(deadline="300ms")]
)
async def test_a_run_out_of_time_undoes_and_lands_timed_out(
    client: durable.Client, function: durable.Function[[], Any]
) -> None:
    async with worker(client):
        run = await client.start(function)
        with pytest.raises(durable.RunTimeout):
            await run.result()
        assert done in (["book car", "unbook car"], [])  # a slow machine may come to the limit before the first step
        assert await _has(client, run, "undo/1") is bool(done)


@pytest.mark.parametrize(
    ("function", "end"), [(undoes_late, "cancel"), (undoes_late, "deadline"), (rests_in_a_shield, "cancel")]
)
async def test_what_a_run_waits_for_after_its_end_was_asked_for_it_waits_for_in_its_worker(
    function: durable.Function[[], Any], end: str
) -> None:
    """No suspension lands over an ask (43), and none lasts past a deadline (12): a run that tried would be woken at once, for ever."""
    ahead = 0

    def clock() -> int:
        return time.time_ns() // 1_000 + ahead

    settings = {"poll": "50ms", "poll_idle": "50ms", "park_after": "0ms"}
    async with durable.Client("sqlite:///:memory:", settings=settings, clock=clock) as client:
        seen = Seen()
        client.events.attach(seen.append)
        run = await client.start(function.using(deadline="1h"))
        async with worker(client):
            await until(lambda: _is(run, Status.SUSPENDED), "the rest")
            if end == "cancel":
                await run.cancel()
            else:
                ahead = 2 * HOUR
            if function is undoes_late:
                await until(lambda: done.count("try to unbook car") >= 2, "two tries")
                gate.set()
            with pytest.raises((durable.RunCancelled, durable.RunTimeout)):
                await run.result()
        assert len(seen.of(RunClaimed)) <= 2  # the first one, and the wake that told of the end
        assert len(seen.of(RunRested)) <= len(done) + 1


async def test_a_worker_that_stops_hands_back_what_rests_after_a_cancel(client: durable.Client) -> None:
    run = await client.start(undoes_late)
    async with worker(client):
        await until(lambda: _has(client, run, "book"), "the booking")
        await run.cancel()
        await until(lambda: done.count("try to unbook car") >= 1, "a try")
    assert (await run.refresh()).status is Status.PENDING
    gate.set()
    async with worker(client):
        with pytest.raises(durable.RunCancelled):
            await run.result()


async def test_past_the_reclaim_limit_what_was_done_is_undone_and_the_run_lands_failed() -> None:
    now = 1_700_000_000_000_000

    def clock() -> int:
        return now

    async with durable.Client(
        "sqlite:///:memory:", settings={"poll": "50ms", "poll_idle": "50ms", "lease": "10s"}, clock=clock
    ) as client:
        run = await client.start(holds)
        async with durable.Worker(client, functions=declared, grace="10ms"):
            await until(lambda: _has(client, run, "book"), "the booking")
        for number in range(3):  # workers that take it and are never heard of again
            request = ClaimRequest(
                mark=f"lost {number}",
                queues={"default": 1},
                functions=[("holds", None)],
                limit=1,
                lease=1_000_000,
                family=REPLAY_FAMILY,
                scope=None,
                alone=True,
            )
            now += 2_000_000
            await client.store.promote(scope=None, limit=10)
            assert len(await client.store.claim(request)) == 1
            now += 2_000_000
            await client.store.sweep(scope=None, limit=10, max_reclaims=2)
        assert (await run.refresh()).status is Status.PENDING
        async with worker(client, max_reclaims=2):
            with pytest.raises(durable.RunFailed):
                await run.result()
        assert run.error_kind == "reclaim_limit"
        assert done == ["book car", "unbook car"]


@pytest.mark.parametrize("function", [stands_still, goes_round_and_round])
async def test_a_run_that_can_not_go_on_undoes_what_it_has_done_before_it_lands_failed(
    client: durable.Client, function: durable.Function[[], Any]
) -> None:
    kind = "stuck" if function is stands_still else "spinning"
    async with worker(client):
        run = await client.start(function)
        with pytest.raises(durable.RunFailed):
            await run.result()
    assert (run.error_kind, done) == (kind, ["book car", "unbook car"])
    assert run.error is not None
    assert ("waits for what nothing can deliver" if kind == "stuck" else "without coming to rest") in run.error
    journal = await client.journal(run.id)
    assert [record.step_id for record in journal] == ["compensation:unbook", "book", ":timeout", "undo/1"]


async def test_a_run_that_stands_still_past_its_pivot_lands_forward_incomplete(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(stands_still_past_the_pivot)
        with pytest.raises(durable.RunForwardIncomplete):
            await run.result()
    assert (run.error_kind, done) == ("stuck", ["book car"])


class Time:
    """The store's clock, in the test's hand."""

    now = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.now


async def take_and_vanish(client: durable.Client, name: str, time: Time, times: int) -> None:
    """Workers that take the run and are never heard of again."""
    for _ in range(times):
        request = ClaimRequest(
            mark=f"lost {time.now}",
            queues={"default": 1},
            functions=[(name, None)],
            limit=1,
            lease=1_000_000,
            family=REPLAY_FAMILY,
            scope=None,
            alone=True,
        )
        time.now += 2_000_000
        await client.store.promote(scope=None, limit=10)
        assert len(await client.store.claim(request)) == 1
        time.now += 2_000_000
        await client.store.sweep(scope=None, limit=10, max_reclaims=2)


@pytest.mark.parametrize("asked", [False, True], ids=["", "cancelled meanwhile"])
async def test_a_compensation_that_takes_its_workers_away_is_not_tried_without_end(asked: bool) -> None:
    time = Time()
    settings = {"poll": "50ms", "poll_idle": "50ms", "lease": "10s"}
    async with durable.Client("sqlite:///:memory:", settings=settings, clock=time) as client:
        run = await client.start(undoes_with_trouble, False)
        async with worker(client, grace="10ms") as first:
            await until(lambda: "book car" in done, "the booking")
            await until(lambda: _has(client, run, "book"), "its record")
            assert first.held == 1
        await take_and_vanish(client, "undoes_with_trouble", time, 3)
        async with durable.Worker(client, functions=declared, grace="10ms", max_reclaims=2):
            await until(lambda: "try to unbook car" in done, "the compensation")
        await take_and_vanish(client, "undoes_with_trouble", time, 3)
        if asked:
            assert await run.cancel()
        tried = done.count("try to unbook car")
        async with worker(client, max_reclaims=2):
            with pytest.raises(durable.RunCancelled if asked else durable.RunFailed):
                await run.result()
        assert done.count("try to unbook car") == tried
        assert run.error_kind == "reclaim_limit"
        assert run.error is not None
        assert "0 of 1 compensations are recorded, the rest must be undone by hand" in run.error


async def test_a_run_past_its_pivot_that_takes_its_workers_away_lands_forward_incomplete() -> None:
    time = Time()
    settings = {"poll": "50ms", "poll_idle": "50ms", "lease": "10s"}
    async with durable.Client("sqlite:///:memory:", settings=settings, clock=time) as client:
        run = await client.start(undoes_with_trouble, True)
        async with worker(client, grace="10ms"):
            await until(lambda: _has(client, run, "refuse_cancel"), "the pivot")
        await take_and_vanish(client, "undoes_with_trouble", time, 3)
        async with worker(client, max_reclaims=2):
            with pytest.raises(durable.RunForwardIncomplete):
                await run.result()
        assert (run.error_kind, done) == ("reclaim_limit", ["book car"])


KILLED = """
import asyncio, os, signal, sys
import durable

async def book() -> None: ...

async def unbook() -> None:
    print("unbook", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

@durable.function
async def deadly(ctx: durable.Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook)
        await saga.step(book)
        raise ValueError("no seat")

async def main() -> None:
    async with durable.Client(sys.argv[1], settings={"poll": "50ms", "poll_idle": "50ms"}) as client:
        async with durable.Worker(client, lease="2s", max_reclaims=1):
            run = [run async for run in client.runs()][0] if len(sys.argv) > 2 else await client.start(deadly)
            try:
                await run.result()
            except durable.RunFailed:
                print("landed", run.error_kind, flush=True)

asyncio.run(main())
"""


async def test_a_compensation_that_kills_its_process_is_tried_a_bounded_number_of_times(url: str) -> None:
    told: list[str] = []
    for number in range(12):
        more = ["again"] if number else []
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, url, *more, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        told += out.decode().splitlines()
        if process.returncode == 0:
            break
    assert told == ["unbook"] * 6 + ["landed reclaim_limit"]
