"""The ask to stop (semantics 43 to 46). `store.py` calls `request_cancel`; the nets and the removal of records call `ask`.

A run that was never claimed ends here, through the landing; any other is only stamped and woken, since its holder alone may end
it. All runs of a call are locked with their families first. Nothing here reads a journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.landing import never_started
from durable.model import Scope, Status
from durable.storekit import within

from . import landing, locks
from .operation import Operation, Work, count

# The first stamp wins. Only the first ask counts as a wake: a repeated one tells the holder nothing new. A run past its pivot keeps the
# stamp, is not woken, and goes on (46).
STAMP: Final = """
UPDATE durable_run AS r SET cancel_requested_at = coalesce(r.cancel_requested_at, now()), cancel_reason = coalesce(r.cancel_reason, $2),
    wake_seq = r.wake_seq + CASE WHEN r.cancel_requested_at IS NULL AND r.cancel_refused_at IS NULL THEN 1 ELSE 0 END, updated_at = now(),
    available_at = CASE WHEN r.status <> 'running' AND r.cancel_refused_at IS NULL THEN NULL ELSE r.available_at END,
    wake_after = CASE WHEN r.status <> 'running' AND r.cancel_refused_at IS NULL THEN 0 ELSE r.wake_after END,
    waiting_for = CASE WHEN r.status <> 'running' AND r.cancel_refused_at IS NULL THEN NULL ELSE r.waiting_for END,
    status = CASE WHEN r.status <> 'running' AND r.cancel_refused_at IS NULL THEN 'pending' ELSE r.status END
WHERE r.run_id = ANY ($1::text[])
"""


def request_cancel(work: Work, run_ids: Sequence[str], scope: Scope, reason: str) -> Operation[list[bool]]:
    """One answer per run: True where it will end cancelled, or refuse and say so; False: terminal, unknown, another tenant's."""
    locked = yield from locks.family(run_ids)
    seen = {run_id for run_id in run_ids if run_id in locked and within(locked[run_id].tenant_id, scope)}
    asked = yield from ask(work, locked, [run_id for run_id in run_ids if run_id in seen], reason)
    return [run_id in asked for run_id in run_ids]


def ask(work: Work, locked: locks.Locked, run_ids: Sequence[str], reason: str) -> Operation[set[str]]:
    """Ask locked runs to stop, whoever's they are; those that were asked. A terminal or unknown one is left alone, and so is a node that
    lands because of one before it."""
    asked: set[str] = set()
    claimed: list[locks.Standing] = []
    fresh: list[locks.Standing] = []
    for run_id in dict.fromkeys(run_ids):
        standing = locked.get(run_id)
        if standing is not None and standing.live:
            (claimed if standing.attempts > 0 else fresh).append(standing)
    if claimed:
        yield from _stamp(work, claimed, reason)
        asked |= {standing.run_id for standing in claimed}
    # Nodes one after the other: the end of one may be the end of the next.
    nodes = [standing for standing in fresh if standing.status == Status.SUSPENDED]
    parts = [[standing] for standing in fresh] if nodes else [fresh] if fresh else []
    for part in parts:
        live = [standing.run_id for standing in part if locked[standing.run_id].live]
        yield from landing.land(work, locked, [never_started(run_id, reason) for run_id in live])
        asked |= set(live)
    return asked


def _stamp(work: Work, claimed: Sequence[locks.Standing], reason: str) -> Operation[None]:
    yield from count(STAMP, [standing.run_id for standing in claimed], reason)
    for standing in claimed:
        first_ask = standing.cancel_requested_at is None
        standing.cancel_requested_at = standing.cancel_requested_at or work.now
        if standing.cancel_refused_at is not None:
            continue
        standing.wake_seq += first_ask
        if standing.status != Status.RUNNING:
            landing.wake(standing)
            work.announce(f"queue:{standing.queue}")
        work.announce(f"run:{standing.run_id}")


__all__ = ["ask", "request_cancel"]
