"""How values travel: instants and durations as integer microseconds, jsonb as its text, in binary wherever the server offers it.

`connection.py` registers this on pooled connections, `callers.py` on a cursor of its own, so that a caller's connection keeps its own
ways. Operations wrap what they send: `at` an instant, `span` a duration; plain integers stay numbers. Where the types of a statement's
parameters are known, `exchange.py` writes them by these, lists in one go: batches consist of them. Nothing here does I/O.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias
from uuid import UUID

from psycopg import adapt, adapters, pq
from psycopg.abc import AdaptContext, Buffer
from psycopg.types.array import ListBinaryDumper

from durable.model import Instant
from durable.settings import Micros

TIMESTAMPTZ: Final = 1184
INTERVAL: Final = 1186
JSON: Final = 114
JSONB: Final = 3802
VERSION: Final = b"\1"
"""Of the form of jsonb on the wire: it begins with it."""
EPOCH: Final = 946_684_800_000_000
"""2000-01-01 in microseconds of ours: the server counts from there."""
DAY: Final = 86_400_000_000
_TOKENS: Final = re.compile(r'("(?:[^"\\]|\\.)*")|([,:]) ')
_WIDE: Final = struct.Struct("!q")
_SPAN: Final = struct.Struct("!qii")
_HEAD: Final = struct.Struct("!III")
_SIZE: Final = struct.Struct("!II")
_LENGTH: Final = struct.Struct("!I")
_NULL: Final = b"\xff\xff\xff\xff"
_EARLIEST: Final = -211_813_488_000_000_000 + EPOCH
_LATEST: Final = 9_223_371_331_200_000_000 - 1
"""What timestamptz can hold; what lies beyond is stored as its end, which no clock reaches."""


Encode: TypeAlias = Callable[[Any], bytes]
REFUSED: Final = (AttributeError, LookupError, TypeError, ValueError, struct.error)
"""What an encoder raises for a value that it can not write."""


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
        return _instant(obj)


class _SpanDumper(adapt.Dumper):
    format = pq.Format.BINARY
    oid = INTERVAL

    def dump(self, obj: int) -> bytes:
        return _duration(obj)


class _InstantLoader(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> int:
        return int(_WIDE.unpack(data)[0]) + EPOCH


class _SpanLoader(adapt.Loader):
    format = pq.Format.BINARY

    def load(self, data: Buffer) -> int:
        micros, days, months = _SPAN.unpack(data)
        return int(micros + (days + 30 * months) * DAY)


class _JsonLoader(adapt.Loader):
    format = pq.Format.BINARY

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._encoding = "utf-8" if self.connection is None else self.connection.info.encoding
        """A caller's connection may have another one, and a lent one may have been given one."""

    def load(self, data: Buffer) -> str:
        return compact(bytes(data).decode(self._encoding))


class _JsonbLoader(_JsonLoader):
    def load(self, data: Buffer) -> str:
        return compact(bytes(data)[len(VERSION) :].decode(self._encoding))


# -- by the type that a statement has there ----------------------------------------------------------------------------------


def encoder(oid: int) -> Encode | None:
    """What writes a parameter of this type as the server reads it; None: the driver has to. It refuses what it can not write, as NULL."""
    return _ENCODERS.get(oid)


def _instant(instant: int) -> bytes:
    return _WIDE.pack(max(min(instant, _LATEST), _EARLIEST) - EPOCH)


def _duration(micros: int) -> bytes:
    return _SPAN.pack(micros, 0, 0)


def _binary(value: Buffer) -> bytes:
    return bytes(memoryview(value))


def _jsonb(text: str) -> bytes:
    return VERSION + text.encode()


def _uuid(value: UUID) -> bytes:
    return value.bytes


class _Lengths(dict[int, bytes]):
    """What stands before an item of so many bytes: its length, and what all of the type begin with. Those of short ones are looked up,
    since batches consist of them."""

    def __init__(self, start: bytes = b"") -> None:
        self._start = start
        super().__init__((size, self[size]) for size in range(256))

    def __missing__(self, size: int) -> bytes:
        return _LENGTH.pack(size + len(self._start)) + self._start


