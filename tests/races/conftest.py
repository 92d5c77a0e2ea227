"""One arena for all pairs of a session."""

from collections.abc import Iterator

import pytest
from races.arena import Arena


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    made = Arena(tmp_path_factory.mktemp("races") / "races.db")
    yield made
    made.close()
