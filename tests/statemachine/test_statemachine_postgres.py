"""The state machine on PostgreSQL, shorter than on SQLite: an operation takes milliseconds there. `DURABLE_POSTGRES_STATE_*` make it
longer."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from statemachine import machine
from statemachine.machine import SCENES
from statemachine.machine_upkeep import WholeMachine
from statemachine.postgres import PostgresDriver

EXAMPLES = int(os.environ.get("DURABLE_POSTGRES_STATE_EXAMPLES", "25"))
STEPS = int(os.environ.get("DURABLE_POSTGRES_STATE_STEPS", "50"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * EXAMPLES)
def test_postgres_and_the_oracle_show_the_same_after_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Driver", PostgresDriver)
    run_state_machine_as_test(
        WholeMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize="DURABLE_POSTGRES_STATE_EXAMPLES" not in os.environ,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_of_the_machine_is_the_same_on_postgres(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Driver", PostgresDriver)
    played = WholeMachine()
    try:
        played.scene(scene)
        played.driver.compare(every_journal=True)
    finally:
        played.teardown()
