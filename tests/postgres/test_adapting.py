"""How parameters travel: what is written in one go is what the driver writes item by item."""

from __future__ import annotations

import enum
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.types.array import ListBinaryDumper

from durable_postgres.adapting import At, Span, teach


class Context:
    """In the place of a connection."""

    connection = None

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)
        teach(self)


ours, the_drivers = Context(), Context()
the_drivers.adapters.register_dumper(list, ListBinaryDumper)


class Colour(enum.StrEnum):
    RED = "#f00"


def sent(context: Any, *lists: list[Any]) -> list[tuple[Any, ...]]:
    """The bytes and the types of these parameters, as one statement sends them."""
    transformer = Transformer(context)
    parameters = transformer.dump_sequence(lists, [PyFormat.BINARY] * len(lists))
    return [
        (None if value is None else bytes(value), oid, form)
        for value, oid, form in zip(parameters, transformer.types or (), transformer.formats or (), strict=True)
    ]


instants = st.integers(-(2**62), 2**63 - 1).map(At)
kinds = (
    st.text(alphabet=st.characters(exclude_categories=("Cs",))),
    instants,
    st.integers(-(2**15), 2**15 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.binary(),
    st.integers(0, 2**40).map(Span),
)
lists = st.one_of(*(st.lists(kind) for kind in kinds), *(st.lists(st.one_of(st.none(), kind)) for kind in kinds))


@given(st.lists(lists, min_size=1, max_size=5))
def test_lists_are_sent_as_the_driver_sends_them(parameters: list[list[Any]]) -> None:
    assert sent(ours, *parameters) == sent(the_drivers, *parameters)


@pytest.mark.parametrize(
    "parameter", [[Colour.RED], ["a", Colour.RED], [["a", "b"], ["c", None]], [[1, 2]], [[At(1)], [At(2)]], [], [None]]
)
def test_what_only_looks_like_texts_or_numbers_is_left_to_the_driver(parameter: list[Any]) -> None:
    assert sent(ours, ["a"], [1], [At(1)], parameter) == sent(the_drivers, ["a"], [1], [At(1)], parameter)


@pytest.mark.parametrize("parameter", [["a", 1], [1, "a"], [At(1), "a"]])
def test_a_list_of_several_kinds_is_refused(parameter: list[Any]) -> None:
    with pytest.raises(psycopg.DataError):
        sent(ours, parameter)
