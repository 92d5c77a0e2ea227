"""The command line: `durable demo | worker | start | runs | queues | tenants | approvals | signal | explain | replay | doctor | migrate |
schema | purge | audit`.

Reads and acts through the client only. The URL comes from `--url`, the environment (DURABLE_URL), `durable.toml` or
`[tool.durable]` in pyproject.toml, in this order. Tables on a terminal, one line of JSON per thing otherwise (or with `--json`).

Exit codes: 0 done · 1 it was carried out and the answer is no (the proof failed, the run did not complete, a finding, an old
schema, nothing to cancel) · 2 wrong usage or configuration · 3 no such run · 4 the store can not be used now · 130 interrupted.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer

from ..config import DISTRIBUTION
from ..errors import ConfigurationError, DurableError, NotFound, RegistrationError, StoreError
from . import (
    approval_commands,
    demo_command,
    doctor,
    queue_commands,
    replay_command,
    run_commands,
    signal_command,
    store_commands,
    tenant_commands,
    work_commands,
)
from .output import complain

ANSWER_IS_NO, USAGE, NOT_FOUND, NO_STORE, INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version(DISTRIBUTION))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Durable functions: run them, look at them, keep their store in order."""


app.command("demo")(demo_command.demo)
app.command("worker")(work_commands.worker)
app.command("start")(work_commands.start)
app.add_typer(run_commands.app, name="runs", help="List, show, cancel and retry runs.")
app.add_typer(approval_commands.app, name="approvals", help="What runs wait to have approved.")
app.add_typer(queue_commands.app, name="queues", help="Look at queues, pause them, limit them.")
app.add_typer(tenant_commands.app, name="tenants", help="Count, pause, export and erase tenants.")
app.command("signal")(signal_command.signal)
app.command("explain")(run_commands.explain)
app.command("replay")(replay_command.replay)
app.command("doctor")(doctor.doctor)
app.command("migrate")(store_commands.migrate)
app.command("schema")(store_commands.schema)
app.command("purge")(store_commands.purge)
app.command("audit")(store_commands.audit)


def exit_code(error: DurableError) -> int:
    """The exit code of an error that ends a command."""
    match error:
        case NotFound():
            return NOT_FOUND
        case ConfigurationError() | RegistrationError():
            return USAGE
        case StoreError():
            return NO_STORE
        case _:
            return ANSWER_IS_NO


def main() -> None:
    """The console script."""
    try:
        app()
    except DurableError as error:
        complain(str(error))
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
