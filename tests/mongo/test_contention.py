"""Many transactions at one document: the server lets one of them through and sends the others back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

import pytest
from mongo.conftest import Open, until
from pymongo import monitoring
from servers.mongo_room import Room

from durable.model import ALL, ClaimRequest, Completed, QueueRecord
from durable.settings import MINUTE
from durable.testing.conformance.scenario import new_run
from durable_mongo import Store, connection

SUBMITS = 64
WORKERS = 6
LIMIT = QueueRecord(scope_name="queue:default", max_concurrency=3 * WORKERS)
KEYS = QueueRecord(scope_name="key:default", max_concurrency=WORKERS)
WRITE_CONFLICT = 112


class Conflicts(monitoring.CommandListener):
    """Counts the commands that met another transaction, the transactions begun, and the writes to flow control outside of one."""

    def __init__(self) -> None:
        self.count = self.begun = self.waiting = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.begun += "startTransaction" in event.command
        self.waiting += event.command.get("update") == "durable_queue" and "txnNumber" not in event.command

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        self.count += event.failure.get("code") == WRITE_CONFLICT


@pytest.fixture
def conflicts() -> Iterator[Conflicts]:
    """Of the clients that are made in this test."""
    listener = Conflicts()
    monitoring.register(listener)
    yield listener
    monitoring._LISTENERS.command_listeners.remove(listener)


@pytest.mark.timeout(600)
async def test_transactions_that_met_another_one_go_one_by_one(
    conflicts: Conflicts, opened: Open, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is sent back about once: if all tried again at once, all but one would be sent back again, and again. A transaction of the
    test's own is open until some have met it."""
    monkeypatch.setattr(connection, "PATIENCE", 600.0)  # none gives up on a slow machine
    store = await opened()
    (first,) = await store.enqueue([new_run(coalesce_key="c", priority=-1)])
    with room.db.client.start_session() as session:
        session.start_transaction()
        room.db["durable_run"].update_one({"_id": first.run.run_id}, {"$set": {"touched": True}}, session=session)
        submitting = asyncio.gather(
            *(store.enqueue([new_run(coalesce_key="c", priority=number)]) for number in range(SUBMITS))
        )
        await until(lambda: conflicts.count >= SUBMITS // 4, "submits to meet a transaction")
        session.abort_transaction()
    answers = await submitting
    assert {answer.run.run_id for (answer,) in answers} == {first.run.run_id}
    (run,) = await store.get([first.run.run_id], scope=ALL)
    assert run is not None
    assert run.priority == SUBMITS - 1
    assert conflicts.count <= 2 * SUBMITS


# -- the row of a limit, which every claim and every settle of its queue writes (73) ----------------------------------------------


def request(mark: str, most: int = 1) -> ClaimRequest:
    return ClaimRequest(
        mark=mark,
        queues={"default": most},
        functions=[("work", None)],
        limit=most,
        lease=10 * MINUTE,
        family="x",
        scope=ALL,
    )


async def limited(store: Store, runs: int) -> None:
    """A queue with a limit, and so many runs in it of three keys, which have one each."""
    for record in (LIMIT, KEYS):
        await store.set_queue(record)
    await store.enqueue([new_run(concurrency_key="abc"[number % 3]) for number in range(runs)])


async def test_claims_and_settles_of_one_process_never_meet_each_other_at_a_limit(
    conflicts: Conflicts, opened: Open
) -> None:
    """They go one by one, and begin one transaction each."""
    store = await opened()
    await limited(store, 2 * WORKERS)
    before = conflicts.begun
    claimed = await asyncio.gather(*(store.claim(request(f"first:{number}")) for number in range(WORKERS)))
    again = asyncio.gather(*(store.claim(request(f"second:{number}")) for number in range(WORKERS)))
    settled = [store.settle([(one.lease, Completed(output="1"))]) for (one,) in claimed]
    assert await asyncio.gather(*settled) == [["landed"]] * WORKERS
    assert [len(found) for found in await again] == [1] * WORKERS
    assert conflicts.count == 0
    assert conflicts.begun - before == 3 * WORKERS


async def test_a_claim_that_finds_nothing_ready_begins_no_transaction(conflicts: Conflicts, opened: Open) -> None:
    """What waits for a limit is not ready: the claims of a full queue write nothing."""
    store = await opened()
    await limited(store, 5 * WORKERS)
    held = await store.claim(request("all of them", 5 * WORKERS))
    assert len(held) == 3 * WORKERS
    assert await store.claim(request("the rest is held back", 5 * WORKERS)) == []
    before = conflicts.begun
    assert [await store.claim(request(f"in vain:{number}")) for number in range(3)] == [[]] * 3
    assert conflicts.begun == before


async def test_a_claim_that_finds_the_queue_paused_begins_no_transaction(conflicts: Conflicts, opened: Open) -> None:
    store = await opened()
    await limited(store, 3)
    await store.set_queue(dataclasses.replace(LIMIT, paused=True, tenant=ALL))
    before = conflicts.begun
    assert await store.claim(request("paused")) == []
    assert conflicts.begun == before


@pytest.mark.timeout(600)
async def test_who_is_sent_back_at_a_limit_waits_there_and_tries_again_when_it_is_free(
    conflicts: Conflicts, opened: Open, room: Room
) -> None:
    """As many stores as there are workers. While a transaction of the test's own has the row, each is sent back once. Then one after
    the other gets through: whoever is sent back again has let another one pass."""
    stores = [await opened() for _ in range(WORKERS)]
    await limited(stores[0], 2 * WORKERS)
    held = [await store.claim(request(f"before:{place}")) for place, store in enumerate(stores[: WORKERS // 2])]
    with room.db.client.start_session() as session:
        session.start_transaction()
        room.db["durable_queue"].update_many({}, {"$set": {"test": True}}, session=session)
        claims = asyncio.gather(
            *(store.claim(request(f"beside:{place}")) for place, store in enumerate(stores[WORKERS // 2 :]))
        )
        settles = asyncio.gather(
            *(store.settle([(one.lease, Completed(output="1"))]) for store, (one,) in zip(stores, held, strict=False))
        )
        await until(lambda: conflicts.waiting >= WORKERS, "all of them to wait for the row")
        assert conflicts.count == WORKERS
        session.abort_transaction()
    assert [len(found) for found in await claims] == [1] * (WORKERS // 2)
    assert await settles == [["landed"]] * (WORKERS // 2)
    assert conflicts.count <= WORKERS * WORKERS
    assert list(await stores[0].audit(scope=ALL)) == []


async def test_what_waits_for_a_token_is_released_beside_who_counts_at_its_row(opened: Open, room: Room) -> None:
    """A claim decides whether there is a token for it: a promotion does not wait for claims."""
    store = await opened()
    await store.set_queue(QueueRecord(scope_name="queue:default", rate_count=1, rate_period=MINUTE, rate_burst=1))
    await store.enqueue([new_run() for _ in range(3)])
    assert len(await store.claim(request("the first token", 3))) == 1
    ready = {"ready": True}
    assert room.db["durable_run"].count_documents(ready) == 0
    room.pass_time(MINUTE)
    with room.db.client.start_session() as session:
        session.start_transaction()
        room.db["durable_queue"].update_many({}, {"$set": {"test": True}}, session=session)
        await store.promote(scope=ALL, limit=10)
        assert room.db["durable_run"].count_documents(ready) == 1
        session.abort_transaction()
    assert len(await store.claim(request("the second token", 3))) == 1
