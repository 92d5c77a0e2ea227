"""A slow, independent reading of semantics 54, for the tests of `durable.cron`.

It enumerates local dates and local times, asks the zone for both readings of each, and sorts what comes out. It shares nothing
with the code under test: not the parser, not the search, not the treatment of gaps.
"""

from __future__ import annotations

import calendar
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
NAMES = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
NAMES |= {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}


def values(field: str, lowest: int, highest: int) -> set[int]:
    found: set[int] = set()
    for item in field.lower().split(","):
        span, _, step = item.partition("/")
        if span == "*":
            first, last = lowest, highest
        else:
            start, dash, end = span.partition("-")
            first = NAMES.get(start) if start in NAMES else int(start)
            last = (NAMES.get(end) if end in NAMES else int(end)) if dash else (highest if step else first)
        found |= set(range(first, last + 1, int(step or 1)))
    return found


class Reference:
    def __init__(self, expression: str, tz: str) -> None:
        self.expression = expression
        parts = expression.split()
        self.zone = ZoneInfo(tz)
        self.minutes = values(parts[0], 0, 59)
        self.hours = values(parts[1], 0, 23)
        self.days = values(parts[2], 1, 31)
        self.months = values(parts[3], 1, 12)
        self.weekdays = {weekday % 7 for weekday in values(parts[4], 0, 7)}
        self.seconds = values(parts[5], 0, 59) if len(parts) == 6 else {0}
        self.restricted = [not parts[2].startswith("*"), not parts[4].startswith("*")]
        self.elapsed = "*" in parts[1]
        self.times = [
            time(h, m, s) for h in sorted(self.hours) for m in sorted(self.minutes) for s in sorted(self.seconds)
        ]

    def matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        answers = [day.day in self.days, day.isoweekday() % 7 in self.weekdays]
        return any(answers) if all(self.restricted) else all(answers)

    def readings(self, wall: datetime) -> list[datetime]:
        """Every instant at which the local clock shows `wall`."""
        found = set()
        for fold in (0, 1):
            moment = wall.replace(tzinfo=self.zone, fold=fold).astimezone(UTC)
            if moment.astimezone(self.zone).replace(tzinfo=None, fold=0) == wall:
                found.add(moment)
        return sorted(found)

    def exists(self, day: date) -> bool:
        start = datetime.combine(day, time())
        return any(self.readings(start + number * MINUTE) for number in range(24 * 60))

    def instants(self, day: date) -> Iterator[datetime]:
        for at in self.times:
            wall = datetime.combine(day, at)
            found = self.readings(wall)
            if self.elapsed:
                yield from found
            elif found:
                yield found[0]
            elif self.exists(day):
                while not self.readings(wall):  # into the first minute after the gap
                    wall += MINUTE
                while self.readings(wall - SECOND):  # and back to its first second
                    wall -= SECOND
                yield self.readings(wall)[0]

    def first(self, after: datetime, count: int) -> list[datetime]:
        """The first `count` instants later than `after`."""
        found: set[datetime] = set()
        day = after.astimezone(self.zone).date() - 2 * DAY
        rest = 3
        while rest:
            if self.matches(day):
                found |= {moment for moment in self.instants(day) if moment > after}
            rest -= len(found) >= count
            day += DAY
        return sorted(found)[:count]


def random_expression(rng: random.Random) -> str:
    """An expression that fires some day, with the forms that people write and some that they should not."""

    def field(lowest: int, highest: int, star: float) -> str:
        if rng.random() < star:
            return "*" if rng.random() < 0.7 else f"*/{rng.randint(1, highest)}"
        items = []
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            first = rng.randint(lowest, highest)
            last = rng.randint(first, highest)
            items.append(
                rng.choice(
                    (
                        f"{first}",
                        f"{first}",
                        f"{first}-{last}",
                        f"{first}-{last}/{rng.randint(1, min(highest, 9))}",
                        f"{first}/7",
                    )
                )
            )
        return ",".join(items)

    weekday = field(0, 7, 0.6) if rng.random() < 0.8 else rng.choice(("mon-fri", "SUN", "sat,sun", "5-7"))
    month = field(1, 12, 0.8) if rng.random() < 0.9 else rng.choice(("jan-mar", "FEB", "oct,nov"))
    parts = [
        rng.choice((str(rng.randint(0, 59)), "0", "30", "0,30", field(0, 59, 0.2))),
        field(0, 23, 0.4),
        field(1, 31, 0.7),
        month,
        weekday,
    ]
    if rng.random() < 0.15:
        parts[0] = str(rng.randint(0, 59))
        parts.append(rng.choice(("0", "15", "*/20", "7,42")))
    return " ".join(parts)


def transitions(tz: str, first: int = 1970, last: int = 2037) -> list[datetime]:
    """The instants at which the zone changes its offset, found by halving six-hour steps."""
    zone = ZoneInfo(tz)
    found = []
    low, end = datetime(first, 1, 1, tzinfo=UTC), datetime(last, 12, 31, tzinfo=UTC)
    while low < end:
        high = low + timedelta(hours=6)
        offset = low.astimezone(zone).utcoffset()
        if high.astimezone(zone).utcoffset() != offset:
            before, after = low, high
            while after - before > SECOND:
                middle = (before + (after - before) / 2).replace(microsecond=0)
                if middle.astimezone(zone).utcoffset() == offset:
                    before = middle
                else:
                    after = middle
            found.append(after)
        low = high
    return found
