"""The writer thread: shared transactions, what fails alone and what fails together, and what must not seem to succeed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from durable.errors import Conflict, StoreError, StoreUnavailable
from durable.model import ALL, Completed, NewRecord, RecordKind, RunQuery
from durable.settings import SECOND, Settings
from durable.testing.conformance.scenario import Scene, new_run
from durable_sqlite import Store, backend, connection

GENEROUS = 60


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings())
    yield store
    await store.close()


@contextlib.asynccontextmanager
async def busy(store: Store) -> AsyncIterator[None]:
    """The writer is at work inside; all that is queued meanwhile goes into the next transaction."""
    began, end = threading.Event(), threading.Event()

    def work(con: sqlite3.Connection, now: int) -> None:
        began.set()
        assert end.wait(GENEROUS)

    working = store._database.core.lane.submit(work, Settings())
    try:
        async with asyncio.timeout(GENEROUS):
            while not began.is_set():
                await asyncio.sleep(0.001)
        yield
    finally:
        end.set()
    await working


async def queued(
    store: Store, operations: Sequence[Callable[[sqlite3.Connection, int], Any]]
) -> list[asyncio.Task[Any]]:
    """Tasks whose operations are in the writer's queue."""
    tasks = [asyncio.create_task(store._database.write(operation)) for operation in operations]
    await asyncio.sleep(0)
    assert store._database.core.lane._queue.qsize() >= len(tasks)
    return tasks


def fails(error: Exception) -> Callable[[sqlite3.Connection, int], Any]:
    def operation(con: sqlite3.Connection, now: int) -> None:
        con.execute("INSERT INTO durable_key VALUES ('half', 'half')")
        raise error

    return operation


def insert(key: str) -> Callable[[sqlite3.Connection, int], Any]:
    return lambda con, now: con.execute("INSERT INTO durable_key VALUES (?, 'x')", (key,)).rowcount


def keys(con: sqlite3.Connection, now: int) -> list[str]:
    return [key for (key,) in con.execute("SELECT idempotency_key FROM durable_key ORDER BY 1")]


# -- shared transactions --------------------------------------------------------------------------------------------------


async def test_what_is_queued_together_is_committed_together(store: Store, tmp_path: Path) -> None:
    commits: list[str] = []
    writer = store._database.core.writer
    async with busy(store):
        writes = await queued(store, [insert(f"k{n:03}") for n in range(200)])
        writer.set_trace_callback(lambda text: commits.append(text) if text == "COMMIT" else None)
    await asyncio.gather(*writes)
    writer.set_trace_callback(None)
    assert len(commits) == 2, "of the one at work, and of all that was queued"
    assert len(await store._database.read(keys)) == 200


@pytest.mark.parametrize("error", [ValueError("a bug"), Conflict("not so"), sqlite3.IntegrityError("not unique")])
async def test_an_operation_that_fails_fails_itself_and_not_its_batch(store: Store, error: Exception) -> None:
    async with busy(store):
        writes = await queued(store, [insert("a"), fails(error), insert("b")])
    answers = await asyncio.gather(*writes, return_exceptions=True)
    assert [answers[0], answers[2]] == [1, 1]
    assert isinstance(answers[1], Conflict if isinstance(error, Conflict) else StoreError)
    assert await store._database.read(keys) == ["a", "b"], "nothing of the one that failed is left"


async def test_an_operation_that_fails_alone_leaves_nothing(store: Store) -> None:
    with pytest.raises(StoreError):
        await store._database.write(fails(KeyError("x")))
    assert await store._database.read(keys) == []


async def test_a_full_disk_fails_the_batch_loses_nothing_acknowledged_and_passes(store: Store) -> None:
    await store.enqueue([new_run() for _ in range(10)])
    writer = store._database.core.writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnavailable) as error:
        await store.enqueue([new_run(input=f'"{"x" * 1000}"') for _ in range(200)])
    assert "full" in str(error.value)
    assert error.value.hint
    assert await store.count(RunQuery(), scope=ALL) == 10
    writer.execute("PRAGMA max_page_count = 1000000")
    await store.enqueue([new_run()])
    assert await store.count(RunQuery(), scope=ALL) == 11


async def test_a_read_sees_every_write_that_was_acknowledged_before_it(store: Store) -> None:
    async def client() -> None:
        for _ in range(20):
            run = new_run()
            await store.enqueue([run])
            assert (await store.get([run.run_id], scope=ALL))[0] is not None

    await asyncio.gather(*(client() for _ in range(10)))


async def test_a_cancelled_caller_harms_nobody_and_its_write_stays(store: Store) -> None:
    async with busy(store):
        gone, stays = await queued(store, [insert("gone"), insert("stays")])
        gone.cancel()
    assert await stays == 1
    assert await store._database.read(keys) == ["gone", "stays"]


