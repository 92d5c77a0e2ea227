"""The purge (rules 60, 61): killed before any of its commands, by any number at once, and beside a retry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
from mongo.conftest import Open
from servers.mongo_room import Room

from durable.errors import Conflict, NotFound
from durable.model import ALL, Dependency
from durable.settings import SECOND
from durable.testing.conformance.scenario import Scene, new_run
from durable_mongo.operation import Work

T = TypeVar("T")
COMMANDS = 8
"""As many as a purge of these runs sends: one that buries, six that delete what is theirs and them, one that cleans up."""


class Killed(BaseException):
    """The process ends here."""


class Interrupted(Work):
    """A work with something that happens before its n-th command that buries or deletes, once, in one task."""

    before: int | None = None
    happens: Callable[[], Awaitable[None]]
    sent = 0
    task: asyncio.Task[Any] | None = None

    @classmethod
    async def step(cls) -> None:
        if asyncio.current_task() is not cls.task:
            return
        number, cls.sent = cls.sent, cls.sent + 1
        if number == cls.before:
            await cls.happens()

    async def remove(self, table: str, where: Any) -> int:
        await self.step()
        return await super().remove(table, where)

    async def change_many(self, table: str, where: Any, change: Any, **options: Any) -> int:
        await self.step()
        return await super().change_many(table, where, change, **options)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[], Awaitable[None]]], None]]:
    """Let something happen before a command of this test's own next purge."""
    monkeypatch.setattr("durable_mongo.connection.Work", Interrupted)

    def at(command: int, happens: Callable[[], Awaitable[None]]) -> None:
        Interrupted.before, Interrupted.happens, Interrupted.sent = command, staticmethod(happens), 0  # type: ignore[assignment]
        Interrupted.task = asyncio.current_task()

    yield at
    Interrupted.before = Interrupted.task = None


Interrupt = Callable[[int, Callable[[], Awaitable[None]]], None]


async def killed() -> None:
    raise Killed


async def aside(work: Awaitable[T]) -> T:
    """Carry it out in a task of its own: nothing interrupts that."""
    return await asyncio.ensure_future(work)


async def ended_runs(scene: Scene, count: int) -> list[str]:
    """Failed runs with everything that can belong to one."""
    ids: list[str] = []
    for number in range(count):
        before = new_run(name="before", queue="none")
        await scene.store.enqueue(
            [before, new_run(name="after", queue="none", depends_on=(Dependency(run_id=before.run_id),))]
        )
        held = await scene.take(idempotency_key=f"k{number}", keep=0)
        await scene.append(held, "a")
        await scene.send(held.run.run_id)
        await scene.fail(held)
        ids.append(held.run.run_id)
    await scene.later(SECOND)
    return ids


def belongings(room: Room, ids: Sequence[str]) -> int:
    """How many documents mention these runs anywhere."""
    where = {"$in": list(ids)}
    return sum(
        room.db[name].count_documents({"run_id": where}) for name in ("durable_step", "durable_signal", "durable_key")
    ) + (room.db["durable_run"].count_documents({"_id": where}))


async def test_every_command_of_a_purge_is_one_that_can_be_interrupted(scene: Scene, interrupt: Interrupt) -> None:
    await ended_runs(scene, 3)
    interrupt(COMMANDS, killed)
    assert await scene.store.purge(scope=ALL, limit=10) == 3
    assert Interrupted.sent == COMMANDS


@pytest.mark.parametrize("command", range(COMMANDS))
async def test_a_purge_that_is_killed_before_any_command_leaves_nothing_that_the_next_does_not_find(
    scene: Scene, room: Room, interrupt: Interrupt, command: int
) -> None:
    ids = await ended_runs(scene, 3)
    interrupt(command, killed)
    with pytest.raises(Killed):
        await scene.store.purge(scope=ALL, limit=10)
    assert list(await scene.store.audit(scope=ALL)) == []
    seen = [run is not None for run in await scene.store.get(ids, scope=ALL)]
    assert seen == [command == 0] * 3
    if command == 0:  # not buried yet: they are whole
        for run_id in ids:
            assert await scene.steps(run_id) == ["a"]
    await scene.store.purge(scope=ALL, limit=10)
    assert belongings(room, ids) == 0
    assert list(await scene.store.audit(scope=ALL)) == []


