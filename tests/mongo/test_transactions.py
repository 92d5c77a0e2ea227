"""Transactions (rules 13, 26, 41, 65): shared with the user, of the caller, and what the driver's labels mean."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from mongo.conftest import Open, fail
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from pymongo.errors import AutoReconnect, DuplicateKeyError, OperationFailure
from servers.mongo_room import Room

from durable.errors import Conflict, Misuse, StoreUnavailable
from durable.model import ALL, Completed, NewRecord, NewSignal, RecordKind, Renewal, Status
from durable.settings import SECOND
from durable.testing.conformance.scenario import LEASE, Scene, new_run
from durable_mongo import Store, connection, faults

TIMEOUT = 5 * SECOND
LONG = 60 * SECOND
pytestmark = pytest.mark.usefixtures("healed")


def record(step_id: str = "pay", **changes: Any) -> NewRecord:
    values: dict[str, Any] = {
        "step_id": step_id,
        "kind": RecordKind.STEP,
        "position": 0,
        "seen": -1,
        "digest": "d",
        "result": '{"value":1}',
    }
    return NewRecord(**{**values, **changes})


@pytest.fixture
async def store(opened: Open) -> Store:
    """A store that soon looks again at a server which said that it shuts down: by itself the driver waits ten seconds."""
    return await opened("heartbeatFrequencyMS=500")


@pytest.fixture
async def client(room: Room) -> AsyncIterator[AsyncMongoClient[dict[str, Any]]]:
    """The application's own client."""
    made: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(room.url)
    yield made
    await made.close()


# -- ctx.transaction ------------------------------------------------------------------------------------------------------------


async def test_a_session_that_was_lent_can_not_end_its_transaction(scene: Scene, store: Store) -> None:
    held = await scene.take()
    for verb in ("commit_transaction", "abort_transaction", "end_session"):

        async def work(session: Any, verb: str = verb) -> NewRecord:
            await getattr(session, verb)()
            raise AssertionError("it was not refused")

        with pytest.raises(Misuse):
            await store.transaction(held.lease, work, timeout=TIMEOUT)
    assert await scene.steps(held.run.run_id) == []


async def test_the_users_own_error_passes_through_as_the_driver_raised_it(
    scene: Scene, store: Store, room: Room
) -> None:
    held = await scene.take()
    room.db["caller_row"].insert_one({"_id": 1, "text": "there"})

    async def work(session: Any) -> NewRecord:
        await session.client[room.name]["caller_row"].insert_one({"_id": 1}, session=session)
        return record()

    with pytest.raises(DuplicateKeyError):
        await store.transaction(held.lease, work, timeout=TIMEOUT)
    assert await scene.steps(held.run.run_id) == []


async def test_work_that_meets_another_transaction_is_called_again_and_counts_once(
    scene: Scene, store: Store, room: Room, client: AsyncMongoClient[dict[str, Any]]
) -> None:
    held = await scene.take()
    rows = client[room.name]["caller_row"]
    await rows.insert_one({"_id": "balance", "amount": 10, "text": ""})
    calls: list[int] = []

    async def work(session: Any) -> NewRecord:
        calls.append(1)
        own = session.client[room.name]["caller_row"]
        await own.find_one({"_id": "balance"}, session=session)
        if len(calls) == 1:
            await rows.update_one({"_id": "balance"}, {"$inc": {"amount": 5}})  # somebody else was quicker
        await own.update_one({"_id": "balance"}, {"$inc": {"amount": -10}}, session=session)
        return record()

    answer = await store.transaction(held.lease, work, timeout=LONG)
    assert answer.state == "appended"
    assert len(calls) == 2
    assert room.db["caller_row"].find_one({"_id": "balance"})["amount"] == 5  # type: ignore[index]


async def test_a_renewal_meanwhile_is_unknown_and_harms_neither(scene: Scene, opened: Open, room: Room) -> None:
    """A write to the run in the middle would make the commit fail; a lease that was not prolonged is not called held (13)."""
    store = scene.store
    held = await scene.take()
    begun, go = asyncio.Event(), asyncio.Event()
    calls: list[int] = []

    async def work(session: Any) -> NewRecord:
        calls.append(1)
        await session.client[room.name]["caller_row"].insert_one({"text": "x"}, session=session)
        begun.set()
        await go.wait()
        return record()

    task = asyncio.create_task(store.transaction(held.lease, work, timeout=LONG))
    await begun.wait()
    (renewed,) = await store.renew([Renewal(lease=held.lease)], lease=LEASE)
    assert renewed.state == "unknown"
    go.set()
    assert (await task).state == "appended"
    assert calls == [1]
    (renewed,) = await store.renew([Renewal(lease=held.lease)], lease=LEASE)
    assert renewed.state == "held"


