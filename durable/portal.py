"""Calling coroutines from threads that have no event loop: a thread of our own with a loop in it.

`SyncClient` calls through it; the lease renewals run on one of their own, so that a blocked loop of the application can not stop
them. What a coroutine raises comes out of `call` as it is. It knows nothing of what it runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, Self, TypeVar

from .errors import Misuse, WorkerStopped

P = ParamSpec("P")
T = TypeVar("T")
ASK_AGAIN = 0.5
"""Seconds after which a task that was cancelled and goes on is cancelled again."""


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel until all have ended. Once is not enough: a driver that is in the middle of something may swallow a cancel, and a loop
    around it would go on for ever."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=ASK_AGAIN)


class Portal:
    """A thread that owns an event loop. `start`, then `call` or `submit` from any other thread, then `close`.

    It is bound to the process that started it: in a forked child it is closed.
    """

    def __init__(self, name: str = "durable-portal") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> Self:
        """Start the thread; returns when its loop runs. Starting twice is starting once, also after a close."""
        if self._pid != os.getpid():
            self._lock, self._loop = threading.Lock(), None
        with self._lock:
            if self._loop is not None:
                return self
            ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
            thread = threading.Thread(target=self._main, args=(ready,), name=self._name, daemon=True)
            thread.start()
            self._loop = ready.result()
            self._thread, self._pid = thread, os.getpid()
        return self

    def submit(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        """Begin `fn(*args, **kwargs)` on the loop and return at once. Raises WorkerStopped if the portal is not open."""
        closed = WorkerStopped("the portal is closed", hint="open the client again")
        if self._pid != os.getpid():  # a fork inherits the object, perhaps with its lock held, but not the thread
            raise closed
        with self._lock:
            if self._loop is None:
                raise closed
            return asyncio.run_coroutine_threadsafe(fn(*args, **kwargs), self._loop)

    def call(self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `fn(*args, **kwargs)` on the loop and wait for it. Raises what it raises, WorkerStopped if the portal is closed
        before it ends, Misuse from the portal's own thread (it would wait for itself). An interrupt cancels the coroutine."""
        if threading.current_thread() is self._thread:
            raise Misuse("a blocking call on the portal's own thread would wait for itself", hint="await the coroutine")
        future = self.submit(fn, *args, **kwargs)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._loop is not None:
                raise asyncio.CancelledError from None
            raise WorkerStopped("the portal was closed before the call had ended") from None
        except BaseException:
            future.cancel()  # an interrupt of the waiting thread; after an error of the coroutine it does nothing
            raise

    def close(self) -> None:
        """Cancel what still runs, wait for it, end the thread. May be called at any time, from any other thread, twice."""
        if self._pid != os.getpid():
            return  # inherited by a fork: the thread is not here
        if threading.current_thread() is self._thread:
            raise Misuse("the portal can not be closed from its own thread", hint="close it from where it was started")
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _main(ready: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        # A Runner would install signal handlers only in the main thread; here it cancels, awaits and closes in the right order.
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            loop.call_soon(ready.set_result, loop)
            while True:
                try:
                    loop.run_forever()
                    break
                except (KeyboardInterrupt, SystemExit):
                    continue  # raised by a coroutine: asyncio also lets it out of the loop, but it belongs to the caller
