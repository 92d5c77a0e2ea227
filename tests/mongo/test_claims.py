"""How claims choose (rules 7, 8): in order, as long as nobody else is at the same heads."""

from __future__ import annotations

from durable.settings import SECOND
from durable.testing.conformance.scenario import Scene


async def test_a_claim_that_finds_heads_which_end_here_goes_on_in_order(scene: Scene) -> None:
    """Heads that are gone since they landed are no sign of another claimer: only among several is anything left to chance."""
    for _ in range(4):
        held = await scene.take()
        await scene.hand_back(held)
        assert await scene.cancel(held.run.run_id)  # asked before its first record: it ends at the next claim
        assert await scene.claim(1) == []
        assert (await scene.get(held.run.run_id)).status == "cancelled"
    runs = [await scene.start() for _ in range(12)]
    taken = [one.run.run_id for _ in runs for one in await scene.claim(1)]
    assert taken == [run.run_id for run in runs]


async def test_a_claim_that_finds_heads_past_their_deadline_goes_on_in_order(scene: Scene) -> None:
    for _ in range(4):
        await scene.start(deadline_after=SECOND)
        await scene.later(2 * SECOND)
        assert await scene.claim(1) == []
    runs = [await scene.start() for _ in range(12)]
    taken = [one.run.run_id for _ in runs for one in await scene.claim(1)]
    assert taken == [run.run_id for run in runs]
