"""Every knob once: default, unit, reason. Durations inside the project are integer microseconds (`Micros`).

Users pass `Duration` (timedelta, seconds as a number, or text such as "90s", "2h", "3d"); `micros()` turns one into
microseconds and refuses what is none. Nobody else parses durations.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeAlias

from .errors import ConfigurationError

Duration: TypeAlias = timedelta | float | str
Micros: TypeAlias = int

SECOND: Micros = 1_000_000
MINUTE: Micros = 60 * SECOND
HOUR: Micros = 60 * MINUTE
DAY: Micros = 24 * HOUR

_UNITS: dict[str, Micros] = {"us": 1, "ms": 1_000, "s": SECOND, "m": MINUTE, "h": HOUR, "d": DAY, "w": 7 * DAY}
_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d|w)", re.ASCII)
LONGEST: Micros = 36_500 * DAY
"""A hundred years: longer ones are refused, so that an instant plus a duration is always a valid instant."""


def micros(value: Duration, /, *, what: str = "duration") -> Micros:
    """Microseconds of a duration. Raises ConfigurationError for text that is none, a negative, a NaN or an endless one."""
    given: object = value  # whatever it is declared to be
    try:
        if isinstance(given, timedelta):
            amount = given // timedelta(microseconds=1)
        elif isinstance(given, str):
            parts = _PART.findall(given)
            if not parts or "".join(number + unit for number, unit in parts) != given.replace(" ", ""):
                raise ValueError("not a duration")
            amount = sum(round(float(number) * _UNITS[unit]) for number, unit in parts)
        elif isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given):
            amount = round(given * SECOND)
        else:
            raise ValueError("not a duration")
        if not 0 <= amount <= LONGEST:
            raise ValueError("negative or longer than a hundred years")
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{what}: {value!r} is {error}",
            hint='pass a timedelta, seconds as a number, or text such as "90s", "2h", "1d12h"; between 0 and 100 years',
        ) from None
    return amount


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The defaults of semantics.md, each with its unit and its reason."""

    lease: Micros = 30 * SECOND
    """How long a claim is valid without a renewal; renewed every third of it. Recovery after a crash takes this plus a sweep."""
    poll: Micros = SECOND
    """Longest wait for work while there was some lately (±20 %): what a lost wake-up costs at most."""
    poll_idle: Micros = 5 * SECOND
    """The same after a minute without work."""
    park_after: Micros = 5 * SECOND
    """How long a run at rest stays in memory before it is suspended."""
    max_parked: int = 1_000
    """Runs at rest that may stay in memory; more are suspended at once."""
    grace: Micros = 30 * SECOND
    """How long bodies may go on after a stop was asked for."""
    max_reclaims: int = 5
    """Lapsed leases in a row without a new record before a run lands failed (reclaim_limit)."""
    mismatch_limit: Micros = DAY
    """How long a run whose code changed under it is handed back before it lands failed."""
    keep: Micros = 30 * DAY
    """How long a landed run is kept before it is purged."""
    max_payload: int = 1 << 20
    """Bytes of one encoded value. Larger ones are refused at the call."""
    concurrency: int = 100
    """Bodies that run at once in one worker."""
    transaction_slots: int = 4
    """`ctx.transaction` calls at once in one worker (each holds a connection)."""
    transaction_timeout: Micros = 5 * SECOND
    """Longest `ctx.transaction`; never more than a third of the lease."""
    wake_delay: Micros = 250_000
    """How long the ends of independent children are gathered before they wake their parent."""
    catch_up_limit: int = 100
    """Runs fired at most for missed instants of one schedule with catch_up="all"."""
    teardown_rounds: int = 10
    """How often the tasks of a body that is put aside are cancelled before they are dropped."""
    start_many_limit: int = 10_000
    """Items of one start_many or map batch."""
    busy_timeout: Micros = 5 * SECOND
    """SQLite: how long a writer waits for the lock of another process before StoreUnavailable."""
    promote_batch: int = 500
    """Due runs promoted by one write."""
    sweep_batch: int = 100
    """Lapsed leases returned by one write."""
    purge_batch: int = 200
    """Landed runs deleted by one write (SQLite: the only writer must not be held for long)."""
    purge_every: Micros = 10 * MINUTE
    """How often due runs are purged."""
    slot_keep: Micros = 400 * DAY
    """How long the slot row of a schedule is kept: longer than its run, so that a purge re-opens no slot."""
    worker_keep: Micros = DAY
    """How long the registry keeps a worker that is not seen any more."""

    @classmethod
    def of(cls, overrides: Mapping[str, Any], /) -> Settings:
        """The defaults with overrides; durations in any form. Raises ConfigurationError for an unknown name or a bad value."""
        known = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, int] = {}
        for name, value in overrides.items():
            if name not in known:
                raise ConfigurationError(f"there is no setting {name!r}", hint="known: " + ", ".join(sorted(known)))
            if known[name] == "Micros":
                values[name] = micros(value, what=name)
            elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
                values[name] = value
            else:
                raise ConfigurationError(f"{name}: {value!r} is not a positive whole number")
        return cls(**values)
