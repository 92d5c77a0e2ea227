"""What the processes of these campaigns are: functions, a worker around them, and the witness that logs which leases it had.

A body's first and last act is a line in the log, and between them it stays for as long as the fleet holds bodies. `Witness` stands between
a worker and its store and logs, for every run that it was given, an instant until which its lease certainly lasts: what was sent, plus
the lease. Between the two lies all that a limit counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flow.fleet import hold_of

import durable
import durable_mongo  # noqa: F401  # the entry points would load them in every process anew
import durable_postgres  # noqa: F401
import durable_sqlite  # noqa: F401
from durable.model import Claimed, ClaimRequest, Renewal, Renewed
from durable.protocol import Store

LEASE = 8
RATED = "rated"
QUICK = {"poll": "100ms", "poll_idle": "200ms"}
_log = -1
_hold = Path()


def note(*words: object) -> None:
    """One line in the log."""
    line = " ".join(map(str, (microseconds(), os.getpid(), *words))) + "\n"
    assert os.write(_log, line.encode()) == len(line)


def microseconds() -> int:
    """The clock of this machine, which the servers of the tests have, too."""
    return time.time_ns() // 1_000


@durable.function(name="flow_tick")
async def tick(ctx: durable.Context) -> None:
    """A slot of the every-second schedule."""
    assert ctx.scheduled_for is not None
    note("tick", int(ctx.scheduled_for.timestamp()), ctx.run_id)


async def stay(length: float, held: bool) -> None:
    """So many seconds, and, if it is held with them, until the bodies are let go."""
    await asyncio.sleep(length)
    while held and _hold.exists():
        await asyncio.sleep(0.01)


@durable.function(name="flow_limited")
async def limited(ctx: durable.Context, key: str, length: float) -> None:
    """Holds its permits for a while. It waits in a step, since a body at rest gives them back."""
    note("start", ctx.run_id, key)
    try:
        # What starts at a rate is not held: without a limit it would fill every slot before a limited run is begun.
        await ctx.step(stay, length, key != RATED)
    finally:
        note("end", ctx.run_id, key)


class Witness:
    """A worker's store, with a memory of its leases."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def claim(self, request: ClaimRequest) -> Sequence[Claimed]:
        sent = microseconds()
        claimed = await self._store.claim(request)
        for one in claimed:
            note("claim", one.run.run_id, one.run.queue, sent, sent + request.lease)
        return claimed

    async def renew(self, renewals: Sequence[Renewal], *, lease: int) -> Sequence[Renewed]:
        sent = microseconds()
        answers = await self._store.renew(renewals, lease=lease)
        for renewal, answer in zip(renewals, answers, strict=True):
            if answer.state == "held":
                note("renewed", renewal.lease.run_id, sent + lease)
        return answers


def work(log: str, url: str, concurrency: int) -> None:
    """The main function of a worker; SIGTERM ends it in good order."""
    _open(log)

    async def main() -> None:
        async with durable.Client(url, settings=QUICK) as client:
            client._opened._store = Witness(client.store)  # type: ignore[assignment]
            worker = durable.Worker(
                client, queues=("default", RATED), functions=[tick, limited], concurrency=concurrency, lease=LEASE
            )
            await worker.run()

    asyncio.run(main())


def _open(log: str) -> None:
    global _log, _hold
    _log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    _hold = hold_of(Path(log))
