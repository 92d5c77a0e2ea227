"""This project as one more peer of a harness that measures durable-execution libraries side by side on one PostgreSQL.

The harness gives `common.Peer` and `common.probe` (its folder has to be on PYTHONPATH) and starts this file a second time as the
worker process. It is a program, not a test: `python peer_ours.py W1 --dsn postgresql://...` prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any

import common  # type: ignore[import-not-found]  # the harness's
from common import Peer, probe

import durable
import durable_postgres  # noqa: F401 -- imports are no part of what is measured, and a store is imported when it is opened
from durable.cli.work_commands import pace_the_collector, quick_loop_factory

registry = durable.Registry("bench")


async def one(i: int) -> dict[str, int]:
    probe.body(i)
    return {"i": i}


@durable.function(name="wf", queue="bench", registry=registry)
async def wf(ctx: durable.Context, i: int, steps: int) -> dict[str, int]:
    result = {"i": -1}
    for _ in range(steps):
        result = await ctx.step(one, i)
    probe.finished(i)
    return result


class Ours(Peer):  # type: ignore[misc]
    name = "ours"
    done_sql = f"select count(*) from durable_run where status = 'completed' and (input #>> '{{0,0}}')::bigint < {common.BACKLOG_BASE}"

    def settings(self) -> dict[str, Any]:
        return {
            "durable-sdk": importlib.metadata.version("durable-sdk"),
            "psycopg": importlib.metadata.version("psycopg"),
        }

    async def setup(self, dsn: str) -> None:
        async with durable.Client(dsn, auto_migrate=True) as client:
            await client.migrate()

    async def connect(self, dsn: str, conns: int) -> None:
        self.client = durable.Client(dsn)
        await self.client.__aenter__()

    async def close(self) -> None:
        await self.client.__aexit__(None, None, None)

    async def enqueue(self, i: int, steps: int) -> durable.Run[dict[str, int]]:
        return await self.client.start(wf, i, steps)

    async def result(self, handle: durable.Run[dict[str, int]]) -> dict[str, int]:
        return await handle.result(timeout=30)

    async def backlog(self, dsn: str, n: int, mode: str) -> None:
        await self.connect(dsn, 4)
        chosen = wf.using(priority=-10, **({"delay": "1d"} if mode == "future" else {}))
        for first in range(0, n, 1000):
            await asyncio.gather(
                *(self.client.start(chosen, common.BACKLOG_BASE + first + place, 1) for place in range(1000))
            )
        await self.close()

    def worker(self, dsn: str, concurrency: int) -> None:
        pace_the_collector()  # this, and the event loop, as `durable worker` does

        async def run() -> None:
            probe.start()
            async with durable.Client(dsn) as client:
                await durable.Worker(client, queues=["bench"], concurrency=concurrency, functions=registry).run()

        with asyncio.Runner(loop_factory=quick_loop_factory()) as runner:
            runner.run(run())


if __name__ == "__main__":
    common.main(Ours())
