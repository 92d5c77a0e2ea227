"""Encryption at rest, as a user has it (semantics 72): nothing readable in the file, keys that change, and texts that somebody moved."""

from __future__ import annotations

import base64
import os
import signal as signals
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine.conftest import until

import durable
from durable import Registry
from durable.codec import KeyRing, digest
from durable.codec.encryption import origin_of
from durable.encrypted import HAND_BACK
from durable.model import ErrorKind, Status
from durable.settings import SECOND

declared = Registry("test_encryption")
OLD, NEW = bytes(range(32)), bytes(range(32, 64))
WORD = durable.Signal("word", str)
SECRET = "plain-secret"


async def keep(text: str) -> str:
    return f"{text}-kept"


async def read_back(con: sqlite3.Connection, text: str) -> str:
    (found,) = con.execute("SELECT ?", (text,)).fetchone()
    return str(found)


async def refuse(text: str) -> str:
    raise ValueError(f"{text}-refused")


@durable.function(registry=declared)
async def child(ctx: durable.Context, text: str) -> str:
    return f"{text}-from-child"


@durable.function(name="encryption_echo")  # `schedules.trigger` looks for it in the default registry
async def echo(ctx: durable.Context, text: str) -> str:
    return await ctx.step(keep, text)


@durable.function(registry=declared)
async def failing(ctx: durable.Context, text: str) -> str:
    return await ctx.step(refuse, text)


@durable.function(registry=declared)
async def listening(ctx: durable.Context, text: str) -> str:
    await ctx.step(keep, text)
    return text + await ctx.wait_signal(WORD)


@durable.function(registry=declared)
async def everything(ctx: durable.Context, text: str) -> dict[str, str]:
    kept = await ctx.step(keep, text)
    await ctx.progress(1, 2, f"{text}-progress")
    await ctx.publish("shown", f"{text}-published")
    try:
        await ctx.step(refuse, text)
    except ValueError as error:
        kept += str(error)
    written = await ctx.transaction(read_back, text)
    return {"kept": kept, "child": await ctx.run(child, text), "word": await ctx.wait_signal(WORD), "row": written}


def opened(url: str, *keys: bytes, clock: Any = None) -> durable.Client:
    settings = {"poll": "50ms", "poll_idle": "50ms", "park_after": "10ms"}
    return durable.Client(url, settings=settings, encryption_key=keys or None, clock=clock)


@asynccontextmanager
async def working(client: durable.Client) -> AsyncIterator[durable.Worker]:
    async with durable.Worker(client, functions=[*declared, echo]) as worker:
        yield worker


def change(url: str, statement: str, *values: Any, **named: Any) -> None:
    """What somebody does who can write to the database."""
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
    with connection:
        assert connection.execute(statement, named or values).rowcount == 1
    connection.close()


def stored(url: str, query: str, *values: Any) -> Any:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)
    (found,) = connection.execute(query, values).fetchone()
    connection.close()
    return found


def file_bytes(url: str) -> bytes:
    path = Path(url.removeprefix("sqlite:///"))
    return b"".join(found.read_bytes() for found in sorted(path.parent.glob(f"{path.name}*")))


# -- nothing readable ---------------------------------------------------------------------------------------------------


async def do_everything(url: str, *keys: bytes) -> None:
    """Every way in which a user's values come into a store."""
    async with opened(url, *keys) as client, working(client):
        run = await client.start(everything, SECRET)
        await client.signal(run.id, WORD, f"{SECRET}-signal")
        result = await run.result(timeout="30s")
        assert result["word"] == f"{SECRET}-signal"
        assert (await run.published()) == {"shown": f"{SECRET}-published"}
        failed = await client.start(failing, SECRET)
        with pytest.raises(durable.RunFailed, match=SECRET):
            await failed.result(timeout="30s")
        assert SECRET in " ".join((await client.explain(failed.id)).reasons)
        asleep = await client.start(listening, SECRET)
        await until(lambda: _suspended(client, asleep.id), "the run to sleep")
        assert await client.cancel(asleep.id, reason=f"{SECRET}-reason")
        with pytest.raises(durable.RunCancelled, match=f"cancelled: {SECRET}-reason$"):
            await asleep.result(timeout="30s")
        assert f'{{"v":{{"reason":"{SECRET}-reason"}}}}' in [one.result for one in await client.journal(asleep.id)]
        waiting = await client.start(echo.using(delay="1h"), SECRET)
        assert await client.cancel(waiting.id, reason=f"{SECRET}-reason")
        assert (await waiting.refresh()).error == f"{SECRET}-reason"
        scheduled = await client.schedules.put("nightly", echo.using(cron="0 3 * * *"), SECRET)
        assert SECRET in scheduled.input
        assert await (await client.schedules.trigger("nightly")).result(timeout="30s") == f"{SECRET}-kept"
        copied = await client.fork(run.id, from_step=2)
        assert SECRET in copied.record.input


