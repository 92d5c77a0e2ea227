"""Many transactions at one document: the server lets one of them through and sends the others back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from mongo.conftest import Open, until
from pymongo import monitoring
from servers.mongo_room import Room

from durable.model import ALL
from durable.testing.conformance.scenario import new_run
from durable_mongo import connection

SUBMITS = 64
WRITE_CONFLICT = 112


class Conflicts(monitoring.CommandListener):
    """Counts the commands that met another transaction."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None: ...

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
