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


LONGEST_DEATH = 10.0
"""Seconds that steps may take to die once their run is over."""


async def pause(span: Micros) -> None:
    """A short back-off, in memory. Simulations put their own in its place."""
    await asyncio.sleep(span / SECOND)


class Execution:
    """The steps in flight of one activation, and those that wait long for their next attempt."""

    def __init__(self, host: Activation) -> None:
        self.host = host
        self.running: set[Pending] = set()
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
        self.running.add(call)
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
        for call in list(self.running):
            self._cancel(call)

    async def ended(self) -> list[str]:
        """Return when nothing of the activation runs any more, threads of its steps included (R15); bounded, then dropped (28)."""
        until = self.host.outer.time() + LONGEST_DEATH
        while True:
            runners = {call.runner: call.step_id for call in self.running if call.runner is not None}
            waiting: set[asyncio.Future[Any]] = {*runners, *self.host.outside.tasks, *self._threads}
            if not waiting:
                return []
            left = until - self.host.outer.time()
            if left <= 0:
                return sorted(runners.values()) or ["a thread of a def step"]
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _in_thread(self, work: Callable[[], Any]) -> Awaitable[Any]:
        future = asyncio.ensure_future(self.host.recorder.run_blocking(work))
        self._threads.add(future)
        future.add_done_callback(self._threads.discard)
        return asyncio.shield(future)

    # -- long back-offs -----------------------------------------------------------------------------------------------------

    def next_attempt(self) -> Instant | None:
        """The earliest instant of a next attempt that is waited for durably."""
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
            if call.transaction is not None:
                await self._transaction(call)
            elif call.plan is None or await self._attempts(call, tries, again):
                await self._record(call)
        except asyncio.CancelledError:
            if not (call.stopping or host.over):  # somebody ends the worker's tasks: this is no failure of the step
                host.interrupt(WorkerStopped(f"the step {call.step_id} was cancelled with the worker"))
                raise
        except Exception as error:  # noqa: BLE001 - the recorder's last word: nothing can be written any more
            host.interrupt(error)
        finally:
            self.running.discard(call)
            host.wake()

    async def _attempts(self, call: Pending, tries: int, again: Instant) -> bool:
        """Attempt after attempt. True: there is a result to record."""
        host, plan = self.host, call.plan
        assert plan is not None
        recorder = host.recorder
        if again:
            await pause(max(0, again - recorder.clock()))
        threads = host.body.run_here if isinstance(host.body, ThreadBody) else self._in_thread
        args, kwargs = steps.isolated(plan, call.args, call.kwargs, call.arguments, host.codec)
        while True:
            if not recorder.held():
                raise LeaseLost(f"the lease ended before the step {call.step_id} was begun")
            call.attempted = attempted = await steps.attempt(
                plan,
                args,
                kwargs,
                step_id=call.step_id,
                codec=host.codec,
                run_blocking=threads,
                interruptible=not host.body.blocking,
            )
            tries += 1
            if call.done() or host.over:
                return False
            error = attempted.error
            if error is None or not plan.retry.decides(error, tries):
                return True
            wait = plan.retry.delay(tries, random=random.random())
            again = recorder.clock() + wait
            await self._record_attempt(call, tries, again, error)
            if call.done() or host.over:
                return False
            if wait > recorder.settings.park_after:
                call.retry_at = again
                self.backing_off[call.step_id] = call
                return False
            await pause(wait)
            args, kwargs = steps.isolated(plan, call.args, call.kwargs, call.arguments, host.codec)

    async def _record_attempt(self, call: Pending, tries: int, again: Instant, error: BaseException) -> None:
        data = plain.read(error_data(error).to_json())
        row = NewRecord(
            step_id=f"{call.step_id}@{tries}",
            kind=RecordKind.ATTEMPT,
            position=None,
            seen=call.seen,
            digest=call.digest,
            result=value_envelope(plain.write({"next_at": again, "error": data})),
            floor=self.host.body.now,
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
        return NewRecord(
            step_id=call.step_id,
            kind=call.kind,
            position=position,
            seen=call.seen,
            digest=call.digest,
            result=call.envelope if call.attempted is None else call.attempted.envelope,
            floor=self.host.body.now,
        )

    async def _transaction(self, call: Pending) -> None:
        """Exactly once: the work and the record commit together (26). A failure of the work is a record of its own."""
        host, plan, timeout = self.host, call.plan, call.transaction
        assert plan is not None
        assert timeout is not None
        position: list[int] = []

        async def work(connection: Any) -> NewRecord:
            args, kwargs = steps.isolated(plan, call.args, call.kwargs, call.arguments, host.codec)
            call.attempted = attempted = await steps.attempt(
                plan,
                (connection, *args),
                kwargs,
                step_id=call.step_id,
                codec=host.codec,
                run_blocking=self._in_thread,
                interruptible=True,
            )
            if attempted.error is not None:
                raise attempted.error
            if call.done() or host.over:
                raise asyncio.CancelledError
            position.append(host.journal.assign())
            call.recording = True
            return self._new_record(call, position[0])

        try:
            record = await host.recorder.transaction(work, timeout)
        except BaseException as error:
            if position:
                host.journal.give_up(position[0])
            attempted = call.attempted
            if attempted is None or attempted.error is not error:
                if not isinstance(error, TimeoutError):
                    raise
                call.attempted = steps.failed(error)
            call.recording = False
            await self._record(call)
            return
        if position:
            host.journal.land(position[0], record)
        else:  # it was there already: an earlier commit whose answer was lost
            host.journal.land(host.journal.assign(), record)
