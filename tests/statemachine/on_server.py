"""The state machine on a store with a server: random histories, shorter than on SQLite, and every scene. Each store brings its driver."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from statemachine.machine import SCENES
from statemachine.machine_upkeep import WholeMachine


def play_histories(examples: int, steps: int, *, derandomize: bool) -> None:
    """The store and the oracle show the same after every operation."""
    run_state_machine_as_test(
        WholeMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def play_scene(scene: str) -> None:
    """One scene, and every journal compared at its end."""
    played: Any = WholeMachine()
    try:
        played.scene(scene)
        played.driver.compare(every_journal=True)
    finally:
        played.teardown()


__all__ = ["SCENES", "play_histories", "play_scene"]
