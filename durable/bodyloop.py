"""The private event loop on which an `async def` body runs: a ready queue, branches, and timers that are durable.

`activation.Activation` makes one per activation and drains it to rest from plain callbacks of the worker's loop, never from a
task. Rest is then a fact (the ready queue is empty), and `asyncio.gather`, `TaskGroup`, `wait`, `timeout`, locks and queues
behave the same when they are replayed: tasks start in order of creation, sets of them iterate in that order, time stands still
between two deliveries. It never waits, never does I/O, and refuses what would (Misuse, where it is called).
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import gc
import sys
import weakref
import zlib
from asyncio import events, tasks
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import TypeVarTuple, Unpack

from .branches import BodyFuture, BranchTask, Host, Nobody, Scope, Stand, Timer
from .errors import Misuse, SpinningError
from .model import Instant
from .settings import LONGEST, SECOND, Micros

if TYPE_CHECKING:
    from types import CodeType, FrameType

Arguments = TypeVarTuple("Arguments")

MOST_CALLBACKS = 100_000
"""Callbacks of one drain before a body counts as spinning."""

DONE_IN_STEPS = (
    "do it in a step: await ctx.step(fn, ...); a step runs on the worker's own loop, where everything is allowed"
)

_ENSURE_FUTURE: frozenset[CodeType] = frozenset(
    getattr(tasks, name).__code__ for name in ("ensure_future", "_ensure_future") if hasattr(tasks, name)
)
_COMPREHENSIONS = frozenset({"<setcomp>", "<listcomp>", "<genexpr>"})
_WAIT_FOR: CodeType = tasks.wait_for.__code__
_AS_COMPLETED: frozenset[Any] = frozenset(
    getattr(function, "__code__", None)
    for function in (tasks.as_completed, getattr(getattr(tasks, "_AsCompletedIterator", None), "__init__", None))
) - {None}


def _span(seconds: float) -> Micros:
    """Asyncio takes any number, also one that is endless; no store has an instant that is further away than `LONGEST`."""
    most = LONGEST / SECOND
    return round(min(max(seconds, -most), most) * SECOND)


class BodyLoop(asyncio.AbstractEventLoop):
    """One per activation (R2). `time()` is seconds since the run began, as of the last delivered record (R8)."""

    def __init__(self, host: Host, salt: str, started: Instant) -> None:
        self.host: Host = host
        self.started = started
        self.now: Instant = started
        self.ready: collections.deque[asyncio.Handle] = collections.deque()
        self.tasks: dict[BranchTask, None] = {}
        self.shielded: dict[BranchTask, int] = {}
        self.running: asyncio.Handle | None = None
        """What a drain runs at the moment."""
        self.closed = False
        self.poison: Misuse | None = None
        self.main: BranchTask | None = None
        self.root = Scope()
        self.callbacks = Scope("~/")
        self.generators: dict[int, weakref.ref[AsyncGenerator[Any, Any]]] = {}
        self.dropped_generators: list[AsyncGenerator[Any, Any]] = []
        # Salted by the run: small equal hashes of many runs would collide in asyncio's global set of tasks.
        self._count = zlib.crc32(salt.encode()) << 20

    def number(self) -> int:
        """The next number of a task or future: its hash."""
        self._count += 1
        return self._count

    def stand(self) -> Stand:
        """The running task, and how deep in shields it stands."""
        task = asyncio.current_task(self)
        return task, self.shielded.get(task, 0) if isinstance(task, BranchTask) else 0

    # -- the body -----------------------------------------------------------------------------------------------------------

    blocking = False
    busy = False
    """A body on this loop is at rest whenever somebody else runs."""

    def start(self, entry: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Make the main task; it begins with the next drain."""
        self.main = BranchTask(entry(), loop=self, scope=self.root, name="body")

    @property
    def done(self) -> bool:
        """The body has returned or raised."""
        return self.main is not None and self.main.done()

    def outcome(self) -> tuple[Any, BaseException | None]:
        """What it returned, or what it raised."""
        assert self.main is not None
        if self.main.cancelled():
            return None, asyncio.CancelledError()
        error = self.main.exception()
        return (None, error) if error is not None else (self.main.result(), None)

    def interrupt(self, message: str) -> None:
        """A cancel or a time-out was delivered: an ordinary CancelledError in the main task (44)."""
        assert self.main is not None
        self.main.cancel(message)

    # -- what asyncio asks of a loop ---------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds since the run began, as of the last delivered record."""
        return (self.now - self.started) / SECOND

    def call_soon(
        self,
        callback: Callable[[Unpack[Arguments]], object],
        *args: Unpack[Arguments],
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Ready at once, first in, first out."""
        handle = asyncio.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Arguments]], object],
        *args: Unpack[Arguments],
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Refused, and remembered, if it comes from outside: no replay could repeat it."""
        if events._get_running_loop() is self:
            return self.call_soon(callback, *args, context=context)
        self.poison = Misuse(
            f"a thread or another event loop tried to wake the body of a durable function: {callback!r}",
            hint="wait for it in a step, and await the step; or send the run a signal",
        )
        raise self.poison

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: Unpack[Arguments],
        context: contextvars.Context | None = None,
    ) -> Timer:
        """A durable timer."""
        return self._timer(self.now + _span(delay), self.time() + delay, callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: Unpack[Arguments],
        context: contextvars.Context | None = None,
    ) -> Timer:
        """A durable timer; `when` is this loop's time."""
        return self._timer(self.started + _span(when), when, callback, args, context)

    def _timer(
        self,
        due: Instant,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> Timer:
        timer = Timer(when, callback, args, self, context)
        timer.due = due
        timer.made_in = self.stand()
        if not self.closed:
            self.host.registered(timer, "timer")
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Part of what asyncio's own handles expect of a loop."""

    def create_future(self) -> BodyFuture:
        """A future of this body."""
        return BodyFuture(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None, **options: Any
    ) -> BranchTask:
        """A branch. What `wait_for` makes for itself belongs to the branch that called it (R4)."""
        parent = self.scope()
        scope: Scope | None = None
        frame = sys._getframe(1)
        if frame.f_code in _ENSURE_FUTURE:  # asyncio itself wraps something; look who asked it to
            asker = _beyond_ensure_future(frame)
            if asker in _AS_COMPLETED and not asyncio.isfuture(coro) and getattr(coro, "cr_code", None) is not _WRAPPER:
                raise Misuse(
                    "as_completed() over coroutines starts them in the order of memory addresses, which no replay repeats",
                    hint="pass tasks (asyncio.create_task) or calls of the context",
                )
            if asker is _WAIT_FOR:
                scope = parent
        if asyncio.isfuture(coro):
            coro = _wrapped(coro)
        task = BranchTask(coro, loop=self, scope=scope or parent.branch(), name=name or "branch", context=context)
        self.tasks[task] = None  # a strong reference: never collected while it is pending
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        assert isinstance(task, BranchTask)
        self.tasks.pop(task, None)

    def scope(self) -> Scope:
        """Where a call is made: the branch of the running task, or `~/` in a callback."""
        task = asyncio.current_task(self)
        return task.scope if isinstance(task, BranchTask) else self.callbacks

    def set_task_factory(self, factory: Any) -> None:
        """Refused: the loop makes the tasks."""
        raise Misuse(
            "the event loop of a durable body takes no task factory", hint="set it on the worker's loop, for the steps"
        )

    def get_task_factory(self) -> None:
        """There is none."""

    def get_debug(self) -> bool:
        """Never: debug mode changes what runs when."""
        return False

    def is_running(self) -> bool:
        """It is whenever someone can ask."""
        return True

    def is_closed(self) -> bool:
        """Not as asyncio understands it: tasks must be able to end after the activation is over."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Passed on; the activation is silent while it replays and while it is torn down."""
        self.host.unhandled(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """The same."""
        self.host.unhandled(context)

    # -- running to rest ----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Run every ready callback and all that follows from it. Raises SpinningError; KeyboardInterrupt passes through."""
        ready = self.ready
        if not ready:
            return
        outside, hooks, collecting = events._get_running_loop(), sys.get_asyncgen_hooks(), gc.isenabled()
        left = MOST_CALLBACKS
        # A collection in here would close generators and run finalizers at moments that no replay repeats: off first, on last.
        gc.disable()
        events._set_running_loop(self)
        sys.set_asyncgen_hooks(self._generator_started, self._generator_dropped)
        try:
            while ready:
                handle = ready.popleft()
                left -= 1
                if left < 0:
                    ready.appendleft(handle)  # one that is interrupted goes on from here
                    raise SpinningError(
                        f"the body ran {MOST_CALLBACKS:,} callbacks without coming to rest; the next is {handle!r}"
                    )
                if handle._cancelled:
                    continue
                self.running = handle
                handle._run()
        finally:
            self.running = None
            sys.set_asyncgen_hooks(*hooks)
            events._set_running_loop(outside)
            if collecting:
                gc.enable()

    def _generator_started(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.generators[id(generator)] = weakref.ref(generator)

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.generators.pop(id(generator), None)
        if (
            events._get_running_loop() is self
        ):  # its last reference went inside the body: close it there, durable clean-up works
            self.create_task(generator.aclose())
        else:
            self.dropped_generators.append(generator)

    def open_generators(self) -> list[AsyncGenerator[Any, Any]]:
        """Those that were begun, not finished and not closed; asked once."""
        if not (self.generators or self.dropped_generators):
            return []
        still = [
            generator for generator in (reference() for reference in self.generators.values()) if generator is not None
        ]
        still += self.dropped_generators
        self.generators.clear()
        self.dropped_generators.clear()
        return still

    def left_over(self) -> list[str]:
        """The branches that live although the body has ended."""
        return [_named(task) for task in self.tasks if not task.done()]

    async def dead(self) -> bool:
        """Nothing of it lives after `close_down`."""
        return True

    def close_down(self, rounds: int) -> list[str]:
        """Tear down (R14): cancel what is unfinished in order of creation, at most `rounds` times, then close open generators.
        What still lives is dropped; it is returned, to be reported. Calls of the context never complete from now on."""
        self.closed = True
        for _ in range(rounds):
            left = self._unfinished()
            if not left:
                generators = self.open_generators()
                if not generators:
                    self.ready.clear()
                    return []
                for generator in generators:
                    task = BranchTask(generator.aclose(), loop=self, scope=self.callbacks, name="close")
                    self.tasks[task] = None
                    task.add_done_callback(self._forget)
            for task in left:
                task.cancel()
            self._drain_quietly()
        left = self._unfinished()
        for task in left:
            task._log_destroy_pending = False
            try:
                task.get_coro().close()
            except BaseException as error:  # noqa: BLE001 - code that refuses to end may raise anything; it is reported
                self.host.unhandled({"message": "a branch that is dropped raised", "exception": error, "task": task})
        self.ready.clear()
        return [_named(task) for task in left]

    def let_go(self) -> None:
        """After `dead`: cut the circles of references between loop, body and activation."""
        self.host = Nobody()
        self.main = None
        self.tasks.clear()

    def _unfinished(self) -> list[BranchTask]:
        main = () if self.main is None else (self.main,)
        return [task for task in (*main, *self.tasks) if not task.done()]

    def _drain_quietly(self) -> None:
        try:
            self.drain()
        except (
            SpinningError,
            SystemExit,
            KeyboardInterrupt,
        ) as error:  # it is over: say so and go on with the next round
            self.ready.clear()
            self.host.unhandled({"message": "the body did not end in good order", "exception": error})


def _named(task: BranchTask) -> str:
    return f"{getattr(task.get_coro(), '__qualname__', 'a branch')} (branch {task.scope.path or 'main'})"


def _beyond_ensure_future(frame: FrameType) -> CodeType | None:
    current: FrameType | None = frame
    while current is not None and (current.f_code in _ENSURE_FUTURE or current.f_code.co_name in _COMPREHENSIONS):
        current = current.f_back
    return current.f_code if current is not None else None


async def _wrapped(future: Awaitable[Any]) -> Any:
    return await future


_WRAPPER = _wrapped.__code__


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: BodyLoop, *args: Any, **options: Any) -> NoReturn:
        raise Misuse(f"loop.{name}() in the body of a durable function: it can not be replayed", hint=DONE_IN_STEPS)

    refused.__name__ = name
    return refused


_FORBIDDEN = ("sock_", "create_", "start_", "add_", "remove_", "run_", "get", "connect_", "subprocess_", "sendfile")


def _refuse_the_rest() -> None:
    """Whatever else a loop can do is I/O, a thread or a process: refused in a body."""
    for name in dir(asyncio.AbstractEventLoop):
        if name.startswith(_FORBIDDEN) and name not in BodyLoop.__dict__:
            setattr(BodyLoop, name, _refuse(name))


_refuse_the_rest()
