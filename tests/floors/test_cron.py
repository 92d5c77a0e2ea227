"""`durable.cron` against a slow reference, and its promises one by one (semantics 52, 54, 55).

`DURABLE_CRON_CASES` says how many random cases are tried (2,000 by default; from 50,000 on, every transition of 60 zones too).
"""

from __future__ import annotations

import os
import random
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from floors.cron_reference import Reference, random_expression, transitions

from durable import cron
from durable.errors import ConfigurationError, RegistrationError

CASES = int(os.environ.get("DURABLE_CRON_CASES", "2000"))
# Half-hour shifts, shifts at midnight, a date left out, offsets with seconds, double summer time, changes in Ramadan, no changes.
ZONES = (
    "UTC Europe/Berlin Europe/London Europe/Dublin Europe/Lisbon Europe/Moscow Europe/Istanbul Europe/Kiev Europe/Chisinau"
    " America/New_York America/Los_Angeles America/Chicago America/Denver America/Phoenix America/Anchorage America/Toronto"
    " America/St_Johns America/Halifax America/Havana America/Sao_Paulo America/Santiago America/Asuncion America/Caracas"
    " America/Bogota America/Mexico_City America/Argentina/Buenos_Aires America/Nuuk America/Scoresbysund America/Metlakatla"
    " Africa/Cairo Africa/Casablanca Africa/El_Aaiun Africa/Lagos Africa/Johannesburg Africa/Monrovia Africa/Windhoek"
    " Asia/Tokyo Asia/Kolkata Asia/Kathmandu Asia/Tehran Asia/Gaza Asia/Jerusalem Asia/Beirut Asia/Amman Asia/Dhaka"
    " Asia/Pyongyang Asia/Shanghai Asia/Singapore Asia/Manila Asia/Kamchatka Antarctica/Troll Antarctica/Casey"
    " Australia/Sydney Australia/Lord_Howe Australia/Adelaide Pacific/Auckland Pacific/Chatham Pacific/Apia"
    " Pacific/Kwajalein Pacific/Kiritimati"
).split()


def check(expression: str, tz: str, base: datetime, count: int = 4) -> None:
    expected = Reference(expression, tz).first(base, count)
    got = list(islice(cron.occurrences(expression, base, tz=tz), count))
    assert got == expected, f"{expression!r} in {tz} after {base.isoformat()}"


def fires(expression: str) -> bool:
    try:
        cron.validate(expression)
    except RegistrationError as error:
        if "never fire" not in str(error):
            raise
        return False
    return True


def test_random_expressions_in_random_zones_agree_with_the_reference() -> None:
    rng = random.Random(54)
    done = 0
    while done < CASES:
        expression = random_expression(rng)
        if fires(expression):
            base = datetime(1970, 1, 3, tzinfo=UTC) + timedelta(seconds=rng.randrange(67 * 365 * 86_400))
            check(expression, rng.choice(ZONES), base, rng.choice((1, 2, 4)))
            done += 1


def test_around_every_transition_of_a_zone_all_kinds_of_entries_agree_with_the_reference() -> None:
    rng = random.Random(541)
    everything = CASES >= 50_000
    zones = ZONES if everything else rng.sample(ZONES, 12)
    moments = [(tz, moment) for tz in zones for moment in transitions(tz)]
    for tz, moment in moments if everything else rng.sample(moments, min(CASES // 4, len(moments))):
        local = moment.astimezone(ZoneInfo(tz))
        hours = [(local.hour + shift) % 24 for shift in (-2, -1, 0, 1)]
        minute = rng.choice((0, 0, 15, 30, 45, rng.randint(0, 59)))
        expression = rng.choice(
            (
                f"{minute} {rng.choice(hours)} * * *",
                f"0,30 {','.join(map(str, sorted(hours)))} * * *",
                f"{minute} * * * *",
                f"{minute} */{rng.randint(1, 5)} * * *",
                f"*/20 {min(hours)}-{max(hours)} * * *",
                f"{minute} {rng.choice(hours)} * * {local.isoweekday()}",
                f"*/{rng.randint(7, 40)} * {local.day} * *",
                f"{minute} {rng.choice(hours)} * * * {rng.choice(('0', '*/30', '5,59'))}",
            )
        )
        check(expression, tz, moment - timedelta(minutes=rng.randint(0, 40 * 60), seconds=rng.choice((0, 0, 1))), 5)


@pytest.mark.parametrize("tz", ["Pacific/Apia", *random.Random(2).sample(ZONES, 11)])
def test_an_entry_with_one_fixed_time_fires_once_on_every_date_that_the_zone_has(tz: str) -> None:
    base = datetime(2010, 12, 31, 23, tzinfo=ZoneInfo(tz))
    found = list(islice(cron.occurrences("30 2 * * *", base, tz=tz), 730))
    dates = [moment.astimezone(ZoneInfo(tz)).date() for moment in found]
    days = (date(2011, 1, 1) + timedelta(days=number) for number in range(800))
    existing = [day for day in days if not (tz == "Pacific/Apia" and day == date(2011, 12, 30))]
    assert dates == existing[:730]


def test_occurrences_rise_strictly_and_each_is_the_next_after_the_one_before() -> None:
    for tz in ("Europe/Berlin", "Australia/Lord_Howe", "America/Havana"):
        for expression in ("*/7 * * * *", "15,45 0-4 * * *", "0 0 * * 1-5"):
            moment = datetime(2026, 1, 1, tzinfo=UTC)
            for expected in islice(cron.occurrences(expression, moment, tz=tz), 300):
                assert expected > moment
                assert cron.next_after(expression, moment, tz=tz) == expected
                assert cron.next_after(expression, expected - timedelta(microseconds=1), tz=tz) == expected
                moment = expected


def test_several_entries_in_one_gap_collapse_to_one() -> None:
    base = datetime(2026, 3, 29, 0, 30, tzinfo=UTC)  # Berlin goes from 02:00 to 03:00 at 01:00 UTC
    found = list(islice(cron.occurrences("0,15,30,45 2 * * *", base, tz="Europe/Berlin"), 2))
    assert found == [datetime(2026, 3, 29, 1, tzinfo=UTC), datetime(2026, 3, 30, 0, tzinfo=UTC)]


def test_in_the_fold_a_fixed_hour_fires_at_the_first_and_a_star_hour_at_both() -> None:
    base = datetime(2026, 10, 24, 23, 45, tzinfo=UTC)  # Berlin has 02:00 to 03:00 twice, from 00:00 and from 01:00 UTC
    fixed = cron.next_after("30 2 * * *", base, tz="Europe/Berlin")
    assert fixed == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    assert cron.next_after("30 2 * * *", fixed, tz="Europe/Berlin") == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)
    star = list(islice(cron.occurrences("30 */2 * * *", base, tz="Europe/Berlin"), 2))
    assert star == [datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1)]


