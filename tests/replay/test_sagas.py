"""Sagas (semantics 49) under a crash and a cancel at every position: what was done is undone once, in reverse, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from replay.stage import Played, Stage, declared, play, twice

from durable import Context, Misuse, SyncContext
from durable.model import NewRecord, RecordKind
from durable.replay import CancelledEnding, Raised, Returned, TimedOutEnding

done: list[str] = []


async def book(what: str) -> str:
    done.append(f"book {what}")
    return what


async def unbook(what: str) -> None:
    done.append(f"unbook {what}")


async def fail() -> None:
    raise ValueError("no seat")


def book_here(what: str) -> str:
    done.append(f"book {what}")
    return what


def unbook_here(what: str) -> None:
    done.append(f"unbook {what}")


def fail_here() -> None:
    raise ValueError("no seat")


async def trip(ctx: Context) -> str:
    async with ctx.saga() as saga:
        for what in ("car", "hotel", "flight"):
            await saga.compensate(unbook, what)
            await saga.step(book, what)
        await ctx.step(fail)
    return "never"


def blocking_trip(ctx: SyncContext) -> str:
    with ctx.saga() as saga:
        for what in ("car", "hotel", "flight"):
            saga.compensate(unbook_here, what)
            saga.step(book_here, what)
        ctx.step(fail_here)
    return "never"


async def good_trip(ctx: Context) -> str:
    async with ctx.saga() as saga:
        for what in ("car", "hotel"):
            await saga.compensate(unbook, what)
            await saga.step(book, what)
        await ctx.sleep(60)
    return "there"


async def pivoting_trip(ctx: Context) -> str:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await saga.pivot()
        await saga.step(book, "hotel")
    return "there"


async def failing_past_the_pivot(ctx: Context) -> str:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.step(book, "car")
        await saga.pivot()
        await ctx.step(fail)
    return "never"


async def caught(ctx: Context) -> str:
    try:
        return await trip(ctx)
    except ValueError as error:
        return f"{error}; {await ctx.step(book, 'bus')}"


async def undo_fails(ctx: Context) -> None:
    async with ctx.saga() as saga:
        await saga.compensate(unbook, "car")
        await saga.compensate(fail)
        await saga.step(book, "car")
        raise LookupError("lost")


async def hasty(ctx: Context) -> None:
    async with ctx.saga() as saga:
        waiting = saga.compensate(unbook, "car")
        saga.step(book, "car")
        await waiting


async def outside(ctx: Context) -> None:
    saga = ctx.saga()
    await saga.compensate(unbook, "car")


@pytest.fixture(autouse=True)
def fresh() -> None:
    done.clear()


UNDONE = ["undo/3", "undo/2", "undo/1"]


@pytest.mark.parametrize("body", [trip, blocking_trip])
async def test_a_failure_undoes_in_reverse_order(body: Callable[..., Any]) -> None:
    played = await twice(body)
    assert isinstance(played.ending, Raised)
    assert str(played.ending.error) == "no seat"
    assert played.ids[-3:] == UNDONE
    assert done == [f"book {w}" for w in ("car", "hotel", "flight")] + [
        f"unbook {w}" for w in ("flight", "hotel", "car")
    ]


async def test_a_compensation_is_recorded_before_its_step_is_started() -> None:
    order: list[str] = []
    stage = Stage()

    async def seen(record: NewRecord) -> None:
        order.append(f"{record.kind} {len(done)}")

    stage.on_append = seen
    await play(trip, stage=stage)
    assert order[:4] == ["compensation 0", "step 1", "compensation 1", "step 2"]


@pytest.mark.parametrize("body", [trip, blocking_trip, caught, pivoting_trip, failing_past_the_pivot, good_trip])
async def test_a_saga_goes_on_after_a_crash_at_every_position(body: Callable[..., Any]) -> None:
    whole = await play(body)
    for cut in range(len(whole.records) + 1):
        again = await play(body, history=whole.records[:cut])
        assert again.ids == whole.ids
        assert type(again.ending) is type(whole.ending)


async def _cancelled_at(body: Callable[..., Any], position: int, history: Any = (), kind: str = "") -> Played:
    """Played, and asked to stop (or timed out) when the record of that position is being written; -1: before the first."""
    stage = Stage()
    activation = stage.begin(declared(body), history=history)

    def ask() -> None:
        if kind:
            activation.time_out(kind)
        else:
            activation.ask_cancel("")

    async def asking(record: NewRecord) -> None:
        if record.position == position:
            ask()

    stage.on_append = asking
    if position < 0:
        ask()
    ending = await asyncio.wait_for(activation.run(), 30)
    return Played(ending, activation.history, stage)


def _registered_and_undone(played: Played) -> tuple[list[str], list[str]]:
    count = sum(record.kind is RecordKind.COMPENSATION for record in played.records)
    return [f"undo/{n}" for n in range(count, 0, -1)], [i for i in played.ids if i.startswith("undo/")]


@pytest.mark.parametrize("body", [trip, blocking_trip, good_trip])
@pytest.mark.parametrize("kind", ["", "deadline"])
async def test_a_cancel_or_a_time_out_at_every_position_undoes_all_that_was_registered(
    body: Callable[..., Any], kind: str
) -> None:
    whole = await play(body)
    before = sum(
        record.kind is not RecordKind.STEP or not record.step_id.startswith("undo/") for record in whole.records
    )
    for position in range(-1, before - 1):
        cancelled = await _cancelled_at(body, position, kind=kind)
        assert isinstance(cancelled.ending, TimedOutEnding if kind else CancelledEnding), cancelled.ending
        registered, undone = _registered_and_undone(cancelled)
        assert undone == registered, (position, cancelled.ids)
        for cut in range(len(cancelled.records) + 1):  # and a crash at every position of that
            rest = await _cancelled_at(body, -1 if cut == 0 else 10_000, history=cancelled.records[:cut], kind=kind)
            registered, undone = _registered_and_undone(rest)
            if any(record.step_id in (":cancel", ":timeout") for record in cancelled.records[:cut]):
                assert undone == registered, (position, cut, rest.ids)
                assert rest.ids == cancelled.ids


async def test_past_the_pivot_nothing_is_undone_and_no_cancel_is_taken() -> None:
    played = await twice(failing_past_the_pivot)
    assert isinstance(played.ending, Raised)
    assert "unbook car" not in done
    for position in range(2, 4):
        cancelled = await _cancelled_at(pivoting_trip, position)
        assert isinstance(cancelled.ending, Returned), (position, cancelled.ending)
        assert "unbook car" not in done


async def test_a_body_may_go_on_after_what_was_undone() -> None:
    played = await twice(caught)
    assert played.value == "no seat; bus"


async def test_a_compensation_that_fails_does_not_keep_the_others_from_running() -> None:
    played = await twice(undo_fails)
    assert isinstance(played.ending, Raised)
    assert isinstance(played.ending.error, LookupError)
    assert "undo/2 (fail) failed too: ValueError: no seat" in played.ending.error.__notes__
    assert done[-1] == "unbook car"


@pytest.mark.parametrize("body", [hasty, outside])
async def test_a_step_whose_compensation_is_not_durable_is_refused(body: Callable[..., Any]) -> None:
    played = await play(body)
    assert isinstance(played.ending, Raised)
    assert isinstance(played.ending.error, Misuse)
    assert done == []
