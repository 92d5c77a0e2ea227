"""What does not fit a pair of calls: a transaction with the user against a sweep, and many processes that open one new file."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import threading
from pathlib import Path
from typing import Any

from races.arena import TRIALS, Arena, Stage, call, record

from durable import model as m
from durable.settings import Settings
from durable_sqlite import backend


def test_a_transaction_and_a_sweep_the_rows_are_there_exactly_with_the_record(arena: Arena) -> None:
    """Semantics 26: a stale worker's rows vanish with its record."""
    seen = set()
    for trial in range(TRIALS):
        stage = Stage(arena)
        lease = stage.lapsed()

        async def work(con: Any, run_id: str = lease.run_id) -> m.NewRecord:
            con.execute("CREATE TABLE IF NOT EXISTS effect (run_id TEXT)")
            con.execute("INSERT INTO effect VALUES (?)", (run_id,))
            return record("a")

        sweep = call("sweep", scope=stage.tenant, limit=9, max_reclaims=5)
        transaction = call("transaction", lease, work, timeout=5_000_000)
        if trial == 0:
            swept = arena.race([], [sweep])[1][0]
            answer = arena.do(transaction.make(arena.near))
        else:
            (answer,), (swept,) = arena.race([transaction], [sweep])
        assert list(swept.returned) == [lease.run_id]
        assert len(stage.journal(lease.run_id)) == (answer.state == "appended")
        assert effects(arena.path, lease.run_id) == (answer.state == "appended")
        seen.add(answer.state)
    assert "lost" in seen


def effects(path: Path, run_id: str) -> int:
    con = sqlite3.connect(path)
    try:
        table = con.execute("SELECT 1 FROM sqlite_master WHERE name = 'effect'").fetchone()
        if table is None:
            return 0
        count: int = con.execute("SELECT count(*) FROM effect WHERE run_id = ?", (run_id,)).fetchone()[0]
        return count
    finally:
        con.close()


def _open(url: str, barrier: Any, answers: Any) -> None:
    async def opened() -> None:
        barrier.wait(60)
        store = await backend.open(url, settings=Settings())
        status = await store.migrate()
        await store.enqueue(
            [m.NewRun(run_id=f"r{multiprocessing.current_process().pid}", name="f", input="1", seed=b"s")]
        )
        answers.put((status.found, status.wanted))
        await store.close()

    try:
        asyncio.run(opened())
    except BaseException as error:
        answers.put(repr(error))


def test_many_processes_that_open_a_new_file_at_once_migrate_it_once(tmp_path: Path) -> None:
    """Semantics 69: idempotent, and safe when many start it at once."""
    context = multiprocessing.get_context("spawn")
    number = 4
    for trial in range(max(1, TRIALS // 20)):
        url = f"sqlite:///{tmp_path / f'new{trial}.db'}"
        barrier, answers = context.Barrier(number), context.Queue()
        processes = [context.Process(target=_open, args=(url, barrier, answers)) for _ in range(number)]
        for process in processes:
            process.start()
        given = [answers.get(timeout=120) for _ in processes]
        for process in processes:
            process.join(60)
        assert len(set(given)) == 1, given
        assert given[0][0] == given[0][1]
        con = sqlite3.connect(tmp_path / f"new{trial}.db")
        assert con.execute("SELECT count(*) FROM durable_schema_version").fetchone() == (given[0][1],)
        assert con.execute("SELECT count(*) FROM durable_run").fetchone() == (number,)
        con.close()


def test_threads_that_open_and_close_one_file_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two handles of one process share their connections; the last one that closes lets go of them."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    errors: list[BaseException] = []

    def use(number: int) -> None:
        async def one(trial: int) -> None:
            store = await backend.open(url, settings=Settings())
            await store.enqueue([m.NewRun(run_id=f"r{number}-{trial}", name="f", input="1", seed=b"s")])
            await store.close()

        try:
            for trial in range(TRIALS):
                asyncio.run(one(trial))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    con = sqlite3.connect(tmp_path / "shared.db")
    assert con.execute("SELECT count(*) FROM durable_run").fetchone() == (4 * TRIALS,)
    con.close()
