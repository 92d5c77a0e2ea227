"""Requirements as data: one sentence of promised behaviour, a program that shows it, and all that must be seen afterwards.

`requirements/*.yaml` hold them, a file per topic; this module reads them and turns the text of a program into durable functions. A
program is ordinary Python: it defines `program`, and has `function`, `step`, `Graph`, `Signal`, `Retry`, `Context` and `note` at hand.
`note("x")` in a body of a step counts how often that body ran. `play.py` runs them; nothing here knows a store.

What a requirement may say, besides `text`, `rules` (of docs/reference/semantics.md) and `program`:

    input      arguments of the run (none)
    before     Python, carried out before any worker looks; `run` and `client` are at hand, and the names of the program
    outside    a list of the same, each carried out once nothing goes on by itself; {after: 2h, do: ...} waits for that time first
    status     of the run in the end (completed), with `result` (null), or with `kind` and `error` (the beginning of the text)
    journal    the records of the run: [step id, kind], and the value where there is one; of an error {error: its class}
    counts     how often each noted body ran
    runs       the other runs in the end: {function: {status: how many}}
    concurrent true: branches are in flight side by side, so their records have no order, and a crash may repeat each of them once
"""

from __future__ import annotations

import ast
import asyncio
import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import yaml

import durable
from durable.settings import Micros, micros

FOLDER = Path(__file__).parent / "requirements"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """Something that happens from outside: Python, and the time since the start before which it does not come."""

    do: str
    after: Micros = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Requirement:
    """One of them, as it is written."""

    topic: str
    text: str
    rules: tuple[str, ...]
    program: str
    input: Sequence[Any] = ()
    before: str = ""
    outside: Sequence[Move] = ()
    status: str = "completed"
    result: Any = None
    kind: str | None = None
    error: str | None = None
    journal: Sequence[Sequence[Any]]
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    runs: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    concurrent: bool = False

    def open(self) -> Program:
        """The program with a registry and counters of its own."""
        return Program(self)


class Program:
    """The durable functions of one requirement, and what their bodies noted."""

    def __init__(self, requirement: Requirement) -> None:
        self.registry = durable.Registry(requirement.topic)
        self.counts: collections.Counter[str] = collections.Counter()
        self.names: dict[str, Any] = {
            "__name__": f"requirement_{requirement.topic}",
            "asyncio": asyncio,
            "contextlib": contextlib,
            "datetime": datetime,
            "timedelta": timedelta,
            "timezone": timezone,
            "durable": durable,
            "step": durable.step,
            "Signal": durable.Signal,
            "Retry": durable.Retry,
            "Context": durable.Context,
            "SyncContext": durable.SyncContext,
            "Graph": functools.partial(durable.Graph, registry=self.registry),
            "function": functools.partial(durable.function, registry=self.registry),
            "note": self._note,
        }
        exec(_compiled(requirement.program), self.names)
        self.start: Any = self.names["program"]

    def _note(self, name: str) -> int:
        self.counts[name] += 1
        return self.counts[name]

    async def move(self, text: str, **given: Any) -> None:
        """Carry out what happens from outside."""
        names = {**self.names, **given}
        found = eval(_compiled(text, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # noqa: S307 -- it is ours
        if inspect.isawaitable(found):
            await found


def _compiled(text: str, *, flags: int = 0) -> Any:
    return compile(text, "<requirement>", "exec", flags=flags, dont_inherit=True)


def _move(written: Any) -> Move:
    if isinstance(written, str):
        return Move(do=written)
    if not isinstance(written, dict) or set(written) != {"after", "do"}:
        raise ValueError(f"outside: {written!r} is neither Python nor {{after: ..., do: ...}}")
    return Move(do=written["do"], after=micros(written["after"], what="after"))


def _requirement(topic: str, written: Mapping[str, Any]) -> Requirement:
    fields = {**written, "rules": tuple(str(rule) for rule in written["rules"])}
    fields["outside"] = [_move(one) for one in written.get("outside", ())]
    return Requirement(topic=topic, **fields)


@functools.cache
def requirements() -> tuple[Requirement, ...]:
    """All of them, by topic. Raises TypeError, KeyError or ValueError for one that says what it can not, or too little."""
    return tuple(
        _requirement(path.stem, written)
        for path in sorted(FOLDER.glob("*.yaml"))
        for written in yaml.safe_load(path.read_text(encoding="utf-8"))
    )


def names() -> list[str]:
    """How tests call them."""
    return [f"{one.topic}: {one.text}" for one in requirements()]


__all__ = ["Move", "Program", "Requirement", "names", "requirements"]
