"""The requirements as data are what they claim to be: enough of them, each a sentence, each of rules that exist, none twice."""

from __future__ import annotations

import collections
import re

import pytest
from conformance.play import Seen, differences  # type: ignore[import-not-found]  # a module of the tests
from conformance.requirement import _requirement, requirements  # type: ignore[import-not-found]
from house.test_rules import RULES  # type: ignore[import-not-found]

LEAST = 80
TOPICS = {"steps", "errors", "waits", "signals", "children", "map", "cancel", "sagas", "again", "changes", "graphs"}


def test_there_are_enough_of_every_topic() -> None:
    count = collections.Counter(one.topic for one in requirements())
    assert count.total() >= LEAST
    assert set(count) >= TOPICS
    assert [topic for topic in TOPICS if count[topic] < 5] == []


def test_each_is_one_sentence_and_none_is_there_twice() -> None:
    texts = [one.text for one in requirements()]
    assert [text for text, times in collections.Counter(texts).items() if times > 1] == []
    assert [text for text in texts if not re.fullmatch(r"[A-Za-z][^\n]{20,}\.", text)] == []


def test_each_names_rules_that_exist() -> None:
    assert [(one.text, rule) for one in requirements() for rule in one.rules if rule not in RULES] == []
    assert [one.text for one in requirements() if not one.rules] == []


def test_what_can_not_be_read_is_refused() -> None:
    given = {"text": "It does something or other.", "rules": [1], "program": "pass", "journal": []}
    _requirement("topic", given)
    with pytest.raises(TypeError, match="jornal"):
        _requirement("topic", {**given, "jornal": []})
    with pytest.raises(TypeError, match="journal"):
        _requirement("topic", {name: value for name, value in given.items() if name != "journal"})
    with pytest.raises(ValueError, match="outside"):
        _requirement("topic", {**given, "outside": [{"do": "pass"}]})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"status": "failed"}, "status"),
        ({"result": 2}, "result"),
        ({"kind": "stuck"}, "kind"),
        ({"error": "something else"}, "error"),
        ({"runs": {"child": {"completed": 1}}}, "runs"),
        ({"journal": [["a", "step", 1]]}, "journal"),
        ({"counts": {"a": 2}}, "body 'a'"),
        ({"counts": {"a": 1, "b": 1}}, "body 'b'"),
    ],
)
def test_a_difference_in_anything_is_found(change: dict[str, object], word: str) -> None:
    text = "It does something or other."
    given = {"text": text, "rules": [1], "program": "pass", "journal": [], "counts": {"a": 1}, "error": "no seat"}
    as_wanted: dict[str, object] = {
        "status": "completed",
        "result": None,
        "kind": None,
        "error": "no seat, and so on",
        "journal": [],
        "counts": {"a": 1},
    }
    requirement = _requirement("topic", given)
    assert differences(requirement, Seen(**as_wanted, runs={}, records=0), crashed=False) == []
    (found,) = differences(requirement, Seen(**{**as_wanted, "runs": {}, "records": 0, **change}), crashed=False)
    assert word in found
