"""From default table names to the configured ones, quoted and with their schema.

Statements are constants written with the default names. `Naming` puts `"schema"."table"` in the place of each table or view, and
follows with the names of indexes, which have no schema where they are made. It composes with `psycopg.sql`; what it puts in are
identifiers only. `connection.py` asks it once for each statement.
"""

from __future__ import annotations

import functools
import re
import zlib
from typing import Final

from psycopg import sql

from durable.errors import ConfigurationError
from durable.model import Names
from durable.storekit import TABLES, Renames

DEFAULT_SCHEMA: Final = "public"
SEQUENCE: Final = "durable_run_submitted_seq"
VIEWS: Final = ("durable_v_runs", "durable_v_steps", "durable_v_functions", "durable_v_queues")
_WORD: Final = re.compile(r"\bdurable_[a-z0-9_]+\b", re.ASCII)
_SEVERAL: Final = frozenset({*TABLES, *VIEWS, SEQUENCE})
LONGEST: Final = 63
"""Bytes of an identifier; the server cuts off what is longer, and two indexes may then meet in one name."""


class Naming:
    """The configured names of one installation."""

    def __init__(self, names: Names) -> None:
        self.renames = Renames(names)
        self.schema = DEFAULT_SCHEMA if names.schema is None else names.schema
        if not self.schema or "\0" in self.schema or len(self.schema.encode()) > LONGEST:
            raise ConfigurationError(
                f"{self.schema!r} can not be the name of a schema", hint=f"1 to {LONGEST} bytes, without NUL"
            )
        self._known: dict[str, str] = {}

    def __call__(self, statement: str) -> str:
        """The statement with the configured names; remembered, since statements are constants."""
        known = self._known.get(statement)
        if known is None:
            known = self._known[statement] = _WORD.sub(self._replace, statement)
        return known

    def plain(self, name: str) -> str:
        """The configured name of a table, view or index, without schema or quotes."""
        return self.renames(name)

    def qualified(self, name: str) -> str:
        """The configured name of a table, view, index or sequence, quoted and with its schema."""
        return sql.Identifier(self.schema, self.renames(name)).as_string()

    @functools.cached_property
    def sequence(self) -> str:
        """The sequence that numbers runs as they are submitted, quoted and with its schema."""
        return self.qualified(SEQUENCE)

    @functools.cached_property
    def key(self) -> int:
        """A number for this installation, for advisory locks: another one for each schema and table name."""
        return zlib.crc32(self.qualified("durable_run").encode()) - (1 << 31)

    @functools.cached_property
    def channel(self) -> str:
        """The channel of its notifications."""
        return f"durable_{self.key + (1 << 31):08x}"

    def _replace(self, match: re.Match[str]) -> str:
        word = match.group()
        if word in _SEVERAL:
            return self.qualified(word)
        return sql.Identifier(self.renames(word)).as_string()


__all__ = ["DEFAULT_SCHEMA", "VIEWS", "Naming"]
