"""Commands of the command line, run in the process of the tests."""

from __future__ import annotations

from typer.testing import Result

import durable
from durable.cli import exit_code


def ended(result: Result) -> int:
    """The exit code: `durable.cli.main` makes one of an error, which the runner does not go through."""
    error = result.exception
    return exit_code(error) if isinstance(error, durable.DurableError) else result.exit_code
