"""The fixture of all that run on three stores."""

from __future__ import annotations

import pytest
from stores.everywhere import STORES, migrated_url


@pytest.fixture(scope="module", params=STORES)
def shared_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated database that the tests of one module share; each keeps to a tenant of its own."""
    return migrated_url(request.param, tmp_path_factory.mktemp(request.param))
