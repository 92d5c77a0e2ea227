"""What a body is promised by its context (semantics 18 to 30, 43 to 47, 50), on a stage without a store."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from replay.programs import Wanted
from replay.simulation import STARTED
from replay.stage import Stage, declared, play, twice

from durable.activation import Activation
from durable.blocking import SyncContext
from durable.codec import read_envelope
from durable.context import Context
from durable.errors import (
    ConfigurationError,
    LeaseLost,
    Misuse,
    SerializationError,
    SignalTimeout,
    StepFailed,
    StepTimeout,
    StoreUnavailable,
)
from durable.function import step
from durable.model import NewRecord, RecordKind
from durable.replay import (
    BadPayload,
    CancelledEnding,
    Ending,
    Interrupted,
    Mismatch,
    PutAside,
    Raised,
    Returned,
    TimedOutEnding,
    failed_positions,
)
from durable.retry import Retry
from durable.settings import LONGEST, SECOND, Settings

ran: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_ran_yet() -> None:
    ran.clear()


async def work(what: Any) -> Any:
    ran.append(what)
    await asyncio.sleep(0)
    return what


def blocking_work(what: int) -> int:
    ran.append(what)
    return what


async def failing(what: str) -> None:
    ran.append(what)
    raise ValueError(what)


async def _resting(stage: Stage, body: Any, *args: Any, **changes: Any) -> tuple[Activation, asyncio.Future[Ending]]:
    """The body at rest, with nothing that wakes it."""
    stage.frozen = True
    activation = stage.begin(declared(body), *args, **changes)
    task = asyncio.ensure_future(activation.run())
    while activation.rest is None:
        assert not task.done(), task.result()
        await asyncio.sleep(0)
    return activation, task


# -- steps and ids (18, 21 to 25) --------------------------------------------------------------------------------------


async def test_an_id_is_the_path_of_the_branch_the_name_and_the_nth_call_of_it() -> None:
    async def branch(ctx: Context) -> None:
        await ctx.step(work, 1)
        await asyncio.create_task(inner(ctx))

    async def inner(ctx: Context) -> None:
        await ctx.step(work, 2)

    async def body(ctx: Context) -> None:
        await ctx.step(work, 3)
        await ctx.step(work, 4)
        await asyncio.gather(branch(ctx), branch(ctx))

    assert set((await twice(body)).ids) == {"work", "work#2", "1/work", "2/work", "1/1/work", "2/1/work"}


async def test_the_place_of_a_call_is_taken_when_it_is_called_not_when_it_is_awaited() -> None:
    async def body(ctx: Context) -> Any:
        first, second = ctx.step(work, "a"), ctx.step(work, "b")
        return [await second, await first]

    assert (await twice(body)).value == ["b", "a"]
    assert ran == ["a", "b"]


async def test_a_recorded_step_is_not_executed_again() -> None:
    async def body(ctx: Context) -> list[int]:
        return [await ctx.step(work, i) for i in range(3)]

    await twice(body)
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("value", [None, 0, ""])
async def test_none_zero_and_empty_text_are_recorded_results(value: Any) -> None:
    async def body(ctx: Context) -> Any:
        return await ctx.step(work, value)

    assert (await twice(body)).value == value
    assert ran == [value]


async def test_a_failed_step_raises_the_same_error_on_replay() -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(failing, "no")

    played = await twice(body)
    assert isinstance(played.ending, Raised)
    assert type(played.ending.error) is ValueError
    assert ran == ["no"]


async def test_an_error_whose_class_is_not_known_is_step_failed_with_the_data() -> None:
    class Own(Exception):
        pass

    async def bad() -> None:
        raise Own("what")

    async def body(ctx: Context) -> str:
        try:
            await ctx.step(bad)
        except StepFailed as error:
            return f"{error.step_id} {error.type_name.rpartition('.')[2]} {error.message}"
        return ""

    assert (await twice(body)).value == "bad Own what"


async def test_a_result_that_can_not_be_stored_is_a_recorded_failure_that_names_the_path() -> None:
    async def bad() -> Any:
        return {"ok": 1, "no": object()}

    async def body(ctx: Context) -> str:
        try:
            await ctx.step(bad)
        except SerializationError as error:
            return error.path
        return ""

    assert (await twice(body)).value == "$.no"


async def test_an_argument_that_can_not_be_stored_is_refused_at_the_call() -> None:
    async def body(ctx: Context) -> None:
        ctx.step(work, object())

    played = await twice(body)
    assert isinstance(played.ending, Raised)
    assert isinstance(played.ending.error, SerializationError)
    assert played.records == ()


async def test_a_step_that_alters_its_argument_alters_a_copy() -> None:
    async def spoil(items: list[int]) -> int:
        items.append(99)
        return len(items)

    async def body(ctx: Context) -> list[int]:
        items = [1, 2]
        await ctx.step(spoil, items)
        return items

    assert (await twice(body)).value == [1, 2]


async def test_a_def_step_runs_in_another_thread() -> None:
    def where() -> int:
        return threading.get_ident()

    async def body(ctx: Context) -> int:
        return await ctx.step(where)

    assert (await twice(body)).value != threading.get_ident()


async def test_a_step_reads_a_stable_key() -> None:
    async def key(ctx_key: str) -> str:
        return ctx_key

    async def body(ctx: Context) -> Any:
        async def own() -> str:
            return ctx.step_key

        def threaded() -> str:
            return ctx.step_key

        return await ctx.step(own), await ctx.step(threaded)

    assert (await twice(body)).value == ["r:own", "r:threaded"]


async def test_a_step_key_outside_of_a_step_is_misuse() -> None:
    async def body(ctx: Context) -> str:
        return ctx.step_key

    ending = (await play(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, Misuse)


async def test_the_name_of_a_step_may_be_declared() -> None:
    async def body(ctx: Context) -> Any:
        return await ctx.step(step(name="charge")(work), 1)

    assert (await twice(body)).ids == ["charge"]


async def test_a_step_longer_than_its_timeout_fails_with_step_timeout() -> None:
    async def slow() -> None:
        await asyncio.Event().wait()

    async def body(ctx: Context) -> str:
        try:
            await ctx.step(step(timeout=0.01)(slow))
        except StepTimeout as error:
            return error.code
        return ""

    assert (await twice(body)).value == "step_timeout"


async def test_a_timeout_of_its_own_making_is_the_steps_error() -> None:
    async def own() -> None:
        raise TimeoutError("the server")

    async def body(ctx: Context) -> str:
        try:
            await ctx.step(step(timeout=60)(own))
        except TimeoutError as error:
            return type(error).__name__
        return ""

    assert (await twice(body)).value == "TimeoutError"


async def test_a_durable_function_is_no_step() -> None:
    async def other(ctx: Context) -> None: ...

    fn = declared(other)

    async def body(ctx: Context) -> None:
        await ctx.step(fn)

    ending = (await play(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, Misuse)


# -- retries of steps (24) ---------------------------------------------------------------------------------------------


async def test_each_failed_attempt_is_a_row_that_is_not_delivered() -> None:
    tries: list[int] = []

    async def third_time() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("not yet")
        return "ok"

    async def body(ctx: Context) -> str:
        return await ctx.step(step(retry=Retry(5, initial=0))(third_time))

    played = await twice(body)
    assert played.value == "ok"
    assert played.ids == ["third_time", "third_time@1", "third_time@2"]
    assert [record.kind for record in played.records[1:]] == [RecordKind.ATTEMPT] * 2
    assert "next_at" in read_envelope(played.records[1].result)[1]


async def test_a_function_that_wraps_a_step_is_called_by_the_policy_of_that_step() -> None:
    @step(retry=Retry(2, initial=0))
    async def inner(what: str) -> str:
        ran.append(what)
        if len(ran) == 1:
            raise ConnectionError("not yet")
        return what

    @functools.wraps(inner)
    async def outer(what: str) -> str:
        return await inner(f"{what}!")

    async def body(ctx: Context) -> str:
        return await ctx.step(outer, "a")

    played = await play(body)
    assert ran == ["a!", "a!"]
    assert isinstance(played.ending, Returned)
    assert played.ids == ["inner", "inner@1"]


async def test_a_crash_does_not_start_the_count_of_attempts_again() -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(step(retry=Retry(3, initial=0))(failing), "x")

    played = await play(body)
    rows = tuple(record for record in played.records if record.position is None)
    assert len(ran) == 3
    ran.clear()
    again = await play(body, history=rows)
    assert len(ran) == 1
    assert isinstance(again.ending, Raised)


async def test_a_step_without_a_policy_is_tried_once() -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(failing, "x")

    await play(body)
    assert ran == ["x"]


async def test_a_long_back_off_is_a_durable_wait() -> None:
    tries: list[int] = []

    async def second_time() -> str:
        tries.append(1)
        if len(tries) < 2:
            raise ConnectionError("not yet")
        return "ok"

    async def body(ctx: Context) -> str:
        return await ctx.step(step(retry=Retry(2, initial="1h", maximum="2h", jitter=0))(second_time))

    stage = Stage()
    played = await play(body, stage=stage)
    assert played.value == "ok"
    assert [rest.waiting_for for rest in stage.rests] == ['{"retries":["second_time"]}']
    assert stage.rests[0].until is not None
    assert stage.rests[0].until >= STARTED + 3_600 * SECOND
    assert stage.slots == ["given", "taken"]


async def test_a_run_that_is_suspended_in_a_long_back_off_goes_on_with_the_next_attempt() -> None:
    async def body(ctx: Context) -> str:
        return await ctx.step(step(retry=Retry(2, initial="1h", maximum="2h", jitter=0))(failing), "x")  # type: ignore[func-returns-value]

    stage = Stage()
    activation, task = await _resting(stage, body)
    await activation.set_aside()
    assert isinstance(await task, PutAside)
    assert [record.step_id for record in activation.history] == ["failing@1"]
    later = Stage()
    later.now = STARTED + 3_700 * SECOND
    again = await play(body, stage=later, history=activation.history)
    assert ran == ["x", "x"]
    assert again.ids == ["failing", "failing@1"]


# -- time, chance, logs (R8, 29) ---------------------------------------------------------------------------------------


async def test_time_stands_still_between_two_records_and_is_that_of_the_last_one() -> None:
    async def body(ctx: Context) -> list[str]:
        before = ctx.now()
        time.sleep(0.01)  # noqa: ASYNC251 - the body's time stands still meanwhile
        assert ctx.now() == before
        await ctx.sleep(timedelta(hours=1))
        return [before.isoformat(), ctx.now().isoformat()]

    played = await twice(body)
    assert played.value[0] == datetime.fromtimestamp(STARTED // SECOND, UTC).isoformat()
    assert datetime.fromisoformat(played.value[1]) - datetime.fromisoformat(played.value[0]) >= timedelta(hours=1)


async def test_sleep_until_waits_for_an_instant() -> None:
    when = datetime.fromtimestamp(STARTED // SECOND + 500, UTC)

    async def body(ctx: Context) -> bool:
        await ctx.sleep_until(when)
        return ctx.now() >= when

    assert (await twice(body)).value is True


async def test_sleep_until_refuses_a_naive_datetime() -> None:
    async def body(ctx: Context) -> None:
        await ctx.sleep_until(datetime(2030, 1, 1))  # noqa: DTZ001

    ending = (await play(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, ConfigurationError)


async def test_chance_is_the_same_in_replay_and_another_for_another_seed() -> None:
    async def body(ctx: Context) -> Any:
        async def branch() -> float:
            return ctx.random()

        return [ctx.random(), ctx.random(), str(ctx.uuid()), await asyncio.create_task(branch())]

    one = (await twice(body)).value
    assert len(set(map(str, one))) == 4
    assert all(0 <= number < 1 for number in (one[0], one[1], one[3]))
    assert (await play(body)).value == one
    assert (await play(body, stage=Stage(seed=b"another"))).value != one


async def test_asyncio_sleep_is_a_durable_timer() -> None:
    async def body(ctx: Context) -> None:
        await asyncio.sleep(86_400)

    stage = Stage()
    played = await play(body, stage=stage)
    assert [(record.step_id, record.kind) for record in played.records] == [("timer", RecordKind.TIMER)]
    assert stage.rests[0].until == STARTED + 86_400 * SECOND


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
async def test_an_endless_limit_of_asyncio_waits_until_an_instant_that_every_store_has(seconds: float) -> None:
    """(18) Plain asyncio takes it. SQLite and MongoDB have no such instant: the run could not be suspended, and ended by its reclaims."""

    async def body(ctx: Context) -> str:
        async with asyncio.timeout(seconds):
            first = await ctx.wait_signal(Wanted("x"))
        forever = asyncio.ensure_future(asyncio.sleep(seconds))
        await ctx.step(work, 1)
        forever.cancel()
        return str(first)

    stage = Stage()
    stage.send("x", "7", at=10)
    played = await play(body, stage=stage)
    assert played.value == "7"
    assert stage.rests[0].until == STARTED + LONGEST
    assert (await play(body, history=played.records)).value == "7"


async def test_an_instant_of_a_timer_is_exact_to_the_microsecond_after_years() -> None:
    async def body(ctx: Context) -> None:
        await ctx.sleep("3650d")
        await asyncio.sleep(0.000_001)

    stage = Stage()
    await play(body, stage=stage)
    first, second = stage.rests
    assert first.until is not None
    assert second.until is not None
    assert second.until - stage.records[0].at == 1


async def test_logs_are_silent_in_replay_and_know_their_run(caplog: pytest.LogCaptureFixture) -> None:
    async def body(ctx: Context) -> None:
        ctx.log.warning("before")
        await ctx.step(work, 1)
        ctx.log.warning("after", extra={"order": 7})

    caplog.set_level(logging.INFO)
    played = await play(body, failures=2)
    lines = [record for record in caplog.records if record.name == "durable.run.body"]
    assert [line.message for line in lines] == ["before", "after"]
    facts: Any = lines[1]
    assert (facts.run_id, facts.function, facts.attempt, facts.order) == ("r", "body", 3, 7)
    caplog.clear()
    await play(body, history=played.records)
    assert [record.message for record in caplog.records] == ["after"]


async def test_progress_is_kept_for_the_next_write_and_silent_in_replay() -> None:
    async def body(ctx: Context) -> None:
        await ctx.progress(1, 10, "first")
        await ctx.step(work, 1)

    stage = Stage()
    played = await play(body, stage=stage)
    assert stage.progressed == ['{"done":1,"total":10,"message":"first"}']
    again = Stage()
    await play(body, stage=again, history=played.records)
    assert again.progressed == []


async def test_facts_of_the_run_are_at_hand() -> None:
    async def body(ctx: Context) -> Any:
        return [ctx.run_id, ctx.attempt, ctx.tenant, dict(ctx.tags), ctx.scheduled_for is None, ctx.replaying]

    assert (await play(body, failures=1, tags={"a": "b"})).value == ["r", 2, None, {"a": "b"}, True, False]


# -- changes of code (25) ----------------------------------------------------------------------------------------------


async def test_a_patch_is_taken_by_new_runs_and_by_old_ones_that_had_not_come_there() -> None:
    async def before(ctx: Context) -> Any:
        return [await ctx.step(work, "old"), await ctx.step(work, "end")]

    async def after(ctx: Context) -> Any:
        first = await ctx.step(work, "new" if await ctx.patched("better") else "old")
        return [first, await ctx.step(work, "end")]

    assert (await twice(after)).value == ["new", "end"]
    old = await play(before)
    assert (await play(after, history=old.records)).value == ["old", "end"]
    assert (await play(after, history=old.records[:1])).value == ["old", "end"]


async def test_a_mismatch_names_what_the_journal_holds_what_the_code_asks_for_and_the_line() -> None:
    async def before(ctx: Context) -> None:
        await ctx.step(work, 1)

    async def after(ctx: Context) -> None:
        await ctx.sleep(5)

    played = await play(after, history=(await play(before)).records)
    assert isinstance(played.ending, Mismatch)
    told = str(played.ending.error)
    assert "position 0: step 'work'" in told
    assert "timer 'sleep'" in told
    assert f"{__file__}:" in told
    assert "ctx.patched" in told


# -- signals (32) ------------------------------------------------------------------------------------------------------


async def test_a_signal_that_comes_before_the_wait_is_not_lost_and_each_is_taken_once() -> None:
    async def body(ctx: Context) -> list[int]:
        return [await ctx.wait_signal(Wanted("x")) for _ in range(2)]

    stage = Stage()
    stage.send("x", "1")
    stage.send("y", "9")
    stage.send("x", "2")
    played = await play(body, stage=stage)
    assert played.value == [1, 2]
    assert [(record.step_id, record.signal_seq) for record in played.records] == [("signal:x", 1), ("signal:x#2", 3)]
    assert (await play(body, history=played.records)).value == [1, 2]


async def test_a_signal_that_does_not_come_is_a_timeout_or_the_default() -> None:
    async def body(ctx: Context) -> Any:
        try:
            await ctx.wait_signal(Wanted("x"), timeout="1h")
        except SignalTimeout as error:
            return [error.code, await ctx.wait_signal(Wanted("x"), timeout="1h", default="none")]

    assert (await twice(body)).value == ["signal_timeout", "none"]


async def test_rest_tells_the_wake_counter_that_was_read_with_the_inbox() -> None:
    async def body(ctx: Context) -> int:
        return await ctx.wait_signal(Wanted("x"))

    stage = Stage()
    stage.send("y", "1")
    activation, task = await _resting(stage, body)
    assert activation.rest is not None
    assert activation.rest.wake_seq == 1
    assert activation.rest.waiting_for == '{"signals":["x"]}'
    stage.send("y", "2")
    activation.news()
    while activation.rest is None or activation.rest.wake_seq != 2:
        await asyncio.sleep(0)
    await activation.set_aside()
    assert isinstance(await task, PutAside)


# -- transactions (26) -------------------------------------------------------------------------------------------------


async def test_a_transaction_commits_its_rows_and_its_record_together() -> None:
    async def credit(connection: str, cents: int) -> int:
        ran.append((connection, cents))
        return cents + 1

    async def body(ctx: Context) -> int:
        return await ctx.transaction(credit, 41)

    played = await twice(body)
    assert (played.value, played.ids, ran) == (42, ["credit"], [("connection", 41)])


async def test_a_transaction_that_fails_is_a_recorded_failure_and_leaves_no_gap() -> None:
    async def bad(connection: str) -> None:
        raise ValueError("no money")

    async def body(ctx: Context) -> str:
        try:
            await ctx.transaction(bad)
        except ValueError as error:
            await ctx.step(work, 1)
            return str(error)
        return ""

    played = await twice(body)
    assert played.value == "no money"
    assert [record.position for record in played.records] == [0, 1]


async def test_a_transaction_is_tried_again_by_its_policy_and_each_failed_attempt_is_a_row() -> None:
    tries: list[int] = []

    @step(retry=Retry(3, initial=0))
    async def credit(connection: str, cents: int) -> int:
        tries.append(cents)
        if len(tries) < 2:
            raise ConnectionError("locked")
        return cents

    async def body(ctx: Context) -> int:
        return await ctx.transaction(credit, 5)

    played = await twice(body)
    assert (played.value, played.ids, tries) == (5, ["credit", "credit@1"], [5, 5])


async def test_a_transaction_that_the_store_calls_again_is_recorded_and_delivered_once() -> None:
    """(19, 26) What it had when it was rolled back holds nothing up: neither its own record nor those of other branches."""

    async def credit(connection: str, cents: int) -> int:
        ran.append(cents)
        return cents + len(ran)

    async def body(ctx: Context) -> list[int]:
        both = await asyncio.gather(ctx.transaction(credit, 10), ctx.step(work, 1))
        return [*both, await ctx.step(work, 2)]

    stage = Stage()
    stage.conflicts = 2
    played = await play(body, stage=stage)
    assert played.value == [13, 1, 2]
    assert sorted(ran) == [1, 2, 10, 10, 10]
    assert (await play(body, history=played.records)).value == [13, 1, 2]


async def test_a_transaction_that_was_given_up_is_not_called_again() -> None:
    """(26, R12) The body gave it up after its first call, while that was rolled back."""
    being_written, rolled_back, given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def credit(connection: str) -> int:
        ran.append("credit")
        await being_written.wait()  # the record of the step comes first
        return 1

    async def body(ctx: Context) -> str:
        paying = asyncio.ensure_future(ctx.transaction(credit))
        await ctx.step(work, 1)
        paying.cancel()
        given_up.set()
        return str(await ctx.step(work, 2))

    async def conflict() -> None:
        rolled_back.set()
        await given_up.wait()

    async def in_order(record: NewRecord) -> None:
        being_written.set()
        await rolled_back.wait()

    stage = Stage()
    stage.conflicts, stage.on_conflict, stage.on_append = 1, conflict, in_order
    played = await play(body, stage=stage)
    assert (played.value, played.ids) == ("2", ["work", "work#2"])
    assert sorted(map(str, ran)) == ["1", "2", "credit"]


async def test_a_transaction_over_its_time_is_a_recorded_failure() -> None:
    async def slow(connection: str) -> None:
        await asyncio.Event().wait()

    async def body(ctx: Context) -> str:
        try:
            await ctx.transaction(slow)
        except TimeoutError as error:
            return type(error).__name__
        return ""

    stage = Stage(settings=Settings(transaction_timeout=10_000))
    assert (await play(body, stage=stage)).value == "TimeoutError"


async def test_a_def_function_is_no_transaction() -> None:
    def credit(connection: str) -> None: ...

    async def body(ctx: Context) -> None:
        await ctx.transaction(credit)  # type: ignore[arg-type]

    ending = (await play(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, Misuse)


# -- rest (30) ---------------------------------------------------------------------------------------------------------


async def test_a_run_at_rest_gives_its_slot_back_and_takes_one_before_it_goes_on() -> None:
    async def body(ctx: Context) -> None:
        await ctx.sleep(10)
        await ctx.sleep(10)

    stage = Stage()
    await play(body, stage=stage)
    assert stage.slots == ["given", "taken"] * 2


async def test_a_run_with_a_step_in_flight_is_not_at_rest() -> None:
    go = asyncio.Event()

    async def slow() -> None:
        await go.wait()

    async def body(ctx: Context) -> None:
        await asyncio.gather(ctx.step(slow), ctx.sleep(3_600))

    stage = Stage()
    stage.frozen = True
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert activation.rest is None
    go.set()
    while activation.rest is None:
        await asyncio.sleep(0)
    await activation.set_aside()
    assert isinstance(await task, PutAside)


async def test_what_branches_wait_for_among_themselves_does_not_matter_for_rest() -> None:
    async def body(ctx: Context) -> None:
        event = asyncio.Event()

        async def setter() -> None:
            await ctx.sleep(5)
            event.set()

        await asyncio.gather(event.wait(), setter())

    stage = Stage()
    await play(body, stage=stage)
    assert len(stage.rests) == 1


# -- cancel and time-out (43 to 47, 12) --------------------------------------------------------------------------------


async def test_a_cancel_is_a_record_and_an_ordinary_cancelled_error_in_the_body() -> None:
    async def body(ctx: Context) -> None:
        try:
            await ctx.sleep("1d")
        except asyncio.CancelledError:
            ran.append("seen")
            raise

    stage = Stage()
    activation, task = await _resting(stage, body)
    activation.ask_cancel("enough")
    ending = await task
    assert isinstance(ending, CancelledEnding)
    assert ending.reason == "enough"
    assert [(r.step_id, r.kind) for r in activation.history] == [(":cancel", RecordKind.CANCEL)]
    again = await play(body, history=activation.history)
    assert isinstance(again.ending, CancelledEnding)
    assert again.ending.reason == "enough"
    assert ran == ["seen", "seen"]


async def test_the_next_holder_raises_the_cancel_at_the_first_call_without_a_record() -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(work, 1)
        await ctx.step(work, 2)

    played = await play(body)
    ran.clear()
    again = await play(body, history=played.records[:1], cancel_requested_at=STARTED + 5)
    assert isinstance(again.ending, CancelledEnding)
    assert ran == []
    assert again.ids == ["work", ":cancel"]


async def test_a_body_that_has_already_returned_when_the_ask_is_found_ends_cancelled() -> None:
    async def body(ctx: Context) -> str:
        await ctx.step(work, 1)
        return "done"

    played = await play(body)
    again = await play(body, history=played.records, cancel_requested_at=STARTED + 5)
    assert isinstance(again.ending, CancelledEnding)


async def test_a_refused_ask_is_not_delivered() -> None:
    async def body(ctx: Context) -> str:
        await ctx.refuse_cancel()
        await ctx.sleep(5)
        return "went on"

    played = await twice(body)
    assert (played.records[0].step_id, played.records[0].kind) == ("refuse_cancel", RecordKind.PIVOT)
    stage = Stage()
    activation, task = await _resting(stage, body)
    activation.ask_cancel("too late")
    stage.now += 10 * SECOND
    activation.tick()
    assert await task == Returned('"went on"')
    spent = await play(body, history=activation.history[:1], cancel_requested_at=STARTED, cancel_refused_at=STARTED + 1)
    assert spent.value == "went on"


async def test_steps_in_a_shield_still_run_after_a_cancel() -> None:
    async def body(ctx: Context) -> None:
        try:
            await ctx.sleep("1d")
        finally:
            async with ctx.shield():
                await ctx.step(work, "clean-up")

    stage = Stage()
    activation, task = await _resting(stage, body)
    activation.ask_cancel("")
    assert isinstance(await task, CancelledEnding)
    assert ran == ["clean-up"]


async def test_a_cancel_that_comes_into_a_shield_waits_for_its_end() -> None:
    async def body(ctx: Context) -> None:
        async with ctx.shield():
            await ctx.sleep("1h")
            ran.append("through")
        ran.append("never")

    stage = Stage()
    activation, task = await _resting(stage, body)
    activation.ask_cancel("")
    while activation.rest is None:
        await asyncio.sleep(0)
    stage.now += 3_600 * SECOND
    while not task.done():
        activation.tick()
        await asyncio.sleep(0)
    assert isinstance(task.result(), CancelledEnding)
    assert ran == ["through"]


async def test_a_shield_holds_against_a_group_that_fails() -> None:
    async def shielded(ctx: Context) -> None:
        async with ctx.shield():
            await ctx.step(work, "first")
            await ctx.step(work, "second")

    async def bad(ctx: Context) -> None:
        await ctx.step(failing, "x")

    async def body(ctx: Context) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(shielded(ctx))
            group.create_task(bad(ctx))

    await twice(body)
    assert ran.count("second") == 1


async def test_a_group_inside_a_shield_fails_as_it_does_elsewhere() -> None:
    async def branch(ctx: Context) -> None:
        await ctx.step(failing, "x")

    async def body(ctx: Context) -> list[str]:
        told = []
        async with ctx.shield():
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(branch(ctx))
            except ExceptionGroup as failed:
                told.append(str(len(failed.exceptions)))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(branch(ctx))
                    await ctx.sleep("1d")
            except ExceptionGroup:
                told.append("interrupted")
            await ctx.step(work, 1)
        await ctx.step(work, 2)
        return told

    assert (await twice(body)).value == ["1", "interrupted"]
    assert ran.count(2) == 1


async def test_a_time_limit_inside_a_shield_works_and_one_outside_waits() -> None:
    async def body(ctx: Context) -> list[str]:
        told = []
        try:
            async with asyncio.timeout(5):
                async with ctx.shield():
                    try:
                        async with asyncio.timeout(2):
                            await ctx.sleep(60)
                    except TimeoutError:
                        told.append("inner")
                    await ctx.sleep(60)
                    told.append("through")
                told.append("never")
        except TimeoutError:
            told.append("outer")
        await ctx.sleep(1)
        return told

    assert (await twice(body)).value == ["inner", "through", "outer"]


async def test_a_time_out_of_the_run_is_a_record_and_ends_it_timed_out_whatever_the_body_does() -> None:
    async def body(ctx: Context) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.sleep("1d")
        return "swallowed"

    stage = Stage()
    activation, task = await _resting(stage, body)
    activation.time_out("deadline")
    assert await task == TimedOutEnding("deadline", None)
    assert [(r.step_id, r.kind) for r in activation.history] == [(":timeout", RecordKind.TIMEOUT)]
    assert (await play(body, history=activation.history)).ending == TimedOutEnding("deadline", None)


async def test_the_first_of_a_cancel_and_a_due_timer_is_delivered_first() -> None:
    async def body(ctx: Context) -> str:
        await ctx.sleep(10)
        ran.append("slept")
        await ctx.sleep(10)
        return "done"

    stage = Stage()
    activation, task = await _resting(stage, body)
    stage.now += 15 * SECOND
    activation.ask_cancel("")
    assert isinstance(await task, CancelledEnding)
    assert ran == ["slept"]


# -- the end of a body (28, 28a, 9) ------------------------------------------------------------------------------------


async def test_a_body_that_is_put_aside_in_a_step_writes_nothing_and_its_step_has_ended() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("ended")

    async def body(ctx: Context) -> None:
        try:
            await ctx.step(slow)
        except asyncio.CancelledError:
            async with ctx.shield():
                await ctx.step(work, "never")

    stage = Stage()
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    for _ in range(10):
        await asyncio.sleep(0)
    await activation.set_aside()
    assert (ended, ran, stage.records) == (["ended"], [], [])
    assert isinstance(await task, PutAside)


async def test_clean_up_with_a_time_limit_survives_being_put_aside() -> None:
    async def body(ctx: Context) -> None:
        try:
            await ctx.sleep("1d")
        finally:
            try:
                async with asyncio.timeout(5):
                    await ctx.step(work, "never")
            finally:
                ran.append("the end")

    stage = Stage()
    activation, task = await _resting(stage, body)
    await activation.set_aside()
    assert isinstance(await task, PutAside)
    assert (ran, stage.records) == (["the end"], [])


async def test_a_record_that_is_on_its_way_when_a_body_is_put_aside_is_waited_for() -> None:
    go = asyncio.Event()

    async def hold(record: NewRecord) -> None:
        await go.wait()

    async def body(ctx: Context) -> None:
        await ctx.step(work, 1)

    stage = Stage()
    stage.on_append = hold
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    while not activation.journal._open:
        await asyncio.sleep(0)
    aside = asyncio.ensure_future(activation.set_aside())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not aside.done()
    go.set()
    await aside
    assert isinstance(await task, PutAside)
    assert [record.step_id for record in activation.history] == ["work"]


@pytest.mark.parametrize("error", [LeaseLost("gone"), StoreUnavailable("away")])
async def test_a_recorder_that_gives_up_ends_the_activation_and_nothing_more_is_written(error: Exception) -> None:
    async def refuse(record: NewRecord) -> None:
        raise error

    async def body(ctx: Context) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.step(work, 1)
        await ctx.step(work, 2)

    stage = Stage()
    stage.on_append = refuse
    played = await play(body, stage=stage)
    assert played.ending == Interrupted(error)
    assert (ran, stage.records) == ([1], [])


async def test_an_input_that_can_not_be_read_is_an_ending_of_its_own() -> None:
    async def body(ctx: Context, number: int) -> None: ...

    assert isinstance((await play(body, 1, input='[["one"],{}]')).ending, BadPayload)
    assert isinstance((await play(body, 1, input="{broken")).ending, BadPayload)


async def test_an_output_that_can_not_be_stored_is_an_ending_of_its_own() -> None:
    async def body(ctx: Context) -> Any:
        return object()

    assert isinstance((await play(body)).ending, BadPayload)


async def test_a_cancelled_activation_leaves_no_task_behind() -> None:
    async def body(ctx: Context) -> None:
        await ctx.sleep("1d")

    stage = Stage()
    _, task = await _resting(stage, body)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


# -- positions of failures (50) ----------------------------------------------------------------------------------------


async def test_positions_of_failed_records_are_followed_through_causes_contexts_and_groups() -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(work, 0)
        results = await asyncio.gather(ctx.step(failing, "a"), ctx.step(failing, "b"), return_exceptions=True)
        try:
            raise ExceptionGroup("both", [error for error in results if isinstance(error, Exception)])
        except ExceptionGroup as group:
            try:
                await ctx.step(failing, "c")
            except ValueError:
                raise RuntimeError("at last") from group

    ending = (await twice(body)).ending
    assert isinstance(ending, Raised)
    assert ending.positions == (1, 2, 3)


def test_an_error_without_records_carries_no_positions() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert failed_positions(error) == ()
    assert failed_positions(None) == ()


# -- long journals -----------------------------------------------------------------------------------------------------


async def test_a_long_replay_does_not_block_the_workers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(ctx: Context) -> int:
        return sum([await ctx.step(work, i) for i in range(300)])

    played = await play(body)
    monkeypatch.setattr("durable.activation.CHUNK_NS", -1)
    turns = 0
    task = asyncio.ensure_future(play(body, history=played.records))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert task.result().value == played.value
    assert turns > 300
    assert len(ran) == 300


# -- def bodies (28b) --------------------------------------------------------------------------------------------------


async def test_a_def_body_and_its_steps_run_in_one_thread_of_their_own() -> None:
    def where() -> int:
        return threading.get_ident()

    def body(ctx: SyncContext) -> list[int]:
        return [threading.get_ident(), ctx.step(where)]

    first, second = (await play(body)).value
    assert first == second != threading.get_ident()


async def test_a_def_body_replays_its_journal() -> None:
    def body(ctx: SyncContext, start: int) -> list[Any]:
        first = ctx.step(blocking_work, start)
        ctx.sleep("1h")
        return [first, ctx.step(blocking_work, first + 1), ctx.random(), str(ctx.uuid()), ctx.now().isoformat()]

    played = await twice(body, 1)
    assert played.ids == ["blocking_work", "sleep", "blocking_work#2"]
    assert ran == [1, 2]
    for crash in range(3):
        again = await play(body, 1, history=played.records[:crash])
        assert again.value[:4] == played.value[:4]


async def test_a_blocking_context_used_from_another_thread_raises() -> None:
    def body(ctx: SyncContext) -> list[str]:
        told: list[str] = []

        def other() -> None:
            try:
                ctx.step(blocking_work, 1)
            except Misuse as error:
                told.append(error.code)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return told

    assert (await twice(body)).value == ["misuse"]


async def test_changed_code_of_a_def_body_is_found() -> None:
    def before(ctx: SyncContext) -> int:
        return ctx.step(blocking_work, 1)

    def after(ctx: SyncContext) -> int:
        return ctx.step(blocking_work, 2)

    def less(ctx: SyncContext) -> int:
        return 0

    records = (await play(before)).records
    for body in (after, less):
        assert isinstance((await play(body, history=records)).ending, Mismatch)


async def test_a_cancel_takes_effect_at_the_next_call_of_a_def_body() -> None:
    started = threading.Event()
    go = threading.Event()

    def slow() -> int:
        started.set()
        go.wait(20)
        return 1

    def body(ctx: SyncContext) -> None:
        ctx.step(slow)
        ran.append("after the step")
        try:
            ctx.step(blocking_work, 2)
        finally:
            with ctx.shield():
                ctx.step(blocking_work, 3)

    stage = Stage()
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    while not started.is_set():
        await asyncio.sleep(0.001)
    activation.ask_cancel("stop")
    go.set()
    assert isinstance(await asyncio.wait_for(task, 20), CancelledEnding)
    assert ran == ["after the step", 3]
    assert [record.step_id for record in activation.history] == ["slow", ":cancel", "blocking_work#2"]
    ran.clear()
    assert isinstance((await play(body, history=activation.history)).ending, CancelledEnding)
    assert ran == ["after the step"]


async def test_a_def_body_that_is_put_aside_unwinds_and_writes_nothing() -> None:
    def body(ctx: SyncContext) -> None:
        try:
            ctx.sleep("1d")
        finally:
            ran.append("finally")
            ctx.step(blocking_work, 1)
            ran.append("never")

    stage = Stage()
    activation, task = await _resting(stage, body)
    assert activation.rest is not None
    assert activation.rest.blocking
    await activation.set_aside()
    assert isinstance(await task, PutAside)
    assert (ran, stage.records) == (["finally"], [])


async def test_an_async_step_in_a_def_body_is_misuse() -> None:
    def body(ctx: SyncContext) -> None:
        ctx.step(work, 1)

    ending = (await play(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, Misuse)


async def test_a_step_of_a_def_body_is_retried_and_its_errors_are_data() -> None:
    def bad(what: str) -> None:
        ran.append(what)
        raise ConnectionError(what)

    def body(ctx: SyncContext) -> str:
        try:
            ctx.step(step(retry=Retry(3, initial=0))(bad), "x")
        except ConnectionError as error:
            return str(error)
        return ""

    played = await twice(body)
    assert (played.value, ran) == ("x", ["x"] * 3)


async def test_a_time_limit_of_a_step_in_the_bodys_thread_takes_effect_when_it_returns() -> None:
    def slow() -> int:
        time.sleep(0.05)
        return 1

    def body(ctx: SyncContext) -> str:
        try:
            ctx.step(step(timeout=0.01)(slow))
        except StepTimeout as error:
            return error.code
        return ""

    assert (await twice(body)).value == "step_timeout"


async def test_signals_patches_and_the_pivot_block_in_a_def_body() -> None:
    def body(ctx: SyncContext) -> Any:
        taken = ctx.wait_signal(Wanted("x"))
        missing = ctx.wait_signal(Wanted("x"), timeout=5, default=-1)
        ctx.refuse_cancel()
        ctx.progress(1)
        return [taken, missing, ctx.patched("new"), ctx.attempt]

    stage = Stage()
    stage.send("x", "7", at=3)
    played = await play(body, stage=stage)
    assert played.value == [7, -1, True, 1]
    assert (await play(body, history=played.records)).value == played.value
