"""A claim of many functions takes what is first in its queue, whichever functions it is of (rule 7).

The heads of the functions are read in parts and merged (`claim.py`): each claim is compared with a sort of what is left, for shares of
every size between the functions, for priorities, versions and replay families, and beside runs that another transaction has locked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
from postgres.conftest import Open, pretending, until
from servers.postgres import Database

from durable.model import ALL, Claimed, ClaimRequest, HandedBack, NewRun, QueueRecord
from durable.settings import SECOND
from durable.testing.conformance.scenario import Scene, new_run
from durable_postgres import Store

SHARES: dict[str, Callable[[int, int], float]] = {
    "even": lambda number, count: 1.0,
    "falling": lambda number, count: 1 / (1 + number),
    "one has it all": lambda number, count: 1.0 if number == 0 else 0.0,
    "one has nearly all": lambda number, count: 1.0 if number == count - 1 else 0.02,
}
RUNS = 120


@dataclasses.dataclass
class Backlog:
    """The runs of a queue in the order in which they are to be taken."""

    queue: str
    functions: Sequence[tuple[str, str | None]]
    runs: list[NewRun]

    async def take(self, store: Store, room: int, mark: str) -> list[str]:
        request = ClaimRequest(
            mark=mark, queues={self.queue: room}, functions=self.functions, limit=room, lease=60 * SECOND, family="f", scope=ALL
        )  # fmt: skip
        return [one.run.run_id for one in await store.claim(request)]

    def first(self, room: int, without: Sequence[str] = ()) -> list[str]:
        """The next ones, which are taken out."""
        taken = [run for run in self.runs if run.run_id not in without][:room]
        self.runs = [run for run in self.runs if run not in taken]
        return [run.run_id for run in taken]


async def backlog(scene: Scene, seed: str, chance: random.Random) -> Backlog:
    """Runs of some functions, in a random order or one function after the other, with few or many priorities."""
    count = chance.choice((1, 2, 3, 7, 20))
    share = SHARES[chance.choice(sorted(SHARES))]
    names = chance.choices(range(count), [share(number, count) for number in range(count)], k=RUNS)
    if chance.random() < 0.3:
        names.sort()
    priorities = chance.choice((1, 3, 50))
    versions = chance.choice(([None], [None, "1", "2"]))
    runs = [
        new_run(
            run_id=f"{seed}-{number}", name=f"f{name}", version=chance.choice(versions), queue=seed,
            priority=chance.randrange(priorities),
        )
        for number, name in enumerate(names)
    ]  # fmt: skip
    await scene.store.enqueue(runs)
    runs.sort(key=lambda run: -run.priority)  # runs of a batch are submitted in its order
    functions = [(f"f{number}", version) for number in range(count) for version in versions]
    return Backlog(seed, functions, runs)


@pytest.mark.parametrize("seed", range(40))
async def test_a_claim_takes_the_first_of_the_queue_whichever_functions_they_are_of(scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    left = await backlog(scene, f"q{seed}", chance)
    claims = 0
    while left.runs:
        room = chance.choice((1, 2, 5, 10, 50))
        claims += 1
        assert await left.take(scene.store, room, f"m{claims}") == left.first(room)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(10))
async def test_a_claim_passes_over_what_another_has_locked_and_takes_the_first_of_the_rest(
    scene: Scene, database: Database, seed: int
) -> None:
    chance = random.Random(seed)
    left = await backlog(scene, f"q{seed}", chance)
    with database.connect() as con:
        con.execute("BEGIN")
        locked = [run.run_id for run in left.runs[:60] if chance.random() < 0.7]
        con.execute("SELECT FROM durable_run WHERE run_id = ANY (%s) FOR UPDATE", [locked])
        for claims in range(3):
            room = chance.choice((2, 10, 30))
            assert await left.take(scene.store, room, f"m{claims}") == left.first(room, without=locked)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
async def test_runs_with_a_journal_and_runs_without_one_are_taken_in_one_order(scene: Scene, seed: int) -> None:
    """A run that was handed back has a replay family, and with it a place of its own in the index."""
    chance = random.Random(seed)
    left = await backlog(scene, f"q{seed}", chance)
    first = ClaimRequest(
        mark="first", queues={left.queue: 40}, functions=left.functions, limit=40, lease=60 * SECOND, family="f", scope=ALL
    )  # fmt: skip
    held = await scene.store.claim(first)
    back: list[Claimed] = chance.sample(list(held), 30)
    assert set(await scene.store.settle([(one.lease, HandedBack()) for one in back])) == {"landed"}
    gone = {one.run.run_id for one in held} - {one.run.run_id for one in back}
    left.runs = [run for run in left.runs if run.run_id not in gone]
    for claims in range(4):
        room = chance.choice((3, 10, 30))
        assert await left.take(scene.store, room, f"m{claims}") == left.first(room)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
async def test_a_claim_that_flow_control_has_a_say_in_takes_them_in_the_same_order(scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    left = await backlog(scene, f"q{seed}", chance)
    limited = QueueRecord(scope_name=f"queue:{left.queue}", tenant=ALL, max_concurrency=1_000)
    await scene.store.set_queue(limited)
    for claims in range(4):
        room = chance.choice((3, 10, 30))
        assert await left.take(scene.store, room, f"m{claims}") == left.first(room)  # type: ignore[arg-type]


async def test_a_run_whose_priority_is_raised_meanwhile_is_taken_once_and_hides_nobody(
    scene: Scene, database: Database, opened: Open
) -> None:
    """A submit joins a run and is committed after the claim's statement has begun, and before it reads its first row."""
    names = [f"r{number}" for number in range(8)]
    await scene.store.enqueue([new_run(run_id=name, name="f0", coalesce_key=name) for name in names])
    waits = "pg_catalog.cardinality($1) FROM (SELECT pg_catalog.pg_advisory_xact_lock_shared(7)) AS wait"
    claiming = await opened(url=pretending(database, "cardinality(text[])", "integer", waits))
    left = Backlog("default", [("f0", None), ("f1", None)], [])
    with database.connect() as con:
        con.execute("SELECT pg_advisory_lock(7)")
        claim = asyncio.create_task(left.take(claiming, 4, "m"))
        waiting = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted"
        await until(lambda: con.execute(waiting).fetchone(), "the claim to begin")
        await scene.store.enqueue([new_run(name="f0", coalesce_key="r1", priority=9)])
        con.execute("SELECT pg_advisory_unlock(7)")
        assert await claim == ["r1", "r0", "r2", "r3"]
