"""The fixtures of the suite. A backend's test file gives `backend_harness`; everything else is made from it here.

After each test the store audits itself: whatever a test did, no invariant that rows can show may be broken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from durable.model import ALL
from durable.protocol import Store

from .harness import FaultyStore, Harness
from .scenario import Scene


@pytest.fixture
async def store(backend_harness: Harness) -> AsyncIterator[Store]:
    """A fresh store that nobody else reaches; sound at the end."""
    opened = await backend_harness.open()
    yield opened
    assert list(await opened.audit(scope=ALL)) == []
    await opened.close()


@pytest.fixture
async def scene(store: Store, backend_harness: Harness) -> Scene:
    """The fresh store with short words for it."""
    return Scene(store, backend_harness)


@pytest.fixture
async def scenes(backend_harness: Harness) -> AsyncIterator[tuple[Scene, Scene]]:
    """Two independent stores on the same data, as two processes have them; sound at the end."""
    first = await backend_harness.open(shared=True)
    second = await backend_harness.open(shared=True)
    yield Scene(first, backend_harness), Scene(second, backend_harness)
    assert list(await first.audit(scope=ALL)) == []
    await second.close()
    await first.close()


@pytest.fixture
async def shared_scene(backend_harness: Harness) -> AsyncIterator[Scene]:
    """A store on data that the application's own connections reach, too; sound at the end."""
    opened = await backend_harness.open(shared=True)
    yield Scene(opened, backend_harness)
    assert list(await opened.audit(scope=ALL)) == []
    await opened.close()


@pytest.fixture
def faulty(store: Store) -> FaultyStore:
    """The fresh store, with answers that get lost on request."""
    return FaultyStore(store)
