"""One claim to one outcome: runs the body of a claimed run and carries out how the run leaves this worker.

The worker makes a `Running` for each claim and awaits `run()` in one task. A `Running` is the activation's `Recorder` and the
lease's `Listener`. What an ending means is decided as a value in `outcomes.py`, and written once, fenced, by the journal's settle
lane. What the store decides (children, dependents, permits, deadlines in the queue) is not repeated here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from ..activation import Activation
from ..clock import boottime
from ..codec import Codec
from ..errors import LeaseLost, NotFound, StoreUnavailable
from ..events import BodyAbandoned, CodeChanged, EngineFault, Events, LeaseLapsed, RunMismatched, RunRested, RunSettled
from ..function import Function
from ..graph import results_wanted, with_results
from ..model import (
    Cancelled,
    Claimed,
    Completed,
    ErrorKind,
    Failed,
    HandedBack,
    Inbox,
    Instant,
    Json,
    Lease,
    NewRecord,
    Outcome,
    Retry,
    RunRecord,
    StepRecord,
    Suspended,
)
from ..protocol import Store
from ..replay import Ending, Interrupted, Mismatch, PutAside, Rest
from ..settings import SECOND, Micros, Settings
from .journal import Journal, Lane
from .leases import Hold, Leases
from .outcomes import cancelled_by_ask, failure_of, given_up, growing_delay, outcome_of, time_limit
from .slots import Slots, Threads

TEARDOWN_LIMIT: Micros = 10 * SECOND
"""How long a body that is put aside may take to die before it is left to itself."""

ASK_AGAIN = 0.2
"""Seconds until a store that gave no answer is asked again."""

Why: TypeAlias = Literal["suspend", "hand_back", "lost"]


class Host(Protocol):
    """What a running body needs from its worker."""

    store: Store
    settings: Settings
    codec: Codec
    events: Events
    journal: Journal
    leases: Leases
    slots: Slots
    threads: Threads
    inboxes: Lane[Lease, Inbox | None]
    transactions: asyncio.Semaphore
    lease: Micros
    max_reclaims: int
    ended: bool
    """The grace period is over: bodies are handed back."""

    def rests(self, running: Running, rest: Rest | None) -> bool:
        """The run came to rest, or (None) goes on. True: it should leave memory at once."""
        ...

    def recorded(self, running: Running) -> None:
        """The run made its first record under this claim."""
        ...

    def due(self, instant: Instant) -> None:
        """Something is due then: the promotion should not sleep past it."""
        ...


class Running:
    """One run in hand. On the worker's loop."""

    def __init__(
        self, host: Host, claimed: Claimed, function: Function[..., Any], hold: Hold, slots: Sequence[Slots]
    ) -> None:
        self.host = host
        self.claimed = claimed
        self.function = function
        self.hold = hold
        hold.listener = self
        self.held = hold.valid
        """Past the end of the lease no step is begun (14)."""
        self.codec = host.codec
        self.settings = host.settings
        self.alone = claimed.run.reclaims >= 2
        self.handed_back = False
        self.abandoned = False
        self.resting = False
        self.since = boottime()
        self._task: asyncio.Task[Any] | None = None
        self._activation: Activation | None = None
        self._aside: asyncio.Task[None] | None = None
        self._why: Why | None = None
        self._rest: Rest | None = None
        self._slots = (
            slots  # its queue's own, if that has a limit in this worker, before the worker's: it waits for both
        )
        self._has_slot = True
        self._settling = False
        self._cancel = claimed.run.cancel_requested_at is not None and claimed.run.cancel_refused_at is None
        self._timers: list[asyncio.TimerHandle] = []
        self._park: asyncio.TimerHandle | None = None

    # -- from the claim to the outcome ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the body, settle, leave. An error of ours is reported and hands the run back; it never reaches the worker."""
        self._task = asyncio.current_task()
        try:
            await self._live()
        except asyncio.CancelledError:
            if not self.abandoned:
                raise
        except (
            LeaseLost,
            StoreUnavailable,
        ) as error:  # the store is asked until the lease has ended: then it is lost, too
            self.hold.lose(error.message)
            self._report(None, "lost")
        except Exception as error:  # noqa: BLE001 -- a defect of ours must not take the worker with it
            self.host.events.emit(
                EngineFault(where=f"run {self.hold.lease.run_id}", error=f"{type(error).__name__}: {error}")
            )
            await self._settle(HandedBack(after=growing_delay(self.claimed.run.attempts)))
        finally:
            self._disarm()
            self._stop_resting()
            self._give_slot()
            self.host.leases.remove(self.hold)
            self.host.journal.forget(self.hold.lease.run_id)
            # Cut the circles: what hangs in one is freed by the collector only, and it costs a busy worker a tenth of its time.
            self.hold.listener = None
            self._activation = self._aside = self._task = None

    async def _live(self) -> None:
        claimed, inbox = self.claimed, None
        if self.host.events.wanted and claimed.history and claimed.run.fingerprint != self.function.fingerprint:
            self.host.events.emit(CodeChanged(run_id=claimed.run.run_id, name=claimed.run.name))
        if (outcome := given_up(claimed.run, claimed.history, self.host.max_reclaims)) is not None:
            self._report(outcome, await self._settle(outcome))
            return
        try:
            if wanted := results_wanted(claimed.run):
                claimed = dataclasses.replace(claimed, run=with_results(claimed.run, await self._read(wanted)))
        except NotFound as error:
            lost = Failed(failure=failure_of(error, ErrorKind.PAYLOAD))
            self._report(lost, await self._settle(lost))
            return
        while True:
            if not self.hold.valid():
                self.hold.lose("it had ended before the body began")
                self._report(None, "lost")
                return
            ending = await self._execute(claimed, inbox)
            self._give_slot()  # a body that is over needs none: the next claim goes beside this settle
            outcome = self._decide(ending, claimed)
            if outcome is None or self.hold.gone is not None:  # the first question of semantics 47
                self._report(outcome, "lost")
                return
            if isinstance(outcome, Cancelled) and not self.interrupted:  # nothing was delivered, so nobody has read why
                outcome = cancelled_by_ask((await self.inbox()).cancel_reason)
            answer = await self._settle(outcome)
            if answer == "woken" and isinstance(outcome, Suspended):
                # Something came while the body was put aside: read it, and go on at once, without another claim (5, 31).
                inbox = await self.inbox()
                assert self._activation is not None
                claimed = dataclasses.replace(claimed, history=self._activation.history)
                await self._take_slot()
                continue
            if answer == "woken":  # a cancel was asked for and is not refused: it decides (43, 47)
                outcome = cancelled_by_ask((await self.inbox()).cancel_reason)
                answer = await self._settle(outcome)
            self._report(outcome, answer)
            return

    async def _execute(self, claimed: Claimed, inbox: Inbox | None) -> Ending:
        activation = self._activation = Activation(self.function, claimed, self, inbox)
        self._why = self._aside = self._rest = None
        if self._cancel or (inbox is not None and inbox.cancel_requested):
            self._cancel = True
            activation.ask_cancel("")
        self._arm(activation)
        if self.host.ended:
            self.set_aside("hand_back")
        try:
            return await activation.run()
        finally:
            self._disarm()
            self._stop_resting()

    def _decide(self, ending: Ending, claimed: Claimed) -> Outcome | None:
        """The outcome of an ending; None: the lease is lost and nothing is written."""
        if isinstance(ending, PutAside):
            if self._why == "suspend" and self._rest is not None:
                rest = self._rest
                return Suspended(
                    until=rest.until,
                    waiting_for=rest.waiting_for,
                    wake_seq=rest.wake_seq,
                    wake_after=rest.wake_after,
                    wake_delay=rest.wake_delay,
                    wake_on_failure=rest.wake_on_failure,
                )
            if self._why == "hand_back":
                self.handed_back = True
                return HandedBack()
            return None
        if isinstance(ending, Interrupted) and isinstance(ending.error, (LeaseLost, StoreUnavailable)):
            self.hold.lose(ending.error.message)
            return None
        if isinstance(ending, Mismatch):
            self.host.events.emit(
                RunMismatched(run_id=claimed.run.run_id, name=claimed.run.name, explanation=str(ending.error))
            )
        history = self._activation.history if self._activation is not None else claimed.history
        return outcome_of(
            ending,
            run=claimed.run,
            history=history,
            declared=self.function.retry,
            cancel_asked=self._cancel,
            now=self.host.store.clock(),
            mismatch_limit=self.settings.mismatch_limit,
        )

    async def _settle(self, outcome: Outcome) -> str:
        if self.hold.gone is not None:
            return "lost"
        self._settling = True
        try:
            answer = await self.host.journal.settle(self.hold, outcome)
        finally:
            self._settling = False
        if answer == "landed":
            until = outcome.until if isinstance(outcome, Suspended) else None
            if isinstance(outcome, (Retry, HandedBack)) and outcome.after:
                until = self.host.store.clock() + outcome.after
            if until is not None:
                self.host.due(until)
        return answer

    def _report(self, outcome: Outcome | None, answer: str) -> None:
        if not self.host.events.wanted:
            return
        run = self.claimed.run
        failure = None if isinstance(outcome, (Completed, Suspended, type(None))) else outcome.failure
        self.host.events.emit(
            RunSettled(
                run_id=run.run_id,
                name=run.name,
                tenant=run.tenant,
                outcome=type(outcome).__name__ if outcome is not None else "None",
                answer=answer,
                error_kind=failure.kind if failure is not None else None,
                took=boottime() - self.since,
            )
        )

    # -- what the lease says (Listener) -----------------------------------------------------------------------------------

    def lease_lost(self, why: str) -> None:
        """Put the body aside at once; nothing is written any more (14)."""
        if self._settling:
            return  # the renewal saw the run after our own settle; its answer says what became of it
        self.host.events.emit(LeaseLapsed(run_id=self.hold.lease.run_id, why=why))
        self.set_aside("lost")

    def news(self) -> None:
        """A signal, a child's end or an ask came."""
        if self._activation is not None:
            self._activation.news()

    def cancel_asked(self) -> None:
        """An ask that is not refused (44)."""
        self._cancel = True
        if self._activation is not None:
            self._activation.ask_cancel("")

    # -- putting aside ----------------------------------------------------------------------------------------------------

    def set_aside(self, why: Why) -> None:
        """Put the body aside (28a), once; a lost lease is the strongest reason."""
        if self._why is None or why == "lost":
            self._why = why
        if self._aside is None and self._activation is not None:
            self._aside = asyncio.get_running_loop().create_task(self._put_aside(self._activation))

    async def _put_aside(self, activation: Activation) -> None:
        try:
            async with asyncio.timeout(TEARDOWN_LIMIT / SECOND):
                await activation.set_aside()
        except TimeoutError:
            self.abandon("a step of it does not end")

    def abandon(self, why: str) -> None:
        """Leave it to itself: nothing is settled, and the sweep returns the run when its lease has lapsed."""
        if self.abandoned or self._task is None:
            return
        self.abandoned = True
        self.host.events.emit(BodyAbandoned(run_id=self.hold.lease.run_id, name=self.function.name, why=why))
        self.hold.gone = self.hold.gone or why
        self._task.cancel()

    @property
    def interrupted(self) -> bool:
        """A cancel or a time-out was delivered. What the body waits for after that, in a shield, it waits for in this worker: over an
        ask the store lands no suspension (43), and none lasts past a deadline (12)."""
        return self._activation is not None and self._activation.interruption is not None

    def suspend(self) -> None:
        """Let a run that rests leave memory (30); one that was interrupted goes to another worker."""
        rest = self._activation.rest if self._activation is not None else None
        if self.resting and rest is not None and self._aside is None:
            self._rest = rest
            self.set_aside("hand_back" if self.interrupted else "suspend")

    # -- what the activation asks for (Recorder) --------------------------------------------------------------------------

    def clock(self) -> Instant:
        """The store's clock as this process estimates it."""
        return self.host.store.clock()

    def append(self, record: NewRecord) -> Awaitable[StepRecord]:
        """Durable when it has been awaited."""
        if self.hold.progress is not None:
            record = dataclasses.replace(record, progress=self.hold.progress)
            self.hold.progress = None
        if self.alone:
            self.alone = False
            self.host.recorded(self)
        return self.host.journal.append(self.hold, record)

    async def transaction(self, work: Callable[[Any], Awaitable[NewRecord]], timeout: Micros) -> StepRecord:
        """Exactly once (26)."""
        async with self.host.transactions:
            answer = await self.host.store.transaction(
                self.hold.lease, work, timeout=min(timeout, self.host.lease // 3)
            )
        if answer.record is None:
            self.hold.lose("fenced out at a transaction")
            raise LeaseLost(f"run {self.hold.lease.run_id}: another worker holds it now; the transaction left nothing")
        return answer.record

    async def _read(self, run_ids: Sequence[str]) -> Sequence[RunRecord | None]:
        """Other runs of its tenant. Asks again, while the lease lasts, where the store gives no answer."""
        while True:
            try:
                return await self.host.store.get(run_ids, scope=self.claimed.run.tenant)
            except StoreUnavailable:
                if not self.hold.valid():
                    raise
                await asyncio.sleep(ASK_AGAIN)

    async def inbox(self) -> Inbox:
        """What came from outside."""
        lease = self.hold.lease
        found = await self.host.inboxes.put(lease.run_id, lease, alive=self.hold.valid)
        if found is None:
            self.hold.lose("fenced out at a reading of its inbox")
            raise LeaseLost(f"run {lease.run_id}: another worker holds it now")
        if found.wake_seq > self.hold.wake_seq:
            self.hold.wake_seq = found.wake_seq
        if found.cancel_requested and not self._cancel:
            self.cancel_asked()
        return found

    async def look(self, run_id: str) -> RunRecord | None:
        """Another run of its tenant."""
        return (await self.host.store.get([run_id], scope=self.claimed.run.tenant))[0]

    def progress(self, progress: Json) -> None:
        """Kept for the next renewal or append."""
        self.hold.progress = progress

    def run_blocking(self, call: Callable[[], Any]) -> Awaitable[Any]:
        """In the pool of threads."""
        return self.host.threads.run(call)

    def give_slot(self, rest: Rest) -> None:
        """The run is at rest (30)."""
        self._give_slot()
        self.resting = True
        if self.host.events.wanted:
            self.host.events.emit(
                RunRested(run_id=self.hold.lease.run_id, until=rest.until, waiting_for=rest.waiting_for)
            )
        crowded = self.host.rests(self, rest)
        if self.interrupted:
            return
        loop = asyncio.get_running_loop()
        if crowded or (rest.until is not None and rest.until - self.clock() > self.settings.park_after):
            self._park = loop.call_later(0, self.suspend)
        else:
            self._park = loop.call_later(self.settings.park_after / SECOND, self.suspend)

    async def take_slot(self) -> None:
        """The run goes on."""
        self._stop_resting()
        await self._take_slot()

    # -- slots and timers -------------------------------------------------------------------------------------------------

    def _stop_resting(self) -> None:
        if self.resting:
            self.resting = False
            self.host.rests(self, None)
        if self._park is not None:
            self._park.cancel()
            self._park = None

    def _give_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            for slots in self._slots:
                slots.give()

    async def _take_slot(self) -> None:
        if self._has_slot:
            return
        taken: list[Slots] = []
        try:
            for slots in self._slots:
                await slots.take()
                taken.append(slots)
        except BaseException:
            for slots in taken:
                slots.give()
            raise
        self._has_slot = True

    def _arm(self, activation: Activation) -> None:
        """The cap of one execution, counted from the claim, and the deadline (12)."""
        run = self.claimed.run
        loop = asyncio.get_running_loop()
        cap = time_limit(run, self.function.timeout)
        if cap is not None:
            left = cap - (boottime() - self.since)
            self._timers.append(loop.call_later(max(left, 0) / SECOND, activation.time_out, "timeout"))
        if run.compensating and run.cancel_refused_at is None and run.reclaims > self.host.max_reclaims:
            activation.time_out(
                ErrorKind.RECLAIM_LIMIT.value
            )  # the sweep left it, so that what it has done is undone (49)
        if run.deadline_at is not None:
            left = run.deadline_at - self.clock()
            self._timers.append(loop.call_later(max(left, 0) / SECOND, activation.time_out, "deadline"))

    def _disarm(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()


__all__ = ["Host", "Running"]
