"""What users get wrong. Each line that ends in E1 to E14 must be reported by mypy strict and pyright strict; it is never run."""

from __future__ import annotations

import durable
from stories import APPROVAL, Order, Receipt, charge, checkout, credit, release, report, sign, thumb


async def mistakes(ctx: durable.Context, client: durable.Client) -> None:
    await client.start(checkout, "not an order")  # E1
    await ctx.step(charge)  # E2
    await client.signal("r", APPROVAL, {"ok": True})  # E3
    await ctx.transaction(credit, "account", "cents")  # E4
    x: str = await client.run(checkout, Order(id="1", cents=1))  # E5
    await client.start(checkout.using(priority="high"), Order(id="1", cents=1))  # E6
    async for _ in client.runs(status="faild"):  # E7
        pass
    await ctx.step(sign, "no receipt")  # E9
    await client.run(report, Order(id="1", cents=1))  # E10
    y: Receipt = await ctx.step(sign, Receipt(id="1"))  # E11
    await ctx.map(thumb, [1, 2])  # E12
    await ctx.run(thumb, 1)  # E13
    await ctx.saga().compensate(release, "no order")  # E14
    print(x, y)


@durable.function  # E8
async def without_context(order: int) -> int:
    return order
