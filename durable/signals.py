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


APPROVAL = "approve:"
"""Signals of this prefix answer `ctx.approve`. No signal of a user can have it: their names hold no colon."""


def approval(what: str) -> Signal[bool]:
    """The signal that answers `ctx.approve(what)`. Raises RegistrationError for a name that can not be one (27)."""
    signal: Signal[bool] = Signal(what, bool)
    signal.name = f"{APPROVAL}{checked_name(what, 'approval')}"
    return signal


__all__ = ["APPROVAL", "Signal", "approval"]
