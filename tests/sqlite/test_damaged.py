"""A damaged row is shown as what it is, and hides no other: in listings, reads, waits and approvals (semantics 9)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlite.conftest import Bench

import durable
from durable.errors import StoreError
from durable.model import ALL, RunQuery, Status
from durable.testing.conformance.scenario import ACME, Scene

DAMAGE = {
    "an unknown status": ("status = 'lost'", "status"),
    "tags that are not JSON": ("tags = '{'", "tags"),
    "tags that are a list": ("tags = '[1]'", "tags"),
    "a tenant that is no UUID": ("tenant_id = 'acme'", "tenant"),
    "text that is not UTF-8": ("name = CAST(x'ff00' AS TEXT)", "name"),
    "an input of bytes": ("input = x'00ff'", "input"),
    "an instant that is text": ("created_at = 'yesterday'", "created_at"),
    "a counter that is text": ("attempts = 'many'", "attempts"),
    "a key of bytes": ("idempotency_key = x'ff'", "idempotency_key"),
    "several at once": ("status = 'lost', tags = '{', seed = 'text'", "status, seed, tags"),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_row_is_shown_as_damaged_and_hides_no_other(bench: Bench, scene: Scene, damage: str) -> None:
    change, names = DAMAGE[damage]
    runs = [await scene.start() for _ in range(5)]
    bad = runs[2].run_id
    await bench.sql("PRAGMA ignore_check_constraints = 1")
    await bench.sql(f"UPDATE durable_run SET {change} WHERE run_id = ?", bad)
    for limit in (1, 2, 3, 100):
        found = [run.run_id for run in await scene.runs(limit=limit)]
        assert sorted(found) == sorted(run.run_id for run in runs)
    (shown,) = [run for run in await scene.runs() if run.run_id == bad]
    assert shown.error == f"its stored row is damaged: {names} can not be read"
    assert shown.error_kind == "payload"
    assert shown.status is (Status.FAILED if "status" in names else Status.PENDING)
    assert await scene.get(bad) == shown
    assert [pulse and pulse.run_id for pulse in await scene.store.pulse([run.run_id for run in runs], scope=ALL)] == [
        run.run_id for run in runs
    ]
    assert await scene.store.count(RunQuery(), scope=ALL) == 5


async def test_a_damaged_child_is_shown_among_its_parents_children(bench: Bench, scene: Scene) -> None:
    family = await scene.with_children(3)
    await bench.sql("UPDATE durable_run SET tags = '{' WHERE run_id = ?", family.children[1])
    found = await scene.store.children(family.parent.run.run_id, scope=ALL)
    assert [child.run_id for child in found] == list(family.children)
    assert [child.error is not None for child in found] == [False, True, False]


async def test_another_tenants_damaged_row_stays_another_tenants(bench: Bench, scene: Scene) -> None:
    run = await scene.start(tenant=ACME)
    await bench.sql("UPDATE durable_run SET tags = '{' WHERE run_id = ?", run.run_id)
    assert await scene.runs(scope=None) == []
    assert list(await scene.store.get([run.run_id], scope=None)) == [None]


async def test_a_journal_that_can_not_be_read_is_a_typed_error_of_its_run_alone(bench: Bench, scene: Scene) -> None:
    held, other = await scene.take(), await scene.take()
    for one in (held, other):
        await scene.append(one, "a")
    await bench.sql("UPDATE durable_step SET kind = 'unheard of' WHERE run_id = ?", held.run.run_id)
    with pytest.raises(StoreError):
        await scene.history(held.run.run_id)
    assert await scene.steps(other.run.run_id) == ["a"]


@durable.function(registry=(declared := durable.Registry("test_damaged")))
async def asks(ctx: durable.Context) -> bool:
    return await ctx.approve("pay")


async def test_damaged_runs_hide_neither_approvals_nor_results(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'damaged.db'}"
    async with durable.Client(url, settings={"park_after": "1ms", "poll": "50ms"}) as client:
        async with durable.Worker(client, functions=declared):
            runs: list[durable.Run[Any]] = [await client.start(asks) for _ in range(4)]
            for run in runs:
                await _until_suspended(run)
        write = client.store._database.write  # type: ignore[attr-defined]

        async def damage(change: str, run_id: str) -> None:
            await write(lambda con, now: con.execute(f"UPDATE durable_run SET {change} WHERE run_id = ?", (run_id,)))

        await damage("waiting_for = '{'", runs[0].id)
        await damage("waiting_for = '[]'", runs[1].id)
        await write(lambda con, now: con.execute("PRAGMA ignore_check_constraints = 1"))
        await damage("status = 'lost'", runs[2].id)
        assert [one.run.id async for one in client.approvals()] == [runs[3].id]
        with pytest.raises(durable.RunFailed, match="status can not be read"):
            await runs[2].result(timeout="30s")
        await client.approve(runs[3].id, "pay", True)
        async with durable.Worker(client, functions=declared):
            assert await runs[3].result(timeout="30s") is True


async def _until_suspended(run: durable.Run[Any]) -> None:
    async for seen in run.watch():
        if seen.status == "suspended":
            return
    pytest.fail("it ended without a sleep")
