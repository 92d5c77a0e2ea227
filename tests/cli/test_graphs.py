"""The command line shows a graph: its nodes, their edges, and how each stands (semantics 77)."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.test_cli import Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_show_and_explain_list_the_nodes_of_a_graph(shell: Shell) -> None:
    (started,) = shell("start", "shop:bundle", "tea")
    for command in (("runs", "show"), ("explain",)):
        (shown,) = shell(*command, started["id"])
        assert [(node["node"], node["status"]) for node in shown["nodes"]] == [
            ("quote", "not written yet"), ("doubled", "not written yet"), ("broken", "not written yet"), ("never", "not written yet"),
        ]  # fmt: skip
    shell.drain()
    for command in (("runs", "show"), ("explain",)):
        (shown,) = shell(*command, started["id"])
        assert [(node["node"], node["status"], node["after"]) for node in shown["nodes"]] == [
            ("quote", "completed", []), ("doubled", "completed", []), ("broken", "failed", ["quote"]), ("never", "cancelled", ["broken"]),
        ]  # fmt: skip
        assert [node["error_kind"] for node in shown["nodes"]] == [None, None, "exception", "upstream"]
        assert all(node["id"] for node in shown["nodes"])
    (node,) = shell("explain", shown["nodes"][3]["id"])
    assert "did not complete" in " ".join(node["reasons"])
    assert "nodes" not in node


def test_a_replay_of_a_graph_and_of_its_nodes_finds_nothing(shell: Shell) -> None:
    (started,) = shell("start", "shop:bundle", "tea")
    shell.drain()
    assert {row["function"]: row["problem"] for row in shell("replay", "shop")} == {"quote": None, "doubled": None}
    assert [row["problem"] for row in shell("replay", "shop", "--run", started["id"])] == [None]
