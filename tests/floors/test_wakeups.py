"""Waiters of one process: who is woken by which announcement, on plain loops and without a store (67)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from durable import wakeups
from durable.wakeups import Waiters

LONG = 3600.0
"""Longer than any test runs: who returns was woken."""
GENEROUS = 60.0


async def waiting(waiters: Waiters, *topics: str) -> asyncio.Task[None]:
    """A task that waits: it has begun to."""
    begun = asyncio.Event()
    task = asyncio.create_task(waiters.wait(topics, LONG, lambda _: begun.set()))
    async with asyncio.timeout(GENEROUS):
        await begun.wait()
    return task


@pytest.mark.parametrize(
    "announce",
    [
        lambda waiters: waiters.announce(["run:1"]),
        lambda waiters: waiters.announce_all("run:"),
        lambda waiters: waiters.announce_all(),
    ],
    ids=["the topic", "its kind", "anything"],
)
async def test_news_wakes_who_waits_and_is_not_missed_by_who_comes_later(
    announce: Callable[[Waiters], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "RECENT", GENEROUS)
    waiters = Waiters()
    task = await waiting(waiters, "queue:a", "run:1")
    announce(waiters)
    async with asyncio.timeout(GENEROUS):
        await task
        await waiters.wait(["run:1"], LONG)
    again = await waiting(waiters, "run:1")  # seen by now: it waits, though nothing was announced since
    again.cancel()


async def test_what_was_announced_for_all_topics_long_ago_is_no_news_to_who_comes_first_and_a_topic_s_own_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wakeups, "RECENT", -1.0)
    waiters = Waiters()
    known = await waiting(waiters, "run:0")
    known.cancel()
    await asyncio.wait([known])
    waiters.announce(["run:2"])
    waiters.announce_all()
    first = await waiting(waiters, "run:1")  # it waits, though something was announced for all
    first.cancel()
    async with asyncio.timeout(GENEROUS):
        await waiters.wait(["run:2"], LONG)
        await waiters.wait(["run:0"], LONG)  # who has waited for these before may have missed it


@pytest.mark.parametrize(
    "announce",
    [lambda waiters: waiters.announce(["queue:b"]), lambda waiters: waiters.announce_all("queue:")],
    ids=["another topic", "another kind"],
)
async def test_news_of_others_wakes_nobody(announce: Callable[[Waiters], None]) -> None:
    waiters = Waiters()
    task = await waiting(waiters, "run:1")
    announce(waiters)
    witness = await waiting(waiters, "run:2")  # whatever the announcement had put on the loop has run by then
    assert not task.done()
    for one in (task, witness):
        one.cancel()


async def test_only_the_first_waiter_is_told_that_it_is_the_first() -> None:
    waiters, told = Waiters(), list[bool]()
    tasks = [asyncio.create_task(waiters.wait([f"run:{number}"], LONG, told.append)) for number in range(3)]
    async with asyncio.timeout(GENEROUS):
        while len(told) < 3:
            await asyncio.sleep(0)
        assert (told, waiters.waiting, waiters.awaited("run:"), waiters.awaited("queue:")) == (
            [True, False, False],
            3,
            True,
            False,
        )
        waiters.announce_all()
        await asyncio.gather(*tasks)
    assert (waiters.waiting, waiters.awaited("")) == (0, False)


async def test_a_wait_whose_beginning_fails_leaves_nothing_behind() -> None:
    waiters = Waiters()

    def fail(_: bool) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await waiters.wait(["run:1"], LONG, fail)
    assert (waiters.waiting, waiters._waiters) == (0, {})


def test_the_memory_for_announcements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "REMEMBERED", 100)
    waiters = Waiters()
    for number in range(1_000):
        waiters.announce([f"run:{number}"])
    assert len(waiters._announced) <= 100
    assert "run:999" in waiters._announced
