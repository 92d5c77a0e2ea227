"""The main job: a worker is killed in the middle of the fourth step, and the run resumes; and the proof can fail."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import durable
from durable.cli import demo, demo_steps
from durable.model import RecordKind, StepRecord


def test_the_killed_run_resumes_and_the_proof_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "durable", "demo", "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["holds"] is True
    assert proof["killed_pid"] != proof["resumed_pid"]
    assert [(step["recorded_by"], step["begun"], step["ended"]) for step in proof["steps"]] == [
        (1, 1, 1),
        (1, 1, 1),
        (1, 1, 1),
        (2, 2, 1),
        (2, 1, 1),
    ]


def test_what_an_interrupted_demo_left_in_the_store_is_not_in_the_proof_of_the_next(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with durable.SyncClient(url) as client:
        left = client.start(demo_steps.checkout, "order-42")
        done = subprocess.run(
            [sys.executable, "-m", "durable", "demo", "--json", "--url", url],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert client.get(left.id).status == "pending"


@dataclasses.dataclass
class _Run:
    id: str = "r"
    status: str = "completed"


def _line(step: str, what: str, pid: int) -> dict[str, Any]:
    return {"step": step, "what": what, "pid": pid}


def _record(step: str, position: int, fence: int) -> StepRecord:
    return StepRecord(
        step_id=step,
        kind=RecordKind.STEP,
        position=position,
        seen=position - 1,
        digest="",
        result="{}",
        at=position,
        started_at=None,
        fence=fence,
    )


def _case() -> tuple[list[StepRecord], list[str], list[dict[str, Any]]]:
    journal = [_record(step, place, 1 if place < 3 else 2) for place, step in enumerate(demo_steps.STEPS)]
    result = [f"{step} order-42: done" for step in demo_steps.STEPS]
    log = [_line(step, what, 1) for step in demo_steps.STEPS[:3] for what in ("begin", "end")]
    log += [_line("ship", "begin", 1), _line("ship", "begin", 2), _line("ship", "end", 2)]
    log += [_line("thank", "begin", 2), _line("thank", "end", 2)]
    return journal, result, log


def _faults(journal: Any, result: Any, log: Any, status: str = "completed") -> list[str]:
    run: Any = _Run(status=status)
    return demo._prove("sqlite://", journal, run, result, log, 1, 2).faults


def test_the_proof_holds_for_what_must_be() -> None:
    assert _faults(*_case()) == []


def test_a_recorded_step_that_ran_again_is_a_fault() -> None:
    journal, result, log = _case()
    assert _faults(journal, result, [*log, _line("pay", "begin", 2)])


def test_an_effect_that_is_there_twice_is_a_fault() -> None:
    journal, result, log = _case()
    assert _faults(journal, result, [*log, _line("thank", "end", 2)])


def test_a_record_that_is_lost_is_a_fault() -> None:
    journal, result, log = _case()
    assert _faults(journal[:-1], result, log)


def test_a_step_recorded_by_the_wrong_worker_is_a_fault() -> None:
    journal, result, log = _case()
    assert _faults([*journal[:2], _record("pack", 2, 2), *journal[3:]], result, log)


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_run_that_did_not_complete_is_a_fault(status: str) -> None:
    assert _faults(*_case(), status=status)
