"""Plain JSON values to text and back, in the one form that SQLite, PostgreSQL and MongoDB all return unchanged.

`typed.py` and `payload.py` call it. It knows nothing of annotations. What jsonb would change is written so that it can not:

- the keys of an object are written in the order in which jsonb returns them (shorter first, then by bytes), so that a body
  which iterates a result sees the same order live and replayed;
- `-0.0` is written as a number that underflows to it, and integral floats past 1e16 with all their digits and `.0`: jsonb
  would return 0.0 and an integer.

Refused with the place in the value: NUL and lone surrogates, NaN and infinities, keys that are not text, anything but dict,
list, tuple (read back as a list), str, int, float, bool and None, and more than 100 levels (a value inside itself).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sized
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any, cast

from pydantic_core import from_json

from durable.errors import EncryptionError, MissingKey, PayloadTooLarge, SerializationError

quote: Callable[[Any], str] = encode_basestring
"""The JSON text of a text. It takes anything, for a checker: the writers ask for the type themselves, once."""
MAX_DEPTH = 100
"""Levels of lists and objects. Far below what the parsers of the stores and of Python take, with room for the envelope."""
MAX_DIGITS = 131_072
"""Digits of an integer: what PostgreSQL's numeric (and so jsonb) can hold."""

SEALED = '"durable-encrypted:'
"""How the text of an encrypted payload begins (encryption.py)."""
UNREADABLE = '"durable-unreadable:'
"""How the text begins that stands in the place of one which can not be opened; the code of the error and its message follow."""

_MAX_BITS = int(MAX_DIGITS * math.log2(10))
_EASY_BITS = 2_000
"""Python refuses to convert integers past a settable limit (640 digits or more) to text; the decimal module does not."""
_EXACT_FLOAT = 1e16
_TEXT: frozenset[type] = frozenset({str})


class Refusal(Exception):
    """Why a value can not be written. Each level on the way out adds its part of the path."""

    def __init__(self, reason: str, hint: str = "", kind: type[SerializationError] = SerializationError) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.kind = kind
        self.parts: list[str | int] = []

    def at(self, root: str) -> SerializationError:
        """The public error, with the path from `root`."""
        return self.kind(self.reason, path=path_of(root, reversed(self.parts)), hint=self.hint or None)


def path_of(root: str, parts: Iterable[str | int]) -> str:
    """`$.items[3].name`; keys that are no identifiers are quoted, with everything unprintable escaped."""
    text = root
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part.isascii() and len(part) <= 200:
            text += f".{part}"
        else:
            text += f"[{part[:200]!a}]"
    return text


def write(value: object, root: str = "$", *, limit: int = 1 << 31) -> str:
    """The compact JSON text of a plain value. Raises SerializationError with the path, PayloadTooLarge past `limit`.

    The limit is only there to stop early (a small value can refer to one list a million times); `Codec` measures the result.
    """
    try:
        kind = type(value)
        text = quote(value) if kind is str else _WRITERS.get(kind, _refuse)(value, 0, [limit])
        # Bad text is rare: it is looked for in the result, which is fast, and only then in the value, for its path.
        if "\\u0000" in text or not text.isascii():
            _check_texts(value, text)
    except Refusal as refusal:
        raise refusal.at(root) from None
    except RecursionError:
        raise SerializationError("nested too deeply", path=root) from None
    except (KeyError, RuntimeError) as error:
        raise SerializationError(f"the value changed while it was written: {error}", path=root) from error
    if text.startswith((SEALED, UNREADABLE)):
        raise SerializationError(f"text that begins with {text[1:20]}, which marks encrypted payloads", path=root)
    return text


def _object(value: dict[str, object], depth: int, left: list[int]) -> str:
    _enter(value, depth, left)
    pieces: list[str] = []
    for key in ordered(value):
        item = value[key]
        kind = type(item)
        try:
            text = quote(item) if kind is str else _WRITERS.get(kind, _refuse)(item, depth + 1, left)
        except Refusal as refusal:
            refusal.parts.append(key)
            raise
        pieces.append(f"{quote(key)}:{text}")
    return f"{{{','.join(pieces)}}}"


def _array(value: list[object] | tuple[object, ...], depth: int, left: list[int]) -> str:
    _enter(value, depth, left)
    pieces: list[str] = []
    try:
        for item in value:
            kind = type(item)
            pieces.append(quote(item) if kind is str else _WRITERS.get(kind, _refuse)(item, depth + 1, left))
    except Refusal as refusal:
        refusal.parts.append(len(pieces))
        raise
    return f"[{','.join(pieces)}]"


def _enter(value: Sized, depth: int, left: list[int]) -> None:
    if depth >= MAX_DEPTH:
        raise Refusal(f"more than {MAX_DEPTH} levels of nesting, or a value that contains itself")
    left[0] -= len(value) + 1
    if left[0] < 0:
        raise Refusal("more than max_payload bytes", PayloadTooLarge.default_hint, PayloadTooLarge)


