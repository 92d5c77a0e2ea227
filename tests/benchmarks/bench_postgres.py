"""Figures of one worker on PostgreSQL: W1 (one-step runs) and W2 (ten-step runs), with a floor beside them.

    python tests/benchmarks/bench_postgres.py [--rounds 3] [--w1 5000] [--w2 500] [--profile FILE]

The floor does the same work without an engine, with every fence: claims, appends and settles of many runs as one statement each, in a
transaction of its own, with the durability that the server has by default. It runs interleaved with the engine, in the same process and
on the same server. Exits 1 if the engine misses its aim: W1 >= 2,500 runs/s and W2 >= 5,000 steps/s, or 0.3 of the floor.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tools of the tests: a server to measure on

import psycopg
from figures import Aim, Batches, Bench, drained, echo, engine, figures, options
from psycopg.rows import TupleRow
from servers.postgres import server

AIMS = {"W1": Aim(2_500, 0.3), "W2": Aim(5_000, 0.3)}


async def on_engine(runs: int, steps: int, profile: cProfile.Profile | None) -> float:
    """The engine, on a database of its own."""
    database = server().create()
    try:
        return await engine(database.url, runs, steps, profile)
    finally:
        await asyncio.to_thread(database.drop)


# -- the floor ----------------------------------------------------------------------------------------------------------------

TABLES = """
CREATE TABLE run (run_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL, status text NOT NULL DEFAULT 'pending',
    priority integer NOT NULL DEFAULT 0, attempts integer NOT NULL DEFAULT 0, owner text, leased_until timestamptz,
    input jsonb NOT NULL, output jsonb);
CREATE INDEX run_ready ON run (queue, priority DESC, run_id) WHERE status = 'pending';
CREATE INDEX run_leases ON run (leased_until) WHERE status = 'running';
CREATE TABLE step (run_id bigint, step_id text, position integer, result jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run_id, step_id));
"""
CLAIM = """
UPDATE run AS r SET status = 'running', attempts = attempts + 1, owner = %s, leased_until = now() + '30 s'
FROM (SELECT run_id FROM run WHERE queue = 'q' AND status = 'pending' ORDER BY priority DESC, run_id LIMIT %s
    FOR NO KEY UPDATE SKIP LOCKED) AS h
WHERE r.run_id = h.run_id RETURNING r.run_id, r.attempts, r.owner, r.input
"""
APPEND = """
WITH held AS MATERIALIZED (
    SELECT r.run_id FROM run AS r JOIN unnest(%s::bigint[], %s::integer[], %s::text[]) AS f (run_id, attempts, owner)
        ON f.run_id = r.run_id AND f.attempts = r.attempts AND f.owner = r.owner
    WHERE r.status = 'running' ORDER BY r.run_id FOR SHARE OF r)
INSERT INTO step (run_id, step_id, position, result)
SELECT n.run_id, n.step_id, n.position, n.result FROM unnest(%s::bigint[], %s::text[], %s::integer[], %s::jsonb[])
    AS n (run_id, step_id, position, result) JOIN held ON held.run_id = n.run_id
"""
SETTLE = """
UPDATE run AS r SET status = 'completed', output = e.output, leased_until = NULL
FROM unnest(%s::bigint[], %s::integer[], %s::text[], %s::jsonb[]) AS e (run_id, attempts, owner, output)
WHERE r.run_id = e.run_id AND r.attempts = e.attempts AND r.owner = e.owner AND r.status = 'running'
"""
Held = tuple[int, int, str, dict[str, Any]]
"""A claimed run: its id and fence, and its input."""


class Floor:
    """The three operations, each on a connection of its own."""

    def __init__(self, connections: list[psycopg.AsyncConnection[TupleRow]]) -> None:
        self.claiming, self.appending, self.settling = connections
        self.one_append, self.one_settle = asyncio.Lock(), asyncio.Lock()
        self.appends, self.settles = Batches(self.append), Batches(self.settle)
        self.claims = 0

    async def claim(self, limit: int) -> list[Held]:
        self.claims += 1
        cursor = await self.claiming.execute(CLAIM, (f"w:{self.claims}", limit))
        return await cursor.fetchall()

    async def append(self, entries: list[tuple[Held, int, str]]) -> None:
        fences = ([run[place] for run, _, _ in entries] for place in range(3))
        rows = (
            [run[0] for run, _, _ in entries],
            [f"echo#{n}" for _, n, _ in entries],
            [n for _, n, _ in entries],
            [result for *_, result in entries],
        )
        async with self.one_append:
            cursor = await self.appending.execute(APPEND, (*fences, *rows))
        assert cursor.rowcount == len(entries), "a run was lost"

    async def settle(self, entries: list[tuple[Held, str]]) -> None:
        fences = ([run[place] for run, _ in entries] for place in range(3))
        async with self.one_settle:
            cursor = await self.settling.execute(SETTLE, (*fences, [output for _, output in entries]))
        assert cursor.rowcount == len(entries), "a run was lost"


async def floor(runs: int, steps: int) -> float:
    """The same work without an engine."""
    database = server().create()
    with database.connect() as con:
        con.execute(TABLES)
        con.execute(
            "INSERT INTO run (queue, input) SELECT 'q', jsonb_build_object('i', i) FROM generate_series(1, %s) AS i",
            (runs,),
        )
    connections = [
        await psycopg.AsyncConnection.connect(database.url, autocommit=True, prepare_threshold=0) for _ in range(3)
    ]
    try:
        return await _drained(Floor(connections), runs, steps)
    finally:
        for con in connections:
            await con.close()
        await asyncio.to_thread(database.drop)


async def _drained(store: Floor, runs: int, steps: int) -> float:
    async def body(run: Held) -> None:
        result = ""
        for n in range(steps):
            result = json.dumps(await echo(run[3]["i"]))
            await store.appends.put((run, n, result))
        await store.settles.put((run, result))

    return await drained(store.claim, body, runs)


# -- the report ---------------------------------------------------------------------------------------------------------------


def server_time() -> float:
    """Seconds of processor time that our own server has used, its ended sessions included; 0 where it is somebody else's."""
    process = server().process
    if process is None:
        return 0.0
    main = int((process.folder / "data" / "postmaster.pid").read_text(encoding="utf-8").partition("\n")[0])
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile: its time is with the main process
        if int(entry.name) == main:  # its own, and that of all sessions that have ended
            total += sum(int(ticks) for ticks in stat[11:15])
        elif int(stat[1]) == main:
            total += int(stat[11]) + int(stat[12])
    return total / os.sysconf("SC_CLK_TCK")


def main() -> int:
    chosen = options(__doc__ or "")
    if server().process is not None:  # the tests' own server does without it
        with psycopg.connect(server().url, autocommit=True) as con:
            con.execute("ALTER SYSTEM SET fsync = on")
            con.execute("SELECT pg_reload_conf()")
    profile = cProfile.Profile() if chosen.profile else None
    bench = Bench(lambda runs, steps: on_engine(runs, steps, profile), floor, AIMS, server_time)
    reached = figures(bench, chosen, f"PostgreSQL {server().version}")
    if profile is not None:
        profile.dump_stats(chosen.profile)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
