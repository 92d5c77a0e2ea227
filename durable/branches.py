"""What a body is made of on its private loop: branches, their scopes and shields, futures, and durable timers.

`bodyloop.BodyLoop` makes them. They carry what replay needs and plain asyncio lacks: a place in the run (`Scope`), a hash that is the
same everywhere, a cancel that a shield holds back, a timer that has a record. They decide nothing about delivery,
and know their loop by what they ask of it only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .model import Instant, RecordKind, StepRecord

if TYPE_CHECKING:
    from types import CodeType


class Host(Protocol):
    """Whom a loop tells what happens to its timers, and what nobody handled."""

    def registered(self, waiter: Any, name: str) -> None:
        """A call or a timer was made in the body: it gets its id (R6, R9)."""

    def dropped(self, waiter: Any) -> None:
        """The body gave it up: nothing is recorded (R12)."""

    def unhandled(self, context: dict[str, Any]) -> None:
        """An exception that nobody retrieved, a callback that raised."""


class Nobody:
    """The host of a loop whose activation is over."""

    def registered(self, waiter: Any, name: str) -> None:
        """Nothing is made any more."""

    def dropped(self, waiter: Any) -> None:
        """Nothing is recorded any more."""

    def unhandled(self, context: dict[str, Any]) -> None:
        """Silent, as in every teardown."""


class Scope:
    """A branch: its path, how often each name was called in it, how many branches it opened, and its shields."""

    __slots__ = ("branches", "names", "path", "shields")

    def __init__(self, path: str = "", shields: int = 0) -> None:
        self.path = path
        self.names: dict[str, int] = {}
        self.branches = 0
        self.shields = shields

    def step_id(self, name: str) -> str:
        """The id of the next call of that name in this branch (R3, semantics 18)."""
        count = self.names[name] = self.names.get(name, 0) + 1
        return f"{self.path}{name}" if count == 1 else f"{self.path}{name}#{count}"

    def branch(self) -> Scope:
        """The scope of a task made here. It may start steps after a cancel if it is made inside a shield."""
        self.branches += 1
        return Scope(f"{self.path}{self.branches}/", 1 if self.shields else 0)


Stand: TypeAlias = tuple["asyncio.Task[Any] | None", int]
"""A task, and how deep in shields it stood."""


def _cause(handle: asyncio.Handle | None) -> Stand | None:
    """Where what runs now was set up: a timer, or the branch whose end is being announced. It tells a cancel that comes from inside
    a shield (a time limit, a group whose member failed) from one that comes from outside."""
    if isinstance(handle, Timer):
        return handle.made_in
    arguments = getattr(handle, "_args", None)
    return arguments[0].made_in if arguments and isinstance(arguments[0], BranchTask) else None


class BodyFuture(asyncio.Future[Any]):
    """A future of a body. Its hash is its number, so that sets of futures iterate in order of creation everywhere (R5)."""

    _number: int

    def __init__(self, *, loop: Any) -> None:
        self._number = loop.number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class BranchTask(asyncio.Task[Any]):
    """A task of a body: a branch. It carries its scope itself, so that an explicit `context=` can not lose it (R3)."""

    _number: int
    _held: int
    _log_destroy_pending: bool

    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, loop: Any, scope: Scope, **options: Any) -> None:
        self._number = loop.number()
        self._held = 0
        self._body_loop = loop
        self.made_in = loop.stand()
        self.scope = scope
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def cancel(self, msg: Any | None = None) -> bool:
        """As ever; but while the task itself stands in a shield the cancel is held back until it leaves it (44), unless it
        comes from a time limit that was set, or from a branch of a group that was opened, inside the shield."""
        loop = self._body_loop
        depth = loop.shielded.get(self)
        if depth is None or loop.closed or self.done():
            return super().cancel(msg)
        if _cause(loop.running) == (self, depth):
            return super().cancel(msg)
        self._held += 1
        return True

    def uncancel(self) -> int:
        """As ever; one that was held back is taken back first."""
        if self._held:
            self._held -= 1
            return self.cancelling()
        return super().uncancel()

    def enter_shield(self) -> None:
        """From here a cancel is held back."""
        self.scope.shields += 1
        self._body_loop.shielded[self] = self._body_loop.shielded.get(self, 0) + 1

    def leave_shield(self) -> bool:
        """True: a cancel was held back and is due now, at the next await."""
        self.scope.shields -= 1
        shielded = self._body_loop.shielded
        shielded[self] -= 1
        if shielded[self]:
            return False
        del shielded[self]
        held, self._held = self._held, 0
        for _ in range(held):
            super().cancel()
        return held > 0


class Timer(asyncio.TimerHandle):
    """`loop.call_at` in a body: what `asyncio.sleep`, `timeout` and `wait_for` wait for. Durable, like a step (R9)."""

    # TimerHandle has slots; a subclass without them may hold what the pump needs.
    _loop: Any
    kind = RecordKind.TIMER
    digest = ""
    step_id = ""
    due: Instant
    made_in: Stand
    order: int
    seen: int
    place: tuple[CodeType, int] | None = None

    def cancel(self) -> None:
        """Nothing is recorded; the record that may lie in the journal is delivered to nobody."""
        if not self._cancelled:
            super().cancel()
            self._loop.host.dropped(self)

    def fire(self, record: StepRecord) -> None:
        """Its record was delivered: the callback is ready."""
        if not self._cancelled:
            self._loop.ready.append(self)
