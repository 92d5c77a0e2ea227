"""The public names are pinned: who adds or takes one away changes exports.txt in the same commit, and says so in CHANGELOG.md.

After a change that is meant: python tests/house/test_exports.py
"""

from __future__ import annotations

import inspect
from pathlib import Path

import durable

PINNED = Path(__file__).with_name("exports.txt")


def test_the_public_names_are_the_pinned_ones() -> None:
    """`durable.__all__` equals exports.txt, line by line."""
    pinned = PINNED.read_text(encoding="utf-8").split()
    assert sorted(durable.__all__) == pinned, "if this is meant: python tests/house/test_exports.py"


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    """Each exported class or function exists and has a docstring."""
    missing = [name for name in durable.__all__ if not hasattr(durable, name)]
    assert missing == []
    silent = [
        name
        for name in durable.__all__
        if (inspect.isclass(thing := getattr(durable, name)) or inspect.isroutine(thing)) and not inspect.getdoc(thing)
    ]
    assert silent == []


def test_no_public_name_is_there_twice() -> None:
    """A name written twice is a merge that nobody read."""
    assert len(set(durable.__all__)) == len(durable.__all__)


if __name__ == "__main__":
    PINNED.write_text("\n".join(sorted(durable.__all__)) + "\n", encoding="utf-8")
