"""The error tree: drawn as it is, each with a code of its own."""

from __future__ import annotations

import inspect
import re

from durable import errors
from durable.errors import DurableError


def _tree(cls: type[BaseException]) -> list[type[BaseException]]:
    return [
        cls,
        *(found for child in cls.__subclasses__() if child.__module__ == errors.__name__ for found in _tree(child)),
    ]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__ or ""))
    assert drawn == {cls.__name__ for cls in _tree(DurableError) if not cls.__name__.startswith("_")}


def test_each_error_has_a_code_of_its_own_and_says_what_it_is() -> None:
    public = [cls for cls in _tree(DurableError) if not cls.__name__.startswith("_")]
    codes = [cls.__dict__.get("code") for cls in public]
    assert None not in codes
    assert len(set(codes)) == len(codes)
    assert all(inspect.getdoc(cls) and cls.__dict__.get("__doc__") for cls in public)


def test_the_text_of_an_error_has_its_code_and_its_hint() -> None:
    shown = str(errors.Conflict("the key is taken", hint="choose another"))
    assert shown == "[conflict] the key is taken\n  hint: choose another"
    assert str(errors.Conflict("the key is taken")) == "[conflict] the key is taken"


def test_what_steers_a_body_is_no_error_of_the_tree() -> None:
    assert all(issubclass(cls, Exception) for cls in _tree(DurableError))
