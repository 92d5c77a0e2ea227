"""What the tests of tenants share: a migrated database per store and module, and clients on it. Each test has tenants of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from stores.everywhere import SETTINGS, STORES, migrated_url

import durable


@pytest.fixture(scope="module", params=STORES)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database that the tests of one module share."""
    return migrated_url(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def client(url: str) -> AsyncIterator[durable.Client]:
    """The plain client on it."""
    async with durable.Client(url, settings=SETTINGS) as opened:
        yield opened
