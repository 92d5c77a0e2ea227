"""The program of the campaign of crashes (`test_restarts.py`): one function of three steps, and the worker process that runs it.

Each body and each step appends a line to a log: a step before it does anything, the body once the step's value has come to it, and that
is when its record was acknowledged. One write on a file opened with O_APPEND: lines of many processes do not mix, and their order is
the order in which things happened. The log is the witness against the journal.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

import durable

STEPS = 3
LONGEST = 0.2
"""Seconds of a step: with a run every ten milliseconds some are under way at any moment, also when a stop has been carried out."""
SETTINGS = {"poll": "200ms", "poll_idle": "200ms"}
_log = -1


def note(run_id: str, what: str, place: int) -> None:
    line = f"{run_id} {what} {place}\n".encode()
    assert os.write(_log, line) == len(line)


async def work(run_id: str, number: int, place: int) -> int:
    note(run_id, "ran", place)
    await asyncio.sleep(random.uniform(0, LONGEST))
    return number * 10 + place


@durable.function(name="three_steps")
async def three_steps(ctx: durable.Context, number: int) -> int:
    total = 0
    for place in range(STEPS):
        total += await ctx.step(work, ctx.run_id, number, place)
        note(ctx.run_id, "got", place)
    return total


def expected(number: int) -> int:
    return sum(number * 10 + place for place in range(STEPS))


async def main(url: str, log: str) -> None:
    """Work until SIGTERM."""
    global _log
    _log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with durable.Client(url, settings=SETTINGS) as client:
        print("ready", flush=True)
        await durable.Worker(client, functions=[three_steps], lease="3s").run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
