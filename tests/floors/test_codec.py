"""`durable.codec`: any value comes back equal or is refused with a typed error (semantics 22, 70, 71).

`DURABLE_CODEC_CASES` says how often the fuzz tests try (60 by default, some of them two or three times that).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, PrivateAttr, SecretStr, model_serializer
from typing_extensions import TypedDict

from durable.codec import UNTYPED, Codec, digest, open_envelope, read_envelope, value_envelope
from durable.codec.plain import MAX_DEPTH
from durable.errors import PayloadTooLarge, RegistrationError, SerializationError

CODEC = Codec(1 << 20)
EXAMPLES = int(os.environ.get("DURABLE_CODEC_CASES", "60"))


def fuzz(times: int = 1) -> settings:
    return settings(
        max_examples=times * EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
plain_values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=12)
odd_leaves = (
    leaves
    | st.text(st.characters())
    | st.sampled_from(
        ["\x00", "\ud800", "a\udfffb", "\\u0000", math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, b"x"]
    )
    | st.sampled_from([10**400, -(10**4299), object(), len, {1, 2}, datetime(2026, 1, 1, tzinfo=UTC), Decimal(1), 1j])
)
odd_keys = st.text(st.characters()) | st.integers() | st.none() | st.booleans() | st.tuples(st.integers()) | st.floats()
odd_values = st.recursive(
    odd_leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(odd_keys, inner),
    max_leaves=10,
)


def exact(value: Any) -> str:
    """More than equality: types, signs of zero and the order of keys, which decide what a body does next."""
    return repr(value)


def as_jsonb_returns_it(text: str) -> str:
    """What PostgreSQL's jsonb makes of a text: its own key order and white space, numbers as numeric prints them."""

    def build(value: Any) -> str:
        if isinstance(value, dict):
            keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
            return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {build(value[key])}" for key in keys) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(build, value)) + "]"
        if isinstance(value, Decimal):
            plain = format(value, "f")
            return plain.removeprefix("-") if value.is_zero() else plain
        return json.dumps(value, ensure_ascii=False)

    return build(json.loads(text, parse_float=Decimal, parse_int=Decimal))


def with_lists(value: Any) -> Any:
    """An unannotated tuple comes back as a list: the only change that is allowed."""
    if isinstance(value, (list, tuple)):
        return [with_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: with_lists(item) for key, item in value.items()}
    return value


# ------------------------------------------------------------------------------------------------------------- plain values


@fuzz()
@given(plain_values)
def test_a_plain_value_comes_back_equal(value: Any) -> None:
    text, back = CODEC.roundtrip(value)
    assert back == value
    assert CODEC.encode(value) == text
    json.loads(text)


@fuzz(2)
@given(odd_values)
def test_any_value_comes_back_equal_or_is_refused_with_a_typed_error_that_names_its_path(value: Any) -> None:
    try:
        text, back = CODEC.roundtrip(value)
    except SerializationError as error:
        assert error.path.startswith("$")
        str(error).encode()
        return
    assert back == with_lists(value)
    text.encode()


@fuzz()
@given(plain_values)
def test_live_and_replay_are_the_same_to_the_last_detail_also_through_jsonb(value: Any) -> None:
    text, live = CODEC.roundtrip(value)
    assert exact(CODEC.decode(text)) == exact(live)
    assert exact(CODEC.decode(as_jsonb_returns_it(text))) == exact(live)


@pytest.mark.parametrize(
    "number", [-0.0, 0.0, 5e-324, 1e16, 1e22, -1e300, 1.7976931348623157e308, 1e15, 0.1, 3.0, 1e-7]
)
def test_a_float_stays_that_float_on_every_store(number: float) -> None:
    for annotation in (UNTYPED, float, list[float]):
        value = [number] if annotation == list[float] else number
        text, live = CODEC.roundtrip(value, annotation)
        assert exact(live) == exact(value)
        assert exact(CODEC.decode(as_jsonb_returns_it(text), annotation)) == exact(value)


@pytest.mark.parametrize("digits", [1, 19, 20, 4_300, 4_301, 20_000])
@pytest.mark.parametrize("annotation", [UNTYPED, int, Any])
def test_integers_of_any_size_come_back(digits: int, annotation: Any) -> None:
    for number in (10**digits - 1, -(10**digits) + 1):
        text, back = CODEC.roundtrip(number, annotation)
        assert back == number
        assert CODEC.decode(f" {text} ", annotation) == number
    assert CODEC.roundtrip([10**digits], list[int])[1] == [10**digits]


