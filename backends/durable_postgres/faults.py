"""The one map from what PostgreSQL, its driver and the network say to the errors of this project.

`connection.py` and `schema.py` wrap every use of a pooled connection in `mapped()`; the caller's own connection is never wrapped, its
errors pass through untouched (semantics 41). The driver's error is chained as the cause. Nothing here tries anything again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Final

import psycopg
import psycopg_pool

from durable.errors import Conflict, SchemaMismatch, StoreError, StoreUnavailable

_Known = tuple[type[StoreError], str, str]
_MIGRATE: Final = "run `durable migrate` with this version"
_TEXT: Final = "NUL characters and lone surrogates can not be stored: take them out, or pass bytes"

_STATES: Final[dict[str, _Known]] = {
    "40001": (StoreUnavailable, "the transaction lost against others, again and again", "try again"),
    "40P01": (StoreUnavailable, "the transaction met others in a dead-lock, again and again", "try again"),
    "55P03": (
        StoreUnavailable,
        "a row is locked by another transaction",
        "try again; end the transaction that holds it",
    ),
    "57014": (StoreUnavailable, "the statement was cancelled", "try again; look at statement_timeout of the role"),
    "25006": (
        StoreUnavailable,
        "the server is read-only (a standby, or a fail-over under way)",
        "connect to the primary",
    ),
    "25P03": (StoreUnavailable, "the transaction was idle for too long and was ended", "try again"),
    "53300": (StoreUnavailable, "the server has no connection left", "raise max_connections, or lower pool_size"),
    "53100": (StoreUnavailable, "the disk of the server is full: nothing of this write was stored", "make room on it"),
    "42P01": (SchemaMismatch, "a table is missing", _MIGRATE),
    "42703": (SchemaMismatch, "a column is missing", _MIGRATE),
    "3F000": (SchemaMismatch, "the schema is missing", _MIGRATE),
    "42P10": (SchemaMismatch, "a unique index is missing", _MIGRATE),
    "42501": (StoreError, "the role may not do that", "grant it what docs/postgresql.md lists"),
    "22021": (StoreError, "text that PostgreSQL can not hold", _TEXT),
    "22P05": (StoreError, "text that PostgreSQL can not hold", _TEXT),
    "22P02": (StoreError, "a payload that is no JSON", "pass what the codec wrote"),
    "54000": (StoreError, "a key or a name is too long for an index", "hash it, or use a shorter one"),
}
_CLASSES: Final[dict[str, _Known]] = {
    "08": (StoreUnavailable, "the connection was lost", "try again"),
    "53": (StoreUnavailable, "the server is short of something", "look at its log"),
    "57": (StoreUnavailable, "the server is stopping or starting", "try again"),
    "58": (StoreUnavailable, "the server can not reach its files", "look at its log"),
    "28": (StoreUnavailable, "the server refuses this user", "check user, password and pg_hba.conf"),
    "3D": (StoreUnavailable, "there is no such database", "create it: createdb NAME"),
}
AGAIN: Final = frozenset({"40001", "40P01"})
"""Another attempt of the whole transaction may simply work."""
NOT_THERE: Final = "26000"
"""A prepared statement is gone: somebody said DISCARD ALL."""
STALE: Final = frozenset({NOT_THERE, "0A000", "42804", "42883"})
"""What was known of a statement does not hold any more: a migration changed the types of a table. Nothing of it was done."""


def lost(error: BaseException) -> bool:
    """Did the connection end, or does it lead to a server that can not write? Then it is not used again."""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return error.sqlstate.startswith(("08", "57P")) or error.sqlstate in ("25006", "25P03")
    return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError, OSError))


@contextlib.contextmanager
def mapped() -> Generator[None, None, None]:
    """What the driver raises comes out as ours; ours come out as they are."""
    try:
        yield
    except psycopg_pool.PoolTimeout as error:
        raise StoreUnavailable(
            f"no connection: {error}", hint="is the server there? if it is, raise pool_size or max_connections"
        ) from error
    except psycopg_pool.PoolClosed as error:
        raise StoreUnavailable("the store is closed", hint="open it again") from error
    except psycopg.Error as error:
        raise _of(error) from error
    except OSError as error:
        raise StoreUnavailable(f"the network says: {error}", hint="check host and port of the URL") from error


def _of(error: psycopg.Error) -> StoreError | Conflict:
    state = error.sqlstate
    text = str(error).strip().replace("\n", "; ")
    if state is None:
        if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
            return StoreUnavailable(f"the connection was lost or can not be made ({text})", hint="try again")
        if isinstance(error, psycopg.DataError):
            return StoreError(f"PostgreSQL can not hold a value ({text})", hint=_TEXT)
        return StoreError(f"psycopg: {text}")
    if state == "23505":
        return Conflict(f"something of that key is there already ({text})")
    known = _STATES.get(state) or _CLASSES.get(state[:2])
    if known is None:
        return StoreError(f"PostgreSQL {state}: {text}")
    kind, message, hint = known
    return kind(f"{message} ({text})", hint=hint)


__all__ = ["AGAIN", "NOT_THERE", "STALE", "lost", "mapped"]
