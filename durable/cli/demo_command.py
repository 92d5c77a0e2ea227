"""`durable demo`: run the demo and print its proof."""

from __future__ import annotations

import asyncio
import dataclasses

import typer

from . import demo as demonstration
from .options import AsJson, Url
from .output import Output


def demo(url: Url = None, json: AsJson = False) -> None:
    """Five steps; the worker is killed in the middle of the fourth; a second one resumes. Exit code 1 if the proof fails."""
    output = Output(json_wanted=json)
    # Piped output stays readable: only --json asks for JSON here.
    output.machine = json
    proof = asyncio.run(demonstration.show(url, output.say))
    if json:
        output.data({**dataclasses.asdict(proof), "holds": proof.holds})
    else:
        output.say("")
        output.table(
            "What the journal and the steps' own log say",
            [_row(step) for step in proof.steps],
            list(_row(proof.steps[0])),
        )
        output.say("")
        for fault in proof.faults:
            output.say(f"  fault: {fault}", style="red")
        if proof.holds:
            output.say(
                f"The run completed on its claim {proof.claims}. No recorded step ran again, the interrupted one was done again,"
                " every effect is there once.",
                style="green",
            )
    if not proof.holds:
        raise typer.Exit(1)


def _row(step: demonstration.StepProof) -> dict[str, str]:
    recorded = {None: "never", 1: "worker 1"}.get(step.recorded_by, "worker 2")
    return {
        "step": step.step,
        "recorded by": recorded,
        "on resume": "replayed" if step.replayed else "done",
        "body began": f"{step.begun}×",
        "effects": str(step.ended),
    }
