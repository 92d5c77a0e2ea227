"""One run of a body from the top: the pump between the journal, the body and the recorder. The engine makes one per claim.

The pump is a plain callback of the worker's loop. It drains the body, delivers one record, drains again, and so on to the frontier;
there it chooses at most one event from outside (a timer that is due, a signal, a cancel, a time-out), which becomes a record like any
other; then it starts new steps, never before the journal is exhausted. What it waits for wakes it: a record that became durable,
a step that ended, news from outside, an alarm. See `replay` for the interface, `execution` for how one step is carried out.
It never writes except through the recorder, and nothing after it was put aside.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import logging
import time
from typing import Any

from .bodyloop import BodyLoop
from .calls import Pending, Waiter, not_called, other_call
from .errors import NonDeterminismError, RegistrationError, SerializationError, SpinningError, StuckError
from .execution import Execution
from .external import Outside
from .model import Claimed, ErrorKind, Inbox, Instant, RecordKind, StepRecord
from .places import what_it_awaits
from .replay import (
    CANCEL_ID,
    TIMEOUT_ID,
    BadPayload,
    CancelledEnding,
    Ending,
    Interrupted,
    Journal,
    Mismatch,
    MisuseEnding,
    Program,
    PutAside,
    Raised,
    Recorder,
    Rest,
    Returned,
    Spinning,
    Stuck,
    TimedOutEnding,
    failed_positions,
)
from .settings import SECOND, Micros
from .threadbody import ThreadBody

logger = logging.getLogger("durable")

CHUNK_NS = 10_000_000
"""A long replay leaves the worker's loop alone after that many nanoseconds, and goes on with its next turn."""
LONGEST_ALARM = 60.0
SHORTEST_ALARM = 0.001
"""Seconds. The alarm is real time and the store's clock is not: it looks again at least every minute, at most every millisecond."""


