"""`durable approvals list | answer`: what runs wait to have approved, and saying yes or no. Through the client only."""

from __future__ import annotations

from typing import Annotated

import typer

import durable

from .options import AsJson, Everybody, Tenant, Url, with_client
from .output import Output
from .run_commands import RunId

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_approvals(
    url: Url = None, json: AsJson = False, tenant: Tenant = None, all_tenants: Everybody = False
) -> None:
    """List what suspended runs wait to have approved."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        rows = [
            {
                "what": one.what,
                "id": one.run.id,
                "function": one.run.function,
                "tenant": None if one.run.tenant is None else str(one.run.tenant),
                "created_at": one.run.created_at,
            }
            async for one in client.approvals()
        ]
        output.table("Approvals", rows, ("what", "id", "function", "created_at"))

    with_client(url, work, tenant=tenant, everybody=all_tenants)


@app.command("answer")
def answer(
    run_id: RunId,
    what: Annotated[str, typer.Argument(metavar="WHAT", help="What the run asks for.")],
    yes: Annotated[bool, typer.Option("--yes/--no", help="The answer.")],
    url: Url = None,
    json: AsJson = False,
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """Say yes or no."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        await client.approve(run_id, what, yes)
        output.fields("Answered", {"id": run_id, "what": what, "approved": yes})

    with_client(url, work, tenant=tenant, everybody=all_tenants)