async def test_no_payload_is_readable_in_the_file_of_the_store(tmp_path: Path) -> None:
    """(72) The same program writes the secret in dozens of places without a key, and in none with one: not even the digest of the
    arguments, from which a short text could be guessed."""
    plain, encrypted = f"sqlite:///{tmp_path / 'plain.db'}", f"sqlite:///{tmp_path / 'encrypted.db'}"
    await do_everything(plain)
    assert file_bytes(plain).count(SECRET.encode()) > 20
    assert digest(f'[["{SECRET}"],{{}}]').encode() in file_bytes(plain)
    await do_everything(encrypted, OLD)
    found = file_bytes(encrypted)
    for form in (SECRET.encode(), base64.b64encode(SECRET.encode())[:12], SECRET.encode("utf-16-le"), OLD):
        assert form not in found
    assert stored(encrypted, "SELECT count(*) FROM durable_step WHERE digest <> ''") == 0
    assert found.count(b"durable-encrypted:1:") > 20


async def _suspended(client: durable.Client, run_id: str) -> bool:
    return (await client.get(run_id)).status == Status.SUSPENDED


@pytest.mark.parametrize("keys", [(), (OLD,)], ids=["no key", "a key"])
@pytest.mark.parametrize("mark", ["encrypted", "unreadable"])
async def test_a_reason_that_looks_like_an_encrypted_text_is_refused(
    url: str, keys: tuple[bytes, ...], mark: str
) -> None:
    """(72) Where the ask is found it would be taken for a damaged one, and the run would land without undoing anything."""
    async with opened(url, *keys) as client:
        run = await client.start(echo, "a")
        with pytest.raises(durable.SerializationError, match="marks encrypted payloads"):
            await run.cancel(reason=f'"durable-{mark}:1:a:b:c')
        assert (await run.refresh()).status == Status.PENDING


async def test_a_cancel_whose_reason_a_worker_can_not_read_is_taken_all_the_same(url: str) -> None:
    """(43, 72) The key has come to those who ask, and not to those who work: the body still hears of the cancel, and the run lands."""
    async with opened(url) as client, working(client):
        run = await client.start(listening, "a")
        await until(lambda: _suspended(client, run.id), "the run to wait")
        async with opened(url, OLD) as other:
            assert await other.cancel(run.id, reason="because")
        with pytest.raises(durable.RunCancelled, match="the reason can not be read here"):
            await run.result(timeout="20s")
        assert [one.step_id for one in await client.journal(run.id)] == ["keep", ":cancel"]


# -- keys ---------------------------------------------------------------------------------------------------------------


async def test_keys_are_rotated_under_a_waiting_run(url: str) -> None:
    """(72) The old key alone; the new one behind it; in front; alone, when no text of the old one is left."""
    async with opened(url, OLD) as client, working(client):
        run = await client.start(listening, "a")
        await until(lambda: _suspended(client, run.id), "the run to wait")
    async with opened(url, OLD, NEW) as client:
        assert (await client.get(run.id, listening)).record.input == run.record.input
    async with opened(url, NEW, OLD) as client, working(client):
        await client.signal(run.id, WORD, "b")
        assert await (await client.get(run.id, listening)).result(timeout="30s") == "ab"
        fresh = await client.start(echo, "c")
        assert await fresh.result(timeout="30s") == "c-kept"
    async with opened(url, NEW) as client:
        assert await (await client.get(fresh.id, echo)).result() == "c-kept"
        found = await client.get(run.id, listening)
        assert found.status == Status.COMPLETED
        assert await found.result() == "ab"  # its output was written with the new key
        journal = await client.journal(run.id)
        assert ["missing_key" in record.result for record in journal] == [True, False]
        assert "missing_key" in found.record.input


