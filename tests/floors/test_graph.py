"""What a graph refuses when it is defined, and what it is made of (semantics 77). No store, no worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import durable
from durable import Graph, RegistrationError, Registry
from durable.codec import Codec
from durable.function import default_registry

declared = Registry("floors graph")


@durable.function(registry=declared)
async def load(ctx: durable.Context, number: int) -> int:
    return number


@durable.function(registry=declared)
async def both(ctx: durable.Context, left: int, right: int = 0) -> int:
    return left + right


@durable.function(registry=declared)
async def alone(ctx: durable.Context) -> str:
    return ""


@durable.function(registry=declared)
async def other_argument(ctx: durable.Context, number: str) -> str:
    return number


async def plain(number: int) -> int:
    return number


def diamond(**options: Any) -> Graph:
    graph = Graph("diamond", registry=Registry("of a test"), **options)
    graph.node("load", load)
    graph.node("left", both, inputs=["load"])
    graph.node("right", both, inputs=["load", "load"], after=["load"])
    graph.node("end", both, inputs=["right", "left"])
    graph.node("tidy", alone, after=["end"])
    return graph


MISTAKES: dict[str, Callable[[Graph], object]] = {
    "a name that is taken": lambda graph: graph.node("load", alone),
    "an unknown node": lambda graph: graph.node("new", alone, after=["nobody"]),
    "an unknown input": lambda graph: graph.node("new", load, inputs=["nobody"]),
    "itself": lambda graph: graph.node("new", alone, after=["new"]),
    "a cycle, whose first edge leads forward": lambda graph: [
        graph.node("chicken", alone, after=["egg"]),
        graph.node("egg", alone, after=["chicken"]),
    ],
    "a node of another graph": lambda graph: graph.node("new", alone, after=[diamond().nodes["load"]]),
    "text where a list belongs": lambda graph: graph.node("new", alone, after="load"),
    "a node where a list belongs": lambda graph: graph.node("new", load, inputs=graph.nodes["load"]),  # type: ignore[arg-type]
    "more inputs than parameters": lambda graph: graph.node("new", load, inputs=["load", "left"]),
    "fewer inputs than parameters": lambda graph: (
        graph.node("new", both.using(), inputs=[]) and graph.node("newer", two_needed, inputs=["load"])
    ),
    "inputs for a function without parameters": lambda graph: graph.node("new", alone, inputs=["load"]),
    "a plain function": lambda graph: graph.node("new", plain),  # type: ignore[arg-type]
    "an idempotency key": lambda graph: graph.node("new", alone.using(idempotency_key="k")),
    "a coalesce key": lambda graph: graph.node("new", alone.using(coalesce_key="k")),
    "a detached node": lambda graph: graph.node("new", alone.using(detached=True)),
    "a name that can be no step": lambda graph: graph.node("a/b", alone),
    "a node after the graph is in use": lambda graph: [graph.function, graph.node("new", alone)],
}


@durable.function(registry=declared)
async def two_needed(ctx: durable.Context, left: int, right: int) -> int:
    return left + right


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_can_not_be_a_node_is_refused_at_its_definition(mistake: str) -> None:
    graph = diamond()
    with pytest.raises(RegistrationError) as refused:
        MISTAKES[mistake](graph)
    assert refused.value.hint


def test_a_node_that_was_refused_leaves_the_graph_as_it_was() -> None:
    graph = diamond()
    with pytest.raises(RegistrationError):
        graph.node("new", alone, after=["nobody"])
    assert list(graph.nodes) == ["load", "left", "right", "end", "tidy"]
    graph.node("new", alone)


def test_a_graph_without_nodes_and_one_without_a_name_are_refused() -> None:
    with pytest.raises(RegistrationError):
        Graph("empty", registry=Registry("of a test")).function  # noqa: B018
    with pytest.raises(RegistrationError):
        Graph("a:b")
    with pytest.raises(RegistrationError):
        Graph("")


def test_too_many_nodes_are_refused() -> None:
    graph = Graph("large", registry=Registry("of a test"))
    for number in range(1_000):
        graph.node(f"n{number}", alone)
    with pytest.raises(RegistrationError):
        graph.node("one more", alone)


def test_a_retry_of_the_graph_itself_is_refused_where_it_is_given() -> None:
    """At the call that starts it in another body it would be too late: its rows are made with the record of the start, and what fails
    there is the store's error, for which a run is handed back again and again."""
    with pytest.raises(RegistrationError, match="its nodes"):
        diamond().function.using(retry=durable.Retry(3))


def test_the_arguments_fit_every_node_that_takes_them() -> None:
    codec = Codec(1_000)
    graph = diamond()
    assert graph.function.encode_arguments(codec, (7,), {}) == "[[7],{}]"
    with pytest.raises(TypeError):
        diamond().function.encode_arguments(codec, (), {})
    with pytest.raises(durable.SerializationError):
        diamond().function.encode_arguments(codec, ("seven",), {})
    graph = Graph("two takers", registry=Registry("of a test"))
    graph.node("number", load)
    graph.node("text", other_argument)
    with pytest.raises(durable.SerializationError):
        graph.function.encode_arguments(codec, (7,), {})


def test_nobody_takes_arguments_where_every_node_has_inputs_or_no_parameter() -> None:
    graph = Graph("without", registry=Registry("of a test"))
    graph.node("alone", alone)
    assert graph.function.encode_arguments(Codec(1_000), (), {}) == "[[],{}]"
    with pytest.raises(TypeError):
        graph.function.encode_arguments(Codec(1_000), (1,), {})


def test_the_fingerprint_is_that_of_the_topology_and_is_stored_with_it() -> None:
    one, same = diamond(), diamond()
    assert one.function.fingerprint == same.function.fingerprint
    run = one.function.new_run("[[1],{}]", tenant=None)
    assert run.fingerprint == one.function.fingerprint
    assert [node["node"] for node in json.loads(run.options or "")["graph"]] == list(one.nodes)
    fingerprints = {one.function.fingerprint}
    changes: tuple[dict[str, Any], ...] = (
        {"fn": load},
        {"after": []},
        {"after": ["left"]},
        {"name": "tidier"},
        {"fn": alone.using(queue="other")},  # not the topology: the same as before
    )
    for changed in changes:
        graph = Graph("diamond", registry=Registry("of a test"))
        for node in list(one.nodes.values())[:-1]:
            graph.node(node.name, node.function, after=node.after, inputs=node.inputs)
        given: dict[str, Any] = {"name": "tidy", "fn": alone, "after": ["end"], **changed}
        graph.node(given["name"], given["fn"], after=given["after"])
        fingerprints.add(graph.function.fingerprint)
    assert len(fingerprints) == 5


def test_a_graph_is_in_the_registry_as_soon_as_it_has_a_node() -> None:
    registry = Registry("of a test")
    graph = Graph("registered", registry=registry, version="2", queue="graphs")
    graph.node("alone", alone)
    found = registry.get("registered", "2")
    assert found is graph.function
    assert found is not None
    assert (found.version, found.queue) == ("2", "graphs")
    assert default_registry.get("registered", "2") is None


def test_two_graphs_of_one_name_in_two_modules_are_refused() -> None:
    registry = Registry("of a test")
    Graph("twice", registry=registry).node("alone", alone)
    elsewhere: dict[str, Any] = {"__name__": "elsewhere", "registry": registry, "durable": durable, "alone": alone}
    with pytest.raises(RegistrationError):
        exec('durable.Graph("twice", registry=registry).node("alone", alone)', elsewhere)
