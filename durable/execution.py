"""Carries out the steps of one run: each in a task of the worker's loop, its attempts, its record.

The activation starts calls here at the frontier and gives them up when the body does. A step that has its position is not cancelled
any more: its record is on its way. It never delivers a record, and starts nothing by itself but the next attempt of a step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from . import steps
from .calls import Pending
from .codec import error_data, plain, value_envelope
from .errors import LeaseLost, WorkerStopped
from .model import Instant, NewRecord, RecordKind
from .settings import SECOND, Micros
from .threadbody import ThreadBody

if TYPE_CHECKING:
    from .activation import Activation
    from .steps import StepPlan


LONGEST_DEATH = 10.0
"""Seconds that steps may take to die once their run is over."""


async def pause(span: Micros) -> None:
    """A short back-off, in memory. Simulations put their own in its place."""
    await asyncio.sleep(span / SECOND)


class Execution:
    """The steps in flight of one activation, and those that wait long for their next attempt."""

    def __init__(self, host: Activation) -> None:
        self.host = host
        self.running: dict[str, Pending] = {}
        self.backing_off: dict[str, Pending] = {}
        """Steps whose next attempt is further away than `park_after`: a durable wait (24)."""
        self._threads: set[asyncio.Future[Any]] = set()

    @property
    def busy(self) -> bool:
        """A step is in flight, or has been given up and is still dying."""
        return bool(self.running)

    def start(self, call: Pending) -> None:
        """Begin a call that has no record. After a cancel or time-out only those made in a shield begin (44)."""
        host = self.host
        if host.interruption is not None and not call.shielded:
            return
        tries, again = host.journal.tries.get(call.step_id, (0, 0))
        if again and again - host.recorder.clock() > host.recorder.settings.park_after:
            call.retry_at = again
            self.backing_off[call.step_id] = call
            return
        self._begin(call, tries, again)

    def _begin(self, call: Pending, tries: int, again: Instant) -> None:
        context = call.context
        assert context is not None
        context.run(steps.STEP_KEY.set, f"{self.host.run_record.run_id}:{call.step_id}")
        self.running[call.step_id] = call
        call.runner = self.host.outer.create_task(self._execute(call, tries, again), context=context)

    def give_up(self, call: Pending) -> None:
        """The body cancelled the call."""
        self.backing_off.pop(call.step_id, None)
        self._cancel(call)

    def _cancel(self, call: Pending) -> None:
        # Once: a second cancel would break into the step's own clean-up. Never while it is being recorded (R12, R13).
        if call.runner is not None and not call.stopping and not call.recording:
            call.stopping = True
            call.runner.cancel()

    def stop(self) -> None:
        """The activation is over: cancel what runs, except what is being recorded."""
        self.backing_off.clear()
        for call in list(self.running.values()):
            self._cancel(call)

    async def ended(self) -> list[str]:
        """Return when nothing of the activation runs any more, threads of its steps included (R15); bounded, then dropped (28)."""
        if not (self.running or self._threads or self.host.outside.tasks):
            return []
        until = self.host.outer.time() + LONGEST_DEATH
        while True:
            # One that was cancelled before its first turn never took itself out.
            runners = {
                call.runner: call.step_id
                for call in self.running.values()
                if call.runner is not None and not call.runner.done()
            }
            waiting: set[asyncio.Future[Any]] = {*runners, *self.host.outside.tasks, *self._threads}
            if not waiting:
                return []
            left = until - self.host.outer.time()
            if left <= 0:
                return sorted(runners.values()) or ["a thread of a def step"]
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def let_go(self) -> None:
        """Everything has ended: cut the circle of references with the activation."""
        del self.host

    def _in_thread(self, work: Callable[[], Any]) -> Awaitable[Any]:
        future = asyncio.ensure_future(self.host.recorder.run_blocking(work))
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        return asyncio.shield(future)

    # -- long back-offs -----------------------------------------------------------------------------------------------------

    def next_attempt(self) -> Instant | None:
        """The earliest instant of a next attempt that is waited for durably."""
        if not self.backing_off:
            return None
        return min((call.retry_at for call in self.backing_off.values() if call.retry_at is not None), default=None)

    def due_again(self) -> bool:
        """A step that backs off is due."""
        again = self.next_attempt()
        return again is not None and again <= self.host.recorder.clock()

    def resume(self) -> None:
        """Begin those that are due."""
        now = self.host.recorder.clock()
        for call in [c for c in self.backing_off.values() if c.retry_at is not None and c.retry_at <= now]:
            del self.backing_off[call.step_id]
            call.retry_at = None
            self._begin(call, self.host.journal.tries.get(call.step_id, (0, 0))[0], 0)

    # -- one step -----------------------------------------------------------------------------------------------------------

    async def _execute(self, call: Pending, tries: int, again: Instant) -> None:
        host = self.host
        try:
            if again:
                await pause(max(0, again - host.recorder.clock()))
            if call.plan is None or await self._attempts(call, call.plan, tries):
                await self._record(call)
        except asyncio.CancelledError:
            if not (call.stopping or host.over):  # somebody ends the worker's tasks: this is no failure of the step
                host.interrupt(WorkerStopped(f"the step {call.step_id} was cancelled with the worker"))
                raise
        except Exception as error:  # noqa: BLE001 - the recorder's last word: nothing can be written any more
            host.interrupt(error)
        finally:
            self.running.pop(call.step_id, None)
            host.wake()

    async def _attempts(self, call: Pending, plan: StepPlan, tries: int) -> bool:
        """Attempt after attempt. True: the last one is the step's end. False: that is recorded, the next one is far away, or nobody wants
        it any more."""
        host = self.host
        while host.recorder.held():
            if call.transaction is not None:
                error = await self._transaction(call, plan)
            else:
                call.attempted = await self._attempt(call, plan)
                error = call.attempted.error
            tries += 1
            if call.recording or call.done() or host.over:
                return False
            if error is None or not plan.retry.decides(error, tries):
                return True
            if not await self._wait(call, plan, tries, error):
                return False
        raise LeaseLost(f"the lease ended before the step {call.step_id} was begun")

    async def _wait(self, call: Pending, plan: StepPlan, tries: int, error: BaseException) -> bool:
        """Keep the failed attempt and wait for the next. False: that is far away, or the call was given up meanwhile."""
        host = self.host
        wait = plan.retry.delay(tries, random=random.random())
        again = host.recorder.clock() + wait
        await self._record_attempt(call, tries, again, error)
        if call.done() or host.over:
            return False
        if wait > host.recorder.settings.park_after:
            call.retry_at = again
            self.backing_off[call.step_id] = call
            return False
        await pause(wait)
        return True

    def _attempt(self, call: Pending, plan: StepPlan, connection: tuple[Any, ...] = ()) -> Awaitable[steps.Attempted]:
        host, body = self.host, self.host.body
        args, kwargs = steps.isolated(plan, call.args, call.kwargs, call.arguments, host.codec)
        return steps.attempt(
            plan,
            (*connection, *args) if connection else args,
            kwargs,
            step_id=call.step_id,
            codec=host.codec,
            run_blocking=body.run_here if isinstance(body, ThreadBody) else self._in_thread,
            interruptible=not body.blocking,
        )

    async def _record_attempt(self, call: Pending, tries: int, again: Instant, error: BaseException) -> None:
        data = plain.read(error_data(error).to_json())
        row = NewRecord(
            step_id=f"{call.step_id}@{tries}",
            kind=RecordKind.ATTEMPT,
            position=None,
            seen=call.seen,
            digest=call.digest,
            result=value_envelope(plain.write({"next_at": again, "error": data})),
            floor=max(self.host.body.now, self.host.journal.attempted_at + 1),
        )
        call.recording = True  # the row is on its way: a cancel waits for it
        try:
            self.host.journal.attempted(await self.host.recorder.append(row))
        finally:
            call.recording = False

    async def _record(self, call: Pending) -> None:
        host = self.host
        if call.done() or host.over:
            return
        position = host.journal.assign()
        call.recording = True
        if call.kind is RecordKind.PIVOT:
            host.outside.refused = True
        try:
            record = await host.recorder.append(self._new_record(call, position))
        except BaseException:
            host.journal.give_up(position)
            raise
        host.journal.land(position, record)

    def _new_record(self, call: Pending, position: int) -> NewRecord:
        envelope, children = (call.envelope, ()) if call.begins is None else call.begins()
        return NewRecord(
            step_id=call.step_id,
            kind=call.kind,
            position=position,
            seen=call.seen,
            digest=call.digest,
            result=envelope if call.attempted is None else call.attempted.envelope,
            floor=self.host.body.now,
            children=children,
        )

    async def _transaction(self, call: Pending, plan: StepPlan) -> BaseException | None:
        """Exactly once: the work and the record commit together (26). An error that left nothing is an attempt like any other."""
        host, timeout = self.host, call.transaction
        assert timeout is not None
        position = -1

        def unwanted() -> bool:
            call.stopping = call.done() or host.over  # while it was being recorded nobody could stop it
            return call.stopping

        async def work(connection: Any) -> NewRecord:
            nonlocal position
            if position >= 0:  # it met another transaction, was rolled back, and the store calls this once more
                host.journal.give_up(position)
                position = -1
                call.recording = False
                if unwanted():
                    raise asyncio.CancelledError
            call.attempted = await self._attempt(call, plan, (connection,))
            if call.attempted.error is not None:
                raise call.attempted.error
            if unwanted():
                raise asyncio.CancelledError
            position = host.journal.assign()
            call.recording = True
            return self._new_record(call, position)

        try:
            record = await host.recorder.transaction(work, timeout)
        except BaseException as error:
            if position >= 0:
                host.journal.give_up(position)
            call.recording = False
            if call.attempted is not None and call.attempted.error is error:
                return error
            if not isinstance(error, TimeoutError):
                raise  # the recorder's own: nothing can be written any more, or the task was cancelled
            call.attempted = steps.failed(error)
            return error
        if position < 0:  # it was there already: an earlier commit whose answer was lost
            position = host.journal.assign()
            call.recording = True
        host.journal.land(position, record)
        return None
