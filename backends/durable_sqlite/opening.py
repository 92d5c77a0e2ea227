"""Opening: the URL, the file and what must be true of it, the settings of a connection, and one `Core` per file and process.

`store.py` calls `open_database`. An existing file is never opened but by SQLite: a plain open and close drops the locks that any
connection of this process has on it, the application's own too, and with them acknowledged commits.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import sys
import threading
import time
import urllib.parse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from durable.errors import ConfigurationError, SchemaMismatch, StoreUnavailable
from durable.model import Instant, Names
from durable.settings import Settings
from durable.storekit import Renames

from . import schema
from .connection import Core, Database
from .faults import mapped
from .lanes import Connection
from .timekeeping import newest

OLDEST: Final = (3, 35, 0)
"""Generated columns, upsert and the math that the queries use; what Python 3.11 is built with is newer."""
NETWORK: Final = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "fuse.sshfs",
        "9p",
        "glusterfs",
        "fuse.glusterfs",
        "ceph",
        "fuse.ceph",
        "lustre",
        "afs",
    }
)


class _Renamed(Connection):
    """A connection on which the statements, written with default names, reach the configured tables."""

    renames: Renames

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return super().execute(self.renames(sql), parameters)

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        return super().executemany(self.renames(sql), parameters)


# -- where --------------------------------------------------------------------------------------------------------------


def path_of(url: str) -> Path | None:
    """The file that a URL names; None: memory. Raises ConfigurationError for a URL that names neither."""
    form = "sqlite:///relative.db, sqlite:////absolute/path.db, or sqlite:///:memory:"
    if not url.startswith("sqlite:"):
        raise ConfigurationError(f"{url!r} is no SQLite URL", hint=f"write {form}")
    if url in ("sqlite:", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://:memory:"):
        return None
    parts = urllib.parse.urlsplit(url)
    if parts.netloc or not url.startswith("sqlite:///"):
        raise ConfigurationError(f"{url!r} names a host, and SQLite has none", hint=f"write {form}, with three slashes")
    if parts.query or parts.fragment:
        raise ConfigurationError(
            f"{url!r} has a query or a fragment",
            hint="settings are arguments; a ? or # that belongs to the path is written %3F or %23",
        )
    text = urllib.parse.unquote(parts.path[1:])
    if "\0" in text:
        raise ConfigurationError("the path has a NUL character", hint="check the URL")
    return Path(os.path.realpath(text))


def _check_file_system(path: Path) -> None:
    """SQLite's locks and shared memory do not hold over a network: refuse where that is known, warn where it is likely."""
    kind = _file_system(path)
    if kind in NETWORK:
        raise ConfigurationError(
            f"{path} lies on a network file system ({kind}), where SQLite loses data",
            hint="put the file on a local disk, or use PostgreSQL or MongoDB to share it between machines",
        )
    if kind is not None and kind.startswith("fuse.") and kind != "fuse.portal":
        warnings.warn(f"{path} lies on {kind}: SQLite needs working locks and shared memory there", stacklevel=2)


