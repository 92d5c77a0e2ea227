"""Static graphs on the three stores, through the engine, with real workers (semantics 77, 25, 50).

Definition errors are in `floors/test_graph.py`, what a store does with edges in the conformance suite.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import until
from pydantic import BaseModel
from servers import mongo
from stores import graph_worker
from stores.everywhere import SETTINGS
from stores.graph_worker import graph

import durable
from durable import Graph, Registry
from durable.events import RunMismatched
from durable.model import Status, new_run_id

declared = Registry("test_graphs")
calls: list[str] = []
gate = asyncio.Event()
barrier = asyncio.Barrier(2)
broken: set[str] = set()


class Order(BaseModel):
    id: str
    cents: int


class Receipt(BaseModel):
    lines: list[str]
    total: int


async def note(what: str) -> None:
    calls.append(what)


async def break_if_told(what: str) -> None:
    if what in broken:
        raise ValueError(f"{what} is broken")


async def pass_the_gate() -> None:
    await gate.wait()


async def meet() -> None:
    await barrier.wait()


@durable.function(registry=declared)
async def read(ctx: durable.Context, order: Order) -> Order:
    await ctx.step(note, "read")
    return order


@durable.function(registry=declared)
async def cents(ctx: durable.Context, order: Order) -> int:
    await ctx.step(note, "cents")
    await ctx.step(break_if_told, "cents")
    return order.cents


@durable.function(registry=declared)
async def label(ctx: durable.Context, order: Order) -> str:
    await ctx.step(note, "label")
    await ctx.step(break_if_told, "label")
    return f"order {order.id}"


@durable.function(registry=declared)
def receipt(ctx: durable.SyncContext, text: str, total: int, tax: int) -> Receipt:
    ctx.step(_note, "receipt")
    return Receipt(lines=[text], total=total + tax)


def _note(what: str) -> None:
    calls.append(what)


@durable.function(registry=declared)
async def ship(ctx: durable.Context, order: Order) -> str:
    await ctx.step(note, f"ship {order.id}")
    return "shipped"


@durable.function(registry=declared, retry=durable.Retry(2, initial="1ms"))
async def flaky(ctx: durable.Context) -> int:
    await ctx.step(note, "flaky")
    if ctx.attempt == 1:
        raise ConnectionError("once")
    return ctx.attempt


@durable.function(registry=declared)
async def meets(ctx: durable.Context) -> int:
    await ctx.step(meet)
    return 1


@durable.function(registry=declared)
async def total(ctx: durable.Context, left: int, right: int) -> int:
    await ctx.step(note, "total")
    return left + right


@durable.function(registry=declared)
async def waits(ctx: durable.Context) -> str:
    await ctx.step(note, "waits")
    await ctx.step(pass_the_gate)
    return "through"


@durable.function(registry=declared)
async def last(ctx: durable.Context) -> str:
    await ctx.step(note, "last")
    return "last"


shop = Graph("shop", registry=declared)
shop.node("order", read)
shop.node("cents", cents, inputs=["order"])
shop.node("tax", cents.using(queue="slow", priority=5), inputs=["order"])
shop.node("label", label, inputs=["order"])
shop.node("receipt", receipt, inputs=["label", "cents", "tax"])
shop.node("ship", ship.using(tags={"kind": "parcel"}), after=["receipt"])
shop.node("side", flaky)

twins = Graph("twins", registry=declared)
twins.node("left", meets)
twins.node("right", meets)
twins.node("total", total, inputs=["left", "right"])

forgetful = Graph("forgetful", registry=declared)
forgetful.node("order", read.using(keep=0))
forgetful.node("label", label, inputs=["order"])

gated = Graph("gated", registry=declared)
gated.node("first", last)
gated.node("waits", waits, after=["first"])
gated.node("last", last, after=["waits"])


@durable.function(registry=declared)
async def breaks(ctx: durable.Context) -> str:
    await ctx.step(break_if_told, "breaks")
    return "whole"


abreast = Graph("abreast", registry=declared)
abreast.node("breaks", breaks)
abreast.node("behind", last, after=["breaks"])
abreast.node("waits", waits)


@durable.function(registry=declared)
async def runs_a_graph(ctx: durable.Context, order: Order) -> list[Any]:
    results = await ctx.run(shop.function, order)
    return [type(results["receipt"]).__name__, results["receipt"].total]


@pytest.fixture(autouse=True)
def fresh() -> None:
    global gate, barrier
    gate, barrier = asyncio.Event(), asyncio.Barrier(2)
    calls.clear()
    broken.clear()


@pytest.fixture
async def client(shared_url: str) -> AsyncIterator[durable.Client]:
    """Bound to a tenant of the test's own: all tests of a store share its database."""
    async with durable.Client(shared_url, settings=SETTINGS) as opened:
        yield opened.using(tenant=durable.tenant_id(new_run_id()))


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, **{"functions": declared, "queues": ["default", "slow"], "grace": "2s", **options})


ORDER = Order(id="7", cents=100)
RESULTS = {
    "order": ORDER,
    "cents": 100,
    "tax": 100,
    "label": "order 7",
    "receipt": Receipt(lines=["order 7"], total=200),
    "ship": "shipped",
    "side": 2,
}


