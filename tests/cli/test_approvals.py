"""`durable approvals`: what runs wait to have approved, listed and answered from a shell."""

from __future__ import annotations

import asyncio

import pytest
from cli.test_cli import Shell

import durable

declared = durable.Registry("test_approvals")


@durable.function(registry=declared)
async def asks(ctx: durable.Context) -> bool:
    return await ctx.approve("pay 5 EUR")


@pytest.fixture
def shell(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:  # type: ignore[no-untyped-def]
    return Shell(tmp_path, monkeypatch, capsys)


async def _until_suspended(url: str) -> str:
    settings = {"park_after": "1ms"}
    async with durable.Client(url, settings=settings) as client, durable.Worker(client, functions=declared):
        run = await client.start(asks)
        async with asyncio.timeout(30):
            while (await run.refresh()).status != "suspended":
                await asyncio.sleep(0.01)
        return run.id


async def _result(url: str, run_id: str) -> bool:
    async with durable.Client(url) as client, durable.Worker(client, functions=declared):
        answer: bool = await (await client.get(run_id, asks)).result(timeout="30s")
        return answer


def test_open_approvals_are_listed_and_answered(shell: Shell) -> None:
    run_id = asyncio.run(_until_suspended(shell.url))
    (row,) = shell("approvals", "list")
    assert (row["what"], row["id"], row["function"]) == ("pay 5 EUR", run_id, "asks")
    assert shell("approvals", "list", "--tenant", "acme") == []
    (answered,) = shell("approvals", "answer", run_id, "pay 5 EUR", "--yes")
    assert answered["approved"] is True
    assert asyncio.run(_result(shell.url, run_id)) is True
    shell("approvals", "answer", "no-such-run", "x", "--no", code=3)
