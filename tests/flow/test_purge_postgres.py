"""The purge is never in the way (semantics 60, 61): 500 runs a second flow while finished runs are deleted by two purgers at once.

The server itself is the witness: it logs every statement that waits for a lock longer than 10 ms (`log_lock_waits`, and a
`deadlock_timeout` of so much), and who holds it. A wait that is made on purpose shows that it does. Statements of other runs may wait for
each other, on a slow machine for longer; nobody may wait for a purger. `DURABLE_FLOW_PURGE` (5,000; a nox session takes 200,000) says how
many finished runs there are. How many buffers a claim reads is explained by the server before and after.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psycopg
import pytest
from postgres.test_plans import TAKEN, Eye, claim, watched
from servers.postgres import Database, Server, start_server

import durable
from durable.model import ALL
from durable.portal import end_tasks

FINISHED = int(os.environ.get("DURABLE_FLOW_PURGE", "5000"))
RATE = 500  # runs a second
PATIENCE_MS = 10
PURGER = "durable_purger"
"""What connections of a purger call themselves."""
WAVES = 20
"""How often finished runs are put back, at the most, until others have landed while they were purged."""
brief_registry = durable.Registry("flow_brief")


@durable.function(name="flow_brief", registry=brief_registry)
async def brief(ctx: durable.Context, number: int) -> int:
    return number


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server of its own, since it is told to log."""
    made = start_server()
    with psycopg.connect(made.url, autocommit=True) as con:
        con.execute("ALTER SYSTEM SET log_lock_waits = on")
        con.execute("ALTER SYSTEM SET log_connections = on")
        con.execute("ALTER SYSTEM SET log_line_prefix = '%p '")
        con.execute(f"ALTER SYSTEM SET deadlock_timeout = '{PATIENCE_MS}ms'")
        con.execute("SELECT pg_reload_conf()")
    assert made.process is not None
    yield made
    made.process.remove()


@pytest.fixture
def database(server: Server) -> Database:
    """Finished runs with a record each that are all due to be purged, and some that wait for a claim."""
    made = server.create()
    asyncio.run(_migrated(made.url))
    _finish(made)
    with made.connect() as con:
        con.execute(f"""
            INSERT INTO durable_run (run_id, name, status, attempts, created_at, updated_at, seed, input, wake_seq, max_attempts)
            SELECT 'ready-' || i, 'f0', 'pending', 0, now(), now(), '\\x00', '1', 0, 1 FROM generate_series(1, {20 * TAKEN}) AS i""")
        con.execute("VACUUM ANALYZE")
    return made


def _finish(database: Database) -> None:
    """Runs that have ended, each with a record, and are due to be purged."""
    with database.connect() as con, con.transaction():
        con.execute(f"""
            INSERT INTO durable_run (run_id, name, status, attempts, created_at, updated_at, finished_at, purge_at, seed, input,
                output, wake_seq, max_attempts)
            SELECT 'finished-' || i, 'f1', 'completed', 1, now(), now(), now() - interval '1 day', now() - i * interval '1 ms',
                '\\x00', '1', jsonb '1', 0, 1
            FROM generate_series(1, {FINISHED}) AS i""")
        con.execute("""
            INSERT INTO durable_step (run_id, step_id, kind, position, seen, digest, fence, created_at, result)
            SELECT run_id, 'a', 'step', 0, -1, 'd', 1, created_at, '{"v":1}' FROM durable_run WHERE name = 'f1'""")


async def _migrated(url: str) -> None:
    async with durable.Client(url, auto_migrate=True):
        pass


def test_no_statement_waits_for_a_purge_and_a_claim_reads_as_much_as_before(server: Server, database: Database) -> None:
    assert server.process is not None
    log = server.process.folder / "log"
    before = _buffers_of_a_claim(database)
    took, landed = asyncio.run(_purged_under_traffic(database))
    waits = _waits_for_a_purger(log)
    with database.connect() as con:
        con.execute("VACUUM ANALYZE")  # what the server does by itself every so often
    after = _buffers_of_a_claim(database)
    print(
        f"\n{FINISHED} runs purged in {took:.1f} s while {landed} runs landed ({landed / took:.0f}/s); {len(waits)} statements waited"
        f" more than {PATIENCE_MS} ms for a lock of a purger; buffers of a claim of {TAKEN}: {before} before, {after} after"
    )
    assert waits == []
    assert after <= before * 1.2
    _wait_on_purpose(database, log)


