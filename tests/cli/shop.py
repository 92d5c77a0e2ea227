"""The application that the tests of the command line start and work on."""

from __future__ import annotations

import asyncio

import durable


async def price(sku: str) -> int:
    return len(sku)


async def _loop_of_a_step() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@durable.function
async def which_loop(ctx: durable.Context) -> str:
    return await ctx.step(_loop_of_a_step)


@durable.function
async def quote(ctx: durable.Context, sku: str, count: int = 1) -> int:
    return count * await ctx.step(price, sku)


@durable.function
async def broken(ctx: durable.Context) -> None:
    raise ValueError("no such luck")


@durable.function
async def patient(ctx: durable.Context) -> None:
    await ctx.sleep("1h")


@durable.function
async def doubled(ctx: durable.Context, price: int) -> int:
    return 2 * price


bundle = durable.Graph("bundle")
bundle.node("quote", quote)
bundle.node("doubled", doubled, inputs=["quote"])
bundle.node("broken", broken, after=["quote"])
bundle.node("never", patient, after=["broken"])


def drain(url: str) -> None:
    """Work until every run of the untagged rows has landed or sleeps."""

    async def main() -> None:
        async with durable.Client(url, settings={"poll": "20ms"}) as client, durable.Worker(client):
            for _ in range(600):
                if not await client.count(status=["pending", "running"]):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("the runs did not come to an end")

    asyncio.run(main())
