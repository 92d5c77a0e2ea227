"""How values travel: instants and durations as integer microseconds, jsonb as its text, in binary wherever the server offers it.

`connection.py` registers this on pooled connections, `callers.py` on a cursor of its own, so that a caller's connection keeps its own
ways. Operations wrap what they send: `at` an instant, `span` a duration; plain integers stay numbers. Nothing here does I/O.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

from psycopg import adapt, adapters, pq
from psycopg.abc import AdaptContext, Buffer, DumperKey, PyFormat
from psycopg.types.array import ListBinaryDumper

from durable.model import Instant
from durable.settings import Micros

TIMESTAMPTZ: Final = 1184
INTERVAL: Final = 1186
JSON: Final = 114
JSONB: Final = 3802
TEXT: Final = 25
SMALL: Final = 21
EPOCH: Final = 946_684_800_000_000
"""2000-01-01 in microseconds of ours: the server counts from there."""
DAY: Final = 86_400_000_000
_TOKENS: Final = re.compile(r'("(?:[^"\\]|\\.)*")|([,:]) ')
_WIDE: Final = struct.Struct("!q")
_SPAN: Final = struct.Struct("!qii")
_HEAD: Final = struct.Struct("!IIIII")
_LENGTH: Final = struct.Struct("!I")
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


class _ListDumper(ListBinaryDumper):
    """As the driver's own, byte for byte. But a list of texts, of instants or of small integers is what batches consist of: it is written
    in one go, not item by item. Whatever else a list may hold is left to the driver, as is the connection of a caller with another encoding
    than UTF-8."""

    def get_key(self, obj: list[Any], format: PyFormat) -> DumperKey:
        """What lists of its kind have in common."""
        return (self.cls, str) if obj and type(obj[0]) is str and not self.oid else super().get_key(obj, format)

    def dump(self, obj: list[Any]) -> Buffer | None:
        """The list as the server reads it."""
        packed = _PACKED.get(type(self.sub_dumper))
        if packed is not None and obj and (packed is not _texts or self._in_utf8()):
            try:
                return packed(obj)
            except (AttributeError, TypeError, struct.error):
                pass  # there is a NULL, or not what it is taken for: the driver says so
        return super().dump(obj)

    def _in_utf8(self) -> bool:
        return self.connection is None or self.connection.info.encoding == "utf-8"


def _texts(items: list[str]) -> bytes:
    encoded = [item.encode() for item in items]
    data = [_HEAD.pack(1, 0, TEXT, len(items), 1)] * (2 * len(items) + 1)
    data[1::2] = map(_LENGTH.pack, map(len, encoded))
    data[2::2] = encoded
    return b"".join(data)


def _instants(items: list[int]) -> bytes:
    if min(items) < _EARLIEST or max(items) > _LATEST:
        items = [max(min(item, _LATEST), _EARLIEST) for item in items]
    values = [8] * (2 * len(items))
    values[1::2] = [item - EPOCH for item in items]
    return _HEAD.pack(1, 0, TIMESTAMPTZ, len(items), 1) + struct.pack("!" + "iq" * len(items), *values)


def _small(items: list[int]) -> bytes:
    values = [2] * (2 * len(items))
    values[1::2] = items
    return _HEAD.pack(1, 0, SMALL, len(items), 1) + struct.pack("!" + "ih" * len(items), *values)


_PACKED: Final[dict[type[Any], Callable[[list[Any]], bytes]]] = {
    adapters.get_dumper_by_oid(TEXT, pq.Format.BINARY): _texts,
    adapters.get_dumper_by_oid(SMALL, pq.Format.BINARY): _small,
    _AtDumper: _instants,
}


class Adapts(Protocol):
    """A connection or a cursor."""

    @property
    def adapters(self) -> adapt.AdaptersMap:
        """Its own map."""
        ...


def teach(target: Adapts | AdaptContext) -> None:
    """Let a connection or a cursor speak as described above."""
    own: Any = target.adapters
    own.register_dumper(At, _AtDumper)
    own.register_dumper(Span, _SpanDumper)
    own.register_dumper(list, _ListDumper)  # what is in a list is asked for in binary, too
    own.register_loader(TIMESTAMPTZ, _InstantLoader)
    own.register_loader(INTERVAL, _SpanLoader)
    own.register_loader(JSONB, _JsonbLoader)
    own.register_loader(JSON, _JsonLoader)


__all__ = ["At", "Span", "at", "compact", "span", "teach"]
