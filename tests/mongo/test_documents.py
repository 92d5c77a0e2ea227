"""What documents hold (rules 9, 70, 71): milliseconds that nobody sees, sizes that are refused, and documents that are damaged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mongo.conftest import Open
from pymongo.errors import BulkWriteError, DocumentTooLarge, OperationFailure, PyMongoError
from servers.mongo_room import Room

from durable.errors import Conflict, PayloadTooLarge
from durable.model import ALL, Completed, Status, Suspended
from durable.settings import HOUR, SECOND
from durable.storekit import RECORD_ROOM
from durable.testing.conformance.scenario import ACME, Scene, new_run, schedule
from durable_mongo import faults
from durable_mongo.opening import LARGEST_PAYLOAD
from durable_mongo.operation import Work


@pytest.mark.parametrize("odd", [1, 499, 500, 999])
async def test_what_is_answered_is_what_is_stored_whatever_the_microseconds(scene: Scene, odd: int) -> None:
    start, end = scene.store.clock() + HOUR + odd, scene.store.clock() + 2 * HOUR + odd
    answer = await scene.submit(start_at=start, deadline_at=end, scheduled_for=start, schedule_id="s")
    assert await scene.get(answer.run.run_id) == answer.run
    row = await scene.store.put_schedule(schedule(next_fire_at=start), scope=None)
    assert list(await scene.store.schedules(scope=None)) == [row]


@pytest.mark.parametrize("odd", [1, 999])
async def test_what_must_not_come_early_is_cut_upwards(scene: Scene, odd: int) -> None:
    start = scene.store.clock() + HOUR + odd
    run = await scene.start(start_at=start, queue="later")
    assert run.available_at is not None
    assert start <= run.available_at < start + 1_000
    held = await scene.take()
    answer = await scene.append(held, "a", floor=start)
    assert answer.record is not None
    assert start <= answer.record.at < start + 1_000
    assert await scene.settle(held, Suspended(until=start, waiting_for="{}", wake_seq=0)) == "landed"
    until = (await scene.get(held.run.run_id)).available_at
    assert until is not None
    assert start <= until < start + 1_000


async def test_every_payload_is_stored_as_text(scene: Scene, room: Room) -> None:
    """A value like {"$ref": …, "$id": …} would come back as something else."""
    tricky = json.dumps({"$ref": "a", "$id": "b", "a.b": {"$set": 1}})
    held = await scene.take(input=tricky)
    await scene.append(held, "a", result=tricky)
    await scene.settle(held, Completed(output=tricky))
    run = await scene.get(held.run.run_id)
    assert (run.input, run.output) == (tricky, tricky)
    stored: Any = room.db["durable_run"].find_one({})
    assert (type(stored["input"]), type(stored["output"])) == (str, str)
    assert type(room.db["durable_step"].find_one({})["result"]) is str  # type: ignore[index]


async def test_a_payload_over_the_limit_is_refused_and_harms_no_neighbour(opened: Open) -> None:
    store = await opened(settings={"max_payload": 1_000})
    scene = Scene(store, None)  # type: ignore[arg-type]
    first, second = await scene.take(), await scene.take()
    large = await scene.record(first.run.run_id, "a", result=json.dumps("x" * (RECORD_ROOM + 2_000)))
    small = await scene.record(second.run.run_id, "a")
    with pytest.raises(PayloadTooLarge):
        await store.append([(first.lease, large), (second.lease, small)])
    assert await scene.steps(second.run.run_id) == []
    assert [answer.state for answer in await store.append([(second.lease, small)])] == ["appended"]


async def test_a_run_with_the_largest_payload_in_every_place_is_one_document(opened: Open) -> None:
    """So whatever does not fit is refused before it is written, and no run grows until its end can not be stored (70)."""
    store = await opened(settings={"max_payload": LARGEST_PAYLOAD})
    scene = Scene(store, None)  # type: ignore[arg-type]
    big = json.dumps("x" * (LARGEST_PAYLOAD - 2))
    held = await scene.take(input=big, options=big)
    assert (await scene.append(held, "a", result=big, progress=big)).state == "appended"
    assert await scene.settle(held, Completed(output=big)) == "landed"
    run = await scene.get(held.run.run_id)
    assert run.input == run.output == run.progress == big
    for place in ("input", "options"):
        with pytest.raises(PayloadTooLarge):
            await store.enqueue([new_run(**{place: big + " "})])
    other = await scene.take()
    with pytest.raises(PayloadTooLarge):
        await scene.settle(other, Completed(output=big + " "))
    assert await scene.settle(other, Completed(output="1")) == "landed"


TOO_LARGE = [
    DocumentTooLarge("BSON document too large"),
    OperationFailure("BSONObj size is invalid", 10334),
    OperationFailure("Resulting document after update is larger than 16777216", 17419),
    BulkWriteError({"writeErrors": [{"index": 0, "code": 2, "errmsg": "object to insert too large"}]}),
]


@pytest.mark.parametrize("error", TOO_LARGE, ids=lambda error: type(error).__name__ + str(getattr(error, "code", "")))
def test_each_way_in_which_the_server_refuses_a_size_is_one_error(error: PyMongoError) -> None:
    made = faults.mapped(error)
    assert isinstance(made, PayloadTooLarge)
    assert made.__cause__ is error


@pytest.mark.parametrize("run_id", ["", "a/b", "x" * 2_000])
async def test_an_id_under_which_nothing_could_be_stored_is_refused(scene: Scene, run_id: str) -> None:
    with pytest.raises(Conflict):
        await scene.start(run_id=run_id)
    run = await scene.start()
    with pytest.raises(Conflict):
        await scene.store.fork(run.run_id, scope=ALL, new_run_id=run_id, from_step=0)
    assert len(await scene.runs()) == 1


async def test_one_run_whose_id_begins_with_anothers_has_its_own_records(scene: Scene) -> None:
    one, other = await scene.take(run_id="r"), await scene.take(run_id="r1")
    await scene.append(one, "a")
    await scene.append(other, "b")
    assert (await scene.steps("r"), await scene.steps("r1")) == (["a"], ["b"])
    await scene.complete(one)
    await scene.store.purge(scope=ALL, limit=10, older_than=-SECOND)
    assert await scene.steps("r1") == ["b"]


DAMAGES: dict[str, dict[str, Any]] = {
    "input": {"$set": {"input": 7}},
    "seed": {"$unset": {"seed": ""}},
    "tags": {"$set": {"tags": ["x"]}},
    "tenant": {"$set": {"keep_this": 1, "created_at": "yesterday"}},
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_document_that_can_not_be_read_lands_failed_and_strands_nobody(
    scene: Scene, room: Room, damage: str
) -> None:
    runs = [await scene.start() for _ in range(3)]
    room.db["durable_run"].update_one({"_id": runs[1].run_id}, DAMAGES[damage])
    claimed = await scene.claim(10)
    assert [one.run.run_id for one in claimed] == [runs[0].run_id, runs[2].run_id]
    stored: Any = room.db["durable_run"].find_one({"_id": runs[1].run_id})
    assert (stored["status"], stored["error_kind"]) == ("failed", "payload")
    room.db["durable_run"].delete_one({"_id": runs[1].run_id})


async def test_a_journal_that_can_not_be_read_lands_its_run_failed(scene: Scene, room: Room) -> None:
    bad, good = await scene.take(), await scene.take()
    for held in (bad, good):
        await scene.append(held, "a")
        await scene.hand_back(held)
    room.db["durable_step"].update_one({"run_id": bad.run.run_id}, {"$set": {"kind": "riddle"}})
    assert [one.run.run_id for one in await scene.claim(10)] == [good.run.run_id]
    run = await scene.get(bad.run.run_id)
    assert (run.status, run.error_kind) == (Status.FAILED, "payload")
    room.db["durable_step"].delete_many({"run_id": bad.run.run_id})
    room.db["durable_run"].delete_many({"_id": bad.run.run_id})


async def test_every_unique_index_begins_with_the_tenant(room: Room) -> None:
    """So the collections can be sharded by it, and two tenants never meet in one key."""
    for name in room.db.list_collection_names():
        for index in room.db[name].list_indexes():
            if index.get("unique"):
                assert next(iter(index["key"])) == "tenant_id", (name, index["name"])


async def test_no_transaction_joins_a_collection_with_itself(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded collection is not joined in a transaction before MongoDB 8 (3904800): chores would stop there."""
    pipelines: list[tuple[bool, bool]] = []
    plain = Work.aggregate

    async def noted(self: Work, table: str, pipeline: Any) -> Any:
        pipelines.append((self._session is not None, any("$lookup" in stage for stage in pipeline)))
        return await plain(self, table, pipeline)

    monkeypatch.setattr(Work, "aggregate", noted)
    family = await scene.with_children(2)
    for child in family.children:
        await scene.complete(await scene.take_again(child))
    await scene.store.purge(scope=ALL, limit=10, older_than=-SECOND)
    await scene.store.mend(scope=ALL, limit=10)
    await scene.store.promote(scope=ALL, limit=10)
    await scene.store.sweep(scope=ALL, limit=10, max_reclaims=5)
    await scene.store.stats(scope=ALL)
    await scene.store.explain(family.parent.run.run_id, scope=ALL)
    assert (False, True) in pipelines
    assert (True, True) not in pipelines


async def test_documents_carry_their_tenant(scene: Scene, room: Room) -> None:
    held = await scene.take(tenant=ACME, idempotency_key="i")
    await scene.append(held, "a")
    await scene.send(held.run.run_id)
    for name in ("durable_run", "durable_step", "durable_signal", "durable_key"):
        assert room.db[name].find_one({})["tenant_id"] == str(ACME), name  # type: ignore[index]
    await scene.store.enqueue([new_run()])
