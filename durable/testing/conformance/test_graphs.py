"""Static graphs (rule 77): nodes wait for those they depend on, and a failure is carried on to all behind it."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import Conflict, NotFound
from durable.model import ALL, Cancelled, Claimed, Completed, Dependency, Failed, Outcome, RecordKind, Status, TimedOut
from durable.settings import MINUTE, SECOND

from .scenario import ACME, BETA, Scene, failure, new_run, rule


async def graph(scene: Scene, edges: dict[str, str], *, held: Claimed | None = None) -> dict[str, str]:
    """Nodes by name; `edges` says on which nodes each depends: {"a": "", "b": "a", "c": "ab"}. Returns name → run id."""
    ids = {name: new_run().run_id for name in edges}
    nodes = [
        new_run(
            run_id=ids[name],
            depends_on=tuple(Dependency(run_id=ids[other], position=n) for n, other in enumerate(edges[name])),
            **({} if held is None else scene.child_of(held, name)),
        )
        for name in edges
    ]
    await scene.store.enqueue(nodes)
    return ids


@rule(77)
async def test_an_unreleased_node_is_suspended_with_attempts_0_and_counts_what_it_waits_for(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "", "c": "ab"})
    node = await scene.get(ids["c"])
    assert (node.status, node.attempts, node.wake_after) == (Status.SUSPENDED, 0, 2)
    assert {one.run.run_id for one in await scene.claim(10)} == {ids["a"], ids["b"]}


@rule(77)
async def test_a_node_is_released_when_all_it_depends_on_have_completed(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "", "c": "ab"})
    await scene.complete(await scene.take_exactly(ids["a"]))
    node = await scene.get(ids["c"])
    assert (node.status, node.wake_after) == (Status.SUSPENDED, 1)
    await scene.complete(await scene.take_exactly(ids["b"]))
    node = await scene.get(ids["c"])
    assert (node.status, node.available_at) == (Status.PENDING, None)
    await scene.complete(await scene.take_again(ids["c"]))


@rule(77)
async def test_several_parents_that_land_in_one_batch_release_a_node_once(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "", "c": "", "d": "abc", "e": "d"})
    claimed = await scene.claim(10)
    await scene.store.settle([(one.lease, Completed(output="1")) for one in claimed])
    assert (await scene.get(ids["d"])).status == Status.PENDING
    assert (await scene.get(ids["e"])).status == Status.SUSPENDED


@rule(77)
async def test_a_node_may_depend_on_a_run_that_has_completed(scene: Scene) -> None:
    held = await scene.take()
    await scene.complete(held)
    free = await scene.start(depends_on=(Dependency(run_id=held.run.run_id),))
    assert free.status == Status.PENDING
    await scene.take_again(free.run_id)


@rule(31)
async def test_a_run_that_waits_for_the_end_of_one_that_is_gone_lands_at_once_and_wakes_its_parent(
    scene: Scene,
) -> None:
    held = await scene.take()
    gone = Dependency(run_id="purged", kind="end")
    child = new_run(**scene.child_of(held, "await"), depends_on=(gone,))
    before = (await scene.inbox(held)).wake_seq
    assert (await scene.append(held, "await", kind=RecordKind.START, children=(child,))).state == "appended"
    landed = await scene.get(child.run_id)
    assert (landed.status, landed.error_kind) == (Status.CANCELLED, "upstream")
    inbox = await scene.inbox(held)
    assert ([end.run_id for end in inbox.children], inbox.wake_seq) == ([child.run_id], before + 1)
    alone = await scene.start(depends_on=(gone,))
    assert (alone.status, alone.error_kind) == (Status.CANCELLED, "upstream")


@rule(77)
async def test_a_node_that_depends_on_nothing_that_exists_is_refused(scene: Scene) -> None:
    with pytest.raises((NotFound, Conflict)):
        await scene.start(depends_on=(Dependency(run_id="unknown"),))
    other = await scene.start(tenant=BETA)
    with pytest.raises((NotFound, Conflict)):
        await scene.start(tenant=ACME, depends_on=(Dependency(run_id=other.run_id),))
    assert len(await scene.runs()) == 1


@rule(77)
@pytest.mark.parametrize(
    "outcome",
    [Failed(failure=failure()), Cancelled(failure=failure()), TimedOut(failure=failure())],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_the_nodes_behind_a_failed_one_land_cancelled_with_upstream(scene: Scene, outcome: Outcome) -> None:
    ids = await graph(scene, {"a": "", "b": "a", "c": "b", "d": "bc", "side": ""})
    await scene.settle(await scene.take_exactly(ids["a"]), outcome)
    for name in "bcd":
        node = await scene.get(ids[name])
        assert (node.status, node.error_kind, node.attempts) == (Status.CANCELLED, "upstream", 0)
        assert node.finished_at is not None
    assert (await scene.get(ids["side"])).status == Status.PENDING


@rule(77)
async def test_a_graph_waits_for_its_nodes_as_a_parent_for_its_children(scene: Scene) -> None:
    held = await scene.take()
    ids = await graph(scene, {"a": "", "b": "a"}, held=held)
    assert [node.run_id for node in await scene.store.children(held.run.run_id, scope=ALL)] == [ids["a"], ids["b"]]
    assert await scene.suspend(held, wake_after=2) == "landed"
    await scene.complete(await scene.take_again(ids["a"]))
    assert (await scene.get(held.run.run_id)).status == Status.SUSPENDED
    await scene.complete(await scene.take_again(ids["b"]))
    again = await scene.take_again(held.run.run_id)
    assert [end.step_id for end in (await scene.inbox(again)).children] == ["a", "b"]


@rule(77)
async def test_the_graph_hears_of_a_failed_node_and_of_those_behind_it(scene: Scene) -> None:
    held = await scene.take()
    ids = await graph(scene, {"a": "", "b": "a", "c": "b"}, held=held)
    assert await scene.suspend(held, wake_after=3) == "landed"
    await scene.fail(await scene.take_again(ids["a"]))
    again = await scene.take_again(held.run.run_id)
    ends = {end.step_id: (end.status, end.error_kind) for end in (await scene.inbox(again)).children}
    assert ends == {
        "a": (Status.FAILED, "exception"),
        "b": (Status.CANCELLED, "upstream"),
        "c": (Status.CANCELLED, "upstream"),
    }


@rule(77, 50)
async def test_a_retry_of_the_failed_node_brings_back_those_behind_it(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "a", "c": "b"})
    await scene.fail(await scene.take_again(ids["a"]))
    await scene.store.retry(ids["a"], scope=ALL, attempts=1)
    for name in "bc":
        node = await scene.get(ids[name])
        assert (node.status, node.attempts, node.wake_after) == (Status.SUSPENDED, 0, 1)
        assert (node.error, node.error_kind, node.finished_at, node.purge_at) == (None, None, None, None)
    for name in "abc":
        await scene.complete(await scene.take_again(ids[name]))


@rule(77, 50)
async def test_a_retry_brings_back_no_node_that_another_failure_holds(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "", "c": "ab"})
    await scene.fail(await scene.take_exactly(ids["a"]))
    await scene.fail(await scene.take_exactly(ids["b"]))
    await scene.store.retry(ids["a"], scope=ALL, attempts=(await scene.get(ids["a"])).attempts)
    await scene.complete(await scene.take_again(ids["a"]))
    assert (await scene.get(ids["c"])).status != Status.PENDING


@rule(77, 43)
async def test_an_unreleased_node_is_cancelled_at_once_and_those_behind_it_too(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "a", "c": "b"})
    assert await scene.cancel(ids["b"])
    b, c = await scene.get(ids["b"]), await scene.get(ids["c"])
    assert (b.status, b.error_kind) == (Status.CANCELLED, "cancelled")
    assert (c.status, c.error_kind) == (Status.CANCELLED, "upstream")
    await scene.complete(await scene.take_again(ids["a"]))


@rule(77)
async def test_nodes_and_edges_are_written_in_one_transaction(scene: Scene) -> None:
    await scene.start(idempotency_key="taken", name="other")
    first = new_run()
    second = new_run(depends_on=(Dependency(run_id=first.run_id),))
    with pytest.raises(Conflict):
        await scene.store.enqueue([first, second, new_run(idempotency_key="taken")])
    assert await scene.gone(first.run_id)
    assert await scene.gone(second.run_id)
    answers = await scene.store.enqueue([first, second])
    assert [answer.run.status for answer in answers] == [Status.PENDING, Status.SUSPENDED]


@rule(77, 12)
async def test_a_node_that_is_released_too_late_lands_timed_out(scene: Scene) -> None:
    first = new_run()
    second = new_run(depends_on=(Dependency(run_id=first.run_id),), deadline_after=MINUTE)
    await scene.store.enqueue([first, second])
    held = await scene.take_again(first.run_id)
    await scene.later(MINUTE + SECOND)
    await scene.complete(held)
    await scene.promote()
    assert list(await scene.claim(10)) == []
    assert (await scene.get(second.run_id)).status == Status.TIMED_OUT


@rule(77)
async def test_the_nets_leave_an_unreleased_node_alone(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "a"})
    await scene.promote()
    await scene.mend()
    assert (await scene.get(ids["b"])).status == Status.SUSPENDED


@rule(77, 50)
async def test_a_retry_of_the_graph_retries_the_nodes_that_failed_in_the_same_write(scene: Scene) -> None:
    held, ids = await landed_graph(scene, {"a": "", "b": "", "c": "ab", "d": ""}, fail="ab")
    await scene.store.retry(held.run.run_id, scope=ALL, attempts=held.lease.attempts, extra_attempts=2)
    statuses = {name: (await scene.get(run_id)).status for name, run_id in ids.items()}
    assert statuses == {"a": "pending", "b": "pending", "c": "suspended", "d": "completed"}
    assert [(await scene.get(ids[name])).max_attempts for name in "abcd"] == [3, 3, 1, 1]
    graph = await scene.get(held.run.run_id)
    assert (graph.status, graph.max_attempts) == (Status.PENDING, 1)
    assert await scene.steps(graph.run_id) == ["graph:g", "d:end"]
    assert list(await scene.store.audit(scope=ALL)) == []
    for name in "abc":
        await scene.complete(await scene.take_exactly(ids[name]))
    again = await scene.take_again(graph.run_id)
    assert {end.step_id for end in (await scene.inbox(again)).children} == {"a", "b", "c"}


@rule(77, 50)
async def test_a_retry_of_a_node_without_edges_brings_its_graph_back(scene: Scene) -> None:
    held, ids = await landed_graph(scene, {"a": "", "b": ""}, fail="a")
    await scene.store.retry(ids["a"], scope=ALL, attempts=1)
    assert (await scene.get(held.run.run_id)).status == Status.PENDING
    assert await scene.steps(held.run.run_id) == ["graph:g", "b:end"]


@rule(50, 77)
async def test_a_retry_of_a_child_that_others_depend_on_leaves_its_parent_alone(scene: Scene) -> None:
    family = await scene.with_children(1)
    child = family.children[0]
    behind = await scene.start(depends_on=(Dependency(run_id=child),))
    await scene.fail(await scene.take_again(child))
    await scene.fail(family.parent)
    await scene.store.retry(child, scope=ALL, attempts=1)
    assert (await scene.get(family.parent.run.run_id)).status == Status.FAILED
    assert (await scene.get(behind.run_id)).status == Status.CANCELLED


@rule(77, 50)
async def test_a_node_that_was_never_released_waits_again_when_it_is_retried(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "a"})
    assert await scene.cancel(ids["b"])
    await scene.store.retry(ids["b"], scope=ALL, attempts=0)
    node = await scene.get(ids["b"])
    assert (node.status, node.wake_after) == (Status.SUSPENDED, 1)
    await scene.complete(await scene.take_again(ids["a"]))
    await scene.complete(await scene.take_again(ids["b"]))


@rule(77, 50)
async def test_a_node_behind_a_failed_one_is_not_retried_without_it(scene: Scene) -> None:
    ids = await graph(scene, {"a": "", "b": "a"})
    await scene.fail(await scene.take_again(ids["a"]))
    with pytest.raises(Conflict):
        await scene.store.retry(ids["b"], scope=ALL, attempts=0)
    assert (await scene.get(ids["b"])).status == Status.CANCELLED


@rule(77, 50)
async def test_a_cancelled_graph_goes_on_when_it_is_retried(scene: Scene) -> None:
    held = await scene.take()
    ids = await start_nodes(scene, held, {"a": "", "b": "a"})
    assert await scene.cancel(held.run.run_id)
    await scene.append(held, ":cancel", kind=RecordKind.CANCEL)
    await scene.settle(held, Cancelled(failure=failure(kind="cancelled")))
    await scene.mend()
    assert {(await scene.get(run_id)).status for run_id in ids.values()} == {Status.CANCELLED}
    await scene.store.retry(held.run.run_id, scope=ALL, attempts=held.lease.attempts)
    assert await scene.steps(held.run.run_id) == ["graph:g"]
    assert [(await scene.get(ids[name])).status for name in "ab"] == [Status.PENDING, Status.SUSPENDED]


@rule(77, 50, 60)
async def test_a_graph_whose_failed_node_was_purged_is_not_retried(scene: Scene) -> None:
    held, ids = await landed_graph(scene, {"a": "", "b": ""}, fail="a", keep=0)
    await scene.later(SECOND)
    await scene.store.purge(scope=ALL, limit=10)
    assert await scene.gone(ids["a"])
    with pytest.raises(Conflict):
        await scene.store.retry(held.run.run_id, scope=ALL, attempts=held.lease.attempts)


async def nested_graphs(scene: Scene) -> tuple[Claimed, dict[str, str], Claimed, dict[str, str]]:
    """A graph, the node `x` of which is a graph, too: a node of that failed, so both landed failed."""
    outer = await scene.take()
    outer_ids = await start_nodes(scene, outer, {"x": "", "y": "x"})
    inner, inner_ids = await landed_graph(
        scene, {"a": "", "b": "a"}, fail="a", held=await scene.take_exactly(outer_ids["x"])
    )
    await land_graph(scene, outer, fail="x")
    return outer, outer_ids, inner, inner_ids


@rule(77, 50)
async def test_a_retry_of_a_graph_retries_what_failed_in_a_graph_that_is_its_node(scene: Scene) -> None:
    outer, outer_ids, inner, inner_ids = await nested_graphs(scene)
    await scene.store.retry(outer.run.run_id, scope=ALL, attempts=outer.lease.attempts, extra_attempts=2)
    statuses = [(await scene.get(run_id)).status for run_id in (*outer_ids.values(), *inner_ids.values())]
    assert statuses == ["pending", "suspended", "pending", "suspended"]
    most = [(await scene.get(run_id)).max_attempts for run_id in (outer.run.run_id, inner.run.run_id, inner_ids["a"])]
    assert most == [1, 1, 3]
    assert await scene.steps(inner.run.run_id) == ["graph:g"]
    assert list(await scene.store.audit(scope=ALL)) == []


@rule(77, 50)
async def test_a_retry_of_a_node_brings_back_every_graph_around_it(scene: Scene) -> None:
    outer, outer_ids, inner, inner_ids = await nested_graphs(scene)
    await scene.store.retry(inner_ids["a"], scope=ALL, attempts=1)
    runs = (outer.run.run_id, *outer_ids.values(), *inner_ids.values())
    statuses = [(await scene.get(run_id)).status for run_id in runs]
    assert statuses == ["pending", "pending", "suspended", "pending", "suspended"]
    assert await scene.steps(outer.run.run_id) == ["graph:g"]
    assert await scene.steps(inner.run.run_id) == ["graph:g"]
    for run_id in (*inner_ids.values(), *outer_ids.values()):
        await scene.complete(await scene.take_exactly(run_id))
    assert list(await scene.store.audit(scope=ALL)) == []


async def start_nodes(scene: Scene, held: Claimed, edges: dict[str, str], **changes: Any) -> dict[str, str]:
    """As the engine does: all nodes are written with one record of the graph. Returns name → run id."""
    ids = {name: new_run().run_id for name in edges}
    nodes = tuple(
        new_run(
            run_id=ids[name],
            depends_on=tuple(Dependency(run_id=ids[other], position=n) for n, other in enumerate(edges[name])),
            **{**scene.child_of(held, name), **changes},
        )
        for name in edges
    )
    assert (await scene.append(held, "graph:g", kind=RecordKind.START, children=nodes)).state == "appended"
    return ids


async def landed_graph(
    scene: Scene, edges: dict[str, str], *, fail: str, held: Claimed | None = None, **changes: Any
) -> tuple[Claimed, dict[str, str]]:
    """A graph that landed failed, because the nodes `fail` did; the others completed or were never run."""
    held = await scene.take() if held is None else held
    ids = await start_nodes(scene, held, edges, **changes)
    for name in edges:
        if (await scene.get(ids[name])).status == Status.PENDING:
            node = await scene.take_exactly(ids[name])
            await (scene.fail(node) if name in fail else scene.complete(node))
    await land_graph(scene, held, fail=fail)
    return held, ids


async def land_graph(scene: Scene, held: Claimed, *, fail: str) -> None:
    """Its nodes have landed: the graph is given their ends, and fails because of the nodes `fail`."""
    blamed: list[int] = []
    for end in (await scene.inbox(held)).children:
        answer = await scene.append(held, f"{end.step_id}:end", kind=RecordKind.CHILD, seen=0)
        if end.step_id in fail:
            assert answer.record is not None
            assert answer.record.position is not None
            blamed.append(answer.record.position)
    await scene.fail(held, positions=tuple(blamed))
