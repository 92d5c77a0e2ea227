"""The function that the chaos campaign runs, and the worker process that runs it. Imported by the fork server, once.

Every body and every step appends one line to a log before it does anything; the end of a body and the news that its run has landed are
a line each, too: one write on a file opened with O_APPEND, so that lines of many processes do not mix and a kill can not undo one. The
log is the witness against the journal, and says whom a kill meets in the middle of a body.
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import durable
import durable_sqlite  # noqa: F401  # the entry point would load it in every worker anew
from durable.events import Event, RunSettled

STEPS = 8
BODY, END, LANDED = "body", "end", "landed"
_log = -1


def note(run_id: str, what: str) -> None:
    line = f"{time.time_ns() // 1000} {os.getpid()} {run_id} {what}\n"
    assert os.write(_log, line.encode()) == len(line)


async def work(run_id: str, number: int, place: int) -> int:
    note(run_id, str(place))
    await asyncio.sleep(random.uniform(0.002, 0.04))
    return number * 100 + place


@durable.function(name="chaos_eight_steps")
async def eight_steps(ctx: durable.Context, number: int) -> int:
    note(ctx.run_id, BODY)
    total = 0
    try:
        for place in range(STEPS):
            total += await ctx.step(work, ctx.run_id, number, place)
    finally:
        note(ctx.run_id, END)
    return total


def expected(number: int) -> int:
    return sum(number * 100 + place for place in range(STEPS))


def work_until_killed(url: str, log: str, concurrency: int) -> None:
    """The main function of a worker process; SIGTERM ends it in good order."""
    global _log
    _log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def landed(event: Event) -> None:
        if isinstance(event, RunSettled) and event.answer == "landed":
            note(event.run_id, LANDED)

    async def main() -> None:
        async with durable.Client(url, settings={"poll": "200ms", "poll_idle": "200ms"}) as client:
            # The kills follow what runs: one run may meet six in a row before its next record, and would land failed (15).
            client.events.attach(landed)
            # A lease that no living worker loses on a machine with much else to do: only kills explain a body that is begun anew.
            worker = durable.Worker(
                client, functions=[eight_steps], concurrency=concurrency, lease="10s", max_reclaims=1_000
            )
            await worker.run()

    asyncio.run(main())
