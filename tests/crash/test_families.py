"""A parent whose worker process is killed (SIGKILL) in the middle of a map: while its children are started, and while they end.

Three generations; the worker of the two older ones is killed three times, each time in the middle of the parent's journal, and another one
goes on. What must hold: every child is there once, ran its step once, and its result counts once. CI has 100 children on SQLite;
`DURABLE_FAMILY_CHILDREN=1000` and `DURABLE_FAMILY_STORES=sqlite,postgresql,mongodb` make it the whole (semantics 33, 48).
"""

from __future__ import annotations

import asyncio
import collections
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from crash.family import SETTINGS, YOUNG, grandparent, serve_elders, young
from servers import mongo, postgres

import durable
from durable.events import Event, StepRecorded
from durable.model import RecordKind

CHILDREN = int(os.environ.get("DURABLE_FAMILY_CHILDREN", "100"))
STORES = os.environ.get("DURABLE_FAMILY_STORES", "sqlite").split(",")
PATIENCE = 120 + CHILDREN / 2  # seconds: generous, nothing is measured


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that nothing has been in."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'family.db'}"
    return {"postgresql": postgres, "mongodb": mongo}[request.param].server().create().url


class Elders:
    """A worker process of the elders."""

    def __init__(self, url: str, records: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe(duplex=False)
        self.process = context.Process(target=serve_elders, args=(url, other, records), daemon=True)
        self.process.start()
        other.close()

    async def killed(self) -> str:
        """Wait until it stands where it should, and kill it. The record that it had just made."""
        assert await asyncio.to_thread(self.pipe.poll, PATIENCE), "it does not come to where it should be killed"
        place: str = self.pipe.recv()
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        await asyncio.to_thread(self.process.join)
        assert self.process.exitcode == -signal.SIGKILL
        return place

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(60)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@pytest.mark.timeout(300 + 4 * PATIENCE)
@pytest.mark.parametrize("limit", [None, 10], ids=["all at once", "ten at once"])
async def test_a_parent_that_is_killed_in_the_middle_of_a_map_starts_no_child_twice(
    url: str, limit: int | None
) -> None:
    third = CHILDREN // 3
    ran: collections.Counter[str] = collections.Counter()

    def seen(event: Event) -> None:
        if isinstance(event, StepRecorded) and event.kind is RecordKind.STEP:
            ran[event.run_id] += 1

    async with durable.Client(url, settings=SETTINGS, auto_migrate=True) as client:
        client.events.attach(seen)
        run = await client.start(grandparent, CHILDREN, limit)
        workers: list[Elders] = []
        try:
            workers.append(Elders(url, 1))  # starts of one moment are one write: behind it, nobody knows of the others
            assert await workers[-1].killed() == "map:family_child/0"
            async with durable.Worker(client, functions=young, queues=[YOUNG]):
                for _ in range(2):
                    workers.append(Elders(url, third))
                    assert (await workers[-1].killed()).startswith("map:family_child/")
                workers.append(Elders(url, None))
                assert await run.result(timeout=PATIENCE) == CHILDREN * (CHILDREN - 1)
        finally:
            for worker in workers:
                worker.stop()
        await _check(client, run, ran)


async def _check(client: durable.Client, run: durable.Run[int], ran: collections.Counter[str]) -> None:
    (middle,) = await client.store.children(run.id, scope=None)
    children = await client.store.children(middle.run_id, scope=None)
    assert len(children) == CHILDREN == len(ran)
    assert {child.status for child in children} == {durable.Status.COMPLETED}
    assert set(ran.values()) == {1}, "a child ran its step twice"
    history = await client.store.history(middle.run_id, scope=None)
    kinds = collections.Counter(record.kind for record in history)
    assert kinds == {RecordKind.START: CHILDREN, RecordKind.CHILD: CHILDREN}
    assert [record.position for record in history] == list(range(2 * CHILDREN))
    assert middle.attempts >= 4, "each kill hit the holder of the parent"
    assert list(await client.audit()) == []
