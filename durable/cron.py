"""Cron expressions: what is accepted, and the instants at which one fires. Pure: the instant is an argument.

Users declare a `Cron`; the scheduler chore and the client ask `next_after`, `occurrences` and `due`. Nothing here reads a clock,
the zone of the host or a store.

**The expression.** Five fields (minute, hour, day of month, month, day of week), or six with seconds *last*. A field is a list of
`*`, `a`, `a-b`, each with an optional `/step`; months and days also by their English names of three letters; Sunday is 0 or 7. Or
one of @hourly @daily @weekly @monthly @yearly. When day of month and day of week are both restricted (neither begins with `*`)
a date matches if either does, as in Vixie's cron. Everything else (`R`, `H`, `L`, `#`, `?`, a year, `5-1`) is refused: croniter,
which reads the fields, would accept most of it.

**Local time** (semantics 54). An entry with fixed hours fires once for each matching local date and time: where the clock is put
forward over it, at the first instant after the gap (several such entries collapse to one); where an hour comes twice, at the
first. A date that a zone left out altogether (Samoa, 30 December 2011) has no entry. An entry with `*` or `*/n` in the hour field
follows elapsed time: it fires whenever the local clock matches, in the repeated hour twice and in the gap not at all.

Instants are aware datetimes in UTC, without microseconds.
"""

from __future__ import annotations

import bisect
import calendar
import dataclasses
import functools
import importlib.resources
import re
import zoneinfo
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal, NamedTuple, get_args

from croniter import croniter

from .errors import RegistrationError
from .settings import Duration, Micros, micros

Overlap = Literal["skip", "queue", "allow"]
CatchUp = Literal["none", "latest", "all"]

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
ON_TIME: Micros = 60_000_000
"""An instant this late is still on time (semantics 52)."""