def test_an_integer_that_postgresql_could_not_hold_is_refused_on_every_store() -> None:
    with pytest.raises(SerializationError, match="131,072"):
        CODEC.encode(10**132_000)


@pytest.mark.parametrize(
    ("value", "path", "why"),
    [
        ({"items": [1, 2, 3, {"name": "a\x00b"}]}, "$.items[3].name", "NUL"),
        ({"k\x00": 1}, "$['k\\x00']", "NUL"),
        (["\ud800"], "$[0]", "surrogate"),
        ({"a": {"\ud800": 1}}, "$.a['\\ud800']", "surrogate"),
        ({"a b": math.nan}, "$['a b']", "nan"),
        ((1, math.inf), "$[1]", "inf"),
        ({"a": {1: 2}}, "$.a", "int, not text"),
        ({None: 1}, "$", "NoneType, not text"),
        ([b"x"], "$[0]", "bytes is not plain JSON"),
        ({"lock": threading.Lock()}, "$.lock", "lock is not plain JSON"),
        ([{1}], "$[0]", "set is not plain JSON"),
        (lambda: 1, "$", "function is not plain JSON"),
        (OrderedDict(a=1), "$", "OrderedDict is not plain JSON"),
        (enum.Enum("Colour", "RED").RED, "$", "Colour is not plain JSON"),  # type: ignore[attr-defined]
    ],
)
def test_what_json_can_not_hold_is_refused_with_its_path(value: Any, path: str, why: str) -> None:
    with pytest.raises(SerializationError, match=why) as caught:
        CODEC.encode(value)
    assert caught.value.path == path


def test_text_that_only_looks_like_an_escape_is_no_nul() -> None:
    for text in ("\\u0000", "\\\\u0000", "\\ud800", '"\\', "\u2028\x7f\uffff"):
        assert CODEC.roundtrip({text: text})[1] == {text: text}


def test_keys_with_dots_and_dollars_come_back() -> None:
    value = {"a.b": 1, "$set": {"$ref": 2, "": 3}}
    assert CODEC.roundtrip(value)[1] == value


@pytest.mark.parametrize("annotation", [UNTYPED, list, Any, dict[str, Any]])
def test_a_value_inside_itself_or_too_deep_is_refused_and_never_a_recursion_error(annotation: Any) -> None:
    inside: Any = []
    inside.append(inside)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (inside, deep):
        with pytest.raises(SerializationError):
            CODEC.encode({"a": value} if annotation == dict[str, Any] else value, annotation)


def test_the_deepest_value_that_is_accepted_can_be_read_inside_its_envelope() -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = {"a": value}
        return value

    text = CODEC.encode(nested(MAX_DEPTH))
    assert open_envelope(CODEC, value_envelope(text)) == (True, nested(MAX_DEPTH))
    with pytest.raises(SerializationError, match="levels"):
        CODEC.encode(nested(MAX_DEPTH + 1))


def test_a_small_value_that_refers_to_one_list_a_million_times_is_too_large_and_does_not_fill_the_memory() -> None:
    value: Any = []
    for _ in range(80):
        value = [value, value]
    with pytest.raises(PayloadTooLarge):
        CODEC.encode(value)


@pytest.mark.parametrize(("text", "size"), [("x" * 8, 10), ("ü" * 4, 10), ("\n" * 4, 10), ("x" * 9, 11), ("ü" * 5, 12)])
def test_the_limit_counts_the_bytes_of_the_text_that_is_stored(text: str, size: int) -> None:
    assert len(CODEC.encode(text).encode()) == size
    for annotation in (UNTYPED, str):
        if size <= 10:
            assert Codec(10).encode(text, annotation)
        else:
            with pytest.raises(PayloadTooLarge, match=f"{size} bytes"):
                Codec(10).encode(text, annotation)


def test_keys_have_one_order_whatever_order_they_were_put_in() -> None:
    one = {"b": 1, "aa": 2, "a": 3, "é": 4, "zz": 5}
    other = dict(reversed(one.items()))
    assert CODEC.encode(one) == CODEC.encode(other) == '{"a":3,"b":1,"aa":2,"zz":5,"é":4}'


def test_the_live_value_is_a_copy_that_later_changes_do_not_reach() -> None:
    source = {"list": [1]}
    text, live = CODEC.roundtrip(source)
    source["list"].append(2)
    live["list"].append(3)
    assert CODEC.decode(text) == {"list": [1]}


