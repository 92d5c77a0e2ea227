"""`durable runs list | show | cancel | retry` and `durable explain`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

import durable

from .options import AsJson, Everybody, Tenant, Url, with_client
from .output import Output

app = typer.Typer(no_args_is_help=True)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run.")]
LISTED = ("id", "function", "status", "queue", "created_at", "failures", "error_kind", "error")


def run_row(run: durable.Run[Any]) -> dict[str, Any]:
    """What a listing says of a run."""
    return {
        "id": run.id,
        "function": run.function,
        "status": str(run.status),
        "queue": run.queue,
        "tenant": None if run.tenant is None else str(run.tenant),
        "created_at": run.created_at,
        "finished_at": run.finished_at,
        "failures": run.failures,
        "error_kind": run.error_kind,
        "error": run.error,
        "idempotency_key": run.idempotency_key,
        "coalesce_key": run.coalesce_key,
        "tags": dict(run.tags),
    }


@app.command("list")
def list_runs(
    url: Url = None,
    json: AsJson = False,
    status: Annotated[list[str] | None, typer.Option("--status", help="Only these states; may be repeated.")] = None,
    function: Annotated[str | None, typer.Option(help="Only runs of this function.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """List runs, newest first."""
    known = [state.value for state in durable.Status]
    for name in status or ():
        if name not in known:
            raise durable.ConfigurationError(f"--status {name}: no such state", hint="one of " + ", ".join(known))
    chosen: Any = status or None
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        rows = [run_row(run) async for run in client.runs(status=chosen, function=function, limit=limit)]
        output.table("Runs", rows, LISTED)

    with_client(url, work, tenant=tenant, everybody=all_tenants)


@app.command("show")
def show_run(
    run_id: RunId, url: Url = None, json: AsJson = False, tenant: Tenant = None, all_tenants: Everybody = False
) -> None:
    """Show a run, its journal, and why it stands where it stands."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        run = await client.get(run_id)
        explanation = await client.explain(run_id)
        journal = [
            {
                "position": record.position,
                "step": record.step_id,
                "kind": str(record.kind),
                "at": datetime.fromtimestamp(record.at / 1e6, UTC),
                "claim": record.fence,
                "result": record.result,
            }
            for record in await client.journal(run_id)
        ]
        if output.machine:
            output.data({**run_row(run), "reasons": list(explanation.reasons), "journal": journal})
            return
        output.fields(f"Run {run.id}", {**run_row(run), "why": " ".join(explanation.reasons)})
        output.table("Journal", journal, ("position", "step", "kind", "at", "claim", "result"))

    with_client(url, work, tenant=tenant, everybody=all_tenants)


@app.command("cancel")
def cancel_run(
    run_id: RunId,
    url: Url = None,
    json: AsJson = False,
    reason: Annotated[str, typer.Option(help="Kept with the run.")] = "",
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """Ask a run to stop. Exit code 1 if there is nothing to stop: it has ended, or is unknown."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> bool:
        return await client.cancel(run_id, reason=reason)

    accepted = with_client(url, work, tenant=tenant, everybody=all_tenants)
    output.fields("Cancel", {"id": run_id, "accepted": accepted})
    if not accepted:
        raise typer.Exit(1)


@app.command("retry")
def retry_run(
    run_id: RunId,
    url: Url = None,
    json: AsJson = False,
    extra_attempts: Annotated[int, typer.Option(min=0, help="Add so many to what its policy allows.")] = 0,
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """Run it again from what failed; what was recorded before stays recorded."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        output.fields("Retried", run_row(await client.retry(run_id, extra_attempts=extra_attempts)))

    with_client(url, work, tenant=tenant, everybody=all_tenants)


def explain(
    run_id: RunId, url: Url = None, json: AsJson = False, tenant: Tenant = None, all_tenants: Everybody = False
) -> None:
    """Say why a run stands where it stands."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        explanation = await client.explain(run_id)
        row = {"id": run_id, "status": str(explanation.run.status), "code": explanation.code}
        if output.machine:
            output.data({**row, "reasons": list(explanation.reasons)})
            return
        output.fields(f"Run {run_id}", {**row, "why": " ".join(explanation.reasons)})

    with_client(url, work, tenant=tenant, everybody=all_tenants)