@pytest.mark.parametrize("ends", ["goes on", "is killed"])
@pytest.mark.parametrize("command", range(COMMANDS))
async def test_a_second_purger_before_any_command_of_the_first_harms_neither(
    scene: Scene, opened: Open, room: Room, interrupt: Interrupt, command: int, ends: str
) -> None:
    """Also where the first one never comes back."""
    other = await opened()
    ids = await ended_runs(scene, 3)
    counts: list[int] = []

    async def second() -> None:
        counts.append(await aside(other.purge(scope=ALL, limit=10)))
        if ends == "is killed":
            raise Killed

    interrupt(command, second)
    try:
        counts.append(await scene.store.purge(scope=ALL, limit=10))
    except Killed:
        assert ends == "is killed"
    assert sum(counts) == (3 if ends == "goes on" or command == 0 else 0)
    assert belongings(room, ids) == 0
    assert list(await scene.store.audit(scope=ALL)) == []


@pytest.mark.parametrize("command", range(COMMANDS))
async def test_a_retry_before_any_command_of_a_purge_finds_a_whole_run_or_none(
    scene: Scene, room: Room, interrupt: Interrupt, command: int
) -> None:
    """Before the tombstone it wins and the purge leaves that run alone; after it there is no run."""
    retried, *others = await ended_runs(scene, 3)
    answers: list[str] = []

    async def retry() -> None:
        try:
            answers.append((await aside(scene.store.retry(retried, scope=ALL, attempts=1))).status)
        except NotFound:
            answers.append("gone")

    interrupt(command, retry)
    purged = await scene.store.purge(scope=ALL, limit=10)
    assert (answers, purged) == ((["pending"], 2) if command == 0 else (["gone"], 3))
    assert belongings(room, others) == 0
    if command == 0:
        assert await scene.steps(retried) == ["a"]
    else:
        assert belongings(room, [retried]) == 0
    assert list(await scene.store.audit(scope=ALL)) == []


async def test_a_buried_run_is_gone_for_everybody_and_its_key_and_id_are_free(
    scene: Scene, interrupt: Interrupt
) -> None:
    (run_id,) = await ended_runs(scene, 1)
    interrupt(1, killed)
    with pytest.raises(Killed):
        await scene.store.purge(scope=ALL, limit=10)
    assert await scene.gone(run_id)
    assert run_id not in [run.run_id for run in await scene.runs()]
    for call in (
        scene.history(run_id),
        scene.store.retry(run_id, scope=ALL, attempts=1),
        scene.store.explain(run_id, scope=ALL),
        scene.store.fork(run_id, scope=ALL, new_run_id="other", from_step=0),
        scene.send(run_id),
    ):
        with pytest.raises(NotFound):
            await call
    assert not await scene.cancel(run_id)
    answer = await scene.submit(idempotency_key="k0", run_id=run_id)
    assert answer.disposition == "created"
    assert await scene.steps(run_id) == []
    assert await scene.store.purge(scope=ALL, limit=10) == 0
    assert await scene.steps(run_id) == []
    assert not await scene.gone(run_id)


async def test_two_purgers_and_a_retry_at_every_step_leave_whole_runs_or_none(opened: Open, room: Room) -> None:
    """Rounds of two purgers with an operator's retry of each run beside them: the retried ones are whole, the others gone."""
    one, other = await opened(), await opened()
    from mongo.conftest import Bench

    scene = Scene(one, Bench(room))  # type: ignore[arg-type]
    for _ in range(8):
        ids = await ended_runs(scene, 4)
        retries = [one.retry(run_id, scope=ALL, attempts=1) for run_id in ids]
        first, second, *answers = await asyncio.gather(
            one.purge(scope=ALL, limit=3), other.purge(scope=ALL, limit=3), *retries, return_exceptions=True
        )
        assert isinstance(first, int)
        assert isinstance(second, int)
        kept = 0
        for run_id, answer in zip(ids, answers, strict=True):
            if isinstance(answer, BaseException):
                assert isinstance(answer, (NotFound, Conflict)), answer
                assert await scene.gone(run_id)
            else:
                kept += 1
                assert await scene.steps(run_id) == ["a"]
        assert first + second == 4 - kept
        assert list(await one.audit(scope=ALL)) == []
        room.empty()
