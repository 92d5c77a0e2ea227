"""Static graphs (semantics 77): durable functions as nodes, edges that give order or data, submitted whole.

A graph is a durable function like any other (`graph.function`): started with a key, on a schedule, in the caller's transaction, or
by another body. Its body writes all nodes with all their edges in the write of its first record, and then waits for their ends; who
may start when is the store's business. The worker asks here for the arguments of a node that takes what others returned, and the
command line for the topology that a run was submitted with. Nothing here talks to a store.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from typing_extensions import TypedDict, TypeVar

from .calls import Call, Pending
from .codec import UNTYPED, Codec, Signature, digest, plain, value_envelope
from .endings import end_id
from .errors import GraphFailed, NonDeterminismError, NotFound, RegistrationError
from .function import Declaration, Function, Registry, default_registry
from .model import Dependency, ErrorKind, Json, NewRun, RecordKind, RunRecord, Status, StepRecord
from .options import Options, checked_text
from .retry import Retry
from .steps import checked_name

if TYPE_CHECKING:
    from .activation import Activation
    from .context import Context

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True, default=Any)

MOST_NODES = 1_000
"""They are written together, and what they return is one result."""
GRAPH = "graph"
RESULTS_OF = "results_of"


# -- definition -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Node(Generic[R_co]):
    """A node of one graph; `graph.node` makes it. Other nodes name it in `after` and `inputs`, by itself or by its name."""

    graph: Graph
    name: str
    function: Function[..., R_co]
    inputs: tuple[str, ...]
    after: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<node {self.name} of graph {self.graph.name}>"

    def shape(self) -> dict[str, Any]:
        """What the fingerprint is made of: the name, whose runs it is, and its edges."""
        version = {} if self.function.version is None else {"version": self.function.version}
        edges = {"inputs": list(self.inputs), "after": list(self.after)}
        return {"node": self.name, "function": self.function.name, **version, **edges}


class Graph:
    """Durable functions and what each of them waits for. Define it at the top of a module, like a function.

    `client.start(graph.function, ...)` writes a run for the graph and, in one transaction, one for each node with its edges (77). A
    node runs when all that it depends on have completed, with its own queue, priority, retries and worker. The result is what
    each node returned, by name; `await run.children()` has the run of each. If a node does not complete, those behind it are
    cancelled unseen (`upstream`), the others go on, and the graph lands failed with GraphFailed. `run.retry()` of the graph, or of
    the node, goes on from there.
    """

    def __init__(
        self, name: str, *, version: str | None = None, queue: str = "default", registry: Registry = default_registry
    ) -> None:
        """`version` and `queue` are those of the graph's own run, as for a function. Raises RegistrationError."""
        self._declared = Declaration(
            name=checked_name(name, "graph"),
            version=None if version is None else checked_text(version, "version", 255),
            queue=checked_name(queue, "queue"),
            retry=Retry.NEVER,
            timeout=None,
            priority=0,
            max_concurrency=None,
            cron=None,
            keep=None,
        )
        self._home = sys._getframe(1).f_globals.get("__name__", "")
        self._registry = registry
        self._nodes: dict[str, Node[Any]] = {}
        self._function: GraphFunction | None = None
        self._sealed = False

    @property
    def name(self) -> str:
        """The name by which its runs find it."""
        return self._declared.name

    @property
    def nodes(self) -> Mapping[str, Node[Any]]:
        """Its nodes in the order of their definition."""
        return dict(self._nodes)

    def node(
        self,
        name: str,
        fn: Function[..., R],
        /,
        *,
        after: Iterable[str | Node[Any]] = (),
        inputs: Sequence[str | Node[Any]] = (),
    ) -> Node[R]:
        """Add a node. What it depends on is defined before it, so that no cycle can be written.

        `inputs`: nodes whose results are its arguments, in this order. `after`: nodes that must only have completed. Without
        `inputs` it is called with the arguments of the graph, or with none if it takes none. `fn.using(...)` gives it a queue,
        a priority, retries and the like.

        Raises RegistrationError for a name that is taken, a node that is not (yet) one of this graph, an input that the function
        has no parameter for, options that a node can not have, and a graph that is in use.
        """
        if self._sealed:
            raise RegistrationError(
                f"graph {self.name!r} is in use and can not get another node",
                hint="add its nodes before .function is read",
            )
        checked_name(name, "node")
        if name in self._nodes:
            raise RegistrationError(
                f"graph {self.name!r} has a node {name!r} already", hint="names of nodes are unique"
            )
        if len(self._nodes) == MOST_NODES:
            raise RegistrationError(
                f"graph {self.name!r} has {MOST_NODES:,} nodes, the most there can be",
                hint="map over the rest in a node",
            )
        _check_function(name, fn)
        taken = tuple(self._known(name, "inputs", inputs))
        waited = tuple(one for one in dict.fromkeys(self._known(name, "after", after)) if one not in taken)
        _check_inputs(name, fn, taken)
        made = self._nodes[name] = Node(self, name, fn, taken, waited)
        self._function = _function(self._declared, tuple(self._nodes.values()), self._home)
        self._registry.add(self._function)
        return made

    def _known(self, name: str, where: str, given: Iterable[str | Node[Any]]) -> Iterable[str]:
        if isinstance(given, (str, Node)):
            raise RegistrationError(f"node {name!r}: {where} is a list of nodes", hint=f"{where}=[{given!r}]")
        for one in given:
            if isinstance(one, Node) and one.graph is not self:
                raise RegistrationError(
                    f"node {name!r}: {where} has {one!r}, a node of another graph",
                    hint="a graph depends on its own nodes only",
                )
            known = one.name if isinstance(one, Node) else one
            if known not in self._nodes:
                raise RegistrationError(
                    f"node {name!r}: {where} has {known!r}, which graph {self.name!r} does not have (yet)",
                    hint="define nodes before those that depend on them; so there can be no cycle",
                )
            yield known

    @property
    def function(self) -> Function[..., dict[str, Any]]:
        """The graph as a durable function: it takes the arguments of its nodes without inputs, and returns the result of each node by
        its name. From here on the graph is in use. Raises RegistrationError for a graph without nodes."""
        if self._function is None:
            raise RegistrationError(f"graph {self.name!r} has no node", hint="add one: graph.node(name, function)")
        self._sealed = True
        return self._function

    def __repr__(self) -> str:
        return f"<durable graph {self.name}: {', '.join(self._nodes) or 'empty'}>"


