"""`durable signal RUN NAME [VALUE]`: send a signal from a shell. Through the client only."""

from __future__ import annotations

from typing import Annotated, Any

import typer

import durable

from .options import AsJson, Everybody, Tenant, Url, value_of, with_client
from .output import Output
from .run_commands import RunId


def signal(
    run_id: RunId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the signal.")],
    value: Annotated[str | None, typer.Argument(metavar="[VALUE]", help="JSON, or text where that is none.")] = None,
    url: Url = None,
    json: AsJson = False,
    signal_id: Annotated[
        str | None, typer.Option("--id", help="Sent again with the same id it is the same signal.")
    ] = None,
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """Send a signal to a run; it is kept until the body takes it. Without a value: null.

    Exit code 1 for a run that has ended, 3 for an unknown one. The body decodes the value by the type that it declares; one that
    does not fit is an error in the body, and a run that does not catch it lands failed for good.
    """
    kind: durable.Signal[Any] = durable.Signal(name, object)
    sent = None if value is None else value_of(value)
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        await client.signal(run_id, kind, sent, id=signal_id)
        output.fields("Sent", {"id": run_id, "signal": kind.name, "value": sent})

    with_client(url, work, tenant=tenant, everybody=all_tenants)
