"""Durations and settings: what is none is refused with a word on what to write, before anything is opened."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from durable.errors import ConfigurationError
from durable.settings import DAY, HOUR, LONGEST, MINUTE, SECOND, Settings, micros


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (timedelta(days=1, microseconds=1), DAY + 1),
        (0, 0),
        (1.5, 1_500_000),
        ("90s", 90 * SECOND),
        ("1.5h", 90 * MINUTE),
        ("1d12h", 36 * HOUR),
        ("1d 12h", 36 * HOUR),
        ("250ms", 250_000),
        ("7us", 7),
        ("2w", 14 * DAY),
        (LONGEST / SECOND, LONGEST),
    ],
)
def test_a_duration_in_any_form_is_whole_microseconds(given: Any, meant: int) -> None:
    assert micros(given) == meant
    assert type(micros(given)) is int


@pytest.mark.parametrize(
    "given",
    [
        *("", " ", "s", "5", "5 apples", "5s!", "-5s", "١s", "1e3s", "1d;", "9" * 400 + "d"),
        *(None, True, [], float("nan"), float("inf"), -1, 1e300, timedelta(days=-1), timedelta(days=36_501)),
    ],
)
def test_what_is_no_duration_is_refused_with_a_hint(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="grace") as refused:
        micros(given, what="grace")
    assert "90s" in refused.value.hint


def test_settings_are_taken_in_any_form_and_the_rest_stays_as_it_is() -> None:
    chosen = Settings.of({"lease": "45s", "concurrency": 7})
    assert (chosen.lease, chosen.concurrency) == (45 * SECOND, 7)
    assert dataclasses.replace(chosen, lease=Settings().lease, concurrency=Settings().concurrency) == Settings()


@pytest.mark.parametrize(
    "wrong", [{"leese": "1s"}, {"concurrency": 0}, {"concurrency": True}, {"concurrency": "7"}, {"lease": "x"}]
)
def test_a_setting_that_can_not_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Settings.of(wrong)
