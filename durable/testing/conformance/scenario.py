"""The words in which the suite's tests are written: start, claim, append, settle, later.

A `Scene` is one store and its harness; every test gets a fresh one. `rule` notes which rules of the contract a test shows, so that
a script can list rule → tests. Nothing here checks anything by itself, except that a claim gave the run that the test meant.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from durable.model import (
    ALL,
    Appended,
    Claimed,
    ClaimRequest,
    Completed,
    Failed,
    Failure,
    HandedBack,
    Inbox,
    Instant,
    NewRecord,
    NewRun,
    NewSignal,
    Outcome,
    Promoted,
    RecordKind,
    RunQuery,
    RunRecord,
    ScheduleSpec,
    Scope,
    Settled,
    StepRecord,
    Submitted,
    Suspended,
    Swept,
    new_run_id,
    tenant_id,
)
from durable.protocol import Store
from durable.settings import SECOND, Micros

from .harness import Harness

LEASE: Micros = 30 * SECOND
FAMILY = "3.12"
OTHER_FAMILY = "3.11"
ACME = tenant_id("acme")
BETA = tenant_id("beta")

_Test = TypeVar("_Test", bound=Callable[..., object])
_marks = itertools.count(1)


def rule(*numbers: int | str) -> Callable[[_Test], _Test]:
    """Note the rules of docs/reference/semantics.md that the test shows."""

    def note(test: _Test) -> _Test:
        test.__dict__["rules"] = tuple(str(number) for number in numbers)
        return test

    return note


def new_run(**changes: Any) -> NewRun:
    """A run of the function `work` in the queue `default`, with changes."""
    values: dict[str, Any] = {"run_id": new_run_id(), "name": "work", "input": '{"n":1}', "seed": b"0123456789abcdef"}
    return NewRun(**{**values, **changes})


def failure(message: str = "it broke", **changes: Any) -> Failure:
    """Why a run ends, as data."""
    return Failure(message=message, **changes)


def schedule(schedule_id: str = "nightly", **changes: Any) -> ScheduleSpec:
    """A schedule of the function `work`."""
    values: dict[str, Any] = {
        "schedule_id": schedule_id,
        "name": "work",
        "cron": "0 3 * * *",
        "tz": "UTC",
        "input": "{}",
        "next_fire_at": None,
    }
    return ScheduleSpec(**{**values, **changes})


class Scene:
    """One store, its harness, and short ways to say what a test does."""

    def __init__(self, store: Store, harness: Harness) -> None:
        self.store = store
        self.harness = harness

    # -- runs

    async def submit(self, **changes: Any) -> Submitted:
        """Store one run; the whole answer."""
        (answer,) = await self.store.enqueue([new_run(**changes)])
        return answer

    async def start(self, **changes: Any) -> RunRecord:
        """Store one run; the run."""
        return (await self.submit(**changes)).run

    async def get(self, run_id: str, *, scope: Scope = ALL) -> RunRecord:
        """The run as it stands now; it must be there."""
        (run,) = await self.store.get([run_id], scope=scope)
        assert run is not None, f"run {run_id} is not there"
        return run

    async def gone(self, run_id: str) -> bool:
        """Whether no scope sees the run."""
        return list(await self.store.get([run_id], scope=ALL)) == [None]

    # -- claims

    def request(self, limit: int = 1, **changes: Any) -> ClaimRequest:
        """A claim of a worker that serves the queue `default` and knows the function `work`."""
        values: dict[str, Any] = {
            "mark": f"worker/{next(_marks)}",
            "queues": {"default": limit},
            "functions": [("work", None)],
            "limit": limit,
            "lease": LEASE,
            "family": FAMILY,
            "scope": ALL,
        }
        return ClaimRequest(**{**values, **changes})

    async def claim(self, limit: int = 1, **changes: Any) -> Sequence[Claimed]:
        """One claim."""
        return await self.store.claim(self.request(limit, **changes))

    async def take(self, **changes: Any) -> Claimed:
        """Start a run and claim it, and no other."""
        run = await self.start(**changes)
        return await self.take_again(run.run_id)

    async def take_again(self, run_id: str, **changes: Any) -> Claimed:
        """Claim this run, which is pending; no other may be in front of it."""
        run = await self.get(run_id)
        values: dict[str, Any] = {"queues": {run.queue: 1}, "functions": [(run.name, run.version)]}
        claimed = await self.claim(**{**values, **changes})
        assert [one.run.run_id for one in claimed] == [run_id], f"wanted {run}, the claim gave {claimed}"
        return claimed[0]

    async def take_exactly(self, run_id: str) -> Claimed:
        """Claim this run though others of its queue may be in front of it: those are handed back."""
        run = await self.get(run_id)
        claimed = await self.claim(100, queues={run.queue: 100}, functions=[(run.name, run.version)])
        found = [one for one in claimed if one.run.run_id == run_id]
        for one in claimed:
            if one.run.run_id != run_id:
                await self.hand_back(one)
        assert len(found) == 1, f"wanted {run}, the claim gave {claimed}"
        return found[0]

    async def lapse(self) -> None:
        """Let every lease lapse."""
        await self.later(LEASE + SECOND)

    async def sweep(self, *, max_reclaims: int = 5, scope: Scope = ALL, limit: int = 100) -> Swept:
        """One sweep."""
        return await self.store.sweep(scope=scope, limit=limit, max_reclaims=max_reclaims)

    async def promote(self, *, scope: Scope = ALL, limit: int = 100) -> Promoted:
        """One promotion."""
        return await self.store.promote(scope=scope, limit=limit)

    async def mend(self, *, scope: Scope = ALL, limit: int = 100) -> int:
        """One pass of the nets."""
        return await self.store.mend(scope=scope, limit=limit)

    async def later(self, micros: Micros) -> None:
        """Time passes."""
        await self.harness.pass_time(micros)

    # -- the holder

    async def record(self, run_id: str, step_id: str, **changes: Any) -> NewRecord:
        """The next record of a run: numbered after what its journal holds."""
        history = await self.store.history(run_id, scope=ALL)
        position = 1 + max((record.position for record in history if record.position is not None), default=-1)
        values: dict[str, Any] = {
            "step_id": step_id,
            "kind": RecordKind.STEP,
            "position": None if changes.get("kind") == RecordKind.ATTEMPT else position,
            "seen": position - 1,
            "digest": "d",
            "result": '{"value":1}',
        }
        return NewRecord(**{**values, **changes})

    async def append(self, held: Claimed, step_id: str, **changes: Any) -> Appended:
        """Append one record under the fence of `held`."""
        (answer,) = await self.store.append([(held.lease, await self.record(held.run.run_id, step_id, **changes))])
        return answer

    async def settle(self, held: Claimed, outcome: Outcome) -> Settled:
        """Settle one run."""
        (answer,) = await self.store.settle([(held.lease, outcome)])
        return answer

    async def complete(self, held: Claimed, output: str = '"done"') -> None:
        """Settle it completed; it must land."""
        assert await self.settle(held, Completed(output=output)) == "landed"

    async def fail(self, held: Claimed, **changes: Any) -> None:
        """Settle it failed; it must land."""
        assert await self.settle(held, Failed(failure=failure(**changes))) == "landed"

    async def hand_back(self, held: Claimed, **changes: Any) -> None:
        """Hand it back; it must land."""
        assert await self.settle(held, HandedBack(**changes)) == "landed"

    async def suspend(self, held: Claimed, **changes: Any) -> Settled:
        """Suspend it against the wake counter of its inbox."""
        return await self.settle(held, await self.rest(held, **changes))

    async def rest(self, held: Claimed, **changes: Any) -> Suspended:
        """The suspension that matches the inbox as it is now."""
        values: dict[str, Any] = {
            "until": None,
            "waiting_for": '{"signal":"go"}',
            "wake_seq": (await self.inbox(held)).wake_seq,
        }
        return Suspended(**{**values, **changes})

    async def inbox(self, held: Claimed) -> Inbox:
        """The inbox of a run that is held."""
        (inbox,) = await self.store.inbox([held.lease])
        assert inbox is not None, "the lease is lost"
        return inbox

    # -- from outside

    async def send(self, run_id: str, name: str = "go", *, scope: Scope = ALL, **changes: Any) -> int:
        """Send a signal."""
        values: dict[str, Any] = {"run_id": run_id, "name": name, "payload": '"hello"', "dedup_id": new_run_id()}
        return await self.store.send(NewSignal(**{**values, **changes}), scope=scope)

    async def cancel(self, run_id: str, *, scope: Scope = ALL) -> bool:
        """Ask one run to stop."""
        (answer,) = await self.store.request_cancel([run_id], scope=scope)
        return answer

    async def with_children(self, count: int = 1, *, parent: Mapping[str, Any] | None = None, **child: Any) -> Family:
        """A claimed parent that has started child runs, each by a record."""
        held = await self.take(**(parent or {}))
        children: list[str] = []
        for number in range(count):
            run = new_run(**{**self.child_of(held, f"child#{number + 1}"), **child})
            answer = await self.append(held, f"child#{number + 1}", kind=RecordKind.START, children=(run,))
            assert answer.state == "appended"
            children.append(run.run_id)
        return Family(parent=held, children=children)

    def child_of(self, held: Claimed, step_id: str) -> dict[str, Any]:
        """The fields by which a run is a child of one that is held."""
        return {
            "tenant": held.run.tenant,
            "parent_run_id": held.run.run_id,
            "parent_step_id": step_id,
            "queue": "children",
        }

    # -- all that can be seen

    async def history(self, run_id: str, *, scope: Scope = ALL) -> Sequence[StepRecord]:
        """The journal of a run."""
        return await self.store.history(run_id, scope=scope)

    async def steps(self, run_id: str) -> list[str]:
        """The step ids in the journal of a run, in its order."""
        return [record.step_id for record in await self.history(run_id)]

    async def runs(self, *, scope: Scope = ALL, **query: Any) -> list[RunRecord]:
        """All runs of a listing, page by page."""
        found: list[RunRecord] = []
        cursor: str | None = None
        while True:
            values: dict[str, Any] = {"limit": 100, **query, "cursor": cursor}
            page = await self.store.find(RunQuery(**values), scope=scope)
            found += page.runs
            cursor = page.cursor
            if cursor is None:
                return found

    async def everything(self) -> dict[str, Any]:
        """All that the protocol shows of the stored rows, to be compared before and after."""
        runs = await self.runs()
        return {
            "runs": {run.run_id: _plain(run) for run in runs},
            "journals": {run.run_id: [_plain(record) for record in await self.history(run.run_id)] for run in runs},
            "schedules": [_plain(row) for row in await self.store.schedules(scope=ALL)],
            "queues": [_plain(row) for row in await self.store.queues(scope=ALL)],
            "workers": [_plain(row) for row in await self.store.workers(scope=ALL)],
        }

    def since(self, before: Instant, instant: Instant) -> bool:
        """Does it lie between that look at the store's clock and now? However long that took; a client's idea of a server's clock may be
        off by a second."""
        return before - SECOND < instant < self.store.clock() + SECOND


def _plain(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A parent in hand and the ids of the children it started."""

    parent: Claimed
    children: Sequence[str]
