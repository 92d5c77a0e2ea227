"""The two clocks of a process, and pacing. Instants and durations are whole microseconds.

Leases of the engine are judged by `boottime`, chores and polls are paced with `jittered`; SQLite stamps with `system_micros`.
It never decides what time it is for a run: that is the store's clock.
"""

from __future__ import annotations

import time

from .settings import Micros

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def boottime() -> Micros:
    """Microseconds that never go back and go on while the machine is suspended (CLOCK_BOOTTIME; elsewhere the monotonic clock).

    A lease that the store has given away while a laptop slept must look old here, too (semantics 14).
    """
    if _BOOTTIME is not None:
        return time.clock_gettime_ns(_BOOTTIME) // 1_000
    return time.monotonic_ns() // 1_000


def system_micros() -> Micros:
    """The wall clock: microseconds since 1970 in UTC. It may jump; only what is shown or stored as an instant uses it."""
    return time.time_ns() // 1_000


def jittered(delay: Micros, random: float, *, spread: float = 0.2) -> Micros:
    """`delay` made shorter or longer by up to `spread` of itself, so that workers started together do not poll together.

    `random` is in [0, 1).
    """
    return max(0, round(delay * (1.0 + spread * (2.0 * random - 1.0))))
