"""Errors as data, and data as errors (semantics 23).

The engine turns what a step or a body raised into `ErrorData` and stores it; replay and the handles turn it back with `rebuild`.
Only three kinds of classes come back as themselves: a fixed list of built-ins, our own errors, and classes that the user has
registered with `error`. All else is `StepFailed` carrying the data. An error can always be stored: texts are cut to a bounded
length and cleaned of what a store refuses. Nothing here imports or executes what stored data names.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from typing import Any, TypeVar, cast

from durable import errors
from durable.errors import DurableError, RegistrationError, SerializationError, StepFailed

from . import plain

E = TypeVar("E", bound=Exception)

MAX_MESSAGE = 8_192
"""Characters of a stored message: enough for any message meant for people."""
MAX_TRACEBACK = 16_384
"""Characters of a stored traceback; the middle is left out."""
_MAX_ARGUMENTS = 8_192

_BUILT_INS: tuple[type[Exception], ...] = (
    ArithmeticError, AssertionError, AttributeError, BlockingIOError, BrokenPipeError, BufferError, ChildProcessError,
    ConnectionAbortedError, ConnectionError, ConnectionRefusedError, ConnectionResetError, EOFError, Exception,
    FileExistsError, FileNotFoundError, FloatingPointError, ImportError, IndexError, InterruptedError, IsADirectoryError,
    KeyError, LookupError, MemoryError, ModuleNotFoundError, NameError, NotADirectoryError, NotImplementedError, OSError,
    OverflowError, PermissionError, ProcessLookupError, RecursionError, ReferenceError, RuntimeError, TimeoutError,
    TypeError, UnboundLocalError, ValueError, ZeroDivisionError,
)  # fmt: skip
_OUR_FIELDS = ("path", "step_id", "type_name", "traceback", "run_id", "error_kind")


def _qualified(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


_known: dict[str, type[Exception]] = {_qualified(cls): cls for cls in _BUILT_INS}
_ours: dict[str, type[DurableError]] = {
    _qualified(cls): cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, DurableError) and not cls.__name__.startswith("_")
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ErrorData:
    """An error as it is stored. `type_name` is qualified; `detail` holds plain JSON with which the class can be rebuilt."""

    type_name: str
    message: str
    traceback: str = ""
    detail: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def to_json(self) -> str:
        """The text that is stored."""
        return plain.write(
            {"type": self.type_name, "message": self.message, "traceback": self.traceback, "detail": self.detail}
        )

    @classmethod
    def from_json(cls, text: str) -> ErrorData:
        """The data of a stored text. Raises SerializationError for what is none."""
        raw = plain.read(text)
        fields = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
        type_name, message = fields.get("type"), fields.get("message")
        if not isinstance(type_name, str) or not isinstance(message, str):
            raise SerializationError(
                "a stored error that is none: it was not written by this project, or it is damaged"
            )
        trace, detail = fields.get("traceback"), fields.get("detail")
        return cls(
            type_name=type_name,
            message=message,
            traceback=trace if isinstance(trace, str) else "",
            detail=cast("dict[str, Any]", detail) if isinstance(detail, dict) else {},
        )


def error(cls: type[E], /) -> type[E]:
    """Decorator: errors of this class survive the journal as themselves, rebuilt as `cls(*args)`.

    The contract is that of pickling and copying: `args` (what was passed to `super().__init__`) must be plain JSON and enough to
    make an equal error. A class whose constructor needs keyword arguments can not do it: RegistrationError. An instance that does
    not keep the contract is StepFailed on both the first pass and replay (semantics 23).
    """
    candidate: object = cls  # callers without a type checker may pass anything
    if not (isinstance(candidate, type) and issubclass(candidate, Exception)):
        raise RegistrationError(f"durable.error: {cls!r} is not a subclass of Exception")
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (ValueError, TypeError):
        parameters = ()  # type: ignore[assignment]
    needed = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if needed:
        raise RegistrationError(
            f"durable.error: {_qualified(cls)} can not be rebuilt from its args: it needs the keyword {needed[0]!r}",
            hint="take it by position and pass it on to super().__init__(...)",
        )
    _known[_qualified(cls)] = cls
    return cls


def error_data(exc: BaseException, /) -> ErrorData:
    """The data of an error. Never raises, whatever the error is made of."""
    cls = type(exc)
    type_name = _clean(_qualified(cls), 500)
    detail: dict[str, Any] = {}
    if isinstance(exc, DurableError):
        message = exc.message
        detail = {
            "fields": {n: _clean(v, MAX_TRACEBACK) for n in _OUR_FIELDS if isinstance(v := getattr(exc, n, None), str)}
        }
        detail["fields"]["hint"] = _clean(exc.hint, MAX_MESSAGE)
    else:
        message = _message(exc)
        arguments = _arguments(exc)
        if _known.get(type_name) is cls and _storable(arguments):
            detail = {"args": list(arguments)}
    return ErrorData(
        type_name=type_name,
        message=_clean(message, MAX_MESSAGE),
        traceback=_clean(_traceback(exc), MAX_TRACEBACK, middle=True),
        detail=detail,
    )


def rebuild(data: ErrorData, step_id: str = "") -> Exception:
    """The error to raise for stored data: its own class if it is known, else StepFailed. Never raises."""
    made = _rebuild_ours(data) or _rebuild_known(data)
    if made is None:
        made = StepFailed(data.message, step_id=step_id, type_name=data.type_name, traceback=data.traceback)
    elif data.traceback:
        note = f"recorded failure of step {step_id}, raised there as:\n{data.traceback}" if step_id else data.traceback
        # Not add_note: a class that refuses attributes (a frozen dataclass) refuses that, too.
        object.__setattr__(made, "__notes__", [*getattr(made, "__notes__", ()), note])
    cause = data.detail.get("cause")
    if isinstance(cause, dict):
        try:
            made.__cause__ = rebuild(ErrorData.from_json(plain.write(cast("object", cause))))
        except SerializationError:
            made.__cause__ = None  # a stored cause that is none: the error itself still stands
    return made


def _rebuild_ours(data: ErrorData) -> Exception | None:
    cls = _ours.get(data.type_name)
    found = data.detail.get("fields")
    if cls is None or not isinstance(found, dict):
        return None
    fields = cast("dict[str, object]", found)
    hint = fields.get("hint")
    made = cls(data.message, hint=hint if isinstance(hint, str) else None)
    for name in _OUR_FIELDS:
        if hasattr(made, name) and isinstance(fields.get(name), str):
            setattr(made, name, fields[name])
    return made


def _rebuild_known(data: ErrorData) -> Exception | None:
    cls = _known.get(data.type_name)
    if cls is None:
        return None
    stored = data.detail.get("args")
    try:
        if isinstance(stored, list):
            arguments = cast("list[object]", stored)
            made = cls(*arguments)
            if type(made) is cls and list(_arguments(made)) == arguments:
                return made
        if cls in _BUILT_INS:
            return cls(data.message)
    except Exception:  # noqa: BLE001
        return None  # the class has changed since, or does not keep its contract: the data is still there
    return None


def _arguments(exc: BaseException) -> tuple[Any, ...]:
    if isinstance(exc, OSError) and len(exc.args) == 2 and exc.filename is not None:
        return (*exc.args, exc.filename)  # it takes the name of the file out of its args
    return exc.args


def _storable(arguments: tuple[Any, ...]) -> bool:
    try:
        text = plain.write(list(arguments), limit=_MAX_ARGUMENTS)
        return len(text) <= _MAX_ARGUMENTS and plain.read(text) == list(arguments)
    except SerializationError:
        return False


def _message(exc: BaseException) -> str:
    try:
        # str(KeyError("k")) is the repr of its argument; rebuilding from that would quote it once more on every pass
        return exc.args[0] if len(exc.args) == 1 and type(exc.args[0]) is str else str(exc)
    except Exception:  # noqa: BLE001
        return f"<{type(exc).__qualname__} whose text can not be made>"


def _traceback(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(exc))
    except Exception:  # noqa: BLE001
        return ""


def _clean(text: str, limit: int, *, middle: bool = False) -> str:
    """The text as every store can hold it: NUL and lone surrogates escaped, cut to `limit` characters with a mark."""
    text = str(text).replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
    if len(text) <= limit:
        return text
    mark = f"… [{len(text) - limit:,} characters left out]"
    return f"{text[: limit // 4]}\n{mark}\n{text[-(limit * 3 // 4) :]}" if middle else f"{text[:limit]}{mark}"
