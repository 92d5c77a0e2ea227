"""`durable replay APP`: today's code against stored journals, read-only. For CI, before a deploy. Exit code 1 if something would break.

Reads through the client; the rehearsal itself is the engine's (`_engine/rehearsal.py`) and writes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

import durable

from .._engine.rehearsal import Rehearsed, rehearse
from ..function import default_registry
from ..graph import results_wanted, with_results
from .options import AsJson, Everybody, Tenant, Url, load, with_client
from .output import Output

LOOKED_AT = (durable.Status.PENDING, durable.Status.RUNNING, durable.Status.SUSPENDED, durable.Status.COMPLETED)


def replay(
    app: Annotated[
        str, typer.Argument(metavar="APP", help="A module that declares durable functions, or module:registry.")
    ],
    url: Url = None,
    json: AsJson = False,
    sample: Annotated[int, typer.Option(min=1, help="The newest so many runs of its functions.")] = 100,
    run: Annotated[str | None, typer.Option("--run", help="Only this run.")] = None,
    tenant: Tenant = None,
    all_tenants: Everybody = False,
) -> None:
    """Replay stored journals with today's code and say what would break; writes nothing, begins no step."""
    found = load(app)
    registry: durable.Registry = found if isinstance(found, durable.Registry) else default_registry
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> list[Rehearsed]:
        if run is not None:
            return [await _one(client, registry, await client.get(run))]
        names = sorted({function.name for function in registry})
        if not names:
            raise durable.ConfigurationError(f"{app} declares no durable function")
        handles = [one async for one in client.runs(status=LOOKED_AT, function=names, limit=sample)]
        return [await _one(client, registry, one) for one in handles]

    rehearsed = with_client(url, work, tenant=tenant, everybody=all_tenants)
    rows = [
        {"id": one.run.run_id, "function": one.run.name, "status": str(one.run.status), "records": one.records,
         "problem": one.problem}
        for one in rehearsed
    ]  # fmt: skip
    broken = [row for row in rows if row["problem"] is not None]
    output.table("What would break", rows if output.machine else broken, ("id", "function", "status", "problem"))
    output.say(f"{len(rows)} replayed, {len(broken)} would break")
    if broken:
        raise typer.Exit(1)


async def _one(client: durable.Client, registry: durable.Registry, handle: durable.Run[Any]) -> Rehearsed:
    record = handle.record
    function = registry.get(record.name, record.version)
    if function is None:
        raise durable.ConfigurationError(
            f"run {handle.id} is of {record.name!r} {record.version or ''}, which this app does not declare",
            hint="name the module that declares it",
        )
    if wanted := results_wanted(record):
        if not record.attempts:
            return Rehearsed(
                record, 0, None
            )  # a node that was never run: it has no journal, and may have no arguments yet
        try:
            record = with_results(record, await client.store.get(wanted, scope=client.scope))
        except durable.NotFound as error:
            return Rehearsed(record, 0, error.message)
    history = await client.store.history(handle.id, scope=client.scope)
    return await rehearse(
        function, record, history, codec=client.codec, settings=client.settings, now=client.store.clock()
    )