def _check_function(name: str, fn: object) -> None:
    if not isinstance(fn, Function):
        raise RegistrationError(
            f"node {name!r}: {fn!r} is not a durable function", hint="decorate it with @durable.function"
        )
    options = cast("Function[..., Any]", fn).options
    refused = ("idempotency_key", "coalesce_key") if not options.detached else ("detached",)
    for key in refused:
        if getattr(options, key):
            raise RegistrationError(
                f"node {name!r} with {key}: a node is the run of its graph, and of that alone",
                hint=f"leave it out here; give the {key} to the graph: graph.function.using(...)",
            )


def _check_inputs(name: str, fn: Function[..., Any], inputs: Sequence[str]) -> None:
    if inputs and not fn.signature.fits(len(inputs)):
        raise RegistrationError(
            f"node {name!r}: {fn.name} can not be called with {len(inputs)} argument(s) by position",
            hint="inputs= has the node for each parameter of the function, in their order",
        )


# -- the function of a graph --------------------------------------------------------------------------------------------------


class GraphFunction(Function[..., dict[str, Any]]):
    """A graph as a durable function. Made by `Graph`."""

    def __init__(self, fn: Callable[..., Any], declared: Declaration, nodes: Sequence[Node[Any]]) -> None:
        super().__init__(fn, declared)
        self.signature = _GraphSignature(fn, nodes)
        self.nodes: Mapping[str, Node[Any]] = {node.name: node for node in nodes}

    @functools.cached_property
    def topology(self) -> Json:
        """Nodes and edges as they are stored with each run."""
        return plain.write([node.shape() for node in self.nodes.values()])

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 digits of the topology. Another one at the worker than at the submitter is reported as a mismatch (25, 77)."""
        return digest(self.topology)

    def encode_arguments(self, codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Json:
        """The input of a run, checked against every node that takes it. Raises as for a function."""
        text = super().encode_arguments(codec, args, kwargs)
        stored = self.signature.decode_arguments(codec, text)
        for node in self.nodes.values():
            if takes_arguments(node):
                node.function.encode_arguments(codec, *stored)
        return text

    def with_options(self, options: Options) -> Function[..., dict[str, Any]]:
        """As for a function. Raises RegistrationError for a retry: what is tried again is a node."""
        if options.retry is not None:
            raise RegistrationError(
                f"graph {self.name!r} with a retry: what fails and is tried again are its nodes",
                hint="graph.node(name, fn.using(retry=...))",
            )
        return super().with_options(options)

    def start_options(self) -> Json | None:
        """With the topology, so that a worker can say what differs and the command line can show the graph."""
        return with_option(super().start_options(), GRAPH, json.loads(self.topology))

    def open(self, host: Any, payload: Json, codec: Codec) -> Callable[[], Any]:
        """Raises NonDeterminismError if the run was submitted with another topology than this worker has (25, 77)."""
        run: RunRecord = host.run_record
        if run.fingerprint is not None and run.fingerprint != self.fingerprint:
            raise NonDeterminismError(
                f"graph {self.name} of run {run.run_id} was submitted with another topology than this worker has:"
                f" {_difference(topology_of(run), json.loads(self.topology))}"
                f" (fingerprints {run.fingerprint} and {self.fingerprint})",
                hint="deploy submitters and workers with the same graph, give a changed one another version=, or cancel the run",
            )
        return super().open(host, payload, codec)

    def __repr__(self) -> str:
        return f"<durable graph {self.name}>"


def takes_arguments(node: Node[Any]) -> bool:
    """Is it called with the arguments of the graph?"""
    return not node.inputs and not node.function.signature.empty


class _GraphSignature(Signature):
    """The parameters of the first node that takes the graph's arguments; the result is what each node returns, by name."""

    def __init__(self, fn: Callable[..., Any], nodes: Sequence[Node[Any]]) -> None:
        super().__init__(fn, skip_first=True)
        self._graph_nodes = nodes

    @functools.cached_property
    def resolved(self) -> Any:
        """Resolved at the first use, like all annotations."""
        shapes = {node.name: node.function.signature.returns for node in self._graph_nodes}
        fields = {name: Any if shape is UNTYPED else shape for name, shape in shapes.items()}
        make: Any = TypedDict  # by its form for names that are known at run time only
        return dataclasses.replace(super().resolved, returns=make("Results", fields))


