"""What the state machine and the races have found, as straight code, and each scene of the machine by itself.

A failure that Hypothesis shrinks is written down here as the calls that make it, so that it stays a test whatever Hypothesis chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from statemachine.driver import now
from statemachine.machine import FUNCTIONS, LEASE, REACHED, SCENES, SECOND
from statemachine.machine_upkeep import WholeMachine

from durable import model as m
from durable.settings import Settings
from durable_sqlite import backend


@pytest.fixture
def machine() -> Iterator[WholeMachine]:
    made = WholeMachine()
    yield made
    made.driver.compare(every_journal=True)
    made.teardown()


@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_is_the_same_in_both(machine: WholeMachine, scene: str) -> None:
    machine.scene(scene)


def test_the_scenes_make_every_transition_but_the_one_that_needs_damage() -> None:
    REACHED.clear()
    for scene in SCENES:
        machine = WholeMachine()
        machine.scene(scene)
        if scene == "held":
            machine.fork(0)
            machine.settle_all(machine.live()[:1], ["completed"])
            machine.submit([machine.new(name="f")])
            machine.ask([max(machine.oracle.runs)], m.ALL)
        elif scene == "graph":
            machine.ask([max(machine.oracle.runs)], m.ALL)
        machine.teardown()
    wanted = {(old, new, door) for (old, new), doors in m.TRANSITIONS.items() for door in doors}
    assert wanted - REACHED == {(m.Status.PENDING, m.Status.FAILED, "claim")}


def test_a_claim_asked_again_hands_out_what_was_recorded_since(machine: WholeMachine) -> None:
    machine.submit([machine.new(name="f")])
    request = machine.request()
    (lease,) = machine.claim_by(request)
    machine.append_one(lease, "step")
    machine.claim_by(request)


def test_an_ask_before_a_hand_back_makes_it_claimable_now(machine: WholeMachine) -> None:
    machine.submit([machine.new(name="f")])
    (lease,) = machine.claim_by(machine.request())
    machine.ask([lease.run_id], m.ALL)
    assert machine.settle_by([(lease, m.HandedBack(after=60 * SECOND))]) == ["landed"]
    assert machine.driver.rows()[lease.run_id].available_at is None


def test_a_child_and_its_parent_that_land_in_one_batch_wake_nobody(machine: WholeMachine) -> None:
    machine.scene("family")
    parent = machine.live()[0]
    child = next(lease for lease in machine.live() if machine.oracle.runs[lease.run_id].parent_run_id == parent.run_id)
    machine.settle_by([(child, m.Completed(output="1")), (parent, m.Completed(output="2"))])
    assert machine.driver.rows()[parent.run_id].wake_seq == 0


def test_a_claim_that_ends_a_child_hands_out_its_parent_with_that_wake(machine: WholeMachine) -> None:
    machine.submit([machine.new(name="f", priority=2)])
    (parent,) = machine.claim_by(machine.request())
    start = machine.record(parent, "start", 40)
    late = dataclasses.replace(start.children[0], deadline_after=2 * SECOND)
    machine.append_by([(parent, dataclasses.replace(start, children=(late,)))])
    machine.settle_by([(parent, m.HandedBack())])
    machine.driver.time += 6 * SECOND
    machine.claim_by(machine.request())
    assert machine.oracle.runs[parent.run_id].wake_seq == 1


DAMAGES = {
    "its input": "UPDATE durable_run SET input = CAST(x'22ff22' AS TEXT) WHERE run_id = 'r2'",
    "its tags": "UPDATE durable_run SET tags = '{' WHERE run_id = 'r2'",
    "its journal": """INSERT INTO durable_step (run_id, step_id, kind, position, seen, digest, fence, created_at, result)
                      VALUES ('r2', 'a', 'step', 0, -1, 'd', 1, 1, CAST(x'ff' AS TEXT))""",
    "the kind of a record": """INSERT INTO durable_step (run_id, step_id, kind, position, seen, digest, fence, created_at, result)
                               VALUES ('r2', 'a', 'no such kind', 0, -1, 'd', 1, 1, '{"v":1}')""",
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_run_that_can_not_be_read_lands_failed_and_strands_nobody(tmp_path: Path, what: str) -> None:
    """Semantics 9, and the transition from pending to failed by a claim: damage comes from outside."""

    async def scenario() -> None:
        store = await backend.open(f"sqlite:///{tmp_path / 'damaged.db'}", settings=Settings())
        await store.enqueue([m.NewRun(run_id=f"r{n}", name="f", input="1", seed=b"s") for n in (1, 2, 3)])
        with contextlib.closing(sqlite3.connect(tmp_path / "damaged.db")) as con:
            con.execute(DAMAGES[what])
            con.execute("UPDATE durable_run SET attempts = 1, replay_family = 'new' WHERE run_id = 'r2'")
            con.commit()
        request = m.ClaimRequest(
            mark="m", queues={"default": 9}, functions=FUNCTIONS, limit=9, lease=LEASE, family="new", scope=m.ALL
        )
        assert [one.run.run_id for one in await store.claim(request)] == ["r1", "r3"]
        with contextlib.closing(sqlite3.connect(tmp_path / "damaged.db")) as con:
            (status, kind) = con.execute("SELECT status, error_kind FROM durable_run WHERE run_id = 'r2'").fetchone()
        assert (status, kind) == ("failed", "payload")
        await store.close()

    asyncio.run(scenario())


def test_the_oracle_is_not_asked_for_what_it_gives(machine: WholeMachine) -> None:
    """A wrong oracle or a wrong store is seen: a state that one of them does not have fails the comparison."""
    machine.submit([machine.new(name="f")])
    machine.oracle.runs["r001"].priority += 1
    with pytest.raises(AssertionError, match="priority"):
        machine.driver.compare()
    machine.oracle.runs["r001"].priority -= 1
    now(machine.store.request_cancel(["r001"], scope=m.ALL))
    with pytest.raises(AssertionError, match="status"):
        machine.driver.compare()
    machine.oracle.request_cancel(["r001"], m.ALL, "")
