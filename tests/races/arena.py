"""Two processes with one SQLite file and one clock, and pairs of conflicting operations that they carry out at the same moment.

`test_races_*.py` name the pairs: a function that makes a stage ready and gives the two calls and a check. Each pair runs in both
orders one after the other, inside one process at once (where the store may put both into one transaction), and then many times from
both processes, started at one instant of the monotonic clock with a random head start for either. Every stage has a tenant and a
queue of its own, so that one file serves all. A second store in the same process would share the connections of the first: hence
the other process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import UUID

from durable import model as m
from durable.errors import Conflict, NotFound
from durable.protocol import Store
from durable.settings import Settings
from durable_sqlite import backend

TRIALS = int(os.environ.get("DURABLE_RACE_TRIALS", "20"))
SECOND = 1_000_000
LEASE = 10 * SECOND
FUNCTIONS = (("f", None), ("g", None))


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a store that can travel to the other process."""

    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]

    async def make(self, store: Store) -> Any:
        """The answer, or the refusal; any other error is the test's to fail with."""
        try:
            return await getattr(store, self.method)(*self.args, **self.options)
        except (Conflict, NotFound) as error:
            return type(error)


def call(method: str, *args: Any, **options: Any) -> Call:
    return Call(method, args, options)


Check = Callable[[Any, Any], None]
Pair = Callable[["Stage"], tuple[Call, Call, Check]]


async def _make_at(store: Store, calls: Sequence[Call], instant: int) -> list[Any]:
    while time.monotonic_ns() < instant:
        pass
    return await asyncio.gather(*(one.make(store) for one in calls))


async def open_sqlite(url: str, clock: Callable[[], int]) -> Store:
    """How the stores of an arena are opened; another backend's tests bring their own."""
    return await backend.open(url, settings=Settings(), clock=clock)


Opener = Callable[[str, Callable[[], int]], Coroutine[Any, Any, Store]]


def _serve(pipe: Connection, url: str, clock: Any, opener: Opener) -> None:
    """The other process: opens the store, then answers batches of calls until the pipe ends."""

    async def serve() -> None:
        store = await opener(url, lambda: int(clock.value))
        pipe.send("open")
        while (request := pipe.recv()) is not None:
            try:
                pipe.send(await _make_at(store, *request))
            except Exception as error:
                pipe.send(error)
        await store.close()

    asyncio.run(serve())


class Arena:
    """The near store on a loop of its own, the far one behind a pipe."""

    def __init__(
        self, path: Path, url: str | None = None, opener: Opener = open_sqlite, *, head_start: int = 500_000
    ) -> None:
        self.head_start = head_start
        self.path, url = path, url or f"sqlite:///{path}"
        context = multiprocessing.get_context("spawn")
        self.clock = context.Value("q", 1_700_000_000 * SECOND)
        self.loop = asyncio.new_event_loop()
        self.near = self.do(opener(url, self.now))
        self.pipe, other = context.Pipe()
        self.far = context.Process(target=_serve, args=(other, url, self.clock, opener), daemon=True)
        self.far.start()
        other.close()
        assert self._answer() == "open"
        self.random = random.Random(7)
        self.stages = 0

    def now(self) -> int:
        return int(self.clock.value)

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.pipe.send(None)
        self.far.join(30)
        self.do(self.near.close())
        self.loop.close()

    def race(self, near: Sequence[Call], far: Sequence[Call]) -> tuple[list[Any], list[Any]]:
        """Both batches at one instant, each with a head start of at most `head_start` nanoseconds."""
        start = time.monotonic_ns() + 300_000
        self.pipe.send((far, start + self.random.randrange(self.head_start)))
        mine = self.do(_make_at(self.near, near, start + self.random.randrange(self.head_start)))
        return mine, self._answer()

    def _answer(self) -> Any:
        if not self.pipe.poll(60):
            raise AssertionError("the other process does not answer")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def trials(self, pair: Pair, count: int = TRIALS, *, audits: bool = True) -> None:
        """Both orders, both at once in one process, and `count` times both at once in two processes, either of which gets either call.
        An audit after each; without `audits` one after all of them, of everything that is there."""
        for trial in range(-3, count):
            stage = Stage(self)
            one, two, check = pair(stage)
            if trial == -3:
                first = self.do(one.make(self.near))
                answers = first, self.race([], [two])[1][0]
            elif trial == -2:
                second = self.race([], [two])[1][0]
                answers = self.do(one.make(self.near)), second
            elif trial == -1:
                first, second = self.do(_make_at(self.near, [one, two], 0))
                answers = first, second
            elif trial % 2:
                others, mine = self.race([two], [one])
                answers = mine[0], others[0]
            else:
                mine, others = self.race([one], [two])
                answers = mine[0], others[0]
            check(*answers)
            if audits or trial == count - 1:
                findings = self.do(self.near.audit(scope=stage.tenant if audits else m.ALL))
                assert not list(findings), f"{findings} after {answers}"


