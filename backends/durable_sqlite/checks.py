"""What `doctor` asks of this store: the library, the file, its log, its schema, its settings.

`store.py` calls `check` on a reader. Every sentence says what to do; nothing is changed.
"""

from __future__ import annotations

import os
import sqlite3

from durable.model import Check

from . import schema
from .connection import CHECKPOINT_BYTES, Core

FIXED_BRANCHES = {(3, 44): 6, (3, 50): 7}
"""Branches that got the repair of the WAL-reset bug, with the first release that has it; from 3.51.3 on all have it."""


def wal_reset_fixed(version: tuple[int, int, int]) -> bool:
    """Whether a SQLite of this version has the repair of the bug by which two processes can damage a file."""
    branch = FIXED_BRANCHES.get(version[:2])
    return version >= (3, 51, 3) or (branch is not None and version[2] >= branch)


def check(con: sqlite3.Connection, core: Core) -> list[Check]:
    """Every check, the worst not first: doctor sorts."""
    found = [_library(core), _schema(con, core)]
    if core.path is None:
        found.append(Check(name="file", level="warn", text="the store is in memory: it ends with this process"))
        return found
    return [*found, *_file(con, core)]


def _library(core: Core) -> Check:
    version = sqlite3.sqlite_version
    if core.path is not None and not wal_reset_fixed(sqlite3.sqlite_version_info):
        return Check(
            name="sqlite",
            level="warn",
            text=f"SQLite {version} has the WAL-reset bug (fixed in 3.51.3, 3.50.7, 3.44.6): with several processes on one file"
            " use a Python that is built with a newer one",
        )
    return Check(name="sqlite", level="ok", text=f"SQLite {version}")


def _schema(con: sqlite3.Connection, core: Core) -> Check:
    status = schema.status(con, core.renames)
    if status.missing:
        return Check(name="schema", level="refuse", text=f"missing: {', '.join(status.missing)}; run `durable migrate`")
    if status.found != status.wanted:
        text = f"the tables have version {status.found}, this code wants {status.wanted}; run `durable migrate`"
        return Check(name="schema", level="refuse", text=text)
    return Check(name="schema", level="ok", text=f"version {status.found}")


def _file(con: sqlite3.Connection, core: Core) -> list[Check]:
    path = core.path
    assert path is not None
    found: list[Check] = []
    mode = path.stat().st_mode & 0o077
    found.append(
        Check(name="permissions", level="warn", text=f"others may read {path} (mode {mode:03o}); chmod 600 it")
        if mode and os.name == "posix"
        else Check(name="permissions", level="ok", text="the file is readable by its owner only")
    )
    journal = con.execute("PRAGMA journal_mode").fetchone()[0]
    level = "ok" if journal == "wal" else "refuse"
    found.append(Check(name="journal", level="ok" if level == "ok" else "refuse", text=f"journal mode {journal}"))
    wal = path.with_name(path.name + "-wal")
    size = wal.stat().st_size if wal.exists() else 0
    if size > 16 * CHECKPOINT_BYTES:
        text = (
            f"the log has grown to {size >> 20} MiB: a long read or a stopped process keeps it from being copied back"
        )
        found.append(Check(name="log", level="warn", text=text))
    else:
        found.append(Check(name="log", level="ok", text=f"the log has {size >> 10} KiB"))
    room = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize if hasattr(os, "statvfs") else None
    if room is not None and room < 256 << 20:
        found.append(Check(name="room", level="warn", text=f"{room >> 20} MiB are left on the disk of {path}"))
    return found
