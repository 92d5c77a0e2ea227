"""The state machine on PostgreSQL, shorter than on SQLite: an operation takes milliseconds there. `DURABLE_POSTGRES_STATE_*` make it
longer."""

from __future__ import annotations

import os

import pytest
from statemachine import machine
from statemachine.on_server import SCENES, play_histories, play_scene
from statemachine.postgres import PostgresDriver

EXAMPLES = int(os.environ.get("DURABLE_POSTGRES_STATE_EXAMPLES", "25"))
STEPS = int(os.environ.get("DURABLE_POSTGRES_STATE_STEPS", "50"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * EXAMPLES)
def test_postgres_and_the_oracle_show_the_same_after_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Driver", PostgresDriver)
    play_histories(EXAMPLES, STEPS, derandomize="DURABLE_POSTGRES_STATE_EXAMPLES" not in os.environ)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_of_the_machine_is_the_same_on_postgres(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Driver", PostgresDriver)
    play_scene(scene)