_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_WEEKDAYS = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("day of week", 0, 7, _WEEKDAYS),
    ("second", 0, 59, {}),
)
_ITEM = re.compile(r"(\*|(\d{1,2}|[a-z]{3})(?:-(\d{1,2}|[a-z]{3}))?)(?:/(\d{1,2}))?", re.ASCII)
_LONGEST = 1_000  # characters of an expression
_SECOND = timedelta(seconds=1)
_HOUR = timedelta(hours=1)
_DAY = timedelta(days=1)
_REACH = timedelta(hours=26)
"""No zone has ever moved its clock by more than a day: further than this from a transition it can not be felt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A parsed expression."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    seconds: tuple[int, ...]
    either_day: bool
    """Day of month *or* day of week; else both must match."""
    every_hour: bool
    """`*` or `*/n` in the hour field: follows elapsed time."""

    def date_from(self, start: date) -> date | None:
        """The first matching date that is not before `start`; None past the end of the calendar."""
        year, month, first = start.year, start.month, start.day
        while year <= date.max.year:
            if month in self.months:
                weekday, length = calendar.monthrange(year, month)
                for day in range(first, length + 1):
                    by_weekday = (weekday + day) % 7 in self.weekdays  # the 1st is `weekday` counted from Monday = 0
                    by_day = day in self.days
                    if (by_day or by_weekday) if self.either_day else (by_day and by_weekday):
                        return date(year, month, day)
            first = 1
            month += 1
            if month > 12:
                year, month = year + 1, 1
        return None

    def wall_from(self, start: datetime) -> datetime | None:
        """The first matching reading of a clock without a zone that is not before `start` (whole seconds)."""
        day = self.date_from(start.date())
        if day is not None and day == start.date():
            index = self.index_from(start.time())
            if index < self.times:
                return datetime.combine(day, self.time_at(index))
            day = self.date_from(day + _DAY)
        return None if day is None else datetime.combine(day, self.time_at(0))

    @property
    def times(self) -> int:
        """How many times of day there are."""
        return len(self.hours) * len(self.minutes) * len(self.seconds)

    def time_at(self, index: int) -> time:
        """The times of day in order, without making a list of up to 86,400."""
        rest, second = divmod(index, len(self.seconds))
        hour, minute = divmod(rest, len(self.minutes))
        return time(self.hours[hour], self.minutes[minute], self.seconds[second])

    def index_from(self, start: time) -> int:
        """The index of the first time of day that is not before `start`; `times` if there is none."""
        hour = bisect.bisect_left(self.hours, start.hour)
        minute = second = 0
        if hour < len(self.hours) and self.hours[hour] == start.hour:
            minute = bisect.bisect_left(self.minutes, start.minute)
            if minute < len(self.minutes) and self.minutes[minute] == start.minute:
                second = bisect.bisect_left(self.seconds, start.second)
        # an index past the end of a level is the first one of the next
        return (hour * len(self.minutes) + minute) * len(self.seconds) + second


def parse(expression: str) -> Fields:
    """The fields of an expression. Raises RegistrationError that says which part can not work and why (semantics 55)."""
    candidate: object = expression  # it may come from a store
    if not isinstance(candidate, str) or len(candidate) > _LONGEST:
        raise RegistrationError(f"cron: the expression must be text of at most {_LONGEST:,} characters")
    return _parse(candidate)


@functools.lru_cache(maxsize=4_096)
def _parse(expression: str) -> Fields:
    text = " ".join(expression.lower().split())
    if text.startswith("@"):
        if text not in ALIASES:
            raise RegistrationError(f"cron {expression!r}: unknown alias", hint="known: " + ", ".join(ALIASES))
        text = ALIASES[text]
    parts = text.split(" ") if text else []
    if len(parts) not in (5, 6):
        raise RegistrationError(
            f"cron {expression!r}: {len(parts)} fields",
            hint="five (minute hour day month weekday), or six with seconds last",
        )
    checked = [
        ",".join(_checked(item, what, lowest, highest, names, expression) for item in part.split(","))
        for part, (what, lowest, highest, names) in zip(parts, _FIELDS, strict=False)
    ]
    try:
        expanded, _ = croniter.expand(" ".join(checked))
        values = [
            range(lowest, min(highest, 6 if what == "day of week" else highest) + 1)
            if field == ["*"]
            else map(int, field)
            for field, (what, lowest, highest, _) in zip(expanded, _FIELDS, strict=False)
        ]
        minutes, hours, days, months, weekdays, *seconds = [tuple(sorted(set(field))) for field in values]
    except (ValueError, TypeError, KeyError) as error:  # what croniter raises for what it can not read
        raise RegistrationError(f"cron {expression!r}: {error}") from None
    fields = Fields(
        minutes=minutes,
        hours=hours,
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(weekdays),
        seconds=seconds[0] if seconds else (0,),
        either_day=not (parts[2].startswith("*") or parts[4].startswith("*")),
        every_hour=any(item.startswith("*") for item in parts[1].split(",")),
    )
    # Weekdays can not make it impossible: each falls on each day of the year, 29 February included, within 28 or 40 years.
    if not fields.either_day and not any(min(days) <= calendar.monthrange(2024, month)[1] for month in months):
        raise RegistrationError(f"cron {expression!r}: no such day exists, it would never fire")
    return fields


def _checked(item: str, what: str, lowest: int, highest: int, names: dict[str, int], expression: str) -> str:
    """The item as a list of values. Raises RegistrationError for one that is not of our grammar."""

    def refuse(why: str) -> RegistrationError:
        return RegistrationError(
            f"cron {expression!r}: {what} {item!r}: {why}",
            hint=f"a field is a list of *, a, a-b, each with an optional /step, between {lowest} and {highest}",
        )

    found = _ITEM.fullmatch(item)
    if found is None:
        raise refuse("random and hashed values are not supported" if item[:1] in ("r", "h") else "can not be read")
    _, first, last, step = found.groups()
    bounds: list[int] = []
    for value in (first, last):
        if value is not None:
            number = int(value) if value.isdigit() else names.get(value)
            if number is None:
                raise refuse(f"{value!r} is no name here")
            if not lowest <= number <= highest:
                raise refuse(f"{number} is out of range")
            bounds.append(number)
    if len(bounds) == 2 and bounds[0] > bounds[1]:
        raise refuse("the range runs backwards" + (" (Sunday at its end is 7)" if bounds[1] == 0 and names else ""))
    if step is not None and not 1 <= int(step) <= highest:
        raise refuse(f"a step of {int(step)}")
    if item == "*":
        return item
    # Written out, since croniter's releases read them differently: 7.0 takes `1-1` for the whole field, 6.0 loses the 6 of `6/7`
    # and refuses a Sunday that is 7 beside seconds.
    begin = bounds[0] if bounds else lowest
    end = bounds[-1] if len(bounds) == 2 or (bounds and step is None) else highest
    chosen = range(begin, end + 1, int(step or 1))
    return ",".join(str(value % 7 if names is _WEEKDAYS else value) for value in chosen)


@functools.cache
def _zone_names() -> frozenset[str]:
    """The names of the tzdata package: the same on every host, and read at once (zoneinfo would search the file system)."""
    return frozenset(importlib.resources.files("tzdata").joinpath("zones").read_text().split())


def zone(name: str) -> zoneinfo.ZoneInfo:
    """The zone of an IANA name. Raises RegistrationError for anything else (offsets, `localtime`, other spellings)."""
    # The list, since a file system may ignore case and knows `localtime`: neither means the same on the next machine.
    candidate: object = name  # it may come from a store
    if isinstance(candidate, str) and candidate in _zone_names():
        return zoneinfo.ZoneInfo(candidate)
    raise RegistrationError(
        f"cron: unknown time zone {str(name)[:100]!r}", hint='an IANA name such as "Europe/Berlin" or "UTC"'
    )


def validate(expression: str, tz: str = "UTC") -> None:
    """Raises RegistrationError unless the expression fires and the zone exists (semantics 55)."""
    parse(expression)
    zone(tz)


def next_after(expression: str, after: datetime, /, *, tz: str = "UTC") -> datetime:
    """The first instant later than `after` (aware) at which the expression fires, in UTC (semantics 54).

    Raises RegistrationError for an expression or a zone that can not work, a naive `after`, or the end of the calendar.
    """
    return _finder(expression, tz)(_whole_second(after) + _SECOND)


def occurrences(expression: str, after: datetime, /, *, tz: str = "UTC") -> Iterator[datetime]:
    """The instants later than `after`, in order, without end. Raises as `next_after` does."""
    find = _finder(expression, tz)
    moment = _whole_second(after)
    while True:
        moment = find(moment + _SECOND)
        yield moment


class Due(NamedTuple):
    """What a schedule has to do now: the instants to fire, in order, and when to look again."""

    fire: tuple[datetime, ...]
    following: datetime


def due(
    expression: str,
    since: datetime,
    now: datetime,
    /,
    *,
    tz: str = "UTC",
    catch_up: CatchUp = "latest",
    limit: int = 100,
) -> Due:
    """What to fire at `now` for a schedule whose next instant was `since` (semantics 52).

    Instants up to 60 s late are on time and all fire. Of later ones `none` fires none, `latest` the newest, `all` the newest
    `limit`. The next instant is the first one after `now`. Raises as `next_after` does.
    """
    find = _finder(expression, tz)
    since = _whole_second(since - timedelta(microseconds=1)) + _SECOND  # rounded up
    now_second = _whole_second(now)
    threshold = max(since, now_second - timedelta(microseconds=ON_TIME))
    late: list[datetime] = []
    wanted = {"none": 0, "latest": 1, "all": limit}[catch_up]
    before, gap = threshold, timedelta(minutes=1)
    while len(late) < wanted and (found := _previous(find, since, before, gap)) is not None:
        late.append(found)
        before, gap = found, max(before - found, _SECOND)
    on_time: list[datetime] = []
    moment = find(threshold)
    while moment <= now_second:
        on_time.append(moment)
        moment = find(moment + _SECOND)
    return Due((*reversed(late), *on_time), moment)


def _previous(
    find: Callable[[datetime], datetime], since: datetime, before: datetime, gap: timedelta
) -> datetime | None:
    """The newest instant in [since, before). `gap` is a guess of how far back it lies."""
    if since >= before:
        return None
    while True:
        start = max(since, before - gap) if gap < before - since else since
        low = find(start)
        if low < before:
            break
        if start == since:
            return None
        gap *= 2
    high = before  # find(low) < before, find(high) >= before
    while high - low > _SECOND:
        nearer = find(low + _SECOND)
        if nearer >= before:
            break
        middle = max(nearer, (low + (high - low) // 2).replace(microsecond=0))
        later = find(middle)
        low, high = (later, high) if later < before else (nearer, middle)
    return low


def _whole_second(moment: datetime) -> datetime:
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise RegistrationError(f"cron: {moment!r} has no time zone", hint="pass an aware datetime: datetime.now(UTC)")
    return moment.astimezone(UTC).replace(microsecond=0)


def _finder(expression: str, tz: str) -> Callable[[datetime], datetime]:
    """A function from an instant (UTC, whole seconds) to the first occurrence that is not before it."""
    fields, place = parse(expression), zone(tz)
    search = _by_elapsed_time if fields.every_hour else _by_date

    def find(start: datetime) -> datetime:
        try:
            found = search(fields, place, start)
        except OverflowError:
            found = None
        if found is None:
            raise RegistrationError(f"cron {expression!r}: nothing is left of the calendar after {start}")
        return found

    return find


def _by_elapsed_time(fields: Fields, place: zoneinfo.ZoneInfo, start: datetime) -> datetime | None:
    """Looks for the match under the offset of now; a transition on the way to it starts the search anew from there."""
    moment = start
    while True:
        local = moment.astimezone(place)
        offset = local.utcoffset() or timedelta(0)
        wall = fields.wall_from(local.replace(tzinfo=None, fold=0))
        if wall is None:
            return None
        found = (wall - offset).replace(tzinfo=UTC)
        horizon = min(found, moment + _REACH)
        change = _first_change(place, moment, horizon)
        if change is not None:
            moment = change
        elif found == horizon:
            return found
        else:  # far away: no wall clock matches in between, whatever its offset, so only the end can hold a transition
            moment = max(horizon, found - _REACH)


def _by_date(fields: Fields, place: zoneinfo.ZoneInfo, start: datetime) -> datetime | None:
    """Goes through the matching dates; on one of them the instants rise with the times of day, so they can be bisected."""
    # The day before: what was due there in a gap over midnight fires on this one.
    day = fields.date_from(start.astimezone(place).date() - _DAY)
    while day is not None:
        date_of = day

        def at(index: int, date_of: date = date_of) -> datetime:
            return _instant(datetime.combine(date_of, fields.time_at(index)), place)

        index = bisect.bisect_left(range(fields.times), start, key=at)
        if index < fields.times:
            found = at(index)
            if found.astimezone(place).date() == day or _exists(day, place):
                return found
        day = fields.date_from(day + _DAY)
    return None


def _instant(wall: datetime, place: zoneinfo.ZoneInfo) -> datetime:
    """The instant of a local reading: the first of two, and for one that is left out the first instant after the gap."""
    local = wall.replace(tzinfo=place)
    moment = local.astimezone(UTC)
    if moment.astimezone(place).replace(tzinfo=None) == wall:
        return moment
    before = local.replace(fold=1).astimezone(UTC)
    return _first_change(place, before, moment) or moment


def _exists(day: date, place: zoneinfo.ZoneInfo) -> bool:
    return _instant(datetime.combine(day, time()), place).astimezone(place).date() == day


def _first_change(place: zoneinfo.ZoneInfo, start: datetime, end: datetime) -> datetime | None:
    """The first second in (start, end] whose offset is not that of `start`. No zone changes twice within an hour."""
    offset = start.astimezone(place).utcoffset()
    low = start
    while low < end:
        high = min(low + _HOUR, end)
        if high.astimezone(place).utcoffset() != offset:
            while high - low > _SECOND:
                middle = low + timedelta(seconds=(high - low) // _SECOND // 2)
                if middle.astimezone(place).utcoffset() == offset:
                    low = middle
                else:
                    high = middle
            return high
        low = high
    return None


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Cron:
    """When a function fires by itself, checked when it is declared (semantics 52, 54, 55).

    `jitter` is how much later than its instant a run may start (a duration; kept in microseconds); `overlap` is what happens
    when the run before is still going; `catch_up` is what happens to instants that were missed.
    Raises RegistrationError for what never fires or can not be read, ConfigurationError for a jitter that is no duration.
    """

    expression: str
    tz: str
    jitter: Micros
    overlap: Overlap
    catch_up: CatchUp

    def __init__(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        jitter: Duration = 0,
        overlap: Overlap = "skip",
        catch_up: CatchUp = "latest",
    ) -> None:
        validate(expression, tz)
        if overlap not in get_args(Overlap):
            raise RegistrationError(f"cron: overlap {overlap!r}", hint="one of: " + ", ".join(get_args(Overlap)))
        if catch_up not in get_args(CatchUp):
            raise RegistrationError(f"cron: catch_up {catch_up!r}", hint="one of: " + ", ".join(get_args(CatchUp)))
        fields = {
            "expression": expression,
            "tz": tz,
            "jitter": micros(jitter, what="Cron: jitter"),
            "overlap": overlap,
            "catch_up": catch_up,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def next_after(self, after: datetime, /) -> datetime:
        """The first instant later than `after`; see the function of this name."""
        return next_after(self.expression, after, tz=self.tz)
