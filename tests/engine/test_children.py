"""Runs of runs: `ctx.run`, `ctx.start` and `ctx.map` from both kinds of bodies, on a worker (semantics 30 to 33, 48, 50)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from engine.conftest import Seen, until

import durable
from durable import Registry, RunFailed, tenant_id
from durable.events import RunClaimed
from durable.model import RecordKind, Status

declared = Registry("test_children")
calls: list[str] = []
gate = asyncio.Event()


@dataclasses.dataclass
class Order:
    id: str


@durable.error
class OutOfStock(Exception):
    """A failure that keeps its class."""


async def note(what: str) -> str:
    calls.append(what)
    return what


async def pass_the_gate() -> None:
    await gate.wait()


@durable.function(registry=declared)
async def twice(ctx: durable.Context, number: int) -> int:
    await ctx.step(note, f"twice {number}")
    return 2 * number


@durable.function(registry=declared)
async def typed(ctx: durable.Context, order: Order) -> tuple[str, Order]:
    return order.id, order


@durable.function(registry=declared)
async def sold_out(ctx: durable.Context, number: int) -> int:
    raise OutOfStock(number)


@durable.function(registry=declared)
async def waits(ctx: durable.Context) -> str:
    await ctx.step(pass_the_gate)
    return "through"


@durable.function(registry=declared)
async def one_child(ctx: durable.Context, number: int) -> int:
    return await ctx.run(twice, number) + 1


@durable.function(registry=declared)
async def grandparent(ctx: durable.Context, number: int) -> int:
    first, second = await asyncio.gather(ctx.run(one_child, number), ctx.run(one_child, number + 1))
    return first + second


@durable.function(registry=declared)
def blocking_parent(ctx: durable.SyncContext, number: int) -> list[int]:
    child = ctx.start(twice, number)
    direct = ctx.run(twice, number + 1)
    return [child.result(), direct, child.result(), *ctx.map(twice, [7, 8, 9], limit=2)]


@durable.function(registry=declared)
async def typed_parent(ctx: durable.Context) -> str:
    name, order = await ctx.run(typed, Order("7"))
    return f"{name} {type(order).__name__}"


@durable.function(registry=declared)
async def started(ctx: durable.Context, number: int) -> list[Any]:
    child = await ctx.start(twice, number)
    await ctx.step(note, "between")
    both = await asyncio.gather(child.result(), child.result())
    return [child.id, *both, await child.result()]


@durable.function(registry=declared)
async def catches(ctx: durable.Context) -> list[str]:
    try:
        await ctx.run(sold_out, 3)
    except RunFailed as error:
        cause = error.__cause__
        return [type(cause).__name__, repr(getattr(cause, "args", None)), error.run_id, str(error.error_kind)]
    return []


@durable.function(registry=declared)
async def does_not_catch(ctx: durable.Context) -> int:
    return await ctx.run(sold_out, 3)


@durable.function(registry=declared)
async def mapped(ctx: durable.Context, count: int, limit: int | None) -> list[int]:
    return await ctx.map(twice, range(count), limit=limit)


@durable.function(registry=declared)
async def some(ctx: durable.Context, number: int) -> int:
    if number % 2:
        raise OutOfStock(number)
    return number


@durable.function(registry=declared)
async def mapped_with_failures(ctx: durable.Context) -> list[str]:
    found = await ctx.map(some, range(4), return_exceptions=True)
    return [
        str(one) if isinstance(one, int) else f"{type(one).__name__} {type(one.__cause__).__name__}" for one in found
    ]


@durable.function(registry=declared)
async def mapped_until_a_failure(ctx: durable.Context) -> list[int]:
    return await ctx.map(some, [0, 1, 2])


@durable.function(registry=declared)
async def waits_for_a_child(ctx: durable.Context) -> str:
    return await ctx.run(waits)


@durable.function(registry=declared)
async def leaves_a_child(ctx: durable.Context, detached: bool) -> str:
    child = await ctx.start(waits.using(detached=detached))
    raise ValueError(child.id)


@durable.function(registry=declared)
async def gives_up_waiting(ctx: durable.Context) -> str:
    child = await ctx.start(waits)
    try:
        return await asyncio.wait_for(child.result(), 0.01)
    except TimeoutError:
        await ctx.step(open_the_gate)
        return f"late, {await child.result()}"


async def open_the_gate() -> None:
    gate.set()


@durable.function(registry=declared)
async def wrong_child(ctx: durable.Context) -> None:
    await ctx.run(twice.using(idempotency_key="k"), 1)


@durable.function(registry=declared)
async def no_child(ctx: durable.Context) -> None:
    await ctx.run(note, "x")  # type: ignore[arg-type]


@durable.function(registry=declared)
async def no_limit(ctx: durable.Context) -> None:
    await ctx.map(twice, [1], limit=0)


@durable.function(registry=declared)
async def independent(ctx: durable.Context, count: int) -> int:
    return sum(await asyncio.gather(*(ctx.run(twice, number) for number in range(count))))


@pytest.fixture(autouse=True)
def fresh() -> None:
    global gate
    calls.clear()
    gate = asyncio.Event()


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, functions=declared, grace="2s", **options)


async def test_a_parent_gets_what_its_child_returns(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(one_child, 4) == 9
        assert await client.run(typed_parent) == "7 Order"


async def test_the_end_of_child_x_is_the_record_x_end(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(one_child, 4)
        await run.result()
        history = await client.store.history(run.id, scope=None)
        assert [(r.step_id, r.kind) for r in history] == [("twice", RecordKind.START), ("twice:end", RecordKind.CHILD)]
        (child,) = await client.store.children(run.id, scope=None)
        assert (child.parent_step_id, child.name) == ("twice", "twice")


async def test_children_may_have_children(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(grandparent, 1) == 3 + 5


async def test_a_blocking_body_runs_starts_and_maps_children(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(blocking_parent, 1) == [2, 4, 2, 14, 16, 18]


async def test_a_started_child_is_awaited_as_often_as_one_likes(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(started, 5)
        child_id, *results = await run.result()
        assert results == [10, 10, 10]
        (child,) = await client.store.children(run.id, scope=None)
        assert child.run_id == child_id
        assert sorted(calls) == ["between", "twice 5"]


async def test_the_failure_of_a_child_has_its_error_as_its_cause(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(catches)
        name, arguments, child_id, kind = await run.result()
        (child,) = await client.store.children(run.id, scope=None)
        assert (name, arguments, child_id, kind) == ("OutOfStock", "(3,)", child.run_id, "exception")


async def test_a_retry_of_the_parent_starts_the_failed_child_anew(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(does_not_catch)
        with pytest.raises(RunFailed):
            await run.result()
        await run.retry()
        with pytest.raises(RunFailed):
            await run.result()
        children = await client.store.children(run.id, scope=None)
        assert sorted(str(child.parent_step_id) for child in children) == ["sold_out", "sold_out@1"]


@pytest.mark.parametrize("limit", [None, 1, 3])
async def test_a_map_gives_results_in_the_order_of_the_items(client: durable.Client, limit: int | None) -> None:
    async with worker(client):
        run = await client.start(mapped, 8, limit)
        assert await run.result() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert sorted(calls) == sorted(f"twice {number}" for number in range(8))


async def test_a_map_over_nothing_is_an_empty_list(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(mapped, 0, None) == []


async def test_a_map_never_has_more_than_limit_children_at_once(client: durable.Client) -> None:
    run = await client.start(mapped, 6, 2)
    async with worker(client):
        await run.result()
    history = await client.store.history(run.id, scope=None)
    open_now = most = 0
    for record in history:
        open_now += 1 if record.kind is RecordKind.START else -1
        most = max(most, open_now)
    assert (most, open_now) == (2, 0)


async def test_a_map_tells_its_progress_by_itself(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(mapped, 4, 1)
        await run.result()
        await run.refresh()
        assert run.progress is not None
        assert run.progress.total == 4
        assert run.progress.done >= 3


async def test_failures_stand_among_the_results_where_that_is_wanted(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(mapped_with_failures) == ["0", "RunFailed OutOfStock", "2", "RunFailed OutOfStock"]


async def test_the_first_failure_of_a_map_is_raised(client: durable.Client) -> None:
    async with worker(client):
        with pytest.raises(RunFailed) as caught:
            await client.run(mapped_until_a_failure)
        assert "RunFailed" in str(caught.value)


async def test_a_parent_that_waits_for_a_child_of_its_queue_holds_no_slot(client: durable.Client) -> None:
    async with worker(client, concurrency=1):
        assert await client.run(grandparent, 1) == 8


async def test_a_parent_that_waits_for_a_child_behind_its_own_limit_does_not_block_it() -> None:
    settings = {"poll": "50ms", "poll_idle": "50ms", "park_after": "50ms"}
    async with durable.Client("sqlite:///:memory:", settings=settings) as client:
        await client.queues.limit("default", max_concurrency=1)
        async with worker(client):
            assert await client.run(one_child, 4) == 9


async def test_a_suspended_parent_is_woken_by_the_end_of_its_child(seen: Seen, client: durable.Client) -> None:
    run = await client.start(waits_for_a_child)
    async with worker(client, queues=["default"]):
        await until(lambda: client.store.children(run.id, scope=None), "the child")
    async with worker(client):
        gate.set()
        assert await run.result() == "through"


async def test_cancelling_a_parent_reaches_its_children() -> None:
    settings = {"poll": "50ms", "poll_idle": "50ms", "lease": "1s"}
    async with durable.Client("sqlite:///:memory:", settings=settings) as client, worker(client):
        run = await client.start(waits_for_a_child)
        (child,) = await until(lambda: client.store.children(run.id, scope=None), "the child")
        await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result()
        with pytest.raises(durable.RunCancelled):
            await (await client.get(child.run_id)).result()


@pytest.mark.parametrize("detached", [False, True])
async def test_a_parent_that_fails_cancels_its_children_unless_detached(detached: bool) -> None:
    settings = {"poll": "50ms", "poll_idle": "50ms", "lease": "1s"}
    async with durable.Client("sqlite:///:memory:", settings=settings) as client, worker(client):
        run = await client.start(leaves_a_child, detached)
        with pytest.raises(RunFailed):
            await run.result()
        (child,) = await client.store.children(run.id, scope=None)
        handle = await client.get(child.run_id)
        if detached:
            gate.set()
            await handle.result()
        else:
            with pytest.raises(durable.RunCancelled):
                await handle.result()


async def test_a_wait_that_is_given_up_does_not_stop_the_child(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(gives_up_waiting) == "late, through"


async def test_children_belong_to_the_tenant_and_the_deadline_of_their_parent(client: durable.Client) -> None:
    acme = client.using(tenant=tenant_id("acme"))
    async with worker(client):
        run = await acme.start(one_child.using(deadline="1h"), 4)
        assert await run.result() == 9
        (child,) = await client.store.children(run.id, scope=run.tenant)
        assert child.tenant == run.tenant
        assert child.deadline_at == run.record.deadline_at


@pytest.mark.parametrize("body", [wrong_child, no_child, no_limit])
async def test_a_child_that_can_not_be_one_is_refused_before_anything_is_written(
    client: durable.Client, body: durable.Function[[], None]
) -> None:
    async with worker(client):
        run = await client.start(body)
        with pytest.raises(RunFailed) as caught:
            await run.result()
        assert isinstance(caught.value.__cause__, (durable.Misuse, durable.RegistrationError))
        assert caught.value.__cause__.hint
        assert await client.store.children(run.id, scope=None) == []
        assert await client.store.history(run.id, scope=None) == []


async def _one_that_dies(client: durable.Client, run: durable.Run[Any], records: int) -> None:
    """A worker that holds the run and gives it up after so many records."""
    async with worker(client):
        await until(lambda: _enough(client, run, records), f"{records} records")


async def _enough(client: durable.Client, run: durable.Run[Any], records: int) -> bool:
    return len(await client.store.history(run.id, scope=None)) >= records


@pytest.mark.parametrize("records", [0, 1, 3, 7])
async def test_a_parent_whose_worker_goes_away_starts_no_child_twice(client: durable.Client, records: int) -> None:
    run = await client.start(mapped, 5, 2)
    await _one_that_dies(client, run, records)
    async with worker(client):
        assert await run.result() == [0, 2, 4, 6, 8]
    assert len(await client.store.children(run.id, scope=None)) == 5
    assert sorted(calls) == sorted(f"twice {number}" for number in range(5))


async def _claims(count: int, function: durable.Function[Any, Any], *arguments: Any) -> tuple[int, Any, Status]:
    """How often the parent was claimed, when it leaves memory whenever it rests."""
    settings = {"poll": "50ms", "poll_idle": "50ms", "park_after": "0ms", "max_parked": 1}
    async with durable.Client("sqlite:///:memory:", settings=settings) as client:
        events = Seen()
        client.events.attach(events.append)
        run = await client.start(function, *arguments)
        async with worker(client):
            result = await run.result(timeout="120s")
        await run.refresh()
        return sum(event.run_id == run.id for event in events.of(RunClaimed)), result, run.status


async def test_the_parent_of_a_map_over_1000_children_is_woken_at_most_twice() -> None:
    claims, result, _ = await _claims(1000, mapped, 1000, None)
    assert result == [2 * number for number in range(1000)]
    assert claims <= 3  # the first one, and two wakes


async def test_the_parent_of_1000_independent_children_is_woken_at_most_40_times() -> None:
    claims, result, _ = await _claims(1000, independent, 1000)
    assert result == 999 * 1000
    assert claims <= 41


async def test_a_suspended_parent_of_a_map_sleeps_until_the_last_of_its_children_has_landed(
    client: durable.Client,
) -> None:
    run = await client.start(mapped, 200, None)
    async with durable.Worker(client, functions=[mapped], grace="30s"):
        await until(lambda: _enough(client, run, 200), "all the starts")
    assert (await run.refresh()).status is Status.SUSPENDED
    assert run.record.wake_after == 200
    async with durable.Worker(client, functions=[twice], grace="2s"):
        await until(lambda: _woken(run), "the wake")
    assert run.record.attempts == 1
    assert all(child.status.terminal for child in await client.store.children(run.id, scope=None))
    async with worker(client):
        assert await run.result() == [2 * number for number in range(200)]
    assert (await run.refresh()).record.attempts == 2


async def _woken(run: durable.Run[Any]) -> bool:
    return (await run.refresh()).status is not Status.SUSPENDED
