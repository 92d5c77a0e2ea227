"""The arguments of a callable as one canonical JSON text, and back.

Function, step and schedule modules ask `Signature.of(fn, skip_first=…)`, which is cached. The text is `[[by position],{by name}]`
with the defaults filled in, so that a call reads the same however it was written, and a run keeps the defaults of the day on
which it was started. Annotations are resolved at the first use, not at the decoration: a class may be defined further down.

It never calls the function.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args, get_origin

from typing_extensions import Unpack

from durable.errors import RegistrationError, SerializationError

from . import plain
from .payload import Codec
from .typed import UNTYPED, Shape, shape_of

_AWAITABLES = (collections.abc.Awaitable, collections.abc.Coroutine)


@dataclasses.dataclass(frozen=True, slots=True)
class _Resolved:
    shapes: dict[str, Shape]
    positional: list[tuple[str, Shape]]
    """For each parameter that may be given by position: where its value stands, for messages, and its shape."""
    defaults: dict[str, str]
    """Encoded defaults. One that can not be stored (a sentinel) is missing: Python fills it in at the call."""
    by_name: dict[str, Shape]
    """Shapes of `**options: Unpack[SomeTypedDict]`."""
    returns: Any


class Signature:
    """What a callable takes and returns, as far as storing it is concerned. Immutable."""

    def __init__(self, fn: Callable[..., Any], *, skip_first: bool) -> None:
        self._fn = fn
        self.name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        parameters, self._returns = _inspect(fn)
        if skip_first:
            first = parameters.pop(0) if parameters else None
            if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
                raise RegistrationError(
                    f"{self.name} has no first parameter for the context",
                    hint="declare it as: async def name(ctx, ...)",
                )
        self._signature = inspect.Signature(parameters)
        self._parameters = {p.name: p for p in parameters}
        self._positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._simple = len(self._positional) == len(parameters)
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._options = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)

    @classmethod
    def of(cls, fn: Callable[..., Any], *, skip_first: bool) -> Signature:
        """The signature of a callable; `skip_first` leaves out the context (RegistrationError if there is none)."""
        return _cached(fn, skip_first) if lasting(fn) else cls(fn, skip_first=skip_first)

    @property
    def returns(self) -> Any:
        """The annotation of the result (UNTYPED without one). Raises RegistrationError if it can not be resolved or stored."""
        return self.resolved.returns

    @functools.cached_property
    def resolved(self) -> _Resolved:
        """All annotations, resolved once. A registry asks for it to report mistakes before any work is taken."""
        shapes: dict[str, Shape] = {}
        defaults: dict[str, str] = {}
        by_name: dict[str, Shape] = {}
        for parameter in self._parameters.values():
            annotation = self._annotation(parameter.annotation, parameter.name)
            if parameter.kind is parameter.VAR_KEYWORD and get_origin(annotation) in (typing.Unpack, Unpack):
                hints = typing.get_type_hints(get_args(annotation)[0], include_extras=True)
                by_name = {name: self._shape(hint, name) for name, hint in hints.items()}
                annotation = UNTYPED
            shapes[parameter.name] = shape = self._shape(annotation, parameter.name)
            if parameter.default is not parameter.empty:
                try:
                    defaults[parameter.name] = shape.write(parameter.default)
                except SerializationError:
                    pass
        returns = self._annotation(self._returns, "return")
        if not inspect.iscoroutinefunction(self._fn) and get_origin(returns) in _AWAITABLES:
            returns = get_args(returns)[-1]
        if isinstance(returns, typing.TypeVar):
            returns = UNTYPED
        self._shape(returns, "return")
        positional = [(f"$.{p.name}", shapes[p.name]) for p in self._positional]
        return _Resolved(shapes, positional, defaults, by_name, returns)

    def encode_arguments(self, codec: Codec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The canonical text of a call. Raises TypeError if the arguments do not fit the signature, SerializationError (with the
        path `$.parameter…`) for a value of the wrong type or one that can not be stored, PayloadTooLarge for too much of it."""
        known = self.resolved
        limit = codec.max_payload
        if self._simple and not kwargs and len(args) == len(known.positional):
            texts = [
                shape.write(value, place, limit=limit)
                for (place, shape), value in zip(known.positional, args, strict=True)
            ]
            return codec.within_limit(f"[[{','.join(texts)}],{{}}]")
        texts, named = self._texts(self._bind(args, kwargs), known, limit)
        body = ",".join(f"{plain.write(name)}:{named[name]}" for name in plain.ordered(named))
        return codec.within_limit(f"[[{','.join(texts)}],{{{body}}}]")

    def _texts(self, given: dict[str, Any], known: _Resolved, limit: int) -> tuple[list[str], dict[str, str]]:
        """The encoded values of a bound call, by position and by name; past a default that can not be stored, by name."""
        shapes = known.shapes
        texts: list[str] = []
        named: dict[str, str] = {}
        hole = False
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                values = given.get(name, ())
                texts += [shapes[name].write(v, f"$.{name}[{i}]", limit=limit) for i, v in enumerate(values)]
            elif parameter.kind is parameter.VAR_KEYWORD:
                for key, value in given.get(name, {}).items():
                    named[key] = known.by_name.get(key, shapes[name]).write(value, f"$.{key}", limit=limit)
            elif name not in given and name not in known.defaults:
                hole = True
            else:
                if name in given:
                    text = shapes[name].write(given[name], f"$.{name}", limit=limit)
                else:
                    text = known.defaults[name]
                by_name = hole and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                if by_name or parameter.kind is parameter.KEYWORD_ONLY:
                    named[name] = text
                elif not hole:  # else it is a default too, of a positional-only parameter: Python fills it in
                    texts.append(text)
        return texts, named

    def decode_arguments(self, codec: Codec, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) to call the function with, after its context. Raises SerializationError for text that does not fit it."""
        known = self.resolved
        raw = plain.read(text)
        pair = cast("list[object]", raw) if isinstance(raw, list) else []
        if [*map(type, pair)] != [list, dict]:
            raise SerializationError(f"{self.name}: stored arguments that are none", path="$")
        positional = cast("list[object]", pair[0])
        named = cast("dict[str, object]", pair[1])
        if not named and self._simple and len(positional) == len(known.positional):  # the usual form fits by its shape
            return tuple(
                shape.from_plain(value, place)
                for (place, shape), value in zip(known.positional, positional, strict=True)
            ), {}
        if len(positional) > len(self._positional) and self._rest is None:
            raise SerializationError(
                f"{self.name} takes {len(self._positional)} arguments by position, {len(positional)} are stored",
                path="$",
            )
        args: list[Any] = []
        for index, value in enumerate(positional):
            name = self._positional[index].name if index < len(self._positional) else self._rest
            assert name is not None
            args.append(known.shapes[name].from_plain(value, f"$.{name}"))
        kwargs: dict[str, Any] = {}
        for name in plain.ordered(named):
            shape = known.by_name.get(name) or known.shapes.get(name if self._takes_name(name) else self._options or "")
            if shape is None:
                raise SerializationError(f"{self.name} has no parameter {name!r}, but one is stored", path=f"$.{name}")
            kwargs[name] = shape.from_plain(named[name], f"$.{name}")
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise SerializationError(f"{self.name}: stored arguments do not fit it: {error}", path="$") from None
        return tuple(args), kwargs

    @property
    def empty(self) -> bool:
        """It takes no argument at all."""
        return not self._parameters

    def fits(self, count: int) -> bool:
        """Can it be called with so many arguments by position, and nothing else?"""
        try:
            self._signature.bind(*range(count))
        except TypeError:
            return False
        return True

    def _takes_name(self, name: str) -> bool:
        parameter = self._parameters.get(name)
        return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None

    def _shape(self, annotation: Any, parameter: str) -> Shape:
        try:
            return shape_of(annotation)
        except RegistrationError as error:
            what = "its return value" if parameter == "return" else f"the parameter {parameter!r}"
            raise RegistrationError(f"{self.name}: {what}: {error.message}", hint=error.hint) from error

    def _annotation(self, annotation: Any, parameter: str) -> Any:
        """The annotation with every name in it resolved where the function was defined; UNTYPED if there is none."""
        if annotation is inspect.Parameter.empty or isinstance(
            annotation, (typing.ParamSpecArgs, typing.ParamSpecKwargs)
        ):
            return UNTYPED
        if isinstance(annotation, type) and not get_args(annotation):
            return annotation
        names, local_names = _scope(self._fn)
        holder = types.FunctionType((lambda: None).__code__, names)
        holder.__annotations__ = {"value": annotation}
        try:
            return typing.get_type_hints(holder, globalns=names, localns=local_names, include_extras=True)["value"]
        except (
            Exception
        ) as error:  # NameError, AttributeError, SyntaxError, whatever the text of an annotation can raise
            what = "the return annotation" if parameter == "return" else f"the annotation of {parameter!r}"
            raise RegistrationError(
                f"{self.name}: {what} ({annotation!r}) can not be resolved: {error}",
                hint="define or import its names at the top of the module, not only under TYPE_CHECKING",
            ) from error


def lasting(fn: object) -> bool:
    """Does it live as long as the program anyway? What is made while it runs (a closure, a method of an object, a partial) keeps
    alive what it was made with; a cache that kept it would keep whole runs."""
    if isinstance(fn, types.FunctionType):
        return fn.__closure__ is None and "<locals>" not in fn.__qualname__
    return isinstance(fn, type) and "<locals>" not in fn.__qualname__


@functools.lru_cache(maxsize=4_096)
def _cached(fn: Callable[..., Any], skip_first: bool) -> Signature:
    return Signature(fn, skip_first=skip_first)


def _inspect(fn: Callable[..., Any]) -> tuple[list[inspect.Parameter], Any]:
    """Parameters and return annotation, unresolved. A built-in that tells nothing takes anything."""
    if not callable(fn):
        raise RegistrationError(f"{fn!r} can not be called")
    try:
        if sys.version_info >= (3, 14):
            import annotationlib  # names that do not exist yet stay references, to be resolved at the first use

            signature = inspect.signature(fn, annotation_format=annotationlib.Format.FORWARDREF)
        else:
            signature = inspect.signature(fn)
    except ValueError:
        kinds = inspect.Parameter
        return [kinds("args", kinds.VAR_POSITIONAL), kinds("kwargs", kinds.VAR_KEYWORD)], inspect.Signature.empty
    returns = fn if isinstance(fn, type) else signature.return_annotation
    return list(signature.parameters.values()), returns


def _scope(fn: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Globals and closure of the function under partials, methods, wrappers and callable objects."""
    inner: Any = fn
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
    inner = getattr(inner, "__func__", inner)
    if isinstance(inner, type):
        inner = inner.__init__  # type: ignore[misc]
    elif not hasattr(inner, "__code__"):
        inner = getattr(type(inner).__call__, "__func__", type(inner).__call__)
    code = getattr(inner, "__code__", None)
    cells = zip(code.co_freevars if code else (), getattr(inner, "__closure__", None) or (), strict=False)
    local_names: dict[str, Any] = {}
    for name, cell in cells:
        try:
            local_names[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for parameter in getattr(inner, "__type_params__", ()):
        local_names[parameter.__name__] = parameter
    return getattr(inner, "__globals__", {}), local_names
