"""Limits hold at every instant (semantics 73, 76): runs in flight, and starts in any window.

Worker processes are killed with SIGKILL all the time, and the witness is not the database: bodies log their start and their end, and each
worker logs until when its leases certainly last. A run is in flight from its start to its end, or to the end of its lease where its
process was killed: never more of them than a queue and a key allow. A claim that was sent after the beginning of a window and answered
before its end has taken its tokens inside it. At the beginning bodies are held until every limit has been reached, and whenever a worker
is to be killed until it has one. `DURABLE_FLOW_RUNS` (200 for each store; a nox session takes 10,000) makes it longer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flow.fleet import Fleet, Line
from flow.population import QUICK, RATED, limited, work

import durable
from durable.model import QueueRecord
from durable.settings import HOUR, SECOND

RUNS = int(os.environ.get("DURABLE_FLOW_RUNS", "200"))
WORKERS = 3
OF_QUEUE, OF_KEY = 8, 3
KEYS = "abcde"
RATE, BURST = 10, 5
"""Starts in a second, and how many at once."""
KILL_EVERY = 100  # runs
PATIENCE = 300
PAUSE = max(0.05, RUNS / 20_000)
"""Seconds between two looks at the store, each of which reads every run."""
LIMITS = (
    QueueRecord(scope_name="queue:default", max_concurrency=OF_QUEUE),
    QueueRecord(scope_name="key:default", max_concurrency=OF_KEY),
)


def rate(period: int) -> QueueRecord:
    """The row of the queue that has a rate."""
    return QueueRecord(scope_name=f"queue:{RATED}", rate_count=RATE, rate_period=period, rate_burst=BURST)


class Flight(NamedTuple):
    """A stretch of time in which a run was certainly in flight."""

    pid: int
    start: int
    end: int
    key: str
    cut: bool
    """It was not ended: its process was killed, or goes on."""


class Log:
    """What the log of a fleet shows."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.flights: list[Flight] = []
        self.claims: list[tuple[int, int]] = []
        """Of runs with a rate: when the claim was sent, and when it was answered."""
        self.unended: set[int] = set()
        """Processes that have bodies which they did not end."""
        self._leases: dict[tuple[int, str], int] = {}
        self._open: dict[tuple[int, str], tuple[int, str]] = {}
        for line in lines:
            what, run_id, *rest = line.words
            run = (line.pid, run_id)
            if what == "claim":
                queue, sent, until = rest
                self._close(run, line.at)
                self._leases[run] = int(until)
                if queue == RATED:
                    self.claims.append((int(sent), line.at))
            elif what == "renewed":
                self._leases[run] = max(self._leases[run], int(rest[0]))
            elif what == "start":
                self._open[run] = (line.at, rest[0])
            elif what == "end":
                self._close(run, line.at)
        for run in list(self._open):
            self.unended.add(run[0])
            self._close(run, None)

    def _close(self, run: tuple[int, str], at: int | None) -> None:
        if run in self._open:
            start, key = self._open.pop(run)
            lease = self._leases[run]
            if key != RATED:
                self.flights.append(Flight(run[0], start, lease if at is None else min(at, lease), key, at is None))

    def most(self, key: str | None = None) -> int:
        """How many were in flight at once, of a key or in all."""
        changes: list[tuple[int, int]] = []
        for flight in self.flights:
            if key in (None, flight.key) and flight.end > flight.start:
                changes += [(flight.start, 1), (flight.end, -1)]
        return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)

    def most_above_the_rate(self) -> float:
        """Over all windows: how many starts more than the rate allows for their length. At most the burst."""
        most = 0.0
        for begin in {sent for sent, _ in self.claims}:
            inside = sorted(back for sent, back in self.claims if sent >= begin)
            most = max(most, *(count - RATE * (back - begin) / SECOND for count, back in enumerate(inside, 1)))
        return most


