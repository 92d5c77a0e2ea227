"""The fuzzer, in the lanes that this interpreter has: random programs, crashed after every durable write and replayed.

`DURABLE_FUZZ_PROGRAMS` sets how many programs each lane plays, with a crash at every position; without it CI plays a few. Beside
it: journals of other processes, with other hash seeds and other interpreters of the family, replayed here.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from replay import families, fuzz, golden

COUNT = int(os.environ.get("DURABLE_FUZZ_PROGRAMS", "0"))
CI_PROGRAMS = 24
LANES = ["asyncio"]
if importlib.util.find_spec("uvloop") is not None:
    LANES.append("uvloop")
if sys.version_info >= (3, 12):
    LANES.append("eager")


@pytest.mark.timeout(36_000 if COUNT else 300)
@pytest.mark.parametrize("lane", LANES)
def test_a_body_replays_as_it_ran_wherever_it_is_killed(lane: str) -> None:
    first = 1_000 * LANES.index(lane)
    if COUNT:
        totals, found = fuzz.run(range(first, first + COUNT), lane=lane)
    else:
        totals, found = fuzz.run(range(first, first + CI_PROGRAMS), lane=lane, crash_points=8)
    print(totals)
    assert not found, found[:3]
    assert totals.programs == (COUNT or CI_PROGRAMS)
    assert totals.crashes > totals.programs
    assert totals.endings["returned"] > totals.programs // 4, "most programs should come to an end of their own"


@pytest.mark.timeout(36_000 if COUNT else 300)
def test_a_body_with_children_and_sagas_replays_as_it_ran_wherever_it_is_killed() -> None:
    seeds = range(500_000, 500_000 + (COUNT or CI_PROGRAMS))
    totals, found = fuzz.run(seeds, crash_points=None if COUNT else 8, draw=families.FamilyDraw)
    print(totals)
    assert not found, found[:3]
    assert totals.programs == len(seeds)
    assert totals.crashes > totals.programs
    assert totals.kinds["start"] > totals.programs, "most programs should have a child"
    assert totals.kinds["child"] > totals.kinds["start"] // 2
    assert totals.kinds["compensation"] > totals.programs // 4


def test_journals_of_other_processes_and_interpreters_of_the_family_replay_the_same() -> None:
    path = golden.path()
    stored = json.loads(gzip.decompress(path.read_bytes()))
    assert len(stored) == golden.COUNT
    step = 1 if COUNT else 8
    assert golden.check(stored[::step]) == []


@pytest.mark.parametrize("hash_seed", ["1", "77"])
def test_another_hash_seed_replays_the_same(hash_seed: str) -> None:
    count = golden.COUNT if COUNT else 24
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join([str(root / "tests"), *sys.path]),
    }
    asked = subprocess.run(
        [sys.executable, "-m", "replay.golden", "check", str(count)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stdout[-2_000:] + asked.stderr[-2_000:]


def test_fixtures_are_small_and_of_both_families() -> None:
    for family in ("3.11", "3.12"):
        assert golden.path(family).stat().st_size < 1_000_000
