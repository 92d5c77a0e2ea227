"""Random bodies with children and sagas beside all that `programs` has, and what becomes of a child in the simulated world.

`FamilyDraw` draws them; the nodes run as those of `programs` do. The fate of a child follows from where it was started and from nothing
else: a crash of its parent does not change when it lands, nor how. The old draws are left as they are: golden journals are made of them.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from replay import programs
from replay.programs import STEPS, Effects, Node, Room

from durable.codec import plain, read_envelope
from durable.context import Context
from durable.function import Registry, function
from durable.model import ChildEnd, RecordKind, Status, StepRecord
from durable.settings import SECOND

KINDS = ["child"] * 4 + ["started"] * 2 + ["map"] * 2 + ["abandoned"]
SAGAS = ["saga"] * 6


@function(registry=Registry("families"))
async def kid(ctx: Context, number: int) -> str:
    """Started by the bodies; the world decides what becomes of it."""
    raise AssertionError("the simulated world runs no child")


async def undo(uid: int) -> str:
    """What a saga registers; it fails now and then."""
    return await Effects.act("undo", uid, 0.1)


class FamilyDraw(programs.Draw):
    """A tree with children and sagas in it."""

    leaves = programs.LEAVES + KINDS
    branches = programs.BRANCHES + SAGAS

    def _parts(self, kind: str, depth: int) -> tuple[Any, ...]:
        draw = self.random
        if kind == "child":
            return ()
        if kind in ("started", "abandoned"):
            return (self._some(max(depth, 3), 1, 2), draw.choice([3, 15]))
        if kind == "map":
            return (draw.randint(1, 5), draw.choice([None, 1, 2]), draw.random() < 0.5)
        if kind == "saga":
            return (
                [draw.choice("ABC") for _ in range(draw.randint(1, 3))],
                self._some(depth, 1, 3),
                draw.random() < 0.2,
            )
        return super()._parts(kind, depth)


def end_of(record: StepRecord) -> ChildEnd:
    """What becomes of the child that this record started."""
    draw = random.Random(f"{record.step_id}:{record.digest}")
    status = draw.choice([Status.COMPLETED] * 8 + [Status.FAILED] * 2 + [Status.CANCELLED])
    completed = status is Status.COMPLETED
    return ChildEnd(
        run_id=read_envelope(record.result)[1]["run_id"],
        step_id=record.step_id,
        status=status,
        output=plain.write(f"kid {record.step_id}") if completed else None,
        error=None if completed else "it had to be",
        error_kind=None if completed else "exception",
        error_detail=None,
        at=record.at + draw.choice([0, 2, 10, 40]) * SECOND,
    )


def landed(records: list[StepRecord], now: int) -> list[ChildEnd]:
    """The children that have landed by now, in the order of their landing."""
    ends = [end_of(record) for record in records if record.kind is RecordKind.START]
    return sorted((end for end in ends if end.at <= now), key=lambda end: (end.at, end.run_id))


async def run_child(node: Node, room: Room, ctx: Context) -> Any:
    return await ctx.run(kid, node[1])


async def run_started(node: Node, room: Room, ctx: Context) -> Any:
    started = await ctx.start(kid, node[1])
    for part in node[2]:
        await programs.evaluate(part, room)
    return [await started.result(), await started.result()]


async def run_abandoned(node: Node, room: Room, ctx: Context) -> Any:
    """A wait for a child that is given up, and taken up again."""
    started = await ctx.start(kid, node[1])
    try:
        return await asyncio.wait_for(started.result(), node[3])
    except TimeoutError:
        room.tell(node[1], "given up")
        for part in node[2]:
            await programs.evaluate(part, room)
        return await started.result()


async def run_map(node: Node, room: Room, ctx: Context) -> Any:
    found = await ctx.map(kid, range(node[2]), limit=node[3], return_exceptions=node[4])
    return [one if isinstance(one, str) else type(one).__name__ for one in found]


async def run_saga(node: Node, room: Room, ctx: Context) -> Any:
    async with ctx.saga() as saga:
        for number, name in enumerate(node[2]):
            await saga.compensate(undo, node[1] * 10 + number)
            room.tell(node[1], "registered", number)
            await saga.step(STEPS[name], node[1])
        if node[4]:
            await saga.pivot()
        result = None
        for part in node[3]:
            result = await programs.evaluate(part, room)
        return result


programs.MORE.update(child=run_child, started=run_started, abandoned=run_abandoned, map=run_map, saga=run_saga)

__all__ = ["FamilyDraw", "end_of", "landed"]
