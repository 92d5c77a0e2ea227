"""What an operation of this backend is: a generator that asks for statements and gets their rows. It does no I/O and holds no connection.

The modules named after the operations (`enqueue.py`, `claim.py`, …) are written in these words. `connection.py` drives them on a
pooled connection, `callers.py` on a caller's own connection, blocking or not: one text for all of them. Nothing here knows a table.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from durable.model import Instant
from durable.settings import Settings

T = TypeVar("T")
Row: TypeAlias = tuple[Any, ...]


class Ask(NamedTuple):
    """A statement with default table names and `$1` parameters."""

    text: str
    parameters: Sequence[Any] = ()


class Last(tuple[Ask, ...]):
    """Statements after whose answers the operation asks for nothing more: the commit may go out with them, in one round trip."""

    __slots__ = ()


class Answer(NamedTuple):
    """What the server said: rows, and how many were touched."""

    rows: list[Row]
    touched: int


Operation: TypeAlias = Generator[Sequence[Ask], list[Answer], T]
"""Yields statements that go out together; is sent one answer for each; returns what the operation is for."""


class Again(Exception):
    """Another transaction was quicker by a moment: the operation is to be done once more, from its beginning, and then sees it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Work:
    """What an operation may need from who drives it: the store's clock, the settings, and a place for news."""

    __slots__ = ("lock_class", "now", "sequence", "settings", "told", "topics")

    def __init__(self, settings: Settings, *, lock_class: int, sequence: str) -> None:
        self.settings = settings
        self.lock_class = lock_class
        """The first half of our advisory locks: another one for each schema and table name."""
        self.sequence = sequence
        """The name of the sequence that gives `submitted`."""
        self.now: Instant = 0
        """The start of this transaction by the server's clock: what `now()` is in its statements."""
        self.topics: set[str] = set()
        self.told: set[str] = set()
        """Those of them that other processes were told already, behind the commit."""

    def announce(self, topic: str) -> None:
        """News that is told once the transaction has committed: at once, if it is announced before the last statement."""
        self.topics.add(topic)


def rows(text: str, *parameters: Any) -> Operation[list[Row]]:
    """One statement; its rows."""
    (answer,) = yield (Ask(text, parameters),)
    return answer.rows


def first(text: str, *parameters: Any) -> Operation[Row | None]:
    """One statement; its first row."""
    (answer,) = yield (Ask(text, parameters),)
    return answer.rows[0] if answer.rows else None


def count(text: str, *parameters: Any) -> Operation[int]:
    """One statement; how many rows it touched."""
    (answer,) = yield (Ask(text, parameters),)
    return answer.touched


def together(*asks: Ask) -> Operation[list[list[Row]]]:
    """Several statements in one round trip; the rows of each."""
    answers = yield asks
    return [answer.rows for answer in answers]


__all__ = ["Again", "Answer", "Ask", "Last", "Operation", "Row", "Work", "count", "first", "rows", "together"]
