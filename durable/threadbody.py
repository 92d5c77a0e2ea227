"""The thread on which a `def` body runs, and its calls. The same pump drives it as an event loop's body (28b).

The body is either computing (`busy`) or stands still in one call; so its ids are strictly sequential. Its steps run in this very
thread: the runner on the worker's loop hands them over and waits. A thread can not be interrupted: a cancel, a time-out or being put
aside takes effect at its next call. It never touches the journal, and talks to the loop by `call_soon_threadsafe` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from .branches import Host, Scope
from .calls import Pending
from .errors import Misuse, SpinningError
from .model import Instant, StepRecord

LONGEST_DEATH = 10.0
"""Seconds that a thread whose body was put aside may take to reach its next call, once no step runs in it any more."""
MOST_REFUSALS = 10_000
"""Calls that a body may make, and have refused, after its cancel or time-out: more, and it goes round and round."""


class ThreadCall(Pending):
    """A call of a `def` body."""

    def __init__(self, body: ThreadBody) -> None:
        self.body = body
        self.over = False

    def done(self) -> bool:
        """It has its answer, or the body has been interrupted in it."""
        return self.over

    def fire(self, record: StepRecord) -> None:
        """Its record is delivered: the thread goes on."""
        if not self.over:
            self.settle(*self.resolve(record))

    def settle(self, value: Any, error: BaseException | None) -> None:
        """Its answer is known: the thread goes on."""
        self.over = True
        self.body.answer(value, error)

    def arrive(self, host: Any, name: str) -> None:
        """The thread stands in this call: it gets its place in the history."""
        host.registered(self, name)
        host.wake()

    def refuse(self) -> None:
        """It is not made: the run is being cancelled and this is outside a shield (44)."""
        self.over = True
        self.body.answer(None, asyncio.CancelledError("the run is cancelled"))


class ThreadBody:
    """The body of one activation."""

    blocking = True

    def __init__(self, host: Host, outer: asyncio.AbstractEventLoop, started: Instant, run_id: str) -> None:
        self.host: Any = host
        self.started = started
        self.now: Instant = started
        self.busy = False
        self.closed = False
        self.poison: Misuse | None = None
        self.root = Scope()
        self.held = ""
        """A cancel was delivered while the body stood in a shield: it is due when the shield is left."""
        self._outer = outer
        self._open: ThreadCall | None = None
        self._orders: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._refused = 0
        self._refusals = 0
        self._refusals_allowed = 10
        self._gone: asyncio.Future[None] = outer.create_future()
        self._thread: threading.Thread | None = None
        self._name = f"durable body {run_id}"

    # -- on the worker's loop ---------------------------------------------------------------------------------------------

    def start(self, entry: Callable[[], Any]) -> None:
        """Begin. A daemon: one that never comes back does not keep the process alive."""
        self.busy = True
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run, entry), name=self._name, daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """A thread runs by itself. Raises SpinningError for one that swallows its cancel again and again."""
        if self._refused > MOST_REFUSALS:
            raise SpinningError(
                f"the body made {MOST_REFUSALS:,} more calls after its cancel or time-out, and does not end"
            )

    def scope(self) -> Scope:
        """There is one branch only."""
        return self.root

    @property
    def done(self) -> bool:
        """The body has returned or raised."""
        return self._outcome is not None

    def outcome(self) -> tuple[Any, BaseException | None]:
        """What it returned, or what it raised."""
        assert self._outcome is not None
        return self._outcome

    def answer(self, value: Any, error: BaseException | None) -> None:
        """The call in which the body stands is over."""
        self._open = None
        self.busy = True
        self._orders.put(("answer", value, error))

    def interrupt(self, message: str) -> None:
        """A cancel or a time-out was delivered: CancelledError in the call in which it stands, or when it leaves its shield."""
        call = self._open
        if self.root.shields:
            self.held = message
        elif call is not None:
            call.over = True
            self.host.dropped(call)
            self.answer(None, asyncio.CancelledError(message))

    def run_here(self, work: Callable[[], Any]) -> Awaitable[Any]:
        """Run a step in this thread."""
        done: asyncio.Future[Any] = self._outer.create_future()
        self.busy = True
        self._orders.put(("work", work, done))
        return asyncio.shield(done)

    def left_over(self) -> list[str]:
        """A `def` body has no branches."""
        return []

    def close_down(self, rounds: int) -> list[str]:
        """Wake it, so that it ends; it is waited for in `dead`."""
        self.closed = True
        self._refusals_allowed = rounds
        call = self._open
        if call is not None:
            call.over = True
            self.answer(None, asyncio.CancelledError("the run was put aside"))
        return []

    async def dead(self) -> bool:
        """Wait for the thread. False: it did not reach a call in time, or does not let go, and is left to itself."""
        if self._thread is not None:
            await asyncio.wait([self._gone], timeout=LONGEST_DEATH)
        return self._thread is None or self._gone.done()

    def let_go(self) -> None:
        """After `dead`: cut the circle of references between body and activation. The thread has told its last."""
        self.host = None

    # -- in the thread ------------------------------------------------------------------------------------------------------

    def _run(self, entry: Callable[[], Any]) -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = entry(), None
        except BaseException as error:  # noqa: BLE001 - it is the outcome of the body, whatever it is
            outcome = None, error
        with contextlib.suppress(asyncio.CancelledError):  # the worker's loop is closed: nobody waits for it
            self._tell(self._finished, outcome)

    def _finished(self, outcome: tuple[Any, BaseException | None]) -> None:
        self._outcome = outcome
        self.busy = False
        if not self._gone.done():
            self._gone.set_result(None)
        self.host.wake()

    def check(self, what: str) -> None:
        """Raises Misuse in any other thread."""
        if threading.current_thread() is not self._thread:
            raise Misuse(
                f"{what} was called in the thread {threading.current_thread().name!r}: a blocking context belongs to the thread of"
                " its body",
                hint="pass values, not the context; in a step use neither",
            )

    def call(self, call: ThreadCall, name: str) -> Any:
        """Make a call and stand still until it is answered."""
        if self.closed:
            self._refuse()
        self._tell(self._arrived, call, name)
        while True:
            order, first, second = self._orders.get()
            if order == "work":
                self._work(first, second)
            elif second is not None:
                raise second
            else:
                return first

    def _work(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        try:
            result, error = work(), None
        except BaseException as raised:  # noqa: BLE001 - handed to the runner, which knows what it means
            result, error = None, raised
        self._tell(self._worked, done, result, error)

    def _worked(self, done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self.busy = False
        if done.cancelled():
            pass  # the loop is being closed around us
        elif error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)
        self.host.wake()

    def _arrived(self, call: ThreadCall, name: str) -> None:
        self._open = call
        self.busy = False
        try:
            if self.closed:
                self.close_down(self._refusals_allowed)
            elif self.host.interruption is not None and not self.root.shields:
                self.root.step_id(name)
                self._refused += 1
                if self._refused > MOST_REFUSALS:
                    self.host.wake()
                else:
                    call.refuse()
            else:
                call.arrive(self.host, name)
        except Exception as error:  # noqa: BLE001 - a callback has no caller, and the thread would stand still for ever
            self.host.fault(error)

    def _refuse(self) -> None:
        self._refusals += 1
        if self._refusals > self._refusals_allowed:
            threading.Event().wait()  # it swallows every refusal: from here its calls never complete (28a)
        raise asyncio.CancelledError("the run was put aside")

    def leave_shield(self) -> None:
        """The shield is left: a cancel that came meanwhile is due."""
        self.root.shields -= 1
        if self.held and not self.root.shields:
            message, self.held = self.held, ""
            raise asyncio.CancelledError(message)

    def _tell(self, what: Callable[..., None], *args: Any) -> None:
        try:
            self._outer.call_soon_threadsafe(what, *args)
        except RuntimeError as error:  # the worker's loop is closed: nobody is left to tell
            raise asyncio.CancelledError("the worker's event loop is closed") from error
