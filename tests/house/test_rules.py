"""No rule of the contract is empty: each has a sentence in a docstring and a test that can fail.

The rules are those of docs/reference/semantics.md. A docstring of `durable/` or `backends/` names one by its number in brackets,
`(13)` or `(12, 29a)` or `(73-75)`, or as `semantics 57`. A test names one by `@rule(13)` or in its docstring in the same way; a test
file of a single subject may name its rules in the docstring of the module.
`python tests/house/test_rules.py` prints the table rule → sentences and tests; `... 13` one rule of it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "semantics.md"
RULES: Sequence[str] = (
    *(str(number) for number in range(1, 29)),
    "28a",
    "28b",
    "29",
    "29a",
    *(str(number) for number in range(30, 78)),
)

NUMBER = r"\d{1,2}[ab]?"
NUMBERS = rf"{NUMBER}(?:(?:, | and |–|-| to ){NUMBER})*"
IN_BRACKETS = re.compile(rf"[(,;] ?(?:semantics |rules? )?({NUMBERS})(?=[;)])")
IN_WORDS = re.compile(rf"\b(?:semantics|rules?) ({NUMBERS})\b")
PART = re.compile(rf"({NUMBER})(?: ?(?:–|-|to) ?({NUMBER}))?")


def named(text: str) -> Iterator[str]:
    """The rules that a text names; a span such as 73-75 names all between."""
    for found in (*IN_BRACKETS.finditer(text), *IN_WORDS.finditer(text)):
        for first, last in PART.findall(found[1]):
            if first not in RULES:
                continue
            if last in RULES and RULES.index(last) > RULES.index(first):
                yield from RULES[RULES.index(first) : RULES.index(last) + 1]
            else:
                yield first


def packages() -> list[Path]:
    """The packages that the distribution is made of, where they are imported from: the checkout or an installed wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = []
    for entry in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        spec = importlib.util.find_spec(Path(entry).name)
        assert spec is not None, f"{entry} can not be imported"
        assert spec.submodule_search_locations, f"{entry} is no package"
        found.append(Path(spec.submodule_search_locations[0]))
    return found


def sources(*folders: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every Python file below the folders: its place and its tree."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            place = path.relative_to(folder.parent).as_posix()
            yield place, ast.parse(path.read_text(encoding="utf-8"))


def is_suite(place: str) -> bool:
    return place.startswith("durable/testing/conformance/")


@functools.cache
def stated() -> Mapping[str, Sequence[str]]:
    """Rule → the places of the docstrings that state it (also those below a class's fields)."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for place, tree in sources(*packages()):
        if is_suite(place):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                for rule in named(node.value.value):
                    found[rule].append(f"{place}:{node.lineno}")
    return found


@functools.cache
def shown() -> Mapping[str, Sequence[str]]:
    """Rule → the tests that show it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for place, tree in sources(*packages(), ROOT / "tests"):
        if place.endswith("house/test_rules.py") or not (is_suite(place) or place.startswith("tests/")):
            continue
        if Path(place).name.startswith("test_") and not is_suite(place):
            for rule in named(ast.get_docstring(tree) or ""):
                found[rule].append(place)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                rules = dict.fromkeys((*marked(node), *named(ast.get_docstring(node) or "")))
                for rule in rules:
                    found[rule].append(f"{place}:{node.lineno} {node.name}")
    return found


def marked(test: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The numbers of `@rule(...)`."""
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "rule":
            for argument in decorator.args:
                assert isinstance(argument, ast.Constant), f"{test.name}: @rule takes numbers as they stand in the page"
                assert str(argument.value) in RULES, f"{test.name}: there is no rule {argument.value!r}"
                yield str(argument.value)


@functools.cache
def published() -> Mapping[str, str]:
    """Rule → its sentence on the page."""
    text = PAGE.read_text(encoding="utf-8")
    parts = re.split(rf"^\*\*({NUMBER})\.\*\* ", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_has_every_rule_once_and_in_order() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(rf"^\*\*({NUMBER})\.\*\* ", text, flags=re.MULTILINE) == list(RULES)
    short = [rule for rule, sentence in published().items() if len(sentence.split()) < 8]
    assert short == [], "these rules say nothing"


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_a_sentence_in_a_docstring(rule: str) -> None:
    assert stated()[rule], f"no docstring of durable/ or backends/ has ({rule}): {published()[rule].strip()}"


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_test_that_can_fail(rule: str) -> None:
    assert shown()[rule], f"no test is marked @rule({rule!r}) or names it in its docstring: {published()[rule].strip()}"


def test_every_test_of_the_suite_shows_a_rule() -> None:
    without = [
        f"{place}:{node.lineno} {node.name}"
        for place, tree in sources(*packages())
        for node in ast.walk(tree)
        if is_suite(place)
        and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not list(marked(node))
    ]
    assert without == []


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RULES:
        print(f"{wanted}. {' '.join(published()[wanted].split())}")
        print("   stated:", ", ".join(stated()[wanted]) or "nowhere")
        print("   shown:", *(f"\n      {test}" for test in shown()[wanted] or ["nowhere"]))