@pytest.mark.parametrize("keys", [(), (NEW,)], ids=["no key", "another key"])
async def test_a_worker_without_the_key_hands_a_run_back_and_one_with_it_completes_it(
    url: str, keys: tuple[bytes, ...]
) -> None:
    """(72) Nothing ends because a key was not rolled out everywhere, and the worker goes on with what it can read."""
    async with opened(url, OLD) as client:
        run = await client.start(echo, "a")
    async with opened(url, *keys) as client, working(client):
        assert await (await client.start(echo, "b")).result(timeout="30s") == "b-kept"
        handed_back = await until(lambda: _with_error(client, run.id), "the run to be handed back")
        assert (handed_back.status, handed_back.error_kind) == (Status.PENDING, ErrorKind.PAYLOAD)
        assert KeyRing([OLD]).key_ids[0] in (handed_back.error or "")
        assert handed_back.record.available_at >= client.store.clock() - SECOND
        assert [one.id async for one in client.runs()][-1] == run.id
        with pytest.raises(durable.MissingKey):
            client.codec.decode(handed_back.record.input)
    later = {"now": handed_back.record.available_at + HAND_BACK}
    async with opened(url, OLD, clock=lambda: later["now"]) as client, working(client):
        found = await client.get(run.id, echo)
        assert await found.result(timeout="30s") == "a-kept"
        assert found.record.failures == 0


async def _with_error(client: durable.Client, run_id: str) -> durable.Run[Any] | None:
    found = await client.get(run_id)
    return found if found.error is not None else None


@pytest.mark.parametrize(
    ("function", "expected"), [(echo, "a-kept"), (failing, "failed: a-refused")], ids=["completed", "failed"]
)
async def test_a_body_that_waits_for_a_run_whose_key_is_missing_looks_again_and_records_no_mark(
    url: str, function: durable.Function[[str], str], expected: str
) -> None:
    @durable.function(registry=(own := Registry("waiters")))
    async def waiter(ctx: durable.Context, run_id: str) -> str:
        try:
            return str(await ctx.result(run_id))
        except durable.RunFailed as error:
            return f"failed: {error.__cause__}"

    async with opened(url, OLD) as client, working(client):
        awaited = await client.start(function, "a")
        await until(lambda: _landed(client, awaited.id), "the run to land")
    async with opened(url, NEW) as client, durable.Worker(client, functions=own):
        run = await client.start(waiter, awaited.id)
        await until(lambda: _attempted(client, run.id), "a look in vain")
    async with opened(url, NEW, OLD) as client, durable.Worker(client, functions=own):
        assert await (await client.get(run.id, waiter)).result(timeout="60s") == expected
        steps = [record.result for record in await client.journal(run.id) if record.kind == "step"]
        assert steps
        assert not any("unreadable" in result for result in steps)


async def _landed(client: durable.Client, run_id: str) -> bool:
    return (await client.get(run_id)).status.terminal


async def _attempted(client: durable.Client, run_id: str) -> bool:
    return any(record.kind == "attempt" for record in await client.journal(run_id))


async def test_a_reader_without_the_key_gets_a_typed_error_from_the_result(url: str) -> None:
    async with opened(url, OLD) as client, working(client):
        run = await client.start(everything, "a")
        await client.signal(run.id, WORD, "b")
        await run.result(timeout="30s")
        assert (await run.refresh()).progress == durable.Progress(1, 2, "a-progress")
    async with opened(url) as client:
        found = await client.get(run.id, everything)
        with pytest.raises(durable.MissingKey) as caught:
            await found.result()
        assert "DURABLE_ENCRYPTION_KEY" in caught.value.hint
        with pytest.raises(durable.MissingKey):
            assert found.progress
        with pytest.raises(durable.MissingKey):
            await found.published()
        assert "missing_key" in found.record.input


async def test_a_worker_without_the_key_leaves_a_schedule_to_others_and_does_not_trigger_it(url: str) -> None:
    now = {"now": 1_800_000_000 * SECOND}
    async with opened(url, OLD, clock=lambda: now["now"]) as client:
        await client.schedules.put("nightly", echo.using(cron="0 3 * * *"), "a")
        now["now"] += 90_000 * SECOND
    async with opened(url, clock=lambda: now["now"]) as client:
        with pytest.raises(durable.MissingKey):
            await client.schedules.trigger("nightly")
        assert list((await client.store.due_schedules(scope=None, limit=10))[1]) == []
        assert await client.count() == 0
    async with opened(url, OLD, clock=lambda: now["now"]) as client, working(client):
        (run,) = await until(lambda: _all_runs(client), "the schedule to fire")
        assert await run.result(timeout="30s") == "a-kept"


