"""Golden journals: what 400 programs wrote once, with the trace that they left, kept as fixtures for each replay family.

`python -m replay.golden make` writes the fixture of this interpreter's family (only when the rules of replay change on purpose, which
breaks runs in flight); `check [count]` replays it. The fuzz tests call `check`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay import programs
from replay.simulation import STARTED, disturbance_of, messages_of, play

from durable.model import RecordKind, StepRecord

COUNT = 400
FIRST = 100_000


def family() -> str:
    """Interpreters that order branches the same: 3.11, and 3.12 and later."""
    return "3.11" if sys.version_info < (3, 12) else "3.12"


def path(of: str | None = None) -> Path:
    """Where the fixture of a family lies."""
    return Path(__file__).parent / "fixtures" / f"journals-{of or family()}.json.gz"


def _digest(trace: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(trace).encode(), digest_size=12).hexdigest()


def _row(record: StepRecord) -> list[Any]:
    return [
        record.step_id,
        record.kind.value,
        record.position,
        record.seen,
        record.digest,
        record.result,
        record.at - STARTED,
        record.signal_seq,
    ]


def _record(row: Sequence[Any]) -> StepRecord:
    step_id, kind, position, seen, digest, result, at, signal_seq = row
    return StepRecord(
        step_id=step_id,
        kind=RecordKind(kind),
        position=position,
        seen=seen,
        digest=digest,
        result=result,
        at=at + STARTED,
        started_at=None,
        fence=1,
        signal_seq=signal_seq,
    )


async def _make(seed: int) -> dict[str, Any]:
    tree = programs.Draw(seed).tree()
    live = await play(tree, (), seed, messages_of(seed), disturbance=disturbance_of(seed))
    records = [_row(record) for record in live.world.durable]
    for row in records:  # the traceback of a failed step names files of this machine
        row[5] = _without_traceback(row[5])
    return {
        "seed": seed,
        "records": records,
        "ending": live.ending,
        "trace": _digest(live.trace),
        "cancelled": live.world.cancelled,
    }


def _without_traceback(result: str) -> str:
    envelope = json.loads(result)
    for data in (envelope.get("e"), envelope["v"].get("error") if isinstance(envelope.get("v"), dict) else None):
        if data:
            data["traceback"] = ""
    return json.dumps(envelope, separators=(",", ":"))


async def _check(stored: dict[str, Any]) -> list[tuple[int, str]]:
    seed = stored["seed"]
    records = [_record(row) for row in stored["records"]]
    at = records[-1].at if records else STARTED
    again = await play(programs.Draw(seed).tree(), records, 1, messages_of(seed), now=at, cancelled=stored["cancelled"])
    wrong = []
    if again.ending != stored["ending"]:
        wrong.append((seed, f"ended {again.ending}, not {stored['ending']}"))
    if _digest(again.trace) != stored["trace"]:
        wrong.append((seed, "another trace"))
    if again.world.executed or again.world.durable != records:
        wrong.append((seed, "it executed or wrote"))
    return wrong


def check(stored: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Replay stored journals; what differs."""

    async def main() -> list[tuple[int, str]]:
        return [wrong for one in stored for wrong in await _check(one)]

    return asyncio.run(main())


def main(arguments: Sequence[str]) -> int:
    """make, or check [count]."""
    logging.disable(logging.WARNING)
    if arguments[:1] == ["make"]:

        async def made() -> list[dict[str, Any]]:
            return [await _make(seed) for seed in range(FIRST, FIRST + COUNT)]

        path().parent.mkdir(exist_ok=True)
        path().write_bytes(gzip.compress(json.dumps(asyncio.run(made()), separators=(",", ":")).encode(), mtime=0))
        print(path(), path().stat().st_size)
        return 0
    stored = json.loads(gzip.decompress(path().read_bytes()))
    wrong = check(stored[: int(arguments[1])] if len(arguments) > 1 else stored)
    print(len(stored), wrong[:5])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
