"""Random durable bodies: a tree of plain asyncio constructs over the real context, drawn from a seed, and an evaluator that
leaves a trace. The fuzzer compares traces, not only results: two executions that differ in any order differ here.

`Draw(seed).tree()` makes a tree; `evaluate(tree, room)` runs it inside a body. Step functions stand at module level and act in the
current `simulation.World`. Nothing here knows crashes, records or mutants.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Awaitable, Callable
from typing import Any

from durable.context import Context
from durable.function import step
from durable.retry import Retry
from durable.signals import Signal

Node = tuple[Any, ...]
USER_VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("user_variable", default="-")


class Boom(Exception):
    """What a body raises by itself."""


def Wanted(name: str) -> Signal[int]:  # noqa: N802 - reads like the class that it makes one of
    """A kind of signal."""
    return Signal(name, int)


class Effects:
    """What the step functions of the current world do; set by the simulation."""

    act: Callable[[str, int, float], Awaitable[str]]


async def a(uid: int) -> str:
    """A step that succeeds."""
    return await Effects.act("a", uid, 0.0)


async def b(uid: int) -> str:
    """A step that fails now and then."""
    return await Effects.act("b", uid, 0.1)


async def c(uid: int) -> str:
    """Another step that succeeds."""
    return await Effects.act("c", uid, 0.0)


async def flaky(uid: int) -> str:
    """A step that fails more often than not."""
    return await Effects.act("flaky", uid, 0.6)


async def variable(uid: int) -> str:
    """A step that sees the user's context variable."""
    return f"{USER_VARIABLE.get()}:{await Effects.act('variable', uid, 0.0)}"


again = step(name="again", retry=Retry(3, initial=0))(flaky)
"""Tried again at once, in memory."""
later = step(name="later", retry=Retry(3, initial="10s", jitter=0))(flaky)
"""Tried again after a durable wait."""
STEPS: dict[str, Callable[[int], Awaitable[str]]] = {"A": a, "B": b, "C": c}

LEAVES = (
    ["step"] * 5
    + ["sleep", "asyncio_sleep", "signal", "signal"]
    + ["put", "get", "under_lock", "under_semaphore", "set_event", "await_event", "raise", "fall_back", "turns"]
    + ["try_again", "try_later", "drawn"]
)
BRANCHES = (
    ["sequence"] * 3
    + ["gather"] * 4
    + ["group"] * 4
    + ["timeout"] * 3
    + ["wait_for"] * 3
    + ["wait"] * 2
    + ["try"] * 2
    + ["generator"] * 2
    + ["loop", "spawn", "spawn_and_cancel", "as_completed", "wait_calls", "finally", "chain", "shield", "shared"]
    + ["gather_calls", "left_over", "variable", "callback", "ctx_shield", "ctx_shield", "condition", "barrier"]
)


MORE: dict[str, Callable[[Node, Room, Context], Awaitable[Any]]] = {}
"""Kinds of nodes that other modules add."""


