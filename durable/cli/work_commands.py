"""`durable worker APP` and `durable start APP:FUNCTION`."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeGuard

import typer

import durable

from ..config import redacted, resolve
from ..events import Event, WorkerStarted
from .options import AsJson, Tenant, Url, load, value_of, with_client
from .output import Output
from .run_commands import run_row


def pace_the_collector() -> None:
    """Look for circles of references less often, and not in what was imported: a run that is over leaves none, and the process is the
    worker's own.

    Measured: a tenth more runs per second. An application that holds a worker decides this for itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(10_000, gc.get_threshold()[0]), 10, 10)


def quick_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of uvloop, where it is installed (extra `uvloop`): a worker needs up to a tenth less processor time on it. None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def say_what_is_served(client: durable.Client, url: str | None) -> None:
    """One line on stderr as soon as the worker is registered and claims."""

    def say(event: Event) -> None:
        if isinstance(event, WorkerStarted):
            detach()
            queues, functions = ", ".join(event.queues), ", ".join(event.functions) or "none, so it claims nothing"
            store = redacted(resolve(url).url)
            print(f"durable worker: queues {queues}; functions {functions}; store {store}", file=sys.stderr, flush=True)

    detach = client.events.attach(say)


def _queues(specs: list[str]) -> dict[str, int | None]:
    queues: dict[str, int | None] = {}
    for spec in specs:
        name, _, limit = spec.partition("=")
        if limit and not (limit.isascii() and limit.isdigit() and int(limit) > 0):
            raise durable.ConfigurationError(
                f"--queue {spec}: {limit!r} is not a positive number", hint="write --queue bulk=2"
            )
        queues[name] = int(limit) if limit else None
    return queues


def worker(
    app: Annotated[
        str, typer.Argument(metavar="APP", help="A module that declares durable functions, or module:registry.")
    ],
    url: Url = None,
    queue: Annotated[
        list[str] | None, typer.Option("--queue", help="A queue, or queue=limit; may be repeated.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Bodies that run at once. Otherwise as configured: 100.")
    ] = None,
    lease: Annotated[
        str | None, typer.Option(help="How long a claim holds without a renewal. Otherwise as configured: 30s.")
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(help="How long bodies may go on after SIGTERM or SIGINT. Otherwise as configured: 30s."),
    ] = None,
    max_reclaims: Annotated[
        int | None,
        typer.Option(min=1, help="Lapsed leases in a row before a run lands failed. Otherwise as configured: 5."),
    ] = None,
    tenant: Tenant = None,
) -> None:
    """Run durable functions until SIGTERM or SIGINT; a second signal stops at once."""
    found = load(app)
    functions = list(found) if isinstance(found, durable.Registry) else None  # None: all that the module declared

    pace_the_collector()

    async def work(client: durable.Client) -> None:
        say_what_is_served(client, url)
        await durable.Worker(
            client,
            queues=_queues(queue or ["default"]),
            concurrency=concurrency,
            functions=functions,
            lease=lease,
            grace=grace,
            max_reclaims=max_reclaims,
        ).run()

    with_client(url, work, tenant=tenant, auto_migrate=None, loop_factory=quick_loop_factory())


def _is_function(one: object) -> TypeGuard[durable.Function[..., Any]]:
    return isinstance(one, durable.Function)


def start(
    function: Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The durable function.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments: JSON, or text where that is none.")
    ] = None,
    url: Url = None,
    json: AsJson = False,
    tenant: Tenant = None,
    idempotency_key: Annotated[str | None, typer.Option(help="One run per key.")] = None,
    queue: Annotated[str | None, typer.Option(help="Another queue than the declared one.")] = None,
    delay: Annotated[str | None, typer.Option(help='Start later: "90s", "2h".')] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the result; exit code 1 if the run does not complete.")
    ] = False,
) -> None:
    """Start a run and print it."""
    found = load(function)
    if isinstance(found, durable.Graph):
        found = found.function
    if not _is_function(found):
        raise durable.ConfigurationError(
            f"{function} is not a durable function", hint="declare it with @durable.function"
        )
    options: dict[str, Any] = {"idempotency_key": idempotency_key, "queue": queue, "delay": delay}
    chosen = found.using(**{name: value for name, value in options.items() if value is not None})
    output = Output(json_wanted=json)

    async def work(client: durable.Client) -> None:
        given = tuple(map(value_of, arguments or ()))
        try:
            run: durable.Run[Any] = await client.start(chosen, *given)
        except (TypeError, durable.SerializationError) as error:  # they do not fit the signature, or its types
            raise durable.ConfigurationError(
                f"{function} does not take these arguments: {error}",
                hint="pass them in the order of its parameters, without the context; each is JSON, or text where that is none",
            ) from error
        if not wait:
            output.fields("Started", {**run_row(run), "disposition": run.disposition})
            return
        result = await run.result()
        output.fields("Completed", {"id": run.id, "result": result})

    with_client(url, work, tenant=tenant, auto_migrate=None)
