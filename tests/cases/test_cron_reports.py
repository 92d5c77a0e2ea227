"""Section A of the public fault reports (cron, time zones, daylight saving): rows 2 to 13, each test named by its row.

Row 9's second half (a bad row already in the store is parked) and row 14 (many processes fire one tick) need a store: they are
tests of the scheduler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zoneinfo
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from durable import cron
from durable.cron import Cron
from durable.errors import RegistrationError


def local(expression: str, tz: str, base: str, count: int) -> list[str]:
    zone = ZoneInfo(tz)
    found = islice(cron.occurrences(expression, datetime.fromisoformat(base).replace(tzinfo=zone), tz=tz), count)
    return [moment.astimezone(zone).isoformat() for moment in found]


@pytest.mark.parametrize(("day", "ticks"), [(date(2026, 10, 25), 25), (date(2026, 3, 29), 23)])
def test_row_2_an_hourly_schedule_fires_in_every_real_hour_of_a_changed_day(day: date, ticks: int) -> None:
    zone = ZoneInfo("Europe/Berlin")
    start = datetime(day.year, day.month, day.day, tzinfo=zone)
    found = list(islice(cron.occurrences("0 * * * *", start - timedelta(seconds=1), tz="Europe/Berlin"), 30))
    assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(hours=1)}
    assert sum(moment.astimezone(zone).date() == day for moment in found) == ticks


def test_row_3_midnight_fires_on_each_local_date_when_the_clock_goes_forward() -> None:
    assert local("0 0 * * *", "US/Pacific", "2022-03-12", 3) == [
        "2022-03-13T00:00:00-08:00",
        "2022-03-14T00:00:00-07:00",
        "2022-03-15T00:00:00-07:00",
    ]


def test_row_4_a_weekday_midnight_after_the_change_is_not_a_day_late() -> None:
    assert local("0 0 * * 1-5", "US/Central", "2021-03-12", 1) == ["2021-03-15T00:00:00-05:00"]


def test_row_5_a_tick_in_the_gap_moves_to_the_first_valid_instant_after_it() -> None:
    assert local("0 2 * * *", "US/Eastern", "2013-03-09T12:00", 2) == [
        "2013-03-10T03:00:00-04:00",
        "2013-03-11T02:00:00-04:00",
    ]


@pytest.mark.parametrize("expression", ["30 2 * * *", "15,45 * * * *", "0 0 * * *"])
def test_row_5_every_tick_is_a_local_time_that_exists(expression: str) -> None:
    names = sorted(zoneinfo.available_timezones() & cron._zone_names())
    for tz in names[:: len(names) // 40]:
        zone = ZoneInfo(tz)
        count = 5 * 366 if expression == "30 2 * * *" else 500
        for moment in islice(cron.occurrences(expression, datetime(2019, 12, 31, tzinfo=UTC), tz=tz), count):
            reading = moment.astimezone(zone)
            assert reading.astimezone(UTC) == moment
            assert (
                reading.replace(tzinfo=None, fold=0).replace(tzinfo=zone, fold=reading.fold).astimezone(UTC) == moment
            )


@pytest.mark.parametrize(
    ("tz", "fold"),
    [
        (
            "Europe/Berlin",
            datetime(2020, 10, 25, 1, tzinfo=UTC),
        ),  # past ones: what is to come may be abolished, as in Havana
        ("America/New_York", datetime(2020, 11, 1, 6, tzinfo=UTC)),
        ("America/St_Johns", datetime(2020, 11, 1, 4, 30, tzinfo=UTC)),
        ("Australia/Lord_Howe", datetime(2020, 4, 4, 15, tzinfo=UTC)),
        ("Pacific/Auckland", datetime(2020, 4, 4, 14, tzinfo=UTC)),
        ("America/Havana", datetime(2020, 11, 1, 5, tzinfo=UTC)),
    ],
)
def test_row_6_a_scheduler_keeps_its_pace_through_the_fold(tz: str, fold: datetime) -> None:
    assert fold.astimezone(ZoneInfo(tz)).fold == 1  # the scenario is what it says
    now = fold - timedelta(hours=3)
    following = cron.next_after("* * * * *", now, tz=tz)
    fired: list[datetime] = []
    for _ in range(6 * 60):
        assert timedelta(0) < following - now <= timedelta(seconds=60)  # what the scheduler sleeps
        now = following
        answer = cron.due("* * * * *", following, now, tz=tz)
        fired += answer.fire
        following = answer.following
    assert {later - earlier for earlier, later in pairwise(fired)} == {timedelta(seconds=60)}


SCRIPT = """
import sys, time
from datetime import datetime, timedelta
from itertools import takewhile
from durable import cron
expression, tz, start, end = sys.argv[1:]
end = datetime.fromisoformat(end)
for moment in takewhile(lambda moment: moment < end, cron.occurrences(expression, datetime.fromisoformat(start), tz=tz)):
    print(moment.isoformat())