@pytest.mark.timeout(600 + RUNS)
def test_no_limit_is_exceeded_at_any_instant_though_workers_are_killed(url: str, tmp_path: Path) -> None:
    asyncio.run(_submitted(url))
    with Fleet(tmp_path, WORKERS, work, url, 20, held=True) as fleet:
        asyncio.run(_campaign(url, fleet))
        fleet.stop()
        log = Log(fleet.lines())
    most, most_of_key = log.most(), max(log.most(key) for key in KEYS)
    cut = sum(flight.cut for flight in log.flights)
    above = log.most_above_the_rate()
    print(
        f"\n{RUNS} runs, {len(fleet.killed)} kills, {cut} runs cut off; in flight at most {most} of {OF_QUEUE}, of one key"
        f" {most_of_key} of {OF_KEY}; {len(log.claims)} starts with a rate, at most {above:.1f} above it, burst {BURST}"
    )
    assert most <= OF_QUEUE
    assert most_of_key <= OF_KEY
    assert above <= BURST
    assert log.unended <= fleet.killed.keys(), "a body was begun, and not ended, by a process that was not killed"
    assert (most, most_of_key) == (OF_QUEUE, OF_KEY), "void: the limits were never reached"
    assert cut >= len(fleet.killed) > 0, "void: the kills hit no run in flight"


async def _submitted(url: str) -> None:
    """Three quarters of the runs with a limit, a quarter with a rate. More of one key than it allows stand in front."""
    dice = random.Random(73)
    async with durable.Client(url) as client:
        for limit in (*LIMITS, rate(HOUR)):
            await client.store.set_queue(limit)
        for first in range(0, RUNS, 100):
            starts: list[Awaitable[Any]] = []
            for number in range(first, min(first + 100, RUNS)):
                if number % 4:
                    key = KEYS[0] if number < 2 * OF_KEY else dice.choice(KEYS)
                    keyed = limited.using(concurrency_key=key, priority=int(number < 2 * OF_KEY))
                    starts.append(client.start(keyed, key, dice.uniform(0.02, 0.12)))
                else:
                    starts.append(client.start(limited.using(queue=RATED), RATED, 0.001))
            await asyncio.gather(*starts)


async def _campaign(url: str, fleet: Fleet) -> None:
    """Fill every limit, then kill a worker after every so many runs, until all of them have ended."""
    dice = random.Random(74)
    async with durable.Client(url, settings=QUICK) as client:
        deadline = time.monotonic() + PATIENCE
        while not await _all_limits_are_reached(client, fleet):
            assert time.monotonic() < deadline, "void: the limits are never reached"
            await asyncio.sleep(PAUSE)
        await client.store.set_queue(rate(SECOND))
        await _kill_one_that_is_at_work(fleet, dice)
        deadline = time.monotonic() + PATIENCE + RUNS / 2
        while (done := await client.count(status="completed")) < RUNS:
            assert time.monotonic() < deadline, f"{done} of {RUNS} runs have ended"
            if done // KILL_EVERY >= len(fleet.killed) and await _waiting(client):
                await _kill_one_that_is_at_work(fleet, dice)
            await asyncio.sleep(PAUSE)
        assert list(await client.audit()) == []


async def _all_limits_are_reached(client: durable.Client, fleet: Fleet) -> bool:
    """As many are in flight as a queue and a key allow, and a run waits for a token."""
    log = Log(fleet.lines())
    if (log.most(), max(log.most(key) for key in KEYS)) != (OF_QUEUE, OF_KEY):
        return False
    return any(queue.blocked for queue in await client.store.stats(scope=None) if queue.queue == RATED)


async def _waiting(client: durable.Client) -> bool:
    """Is a run with a limit still to be claimed?"""
    stats = await client.store.stats(scope=None)
    return any(queue.ready + queue.blocked > 0 for queue in stats if queue.queue == "default")


async def _kill_one_that_is_at_work(fleet: Fleet, dice: random.Random) -> None:
    """What has begun a body and not ended it, by the log, does not end it before the kill: bodies are held."""
    fleet.hold.touch()
    deadline = time.monotonic() + PATIENCE
    places: list[int] = []
    while not places:
        assert time.monotonic() < deadline, "void: no body is begun"
        await asyncio.sleep(0.05)
        at_work = {flight.pid for flight in Log(fleet.lines()).flights if flight.cut}
        places = [place for place, process in enumerate(fleet.processes) if process.pid in at_work]
    await asyncio.to_thread(fleet.kill, dice.choice(places))
    fleet.hold.unlink()
