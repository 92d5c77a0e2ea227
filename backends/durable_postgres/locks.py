"""Locking the runs that a batch touches: all of them in one statement, in the order of their ids (semantics 3, 31, 64).

Every write of several runs begins here: `settle`, `cancel`, `mailbox`, the landing for what it drags in, `retry`. With a run come its
parent and the nodes behind it in a graph, since a landing changes them. Whoever only takes what is free (claim, sweep, promote, purge)
skips what is locked instead. Sequence keys, which are no rows, are locked by number. What other tables say of a locked run is asked in a
later statement: the one that waits for a lock sees them as they were before. Nothing here changes a row.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from durable.model import Instant
from durable.settings import Micros

from .operation import Ask, Operation, Work, rows, together

FAMILY: Final = """
WITH wanted AS MATERIALIZED (
    SELECT unnest($1::text[]) AS run_id
    UNION SELECT p.parent_run_id FROM durable_run AS p WHERE p.run_id = ANY ($1::text[]) AND p.parent_run_id IS NOT NULL
    UNION SELECT d.run_id FROM durable_dependency AS d WHERE d.depends_on = ANY ($1::text[])
)
SELECT r.run_id, r.status, r.attempts, r.lease_owner, r.cancel_requested_at, r.cancel_refused_at, r.wake_seq, r.deadline_at, r.queue,
    r.keep, r.sequence_key, r.blocked_on, r.parent_run_id, r.schedule_id, r.wake_after, r.wake_delay, r.wake_on_failure, r.available_at,
    r.tenant_id
FROM durable_run AS r WHERE r.run_id = ANY (ARRAY(SELECT w.run_id FROM wanted AS w)) ORDER BY r.run_id FOR NO KEY UPDATE OF r
"""
FOLLOWERS: Final = """
SELECT EXISTS (SELECT 1 FROM durable_dependency AS d WHERE d.depends_on = ANY ($1::text[]))
    OR EXISTS (SELECT 1 FROM durable_permit AS p WHERE p.run_id = ANY ($1::text[]))
"""
ALONE: Final = """
SELECT r.run_id FROM durable_run AS r WHERE r.run_id = ANY ($1::text[]) ORDER BY r.run_id FOR NO KEY UPDATE
"""
LINES: Final = "SELECT pg_advisory_xact_lock($1, n) FROM unnest($2::integer[]) AS n"
LINE_COUNT: Final = 64
"""Sequence keys share so many locks: a batch of thousands of keys must not fill the server's table of locks."""


@dataclasses.dataclass(slots=True)
class Standing:
    """A locked run, as it stands for the rest of the transaction. Who writes the row writes here, too."""

    run_id: str
    status: str
    attempts: int
    lease_owner: str | None
    cancel_requested_at: Instant | None
    cancel_refused_at: Instant | None
    wake_seq: int
    deadline_at: Instant | None
    queue: str
    keep: Micros | None
    sequence_key: str | None
    blocked_on: str | None
    parent_run_id: str | None
    schedule_id: str | None
    wake_after: int
    wake_delay: Micros
    wake_on_failure: bool
    available_at: Instant | None
    tenant_id: UUID | None

    @property
    def live(self) -> bool:
        """Not terminal."""
        return self.status in ("pending", "running", "suspended")

    @property
    def cancel_open(self) -> bool:
        """An ask that is not refused."""
        return self.cancel_requested_at is not None and self.cancel_refused_at is None


Locked = dict[str, Standing]


def family(run_ids: Iterable[str]) -> Operation[Locked]:
    """Lock these runs, their parents and the nodes behind them; unknown ids are left out."""
    found = yield from rows(FAMILY, sorted(set(run_ids)))
    return {row[0]: Standing(*row) for row in found}


def family_and_followers(run_ids: Iterable[str]) -> Operation[tuple[Locked, bool]]:
    """The same; and, in the same round trip but after the lock, whether a node is behind one of these runs or one holds a permit.

    What it says of a run that is live stays true until the commit: both are written under the lock of the run."""
    ids = sorted(set(run_ids))
    found, ((followed,),) = yield from together(Ask(FAMILY, (ids,)), Ask(FOLLOWERS, (ids,)))
    return {row[0]: Standing(*row) for row in found}, followed


def alone(run_ids: Iterable[str]) -> Operation[None]:
    """Lock these runs only."""
    yield from rows(ALONE, sorted(set(run_ids)))


def lines(work: Work, sequence_keys: Iterable[str]) -> Operation[None]:
    """One transaction at a time joins, heads or leaves the line of a sequence key (75). After rows, never before them."""
    numbers = sorted({zlib.crc32(key.encode()) % LINE_COUNT for key in sequence_keys})
    if numbers:
        yield from rows(LINES, work.lock_class, numbers)


__all__ = ["Locked", "Standing", "alone", "family", "family_and_followers", "lines"]
