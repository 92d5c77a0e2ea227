"""Schedules (rules 53, 55 to 57, 62): one run per slot over any number of workers, and a bad row harms only itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from durable.model import ALL, Firing, NewRun, Schedule, Status
from durable.settings import DAY, HOUR, MINUTE, SECOND

from .scenario import ACME, BETA, Scene, new_run, rule, schedule


async def put(scene: Scene, schedule_id: str = "nightly", *, scope: Any = None, **changes: Any) -> Schedule:
    """Register a schedule that is due in a minute unless the test says otherwise."""
    values = {"next_fire_at": scene.store.clock() + MINUTE, **changes}
    return await scene.store.put_schedule(schedule(schedule_id, **values), scope=scope)


def slot(row: Schedule, scheduled_for: int, **changes: Any) -> NewRun:
    """The run of one slot."""
    return new_run(
        schedule_id=row.schedule_id, scheduled_for=scheduled_for, tenant=row.tenant, input=row.input, **changes
    )


def firing(row: Schedule, *, following: int | None = None, **changes: Any) -> Firing:
    """Fire the slot that is due and go on to the following."""
    assert row.next_fire_at is not None
    values: dict[str, Any] = {
        "schedule_id": row.schedule_id,
        "tenant": row.tenant,
        "expected": row.next_fire_at,
        "next_fire_at": row.next_fire_at + HOUR if following is None else following,
        "runs": (slot(row, row.next_fire_at),),
    }
    return Firing(**{**values, **changes})


async def only(scene: Scene, scope: Any = ALL) -> Schedule:
    """The one schedule there is."""
    (row,) = await scene.store.schedules(scope=scope)
    return row


@rule(56)
async def test_a_schedule_is_stored_as_it_was_registered(scene: Scene) -> None:
    row = await put(
        scene, cron="*/5 * * * *", tz="Europe/Berlin", input='{"a":1}', queue="q", overlap="queue", jitter=SECOND
    )
    assert (row.schedule_id, row.tenant, row.name, row.cron, row.tz) == (
        "nightly",
        None,
        "work",
        "*/5 * * * *",
        "Europe/Berlin",
    )
    assert (row.input, row.queue, row.overlap, row.catch_up, row.jitter) == ('{"a":1}', "q", "queue", "latest", SECOND)
    assert (row.enabled, row.parked_reason, row.consecutive_failures, row.last_run_id) == (True, None, 0, None)
    assert await only(scene) == row


@rule(56)
async def test_registering_again_with_the_same_cron_and_zone_leaves_the_next_instant_and_the_paused_state_alone(
    scene: Scene,
) -> None:
    first = await put(scene)
    await scene.store.pause_schedule("nightly", scope=None, paused=True)
    again = await put(scene, next_fire_at=scene.store.clock() + DAY)
    assert (again.next_fire_at, again.enabled) == (first.next_fire_at, False)


@rule(56)
@pytest.mark.parametrize("change", [{"cron": "0 4 * * *"}, {"tz": "Europe/Berlin"}])
async def test_a_changed_cron_or_zone_takes_the_new_instant(scene: Scene, change: dict[str, str]) -> None:
    await put(scene)
    instant = scene.store.clock() + DAY
    again = await put(scene, next_fire_at=instant, **change)
    assert again.next_fire_at == instant


@rule(56)
async def test_changed_input_alone_keeps_the_instant(scene: Scene) -> None:
    first = await put(scene)
    again = await put(scene, input='{"new":1}', next_fire_at=scene.store.clock() + DAY)
    assert (again.input, again.next_fire_at) == ('{"new":1}', first.next_fire_at)


@rule(55, 56)
async def test_a_parked_row_that_is_put_again_is_unparked(scene: Scene) -> None:
    await put(scene)
    assert await scene.store.park_schedule("nightly", scope=None, reason="its function is gone")
    assert (await only(scene)).parked_reason == "its function is gone"
    again = await put(scene)
    assert again.parked_reason is None
    await scene.later(2 * MINUTE)
    _, due = await scene.store.due_schedules(scope=ALL, limit=10)
    assert len(due) == 1


@rule(53)
async def test_due_schedules_are_the_enabled_ones_whose_instant_has_come_oldest_first(scene: Scene) -> None:
    now = scene.store.clock()
    for name, minutes in (("c", 3), ("a", 1), ("b", 2), ("later", 3600)):
        await put(scene, name, next_fire_at=now + minutes * MINUTE)
    await put(scene, "never", next_fire_at=None)
    await put(scene, "paused", next_fire_at=now + MINUTE)
    await scene.store.pause_schedule("paused", scope=None, paused=True)
    await put(scene, "parked", next_fire_at=now + MINUTE)
    await scene.store.park_schedule("parked", scope=None, reason="unreadable")
    _, none = await scene.store.due_schedules(scope=ALL, limit=10)
    assert list(none) == []
    await scene.later(5 * MINUTE)
    at, due = await scene.store.due_schedules(scope=ALL, limit=10)
    assert [row.schedule_id for row in due] == ["a", "b", "c"]
    assert at >= now
    _, first = await scene.store.due_schedules(scope=ALL, limit=2)
    assert [row.schedule_id for row in first] == ["a", "b"]


@rule(53)
async def test_the_slot_row_the_run_and_the_next_instant_are_written_together(scene: Scene) -> None:
    row = await put(scene)
    following = (row.next_fire_at or 0) + HOUR
    answers = await scene.store.fire(firing(row, following=following))
    assert answers is not None
    (answer,) = answers
    assert answer.disposition == "created"
    assert (answer.run.schedule_id, answer.run.scheduled_for) == ("nightly", row.next_fire_at)
    after = await only(scene)
    assert (after.next_fire_at, after.last_run_id, after.last_run_live) == (following, answer.run.run_id, True)
    await scene.complete(await scene.take_again(answer.run.run_id))
    assert not (await only(scene)).last_run_live


@rule(53)
async def test_a_firing_whose_expected_instant_is_past_does_nothing(scene: Scene) -> None:
    row = await put(scene)
    assert await scene.store.fire(firing(row)) is not None
    before = await scene.everything()
    assert await scene.store.fire(firing(row)) is None
    assert await scene.everything() == before


@rule(53)
async def test_exactly_one_run_per_schedule_and_instant_over_any_number_of_workers(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    for _ in range(5):
        row = await put(one, tz=f"Etc/GMT+{_}")
        answers = await asyncio.gather(*(scene.store.fire(firing(row)) for scene in (one, other) * 4))
        assert sum(answer is not None for answer in answers) == 1
    runs = await one.runs()
    assert len(runs) == len({run.scheduled_for for run in runs})


@rule(53)
async def test_a_slot_that_has_a_row_is_left_out_of_the_answer(scene: Scene) -> None:
    row = await put(scene)
    assert row.next_fire_at is not None
    await scene.store.fire(firing(row))
    await scene.store.remove_schedule("nightly", scope=None)
    again = await put(scene, next_fire_at=row.next_fire_at)
    both = (slot(again, row.next_fire_at), slot(again, row.next_fire_at + SECOND))
    answers = await scene.store.fire(firing(again, runs=both))
    assert answers is not None
    assert [answer.run.scheduled_for for answer in answers] == [row.next_fire_at + SECOND]
    assert len(await scene.runs()) == 2


@rule(52)
async def test_several_missed_slots_are_fired_in_one_write(scene: Scene) -> None:
    row = await put(scene)
    assert row.next_fire_at is not None
    runs = tuple(slot(row, row.next_fire_at + n * MINUTE) for n in range(5))
    answers = await scene.store.fire(firing(row, runs=runs))
    assert answers is not None
    assert [answer.run.scheduled_for for answer in answers] == [run.scheduled_for for run in runs]
    assert (await only(scene)).last_run_id == runs[-1].run_id


@rule(52)
async def test_missed_slots_are_skipped_by_a_firing_without_runs(scene: Scene) -> None:
    row = await put(scene)
    answers = await scene.store.fire(firing(row, runs=()))
    assert answers is not None
    assert list(answers) == []
    after = await only(scene)
    assert after.next_fire_at == (row.next_fire_at or 0) + HOUR
    assert await scene.runs() == []


@rule(53)
@pytest.mark.parametrize("state", ["paused", "parked", "removed"])
async def test_a_schedule_that_is_gone_paused_or_parked_is_not_fired(scene: Scene, state: str) -> None:
    row = await put(scene)
    if state == "paused":
        await scene.store.pause_schedule("nightly", scope=None, paused=True)
    elif state == "parked":
        await scene.store.park_schedule("nightly", scope=None, reason="unreadable")
    else:
        await scene.store.remove_schedule("nightly", scope=None)
    assert await scene.store.fire(firing(row)) is None
    assert await scene.runs() == []


@rule(55)
async def test_a_bad_row_is_parked_with_a_visible_error_and_harms_nothing_else(scene: Scene) -> None:
    for name in ("bad", "good"):
        await put(scene, name)
    await scene.later(2 * MINUTE)
    bad, good = await scene.store.schedules(scope=None, schedule_ids=["bad", "good"])
    await scene.store.fire(firing(bad, runs=(), following=bad.next_fire_at, parked_reason="cron 'x' can not be read"))
    _, due = await scene.store.due_schedules(scope=ALL, limit=10)
    assert [row.schedule_id for row in due] == ["good"]
    (parked,) = await scene.store.schedules(scope=None, schedule_ids=["bad"])
    assert parked.parked_reason == "cron 'x' can not be read"
    assert await scene.store.fire(firing(good)) is not None


@rule(56)
async def test_a_paused_schedule_is_resumed_with_a_new_instant_or_its_old_one(scene: Scene) -> None:
    row = await put(scene)
    assert await scene.store.pause_schedule("nightly", scope=None, paused=True)
    assert not (await only(scene)).enabled
    assert await scene.store.pause_schedule("nightly", scope=None, paused=False)
    assert (await only(scene)).next_fire_at == row.next_fire_at
    await scene.store.pause_schedule("nightly", scope=None, paused=True)
    instant = scene.store.clock() + DAY
    assert await scene.store.pause_schedule("nightly", scope=None, paused=False, next_fire_at=instant)
    after = await only(scene)
    assert (after.enabled, after.next_fire_at) == (True, instant)


@rule(55)
async def test_consecutive_failures_counts_and_is_reset_by_success(scene: Scene) -> None:
    row = await put(scene)
    for expected, good in ((1, False), (2, False), (0, True), (1, False)):
        answers = await scene.store.fire(firing(row))
        assert answers is not None
        held = await scene.take_again(answers[0].run.run_id)
        if good:
            await scene.complete(held)
        else:
            await scene.fail(held)
        row = await only(scene)
        assert row.consecutive_failures == expected


@rule(62)
async def test_a_purge_never_reopens_a_slot(scene: Scene) -> None:
    row = await put(scene)
    await put(scene, "witness", next_fire_at=row.next_fire_at)
    answers = await scene.store.fire(firing(row))
    assert answers is not None
    await scene.complete(await scene.take_again(answers[0].run.run_id))
    await scene.later(100 * DAY)
    (witness,) = await scene.store.schedules(scope=None, schedule_ids=["witness"])  # that instant, as it is called now
    assert await scene.store.purge(scope=ALL, limit=10) == 1
    await scene.store.remove_schedule("nightly", scope=None)
    again = await put(scene, next_fire_at=witness.next_fire_at)
    refired = await scene.store.fire(firing(again))
    assert refired is not None
    assert list(refired) == []
    assert await scene.runs() == []


@rule(56)
async def test_what_is_not_there_is_answered_with_false(scene: Scene) -> None:
    assert not await scene.store.pause_schedule("nothing", scope=ALL, paused=True)
    assert not await scene.store.park_schedule("nothing", scope=ALL, reason="x")
    assert not await scene.store.remove_schedule("nothing", scope=ALL)
    await put(scene)
    assert await scene.store.remove_schedule("nightly", scope=None)
    assert not await scene.store.remove_schedule("nightly", scope=None)
    assert list(await scene.store.schedules(scope=ALL)) == []


@rule(57)
async def test_two_tenants_may_use_one_schedule_id(scene: Scene) -> None:
    for scope in (None, ACME, BETA):
        await put(scene, scope=scope, input=f'"{scope}"')
    assert len(await scene.store.schedules(scope=ALL)) == 3
    assert (await only(scene, ACME)).input == f'"{ACME}"'
    await scene.later(2 * MINUTE)
    for scope in (None, ACME, BETA):
        _, due = await scene.store.due_schedules(scope=scope, limit=10)
        assert [row.tenant for row in due] == [scope]
    row, other = await only(scene, ACME), await only(scene, BETA)
    answers = await scene.store.fire(firing(row))
    assert answers is not None
    assert answers[0].run.tenant == ACME
    assert await only(scene, BETA) == other
    await scene.store.remove_schedule("nightly", scope=ACME)
    assert len(await scene.store.schedules(scope=ALL)) == 2


@rule(53)
async def test_a_scheduled_run_is_a_run_as_any_other(scene: Scene) -> None:
    row = await put(scene)
    answers = await scene.store.fire(firing(row))
    assert answers is not None
    run = answers[0].run
    assert run.status == Status.PENDING
    assert [found.run_id for found in await scene.runs(schedule_id="nightly", scope=None)] == [run.run_id]
