"""The races of `waits.py` on SQLite: 1,000 over the five kinds, or as many as `DURABLE_WAIT_RACES` says."""

from __future__ import annotations

import pytest
from races.arena import Arena, Pair
from races.waits import EACH, ORDERS, WAITS


@pytest.mark.timeout(300 + EACH)
@pytest.mark.parametrize("pair", WAITS, ids=lambda pair: pair.__name__)
def test_no_wake_is_lost_and_one_end_is_reached(arena: Arena, pair: Pair) -> None:
    arena.trials(pair, EACH, audits=False)
    print(dict(ORDERS))
