"""The vocabulary: ids, tenants, and the table of transitions."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

from durable.model import TERMINAL, TRANSITIONS, Status, new_run_id, tenant_id


def test_a_run_id_is_a_uuid_of_version_7_and_lies_beside_those_of_its_time() -> None:
    before = time.time_ns() // 1_000_000
    made = [uuid.UUID(new_run_id()) for _ in range(2_000)]
    after = time.time_ns() // 1_000_000
    assert len(set(made)) == len(made)
    assert {(one.version, one.variant) for one in made} == {(7, uuid.RFC_4122)}
    assert all(before <= one.int >> 80 <= after for one in made)


def test_a_tenants_id_is_the_same_for_the_same_name_always() -> None:
    assert tenant_id("acme") == uuid.UUID("c59eab95-96f7-594a-bceb-3926fae0f92b")
    assert tenant_id("acme") != tenant_id("Acme")


@pytest.mark.parametrize("name", ["", None, 7, b"acme"])
def test_a_tenant_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="not empty"):
        tenant_id(name)


def test_terminal_states_are_left_only_by_an_operators_retry_and_completed_never() -> None:
    leaving = {(before, door) for (before, _), doors in TRANSITIONS.items() for door in doors if before in TERMINAL}
    assert leaving == {(status, "operator_retry") for status in TERMINAL - {Status.COMPLETED}}


def test_every_state_can_be_reached_and_every_other_one_left() -> None:
    assert {after for _, after in TRANSITIONS} == set(Status)
    assert {before for before, _ in TRANSITIONS} - {None} == set(Status) - {Status.COMPLETED}


def test_only_a_holder_or_the_sweep_ends_what_runs() -> None:
    doors = {door for (before, _), doors in TRANSITIONS.items() for door in doors if before is Status.RUNNING}
    assert doors == {"settle", "retry", "hand_back", "suspend", "sweep"}
