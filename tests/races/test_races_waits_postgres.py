"""The races of `waits.py` on PostgreSQL: 1,000 over the five kinds, or as many as `DURABLE_WAIT_RACES` says."""

from __future__ import annotations

import pytest
from races.arena import Arena, Pair
from races.test_races_postgres import postgres_arena as postgres_arena  # noqa: PLC0414 -- a fixture
from races.waits import EACH, ORDERS, WAITS


@pytest.mark.slow
@pytest.mark.timeout(300 + EACH)
@pytest.mark.parametrize("pair", WAITS, ids=lambda pair: pair.__name__)
def test_no_wake_is_lost_and_one_end_is_reached(postgres_arena: Arena, pair: Pair) -> None:
    postgres_arena.trials(pair, EACH, audits=False)
    print(dict(ORDERS))