def _as_purger(database: Database) -> str:
    return f"{database.url}{'&' if '?' in database.url else '?'}application_name={PURGER}"


async def _purged_under_traffic(database: Database) -> tuple[float, int]:
    """Purge everything with two clients, as often as it takes for runs to land meanwhile; how long it took, and how many did."""
    url = database.url
    async with (
        durable.Client(url) as client,
        durable.Client(_as_purger(database)) as one,
        durable.Client(_as_purger(database)) as other,
    ):
        async with durable.Worker(client, functions=brief_registry, concurrency=100):
            flowing = asyncio.create_task(_flow(client))
            try:
                while not await client.count(function="flow_brief", status="completed"):
                    assert not flowing.done(), flowing.result()
                    await asyncio.sleep(0.05)
                for _ in range(WAVES):
                    began, before = time.monotonic(), await client.count(function="flow_brief", status="completed")
                    counts = await asyncio.gather(one.purge(), other.purge())
                    took, after = (
                        time.monotonic() - began,
                        await client.count(function="flow_brief", status="completed"),
                    )
                    assert sum(counts) == FINISHED
                    assert await client.count(function="f1") == 0
                    if after > before:
                        break
                    await asyncio.to_thread(_finish, database)
                else:
                    pytest.fail("void: nothing flowed")
            finally:
                await end_tasks([flowing])
        assert list(await client.store.audit(scope=ALL)) == []
        return took, after - before


async def _flow(client: durable.Client) -> None:
    """Runs at an even rate, as far as this machine can."""
    began, sent = time.monotonic(), 0
    while True:
        due = min(int((time.monotonic() - began) * RATE) - sent, RATE)
        await asyncio.gather(*(client.start(brief, sent + number) for number in range(due)))
        sent += due
        await asyncio.sleep(0.02)


def _waits_for_a_purger(log: Path) -> list[str]:
    """Who waited longer than that for a lock that a purger held, in the words of the server."""
    text = log.read_text(errors="replace")
    purgers = set(re.findall(rf"^(\d+) LOG:  connection authorized:.* application_name={PURGER}\b", text, re.MULTILINE))
    assert purgers, "void: the server does not log who is connected"
    waits = re.findall(
        r"^\d+ LOG:  process \d+ still waiting for .*\n\d+ DETAIL:  Process.* holding the lock: .*", text, re.MULTILINE
    )
    held = re.compile(r"holding the lock: ([\d, ]+)\.")
    return [wait for wait in waits for found in held.findall(wait) if purgers & {*found.split(", ")}]


def _buffers_of_a_claim(database: Database) -> int:
    """Of the third claim: by then its plan is the lasting one."""
    with mock.patch("durable_postgres.connection.teach", watched):
        eye = Eye(database)
        try:
            for _ in range(3):
                taken, seen = eye.look(claim)
                assert taken == TAKEN
            buffers = sum(one.buffers for one in seen)
            assert buffers > TAKEN, "void: so little is read by a claim that takes nothing"
            return buffers
        finally:
            with mock.patch.object(database, "drop"):
                eye.close()


def _wait_on_purpose(database: Database, log: Path) -> None:
    """One statement waits for a row that a purger has locked, until the server has logged it."""
    lock = "SELECT 1 FROM durable_run WHERE run_id = 'ready-1' FOR UPDATE"
    with psycopg.connect(_as_purger(database), autocommit=True) as holder, database.connect() as waiter:
        holder.execute("BEGIN")
        holder.execute(lock)
        blocked = threading.Thread(target=waiter.execute, args=(lock,))
        blocked.start()
        deadline = time.monotonic() + 30
        while not _waits_for_a_purger(log):
            assert time.monotonic() < deadline, "void: the server does not log who waits for whom"
            time.sleep(0.05)
        holder.execute("COMMIT")
        blocked.join(30)
        assert not blocked.is_alive()
