"""Reading (rules 7, 57): get, find, count, children and pulse; pages by keyset that neither shift nor repeat."""

from __future__ import annotations

from typing import Any

import pytest

from durable.errors import Conflict
from durable.model import ALL, RunQuery, Status
from durable.settings import MINUTE, SECOND

from .scenario import ACME, BETA, Scene, new_run, rule


async def population(scene: Scene) -> dict[str, str]:
    """One run of each kind, a second apart; name of the kind → run id."""
    ids: dict[str, str] = {}
    for kind in ("pending", "running", "suspended", "completed", "failed", "cancelled"):
        run = await scene.start(queue=kind, tags={"kind": kind, "all": "yes"})
        ids[kind] = run.run_id
        if kind == "cancelled":
            await scene.cancel(run.run_id)
        elif kind != "pending":
            held = await scene.take_again(run.run_id)
            if kind == "suspended":
                await scene.suspend(held)
            elif kind == "completed":
                await scene.complete(held)
            elif kind == "failed":
                await scene.fail(held)
        await scene.later(SECOND)
    return ids


@rule(57)
async def test_get_answers_in_order_with_none_for_what_is_not_there(scene: Scene) -> None:
    one, other = await scene.start(tenant=ACME), await scene.start()
    found = await scene.store.get([other.run_id, "unknown", one.run_id, other.run_id], scope=ALL)
    assert list(found) == [other, None, one, other]
    assert list(await scene.store.get([one.run_id], scope=BETA)) == [None]
    assert list(await scene.store.get([one.run_id], scope=None)) == [None]


@rule(7)
async def test_a_listing_is_newest_first(scene: Scene) -> None:
    ids: list[str] = []
    for _ in range(5):
        ids.append((await scene.start()).run_id)
        await scene.later(SECOND)
    assert [run.run_id for run in await scene.runs()] == ids[::-1]


@rule(7)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
async def test_pages_by_keyset_show_every_run_once(scene: Scene, size: int) -> None:
    ids = {run.run_id for run in (answer.run for answer in await scene.store.enqueue([new_run() for _ in range(7)]))}
    found = [run.run_id for run in await scene.runs(limit=size)]
    assert len(found) == 7
    assert set(found) == ids


@rule(7)
async def test_a_run_that_comes_or_goes_meanwhile_neither_shifts_nor_repeats_a_page(scene: Scene) -> None:
    ids: list[str] = []
    for _ in range(6):
        ids.append((await scene.start(keep=0)).run_id)
        await scene.later(SECOND)
    first = await scene.store.find(RunQuery(limit=2), scope=ALL)
    assert [run.run_id for run in first.runs] == [ids[5], ids[4]]
    await scene.start()
    await scene.cancel(ids[4])
    await scene.later(SECOND)
    await scene.store.purge(scope=ALL, limit=10)
    second = await scene.store.find(RunQuery(limit=2, cursor=first.cursor), scope=ALL)
    assert [run.run_id for run in second.runs] == [ids[3], ids[2]]


@rule(7)
async def test_the_cursor_is_none_at_the_end(scene: Scene) -> None:
    assert (await scene.store.find(RunQuery(), scope=ALL)).cursor is None
    await scene.store.enqueue([new_run() for _ in range(3)])
    page = await scene.store.find(RunQuery(limit=2), scope=ALL)
    assert page.cursor is not None
    assert (await scene.store.find(RunQuery(limit=2, cursor=page.cursor), scope=ALL)).cursor is None


@rule(7)
@pytest.mark.parametrize("cursor", ["", "x", "eyJhIjoxfQ==", "' OR 1=1 --", "0", "\u0000", "9" * 5000])
async def test_a_cursor_that_is_not_ours_is_a_conflict(scene: Scene, cursor: str) -> None:
    await scene.start()
    with pytest.raises(Conflict):
        await scene.store.find(RunQuery(cursor=cursor), scope=ALL)


@rule(7)
async def test_an_altered_cursor_is_a_conflict_or_stays_inside_the_listing(scene: Scene) -> None:
    await scene.store.enqueue([new_run(tenant=ACME) for _ in range(3)])
    await scene.store.enqueue([new_run(tenant=BETA) for _ in range(3)])
    page = await scene.store.find(RunQuery(limit=2), scope=ACME)
    assert page.cursor is not None
    for place in range(0, len(page.cursor), 3):
        altered = page.cursor[:place] + ("A" if page.cursor[place] != "A" else "B") + page.cursor[place + 1 :]
        try:
            found = await scene.store.find(RunQuery(limit=2, cursor=altered), scope=ACME)
        except Conflict:
            continue
        assert {run.tenant for run in found.runs} <= {ACME}


