"""What is installed is what was promised: one version, the entry points, the types, the licence.

The session `wheel` runs these against the built wheel; everywhere else they look at the editable installation.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DISTRIBUTION = importlib.metadata.distribution("durable-sdk")
PACKAGES = [Path(path).name for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]


def home(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None, package
    assert found.origin is not None, f"{package} has no __init__.py"
    return Path(found.origin).parent


def test_the_version_has_one_source() -> None:
    """pyproject.toml says it and the installed metadata repeats it; no file of the packages holds it a second time."""
    version = PROJECT["project"]["version"]
    assert DISTRIBUTION.version == version
    written = [
        str(file)
        for package in PACKAGES
        for file in home(package).rglob("*.py")
        if f'"{version}"' in file.read_text(encoding="utf-8")
    ]
    assert written == []


@pytest.mark.parametrize("name", sorted(PROJECT["project"]["entry-points"]["durable.backends"]))
def test_each_backend_is_found_by_its_entry_point_and_can_open(name: str) -> None:
    """The SDK finds a backend by the scheme of a URL: the entry point of that name loads and has `open`."""
    (found,) = importlib.metadata.entry_points(group="durable.backends", name=name)
    assert callable(found.load().open)


def test_the_console_script_starts_and_knows_its_name() -> None:
    """`durable --help` lists the commands and exits with 0."""
    assert PROJECT["project"]["scripts"] == {"durable": "durable.cli:main"}
    (script,) = DISTRIBUTION.entry_points.select(group="console_scripts", name="durable")
    assert callable(script.load())
    command = Path(sys.executable).with_name("durable")
    answer = subprocess.run([str(command), "--help"], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "demo" in answer.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_the_types_are_published(package: str) -> None:
    """PEP 561: `py.typed` lies in each package, so that a user's type checker believes our annotations."""
    assert (home(package) / "py.typed").exists()


def test_the_licence_comes_along() -> None:
    """Apache-2.0, named in the metadata and there as text."""
    assert DISTRIBUTION.metadata["License-Expression"] == "Apache-2.0"
    (text,) = [file for file in DISTRIBUTION.files or () if file.name == "LICENSE"]
    assert "Apache License" in str(text.read_text())


def test_every_backend_lies_in_the_wheel() -> None:
    """A folder below backends/ that pyproject.toml forgets would work here and be missing for users."""
    folders = sorted(path.parent.name for path in ROOT.glob("backends/*/__init__.py"))
    if folders:  # not when the wheel is tested, far from the sources
        assert [name for name in PACKAGES if name != "durable"] == folders
        assert PROJECT["tool"]["importlinter"]["root_packages"] == ["durable", *folders]


def test_the_sdk_imports_without_the_tools_of_the_roof() -> None:
    """`import durable` stays quick: the command line, its libraries and pytest are loaded by those who use them."""
    code = "import durable, sys; print(*sorted({'typer', 'rich', 'pytest', 'hypothesis', 'durable.cli'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
