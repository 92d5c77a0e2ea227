"""`durable.Signal`: the name and the type of what is sent to a run. Declared once, used by who sends and by the body that waits.

`client.signal` encodes by it, `ctx.wait_signal` decodes by it. It holds no value and knows no run.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from .steps import checked_name

T = TypeVar("T")


class Signal(Generic[T]):
    """A kind of signal. Raises RegistrationError for a name with `/ # : @` or control characters (semantics 27)."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: type[T]) -> None:
        self.name = checked_name(name, "signal")
        self.type = type

    def __repr__(self) -> str:
        shown: Any = getattr(self.type, "__name__", self.type)
        return f"<Signal {self.name} of {shown}>"


__all__ = ["Signal"]
