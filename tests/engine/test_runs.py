"""Runs from start to result: what a user sees of semantics 2, 9, 12, 21-25, 40-42."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from engine.conftest import Seen, until

import durable
from durable import Registry
from durable.activation import Activation
from durable.bodyloop import BodyLoop
from durable.branches import BranchTask
from durable.model import ErrorKind, RecordKind
from durable.settings import SECOND

declared = Registry("test_runs")
calls: list[str] = []


async def add(a: int, b: int) -> int:
    calls.append("add")
    return a + b


def blocking_add(a: int, b: int) -> int:
    return a + b


@durable.function(registry=declared)
async def total(ctx: durable.Context, numbers: list[int]) -> int:
    result = 0
    for number in numbers:
        result = await ctx.step(add, result, number)
    return result


@durable.function(registry=declared)
def blocking_total(ctx: durable.SyncContext, numbers: list[int]) -> int:
    result = 0
    for number in numbers:
        result = ctx.step(blocking_add, result, number)
    return result


@dataclasses.dataclass
class Order:
    id: str
    cents: int


@durable.function(registry=declared)
async def typed(ctx: durable.Context, order: Order) -> tuple[str, Order]:
    return order.id, order


async def object_result() -> object:
    return object()


@durable.function(registry=declared)
async def unstorable_step(ctx: durable.Context) -> None:
    await ctx.step(object_result)


@durable.function(registry=declared)
async def io_in_a_body(ctx: durable.Context) -> None:
    await asyncio.to_thread(time.time)


failures_left = 0


async def flaky() -> str:
    global failures_left
    if failures_left > 0:
        failures_left -= 1
        raise ConnectionError("no line")
    return "through"


@durable.step(retry=durable.Retry(4, initial="1ms"))
async def fails() -> None:
    raise ValueError("again")


@durable.function(registry=declared)
async def tries_three_times(ctx: durable.Context) -> None:
    await ctx.step(fails)


@durable.function(registry=declared, retry=durable.Retry(3, initial="1ms"))
async def retried(ctx: durable.Context) -> str:
    first = await ctx.step(add, 1, 1)
    assert first == 2
    return await ctx.step(flaky)


@durable.function(registry=declared, retry=durable.Retry(5, initial="1ms", give_up_on=ValueError))
async def gives_up(ctx: durable.Context) -> None:
    raise ValueError("never again")


async def endless() -> None:
    await asyncio.Event().wait()


@durable.function(registry=declared, timeout="100ms")
async def capped(ctx: durable.Context) -> None:
    await ctx.step(endless)


@durable.function(registry=declared, timeout="100ms")
async def sleeper(ctx: durable.Context) -> None:
    await ctx.sleep("1h")


@durable.function(registry=declared)
async def unwanted(ctx: durable.Context) -> None: ...


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, functions=declared, grace="2s", **options)


async def test_a_run_ends_with_what_its_body_returned(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(total, [1, 2, 3]) == 6
        assert await client.run(blocking_total, [1, 2, 3]) == 6


async def test_values_come_back_by_their_annotation(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(typed, Order("a", 5)) == ("a", Order("a", 5))


async def test_many_runs_at_once_all_land(client: durable.Client, seen: Seen) -> None:
    async with worker(client, concurrency=20):
        runs = await client.start_many(total, [[n, n] for n in range(200)])
        results = await asyncio.gather(*(run.result() for run in runs))
    assert results == [2 * n for n in range(200)]
    assert await client.count(status="completed") == 200


async def test_runs_that_have_left_are_freed_without_the_garbage_collector(client: durable.Client) -> None:
    gc.collect()
    before = _alive()  # what other tests still hold
    gc.disable()
    try:
        async with worker(client, concurrency=20):
            for run in [
                *await client.start_many(total, [[n, n] for n in range(30)]),
                await client.start(blocking_total, [1]),
            ]:
                await run.result()
            await until(lambda: _alive() <= before, "the runs to be freed")
    finally:
        gc.enable()


def _alive() -> int:
    parts = (Activation, BodyLoop, BranchTask, durable.Context, durable.SyncContext)
    return sum(issubclass(type(one), parts) for one in gc.get_objects())


async def test_concurrent_starts_share_writes(client: durable.Client, seen: Seen) -> None:
    from durable.events import RunsSubmitted

    await asyncio.gather(*(client.start(total, [n]) for n in range(100)))
    assert len(seen.of(RunsSubmitted)) < 50
    assert sum(event.count for event in seen.of(RunsSubmitted)) == 100


async def test_one_bad_submit_of_a_shared_batch_fails_alone(client: durable.Client) -> None:
    await client.start(total.using(idempotency_key="k"), [1])
    answers = await asyncio.gather(
        client.start(total, [1]),
        client.start(unwanted.using(idempotency_key="k")),
        client.start(total, [2]),
        return_exceptions=True,
    )
    assert isinstance(answers[1], durable.Conflict)
    assert isinstance(answers[0], durable.Run)
    assert isinstance(answers[2], durable.Run)


async def test_the_same_idempotency_key_gives_the_same_run_and_says_so(client: durable.Client) -> None:
    first = await client.start(total.using(idempotency_key="k"), [1])
    second = await client.start(total.using(idempotency_key="k"), [2])
    assert (first.id, first.disposition, second.disposition) == (second.id, "created", "existing")
    assert second.idempotency_key == "k"


async def test_an_undecodable_input_lands_that_run_failed_and_the_others_go_on(client: durable.Client) -> None:
    good = await client.start(total, [1])
    from durable.submission import new_run

    bad = dataclasses.replace(new_run(total, ([1],), {}, codec=client.codec, tenant=None), input='[["no list"],{}]')
    await client.store.enqueue([bad])
    async with worker(client):
        assert await good.result() == 1
        run = await client.get(bad.run_id)
        with pytest.raises(durable.RunFailed) as caught:
            await run.result()
    assert caught.value.error_kind == ErrorKind.PAYLOAD
    assert isinstance(caught.value.__cause__, durable.SerializationError)


async def test_a_step_result_that_can_not_be_stored_is_a_typed_error_of_that_run_alone(client: durable.Client) -> None:
    async with worker(client):
        with pytest.raises(durable.RunFailed) as caught:
            await client.run(unstorable_step)
        assert caught.value.error_kind == ErrorKind.PAYLOAD
        assert await client.run(total, [1]) == 1


async def test_io_in_a_body_is_misuse_of_that_run_alone(client: durable.Client) -> None:
    async with worker(client):
        with pytest.raises(durable.RunFailed) as caught:
            await client.run(io_in_a_body)
        assert caught.value.error_kind == ErrorKind.MISUSE
        assert isinstance(caught.value.__cause__, durable.Misuse)
        assert await client.run(total, [1]) == 1


def test_a_body_called_directly_says_how_to_start_it() -> None:
    with pytest.raises(durable.Misuse, match=r"client\.run\(total"):
        total([1])


@pytest.mark.parametrize(
    "bad",
    [
        {"at": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"deadline": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"idempotency_key": ""},
        {"coalesce_key": "~mine"},
        {"queue": "a/b"},
        {"queue": "a#b"},
        {"priority": 1.5},
    ],
)
def test_a_bad_option_is_refused_where_it_is_given(bad: dict[str, Any]) -> None:
    with pytest.raises((durable.RegistrationError, durable.ConfigurationError)):
        total.using(**bad)


@pytest.mark.parametrize("name", ["a/b", "a#b", "a:b", "a@b", "", "a\x07"])
def test_a_name_with_a_reserved_character_is_refused_when_it_is_declared(name: str) -> None:
    with pytest.raises(durable.RegistrationError):
        durable.function(name=name, registry=Registry("other"))(total.fn)


async def test_arguments_that_do_not_fit_are_refused_before_anything_is_written(client: durable.Client) -> None:
    with pytest.raises(TypeError):
        await client.start(total)  # type: ignore[call-arg]
    with pytest.raises(durable.SerializationError):
        await client.start(total, ["x"])  # type: ignore[list-item]
    with pytest.raises(durable.PayloadTooLarge):
        await client.start(total, [1] * 2_000_000)
    with pytest.raises(durable.RegistrationError):
        await client.start(total.fn, [1])  # type: ignore[arg-type]
    assert await client.count() == 0


async def test_a_run_of_a_function_that_no_worker_knows_stays_pending_and_is_shown_as_such(
    client: durable.Client,
) -> None:
    run = await client.start(unwanted)
    async with durable.Worker(client, functions=[total]):
        assert await client.run(total, [1]) == 1
        assert (await run.refresh()).status == "pending"
        explained = await client.explain(run.id)
        assert "unwanted" in " ".join(explained.reasons)


async def test_a_failed_run_is_tried_again_from_its_records_until_it_is_through(client: durable.Client) -> None:
    global failures_left
    failures_left = 2
    calls.clear()
    async with worker(client):
        run = await client.start(retried)
        assert await run.result() == "through"
    assert (run.failures, calls) == (2, ["add"])


async def test_the_last_failure_lands_the_run_with_the_original_error(client: durable.Client) -> None:
    global failures_left
    failures_left = 99
    async with worker(client):
        run = await client.start(retried)
        with pytest.raises(durable.RunFailed) as caught:
            await run.result()
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert (run.failures, run.error_kind) == (3, ErrorKind.EXCEPTION)


async def test_an_operators_retry_takes_up_where_the_failure_was(client: durable.Client) -> None:
    global failures_left
    failures_left = 99
    calls.clear()
    async with worker(client):
        run = await client.start(retried)
        with pytest.raises(durable.RunFailed):
            await run.result()
        failures_left = 0
        await run.retry()
        assert await run.result() == "through"
        with pytest.raises(durable.Conflict):
            await run.retry()
    assert calls == ["add"]


async def test_attempts_stay_in_their_order_though_the_clock_of_the_store_goes_back(client: durable.Client) -> None:
    """Where a stamp is a process's idea of the server's clock, each correction of that may be one backwards."""
    append = client.store.append
    ahead = iter((5 * SECOND, 0, 0))

    async def from_a_clock_that_is_corrected(records: Any) -> Any:
        moved = []
        for lease, record in records:
            if record.kind is RecordKind.ATTEMPT:
                record = dataclasses.replace(record, floor=max(record.floor, client.store.clock() + next(ahead)))
            moved.append((lease, record))
        return await append(moved)

    client.store.append = from_a_clock_that_is_corrected  # type: ignore[method-assign]
    async with worker(client):
        run = await client.start(tries_three_times)
        with pytest.raises(durable.RunFailed):
            await run.result()
    attempts = [record for record in await client.journal(run.id) if record.kind is RecordKind.ATTEMPT]
    assert [record.step_id for record in attempts] == ["fails@1", "fails@2", "fails@3"]


async def test_an_error_that_the_policy_gives_up_on_is_not_tried_again(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(gives_up)
        with pytest.raises(durable.RunFailed):
            await run.result()
    assert (run.failures, run.attempts) == (1, 1)


async def test_the_time_limit_of_an_execution_lands_it_timed_out(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(capped)
        with pytest.raises(durable.RunTimeout) as caught:
            await run.result()
    assert (run.status, caught.value.error_kind) == ("timed_out", ErrorKind.TIMEOUT)


async def test_a_suspended_run_is_not_executed_so_its_time_limit_does_not_count(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(sleeper)
        await until(_is(run, "suspended"), "the suspension")
        assert await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result()


async def test_timeout_none_lifts_the_declared_limit_of_one_start(client: durable.Client) -> None:
    async with worker(client):
        limited = await client.start(capped)
        lifted = await client.start(capped.using(timeout=None))
        with pytest.raises(durable.RunTimeout):
            await limited.result()
        await until(_is(lifted, "running"), "the other one")
        assert await lifted.cancel()
        with pytest.raises(durable.RunCancelled):
            await lifted.result()


def _is(run: durable.Run[Any], status: str) -> Any:
    async def found() -> bool:
        return (await run.refresh()).status == status

    return found


async def test_the_deadline_ends_a_run_that_waits(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(sleeper.using(timeout=None, deadline="200ms"))
        with pytest.raises(durable.RunTimeout):
            await run.result()
    assert run.error_kind == ErrorKind.DEADLINE


async def test_a_run_that_was_never_claimed_before_its_deadline_lands_timed_out(client: durable.Client) -> None:
    run = await client.start(total.using(deadline="1ms"), [1])
    async with worker(client):
        with pytest.raises(durable.RunTimeout):
            await run.result()


async def test_a_delayed_run_starts_when_it_is_due(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(total.using(delay="300ms"), [1])
        assert run.status == "pending"
        assert await run.result() == 1
    record = run.record
    assert record.started_at is not None
    assert record.started_at - record.created_at >= 0.3 * SECOND


async def test_waiting_too_long_is_a_plain_timeout_and_the_run_goes_on(client: durable.Client) -> None:
    run = await client.start(total, [1])
    with pytest.raises(TimeoutError, match="pending") as caught:
        await run.result(timeout=timedelta(milliseconds=50))
    assert not isinstance(caught.value, durable.DurableError)
    async with worker(client):
        assert await run.result() == 1


async def test_watch_shows_changes_until_the_run_has_landed(client: durable.Client) -> None:
    run = await client.start(total, [1])
    states: list[str] = []

    async def watching() -> None:
        states.extend([state.status async for state in run.watch()])

    watcher = asyncio.create_task(watching())
    await until(lambda: states or watcher.done() or True)
    async with worker(client):
        await watcher
    assert states[-1] == "completed"


async def test_runs_are_listed_newest_first_and_counted(client: durable.Client) -> None:
    made = [await client.start(total.using(tags={"n": str(n)}), [n]) for n in range(7)]
    listed = [run.id async for run in client.runs(limit=5)]
    assert listed == [run.id for run in reversed(made)][:5]
    assert await client.count(function="total") == 7
    assert [run.id async for run in client.runs(tags={"n": "3"})] == [made[3].id]
    with pytest.raises(durable.ConfigurationError):
        await client.count(status="nonsense")


async def test_get_decodes_by_the_registered_function_and_refuses_another(client: durable.Client) -> None:
    run = await client.start(total, [1])
    assert (await client.get(run.id, total)).id == run.id
    with pytest.raises(durable.Conflict):
        await client.get(run.id, typed)
    with pytest.raises(durable.NotFound):
        await client.get("nothing")


async def test_a_fork_copies_the_records_before_the_step(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(total, [1, 2, 3])
        assert await run.result() == 6
        calls.clear()
        forked = await run.fork(from_step="add#3")
        assert await forked.result() == 6
    assert calls == ["add"]
    assert forked.record.forked_from == run.id


async def test_purge_deletes_what_landed_long_enough_ago(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(total, [1]) == 1
    assert await client.purge() == 0
    assert await client.purge(older_than=0) == 1
    assert await client.count() == 0
