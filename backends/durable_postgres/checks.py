"""What `doctor` asks of this store: the server, the schema, connections, the clock, dead rows, waiting work, the workers.

`store.py` calls `check`. Every sentence says what to do; nothing is changed.
"""

from __future__ import annotations

import datetime
import json
import time
from typing import Final

from durable.errors import DurableError
from durable.model import Check
from durable.settings import SECOND, Settings
from durable.storekit import pending

from . import schema
from .adapting import Span
from .connection import Database
from .contact import OLDEST
from .opening import SPARE
from .operation import Ask, Operation, Row, Work, together

SKEW: Final = SECOND
"""A clock of this machine that is further off shows instants in logs that the store has never seen; leases are not harmed."""
BESIDE: Final = 2
"""Connections of a worker beside its pool: that of the renewal thread, and the listener."""
DEAD: Final = 1_000_000
DEFAULT_SLOTS: Final = Settings().transaction_slots
WAITS: Final = 300 * SECOND
SERVER: Final = """
SELECT current_setting('server_version_num')::integer, current_setting('default_transaction_isolation'),
    current_setting('synchronous_commit'), current_setting('fsync'), current_setting('max_connections')::integer,
    current_setting('superuser_reserved_connections')::integer, pg_is_in_recovery(), clock_timestamp(),
    (SELECT sum(numbackends) FROM pg_stat_database)::integer
"""
DEAD_ROWS: Final = """
SELECT relname, n_dead_tup FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = ANY ($2::text[]) AND n_dead_tup > $3
ORDER BY relname
"""
OLDEST_READY: Final = """
SELECT r.queue, now() - min(r.updated_at), count(*)::integer FROM durable_run AS r
WHERE r.status = 'pending' AND r.available_at IS NULL AND r.blocked_on IS NULL GROUP BY r.queue ORDER BY 2 DESC
"""
# Names in front of a queue for which no worker was seen within a lease.
UNKNOWN: Final = """
SELECT r.queue, r.name, count(*)::integer FROM durable_run AS r
WHERE r.status = 'pending' AND r.available_at IS NULL AND NOT EXISTS (
    SELECT 1 FROM durable_worker AS w WHERE w.seen_at >= now() - $1::interval AND w.queues ? r.queue
    AND (NOT w.bound OR w.tenant_id = r.tenant_id)
    AND EXISTS (SELECT 1 FROM jsonb_array_elements(w.functions) AS f (pair) WHERE f.pair ->> 0 = r.name))
GROUP BY r.queue, r.name ORDER BY 3 DESC LIMIT 10
"""
LIVE_WORKERS: Final = "SELECT w.worker_id, w.settings FROM durable_worker AS w WHERE w.seen_at >= now() - $1::interval ORDER BY w.worker_id"
LIMITS: Final = ("max_reclaims", "lease", "mismatch_limit")
"""Settings that must not differ among workers: who sweeps judges by its own."""


