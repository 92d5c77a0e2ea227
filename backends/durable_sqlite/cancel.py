"""The ask to stop (semantics 43 to 46). `store.py` calls `request_cancel`; the nets and the removal of records call `ask`.

A run that was never claimed ends here, through the landing; any other is only stamped and woken, since its holder alone may end
it. Nothing here reads a journal.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from durable.landing import never_started
from durable.model import TERMINAL, Instant, Scope, Status

from . import landing, scopes
from .connection import announce

STATE = "SELECT status, attempts, tenant_id, queue, cancel_requested_at, cancel_refused_at FROM durable_run WHERE run_id = ?"
# The first stamp wins. Only the first ask counts as a wake: a repeated one tells the holder nothing new.
STAMP = """
UPDATE durable_run SET cancel_requested_at = coalesce(cancel_requested_at, ?), cancel_reason = coalesce(cancel_reason, ?),
    wake_seq = wake_seq + ?, updated_at = ?
WHERE run_id = ? AND status IN ('pending', 'running', 'suspended')
"""
MAKE_READY = """
UPDATE durable_run SET status = 'pending', available_at = NULL, wake_after = 0, waiting_for = NULL
WHERE run_id = ? AND status IN ('pending', 'suspended') AND attempts > 0
"""


def request_cancel(
    con: sqlite3.Connection, now: Instant, run_ids: Sequence[str], scope: Scope, reason: str
) -> list[bool]:
    """One answer per run: True where it will end cancelled, or refuse and say so; False: terminal, unknown, another tenant's."""
    return [_request(con, now, run_id, scope, reason) for run_id in run_ids]


def _request(con: sqlite3.Connection, now: Instant, run_id: str, scope: Scope, reason: str) -> bool:
    row = con.execute(STATE, (run_id,)).fetchone()
    if row is None or not scopes.sees(scope, row[2]) or row[0] in TERMINAL:
        return False
    ask(con, now, run_id, reason)
    return True


def ask(con: sqlite3.Connection, now: Instant, run_id: str, reason: str) -> None:
    """Ask a live run to stop, whoever's it is. A terminal or unknown one is left alone."""
    row = con.execute(STATE, (run_id,)).fetchone()
    if row is None or row[0] in TERMINAL:
        return
    status, attempts, _, queue, requested_at, refused_at = row
    if attempts == 0:
        landing.land(con, now, [never_started(run_id, reason)])
        return
    wakes = requested_at is None and refused_at is None
    con.execute(STAMP, (now, reason, int(wakes), now, run_id))
    if refused_at is not None:
        return  # past its pivot: it keeps the stamp, is not woken, and goes on (46)
    if status != Status.RUNNING:
        con.execute(MAKE_READY, (run_id,))
        announce(con, f"queue:{queue}")
    announce(con, f"run:{run_id}")
