"""What the demo runs: five steps. Each step writes what it does to a log of its own.

The log is the proof that does not come from the database: one line per beginning and end of a step's body, appended with
a single write, so that a killed process leaves whole lines only. `demo.py` starts the workers as anybody would:
`durable worker durable.cli.demo_steps:registry`. The functions of the demo are in a registry of their own, since every command
imports this module: a worker of somebody else's functions does not serve them.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import durable

STEPS = ("reserve", "pay", "pack", "ship", "thank")
KILLED_IN = "ship"
LOG_VARIABLE = "DURABLE_DEMO_LOG"


def note(step: str, what: str) -> None:
    """Append one line to the log: a single write, so it is there whole or not at all."""
    line = json.dumps({"step": step, "what": what, "pid": os.getpid(), "at": time.time()}) + "\n"
    descriptor = os.open(os.environ[LOG_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


async def _work(step: str, order: str) -> str:
    first = step == KILLED_IN and not Path(os.environ[LOG_VARIABLE] + ".killed").exists()
    note(step, "begin")
    # The step that is killed waits for its end the first time; every other one takes a moment, like real work.
    await asyncio.sleep(3600 if first else 0.1)
    note(step, "end")
    return f"{step} {order}: done"


async def reserve(order: str) -> str:
    """Step 1."""
    return await _work("reserve", order)


async def pay(order: str) -> str:
    """Step 2."""
    return await _work("pay", order)


async def pack(order: str) -> str:
    """Step 3."""
    return await _work("pack", order)


async def ship(order: str) -> str:
    """Step 4: the worker is killed in the middle of it."""
    return await _work("ship", order)


async def thank(order: str) -> str:
    """Step 5."""
    return await _work("thank", order)


registry = durable.Registry("demo")


@durable.function(name="demo_checkout", registry=registry)
async def checkout(ctx: durable.Context, order: str) -> list[str]:
    """The durable function of the demo: five steps, one after the other."""
    return [
        await ctx.step(reserve, order),
        await ctx.step(pay, order),
        await ctx.step(pack, order),
        await ctx.step(ship, order),
        await ctx.step(thank, order),
    ]