def _function(declared: Declaration, nodes: Sequence[Node[Any]], home: str) -> GraphFunction:
    async def body(ctx: Context, *args: Any, **kwargs: Any) -> dict[str, Any]:
        results: dict[str, Any] = await _all(ctx, nodes, args, kwargs)
        return results

    async def without_arguments(ctx: Context) -> None: ...

    taker = next((node.function.fn for node in nodes if takes_arguments(node)), without_arguments)
    body.__wrapped__ = taker  # type: ignore[attr-defined]  # where its signature is looked up
    body.__module__, body.__qualname__ = home, f"Graph({declared.name!r})"
    body.__doc__ = f"The graph {declared.name}."
    return GraphFunction(body, declared, nodes)


# -- the body: all nodes in one record, then their ends -------------------------------------------------------------------------


def _all(ctx: Context, nodes: Sequence[Node[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    call = _NodesCall(loop=ctx._loop)
    call.prepare(ctx._host, nodes, args, kwargs)
    return ctx._made(call, f"graph:{ctx.function}")  # type: ignore[no-any-return]


class _NodesCall(Call):
    """The start of all nodes, which is one record, and the wait for all of their ends (33)."""

    host: Activation
    nodes: Sequence[Node[Any]]

    def prepare(
        self, host: Activation, nodes: Sequence[Node[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Encode the arguments of each node; the rows are made when the record is written."""
        self.host = host
        self.nodes = nodes
        self.codec = host.codec
        self.kind = RecordKind.START
        self.inputs = {node.name: _input(node, host.codec, args, kwargs) for node in nodes}
        self.digest = digest(plain.write(self.inputs))
        self.begins = self._rows
        self.results: dict[str, Any] = {}
        self.errors: dict[str, BaseException] = {}
        self.waits: dict[str, _NodeEnd] = {}

    def _rows(self) -> tuple[Json, tuple[NewRun, ...]]:
        """What the record of the start holds, and the runs that are written with it (77)."""
        parent = self.host.run_record
        runs = {node.name: node.function.new_run(self.inputs[node.name], tenant=parent.tenant) for node in self.nodes}
        ids = {name: run.run_id for name, run in runs.items()}
        told = value_envelope(plain.write({"nodes": ids}))
        return told, tuple(_row(node, runs[node.name], ids, parent) for node in self.nodes)

    def fire(self, record: StepRecord) -> None:
        """The start is delivered: wait for every end."""
        if self.done():
            return
        for node in self.nodes:
            wait = self.waits[node.name] = _NodeEnd(self, node)
            self.host.registered(wait, None)

    def needs(self) -> tuple[int, bool]:
        """All that are open: the graph lands when its nodes have (33, 77)."""
        return len(self.waits), False

    def ended(self, node: Node[Any], value: Any, error: BaseException | None) -> None:
        """A node has landed."""
        del self.waits[node.name]
        if error is None:
            self.results[node.name] = value
        else:
            self.errors[node.name] = error
        if self.waits or self.done():
            return
        if self.errors:
            self.settle(None, _failure(self.host.run_record.name, self.nodes, self.errors))
        else:
            self.settle({one.name: self.results[one.name] for one in self.nodes}, None)

    def cancel(self, msg: Any | None = None) -> bool:
        """The graph is cancelled or out of time: the ends are not waited for. Its nodes are cancelled when it has landed (48)."""
        if not super().cancel(msg):
            return False
        for wait in self.waits.values():
            self.host.dropped(wait)
        return True


class _NodeEnd(Pending):
    """The wait for the end of one node."""

    kind = RecordKind.CHILD

    def __init__(self, owner: _NodesCall, node: Node[Any]) -> None:
        self.owner = owner
        self.node = node
        self.step_id = end_id(node.name)
        self.codec = owner.codec
        self.annotation = node.function.signature.returns
        self.group = owner

    def done(self) -> bool:
        """Nobody wants it any more."""
        return self.owner.done()

    def fire(self, record: StepRecord) -> None:
        """It has landed."""
        self.owner.ended(self.node, *self.resolve(record))


def _input(node: Node[Any], codec: Codec, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Json:
    """The arguments of a node. One that takes results has none yet: its worker puts them in (`with_results`)."""
    if node.inputs:
        return plain.write({RESULTS_OF: list(node.inputs)})
    if not takes_arguments(node):
        return node.function.encode_arguments(codec, (), {})
    return node.function.encode_arguments(codec, args, kwargs)


def _row(node: Node[Any], run: NewRun, ids: Mapping[str, str], parent: RunRecord) -> NewRun:
    data = tuple(dict.fromkeys(node.inputs))  # a result may be taken twice, an edge is one
    edges: list[tuple[str, Literal["control", "data"]]] = [(name, "data") for name in data]
    edges.extend((name, "control") for name in node.after)
    options = with_option(run.options, RESULTS_OF, [ids[name] for name in node.inputs]) if node.inputs else run.options
    return dataclasses.replace(
        run,
        options=options,
        parent_run_id=parent.run_id,
        parent_step_id=node.name,
        depends_on=tuple(_edge(ids[name], kind, at) for at, (name, kind) in enumerate(edges)),
    )


def _edge(run_id: str, kind: Literal["control", "data"], position: int) -> Dependency:
    return Dependency(run_id=run_id, kind=kind, position=position)


def _failure(name: str, nodes: Sequence[Node[Any]], errors: Mapping[str, BaseException]) -> GraphFailed:
    """What went wrong, node by node, without those that were never run because of another."""
    behind = {node for node, error in errors.items() if getattr(error, "error_kind", None) == ErrorKind.UPSTREAM}
    own = {node.name: errors[node.name] for node in nodes if node.name in errors and node.name not in behind} or errors
    told = "; ".join(f"{node}: {getattr(error, 'message', error)}" for node, error in own.items())
    rest = f"; {len(behind)} behind were not run: {', '.join(sorted(behind)[:10])}" if behind else ""
    failure = GraphFailed(f"{len(own)} of {len(nodes)} nodes of graph {name} did not complete: {told}{rest}")
    found = [error for error in own.values() if isinstance(error, Exception)]
    failure.__cause__ = ExceptionGroup("the nodes that did not complete", found)
    # Not shown, but a retry forgets their ends with those of the others (50): a node that was retried meanwhile brought them back.
    hidden = [error for node, error in errors.items() if node not in own and isinstance(error, Exception)]
    failure.__context__ = ExceptionGroup("the nodes behind them", hidden) if hidden else None
    return failure


# -- what is stored with a run --------------------------------------------------------------------------------------------------


def with_option(options: Json | None, name: str, value: Any) -> Json:
    """The options of a run with one more."""
    known: dict[str, Any] = {} if options is None else json.loads(options)
    return json.dumps({**known, name: value}, separators=(",", ":"))


def topology_of(run: RunRecord) -> list[dict[str, Any]] | None:
    """The nodes with which the run of a graph was submitted: `node`, `function`, `inputs`, `after`. None: it is no graph."""
    found = _option(run, GRAPH)
    return cast("list[dict[str, Any]]", found) if isinstance(found, list) else None


def node_function(function: Function[..., Any] | None, name: str | None) -> Function[..., Any] | None:
    """The function of a node, where `function` is that of its graph: it knows the type of the node's result."""
    node = function.nodes.get(name or "") if isinstance(function, GraphFunction) else None
    return None if node is None else node.function


def results_wanted(run: RunRecord) -> Sequence[str]:
    """The runs whose results are the arguments of this one, in their order."""
    found = _option(run, RESULTS_OF)
    return [str(one) for one in cast("list[object]", found)] if isinstance(found, list) else ()


def _option(run: RunRecord, name: str) -> object:
    options: dict[str, object] = {} if run.options is None else json.loads(run.options)
    return options.get(name)


def with_results(run: RunRecord, before: Sequence[RunRecord | None]) -> RunRecord:
    """The run with the results of others as its arguments: those that `results_wanted` named, in that order.

    Raises NotFound for one that is not stored any more.
    """
    texts: list[Json] = []
    for run_id, record in zip(results_wanted(run), before, strict=True):
        if record is None or record.status is not Status.COMPLETED:
            raise NotFound(
                f"run {run.run_id} takes the result of run {run_id}, which is not stored any more",
                hint="start the graph anew, and keep the runs of its nodes longer: keep=",
            )
        texts.append("null" if record.output is None else record.output)
    return dataclasses.replace(run, input=f"[[{','.join(texts)}],{{}}]")


def _difference(submitted: Sequence[Mapping[str, Any]] | None, here: Sequence[Mapping[str, Any]]) -> str:
    """What a worker's topology has, lacks and has otherwise, in words."""
    if submitted is None:
        return "the submitter did not say which"
    theirs, ours = ({one["node"]: one for one in nodes} for nodes in (submitted, here))
    lines = [f"node {name!r} is not here" for name in theirs if name not in ours]
    lines += [f"node {name!r} was not there" for name in ours if name not in theirs]
    for name in theirs:
        if name in ours:
            lines += [
                f"{what} of node {name!r} was {theirs[name].get(what)!r} and is {ours[name].get(what)!r}"
                for what in ("function", "version", "inputs", "after")
                if theirs[name].get(what) != ours[name].get(what)
            ]
    return "; ".join(lines[:10]) or "its nodes come in another order"


__all__ = ["Graph", "GraphFunction", "Node", "node_function", "results_wanted", "topology_of", "with_results"]
