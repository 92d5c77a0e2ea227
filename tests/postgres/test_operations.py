"""What docs/postgresql.md tells those who run it (rule 69): the privileges of the roles, and a backup that is restored and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from postgres.conftest import until
from postgres.test_faults import NoTime
from postgres.test_schema import catalog
from servers.postgres import Database, server

import durable
from durable.errors import StoreError
from durable.model import ALL
from durable.settings import Settings
from durable.storekit import TABLES
from durable.testing.conformance.scenario import Scene, new_run
from durable.testing.conformance.test_lost_answers import WRITES, state
from durable_postgres import backend, schema

PAGE = (Path(__file__).parents[2] / "docs" / "postgresql.md").read_text(encoding="utf-8")
APP, READER = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
SETTINGS = {"poll": "100ms", "poll_idle": "100ms"}


def as_role(database: Database, role: str) -> str:
    """The URL of the database for another role."""
    parts = urllib.parse.urlsplit(database.url)
    place = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{role}@{place}"))


class Roles:
    """An owner, an application and a reader, with names of this process; the page's statements with these names."""

    def __init__(self) -> None:
        self.owner, self.app, self.reader = (f"durable_{what}_{os.getpid()}" for what in ("owner", "app", "reader"))

    def of(self, statements: str) -> str:
        return statements.replace("durable_app;", f"{self.app};").replace("durable_reader;", f"{self.reader};")