class Draw:
    """A tree from a seed."""

    leaves = LEAVES
    branches = BRANCHES

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.uid = 0
        self.budget = self.random.randint(6, 55)

    def tree(self, depth: int = 0) -> Node:
        """One node with all that is below it."""
        draw = self.random
        self.uid += 1
        self.budget -= 1
        uid = self.uid
        if not depth:
            kind = draw.choice(["sequence", "gather", "group", "wait"])
        else:
            kind = draw.choice(self.leaves if depth >= 4 or self.budget <= 0 else self.leaves + self.branches)
        return (kind, uid, *self._parts(kind, depth))

    def _some(self, depth: int, low: int, high: int) -> list[Node]:
        return [self.tree(depth + 1) for _ in range(self.random.randint(low, high))]

    def _parts(self, kind: str, depth: int) -> tuple[Any, ...]:
        draw = self.random
        name = lambda: draw.choice("ABC")  # noqa: E731
        span = lambda: draw.choice([1, 3, 7, 15, 40])  # noqa: E731
        parts: dict[str, Callable[[], tuple[Any, ...]]] = {
            "signal": lambda: (draw.choice("xy"), draw.choice([None, 5, 20, 60])),
            "turns": lambda: (draw.randint(1, 9),),
            "gather": lambda: (self._some(depth, 2, 4), draw.random() < 0.5),
            "gather_calls": lambda: ([name() for _ in range(draw.randint(2, 4))],),
            "shared": lambda: ([name() for _ in range(draw.randint(2, 4))],),
            "barrier": lambda: ([name() for _ in range(draw.randint(2, 4))],),
            "wait_calls": lambda: (
                [name() for _ in range(draw.randint(2, 4))],
                draw.choice(["FIRST_COMPLETED", "ALL_COMPLETED"]),
                draw.random() < 0.5,
            ),
            "loop": lambda: (draw.randint(2, 4), self._some(depth, 1, 2)),
            "as_completed": lambda: (self._some(depth, 2, 5), draw.random() < 0.3),
            "wait": lambda: (
                self._some(depth, 2, 5),
                draw.choice(["FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED"]),
                draw.choice([None, 5, 20]),
                draw.choice(["cancel", "leave", "await"]),
            ),
            "chain": lambda: (draw.randint(1, 8), self.tree(depth + 1)),
            "generator": lambda: (draw.randint(2, 4), name(), draw.choice(["all", "break", "closing"])),
        }
        if kind in parts:
            return parts[kind]()
        if kind in ("step", "fall_back", "under_lock", "under_semaphore", "callback"):
            return (name(),)
        if kind in ("sleep", "asyncio_sleep", "get", "await_event"):
            return (span(),)
        if kind in ("sequence", "try", "finally", "shield", "ctx_shield"):
            return (self._some(depth, 1, 4),)
        if kind == "group":
            return (self._some(depth, 2, 4),)
        if kind in ("timeout", "wait_for"):
            return (span(), self._some(depth, 1, 2))
        if kind in ("spawn", "spawn_and_cancel", "left_over", "condition"):
            return (self.tree(depth + 1), self.tree(depth + 1))
        return (self._some(depth, 1, 2),) if kind == "variable" else ()