def test_a_store_is_usable_from_any_number_of_loops_and_threads(tmp_path: Path) -> None:
    async def use() -> int:
        store = await backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings())
        await asyncio.gather(*(store.enqueue([new_run()]) for _ in range(20)))
        await store.close()
        return 1

    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(use()))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GENEROUS)
    assert answers == [1] * 5
    con = sqlite3.connect(tmp_path / "s.db")
    assert con.execute("SELECT count(*) FROM durable_run").fetchone() == (100,)
    con.close()


def test_an_answer_for_a_loop_that_was_closed_stops_nobody(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings()))
    left = threading.Event()

    async def leave() -> None:
        store._database.core.lane.submit(lambda con, now: left.wait(GENEROUS), Settings())
        store._database.core.lane.submit(insert("orphan"), Settings())

    loop.run_until_complete(leave())
    loop.close()
    left.set()

    async def go_on() -> list[str]:
        assert await store._database.write(insert("next")) == 1
        found = await store._database.read(keys)
        await store.close()
        return found

    assert asyncio.run(go_on()) == ["next", "orphan"]


# -- the lock of other processes --------------------------------------------------------------------------------------------


async def test_a_writer_waits_for_another_process_and_gives_up_in_plain_words(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = await backend.open(f"sqlite:///{path}", settings=Settings.of({"busy_timeout": "200ms"}))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable) as error:
        await store.enqueue([new_run()])
    assert "lock" in str(error.value)
    assert await store.count(RunQuery(), scope=ALL) == 0, "reads go on meanwhile"
    waiting = asyncio.create_task(store.enqueue([new_run()]))
    await asyncio.sleep(0)
    other.execute("COMMIT")
    await waiting
    other.close()
    await store.close()


async def test_the_log_is_copied_back_when_it_is_long(store: Store, tmp_path: Path) -> None:
    wal = tmp_path / "s.db-wal"
    for _ in range(12):
        await store.enqueue([new_run(input=f'"{"x" * 50_000}"') for _ in range(20)])
    async with asyncio.timeout(GENEROUS):
        while wal.stat().st_size > connection.CHECKPOINT_BYTES:
            await store.enqueue([new_run()])
    assert (tmp_path / "s.db").stat().st_size > 10_000_000


async def test_a_long_reader_only_delays_the_copying_back(store: Store, tmp_path: Path) -> None:
    await store.enqueue([new_run()])
    reader = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM durable_run").fetchone()
    for _ in range(12):
        await store.enqueue([new_run(input=f'"{"x" * 50_000}"') for _ in range(20)])
    assert (tmp_path / "s.db-wal").stat().st_size > connection.CHECKPOINT_BYTES
    reader.execute("COMMIT")
    reader.close()
    async with asyncio.timeout(GENEROUS):
        while (tmp_path / "s.db-wal").stat().st_size > connection.CHECKPOINT_BYTES:
            await store.enqueue([new_run()])
            await asyncio.sleep(0.01)


# -- what must not seem to succeed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_file_that_is_gone_acknowledges_nothing_more(tmp_path: Path, how: str) -> None:
    path = tmp_path / "s.db"
    store = await backend.open(f"sqlite:///{path}", settings=Settings())
    await store.enqueue([new_run()])
    if how == "removed":
        path.unlink()
    else:
        (tmp_path / "new").write_bytes(path.read_bytes())
        (tmp_path / "new").replace(path)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=how) as error:
            await store.enqueue([new_run()])
        assert "restart" in error.value.hint
    with pytest.raises(StoreUnavailable):
        await store.count(RunQuery(), scope=ALL)
    again = await backend.open(f"sqlite:///{path}", settings=Settings())  # who opens now gets the file that is there
    await again.enqueue([new_run()])
    await again.close()
    await store.close()


async def test_a_closed_store_says_so(store: Store) -> None:
    pending = asyncio.create_task(store.enqueue([new_run()]))
    await asyncio.sleep(0)
    await store.close()
    await pending  # what was queued is finished
    for call in (
        store.enqueue([new_run()]),
        store.count(RunQuery(), scope=ALL),
        store.wait(["queue:x"], 1),
        store.notify([]),
    ):
        with pytest.raises(StoreUnavailable, match="closed"):
            await call
    await store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
