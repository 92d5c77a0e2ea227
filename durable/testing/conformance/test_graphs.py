"""Static graphs (rule 77): nodes wait for those they depend on, and a failure is carried on to all behind it."""

from __future__ import annotations

import pytest

from durable.errors import Conflict, NotFound
from durable.model import ALL, Cancelled, Claimed, Completed, Dependency, Failed, Outcome, Status, TimedOut
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
