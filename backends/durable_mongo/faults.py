"""The one map from what the driver says to the errors of this project, and which of its errors mean "again".

`connection.py` and `transactions.py` call these. Nothing here raises or swallows: the driver's error is chained as the cause by
whoever raises.
"""

from __future__ import annotations

from typing import Final

from bson.errors import InvalidDocument
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    DocumentTooLarge,
    DuplicateKeyError,
    InvalidOperation,
    NetworkTimeout,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
    WTimeoutError,
)

from durable.errors import Conflict, DurableError, PayloadTooLarge, SchemaMismatch, StoreError, StoreUnavailable

TRANSIENT: Final = "TransientTransactionError"
UNKNOWN_COMMIT: Final = "UnknownTransactionCommitResult"

_DUPLICATE: Final = 11000
_WRITE_CONFLICT: Final = 112
_TOO_LARGE: Final = frozenset({10334, 17419, 17420})
_STANDALONE: Final = 20
_AUTHENTICATION: Final = frozenset({13, 18})
# Not now: elections, shutdowns, time limits, write conflicts, and nodes that are no primary any more.
_NOT_NOW: Final = frozenset(
    {6, 7, 24, 50, 64, 79, 89, 91, 100, 112, 133, 134, 189, 202, 246, 251, 262, 317, 384, 9001, 10058, 10107, 11600, 11602, 13435, 13436}
)  # fmt: skip

STANDALONE: Final = (
    "durable needs transactions, and this mongod is no replica set",
    "start mongod with --replSet rs0 and run rs.initiate() once in mongosh: one node is enough",
)


def codes(error: PyMongoError) -> list[int]:
    """The server's codes in an error: one, or those of each failed write of a batch."""
    if isinstance(error, BulkWriteError):
        details = error.details
        found = [int(one["code"]) for one in details.get("writeErrors", ()) if "code" in one]
        return found + [int(one["code"]) for one in details.get("writeConcernErrors", ()) if "code" in one]
    if isinstance(error, OperationFailure) and error.code is not None:
        return [error.code]
    return []


def duplicate(error: BaseException) -> bool:
    """Somebody else's document has that key."""
    return isinstance(error, DuplicateKeyError) or (isinstance(error, PyMongoError) and _DUPLICATE in codes(error))


def transient(error: BaseException) -> bool:
    """The transaction as a whole is to be tried again."""
    return isinstance(error, PyMongoError) and error.has_error_label(TRANSIENT)


def unknown_commit(error: BaseException) -> bool:
    """The commit may have happened: it is to be asked for again. Also where the server gives no label (a failed write concern)."""
    if not isinstance(error, PyMongoError):
        return False
    return error.has_error_label(UNKNOWN_COMMIT) or isinstance(
        error, (WriteConcernError, WTimeoutError, ConnectionFailure)
    )


def conflict(error: BaseException) -> bool:
    """It met another writer at a document. The server itself is well."""
    return isinstance(error, PyMongoError) and codes(error) == [_WRITE_CONFLICT]


def passing(error: BaseException) -> bool:
    """A write outside a transaction, which can be repeated, may succeed in a moment."""
    if isinstance(error, (AutoReconnect, NetworkTimeout, WriteConcernError)):
        return True
    return isinstance(error, PyMongoError) and bool(_NOT_NOW.intersection(codes(error)))


def mapped(error: BaseException) -> DurableError:
    """The project's error for a driver's or an unexpected one; ours are given back as they are."""
    if isinstance(error, DurableError):
        return error
    made = _made(error)
    made.__cause__ = error
    return made


def _made(error: BaseException) -> DurableError:
    text = _short(error)
    if isinstance(error, DocumentTooLarge):
        return PayloadTooLarge("a document would be larger than the 16 MB that MongoDB stores")
    if isinstance(error, PyMongoError):
        found = set(codes(error))
        if found & _TOO_LARGE or (2 in found and "too large" in str(error)):
            return PayloadTooLarge("a document would be larger than the 16 MB that MongoDB stores")
        if _STANDALONE in found:
            return StoreError(STANDALONE[0], hint=STANDALONE[1])
        if found & _AUTHENTICATION:
            return StoreError(f"MongoDB refuses access: {text}", hint="the user needs readWrite on the database")
        if isinstance(error, ConnectionFailure) or found & _NOT_NOW or error.timeout:
            return StoreUnavailable(f"MongoDB does not answer: {text}", hint="nothing is lost; it is tried again")
        if duplicate(error):
            return Conflict(
                f"a row can not be stored, another one has its key: {text}",
                hint="a step of a parent starts one child, and a position has one record",
            )
        if "hint provided" in str(error):
            return SchemaMismatch(f"an index is missing: {text}", hint="run `durable migrate`")
        if isinstance(error, (ConfigurationError, InvalidOperation)):
            return StoreUnavailable(f"the connection can not be used: {text}")
        return StoreError(f"MongoDB: {text}")
    if isinstance(error, InvalidDocument):
        return StoreError(f"a document can not be stored: {text}")
    if isinstance(error, UnicodeEncodeError):
        return StoreError(f"a text can not be stored: {text}", hint="it holds half of a surrogate pair")
    if isinstance(error, OSError):
        return StoreUnavailable(f"the operating system says: {text}")
    return StoreError(f"unexpected {type(error).__name__}: {text}", hint="this is a bug of durable: please report it")


def _short(error: BaseException) -> str:
    """The message without the driver's long tail (topology, full reply)."""
    return str(error).partition(", full error:")[0].partition(", Topology Description:")[0][:500]


__all__ = ["STANDALONE", "conflict", "duplicate", "mapped", "passing", "transient", "unknown_commit"]
