"""Plays a requirement on a store: plain, and with a crash after any record. Time is the test's, and so is every turn of the worker.

A `Hand` does what a worker does, one claim at a time: the engine's own `Running` carries a claim out, and what rests is suspended at once.
A crash is an activation that is dropped: its record is durable, its holder never hears of it and settles nothing, the lease lapses,
and the next claim replays. `check` is what the test files call; each of them gives a `World`, which is a store under a clock.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from conformance.requirement import Program, Requirement

import durable
from durable import model as m
from durable._engine.journal import Journal, Lane
from durable._engine.leases import Hold, Leases
from durable._engine.runner import Running
from durable._engine.slots import Slots, Threads
from durable._engine.turnstile import Turnstile
from durable._engine.worker import REPLAY_FAMILY
from durable.clock import boottime
from durable.codec import Codec, ErrorData, plain, read_envelope
from durable.errors import LeaseLost
from durable.events import EngineFault, Event, Events
from durable.protocol import Store
from durable.settings import SECOND, Duration, Settings, micros

START = 1_800_000_000 * SECOND
LEASE = 600 * SECOND
"""Of the test's time, and longer than any play takes of real time: nothing is renewed."""
SETTINGS = Settings.of({"park_after": "0s"})
PATIENCE = 60.0
"""Seconds for one claim; a body that needs them is stuck."""
TURNS = 300
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_numbers = itertools.count(1)


class World:
    """A store under a clock that the test moves, on an event loop of its own."""

    def __init__(self, open_client: Callable[[Callable[[], int]], Awaitable[durable.Client]]) -> None:
        self.now = START
        self.loop = asyncio.new_event_loop()
        self.client = self.do(open_client(lambda: self.now))

    def do(self, work: Any) -> Any:
        """Carry out a coroutine."""
        return self.loop.run_until_complete(work)

    def moved(self) -> None:
        """Time has passed: for a world whose server has to be told."""

    def pass_to(self, instant: int) -> None:
        """Let time pass until then."""
        self.now = max(self.now, instant)
        self.moved()

    def pass_time(self, duration: Duration) -> None:
        """Let time pass while no worker looks."""
        self.pass_to(self.now + micros(duration))

    def close(self) -> None:
        """Close the client."""
        self.do(self.client.__aexit__(None, None, None))
        self.loop.close()


class _Watched:
    """The store as one hand sees it: with the test's clock, counting records, and gone after the one that the crash comes behind."""

    def __init__(self, store: Store, world: World, crash_after: int | None) -> None:
        self._store = store
        self._world = world
        self._crash_after = crash_after
        self.records = 0
        self.crashed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clock(self) -> int:
        return self._world.now

    async def append(self, records: Sequence[tuple[m.Lease, m.NewRecord]]) -> list[m.Appended]:
        """One by one, so that a crash comes between any two."""
        answers: list[m.Appended] = []
        for record in records:
            self._alive()
            answers += await self._store.append([record])
            self.records += answers[-1].state == "appended"
        self._alive()
        return answers

    async def transaction(
        self, lease: m.Lease, work: Callable[[Any], Awaitable[m.NewRecord]], *, timeout: int
    ) -> m.Appended:
        self._alive()
        answer = await self._store.transaction(lease, work, timeout=timeout)
        self.records += answer.state == "appended"
        self._alive()
        return answer

    async def settle(self, entries: Sequence[tuple[m.Lease, m.Outcome]]) -> Sequence[m.Settled]:
        assert not self.crashed, "an activation that was dropped settled its run"
        return await self._store.settle(entries)

    def dropped(self) -> bool:
        """Whether the crash has come."""
        self.crashed = self.crashed or self.records == self._crash_after
        return self.crashed

    def _alive(self) -> None:
        if self.dropped():
            raise LeaseLost("the crash of this play")