@fuzz()
@given(plain_values, st.data())
def test_damaged_text_is_a_typed_error_or_another_value_and_nothing_else(value: Any, data: st.DataObject) -> None:
    text = value_envelope(CODEC.encode(value))
    position = data.draw(st.integers(0, len(text) - 1))
    damaged = (
        text[:position]
        + data.draw(st.sampled_from(["", "\x00", "{", '"', "9" * 5_000, "NaN", "\ud800"]))
        + text[position + 1 :]
    )
    for read in (
        lambda: CODEC.decode(damaged, dict[str, int]),
        lambda: open_envelope(CODEC, damaged),
        lambda: read_envelope(damaged),
    ):
        try:
            read()
        except SerializationError:
            pass


@pytest.mark.parametrize(
    "text", ["", " ", "nul", "[", "NaN", "[Infinity]", '"\\ud800"', "[1,]", "{'a':1}", "[" * 100_000]
)
def test_text_that_is_no_json_is_a_typed_error(text: str) -> None:
    for annotation in (UNTYPED, list[int], int):
        with pytest.raises(SerializationError):
            CODEC.decode(text, annotation)


# --------------------------------------------------------------------------------------------------------- annotated values


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: int


class Options(TypedDict, total=False):
    size: int
    raw: bytes


@dataclasses.dataclass
class Parcel:
    name: str
    seal: bytes = b""
    tags: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    at: datetime


class Item(BaseModel):
    name: str = Field(alias="itemName")
    price: Decimal = Decimal(0)


class Order(BaseModel):
    id: UUID
    items: list[Item] = []
    at: datetime | None = None
    notes: dict[int, str] = {}


class Express(Order):
    until: datetime


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    size: int


class Square(BaseModel):
    kind: Literal["square"] = "square"
    size: int


class Left(BaseModel):
    size: int


class Right(BaseModel):
    size: int


# In a repeated or left-out hour datetimes of two zones are never equal (PEP 495): those have a test of their own.
instants = st.datetimes() | st.datetimes(
    timezones=st.sampled_from([UTC, ZoneInfo("Europe/Berlin"), timezone(timedelta(hours=-9.5))])
).filter(lambda moment: moment.tzinfo is None or (moment.year > 1950 and moment == moment.astimezone(UTC)))
items = st.builds(Item, itemName=texts, price=st.decimals(allow_nan=False, allow_infinity=False, places=3))
orders = st.builds(
    Order,
    id=st.uuids(),
    items=st.lists(items, max_size=3),
    at=st.none() | instants,
    notes=st.dictionaries(st.integers(), texts),
)
TYPED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (bytes, st.binary()),
    (list[bytes], st.lists(st.binary())),
    (datetime, instants),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas()),
    (UUID, st.uuids()),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
    (Point, st.builds(Point, st.integers(), st.integers())),
    (Options, st.fixed_dictionaries({"size": st.integers()}, optional={"raw": st.binary()})),
    (Parcel, st.builds(Parcel, texts, st.binary(), st.frozensets(texts))),
    (Slotted, st.builds(Slotted, instants)),
    (Order, orders),
    (list[Order], st.lists(orders, max_size=2)),
    (dict[str, Parcel], st.dictionaries(texts, st.builds(Parcel, texts, st.binary()))),
    (dict[int, float], st.dictionaries(st.integers(), st.floats(allow_nan=False, allow_infinity=False))),
    (tuple[int, str], st.tuples(st.integers(), texts)),
    (tuple[int, ...], st.lists(st.integers()).map(tuple)),
    (set[int], st.sets(st.integers())),
    (deque[int], st.lists(st.integers()).map(deque)),
    (Sequence[int], st.lists(st.integers())),
    (Iterable[int], st.lists(st.integers())),
    (int | None, st.none() | st.integers()),
    (int | str, st.integers() | texts),
    (bool | int, st.booleans() | st.integers()),
    (
        Annotated[Circle | Square, Field(discriminator="kind")],
        st.builds(Circle, size=st.integers()) | st.builds(Square, size=st.integers()),
    ),
    (PurePosixPath, texts.filter(lambda text: text != "").map(PurePosixPath)),
    (Any, plain_values),
    (dict[str, Any], st.dictionaries(texts, plain_values)),
]  # fmt: skip


@fuzz(3)
@given(st.sampled_from(TYPED).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1])))
def test_an_annotated_value_comes_back_equal_and_of_its_type(case: tuple[Any, Any]) -> None:
    annotation, value = case
    text, live = CODEC.roundtrip(value, annotation)
    assert live == value
    assert type(live) is type(value)
    assert exact(CODEC.decode(text, annotation)) == exact(live)
    assert exact(CODEC.decode(as_jsonb_returns_it(text), annotation)) == exact(live)


