"""Instants as BSON dates, which hold milliseconds, and the server's clock as this process estimates it.

Everybody here stores instants through these functions. What the contract gives in microseconds is cut to the millisecond before it is
stored, compared or returned, so that what a call returns is what the store holds: a stamp downwards, an instant that must not come
early (a due time, a floor) upwards. The clock that a *write* decides by (leases, due times) is the server's own `$$NOW`; the estimate
serves where a write can not have that (inserts) and for what is computed before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from bson.datetime_ms import DatetimeMS

from durable.clock import boottime
from durable.model import Instant
from durable.settings import SECOND, Micros

MILLI: Final = 1_000
FRESH: Final[Micros] = 5 * SECOND
"""How old a sample of the server's clock may be before another one is taken."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def stored(instant: Instant) -> DatetimeMS:
    """A stamp, cut downwards."""
    return DatetimeMS(instant // MILLI)


def stored_not_before(instant: Instant) -> DatetimeMS:
    """An instant that must not come early, cut upwards."""
    return DatetimeMS(-(-instant // MILLI))


def cut(instant: Instant) -> Instant:
    """An instant as it comes back from the store."""
    return instant // MILLI * MILLI


def cut_up(instant: Instant) -> Instant:
    """The same for one that must not come early."""
    return -(-instant // MILLI) * MILLI


def milliseconds(length: Micros) -> int:
    """A length of time for the server's arithmetic: never shorter than asked."""
    return -(-length // MILLI)


def instant_of(value: Any) -> Instant:
    """The instant of a stored date."""
    return int(value) * MILLI


class ServerClock:
    """The server's clock, by samples of `hello.localTime` against the clock of this machine that counts suspend.

    The wall clock of this machine is never read. Half a round trip is the error of a sample; it is taken anew after `FRESH`, and by
    whoever finds that another node has become primary.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offset: Micros = 0
        self._sampled_at: Instant | None = None
        self._last_order = 0
        self.manual: Callable[[], Instant] | None = None
        """Set by tests only: the clock of a state machine. `$$NOW` is then a literal too."""

    def sampled(self, sent: Instant, received: Instant, server: datetime) -> None:
        """Take a sample: the server said `server` between two readings of `boottime`."""
        with self._lock:
            self._offset = round((server - _EPOCH).total_seconds() * SECOND) - (sent + received) // 2
            self._sampled_at = received

    @property
    def stale(self) -> bool:
        """Whether a sample is due."""
        return self.manual is None and (self._sampled_at is None or boottime() - self._sampled_at > FRESH)

    def doubt(self) -> None:
        """Another node may answer from here on."""
        self._sampled_at = None

    def now(self) -> Instant:
        """The server's clock, cut to the millisecond."""
        return cut(self._exact())

    def expression(self) -> Any:
        """The clock inside a write: the server's own."""
        return "$$NOW" if self.manual is None else {"$literal": stored(self.manual())}

    def order(self, count: int) -> int:
        """The first of `count` numbers for `submitted`: the server's microseconds, strictly growing within this process (7)."""
        with self._lock:
            first = max(self._exact(), self._last_order + 1)
            self._last_order = first + count - 1
        return first

    def _exact(self) -> Instant:
        return boottime() + self._offset if self.manual is None else self.manual()


__all__ = [
    "MILLI",
    "ServerClock",
    "cut",
    "cut_up",
    "instant_of",
    "milliseconds",
    "stored",
    "stored_not_before",
]
