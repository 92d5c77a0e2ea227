"""How parameters travel: what is written by the type that a statement has there is what the driver writes, byte for byte."""

from __future__ import annotations

import enum
import uuid
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.pq import Format

from durable_postgres.adapting import REFUSED, At, Span, encoder, teach


class Context:
    """In the place of a connection."""

    connection = None

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)
        teach(self)


the_drivers = Context()


class Colour(enum.StrEnum):
    RED = "#f00"


def by_the_driver(oid: int, value: Any) -> bytes:
    transformer = Transformer(the_drivers)
    transformer.set_dumper_types([oid], Format.BINARY)
    (data,) = transformer.dump_sequence([value], [])
    assert data is not None
    return bytes(data)


texts = st.text(alphabet=st.characters(exclude_categories=("Cs",)))
instants = st.integers(-(2**62), 2**63 - 1).map(At)
spans = st.integers(0, 2**40).map(Span)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "bytea": st.binary(),
    "int2": st.integers(-(2**15), 2**15 - 1),
    "int4": st.integers(-(2**31), 2**31 - 1),
    "int8": st.integers(-(2**63), 2**63 - 1),
    "name": texts,
    "text": texts | st.just(Colour.RED) | st.just("x" * 300),
    "timestamptz": instants,
    "interval": spans,
    "uuid": st.uuids(),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_parameter_is_written_as_the_driver_writes_it(kind: str, data: st.DataObject) -> None:
    oid = psycopg.adapters.types[kind].oid
    write = encoder(oid)
    assert write is not None
    value = data.draw(KINDS[kind])
    assert write(value) == by_the_driver(oid, value)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_list_is_written_as_the_driver_writes_it(kind: str, data: st.DataObject) -> None:
    oid = psycopg.adapters.types[kind].array_oid
    write = encoder(oid)
    assert write is not None
    value = data.draw(st.lists(KINDS[kind]) | st.lists(st.none() | KINDS[kind]))
    written = write(value)
    if any(item is not None for item in value):
        assert written == by_the_driver(oid, value)
    else:  # of such a list the driver does not say of what it is
        of = psycopg.adapters.types[kind].oid.to_bytes(4)
        empty = bytes(8) + of
        full = b"\0\0\0\1\0\0\0\1" + of + len(value).to_bytes(4) + b"\0\0\0\1" + b"\xff" * 4 * len(value)
        assert written == (full if value else empty)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bool", "yes"), ("bytea", 5), ("int2", 2**15), ("int4", "5"), ("int8", 2**63), ("jsonb", {}), ("text", 1), ("text", "\ud800"),
        ("uuid", str(uuid.UUID(int=1))), ("interval", "1 s"), ("timestamptz", "now"),
    ],
)  # fmt: skip
def test_what_is_not_of_the_type_is_refused_alone_and_in_a_list(kind: str, value: Any) -> None:
    """The driver then says what it is, or what is wrong with it."""
    info = psycopg.adapters.types[kind]
    for oid, one in ((info.oid, value), (info.array_oid, [value]), (info.array_oid, [None, value]), (info.oid, None)):
        write = encoder(oid)
        assert write is not None
        with pytest.raises(REFUSED):
            write(one)


@pytest.mark.parametrize("items", [[1, "a"], ["a", 1], [["a"], ["b"]]])
def test_a_list_of_several_kinds_is_refused(items: list[Any]) -> None:
    for kind in ("text", "int4", "timestamptz"):
        write = encoder(psycopg.adapters.types[kind].array_oid)
        assert write is not None
        with pytest.raises(REFUSED):
            write(items)