async def test_a_signal_and_a_cancel_meanwhile_are_not_lost_and_the_work_counts_once(
    scene: Scene, opened: Open, room: Room
) -> None:
    held = await scene.take()
    calls: list[int] = []

    async def work(session: Any) -> NewRecord:
        calls.append(1)
        await session.client[room.name]["caller_row"].insert_one({"text": "x"}, session=session)
        if len(calls) == 1:
            await scene.send(held.run.run_id)
            await scene.cancel(held.run.run_id)
        return record()

    assert (await scene.store.transaction(held.lease, work, timeout=LONG)).state == "appended"
    assert room.caller_rows() == ["x"]
    inbox = await scene.inbox(held)
    assert (len(inbox.signals), inbox.cancel_requested) == (1, True)


async def test_a_fence_that_goes_while_the_work_runs_takes_the_rows_with_it(scene: Scene, room: Room) -> None:
    held = await scene.take()

    async def work(session: Any) -> NewRecord:
        await session.client[room.name]["caller_row"].insert_one({"text": "stale"}, session=session)
        if (await scene.get(held.run.run_id)).lease_owner == held.lease.mark:
            await scene.lapse()
            await scene.sweep()
        return record()

    answer = await scene.store.transaction(held.lease, work, timeout=LONG)
    assert (answer.state, answer.record) == ("lost", None)
    assert room.caller_rows() == []


# -- labels -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"errorCode": 112, "errorLabels": ["TransientTransactionError"]},
        {"closeConnection": True},
        {"errorCode": 91},
        {"writeConcernError": {"code": 91, "errmsg": "shutdown"}},
        {"writeConcernError": {"code": 64, "errmsg": "timeout"}},
    ],
    ids=["conflict", "cut", "shutdown", "applied-then-shutdown", "applied-unknown"],
)
@pytest.mark.parametrize("command", ["insert", "update", "commitTransaction"])
async def test_an_append_whose_command_fails_is_written_once(
    scene: Scene, room: Room, command: str, how: dict[str, Any]
) -> None:
    held = await scene.take()
    made = await scene.record(held.run.run_id, "a")
    fail(room, command, **how)
    (answer,) = await scene.store.append([(held.lease, made)])
    assert answer.state in ("appended", "recorded")
    assert await scene.steps(held.run.run_id) == ["a"]


@pytest.mark.parametrize("times", [1, 3])
async def test_a_commit_whose_answer_is_lost_is_asked_again_and_happens_once(
    scene: Scene, room: Room, times: int
) -> None:
    fail(room, "commitTransaction", times=times, closeConnection=True)
    answers = await scene.store.enqueue([new_run(idempotency_key=f"k{n}") for n in range(3)])
    assert len(answers) == 3
    assert len(await scene.runs()) == 3


@pytest.mark.parametrize("command", ["find", "insert", "update"])
async def test_a_claim_whose_command_fails_takes_each_run_once(scene: Scene, room: Room, command: str) -> None:
    await scene.store.enqueue([new_run() for _ in range(5)])
    request = scene.request(5)
    fail(room, command, closeConnection=True)
    first = await scene.store.claim(request)
    again = await scene.store.claim(request)
    assert {one.run.attempts for one in again} <= {1}
    rest = await scene.claim(5)
    assert len({one.run.run_id for one in (*first, *again, *rest)}) == 5
    assert {run.attempts for run in await scene.runs()} == {1}


async def test_a_settle_that_was_applied_without_an_answer_lands(scene: Scene, room: Room) -> None:
    held = await scene.take()
    fail(room, "update", times=1, writeConcernError={"code": 91, "errmsg": "shutdown"})
    assert await scene.settle(held, Completed(output="1")) == "landed"
    assert (await scene.get(held.run.run_id)).status == Status.COMPLETED


