"""How values travel: instants and durations as integer microseconds, jsonb as its text, in binary wherever the server offers it.

`connection.py` registers this on pooled connections, `callers.py` on a cursor of its own, so that a caller's connection keeps its own
ways. Operations wrap what they send: `at` an instant, `span` a duration; plain integers stay numbers. Nothing here does I/O.
"""

from __future__ import annotations

import re
import struct
from typing import Any, Final, Protocol

from psycopg import adapt, pq
from psycopg.abc import AdaptContext, Buffer
from psycopg.types.array import ListBinaryDumper

from durable.model import Instant
from durable.settings import Micros

TIMESTAMPTZ: Final = 1184
INTERVAL: Final = 1186
JSON: Final = 114
JSONB: Final = 3802
EPOCH: Final = 946_684_800_000_000
"""2000-01-01 in microseconds of ours: the server counts from there."""
DAY: Final = 86_400_000_000
_TOKENS: Final = re.compile(r'("(?:[^"\\]|\\.)*")|([,:]) ')
_WIDE: Final = struct.Struct("!q")
_SPAN: Final = struct.Struct("!qii")
_EARLIEST: Final = -211_813_488_000_000_000 + EPOCH
_LATEST: Final = 9_223_371_331_200_000_000 - 1
"""What timestamptz can hold; what lies beyond is stored as its end, which no clock reaches."""


class At(int):
    """An instant on its way to the server."""


class Span(int):
    """A duration on its way to the server."""


def at(instant: Instant | None) -> At | None:
    """An instant as a parameter."""
    return None if instant is None else At(instant)


def span(micros: Micros | None) -> Span | None:
    """A duration as a parameter."""
    return None if micros is None else Span(micros)


def compact(text: str) -> str:
    """The text of a jsonb value as the codec writes it: the server puts a space after each comma and colon. So a value that was stored
    reads as the one that was given, and two readings compare equal."""
    if ", " not in text and ": " not in text:
        return text
    if "\\" in text:
        return _TOKENS.sub(r"\1\2", text)
    parts = text.split('"')
    parts[::2] = [outside.replace(", ", ",").replace(": ", ":") for outside in parts[::2]]
    return '"'.join(parts)


class _AtDumper(adapt.Dumper):
    format = pq.Format.BINARY
    oid = TIMESTAMPTZ

    def dump(self, obj: int) -> bytes:
        return _WIDE.pack(max(min(obj, _LATEST), _EARLIEST) - EPOCH)


class _SpanDumper(adapt.Dumper):
    format = pq.Format.BINARY
    oid = INTERVAL

    def dump(self, obj: int) -> bytes:
        return _SPAN.pack(obj, 0, 0)


class _InstantLoader(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> int:
        return int(_WIDE.unpack(data)[0]) + EPOCH


class _SpanLoader(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> int:
        micros, days, months = _SPAN.unpack(data)
        return int(micros + (days + 30 * months) * DAY)


class _JsonbLoader(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> str:
        return compact(bytes(data)[1:].decode())  # the first byte is the version of the format


class _JsonLoader(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> str:
        return compact(bytes(data).decode())


class Adapts(Protocol):
    """A connection or a cursor."""

    @property
    def adapters(self) -> adapt.AdaptersMap:
        """Its own map."""
        ...


def teach(target: Adapts | AdaptContext) -> None:
    """Let a connection or a cursor speak as described above."""
    adapters: Any = target.adapters
    adapters.register_dumper(At, _AtDumper)
    adapters.register_dumper(Span, _SpanDumper)
    adapters.register_dumper(list, ListBinaryDumper)  # what is in a list is asked for in binary, too
    adapters.register_loader(TIMESTAMPTZ, _InstantLoader)
    adapters.register_loader(INTERVAL, _SpanLoader)
    adapters.register_loader(JSONB, _JsonbLoader)
    adapters.register_loader(JSON, _JsonLoader)


__all__ = ["At", "Span", "at", "compact", "span", "teach"]
