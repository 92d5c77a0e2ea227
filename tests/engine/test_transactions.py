"""`ctx.transaction` and `client.using(conn=…)`, end to end: semantics 26, 32, 41, 67."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import until

import durable
from durable import Registry
from durable.model import ErrorKind

declared = Registry("test_transactions")
PATIENCE = "30s"
GO = durable.Signal("go", int)

started: list[str] = []
the_client: durable.Client


async def credit(con: sqlite3.Connection, account: str, cents: int) -> int:
    started.append("credit")
    con.execute("UPDATE account SET cents = cents + ? WHERE id = ?", (cents, account))
    return int(con.execute("SELECT cents FROM account WHERE id = ?", (account,)).fetchone()[0])


def plain_credit(con: sqlite3.Connection, account: str, cents: int) -> int:
    con.execute("UPDATE account SET cents = cents + ? WHERE id = ?", (cents, account))
    return cents


async def credit_then_fail(con: sqlite3.Connection, account: str) -> None:
    con.execute("UPDATE account SET cents = cents + 1000 WHERE id = ?", (account,))
    raise ValueError("not today")


async def credit_and_commit(con: sqlite3.Connection, account: str) -> None:
    con.execute("UPDATE account SET cents = cents + 1000 WHERE id = ?", (account,))
    con.commit()


async def break_once() -> None:
    started.append("break")
    if started.count("break") == 1:
        raise RuntimeError("the first time")


@durable.function(registry=declared)
async def top_up(ctx: durable.Context, account: str, cents: int) -> int:
    return await ctx.transaction(credit, account, cents)


@durable.function(registry=declared, retry=durable.Retry(2, initial="10ms"))
async def top_up_then_break(ctx: durable.Context, account: str) -> int:
    balance = await ctx.transaction(credit, account, 5)
    await ctx.step(break_once)
    return balance


@durable.function(registry=declared)
async def failing(ctx: durable.Context, account: str) -> str:
    try:
        await ctx.transaction(credit_then_fail, account)
    except ValueError as error:
        return str(error)
    return "it did not fail"


@durable.function(registry=declared)
async def committing(ctx: durable.Context, account: str) -> None:
    await ctx.transaction(credit_and_commit, account)


@durable.function(registry=declared)
async def follow_up(ctx: durable.Context, account: str) -> str:
    return f"told {account}"


async def credit_and_start(con: sqlite3.Connection, account: str) -> str:
    con.execute("UPDATE account SET cents = cents + 1 WHERE id = ?", (account,))
    return (await the_client.using(conn=con).start(follow_up.using(idempotency_key=f"after-{account}"), account)).id


@durable.function(registry=declared)
async def chains(ctx: durable.Context, account: str) -> str:
    return await ctx.transaction(credit_and_start, account)


@durable.function(registry=declared)
async def waits(ctx: durable.Context) -> int:
    return await ctx.wait_signal(GO)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[durable.Client]:
    global the_client
    started.clear()
    settings = {"poll": "20ms", "poll_idle": "20ms"}
    async with durable.Client(f"sqlite:///{tmp_path / 'bank.db'}", settings=settings) as opened:
        the_client = opened
        yield opened


@pytest.fixture
def bank(client: durable.Client, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    con = sqlite3.connect(tmp_path / "bank.db", isolation_level=None)
    con.execute("CREATE TABLE account (id TEXT PRIMARY KEY, cents INTEGER NOT NULL)")
    con.execute("INSERT INTO account VALUES ('ann', 100)")
    yield con
    con.close()


def worker(client: durable.Client) -> durable.Worker:
    return durable.Worker(client, functions=declared, lease="5s")


def cents(bank: sqlite3.Connection) -> int:
    return int(bank.execute("SELECT cents FROM account").fetchone()[0])


async def test_the_callers_rows_and_the_record_are_there_together(
    client: durable.Client, bank: sqlite3.Connection
) -> None:
    async with worker(client):
        run = await client.start(top_up, "ann", 250)
        assert await run.result(timeout=PATIENCE) == 350
    assert cents(bank) == 350
    assert [record.step_id for record in await client.journal(run.id)] == ["credit"]


async def test_a_transaction_that_is_recorded_is_not_done_again_when_the_run_is_tried_again(
    client: durable.Client, bank: sqlite3.Connection
) -> None:
    async with worker(client):
        assert await client.run(top_up_then_break, "ann") == 105
    assert (started, cents(bank)) == (["credit", "break", "break"], 105)


async def test_work_that_raises_leaves_nothing_and_the_body_gets_its_error(
    client: durable.Client, bank: sqlite3.Connection
) -> None:
    async with worker(client):
        assert await client.run(failing, "ann") == "not today"
    assert cents(bank) == 100


async def test_commit_by_the_caller_is_refused_and_leaves_nothing(
    client: durable.Client, bank: sqlite3.Connection
) -> None:
    async with worker(client):
        run = await client.start(committing, "ann")
        with pytest.raises(durable.RunFailed):
            await run.result(timeout=PATIENCE)
    await run.refresh()
    assert (cents(bank), run.error_kind) == (100, ErrorKind.MISUSE)


async def test_many_transactions_at_once_each_count_once(client: durable.Client, bank: sqlite3.Connection) -> None:
    async with worker(client):
        runs = [await client.start(top_up, "ann", 1) for _ in range(40)]
        seen = sorted([await run.result(timeout=PATIENCE) for run in runs])
    assert seen == list(range(101, 141))
    assert cents(bank) == 140


async def test_a_run_started_inside_commits_with_the_step(client: durable.Client, bank: sqlite3.Connection) -> None:
    async with worker(client):
        started_id = await client.run(chains, "ann")
        assert await (await client.get(started_id, follow_up)).result(timeout=PATIENCE) == "told ann"
    assert cents(bank) == 101


@pytest.mark.parametrize("many", [False, True])
async def test_in_the_callers_transaction_runs_exist_if_and_only_if_it_commits(
    client: durable.Client, bank: sqlite3.Connection, many: bool
) -> None:
    async def submit() -> list[durable.Run[Any]]:
        inside = client.using(conn=bank)
        return [*await inside.start_many(follow_up, ["a", "b"])] if many else [await inside.start(follow_up, "a")]

    bank.execute("BEGIN IMMEDIATE")
    for run in await submit():
        with pytest.raises(durable.NotFound):
            await client.get(run.id)
    bank.execute("ROLLBACK")
    assert await client.count() == 0
    bank.execute("BEGIN IMMEDIATE")
    runs = await submit()
    bank.execute("COMMIT")
    await client.wake()
    async with worker(client):
        assert {await run.result(timeout=PATIENCE) for run in runs} <= {"told a", "told b"}
    assert await client.count(status="completed") == len(runs)


async def test_a_submit_in_the_callers_transaction_joins_the_waiting_run_and_keeps_it_from_being_claimed(
    client: durable.Client, bank: sqlite3.Connection
) -> None:
    once = follow_up.using(coalesce_key="k")
    waiting = await client.start(once, "ann")
    bank.execute("BEGIN IMMEDIATE")
    joined = await client.using(conn=bank).start(once, "ann")
    assert (joined.id, joined.disposition) == (waiting.id, "coalesced")
    late = worker(client)
    working = asyncio.create_task(late.run())  # the caller holds the only write lock: it waits
    await asyncio.sleep(0.2)
    assert bank.execute("SELECT attempts FROM durable_run").fetchone() == (0,)
    bank.execute("COMMIT")
    assert await waiting.result(timeout=PATIENCE) == "told ann"
    await late.stop()
    await working


async def test_a_signal_in_the_callers_transaction_is_sent_if_and_only_if_it_commits(
    client: durable.Client, bank: sqlite3.Connection
) -> None:
    async with worker(client):
        run = await client.start(waits)
        await until(lambda: _begun(client, run.id))
        for value, end in ((1, "ROLLBACK"), (2, "COMMIT")):
            bank.execute("BEGIN IMMEDIATE")
            await client.using(conn=bank).signal(run.id, GO, value)
            bank.execute(end)
        assert await run.result(timeout=PATIENCE) == 2


async def _begun(client: durable.Client, run_id: str) -> bool:
    return (await client.get(run_id)).attempts == 1


async def test_a_connection_without_a_transaction_is_refused(client: durable.Client, bank: sqlite3.Connection) -> None:
    with pytest.raises(durable.DurableError, match="BEGIN"):
        await client.using(conn=bank).start(follow_up, "ann")
    assert await client.count() == 0


async def test_waiting_for_a_result_inside_the_transaction_is_misuse(
    client: durable.Client, bank: sqlite3.Connection
) -> None:
    bank.execute("BEGIN IMMEDIATE")
    with pytest.raises(durable.Misuse):
        await client.using(conn=bank).run(follow_up, "ann")
    bank.execute("ROLLBACK")
