"""A world without a store: simulated time, an in-memory recorder whose commits complete in groups and out of order, and the
oracles that watch one activation after another.

`play` executes a body from a journal to its end, suspending and waking it as an engine would; `check_seed` plays a program live,
then crashes it after every durable write and compares. A broken rule raises `Violation`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from replay import families, programs

from durable import activation as activation_module
from durable import execution
from durable.activation import Activation
from durable.codec import Codec
from durable.context import Context
from durable.endings import end_id
from durable.execution import Execution
from durable.model import (
    ChildEnd,
    Claimed,
    Inbox,
    Lease,
    NewRecord,
    RecordKind,
    RunRecord,
    Signal,
    Status,
    StepRecord,
)
from durable.replay import (
    Ending,
    Interrupted,
    Mismatch,
    MisuseEnding,
    PutAside,
    Raised,
    Rest,
    Returned,
    Spinning,
    Stuck,
)
from durable.settings import SECOND, Settings

STARTED = 1_700_000_000 * SECOND
CODEC = Codec(1 << 20)
SETTINGS = Settings()
LEASE = Lease(run_id="r", tenant=None, attempts=1, mark="m")


class Violation(Exception):
    """A rule is broken."""


def need(holds: object, *facts: object) -> None:
    """Raises Violation with the facts."""
    if not holds:
        raise Violation(*facts)


def run_record(**changes: Any) -> RunRecord:
    """A run as a claim hands it out."""
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(RunRecord)}
    values.update(
        run_id="r",
        name="fuzz",
        status=Status.RUNNING,
        input="[[],{}]",
        queue="default",
        priority=0,
        attempts=1,
        failures=0,
        reclaims=0,
        submitted=1,
        created_at=STARTED,
        updated_at=STARTED,
        started_at=STARTED,
        seed=b"0123456789abcdef",
        wake_seq=0,
        wake_after=0,
        compensating=False,
        detached=False,
        tags={},
    )
    values.update(changes)
    return RunRecord(**values)


class Body:
    """A program (`replay.Program`) made of a plain body."""

    blocking = False
    name = "fuzz"

    def __init__(self, body: Callable[[Context], Any]) -> None:
        self.body = body

    def open(self, host: Any, payload: str, codec: Codec) -> Callable[[], Any]:
        return lambda: self.body(Context(host, self.name))

    def encode_result(self, value: Any, codec: Codec) -> str:
        return codec.encode(value)


class World:
    """Time goes on by a second per turn of the outer loop, and jumps while a run is suspended."""

    def __init__(self, seed: int, messages: Sequence[Signal], history: Sequence[StepRecord], now: int) -> None:
        self.random = random.Random(seed)
        self.now = now
        self.messages = messages
        self.durable: list[StepRecord] = list(history)
        """Every durable write in order: also what a crash leaves."""
        self.executed: collections.Counter[tuple[str, int]] = collections.Counter()
        self.in_flight = 0
        self.slowness = self.random.choice([3, 12, 40])
        self.lane: list[tuple[NewRecord, asyncio.Future[StepRecord]]] = []
        self.reads: list[asyncio.Future[Inbox]] = []
        self.bad: list[tuple[Any, ...]] = []
        self.cancelled = False
        self.slots = 1
        self.rests = 0
        self.activation: Activation | None = None
        self.step_ids: list[str] = []

    current: World

    # -- the recorder -----------------------------------------------------------------------------------------------------

    codec = CODEC
    settings = SETTINGS

    def clock(self) -> int:
        return self.now

    async def append(self, record: NewRecord) -> StepRecord:
        future: asyncio.Future[StepRecord] = asyncio.get_running_loop().create_future()
        self.lane.append((record, future))
        return await future

    async def inbox(self) -> Inbox:
        future: asyncio.Future[Inbox] = asyncio.get_running_loop().create_future()
        self.reads.append(future)
        return await future

    def read(self) -> Inbox:
        taken = {record.signal_seq for record in self.durable}
        waiting = [m for m in self.messages if m.at <= self.now and m.seq not in taken]
        recorded = {record.step_id for record in self.durable}
        children = [end for end in self.landed if end_id(end.step_id) not in recorded]
        asked = self.cancelled and not self.refused
        return Inbox(wake_seq=self.wake_seq, cancel_requested=asked, signals=waiting, children=children)

    @property
    def landed(self) -> list[ChildEnd]:
        return families.landed(self.durable, self.now)

    @property
    def refused(self) -> bool:
        """The run has passed a pivot (46)."""
        return any(record.kind is RecordKind.PIVOT for record in self.durable)

    @property
    def wake_seq(self) -> int:
        messages = sum(message.at <= self.now for message in self.messages)
        return messages + 1_000 * self.cancelled + 1_000_000 * len(self.landed)

    def progress(self, progress: str) -> None: ...

    def run_blocking(self, call: Callable[[], Any]) -> Any:
        return asyncio.get_running_loop().run_in_executor(None, call)

    def held(self) -> bool:
        return True

    def give_slot(self, rest: Rest) -> None:
        self.slots -= 1
        self.rests += 1
        self._judge_rest(rest)

    async def take_slot(self) -> None:
        for _ in range(self.random.randrange(3)):
            await asyncio.sleep(0)
        self.slots += 1

    # -- time -------------------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One turn of the outer loop has passed."""
        before, self.now = self.now, self.now + SECOND
        if self.random.random() < 0.4:
            self.flush()
        for future in self.reads:
            if not future.done():
                future.set_result(self.read())
        self.reads.clear()
        activation = self.activation
        if activation is None:
            return
        if activation.alarm_at is not None and activation.alarm_at <= self.now:
            activation.tick()
        if any(before < event.at <= self.now for event in (*self.messages, *self.landed)):
            activation.news()

    def flush(self) -> None:
        """A group commit: a batch becomes durable in order; its answers come in any order."""
        size = self.random.randint(1, 5)
        batch, self.lane = self.lane[:size], self.lane[size:]
        answers = []
        for new, future in batch:
            record = StepRecord(
                step_id=new.step_id,
                kind=new.kind,
                position=new.position,
                seen=new.seen,
                digest=new.digest,
                result=new.result,
                at=max(self.now, new.floor),
                started_at=None,
                fence=1,
                signal_seq=new.signal_seq,
            )
            self.durable.append(record)
            answers.append((future, record))
        self.random.shuffle(answers)
        for future, record in answers:
            if not future.done():
                future.set_result(record)
                if self.random.random() < 0.5:  # the others come in a later turn
                    rest = [one for one in answers if not one[0].done()]
                    asyncio.get_running_loop().call_soon(_answer, rest)
                    return

    @property
    def busy(self) -> bool:
        """Something is under way that will go on by itself."""
        activation = self.activation
        assert activation is not None
        under_way = activation._queued or activation.execution.running or activation._going_on is not None
        return bool(self.in_flight or self.lane or self.reads or under_way)

    def disturb(self, how: str) -> None:
        """Somebody asks for a cancel, or the run's time is over."""
        assert self.activation is not None
        if how == "cancel":
            self.cancelled = True
            self.activation.ask_cancel("")
        else:
            self.activation.time_out("timeout")

    # -- what steps do ----------------------------------------------------------------------------------------------------

    async def act(self, name: str, uid: int, fails: float) -> str:
        self.executed[name, uid] += 1
        self.in_flight += 1
        try:
            for _ in range(self.random.randrange(self.slowness)):
                await asyncio.sleep(0)
            if self.random.random() < 0.3:
                await asyncio.create_task(asyncio.sleep(0))  # a library's own task
            if self.random.random() < 0.02:
                gc.collect()
            if self.random.random() < fails:
                raise ValueError(f"{name}{uid}:{self.random.random():.3f}")
            return f"{name}{uid}:{self.random.random():.3f}"
        finally:
            try:
                if self.random.random() < 0.3:
                    await asyncio.sleep(0)  # slow to die when it is cancelled
            finally:
                self.in_flight -= 1

    # -- oracles ------------------------------------------------------------------------------------------------------------

    def _judge_rest(self, rest: Rest) -> None:
        activation = self.activation
        assert activation is not None
        if self.in_flight or activation.execution.running:
            self.bad.append(("at rest with a step in flight", self.in_flight))
        if self.lane:
            self.bad.append(("at rest with a record on its way", len(self.lane)))
        if activation.body.ready:  # type: ignore[union-attr]
            self.bad.append(("at rest while a branch could run",))
        if any(waiter.due is not None and waiter.due <= self.now for waiter in activation.waits.values()):
            self.bad.append(("at rest with a due timer",))
        if not activation.journal.exhausted:
            self.bad.append(("at rest before the journal was delivered",))
        taken = {record.signal_seq for record in self.durable}
        names = {waiter.signal for waiter in activation.waits.values() if waiter.kind is RecordKind.SIGNAL}  # type: ignore[attr-defined]
        for message in self.messages[: rest.wake_seq % 1_000]:
            if message.name in names and message.seq not in taken:
                self.bad.append(("at rest with a signal that it had read", message.seq))
        recorded = {record.step_id for record in self.durable}
        for end in self.landed[: rest.wake_seq // 1_000_000]:
            if end_id(end.step_id) in activation.outside.expected and end_id(end.step_id) not in recorded:
                self.bad.append(("at rest with the end of a child that it had read", end.step_id))

    def judge_stuck(self, activation: Activation) -> None:
        if self.in_flight:
            self.bad.append(("stuck with a step in flight", self.in_flight))
        if activation.waits:
            self.bad.append(("stuck with a durable wait open", list(activation.waits)))


def _answer(rest: list[tuple[asyncio.Future[StepRecord], StepRecord]]) -> None:
    for future, record in rest:
        if not future.done():
            future.set_result(record)


class Watched(Activation):
    """An activation that notes where the trace stood at each delivery."""

    world: World
    marks: dict[int | None, int]
    trace: Callable[[], list[str]]

    def _deliver_one(self, record: StepRecord) -> bool:
        self.marks[record.position] = len(self.trace())
        if record.signal_seq is not None:
            waiter = self.calls.get(record.step_id)
            if waiter is not None and waiter.done():  # type: ignore[attr-defined]
                self.world.bad.append(("a signal was taken by a wait that the body had given up", record.step_id))
        return super()._deliver_one(record)


async def _pause(span: int) -> None:
    world = World.current
    until = world.now + span
    while world.now < until:
        await asyncio.sleep(0)


@contextlib.contextmanager
def _simulated(world: World) -> Iterator[None]:
    """Pauses take the world's time, and replay comes in chunks of one record, or in one."""
    World.current = world
    programs.Effects.act = staticmethod(world.act)  # type: ignore[method-assign, assignment]
    pause, chunk = execution.pause, activation_module.CHUNK_NS
    execution.pause = _pause
    activation_module.CHUNK_NS = world.random.choice([-1, 10_000_000])
    try:
        yield
    finally:
        execution.pause, activation_module.CHUNK_NS = pause, chunk


class WatchedExecution(Execution):
    """Refuses nothing, notes everything: a recorded step that runs, one that runs twice, one that is never told to stop."""

    async def _execute(self, call: Any, tries: int, again: int) -> None:
        activation = self.host
        assert isinstance(activation, Watched)
        world = activation.world
        known = {record.step_id for record in world.durable}
        if call.step_id in known:
            world.bad.append(("a recorded step was executed", call.step_id))
        if call.runner is not None and not call.runner.done() and call.runner is not asyncio.current_task():
            world.bad.append(("a step was executed twice at once", call.step_id))
        world.step_ids.append(call.step_id)
        await super()._execute(call, tries, again)

    def give_up(self, call: Any) -> None:
        super().give_up(call)
        if call.runner is not None and not call.runner.done() and not call.runner.cancelling() and not call.recording:
            assert isinstance(self.host, Watched)
            self.host.world.bad.append(("a cancelled step was never told", call.step_id))


@dataclasses.dataclass
class Played:
    """How a program went."""

    ending: str
    trace: list[str]
    marks: dict[int | None, int]
    world: World
    activations: int
    rests: int


Disturbance = tuple[str, int] | None
"""("cancel" | "timeout", the number of turns after which it comes)."""


def told(ending: Ending) -> str:
    """An ending in words that are the same in every process."""
    if isinstance(ending, Returned):
        return f"returned {ending.output}"
    error = getattr(ending, "error", None)
    positions = ending.positions if isinstance(ending, Raised) else ""
    return f"{type(ending).__name__} {'' if error is None else type(error).__name__} {positions}"


async def play(
    tree: programs.Node,
    history: Sequence[StepRecord],
    seed: int,
    messages: Sequence[Signal],
    *,
    now: int = STARTED,
    disturbance: Disturbance = None,
    cancelled: bool = False,
) -> Played:
    """Execute a program from a journal to its end."""
    world = World(seed, messages, history, now)
    with _simulated(world):
        return await _play(tree, world, disturbance, cancelled)


async def _play(tree: programs.Node, world: World, disturbance: Disturbance, cancelled: bool) -> Played:
    marks: dict[int | None, int] = {}
    room: programs.Room | None = None
    turns = 0

    async def body(ctx: Context) -> Any:
        nonlocal room
        room = programs.Room(ctx)
        return await programs.evaluate(tree, room)

    if any(record.step_id in (":cancel", ":timeout") for record in world.durable):
        disturbance = None
        world.cancelled = any(record.step_id == ":cancel" for record in world.durable)
    world.cancelled = world.cancelled or cancelled
    inbox: Inbox | None = None
    for count in range(1, 400):
        run = run_record(
            wake_seq=world.wake_seq,
            cancel_requested_at=world.now if world.cancelled else None,
            cancel_refused_at=world.now if world.refused else None,
        )
        claimed = Claimed(lease=LEASE, run=run, history=tuple(world.durable))
        activation = Watched(Body(body), claimed, world, inbox)  # type: ignore[arg-type]
        activation.world, activation.marks = world, marks
        activation.trace = lambda: room.trace if room is not None else []
        activation.execution = WatchedExecution(activation)
        world.activation = activation
        world.slots = 1
        task = asyncio.ensure_future(activation.run())
        suspended: Rest | None = None
        idle = own = 0
        try:
            while not task.done():
                await asyncio.sleep(0)
                world.turn()
                turns += 1
                own += 1
                if disturbance is not None and turns > disturbance[1] and not activation.over:
                    world.disturb(disturbance[0])
                    disturbance = None
                rest = activation.rest
                if rest is not None and suspended is None:
                    if world.random.random() < 0.7:
                        suspended = rest
                        await activation.set_aside()
                    else:
                        _jump(world, rest, activation)
                need(own < 5_000, "hang")
                idle = 0 if world.busy or rest is not None or task.done() else idle + 1
                need(
                    idle < 50,
                    "nothing in flight, yet neither ended nor at rest",
                    list(activation.waits),
                    activation.outside.busy,
                )
        finally:
            if not task.done():  # a rule is broken: leave nothing behind
                world.lane.clear()
                task.cancel()
                await asyncio.wait([task])
        ending = task.result()
        need(not world.in_flight, "released with a step in flight", world.in_flight)
        need(not world.bad, *(world.bad[0] if world.bad else ()))
        need(world.slots in (0, 1), "slots", world.slots)
        if not isinstance(ending, PutAside):
            break
        need(suspended is not None, "put aside by nobody")
        need(not world.in_flight, "suspended with a step in flight", world.in_flight)
        need(not world.lane, "suspended with a record on its way")
        assert suspended is not None
        inbox = None
        if world.wake_seq != suspended.wake_seq:
            inbox = world.read()  # woken: it goes on at once
            continue
        if not _jump(world, suspended, None):
            need(room is not None, "no room")
            return Played("waits for ever", room.trace if room else [], marks, world, count, world.rests)
    else:
        raise Violation("livelock: it suspends for ever")
    for _ in range(200):
        if not world.in_flight:
            break
        await asyncio.sleep(0)
    need(not world.in_flight, "steps live on", world.in_flight)
    need(
        not isinstance(ending, (Mismatch, Spinning, MisuseEnding, Interrupted)),
        "broken",
        type(ending).__name__,
        getattr(ending, "error", None),
    )
    if isinstance(ending, Stuck):
        world.judge_stuck(activation)
        need(not world.bad, *(world.bad[0] if world.bad else ()))
    leaked = asyncio.all_tasks(activation.body)  # type: ignore[arg-type]
    need(not leaked, "leaked branches", leaked)
    return Played(told(ending), room.trace if room else [], marks, world, count, world.rests)


def _jump(world: World, rest: Rest, activation: Activation | None) -> bool:
    """Nothing happens until the next event from outside. False: nothing ever does."""
    ahead = [message.at for message in world.messages if message.at > world.now]
    ends = [families.end_of(record) for record in world.durable if record.kind is RecordKind.START]
    ahead += [end.at for end in ends if end.at > world.now]
    if rest.until is not None:
        ahead.append(rest.until)
    if not ahead:
        if activation is not None and not world.messages:
            world.now += SECOND
        return False
    late = world.random.randrange(30) * SECOND if world.random.random() < 0.3 else 0
    world.now = max(world.now, min(ahead)) + late
    if activation is not None:
        activation.news()
    return True


def messages_of(seed: int) -> list[Signal]:
    """The signals that a program is sent."""
    draw = random.Random(seed * 7 + 1)
    instants = sorted(STARTED + draw.randrange(120) * SECOND for _ in range(draw.choice([0, 2, 6])))
    return [
        Signal(name=draw.choice("xy"), seq=number, payload=str(number), at=at) for number, at in enumerate(instants, 1)
    ]


def disturbance_of(seed: int) -> Disturbance:
    """A third of the programs is cancelled or runs out of time at some moment."""
    draw = random.Random(seed * 13 + 5)
    return (draw.choice(["cancel", "cancel", "timeout"]), draw.randrange(1, 150)) if draw.random() < 0.35 else None


def difference(one: Sequence[Any], other: Sequence[Any]) -> object:
    """Where two traces part."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index, left, right
    return len(one), len(other), list(one[len(other) :] or other[len(one) :])[:1]


@dataclasses.dataclass
class Totals:
    """What was done."""

    programs: int = 0
    records: int = 0
    crashes: int = 0
    activations: int = 0
    endings: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Of the records."""


async def replayed(live: Played, tree: programs.Node, messages: Sequence[Signal], seed: int, label: str) -> None:
    """The whole journal again: the same result and trace, nothing executed, nothing written."""
    records = list(live.world.durable)
    at = records[-1].at if records else STARTED
    again = await play(tree, records, seed, messages, now=at, cancelled=live.world.cancelled)
    need(again.ending == live.ending, f"{label}: another ending", live.ending, again.ending)
    need(again.trace == live.trace, f"{label}: another trace", difference(live.trace, again.trace))
    need(not again.world.executed, f"{label}: steps were executed", dict(again.world.executed))
    need(again.world.durable == records, f"{label}: the journal grew")


async def check_seed(
    seed: int, totals: Totals, *, crash_points: int | None = None, draw: type[programs.Draw] = programs.Draw
) -> Played:
    """Live, then a crash after every durable write, each continued and replayed."""
    tree = draw(seed).tree()
    messages, disturbance = messages_of(seed), disturbance_of(seed)
    live = await play(tree, (), seed * 1_000 + 1, messages, disturbance=disturbance)
    records = list(live.world.durable)
    totals.programs += 1
    totals.records += len(records)
    totals.activations += live.activations
    totals.kinds.update(str(record.kind) for record in records)
    totals.endings[live.ending.split()[0]] += 1
    # What ends for ever at rest has no ending to compare; its trace is compared like any other.
    await replayed(live, tree, messages, seed, "replay")
    points = list(range(len(records) + 1))
    if crash_points is not None and len(points) > crash_points:
        points = sorted(random.Random(seed).sample(points, crash_points))
    for crash in points:
        totals.crashes += 1
        kept = records[:crash]
        chance = random.Random(seed * 100_003 + crash)
        at = kept[-1].at if kept else STARTED
        late = chance.choice([0, 0, 5, 50]) * SECOND
        onward = await play(tree, kept, chance.randrange(1 << 30), messages, now=at + late, disturbance=disturbance)
        last = max((r.position for r in kept if r.position is not None), default=-1)
        if last in live.marks and last in onward.marks:
            mark, own = live.marks[last], onward.marks[last]
            need(
                onward.trace[:own] == live.trace[:mark],
                "crash: another past",
                crash,
                difference(live.trace[:mark], onward.trace[:own]),
            )
        known = {record.step_id for record in kept}
        need(
            not known & set(onward.world.step_ids),
            "crash: a recorded step was executed",
            known & set(onward.world.step_ids),
        )
        await replayed(onward, tree, messages, seed, "replay after a crash")
    return live