def test_day_of_month_or_day_of_week_when_both_are_restricted_and_both_when_one_begins_with_a_star() -> None:
    base = datetime(2026, 6, 1, tzinfo=UTC)
    either = list(islice(cron.occurrences("0 0 13 * 5", base), 4))
    assert [moment.day for moment in either] == [5, 12, 13, 19]
    both = list(islice(cron.occurrences("0 0 */2 * 5", base), 3))  # odd days that are a Friday, as in Vixie's cron
    assert [(moment.day, moment.isoweekday()) for moment in both] == [(5, 5), (19, 5), (3, 5)]


def test_leap_days_are_found_across_a_century_without_one() -> None:
    assert cron.next_after("0 0 29 2 *", datetime(2096, 3, 1, tzinfo=UTC)) == datetime(2104, 2, 29, tzinfo=UTC)
    sunday = cron.next_after("0 0 29 2 */7", datetime(2004, 3, 1, tzinfo=UTC))
    assert sunday == datetime(2032, 2, 29, tzinfo=UTC)


@pytest.mark.parametrize(
    ("alias", "expression"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
    ],
)
def test_an_alias_means_the_same_as_its_expression_with_and_without_a_zone(alias: str, expression: str) -> None:
    base = datetime(2026, 10, 24, 22, 30, tzinfo=UTC)
    for tz in ("UTC", "Europe/Berlin"):
        assert list(islice(cron.occurrences(alias, base, tz=tz), 5)) == list(
            islice(cron.occurrences(expression, base, tz=tz), 5)
        )


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "0 fields"),
        ("* * * *", "4 fields"),
        ("0 0 1 1 * 0 2020", "7 fields"),
        ("0 0 31 2 *", "never fire"),
        ("0 0 31 4,6,9,11 *", "never fire"),
        ("0 0 30 2 */2", "never fire"),
        ("60 * * * *", "out of range"),
        ("* 24 * * *", "out of range"),
        ("* * 0 * *", "out of range"),
        ("* * * 13 *", "out of range"),
        ("* * * * 8", "out of range"),
        ("* * * * * 60", "out of range"),
        ("5-1 * * * *", "backwards"),
        ("* * * * fri-sun", "backwards"),
        ("*/0 * * * *", "step"),
        ("*/70 * * * *", "step"),
        ("* * * foo *", "no name"),
        ("mon * * * *", "no name"),
        ("r r * * *", "random"),
        ("R(0-30) * * * *", "random"),
        ("h * * * *", "hashed"),
        ("0 0 l * *", "can not be read"),
        ("0 0 * * 5#2", "can not be read"),
        ("? * * * *", "can not be read"),
        ("1,,2 * * * *", "can not be read"),
        ("1- * * * *", "can not be read"),
        ("-1 * * * *", "can not be read"),
        ("+1 * * * *", "can not be read"),
        ("1.5 * * * *", "can not be read"),
        ("٣ * * * *", "can not be read"),
        ("* * * * *\x00", "can not be read"),
        ("@reboot", "alias"),
        ("@every 5m", "alias"),
        ("@", "alias"),
        ("* " * 10_000, "at most"),
        (None, "must be text"),
    ],
)
def test_an_expression_that_can_not_work_is_refused_and_says_why(expression: str, why: str) -> None:
    with pytest.raises(RegistrationError, match=why):
        cron.Cron(expression)


