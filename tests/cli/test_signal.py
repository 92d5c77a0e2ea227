"""`durable signal`, and the line with which `durable worker` starts."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest
from cli.test_cli import Shell

import durable

declared = durable.Registry("test_signal")
WORD = durable.Signal("word", dict[str, int])


@durable.function(registry=declared)
async def listener(ctx: durable.Context) -> int:
    return (await ctx.wait_signal(WORD))["n"]


@durable.function(registry=declared)
async def patient_listener(ctx: durable.Context) -> int:
    while True:
        try:
            return (await ctx.wait_signal(WORD))["n"]
        except durable.SerializationError:
            ctx.log.info("that was no word")


@durable.function(registry=declared)
async def told_anything(ctx: durable.Context) -> object:
    return await ctx.wait_signal(durable.Signal("anything", object))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def _started(url: str, function: durable.Function[[], object], tenant: str | None = None) -> str:
    with durable.SyncClient(url) as client:
        return (client if tenant is None else client.using(tenant=durable.tenant_id(tenant))).start(function).id


async def _result(url: str, run_id: str) -> object:
    async with durable.Client(url) as client, durable.Worker(client, functions=declared):
        return await (await client.all_tenants().get(run_id)).result(timeout="30s")


def test_a_signal_is_sent_and_taken_with_its_value(shell: Shell) -> None:
    run_id = _started(shell.url, listener)
    assert shell("signal", run_id, "word", '{"n": 7}') == [{"id": run_id, "signal": "word", "value": {"n": 7}}]
    assert asyncio.run(_result(shell.url, run_id)) == 7
    shell("signal", run_id, "word", "{}", code=1)
    assert "[conflict]" in shell.errors


@pytest.mark.parametrize(("words", "taken"), [([], None), (["plain text"], "plain text"), (['"7"'], "7"), (["7"], 7)])
def test_a_value_is_json_or_text_and_null_without_one(shell: Shell, words: list[str], taken: object) -> None:
    run_id = _started(shell.url, told_anything)
    shell("signal", run_id, "anything", *words)
    assert asyncio.run(_result(shell.url, run_id)) == taken


def test_the_same_id_is_the_same_signal(shell: Shell) -> None:
    run_id = _started(shell.url, told_anything)
    shell("signal", run_id, "anything", "first", "--id", "once")
    shell("signal", run_id, "anything", "second", "--id", "once")
    assert asyncio.run(_result(shell.url, run_id)) == "first"


def test_an_unknown_run_another_tenants_and_a_bad_name_have_their_exit_codes(shell: Shell) -> None:
    shell("migrate")
    shell("signal", "no-such-run", "word", code=3)
    run_id = _started(shell.url, told_anything, "acme")
    shell("signal", run_id, "anything", "1", code=3)
    shell("signal", run_id, "a/b", code=2)
    shell("signal", run_id, "anything", "1", "--tenant", "acme")
    assert asyncio.run(_result(shell.url, run_id)) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shop", "--queue", "bulk=2"], "durable worker: queues bulk; functions broken,"),
        (["idle:nothing"], "functions none, so it claims nothing"),
    ],
)
def test_a_worker_says_at_its_start_what_it_serves(shell: Shell, words: list[str], said: str) -> None:
    worker = shell.process("worker", *words, "--url", "sqlite:///cli.db", stderr=subprocess.PIPE)
    assert worker.stderr is not None
    try:
        line = worker.stderr.readline().decode()
        assert said in line
        assert line.endswith("; store sqlite:///cli.db\n")
    finally:
        worker.send_signal(signal.SIGTERM)
        rest = worker.communicate(timeout=30)[1]
    assert (worker.returncode, rest) == (0, b"")


def test_a_value_that_does_not_fit_is_an_error_in_the_body_which_can_wait_for_a_better_one(shell: Shell) -> None:
    bad, good = _started(shell.url, listener), _started(shell.url, patient_listener)
    for run_id in (bad, good):
        shell("signal", run_id, "word", "seven")
        shell("signal", run_id, "word", '{"n": 7}')
    assert asyncio.run(_result(shell.url, good)) == 7
    with pytest.raises(durable.RunFailed, match="not a valid dict"):
        asyncio.run(_result(shell.url, bad))
