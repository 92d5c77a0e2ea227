"""Each row of the table of hazards in `docs/reference/replay.md`: what happens when a body does the difficult thing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import gc
import sys
import threading
import time
import weakref
from typing import Any

import pytest
from replay.programs import Wanted
from replay.stage import Stage, declared, play, twice

from durable.activation import Activation
from durable.blocking import SyncContext
from durable.codec import error as durable_error
from durable.context import Context
from durable.errors import Misuse, NonDeterminismError, SpinningError, StepFailed, StuckError
from durable.function import step as durable_step
from durable.model import Inbox, RecordKind
from durable.replay import CancelledEnding, Mismatch, MisuseEnding, PutAside, Raised, Returned, Spinning, Stuck
from durable.retry import Retry
from durable.settings import SECOND
from durable.signals import Signal

ran: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_ran_yet() -> None:
    ran.clear()


async def work(what: Any, turns: int = 1) -> Any:
    ran.append(what)
    for _ in range(turns):
        await asyncio.sleep(0)
    return what


# -- supported: plain asyncio ------------------------------------------------------------------------------------------------


async def test_as_completed_over_calls_of_the_context_is_supported() -> None:
    async def body(ctx: Context) -> list[int]:
        return [await future for future in asyncio.as_completed([ctx.step(work, i, 9 - 4 * i) for i in range(3)])]

    assert (await twice(body)).value == [2, 1, 0]


async def test_as_completed_over_tasks_is_supported() -> None:
    async def branch(ctx: Context, i: int) -> int:
        return await ctx.step(work, i, 9 - 4 * i)

    async def body(ctx: Context) -> list[int]:
        tasks = [asyncio.create_task(branch(ctx, i)) for i in range(3)]
        if sys.version_info >= (3, 13):
            return [await task async for task in asyncio.as_completed(tasks)]
        return [await future for future in asyncio.as_completed(tasks)]

    assert (await twice(body)).value == [2, 1, 0]


async def test_two_timeouts_that_are_due_together_end_the_outer_first() -> None:
    async def body(ctx: Context) -> list[str]:
        told: list[str] = []
        try:
            async with asyncio.timeout(10):
                try:
                    async with asyncio.timeout(10):
                        await ctx.sleep(100)
                except TimeoutError:
                    told.append("inner")
                await ctx.sleep(1)
        except TimeoutError:
            told.append("outer")
        return told

    assert (await twice(body)).value == ["outer"]


async def test_a_signal_that_was_stored_before_the_instant_wins_however_late_the_run_wakes() -> None:
    async def body(ctx: Context) -> int:
        return await ctx.wait_signal(Wanted("x"), timeout=20)

    stage = Stage()
    stage.send("x", "7", at=15)
    stage.now += 30 * SECOND
    assert (await play(body, stage=stage)).value == 7


async def test_a_signal_after_the_instant_is_too_late() -> None:
    async def body(ctx: Context) -> int:
        return await ctx.wait_signal(Wanted("x"), timeout=10, default=-1)

    stage = Stage()
    stage.send("x", "7", at=15)
    stage.now += 30 * SECOND
    assert (await play(body, stage=stage)).value == -1


async def test_a_cancelled_step_is_not_started_again() -> None:
    async def body(ctx: Context) -> Any:
        slow = ctx.step(work, "slow", 50)
        await ctx.step(work, 1)
        slow.cancel()  # type: ignore[attr-defined]
        await ctx.step(work, 2)
        return await ctx.step(work, 3)

    played = await twice(body)
    assert played.ids == ["work#2", "work#3", "work#4"]
    assert ran == ["slow", 1, 2, 3]


async def test_a_shielded_step_goes_on_after_wait_for() -> None:
    async def body(ctx: Context) -> Any:
        step = ctx.step(work, "kept", 30)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(step), 0)
        return await step

    assert (await twice(body)).value == "kept"


async def test_ids_of_a_wait_for_without_time_are_stable() -> None:
    async def branch(ctx: Context) -> Any:
        return await ctx.step(work, 1)

    async def body(ctx: Context) -> Any:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(branch(ctx), 0)
        return await asyncio.create_task(branch(ctx))

    played = await twice(body)
    assert [step_id for step_id in played.ids if "work" in step_id] == ["1/work"]


async def test_a_call_from_a_callback_has_an_id_of_its_own() -> None:
    async def body(ctx: Context) -> Any:
        first, made = ctx.step(work, 1), []
        first.add_done_callback(lambda _: made.append(ctx.step(work, 2)))  # type: ignore[attr-defined]
        await first
        await asyncio.sleep(0)
        return await made[0]

    played = await twice(body)
    assert played.ids == ["work", "~/work"]


async def test_an_explicit_context_of_a_task_can_not_lose_its_branch() -> None:
    async def branch(ctx: Context) -> Any:
        return await ctx.step(work, 1)

    async def body(ctx: Context) -> Any:
        return await asyncio.create_task(branch(ctx), context=contextvars.Context())

    assert (await twice(body)).ids == ["1/work"]


async def test_context_variables_flow_into_steps_and_never_back() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="-")

    async def show() -> str:
        seen = variable.get()
        variable.set("from the step")
        return seen

    async def branch(ctx: Context, value: str) -> str:
        variable.set(value)
        return await ctx.step(show)

    async def body(ctx: Context) -> Any:
        variable.set("root")
        return await asyncio.gather(*(branch(ctx, value) for value in "ab")), await ctx.step(show), variable.get()

    assert (await twice(body)).value == [["a", "b"], "root", "root"]


async def test_a_group_of_errors_keeps_its_order() -> None:
    async def branch(ctx: Context, i: int) -> None:
        await ctx.step(work, i, 5 - i)
        raise ValueError(i)

    async def body(ctx: Context) -> Any:
        try:
            async with asyncio.TaskGroup() as group:
                for i in range(4):
                    group.create_task(branch(ctx, i))
        except ExceptionGroup as group_error:
            return [str(error) for error in group_error.exceptions]

    assert (await twice(body)).value == ["3"]


async def test_a_generator_that_is_left_is_closed_at_once_and_may_clean_up_durably() -> None:
    async def body(ctx: Context) -> Any:
        async def produce() -> Any:
            try:
                for i in range(5):
                    yield await ctx.step(work, i)
            finally:
                await ctx.step(work, 99)

        async for value in produce():
            if value == 2:
                break
        await ctx.step(work, 50)
        return value

    await twice(body)
    assert ran == [0, 1, 2, 99, 50] or ran == [0, 1, 2, 50, 99]


async def test_the_garbage_collector_is_off_inside_the_body_and_on_outside() -> None:
    await collector()


async def collector() -> None:
    """A collection runs finalizers, at moments that no replay repeats: between two bytes of a body it must not happen."""

    async def enabled() -> bool:
        return gc.isenabled()

    async def body(ctx: Context) -> list[bool]:
        return [gc.isenabled(), await ctx.step(enabled), gc.isenabled()]

    assert (await twice(body)).value == [False, True, False]
    assert gc.isenabled()


async def test_a_generator_in_a_cycle_is_not_collected_inside_the_body() -> None:
    assert await collection() == ["work", "work#2", "work#3", "work#4"]


async def collection() -> list[str]:
    """Ids of a body that leaves a generator to the garbage collector, which is as eager as can be."""

    async def body(ctx: Context) -> Any:
        class Box:
            generator: Any

        async def produce() -> Any:
            try:
                yield 1
            finally:
                await ctx.step(work, "clean-up")

        box = Box()
        box.generator = produce()
        box.me = box  # type: ignore[attr-defined]
        await box.generator.__anext__()
        del box
        for i in range(4):
            _ = [[[]] for _ in range(50)]
            await ctx.step(work, i)

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        return (await play(body)).ids
    finally:
        gc.set_threshold(*before)


# -- errors of steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [asyncio.CancelledError, StopIteration, SystemExit, GeneratorExit])
@pytest.mark.parametrize("threaded", [False, True])
async def test_what_a_step_raises_unasked_is_a_failure_like_any_other(
    error: type[BaseException], threaded: bool
) -> None:
    async def bad() -> None:
        raise error("x")

    def bad_too() -> None:
        raise error("x")

    async def body(ctx: Context) -> str:
        try:
            await ctx.step(bad_too if threaded else bad)
        except (StepFailed, RuntimeError) as failure:
            return type(failure).__name__
        return "nothing"

    assert (await twice(body)).value in ("StepFailed", "RuntimeError")


async def test_a_system_exit_of_a_body_fails_the_run() -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(work, 1)
        sys.exit(3)

    ending = (await twice(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, SystemExit)


async def test_a_keyboard_interrupt_in_a_branch_reaches_the_worker_and_records_nothing() -> None:
    async def branch() -> None:
        raise KeyboardInterrupt

    async def body(ctx: Context) -> None:
        await ctx.step(work, 1)
        await asyncio.create_task(branch())

    stage = Stage()
    with pytest.raises(KeyboardInterrupt):
        await stage.begin(declared(body)).run()
    assert [record.step_id for record in stage.records] == ["work"]


async def test_an_exception_that_nobody_retrieves_is_reported_live_and_silent_in_replay() -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context.get("message")))

    async def branch() -> None:
        raise ValueError("nobody looks")

    async def body(ctx: Context) -> None:
        asyncio.create_task(branch())  # noqa: RUF006
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
        await ctx.step(work, 1)

    played = await play(body)
    assert len(reported) == 1
    await play(body, history=played.records)
    assert len(reported) == 1


# -- misuse --------------------------------------------------------------------------------------------------------------------


async def _misused(body: Any, match: str) -> None:
    ending = (await twice(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, Misuse)
    assert match in str(ending.error)


async def test_as_completed_over_coroutines_is_misuse() -> None:
    async def branch(ctx: Context, i: int) -> int:
        return await ctx.step(work, i)

    async def body(ctx: Context) -> list[int]:
        coroutines = [branch(ctx, i) for i in range(3)]
        try:
            return [await future for future in asyncio.as_completed(coroutines)]
        finally:
            for coroutine in coroutines:
                coroutine.close()

    await _misused(body, "pass tasks")


async def test_io_in_a_body_is_misuse_where_it_is_called() -> None:
    async def body(ctx: Context) -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    await _misused(body, "do it in a step")


async def test_a_thread_in_a_body_is_misuse() -> None:
    async def body(ctx: Context) -> None:
        await asyncio.to_thread(time.time)

    await _misused(body, "run_in_executor")


async def test_a_subprocess_in_a_body_is_misuse() -> None:
    async def body(ctx: Context) -> None:
        await asyncio.create_subprocess_exec("true")

    await _misused(body, "subprocess_exec")


async def test_a_task_factory_in_a_body_is_misuse() -> None:
    async def body(ctx: Context) -> None:
        asyncio.get_running_loop().set_task_factory(None)

    await _misused(body, "task factory")


async def test_a_call_of_the_context_inside_a_step_is_misuse() -> None:
    async def body(ctx: Context) -> Any:
        async def bad() -> Any:
            return await ctx.step(work, 1)

        return await ctx.step(bad)

    await _misused(body, "outside the body")


async def test_a_call_of_the_context_in_a_thread_is_misuse() -> None:
    async def body(ctx: Context) -> Any:
        told: list[str] = []

        def other() -> None:
            try:
                ctx.step(work, 1)
            except Misuse as error:
                told.append(error.code)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return told

    assert (await twice(body)).value == ["misuse"]


async def test_a_thread_that_wakes_a_body_ends_the_activation() -> None:
    async def body(ctx: Context) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def other() -> None:
            with contextlib.suppress(Misuse):
                loop.call_soon_threadsafe(future.set_result, 1)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return await future

    ending = (await play(body)).ending
    assert isinstance(ending, MisuseEnding)
    assert "thread or another event loop" in str(ending.error)


async def test_awaiting_a_future_of_the_workers_loop_fails_the_run() -> None:
    outside = asyncio.get_running_loop().create_future()

    async def body(ctx: Context) -> Any:
        return await outside

    ending = (await play(body)).ending
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, RuntimeError)


async def test_a_contended_lock_of_the_workers_loop_fails_the_run() -> None:
    lock = asyncio.Lock()
    await lock.acquire()
    waiting = asyncio.ensure_future(lock.acquire())
    await asyncio.sleep(0)

    async def body(ctx: Context) -> Any:
        async with lock:
            return 1

    ending = (await play(body)).ending
    waiting.cancel()
    assert isinstance(ending, Raised)
    assert isinstance(ending.error, RuntimeError)


# -- never coming to an end --------------------------------------------------------------------------------------------------


async def test_a_body_that_spins_ends_as_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("durable.bodyloop.MOST_CALLBACKS", 2_000)

    async def body(ctx: Context) -> Any:
        step = ctx.step(work, 1)
        while not step.done():  # type: ignore[attr-defined]
            await asyncio.sleep(0)

    ending = (await play(body)).ending
    assert isinstance(ending, Spinning)
    assert isinstance(ending.error, SpinningError)


async def test_a_body_that_waits_for_what_nobody_delivers_is_stuck_and_told_where() -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(work, 1)
        await asyncio.Event().wait()

    ending = (await twice(body)).ending
    assert isinstance(ending, Stuck)
    assert isinstance(ending.error, StuckError)
    assert "test_hazards.py" in str(ending.error)


async def test_a_body_that_swallows_cancellation_for_ever_is_dropped() -> None:
    async def body(ctx: Context) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await ctx.sleep("300d")

    stage = Stage()
    stage.frozen = True
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    while activation.rest is None:
        await asyncio.sleep(0)
    await activation.set_aside()
    assert isinstance(await task, PutAside)


async def test_clean_up_of_a_body_that_is_put_aside_records_nothing() -> None:
    told: list[str] = []

    async def body(ctx: Context) -> None:
        try:
            await ctx.sleep(100)
        finally:
            told.append("finally")
            await ctx.step(work, 7)
            told.append("never reached")

    stage = Stage()
    stage.frozen = True
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    while activation.rest is None:
        await asyncio.sleep(0)
    await activation.set_aside()
    assert isinstance(await task, PutAside)
    assert (told, ran, stage.records) == (["finally"], [], [])


async def test_a_generator_that_is_open_at_suspension_is_closed_with_the_context_closed() -> None:
    told: list[str] = []
    kept: list[Any] = []

    async def body(ctx: Context) -> None:
        async def produce() -> Any:
            try:
                yield 1
            finally:
                told.append("closed")
                await ctx.step(work, 8)
                told.append("never reached")

        kept.append(produce())
        await kept[0].__anext__()
        await ctx.sleep(100)

    stage = Stage()
    stage.frozen = True
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    while activation.rest is None:
        await asyncio.sleep(0)
    await activation.set_aside()
    await task
    assert (told, ran) == (["closed"], [])


async def test_a_branch_that_a_body_leaves_is_ended_before_the_run_is_released() -> None:
    async def body(ctx: Context) -> str:
        asyncio.create_task(ctx.step(work, "left", 500))  # type: ignore[arg-type]  # noqa: RUF006
        await ctx.step(work, 1)
        return "returned"

    played = await twice(body)
    assert isinstance(played.ending, Returned)
    assert played.ids == ["work#2"] or played.ids == ["work"]
    assert not asyncio.all_tasks() - {asyncio.current_task()}


async def test_an_ask_to_cancel_that_is_swallowed_starts_no_new_step_outside_a_shield() -> None:
    async def body(ctx: Context) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.sleep("1d")
        async with ctx.shield():
            await ctx.step(work, "in the shield")
        with contextlib.suppress(asyncio.CancelledError):
            await ctx.step(work, "outside")
        return "swallowed"

    stage = Stage()
    stage.frozen = True
    activation = stage.begin(declared(body))
    task = asyncio.ensure_future(activation.run())
    while activation.rest is None:
        await asyncio.sleep(0)
    activation.ask_cancel("enough")
    assert await task == CancelledEnding("enough", None)
    assert ran == ["in the shield"]
    assert [(record.step_id, record.kind) for record in activation.history] == [
        (":cancel", RecordKind.CANCEL),
        ("work", RecordKind.STEP),
    ]
    again = await play(body, history=activation.history)
    assert again.ending == CancelledEnding("enough", None)
    assert ran == ["in the shield"]


# -- changed code --------------------------------------------------------------------------------------------------------------


async def test_code_that_changed_under_a_journal_is_found_in_all_three_forms() -> None:
    await code_changed()


async def code_changed() -> None:
    async def before(ctx: Context) -> None:
        await ctx.step(work, 1)
        await ctx.step(work, 2)

    async def another_kind(ctx: Context) -> None:
        await ctx.step(work, 1)
        await ctx.sleep(3)

    async def another_argument(ctx: Context) -> None:
        await ctx.step(work, 1)
        await ctx.step(work, 22)

    async def less(ctx: Context) -> int:
        return 1

    records = (await play(before)).records
    for body, words in [
        (another_kind, ["position 1: step 'work#2'", "timer 'sleep'"]),
        (another_argument, ["position 1: step 'work#2'", "with other arguments", "test_hazards.py"]),
        (less, ["position 0: step 'work'", "nothing: it has ended"]),
    ]:
        played = await play(body, history=records)
        assert isinstance(played.ending, Mismatch), body.__name__
        assert isinstance(played.ending.error, NonDeterminismError)
        for word in words:
            assert word in str(played.ending.error)
        assert played.records == records, "the journal was touched"


async def test_what_is_returned_live_is_the_decoded_form_of_what_was_stored() -> None:
    await decoded_form()


async def decoded_form() -> None:
    def pair() -> list[int]:
        return (1, 2)  # type: ignore[return-value]

    async def body(ctx: Context) -> str:
        return type(await ctx.step(pair)).__name__

    assert (await twice(body)).value == "list"


async def test_a_record_knows_what_had_been_delivered_when_its_call_was_made() -> None:
    await seen()


async def seen() -> None:
    async def body(ctx: Context) -> None:
        early = ctx.step(work, "early", 40)
        await ctx.step(work, 1)
        await ctx.step(work, 2)
        await early

    played = await twice(body)
    assert [(record.step_id, record.seen) for record in played.records] == [("work#2", -1), ("work#3", 0), ("work", -1)]


@durable_error
@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


@durable_error
class Closed(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError("no attributes, please")


@pytest.mark.parametrize("error", [Frozen(3), Closed("x")])
async def test_an_error_whose_class_refuses_attributes_survives_the_journal_with_its_position(error: Exception) -> None:
    async def fails() -> None:
        raise error

    async def body(ctx: Context) -> None:
        await ctx.step(work, 1)
        await ctx.step(fails)

    played = await twice(body)
    assert isinstance(played.ending, Raised)
    assert (type(played.ending.error), played.ending.error.args) == (type(error), error.args)
    assert played.ending.positions == (1,)


async def test_an_error_inside_the_pump_is_raised_and_the_run_is_not_held_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(ctx: Context) -> None:
        await ctx.step(work, 1)

    def sync_body(ctx: SyncContext) -> None:
        ctx.sleep(1)

    def broken(*_: object) -> None:
        raise AttributeError("a defect of ours")

    for made, place in ((body, "_proceed"), (sync_body, "_proceed"), (sync_body, "registered"), (body, "_look_up")):
        with monkeypatch.context() as patched:
            stage = Stage()
            stage.frozen = place == "_look_up"
            activation = stage.begin(declared(sleeping if place == "_look_up" else made))
            patched.setattr(Activation, place, broken)
            running = asyncio.ensure_future(activation.run())
            if place == "_look_up":
                while activation.rest is None:
                    await asyncio.sleep(0.001)
                activation.news()
            with pytest.raises(AttributeError, match="a defect of ours"):
                await asyncio.wait_for(running, 30)


async def sleeping(ctx: Context) -> None:
    await ctx.sleep(100)


async def test_a_run_that_is_put_aside_while_it_waits_for_its_slot_begins_no_step() -> None:
    async def fails() -> None:
        ran.append("try")
        raise ValueError("again")

    step = durable_step(fails).using(retry=Retry(3, initial=60, jitter=0.0))

    async def body(ctx: Context) -> None:
        await ctx.step(step)

    class Full(Stage):
        async def take_slot(self) -> None:
            asked.set()
            await asyncio.Event().wait()

    asked = asyncio.Event()
    stage = Full()
    activation = stage.begin(declared(body))
    running = asyncio.ensure_future(activation.run())
    await asyncio.wait_for(asked.wait(), 30)
    await asyncio.wait_for(activation.set_aside(), 30)
    assert isinstance(await running, PutAside)
    assert ran == ["try"]
    assert not activation.execution.running


async def test_what_a_body_makes_for_its_steps_goes_when_its_run_goes() -> None:
    class Gateway:
        async def charge(self) -> int:
            return 1

    kept: list[weakref.ref[Gateway]] = []

    async def body(ctx: Context) -> int:
        gateway = Gateway()
        kept.append(weakref.ref(gateway))

        async def closure() -> int:
            return await gateway.charge()

        steps = (closure, functools.partial(closure), lambda given=gateway: 1, gateway.charge)
        return sum([await ctx.step(step) for step in steps for _ in range(2)])

    assert (await twice(body)).value == 8
    gc.collect()
    assert [one() for one in kept] == [None, None]


async def test_a_def_body_that_swallows_its_cancel_for_ever_ends_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("durable.threadbody.MOST_REFUSALS", 20)
    monkeypatch.setattr("durable.threadbody.LONGEST_DEATH", 0.05)

    def body(ctx: SyncContext) -> None:
        while True:
            ran.append("round")
            with contextlib.suppress(BaseException):
                ctx.sleep(1)

    stage = Stage()
    activation = stage.begin(declared(body))
    running = asyncio.ensure_future(activation.run())
    while not ran:
        await asyncio.sleep(0.001)
    activation.ask_cancel("enough")
    assert isinstance(await asyncio.wait_for(running, 30), CancelledEnding)


@pytest.mark.parametrize("seconds", [0, 3600])
async def test_an_ask_whose_stamp_is_ahead_of_our_clock_is_delivered_after_one_look(seconds: int) -> None:
    reads: list[int] = []

    async def body(ctx: Context) -> None:
        await ctx.wait_signal(Signal("word", str))

    class Counting(Stage):
        async def inbox(self) -> Inbox:
            reads.append(1)
            return await super().inbox()

    stage = Counting()
    activation = stage.begin(declared(body), cancel_requested_at=stage.now + seconds * SECOND)
    assert isinstance(await asyncio.wait_for(activation.run(), 30), CancelledEnding)
    assert len(reads) <= 2
