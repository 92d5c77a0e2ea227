"""Opening: what a URL, a file and a schema must be, and what is said where they are not."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from durable.errors import ConfigurationError, DurableError, SchemaMismatch, StoreUnavailable
from durable.model import ALL, Names, QueueRecord, RunQuery
from durable.settings import Settings
from durable.storekit import Migration
from durable.testing.conformance.scenario import Scene, new_run
from durable_sqlite import Store, backend, opening, schema

NEXT = len(schema.migrations()) + 1
"""The version of a migration that is added to those that there are."""


def url(path: Path) -> str:
    return f"sqlite:///{path}"


async def opened(path: Path, **options: Any) -> Store:
    return await backend.open(url(path), settings=Settings(), **options)


@contextlib.contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    con = sqlite3.connect(path, isolation_level=None, timeout=30)
    try:
        yield con
    finally:
        con.close()


def says_what_to_do(error: pytest.ExceptionInfo[DurableError]) -> bool:
    return bool(error.value.hint) and error.value.__class__ is not DurableError


# -- the URL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        "sqlite://host/file.db",
        "sqlite:/file.db",
        "postgresql://x/y",
        "sqlite:///file.db?mode=ro",
        "sqlite:///a#b",
        "sqlite:///a%00b",
    ],
)
async def test_a_url_that_names_neither_a_file_nor_memory_is_refused_in_plain_words(bad: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        await backend.open(bad, settings=Settings())
    assert says_what_to_do(error)


@pytest.mark.parametrize("memory", ["sqlite://", "sqlite:///:memory:", "sqlite://:memory:"])
async def test_every_store_in_memory_is_its_own(memory: str) -> None:
    first, second = [await backend.open(memory, settings=Settings()) for _ in range(2)]
    await first.enqueue([new_run()])
    assert await first.count(RunQuery(), scope=ALL) == 1
    assert await second.count(RunQuery(), scope=ALL) == 0
    await first.close()
    await second.close()


def test_a_path_in_a_url_is_relative_after_three_slashes_and_absolute_after_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = Path(os.path.realpath(tmp_path))
    assert opening.path_of("sqlite:///a%20b.db") == here / "a b.db"
    assert opening.path_of(f"sqlite:///{tmp_path}/c.db") == here / "c.db"


async def test_a_memory_store_opens_in_a_few_milliseconds() -> None:
    """The template is what makes it so: the second store runs no DDL. Counted, not timed."""
    statements: list[str] = []
    schema.template(Names())
    con = opening._connect_memory(Names(), opening.Renames(Names()))
    con.set_trace_callback(statements.append)
    assert schema.status(con, opening.Renames(Names())).missing == []
    assert not [statement for statement in statements if "CREATE" in statement]
    con.close()


# -- the file -----------------------------------------------------------------------------------------------------------


async def test_a_new_file_and_its_log_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = await opened(tmp_path / "s.db")
    finally:
        os.umask(before)
    await store.enqueue([new_run()])
    modes = {name.name: stat.S_IMODE(name.stat().st_mode) for name in tmp_path.iterdir()}
    assert modes == {"s.db": 0o600, "s.db-wal": 0o600, "s.db-shm": 0o600}
    await store.close()


async def test_the_mode_of_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.touch(mode=0o640)
    path.chmod(0o640)
    store = await opened(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [check.level for check in await store.check() if check.name == "permissions"] == ["warn"]
    await store.close()


@pytest.mark.parametrize(
    "content", [b"hello", b"# a text file\n" * 1000, b"SQLite format 3\0 and then nothing that fits"]
)
async def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(SchemaMismatch) as error:
        await opened(path)
    assert says_what_to_do(error)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


async def test_an_empty_file_is_a_new_database(tmp_path: Path) -> None:
    (tmp_path / "s.db").touch()
    store = await opened(tmp_path / "s.db")
    assert (await store.schema_status()).missing == []
    await store.close()


async def test_a_directory_and_a_missing_directory_say_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "s.db"):
        with pytest.raises(StoreUnavailable) as error:
            await opened(path)
        assert says_what_to_do(error)
    assert list(tmp_path.iterdir()) == []


async def test_a_truncated_database_is_a_store_error_that_says_damaged(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = await opened(path)
    await store.enqueue([new_run() for _ in range(50)])
    await store.close()
    path.write_bytes(path.read_bytes()[: 4096 * 3])

    async def used() -> None:
        store = await opened(path)
        try:
            await store.enqueue([new_run() for _ in range(200)])
        finally:
            await store.close()

    with pytest.raises(DurableError) as error:
        await used()
    assert error.value.code in ("store", "store_unavailable", "schema_mismatch")
    assert says_what_to_do(error)


READ_ONLY = """
import asyncio, concurrent.futures.thread, os, sys
from durable.errors import StoreUnavailable
from durable.settings import Settings
from durable_sqlite import backend
if os.geteuid() == 0:  # permissions do not bind root: go on as nobody
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
async def main():
    try:
        store = await backend.open("sqlite:///" + sys.argv[1], settings=Settings())
    except StoreUnavailable as error:
        print(error.code, bool(error.hint))
