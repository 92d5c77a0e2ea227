"""Signals (rules 32, 57): ordered, kept until a record names them, waking in the same write."""

from __future__ import annotations

import asyncio

import pytest

from durable.errors import Conflict, NotFound
from durable.model import (
    ALL,
    Cancelled,
    Completed,
    Failed,
    ForwardIncomplete,
    Outcome,
    RecordKind,
    Retry,
    Status,
    TimedOut,
)
from durable.settings import HOUR, SECOND

from .scenario import ACME, BETA, Scene, failure, rule


@rule(32)
async def test_a_signal_is_kept_until_the_body_takes_it(scene: Scene) -> None:
    held = await scene.take()
    seq = await scene.send(held.run.run_id, "go", payload='{"x":1}')
    for _ in range(2):
        (signal,) = (await scene.inbox(held)).signals
        assert (signal.name, signal.seq, signal.payload) == ("go", seq, '{"x":1}')
    await scene.hand_back(held)
    again = await scene.take_again(held.run.run_id)
    assert [signal.seq for signal in (await scene.inbox(again)).signals] == [seq]


@rule(32)
async def test_a_signal_is_taken_once_and_taken_means_named_by_a_record(scene: Scene) -> None:
    held = await scene.take()
    first = await scene.send(held.run.run_id)
    second = await scene.send(held.run.run_id)
    answer = await scene.append(held, "wait", kind=RecordKind.SIGNAL, signal_seq=first)
    assert answer.record is not None
    assert answer.record.signal_seq == first
    assert [signal.seq for signal in (await scene.inbox(held)).signals] == [second]
    assert [record.signal_seq for record in await scene.history(held.run.run_id)] == [first]


@rule(32)
async def test_signals_come_in_order_of_their_sends(scene: Scene) -> None:
    held = await scene.take()
    sent = [await scene.send(held.run.run_id, name, payload=str(n)) for n, name in enumerate(("a", "b", "a", "c", "a"))]
    assert sent == sorted(sent)
    signals = (await scene.inbox(held)).signals
    assert [signal.seq for signal in signals] == sent
    assert [signal.payload for signal in signals if signal.name == "a"] == ["0", "2", "4"]


@rule(32)
async def test_a_signals_seq_is_the_wake_seq_that_its_send_produced(scene: Scene) -> None:
    held = await scene.take()
    seq = await scene.send(held.run.run_id)
    assert seq == (await scene.inbox(held)).wake_seq == (await scene.get(held.run.run_id)).wake_seq


@rule(32)
@pytest.mark.parametrize("state", ["never claimed", "delayed", "handed back", "suspended"])
async def test_a_signal_that_comes_before_the_wait_is_not_lost(scene: Scene, state: str) -> None:
    if state in ("never claimed", "delayed"):
        run_id = (await scene.start(delay=HOUR if state == "delayed" else None)).run_id
    else:
        held = await scene.take()
        run_id = held.run.run_id
        if state == "handed back":
            await scene.hand_back(held)
        else:
            assert await scene.suspend(held) == "landed"
    await scene.send(run_id)
    if state == "delayed":
        assert list(await scene.claim()) == []
        await scene.later(HOUR + SECOND)
        await scene.promote()
    again = await scene.take_again(run_id)
    assert [signal.name for signal in (await scene.inbox(again)).signals] == ["go"]


@rule(32)
async def test_a_send_does_not_make_a_delayed_run_start_early(scene: Scene) -> None:
    run = await scene.start(delay=HOUR)
    await scene.send(run.run_id)
    assert (await scene.get(run.run_id)).available_at == run.available_at


@rule(32)
async def test_a_send_does_not_shorten_the_back_off_of_a_retry(scene: Scene) -> None:
    held = await scene.take(max_attempts=3)
    await scene.settle(held, Retry(after=HOUR, failure=failure()))
    await scene.send(held.run.run_id)
    assert list(await scene.claim()) == []


@rule(32)
async def test_a_repeated_send_with_the_same_dedup_id_is_the_same_signal(scene: Scene) -> None:
    held = await scene.take()
    first = await scene.send(held.run.run_id, dedup_id="one")
    await scene.send(held.run.run_id, dedup_id="other")
    counter = (await scene.inbox(held)).wake_seq
    assert await scene.send(held.run.run_id, dedup_id="one", payload='"changed"') == first
    inbox = await scene.inbox(held)
    assert inbox.wake_seq == counter
    assert [signal.payload for signal in inbox.signals] == ['"hello"', '"hello"']


@rule(32)
async def test_a_repeated_send_whose_signal_was_taken_is_still_the_same_signal(scene: Scene) -> None:
    held = await scene.take()
    first = await scene.send(held.run.run_id, dedup_id="one")
    await scene.append(held, "wait", kind=RecordKind.SIGNAL, signal_seq=first)
    assert await scene.send(held.run.run_id, dedup_id="one") == first
    assert list((await scene.inbox(held)).signals) == []


@rule(32)
async def test_the_same_dedup_id_for_another_run_is_another_signal(scene: Scene) -> None:
    one, other = await scene.take(), await scene.take()
    await scene.send(one.run.run_id, dedup_id="x")
    await scene.send(other.run.run_id, dedup_id="x")
    assert [len((await scene.inbox(held)).signals) for held in (one, other)] == [1, 1]


