"""A damaged document is shown as what it is, and hides no other (semantics 9)."""

from __future__ import annotations

from typing import Any

import pytest
from bson import Timestamp
from servers.mongo_room import Room

from durable.model import ALL, RunQuery, Status
from durable.testing.conformance.scenario import Scene


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"$set": {"status": "lost"}}, "status"),
        ({"$set": {"tags": 7}}, "tags"),
        ({"$set": {"input": {"n": 1}}}, "input"),
        ({"$unset": {"name": 1, "queue": 1}}, "name, queue"),
        ({"$set": {"attempts": "many"}}, "attempts"),
        ({"$set": {"deadline_at": "soon", "error": 5}}, "error, deadline_at"),
        ({"$set": {"created_at": "soon"}}, "created_at"),
        ({"$unset": {"created_at": 1}}, "created_at"),
    ],
    ids=str,
)
async def test_a_damaged_document_is_shown_as_damaged_and_hides_no_other(
    room: Room, scene: Scene, change: dict[str, Any], names: str
) -> None:
    runs = [await scene.start() for _ in range(5)]
    bad = runs[2].run_id
    room.db["durable_run"].update_one({"_id": bad}, change, bypass_document_validation=True)
    for limit in (1, 2, 100):
        found = await scene.runs(limit=limit)
        assert sorted(run.run_id for run in found) == sorted(run.run_id for run in runs)
    shown = await scene.get(bad)
    assert (shown.error, shown.error_kind) == (f"its stored row is damaged: {names} can not be read", "payload")
    assert shown.status is (Status.FAILED if names == "status" else Status.PENDING)
    pulses = await scene.store.pulse([run.run_id for run in runs], scope=ALL)
    assert [pulse and pulse.run_id for pulse in pulses] == [run.run_id for run in runs]


@pytest.mark.parametrize("bad", [5, "soon", None, Timestamp(1, 1)], ids=["number", "text", "nothing", "timestamp"])
async def test_documents_without_a_date_come_last_and_once_on_whatever_page(
    room: Room, scene: Scene, bad: object
) -> None:
    """A comparison with a date sees dates only: they were missing from every page but the first."""
    runs = [(await scene.start()).run_id for _ in range(6)]
    change = {"$unset": {"created_at": 1}} if bad is None else {"$set": {"created_at": bad}}
    damaged = sorted(runs[1:4], reverse=True)
    room.db["durable_run"].update_many({"_id": {"$in": damaged}}, change, bypass_document_validation=True)
    for limit in (1, 2, 3, 4, 100):
        found = [run.run_id for run in await scene.runs(limit=limit)]
        assert found == [runs[5], runs[4], runs[0], *damaged], limit
    assert await scene.store.count(RunQuery(), scope=ALL) == 6