"""


def ticks_on_a_host_in(host: str, *arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "TZ": host, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout


def test_row_7_a_schedule_whose_zone_is_behind_the_hosts_fires_once_a_day() -> None:
    arguments = ("0 9 * * *", "America/Los_Angeles", "2026-06-01T00:00:00+00:00", "2026-06-04T00:00:00+00:00")
    assert len(ticks_on_a_host_in("Pacific/Auckland", *arguments).split()) == 3


def test_row_8_the_zone_of_the_host_does_not_matter() -> None:
    assert cron.next_after("0 * * * *", datetime(2025, 10, 5, 2, tzinfo=UTC)) == datetime(2025, 10, 5, 3, tzinfo=UTC)
    arguments = ("0 * * * *", "UTC", "2025-10-01T00:00:00+00:00", "2025-10-08T00:00:00+00:00")
    hosts = ("UTC", "Australia/Sydney", "America/New_York", "Pacific/Apia", "Australia/Lord_Howe")
    answers = {ticks_on_a_host_in(host, *arguments) for host in hosts}
    assert len(answers) == 1
    assert len(answers.pop().split()) == 7 * 24 - 1


@pytest.mark.parametrize("expression", ["0 0 31 2 *", "0 0 30,31 2 *", "* * 31 4,6,9,11 *"])
def test_row_9_a_schedule_that_never_matches_is_refused_when_it_is_declared(expression: str) -> None:
    with pytest.raises(RegistrationError, match="never fire"):
        Cron(expression)


def test_row_10_the_half_of_a_union_that_can_not_match_does_not_harm_the_other() -> None:
    found = islice(cron.occurrences("30 6 31 2 1", datetime(2026, 1, 1, tzinfo=UTC)), 4)
    assert [moment.isoformat() for moment in found] == [f"2026-02-{day:02}T06:30:00+00:00" for day in (2, 9, 16, 23)]


def test_row_10_a_year_field_is_refused() -> None:
    with pytest.raises(RegistrationError, match="7 fields"):
        Cron("0 0 1 1 * 0 2020")


@pytest.mark.parametrize(("catch_up", "runs"), [("latest", 1), ("all", 100), ("none", 0)])
def test_row_11_ten_missed_hours_are_made_up_once_a_hundred_times_or_not_at_all(catch_up: Any, runs: int) -> None:
    since = datetime(2026, 6, 1, tzinfo=UTC)
    now = since + timedelta(hours=10, seconds=30)
    answer = cron.due("* * * * *", since, now, tz="Europe/Berlin", catch_up=catch_up)
    made_up = [moment for moment in answer.fire if now - moment > timedelta(seconds=60)]
    assert len(made_up) == runs
    assert list(answer.fire) == sorted(set(answer.fire))
    assert answer.following == now + timedelta(seconds=30)


def test_row_11_a_changed_zone_makes_no_tick_before_the_edit() -> None:
    edit = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
    for tz in ("UTC", "America/Los_Angeles", "Pacific/Kiritimati", "Asia/Kathmandu"):
        assert all(moment > edit for moment in islice(cron.occurrences("* * * * *", edit, tz=tz), 3))
        assert cron.due("* * * * *", cron.next_after("* * * * *", edit, tz=tz), edit, tz=tz, catch_up="all").fire == ()


@pytest.mark.parametrize("tz", [timezone(timedelta(hours=2)), ZoneInfo("Europe/Berlin"), "Foo/Bar", "", None])
def test_row_12_a_zone_that_is_no_iana_name_is_refused_when_it_is_declared(tz: Any) -> None:
    with pytest.raises(RegistrationError, match="unknown time zone"):
        Cron("0 9 * * *", tz=tz)


def test_row_12_an_old_name_of_a_zone_gives_the_ticks_of_its_new_one() -> None:
    base = datetime(2026, 3, 1, tzinfo=UTC)
    old, new = (list(islice(cron.occurrences("0 9 * * *", base, tz=tz), 300)) for tz in ("Europe/Kiev", "Europe/Kyiv"))
    assert old == new


@pytest.mark.parametrize("tz", ["UTC", "America/New_York"])
def test_row_13_aliases_work_the_same_with_a_zone(tz: str) -> None:
    zone = ZoneInfo(tz)
    base = datetime(2026, 5, 13, 10, 30, tzinfo=zone)
    nexts = {alias: f"{cron.next_after(alias, base, tz=tz).astimezone(zone):%Y-%m-%d %H:%M}" for alias in cron.ALIASES}
    assert nexts == {
        "@hourly": "2026-05-13 11:00",
        "@daily": "2026-05-14 00:00",
        "@weekly": "2026-05-17 00:00",
        "@monthly": "2026-06-01 00:00",
        "@yearly": "2027-01-01 00:00",
    }


@pytest.mark.parametrize("tz", ["UTC", "America/New_York"])
@pytest.mark.parametrize(
    "expression",
    ["@reboot", "@every 5m", "R R * * *", "H H * * *", "5-1 * * * *", "٥ * * * *", "٠ ٠ * * *", "*/５ * * * *"],
)
def test_row_13_everything_else_is_refused(expression: str, tz: str) -> None:
    with pytest.raises(RegistrationError):
        Cron(expression, tz=tz)


def test_row_13_the_same_question_has_the_same_answer_every_time() -> None:
    base = datetime(2026, 5, 13, tzinfo=UTC)
    answers = {cron.next_after("*/7 1-5 * * *", base, tz="Asia/Tehran") for _ in range(50)}
    assert len(answers) == 1
