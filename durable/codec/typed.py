"""Annotated values to JSON text and back, through pydantic, and the proof that what is written can be read.

`payload.py` and `signature.py` ask `shape_of(annotation)` for a `Shape`, which is cached. Writing an annotated value is:
validate (a value of the wrong type is refused at the call, in pydantic's lax mode: a tuple annotated as a list becomes one),
turn it into plain JSON, write that, **read it back**, and compare. What would not come back (a `date` in `date | str`, a
subclass with more fields than the annotation has, a `datetime` inside `Any`) is refused before anything is stored; what is
returned live is the copy that was read back (semantics 22). Plain scalars and unannotated values take a short way.

Fields go by their Python names, never by alias, so that what is written does not depend on how a model talks to others.
Sets are written in sorted order: their own order differs from process to process, and with it the digest of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Never, NoReturn, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, RootModel, TypeAdapter, ValidationError
from typing_extensions import TypeAliasType

from durable.errors import RegistrationError, SerializationError

from . import plain


class _Untyped:
    def __repr__(self) -> str:
        return "UNTYPED"


UNTYPED: Final = _Untyped()
"""The annotation of what has none: plain JSON only."""

# Base64, since UTF-8 (pydantic's default) can not hold every byte. A BaseModel goes by its own config.
_CONFIG = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLAIN = (UNTYPED, Any, object, inspect.Parameter.empty, NoReturn, Never)


class Shape:
    """How values of one annotation are written and read. Immutable, shared by everyone who asks for the annotation."""

    __slots__ = ("_adapter", "_exact", "_loose", "_sets", "annotation")

    def __init__(self, annotation: Any) -> None:
        self.annotation = type(None) if annotation is None else annotation
        self._exact = self.annotation if isinstance(self.annotation, type) else None
        self._adapter: TypeAdapter[Any] | None = None
        self._loose = False
        self._sets = False
        if not any(annotation is one for one in _PLAIN) and not isinstance(self.annotation, TypeVar):
            self._adapter = _build(self.annotation)
            kinds = set(_kinds(self._adapter.core_schema))
            if "generator" in kinds:
                raise RegistrationError(
                    f"{_name(annotation)}: a one-shot iterator can not be stored", hint="annotate it as a list"
                )
            self._loose = bool(kinds & {"union", "any"})
            self._sets = bool(kinds & {"set", "frozenset"})

    def roundtrip(self, value: Any, root: str = "$", *, limit: int = 1 << 31) -> tuple[str, Any]:
        """The text to store and the value that will be read from it. Raises SerializationError naming the path."""
        adapter = self._adapter
        if adapter is None or (type(value) is self._exact and self._exact in _SCALARS):
            text = plain.write(value, root, limit=limit)
            return text, value if value is None or type(value) in _SCALARS else plain.read(text, root)
        checked = value if type(value) is self._exact and isinstance(value, BaseModel) else self._validate(value, root)
        try:
            dumped = adapter.serializer.to_python(checked, mode="json", by_alias=False, round_trip=True, warnings=False)
        except Exception as error:  # a serializer of the user's may raise anything
            raise SerializationError(
                f"{_name(self.annotation)} can not be written: {_one_line(error)}", path=_blame(value, root)
            ) from error
        if self._sets:
            _sort_sets(checked, dumped)
        text = plain.write(dumped, root, limit=limit)
        back = self.read(text, root)
        if self._loose or not _equal(checked, back):
            _compare(checked, back, root)
        return text, back

    def write(self, value: Any, root: str = "$", *, limit: int = 1 << 31) -> str:
        """The text to store. Raises SerializationError naming the path."""
        if self._adapter is None or (type(value) is self._exact and self._exact in _SCALARS):
            return plain.write(value, root, limit=limit)
        return self.roundtrip(value, root, limit=limit)[0]

    def read(self, text: str, root: str = "$") -> Any:
        """The value of a stored text. Raises SerializationError if it is not one of this annotation."""
        adapter = self._adapter
        if adapter is None:
            return plain.read(text, root)
        if self._exact in _SCALARS:
            value = plain.read(text, root)
            if type(value) is self._exact:
                return value
        plain.refuse_unreadable(text)
        try:
            return adapter.validator.validate_json(text, by_alias=False, by_name=True)
        except ValidationError as error:
            if "number out of range" in str(error):
                return self._read_long_integers(adapter, text, root)
            raise self._invalid(error, root) from None
        except Exception as error:  # a validator of the user's may raise anything
            raise SerializationError(
                f"{_name(self.annotation)} can not be read: {_one_line(error)}", path=root
            ) from error

    def from_plain(self, value: Any, root: str = "$") -> Any:
        """The value of an already parsed text."""
        if self._adapter is None or (type(value) is self._exact and self._exact in _SCALARS):
            return value
        return self.read(plain.write(value, root), root)

    def _validate(self, value: Any, root: str) -> Any:
        assert self._adapter is not None
        try:
            return self._adapter.validator.validate_python(value)
        except ValidationError as error:
            raise self._invalid(error, root) from None
        except Exception as error:  # as above
            raise SerializationError(f"not a valid {_name(self.annotation)}: {_one_line(error)}", path=root) from error

    def _read_long_integers(self, adapter: TypeAdapter[Any], text: str, root: str) -> Any:
        value = plain.read_long_integers(text, root)
        try:
            back = adapter.validate_python(value, by_alias=False, by_name=True)
            # Validating Python values is not quite validating JSON (bytes are no base64 here): the text decides.
            if adapter.dump_python(back, mode="json", by_alias=False, round_trip=True, warnings=False) == value:
                return back
        except Exception as error:
            raise SerializationError(f"not a valid {_name(self.annotation)}: {_one_line(error)}", path=root) from error
        raise SerializationError(f"{_name(self.annotation)} can not hold integers of this size", path=root)

    def _invalid(self, error: ValidationError, root: str) -> SerializationError:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return SerializationError(
            f"not a valid {_name(self.annotation)}: {first['msg']}", path=plain.path_of(root, first["loc"])
        )


@functools.lru_cache(maxsize=4_096)
def _cached_shape(annotation: Any) -> Shape:
    return Shape(annotation)


def shape_of(annotation: Any) -> Shape:
    """The shape of an annotation. Raises RegistrationError for one that can not be stored at all."""
    try:
        return _cached_shape(annotation)
    except TypeError:  # metadata inside Annotated may be unhashable
        return Shape(annotation)


def _build(annotation: Any) -> TypeAdapter[Any]:
    if (
        get_origin(annotation) is Iterable
    ):  # as a parameter it means "a list will do"; as it stands it is read only once
        annotation = list[get_args(annotation)]  # type: ignore[misc]
    try:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return TypeAdapter(annotation)
        # The alias lets our config reach dataclasses and typed dicts, to which it can not be given directly.
        make_alias: Any = TypeAliasType  # a checker wants an alias at the top of a module, of a type that it can see
        return TypeAdapter(make_alias("value", annotation), config=_CONFIG)
    except Exception as error:  # the building of a schema runs code of the user's classes
        raise RegistrationError(
            f"{_name(annotation)} can not be stored: {_one_line(error)}",
            hint="use plain JSON, a dataclass, a pydantic model or a type that pydantic knows",
        ) from error


def _kinds(schema: Any) -> Iterable[str]:
    """The kinds of the parts of a core schema; a container that says nothing of its items counts as "any"."""
    if isinstance(schema, dict):
        fields = cast("dict[str, object]", schema)
        kind = fields.get("type")
        if isinstance(kind, str):
            yield kind
            if kind in ("list", "set", "frozenset") and "items_schema" not in fields:
                yield "any"
            if kind == "dict" and not {"keys_schema", "values_schema"} <= fields.keys():
                yield "any"
        for key, part in fields.items():
            if key not in ("metadata", "default", "serialization"):
                yield from _kinds(part)
    elif isinstance(schema, (list, tuple)):
        for part in cast("Iterable[object]", schema):
            yield from _kinds(part)


def _sort_sets(value: Any, dumped: Any) -> None:
    """Sort, in place, what came of sets: a set is dumped as it is iterated, so value and dump can be walked together."""
    anything: object = dumped
    kind = type(anything)
    if isinstance(value, RootModel):
        _sort_sets(cast("RootModel[object]", value).root, dumped)
    elif kind is list and isinstance(value, Iterable):
        for item, piece in zip(cast("Iterable[object]", value), dumped, strict=False):
            _sort_sets(item, piece)
        if isinstance(value, (set, frozenset)):
            dumped.sort(key=plain.write)
    elif kind is dict and isinstance(value, Mapping):
        for item, piece in zip(cast("Mapping[object, object]", value).values(), dumped.values(), strict=False):
            _sort_sets(item, piece)
    elif kind is dict:
        for name, piece in dumped.items():
            _sort_sets(getattr(value, name, None), piece)


def _has_equality(kind: Any) -> bool:
    return kind.__eq__ is not object.__eq__


def _equal(before: Any, after: Any) -> bool:
    try:
        return bool(before == after)
    except Exception:  # noqa: BLE001 – an __eq__ of the user's (arrays answer with an array)
        return False


def _compare(before: object, after: object, path: str) -> None:
    """Refuse a value that came back as another one. A class without `==` of its own is only asked for its type; private
    attributes of models are not part of the value."""
    kind = type(before)
    if kind is not type(after) and not (kind is tuple and type(after) is list):
        raise SerializationError(
            f"{_name(kind)} would come back as {_name(type(after))}",
            path=path,
            hint="annotate it with exactly this type; for alternatives that look alike in JSON use a discriminated union",
        )
    if kind in _SCALARS:  # most parts are one: the questions below take longer than this answer
        if before != after:
            raise SerializationError(f"{_name(kind)} would come back as another value", path=path)
    else:
        _compare_parts(before, after, path)


def _compare_parts(before: Any, after: Any, path: str) -> None:
    if isinstance(before, Mapping):
        mapping = cast("Mapping[object, object]", before)
        for (key, item), (key_after, item_after) in zip(mapping.items(), _aligned(mapping, after), strict=True):
            _compare(key, key_after, path)
            _compare(item, item_after, plain.path_of(path, [str(key)]))
    elif isinstance(before, (list, tuple, deque)):
        sequence = cast("Sequence[object]", before)
        if len(sequence) != len(after):
            raise SerializationError(f"{len(sequence)} items would come back as {len(after)}", path=path)
        for index, (item, item_after) in enumerate(zip(sequence, after, strict=True)):
            _compare(item, item_after, f"{path}[{index}]")
    elif isinstance(before, (set, frozenset)):
        members = cast("Iterable[object]", before)
        if {(type(item), item) for item in members} != {(type(item), item) for item in after}:
            raise SerializationError("its items would come back as others", path=path)
    elif dataclasses.is_dataclass(before) or isinstance(before, BaseModel):
        fields = dataclasses.fields(before) if dataclasses.is_dataclass(before) else ()
        for name in [field.name for field in fields] or list(getattr(before, "__dict__", ())):
            if hasattr(before, name) and hasattr(after, name):
                _compare(getattr(before, name), getattr(after, name), f"{path}.{name}")
    elif isinstance(before, datetime) and before.utcoffset() is not None:
        # In a repeated hour, datetimes of different zones are never equal, even if they are the same instant (PEP 495).
        if after.utcoffset() is None or before.astimezone(UTC) != after.astimezone(UTC):
            raise SerializationError(f"{before.isoformat()} would come back as {after.isoformat()}", path=path)
    elif _has_equality(type(before)) and not _equal(before, after):
        raise SerializationError(f"{_name(type(before))} would come back as another value", path=path)


def _aligned(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    if len(before) != len(after):
        raise SerializationError(f"{len(before)} keys would come back as {len(after)}")
    own = {key: key for key in after}
    return [(own[key], after[key]) if key in own else (None, None) for key in before]


def _blame(value: Any, path: str, depth: int = 0) -> str:
    """The place of the first part that pydantic can not write, as well as it can be found."""
    if depth > plain.MAX_DEPTH:
        return path
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        parts = [(plain.path_of(path, [str(key)]), item) for key, item in mapping.items()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        members = cast("Iterable[object]", value)
        parts = [(f"{path}[{index}]", item) for index, item in enumerate(members)]
    elif isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        parts = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for place, item in parts:
        try:
            _ANYTHING.dump_python(item, mode="json", warnings=False)
        except Exception:  # noqa: BLE001
            return _blame(item, place, depth + 1)
    return path


_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


def _name(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


def _one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001
        text = ""
    return f"{type(error).__qualname__}: {' '.join(text.split())[:300]}".encode("utf-8", "replace").decode()
