"""The function behind `ctx.result`: its runs depend on another run, and that they are released is all they are for.

Every worker has it beside the functions it was given, and claims its runs from the queues it serves.
"""

from __future__ import annotations

from ..context import Context
from ..function import Registry, function
from ..results import AWAITED


@function(name=AWAITED, registry=Registry("the engine's own"))
async def awaited(ctx: Context) -> None:
    """Nothing."""


__all__ = ["awaited"]
