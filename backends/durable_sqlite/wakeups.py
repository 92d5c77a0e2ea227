"""Who waits for what: topics (`queue:NAME`, `run:ID`) announced after a commit, and changes by other processes.

`connection.py` calls `announce` and `changed` from its writer thread after each commit; `store.py` calls `wait` from any loop. A
wake-up is a hint (semantics 67): nothing here decides anything, and losing one costs a poll interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from durable.wakeups import Waiters

QUICK = 0.002
"""Seconds between looks at other processes' commits while there were some lately."""
IDLE = 0.020
"""The same when nothing happened for a while: 50 looks of 7 µs a second cost a thousandth of a core."""
LATELY = 0.100


class Wakeups:
    """The waiters of one database in this process."""

    def __init__(self, nudge: Callable[[], None]) -> None:
        self._nudge = nudge  # wakes the writer thread, so that it begins to look at other processes' commits
        self._waiters = Waiters()
        self._last_change = 0.0
        self._interval = IDLE

    async def wait(self, topics: Sequence[str], timeout: float) -> None:
        """Return when a topic is announced, another process commits, or `timeout` seconds have passed."""
        await self._waiters.wait(topics, timeout, self._began)

    def _began(self, first: bool) -> None:
        if first:
            self._nudge()

    def announce(self, topics: Iterable[str]) -> None:
        """A commit of this process brought news of these topics."""
        self._waiters.announce(topics)

    def changed(self) -> None:
        """Another connection committed: anything may be new."""
        self._last_change = time.monotonic()
        self._waiters.announce_all()

    def look_after(self) -> float | None:
        """Seconds until the writer thread should look at other processes' commits; None: nobody waits."""
        if not self._waiters.waiting:
            return None
        if time.monotonic() - self._last_change < LATELY:
            self._interval = QUICK
        else:
            self._interval = min(self._interval * 2, IDLE)
        return self._interval