@pytest.mark.parametrize(
    "tz",
    [
        "Foo/Bar",
        "",
        " ",
        "localtime",
        "europe/berlin",
        "../../etc/passwd",
        "/etc/localtime",
        "UTC\x00",
        "+02:00",
        None,
        [],
    ],
)
def test_an_unknown_zone_is_refused_when_it_is_declared(tz: str) -> None:
    with pytest.raises(RegistrationError, match="unknown time zone"):
        cron.Cron("* * * * *", tz=tz)


def test_an_instant_without_a_zone_is_refused() -> None:
    with pytest.raises(RegistrationError, match="no time zone"):
        cron.next_after("* * * * *", datetime(2026, 1, 1))  # noqa: DTZ001


def test_the_end_of_the_calendar_is_a_typed_error() -> None:
    for expression in ("* * * * *", "0 0 1 1 *"):
        for tz in ("UTC", "Pacific/Kiritimati", "America/Los_Angeles"):
            with pytest.raises(RegistrationError, match="calendar"):
                list(islice(cron.occurrences(expression, datetime(9999, 12, 31, 23, 59, 0, tzinfo=UTC), tz=tz), 2_000))


def test_what_is_declared_wrong_beside_the_expression_is_refused() -> None:
    with pytest.raises(RegistrationError, match="overlap"):
        cron.Cron("* * * * *", overlap="never")  # type: ignore[arg-type]
    with pytest.raises(RegistrationError, match="catch_up"):
        cron.Cron("* * * * *", catch_up="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="jitter"):
        cron.Cron("* * * * *", jitter="soon")
    assert cron.Cron("@daily", jitter="90s") == cron.Cron("@daily", jitter=timedelta(seconds=90))
    assert cron.Cron("@daily", jitter="90s").jitter == 90_000_000


def brute_force(expression: str, tz: str, since: datetime, now: datetime) -> list[datetime]:
    found = []
    for moment in cron.occurrences(expression, since - timedelta(seconds=1), tz=tz):
        if moment > now:
            return found
        found.append(moment)
    raise AssertionError


def test_due_fires_what_is_on_time_and_of_the_late_ones_none_the_newest_or_the_newest_hundred() -> None:
    rng = random.Random(52)
    minute = timedelta(seconds=60)
    for _ in range(60):
        expression = rng.choice(
            ("* * * * *", "*/7 3-5 * * *", "0 0 1 * *", "15 * * * *", "1-3 9 * * 1", "* * 9 * * */30")
        )
        tz = rng.choice(("UTC", "Europe/Berlin", "Australia/Lord_Howe"))
        start = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=rng.randrange(400 * 1_440))
        since = cron.next_after(expression, start, tz=tz)
        span = (
            rng.choice((10, 59, 60, 61, 200, 7_200, 90_000, 30 * 86_400)) if "9 * * */30" not in expression else 90_000
        )
        now = since + timedelta(seconds=rng.randrange(span))
        missed = brute_force(expression, tz, since, now)
        late = [moment for moment in missed if now - moment > minute]
        on_time = missed[len(late) :]
        for catch_up, fired in (("none", []), ("latest", late[-1:]), ("all", late[-100:])):
            answer = cron.due(expression, since, now, tz=tz, catch_up=catch_up)  # type: ignore[arg-type]
            assert list(answer.fire) == fired + on_time, (expression, tz, since, now, catch_up)
            assert answer.following == cron.next_after(expression, now, tz=tz)


def test_due_before_its_instant_fires_nothing() -> None:
    since = datetime(2026, 1, 2, tzinfo=UTC)
    assert cron.due("0 0 * * *", since, since - timedelta(hours=3)) == ((), since)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("0 0 * 1-1 *", "0 0 * 1 *"),  # croniter 7.0 reads the first as every month
        ("0 0 * * 6/7", "0 0 * * 6"),  # croniter 6.0 reads the first as Sunday
        ("0 0 * * 7-7/7", "0 0 * * 0"),
        ("0 0 * * 6,7 0,30", "0 0 * * 0,6 0,30"),  # croniter 6.0 refuses the first
        ("50/5 3-3/2 * * *", "50,55 3 * * *"),
        ("0 0 * * mon-FRI", "0 0 * * 1,2,3,4,5"),
    ],
)
def test_ranges_and_steps_mean_their_values_in_every_release_of_the_parser(short: str, long: str) -> None:
    base = datetime(2026, 2, 3, tzinfo=UTC)
    assert list(islice(cron.occurrences(short, base), 20)) == list(islice(cron.occurrences(long, base), 20))