def ordered(names: Iterable[str]) -> list[str]:
    """The keys of an object in jsonb's own order: by length in bytes, then by bytes."""
    keys = list(names)
    if not {*map(type, keys)} <= _TEXT:
        odd = next(key for key in keys if type(key) is not str)
        raise Refusal(
            f"the key {ascii(odd)[:200]} is {type(odd).__qualname__}, not text",
            "annotate the value, e.g. dict[int, str]: its keys then come back as what they were",
        )
    if len(keys) > 1:
        keys.sort()
        keys.sort(key=len if "".join(keys).isascii() else _bytes_of)
    return keys


def _bytes_of(key: str) -> int:
    return len(key.encode("utf-8", "surrogatepass"))


def _check_texts(value: object, text: str) -> None:
    if "\\u0000" not in text:
        try:
            text.encode()
        except UnicodeEncodeError:
            pass
        else:
            return
    _find_bad_text(value)


def _find_bad_text(value: object) -> None:
    if isinstance(value, str):
        if "\x00" in value:
            raise Refusal("text with a NUL character", "PostgreSQL can not hold it; pass bytes, annotated as bytes")
        try:
            value.encode()
        except UnicodeEncodeError:
            hint = "file names of the system can have them: os.fsencode(name), annotated as bytes"
            raise Refusal("text with a lone surrogate", hint) from None
    elif isinstance(value, (dict, list, tuple)):
        pairs: Iterable[tuple[str | int, object]]
        if isinstance(value, dict):
            pairs = cast("dict[str, object]", value).items()
        else:
            pairs = enumerate(cast("list[object]", value))
        for part, item in pairs:
            try:
                _find_bad_text(part)
                _find_bad_text(item)
            except Refusal as refusal:
                refusal.parts.append(part)
                raise


def _integer(number: int, depth: int, left: list[int]) -> str:
    if number.bit_length() < _EASY_BITS:
        return repr(number)
    if number.bit_length() > _MAX_BITS:
        raise Refusal(f"an integer of more than {MAX_DIGITS:,} digits")
    return str(Decimal(number))


def _float(number: float, depth: int, left: list[int]) -> str:
    if -_EXACT_FLOAT < number < _EXACT_FLOAT:
        text = repr(number)
        return "-1e-400" if text == "-0.0" else text
    if not math.isfinite(number):
        raise Refusal(f"{number!r} is not a JSON number")
    return f"{number:.1f}"


def _refuse(value: object, depth: int, left: list[int]) -> str:
    kind = type(value)
    raise Refusal(
        f"{kind.__module__}.{kind.__qualname__} is not plain JSON",
        "annotate the parameter or the return value with its type, or pass dict, list, str, int, float, bool or None",
    )


# By exact type: an enum or an ordered dict would come back as something else.
_WRITERS: dict[type, Callable[[Any, int, list[int]], str]] = {
    dict: _object,
    list: _array,
    tuple: _array,
    int: _integer,
    float: _float,
    bool: lambda value, depth, left: "true" if value else "false",
    type(None): lambda value, depth, left: "null",
}


def unreadable(error: EncryptionError) -> str:
    """The text to show in the place of a payload that can not be opened; whoever reads it gets the error (72)."""
    return quote(f"{UNREADABLE[1:]}{error.code}:{error.message}")


def refuse_unreadable(text: str) -> None:
    """Raise EncryptionError or MissingKey for a text that stands in the place of an encrypted one (72)."""
    if text.startswith((UNREADABLE, SEALED)):
        code, _, message = json.loads(text).removeprefix(UNREADABLE[1:]).partition(":")
        if code == EncryptionError.code:
            raise EncryptionError(message)
        raise MissingKey(message if code == MissingKey.code else "the payload is encrypted")


def read(text: str, root: str = "$") -> Any:
    """The plain value of a JSON text. Raises SerializationError for anything that is none."""
    refuse_unreadable(text)
    try:
        return from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as error:  # a TypeError for text with lone surrogates
        if "number out of range" in str(error):
            return read_long_integers(text, root)
        raise SerializationError(f"stored text that is not JSON: {error}", path=root) from None


def read_long_integers(text: str, root: str = "$") -> Any:
    """The same, slower, for texts with integers of more than 4,300 digits."""
    try:
        return json.loads(text, parse_int=_parse_integer)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise SerializationError(f"stored text that is not JSON: {error}", path=root) from None


def _parse_integer(digits: str) -> int:
    if len(digits) <= 4_300:
        return int(digits)
    if len(digits) > MAX_DIGITS + 1:
        raise ValueError(f"an integer of more than {MAX_DIGITS:,} digits")
    return int(Decimal(digits))
