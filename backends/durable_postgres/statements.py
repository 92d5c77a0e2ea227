"""What is known of the statements that go out on pooled connections: of each in a process, and what of them each connection has prepared.

`exchange.py` asks and tells both; `lending.py` says when somebody else had the connection. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from psycopg import pq

from . import faults
from .adapting import Encode, encoder

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

MOST: Final = 100
"""How many statements stay prepared on a connection: as many as the driver keeps."""
THERE: Final = b"SELECT name FROM pg_catalog.pg_prepared_statements WHERE name LIKE 'durable\\_%'"


class Statement:
    """What a process knows of a statement."""

    __slots__ = ("encoders", "formats", "known", "text", "types")

    def __init__(self, text: bytes, *, plain: bool = False) -> None:
        self.text = text
        self.known = plain
        """The server has said what its parameters are."""
        self.types: Sequence[int] = ()
        self.formats: list[pq.Format] = []  # psycopg 3.2 takes no tuple
        self.encoders: Sequence[Encode] | None = () if plain else None
        """None: they are left to the driver."""

    def learn(self, described: PGresult) -> None:
        """This is what the server says."""
        self.types = [described.param_type(place) for place in range(described.nparams)]
        self.formats = [pq.Format.BINARY] * len(self.types)
        found = [one for one in map(encoder, self.types) if one is not None]
        self.encoders = found if len(found) == len(self.types) else None
        self.known = True

    def forget(self) -> None:
        """It does not hold any more."""
        if self.types:
            self.known, self.encoders = False, None


class Prepared:
    """What is prepared on a connection, as far as we know."""

    def __init__(self) -> None:
        self.names: dict[Statement, bytes] = {}
        """The one that was used last is the last."""
        self.seen: set[Statement] = set()
        """These were sent once."""
        self.closing: list[bytes] = []
        self.certain = True
        """False: somebody else may have let go of it since. It is looked at first."""
        self._number = 0

    def new_name(self) -> bytes:
        """A name that this connection never had."""
        self._number += 1
        return b"durable_%d" % self._number

    def add(self, statement: Statement, name: bytes, _: PGresult) -> None:
        """The server has prepared it."""
        self._let_go(statement)  # of the one before, if it went out several times in the round trip
        self.names[statement] = name
        if len(self.names) > MOST:
            self._let_go(next(iter(self.names)))

    def closed(self, name: bytes, _: PGresult) -> None:
        """The server has let go of it."""
        self.closing.remove(name)

    def see(self, found: PGresult) -> None:
        """This is what is there."""
        there = {found.get_value(place, 0) for place in range(found.ntuples)}
        self.names = {statement: name for statement, name in self.names.items() if name in there}
        self.closing = [name for name in self.closing if name in there]
        self.certain = True

    def doubt(self, statement: Statement | None, state: str | None) -> None:
        """It failed with this error, which may be one of what is known or prepared."""
        if state == faults.NOT_THERE:
            self.certain = False
        elif state in faults.STALE and statement is not None:
            statement.forget()
            self._let_go(statement)

    def _let_go(self, statement: Statement) -> None:
        name = self.names.pop(statement, None)
        if name is not None:
            self.closing.append(name)


__all__ = ["THERE", "Prepared", "Statement"]
