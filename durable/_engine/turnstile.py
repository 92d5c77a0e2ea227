"""What the store answers to one batch is followed through before the answers to the next are handed out.

A worker has one `Turnstile`; its lanes and its claims pass it before they hand answers to runs. The loop runs what is ready in turns, so
without it the runs of two batches that are answered at about the same time would go on side by side, and neither would write anything
before both are through: the loop and the store would wait for each other in turns. One after the other, the store has the next records of
the first while the loop is with the second, and runs that were claimed together go on writing together.

It asks nobody how far they are, and waits for no body: it counts turns of the loop, and lets the next one pass sooner where they are long.
"""

from __future__ import annotations

import asyncio
import collections
from typing import Final

TURNS: Final = 12
"""From an answer in the hands of a run until its next record is on its way it takes eight or nine: the run goes on, a step begins and
ends, its record is put, a flush begins, it has a connection, and the socket takes it. An empty turn costs 1 or 2 µs."""
LONGEST: Final = 0.01
"""Seconds for all of them: beside bodies that keep the loop busy the order is not worth a longer wait."""


class Turnstile:
    """Lets one pass, and the next one when that is followed through; first come, first served."""

    def __init__(self, turns: int = TURNS, longest: float = LONGEST) -> None:
        self._turns = turns
        self._longest = longest
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def passed(self) -> None:
        """Wait for one's turn."""
        if self._closed:
            future = self._loop.create_future()
            self._waiting.append(future)
            await future
        else:
            self._close(self._turns)

    def _close(self, turns: int) -> None:
        self._closed = True
        self._loop.call_soon(self._count, turns, self._loop.time() + self._longest)

    def _count(self, left: int, until: float) -> None:
        if left and self._loop.time() < until:
            self._loop.call_soon(self._count, left - 1, until)
            return
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # its task may have been cancelled
                future.set_result(None)
                self._close(self._turns + 1)  # one more until it goes on
                return
        self._closed = False


__all__ = ["Turnstile"]
