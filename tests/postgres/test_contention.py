"""Many at once on the same rows (rules 2, 3, 14, 35, 36): one run per key, no dead-lock that a caller sees, nothing of a stale worker."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from postgres.conftest import Open, until
from servers.postgres import Database

from durable.model import ALL, Cancelled, Claimed, Completed, QueueRecord, RecordKind, RunQuery, Status
from durable.testing.conformance.scenario import Scene, failure, new_run

PROCESSES, CLIENTS, KEYS = 4, 16, 200
SUBMIT = """
import asyncio, random, sys
from durable.errors import StoreUnavailable
from durable.settings import Settings
from durable.testing.conformance.scenario import new_run
from durable_postgres import backend

async def client(url, number):
    store = await backend.open(url + "?listen=off", settings=Settings())
    keys = list(range(200))
    random.Random(number).shuffle(keys)
    for start in range(0, 200, 10):
        runs = [new_run(coalesce_key=f"k{key}", **({"idempotency_key": f"k{key}"} if number % 2 else {})) for key in keys[start:start + 10]]
        while True:  # on a slow machine a key may be locked for longer than a batch waits: it is repeated as it is (42)
            try:
                answers = await store.enqueue(runs)
                break
            except StoreUnavailable:
                await asyncio.sleep(random.random())
        assert len({answer.run.run_id for answer in answers}) == 10
    await store.close()

async def main(url, first):
    await asyncio.gather(*(client(url, first + number) for number in range(16)))

print("ready", flush=True); sys.stdin.readline(); asyncio.run(main(sys.argv[1], int(sys.argv[2]))); print("done", flush=True)
"""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_sixty_four_clients_that_submit_the_same_keys_at_once_make_one_run_per_key(
    database: Database, scene: Scene
) -> None:
    """Half of them by idempotency and coalesce key, half by coalesce key alone, in every order (35, 36, 40)."""
    processes = [start(SUBMIT, database.url, str(CLIENTS * number)) for number in range(PROCESSES)]
    for process in processes:
        go(process)
    answers = [await asyncio.to_thread(process.communicate, timeout=580) for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES, answers
    runs = await scene.runs()
    assert sorted(str(run.coalesce_key) for run in runs) == sorted(f"k{key}" for key in range(KEYS))
    assert list(await scene.store.audit(scope=ALL)) == []


async def finish(store: Any, claimed: Sequence[Claimed]) -> None:
    """Complete them; one that was asked to stop meanwhile is cancelled instead (43)."""
    answers = await store.settle([(one.lease, Completed(output="1")) for one in claimed])
    asked = [one.lease for one, answer in zip(claimed, answers, strict=True) if answer == "woken"]
    await store.settle([(lease, Cancelled(failure=failure(kind="cancelled"))) for lease in asked])


async def test_claims_settles_cancels_signals_and_sweeps_at_once_dead_lock_nobody(opened: Open) -> None:
    """Batches that share runs, parents and limits, in random order, from several stores; every call is answered (64). Once more, until
    a cancel has come before a claim and a claim before a cancel."""
    stores = [await opened() for _ in range(4)]
    scene = Scene(stores[0], None)  # type: ignore[arg-type]
    await scene.store.set_queue(QueueRecord(scope_name="queue:children", max_concurrency=15))
    dice = random.Random(3)
    for _ in range(20):
        await all_at_once(scene, stores, dice)
        if all([await ended(scene, status) for status in (Status.COMPLETED, Status.CANCELLED)]):
            return
    pytest.fail("void: claims and cancels did not meet")


async def ended(scene: Scene, *statuses: Status) -> int:
    """How many children are in these states."""
    return await scene.store.count(RunQuery(statuses=statuses, queues=["children"]), scope=ALL)


async def all_at_once(scene: Scene, stores: Sequence[Any], dice: random.Random) -> None:
    """Sixty children of five parents, until none of them is left."""
    parents = [await scene.with_children(0) for _ in range(5)]
    children: list[str] = []
    for family in parents:
        runs = [
            new_run(**scene.child_of(family.parent, f"child#{number}"), sequence_key=f"s{number % 7}")
            for number in range(12)
        ]
        children += [run.run_id for run in runs]
        record = await scene.record(family.parent.run.run_id, "map", kind=RecordKind.START, children=tuple(runs))
        await scene.store.append([(family.parent.lease, record)])

    async def work(store: Any) -> None:
        own = Scene(store, None)  # type: ignore[arg-type]
        for _ in range(25):
            claimed = list(await own.claim(8, queues={"children": 8}))
            dice.shuffle(claimed)
            await finish(store, claimed)

    async def disturb(store: Any) -> None:
        for _ in range(25):
            some = dice.sample(children, 6)
            await store.request_cancel(some, scope=ALL)
            await store.sweep(scope=ALL, limit=10, max_reclaims=5)
            await store.mend(scope=ALL, limit=10)
            await store.promote(scope=ALL, limit=10)
            own = Scene(store, None)  # type: ignore[arg-type]
            await asyncio.gather(*(own.send(family.parent.run.run_id) for family in parents))

    await asyncio.gather(*(work(store) for store in stores), *(disturb(store) for store in stores[:2]))
    while True:  # what was passed over because somebody held its row, the net finds (74)
        claimed = await scene.claim(20, queues={"children": 20})
        await finish(scene.store, claimed)
        if not claimed and not await scene.mend():
            break
    assert await ended(scene, Status.PENDING, Status.RUNNING) == 0
    assert list(await scene.store.audit(scope=ALL)) == []


# -- a worker that stands still ---------------------------------------------------------------------------------------------------

STEPS, LEASE = 60, 2
WORKER = """
import asyncio, sys
import durable