async def check(database: Database) -> list[Check]:
    """Every check; where the server does not answer, that is the answer."""
    try:
        async with database.direct() as con:
            found = await schema.look(database, con)
    except DurableError as error:
        return [Check(name="server", level="refuse", text=f"{error.message}; {error.hint}")]
    checks = _schema(found)
    if found.applied is None or found.missing:
        return checks
    before = time.time_ns() // 1_000
    server, dead, ready, unknown, workers = await database.read(lambda work: _ask(work, database))
    after = time.time_ns() // 1_000
    checks += _server(server[0], (before + after) // 2, (after - before) // 2)
    checks.append(_connections(database, server[0], workers))
    checks.append(_dead(dead))
    checks.append(_ready(ready))
    checks.append(_unknown(unknown))
    checks.append(_limits(workers))
    return checks


def _ask(work: Work, database: Database) -> Operation[list[list[Row]]]:
    lease = Span(work.settings.lease)
    tables = [
        database.naming.plain(name) for name in ("durable_run", "durable_step", "durable_signal", "durable_queue")
    ]
    return (
        yield from together(
            Ask(SERVER),
            Ask(DEAD_ROWS, (database.naming.schema, tables, DEAD)),
            Ask(OLDEST_READY),
            Ask(UNKNOWN, (lease,)),
            Ask(LIVE_WORKERS, (lease,)),
        )
    )


def _schema(found: schema.Found) -> list[Check]:
    if found.applied is None:
        return [Check(name="schema", level="refuse", text="there are no tables of durable; run `durable migrate`")]
    try:
        todo = pending(found.applied, schema.migrations())
    except DurableError as error:
        return [Check(name="schema", level="refuse", text=f"{error.message}; {error.hint}")]
    checks: list[Check] = []
    if todo or found.missing:
        names = ", ".join([*(migration.name for migration in todo), *found.missing])
        checks.append(Check(name="schema", level="refuse", text=f"to be migrated: {names}; run `durable migrate`"))
    else:
        checks.append(Check(name="schema", level="ok", text=f"version {found.status.found}"))
    if found.broken_unique:
        text = (
            f"missing or invalid: {', '.join(found.broken_unique)}; a key could be given twice; run `durable migrate`"
        )
        checks.append(Check(name="indexes", level="refuse", text=text))
    elif found.broken:
        text = f"missing or invalid: {', '.join(found.broken)}; run `durable migrate`"
        checks.append(Check(name="indexes", level="warn", text=text))
    else:
        checks.append(Check(name="indexes", level="ok", text="all there and valid"))
    return checks


def _server(row: Row, here: int, doubt: int) -> list[Check]:
    version, isolation, commits, fsync, _, _, standby, there, _ = row
    checks = [
        Check(
            name="server",
            level="ok" if version >= OLDEST else "refuse",
            text=f"PostgreSQL {version // 10_000}.{version % 10_000}",
        )
    ]
    if standby:
        checks.append(
            Check(
                name="primary",
                level="refuse",
                text="the server is a standby and takes no writes; connect to the primary",
            )
        )
    if isolation == "read committed":
        checks.append(Check(name="isolation", level="ok", text="read committed"))
    else:
        text = f"default_transaction_isolation is {isolation!r}; ALTER ROLE … RESET default_transaction_isolation"
        checks.append(Check(name="isolation", level="refuse", text=text))
    if fsync == "off":
        text = "fsync is off: a crash of the machine loses what was acknowledged, and may leave the database unreadable; turn it on"
        checks.append(Check(name="durability", level="warn", text=text))
    else:
        checks.append(Check(name="durability", level="ok", text=f"fsync is on, synchronous_commit is {commits}"))
    skew = max(abs(there - here) - doubt, 0)
    if skew > SKEW:
        text = f"this machine's clock is {skew / SECOND:.1f} s off the server's; leases are judged by the server's, but set it right"
        checks.append(Check(name="clock", level="warn", text=text))
    else:
        checks.append(Check(name="clock", level="ok", text=f"within {(skew + doubt) / SECOND:.3f} s of the server's"))
    return checks


def _connections(database: Database, row: Row, workers: list[Row]) -> Check:
    """All workers against the server's limit (68)."""
    most, used = row[4] - row[5], row[8]
    slots = [int(json.loads(settings).get("transaction_slots", DEFAULT_SLOTS)) for _, settings in workers]
    wanted = sum(slots) + len(slots) * (SPARE + BESIDE)
    text = f"{len(workers)} live worker(s) may open {wanted} connections, {used} are open; the server takes {most}"
    if max(wanted, database.address.pool_size) > most:
        return Check(
            name="connections",
            level="warn",
            text=f"{text}; raise max_connections, or lower pool_size and transaction_slots",
        )
    return Check(name="connections", level="ok", text=text)


def _dead(found: list[Row]) -> Check:
    if not found:
        return Check(name="dead rows", level="ok", text=f"no table has more than {DEAD:,}")
    tables = ", ".join(f"{name} {count:,}" for name, count in found)
    return Check(
        name="dead rows", level="warn", text=f"{tables}: VACUUM ANALYZE them; look for old transactions that hold them"
    )


def _ready(found: list[Row]) -> Check:
    late = [(queue, age, count) for queue, age, count in found if age > WAITS]
    if not late:
        return Check(name="ready", level="ok", text="nothing has been ready for more than five minutes")
    queue, age, count = late[0]
    text = f"the queue {queue!r} has {count} ready run(s), the oldest for {datetime.timedelta(microseconds=age)}; add workers"
    return Check(name="ready", level="warn", text=text)


def _unknown(found: list[Row]) -> Check:
    if not found:
        return Check(name="functions", level="ok", text="a live worker knows every run that waits")
    names = ", ".join(f"{name!r} in queue {queue!r} ({count})" for queue, name, count in found)
    return Check(name="functions", level="warn", text=f"no live worker knows {names}; start one, or cancel them")


def _limits(workers: list[Row]) -> Check:
    values: dict[str, set[str]] = {}
    for _, settings in workers:
        read = json.loads(settings)
        for name in LIMITS:
            if name in read:
                values.setdefault(name, set()).add(str(read[name]))
    unequal = [f"{name}: {', '.join(sorted(found))}" for name, found in values.items() if len(found) > 1]
    if unequal:
        return Check(
            name="limits", level="warn", text=f"workers disagree on {'; '.join(unequal)}; give all of them the same"
        )
    return Check(name="limits", level="ok", text="all live workers have the same limits")


__all__ = ["check"]
