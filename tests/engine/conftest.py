"""What the engine's tests share: a client on a fresh store, a worker that is quick to notice, and waiting for a condition.

No test here sleeps for luck or asserts how long something took: `until` waits for what must become true, generously.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import durable
from durable.events import Event

PATIENCE = 30.0


async def until(condition: Callable[[], Any] | Callable[[], Awaitable[Any]], what: str = "it") -> Any:
    """Wait until the condition is true; returns its value. Fails after a long time, saying for what it waited."""
    async with asyncio.timeout(PATIENCE):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)
    pytest.fail(f"waited in vain for {what}")


class Seen(list[Event]):
    """The events of a client, in order."""

    def of(self, kind: type[Event]) -> list[Any]:
        """Those of one class."""
        return [event for event in self if type(event) is kind]


@pytest.fixture
async def client() -> AsyncIterator[durable.Client]:
    """On a store in memory, with short polls."""
    async with durable.Client("sqlite:///:memory:", settings={"poll": "50ms", "poll_idle": "50ms"}) as opened:
        yield opened


@pytest.fixture
def seen(client: durable.Client) -> Seen:
    """The events of `client`."""
    events = Seen()
    client.events.attach(events.append)
    return events


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in a file of its own."""
    return f"sqlite:///{tmp_path / 'engine.db'}"
