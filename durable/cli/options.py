"""What several commands take: the store, the form of the output, the tenant; and how a command opens its client."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar
from uuid import UUID

import typer

import durable

T = TypeVar("T")

Url: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The store, e.g. sqlite:///shop.db. Otherwise DURABLE_URL, durable.toml or tool.durable of pyproject.toml.",
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="One line of JSON per thing, also on a terminal.")]
Tenant: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--tenant", help="A tenant's id (UUID), or any name, as durable.tenant_id makes one of it. Otherwise untagged."
    ),
]
Everybody: TypeAlias = Annotated[bool, typer.Option("--all-tenants", help="The rows of every tenant.")]


def with_client(
    url: str | None,
    work: Callable[[durable.Client], Awaitable[T]],
    *,
    tenant: str | None = None,
    everybody: bool = False,
    auto_migrate: bool | None = False,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Open a client for one command, do the work, close it. `loop_factory`: of another event loop than asyncio's own.

    Whoever only looks or acts on what is there makes no tables and changes none: a mistyped path is an error and not a new, empty
    database. None: as it is configured, for those who begin something.
    """
    if tenant is not None and everybody:
        raise durable.ConfigurationError("--tenant and --all-tenants exclude each other")

    async def main() -> T:
        async with durable.Client(url, auto_migrate=auto_migrate) as client:
            if everybody:
                return await work(client.all_tenants())
            return await work(client if tenant is None else client.using(tenant=tenant_named(tenant)))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def tenant_named(text: str) -> UUID:
    """A tenant from its id, or from any name. Raises ConfigurationError for an empty one."""
    if not text:
        raise durable.ConfigurationError("--tenant is empty")
    try:
        return UUID(text)
    except ValueError:
        return durable.tenant_id(text)


def value_of(text: str) -> Any:
    """The value of an argument: JSON, or the text itself where that is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def load(target: str) -> Any:
    """What `module:name` names, or the module. The current directory can be imported from. Raises ConfigurationError."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module_name, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise durable.ConfigurationError(
            f"{target!r} can not be loaded: {error}",
            hint="name a module, or module:function, that can be imported from the current directory",
        ) from error
    return found
