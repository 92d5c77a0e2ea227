"""The codec with its size limit, the digest of a call, and the envelope in which a journal record keeps a value or an error.

Called by the function, context, engine and client modules. An envelope has exactly one key, `v` or `e`, so that a store which
re-orders keys or changes white space (jsonb) can not hurt it.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from durable.errors import PayloadTooLarge, SerializationError

from . import plain
from .failures import ErrorData
from .typed import UNTYPED, shape_of

_ENVELOPE = re.compile(r'\s*\{\s*"([ve])"\s*:\s*')


class Codec:
    """Encodes values as JSON text of at most `max_payload` bytes, and decodes them by annotation (semantics 22, 70, 71)."""

    __slots__ = ("max_payload",)

    def __init__(self, max_payload: int) -> None:
        self.max_payload = max_payload

    def encode(self, value: Any, annotation: Any = UNTYPED) -> str:
        """The compact JSON text of a value. Raises SerializationError naming the path, or PayloadTooLarge; never stores half."""
        return self.within_limit(shape_of(annotation).write(value, limit=self.max_payload))

    def roundtrip(self, value: Any, annotation: Any = UNTYPED) -> tuple[str, Any]:
        """The text to store, and the value as it will be read from it: what a step returns live (semantics 22)."""
        text, back = shape_of(annotation).roundtrip(value, limit=self.max_payload)
        return self.within_limit(text), back

    def decode(self, text: str, annotation: Any = UNTYPED) -> Any:
        """The value of a stored text. Raises SerializationError for what is not JSON or not of this annotation."""
        return shape_of(annotation).read(text)

    def within_limit(self, text: str) -> str:
        """The text itself. Raises PayloadTooLarge if it is longer than `max_payload` bytes in UTF-8."""
        size = len(text)
        if 4 * size > self.max_payload and not text.isascii():
            size = len(text.encode())
        if size > self.max_payload:
            raise PayloadTooLarge(f"{size:,} bytes are more than max_payload, {self.max_payload:,}")
        return text


def digest(text: str) -> str:
    """16 hexadecimal digits that stay the same for the same text, on every machine and in every release (semantics 25)."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def value_envelope(text: str) -> str:
    """The envelope of an encoded value. Raises EncryptionError for the mark of one that could not be opened: it is no value (72)."""
    plain.refuse_unreadable(text)
    return f'{{"v":{text}}}'


def error_envelope(data: ErrorData) -> str:
    """The envelope of an error. It never fails: whatever is in an error was made storable when it became data."""
    return f'{{"e":{data.to_json()}}}'


def open_envelope(codec: Codec, text: str, annotation: Any = UNTYPED) -> tuple[bool, Any]:
    """(True, the value by its annotation) or (False, ErrorData). Raises SerializationError for damaged text."""
    is_value, body = _split(text)
    return (True, codec.decode(body, annotation)) if is_value else (False, ErrorData.from_json(body))


def read_envelope(text: str) -> tuple[bool, Any]:
    """(True, the value as plain JSON) or (False, ErrorData): for those who show records without knowing their types."""
    is_value, body = _split(text)
    return (True, plain.read(body)) if is_value else (False, ErrorData.from_json(body))


def _split(text: str) -> tuple[bool, str]:
    found = _ENVELOPE.match(text)
    body = text.rstrip()
    if found is None or not body.endswith("}"):
        plain.refuse_unreadable(text)
        raise SerializationError("a record that is no envelope: it was not written by this project, or it is damaged")
    return found[1] == "v", body[found.end() : -1]
