"""`durable replay`: changed code is found before it is deployed, and nothing is written or called (semantics 25)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from cli.test_cli import Shell

import durable
from durable import Registry

OLD = """
import durable
declared = durable.Registry("replayed")
calls = []

async def reserve(order: str) -> str:
    calls.append("reserve")
    return order

async def charge(order: str) -> str:
    calls.append("charge")
    return order

async def never() -> None:
    raise AssertionError("a rehearsal begins no step")

@durable.function(registry=declared)
async def shop(ctx: durable.Context, order: str, wait: bool) -> str:
    await ctx.step(reserve, order)
    await ctx.step(charge, order)
    if wait:
        await ctx.sleep("1d")
        await ctx.step(never)
    return order

@durable.function(registry=declared)
def blocking_shop(ctx: durable.SyncContext, order: str) -> str:
    ctx.sleep("1d")
    return order
"""
RESERVE = "    await ctx.step(reserve, order)\n"
CHARGE = "    await ctx.step(charge, order)\n"
NEW = OLD.replace(RESERVE + CHARGE, CHARGE + RESERVE)
GROWN = OLD.replace("    return order\n\n@durable", "    await ctx.step(never)\n    return order\n\n@durable", 1)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def _module(shell: Shell, name: str, text: str) -> Registry:
    (shell.directory / f"{name}.py").write_text(text)
    sys.path.insert(0, str(shell.directory))
    try:
        registry: Registry = __import__(name).declared
    finally:
        sys.path.remove(str(shell.directory))
    return registry


async def _stored(url: str, registry: Registry) -> list[str]:
    settings = {"park_after": "1ms"}
    async with durable.Client(url, settings=settings) as client, durable.Worker(client, functions=registry):
        functions = {function.name: function for function in registry}
        ended = await client.start(functions["shop"], "a", False)
        waiting = await client.start(functions["shop"], "b", True)
        blocking = await client.start(functions["blocking_shop"], "c")
        await ended.result(timeout="30s")
        async with asyncio.timeout(30):
            while not all([(await run.refresh()).status == "suspended" for run in (waiting, blocking)]):
                await asyncio.sleep(0.01)
        return [ended.id, waiting.id, blocking.id]


def test_what_would_break_is_found_before_it_is_deployed(shell: Shell) -> None:
    old = _module(shell, "replayed_old", OLD)
    ended, waiting, blocking = asyncio.run(_stored(shell.url, old))
    before = (shell("runs", "list"), list(__import__("replayed_old").calls))
    rows = shell("replay", "replayed_old:declared")
    assert {row["id"] for row in rows} == {ended, waiting, blocking}
    assert [row["problem"] for row in rows] == [None, None, None]
    assert (shell("runs", "list"), __import__("replayed_old").calls) == before

    _module(shell, "replayed_new", NEW)
    rows = shell("replay", "replayed_new:declared", code=1)
    broken = {row["id"]: row["problem"] for row in rows if row["problem"]}
    assert set(broken) == {ended, waiting}
    assert "the journal holds" in broken[waiting]
    assert "'reserve'" in broken[waiting]
    (only,) = shell("replay", "replayed_new:declared", "--run", blocking)
    assert only["problem"] is None
    assert len(shell("replay", "replayed_old:declared", "--sample", "1")) == 1


def test_a_step_that_is_new_at_the_end_of_a_completed_run_breaks_nothing_and_is_not_called(shell: Shell) -> None:
    old = _module(shell, "replayed_before", OLD)
    asyncio.run(_stored(shell.url, old))
    _module(shell, "replayed_grown", GROWN)
    assert all(row["problem"] is None for row in shell("replay", "replayed_grown:declared"))


def test_a_run_of_a_function_that_the_app_lacks_is_said(shell: Shell) -> None:
    old = _module(shell, "replayed_known", OLD)
    ended, *_ = asyncio.run(_stored(shell.url, old))
    _module(shell, "replayed_other", OLD.replace("async def shop", "async def other_shop"))
    shell.raw("replay", "replayed_other:declared", "--run", ended, code=2)
    assert "does not declare" in shell.errors