class Hand:
    """The hand of a worker (`runner.Host`): claims one run, runs it until it has left, claims the next."""

    def __init__(self, watched: Any, world: World, program: Program, scope: m.Scope, codec: Codec) -> None:
        self.store: Any = watched
        self._world = world
        self.codec = codec
        self.settings = SETTINGS
        self.events = Events()
        self.faults: list[Event] = []
        self.events.attach(lambda event: self.faults.append(event) if isinstance(event, EngineFault) else None)
        self.journal = Journal(watched, self.events, Turnstile())
        self.inboxes: Lane[m.Lease, m.Inbox | None] = Lane("inbox", watched.inbox, events=self.events, ordered=False)
        self.leases = Leases(watched, lease=LEASE, events=self.events, register=_nowhere)
        self.slots = Slots(1, lambda: None)
        self.threads = Threads(4, "requirement")
        self.transactions = asyncio.Semaphore(1)
        self.lease = LEASE
        self.max_reclaims = SETTINGS.max_reclaims
        self.ended = False
        self._registry = program.registry
        self._scope = scope

    async def work(self) -> int | None:
        """Do all that can be done now. The next instant at which something is due by itself."""
        for _ in range(TURNS):
            promoted: m.Promoted = await self.store.promote(scope=self._scope, limit=100)
            claimed = await self.store.claim(self._request())
            if not claimed:
                return promoted.next_due
            if not self.store.dropped():
                await asyncio.wait_for(self._run(claimed[0]), PATIENCE)
            assert not self.faults, self.faults
            if self.store.crashed:
                return None
        raise AssertionError("it does not come to rest")

    async def _run(self, claimed: m.Claimed) -> None:
        function = self._registry.get(claimed.run.name, claimed.run.version)
        assert function is not None
        hold = Hold(claimed.lease, sent=boottime(), length=LEASE, wake_seq=claimed.run.wake_seq)
        self.leases.add(hold)
        self.slots.occupy()
        await Running(self, claimed, function, hold, (self.slots,)).run()

    def _request(self) -> m.ClaimRequest:
        return m.ClaimRequest(
            mark=f"hand {next(_numbers)}",
            queues={"default": 1, "other": 1},
            functions=[(function.name, function.version) for function in self._registry],
            limit=1,
            lease=LEASE,
            family=REPLAY_FAMILY,
            scope=self._scope,
            alone=True,
        )

    async def close(self) -> None:
        """Let go of lanes and threads."""
        await self.inboxes.close()
        await self.journal.close()
        self.threads.close()

    # -- what a running body asks for ------------------------------------------------------------------------------------

    def rests(self, running: Running, rest: Any) -> bool:
        """Everything at rest leaves memory at once, but for what stays there after a cancel: its time passes here."""
        if rest is not None and running.interrupted:
            assert rest.until is not None, "it waits in memory for what does not come by itself"
            self._world.pass_to(rest.until)
            asyncio.get_running_loop().call_soon(running.news)
        return rest is not None

    def recorded(self, running: Running) -> None:
        """Nobody waits for room."""

    def due(self, instant: int) -> None:
        """The play asks the store."""


async def _nowhere() -> None:
    """There is no registry of hands."""


@dataclasses.dataclass
class Seen:
    """What there is to be seen in the end."""

    status: str
    result: Any
    kind: str | None
    error: str | None
    journal: list[list[Any]]
    counts: dict[str, int]
    runs: dict[str, dict[str, int]]
    records: int
    """Of all runs of the play: after each of them a crash may come."""


async def play(world: World, requirement: Requirement, crash_after: int | None = None) -> Seen:
    """Run it to its end, with at most one crash."""
    program = requirement.open()
    client = world.client.using(tenant=m.tenant_id(f"play {next(_numbers)}"))
    store, scope, started = client.store, client.scope, world.now
    run = await client.start(program.start, *requirement.input)
    if requirement.before:
        await program.move(requirement.before, run=run, client=client)
    left = list(requirement.outside)
    watched = _Watched(store, world, crash_after)
    hand = Hand(watched, world, program, scope, client.codec)
    for _ in range(TURNS):
        due = await hand.work()
        if watched.crashed:
            await hand.close()
            world.pass_to(world.now + LEASE + SECOND)
            assert len((await store.sweep(scope=scope, limit=10, max_reclaims=5)).returned) == 1
            watched = _Watched(store, world, None)
            hand = Hand(watched, world, program, scope, client.codec)
            continue
        if await store.mend(scope=scope, limit=100):
            continue
        if left and started + left[0].after <= world.now:
            await program.move(left.pop(0).do, run=await run.refresh(), client=client, pass_time=world.pass_time)
            continue
        ahead = [due] if due is not None else []
        ahead += [started + move.after for move in left[:1]]
        if not ahead:
            break
        world.pass_to(min(ahead))
    else:
        raise AssertionError("it does not end")
    await hand.close()
    assert list(await store.audit(scope=scope)) == []
    return await _seen(client, run.id, program, watched.records)


