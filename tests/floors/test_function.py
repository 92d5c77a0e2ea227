"""Declarations and options: everything that can be wrong with one is refused at once, with a typed error that says what to do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from durable.blocking import SyncContext
from durable.codec import Codec
from durable.context import Context
from durable.cron import Cron
from durable.errors import ConfigurationError, DurableError, Misuse, RegistrationError
from durable.function import Function, Registry, Step, default_registry, function, source_fingerprint, step
from durable.retry import Retry
from durable.settings import SECOND
from durable.steps import plan_of


async def body(ctx: Context, number: int, word: str = "w") -> str:
    return word * number


def declared(**options: Any) -> Function[..., Any]:
    made: Function[..., Any] = function(registry=Registry(), **options)(body)
    return made


# -- names (27) --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a/b", "a#2", "a:b", "a@b", "a\nb", "a\x00b", "a\x7f", "", "   ", "x" * 256, 7])
def test_names_of_functions_steps_and_queues_with_reserved_or_control_characters_are_refused(name: Any) -> None:
    for refused in (
        lambda: declared(name=name),
        lambda: declared(queue=name),
        lambda: declared().using(queue=name),
        lambda: step(name=name)(lambda: 1),
        lambda: step(lambda: 1).using(name=name),
    ):
        with pytest.raises(RegistrationError):
            refused()


@pytest.mark.parametrize("name", ["checkout", "shop.checkout", "send mail", "träger", "a-b_c", "<lambda>"])
def test_other_names_are_taken(name: str) -> None:
    assert declared(name=name).name == name


def test_a_function_is_called_by_its_name_unless_another_is_declared() -> None:
    assert declared().name == "body"
    assert declared(name="other").name == "other"


# -- registering -------------------------------------------------------------------------------------------------------


def test_two_functions_of_one_name_are_refused_and_both_places_are_named() -> None:
    registry = Registry()
    function(registry=registry, name="same")(body)

    async def another(ctx: Context) -> None: ...

    with pytest.raises(RegistrationError, match=r"body.*another"):
        function(registry=registry, name="same")(another)


def test_the_same_function_again_takes_the_place_of_the_one_before() -> None:
    registry = Registry()
    function(registry=registry)(body)
    second = function(registry=registry)(body)
    assert registry.get("body") is second
    assert len(registry) == 1


def test_versions_of_one_name_live_side_by_side() -> None:
    registry = Registry()
    one, two = (function(registry=registry, version=version)(body) for version in ("1", "2"))
    assert (registry.get("body", "1"), registry.get("body", "2"), registry.get("body", "3")) == (one, two, None)
    assert registry.get("body") is one
    assert registry.get("unknown") is None


def test_a_declaration_without_a_registry_goes_to_the_default_one() -> None:
    @function(name="only for this test")
    async def one(ctx: Context) -> None: ...

    assert default_registry.get("only for this test") is one


def test_a_body_without_a_place_for_the_context_is_refused() -> None:
    async def without() -> None: ...

    with pytest.raises(RegistrationError, match="context"):
        function(registry=Registry())(without)  # type: ignore[call-overload]


def test_what_is_no_plain_function_is_refused() -> None:
    async def generator(ctx: Context) -> AsyncIterator[int]:
        yield 1

    for refused in (generator, functools.partial(body, number=1), 7, declared(), step(body)):
        with pytest.raises(RegistrationError):
            function(registry=Registry())(refused)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": "soon"},
        {"keep": float("nan")},
        {"retry": 3},
        {"priority": 1.5},
        {"priority": 40_000},
        {"priority": True},
        {"max_concurrency": 0},
        {"max_concurrency": True},
        {"cron": 5},
        {"cron": "not a cron"},
        {"version": ""},
    ],
)
def test_a_declaration_that_can_not_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((RegistrationError, ConfigurationError)):
        declared(**options)


def test_a_declaration_keeps_what_it_was_given() -> None:
    fn = declared(retry=Retry(3), timeout="1h", queue="images", priority=5, version="2", cron="0 9 * * *", keep="7d")
    assert (fn.retry.max_attempts, fn.timeout, fn.queue, fn.version) == (3, 3_600 * SECOND, "images", "2")
    assert (fn.declared.priority, fn.declared.keep) == (5, 7 * 86_400 * SECOND)
    assert isinstance(fn.cron, Cron)


def test_def_and_async_def_bodies_are_told_apart() -> None:
    def blocking(ctx: SyncContext) -> None: ...

    assert function(registry=Registry())(blocking).blocking
    assert not declared().blocking


# -- calling -----------------------------------------------------------------------------------------------------------


def test_a_direct_call_of_a_durable_function_says_how_to_start_it() -> None:
    with pytest.raises(Misuse, match=r"await client\.run\(body, \.\.\.\)"):
        declared()(1)


def test_a_step_is_still_the_plain_function() -> None:
    @step(retry=Retry(3), timeout="5s")
    def double(number: int) -> int:
        """Twice."""
        return 2 * number

    assert double(4) == 8
    assert (double.name, double.__doc__, double.plan.timeout) == ("double", "Twice.", 5 * SECOND)


# -- options of a start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["idempotency_key", "coalesce_key", "sequence_key", "concurrency_key"])
@pytest.mark.parametrize("key", ["", "~mine", "k" * 1_025, "a\x00b", "\ud800", None, 7])
def test_a_key_that_is_none_is_refused(option: str, key: Any) -> None:
    with pytest.raises(RegistrationError):
        declared().using(**{option: key})


@pytest.mark.parametrize("key", ["a", "a/b#c:d@e", "k" * 1_024, "ключ", " "])
def test_any_other_key_is_taken(key: str) -> None:
    assert declared().using(idempotency_key=key).options.idempotency_key == key


@pytest.mark.parametrize(
    "options",
    [
        {"at": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"at": "2030-01-01"},
        {"deadline": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"deadline": 0},
        {"deadline": "never"},
        {"delay": -1},
        {"delay": "1 fortnight"},
        {"on_coalesce": "drop"},
        {"max_delay": "1s"},
        {"retry": "3"},
        {"timeout": 0},
        {"tags": ["a"]},
        {"tags": {"a": 1}},
        {"tags": {"": "b"}},
        {"tags": {"a": "\x00"}},
        {"detached": 1},
        {"priority": "high"},
        {"cron": "61 * * * *"},
    ],
)
def test_an_option_that_can_not_work_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises((RegistrationError, ConfigurationError)) as caught:
        declared().using(**options)
    assert isinstance(caught.value, DurableError)


def test_a_naive_datetime_is_told_how_to_be_written() -> None:
    with pytest.raises(ConfigurationError, match="time zone"):
        declared().using(at=datetime(2030, 1, 1))  # noqa: DTZ001


def test_options_add_up_and_leave_the_function_alone() -> None:
    fn = declared()
    first = fn.using(idempotency_key="a", delay="5s")
    second = first.using(delay="7s", tags={"x": "y"}, at=datetime(2030, 1, 1, tzinfo=UTC), timeout=None)
    assert (fn.options.idempotency_key, first.options.delay, second.options.delay) == (None, 5 * SECOND, 7 * SECOND)
    assert (second.options.idempotency_key, dict(second.options.tags)) == ("a", {"x": "y"})
    assert second.options.start_at == 1_893_456_000 * SECOND
    assert (fn.options.unlimited, second.options.unlimited) == (False, True)
    assert second.fn is fn.fn


def test_a_deadline_is_an_instant_or_a_span() -> None:
    at = declared().using(deadline=datetime(2030, 1, 1, tzinfo=UTC)).options
    after = declared().using(deadline="2h").options
    assert (at.deadline_at, at.deadline_after) == (1_893_456_000 * SECOND, None)
    assert (after.deadline_at, after.deadline_after) == (None, 7_200 * SECOND)


def test_tags_can_not_be_changed_afterwards() -> None:
    tags = {"a": "b"}
    fn = declared().using(tags=tags)
    tags["a"] = "c"
    assert dict(fn.options.tags) == {"a": "b"}
    with pytest.raises(TypeError):
        fn.options.tags["a"] = "d"  # type: ignore[index]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_step_may_be_given_another_policy_for_one_call() -> None:
    @step(retry=Retry(8), timeout="20s")
    async def charge() -> None: ...

    other = charge.using(retry=Retry.NEVER, timeout=None)
    assert (charge.plan.retry.max_attempts, charge.plan.timeout) == (8, 20 * SECOND)
    assert (other.plan.retry.max_attempts, other.plan.timeout, other.name) == (1, None, "charge")


@pytest.mark.parametrize("options", [{"retry": 3}, {"timeout": 0}, {"timeout": "x"}, {"name": "a/b"}])
def test_a_step_that_can_not_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((RegistrationError, ConfigurationError)):
        step(**options)(lambda: None)


def test_what_is_declared_is_not_declared_again() -> None:
    with pytest.raises(RegistrationError):
        step(step(lambda: None))
    with pytest.raises(RegistrationError):
        step(declared())  # type: ignore[arg-type]


def test_any_callable_has_a_name_as_a_step() -> None:
    class Caller:
        def __call__(self) -> int:
            return 1

        def method(self) -> int:
            return 2

    def plain() -> int:
        return 3

    caller = Caller()
    assert [
        plan_of(one).name for one in (plain, functools.partial(functools.partial(plain)), caller, caller.method)
    ] == [
        "plain",
        "plain",
        "Caller",
        "method",
    ]
    assert isinstance(step(plain), Step)


# -- storing -----------------------------------------------------------------------------------------------------------


def test_arguments_are_stored_in_one_form_with_their_defaults() -> None:
    fn, codec = declared(), Codec(1_000)
    assert fn.encode_arguments(codec, (2,), {}) == '[[2,"w"],{}]'
    assert fn.encode_arguments(codec, (), {"number": 2, "word": "w"}) == '[[2,"w"],{}]'
    assert fn.decode_result(fn.encode_result("ww", codec), codec) == "ww"


def test_the_source_of_a_function_is_read_once_and_not_for_every_start(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda fn: reads.append(fn) or source(fn))
    fn = declared()
    prints = {fn.using(idempotency_key=str(n)).using(priority=n).fingerprint for n in range(5)}
    assert prints == {fn.fingerprint}
    assert len(reads) == 1


def test_the_fingerprint_follows_the_code_and_not_its_comments() -> None:
    def one() -> int:
        # a comment
        return 1

    first = source_fingerprint(one)

    def one() -> int:  # type: ignore[no-redef]
        return 1

    second = source_fingerprint(one)

    def one() -> int:  # type: ignore[no-redef]
        return 2

    assert first == second != source_fingerprint(one)
    assert declared().fingerprint == declared(name="other").fingerprint