@fuzz(2)
@given(st.sampled_from([annotation for annotation, _ in TYPED]), odd_values)
def test_any_value_for_any_annotation_is_taken_or_refused_with_a_typed_error(annotation: Any, value: Any) -> None:
    try:
        text, live = CODEC.roundtrip(value, annotation)
    except SerializationError as error:
        assert error.path.startswith("$")
        return
    assert exact(CODEC.decode(as_jsonb_returns_it(text), annotation)) == exact(live)


@pytest.mark.parametrize(
    ("value", "annotation", "path"),
    [
        ("x", int, "$"),
        (None, int, "$"),
        (1, None, "$"),
        ([1, "x"], list[int], "$[1]"),
        ({"a": [1, None]}, dict[str, list[int]], "$.a[1]"),
        ({"id": "no"}, Order, "$.id"),
        ("blue", Colour, "$"),
        (Order(id=UUID(int=1)), Circle, "$"),
        (math.nan, float, "$"),
        ([math.inf], list[float], "$[0]"),
        ({"a": {"b": "\x00"}}, dict[str, dict[str, str]], "$.a.b"),
        (["\ud800"], list[str], "$[0]"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_at_the_call_with_its_path(value: Any, annotation: Any, path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        CODEC.encode(value, annotation)
    assert caught.value.path == path


def test_an_instant_is_the_same_instant_also_in_a_repeated_and_in_a_left_out_hour() -> None:
    for reading in ("2026-10-25T02:30:00.123456", "2026-03-29T02:30:00", "0001-01-02T00:00:00", "9999-12-30T00:00:00"):
        for fold in (0, 1):
            value = datetime.fromisoformat(reading).replace(tzinfo=ZoneInfo("Europe/Paris"), fold=fold)
            if value.year > 1:
                live = CODEC.roundtrip(value, datetime)[1]
                assert live.astimezone(UTC) == value.astimezone(UTC)


def test_an_offset_with_seconds_which_iso_text_can_not_hold_is_refused() -> None:
    value = datetime(1893, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))  # local mean time, +00:53:28
    for annotation in (datetime, Slotted, list[datetime]):
        with pytest.raises(SerializationError, match="come back"):
            CODEC.encode({datetime: value, Slotted: Slotted(value)}.get(annotation, [value]), annotation)  # type: ignore[call-overload]


def test_a_secret_that_would_be_stored_as_stars_is_refused() -> None:
    with pytest.raises(SerializationError, match="come back"):
        CODEC.encode(SecretStr("hunter2"), SecretStr)


def test_an_excluded_field_with_a_value_is_refused_and_without_one_is_no_obstacle() -> None:
    class Partial(BaseModel):
        size: int
        note: str = Field(default="", exclude=True)

    assert CODEC.roundtrip(Partial(size=1), Partial)[1] == Partial(size=1)
    with pytest.raises(SerializationError, match="come back") as caught:
        CODEC.encode(Partial(size=1, note="x"), Partial)
    assert caught.value.path == "$.note"


def test_a_tuple_annotated_as_a_list_is_a_list_both_times() -> None:
    text, live = CODEC.roundtrip((1, 2), list[int])
    assert exact(live) == exact(CODEC.decode(text, list[int])) == "[1, 2]"


@pytest.mark.parametrize(
    ("value", "annotation", "path"),
    [
        ("2026-01-01", date | datetime | str, "$"),
        ({"x": date(2026, 1, 1)}, dict[str, str | date], "$.x"),
        (Right(size=1), Left | Right, "$"),
        ({"a": [datetime(2026, 1, 1, tzinfo=UTC)]}, dict[str, Any], "$.a[0]"),
        ({"a": {1, 2}}, dict, "$.a"),
        ({1: 2}, dict, "$"),
        ([Colour.RED], list, "$[0]"),
        ([Express(id=UUID(int=1), until=datetime(2026, 1, 1, tzinfo=UTC))], list[Order], "$[0]"),
    ],
)
def test_a_value_that_would_come_back_as_something_else_is_refused(value: Any, annotation: Any, path: str) -> None:
    with pytest.raises(SerializationError, match="would come back as") as caught:
        CODEC.encode(value, annotation)
    assert caught.value.path == path


def test_a_model_changed_behind_pydantics_back_is_refused_before_it_is_stored() -> None:
    order = Order(id=UUID(int=1))
    order.id = "not a uuid"  # type: ignore[assignment]
    with pytest.raises(SerializationError) as caught:
        CODEC.encode(order, Order)
    assert caught.value.path == "$.id"


def test_what_pydantic_can_not_write_is_refused_with_its_path() -> None:
    with pytest.raises(SerializationError, match="can not be written") as caught:
        CODEC.encode({"a": [1, threading.Lock()]}, dict[str, Any])
    assert caught.value.path == "$.a[1]"


def test_a_set_is_written_in_one_order_so_that_the_digest_is_the_same_in_every_process() -> None:
    class Nested(BaseModel):
        names: set[str]
        groups: list[frozenset[int]]

    first = Nested(names={"b", "a", "c"}, groups=[frozenset([3, 1, 2**40])])
    assert CODEC.encode(first, Nested) == '{"names":["a","b","c"],"groups":[[1,1099511627776,3]]}'
    assert CODEC.encode({8, 0, 16}, set[int]) == CODEC.encode({16, 8, 0}, set[int])


def test_fields_go_by_their_names_and_not_by_their_aliases() -> None:
    item = Item(itemName="x")
    text, live = CODEC.roundtrip(item, Item)
    assert json.loads(text) == {"name": "x", "price": "0"}
    assert live == item


def test_an_error_in_the_users_own_serializer_or_validator_is_a_typed_error() -> None:
    class Broken(BaseModel):
        @model_serializer
        def write(self) -> dict[str, Any]:
            raise ZeroDivisionError("mine")

    with pytest.raises(SerializationError, match="mine") as caught:
        CODEC.encode(Broken(), Broken)
    assert caught.value.__cause__ is not None


def test_private_state_that_json_does_not_carry_is_not_there_live_either() -> None:
    class Stateful(BaseModel):
        size: int
        _cache: int = PrivateAttr(default=0)

    value = Stateful(size=1)
    value._cache = 9
    text, live = CODEC.roundtrip(value, Stateful)
    assert (live._cache, CODEC.decode(text, Stateful)._cache) == (0, 0)


@pytest.mark.parametrize("annotation", [Iterator[int], threading.Thread, list[threading.Thread], "no such type"])
def test_an_annotation_that_can_not_be_stored_is_a_registration_error(annotation: Any) -> None:
    with pytest.raises(RegistrationError):
        CODEC.encode(1, annotation)


def test_metadata_that_can_not_be_hashed_is_no_obstacle() -> None:
    annotation = Annotated[int, Field(ge=0), {"unit": ["cents"]}]
    assert CODEC.roundtrip(3, annotation) == ("3", 3)
    with pytest.raises(SerializationError):
        CODEC.encode(-1, annotation)


# --------------------------------------------------------------------------------------------------- digests and envelopes


def test_a_digest_is_sixteen_digits_that_never_change() -> None:
    assert digest("[[1],{}]") == "c9b221bf1e91333a"
    assert digest("[[1],{}]") != digest("[[2],{}]")


@fuzz()
@given(plain_values)
def test_an_envelope_gives_its_value_back_also_through_jsonb(value: Any) -> None:
    text = value_envelope(CODEC.encode(value))
    for stored in (text, as_jsonb_returns_it(text), f'\n {{ "v" :\t{CODEC.encode(value)} }} '):
        assert read_envelope(stored) == (True, value)
        assert open_envelope(CODEC, stored) == (True, value)


def test_an_envelope_is_opened_by_annotation() -> None:
    order = Order(id=UUID(int=7), notes={1: "x"})
    text = as_jsonb_returns_it(value_envelope(CODEC.encode(order, Order)))
    assert open_envelope(CODEC, text, Order) == (True, order)
    with pytest.raises(SerializationError):
        open_envelope(CODEC, text, list[int])


@pytest.mark.parametrize("value", [None, 0, "", False, [], {}])
def test_an_empty_result_is_a_result(value: Any) -> None:
    assert read_envelope(value_envelope(CODEC.encode(value))) == (True, value)


@pytest.mark.parametrize(
    "text", ["", "1", "[]", "{}", '{"v":}', '{"x":1}', '{"v":1', '{"v":1,"e":2}', '{"e":1}', '{"e":{}}', '{"v":1}x']
)
def test_what_is_no_envelope_is_a_typed_error(text: str) -> None:
    with pytest.raises(SerializationError):
        read_envelope(text)
    with pytest.raises(SerializationError):
        open_envelope(CODEC, text)
