"""`durable migrate | schema | purge | audit`: what keeps a store in order."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

import durable

from .. import config
from ..protocol import RowSecurity
from .options import AsJson, Everybody, Tenant, Url, with_client
from .output import Output


def migrate(
    url: Url = None,
    json: AsJson = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 if the tables are not up to date.")
    ] = False,
    sql: Annotated[
        bool, typer.Option("--sql", help="Change nothing; print the schema, for those who own their migrations.")
    ] = False,
) -> None:
    """Bring the tables to the version of this code. Safe to start many times at once."""
    if sql:
        schema(url)
        return
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> bool:
        status = await (client.schema_status() if check else client.migrate())
        output.fields("Schema", dataclasses.asdict(status))
        return status.found == status.wanted and not status.missing

    try:
        current = with_client(url, work, auto_migrate=not check)
    except durable.SchemaMismatch as error:
        if not check:
            raise
        output.fields("Schema", {"current": False, "why": error.message, "hint": error.hint})
        raise typer.Exit(1) from error
    if not current:
        raise typer.Exit(1)


def schema(
    url: Url = None,
    row_security: Annotated[
        bool, typer.Option("--row-security", help="The policies that keep tenants apart instead; PostgreSQL only.")
    ] = False,
) -> None:
    """Print the whole schema of the store that the URL names; nothing is opened."""
    backend = config.backend_for(config.resolve(url).url)
    if not row_security:
        sys.stdout.write(backend.schema())
    elif isinstance(backend, RowSecurity):
        sys.stdout.write(backend.row_security())
    else:
        raise durable.ConfigurationError(
            "this store has no row-level security", hint="on PostgreSQL the database itself can keep tenants apart"
        )


def purge(
    url: Url = None,
    json: AsJson = False,
    older_than: Annotated[
        str | None, typer.Option(help='Also runs that landed so long ago ("7d"), whatever their keep says.')
    ] = None,
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """Delete landed runs that are due, with everything that belongs to them."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        output.fields("Purged", {"runs": await client.purge(older_than=older_than)})

    with_client(url, work, tenant=tenant, everybody=all_tenants)


def audit(url: Url = None, json: AsJson = False, tenant: Tenant = None, all_tenants: Everybody = False) -> None:
    """Check every invariant that the stored rows can show. Exit code 1 if one is broken."""
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> int:
        findings = [dataclasses.asdict(finding) for finding in await client.audit()]
        output.table("Findings", findings, ("invariant", "run_id", "text"))
        return len(findings)

    if with_client(url, work, tenant=tenant, everybody=all_tenants):
        raise typer.Exit(1)