def _file_system(path: Path) -> str | None:
    """The type of the file system of a path; None where the system does not say (macOS, Windows)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return file_system_of(path, table)


def file_system_of(path: Path, table: str) -> str | None:
    """The type of the last mount in a mountinfo table whose point is the longest above the path."""
    best, kind = "", None
    for line in table.splitlines():
        left, dash, right = line.partition(" - ")
        fields = left.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), fields[4])
        under = point == "/" or str(path) == point or str(path).startswith(point.rstrip("/") + "/")
        if under and len(point) >= len(best):
            best, kind = point, right.split(" ")[0]
    return kind


def _prepare_file(path: Path, auto_migrate: bool | None) -> None:
    """Make the file, for this user only, where there is none; say what is wrong with a path that can not be one."""
    if path.is_dir():
        raise StoreUnavailable(f"{path} is a directory", hint="name a file in the URL")
    if not path.parent.is_dir():
        raise StoreUnavailable(f"the directory {path.parent} does not exist", hint="create it, or correct the URL")
    if auto_migrate is False and not path.exists():
        raise SchemaMismatch(
            f"there is no database at {path}",
            hint="check the path, run `durable migrate`, or open it without auto_migrate=False",
        )
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))  # payloads are nobody else's business
    except FileExistsError:
        pass  # what it holds is for SQLite to say: to open and close it here would drop the locks of the application's connections


# -- connections ----------------------------------------------------------------------------------------------------------


def _connect(target: str, renames: Renames) -> Connection:
    con = sqlite3.connect(
        target,
        timeout=5.0,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
        factory=_Renamed if renames else Connection,
    )
    if isinstance(con, _Renamed):
        con.renames = renames
    return con


def _connect_file(path: Path, renames: Renames) -> Connection:
    con = _connect(str(path), renames)
    try:
        con.execute(
            "PRAGMA schema_version"
        ).fetchone()  # reads the header: a file that is no database is refused untouched
        mode = _to_wal(con)
        if mode != "wal":
            raise StoreUnavailable(
                f"{path} can not use a write-ahead log (journal mode {mode})",
                hint="put the file on a local file system",
            )
        con.execute("PRAGMA synchronous=FULL")
        con.execute("PRAGMA wal_autocheckpoint=0")
        con.execute("PRAGMA journal_size_limit=67108864")
        con.execute("PRAGMA busy_timeout=0")
    except BaseException:
        con.close()
        raise
    return con


def _to_wal(con: Connection) -> str:
    """Processes that open a new file together meet here, and SQLite's own timeout does not serve: where two of them hold a read
    lock and both want to change the mode, one is refused at once."""
    give_up = time.monotonic() + 5.0
    while True:
        try:
            (mode,) = con.execute("PRAGMA journal_mode=WAL").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(random.uniform(0.001, 0.01))
        else:
            return str(mode)


def _connect_memory(names: Names, renames: Renames) -> Connection:
    con = _connect(":memory:", renames)
    con.deserialize(schema.template(names))
    con.execute("PRAGMA journal_mode=MEMORY")
    con.execute("PRAGMA synchronous=OFF")
    return con


# -- one core per file and process ------------------------------------------------------------------------------------------

_Key = tuple[int, str, tuple[tuple[str, str], ...]]
_lock = threading.Lock()
_cores: dict[_Key, tuple[Core, int]] = {}
"""By process, path and table names, with the number of handles. After a fork the parent's entries stay, untouched, in the child."""


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()  # a fork may have copied it while another thread held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def open_database(
    url: str, *, settings: Settings, names: Names, auto_migrate: bool | None, clock: Callable[[], Instant] | None
) -> Database:
    """Open a URL, blocking. Raises ConfigurationError, StoreUnavailable or SchemaMismatch; nothing is left half open."""
    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigurationError(
            f"this Python has SQLite {sqlite3.sqlite_version}, durable needs {'.'.join(map(str, OLDEST))}",
            hint="use a newer Python or system library",
        )
    if names.schema is not None:
        raise ConfigurationError("SQLite has no schemas", hint="rename tables with names=Names(tables=...) instead")
    path = path_of(url)
    renames = Renames(names)
    if path is None:
        core = Core(
            path=None,
            connect=lambda: _connect_memory(names, renames),
            clock=clock,
            busy_timeout=settings.busy_timeout,
            renames=renames,
        )
        return Database(core, settings, Core.close)
    key = (os.getpid(), str(path), tuple(sorted(names.tables.items())))
    try:
        with _lock:
            return _shared(key, path, settings, renames, auto_migrate, clock)
    except (sqlite3.Error, OSError) as error:
        raise mapped(error) from error


def _shared(
    key: _Key,
    path: Path,
    settings: Settings,
    renames: Renames,
    auto_migrate: bool | None,
    clock: Callable[[], Instant] | None,
) -> Database:
    known, handles = _cores.get(key, (None, 0))
    if known is not None and not known.usable:
        known = None  # its file was replaced; who opens now gets the file that is there
    if known is not None:
        if known.clock is not clock:
            raise ConfigurationError(
                f"{path} is open in this process with another clock",
                hint="open all stores of one file with the same clock",
            )
        _cores[key] = (known, handles + 1)
        return Database(known, settings, lambda core: _release(key, core))
    if not any(pid == key[0] and text == key[1] for pid, text, _ in _cores):
        _check_file_system(path)
        _prepare_file(path, auto_migrate)

    def prepare(con: sqlite3.Connection, now: Instant) -> Instant:
        schema.prepare(con, now, renames, auto_migrate, str(path))
        return newest(con, now)

    core = Core(
        path=path,
        connect=lambda: _connect_file(path, renames),
        clock=clock,
        busy_timeout=settings.busy_timeout,
        renames=renames,
        prepare=prepare,
    )
    _cores[key] = (core, 1)
    return Database(core, settings, lambda core: _release(key, core))


def _release(key: _Key, core: Core) -> None:
    with _lock:
        known, handles = _cores.get(key, (None, 0))
        if known is core and handles > 1:
            _cores[key] = (core, handles - 1)
            return
        if known is core and core.pid == os.getpid():
            del _cores[key]
        core.close()
