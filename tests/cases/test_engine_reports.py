"""Sections B to E of the public fault reports, the rows that need the engine, the client or the codec; each test is named by its row.

The workers here run in the process of the test. Real kills are in tests/crash; what belongs to a later part or does not apply
stands in README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import enum
import gc
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic
import pytest

import durable
from durable import Registry
from durable.codec import Codec, error_data
from durable.model import ErrorKind
from durable.settings import SECOND

declared = Registry("test_engine_reports")
log: list[str] = []
gate: asyncio.Event
PATIENCE = 60.0


@pytest.fixture(autouse=True)
async def _fresh() -> None:
    global gate
    gate = asyncio.Event()
    log.clear()


@pytest.fixture
async def client() -> AsyncIterator[durable.Client]:
    quick = {"poll": "20ms", "poll_idle": "20ms", "park_after": "50ms"}
    async with durable.Client("sqlite:///:memory:", settings=quick) as opened:
        yield opened


def worker(client: durable.Client, **options: Any) -> durable.Worker:
    return durable.Worker(client, functions=declared, **{"grace": "1s", **options})


async def until(condition: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return
            await asyncio.sleep(0.005)
    pytest.fail(f"waited in vain for {what}")


def is_in(run: durable.Run[Any], *statuses: str) -> Callable[[], Awaitable[bool]]:
    async def found() -> bool:
        return (await run.refresh()).status in statuses

    return found


async def note(text: str) -> str:
    log.append(text)
    return text


async def wait_at_the_gate() -> str:
    log.append("at the gate")
    await gate.wait()
    return "through"


# -- B: recovery --------------------------------------------------------------------------------------------------------------

tries = 0


@durable.step(retry=durable.Retry(5, initial="1ms"))
async def fails_three_times() -> int:
    global tries
    tries += 1
    if tries == 3:
        gate.set()
    if tries <= 3:
        raise ConnectionError(f"try {tries}")
    return tries


@durable.function(registry=declared)
async def stubborn(ctx: durable.Context) -> int:
    return await ctx.step(fails_three_times)


async def test_row_19_a_step_with_retries_goes_on_counting_in_the_next_worker(client: durable.Client) -> None:
    global tries
    tries = 0
    run = await client.start(stubborn)
    async with worker(client, grace="0s"):
        await asyncio.wait_for(gate.wait(), PATIENCE)
    async with worker(client):
        assert await run.result(timeout=PATIENCE) == tries
    assert tries in (4, 5)
    records = await client.journal(run.id)
    assert [record.step_id for record in records if record.position is not None] == ["fails_three_times"]


@durable.function(registry=declared)
async def occupied(ctx: durable.Context, number: int) -> int:
    await ctx.step(note, f"began {number}")
    await ctx.step(wait_at_the_gate)
    return number


async def test_row_26_a_worker_claims_no_more_than_it_can_run(client: durable.Client) -> None:
    runs = [await client.start(occupied, number) for number in range(10)]
    async with worker(client, concurrency=2):
        await until(lambda: log.count("at the gate") == 2, "two bodies")
        for _ in range(10):
            assert await client.count(status="running") <= 3
            await asyncio.sleep(0.01)
        gate.set()
        assert [await run.result(timeout=PATIENCE) for run in runs] == list(range(10))
    assert sorted(text for text in log if text.startswith("began")) == [f"began {number}" for number in range(10)]


@durable.function(registry=declared)
async def sleeps_twice(ctx: durable.Context) -> list[datetime]:
    before = ctx.now()
    await ctx.sleep(1.5)
    between = ctx.now()
    await ctx.sleep(1.5)
    return [before, between, ctx.now()]


async def test_row_32_a_sleep_is_not_slept_again_after_a_restart(client: durable.Client) -> None:
    run = await client.start(sleeps_twice)
    async with worker(client):
        await until(is_in(run, "suspended"), "the suspension")
    await asyncio.sleep(1.6)
    async with worker(client):
        before, between, after = await run.result(timeout=PATIENCE)
    assert between - before >= timedelta(seconds=1.5)
    assert after - between >= timedelta(seconds=1.5)
    timers = [record for record in await client.journal(run.id) if record.kind == "timer"]
    assert len(timers) == 2


@durable.step(timeout="50ms", retry=durable.Retry(3, initial="1ms"))
async def hangs_once() -> str:
    log.append("try")
    if len(log) == 2:
        await asyncio.Event().wait()
    if len(log) < 2:
        raise ConnectionError("first")
    return "third time"


@durable.function(registry=declared)
async def hanging(ctx: durable.Context) -> str:
    return await ctx.step(hangs_once)


async def test_row_33_a_try_that_hangs_is_cut_and_tried_again(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(hanging) == "third time"
    assert log == ["try", "try", "try"]


# -- C: cancellation, deadlines, asyncio ---------------------------------------------------------------------------------------


async def brief() -> None:
    await asyncio.sleep(0.005)


@durable.function(registry=declared)
async def short_then_long(ctx: durable.Context) -> None:
    await ctx.step(brief)
    await ctx.sleep(3600)


async def test_row_39_a_cancel_that_meets_the_end_of_an_await_is_not_swallowed(client: durable.Client) -> None:
    async with worker(client):

        async def cancelled_after(offset: float) -> None:
            run = await client.start(short_then_long)
            await asyncio.sleep(offset)
            assert await run.cancel()
            with pytest.raises(durable.RunCancelled):
                await run.result(timeout=PATIENCE)

        await asyncio.gather(*(cancelled_after(number * 0.0005) for number in range(40)))
    assert await client.count(status="cancelled") == 40


@durable.function(registry=declared)
async def drops_a_sleep(ctx: durable.Context) -> str:
    sleeping = asyncio.create_task(_sleep(ctx))
    await ctx.step(note, "one")
    sleeping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sleeping
    await ctx.sleep(0.2)
    return await ctx.step(note, "two")


async def _sleep(ctx: durable.Context) -> None:
    await ctx.sleep(3600)


async def test_row_40_a_sleep_that_was_cancelled_leaves_nothing_behind(client: durable.Client) -> None:
    async with worker(client):
        assert await client.run(drops_a_sleep) == "two"
    assert log == ["one", "two"]


async def _swallow_gather(ctx: durable.Context) -> None:
    await asyncio.gather(ctx.sleep(3600), ctx.step(wait_at_the_gate), return_exceptions=True)


async def _swallow_except(ctx: durable.Context) -> None:
    try:
        await ctx.step(wait_at_the_gate)
    except BaseException:
        pass


async def _swallow_suppress(ctx: durable.Context) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await ctx.step(wait_at_the_gate)


SWALLOWERS = {"gather": _swallow_gather, "except": _swallow_except, "suppress": _swallow_suppress}


@durable.function(registry=declared)
async def swallower(ctx: durable.Context, how: str) -> str:
    await SWALLOWERS[how](ctx)
    return await ctx.step(note, "after")


@pytest.mark.parametrize("how", SWALLOWERS)
async def test_row_41_a_body_that_swallows_its_cancel_starts_no_new_step_and_lands_cancelled(
    client: durable.Client, how: str
) -> None:
    """Whatever the body makes of its CancelledError (44)."""
    async with worker(client):
        run = await client.start(swallower, how)
        await until(lambda: "at the gate" in log, "the step")
        assert await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result(timeout=PATIENCE)
    assert "after" not in log


@durable.function(registry=declared)
async def cleans_up_in_finally(ctx: durable.Context) -> None:
    try:
        await ctx.sleep(3600)
    finally:
        await ctx.step(note, "cleanup")


async def test_row_42_a_body_that_leaves_memory_runs_no_clean_up_in_any_run(client: durable.Client) -> None:
    """A body that is put aside writes nothing, whatever its finally tries (28a)."""
    runs = [await client.start(cleans_up_in_finally) for _ in range(50)]
    async with worker(client):
        await until(lambda: _all_suspended(client, 50), "50 suspensions")
        for _ in range(5):
            gc.collect()
            await asyncio.sleep(0)
    gc.collect()
    assert log == []
    for run in runs:
        assert list(await client.journal(run.id)) == []
        assert (await run.refresh()).status == "suspended"


async def _all_suspended(client: durable.Client, number: int) -> bool:
    return await client.count(status="suspended") == number


@durable.step(retry=durable.Retry(5, initial="1ms"))
async def fails_when_stopped() -> None:
    log.append("try")
    try:
        await gate.wait()
    except asyncio.CancelledError:
        raise ConnectionError("the cancel cut the line") from None


@durable.function(registry=declared, retry=durable.Retry(5, initial="1ms"))
async def fails_when_cancelled(ctx: durable.Context) -> None:
    await ctx.step(fails_when_stopped)


async def test_row_43_a_cancel_and_a_failing_step_that_wants_a_retry_end_cancelled(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(fails_when_cancelled)
        await until(lambda: log == ["try"], "the first try")
        assert await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result(timeout=PATIENCE)
        assert log == ["try"]
        assert await client.run(stubborn_note) == "alive"


@durable.function(registry=declared)
async def stubborn_note(ctx: durable.Context) -> str:
    return await ctx.step(note, "alive")


@durable.function(registry=declared, retry=durable.Retry(5, initial="1h", maximum="1h"))
async def backs_off(ctx: durable.Context) -> None:
    await ctx.step(note, "tried")
    raise ConnectionError("later")


WORD = durable.Signal("word", str)


@durable.function(registry=declared)
async def listens(ctx: durable.Context) -> str:
    return await ctx.wait_signal(WORD)


@durable.function(registry=declared)
async def sleeps_long(ctx: durable.Context) -> None:
    await ctx.sleep(3600)


@pytest.mark.parametrize("waiting", [backs_off, listens, sleeps_long], ids=["back_off", "signal", "sleep"])
async def test_row_44_a_cancel_reaches_a_run_that_waits(client: durable.Client, waiting: Any) -> None:
    async with worker(client) as working:
        run = await client.start(waiting)
        await until(is_in(run, "suspended" if waiting is not backs_off else "pending"), "the wait")
        await until(lambda: working.held == 0, "an idle worker")
        if waiting is backs_off:
            await until(lambda: "tried" in log, "the first execution")
        assert await run.cancel()
        with pytest.raises(durable.RunCancelled):
            await run.result(timeout=PATIENCE)


async def raises_timeout() -> None:
    raise TimeoutError("the service took too long")


@durable.step(timeout="20ms")
async def takes_too_long() -> None:
    await asyncio.Event().wait()


@durable.function(registry=declared)
async def times_out_itself(ctx: durable.Context) -> None:
    await ctx.step(raises_timeout)


@durable.function(registry=declared)
async def times_out_a_step(ctx: durable.Context) -> None:
    await ctx.step(takes_too_long)


async def test_row_47_five_ends_of_time_are_told_apart(client: durable.Client) -> None:
    """By what ended it, in the order of rule 47."""
    async with worker(client, grace="0s"):
        with pytest.raises(durable.RunFailed) as own:
            await client.run(times_out_itself)
        assert isinstance(own.value.__cause__, TimeoutError)
        assert not isinstance(own.value.__cause__, durable.StepTimeout)
        with pytest.raises(durable.RunFailed) as step:
            await client.run(times_out_a_step)
        assert isinstance(step.value.__cause__, durable.StepTimeout)
        with pytest.raises(durable.RunTimeout) as late:
            await client.run(sleeps_long.using(deadline="100ms"))
        assert late.value.error_kind == ErrorKind.DEADLINE
        cancelled = await client.start(sleeps_long)
        await cancelled.cancel()
        with pytest.raises(durable.RunCancelled):
            await cancelled.result(timeout=PATIENCE)
        stopped = await client.start(occupied, 1)
        await until(lambda: "at the gate" in log, "the step")
    assert (await stopped.refresh()).status == "pending"
    gate.set()
    async with worker(client):
        assert await stopped.result(timeout=PATIENCE) == 1


async def test_row_48_the_deadline_of_a_run_does_not_move_when_its_worker_is_replaced() -> None:
    """The second worker has a second of the hour left."""
    ahead = 0

    def clock() -> int:
        return time.time_ns() // 1_000 + ahead

    async with durable.Client(
        "sqlite:///:memory:", settings={"poll": "20ms", "poll_idle": "20ms"}, clock=clock
    ) as client:
        run = await client.start(occupied.using(deadline="1h"), 1)
        async with worker(client, grace="0s"):
            await until(lambda: "at the gate" in log, "the step")
            deadline = run.record.deadline_at
        assert deadline is not None
        ahead = deadline - SECOND - clock()
        async with worker(client):
            with pytest.raises(durable.RunTimeout):
                await run.result(timeout=PATIENCE)
        assert (await run.refresh()).record.deadline_at == deadline


# -- D: payloads --------------------------------------------------------------------------------------------------------------


class Loop(Exception):
    pass


def _looped() -> BaseException:
    error = Loop("round and round")
    error.__cause__ = Loop("and round")
    error.__cause__.__cause__ = error
    return error


ODD_ERRORS: list[BaseException] = [
    ValueError("x", object()),
    ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    _looped(),
    KeyError(b"\xff"),
    RuntimeError("m" * 5_000_000),
    ValueError("a\x00b \ud800"),
]


@pytest.mark.parametrize("error", ODD_ERRORS, ids=["object", "group", "loop", "bytes", "huge", "bad_text"])
def test_row_50_an_error_that_is_hard_to_store_is_stored_as_itself(error: BaseException) -> None:
    data = error_data(error)
    assert data.type_name.rpartition(".")[2] == type(error).__name__
    assert len(data.to_json()) < 1 << 20
    data.to_json().encode()


def _endless() -> list[Any]:
    nest: list[Any] = []
    nest.append(nest)
    return nest


def _deep() -> list[Any]:
    nest: list[Any] = []
    for _ in range(5_000):
        nest = [nest]
    return nest


UNSTORABLE: list[Callable[[], Any]] = [
    threading.Lock,
    lambda: (number for number in range(3)),
    lambda: lambda: None,
    lambda: Loop,
    _endless,
    _deep,
    object,
]


async def unstorable(kind: int) -> Any:
    log.append("called")
    return UNSTORABLE[kind]()


@durable.function(registry=declared)
async def returns_what_can_not_be_stored(ctx: durable.Context, kind: int) -> None:
    await ctx.step(unstorable, kind)


@pytest.mark.parametrize("kind", range(len(UNSTORABLE)))
async def test_row_51_what_can_not_be_stored_is_a_typed_error_and_no_endless_retry(
    client: durable.Client, kind: int
) -> None:
    """Refused with a typed error before a record exists (22)."""
    async with worker(client):
        with pytest.raises(durable.RunFailed) as caught:
            await client.run(returns_what_can_not_be_stored, kind)
        assert isinstance(caught.value.__cause__, durable.SerializationError)
        assert log == ["called"]
        assert await client.run(stubborn_note) == "alive"


@pytest.mark.parametrize("bad", ["a\x00b", {"k\x00": 1}, "\ud800", b"\xff".decode(errors="surrogateescape")])
def test_rows_52_and_54_nul_and_lone_surrogates_are_refused_with_the_path(bad: Any) -> None:
    with pytest.raises(durable.SerializationError):
        Codec(1 << 20).encode({"inner": [bad]})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_row_53_nan_and_infinity_are_refused_the_same_everywhere(bad: float) -> None:
    codec = Codec(1 << 20)
    with pytest.raises(durable.SerializationError):
        codec.encode([bad])

    class Model(pydantic.BaseModel):
        x: float

    with pytest.raises(durable.SerializationError):
        codec.encode(Model(x=bad), Model)


@pytest.mark.parametrize("good", [-0.0, 5e-324, 1.7976931348623157e308])
def test_row_53_finite_floats_keep_sign_and_value(good: float) -> None:
    codec = Codec(1 << 20)
    back = codec.decode(codec.encode(good))
    assert (back, math.copysign(1, back)) == (good, math.copysign(1, good))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400, 2**53 + 1, True, 0])
def test_row_55_integers_of_any_size_are_exact_and_bool_stays_bool(number: int) -> None:
    codec = Codec(1 << 20)
    back = codec.decode(codec.encode(number))
    assert (back, type(back)) == (number, type(number))


async def test_row_55_a_priority_out_of_range_is_refused() -> None:
    with pytest.raises((durable.RegistrationError, durable.ConfigurationError)):
        stubborn_note.using(priority=2**63)


async def returns_megabytes() -> str:
    return "x" * 17_000_000


@durable.function(registry=declared)
async def oversized(ctx: durable.Context) -> str:
    return await ctx.step(returns_megabytes)


async def test_row_56_what_is_too_large_says_so_at_once_and_the_worker_lives(client: durable.Client) -> None:
    async with worker(client):
        with pytest.raises(durable.RunFailed) as caught:
            await client.run(oversized)
        assert isinstance(caught.value.__cause__, durable.PayloadTooLarge)
        with pytest.raises(durable.PayloadTooLarge):
            await client.start(takes_text, "x" * 17_000_000)
        assert await client.run(stubborn_note) == "alive"


@durable.function(registry=declared)
async def takes_text(ctx: durable.Context, text: str) -> None: ...


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (datetime(2026, 10, 25, 2, 30, 0, 123456, tzinfo=UTC), datetime),
        (datetime(2026, 10, 25, 2, 30, 0, 123456), datetime),  # noqa: DTZ001 -- naive stays naive
        (date(2026, 1, 1), date),
        (time_of_day(23, 59, 59, 999999), time_of_day),
        (timedelta(days=3, microseconds=1), timedelta),
        (datetime(1, 1, 1, tzinfo=UTC), datetime),
        (datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), datetime),
    ],
)
def test_row_57_dates_and_times_keep_microseconds_and_whether_they_know_a_zone(value: Any, annotation: Any) -> None:
    codec = Codec(1 << 20)
    back = codec.decode(codec.encode(value, annotation), annotation)
    assert (back, type(back)) == (value, type(value))
    if isinstance(value, datetime):
        assert (back.tzinfo is None) == (value.tzinfo is None)


def test_row_57_the_second_of_two_equal_hours_stays_the_second() -> None:
    codec = Codec(1 << 20)
    value = datetime(2026, 10, 25, 2, 30, 0, 123456, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    back = codec.decode(codec.encode(value, datetime), datetime)
    assert back.astimezone(UTC) == value.astimezone(UTC)
    assert back.utcoffset() == value.utcoffset()


class Dated(pydantic.BaseModel):
    x: date | datetime | str


@pytest.mark.parametrize("value", ["2026-01-01", date(2026, 1, 1), datetime(2026, 1, 1, 5, tzinfo=UTC)])
def test_row_58_a_union_does_not_change_its_type_silently(value: Any) -> None:
    codec = Codec(1 << 20)
    try:
        text = codec.encode(Dated(x=value), Dated)
    except durable.SerializationError:
        return
    back = codec.decode(text, Dated)
    assert (back.x, type(back.x)) == (value, type(value))


shared: dict[str, int] = {}


async def gives_the_shared_dict() -> dict[str, int]:
    shared.update({"k": 1})
    return shared


@durable.function(registry=declared)
async def mutates(ctx: durable.Context) -> dict[str, int]:
    mine = await ctx.step(gives_the_shared_dict)
    assert mine == {"k": 1}
    shared["k"] = 2
    mine["j"] = 3
    await ctx.sleep(0.2)
    return mine


async def test_row_59_a_recorded_value_does_not_change_when_the_object_does(client: durable.Client) -> None:
    async with worker(client):
        run = await client.start(mutates)
        assert await run.result(timeout=PATIENCE) == {"k": 1, "j": 3}
    (record, *_) = await client.journal(run.id)
    assert '"k":1' in record.result.replace(" ", "")
    assert "j" not in record.result


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Item:
    name: str
    price: Decimal


async def nothing() -> None:
    log.append("nothing")


async def false() -> bool:
    log.append("false")
    return False


async def zero() -> int:
    log.append("zero")
    return 0


async def empty_text() -> str:
    log.append("empty_text")
    return ""


async def empty_list() -> list[int]:
    log.append("empty_list")
    return []


async def empty_tuple() -> tuple[()]:
    log.append("empty_tuple")
    return ()


async def int_keys() -> dict[int, str]:
    log.append("int_keys")
    return {1: "a"}


async def a_set() -> set[int]:
    log.append("a_set")
    return {1, 2}


async def a_decimal() -> Decimal:
    log.append("a_decimal")
    return Decimal("1.10")


async def an_enum() -> Colour:
    log.append("an_enum")
    return Colour.RED


async def a_uuid() -> UUID:
    log.append("a_uuid")
    return UUID(int=7)


async def a_namedtuple() -> Point:
    log.append("a_namedtuple")
    return Point(1, 2)


async def some_bytes() -> bytes:
    log.append("some_bytes")
    return b"\x00\xff"


async def a_dataclass() -> Item:
    log.append("a_dataclass")
    return Item("x", Decimal("2.50"))


RESULTS: list[Callable[[], Awaitable[Any]]] = [
    nothing,
    false,
    zero,
    empty_text,
    empty_list,
    empty_tuple,
    int_keys,
    a_set,
    a_decimal,
    an_enum,
    a_uuid,
    a_namedtuple,
    some_bytes,
    a_dataclass,
]
seen: list[list[str]] = []


@durable.function(registry=declared)
async def shows_what_it_gets(ctx: durable.Context) -> None:
    got = [repr(await ctx.step(result)) for result in RESULTS]
    seen.append(got)
    await ctx.sleep(1.5)


async def test_row_60_what_a_body_gets_on_replay_is_what_it_got_the_first_time(client: durable.Client) -> None:
    """Live is the decoded form of what was stored (22); empty results are results (23)."""
    seen.clear()
    async with worker(client):
        run = await client.start(shows_what_it_gets)
        await run.result(timeout=PATIENCE)
    assert len(seen) == 2, "it was suspended and replayed once"
    assert seen[0] == seen[1]
    assert log == [result.__name__ for result in RESULTS]


counter = 0


async def poll() -> int:
    global counter
    counter += 1
    return counter


@durable.function(registry=declared)
async def polls(ctx: durable.Context) -> list[int]:
    first = [await ctx.step(poll) for _ in range(5)]
    await ctx.sleep(0.2)
    return first


async def test_row_61_the_same_call_again_is_another_step(client: durable.Client) -> None:
    """The n-th call of a name is a step of its own (18)."""
    global counter
    counter = 0
    async with worker(client):
        assert await client.run(polls) == [1, 2, 3, 4, 5]
    assert counter == 5


# -- E: keys, and rows of other sections that the engine shows -----------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "\x00", "a" * 10_000, "~engine"])
def test_row_18_a_key_that_can_not_work_is_refused_before_anything_is_written(key: str) -> None:
    with pytest.raises((durable.RegistrationError, durable.ConfigurationError, durable.SerializationError)):
        stubborn_note.using(idempotency_key=key)


@pytest.mark.parametrize("key", ["a/b", "%", "0", "None"])
async def test_row_18_an_odd_key_that_can_work_does_work(client: durable.Client, key: str) -> None:
    first = await client.start(stubborn_note.using(idempotency_key=key))
    second = await client.start(stubborn_note.using(idempotency_key=key))
    assert (first.id, second.disposition) == (second.id, "existing")


async def test_row_67_work_in_the_callers_transaction_is_seen_with_its_data_or_not_at_all(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "app.db"
    quick = {"poll": "20ms", "poll_idle": "20ms"}
    async with durable.Client(f"sqlite:///{path}", settings=quick) as client:
        connection = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)
        connection.execute("CREATE TABLE orders (id INTEGER)")
        async with worker(client):
            for end in ("ROLLBACK", "COMMIT"):
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO orders VALUES (1)")
                run = await client.using(conn=connection).start(stubborn_note.using(idempotency_key="k"))
                await asyncio.sleep(0.15)
                assert log == []
                connection.execute(end)
                if end == "COMMIT":
                    assert await (await client.get(run.id, stubborn_note)).result(timeout=PATIENCE) == "alive"
                else:
                    with pytest.raises(durable.NotFound):
                        await client.get(run.id)
        connection.close()
    assert log == ["alive"]


request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")


def reads_context() -> str:
    time.sleep(0.001)
    found = request.get()
    request.set("leaked")
    return found


@durable.function(registry=declared)
async def asks_in_threads(ctx: durable.Context, name: str) -> list[str]:
    request.set(name)
    return [await ctx.step(reads_context) for _ in range(3)]


async def test_row_101_context_variables_reach_steps_in_threads_and_do_not_leak(client: durable.Client) -> None:
    """Steps that are plain functions have threads (28b)."""
    async with worker(client):
        names = [f"request {number}" for number in range(30)]
        runs = await client.start_many(asks_in_threads, names)
        for name, run in zip(names, runs, strict=True):
            assert await run.result(timeout=PATIENCE) == [name] * 3


@durable.function(registry=declared)
async def leaves_a_branch(ctx: durable.Context) -> str:
    asyncio.create_task(_branch(ctx))  # noqa: RUF006 -- nobody waits for it, which is the point
    return await ctx.step(note, "main")


async def _branch(ctx: durable.Context) -> None:
    try:
        await ctx.sleep(3600)
    except asyncio.CancelledError:
        log.append("branch ended")
        raise


async def test_row_42_the_branches_of_a_body_end_before_its_run_lands(client: durable.Client) -> None:
    """A body that is over ends its branches (28)."""
    async with worker(client):
        assert await client.run(leaves_a_branch) == "main"
        assert log == ["main", "branch ended"]


async def tells_its_key() -> str:
    log.append(durable_key.get()())
    raise ConnectionError("again")


durable_key: contextvars.ContextVar[Callable[[], str]] = contextvars.ContextVar("durable_key")


@durable.function(registry=declared)
async def pays(ctx: durable.Context) -> None:
    durable_key.set(lambda: ctx.step_key)
    await ctx.step(durable.step(retry=durable.Retry(3, initial="1ms"))(tells_its_key))


async def test_row_19_every_try_of_a_step_has_the_same_key_for_services_outside(client: durable.Client) -> None:
    """The key is the run and the step, over all tries (27)."""
    async with worker(client):
        run = await client.start(pays)
        with pytest.raises(durable.RunFailed):
            await run.result(timeout=PATIENCE)
    assert log == [f"{run.id}:tells_its_key"] * 3


LETTER = durable.Signal("letter", str)


@durable.function(registry=declared)
async def reads(ctx: durable.Context) -> int:
    return len(await ctx.wait_signal(LETTER))


async def raises_at_length() -> None:
    raise ValueError("x" * 3_000)


@durable.function(registry=declared)
async def fails_at_length(ctx: durable.Context) -> str:
    try:
        await ctx.step(raises_at_length)
    except ValueError as error:
        return type(error).__name__
    return "nothing"


async def test_row_56_what_was_accepted_ends_no_run_when_it_is_recorded(tmp_path: Path) -> None:
    async with (
        durable.Client(f"sqlite:///{tmp_path / 'small.db'}", settings={"max_payload": 2_000, "poll": "50ms"}) as client,
        durable.Worker(client, functions=[reads, fails_at_length]),
    ):
        run = await client.start(reads)
        await run.signal(LETTER, "x" * 1_998)  # with its quotes exactly max_payload
        assert await run.result(timeout=30) == 1_998
        assert await client.run(fails_at_length) == "ValueError"