async def test_a_child_of_a_fork_is_refused_and_the_parent_goes_on(store: Store, tmp_path: Path) -> None:
    await store.enqueue([new_run()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads do not survive a fork is what this is about
        child = os.fork()
    if child == 0:
        code = 1
        try:
            coroutine = store.enqueue([new_run()])
            try:
                coroutine.send(None)
            except StoreUnavailable as error:
                code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    await store.enqueue([new_run()])
    assert await store.count(RunQuery(), scope=ALL) == 2


async def test_the_store_s_clock_never_runs_backwards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    times = iter([5_000_000, 1_000_000, 9_000_000])
    last = [0]

    def clock() -> int:
        last[0] = next(times, last[0])
        return last[0]

    store = await backend.open("sqlite://", settings=Settings(), clock=clock)
    assert [store.clock(), store.clock(), store.clock()] == [5_000_000, 5_000_000, 9_000_000]
    await store.close()


# -- kill -9 ------------------------------------------------------------------------------------------------------------------

VICTIM = """
import asyncio, itertools, sys
from durable.model import ALL, ClaimRequest, Completed, NewRecord, NewRun, RecordKind, new_run_id
from durable.settings import SECOND, Settings
from durable_sqlite import backend

def say(*words):
    sys.stdout.write(" ".join(words) + "\\n")
    sys.stdout.flush()

async def enqueue(store):
    while True:
        batch = new_run_id()
        runs = [NewRun(run_id=f"{batch}-{n}", name="work", input="{}", seed=b"0" * 16, tags={"batch": batch}) for n in range(5)]
        await store.enqueue(runs)
        say("enqueued", batch)

async def work(store):
    for mark in itertools.count():
        claimed = await store.claim(ClaimRequest(mark=f"{new_run_id()}", queues={"default": 10}, functions=[("work", None)],
                                                 limit=10, lease=30 * SECOND, family="f", scope=ALL))
        step = NewRecord(step_id="a", kind=RecordKind.STEP, position=0, seen=-1, digest="d", result="1")
        await store.append([(one.lease, step) for one in claimed])
        for one in claimed:
            say("recorded", one.run.run_id)
        await store.settle([(one.lease, Completed(output="2")) for one in claimed])
        for one in claimed:
            say("landed", one.run.run_id)

async def main():
    store = await backend.open("sqlite:///" + sys.argv[1], settings=Settings())
    say("ready")
    await asyncio.gather(*(enqueue(store) for _ in range(5)), work(store), work(store))

asyncio.run(main())
"""
KILLS = int(os.environ.get("DURABLE_SQLITE_KILLS", "3"))


def test_kill_minus_nine_in_the_middle_of_writes_loses_nothing_acknowledged_and_leaves_nothing_half(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s.db"
    said: dict[str, set[str]] = {"enqueued": set(), "recorded": set(), "landed": set()}
    chance = random.Random(9)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(KILLS):
        victim = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert victim.stdout is not None
        assert victim.stderr is not None
        lines = [victim.stdout.readline() for _ in range(chance.randrange(50, 400))]
        assert lines[0] == "ready\n", victim.stderr.read() if victim.poll() is not None else lines[0]
        victim.send_signal(signal.SIGKILL)
        lines += victim.communicate(timeout=GENEROUS)[0].splitlines(keepends=True)
        for line in lines[1:]:
            if line.endswith("\n"):
                what, who = line.split()
                said[what].add(who)
        _check(path, said)
    assert len(said["enqueued"]) > KILLS
    assert said["landed"]


def _check(path: Path, said: dict[str, set[str]]) -> None:
    con = sqlite3.connect(path)
    try:
        assert con.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        batches = dict(con.execute("SELECT json_extract(tags, '$.batch'), count(*) FROM durable_run GROUP BY 1"))
        assert set(batches.values()) <= {5}, "no half batch"
        assert said["enqueued"] <= set(batches), "no acknowledged submit is lost"
        assert said["recorded"] <= {run for (run,) in con.execute("SELECT run_id FROM durable_step")}
        assert said["landed"] <= {
            run for (run,) in con.execute("SELECT run_id FROM durable_run WHERE status = 'completed'")
        }
    finally:
        con.close()


async def test_stores_of_several_processes_work_on_one_file(store: Store, tmp_path: Path) -> None:
    """A second process enqueues while this one works: each run is taken once, and all land."""
    runs = 200
    code = (
        VICTIM.split("async def work", maxsplit=1)[0]
        + f"""
async def main():
    store = await backend.open("sqlite:///" + sys.argv[1], settings=Settings())
    for _ in range({runs}):
        await store.enqueue([NewRun(run_id=new_run_id(), name="work", input="{{}}", seed=b"0" * 16)])
    await store.close()
asyncio.run(main())
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path / "s.db"), env=environment)
    scene = Scene(store, None)  # type: ignore[arg-type]  # no clock is moved here
    landed: list[str] = []
    async with asyncio.timeout(GENEROUS):
        while len(landed) < runs:
            claimed = await scene.claim(20)
            step = NewRecord(step_id="a", kind=RecordKind.STEP, position=0, seen=-1, digest="d", result="1")
            answers = await store.append([(one.lease, step) for one in claimed])
            assert {answer.state for answer in answers} <= {"appended"}
            assert set(await store.settle([(one.lease, Completed(output="1")) for one in claimed])) <= {"landed"}
            landed += [one.run.run_id for one in claimed]
            if not claimed:
                await store.wait(["queue:default"], SECOND)
        assert await other.wait() == 0
    assert len(set(landed)) == runs
    assert list(await store.audit(scope=ALL)) == []
