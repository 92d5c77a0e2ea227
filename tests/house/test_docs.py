"""The documents keep what they say: their Python runs, their commands exist, their links lead somewhere.

A Python block stands alone and is run as a program in an empty directory, with DURABLE_URL set to a fresh database: here a SQLite file,
in `stores/test_examples.py` the other stores. One that imports a store's driver belongs to that store. A block that can not run anywhere
carries the comment `# not run` with its reason.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from durable.cli import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.MULTILINE)
NOT_RUN = "# not run"
PLAIN_TERMINAL = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
DRIVERS = {
    "sqlite": re.compile(r"^(?:import|from) sqlite3\b", re.MULTILINE),
    "postgresql": re.compile(r"^(?:import|from) (?:psycopg|asyncpg|sqlalchemy)\b", re.MULTILINE),
    "mongodb": re.compile(r"^(?:import|from) (?:pymongo|motor|bson)\b", re.MULTILINE),
}
SQLITE_URL = re.compile(r"sqlite:///[\w./]+")


class Block(NamedTuple):
    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(*languages: str) -> Iterator[Block]:
    for document in documents():
        content = document.read_text(encoding="utf-8")
        for found in FENCE.finditer(content):
            if found["language"] in languages:
                indent = found["indent"]
                text = "".join(line.removeprefix(indent) for line in found["text"].splitlines(keepends=True))
                yield Block(document, content.count("\n", 0, found.start()) + 2, found["language"], text)


def commands() -> Iterator[tuple[str, list[str]]]:
    """The command lines in shell blocks, as (place, words), without a prompt and without comments."""
    for block in blocks("sh", "bash", "console", "shell"):
        for offset, line in enumerate(block.text.splitlines()):
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield f"{block.document.relative_to(ROOT)}:{block.line + offset}", words


def runnable(store: str) -> list[Block]:
    """The blocks that are programs for this store: those that name no driver, or its own."""
    plain = [block for block in PYTHON if NOT_RUN not in block.text]
    named = {block: {name for name, driver in DRIVERS.items() if driver.search(block.text)} for block in plain}
    return [block for block in plain if named[block] in (set(), {store})]


def run(block: Block, place: Path, url: str) -> None:
    """The block as a program of its own, warnings being errors, with nothing but a fresh directory and the URL."""
    program = place / "example.py"
    text = block.text if url.startswith("sqlite") else SQLITE_URL.sub(lambda _: url, block.text)
    program.write_text(text, encoding="utf-8")
    answer = subprocess.run(
        [sys.executable, "-W", "error", program.name],
        cwd=place,
        env={**os.environ, "DURABLE_URL": url, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == 0, f"{block.place}\n{answer.stdout}\n{answer.stderr}"


PYTHON = list(blocks("python"))
OURS = [(place, words) for place, words in commands() if words[0] == "durable"]
DEV = [(place, words) for place, words in commands() if words[:2] == ["python3", "dev.py"]]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_each_python_block_compiles(block: Block) -> None:
    """Also the ones that are not run are Python."""
    compile(block.text, block.place, "exec")


def test_each_python_block_that_is_to_run_runs_on_some_store() -> None:
    run_somewhere = {block for store in DRIVERS for block in runnable(store)}
    assert [block.place for block in PYTHON if NOT_RUN not in block.text and block not in run_somewhere] == []


@pytest.mark.parametrize("block", runnable("sqlite"), ids=lambda block: block.place)
def test_each_python_block_runs(block: Block, tmp_path: Path) -> None:
    """On SQLite, as written."""
    run(block, tmp_path, f"sqlite:///{tmp_path / 'example.db'}")


@pytest.mark.parametrize(("place", "words"), OURS, ids=[" ".join(words) for _, words in OURS])
def test_each_durable_command_exists(place: str, words: list[str]) -> None:
    """`--help` of the command answers, and it knows each option that the document shows. That there is a program of that name which knows
    them all is for `test_packaging.py`; here a process for each command would only take time."""
    plain = [word for word in words[1:] if not word.startswith("-")]
    options = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    answer = CliRunner(env=PLAIN_TERMINAL).invoke(app, [*plain, "--help"])
    assert answer.exit_code == 0, f"{place}: {answer.output}"
    assert [option for option in options if option not in answer.stdout] == [], place


@pytest.mark.parametrize(("place", "words"), DEV, ids=[" ".join(words[2:]) for _, words in DEV])
def test_each_job_named_for_dev_py_is_a_session(place: str, words: list[str]) -> None:
    """The jobs of dev.py are the sessions of noxfile.py, and `setup`."""
    sessions = set(re.findall(r"^@nox\.session.*\ndef (\w+)\(", (ROOT / "noxfile.py").read_text("utf-8"), re.MULTILINE))
    assert words[2] in {*sessions, "setup"}, place


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_each_link_inside_the_repository_leads_somewhere(document: Path) -> None:
    """To a file that exists and, after #, to a heading in it."""
    broken: list[str] = []
    for found in LINK.finditer(FENCE.sub("", document.read_text(encoding="utf-8"))):
        target, _, anchor = found["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(found["target"])
    assert broken == []


def anchors(document: Path) -> set[str]:
    """The headings of a document as a forge names them."""
    titles = HEADING.findall(FENCE.sub("", document.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