@rule(32)
@pytest.mark.parametrize(
    "outcome",
    [
        Completed(output="1"),
        Failed(failure=failure()),
        Cancelled(failure=failure()),
        TimedOut(failure=failure()),
        ForwardIncomplete(failure=failure()),
    ],
    ids=lambda outcome: type(outcome).__name__,
)
async def test_a_signal_to_a_terminal_run_is_a_conflict_and_stores_nothing(scene: Scene, outcome: Outcome) -> None:
    held = await scene.take()
    await scene.settle(held, outcome)
    before = await scene.everything()
    with pytest.raises(Conflict):
        await scene.send(held.run.run_id)
    assert await scene.everything() == before


@rule(32)
async def test_a_repeated_send_that_was_stored_before_the_landing_is_still_known(scene: Scene) -> None:
    """The answer of the send was lost and the run has landed since: the signal is there, so the repeated send says so."""
    held = await scene.take()
    seq = await scene.send(held.run.run_id, dedup_id="one")
    await scene.complete(held)
    assert await scene.send(held.run.run_id, dedup_id="one") == seq


@rule(32, 57)
async def test_a_signal_to_an_unknown_or_foreign_run_is_not_found(scene: Scene) -> None:
    run = await scene.start(tenant=ACME)
    for run_id, scope in (("unknown", ALL), (run.run_id, BETA), (run.run_id, None)):
        with pytest.raises(NotFound):
            await scene.send(run_id, scope=scope)
    assert (await scene.get(run.run_id)).wake_seq == 0
    await scene.send(run.run_id, scope=ACME)


@rule(32)
async def test_a_send_and_the_landing_of_its_run_come_in_one_order(scene: Scene) -> None:
    """Either the signal was first and the run knows of it, or the landing was first and the sender is told."""
    for _ in range(10):
        held = await scene.take()
        rest = await scene.rest(held)
        settled, sent = await asyncio.gather(
            scene.settle(held, rest), scene.send(held.run.run_id), return_exceptions=True
        )
        assert not isinstance(sent, BaseException)
        run = await scene.get(held.run.run_id)
        assert (settled, run.status) in (("woken", Status.RUNNING), ("landed", Status.PENDING))
        if run.status == Status.PENDING:
            held = await scene.take_again(run.run_id)
        assert len((await scene.inbox(held)).signals) == 1
        await scene.complete(held)


@rule(32)
async def test_the_instant_of_a_signal_is_the_stores(scene: Scene) -> None:
    """By it the body decides between a signal and a time-out, however late it wakes."""
    held = await scene.take()
    before = scene.store.clock()
    await scene.send(held.run.run_id)
    (signal,) = (await scene.inbox(held)).signals
    assert scene.since(before, signal.at)


@rule(31, 32)
async def test_the_inbox_is_one_snapshot_with_its_wake_seq(scene: Scene) -> None:
    held = await scene.take()
    empty = await scene.inbox(held)
    assert (empty.cancel_requested, list(empty.signals), list(empty.children)) == (False, [], [])
    await scene.send(held.run.run_id)
    await scene.cancel(held.run.run_id)
    inbox = await scene.inbox(held)
    assert (inbox.wake_seq, inbox.cancel_requested, len(inbox.signals)) == (empty.wake_seq + 2, True, 1)


@rule(31)
async def test_inboxes_of_many_runs_are_answered_in_order(scene: Scene) -> None:
    held = [await scene.take() for _ in range(3)]
    await scene.send(held[1].run.run_id, "b")
    await scene.complete(held[0])
    inboxes = await scene.store.inbox([one.lease for one in reversed(held)])
    assert [None if inbox is None else len(inbox.signals) for inbox in inboxes] == [0, 1, None]


@rule(46)
async def test_a_refused_ask_is_not_shown_in_the_inbox(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, ":pivot", kind=RecordKind.PIVOT)
    await scene.cancel(held.run.run_id)
    assert not (await scene.inbox(held)).cancel_requested


@rule(32, 50)
async def test_a_signal_whose_record_is_taken_out_by_a_retry_is_there_again(scene: Scene) -> None:
    held = await scene.take()
    await scene.append(held, "a")
    seq = await scene.send(held.run.run_id)
    await scene.append(held, "wait", kind=RecordKind.SIGNAL, signal_seq=seq)
    await scene.fail(held, positions=(0,))
    await scene.store.retry(held.run.run_id, scope=ALL, attempts=1)
    again = await scene.take_again(held.run.run_id)
    assert [record.step_id for record in again.history] == []
    assert [signal.seq for signal in (await scene.inbox(again)).signals] == [seq]


@rule(32, 60)
async def test_a_signal_that_nobody_took_goes_with_its_run(scene: Scene) -> None:
    held = await scene.take(keep=SECOND)
    await scene.send(held.run.run_id, dedup_id="one")
    await scene.complete(held)
    await scene.later(HOUR)
    assert await scene.store.purge(scope=ALL, limit=10) == 1
    with pytest.raises(NotFound):
        await scene.send(held.run.run_id, dedup_id="one")


@rule(32)
async def test_concurrent_sends_get_distinct_seqs(scenes: tuple[Scene, Scene]) -> None:
    one, other = scenes
    held = await one.take()
    seqs = await asyncio.gather(*(scene.send(held.run.run_id) for scene in (one, other) * 8))
    assert len(set(seqs)) == 16
    assert [signal.seq for signal in (await one.inbox(held)).signals] == sorted(seqs)
