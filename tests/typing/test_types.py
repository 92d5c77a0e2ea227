"""The stories type-check and each mistake is reported, by mypy and by pyright, both strict."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXPECTED = {f"E{number}" for number in range(1, 15)}


def _marks() -> dict[int, str]:
    lines = (HERE / "mistakes.py").read_text().splitlines()
    return {number: found[1] for number, line in enumerate(lines, 1) if (found := re.search(r"# (E\d+)$", line))}


def _told(reported: set[tuple[str, int]]) -> tuple[set[str], set[tuple[str, int]]]:
    """The mistakes that were reported, and reports where nothing is wrong. A report for a decorator may stand at the `def`."""
    marks = _marks()
    wrong = {(file, line) for file, line in reported if file != "mistakes.py"}
    hit: set[str] = set()
    for file, line in reported - wrong:
        mark = marks.get(line) or marks.get(line - 1)
        if mark is None:
            wrong.add((file, line))
        else:
            hit.add(mark)
    return hit, wrong


def test_every_mistake_has_its_mark() -> None:
    assert set(_marks().values()) == EXPECTED


def test_mypy_strict_takes_the_stories_and_reports_each_mistake() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--no-error-summary", "--hide-error-context",
         "--cache-dir", str(ROOT / ".mypy_cache" / "typing"), "--follow-imports", "silent", "stories.py", "mistakes.py"],
        cwd=HERE, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    reported = {(m[1], int(m[2])) for m in re.finditer(r"^(\w+\.py):(\d+): error:", asked.stdout, re.MULTILINE)}
    assert _told(reported) == (EXPECTED, set()), asked.stdout + asked.stderr


def test_pyright_strict_takes_the_stories_and_reports_each_mistake(tmp_path: Path) -> None:
    pyright = shutil.which("pyright") or shutil.which("pyright", path=str(Path(sys.executable).parent))
    assert pyright is not None, "pyright is not installed (group `types`)"
    for name in ("stories.py", "mistakes.py"):
        shutil.copy(HERE / name, tmp_path / name)
    config = {"include": ["stories.py", "mistakes.py"], "extraPaths": [str(ROOT)],
              "typeCheckingMode": "strict", "pythonVersion": "3.11", "reportUnusedFunction": False}  # fmt: skip
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps(config))
    asked = subprocess.run(
        [pyright, "--outputjson", "--pythonpath", sys.executable, "--project", str(project)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.stdout.lstrip().startswith("{"), asked.stdout + asked.stderr
    found = [one for one in json.loads(asked.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    reported = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in found}
    assert _told(reported) == (EXPECTED, set()), json.dumps(found, indent=1)
