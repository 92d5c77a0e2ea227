"""The state machine on MongoDB, shorter than on SQLite: an operation takes milliseconds there. `DURABLE_MONGO_STATE_*` make it longer."""

from __future__ import annotations

import os

import pytest
from statemachine import machine
from statemachine.mongo import LEASE, MongoDriver
from statemachine.on_server import SCENES, play_histories, play_scene

EXAMPLES = int(os.environ.get("DURABLE_MONGO_STATE_EXAMPLES", "15"))
STEPS = int(os.environ.get("DURABLE_MONGO_STATE_STEPS", "25"))


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_mongodb_and_the_oracle_show_the_same_after_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Driver", MongoDriver)
    monkeypatch.setattr(machine, "LEASE", LEASE)
    play_histories(EXAMPLES, STEPS, derandomize="DURABLE_MONGO_STATE_EXAMPLES" not in os.environ)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_of_the_machine_is_the_same_on_mongodb(scene: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Driver", MongoDriver)
    monkeypatch.setattr(machine, "LEASE", LEASE)
    play_scene(scene)
