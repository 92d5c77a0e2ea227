"""Submitting (rules 34, 35, 38 to 42): a returned id is durable, and a key means one run for as long as the run exists."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from durable.errors import Conflict
from durable.model import ALL, NewRun, RunRecord, Status
from durable.settings import DAY, HOUR, SECOND

from .scenario import ACME, BETA, Scene, new_run, rule


async def bring_to(scene: Scene, run: RunRecord, state: str) -> None:
    """Bring a pending run into a state."""
    if state == "pending":
        return
    if state == "cancelled":
        assert await scene.cancel(run.run_id)
        return
    held = await scene.take_again(run.run_id)
    if state == "suspended":
        await scene.suspend(held)
    elif state == "completed":
        await scene.complete(held)
    elif state == "failed":
        await scene.fail(held)


STATES = ["pending", "running", "suspended", "completed", "failed", "cancelled"]


@rule(39)
async def test_the_answer_says_created(scene: Scene) -> None:
    answer = await scene.submit(input='{"a":1}', queue="q", priority=3, version="v", fingerprint="f", tags={"k": "v"})
    run = answer.run
    assert answer.disposition == "created"
    assert (run.status, run.input, run.queue, run.priority) == (Status.PENDING, '{"a":1}', "q", 3)
    assert (run.version, run.fingerprint, dict(run.tags)) == ("v", "f", {"k": "v"})
    assert await scene.get(run.run_id) == run


@rule(42)
async def test_a_returned_id_is_durable(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    run = await one.start()
    assert await other.get(run.run_id) == run


@rule(42)
@pytest.mark.parametrize("state", STATES)
async def test_any_submit_can_be_repeated_and_makes_no_second_run(scene: Scene, state: str) -> None:
    submit = new_run()
    (first,) = await scene.store.enqueue([submit])
    await bring_to(scene, first.run, state)
    before = await scene.everything()
    (second,) = await scene.store.enqueue([submit])
    assert (second.disposition, second.run.run_id) == ("existing", submit.run_id)
    assert second.run.status == state
    assert await scene.everything() == before


@rule(42)
async def test_the_same_id_for_another_function_is_a_conflict(scene: Scene) -> None:
    run = await scene.start()
    with pytest.raises(Conflict):
        await scene.start(run_id=run.run_id, name="other")
    assert (await scene.get(run.run_id)).name == "work"


@rule(34, 57)
async def test_the_id_of_another_tenants_run_is_not_given_away(scene: Scene) -> None:
    run = await scene.start(tenant=ACME)
    with pytest.raises(Conflict):
        await scene.start(run_id=run.run_id, tenant=BETA)


@rule(35)
@pytest.mark.parametrize("state", STATES)
async def test_one_run_per_idempotency_key_for_as_long_as_the_run_exists_in_any_state(scene: Scene, state: str) -> None:
    first = await scene.start(idempotency_key="k")
    await bring_to(scene, first, state)
    before = await scene.everything()
    second = await scene.submit(idempotency_key="k", input='{"other":true}', priority=9)
    assert (second.disposition, second.run.run_id, second.run.input) == ("existing", first.run_id, first.input)
    assert await scene.everything() == before


@rule(35)
@pytest.mark.parametrize("state", STATES)
async def test_the_same_idempotency_key_for_another_function_is_a_conflict(scene: Scene, state: str) -> None:
    first = await scene.start(idempotency_key="k")
    await bring_to(scene, first, state)
    before = await scene.everything()
    with pytest.raises(Conflict):
        await scene.start(idempotency_key="k", name="other")
    assert await scene.everything() == before


@rule(35)
async def test_two_runs_of_one_batch_may_share_a_key_and_the_later_one_finds_the_first(scene: Scene) -> None:
    answers = await scene.store.enqueue([new_run(idempotency_key="k") for _ in range(3)])
    assert [answer.disposition for answer in answers] == ["created", "existing", "existing"]
    assert len({answer.run.run_id for answer in answers}) == 1
    assert len(await scene.runs()) == 1


@rule(35, 60)
async def test_a_key_is_free_again_when_its_run_is_purged(scene: Scene) -> None:
    first = await scene.start(idempotency_key="k", keep=SECOND)
    await bring_to(scene, first, "completed")
    await scene.later(HOUR)
    assert await scene.store.purge(scope=ALL, limit=10) == 1
    second = await scene.submit(idempotency_key="k", name="other")
    assert second.disposition == "created"


@rule(35)
async def test_concurrent_submits_of_one_key_make_one_run(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    answers = await asyncio.gather(*(scene.submit(idempotency_key="k") for scene in (one, other) * 16))
    assert len({answer.run.run_id for answer in answers}) == 1
    assert sorted(answer.disposition for answer in answers) == ["created"] + ["existing"] * 31
    assert len(await one.runs()) == 1


@rule(34)
async def test_a_key_is_given_back_as_the_caller_passed_it(scene: Scene) -> None:
    for tenant in (None, ACME):
        run = await scene.start(
            tenant=tenant, idempotency_key="a:b", coalesce_key=":c", sequence_key=f"{ACME}:d", concurrency_key="e"
        )
        assert (run.idempotency_key, run.coalesce_key, run.sequence_key, run.concurrency_key) == (
            "a:b",
            ":c",
            f"{ACME}:d",
            "e",
        )


@rule(34, 57)
@pytest.mark.parametrize("field", ["idempotency_key", "coalesce_key"])
async def test_keys_of_different_tenants_never_meet(scene: Scene, field: str) -> None:
    """Also where a key is written like the stored form of another one."""
    submits = [
        new_run(tenant=None, **{field: "k"}),
        new_run(tenant=ACME, **{field: "k"}),
        new_run(tenant=BETA, **{field: "k"}),
        new_run(tenant=None, **{field: f"{ACME}:k"}),
        new_run(tenant=None, **{field: ":k"}),
        new_run(tenant=ACME, **{field: ":k"}),
    ]
    answers = await scene.store.enqueue(submits)
    assert [answer.disposition for answer in answers] == ["created"] * len(submits)


@rule(34)
@pytest.mark.parametrize(
    "key",
    [
        "'; DROP TABLE durable_run; --",
        "%",
        "_",
        "$where",
        "a.b",
        "ключ",
        "e\u0301",
        "\u00e9",
        " k ",
        "K",
        "k",
        "x" * 1000,
    ],
)
async def test_a_key_is_text_and_nothing_else(scene: Scene, key: str) -> None:
    first = await scene.submit(idempotency_key=key)
    again = await scene.submit(idempotency_key=key)
    other = await scene.submit(idempotency_key=key + "'")
    assert [answer.disposition for answer in (first, again, other)] == ["created", "existing", "created"]
    assert first.run.idempotency_key == key


@rule(40)
async def test_a_batch_keeps_order_and_answers_per_item(scene: Scene) -> None:
    known = await scene.start(idempotency_key="known")
    waiting = await scene.start(coalesce_key="waiting")
    runs = [
        new_run(),
        new_run(idempotency_key="known"),
        new_run(coalesce_key="waiting"),
        new_run(idempotency_key="new"),
        new_run(idempotency_key="new"),
    ]
    answers = await scene.store.enqueue(runs)
    assert [answer.disposition for answer in answers] == ["created", "existing", "coalesced", "created", "existing"]
    assert [answer.run.run_id for answer in answers] == [
        runs[0].run_id,
        known.run_id,
        waiting.run_id,
        runs[3].run_id,
        runs[3].run_id,
    ]


@rule(40)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_callers_batch_is_stored_whole_or_not_at_all(scene: Scene, place: int) -> None:
    await scene.start(idempotency_key="taken", name="other")
    before = await scene.everything()
    batch: list[NewRun] = [new_run(idempotency_key=f"k{n}") for n in range(2)]
    batch.insert(place, new_run(idempotency_key="taken"))
    with pytest.raises(Conflict):
        await scene.store.enqueue(batch)
    assert await scene.everything() == before
    del batch[place]
    assert [answer.disposition for answer in await scene.store.enqueue(batch)] == ["created", "created"]


@rule(40)
async def test_batches_with_the_same_keys_in_other_orders_do_not_dead_lock(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    keys = [f"k{n}" for n in range(20)]

    async def submit(scene: Scene, order: Sequence[str]) -> None:
        await scene.store.enqueue([new_run(idempotency_key=key) for key in order])

    await asyncio.gather(*(submit(one, keys) for _ in range(4)), *(submit(other, keys[::-1]) for _ in range(4)))
    assert len(await one.runs()) == 20


@rule(38)
async def test_idempotency_comes_before_coalescing(scene: Scene) -> None:
    known = await scene.start(idempotency_key="i")
    waiting = await scene.start(coalesce_key="c")
    answer = await scene.submit(idempotency_key="i", coalesce_key="c")
    assert (answer.disposition, answer.run.run_id) == ("existing", known.run_id)
    assert await scene.get(waiting.run_id) == waiting


@rule(38)
async def test_a_join_records_the_joiners_idempotency_key_for_the_run_it_joined(scene: Scene) -> None:
    waiting = await scene.start(coalesce_key="c")
    joined = await scene.submit(coalesce_key="c", idempotency_key="joiner")
    assert (joined.disposition, joined.run.run_id) == ("coalesced", waiting.run_id)
    await scene.complete(await scene.take_again(waiting.run_id))
    again = await scene.submit(coalesce_key="c", idempotency_key="joiner")
    assert (again.disposition, again.run.run_id) == ("existing", waiting.run_id)


@rule(35, 38)
async def test_a_join_and_a_create_of_one_key_can_not_both_succeed(scenes: tuple[Scene, Scene]) -> None:
    """One submit joins a waiting run with a key while another creates a run with that key."""
    one, other = scenes
    for turn in range(10):
        waiting = await one.start(coalesce_key=f"c{turn}")
        joined, created = await asyncio.gather(
            one.submit(coalesce_key=f"c{turn}", idempotency_key=f"i{turn}"), other.submit(idempotency_key=f"i{turn}")
        )
        assert joined.run.run_id == created.run.run_id
        assert (joined.run.run_id == waiting.run_id) == (joined.disposition == "coalesced")


@rule(38, 60)
async def test_the_key_of_a_joiner_goes_with_the_run_it_joined(scene: Scene) -> None:
    waiting = await scene.start(coalesce_key="c", keep=SECOND)
    await scene.submit(coalesce_key="c", idempotency_key="joiner")
    await scene.complete(await scene.take_again(waiting.run_id))
    await scene.later(DAY)
    assert await scene.store.purge(scope=ALL, limit=10) == 1
    assert (await scene.submit(idempotency_key="joiner")).disposition == "created"


@rule(42)
async def test_a_repeated_batch_is_answered_with_what_is_there(scene: Scene) -> None:
    batch = [new_run() for _ in range(5)]
    await scene.store.enqueue(batch)
    again = await scene.store.enqueue([*batch, new_run()])
    assert [answer.disposition for answer in again] == ["existing"] * 5 + ["created"]
    assert len(await scene.runs()) == 6


@rule(42)
async def test_a_repeated_submit_that_had_joined_finds_the_run_it_joined_by_its_key(scene: Scene) -> None:
    waiting = await scene.start(coalesce_key="c")
    joiner = new_run(coalesce_key="c", idempotency_key="i")
    for expected in ("coalesced", "existing"):
        (answer,) = await scene.store.enqueue([joiner])
        assert (answer.disposition, answer.run.run_id) == (expected, waiting.run_id)
