"""The floors of the house are import contracts in pyproject.toml; here they are checked with every run of the tests."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
LINT = "from importlinter.cli import lint_imports_command as lint; lint()"


def test_a_file_uses_only_what_lies_beneath_it() -> None:
    """Every contract of [tool.importlinter] is kept; the report of a broken one is the message of this test."""
    answer = subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=ROOT,  # where the contracts are
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, f"\n{answer.stdout}\n{answer.stderr}"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("durable", "durable_sqlite", cache_dir=None)


def test_a_backend_never_imports_the_public_names(graph: grimp.ImportGraph) -> None:
    """`import durable` would pull in the engine; a backend names the low modules that it needs."""
    backends = [module for module in graph.modules if module.startswith("durable_")]
    assert backends
    guilty = sorted(module for module in backends if "durable" in graph.find_modules_directly_imported_by(module))
    assert guilty == []


def test_nothing_beneath_the_roof_imports_the_public_names(graph: grimp.ImportGraph) -> None:
    """durable/__init__.py gathers the names for users; whoever is gathered there may not look back."""
    roof = ("durable.cli", "durable.telemetry", "durable.dashboard", "durable.testing")
    beneath = [module for module in graph.modules if module.startswith("durable.") and not module.startswith(roof)]
    guilty = sorted(module for module in beneath if "durable" in graph.find_modules_directly_imported_by(module))
    assert guilty == []


def test_no_module_is_named_for_having_no_purpose(graph: grimp.ImportGraph) -> None:
    """A module named utils, helpers, common or base says that nobody knew where its content belongs."""
    nameless = {"utils", "util", "helpers", "helper", "common", "base", "misc"}
    assert sorted(module for module in graph.modules if module.rpartition(".")[2].strip("_") in nameless) == []


def names_in(folder: Path) -> Iterator[str]:
    """The modules of a folder, and its folders with a slash behind."""
    for path in folder.iterdir():
        if path.suffix == ".py":
            yield path.stem
        elif path.is_dir() and path.name not in {"__pycache__", "migrations"}:
            yield f"{path.name}/"


def mapped(title: str) -> dict[str, list[str]]:
    """A table of CONTRIBUTING: the first cell of each row, and the names in code that stand in the others."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.split(f"| {title} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {
        first: [name for code in re.findall(r"`([^`]+)`", " ".join(rest)) for name in code.split()]
        for first, *rest in cells
    }


def test_contributing_names_every_file_once() -> None:
    """Its map tells where a line lives; a file that nobody told is a file that nobody finds."""
    floors = [name for names in mapped("floor | what").values() for name in names]
    assert sorted(floors) == sorted(names_in(ROOT / "durable"))
    for folder, names in mapped("folder").items():
        assert sorted(names) == sorted(names_in(ROOT / folder.strip("`"))), folder
    common = [name for row in mapped("files in `backends/durable_*/`") for name in row.replace("`", "").split()]
    for folder, names in mapped("its own files").items():
        assert sorted([*common, *names]) == sorted(names_in(ROOT / "backends" / folder.strip("`"))), folder


def test_every_file_has_its_floor() -> None:
    """A module that stands in no contract may import whatever it likes."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = {one["id"]: " ".join(one["layers"]) for one in contracts if one["type"] == "layers"}
    for contract, folder, entry in (
        ("floors", "durable", {"__init__", "__main__"}),
        ("engine", "durable/_engine", set()),
    ):
        floored = set(re.findall(r"(\w+)\)", layers[contract]))
        assert {name.rstrip("/") for name in names_in(ROOT / folder)} - floored == entry
