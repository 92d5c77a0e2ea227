"""Motor, for applications that still hold its client: their sessions are accepted as `tx=` (extra `motor`). Motor is not used inside.

`transactions.py` asks here whether a session is Motor's; what is written goes through the client that the session belongs to. Its
collections are called as PyMongo's own (`operation.py` copes with the one difference that matters, a cursor that is given at once). Motor
is past its end of life, and a caller is told so once.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from .operation import NativeDatabase


def is_session(tx: object) -> bool:
    """Whether it is a session of Motor. What was never imported can not have made one."""
    module = sys.modules.get("motor.motor_asyncio")
    return module is not None and isinstance(tx, module.AsyncIOMotorClientSession)


def is_client(tx: object) -> bool:
    """Whether it is a client of Motor."""
    module = sys.modules.get("motor.motor_asyncio")
    return module is not None and isinstance(tx, module.AsyncIOMotorClient)


def database_of(tx: Any, name: str) -> NativeDatabase:
    """The database through the client that the session belongs to: sessions do not mix."""
    warnings.warn(
        "Motor has reached its end of life; PyMongo's AsyncMongoClient has the same methods",
        DeprecationWarning,
        stacklevel=2,
    )
    database: NativeDatabase = tx.client.get_database(name)
    return database


__all__ = ["database_of", "is_client", "is_session"]
