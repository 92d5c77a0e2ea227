"""What the row of a limit says of its permits (73): nothing where somebody has taken permits without telling it."""

from __future__ import annotations

from typing import Any

import pytest
from servers.mongo_room import Room

from durable.model import ALL, Claimed, QueueRecord
from durable.testing.conformance.scenario import Scene, new_run
from durable_mongo import flow

LIMIT = QueueRecord(scope_name="queue:default", max_concurrency=5)


async def of_a_version_before(scene: Scene, room: Room) -> list[Claimed]:
    """It takes a turn, and does not know what the row says."""
    await scene.store.set_queue(LIMIT)
    held = list(await scene.claim(1))
    said = room.db["durable_queue"].find_one()["in_flight"]
    held += await scene.claim(3)
    room.db["durable_queue"].update_one({}, {"$set": {"in_flight": said}})
    return held


async def of_a_limit_that_came_late(scene: Scene, room: Room) -> list[Claimed]:
    held = list(await scene.claim(3))
    await scene.store.set_queue(LIMIT)
    return [*held, *(await scene.claim(1))]


async def of_a_limit_that_went_and_came(scene: Scene, room: Room) -> list[Claimed]:
    await scene.store.set_queue(LIMIT)
    held = list(await scene.claim(1))
    await scene.store.set_queue(QueueRecord(scope_name="queue:default"))
    held += await scene.claim(3)
    await scene.store.set_queue(LIMIT)
    return held


async def of_a_claim_that_did_not_look(scene: Scene, room: Room) -> list[Claimed]:
    """The limit came while it was under way."""
    await scene.store.set_queue(LIMIT)
    held = list(await scene.claim(1))
    look, looks = flow.ruled, 0

    async def looked(*values: Any) -> bool:
        nonlocal looks
        looks += 1
        return looks > 1 and await look(*values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "ruled", looked)
        return held + list(await scene.claim(3))


SILENT = (of_a_version_before, of_a_limit_that_came_late, of_a_limit_that_went_and_came, of_a_claim_that_did_not_look)


@pytest.mark.parametrize("first", ["a claim", "a settle"])
@pytest.mark.parametrize("silent", SILENT, ids=[one.__name__ for one in SILENT])
async def test_permits_of_which_the_row_was_not_told_are_counted(
    scene: Scene, room: Room, silent: Any, first: str
) -> None:
    """No more than five are in flight, whoever meets the row first."""
    await scene.store.enqueue([new_run() for _ in range(9)])
    held = await silent(scene, room)
    assert len(held) == 4
    if first == "a settle":
        await scene.complete(held.pop())
    held += await scene.claim(5)
    assert len(held) == 5
    for one in held[:3]:
        await scene.complete(one)
    assert len(await scene.claim(5)) == 3
    assert list(await scene.store.audit(scope=ALL)) == []


@pytest.mark.parametrize("leaves", ["hand_back", "complete", "fail", "suspend", "lapse"])
async def test_the_row_says_how_many_are_out_when_runs_leave(scene: Scene, room: Room, leaves: str) -> None:
    await scene.store.set_queue(LIMIT)
    await scene.store.enqueue([new_run() for _ in range(3)])
    held = await scene.claim(3)
    if leaves == "lapse":
        await scene.lapse()
        assert len((await scene.sweep(limit=2)).returned) == 2
    else:
        for one in held[:2]:
            await getattr(scene, leaves)(one)
    row = room.db["durable_queue"].find_one()
    assert row["in_flight"] == {"most": 1, "turn": row["turn"]}
