"""The floors of the house are import contracts in pyproject.toml; here they are checked with every run of the tests."""

from __future__ import annotations

import subprocess
import sys
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