async def _all_runs(client: durable.Client) -> list[durable.Run[Any]]:
    return [run async for run in client.runs()]


async def test_texts_from_before_the_encryption_are_read(url: str) -> None:
    async with opened(url) as client, working(client):
        run = await client.start(listening, "a")
        await until(lambda: _suspended(client, run.id), "the run to wait")
        await client.schedules.put("nightly", echo.using(cron="0 3 * * *"), "b")
    async with opened(url, OLD) as client, working(client):
        await client.signal(run.id, WORD, "b")
        assert await (await client.get(run.id, listening)).result(timeout="30s") == "ab"
        assert await (await client.schedules.trigger("nightly")).result(timeout="30s") == "b-kept"
    assert stored(url, "SELECT output FROM durable_run WHERE run_id = ?", run.id).startswith('"durable-encrypted')


@pytest.mark.parametrize("text", ["", "no key"])
def test_a_variable_without_a_key_is_refused_before_anything_is_opened(
    monkeypatch: pytest.MonkeyPatch, url: str, text: str
) -> None:
    monkeypatch.setenv("DURABLE_ENCRYPTION_KEY", text)
    with pytest.raises(durable.ConfigurationError, match="DURABLE_ENCRYPTION_KEY"):
        durable.Client(url)
    assert not Path(url.removeprefix("sqlite:///")).exists()


def test_the_environment_gives_the_key_also_to_the_blocking_client(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DURABLE_ENCRYPTION_KEY", base64.b64encode(OLD).decode())
    with durable.SyncClient(url) as client:
        run = client.start(echo, SECRET)
    with durable.SyncClient(url, encryption_key=[NEW, OLD]) as client:
        assert SECRET in client.get(run.id).record.input
    assert SECRET.encode() not in file_bytes(url)


# -- texts that somebody changed or moved ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE durable_run SET input = replace(input, substr(input, -9, 3), 'AAA') WHERE run_id = :run", "changed"),
        ("UPDATE durable_run SET input = substr(input, 1, 60) || '\"' WHERE run_id = :run", "form|changed|key"),
        (
            "UPDATE durable_run SET input = (SELECT input FROM durable_run WHERE name = 'child') WHERE run_id = :run",
            "place",
        ),
        (
            (
                "UPDATE durable_run SET input = (SELECT replace(input, run_id, :run) FROM durable_run WHERE name = 'child')"
                " WHERE run_id = :run"
            ),
            "changed",
        ),
        (
            "UPDATE durable_run SET input = (SELECT result FROM durable_step WHERE run_id = :run) WHERE run_id = :run",
            "moved",
        ),
        (
            "UPDATE durable_run SET tenant_id = '6f1c2f0e-52b1-5a5e-9d3a-2f6f0c8f4a11' WHERE run_id = :run",
            "moved here from another tenant",
        ),
        (
            "UPDATE durable_step SET result = replace(result, substr(result, -9, 3), 'AAA') WHERE run_id = :run",
            "changed",
        ),
        ("UPDATE durable_step SET step_id = 'another' WHERE run_id = :run", "moved"),
        (
            "UPDATE durable_signal SET payload = (SELECT input FROM durable_run r WHERE r.run_id = :run) WHERE run_id = :run",
            "moved",
        ),
    ],
    ids=[
        "a changed input",
        "an input that is cut",
        "another run's input",
        "another run's input under this run's id",
        "a record as input",
        "a run given to another tenant",
        "a changed record",
        "a record under another step",
        "an input as signal",
    ],
)
async def test_a_run_with_a_text_that_was_changed_or_moved_fails_and_no_other(
    url: str, statement: str, what: str
) -> None:
    """(9, 72) It lands `failed`, kind `payload`, with the reason; the worker and every other run go on."""
    async with opened(url, OLD) as client:
        async with working(client):
            run = await client.start(listening, "a")
            await until(lambda: _suspended(client, run.id), "the run to wait")
            await (await client.start(child, "x")).result(timeout="30s")
        await client.signal(run.id, WORD, "b")
        change(url, statement, run=run.id)
        seen = client.all_tenants()
        assert len([one async for one in seen.runs()]) == 2
        async with working(client):
            other = await client.start(echo, "c")
            assert await other.result(timeout="30s") == "c-kept"
            found = await seen.get(run.id)
            with pytest.raises(durable.RunFailed, match=what) as caught:
                await found.result(timeout="30s")
            assert caught.value.error_kind == ErrorKind.PAYLOAD
            assert isinstance(caught.value.__cause__, durable.EncryptionError)