async def test_a_graph_runs_each_node_once_in_its_order_with_ordered_inputs_and_its_own_options(
    client: durable.Client,
) -> None:
    async with worker(client):
        run = await client.start(shop.function.using(idempotency_key="k"), ORDER)
        assert await run.result(timeout="60s") == RESULTS
        assert (await client.start(shop.function.using(idempotency_key="k"), ORDER)).disposition == "existing"
    assert list(await run.result()) == list(RESULTS)
    assert sorted(calls) == ["cents", "cents", "flaky", "label", "read", "receipt", "ship 7"]
    assert calls.index("receipt") > max(calls.index("label"), 1 + calls.index("read"))
    nodes = await run.children()
    assert {name: await node.result() for name, node in nodes.items()} == RESULTS
    assert (nodes["tax"].queue, nodes["tax"].record.priority) == ("slow", 5)
    assert (nodes["side"].failures, dict(nodes["ship"].tags)) == (1, {"kind": "parcel"})
    assert {node.tenant for node in nodes.values()} == {run.tenant}
    assert (await run.refresh()).attempts <= 2  # the claim that wrote the nodes, and the one wake when all had landed
    assert list(await client.audit()) == []


async def test_nodes_behind_a_failed_one_are_never_run_and_say_why_and_a_retry_goes_on_from_there(
    client: durable.Client,
) -> None:
    broken.update({"cents", "label"})
    async with worker(client):
        run = await client.start(shop.function, ORDER)
        with pytest.raises(durable.RunFailed) as failed:
            await run.result(timeout="60s")
        assert isinstance(failed.value.__cause__, durable.GraphFailed)
        for part in ("3 of 7 nodes", "cents is broken", "label is broken", "2 behind were not run: receipt, ship"):
            assert part in failed.value.message
        nodes = await run.children()
        shown = {name: (node.status, node.error_kind) for name, node in nodes.items()}
        assert shown["receipt"] == shown["ship"] == (Status.CANCELLED, "upstream")
        assert [shown[name][0] for name in ("order", "cents", "tax", "label", "side")] == [
            "completed", "failed", "failed", "failed", "completed",
        ]  # fmt: skip
        assert "did not complete" in " ".join((await client.explain(nodes["ship"].id)).reasons)
        assert nodes["ship"].record.attempts == 0
        broken.discard("label")
        await run.retry()
        with pytest.raises(durable.RunFailed):
            await run.result(timeout="60s")
        assert "label" not in str(run.error).split("behind")[0]
        broken.clear()
        await run.retry()
        assert await run.result(timeout="60s") == RESULTS
    # What had completed was not run again, and each failed node from its failed step on.
    assert [calls.count(what) for what in ("read", "receipt", "ship 7", "flaky")] == [1, 1, 1, 1]
    assert (calls.count("cents"), calls.count("label")) == (2, 1)
    assert list(await client.audit()) == []


async def test_a_retry_of_one_node_brings_the_rest_and_the_graph_back(client: durable.Client) -> None:
    broken.add("label")
    async with worker(client):
        run = await client.start(shop.function, ORDER)
        with pytest.raises(durable.RunFailed):
            await run.result(timeout="60s")
        broken.clear()
        await (await run.children())["label"].retry()
        await run.refresh()
        assert await run.result(timeout="60s") == RESULTS
    assert calls.count("read") == calls.count("ship 7") == 1


async def test_a_graph_that_still_ran_when_its_node_was_retried_is_retried_once(shared_url: str) -> None:
    """(50, 77) It has been given the failure and what that cancelled, and keeps that; its own retry forgets both."""
    broken.add("breaks")
    async with durable.Client(shared_url, settings={**SETTINGS, "park_after": "1m"}) as opened:
        client = opened.using(tenant=durable.tenant_id(new_run_id()))
        async with worker(client):
            run = await client.start(abreast.function)
            await until(lambda: _recorded(client, run, "breaks:end", "behind:end"), "both ends to be given")
            broken.clear()
            nodes = await run.children()
            await nodes["breaks"].retry()
            await nodes["behind"].refresh()
            assert await nodes["behind"].result(timeout="60s") == "last"
            gate.set()
            with pytest.raises(durable.RunFailed, match="breaks is broken"):
                await run.result(timeout="60s")
            await run.retry()
            assert await run.result(timeout="60s") == {"breaks": "whole", "behind": "last", "waits": "through"}
        assert list(await client.audit()) == []


async def _recorded(client: durable.Client, run: durable.Run[Any], *step_ids: str) -> bool:
    return set(step_ids) <= {record.step_id for record in await client.journal(run.id)}


async def test_a_node_is_released_once_when_the_last_two_before_it_complete_at_the_same_instant(
    client: durable.Client, shared_url: str
) -> None:
    async with durable.Client(shared_url, settings=SETTINGS) as second:
        other = second.using(tenant=str(client.scope))
        async with worker(client, concurrency=3), worker(other, concurrency=3):
            for _ in range(8):
                run = await client.start(twins.function)
                assert await run.result(timeout="60s") == {"left": 1, "right": 1, "total": 2}
    assert calls == ["total"] * 8


