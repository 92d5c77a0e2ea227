"""THE landing: the one function through which every write that makes a run terminal goes, with all that follows from it."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Sequence

from durable.model import Failure, Instant, Json, Status


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends. Terminal status; output only with completed, failure otherwise."""

    run_id: str
    status: Status
    output: Json | None = None
    failure: Failure | None = None


def land(con: sqlite3.Connection, now: Instant, endings: Sequence[Ending]) -> None:
    """Make runs terminal. The caller has checked, in this same transaction, that each of them may end (fence, status, scope)."""
    raise NotImplementedError
