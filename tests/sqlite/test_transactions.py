"""Transactions shared with the user, where SQLite has ways of its own to go wrong: `ctx.transaction` and the caller's connection."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from durable.errors import Conflict, Misuse, NotFound, StoreUnavailable
from durable.model import ALL, Claimed, Names, NewRecord, NewSignal, RecordKind, RunQuery
from durable.settings import SECOND, Settings
from durable.testing.conformance.scenario import Scene, new_run
from durable_sqlite import Store, backend

GENEROUS = 60 * SECOND


def record(step_id: str = "pay", position: int = 0) -> NewRecord:
    return NewRecord(step_id=step_id, kind=RecordKind.STEP, position=position, seen=-1, digest="d", result="1")


@pytest.fixture(params=["file", "memory"])
async def store(request: Any, tmp_path: Path) -> AsyncIterator[Store]:
    url = f"sqlite:///{tmp_path}/s.db" if request.param == "file" else "sqlite://"
    store = await backend.open(url, settings=Settings())
    await store._database.write(lambda con, now: con.execute("CREATE TABLE ledger (text TEXT)"))
    yield store
    await store.close()


@pytest.fixture
async def held(store: Store) -> Claimed:
    scene = Scene(store, None)  # type: ignore[arg-type]  # no clock is moved here
    return await scene.take()


async def ledger(store: Store) -> list[str]:
    return await store._database.read(lambda con, now: [text for (text,) in con.execute("SELECT text FROM ledger")])


# -- ctx.transaction ------------------------------------------------------------------------------------------------------


def by_commit(con: Any) -> None:
    con.commit()


def by_rollback(con: Any) -> None:
    con.rollback()


def by_statement(con: Any) -> None:
    con.execute("COMMIT")


def by_cursor(con: Any) -> None:
    con.cursor().execute("rollback")


def by_begin(con: Any) -> None:
    con.execute("BEGIN")


def by_script(con: Any) -> None:
    con.executescript("INSERT INTO ledger VALUES ('leaked'); COMMIT;")


def by_with(con: Any) -> None:
    with con:
        con.execute("INSERT INTO ledger VALUES ('leaked')")


def by_close(con: Any) -> None:
    con.close()


@pytest.mark.parametrize(
    "end",
    [by_commit, by_rollback, by_statement, by_cursor, by_begin, by_script, by_with, by_close],
    ids=lambda end: end.__name__,
)
async def test_whoever_ends_the_transaction_inside_it_gets_misuse_and_no_row_leaks(
    store: Store, held: Claimed, end: Callable[[Any], None]
) -> None:
    async def work(con: Any) -> NewRecord:
        con.execute("INSERT INTO ledger VALUES ('leaked')")
        end(con)
        return record()

    with pytest.raises(Misuse) as error:
        await store.transaction(held.lease, work, timeout=GENEROUS)
    assert error.value.hint
    assert await ledger(store) == []
    assert await store.history(held.run.run_id, scope=ALL) == []


async def test_a_refused_commit_that_is_swallowed_still_commits_nothing_by_itself(store: Store, held: Claimed) -> None:
    async def work(con: Any) -> NewRecord:
        con.execute("INSERT INTO ledger VALUES ('a')")
        with pytest.raises(sqlite3.DatabaseError):
            con.execute("COMMIT")
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="own"):
        await store.transaction(held.lease, work, timeout=GENEROUS)
    assert await ledger(store) == []


async def test_a_savepoint_inside_the_transaction_passes(store: Store, held: Claimed) -> None:
    async def work(con: Any) -> NewRecord:
        con.execute("INSERT INTO ledger VALUES ('kept')")
        con.execute("SAVEPOINT part")
        con.execute("INSERT INTO ledger VALUES ('undone')")
        con.execute("ROLLBACK TO part")
        con.execute("RELEASE part")
        return record()

    assert (await store.transaction(held.lease, work, timeout=GENEROUS)).state == "appended"
    assert await ledger(store) == ["kept"]


async def test_what_the_user_sets_on_the_connection_does_not_outlive_the_transaction(
    store: Store, held: Claimed
) -> None:
    async def work(con: Any) -> NewRecord:
        con.row_factory, con.text_factory = sqlite3.Row, bytes
        return record()

    await store.transaction(held.lease, work, timeout=GENEROUS)
    assert [one.step_id for one in await store.history(held.run.run_id, scope=ALL)] == ["pay"]
    (claimed,) = [run for run in await store.get([held.run.run_id], scope=ALL) if run is not None]
    assert claimed.name == "work"

    async def again(con: Any) -> NewRecord:
        assert con.execute("SELECT 'x'").fetchone() == ("x",)
        return record("second", 1)

    assert (await store.transaction(held.lease, again, timeout=GENEROUS)).state == "appended"


async def test_a_write_awaited_inside_the_transaction_is_misuse_and_not_a_dead_lock(
    store: Store, held: Claimed
) -> None:
    async def work(con: Any) -> NewRecord:
        await store.enqueue([new_run()])
        return record()

    with pytest.raises(Misuse, match="lock"):
        await store.transaction(held.lease, work, timeout=GENEROUS)

    async def nested(con: Any) -> NewRecord:
        await store.transaction(held.lease, work, timeout=GENEROUS)
        return record()

    with pytest.raises(Misuse, match="lock"):
        await store.transaction(held.lease, nested, timeout=GENEROUS)
    await store.enqueue([new_run()])


async def test_a_transaction_over_its_time_leaves_nothing_and_frees_the_lock(store: Store, held: Claimed) -> None:
    async def work(con: Any) -> NewRecord:
        con.execute("INSERT INTO ledger VALUES ('late')")
        await asyncio.sleep(3600)
        return record()

    with pytest.raises(TimeoutError, match="rolled back"):
        await store.transaction(held.lease, work, timeout=50_000)
    assert await ledger(store) == []
    await store.enqueue([new_run()])


async def test_a_statement_that_holds_up_the_loop_is_interrupted_when_the_time_is_over(
    store: Store, held: Claimed
) -> None:
    async def work(con: Any) -> NewRecord:
        con.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n").fetchone()
        return record()

    with pytest.raises(TimeoutError, match="rolled back"):
        await store.transaction(held.lease, work, timeout=100_000)
    await store.enqueue([new_run()])


async def test_a_thread_that_goes_on_after_the_time_is_over_writes_nothing_more(tmp_path: Path) -> None:
    store = await backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings())
    await store._database.write(lambda con, now: con.execute("CREATE TABLE ledger (text TEXT)"))
    held = await Scene(store, None).take()  # type: ignore[arg-type]  # no clock is moved here
    go_on, outcome = threading.Event(), list[str]()

    def function(con: sqlite3.Connection) -> None:
        go_on.wait(60)
        try:
            con.execute("INSERT INTO ledger VALUES ('too late')")
            outcome.append("written")
        except sqlite3.DatabaseError as error:
            outcome.append(str(error))

    thread: list[threading.Thread] = []

    async def work(con: Any) -> NewRecord:
        thread.append(threading.Thread(target=function, args=(con,)))
        thread[0].start()
        await asyncio.sleep(3600)
        return record()

    with pytest.raises(TimeoutError):
        await store.transaction(held.lease, work, timeout=50_000)
    go_on.set()
    thread[0].join(60)
    assert outcome == ["not authorized"]
    assert await ledger(store) == []

    async def fine(con: Any) -> NewRecord:
        con.execute("INSERT INTO ledger VALUES ('fine')")
        return record()

    assert (await store.transaction(held.lease, fine, timeout=GENEROUS)).state == "appended"
    assert await ledger(store) == ["fine"]
    await store.close()


@pytest.mark.parametrize("when", ["waiting for its turn", "at work"])
async def test_a_cancelled_transaction_leaves_nothing_and_the_next_has_its_turn(
    store: Store, held: Claimed, when: str
) -> None:
    began, end = asyncio.Event(), asyncio.Event()

    async def work(con: Any) -> NewRecord:
        began.set()
        con.execute("INSERT INTO ledger VALUES ('first')")
        await end.wait()
        return record("first")

    async def second(con: Any) -> NewRecord:
        con.execute("INSERT INTO ledger VALUES ('second')")
        return record("second", 1)

    first = asyncio.create_task(store.transaction(held.lease, work, timeout=GENEROUS))
    await began.wait()
    waiting = [asyncio.create_task(store.transaction(held.lease, second, timeout=GENEROUS)) for _ in range(2)]
    await asyncio.sleep(0)
    gone = first if when == "at work" else waiting[0]
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    end.set()
    states = [(await task).state for task in [first, *waiting] if task is not gone]
    assert sorted(states) in (["appended", "appended"], ["appended", "recorded"])
    assert sorted(await ledger(store)) == (["second"] if when == "at work" else ["first", "second"])


async def test_the_engine_s_writes_wait_for_a_transaction_and_pass_after_it(store: Store, held: Claimed) -> None:
    order: list[str] = []

    async def enqueue() -> None:
        await store.enqueue([new_run()])
        order.append("enqueued")

    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    async def work(con: Any) -> NewRecord:
        tasks.append(loop.create_task(enqueue(), context=contextvars.Context()))  # somebody else's, not this body's
        await asyncio.sleep(0.02)
        order.append("worked")
        return record()

    await store.transaction(held.lease, work, timeout=GENEROUS)
    await tasks[0]
    assert order == ["worked", "enqueued"]


# -- the caller's connection ----------------------------------------------------------------------------------------------


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Store]:
    store = await backend.open(f"sqlite:///{tmp_path}/s.db", settings=Settings())
    yield store
    await store.close()


@pytest.fixture
def caller(tmp_path: Path, shared: Store) -> Any:
    con = sqlite3.connect(tmp_path / "s.db", timeout=30)
    con.execute("CREATE TABLE orders (text TEXT)")
    yield con
    con.close()


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_run_and_a_signal_exist_if_and_only_if_the_caller_s_transaction_commits(
    shared: Store, caller: sqlite3.Connection, end: str
) -> None:
    waiting, run = new_run(), new_run(idempotency_key="k")
    await shared.enqueue([waiting])
    caller.execute("INSERT INTO orders VALUES ('x')")  # opens the transaction, as Python's sqlite3 does by default
    (answer,) = await shared.enqueue([run], tx=caller)
    signal = NewSignal(run_id=waiting.run_id, name="go", payload="1", dedup_id="d")
    assert answer.disposition == "created"
    assert await shared.send(signal, scope=ALL, tx=caller) == 1
    assert await shared.get([run.run_id], scope=ALL) == [None], "nobody sees it before"
    getattr(caller, end)()
    found = await shared.get([run.run_id], scope=ALL)
    assert [one is not None for one in found] == [end == "commit"]
    (pulse,) = await shared.pulse([waiting.run_id], scope=ALL)
    assert pulse is not None
    assert pulse.wake_seq == (1 if end == "commit" else 0)


async def test_the_caller_s_row_and_text_factories_change_nothing_and_are_left(
    shared: Store, caller: sqlite3.Connection
) -> None:
    caller.row_factory, caller.text_factory = sqlite3.Row, bytes
    caller.execute("BEGIN IMMEDIATE")
    await shared.enqueue([new_run(coalesce_key="c")], tx=caller)
    (joined,) = await shared.enqueue([new_run(coalesce_key="c")], tx=caller)
    assert (joined.disposition, joined.run.name) == ("coalesced", "work")
    assert (caller.row_factory, caller.text_factory) == (sqlite3.Row, bytes)
    caller.commit()
    assert await shared.count(RunQuery(), scope=ALL) == 1


async def test_an_error_leaves_the_caller_s_transaction_as_it_was_before_the_call(
    shared: Store, caller: sqlite3.Connection
) -> None:
    await shared.enqueue([new_run(idempotency_key="k")])
    caller.execute("INSERT INTO orders VALUES ('x')")
    with pytest.raises(Conflict):
        await shared.enqueue([new_run(), new_run(idempotency_key="k", name="other")], tx=caller)
    with pytest.raises(NotFound):
        await shared.send(NewSignal(run_id="none", name="go", payload="1", dedup_id="d"), scope=ALL, tx=caller)
    assert caller.in_transaction
    caller.commit()
    assert caller.execute("SELECT text FROM orders").fetchall() == [("x",)]
    assert await shared.count(RunQuery(), scope=ALL) == 1


async def test_a_joined_run_can_not_be_claimed_before_the_caller_commits(
    shared: Store, caller: sqlite3.Connection
) -> None:
    """The write lock of the file is that lock: the claim waits for it."""
    await shared.enqueue([new_run(coalesce_key="c", input='"old"')])
    caller.execute("BEGIN IMMEDIATE")
    await shared.enqueue([new_run(coalesce_key="c", on_coalesce="replace", input='"new"')], tx=caller)
    claim = asyncio.create_task(Scene(shared, None).claim())  # type: ignore[arg-type]  # no clock is moved here
    await asyncio.sleep(0.05)
    assert not claim.done()
    caller.commit()
    assert [one.run.input for one in await claim] == ['"new"']


@pytest.mark.parametrize("wrong", ["nothing open", "another file", "memory", "no connection"])
async def test_a_caller_s_transaction_that_can_not_be_shared_is_misuse_with_a_hint(
    shared: Store, caller: sqlite3.Connection, tmp_path: Path, wrong: str
) -> None:
    tx: Any = caller
    if wrong == "no connection":
        tx = "BEGIN"
    elif wrong != "nothing open":
        tx = sqlite3.connect(tmp_path / "other.db" if wrong == "another file" else ":memory:")
        tx.execute("BEGIN")
    with pytest.raises(Misuse) as error:
        await shared.enqueue([new_run()], tx=tx)
    assert error.value.hint
    if wrong in ("another file", "memory"):
        tx.close()
    assert await shared.count(RunQuery(), scope=ALL) == 0


async def test_a_store_in_memory_has_no_caller_s_transactions_and_says_so() -> None:
    store = await backend.open("sqlite://", settings=Settings())
    assert not store.capabilities.caller_tx
    con = sqlite3.connect(":memory:")
    con.execute("BEGIN")
    with pytest.raises(Misuse):
        await store.enqueue([new_run()], tx=con)
    con.close()
    await store.close()


async def test_sqlite_s_own_errors_on_the_caller_s_connection_pass_through_untouched(
    shared: Store, tmp_path: Path
) -> None:
    con = sqlite3.connect(tmp_path / "s.db", timeout=0, isolation_level=None)
    con.execute("BEGIN")
    con.execute("SELECT count(*) FROM durable_run").fetchone()
    await shared.enqueue([new_run()])  # the snapshot of that transaction is old now
    with pytest.raises(sqlite3.OperationalError) as error:
        await shared.enqueue([new_run()], tx=con)
    assert error.value.sqlite_errorname == "SQLITE_BUSY_SNAPSHOT"
    con.close()


async def test_a_caller_s_connection_reaches_tables_with_other_names(tmp_path: Path) -> None:
    store = await backend.open(
        f"sqlite:///{tmp_path}/s.db",
        settings=Settings(),
        names=Names(tables={"durable_run": "jobs", "durable_key": "job_keys"}),
    )
    con = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    con.execute("BEGIN IMMEDIATE")
    await store.enqueue([new_run(idempotency_key="k")], tx=con)
    con.execute("COMMIT")
    con.close()
    assert await store.count(RunQuery(), scope=ALL) == 1
    await store.close()


async def test_waiting_callers_hear_of_a_commit_on_the_caller_s_connection(
    shared: Store, caller: sqlite3.Connection
) -> None:
    await shared.wait(["queue:default"], 0)
    waiting = asyncio.create_task(shared.wait(["queue:default"], GENEROUS))
    await asyncio.sleep(0)
    caller.execute("BEGIN IMMEDIATE")
    await shared.enqueue([new_run()], tx=caller)
    caller.commit()
    async with asyncio.timeout(30):
        await waiting


async def test_a_transaction_on_a_closed_store_says_so(shared: Store) -> None:
    held = await Scene(shared, None).take()  # type: ignore[arg-type]  # no clock is moved here
    await shared.close()

    async def work(con: Any) -> NewRecord:
        return record()

    with pytest.raises(StoreUnavailable):
        await shared.transaction(held.lease, work, timeout=GENEROUS)
