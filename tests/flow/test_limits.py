"""Limits hold at every instant (semantics 73, 76): runs in flight, and starts in any window.

Worker processes are killed with SIGKILL all the time, and the witness is not the database: bodies log their start and their end, and each
worker logs until when its leases certainly last. A run is in flight from its start to its end, or to the end of its lease where its
process was killed: never more of them than a queue and a key allow. A claim that was sent after the beginning of a window and answered
before its end has taken its tokens inside it. `DURABLE_FLOW_RUNS` (200 for each store; a nox session takes 10,000) makes it longer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flow.fleet import Fleet, Line
from flow.population import QUICK, RATED, limited, work

import durable
from durable.model import QueueRecord
from durable.settings import SECOND

RUNS = int(os.environ.get("DURABLE_FLOW_RUNS", "200"))
WORKERS = 3
OF_QUEUE, OF_KEY = 8, 3
KEYS = "abcde"
RATE, BURST = 10, 5
"""Starts in a second, and how many at once."""
KILL_EVERY = 100  # runs
LIMITS = (
    QueueRecord(scope_name="queue:default", max_concurrency=OF_QUEUE),
    QueueRecord(scope_name="key:default", max_concurrency=OF_KEY),
    QueueRecord(scope_name=f"queue:{RATED}", rate_count=RATE, rate_period=SECOND, rate_burst=BURST),
)


class Flight(NamedTuple):
    """A stretch of time in which a run was certainly in flight."""

    start: int
    end: int
    key: str
    cut: bool
    """Its process was killed."""


class Log:
    """What the log of a fleet shows."""

    def __init__(self, lines: Iterable[Line], killed: dict[int, int]) -> None:
        self.flights: list[Flight] = []
        self.claims: list[tuple[int, int]] = []
        """Of runs with a rate: when the claim was sent, and when it was answered."""
        self._killed = killed
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
            assert run[0] in killed, "a body was begun, and not ended, by a process that was not killed"
            self._close(run, None)

    def _close(self, run: tuple[int, str], at: int | None) -> None:
        if run in self._open:
            start, key = self._open.pop(run)
            lease = self._leases[run]
            if key != RATED:
                self.flights.append(Flight(start, lease if at is None else min(at, lease), key, at is None))

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


@pytest.mark.timeout(240 + RUNS)
def test_no_limit_is_exceeded_at_any_instant_though_workers_are_killed(url: str, tmp_path: Path) -> None:
    asyncio.run(_submitted(url))
    with Fleet(tmp_path, WORKERS, work, url, 20) as fleet:
        asyncio.run(_campaign(url, fleet))
        fleet.stop()
        log = Log(fleet.lines(), fleet.killed)
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
    assert (most, most_of_key) == (OF_QUEUE, OF_KEY), "void: the limits were never reached"
    assert above > 1, "void: nobody was held back by the rate"
    assert cut >= len(fleet.killed) / 2, "void: the kills hit no run in flight"


async def _submitted(url: str) -> None:
    """Three quarters of the runs with a limit, a quarter with a rate."""
    dice = random.Random(73)
    async with durable.Client(url) as client:
        for limit in LIMITS:
            await client.store.set_queue(limit)
        for first in range(0, RUNS, 100):
            starts: list[Awaitable[Any]] = []
            for number in range(first, min(first + 100, RUNS)):
                if number % 4:
                    key = dice.choice(KEYS)
                    starts.append(client.start(limited.using(concurrency_key=key), key, dice.uniform(0.02, 0.12)))
                else:
                    starts.append(client.start(limited.using(queue=RATED), RATED, 0.001))
            await asyncio.gather(*starts)


async def _campaign(url: str, fleet: Fleet) -> None:
    """Kill a worker after every so many runs, until all of them have ended."""
    dice = random.Random(74)
    async with durable.Client(url, settings=QUICK) as client:
        deadline = time.monotonic() + 150 + RUNS / 2
        while (done := await client.count(status="completed")) < RUNS or len(fleet.killed) < RUNS // KILL_EVERY - 1:
            assert time.monotonic() < deadline, f"{done} of {RUNS} runs have ended"
            if done // KILL_EVERY > len(fleet.killed):
                await asyncio.to_thread(_kill_one_that_is_at_work, fleet, dice)
            await asyncio.sleep(0.05)
        assert list(await client.audit()) == []


def _kill_one_that_is_at_work(fleet: Fleet, dice: random.Random) -> None:
    """The end of the log says who has just begun a body; if nobody has for a while, any of them."""
    deadline = time.monotonic() + 5
    while True:
        flights = Counter[int]()
        for line in fleet.lines(last=4_096):
            flights[line.pid] += {"start": 1, "end": -1}.get(line.words[0], 0)
        places = [place for place, process in enumerate(fleet.processes) if flights[process.pid] > 0]
        if places or time.monotonic() > deadline:
            return fleet.kill(dice.choice(places or range(WORKERS)))
        time.sleep(0.002)