async def test_an_unreadable_end_of_a_child_ends_its_parent_alone(url: str) -> None:
    @durable.function(registry=(own := Registry("parents")))
    async def parent(ctx: durable.Context) -> str:
        return await ctx.run(child.using(queue="elsewhere"), "x")

    async with opened(url, OLD) as client:
        async with durable.Worker(client, functions=own):
            run = await client.start(parent)
            await until(lambda: _suspended(client, run.id), "the parent to wait")
        async with durable.Worker(client, functions=declared, queues=["elsewhere"]):
            (one,) = await client.store.children(run.id, scope=None)
            assert await (await client.get(one.run_id, child)).result(timeout="30s") == "x-from-child"
        change(url, "UPDATE durable_run SET output = input WHERE run_id = ?", one.run_id)
        async with durable.Worker(client, functions=own):
            with pytest.raises(durable.RunFailed, match="moved"):
                await run.result(timeout="30s")


async def test_a_damaged_schedule_is_parked_with_the_reason(url: str) -> None:
    """(55, 72)"""
    now = {"now": 1_800_000_000 * SECOND}
    async with opened(url, OLD, clock=lambda: now["now"]) as client:
        await client.schedules.put("damaged", echo.using(cron="0 3 * * *"), "a")
        await client.schedules.put("sound", echo.using(cron="0 3 * * *"), "b")
        change(
            url,
            "UPDATE durable_schedule SET input = (SELECT input FROM durable_schedule WHERE schedule_id = ':sound')"
            " WHERE schedule_id = ':damaged'",
        )
        now["now"] += 90_000 * SECOND
        async with working(client):
            (run,) = await until(lambda: _all_runs(client), "the sound one to fire")
            assert await run.result(timeout="30s") == "b-kept"
        parked = {one.schedule_id: one.parked_reason for one in await client.schedules.all()}
        assert parked["sound"] is None
        assert "another place" in (parked["damaged"] or "")


# -- what a store itself moves -----------------------------------------------------------------------------------------------


async def test_a_fork_of_a_fork_is_read_also_when_those_before_it_are_purged(url: str) -> None:
    """(51, 72) A copied text stays encrypted for the run it was made for."""
    async with opened(url, OLD) as client, working(client):
        first = await client.start(everything, "a")
        await client.signal(first.id, WORD, "b")
        result = await first.result(timeout="30s")
        second = await client.fork(first.id, from_step=3)
        await client.signal(second.id, WORD, "c")
        assert (await second.result(timeout="30s"))["word"] == "c"
        third = await client.fork(second.id, from_step=2)
        copied = stored(url, "SELECT result FROM durable_step WHERE run_id = ? AND position = 0", third.id)
        assert origin_of(copied) == first.id
        await client.signal(third.id, WORD, "d")
        assert await third.result(timeout="30s") == {**result, "word": "d"}
        change(url, "UPDATE durable_run SET purge_at = 1 WHERE run_id = ?", first.id)
        change(url, "UPDATE durable_run SET purge_at = 1 WHERE run_id = ?", second.id)
        assert await client.purge() >= 2
        assert "missing" not in (await client.get(third.id)).record.input
        fourth = await client.fork(third.id, from_step=1)
        await client.signal(fourth.id, WORD, "e")
        assert (await fourth.result(timeout="30s"))["word"] == "e"


async def test_a_text_of_a_run_that_is_no_ancestor_is_refused_in_a_fork(url: str) -> None:
    async with opened(url, OLD) as client:
        async with working(client):
            first, stranger = await client.start(echo, "a"), await client.start(echo, "b")
            await first.result(timeout="30s")
            await stranger.result(timeout="30s")
        copied = await client.fork(first.id, from_step=1)
        change(
            url,
            "UPDATE durable_run SET input = (SELECT input FROM durable_run WHERE run_id = ?) WHERE run_id = ?",
            stranger.id,
            copied.id,
        )
        async with working(client):
            with pytest.raises(durable.RunFailed, match="another place"):
                await copied.result(timeout="30s")


