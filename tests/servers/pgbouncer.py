"""A PgBouncer in transaction mode before the test server, with few server connections, so that sessions change hands all the time.

`apt-get install pgbouncer` brings it, which `.ci/run` does where it may. Where it is missing the tests that need it are skipped with that
sentence, and fail where `DURABLE_REQUIRE_PGBOUNCER` is set, as by `.ci/run` once it is there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
import urllib.parse
from pathlib import Path

import psycopg
import pytest
from servers.ports import free_port
from servers.postgres import server

CONFIG = """
[databases]
* = host={host} port={port} user={user}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 4
max_client_conn = 500
server_lifetime = 30
logfile = {folder}/log
pidfile = {folder}/pid
"""
ADVICE = "PgBouncer is not installed: apt-get install pgbouncer"


class Bouncer:
    """A running PgBouncer."""

    def __init__(self, program: str) -> None:
        parts = urllib.parse.urlsplit(server().url)
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="durable-pgbouncer-"))
        values = {"host": parts.hostname, "port": parts.port or 5432, "user": parts.username or "postgres"}
        config = self.folder / "pgbouncer.ini"
        config.write_text(CONFIG.format(own=self.port, folder=self.folder, **values), encoding="utf-8")
        identity: dict[str, object] = {}
        if os.getuid() == 0:  # it refuses root
            identity = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid}
            for path in (self.folder, config):
                shutil.chown(path, "nobody")
        self.process = subprocess.Popen(
            [program, str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **identity
        )  # type: ignore[call-overload]
        atexit.register(self.close)
        limit = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.url_of("postgres"), prepare_threshold=None).close()
                return
            except psycopg.OperationalError:
                if self.process.poll() is not None or time.monotonic() > limit:
                    raise
            time.sleep(0.05)

    def url_of(self, database: str) -> str:
        """The URL of a database through it."""
        user = urllib.parse.urlsplit(server().url).username or "postgres"
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def close(self) -> None:
        """Stop it."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)


def bouncer() -> Bouncer:
    """A PgBouncer, or a skip that says how to get one."""
    program = shutil.which("pgbouncer") or next(
        (path for path in ("/usr/sbin/pgbouncer",) if Path(path).exists()), None
    )
    if program is None:
        if os.environ.get("DURABLE_REQUIRE_PGBOUNCER"):
            pytest.fail(ADVICE)
        pytest.skip(ADVICE)
    return Bouncer(program)
