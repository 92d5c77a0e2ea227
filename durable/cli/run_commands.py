"""`durable runs list | show | cancel | retry` and `durable explain`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

import durable

from ..graph import topology_of
from .options import AsJson, Everybody, Tenant, Url, with_client
from .output import Output

app = typer.Typer(no_args_is_help=True)

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The id of a run.")]
NODE_COLUMNS = ("node", "function", "inputs", "after", "status", "id", "error")
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


async def node_rows(run: durable.Run[Any]) -> list[dict[str, Any]] | None:
    """The nodes of a graph, as the run was submitted, with how each stands; None for a run that is no graph."""
    topology = topology_of(run.record)
    if topology is None:
        return None
    nodes = await run.children()
    rows: list[dict[str, Any]] = []
    for shape in topology:
        node = nodes.get(shape["node"])
        rows.append(
            {
                "node": shape["node"],
                "function": shape["function"],
                "inputs": shape["inputs"],
                "after": shape["after"],
                "status": "not written yet" if node is None else str(node.status),
                "id": None if node is None else node.id,
                "error_kind": None if node is None else node.error_kind,
                "error": None if node is None else node.error,
            }
        )
    return rows


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
        nodes = await node_rows(run)
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
            shown = {**run_row(run), "reasons": list(explanation.reasons), "journal": journal}
            output.data(shown if nodes is None else {**shown, "nodes": nodes})
            return
        output.fields(f"Run {run.id}", {**run_row(run), "why": " ".join(explanation.reasons)})
        if nodes is not None:
            output.table("Nodes", nodes, NODE_COLUMNS)
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
        nodes = await node_rows(await client.get(run_id))
        if output.machine:
            shown = {**row, "reasons": list(explanation.reasons)}
            output.data(shown if nodes is None else {**shown, "nodes": nodes})
            return
        output.fields(f"Run {run_id}", {**row, "why": " ".join(explanation.reasons)})
        if nodes is not None:
            output.table("Nodes", nodes, NODE_COLUMNS)

    with_client(url, work, tenant=tenant, everybody=all_tenants)
