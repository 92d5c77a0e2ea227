"""`durable.retry`: the promises of a policy (semantics 24)."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from durable.errors import ConfigurationError, Misuse, RegistrationError, SerializationError
from durable.retry import Retry

SECOND = 1_000_000


@st.composite
def policies(draw: st.DrawFn) -> Retry:
    first = draw(st.integers(0, 10**9))
    return Retry(
        draw(st.none() | st.integers(1, 10**9)),
        initial=first / SECOND,
        factor=draw(st.floats(1.0, 1e300)),
        maximum=draw(st.integers(first, 10**15)) / SECOND,
        jitter=draw(st.floats(0.0, 1.0)),
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies(), st.integers(1, 10**12), st.floats(0.0, 1.0, exclude_max=True))
def test_a_wait_is_a_whole_number_between_nothing_and_the_maximum_at_every_attempt(
    retry: Retry, attempt: int, random: float
) -> None:
    wait = retry.delay(attempt, random=random)
    assert type(wait) is int
    assert 0 <= wait <= retry.maximum


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies(), st.integers(1, 2_000))
def test_without_jitter_waits_never_get_shorter(retry: Retry, attempt: int) -> None:
    middle = 0.5  # the random number at which jitter changes nothing
    assert retry.delay(attempt, random=middle) <= retry.delay(attempt + 1, random=middle)


def test_waits_double_from_initial_up_to_the_maximum() -> None:
    retry = Retry(initial="1s", maximum="10s")
    assert [retry.delay(n, random=0.5) / SECOND for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]


def test_jitter_moves_a_wait_by_its_share_in_both_directions_but_not_past_the_maximum() -> None:
    retry = Retry(initial="10s", maximum="20s", jitter=0.1)
    assert retry.delay(1, random=0.0) == 9 * SECOND
    assert retry.delay(1, random=math.nextafter(1.0, 0.0)) == 11 * SECOND
    assert retry.delay(5, random=math.nextafter(1.0, 0.0)) == 20 * SECOND
    assert Retry(initial="10s", jitter=0.0).delay(1, random=0.0) == 10 * SECOND


def test_the_millionth_attempt_waits_the_maximum_without_an_overflow() -> None:
    assert Retry(None, maximum="5m", jitter=0.0).delay(10**6, random=0.3) == 300 * SECOND
    assert Retry(None, factor=1e308, jitter=0.0).delay(10**6, random=0.3) == 300 * SECOND
    assert Retry(None, factor=1.0, initial="7s", jitter=0.0).delay(10**6, random=0.3) == 7 * SECOND
    assert Retry(None, initial=0).delay(10**6, random=0.3) == 0


def test_the_last_attempt_is_not_followed_by_another_and_an_endless_policy_has_no_last() -> None:
    error = ValueError("x")
    assert [Retry(3).decides(error, attempt) for attempt in (1, 2, 3, 4)] == [True, True, False, False]
    assert Retry(None).decides(error, 10**9)
    assert not Retry.NEVER.decides(error, 1)


def test_only_errors_of_on_and_none_of_give_up_on_are_tried_again() -> None:
    retry = Retry(9, on=(OSError, KeyError), give_up_on=(FileNotFoundError,))
    assert retry.decides(ConnectionError(), 1)
    assert retry.decides(KeyError(), 1)
    assert not retry.decides(ValueError(), 1)
    assert not retry.decides(FileNotFoundError(), 1)
    assert Retry(on=ValueError).on == (ValueError,)


def test_what_is_no_exception_of_the_program_is_never_tried_again() -> None:
    for error in (KeyboardInterrupt(), SystemExit(), GeneratorExit()):
        assert not Retry(None).decides(error, 1)


def test_errors_that_stay_are_tried_again_only_if_named() -> None:
    assert not Retry(None).decides(SerializationError("x"), 1)
    assert not Retry(None).decides(Misuse("x"), 1)
    assert Retry(None, on=SerializationError).decides(SerializationError("x"), 1)
    assert not Retry(None, on=SerializationError).decides(Misuse("x"), 1)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies())
def test_the_numbers_survive_json_and_the_classes_stay_those_of_the_code(retry: Retry) -> None:
    declared = Retry(1, on=OSError, give_up_on=(KeyError,))
    back = Retry.from_json(retry.to_json(), like=declared)
    assert back.to_json() == retry.to_json()
    assert (back.on, back.give_up_on) == ((OSError,), (KeyError,))
    assert Retry.from_json(retry.to_json()) == retry


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"max_attempts":0}', Retry(2).to_json().replace("2.0", '"x"')]
)
def test_a_stored_policy_that_is_none_is_a_typed_error(text: str) -> None:
    with pytest.raises(SerializationError):
        Retry.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"max_attempts": 1.5},
        {"max_attempts": True},
        {"factor": 0.9},
        {"factor": math.nan},
        {"factor": math.inf},
        {"factor": "2"},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": math.nan},
        {"initial": "soon"},
        {"initial": -1},
        {"maximum": math.inf},
        {"initial": "2h", "maximum": "1h"},
    ],
)
def test_numbers_that_make_no_policy_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Retry(**wrong)


@pytest.mark.parametrize(
    "kinds", [BaseException, KeyboardInterrupt, "ValueError", (ValueError, 3), None, ValueError("x")]
)
def test_on_must_name_exception_classes(kinds: Any) -> None:
    with pytest.raises(RegistrationError):
        Retry(on=kinds)
    with pytest.raises(RegistrationError):
        Retry(give_up_on=kinds)


def test_durations_in_any_form_are_kept_in_microseconds() -> None:
    assert Retry(initial=timedelta(milliseconds=5), maximum="1h30m").initial == 5_000
    assert Retry(initial=0.25, maximum=60).maximum == 60 * SECOND
