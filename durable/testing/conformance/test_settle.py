"""Settling (rules 2, 5, 9, 12, 25, 43): what each outcome makes of a run, and what comes before it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from durable.model import (
    Cancelled,
    Completed,
    Failed,
    ForwardIncomplete,
    HandedBack,
    Outcome,
    RecordKind,
    Retry,
    Status,
    TimedOut,
)
from durable.settings import HOUR, MINUTE, SECOND

from .scenario import Scene, failure, rule

ENDS = [
    (Failed, Status.FAILED),
    (Cancelled, Status.CANCELLED),
    (TimedOut, Status.TIMED_OUT),
    (ForwardIncomplete, Status.FORWARD_INCOMPLETE),
]


@rule(5)
async def test_completed_stores_the_output_and_no_error(scene: Scene) -> None:
    held = await scene.take()
    await scene.complete(held, '{"total":3}')
    run = await scene.get(held.run.run_id)
    assert (run.status, run.output, run.error, run.error_kind, run.error_detail) == (
        Status.COMPLETED,
        '{"total":3}',
        None,
        None,
        None,
    )


@rule(5)
@pytest.mark.parametrize(("outcome", "status"), ENDS)
async def test_every_other_end_stores_its_error_as_data_and_no_output(
    scene: Scene, outcome: Any, status: Status
) -> None:
    held = await scene.take()
    reason = failure("it broke", kind="misuse", detail='{"type":"ValueError"}')
    assert await scene.settle(held, outcome(failure=reason)) == "landed"
    run = await scene.get(held.run.run_id)
    assert (run.status, run.output, run.error, run.error_kind) == (status, None, "it broke", "misuse")
    assert run.error_detail == '{"type":"ValueError"}'


@rule(2)
async def test_a_retry_adds_one_to_failures_and_returns_the_run_after_its_back_off(scene: Scene) -> None:
    held = await scene.take(max_attempts=3)
    assert await scene.settle(held, Retry(after=MINUTE, failure=failure("again"))) == "landed"
    run = await scene.get(held.run.run_id)
    assert (run.status, run.failures, run.attempts, run.error) == (Status.PENDING, 1, 1, "again")
    assert list(await scene.claim()) == []
    await scene.later(MINUTE + SECOND)
    await scene.promote()
    await scene.take_again(run.run_id)


@rule(2)
async def test_an_execution_that_fails_for_the_last_time_counts_as_a_failure_too(scene: Scene) -> None:
    held = await scene.take()
    await scene.settle(held, Retry(after=0, failure=failure("again")))
    held = await scene.take_again(held.run.run_id)
    assert await scene.settle(held, Failed(failure=failure("for good"))) == "landed"
    assert (await scene.get(held.run.run_id)).failures == 2
    assert await scene.settle(held, Failed(failure=failure("for good"))) == "landed"
    assert (await scene.get(held.run.run_id)).failures == 2


@rule(2)
async def test_a_retry_without_back_off_is_claimable_now(scene: Scene) -> None:
    held = await scene.take(max_attempts=3)
    await scene.settle(held, Retry(after=0, failure=failure()))
    assert (await scene.get(held.run.run_id)).available_at is None
    await scene.take_again(held.run.run_id)


@rule(2)
async def test_a_completed_run_forgets_the_error_of_an_earlier_execution(scene: Scene) -> None:
    held = await scene.take(max_attempts=3)
    await scene.settle(held, Retry(after=0, failure=failure("first try")))
    again = await scene.take_again(held.run.run_id)
    await scene.complete(again)
    run = await scene.get(held.run.run_id)
    assert (run.status, run.error, run.error_kind, run.failures) == (Status.COMPLETED, None, None, 1)


@rule(12)
async def test_a_back_off_is_never_later_than_the_deadline(scene: Scene) -> None:
    held = await scene.take(max_attempts=3, deadline_after=MINUTE)
    await scene.settle(held, Retry(after=HOUR, failure=failure()))
    run = await scene.get(held.run.run_id)
    assert run.available_at == run.deadline_at


@rule(16)
async def test_a_hand_back_leaves_failures_and_may_be_delayed(scene: Scene) -> None:
    held = await scene.take()
    assert await scene.settle(held, HandedBack(after=MINUTE)) == "landed"
    run = await scene.get(held.run.run_id)
    assert (run.status, run.failures, run.mismatch_since) == (Status.PENDING, 0, None)
    assert run.available_at is not None
    assert list(await scene.claim()) == []


@rule(43)
@pytest.mark.parametrize(
    "outcome",
    [
        Completed(output="1"),
        Failed(failure=failure()),
        TimedOut(failure=failure()),
        ForwardIncomplete(failure=failure()),
        Retry(after=0, failure=failure()),
    ],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_a_settle_other_than_cancelled_or_handed_back_answers_woken_when_an_ask_came_first(
    scene: Scene, outcome: Outcome
) -> None:
    held = await scene.take()
    assert await scene.cancel(held.run.run_id)
    before = await scene.everything()
    assert await scene.settle(held, outcome) == "woken"
    assert await scene.everything() == before
    assert await scene.settle(held, Cancelled(failure=failure())) == "landed"
    assert (await scene.get(held.run.run_id)).status == Status.CANCELLED


@rule(43)
async def test_a_suspension_answers_woken_when_an_ask_came_first(scene: Scene) -> None:
    held = await scene.take()
    rest = await scene.rest(held)
    assert await scene.cancel(held.run.run_id)
    assert await scene.settle(held, rest) == "woken"
    fresh = await scene.rest(held)
    assert await scene.settle(held, fresh) == "woken"
    assert (await scene.get(held.run.run_id)).status == Status.RUNNING


@rule(43)
async def test_a_hand_back_lands_though_an_ask_came_first(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    assert await scene.cancel(held.run.run_id)
    await scene.hand_back(held)
    assert (await scene.get(held.run.run_id)).cancel_requested_at is not None
    await scene.take_again(held.run.run_id)


@rule(43, 46)
@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Completed(output="1"), Status.COMPLETED),
        (Failed(failure=failure()), Status.FAILED),
        (TimedOut(failure=failure()), Status.TIMED_OUT),
        (ForwardIncomplete(failure=failure()), Status.FORWARD_INCOMPLETE),
        (Retry(after=0, failure=failure()), Status.PENDING),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_settle_lands_when_the_ask_was_refused(scene: Scene, outcome: Outcome, status: Status) -> None:
    held = await scene.take()
    await scene.append(held, ":pivot", kind=RecordKind.PIVOT)
    await scene.cancel(held.run.run_id)
    assert await scene.settle(held, outcome) == "landed"
    assert (await scene.get(held.run.run_id)).status == status


@rule(5)
async def test_woken_leaves_the_fence_intact(scene: Scene) -> None:
    held = await scene.take()
    rest = await scene.rest(held)
    await scene.send(held.run.run_id)
    assert await scene.settle(held, rest) == "woken"
    assert (await scene.append(held, "a")).state == "appended"
    assert await scene.settle(held, await scene.rest(held)) == "landed"


@rule(5, 9)
async def test_one_batch_gives_one_answer_per_entry_in_order(scene: Scene) -> None:
    held = [await scene.take() for _ in range(4)]
    await scene.cancel(held[1].run.run_id)
    stale = dataclasses.replace(held[2].lease, mark="somebody/else")
    answers = await scene.store.settle(
        [
            (held[0].lease, Completed(output="0")),
            (held[1].lease, Completed(output="1")),
            (stale, Completed(output="2")),
            (held[3].lease, Failed(failure=failure())),
        ]
    )
    assert list(answers) == ["landed", "woken", "lost", "landed"]
    statuses = [(await scene.get(one.run.run_id)).status for one in held]
    assert statuses == [Status.COMPLETED, Status.RUNNING, Status.RUNNING, Status.FAILED]


@rule(9)
async def test_an_empty_batch_is_an_empty_answer(scene: Scene) -> None:
    assert list(await scene.store.settle([])) == []
    assert list(await scene.store.append([])) == []
    assert list(await scene.store.enqueue([])) == []
    assert list(await scene.store.inbox([])) == []
    assert list(await scene.store.renew([], lease=SECOND)) == []
    assert list(await scene.store.get([], scope=None)) == []


@rule(9)
async def test_a_large_batch_settles_whole(scene: Scene) -> None:
    runs = [await scene.start() for _ in range(120)]
    claimed = await scene.claim(120)
    assert len(claimed) == len(runs)
    answers = await scene.store.settle([(one.lease, Completed(output=str(n))) for n, one in enumerate(claimed)])
    assert list(answers) == ["landed"] * 120
    assert {run.status for run in await scene.runs()} == {Status.COMPLETED}
