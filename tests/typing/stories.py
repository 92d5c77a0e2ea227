"""What users write. It must type-check under mypy strict and pyright strict; it is never run."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

import durable
from pydantic import BaseModel


class Order(BaseModel):
    id: str
    cents: int


class Receipt(BaseModel):
    id: str


class Approval(BaseModel):
    ok: bool
    by: str


class Connection:
    async def execute(self, text: str) -> int:
        return len(text)


async def reserve(order: Order) -> str:
    return order.id


async def charge(order: Order) -> Receipt:
    return Receipt(id=order.id)


def render(receipt: Receipt) -> bytes:
    return receipt.id.encode()


# a first workflow


@durable.function
async def checkout(ctx: durable.Context, order: Order) -> Receipt:
    await ctx.step(reserve, order)
    receipt = await ctx.step(charge, order)
    assert_type(receipt, Receipt)
    assert_type(await ctx.step(render, receipt), bytes)
    return receipt


async def main() -> None:
    async with durable.Client("sqlite:///shop.db") as client, durable.Worker(client):
        assert_type(await client.run(checkout, Order(id="42", cents=100)), Receipt)
        run = await client.start(checkout.using(idempotency_key="42", delay="5s"), Order(id="42", cents=100))
        assert_type(run, durable.Run[Receipt])
        assert_type(await run.result(), Receipt)


# retries


@durable.step(retry=durable.Retry(8, initial="1s", maximum="2m", on=ConnectionError), timeout="20s")
async def call_bank(order: Order) -> Receipt:
    return Receipt(id=order.id)


@durable.step
def sign(receipt: Receipt) -> str:
    return receipt.id


@durable.function(retry=durable.Retry(3), timeout="1h", queue="money", version="2")
async def pay(ctx: durable.Context, order: Order) -> Receipt:
    receipt = await ctx.step(call_bank, order)
    assert_type(receipt, Receipt)
    assert_type(await ctx.step(sign, receipt), str)
    assert_type(sign(receipt), str)
    return await ctx.step(call_bank.using(retry=durable.Retry.NEVER), order)


# in parallel


async def price(sku: str) -> int:
    return len(sku)


@durable.function
async def quote(ctx: durable.Context, a: str, b: str) -> int:
    x, y = await asyncio.gather(ctx.step(price, a), ctx.step(price, b))
    assert_type(x, int)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ctx.step(price, a))
    return x + y + task.result()


# time


async def mail(to: str, template: str) -> None: ...


@durable.function
async def trial(ctx: durable.Context, email: str) -> None:
    await ctx.step(mail, email, "welcome")
    await ctx.sleep(timedelta(days=14))
    await ctx.sleep_until(ctx.now() + timedelta(days=1))
    assert_type(ctx.now(), datetime)
    assert_type(ctx.random(), float)
    assert_type(ctx.uuid(), UUID)
    await ctx.progress(1, 2, "half")
    await ctx.step(mail, email, template="trial-over")


# signals


APPROVAL = durable.Signal("approval", Approval)


@durable.function
async def refund(ctx: durable.Context, order: Order) -> str:
    decision = await ctx.wait_signal(APPROVAL, timeout="3d", default=None)
    assert_type(decision, Approval | None)
    if decision is None or not decision.ok:
        return "declined"
    assert_type(await ctx.wait_signal(APPROVAL), Approval)
    return f"approved by {decision.by}"


async def approve(client: durable.Client, run_id: str) -> None:
    await client.signal(run_id, APPROVAL, Approval(ok=True, by="ann"))


# exactly once


async def credit(connection: Connection, account: str, cents: int) -> int:
    return await connection.execute(account * cents)


@durable.function
async def top_up(ctx: durable.Context, account: str, cents: int) -> int:
    balance = await ctx.transaction(credit, account, cents)
    assert_type(balance, int)
    return balance


# cancel, pivot, change


@durable.function
async def trip(ctx: durable.Context, who: str) -> str:
    hotel = await ctx.step(reserve, Order(id=who, cents=1))
    try:
        await ctx.sleep("7d")
        if await ctx.patched("free breakfast"):
            await ctx.step(mail, who, "breakfast")
        await ctx.refuse_cancel()
        return hotel
    except asyncio.CancelledError:
        async with ctx.shield():
            await ctx.step(mail, who, "cancelled")
        raise


async def stop(client: durable.Client) -> None:
    run = await client.start(trial, "ann@example.com")
    assert_type(await run.cancel(reason="customer left"), bool)


# runs of runs


@durable.function(queue="images")
async def thumb(ctx: durable.Context, url: str) -> Receipt:
    return Receipt(id=url)


@durable.function
async def gallery(ctx: durable.Context, urls: list[str]) -> int:
    assert_type(await ctx.run(thumb, urls[0]), Receipt)
    assert_type(await ctx.result("another run", thumb), Receipt)
    assert_type(await ctx.result("another run"), Any)
    child = await ctx.start(thumb.using(priority=5), urls[0])
    assert_type(child, durable.ChildRun[Receipt])
    assert_type(await child.result(), Receipt)
    assert_type(await ctx.map(thumb, urls, limit=50), list[Receipt])
    done = await ctx.map(thumb, urls, return_exceptions=True)
    assert_type(done, list[Receipt | Exception])
    return sum(isinstance(one, Receipt) for one in done)


@durable.function
def blocking_gallery(ctx: durable.SyncContext, urls: list[str]) -> int:
    assert_type(ctx.run(thumb, urls[0]), Receipt)
    assert_type(ctx.start(thumb, urls[0]).result(), Receipt)
    assert_type(ctx.result("another run", thumb), Receipt)
    return len(ctx.map(thumb, urls))


# asking and showing


@durable.step(every="1m")
async def paid(order: Order) -> bool:
    return True


@durable.function
async def purchase(ctx: durable.Context, order: Order) -> str:
    await ctx.publish("order", order)
    assert_type(await ctx.approve("refund", expires="3d", default=False), bool)
    await ctx.wait_until(paid, order)
    await ctx.wait_until(paid.using(every="5s"), order)
    return order.id


async def say_yes(client: durable.Client) -> None:
    async for approval in client.approvals():
        assert_type(approval, durable.Approval)
        await client.approve(approval.run.id, approval.what, True)
        assert_type(await approval.run.published(), dict[str, Any])


# undo


async def release(order: Order, *, why: str = "") -> None: ...


@durable.function
async def booking(ctx: durable.Context, order: Order) -> str:
    async with ctx.saga() as saga:
        assert_type(saga, durable.Saga)
        await saga.compensate(release, order, why="no seat")
        assert_type(await saga.step(reserve, order), str)
        await saga.pivot()
    return order.id


@durable.function
def blocking_booking(ctx: durable.SyncContext, receipt: Receipt) -> bytes:
    with ctx.saga() as saga:
        saga.compensate(render, receipt)
        page = saga.step(render, receipt)
        assert_type(page, bytes)
        saga.pivot()
    return page


# def bodies


@durable.function
def report(ctx: durable.SyncContext, receipt: Receipt) -> bytes:
    page = ctx.step(render, receipt)
    assert_type(page, bytes)
    assert_type(ctx.step(sign, receipt), str)
    ctx.sleep("1h")
    with ctx.shield():
        ctx.step(render, receipt)
    return page


# cron and tenants


@durable.function(cron=durable.Cron("0 9 * * MON-FRI", tz="Europe/Berlin", overlap="skip"))
async def digest(ctx: durable.Context) -> None:
    await ctx.step(mail, "team@example.com", f"digest-{ctx.scheduled_for:%F}")


async def per_tenant(client: durable.Client) -> None:
    acme = client.using(tenant=durable.tenant_id("acme"))
    await acme.start(trial, "ann@acme.test")
    async for run in acme.runs(status="failed"):
        print(run.tenant, run.id)


# graphs


@durable.function
async def lines(ctx: durable.Context, order: Order) -> list[str]:
    return [order.id]


@durable.function
async def invoice(ctx: durable.Context, texts: list[str], receipt: Receipt) -> str:
    return texts[0] + receipt.id


order_graph = durable.Graph("order")
priced = order_graph.node("lines", lines)
assert_type(priced, durable.Node[list[str]])
order_graph.node("paid", pay.using(queue="money", priority=5, retry=durable.Retry(5)), after=[priced])
order_graph.node("invoice", invoice, inputs=["lines", "paid"], after=("lines",))


async def order_all(client: durable.Client, order: Order) -> None:
    run = await client.start(order_graph.function.using(idempotency_key=order.id), order)
    assert_type(run, durable.Run[dict[str, Any]])
    assert_type(await run.result(), dict[str, Any])
    nodes = await run.children()
    assert_type(nodes, dict[str, durable.Run[Any]])
    await nodes["paid"].retry()


def order_blocking(client: durable.SyncClient, order: Order) -> None:
    run = client.start(order_graph.function, order)
    assert_type(run.result(), dict[str, Any])
    assert_type(run.children(), dict[str, durable.SyncRun[Any]])


@durable.function
async def orders(ctx: durable.Context, order: Order) -> str:
    results = await ctx.run(order_graph.function, order)
    return str(results["invoice"])
