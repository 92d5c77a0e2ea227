"""Seeded faults of our own code: each is one change of one function's text. A text that is not there any more is an error, so that
the mutants can not rot away. `test_mutants` lets the fuzzer, or a probe, look at each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from replay.families import FamilyDraw
from replay.programs import Draw

from durable import activation, bodyloop, branches, children, execution, external, replay, steps


class Rotten(Exception):
    """The text that a mutant changes is not there."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: in `owner.function`, `old` becomes `new`. `probe` names the scenario that sees it; None: the fuzzer."""

    name: str
    owner: Any
    function: str
    old: str
    new: str
    probe: str | None = None
    lane: str = "asyncio"
    start: int = 0
    """The first seed: where a program lies near that shows it, so that CI does not search for long."""

    draw: type[Draw] = Draw
    """What draws the programs."""
    also: tuple[tuple[Any, str, str, str], ...] = ()
    """More changes that belong to the same fault."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in the code."""
        with contextlib.ExitStack() as stack:
            for owner, function, old, new in self.also:
                stack.enter_context(Mutant(self.name, owner, function, old, new).planted())
            stack.enter_context(self._changed())
            yield

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        original = inspect.getattr_static(self.owner, self.function)
        is_property = isinstance(original, property)
        plain = original.fget if is_property else original
        source = textwrap.dedent(inspect.getsource(plain))
        if is_property:
            source = source.removeprefix("@property\n")
        if source.count(self.old) != 1:
            raise Rotten(f"{self.name}: {self.old!r} stands {source.count(self.old)} times in {self.function}")
        made: dict[str, Any] = {}
        exec(
            compile("from __future__ import annotations\n" + source.replace(self.old, self.new), self.name, "exec"),
            plain.__globals__,
            made,
        )
        changed = made[plain.__name__]
        setattr(self.owner, self.function, property(changed) if is_property else changed)
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)


ACTIVATION, LOOP = activation.Activation, bodyloop.BodyLoop
CAUGHT = [
    Mutant(
        "the end of a child is given before it is delivered",
        children.ChildRun,
        "result",
        "host.journal.delivered(self._end_id)",
        "host.journal.by_id.get(self._end_id)",
        draw=FamilyDraw,
    ),
    Mutant(
        "sets of tasks iterate by address",
        branches.BranchTask,
        "__hash__",
        "return self._number",
        "return id(self) >> 4",
    ),
    Mutant(
        "steps are started before the frontier",
        ACTIVATION,
        "_deliver",
        "        if body.busy:\n",
        "        self._start()\n        if body.busy:\n",
    ),
    Mutant(
        "several records are delivered before the body rests",
        ACTIVATION,
        "_deliver",
        "if not self._deliver_one(journal.records[journal.cursor]):",
        "while journal.cursor < len(journal.records) - 1 and journal.records[journal.cursor].step_id in self.calls:\n"
        "            self._deliver_one(journal.records[journal.cursor])\n"
        "        if not self._deliver_one(journal.records[journal.cursor]):",
    ),
    Mutant(
        "a live result is delivered when it is durable, not in its turn",
        execution.Execution,
        "_record",
        "host.journal.land(position, record)",
        "host.journal.land(position, record); call.fire(record)",
    ),
    Mutant(
        "rest is assumed after a number of callbacks",
        LOOP,
        "drain",
        "            left -= 1\n",
        "            left -= 1\n            if left < MOST_CALLBACKS - 8 and not self.host.journal.exhausted:\n"
        "                ready.appendleft(handle)\n                break\n",
    ),
    Mutant(
        "events from outside are chosen before the frontier",
        external.Outside,
        "_write",
        "host.over or not host.journal.settled or host.journal.cursor != frontier",
        "host.over",
        also=((ACTIVATION, "_proceed", "if event is not None and self.journal.settled:", "if event is not None:"),),
    ),
    Mutant(
        "time is the clock, not the record",
        ACTIVATION,
        "_deliver_one",
        "body.now = max(body.now, record.at)",
        "body.now = max(body.now, self.recorder.clock())",
        start=6,
    ),
    Mutant("branches are held weakly", LOOP, "create_task", "self.tasks[task] = None", "pass"),
    Mutant(
        "a run rests while a step is in flight",
        ACTIVATION,
        "_proceed",
        "if self.execution.busy or",
        "if (self.execution.busy and not self.waits) or",
    ),
    Mutant(
        "a run at rest is never suspended",
        ACTIVATION,
        "_proceed",
        "self._come_to_rest()",
        "self._arm(self.next_due())",
    ),
    Mutant(
        "a wait without an end counts as stuck",
        ACTIVATION,
        "_proceed",
        "elif self.waits or",
        "elif (self.waits and self.next_due() is not None) or",
        start=48,
    ),
    Mutant("a cancelled step is left alone", execution.Execution, "_cancel", "call.runner.cancel()", "pass"),
    Mutant(
        "records are delivered as they land, not by position",
        replay.Journal,
        "land",
        "self._landed[position] = record\n    self._release()",
        "self._open.pop(position); self.records.append(record); self.by_id[record.step_id] = record",
    ),
    Mutant(
        "the worker does not wait for the steps of a run that it releases",
        ACTIVATION,
        "run",
        "await self.execution.ended()",
        "[]",
    ),
    Mutant(
        "branches that a body leaves are not ended",
        ACTIVATION,
        "_tear_down",
        "self.body.close_down(self.recorder.settings.teardown_rounds)",
        "[]",
    ),
    Mutant(
        "a call with other arguments is not noticed",
        ACTIVATION,
        "registered",
        "record.kind is not waiter.kind or record.digest != waiter.digest",
        "False",
        probe="code_changed",
    ),
    Mutant(
        "the live object is delivered, not what was stored",
        steps,
        "attempt",
        "value=back",
        "value=value",
        probe="decoded_form",
    ),
    Mutant("garbage is collected while the body runs", LOOP, "drain", "gc.disable()", "pass", probe="collector"),
    Mutant(
        "a record that nobody asks for is ignored when the body returns",
        ACTIVATION,
        "_finish",
        "if self._mismatch is None and body.done and journal.cursor < len(journal.records):",
        "if False:",
        probe="code_changed",
    ),
    Mutant(
        "a call knows what had been delivered when it was recorded, not when it was made",
        execution.Execution,
        "_new_record",
        "seen=call.seen",
        "seen=self.host.journal.seen",
        probe="seen",
    ),
]

EQUIVALENT = [
    Mutant("ids are counted per run, not per branch", LOOP, "scope", "return task.scope if", "return self.root if"),
    Mutant(
        "the outcome of a cancelled call is recorded",
        execution.Execution,
        "_record",
        "if call.done() or host.over:",
        "if host.over:",
    ),
]
"""Not caught, and known not to be: branch paths are not needed for determinism on one version (their value is that a change in
one branch leaves the ids of the others alone), and an outcome that is recorded for nobody is delivered to nobody."""
