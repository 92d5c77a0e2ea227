"""The main job, shown: a run of five steps whose worker is killed with SIGKILL in the middle of the fourth, and resumes.

`durable demo` calls `show`. The proof is read back from two places that know nothing of each other: the journal in the
database, and the log that the bodies of the steps wrote themselves. Nothing here writes to the database but the client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import durable

from . import demo_steps

LEASE = "2s"
"""Short, so that the second worker takes over soon; 30 s is what a worker has otherwise."""
PATIENCE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepProof:
    """What is known of one step: from the journal (`recorded_by`: which claim recorded it) and from the log."""

    step: str
    recorded_by: int | None
    begun: int
    ended: int
    replayed: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The whole: `faults` is empty if everything that must hold holds."""

    url: str
    run_id: str
    killed_pid: int
    resumed_pid: int
    claims: int
    result: list[str]
    steps: list[StepProof]
    faults: list[str]

    @property
    def holds(self) -> bool:
        """True if nothing was lost and no recorded step ran again."""
        return not self.faults


class DemoFailed(durable.DurableError):
    """The demo could not come to its end (a worker that did not start, a step that did not come)."""

    code = "demo"


def _log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def _until(holds: Callable[[], bool], what: str, worker: subprocess.Popen[bytes]) -> None:
    for _ in range(int(PATIENCE_SECONDS / 0.02)):
        if holds():
            return
        if worker.poll() is not None:
            raise DemoFailed(f"the worker ended with exit code {worker.returncode} before {what}")
        await asyncio.sleep(0.02)
    raise DemoFailed(f"{what} did not happen within {PATIENCE_SECONDS:.0f} s")


async def show(url: str | None, say: Callable[[str], None]) -> Proof:
    """Run the demo on `url` (None: a SQLite file in a temporary directory) and give the proof. Raises DemoFailed."""
    with tempfile.TemporaryDirectory(prefix="durable-demo-") as directory:
        log = Path(directory, "steps.log")
        store = url or f"sqlite:///{Path(directory, 'demo.db')}"
        queue = f"demo-{uuid.uuid4().hex[:12]}"  # of this demo alone: what another one left or does is not in its proof
        workers: list[subprocess.Popen[bytes]] = []

        def start_worker() -> subprocess.Popen[bytes]:
            app = f"{demo_steps.__name__}:registry"
            command = [
                sys.executable,
                "-m",
                "durable",
                "worker",
                app,
                "--url",
                store,
                "--queue",
                queue,
                "--lease",
                LEASE,
            ]
            process = subprocess.Popen(command, env={**os.environ, demo_steps.LOG_VARIABLE: str(log)})
            workers.append(process)
            return process

        try:
            async with durable.Client(store, auto_migrate=True) as client:
                run = await client.start(demo_steps.checkout.using(queue=queue), "order-42")
                say(
                    f"started run {run.id} of five steps on {'a temporary SQLite file' if url is None else 'your database'}"
                )
                first = start_worker()
                say(f"worker 1 (pid {first.pid}) took it")
                begun = {"step": demo_steps.KILLED_IN, "what": "begin"}
                await _until(lambda: any(begun.items() <= line.items() for line in _log(log)), "step 4 began", first)
                first.send_signal(signal.SIGKILL)
                first.wait()
                Path(f"{log}.killed").touch()
                say(f"worker 1 was killed (SIGKILL) in the middle of step 4, {demo_steps.KILLED_IN!r}")
                second = start_worker()
                say(f"worker 2 (pid {second.pid}) waits for the lease of the dead one to lapse, then resumes")
                result = await run.result(timeout=PATIENCE_SECONDS)
                await run.refresh()
                return _prove(store, await client.journal(run.id), run, result, _log(log), first.pid, second.pid)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
                    worker.wait()


def _prove(
    url: str,
    journal: Any,
    run: durable.Run[list[str]],
    result: list[str],
    log: list[dict[str, Any]],
    killed_pid: int,
    resumed_pid: int,
) -> Proof:
    recorded = {record.step_id: record.fence for record in journal}
    begun = Counter(line["step"] for line in log if line["what"] == "begin")
    ended = Counter(line["step"] for line in log if line["what"] == "end")
    steps = [
        StepProof(
            step=step,
            recorded_by=recorded.get(step),
            begun=begun[step],
            ended=ended[step],
            replayed=recorded.get(step) == 1,
        )
        for step in demo_steps.STEPS
    ]
    faults = [f"{step.step}: the journal holds no record" for step in steps if step.recorded_by is None]
    faults += [f"{step.step}: ended {step.ended} times, not once" for step in steps if step.ended != 1]
    faults += [
        f"{step.step}: recorded before the kill, yet its body began {step.begun} times"
        for step in steps
        if step.replayed and step.begun != 1
    ]
    killed = steps[demo_steps.STEPS.index(demo_steps.KILLED_IN)]
    if killed.begun != 2:
        faults.append(
            f"{killed.step}: was to be interrupted once and done again, but its body began {killed.begun} times"
        )
    if [step.step for step in steps if step.replayed] != list(demo_steps.STEPS[: demo_steps.STEPS.index(killed.step)]):
        faults.append("the steps before the kill are not just those that worker 1 recorded")
    if {line["pid"] for line in log} != {killed_pid, resumed_pid}:
        faults.append("the log was not written by the two workers")
    if run.status != "completed":
        faults.append(f"the run is {run.status}, not completed")
    if result != [f"{step} order-42: done" for step in demo_steps.STEPS]:
        faults.append(f"the result is {result}")
    return Proof(
        url=url,
        run_id=run.id,
        killed_pid=killed_pid,
        resumed_pid=resumed_pid,
        claims=max(recorded.values(), default=0),
        result=result,
        steps=steps,
        faults=faults,
    )
