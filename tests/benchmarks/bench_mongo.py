"""Figures of one worker on a MongoDB replica set of one node: W1 (one-step runs) and W2 (ten-step runs), with a floor beside them.

    python tests/benchmarks/bench_mongo.py [--rounds 3] [--w1 5000] [--w2 500] [--profile FILE]

The floor does the same work without an engine, with every fence: claims of three round trips, appends as a transaction that touches the
runs of its batch in one update, settles as one bulk of fenced updates, everything `w: majority`. It runs interleaved with the
engine, in the same process and on the same server. Exits 1 if the engine misses its aim: W1 >= 800 runs/s and W2 >= 2,500 steps/s.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tools of the tests: a server to measure on

from figures import Aim, Batches, Bench, drained, echo, engine, figures, options
from pymongo import AsyncMongoClient, UpdateOne
from pymongo.read_concern import ReadConcern
from pymongo.write_concern import WriteConcern
from servers.mongo import server

AIMS = {"W1": Aim(800), "W2": Aim(2_500)}
MAJORITY = WriteConcern("majority")


async def on_engine(runs: int, steps: int, profile: cProfile.Profile | None) -> float:
    """The engine, on a database of its own."""
    database = server().create()
    try:
        return await engine(database.url, runs, steps, profile)
    finally:
        await asyncio.to_thread(database.drop)


# -- the floor ----------------------------------------------------------------------------------------------------------------


class Floor:
    """The three operations on the two collections."""

    def __init__(self, client: AsyncMongoClient[dict[str, Any]], name: str) -> None:
        database = client.get_database(name, write_concern=MAJORITY)
        self.client, self.runs, self.steps = client, database["run"], database["step"]
        self.appends, self.settles = Batches(self.append), Batches(self.settle)

    async def fill(self, count: int) -> None:
        await self.runs.create_index(
            [("queue", 1), ("priority", -1), ("submitted", 1)], partialFilterExpression={"status": "pending"}
        )
        rows = [
            {"_id": uuid.uuid4().hex, "queue": "q", "priority": 0, "submitted": i, "status": "pending", "attempts": 0,
             "input": json.dumps({"i": i})}
            for i in range(count)
        ]  # fmt: skip
        await self.runs.insert_many(rows)

    async def claim(self, limit: int) -> list[dict[str, Any]]:
        order = [("priority", -1), ("submitted", 1)]
        heads = await self.runs.find({"queue": "q", "status": "pending"}, {"_id": 1}, sort=order, limit=limit).to_list()
        ids, token = [row["_id"] for row in heads], uuid.uuid4().hex
        taken = {
            "status": "running", "attempts": {"$add": ["$attempts", 1]}, "token": token,
            "mark": {"$concat": ["$_id", "/", token]}, "leased_until": {"$add": ["$$NOW", 30_000]},
        }  # fmt: skip
        await self.runs.update_many({"_id": {"$in": ids}, "status": "pending"}, [{"$set": taken}])
        return await self.runs.find({"_id": {"$in": ids}, "token": token}).to_list()

    async def append(self, entries: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        runs = [run for run, _ in entries]
        where = {
            "_id": {"$in": [run["_id"] for run in runs]}, "mark": {"$in": [run["mark"] for run in runs]},
            "status": "running",
        }  # fmt: skip
        async with self.client.start_session() as session:
            await session.start_transaction(ReadConcern("snapshot"), MAJORITY)
            touched = await self.runs.update_many(where, {"$inc": {"journaled": 1}}, session=session)
            assert touched.matched_count == len(runs), "a run was lost"
            await self.steps.insert_many([row for _, row in entries], session=session)
            await session.commit_transaction()

    async def settle(self, entries: list[tuple[dict[str, Any], str]]) -> None:
        writes = [
            UpdateOne(
                {"_id": run["_id"], "mark": run["mark"], "status": "running"},
                {"$set": {"status": "completed", "output": output}, "$unset": {"leased_until": 1},
                 "$currentDate": {"finished_at": True}},
            )
            for run, output in entries
        ]  # fmt: skip
        answer = await self.runs.bulk_write(writes, ordered=False)
        assert answer.matched_count == len(entries), "a run was lost"


async def floor(runs: int, steps: int) -> float:
    """The same work without an engine."""
    database = server().create()
    async with AsyncMongoClient(database.url) as client:
        store = Floor(client, database.name)
        await store.fill(runs)

        async def body(run: dict[str, Any]) -> None:
            i = json.loads(run["input"])["i"]
            result = ""
            for n in range(steps):
                result = json.dumps(await echo(i))
                await store.appends.put((run, {"_id": f"{run['_id']}/echo#{n}", "result": result}))
            await store.settles.put((run, result))

        took = await drained(store.claim, body, runs)
        await client.drop_database(database.name)
    return took


# -- the report ---------------------------------------------------------------------------------------------------------------


def server_time() -> float:
    """Seconds of processor time that our own mongod has used; 0 where it is somebody else's."""
    members = server().members
    if members is None:
        return 0.0
    used = Path(f"/proc/{members.primary().process_id}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    chosen = options(__doc__ or "")
    profile = cProfile.Profile() if chosen.profile else None
    with server().client() as client:
        version = client.server_info()["version"]
    bench = Bench(lambda runs, steps: on_engine(runs, steps, profile), floor, AIMS, server_time)
    reached = figures(bench, chosen, f"MongoDB {version}, one node")
    if profile is not None:
        profile.dump_stats(chosen.profile)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