STEPS, LEASE = int(sys.argv[4]), sys.argv[5]

async def effect(number: int) -> int:
    with open(sys.argv[2], "a") as file:
        file.write(f"{number} {sys.argv[3]}\\n")
    return number

@durable.function
async def long_one(ctx: durable.Context) -> int:
    total = 0
    for number in range(STEPS):
        total += await ctx.step(effect, number)
        await ctx.sleep("50ms")
    return total

async def main():
    settings = {"poll": "100ms", "poll_idle": "100ms", "lease": LEASE}
    async with durable.Client(sys.argv[1], settings=settings) as client:
        await client.start(long_one.using(idempotency_key="the only one"))
        await durable.Worker(client).run()

print("ready", flush=True); sys.stdin.readline(); asyncio.run(main())
"""


def now(database: Database) -> datetime.datetime:
    """By the server's clock."""
    with database.connect() as con:
        row = con.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    assert isinstance(row[0], datetime.datetime)
    return row[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_worker_that_is_stopped_for_three_leases_and_continued_writes_nothing(
    database: Database, scene: Scene, tmp_path: Any
) -> None:
    """SIGSTOP in the middle of a run; another worker ends it; SIGCONT: the first one's records, renewals and ends are refused."""
    log = tmp_path / "effects"
    log.touch()
    first, second = (
        start(WORKER, database.url, str(log), name, str(STEPS), f"{LEASE}s") for name in ("first", "second")
    )
    try:
        go(first)
        await until(lambda: log.read_text().count("first") >= 3, "the first worker to work")
        os.kill(first.pid, signal.SIGSTOP)
        since = now(database)
        (run,) = await scene.runs()
        run_id, seen = run.run_id, run.attempts
        go(second)
        await until(lambda: "second" in log.read_text(), "the second worker to take over")
        await until(lambda: now(database) > since + datetime.timedelta(seconds=3 * LEASE), "three leases to pass")
        stopped = [record.step_id for record in await scene.history(run_id) if record.fence == seen]
        woken = now(database)
        os.kill(first.pid, signal.SIGCONT)
        with database.connect() as con:
            alive = "SELECT 1 FROM durable_worker WHERE pid = %s AND seen_at > %s"
            await until(lambda: con.execute(alive, (first.pid, woken)).fetchone(), "the first worker to come back")

        async def ended() -> bool:
            return (await scene.get(run_id)).status == Status.COMPLETED

        await until(ended, "the run to end")
        journal = await scene.history(run_id)
        assert [record.step_id for record in journal if record.fence == seen] == stopped
        values = [json.loads(record.result)["v"] for record in journal if record.kind == RecordKind.STEP]
        assert values == list(range(STEPS))
        assert (await scene.get(run_id)).output == str(sum(range(STEPS)))
        assert list(await scene.store.audit(scope=ALL)) == []
    finally:
        for process in (first, second):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.communicate(timeout=60)
