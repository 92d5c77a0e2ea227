"""`durable queues list | pause | resume | limit | fair`: flow control of one tenant's runs, the untagged, or everybody's together."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import durable

from ..instants import moment
from ..model import ALL, QueueRecord
from ..settings import SECOND
from .options import AsJson, Everybody, Tenant, Url, with_client
from .output import Output

app = typer.Typer(no_args_is_help=True)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of a queue.")]
LISTED = ("queue", "ready", "delayed", "blocked", "suspended", "running", "oldest_ready_at", "paused", "failed")
RULES = ("scope", "tenant", "paused", "max_concurrency", "rate", "fair")


@app.command("list")
def list_queues(url: Url = None, json: AsJson = False, tenant: Tenant = None, all_tenants: Everybody = False) -> None:
    """Show what each queue holds, and every limit and pause."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        depths = [
            {
                "queue": one.queue,
                "ready": one.ready,
                "delayed": one.delayed,
                "blocked": one.blocked,
                "suspended": one.suspended,
                "running": one.running,
                "oldest_ready_at": None if one.oldest_ready_at is None else moment(one.oldest_ready_at),
                "paused": one.paused,
                "failed": sum(one.failed_by_kind.values()),
            }
            for one in await client.queues.stats()
        ]
        output.table("Queues", depths, LISTED)
        output.table("Flow control", [_rule(row) for row in await client.queues.all()], RULES)

    with_client(url, work, tenant=tenant, everybody=all_tenants)


def _rule(row: QueueRecord) -> dict[str, Any]:
    owner = "all" if row.tenant is ALL else None if row.tenant is None else str(row.tenant)
    period = (row.rate_period or 0) / SECOND
    return {
        "scope": row.scope_name,
        "tenant": owner,
        "paused": row.paused,
        "max_concurrency": row.max_concurrency,
        "rate": None if row.rate_count is None else f"{row.rate_count}/{period:g}s",
        "fair": row.fair,
    }


@app.command("pause")
def pause(queue: Queue, url: Url = None, tenant: Tenant = None, all_tenants: Everybody = False) -> None:
    """Claim nothing from a queue until it is resumed; runs in hand go on."""
    with_client(url, lambda client: client.queues.pause(queue), tenant=tenant, everybody=all_tenants)


@app.command("resume")
def resume(queue: Queue, url: Url = None, tenant: Tenant = None, all_tenants: Everybody = False) -> None:
    """Claim from a queue again."""
    with_client(url, lambda client: client.queues.resume(queue), tenant=tenant, everybody=all_tenants)


@app.command("limit")
def limit(
    queue: Queue,
    url: Url = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Runs at once, over all workers.")] = None,
    rate: Annotated[str | None, typer.Option(help='Starts in a time, such as "100/1m".')] = None,
    per_key: Annotated[int | None, typer.Option(help="Runs at once of each concurrency key.")] = None,
    per_tenant: Annotated[int | None, typer.Option(help="Runs at once of each tenant; with --all-tenants.")] = None,
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """Limit a queue. What is left out is unlimited."""

    async def work(client: durable.Client) -> None:
        await client.queues.limit(
            queue, max_concurrency=max_concurrency, rate=rate, per_key=per_key, per_tenant=per_tenant
        )

    with_client(url, work, tenant=tenant, everybody=all_tenants)


@app.command("fair")
def fair(
    queue: Queue,
    url: Url = None,
    off: Annotated[bool, typer.Option("--off", help="By priority and age again, whoever owns the runs.")] = False,
) -> None:
    """Let tenants take turns in a queue, whatever the backlog of one."""
    with_client(url, lambda client: client.queues.fair(queue, not off), everybody=True)