asyncio.run(main())
"""


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
async def test_a_file_that_can_not_be_written_says_so_when_it_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    store = await opened(folder / "s.db")
    await store.close()
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o055)
    (folder / "s.db").chmod(0o444)
    folder.chmod(0o555)
    answer = child(READ_ONLY, str(folder / "s.db"))
    folder.chmod(0o755)
    assert answer.split() == ["store_unavailable", "True"]


def child(code: str, *arguments: str) -> str:
    """What a process of its own prints; it must end well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:30 / /mnt/share rw - nfs4 server:/export rw
31 30 0:31 / /mnt/share/local rw - ext4 /dev/vdb rw
32 22 0:32 / /mnt/with\\040space rw master:1 - fuse.sshfs host:/ rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/s.db", "ext4"),
        ("/mnt/share/s.db", "nfs4"),
        ("/mnt/shared/s.db", "ext4"),
        ("/mnt/share/local/s.db", "ext4"),
        ("/mnt/with space/s.db", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_longest_mount_above_it(path: str, kind: str) -> None:
    assert opening.file_system_of(Path(path), MOUNTS) == kind


async def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_file_system", lambda path: "nfs4")
    with pytest.raises(ConfigurationError) as error:
        await opened(tmp_path / "s.db")
    assert says_what_to_do(error)
    assert list(tmp_path.iterdir()) == []


async def test_an_unknown_file_system_in_user_space_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_file_system", lambda path: "fuse.something")
    with pytest.warns(UserWarning, match=r"fuse\.something"):
        store = await opened(tmp_path / "s.db")
    await store.close()


# -- the schema ---------------------------------------------------------------------------------------------------------


async def test_a_database_of_another_application_is_refused_unless_migration_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with raw(path) as con:
        con.execute("CREATE TABLE customer (name TEXT)")
    with pytest.raises(SchemaMismatch) as error:
        await opened(path)
    assert says_what_to_do(error)
    with raw(path) as con:
        assert con.execute("SELECT name FROM sqlite_master").fetchall() == [("customer",)]
    store = await opened(path, auto_migrate=True)
    await store.enqueue([new_run()])
    await store.close()
    with raw(path) as con:
        assert con.execute("SELECT count(*) FROM customer").fetchone() == (0,)
        assert con.execute("PRAGMA application_id").fetchone() == (0,), "the file is the application's"
    await (await opened(path)).close()


async def test_no_database_and_auto_migrate_false_is_refused_and_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(SchemaMismatch) as error:
        await opened(tmp_path / "s.db", auto_migrate=False)
    assert says_what_to_do(error)
    assert list(tmp_path.iterdir()) == []


async def test_an_empty_database_and_auto_migrate_false_is_a_schema_mismatch(tmp_path: Path) -> None:
    (tmp_path / "s.db").touch()
    with pytest.raises(SchemaMismatch) as error:
        await opened(tmp_path / "s.db", auto_migrate=False)
    assert says_what_to_do(error)


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this were the code of the next release, with one more migration."""
    now = schema.migrations()
    later = Migration(version=NEXT, name="0900_later", text="CREATE TABLE durable_worker_note (note TEXT NOT NULL);\n")
    monkeypatch.setattr(schema, "migrations", lambda: [*now, later])
    schema._wanted.cache_clear()
    yield
    schema._wanted.cache_clear()


async def test_an_older_schema_is_brought_up_to_date_and_keeps_its_rows(tmp_path: Path, request: Any) -> None:
    store = await opened(tmp_path / "s.db")
    await store.enqueue([new_run()])
    await store.close()
    request.getfixturevalue("next_version")
    store = await opened(tmp_path / "s.db")
    status = await store.schema_status()
    assert (status.found, status.wanted, list(status.missing)) == (NEXT, NEXT, [])
    assert await store.count(RunQuery(), scope=ALL) == 1
    assert await store.migrate() == status, "a second migrate does nothing"
    await store.close()


async def test_permits_from_before_they_said_how_many_are_out_are_counted(tmp_path: Path) -> None:
    """A file of version 1 with runs in flight under a limit."""
    store = await opened(tmp_path / "s.db")
    scene = Scene(store, None)  # type: ignore[arg-type]  # no clock is moved here
    await store.set_queue(QueueRecord(scope_name="queue:default", max_concurrency=3))
    await store.enqueue([new_run() for _ in range(5)])
    assert len(await scene.claim(2)) == 2
    await store.close()
    with raw(tmp_path / "s.db") as con:
        con.execute("DROP INDEX durable_permit_newest")
        con.execute("ALTER TABLE durable_permit DROP COLUMN number")
        con.execute("ALTER TABLE durable_permit DROP COLUMN in_flight")
        con.execute("DELETE FROM durable_schema_version WHERE version > 1")
    store = await opened(tmp_path / "s.db")
    scene = Scene(store, None)  # type: ignore[arg-type]
    assert len(await scene.claim(5)) == 1
    assert list(await store.audit(scope=ALL)) == []
    await store.close()


async def test_an_older_schema_with_auto_migrate_false_is_refused_and_left_as_it_is(
    tmp_path: Path, request: Any
) -> None:
    await (await opened(tmp_path / "s.db")).close()
    request.getfixturevalue("next_version")
    with pytest.raises(SchemaMismatch) as error:
        await opened(tmp_path / "s.db", auto_migrate=False)
    assert says_what_to_do(error)
    with raw(tmp_path / "s.db") as con:
        assert con.execute("SELECT max(version) FROM durable_schema_version").fetchone() == (NEXT - 1,)


async def test_a_newer_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    await (await opened(tmp_path / "s.db")).close()
    with raw(tmp_path / "s.db") as con:
        con.execute("INSERT INTO durable_schema_version VALUES (99, 'x', 0)")
    for auto_migrate in (None, True, False):
        with pytest.raises(SchemaMismatch) as error:
            await opened(tmp_path / "s.db", auto_migrate=auto_migrate)
        assert says_what_to_do(error)


async def test_tables_made_by_another_text_of_a_migration_are_refused(tmp_path: Path) -> None:
    await (await opened(tmp_path / "s.db")).close()
    with raw(tmp_path / "s.db") as con:
        con.execute("UPDATE durable_schema_version SET checksum = 'other'")
    with pytest.raises(SchemaMismatch) as error:
        await opened(tmp_path / "s.db")
    assert says_what_to_do(error)


@pytest.mark.parametrize("lost", ["TABLE durable_signal", "INDEX durable_run_idempotency"])
async def test_a_table_or_an_index_that_was_dropped_is_named(tmp_path: Path, lost: str) -> None:
    await (await opened(tmp_path / "s.db")).close()
    with raw(tmp_path / "s.db") as con:
        con.execute(f"DROP {lost}")
    with pytest.raises(SchemaMismatch, match=lost.split()[1]):
        await opened(tmp_path / "s.db")


SIX = """
import asyncio, concurrent.futures.thread, os, sys
from durable.settings import Settings
from durable_sqlite import backend
async def main():
    store = await backend.open("sqlite:///" + sys.argv[1], settings=Settings())
    print((await store.schema_status()).found, flush=True)
    await store.close()
go, gone = os.pipe()
children = []
for _ in range(6):  # forked before anything is open, so that all are ready to start at once
    child = os.fork()
    if child == 0:
        os.close(gone)
        os.read(go, 1)
        asyncio.run(main())
        os._exit(0)
    children.append(child)
os.close(gone)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")
def test_six_processes_that_open_a_new_file_at_once_migrate_it_once(tmp_path: Path) -> None:
    assert child(SIX, str(tmp_path / "s.db")).split() == [str(NEXT - 1)] * 6
    with raw(tmp_path / "s.db") as con:
        assert [version for (version,) in con.execute("SELECT version FROM durable_schema_version")] == [
            *range(1, NEXT)
        ]


async def test_tables_can_have_other_names_and_two_sets_live_in_one_file(tmp_path: Path) -> None:
    other = Names(tables={"durable_run": "jobs_run", "durable_schema_version": "jobs_version", **{
        f"durable_{name}": f"jobs_{name}"
        for name in ("step", "signal", "key", "schedule", "schedule_fire", "queue", "permit", "worker", "dependency")
    }})  # fmt: skip
    first = await opened(tmp_path / "s.db")
    second = await opened(tmp_path / "s.db", names=other, auto_migrate=True)
    await second.enqueue([new_run(idempotency_key="k"), new_run()])
    assert await first.count(RunQuery(), scope=ALL) == 0
    assert await second.count(RunQuery(), scope=ALL) == 2
    await first.close()
    await second.close()
    with raw(tmp_path / "s.db") as con:
        assert con.execute("SELECT count(*) FROM jobs_run").fetchone() == (2,)


@pytest.mark.parametrize(
    "tables",
    [
        {"durable_nothing": "x"},
        {"durable_run": "Robert'); DROP"},
        {"durable_run": "sqlite_x"},
        {"durable_run": "durable_step"},
    ],
)
async def test_a_table_name_that_can_not_work_is_refused(tables: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        await backend.open("sqlite://", settings=Settings(), names=Names(tables=tables))
    with pytest.raises(ConfigurationError):
        await backend.open("sqlite://", settings=Settings(), names=Names(schema="x"))


async def test_stores_of_one_file_in_one_process_share_connections_and_so_a_clock(tmp_path: Path) -> None:
    first = await opened(tmp_path / "s.db")
    second = await opened(tmp_path / "s.db")
    assert first._database.core is second._database.core
    with pytest.raises(ConfigurationError) as error:
        await opened(tmp_path / "s.db", clock=lambda: 1)
    assert says_what_to_do(error)
    await first.close()
    await second.enqueue([new_run()])  # it goes on when the other was closed
    await second.close()
    with pytest.raises(StoreUnavailable):
        await first.count(RunQuery(), scope=ALL)


def test_the_published_schema_is_that_of_the_migrations() -> None:
    """`schemas/sqlite.sql` is made by `durable schema`; when this fails, make it again and look at the difference."""
    published = Path(__file__).parents[2] / "schemas" / "sqlite.sql"
    assert published.read_text(encoding="utf-8") == backend.schema()


def test_the_published_schema_makes_the_same_database_as_the_migrations() -> None:
    def shape(con: sqlite3.Connection) -> list[Any]:
        rows = con.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()
        return [
            (kind, name, table, " ".join((sql or "").split()).replace("( ", "(").replace(" )", ")"))
            for kind, name, table, sql in rows
        ]

    published, migrated = sqlite3.connect(":memory:"), sqlite3.connect(":memory:")
    published.executescript(backend.schema())
    migrated.deserialize(schema.template(Names()))
    assert shape(published) == shape(migrated)
    versions = "SELECT version, checksum FROM durable_schema_version"
    assert published.execute(versions).fetchall() == migrated.execute(versions).fetchall()
    published.close()
    migrated.close()
