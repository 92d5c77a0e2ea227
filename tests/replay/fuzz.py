"""The fuzzer from a command line: `python -m replay.fuzz [count] [start] [uvloop] [eager]` with tests/ on the path."""

from __future__ import annotations

import asyncio
import sys
import time
import traceback

from replay.programs import Draw
from replay.simulation import Totals, Violation, check_seed


async def search(
    seeds: range, *, crash_points: int | None = None, first_only: bool = False, draw: type[Draw] = Draw
) -> tuple[Totals, list[tuple[int, object]]]:
    """Check the seeds; the violations found, with callbacks that raised counted among them: a uniformly broken engine
    would replay "the same"."""
    totals = Totals()
    found: list[tuple[int, object]] = []
    noise: list[object] = []

    def heard(_: object, context: dict[str, object]) -> None:
        if str(context.get("message")).startswith("Exception in callback"):
            noise.append((context.get("message"), context.get("exception")))

    asyncio.get_running_loop().set_exception_handler(heard)
    for seed in seeds:
        try:
            await check_seed(seed, totals, crash_points=crash_points, draw=draw)
        except Violation as violation:
            found.append((seed, violation.args))
        except Exception:
            found.append((seed, traceback.format_exc()))
        if noise:
            found.append((seed, tuple(noise)))
            noise.clear()
        if found and first_only:
            break
    return totals, found


def run(
    seeds: range,
    *,
    lane: str = "asyncio",
    crash_points: int | None = None,
    first_only: bool = False,
    draw: type[Draw] = Draw,
) -> tuple[Totals, list[tuple[int, object]]]:
    """The same on a loop of its own: asyncio, uvloop, or eager tasks outside."""

    async def main() -> tuple[Totals, list[tuple[int, object]]]:
        if lane == "eager":
            asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
        return await search(seeds, crash_points=crash_points, first_only=first_only, draw=draw)

    if lane == "uvloop":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    return asyncio.run(main())


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    lane = next((word for word in sys.argv[1:] if not word.isdigit()), "asyncio")
    count, start = (*numbers, 200, 0)[:2] if len(numbers) != 1 else (numbers[0], 0)
    began = time.monotonic()
    totals, found = run(range(start, start + count), lane=lane)
    print(sys.version.split()[0], lane, totals, f"{time.monotonic() - began:.0f} s", "VIOLATIONS", len(found))
    for seed, facts in found[:5]:
        print("  ", seed, str(facts)[:1500])
