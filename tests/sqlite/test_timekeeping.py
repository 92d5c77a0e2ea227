"""A wall clock that is set back or forward under a file (semantics 11, 15; the store's clock is that of its machine).

Both clocks of the machine are replaced, so that an hour passes at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from durable.model import ALL, Status
from durable.protocol import Store
from durable.settings import DAY, HOUR, MINUTE, SECOND, Settings
from durable.testing.conformance.scenario import LEASE, Scene
from durable_sqlite import backend, timekeeping


class Machine:
    """The two clocks of a machine: one that can be set, and one that can not."""

    def __init__(self) -> None:
        self.wall = 1_800_000_000 * SECOND
        self.steady = 5 * HOUR

    def pass_time(self, micros: int) -> None:
        self.wall += micros
        self.steady += micros

    def set_clock(self, by: int) -> None:
        self.wall += by

    def sleep(self, micros: int) -> None:
        """Suspended: only the wall clock goes on, where the system has no clock that counts it."""
        self.wall += micros


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(time, "time_ns", lambda: made.wall * 1_000)
    monkeypatch.setattr(timekeeping, "boottime", lambda: made.steady)
    return made


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Scene]:
    store: Store = await backend.open(f"sqlite:///{path}", settings=Settings())
    try:
        yield Scene(store, None)  # type: ignore[arg-type]  # the machine moves its clock
    finally:
        await store.close()


async def test_the_clock_goes_on_at_half_its_pace_until_the_machine_s_has_caught_up(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path / "s.db") as scene:
        before = scene.store.clock()
        assert before == machine.wall
        machine.set_clock(-HOUR)
        with caplog.at_level(logging.WARNING, "durable.sqlite"):
            assert scene.store.clock() == before
            for minutes in range(1, 121):
                machine.pass_time(MINUTE)
                assert scene.store.clock() == before + minutes * MINUTE // 2
            assert scene.store.clock() == machine.wall
        machine.pass_time(MINUTE)
        assert scene.store.clock() == machine.wall
        assert [record.message for record in caplog.records if "went back" in record.message] == [
            "the clock of this machine went back by 3600.0 s: what is due comes after at most twice its time until it has caught up"
        ]


async def test_a_clock_that_is_set_forward_is_followed_and_ends_a_lead(tmp_path: Path, machine: Machine) -> None:
    async with opened(tmp_path / "s.db") as scene:
        machine.set_clock(HOUR)
        assert scene.store.clock() == machine.wall
        machine.set_clock(-HOUR)
        assert scene.store.clock() == machine.wall + HOUR
        machine.set_clock(HOUR + MINUTE)
        assert scene.store.clock() == machine.wall
        machine.sleep(DAY)
        assert scene.store.clock() == machine.wall


async def test_it_never_runs_backwards_whatever_is_done_to_the_machine_s(tmp_path: Path, machine: Machine) -> None:
    async with opened(tmp_path / "s.db") as scene:
        last = scene.store.clock()
        for step in (-1, 3, -SECOND, 7, -HOUR, MINUTE, -2 * DAY, HOUR, -MINUTE, 3 * DAY, -5):
            for passed in (0, 1, 3, SECOND):
                machine.pass_time(passed)
                machine.set_clock(step)
                now = scene.store.clock()
                assert now >= last
                last = now


async def test_leases_and_due_times_go_on_when_the_machine_s_clock_is_set_back(
    tmp_path: Path, machine: Machine
) -> None:
    """(11, 15) They wait for twice their time at the most, not until the clock has caught up."""
    async with opened(tmp_path / "s.db") as scene:
        held = await scene.take()
        delayed = await scene.start(delay=MINUTE)
        machine.set_clock(-HOUR)
        assert (await scene.sweep()).returned == []
        machine.pass_time(2 * LEASE + SECOND)
        assert list((await scene.sweep()).returned) == [held.run.run_id]
        machine.pass_time(MINUTE)
        assert (await scene.promote()).count == 1
        assert (await scene.get(delayed.run_id)).available_at is None
        assert list(await scene.store.audit(scope=ALL)) == []


async def test_a_process_that_opens_the_file_after_the_step_agrees_with_those_before(
    tmp_path: Path, machine: Machine
) -> None:
    """Otherwise the old ones would take its fresh leases for lapsed, or it would wait an hour for theirs."""
    async with opened(tmp_path / "s.db") as scene:
        held = await scene.take()
        stamp = scene.store.clock()
    machine.set_clock(-HOUR)  # while nobody has the file open
    async with opened(tmp_path / "s.db") as scene:
        assert scene.store.clock() == stamp
        machine.pass_time(2 * LEASE + SECOND)
        assert list((await scene.sweep()).returned) == [held.run.run_id]
        assert (await scene.get(held.run.run_id)).status is Status.PENDING


async def test_stamps_of_a_clock_that_was_simply_wrong_are_not_followed(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set_clock(30 * DAY)
    async with opened(tmp_path / "s.db") as scene:
        await scene.start()
    machine.set_clock(-30 * DAY)
    with caplog.at_level(logging.WARNING, "durable.sqlite"):
        async with opened(tmp_path / "s.db") as scene:
            assert scene.store.clock() == machine.wall
    assert "stamps that lie 30.0 days ahead" in caplog.text
