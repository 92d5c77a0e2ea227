"""How often an operation waits for the server: what a step, a claim and an end cost in round trips (docs/performance.md).

Counted, not timed: each call of `Database.ask` is one round trip. Notifications go out with a commit, or beside, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest

from durable.errors import Conflict
from durable.model import ALL, Claimed, ClaimRequest, Completed, Lease, NewRecord, RecordKind
from durable.settings import SECOND
from durable.testing.conformance.scenario import Scene, new_run
from durable_postgres import Store
from durable_postgres.connection import Database
from durable_postgres.operation import Ask, Last, Operation, Work
from durable_postgres.wakeups import NOTIFY


class Trips(list[list[str]]):
    """The statements of each round trip."""

    def taken(self) -> int:
        """How many since the last time."""
        number = len(self)
        self.clear()
        return number


@pytest.fixture
def trips() -> Iterator[Trips]:
    seen = Trips()
    ask = Database.ask

    async def counted(database: Database, con: object, asks: list[Ask], hints: Sequence[Ask] = ()) -> object:
        texts = [one.text for one in asks]
        if NOTIFY not in texts:
            seen.append(texts)
        return await ask(database, con, asks, hints)  # type: ignore[arg-type]

    with mock.patch.object(Database, "ask", counted):
        yield seen


def request(mark: str, *, alone: bool = True) -> ClaimRequest:
    return ClaimRequest(
        mark=mark, queues={"default": 10}, functions=(("work", None),), limit=10, lease=60 * SECOND, family="f", scope=ALL,
        alone=alone,
    )  # fmt: skip


def record(step_id: str, position: int) -> NewRecord:
    return NewRecord(
        step_id=step_id, kind=RecordKind.STEP, position=position, seen=position - 1, digest="d", result='{"v":1}'
    )


async def claimed(store: Store, mark: str = "w:1") -> Claimed:
    (one,) = await store.claim(request(mark))
    return one


async def test_a_run_of_one_step_takes_four_round_trips(scene: Scene, trips: Trips) -> None:
    store = scene.store
    await scene.submit()  # opens the first connection
    await store.claim(request("w:0"))
    trips.clear()
    await store.enqueue([new_run()])
    assert trips.taken() == 1
    one = await claimed(store)  # type: ignore[arg-type]
    assert trips.taken() == 1, "a worker that holds nothing claims as quickly as any other"
    (appended,) = await store.append([(one.lease, record("a", 0))])
    assert (appended.state, trips.taken()) == ("appended", 1)
    assert await store.settle([(one.lease, Completed(output="1"))]) == ["landed"]
    assert trips.taken() == 1
    assert (await store.get([one.run.run_id], scope=ALL))[0].status == "completed"  # type: ignore[union-attr]


async def test_what_is_written_again_and_again_is_not_planned_anew(store: Store) -> None:
    """Left to itself the server plans a claim each time, which costs more than the claim."""
    scene = Scene(store, None)  # type: ignore[arg-type]
    for number in range(12):
        await scene.submit()
        (one,) = await store.claim(request(f"w:{number}"))
        await store.append([(one.lease, record("a", 0))])
        await store.settle([(one.lease, Completed(output="1"))])

    plans: dict[str, tuple[int, int]] = {}
    pool = await store._database.pools.of_this_loop()
    made = next(iter(store._database.pools._connections.values()))
    for con in [await pool.getconn() for _ in made]:  # each of them, also one that has just told others the news
        found = await con.execute("SELECT statement, generic_plans, custom_plans FROM pg_prepared_statements")
        plans |= {text: (generic, custom) for text, generic, custom in await found.fetchall() if "durable_run" in text}
        await pool.putconn(con)
    assert {"WITH dispute", "WITH held", "UPDATE", "INSERT"} == {
        word
        for text in plans
        for word in ("WITH dispute", "WITH held", "UPDATE", "INSERT")
        if text.strip().startswith(word)
    }
    assert all(generic > 0 and custom == 0 for generic, custom in plans.values()), plans


async def test_the_connection_that_came_back_last_is_the_next_one(store: Store) -> None:
    """What it has prepared and what its server process has in its caches is used again, and the others may rest."""
    pool = await store._database.pools.of_this_loop()
    made = [await pool.getconn() for _ in range(3)]
    for con in made:
        await pool.putconn(con)
    for _ in range(2):
        async with pool.connection() as con:
            assert con is made[-1]
            async with pool.connection() as beside:
                assert beside is made[-2]


async def test_one_lost_fence_in_a_batch_is_told_and_the_others_are_written(scene: Scene) -> None:
    store = scene.store
    await scene.submit()
    await scene.submit()
    first, second = await store.claim(request("w:1"))
    gone = Lease(run_id=second.lease.run_id, tenant=None, attempts=second.lease.attempts, mark="another")
    answers = await store.append([(first.lease, record("a", 0)), (gone, record("a", 0))])
    assert [answer.state for answer in answers] == ["appended", "lost"]
    again = await store.append([(first.lease, record("a", 0)), (second.lease, record("a", 0))])
    assert [answer.state for answer in again] == ["recorded", "appended"]
    assert again[0].record == answers[0].record


async def test_two_records_of_one_position_are_a_conflict_and_the_first_stays(scene: Scene) -> None:
    store = scene.store
    await scene.submit()
    one = await claimed(store)  # type: ignore[arg-type]
    await store.append([(one.lease, record("a", 0))])
    with pytest.raises(Conflict):
        await store.append([(one.lease, record("b", 0))])
    assert await scene.steps(one.run.run_id) == ["a"]


async def test_a_worker_that_holds_nothing_takes_the_run_that_must_be_alone_first(scene: Scene) -> None:
    store = scene.store
    poison = await scene.submit()
    for number in range(2):  # two leases that lapse in a row
        (held,) = await store.claim(request(f"p:{number}"))
        await _lapse(store, held)
        await store.sweep(scope=ALL, limit=10, max_reclaims=5)
    other = await scene.submit()
    beside = await store.claim(request("w:1", alone=False))
    assert [one.run.run_id for one in beside] == [other.run.run_id]
    await scene.submit()
    assert [one.run.run_id for one in await store.claim(request("w:2"))] == [poison.run.run_id]


async def _lapse(store: object, held: Claimed) -> None:
    database: Database = store._database  # type: ignore[attr-defined]
    await database.write(lambda work: _lapsed(held.run.run_id))


def _lapsed(run_id: str) -> Operation[None]:
    yield [Ask("UPDATE durable_run SET leased_until = now() - interval '1 s' WHERE run_id = $1", (run_id,))]


async def test_an_operation_that_asks_for_more_after_its_last_statement_is_a_defect(store: Store) -> None:
    def wrong(work: Work) -> Operation[None]:
        yield [Ask("SELECT 1")]
        yield Last((Ask("SELECT 2"),))
        yield [Ask("SELECT 3")]

    with pytest.raises(RuntimeError, match="after its last statement"):
        await store._database.write(wrong)


async def test_what_goes_wrong_with_the_last_statement_leaves_nothing(scene: Scene) -> None:
    run_id = (await scene.submit()).run.run_id

    def wrong(work: Work) -> Operation[None]:
        yield [Ask("UPDATE durable_run SET priority = 7 WHERE run_id = $1", (run_id,))]
        yield Last((Ask("SELECT 1 / 0"),))

    with pytest.raises(Exception, match="division by zero"):
        await scene.store._database.write(wrong)  # type: ignore[attr-defined]
    found = (await scene.store.get([run_id], scope=ALL))[0]
    assert found is not None
    assert found.priority == 0
