"""`durable tenants list | pause | resume | export | erase`. For operators: it sees all tenants."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import durable

from .options import AsJson, Url, tenant_named, with_client
from .output import Output

app = typer.Typer(no_args_is_help=True)

Named = Annotated[
    str,
    typer.Argument(metavar="TENANT", help="A tenant's id (UUID), or any name, as durable.tenant_id makes one of it."),
]
LISTED = ("tenant", "paused", "live", "landed", "schedules", "runs")
LIVE = ("pending", "running", "suspended")


@app.command("list")
def list_tenants(url: Url = None, json: AsJson = False) -> None:
    """Show what is stored of each tenant. The first line may be the untagged runs, which have none."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        rows = [
            {
                "tenant": None if one.tenant is None else str(one.tenant),
                "paused": one.paused,
                "live": sum(one.runs.get(state, 0) for state in LIVE),
                "landed": sum(count for state, count in one.runs.items() if state not in LIVE),
                "schedules": one.schedules,
                "runs": dict(one.runs),
            }
            for one in await client.tenants.all()
        ]
        output.table("Tenants", rows, LISTED)

    with_client(url, work, everybody=True)


@app.command("pause")
def pause(tenant: Named, url: Url = None) -> None:
    """Claim none of a tenant's runs until it is resumed; runs in hand go on."""
    with_client(url, lambda client: client.tenants.pause(tenant_named(tenant)), everybody=True)


@app.command("resume")
def resume(tenant: Named, url: Url = None) -> None:
    """Claim a tenant's runs again."""
    with_client(url, lambda client: client.tenants.resume(tenant_named(tenant)), everybody=True)


@app.command("export")
def export(tenant: Named, url: Url = None) -> None:
    """Print everything that is stored of a tenant: a line of JSON per schedule, limit, run, record and signal."""

    async def work(client: durable.Client) -> None:
        async for line in client.tenants.export(tenant_named(tenant)):
            sys.stdout.write(f"{line}\n")

    with_client(url, work, everybody=True)


@app.command("erase")
def erase(
    tenant: Named,
    url: Url = None,
    json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete everything that is stored of a tenant. Refused while it has live runs: cancel them and let them land first."""
    output = Output(json_wanted=json)
    wanted = tenant_named(tenant)
    if not yes:
        typer.confirm(f"Delete everything of tenant {wanted}? It can not be undone.", abort=True, err=True)

    async def work(client: durable.Client) -> None:
        output.fields("Erased", {"tenant": str(wanted), "rows": await client.tenants.erase(wanted)})

    with_client(url, work, everybody=True)
