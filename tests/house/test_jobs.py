"""dev.py, noxfile.py and pyproject.toml speak of the same jobs, and no test escapes its time budget."""

from __future__ import annotations

import ast
import fnmatch
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[2]
DEV: dict[str, Any] = runpy.run_path(str(ROOT / "dev.py"))
GROUPS: dict[str, list[Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]


def budgets() -> dict[str, tuple[str, int]]:
    """The table as it is written in noxfile.py (nox itself is not installed where the wheel is tested)."""
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BUDGETS":
            return {str(suite): value for suite, value in ast.literal_eval(node.value).items()}
    raise AssertionError("noxfile.py has no table BUDGETS")


def test_what_a_job_needs_is_a_dependency_group() -> None:
    """Each group that dev.py installs stands in pyproject.toml."""
    assert {group for groups in DEV["JOB_GROUPS"].values() for group in groups} <= set(GROUPS)


def test_included_groups_are_unfolded_once() -> None:
    """`dev` holds all of them, and no requirement twice."""
    wanted = DEV["_requirements"](GROUPS, "dev")
    assert len(wanted) == len(set(wanted))
    assert {entry for group in GROUPS.values() for entry in group if isinstance(entry, str)} == set(wanted)


def test_an_unknown_option_is_named_and_nothing_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    """dev.py answers 2 and says where options of the job belong."""
    assert DEV["main"](["tests", "--verbose"]) == 2
    assert "--verbose" in capsys.readouterr().err


def test_every_test_file_belongs_to_a_suite_with_a_time_budget() -> None:
    """A file below tests/ that fits no pattern of BUDGETS would be as slow as it likes."""
    patterns = [pattern for pattern, _ in budgets().values()]
    files = [path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert files
    assert [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)] == []


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("factor", [None, "1", "4"])
def test_a_suite_over_its_budget_fails_the_session_only_where_a_factor_is_set(
    factor: str | None, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer's slow machine passes and is told; CI, which says how slow it may be, fails beyond that."""
    monkeypatch.delenv("DURABLE_BUDGET_FACTOR", raising=False)
    if factor is not None:
        monkeypatch.setenv("DURABLE_BUDGET_FACTOR", factor)
    monkeypatch.setitem(sys.modules, "nox", MagicMock())  # not installed where the wheel is tested
    check = runpy.run_path(str(ROOT / "noxfile.py"))["_check_budgets"]
    report = tmp_path / "report.xml"
    seconds = 2 * budgets()["house"][1] / share  # of a process that had this share of a processor
    report.write_text(
        f'<testsuite><testcase classname="tests.house.test_jobs" name="slow" time="{seconds}"/></testsuite>'
    )
    session = MagicMock()
    check(session, report, 0.0, share)
    said = [str(call) for call in (*session.warn.mock_calls, *session.error.mock_calls)]
    assert session.error.called == (factor == "1")
    assert session.warn.called == (factor is None)
    assert all("the suite 'house' took" in sentence for sentence in said)


def test_tests_write_to_memory_only_where_there_is_room_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere they write to the disk as ever: 64 MB, which is what containers have there, would end in the middle of a test."""
    monkeypatch.setitem(sys.modules, "nox", MagicMock())
    names = runpy.run_path(str(ROOT / "noxfile.py"))
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    monkeypatch.setattr(names["os"], "access", lambda path, mode: True)
    monkeypatch.setattr(names["os"], "statvfs", lambda path: MagicMock(f_flag=0))
    for processes, missing, found in ((2, 0, "/dev/shm"), (2, 1, None), (4, 0, "/dev/shm"), (4, 1, None)):
        free = processes * names["ROOM"] - missing
        monkeypatch.setattr(names["shutil"], "disk_usage", lambda path, free=free: MagicMock(free=free))
        assert names["_memory"](processes) == found