@pytest.fixture
def roles() -> Iterator[tuple[Database, Roles]]:
    """A database of the owner's, migrated by it, with the page's grants."""
    made = Roles()
    names = (made.owner, made.app, made.reader)
    with psycopg.connect(server().url, autocommit=True) as con:
        for name in names:
            con.execute(f"CREATE ROLE {name} LOGIN")
    database = server().create()
    with database.connect() as con:
        con.execute(f"ALTER DATABASE {database.name} OWNER TO {made.owner}")
    done = subprocess.run(
        [sys.executable, "-m", "durable", "migrate", "--url", as_role(database, made.owner)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with psycopg.connect(as_role(database, made.owner), autocommit=True) as con:
        con.execute(made.of(APP))
        con.execute(made.of(READER))
    yield database, made
    database.drop()
    with psycopg.connect(server().url, autocommit=True) as con:
        for name in names:
            con.execute(f"DROP ROLE {name}")


# -- privileges ---------------------------------------------------------------------------------------------------------------


def test_the_page_names_every_table_and_view() -> None:
    assert {table for table in TABLES if not re.search(rf"\b{table}\b", APP)} == set()
    assert {view for view in schema.VIEWS if not re.search(rf"\b{view}\b", READER)} == set()


@pytest.mark.timeout(180)
def test_the_demo_runs_as_a_role_that_owns_nothing(roles: tuple[Database, Roles]) -> None:
    database, names = roles
    done = subprocess.run(
        [sys.executable, "-m", "durable", "demo", "--json", "--url", as_role(database, names.app)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["holds"] is True


async def test_every_write_and_every_look_is_allowed_to_a_role_that_owns_nothing_and_locks_no_table(
    roles: tuple[Database, Roles],
) -> None:
    """Somebody holds the locks that a writer and a vacuum hold: what asks for more than rows would wait for them in vain."""
    database, names = roles
    holder = psycopg.connect(database.url)
    store = await backend.open(as_role(database, names.app), settings=Settings())
    scene = Scene(store, NoTime(database))  # type: ignore[arg-type]
    for prepare in WRITES.values():
        for mode in ("ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE"):
            holder.execute(f"LOCK TABLE {', '.join(TABLES)} IN {mode} MODE")
        await (await prepare(scene))(store)
        await state(scene)
        for run in await scene.runs():
            await store.explain(run.run_id, scope=ALL)
        await store.audit(scope=ALL)
        await store.stats(scope=ALL)
        assert {check.name for check in await store.check() if check.level == "refuse"} == set()
        holder.rollback()
        holder.execute("; ".join(f"DELETE FROM {table}" for table in TABLES if table != "durable_schema_version"))
        holder.commit()
    await store.close()
    holder.close()


async def test_a_role_that_may_less_is_told_what_to_grant(roles: tuple[Database, Roles]) -> None:
    """The hint names the page; nothing is half written."""
    database, names = roles
    with database.connect() as con:
        con.execute(f"REVOKE USAGE ON SEQUENCE durable_run_submitted_seq FROM {names.app}")
    store = await backend.open(as_role(database, names.app), settings=Settings())
    with pytest.raises(StoreError, match=r"docs/postgresql\.md"):
        await store.enqueue([new_run(idempotency_key="k")])
    await store.close()
    with database.connect() as con:
        assert con.execute("SELECT count(*) FROM durable_key").fetchone() == (0,)


def test_a_reader_sees_the_views_and_nothing_else(roles: tuple[Database, Roles]) -> None:
    database, names = roles
    with psycopg.connect(as_role(database, names.reader), autocommit=True) as con:
        for view in schema.VIEWS:
            con.execute(f"SELECT * FROM {view}")
        for table in TABLES:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                con.execute(f"SELECT * FROM {table}")


# -- backup and restore -------------------------------------------------------------------------------------------------------

declared = durable.Registry("test_operations")
GO = durable.Signal("go", str)
began: list[str] = []
gate = asyncio.Event()


async def note(what: str) -> str:
    began.append(what)
    return what


async def held(what: str) -> str:
    began.append(what)
    await gate.wait()
    return what


@durable.function(registry=declared)
async def waits(ctx: durable.Context) -> str:
    first = await ctx.step(note, "before the signal")
    return f"{first}, {await ctx.wait_signal(GO)}"


@durable.function(registry=declared)
async def works(ctx: durable.Context) -> str:
    first = await ctx.step(note, "first")
    return f"{first}, {await ctx.step(held, 'second')}"


@durable.function(registry=declared)
async def quick(ctx: durable.Context) -> str:
    return await ctx.step(note, "quick")


def program(name: str) -> str:
    """One of PostgreSQL's own, of the version of the server."""
    process = server().process
    found = str(process.programs / name) if process is not None else shutil.which(name)
    assert found is not None, f"{name} is not installed: it comes with the client programs of PostgreSQL"
    return found


def carry_over(database: Database, target: Database, file: Path) -> None:
    """As the page says it."""
    for command in (
        [program("pg_dump"), "--format=custom", f"--file={file}", database.url],
        [program("pg_restore"), "--no-owner", f"--dbname={target.url}", str(file)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


async def test_a_dump_is_restored_and_its_runs_go_on(database: Database, empty: Database, tmp_path: Path) -> None:
    """One has ended, one waits for a signal, one is in the middle of a step, one is delayed: what was recorded is not run again."""
    began.clear()
    gate.clear()
    async with (
        durable.Client(database.url, settings=SETTINGS) as client,
        durable.Worker(client, functions=declared, lease="5s"),
    ):
        ended = await client.start(quick)
        assert await ended.result(timeout=60) == "quick"
        waiting, working = await client.start(waits), await client.start(works)
        delayed = await client.start(quick.using(delay="1h"))
        await until(lambda: {"before the signal", "second"} <= {*began}, "the runs to come to their places")
        await until(lambda: _recorded(database, waiting.id), "the record")
        await asyncio.to_thread(carry_over, database, empty, tmp_path / "dump")
        before = list(began)
        gate.set()
    async with durable.Client(empty.url, settings=SETTINGS) as client:
        assert (await client.get(ended.id, quick)).status == "completed"
        resumed = [await client.get(run.id) for run in (waiting, working, delayed)]
        with empty.connect() as con:  # the hour has passed
            con.execute("UPDATE durable_run SET available_at = now() WHERE run_id = %s", (delayed.id,))
        async with durable.Worker(client, functions=declared, lease="5s"):
            began.clear()
            await resumed[0].signal(GO, "gone")
            answers = [await run.result(timeout=60) for run in resumed]
            assert answers == ["before the signal, gone", "first, second", "quick"]
            assert await client.run(quick) == "quick"  # new ones find their place in the order
        assert sorted(began) == ["quick", "quick", "second"], before
        assert list(await client.audit()) == []
    assert catalog(database) == catalog(empty)


def _recorded(database: Database, run_id: str) -> bool:
    with database.connect() as con:
        return bool(con.execute("SELECT 1 FROM durable_step WHERE run_id = %s", (run_id,)).fetchall())
