"""`durable.codec.Signature`: the arguments of a call as one canonical text, and back (semantics 22, 25, 70)."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict, Unpack

from durable.codec import UNTYPED, Codec, Signature
from durable.errors import PayloadTooLarge, RegistrationError, SerializationError

if TYPE_CHECKING:
    from nowhere import Context, Missing  # type: ignore[import-not-found]

CODEC = Codec(1 << 20)
T = TypeVar("T")
NOT_GIVEN: Any = object()


class Order(BaseModel):
    id: str
    cents: int = 0


class Extra(TypedDict, total=False):
    colour: str
    order: Order


async def trial(ctx: Context, order: Order, days: int = 14, *, note: str = "", urgent: bool = False) -> Order: ...


def signature(fn: Callable[..., Any], *, skip_first: bool = False) -> Signature:
    return Signature.of(fn, skip_first=skip_first)


def both(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    text = signature(fn).encode_arguments(CODEC, args, kwargs)
    return text, *signature(fn).decode_arguments(CODEC, text)


def test_a_call_has_one_text_however_it_is_written() -> None:
    order = Order(id="x")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((order,), {}),
        ((order, 14), {}),
        ((), {"order": order}),
        ((), {"urgent": False, "days": 14, "order": order, "note": ""}),
        ((order,), {"note": "", "days": 14}),
        (({"id": "x", "cents": 0},), {}),
    ]
    trialled = signature(trial, skip_first=True)
    texts = {trialled.encode_arguments(CODEC, args, kwargs) for args, kwargs in calls}
    assert texts == {'[[{"id":"x","cents":0},14],{"note":"","urgent":false}]'}
    assert trialled.decode_arguments(CODEC, texts.pop()) == ((order, 14), {"note": "", "urgent": False})


def test_a_run_keeps_the_defaults_of_the_day_it_was_started() -> None:
    def before(days: int = 14) -> None: ...
    def after(days: int = 30) -> None: ...

    text = signature(before).encode_arguments(CODEC, (), {})
    assert signature(after).decode_arguments(CODEC, text) == ((14,), {})


def test_a_default_that_can_not_be_stored_is_left_to_python_and_what_follows_goes_by_name() -> None:
    def fn(a: int, b: Any = NOT_GIVEN, c: int = 3, *, d: Any = NOT_GIVEN) -> None: ...

    assert both(fn, 1) == ('[[1],{"c":3}]', (1,), {"c": 3})
    assert both(fn, 1, 2) == ("[[1,2,3],{}]", (1, 2, 3), {})

    def positional(a: Any = NOT_GIVEN, b: int = 2, /) -> None: ...

    assert both(positional) == ("[[],{}]", (), {})
    assert both(positional, 1) == ("[[1,2],{}]", (1, 2), {})


def test_a_default_of_the_wrong_type_is_left_to_python() -> None:
    def fn(a: int = "none") -> None: ...  # type: ignore[assignment]

    assert both(fn) == ("[[],{}]", (), {})


def test_variable_arguments_come_back_by_their_annotations() -> None:
    def fn(first: int, *rest: Order, flag: bool = False, **options: float) -> None: ...

    order = Order(id="x")
    text, args, kwargs = both(fn, 1, order, order, zoom=2, a=1.5)
    assert text == '[[1,{"id":"x","cents":0},{"id":"x","cents":0}],{"a":1.5,"flag":false,"zoom":2.0}]'
    assert (args, kwargs) == ((1, order, order), {"a": 1.5, "flag": False, "zoom": 2.0})


def test_unpacked_keyword_arguments_have_the_types_of_their_typed_dict() -> None:
    def fn(**options: Unpack[Extra]) -> None: ...

    order = Order(id="x")
    assert both(fn, order=order, colour="red")[2] == {"order": order, "colour": "red"}
    with pytest.raises(SerializationError) as caught:
        both(fn, colour=3)
    assert caught.value.path == "$.colour"


def test_a_name_that_is_positional_only_is_free_for_an_option() -> None:
    def fn(a: int, /, **options: str) -> None: ...

    assert both(fn, 1, a="x")[1:] == ((1,), {"a": "x"})


@pytest.mark.parametrize("kwargs", [{}, {"order": 1, "nobody": 2}])
def test_arguments_that_do_not_fit_are_a_type_error_that_names_the_function(kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"trial\(\)"):
        signature(trial, skip_first=True).encode_arguments(CODEC, (), kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "path"),
    [
        (("x",), {}, "$.order"),
        (({"id": 1},), {}, "$.order.id"),
        (({"id": "a\x00"},), {}, "$.order.id"),
        ((Order(id="x"), "soon"), {}, "$.days"),
        ((Order(id="x"),), {"note": None}, "$.note"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_with_its_parameter_in_the_path(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: str
) -> None:
    with pytest.raises(SerializationError) as caught:
        signature(trial, skip_first=True).encode_arguments(CODEC, args, kwargs)
    assert caught.value.path == path


def test_unannotated_arguments_are_plain_json_and_nothing_else() -> None:
    def fn(a, *rest, **options): ...  # type: ignore[no-untyped-def]

    assert both(fn, {"x": (1, 2)}, None, k=[1]) == ('[[{"x":[1,2]},null],{"k":[1]}]', ({"x": [1, 2]}, None), {"k": [1]})
    with pytest.raises(SerializationError) as caught:
        both(fn, 1, {"lock": threading.Lock()})
    assert caught.value.path == "$.rest[0].lock"


def test_the_limit_counts_all_arguments_together() -> None:
    def fn(a: str, b: str) -> None: ...

    small = Codec(41)
    assert len(signature(fn).encode_arguments(small, ("x" * 15, "y" * 14), {})) == 41
    with pytest.raises(PayloadTooLarge):
        signature(fn).encode_arguments(small, ("x" * 15, "y" * 15), {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[[],[]]",
        "[[1,2,3],{}]",
        "[[],{}]",
        '[[1],{"c":1}]',
        '[[1],{"a":1}]',
        '[["x"],{}]',
        "[[1],{},1]",
        "[[1]",
    ],
)
def test_stored_arguments_that_do_not_fit_the_function_are_a_typed_error(text: str) -> None:
    def fn(a: int, b: int = 1) -> None: ...

    with pytest.raises(SerializationError):
        signature(fn).decode_arguments(CODEC, text)


def test_white_space_and_the_order_of_keys_do_not_matter() -> None:
    def fn(a: Order, *, b: int, cc: float) -> None: ...

    text = ' [ [ {"cents" : 7, "id": "x"} ] , {"cc": 2.0, "b": 1} ] '
    assert signature(fn).decode_arguments(CODEC, text) == ((Order(id="x", cents=7),), {"b": 1, "cc": 2.0})


# ------------------------------------------------------------------------------------------------ annotations and callables


def test_the_result_annotation_is_the_plain_one() -> None:
    async def coroutine() -> Order: ...
    def awaitable() -> Awaitable[Order]: ...
    def typed() -> Coroutine[Any, Any, list[Order]]: ...
    def nothing() -> None: ...
    def unsaid(): ...  # type: ignore[no-untyped-def]
    def generic(value: T) -> T: ...

    assert signature(trial, skip_first=True).returns is Order
    assert signature(coroutine).returns is Order
    assert signature(awaitable).returns is Order
    assert signature(typed).returns == list[Order]
    assert signature(nothing).returns in (None, type(None))
    assert signature(unsaid).returns is UNTYPED
    assert signature(generic).returns is UNTYPED


def test_annotations_are_resolved_at_the_first_use_so_a_class_may_be_defined_further_down() -> None:
    early = signature(uses_later)
    assert early.encode_arguments(CODEC, (Later(x=1),), {}) == '[[{"x":1}],{}]'


def uses_later(value: Later) -> Later: ...


class Later(BaseModel):
    x: int


def test_a_local_class_is_found_if_the_function_can_see_it() -> None:
    class Local(BaseModel):
        x: int

    def fn(value: Local) -> Local:
        return Local(x=value.x)

    assert both(fn, Local(x=1))[1] == (Local(x=1),)


def test_an_annotation_that_can_not_be_resolved_is_a_registration_error_that_names_it() -> None:
    def argument(missing: Missing) -> None: ...
    def result() -> list[Missing]: ...

    with pytest.raises(RegistrationError, match=r"argument: the annotation of 'missing'.*Missing"):
        signature(argument).encode_arguments(CODEC, (1,), {})
    with pytest.raises(RegistrationError, match=r"result: the return annotation.*Missing"):
        _ = signature(result).returns
    assert signature(trial, skip_first=True).returns is Order  # that of the context is not needed


def test_an_annotation_that_can_not_be_stored_names_the_parameter() -> None:
    def fn(lock: threading.Thread) -> None: ...

    with pytest.raises(RegistrationError, match=r"fn: the parameter 'lock'"):
        signature(fn).encode_arguments(CODEC, (1,), {})


def test_a_function_without_a_place_for_its_context_is_a_registration_error() -> None:
    def none() -> None: ...
    def by_name(*, ctx: Any) -> None: ...

    for fn in (none, by_name):
        with pytest.raises(RegistrationError, match="context"):
            signature(fn, skip_first=True)
    with pytest.raises(RegistrationError, match="called"):
        signature(3)  # type: ignore[arg-type]


class Service:
    def method(self, order: Order) -> Order: ...

    @classmethod
    def maker(cls, order: Order) -> Order: ...

    @staticmethod
    def plain(order: Order) -> Order: ...

    def __call__(self, order: Order) -> Order: ...


def decorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


def with_flag(flag: bool, order: Order) -> Order: ...


@pytest.mark.parametrize(
    "fn",
    [
        Service().method,
        Service.maker,
        Service.plain,
        Service(),
        decorated(Service.plain),
        functools.partial(with_flag, True),
        decorated(functools.partial(with_flag, True)),
    ],
)
def test_methods_partials_wrappers_and_callable_objects_have_a_signature(fn: Callable[..., Any]) -> None:
    order = Order(id="x")
    assert json.loads(both(fn, order)[0])[0] == [{"id": "x", "cents": 0}]
    assert both(fn, order)[1] == (order,)
    assert signature(fn).returns is Order


def test_a_class_returns_itself() -> None:
    assert signature(Order).returns is Order


def test_a_built_in_that_tells_nothing_takes_plain_json() -> None:
    assert both(max, 1, 2) == ("[[1,2],{}]", (1, 2), {})
    assert signature(max).returns is UNTYPED


def test_a_signature_is_made_once_for_a_function() -> None:
    assert signature(trial, skip_first=True) is signature(trial, skip_first=True)
    assert signature(trial, skip_first=True) is not signature(trial)