@rule(7)
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"statuses": [Status.FAILED]}, {"failed"}),
        ({"statuses": [Status.COMPLETED, Status.CANCELLED]}, {"completed", "cancelled"}),
        ({"queues": ["pending", "running"]}, {"pending", "running"}),
        ({"names": ["nothing"]}, set[str]()),
        ({"names": ["work"], "queues": ["failed"]}, {"failed"}),
        ({"tags": {"kind": "suspended"}}, {"suspended"}),
        ({"tags": {"all": "yes", "kind": "failed"}}, {"failed"}),
        ({"tags": {"all": "no"}}, set[str]()),
        ({"statuses": [Status.PENDING], "queues": ["failed"]}, set[str]()),
    ],
)
async def test_a_listing_is_filtered_and_counted_alike(scene: Scene, query: dict[str, Any], expected: set[str]) -> None:
    await population(scene)
    assert {run.queue for run in await scene.runs(**query)} == expected
    assert await scene.store.count(RunQuery(limit=1, **query), scope=ALL) == len(expected)


@rule(7)
async def test_since_is_included_and_until_is_not(scene: Scene) -> None:
    ids = await population(scene)
    middle = (await scene.get(ids["suspended"])).created_at
    late = [run.queue for run in await scene.runs(since=middle)]
    early = [run.queue for run in await scene.runs(until=middle)]
    assert sorted(late + early) == sorted(ids)
    assert "suspended" in late


@rule(7)
async def test_a_listing_shows_the_runs_of_a_parent(scene: Scene) -> None:
    family = await scene.with_children(3)
    found = await scene.runs(parent_run_id=family.parent.run.run_id)
    assert {run.run_id for run in found} == set(family.children)


@rule(57)
async def test_a_listing_and_its_count_see_their_scope_only(scene: Scene) -> None:
    for tenant in (None, ACME, ACME, BETA):
        await scene.start(tenant=tenant)
    for scope, expected in ((None, 1), (ACME, 2), (BETA, 1), (ALL, 4)):
        runs = await scene.runs(scope=scope)
        assert len(runs) == expected == await scene.store.count(RunQuery(), scope=scope)
        if scope is not ALL:
            assert {run.tenant for run in runs} == {scope}


@rule(57)
async def test_a_cursor_of_one_tenant_shows_nothing_of_another(scene: Scene) -> None:
    await scene.store.enqueue([new_run(tenant=tenant) for tenant in (ACME, BETA) * 4])
    page = await scene.store.find(RunQuery(limit=2), scope=ACME)
    try:
        found = await scene.store.find(RunQuery(limit=10, cursor=page.cursor), scope=BETA)
    except Conflict:
        return
    assert {run.tenant for run in found.runs} <= {BETA}


@rule(7)
async def test_count_ignores_limit_and_cursor(scene: Scene) -> None:
    await scene.store.enqueue([new_run() for _ in range(5)])
    page = await scene.store.find(RunQuery(limit=2), scope=ALL)
    assert await scene.store.count(RunQuery(limit=2, cursor=page.cursor), scope=ALL) == 5


@rule(7)
async def test_children_are_listed_in_the_order_of_their_submission(scene: Scene) -> None:
    family = await scene.with_children(4)
    found = await scene.store.children(family.parent.run.run_id, scope=ALL)
    assert [run.run_id for run in found] == family.children
    assert list(await scene.store.children("unknown", scope=ALL)) == []


@rule(29)
async def test_a_pulse_is_the_little_that_waiting_handles_need(scene: Scene) -> None:
    held = await scene.take(tenant=ACME)
    await scene.later(MINUTE // 4)
    await scene.append(held, "a", progress='"x"')
    await scene.send(held.run.run_id)
    run = await scene.get(held.run.run_id)
    pulses = await scene.store.pulse(["unknown", run.run_id], scope=ALL)
    assert pulses[0] is None
    assert pulses[1] is not None
    assert (pulses[1].run_id, pulses[1].status, pulses[1].attempts, pulses[1].wake_seq) == (
        run.run_id,
        run.status,
        run.attempts,
        run.wake_seq,
    )
    assert pulses[1].progress == '"x"'
    assert list(await scene.store.pulse([run.run_id], scope=BETA)) == [None]


@rule(7)
async def test_filters_are_text_and_nothing_else(scene: Scene) -> None:
    await scene.start()
    for text in ("' OR 1=1 --", "%", "_", '{"$gt":""}', "work' --"):
        assert await scene.runs(names=[text]) == []
        assert await scene.runs(queues=[text]) == []
        assert await scene.runs(tags={text: text}) == []
        assert await scene.runs(parent_run_id=text) == []
        assert await scene.runs(schedule_id=text) == []
    assert len(await scene.runs()) == 1
