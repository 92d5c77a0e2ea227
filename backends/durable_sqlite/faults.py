"""The one map from what SQLite and the file system say to the errors of this project.

The threads of `connection.py` and everybody who uses a caller's own connection call `mapped`. It never raises and never
swallows: the driver's error is chained as the cause by whoever raises.
"""

from __future__ import annotations

import sqlite3

from durable.errors import DurableError, SchemaMismatch, StoreError, StoreUnavailable

_HINTS: dict[int, tuple[type[StoreError], str, str]] = {
    sqlite3.SQLITE_BUSY: (
        StoreUnavailable,
        "another process holds the write lock of the database",
        "try again; a process that is stopped inside a transaction keeps the lock: find it with `fuser FILE`",
    ),
    sqlite3.SQLITE_LOCKED: (
        StoreUnavailable,
        "another connection of this process holds the database",
        "end the transaction that is open on your own connection",
    ),
    sqlite3.SQLITE_FULL: (
        StoreUnavailable,
        "the disk is full: nothing of this write was stored",
        "make room on the file system of the database; what was acknowledged is safe, and writes go on afterwards",
    ),
    sqlite3.SQLITE_READONLY: (
        StoreUnavailable,
        "the database can not be written",
        "give this user write permission on the file and on its directory (SQLite keeps -wal and -shm files beside it)",
    ),
    sqlite3.SQLITE_CANTOPEN: (
        StoreUnavailable,
        "the database file can not be opened",
        "check that the directory exists and that this user may read and write in it",
    ),
    sqlite3.SQLITE_PERM: (
        StoreUnavailable,
        "the operating system refuses access to the database file",
        "give this user read and write permission on the file and on its directory",
    ),
    sqlite3.SQLITE_IOERR: (
        StoreUnavailable,
        "the operating system could not read or write the database file",
        "check the disk; then restart this process, so that it opens the file anew",
    ),
    sqlite3.SQLITE_NOTADB: (
        SchemaMismatch,
        "the file is no SQLite database",
        "check the path in the URL; nothing was changed in the file",
    ),
    sqlite3.SQLITE_CORRUPT: (
        StoreError,
        "the database file is damaged",
        "stop all processes, keep a copy, and restore a backup or run `sqlite3 FILE .recover`",
    ),
    sqlite3.SQLITE_TOOBIG: (
        StoreError,
        "a value is longer than SQLite can hold",
        "store the data elsewhere and pass its address",
    ),
    sqlite3.SQLITE_INTERRUPT: (
        StoreUnavailable,
        "the statement was interrupted",
        "try again",
    ),
}


def mapped(error: BaseException) -> DurableError:
    """The project's error for a driver's, the operating system's or an unexpected one; ours are given back as they are."""
    if isinstance(error, DurableError):
        return error
    made: DurableError
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        known = _HINTS.get(code & 0xFF) if code is not None else None
        if known is not None:
            kind, message, hint = known
            made = kind(f"{message} ({error})", hint=hint)
        elif "no such table" in str(error) or "no such column" in str(error):
            made = SchemaMismatch(
                f"the tables are not those of this version ({error})", hint="run `durable migrate` with this version"
            )
        else:
            made = StoreError(f"SQLite: {error}")
    elif isinstance(error, OSError):
        made = StoreUnavailable(f"the operating system says: {error}", hint="check the path and its permissions")
    else:
        made = StoreError(
            f"unexpected {type(error).__name__}: {error}", hint="this is a bug of durable: please report it"
        )
    made.__cause__ = error
    return made
