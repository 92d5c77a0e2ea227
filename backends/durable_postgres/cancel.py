"""The ask to stop (semantics 43 to 46). `store.py` calls `request_cancel`; the nets and the removal of records call `ask`.

A run that was never claimed ends here, through the landing; any other is only stamped and woken, since its holder alone may end
it. All runs of a call are locked with their families first. Nothing here reads a journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from durable.model import ErrorKind, Failure, Scope, Status
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
    asked = {
        run_id: run_id in locked and within(locked[run_id].tenant_id, scope) and locked[run_id].live
        for run_id in run_ids
    }
    yield from ask(work, locked, [run_id for run_id, live in asked.items() if live], reason)
    return [asked[run_id] for run_id in run_ids]


def ask(work: Work, locked: locks.Locked, run_ids: Sequence[str], reason: str) -> Operation[None]:
    """Ask locked runs to stop, whoever's they are. A terminal or unknown one is left alone."""
    live = [locked[run_id] for run_id in run_ids if run_id in locked and locked[run_id].live]
    fresh = [standing for standing in live if standing.attempts == 0]
    claimed = [standing for standing in live if standing.attempts > 0]
    if claimed:
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
    if fresh:
        failure = Failure(message=reason or "cancelled before it was started", kind=ErrorKind.CANCELLED)
        endings = [landing.Ending(standing.run_id, Status.CANCELLED, failure=failure) for standing in fresh]
        yield from landing.land(work, locked, endings)


__all__ = ["ask", "request_cancel"]
