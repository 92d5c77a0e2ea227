"""The store's clock: the wall clock of this machine, made to go on when somebody sets that back.

`connection.py` asks it once per transaction. A wall clock that is set back by an hour would otherwise stop every lease and every
due time for an hour. So the store's clock keeps its lead, and goes at half its pace until the wall clock has caught up: it neither
stands nor jumps, and what is due comes after at most twice its time. Processes of one file agree on the lead: each measures the
step by the clock that nobody sets, and one that opens the file later begins at the newest stamp that the file has.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Final

from durable.clock import boottime
from durable.model import Instant
from durable.settings import DAY, SECOND, Micros

log = logging.getLogger("durable.sqlite")

NEWEST: Final = """
SELECT max((SELECT coalesce(max(seen_at), 0) FROM durable_worker),
           (SELECT coalesce((SELECT updated_at FROM durable_run ORDER BY submitted DESC LIMIT 1), 0)))
"""
"""The latest stamp at hand: live workers renew theirs every few seconds."""
LONGEST_LEAD: Final[Micros] = DAY
"""A stamp further ahead than this was made under a clock that was simply wrong: it is not followed."""


def newest(con: sqlite3.Connection, now: Instant) -> Instant:
    """The newest stamp of a file that is being opened; `now` where it has none, or one that no sound clock can have made."""
    (found,) = con.execute(NEWEST).fetchone()
    if found - now > LONGEST_LEAD:
        log.warning(
            "the file has stamps that lie %.1f days ahead: it was written under a clock that was wrong, which is not followed",
            (found - now) / DAY,
        )
        return now
    return max(int(found), now)


class Timekeeper:
    """The clock of one process on one file. `given` replaces the wall clock in tests; it never runs backwards either, but stands.

    Usable from any thread.
    """

    def __init__(self, given: Callable[[], Instant] | None) -> None:
        self.given = given
        self._lock = threading.Lock()
        self._last: Instant = 0
        self._wall: Instant = time.time_ns() // 1_000
        self._steady: Micros = boottime()
        self._lead: Micros = 0

    def now(self) -> Instant:
        """Microseconds since 1970; never less than it said before."""
        with self._lock:
            self._last = max(self._last, self._read() if self.given is None else self.given())
            return self._last

    def begin_at(self, stamp: Instant) -> None:
        """Take over the lead that the processes had which wrote this stamp."""
        if self.given is None and stamp > self.now():
            with self._lock:
                self._gain(stamp - self._last)

    def _read(self) -> Instant:
        """The wall clock and the lead: what the wall clock lost against the steady one, and half of what has passed since."""
        wall, steady = time.time_ns() // 1_000, boottime()
        passed = max(steady - self._steady, 0)
        lost = passed - (wall - self._wall)
        self._wall, self._steady = wall, steady
        self._lead = max(self._lead - passed // 2, 0)
        if lost < 0:  # it was set forward, or the machine slept and only the wall clock went on
            self._lead = max(self._lead + lost, 0)
        else:
            self._gain(lost)
        return wall + self._lead

    def _gain(self, lost: Micros) -> None:
        self._lead += lost
        if lost > SECOND:
            log.warning(
                "the clock of this machine went back by %.1f s: what is due comes after at most twice its time until it has caught up",
                lost / SECOND,
            )


__all__ = ["Timekeeper", "newest"]