async def _seen(client: durable.Client, run_id: str, program: Program, records: int) -> Seen:
    store, scope = client.store, client.scope
    page = await store.find(m.RunQuery(limit=1000), scope=scope)
    (run,) = [one for one in page.runs if one.run_id == run_id]
    others: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in page.runs:
        if one.run_id != run_id:
            others[one.name][str(one.status)] += 1
    return Seen(
        status=str(run.status),
        result=None if run.output is None else plain.read(run.output),
        kind=run.error_kind,
        error=run.error,
        journal=[_told(record) for record in await store.history(run_id, scope=scope)],
        counts=dict(program.counts),
        runs={name: dict(statuses) for name, statuses in others.items()},
        records=records,
    )


def _told(record: m.StepRecord) -> list[Any]:
    """A record as requirements write it. Ids differ from play to play and are written <id>; the id of a new child is left out."""
    is_value, body = read_envelope(ID.sub("<id>", record.result))
    if record.kind is m.RecordKind.ATTEMPT:
        is_value, body = False, ErrorData.from_json(plain.write(body["error"]))
    if not is_value:
        return [record.step_id, str(record.kind), {"error": body.type_name.rpartition(".")[2]}]
    if body is None or record.kind is m.RecordKind.START:
        return [record.step_id, str(record.kind)]
    return [record.step_id, str(record.kind), body]


def differences(requirement: Requirement, seen: Seen, *, crashed: bool) -> list[str]:
    """What is not as the requirement says, in sentences."""
    found = [
        f"{what} is {mine!r}, not {wanted!r}"
        for what, wanted, mine in (
            ("status", requirement.status, seen.status),
            ("result", requirement.result, seen.result),
            ("kind", requirement.kind, seen.kind),
            ("runs", requirement.runs, seen.runs),
        )
        if wanted != mine
    ]
    if requirement.error is not None and not (seen.error or "").startswith(requirement.error):
        found.append(f"error is {seen.error!r}, not {requirement.error!r}")
    journal, wanted = seen.journal, [list(one) for one in requirement.journal]
    if requirement.concurrent:
        journal, wanted = sorted(journal, key=str), sorted(wanted, key=str)
    if journal != wanted:
        found.append(f"journal is {journal}, not {wanted}")
    again = requirement.concurrent and crashed
    for name in {*requirement.counts, *seen.counts}:
        least = requirement.counts.get(name, 0)
        if not least <= seen.counts.get(name, 0) <= least + again:
            found.append(f"the body {name!r} ran {seen.counts.get(name, 0)} times, not {least}")
    return found


def check(world: World, requirement: Requirement, *, every: int = 1) -> int:
    """Plain, and with a crash before the first record and after each `every`-th; how many crashes that were. Fails on a difference."""
    plainly = world.do(play(world, requirement))
    wrong = [f"plain: {one}" for one in differences(requirement, plainly, crashed=False)]
    assert not wrong, "\n".join([requirement.text, *wrong])
    points = range(len(requirement.text) % every, plainly.records + 1, every)
    for point in points:
        seen = world.do(play(world, requirement, point))
        wrong += [f"a crash after record {point}: {one}" for one in differences(requirement, seen, crashed=True)]
    assert not wrong, "\n".join([requirement.text, *wrong])
    return len(points)


__all__ = ["START", "World", "check", "differences", "play"]