class Stage:
    """What a pair needs to get ready: runs of a tenant and a queue that nobody else has."""

    def __init__(self, arena: Arena) -> None:
        arena.stages += 1
        self.arena, self.serial = arena, 0
        self.tenant: UUID = m.tenant_id(f"tenant {arena.stages}")
        self.queue = f"queue{arena.stages}"
        self.do, self.store = arena.do, arena.near

    def tick(self, amount: int) -> None:
        self.arena.clock.value += amount

    def name(self, letter: str) -> str:
        self.serial += 1
        return f"{letter}{self.arena.stages}-{self.serial}"

    def new(self, **values: Any) -> m.NewRun:
        run_id = self.name("r")
        given = {
            "run_id": run_id,
            "name": "f",
            "input": json.dumps(run_id),
            "seed": b"s",
            "tenant": self.tenant,
            "queue": self.queue,
        }
        return m.NewRun(**{**given, **values})

    def submit(self, count: int = 1, **values: Any) -> list[str]:
        runs = [self.new(**values) for _ in range(count)]
        self.do(self.store.enqueue(runs))
        return [run.run_id for run in runs]

    def request(self, **values: Any) -> m.ClaimRequest:
        given = {"queues": {self.queue: 100}, "functions": FUNCTIONS, "limit": 100, "lease": LEASE, "family": "x"}
        return m.ClaimRequest(**{**given, "mark": self.name("m"), "scope": self.tenant, **values})

    def claim(self, **values: Any) -> list[m.Lease]:
        return [one.lease for one in self.do(self.store.claim(self.request(**values)))]

    def held(self, **values: Any) -> m.Lease:
        """A fresh run in hand."""
        run_id = self.submit(**values)[0]
        return next(lease for lease in self.claim() if lease.run_id == run_id)

    def lapsed(self, **values: Any) -> m.Lease:
        lease = self.held(**values)
        self.tick(LEASE + 2_000)  # no less than a millisecond: MongoDB stores no smaller ones
        return lease

    def landed(self, outcome: m.Outcome, **values: Any) -> m.Lease:
        lease = self.held(**values)
        assert self.do(self.store.settle([(lease, outcome)])) == ["landed"]
        return lease

    def returned(self, swept: m.Swept) -> list[str]:
        """What a sweep returned; a run that it passed over because a commit held its row, the next one returns (3)."""
        again = self.do(self.store.sweep(scope=self.tenant, limit=10, max_reclaims=5))
        return [*swept.returned, *again.returned]

    def suspended(self, **values: Any) -> m.Lease:
        lease = self.held()
        assert self.do(self.store.settle([(lease, asleep(**values))])) == ["landed"]
        return lease

    def parent(self, count: int) -> tuple[m.Lease, list[m.Lease]]:
        """A parent and its children, all in hand."""
        lease = self.held()
        for _ in range(count):
            self.do(self.store.append([(lease, self.start(lease))]))
        return lease, self.claim()

    def start(self, lease: m.Lease) -> m.NewRecord:
        """The record that starts a child, with the child."""
        step_id = self.name("s")
        child = self.new(parent_run_id=lease.run_id, parent_step_id=step_id)
        return record(step_id, kind=m.RecordKind.START, position=self.serial, children=(child,))

    def run(self, run_id: str) -> m.RunRecord:
        found = self.find(run_id)
        assert found is not None
        return found

    def find(self, run_id: str) -> m.RunRecord | None:
        found: m.RunRecord | None = self.do(self.store.get([run_id], scope=self.tenant))[0]
        return found

    def all(self) -> list[m.RunRecord]:
        return list(self.do(self.store.find(m.RunQuery(limit=1000), scope=self.tenant)).runs)

    def journal(self, run_id: str) -> list[m.StepRecord]:
        return list(self.do(self.store.history(run_id, scope=self.tenant)))

    def inbox(self, lease: m.Lease) -> m.Inbox:
        box: m.Inbox | None = self.do(self.store.inbox([lease]))[0]
        assert box is not None
        return box


def record(step_id: str, **values: Any) -> m.NewRecord:
    given = {
        "step_id": step_id,
        "kind": m.RecordKind.STEP,
        "position": 0,
        "seen": -1,
        "digest": "d",
        "result": '{"v":1}',
    }
    return m.NewRecord(**{**given, **values})


def asleep(**values: Any) -> m.Suspended:
    return m.Suspended(**{"until": None, "waiting_for": "{}", "wake_seq": 0, **values})


DONE = m.Completed(output="1")
BROKEN = m.Failed(failure=m.Failure(message="broken"))
STOPPED = m.Cancelled(failure=m.Failure(message="asked", kind="cancelled"))
