"""The conformance suite on SQLite through encryption: the contract is the same when payloads are encrypted at rest (72).

The rooms in which payloads travel; with DURABLE_ENCRYPTED_SUITE=all every room.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, cast

import pytest
from conformance.test_sqlite import SqliteHarness

from durable.codec import KeyRing
from durable.encrypted import EncryptedStore, room_for
from durable.protocol import Store
from durable.settings import Settings
from durable.testing.conformance import MODULES, collect
from durable.testing.conformance.harness import Harness

ROOMS: Final = (
    "test_cancel",
    "test_children",
    "test_coalescing",
    "test_enqueue_idempotency",
    "test_fork",
    "test_journal",
    "test_lost_answers",
    "test_mailbox",
    "test_payloads",
    "test_retry",
    "test_schedules",
    "test_settle",
    "test_suspension",
    "test_transaction",
)

globals().update(collect(MODULES if os.environ.get("DURABLE_ENCRYPTED_SUITE") == "all" else ROOMS))


class EncryptedHarness(SqliteHarness):
    """As SQLite's, with an encrypted store around each."""

    name = "sqlite, encrypted"

    async def open(self, *, shared: bool = False) -> Store:
        store = await self.open_within(room_for(Settings()), shared=shared)
        return cast(Store, EncryptedStore(store, KeyRing([bytes(range(32))]), Settings()))


@pytest.fixture
async def backend_harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = EncryptedHarness(tmp_path)
    yield harness
    await harness.close()
