"""Where the settings come from, in order; URLs and secrets; how a client is opened, used and closed."""

from __future__ import annotations

import asyncio
import importlib.metadata
import threading
from pathlib import Path
from typing import Any

import pytest

import durable
from durable import Registry
from durable.config import DEFAULT_URL, redacted, resolve
from durable.settings import SECOND

declared = Registry("test_config")


@durable.function(registry=declared)
async def double(ctx: durable.Context, n: int) -> int:
    return 2 * n


durable.function(name="double")(double.fn)


def test_arguments_come_before_the_environment_before_the_file_before_the_defaults(tmp_path: Path) -> None:
    assert resolve(environment={}, directory=tmp_path).url == DEFAULT_URL
    (tmp_path / "pyproject.toml").write_text('[tool.durable]\nurl = "sqlite:///project.db"\n')
    assert resolve(environment={}, directory=tmp_path).url == "sqlite:///project.db"
    (tmp_path / "durable.toml").write_text('url = "sqlite:///file.db"\n[settings]\nlease = "10s"\npoll = "2s"\n')
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    found = resolve(environment={"DURABLE_POLL": "3", "DURABLE_CONCURRENCY": "7"}, directory=below)
    assert (found.url, found.settings.lease, found.settings.poll) == ("sqlite:///file.db", 10 * SECOND, 3 * SECOND)
    assert found.settings.concurrency == 7
    environment = {"DURABLE_URL": "sqlite:///environment.db", "DURABLE_LEASE": "20s"}
    assert resolve(environment=environment, directory=below).url == "sqlite:///environment.db"
    found = resolve("sqlite:///argument.db", settings={"lease": 40}, environment=environment, directory=below)
    assert (found.url, found.settings.lease) == ("sqlite:///argument.db", 40 * SECOND)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("url = 1", "not a URL"),
        ("nonsense = 1", "nonsense"),
        ("= broken", "can not be read"),
        ("settings = 3", "not a table"),
        ('auto_migrate = "maybe"', "auto_migrate"),
        ("[settings]\nleese = 3", "leese"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "durable.toml").write_text(text)
    with pytest.raises(durable.ConfigurationError, match=named):
        resolve(environment={}, directory=tmp_path)


@pytest.mark.parametrize(
    "environment", [{"DURABLE_CONCURRENCY": "many"}, {"DURABLE_AUTO_MIGRATE": "maybe"}, {"DURABLE_LEASE": "x"}]
)
def test_a_bad_variable_is_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(durable.ConfigurationError):
        resolve(environment=environment, directory=tmp_path)


def test_passwords_are_not_shown() -> None:
    secret = "postgresql://ann:hunter2@host:5432/db?sslmode=require&password=hunter2"
    assert "hunter2" not in redacted(secret)
    assert redacted("sqlite:///a/b.db") == "sqlite:///a/b.db"
    with pytest.raises(durable.ConfigurationError) as caught:
        durable.config.backend_for(secret.replace("postgresql", "elsewhere"))
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(durable.Client(secret))


def test_a_backend_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint(
        name="elsewhere", value="durable_sqlite:backend", group=durable.config.ENTRY_POINTS
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [entry])
    assert durable.config.backend_for("elsewhere://host/db") is durable.config.backend_for("sqlite://")


def test_a_missing_backend_says_what_to_install() -> None:
    for scheme, extra in (("postgresql", "postgres"), ("postgres", "postgres"), ("mongodb+srv", "mongo")):
        try:
            durable.config.backend_for(f"{scheme}://host/db")
        except durable.ConfigurationError as error:
            assert f"durable-sdk[{extra}]" in error.hint


async def test_a_client_that_is_not_open_says_async_with() -> None:
    client = durable.Client("sqlite:///:memory:")
    with pytest.raises(durable.Misuse, match="async with"):
        await client.start(double, 1)
    async with client:
        await client.start(double, 1)
    with pytest.raises(durable.Misuse, match="async with"):
        await client.count()


async def test_a_client_can_be_opened_again_and_views_share_what_is_open(url: str) -> None:
    client = durable.Client(url)
    async with client:
        await client.start(double, 1)
        async with client.using(tenant=durable.tenant_id("acme")) as view:
            assert await view.count() == 0
        assert await client.count() == 1
    async with client:
        assert await client.count() == 1


async def test_a_client_of_another_loop_is_refused(url: str) -> None:
    async with durable.Client(url) as client:

        def elsewhere() -> Any:
            return asyncio.run(client.count())

        with pytest.raises(durable.Misuse, match="event loop"):
            await asyncio.to_thread(elsewhere)


async def test_closing_a_client_ends_its_waits(url: str) -> None:
    client = durable.Client(url)
    async with client:
        run = await client.start(double, 1)
        waiting = asyncio.create_task(run.result())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises((durable.WorkerStopped, durable.Misuse)):
        await waiting


def test_the_blocking_client_has_the_same_verbs(url: str) -> None:
    async def serve(stop: threading.Event, ready: threading.Event) -> None:
        async with durable.Client(url, settings={"poll": "50ms"}) as client, durable.Worker(client, functions=declared):
            ready.set()
            await asyncio.to_thread(stop.wait)

    stop, ready = threading.Event(), threading.Event()
    with durable.SyncClient(url, settings={"poll": "50ms"}) as client:
        first = client.start(double, 1)
        assert first.status == "pending"
        assert client.count() == 1
        assert client.cancel(first.id)
        with pytest.raises(durable.RunCancelled):
            first.result()
        thread = threading.Thread(target=lambda: durable.run(lambda: serve(stop, ready)))
        thread.start()
        try:
            ready.wait(30)
            assert client.run(double, 4) == 8
            assert [run.result() for run in client.start_many(double, [1, 2])] == [2, 4]
            assert first.retry().result(timeout="30s") == 2
            acme = client.using(tenant=durable.tenant_id("acme"))
            assert acme.run(double, 5) == 10
            assert [run.tenant for run in acme.runs()] == [durable.tenant_id("acme")]
            assert client.get(first.id, double).refresh().result() == 2
            assert client.journal(first.id) is not None
            assert first.fork(from_step=0).result(timeout="30s") == 2
        finally:
            stop.set()
            thread.join()


async def test_durable_run_inside_a_loop_is_refused() -> None:
    async def main() -> None: ...

    with pytest.raises(durable.Misuse, match="await"):
        durable.run(main)


@pytest.mark.parametrize(
    "bad",
    [
        {"queues": "default"},
        {"queues": []},
        {"queues": {"default": 0}},
        {"concurrency": 0},
        {"lease": "10ms"},
        {"grace": "soon"},
        {"max_reclaims": True},
    ],
)
def test_a_worker_refuses_what_can_not_work(bad: dict[str, Any]) -> None:
    with pytest.raises(durable.ConfigurationError):
        durable.Worker(durable.Client("sqlite:///:memory:"), **bad)