def _list_of(oid: int, encode: Encode, lengths: _Lengths) -> Encode:
    empty = _HEAD.pack(0, 0, oid)
    full, with_nulls = (_HEAD.pack(1, nulls, oid) for nulls in (0, 1))
    before = lengths.__getitem__

    def write(items: list[Any]) -> bytes:
        count = len(items)
        if not count:
            return empty
        if items[0] is None:
            return some(items)
        if items.count(items[0]) == count:  # in many a batch they are
            data = encode(items[0])
            return full + _SIZE.pack(count, 1) + (before(len(data)) + data) * count
        try:
            encoded = [*map(encode, items)]
        except REFUSED:
            return some(items)
        parts = [full + _SIZE.pack(count, 1)] * (2 * count + 1)
        parts[1::2] = map(before, map(len, encoded))
        parts[2::2] = encoded
        return b"".join(parts)

    def some(items: list[Any]) -> bytes:
        head = with_nulls + _SIZE.pack(len(items), 1)
        if items.count(None) == len(items):
            return head + _NULL * len(items)
        encoded = [item if item is None else encode(item) for item in items]
        return head + b"".join(_NULL if item is None else before(len(item)) + item for item in encoded)

    return write


def _numbers(oid: int, form: str, listed: Encode, shifted: Callable[[list[int]], list[int]] = list) -> Encode:
    """The same in one go, where all have one width and none is NULL."""
    head, width = _HEAD.pack(1, 0, oid), struct.calcsize(f"!{form}")

    def write(items: list[Any]) -> bytes:
        count = len(items)
        if count < 2 or items[0] is None:
            return listed(items)
        values = [width] * (2 * count)
        try:
            values[1::2] = shifted(items)
            return head + _SIZE.pack(count, 1) + struct.pack("!" + f"i{form}" * count, *values)
        except REFUSED:
            return listed(items)

    return write


def _since_2000(items: list[int]) -> list[int]:
    if min(items) < _EARLIEST or max(items) > _LATEST:
        raise ValueError("beyond what timestamptz holds")
    return [item - EPOCH for item in items]


def _encoders() -> dict[int, Encode]:
    """For each type, and for lists of it."""
    types = adapters.types
    one: dict[str, Encode] = {
        "bool": {True: b"\1", False: b"\0"}.__getitem__,
        "bytea": _binary,
        "int2": struct.Struct("!h").pack,
        "int4": struct.Struct("!i").pack,
        "int8": _WIDE.pack,
        "interval": _duration,
        "jsonb": _jsonb,
        "name": str.encode,
        "text": str.encode,
        "timestamptz": _instant,
        "uuid": _uuid,
    }
    found = {types[name].oid: encode for name, encode in one.items()}
    lengths = _Lengths()
    found |= {types[name].array_oid: _list_of(types[name].oid, encode, lengths) for name, encode in one.items()}
    found[types["jsonb"].array_oid] = _list_of(JSONB, str.encode, _Lengths(VERSION))
    for name, form in (("int2", "h"), ("int4", "i"), ("int8", "q")):
        found[types[name].array_oid] = _numbers(types[name].oid, form, found[types[name].array_oid])
    instants = types["timestamptz"].array_oid
    found[instants] = _numbers(TIMESTAMPTZ, "q", found[instants], _since_2000)
    return found


_ENCODERS: Final = _encoders()


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
    own.register_dumper(list, ListBinaryDumper)  # what is in a list is asked for in binary, too
    own.register_loader(TIMESTAMPTZ, _InstantLoader)
    own.register_loader(INTERVAL, _SpanLoader)
    own.register_loader(JSONB, _JsonbLoader)
    own.register_loader(JSON, _JsonLoader)


__all__ = ["REFUSED", "At", "Encode", "Span", "at", "compact", "encoder", "span", "teach"]
