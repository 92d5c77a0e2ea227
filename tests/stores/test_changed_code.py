"""Somebody reorders two steps under a run: `durable replay` finds it before the deploy; deployed, it stops the run with an error that
names both; the old code put back lets it finish (semantics 25). Real worker processes and a file that changes, on SQLite and PostgreSQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from servers import postgres

import durable

APP = """
from pathlib import Path

import durable

declared = durable.Registry("changing_shop")
go = durable.Signal("go", str)


def log(line: str) -> str:
    with Path(__file__).with_name("log").open("a") as file:
        file.write(line + "\\n")
    return line


async def reserve(order: str) -> str:
    return log(f"reserve {order}")


async def charge(order: str) -> str:
    return log(f"charge {order}")


@durable.function(registry=declared)
async def shop(ctx: durable.Context, order: str) -> str:
    await ctx.step(reserve, order)
    await ctx.step(charge, order)
    return await ctx.wait_signal(go)
"""
RESERVE, CHARGE = "    await ctx.step(reserve, order)\n", "    await ctx.step(charge, order)\n"
REORDERED = APP.replace(RESERVE + CHARGE, CHARGE + RESERVE)
GO = durable.Signal("go", str)
PATIENCE = 90.0


class Deployment:
    """The directory of an application, and its processes."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.url = directory, url
        self.app = directory / "changing_shop.py"
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(directory),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DURABLE_URL": url,
            "DURABLE_POLL": "100ms",
            "DURABLE_PARK_AFTER": "50ms",
        }

    @property
    def told(self) -> str:
        """What the error says: what the journal holds, what the code asks for, and where."""
        line = REORDERED.splitlines().index(CHARGE.rstrip("\n")) + 1
        return (
            "the code of shop has changed under a run\n"
            "  the journal holds  position 0: step 'reserve'\n"
            f"  the code asks for  step 'charge' at {self.app}:{line}, in shop"
        )

    def deploy(self, text: str) -> None:
        self.app.write_text(text)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "durable", *words]

    @contextlib.contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            self.command("worker", "changing_shop:declared"), cwd=self.directory, env=self.environment
        )
        try:
            yield process
            assert process.poll() is None, "the worker ended by itself"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def replay(self) -> tuple[int, list[str | None]]:
        """The exit code of `durable replay`, and the problem of each run."""
        done = subprocess.run(
            self.command("replay", "changing_shop:declared"),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, [
            json.loads(line)["problem"] for line in done.stdout.splitlines() if line.startswith("{")
        ]

    def log(self) -> list[str]:
        return (self.directory / "log").read_text().splitlines()


@pytest.fixture(params=["sqlite", "postgresql"])
def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> Deployment:
    url = f"sqlite:///{tmp_path / 'shop.db'}" if request.param == "sqlite" else postgres.server().create().url
    return Deployment(tmp_path, url)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.mark.timeout(300)
async def test_two_steps_reordered_under_a_run_are_found_stop_it_and_put_back_let_it_finish(
    deployment: Deployment,
) -> None:
    deployment.deploy(APP)
    registry: dict[str, object] = {"__name__": "changing_shop", "__file__": str(deployment.app)}
    exec(compile(APP, str(deployment.app), "exec", dont_inherit=True), registry)
    async with durable.Client(deployment.url, auto_migrate=True) as client:
        run = await client.start(registry["shop"], "a7")  # type: ignore[arg-type]

        async def is_(status: str) -> bool:
            return (await run.refresh()).status == status

        async def is_handed_back() -> bool:
            return (await run.refresh()).error_kind == "non_determinism" and run.status == "pending"

        with deployment.worker():
            await _until(lambda: is_("suspended"))
        before = list(await client.journal(run.id))

        deployment.deploy(REORDERED)
        code, problems = await asyncio.to_thread(deployment.replay)
        assert (code, problems) == (1, [deployment.told])
        assert list(await client.journal(run.id)) == before

        await run.signal(GO, "sent")
        with deployment.worker():
            await _until(is_handed_back)
        assert deployment.told in (run.error or "")
        assert list(await client.journal(run.id)) == before
        assert run.failures == 0

        deployment.deploy(APP)
        assert await asyncio.to_thread(deployment.replay) == (0, [None])
        with deployment.worker():
            assert await run.result(timeout=PATIENCE) == "sent"
        assert [record.step_id for record in await client.journal(run.id)] == ["reserve", "charge", "signal:go"]
        assert deployment.log() == ["reserve a7", "charge a7"]
        assert list(await client.audit()) == []
