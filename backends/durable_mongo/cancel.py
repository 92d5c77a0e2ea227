"""The ask to stop (semantics 43 to 46). `store.py` calls `request_cancel`; the nets and the removal of records call `ask`.

A run that was never claimed ends here, through the landing; any other is only stamped and woken, since its holder alone may end
it. Nothing here reads a journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from durable.landing import never_started
from durable.model import Scope, Status

from . import landing
from .changes import ENDED, IS_LIVE, change, plus
from .operation import Document, Work
from .rows import visible
from .times import stored

_STATE = ("status", "attempts", "tenant_id", "queue", "cancel_requested_at", "cancel_refused_at", "purging_at")


async def request_cancel(work: Work, run_ids: Sequence[str], scope: Scope, reason: str) -> list[bool]:
    """One answer per run: True where it will end cancelled, or refuse and say so; False: terminal, unknown, another tenant's."""
    answers: list[bool] = []
    for run_id in run_ids:
        row = await work.first("durable_run", {"_id": run_id}, fields=_STATE)
        seen = row is not None and visible(row, scope) and row["status"] not in ENDED
        answers.append(seen)
        if row is not None and seen:
            await _ask(work, row, reason)
    return answers


async def ask(work: Work, run_id: str, reason: str) -> None:
    """Ask a live run to stop, whoever's it is. A terminal or unknown one is left alone."""
    row = await work.first("durable_run", {"_id": run_id}, fields=_STATE)
    if row is not None and row["status"] not in ENDED:
        await _ask(work, row, reason)


async def _ask(work: Work, row: Document, reason: str) -> None:
    run_id = row["_id"]
    if row["attempts"] == 0:
        await landing.land(work, [never_started(run_id, reason)])
        return
    refused = "cancel_refused_at" in row
    first = "cancel_requested_at" not in row
    # The first stamp wins. Only the first ask counts as a wake: a repeated one tells the holder nothing new.
    put: dict[str, Any] = {"updated_at": stored(work.now)}
    if first:
        put.update(cancel_requested_at=stored(work.now), cancel_reason=reason)
    compute = {"wake_seq": plus("wake_seq", 1)} if first and not refused else {}
    drop: tuple[str, ...] = ()
    # Past its pivot it keeps the stamp, is not woken, and goes on (46).
    if not refused and row["status"] != Status.RUNNING:
        put["status"] = "pending"
        drop = ("available_at", "wake_after", "waiting_for")
        work.announce(f"queue:{row['queue']}")
    await work.change_one(
        "durable_run", {"_id": run_id, "status": IS_LIVE}, change(put=put, compute=compute, drop=drop)
    )
    if not refused:
        work.announce(f"run:{run_id}")


__all__ = ["ask", "request_cancel"]