async def test_a_graph_that_is_cancelled_cancels_its_nodes_and_a_retry_takes_it_up(client: durable.Client) -> None:
    async with worker(client, lease="5s"):
        run = await client.start(gated.function)
        await until(lambda: "waits" in calls, "the node to start")
        assert await run.cancel(reason="no more")
        with pytest.raises(durable.RunCancelled):
            await run.result(timeout="60s")

        async def landed() -> bool:
            return all(node.status.terminal for node in (await run.children()).values())

        await until(landed, "the nodes to land")
        shown = {name: node.status for name, node in (await run.children()).items()}
        assert shown == {"first": Status.COMPLETED, "waits": Status.CANCELLED, "last": Status.CANCELLED}
        gate.set()
        await run.retry()
        assert await run.result(timeout="60s") == {"first": "last", "waits": "through", "last": "last"}
    assert calls == ["last", "waits", "last"]
    assert list(await client.audit()) == []


async def test_a_graph_runs_inside_a_body_and_its_results_have_their_types(client: durable.Client) -> None:
    async with worker(client):
        assert await (await client.start(runs_a_graph, ORDER)).result(timeout="60s") == ["Receipt", 200]


async def test_a_topology_that_differs_between_submitter_and_worker_is_reported_and_nothing_is_run(
    client: durable.Client,
) -> None:
    here = Registry("a worker of yesterday")
    old = Graph("shop", registry=here)
    old.node("order", read)
    old.node("label", label, after=["order"])
    seen: list[Any] = []
    client.events.attach(seen.append)
    run = await client.start(shop.function, ORDER)
    async with worker(client, functions=here):
        await until(lambda: [one for one in seen if isinstance(one, RunMismatched)], "the report")
        await until(lambda: _kind(run, "non_determinism"), "the hand-back")
    told = next(one.explanation for one in seen if isinstance(one, RunMismatched))
    assert "node 'cents' is not here" in told
    assert "inputs of node 'label' was ['order'] and is []" in told
    assert await run.children() == {}
    assert calls == []
    async with worker(client):
        assert await run.result(timeout="60s") == RESULTS


async def _kind(run: durable.Run[Any], kind: str) -> bool:
    return (await run.refresh()).error_kind == kind


async def test_the_worker_of_the_graph_and_of_a_node_may_stop_at_any_point(client: durable.Client) -> None:
    run = await client.start(gated.function)
    async with worker(client, grace="10ms"):
        await until(lambda: "waits" in calls, "the node to start")
    assert (await run.refresh()).status is not Status.RUNNING
    gate.set()
    async with worker(client):
        assert (await run.result(timeout="60s"))["waits"] == "through"
    assert calls == ["last", "waits", "waits", "last"] or calls == ["last", "waits", "last"]


async def test_a_fork_of_a_graph_is_a_graph_of_its_own(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(shop.function, ORDER)
        await run.result(timeout="60s")
        fork = await run.fork(from_step="receipt:end")
        assert await fork.result(timeout="60s") == RESULTS
    assert calls.count("read") == 2
    old, new = await run.children(), await fork.children()
    assert {node.id for node in old.values()} & {node.id for node in new.values()} == set()


async def test_a_node_whose_arguments_are_not_stored_any_more_fails_and_says_so(client: durable.Client) -> None:
    broken.add("label")
    async with worker(client):
        run = await client.start(forgetful.function, ORDER)
        with pytest.raises(durable.RunFailed):
            await run.result(timeout="60s")
        broken.clear()
        await until(client.purge, "the purge of the first node")
        await run.retry()
        with pytest.raises(durable.RunFailed, match="not stored any more"):
            await run.result(timeout="60s")
        assert (await run.children())["label"].error_kind == "payload"


@pytest.fixture
def short_transactions(shared_url: str) -> Iterator[None]:
    """For a process that is killed."""
    with mongo.server().short_transactions() if shared_url.startswith("mongodb") else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("short_transactions")
async def test_a_graph_survives_the_kill_of_the_worker_that_runs_it(shared_url: str, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    log.touch()
    process = await _killable(shared_url, log, go)
    async with durable.Client(shared_url, settings=SETTINGS) as client:
        try:
            run = await client.start(graph.function, "first")
            await until(lambda: "second" in log.read_text(), "the second node")
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        go.touch()
        process = await _killable(shared_url, log, go)
        try:
            assert await run.result(timeout="60s") == {"first": "first", "second": "second", "third": "second first"}
        finally:
            process.terminate()
            await process.wait()
        assert log.read_text().split() == ["first", "second", "second", "third"]
        assert list(await client.audit()) == []


async def _killable(url: str, log: Path, go: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, graph_worker.__file__, url, str(log), str(go))


def test_the_blocking_client_starts_graphs_and_shows_their_nodes(shared_url: str) -> None:
    with durable.SyncClient(shared_url, settings=SETTINGS) as client:
        run = client.start(shop.function, ORDER)
        assert run.children() == {}
        assert json.loads(run.record.options or "")["graph"][0]["node"] == "order"
        assert run.cancel()
