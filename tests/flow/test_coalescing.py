"""Many submitters of one coalesce key against a worker that claims (semantics 36): the last submit is always seen.

Two processes with 32 submitters each. A submitter writes its number where a run would read it, then submits, with its number as the
priority too: the run that it is told of must read a number that is not older, and must have been claimed with a priority that is not
lower, since the submit was stored before the claim. Meanwhile an observer counts the runs that wait: never more than one.
`DURABLE_FLOW_ROUNDS` (30; a nox session takes 1,000) says how often; it goes on until claims have come between submits, submitters have
joined and the observer has seen a run that waits.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
from flow.population import QUICK

import durable
from durable.model import ALL, Claimed, ClaimRequest, Completed, RunQuery, Status, new_run_id
from durable.portal import end_tasks
from durable.protocol import Store
from durable.settings import MINUTE

ROUNDS = int(os.environ.get("DURABLE_FLOW_ROUNDS", "30"))
PROCESSES = 2
SUBMITTERS = 32
SPREADS = (0, 0.02, 0.2)
"""Seconds over which the submits of a round are spread, in turn: all at once, and with claims between them."""
MOST = 10
"""Times as many rounds as were asked for, at the most."""


@durable.function(name="flow_covered")
async def covered(ctx: durable.Context) -> None:
    """What is submitted; the test claims it itself."""


class Said(NamedTuple):
    """What a submitter was told."""

    number: int
    run_id: str
    disposition: str


def submit_when_told(url: str, pipe: Connection, newest: Any) -> None:
    """The main function of a process of submitters: a round for each key and spread that come through the pipe, until there is none."""

    async def submit(client: durable.Client, key: str, spread: float) -> Said:
        await asyncio.sleep(random.uniform(0, spread))
        with newest.get_lock():
            newest.value += 1
            number = int(newest.value)
        run = await client.start(covered.using(coalesce_key=key, priority=number))
        return Said(number, run.id, str(run.disposition))

    async def main() -> None:
        async with durable.Client(url, settings=QUICK) as client:
            pipe.send(None)
            while order := await asyncio.to_thread(pipe.recv):
                pipe.send(await asyncio.gather(*(submit(client, *order) for _ in range(SUBMITTERS))))

    asyncio.run(main())


class Round:
    """One key: the submitters are let loose, the worker claims until all that was submitted has run."""

    def __init__(self, store: Store, observer: Store, newest: Any) -> None:
        self.store, self.observer, self.newest = store, observer, newest
        self.read: dict[str, int] = {}
        self.claimed: dict[str, Claimed] = {}
        self.waiting: list[int] = []

    async def run(self, key: str, spread: float, pipes: Sequence[Connection]) -> list[Said]:
        """What all submitters were told."""
        self.newest.value = 0
        for pipe in pipes:
            pipe.send((key, spread))
        told = asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in pipes))
        watching = asyncio.create_task(self._watch())
        try:
            while not told.done():
                await self._claim()
            while await self._claim():
                pass
        finally:
            await end_tasks([watching])
        return [said for answers in await told for said in answers]

    async def _claim(self) -> int:
        request = ClaimRequest(
            mark=new_run_id(),
            queues={"default": 10},
            functions=[(covered.name, None)],
            limit=10,
            lease=MINUTE,
            family="3.12",
            scope=ALL,
        )
        claimed = await self.store.claim(request)
        now = int(self.newest.value)  # a body that starts now reads this
        for one in claimed:
            self.claimed[one.run.run_id], self.read[one.run.run_id] = one, now
        await self.store.settle([(one.lease, Completed(output="null")) for one in claimed])
        return len(claimed)

    async def _watch(self) -> None:
        while True:
            self.waiting.append(await self.observer.count(RunQuery(statuses=(Status.PENDING,)), scope=ALL))
            await asyncio.sleep(0.005)


@pytest.mark.timeout(240 + 6 * ROUNDS)
def test_the_last_submit_is_always_seen_by_a_run_that_starts_after_it_and_at_most_one_waits(url: str) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*sys.path, os.environ.get("PYTHONPATH", "")]))
    context = multiprocessing.get_context("spawn")
    newest = context.Value("q", 0)
    ends = [context.Pipe() for _ in range(PROCESSES)]
    processes = [
        context.Process(target=submit_when_told, args=(url, theirs, newest), daemon=True) for _, theirs in ends
    ]
    for process, (_, theirs) in zip(processes, ends, strict=True):
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
    try:
        asyncio.run(_rounds(url, [ours for ours, _ in ends], newest))
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


async def _rounds(url: str, pipes: Sequence[Connection], newest: Any) -> None:
    told, runs, waiting = Counter[str](), Counter[int](), Counter[int]()
    async with AsyncExitStack() as stack:
        store, observer = [
            (await stack.enter_async_context(durable.Client(url, settings=QUICK))).store for _ in range(2)
        ]
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        rounds = 0
        while rounds < ROUNDS or not (max(runs) > 1 and told["coalesced"] > ROUNDS and waiting[1]):
            assert rounds < MOST * ROUNDS, f"void: no claim between submits, nobody who joined or waited: {runs} {told}"
            one = Round(store, observer, newest)
            said = await one.run(f"round {rounds}", SPREADS[rounds % len(SPREADS)], pipes)
            _check(one, said)
            told.update(answer.disposition for answer in said)
            runs[len(one.claimed)] += 1
            waiting.update(one.waiting)
            rounds += 1
        assert list(await store.audit(scope=ALL)) == []
    for pipe in pipes:
        pipe.send(None)
    print(
        f"\n{rounds} rounds of {PROCESSES * SUBMITTERS} submits: {dict(told)}, runs in a round {dict(sorted(runs.items()))},"
        f" {sum(waiting.values())} looks at what waits {dict(sorted(waiting.items()))}"
    )


def _check(one: Round, said: Sequence[Said]) -> None:
    assert len(said) == PROCESSES * SUBMITTERS
    assert sorted(answer.number for answer in said) == list(range(1, len(said) + 1))
    for answer in said:
        assert answer.run_id in one.claimed, f"{answer} was told of a run that nobody could claim"
        assert one.claimed[answer.run_id].run.priority >= answer.number, f"{answer} joined after the claim"
        assert one.read[answer.run_id] >= answer.number, f"{answer} was not seen"
    created = Counter(answer.run_id for answer in said if answer.disposition == "created")
    assert set(created) == set(one.claimed)
    assert set(created.values()) == {1}
    assert set(one.waiting) <= {0, 1}, "more than one run waited"