async def test_an_input_that_took_the_place_of_a_waiting_one_is_read(url: str) -> None:
    """(37, 72) It is encrypted for the coalesce key, since nobody knows beforehand which run waits; also in a fork."""
    async with opened(url, OLD) as client:
        kept = await client.start(echo.using(coalesce_key="k", on_coalesce="join"), "a")
        replaced = await client.start(echo.using(coalesce_key="k", on_coalesce="replace"), "b")
        assert replaced.id == kept.id
        assert replaced.record.input == '[["b"],{}]'
        other = await client.start(echo.using(coalesce_key="another", on_coalesce="replace"), "c")
        async with working(client):
            assert await kept.result(timeout="30s") == "b-kept"
            assert await other.result(timeout="30s") == "c-kept"
            copied = await client.fork(kept.id, from_step=0)
            assert await copied.result(timeout="30s") == "b-kept"
        copied = await client.fork(kept.id, from_step=0)
        change(
            url,
            "UPDATE durable_run SET input = (SELECT input FROM durable_run WHERE run_id = ?) WHERE run_id = ?",
            other.id,
            copied.id,
        )
        async with working(client):
            with pytest.raises(durable.RunFailed, match="another place"):
                await copied.result(timeout="30s")


async def test_what_comes_from_the_view_on_all_tenants_is_encrypted_for_the_run_s_own(url: str) -> None:
    async with opened(url, OLD) as client, working(client):
        acme = client.using(tenant=durable.tenant_id("acme"))
        delayed = await acme.start(echo.using(delay="1h"), "a")
        assert await client.all_tenants().cancel(delayed.id, reason="no more")
        assert (await delayed.refresh()).error == "no more"
        run = await client.using(tenant=durable.tenant_id("acme")).start(listening, "a")
        await client.all_tenants().signal(run.id, WORD, "b")
        assert await run.result(timeout="30s") == "ab"


async def test_a_payload_at_the_limit_is_stored_and_one_over_it_refused_at_the_call(url: str) -> None:
    """(70, 72) The limit is that of the plain text, not of its longer encrypted form."""
    async with opened(url, OLD) as client, working(client):
        longest = "x" * (client.settings.max_payload - len('[[""],{}]'))
        run = await client.start(listening, longest)
        await client.signal(run.id, WORD, "b")
        with pytest.raises(durable.PayloadTooLarge):
            await client.start(echo, longest + "x")
        assert [one.id async for one in client.runs()] == [run.id]


# -- a crash ----------------------------------------------------------------------------------------------------------------

CRASHING = """
import asyncio, os, signal, sys
import durable

async def first(text: str) -> str:
    return text + "-first"

async def second(text: str) -> str:
    if not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return text + "-second"

@durable.function(name="crashing")
async def crashing(ctx: durable.Context, text: str) -> str:
    return await ctx.step(second, await ctx.step(first, text))

async def main() -> None:
    async with durable.Client(sys.argv[1], settings={"poll": "50ms", "poll_idle": "50ms"}) as client:
        async with durable.Worker(client, functions=[crashing], lease="3s"):
            key = crashing.using(idempotency_key="one")
            print(await (await client.start(key, "plain-secret")).result(timeout="60s"))

asyncio.run(main())
"""


def test_a_killed_worker_s_run_is_replayed_from_an_encrypted_journal(url: str, tmp_path: Path) -> None:
    """(72) With the key from the environment, by a real SIGKILL inside a step."""
    program = tmp_path / "crashing.py"
    program.write_text(CRASHING, encoding="utf-8")
    environment: Mapping[str, str] = {**os.environ, "DURABLE_ENCRYPTION_KEY": base64.b64encode(OLD).decode()}
    command = [sys.executable, str(program), url, str(tmp_path / "killed")]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert killed.returncode == -signals.SIGKILL, killed.stderr
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert (again.stdout.strip(), again.returncode) == ("plain-secret-first-second", 0), again.stderr
    assert SECRET.encode() not in file_bytes(url)
    assert stored(url, "SELECT attempts FROM durable_run") == 2
