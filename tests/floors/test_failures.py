"""`durable.codec.failures`: errors as data, and data as errors (semantics 23)."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from durable.codec import Codec, ErrorData, error, error_data, error_envelope, open_envelope, read_envelope, rebuild
from durable.codec.failures import MAX_MESSAGE, MAX_TRACEBACK
from durable.errors import (
    PayloadTooLarge,
    RegistrationError,
    RunFailed,
    SerializationError,
    StepFailed,
    StepTimeout,
)


def through_the_journal(exc: BaseException, step_id: str = "charge") -> Exception:
    is_value, data = read_envelope(error_envelope(error_data(exc)))
    assert not is_value
    return rebuild(data, step_id)


class Unregistered(ValueError):
    pass


@error
class Declined(Exception):
    def __init__(self, code: str, cents: int) -> None:
        super().__init__(code, cents)
        self.code, self.cents = code, cents


@error
class Forgetful(Exception):
    """Does not keep the contract: its args are not those of its constructor."""

    def __init__(self, code: str, cents: int) -> None:
        super().__init__(f"{code} {cents}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("x"),
        ValueError(),
        ValueError("a", 1),
        TypeError("x"),
        KeyError("k"),
        KeyError(5),
        IndexError("i"),
        LookupError("l"),
        RuntimeError("r"),
        NotImplementedError("n"),
        TimeoutError("t"),
        ConnectionError("c"),
        ConnectionResetError(104, "reset"),
        PermissionError(13, "no", "/etc"),
        FileNotFoundError(2, "none", "f"),
        OSError("o"),
        ZeroDivisionError("z"),
        AssertionError("a"),
        Exception("e"),
        Declined("insufficient", 100),
    ],
)
def test_an_error_of_a_known_class_comes_back_as_itself(exc: Exception) -> None:
    back = through_the_journal(raised(exc))
    assert type(back) is type(exc)
    assert str(back) == str(exc)
    assert vars(back).items() >= {name: value for name, value in vars(exc).items() if name != "__notes__"}.items()
    assert getattr(back, "errno", None) == getattr(exc, "errno", None)


@pytest.mark.parametrize(
    "exc",
    [
        Unregistered("x"),
        Forgetful("x", 1),
        Unprintable("x"),
        asyncio.CancelledError("x"),
        SystemExit(3),
        StopIteration(3),
        StopAsyncIteration(),
        KeyboardInterrupt(),
        GeneratorExit(),
        ExceptionGroup("g", [ValueError("x")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        json.JSONDecodeError("bad", "doc", 0),
        pickle.PicklingError("p"),
    ],
)
def test_any_other_error_is_step_failed_carrying_the_data(exc: BaseException) -> None:
    back = through_the_journal(raised(exc), "charge#2")
    assert type(back) is StepFailed
    assert back.step_id == "charge#2"
    assert back.type_name.endswith(type(exc).__qualname__)
    assert back.message == error_data(exc).message
    assert "test_failures.py" in back.traceback


def test_the_text_of_an_error_that_comes_back_twice_does_not_change() -> None:
    exc: Exception = KeyError("k")
    for _ in range(3):
        exc = through_the_journal(exc)
    assert exc.args == ("k",)


def test_an_argument_that_json_can_not_hold_leaves_class_and_text() -> None:
    odd = object()
    back = through_the_journal(ValueError("x", odd))
    assert type(back) is ValueError
    assert str(back) == f"('x', {odd!r})"
    assert str(through_the_journal(KeyError(b"\xff"))) == repr("b'\\xff'")


def test_a_rebuilt_error_tells_where_it_was_first_raised() -> None:
    back = through_the_journal(raised(ValueError("x")))
    assert "raise exc" in "".join(back.__notes__)
    assert "step charge" in "".join(back.__notes__)


def test_our_own_errors_come_back_with_what_they_carry() -> None:
    too_large = PayloadTooLarge("5 MB", path="$.x", hint="less")
    back = through_the_journal(too_large)
    assert type(back) is PayloadTooLarge
    assert (back.path, back.hint, str(back)) == ("$.x", "less", str(too_large))
    ended = through_the_journal(RunFailed("child", run_id="r1", error_kind="exception", traceback="tb"))
    assert isinstance(ended, RunFailed)
    assert (ended.run_id, ended.error_kind, ended.traceback) == ("r1", "exception", "tb")
    late = StepTimeout("over 5 s", step_id="a", type_name="TimeoutError")
    again = through_the_journal(late)
    assert isinstance(again, StepTimeout)
    assert (again.step_id, again.type_name, again.message) == ("a", "TimeoutError", "over 5 s")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(st.characters()) | st.binary() | st.integers() | st.none() | st.lists(st.floats()))
def test_any_message_can_be_stored(message: Any) -> None:
    for exc in (
        ValueError(message),
        Unregistered(message),
        KeyError(message),
        Declined(message, 1),
        StepFailed(str(message)),
    ):
        text = error_envelope(error_data(raised(exc)))
        text.encode()
        assert "\\u0000" not in text.replace("\\\\", "")
        assert isinstance(through_the_journal(exc), Exception)


def test_a_huge_message_is_cut_with_a_mark_and_a_huge_traceback_keeps_both_ends() -> None:
    exc = raised(Unregistered("x" * 5_000_000))
    data = error_data(exc)
    assert len(data.message) < MAX_MESSAGE + 100
    assert "characters left out" in data.message
    assert len(data.traceback) < MAX_TRACEBACK + 100
    assert data.traceback.startswith("Traceback")
    assert len(error_envelope(data)) < 100_000


def test_causes_that_form_a_loop_and_bottomless_recursion_can_be_stored() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert error_data(one).message == "one"

    def down() -> None:
        down()

    with pytest.raises(RecursionError) as caught:
        down()
    assert type(through_the_journal(caught.value)) is RecursionError


def test_an_error_whose_text_can_not_be_made_is_stored_without_it() -> None:
    assert "Unprintable" in error_data(Unprintable()).message


def test_stored_data_never_makes_a_class_that_was_not_registered() -> None:
    for name in ("os.system", "subprocess.Popen", "builtins.SystemExit", "SystemExit", "KeyboardInterrupt", "eval", ""):
        data = ErrorData(type_name=name, message="m", detail={"args": ["echo"], "fields": {"hint": "h"}})
        assert type(rebuild(data, "s")) is StepFailed


@pytest.mark.parametrize(
    "detail", [{"args": {}}, {"args": [1, 2, 3, 4, 5, 6]}, {"fields": 3}, {"fields": {"run_id": 4}}, {"args": None}]
)
def test_damaged_detail_still_gives_an_error_to_raise(detail: dict[str, Any]) -> None:
    for name in ("ValueError", "FileNotFoundError", "durable.errors.RunFailed", f"{__name__}.Declined", "UnicodeError"):
        assert isinstance(rebuild(ErrorData(type_name=name, message="m", detail=detail), "s"), Exception)


@pytest.mark.parametrize("text", ['{"e":[]}', '{"e":{"type":1,"message":"m"}}', '{"e":{"message":"m"}}', '{"e":"x"}'])
def test_a_stored_error_that_is_none_is_a_typed_error(text: str) -> None:
    with pytest.raises(SerializationError):
        open_envelope(Codec(100), text)


def test_a_class_that_can_not_be_rebuilt_from_its_args_is_refused_when_it_is_registered() -> None:
    class Keyword(Exception):
        def __init__(self, *, code: str) -> None:
            super().__init__(code)

    with pytest.raises(RegistrationError, match="'code'"):
        error(Keyword)
    for wrong in (ValueError("x"), int, BaseException, KeyboardInterrupt, "ValueError"):
        with pytest.raises(RegistrationError):
            error(wrong)  # type: ignore[type-var]
    assert error(Declined) is Declined