class Activation:
    """Executes one claimed run; on the worker's loop; used once."""

    def __init__(self, program: Program, claimed: Claimed, recorder: Recorder, inbox: Inbox | None = None) -> None:
        run = claimed.run
        self.program = program
        self.run_record = run
        self.recorder = recorder
        self.codec = recorder.codec
        self.outer = asyncio.get_running_loop()
        self.journal = Journal(claimed.history)
        self.rest: Rest | None = None
        """Where the run rests now; None while it goes on."""
        self.alarm_at: Instant | None = None
        """When the store's clock must have come for the pump to find something due. `tick()` looks before the alarm does."""
        self.calls: dict[str, Waiter] = {}
        self.waits: dict[str, Waiter] = {}
        self.unstarted: dict[str, Pending] = {}
        self.started = run.started_at if run.started_at is not None else run.created_at
        self.body: BodyLoop | ThreadBody = (
            ThreadBody(self, self.outer, self.started, run.run_id)
            if program.blocking
            else BodyLoop(self, run.run_id, self.started)  # type: ignore[abstract] # the rest of it refuses, at run time
        )
        self.execution = Execution(self)
        self.outside = Outside(self, inbox)
        self.interruption: str | None = None
        """CANCEL_ID or TIMEOUT_ID once its record was delivered: from here steps start in shields only."""
        self.over = False
        self.replay_took: Micros | None = None
        """How long it took from the start to the frontier; None: it is not there yet. What a wake costs (33)."""
        self._began = time.perf_counter_ns()
        self._mismatch: NonDeterminismError | None = None
        self._ending: Ending | None = None
        self._failure: BaseException | None = None
        self._spun = False
        """The body did not come to rest, and is given its time-out before it goes on."""
        self._ended: asyncio.Future[None] = self.outer.create_future()
        self._dead = asyncio.Event()
        self._dues: list[tuple[Instant, int, Waiter]] = []
        self._count = 0
        self._queued = False
        self._apart = contextvars.Context()  # callbacks of the pump inherit nothing from whoever wakes it
        self._alarm: asyncio.TimerHandle | None = None
        self._has_slot = True
        self._going_on: asyncio.Task[None] | None = None

    # -- the engine's side --------------------------------------------------------------------------------------------------

    @property
    def history(self) -> tuple[StepRecord, ...]:
        """The journal as it stands: durable records by position, attempt rows last."""
        return self.journal.history()

    @property
    def replaying(self) -> bool:
        """The body has not yet seen all that was recorded before this activation."""
        return self.journal.cursor < self.journal.replayed

    async def run(self) -> Ending:
        """Run the body to its end, or until it is put aside. Raises only KeyboardInterrupt from the body."""
        try:
            entry = self.program.open(self, self.run_record.input, self.codec)
        except (SerializationError, RegistrationError, NonDeterminismError) as error:
            self._dead.set()
            self.over = True
            if isinstance(error, NonDeterminismError):
                return Mismatch(error)
            return BadPayload(error) if isinstance(error, SerializationError) else Raised(error, ())
        try:
            if not self.over:
                self.body.start(entry)
                self.wake()
            await self._ended
            alive = await self.execution.ended()
            if alive:
                self._warn("steps refuse to end and are left to themselves", alive)
            if not await self.body.dead():
                self._warn("does not come back and is left to itself", ["the thread of the body"])
            elif not alive:
                self._let_go()
        except asyncio.CancelledError:
            self._put_aside()
            raise
        finally:
            self._dead.set()
        if self._failure is not None:
            raise self._failure
        assert self._ending is not None
        return self._ending

    def ask_cancel(self, reason: str) -> None:
        """A cancel was asked for; it is delivered at the frontier (43). Ignored past the pivot. The first ask counts."""
        if not self.over:
            self.outside.ask_cancel(reason)
            self.wake()

    def time_out(self, kind: str) -> None:
        """The deadline or the cap of one execution has passed; delivered at the frontier."""
        if not self.over:
            self.outside.time_out(kind)
            self.wake()

    def news(self) -> None:
        """The inbox may have news: it is read again if the body waits for something that comes from there, or rests."""
        if not self.over:
            self.outside.stale = True
            self.wake()

    def tick(self) -> None:
        """The store's clock may have moved (a manual clock in tests)."""
        self.wake()

    async def set_aside(self) -> None:
        """Put the body aside (28a). Returns when it is dead or dropped and its steps have ended."""
        self._put_aside()
        await self._dead.wait()

    def _let_go(self) -> None:
        """Nothing of it lives: cut the circles of references, so that all of it goes now and not when the collector comes round."""
        for part in (self.body, self.execution, self.outside):
            part.let_go()

    def _put_aside(self) -> None:
        if not self.over:
            self._end_soon(PutAside())

    # -- the body's side (bodyloop.Host) --------------------------------------------------------------------------------------

    def registered(self, waiter: Waiter, name: str | None) -> None:
        """A call is made: it gets its id, and what the journal holds under that id must be the same call (R6, R7).

        Without a name it has its id already: the end of a child, an item of a map."""
        journal = self.journal
        scope = self.body.scope()
        if name is not None:
            waiter.step_id = scope.step_id(name)
        step_id = waiter.step_id
        waiter.seen = journal.seen
        waiter.order = self._count = self._count + 1
        record = journal.by_id.get(step_id)
        self.calls[step_id] = waiter
        if record is None:
            if waiter.kind in _WAITS:
                self.waits[step_id] = waiter
                if waiter.due is not None:
                    heapq.heappush(self._dues, (waiter.due, waiter.order, waiter))
                if waiter.kind is RecordKind.SIGNAL:
                    self.outside.listen(waiter)
                elif waiter.kind is RecordKind.CHILD:
                    self.outside.expect(waiter)
            elif isinstance(waiter, Pending):
                self.unstarted[step_id] = waiter
                if name is not None:
                    waiter.shielded = scope.shields > 0
                if waiter.context is None:  # the user's context variables flow into the step, never back (R10)
                    waiter.context = contextvars.copy_context()
        elif record.kind is not waiter.kind or record.digest != waiter.digest:
            self._mismatch = self._mismatch or other_call(record, waiter, self.run_record.name)

    def dropped(self, waiter: Any) -> None:
        """The body gave a call up: nothing is recorded; a step in flight is cancelled, once (R12)."""
        step_id = waiter.step_id
        if self.waits.get(step_id) is waiter:
            del self.waits[step_id]
            self.outside.expected.pop(step_id, None)
        if self.unstarted.get(step_id) is waiter:
            del self.unstarted[step_id]
        if isinstance(waiter, Pending):
            self.execution.give_up(waiter)

    def unhandled(self, context: dict[str, Any]) -> None:
        """What asyncio reports of the body: passed on, but silent in replay and when the body is torn down."""
        if not (self.over or self.replaying):
            self.outer.call_exception_handler(context)

    # -- the pump ---------------------------------------------------------------------------------------------------------------

    def wake(self, *_: object) -> None:
        """Run the pump in the next turn of the worker's loop; at most one is queued."""
        if not (self._queued or self.over):
            self._queued = True
            self.outer.call_soon(self._pump, context=self._apart)

    def _pump(self) -> None:
        self._queued = False
        if self.over:
            return
        try:
            if self.rest is not None:
                self._look_up()
            elif self._going_on is None and self._deliver():
                self._proceed()
        except Exception as error:  # noqa: BLE001 - a callback has no caller: unseen, the run would be held for ever
            self.fault(error)

    def _deliver(self) -> bool:
        """Drain, deliver one record, drain, to the frontier. False: it is over, or goes on later (R13, pump steps 1 to 3)."""
        journal, body = self.journal, self.body
        until = 0
        while True:
            try:
                if not self._spun:
                    body.drain()
            except SystemExit:
                continue  # kept by its task: the body's failure, or its branch's
            except SpinningError as error:
                if not self._must_undo():
                    self._end(Spinning(error))
                    return False
                self._spun = True
                self.outside.time_out(ErrorKind.SPINNING.value, str(error))
            except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt in a branch: not the run's failure, the worker's
                self.fault(error)
                return False
            if self._mismatch is not None or body.poison is not None or body.done:
                self._finish()
                return False
            if body.busy:
                return False
            if journal.cursor == len(journal.records):
                return True
            if not until:
                until = time.perf_counter_ns() + CHUNK_NS
            elif time.perf_counter_ns() > until:
                self.wake()
                return False
            if not self._deliver_one(journal.records[journal.cursor]):
                self._finish()
                return False

    def _deliver_one(self, record: StepRecord) -> bool:
        journal, body = self.journal, self.body
        waiter = self.calls.pop(record.step_id, None)
        if waiter is None and record.step_id not in (CANCEL_ID, TIMEOUT_ID):
            self._mismatch = not_called(record, self.calls, self.run_record.name)
            return False
        journal.deliver(record)
        self._spun = False
        body.now = max(body.now, record.at)
        if waiter is None:
            self.interruption = record.step_id
            self.outside.delivered(record)
            why = f": {self.outside.cancel_reason}" if self.outside.cancel_reason else ""
            body.interrupt(f"the run is cancelled{why}" if record.step_id == CANCEL_ID else "the run has timed out")
            return True
        if record.kind is RecordKind.PIVOT:
            self.outside.refused = True
        if record.kind in _WAITS:
            self.waits.pop(record.step_id, None)
            self.outside.expected.pop(record.step_id, None)
        waiter.fire(record)
        return True

    def _proceed(self) -> None:
        """At the end of what is durable: an event from outside, or new steps, or rest (pump steps 4 to 7)."""
        if self._spun:
            self.outside.give_up()  # nothing else is begun or chosen; what is in flight wakes the pump
            return
        if self.replay_took is None:
            self.replay_took = (time.perf_counter_ns() - self._began) // 1_000
        event = None if self.outside.committing else self.outside.choose()
        if event is not None and self.journal.settled:
            self.outside.commit(event)
        elif event is None and not (self.outside.committing or self.outside.withheld):
            self._start()
        # With an event at hand but records in flight no step is started: they land, and the event comes first.
        if self.over or self._queued or self.unstarted:
            return
        if self.execution.busy or self.outside.busy or not self.journal.settled:
            if self._dues or self._alarm is not None or self.execution.backing_off:
                self._arm(self.next_due())
        elif self.waits or self.execution.backing_off:
            self._come_to_rest()
        else:
            error = StuckError(f"the run waits for what nothing can deliver: {what_it_awaits(self.body)}")
            if self._must_undo():
                self.outside.time_out(ErrorKind.STUCK.value, str(error))
                self.wake()
            else:
                self._end(Stuck(error))

    def _must_undo(self) -> bool:
        """It can not go on, but has done what is to be undone: it is interrupted like a run out of time, so that it can (49)."""
        kinds = {record.kind for record in self.journal.records}
        return self.interruption is None and RecordKind.COMPENSATION in kinds and RecordKind.PIVOT not in kinds

    def _start(self) -> None:
        if self.execution.backing_off and self.execution.due_again():
            self.execution.resume()
        if self.unstarted:
            starting, self.unstarted = self.unstarted, {}
            for call in starting.values():
                self.execution.start(call)

    def next_due(self) -> Instant | None:
        """The earliest instant at which a wait ends by itself or a step is tried again."""
        top = self.earliest_wait()
        again = self.execution.next_attempt()
        return again if top is None or top.due is None else top.due if again is None else min(top.due, again)

    def earliest_wait(self) -> Waiter | None:
        """The open wait that is due first; of those due together the one that was made first."""
        dues = self._dues
        while dues and self.waits.get(dues[0][2].step_id) is not dues[0][2]:
            heapq.heappop(dues)
        return dues[0][2] if dues else None

    def _arm(self, due: Instant | None) -> None:
        self.alarm_at = due
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if due is not None:
            left = (due - self.recorder.clock()) / SECOND
            self._alarm = self.outer.call_later(min(max(left, SHORTEST_ALARM), LONGEST_ALARM), self.wake)

    # -- rest -------------------------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        self.rest = rest = self.outside.rest(self.next_due())
        self._arm(rest.until)
        self._has_slot = False
        self.recorder.give_slot(rest)

    def _look_up(self) -> None:
        """Something woke a run at rest: does it go on?"""
        if self.outside.stale and not self.outside.reading:
            self.outside.read()
        if self.outside.choose() is not None or self.execution.due_again():
            self.rest = None
            self._arm(None)
            self._going_on = self.outer.create_task(self._go_on())
            if self._going_on.done():  # eager tasks outside: there was a slot at once
                self._going_on = None
        elif self.rest is not None:
            if not self.outside.reading and self.rest.wake_seq != self.outside.wake_seq:
                self.rest = self.outside.rest(self.rest.until)
            self._arm(self.rest.until)

    async def _go_on(self) -> None:
        try:
            await self.recorder.take_slot()
            self._has_slot = True
        except asyncio.CancelledError:
            if not self.over:
                raise
        except Exception as error:  # noqa: BLE001 - whatever the engine says: it is its error, not the run's
            self.interrupt(error)
        finally:
            self._going_on = None
            if not self.over:
                self.execution.resume()
                self.wake()

    # -- the end ----------------------------------------------------------------------------------------------------------------

    def interrupt(self, error: Exception) -> None:
        """The recorder gave up: nothing more can be written."""
        if not self.over:
            self._end_soon(Interrupted(error))

    def fault(self, error: BaseException) -> None:
        """Something in here raised that should not have: `run()` raises it, nothing is recorded any more."""
        self._failure = self._failure or error
        if not self.over:
            self._end_soon(PutAside())

    def _finish(self) -> None:
        """The body is over, or can not go on: which ending is it?"""
        body, journal = self.body, self.journal
        if body.poison is not None:
            self._end(MisuseEnding(body.poison))
            return
        if self._mismatch is None and body.done and journal.cursor < len(journal.records):
            unasked = next((r for r in journal.records[journal.cursor :] if r.step_id not in self.calls), None)
            if unasked is not None:
                self._mismatch = not_called(unasked, self.calls, self.run_record.name, returned=True)
        if self._mismatch is not None:
            self._end(Mismatch(self._mismatch))
            return
        value, error = body.outcome()
        if error is not None:
            self._end(Raised(error, failed_positions(error)))
        elif self.interruption is not None or self.outside.cancel_open:
            self._end(Returned("null"))
        else:
            try:
                self._end(Returned(self.program.encode_result(value, self.codec)))
            except SerializationError as refused:
                self._end(BadPayload(refused))
            except RegistrationError as undeclared:
                self._end(Raised(undeclared, ()))

    def _end(self, ending: Ending) -> None:
        if self.over:
            return
        self._begin_end(self._as_interrupted(ending))
        self._tear_down()

    def _end_soon(self, ending: Ending) -> None:
        """From a task: nothing starts from now on, and the body is torn down from a plain callback, as it is drained."""
        self.body.closed = True
        self._begin_end(ending)
        self.outer.call_soon(self._tear_down, context=self._apart)

    def _as_interrupted(self, ending: Ending) -> Ending:
        """A cancel or time-out that was delivered decides, whatever the body made of it; so does an ask that is found now (44)."""
        if isinstance(ending, (Mismatch, MisuseEnding, PutAside, Interrupted)):
            return ending
        error = getattr(ending, "error", None)
        if self.interruption == TIMEOUT_ID:
            return TimedOutEnding(self.outside.timeout_kind, error, self.outside.timeout_message)
        if self.interruption == CANCEL_ID or self.outside.cancel_open:
            return CancelledEnding(self.outside.cancel_reason, error)
        return ending

    def _begin_end(self, ending: Ending) -> None:
        self.over = True
        self.rest = None
        self._ending = ending
        if self._alarm is not None:
            self._alarm.cancel()
        if self._going_on is not None:
            self._going_on.cancel()
        self.outside.stop()

    def _warn(self, what: str, whom: list[str]) -> None:
        logger.warning("%s %s: %s: %s", self.run_record.name, self.run_record.run_id, what, ", ".join(whom[:5]))

    def _tear_down(self) -> None:
        """Unfinished branches are cancelled with the context closed, runners are cancelled (28, 28a, R14, R15)."""
        try:
            self.execution.stop()
            left_over = self.body.left_over() if isinstance(self._ending, Returned) else []
            dropped = self.body.close_down(self.recorder.settings.teardown_rounds)
            if left_over:
                self._warn("returned with branches left; they were cancelled", left_over)
            if dropped:
                self._warn("left branches that refuse to end; they were dropped", dropped)
        except Exception as error:  # noqa: BLE001 - as in the pump
            self.fault(error)
        if not self._ended.done():
            self._ended.set_result(None)


_WAITS = frozenset({RecordKind.TIMER, RecordKind.SIGNAL, RecordKind.CHILD})
