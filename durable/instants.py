"""Instants as users see them (aware datetimes) and as everything inside sees them (whole microseconds since 1970, UTC). Pure.

The faces and the scheduler convert here; nothing is rounded and a datetime without a zone is refused, since it means another
instant on every machine.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from .errors import ConfigurationError
from .settings import Micros

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def moment(instant: Micros, /) -> datetime:
    """The aware datetime of an instant, in UTC."""
    return EPOCH + timedelta(microseconds=instant)


def instant(value: datetime, /, *, what: str = "instant") -> Micros:
    """The instant of an aware datetime. Raises ConfigurationError for a naive one, or one that is no datetime at all."""
    candidate: object = value
    if not isinstance(candidate, datetime):
        raise ConfigurationError(f"{what}: {candidate!r} is not a datetime", hint="pass an aware datetime")
    if candidate.tzinfo is None or candidate.utcoffset() is None:
        raise ConfigurationError(
            f"{what}: {candidate!r} has no time zone: it would be another instant on every machine",
            hint="pass an aware one, such as datetime.now(UTC) + timedelta(hours=1)",
        )
    return (candidate - EPOCH) // _MICROSECOND


__all__ = ["EPOCH", "instant", "moment"]