class Room:
    """What the branches of one body share, and the trace that they leave."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.trace: list[str] = []
        self.lock = asyncio.Lock()
        self.semaphore = asyncio.Semaphore(2)
        self.queue: asyncio.Queue[Any] = asyncio.Queue(2)
        self.event = asyncio.Event()
        self.condition = asyncio.Condition()

    def tell(self, *facts: object) -> None:
        """Add to the trace."""
        self.trace.append(repr(facts))


async def evaluate(node: Node, room: Room) -> Any:
    """Run one node; leave in the trace how it ended."""
    kind, uid = node[0], node[1]
    try:
        result = await (MORE.get(kind) or globals()["run_" + kind])(node, room, room.ctx)
        room.tell(uid, kind, result)
        return result
    except BaseException as error:
        room.tell(uid, kind, "!", type(error).__name__, [repr(part) for part in getattr(error, "exceptions", [])])
        raise


async def _all(nodes: list[Node], room: Room) -> Any:
    result = None
    for node in nodes:
        result = await evaluate(node, room)
    return result


async def run_step(node: Node, room: Room, ctx: Context) -> Any:
    return await ctx.step(STEPS[node[2]], node[1])


async def run_fall_back(node: Node, room: Room, ctx: Context) -> Any:
    try:
        return await ctx.step(flaky, node[1])
    except ValueError as error:
        room.tell(node[1], "caught", str(error))
        return await ctx.step(STEPS[node[2]], node[1])


async def run_try_again(node: Node, room: Room, ctx: Context) -> Any:
    return await ctx.step(again, node[1])


async def run_try_later(node: Node, room: Room, ctx: Context) -> Any:
    return await ctx.step(later, node[1])


async def run_drawn(node: Node, room: Room, ctx: Context) -> Any:
    return ctx.random(), str(ctx.uuid()), ctx.now().isoformat()


async def run_under_lock(node: Node, room: Room, ctx: Context) -> Any:
    async with room.lock:
        room.tell(node[1], "locked")
        return await ctx.step(STEPS[node[2]], node[1])


async def run_under_semaphore(node: Node, room: Room, ctx: Context) -> Any:
    async with room.semaphore:
        room.tell(node[1], "in")
        return await ctx.step(STEPS[node[2]], node[1])


async def run_sleep(node: Node, room: Room, ctx: Context) -> Any:
    return await ctx.sleep(node[2])


async def run_asyncio_sleep(node: Node, room: Room, ctx: Context) -> Any:
    return await asyncio.sleep(node[2])


async def run_signal(node: Node, room: Room, ctx: Context) -> Any:
    return await ctx.wait_signal(Wanted(node[2]), timeout=node[3])


async def run_turns(node: Node, room: Room, ctx: Context) -> Any:
    for _ in range(node[2]):
        await asyncio.sleep(0)
    room.tell(node[1], "turned")


async def run_put(node: Node, room: Room, ctx: Context) -> Any:
    try:
        room.queue.put_nowait(node[1])
    except asyncio.QueueFull:
        room.tell(node[1], "full")


async def run_get(node: Node, room: Room, ctx: Context) -> Any:
    try:
        return await asyncio.wait_for(room.queue.get(), node[2])
    except TimeoutError:
        return "none"


async def run_set_event(node: Node, room: Room, ctx: Context) -> Any:
    room.event.set()


async def run_await_event(node: Node, room: Room, ctx: Context) -> Any:
    try:
        async with asyncio.timeout(node[2]):
            await room.event.wait()
            return "set"
    except TimeoutError:
        return "unset"


async def run_raise(node: Node, room: Room, ctx: Context) -> Any:
    raise Boom(node[1])


async def run_sequence(node: Node, room: Room, ctx: Context) -> Any:
    return await _all(node[2], room)


async def run_try(node: Node, room: Room, ctx: Context) -> Any:
    try:
        return await _all(node[2], room)
    except Exception as error:
        room.tell(node[1], "handled", type(error).__name__)
        return await ctx.step(a, node[1])
    except BaseExceptionGroup:
        room.tell(node[1], "group")
        return None


async def run_finally(node: Node, room: Room, ctx: Context) -> Any:
    try:
        return await _all(node[2], room)
    finally:
        room.tell(node[1], "finally")
        await ctx.step(b, node[1])
        room.tell(node[1], "cleaned")


async def run_ctx_shield(node: Node, room: Room, ctx: Context) -> Any:
    try:
        return await _all(node[2][:1], room)
    finally:
        async with ctx.shield():
            room.tell(node[1], "shielded")
            try:
                await _all(node[2][1:], room)
            finally:
                room.tell(node[1], "end of shield")


async def run_gather(node: Node, room: Room, ctx: Context) -> Any:
    results = await asyncio.gather(*(evaluate(part, room) for part in node[2]), return_exceptions=node[3])
    return [repr(result) for result in results]


async def run_gather_calls(node: Node, room: Room, ctx: Context) -> Any:
    return await asyncio.gather(*(ctx.step(STEPS[name], node[1]) for name in node[2]))


async def run_shared(node: Node, room: Room, ctx: Context) -> Any:
    first = asyncio.ensure_future(ctx.step(STEPS[node[2][0]], node[1]))

    async def follow(index: int, name: str) -> Any:
        value = await first
        room.tell(node[1], "woken", index, value)
        return await ctx.step(STEPS[name], node[1])

    return await asyncio.gather(*(follow(index, name) for index, name in enumerate(node[2])))


async def run_barrier(node: Node, room: Room, ctx: Context) -> Any:
    barrier = asyncio.Barrier(len(node[2]))

    async def meet(index: int, name: str) -> Any:
        await ctx.step(STEPS[name], node[1])
        place = await barrier.wait()
        room.tell(node[1], "through", index, place)
        return await ctx.step(STEPS[name], place)

    return await asyncio.gather(*(meet(index, name) for index, name in enumerate(node[2])), return_exceptions=True)


async def run_condition(node: Node, room: Room, ctx: Context) -> Any:
    done: list[str] = []

    async def follow(index: int) -> None:
        async with room.condition:
            await room.condition.wait_for(lambda: done)
            room.tell(node[1], "noticed", index)

    followers = [asyncio.create_task(follow(index)) for index in range(2)]
    try:
        await evaluate(node[2], room)
    finally:
        async with room.condition:
            done.append("yes")
            room.condition.notify_all()
    return [repr(one) for one in await asyncio.gather(*followers, evaluate(node[3], room), return_exceptions=True)]


async def run_group(node: Node, room: Room, ctx: Context) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(evaluate(part, room)) for part in node[2]]
    return [repr(task.result()) for task in tasks]


async def run_loop(node: Node, room: Room, ctx: Context) -> Any:
    result = None
    for _ in range(node[2]):
        result = await _all(node[3], room)
    return result


async def run_spawn(node: Node, room: Room, ctx: Context) -> Any:
    task = asyncio.create_task(evaluate(node[2], room))
    try:
        await evaluate(node[3], room)
    finally:
        result = await asyncio.gather(task, return_exceptions=True)
    return repr(result)


async def run_spawn_and_cancel(node: Node, room: Room, ctx: Context) -> Any:
    task = asyncio.create_task(evaluate(node[2], room))
    await evaluate(node[3], room)
    task.cancel()
    return repr(await asyncio.gather(task, return_exceptions=True))


async def run_left_over(node: Node, room: Room, ctx: Context) -> Any:
    asyncio.create_task(evaluate(node[2], room))  # noqa: RUF006 - that is the point
    return await evaluate(node[3], room)


async def run_as_completed(node: Node, room: Room, ctx: Context) -> Any:
    results: list[Any] = []
    for future in asyncio.as_completed([asyncio.create_task(evaluate(part, room)) for part in node[2]]):
        try:
            results.append(repr(await future))
        except Exception as error:
            results.append(type(error).__name__)
        if node[3]:
            results.append(await ctx.step(a, node[1]))
    return results


async def run_wait(node: Node, room: Room, ctx: Context) -> Any:
    tasks = [asyncio.create_task(evaluate(part, room)) for part in node[2]]
    index = {task: number for number, task in enumerate(tasks)}
    done, pending = await asyncio.wait(tasks, return_when=getattr(asyncio, node[3]), timeout=node[4])
    results: list[Any] = []
    for task in done:
        results.append((index[task], task.cancelled() or repr(task.exception() or task.result())))
    for task in done:  # the order of a set decides which call comes first
        await ctx.step(c, index[task])
    if node[5] == "cancel":
        for task in pending:
            task.cancel()
    if node[5] != "leave":
        results.append([type(one).__name__ for one in await asyncio.gather(*pending, return_exceptions=True)])
    return results


async def run_wait_calls(node: Node, room: Room, ctx: Context) -> Any:
    futures = [asyncio.ensure_future(ctx.step(STEPS[name], node[1])) for name in node[2]]
    done, pending = await asyncio.wait(futures, return_when=getattr(asyncio, node[3]))
    if node[4]:
        for future in pending:
            future.cancel()
    return [futures.index(future) for future in done]


async def run_timeout(node: Node, room: Room, ctx: Context) -> Any:
    try:
        async with asyncio.timeout(node[2]):
            return await _all(node[3], room)
    except TimeoutError:
        room.tell(node[1], "timed out")
        return await ctx.step(a, node[1])


async def run_wait_for(node: Node, room: Room, ctx: Context) -> Any:
    try:
        return await asyncio.wait_for(_all(node[3], room), node[2])
    except TimeoutError:
        return await ctx.step(a, node[1])


async def run_chain(node: Node, room: Room, ctx: Context) -> Any:
    async def link(left: int) -> Any:
        return await (asyncio.create_task(link(left - 1)) if left else evaluate(node[3], room))

    return await link(node[2])


async def run_shield(node: Node, room: Room, ctx: Context) -> Any:
    task = asyncio.create_task(_all(node[2], room))
    try:
        return await asyncio.wait_for(asyncio.shield(task), 3)
    except TimeoutError:
        room.tell(node[1], "left")
        return await task


async def run_generator(node: Node, room: Room, ctx: Context) -> Any:
    async def produce() -> Any:
        try:
            for index in range(node[2]):
                yield await ctx.step(STEPS[node[3]], index)
        finally:
            room.tell(node[1], "generator closed")
            if room.queue.empty():
                room.queue.put_nowait("generator")

    results = []
    if node[4] == "closing":
        async with contextlib.aclosing(produce()) as generator:
            async for value in generator:
                results.append(value)
                break
    else:
        async for value in produce():
            results.append(value)
            if node[4] == "break" and len(results) == 2:
                break
    return results


async def run_callback(node: Node, room: Room, ctx: Context) -> Any:
    got: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run_step(("step", node[1], node[2]), room, ctx))

    def called(_: object) -> None:
        if not got.done():
            got.set_result(ctx.step(a, node[1]))  # a call of the context from a callback

    task.add_done_callback(called)
    return await (await got)


async def run_variable(node: Node, room: Room, ctx: Context) -> Any:
    token = USER_VARIABLE.set(str(node[1]))
    try:
        value = await _all(node[2], room)
    finally:
        USER_VARIABLE.reset(token)
    return value, await ctx.step(variable, node[1])