async def test_conflicts_without_end_are_unavailable(scene: Scene, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    held = await scene.take()
    made = await scene.record(held.run.run_id, "a")
    monkeypatch.setattr(connection, "PATIENCE", 0.3)
    fail(room, "insert", times=100_000, errorCode=112, errorLabels=["TransientTransactionError"])
    with pytest.raises(StoreUnavailable):
        await scene.store.append([(held.lease, made)])


async def test_a_call_and_what_looks_before_it_share_their_patience(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own: sent back for as long as it may be, and then not once more for as long by the look."""
    clock = [0.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(connection, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))

    async def nothing_yet(_work: Any) -> None:
        if clock[0] > connection.PATIENCE - 2:
            raise AutoReconnect("nobody answers")

    async def sent_back(_work: Any) -> str:
        raise OperationFailure("conflict", 112, {"errorLabels": [faults.TRANSIENT]})

    with pytest.raises(StoreUnavailable):
        await store._database.write(sent_back, look=nothing_yet)
    assert connection.PATIENCE - 2 < clock[0] <= connection.PATIENCE


# -- the caller's session --------------------------------------------------------------------------------------------------------


async def test_a_session_without_a_transaction_is_refused(
    store: Store, client: AsyncMongoClient[dict[str, Any]]
) -> None:
    async with client.start_session() as session:
        with pytest.raises(Misuse, match="no open transaction"):
            await store.enqueue([new_run()], tx=session)


async def test_a_session_on_other_data_is_refused(store: Store, client: AsyncMongoClient[dict[str, Any]]) -> None:
    store._database.store_id = "another deployment"
    async with client.start_session() as session:
        await session.start_transaction()
        with pytest.raises(Misuse, match="does not reach"):
            await store.enqueue([new_run()], tx=session)
        await session.abort_transaction()


async def test_errors_of_the_drivers_own_pass_through_with_their_labels(
    scene: Scene, room: Room, client: AsyncMongoClient[dict[str, Any]]
) -> None:
    """So that `with_transaction` does what it does for the caller's own writes."""
    calls: list[int] = []

    async def work(session: Any) -> None:
        calls.append(1)
        await session.client[room.name]["caller_row"].insert_one({"text": "order"}, session=session)
        if len(calls) == 1:
            fail(room, "insert", errorCode=112, errorLabels=["TransientTransactionError"])
        await scene.store.enqueue([new_run(idempotency_key="i")], tx=session)

    async with client.start_session() as session:
        await session.with_transaction(work)
    assert len(calls) == 2
    assert room.caller_rows() == ["order"]
    assert len(await scene.runs()) == 1


async def test_twenty_callers_with_five_keys_make_five_runs(
    scene: Scene, room: Room, client: AsyncMongoClient[dict[str, Any]]
) -> None:
    async def one(number: int) -> str:
        async def work(session: Any) -> str:
            (answer,) = await scene.store.enqueue([new_run(idempotency_key=f"k{number % 5}")], tx=session)
            return answer.run.run_id

        async with client.start_session() as session:
            found: str = await session.with_transaction(work)
            return found

    found = await asyncio.gather(*(one(number) for number in range(20)))
    assert len(set(found)) == 5
    assert {run.run_id for run in await scene.runs()} == set(found)


# -- Motor ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def motor(room: Room) -> AsyncIterator[Any]:
    """The application's Motor client."""
    made: Any = AsyncIOMotorClient(room.url)
    yield made
    made.close()


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_motor_session_is_accepted_for_submits_and_signals(
    scene: Scene, room: Room, motor: Any, end: str
) -> None:
    held = await scene.take()
    assert await scene.suspend(held) == "landed"
    waiting = await scene.start(coalesce_key="c", input="1")
    signal = NewSignal(run_id=held.run.run_id, name="go", payload="1", dedup_id="d")
    fresh = new_run(idempotency_key="i", sequence_key="s", tags={"a": "b"})
    joiner = new_run(coalesce_key="c", on_coalesce="replace", input="2")
    async with await motor.start_session() as session:
        session.start_transaction()
        await motor[room.name]["caller_row"].insert_one({"text": "order"}, session=session)
        with pytest.deprecated_call(match="end of life"):
            created, joined = await scene.store.enqueue([fresh, joiner], tx=session)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert await scene.store.send(signal, scope=ALL, tx=session) == 1
        assert (created.disposition, joined.disposition) == ("created", "coalesced")
        assert await scene.gone(fresh.run_id)
        await (session.commit_transaction() if end == "commit" else session.abort_transaction())
    committed = end == "commit"
    assert room.caller_rows() == (["order"] if committed else [])
    assert await scene.gone(fresh.run_id) is not committed
    assert (await scene.get(waiting.run_id)).input == ("2" if committed else "1")
    assert (await scene.get(held.run.run_id)).status == (Status.PENDING if committed else Status.SUSPENDED)


async def test_a_conflict_leaves_a_motor_transaction_usable(scene: Scene, room: Room, motor: Any) -> None:
    await scene.start(idempotency_key="i", name="other")
    async with await motor.start_session() as session:
        session.start_transaction()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with pytest.raises(Conflict):
                await scene.store.enqueue([new_run(), new_run(idempotency_key="i")], tx=session)
        await motor[room.name]["caller_row"].insert_one({"text": "after"}, session=session)
        await session.commit_transaction()
    assert room.caller_rows() == ["after"]
    assert len(await scene.runs()) == 1


@pytest.mark.parametrize("kind", ["motor", "pymongo"])
async def test_a_client_in_the_place_of_a_session_is_refused_before_anything_is_written(
    scene: Scene, room: Room, motor: Any, kind: str
) -> None:
    """It has no transaction: what the caller believes to be inside one would be there at once."""
    held = await scene.take()
    run, signal = new_run(), NewSignal(run_id=held.run.run_id, name="go", payload="1", dedup_id="d")
    async with AsyncMongoClient[dict[str, Any]](room.url) as own:
        client: Any = motor if kind == "motor" else own
        for write in (scene.store.enqueue([run], tx=client), scene.store.send(signal, scope=ALL, tx=client)):
            with pytest.raises(Misuse, match="it has no transaction of its own") as refused:
                await write
            assert "session of your transaction" in str(refused.value.hint)
    assert await scene.gone(run.run_id)
    assert not (await scene.inbox(held)).signals


def test_motor_is_never_imported_by_the_backend() -> None:
    code = "import durable_mongo, sys; print('motor' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_the_servers_refusal_of_transactions_is_known() -> None:
    error = OperationFailure("Transaction numbers are only allowed on a replica set member or mongos", 20)
    assert "--replSet" in faults.mapped(error).hint
