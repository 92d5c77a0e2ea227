"""What `doctor` asks of this store: the deployment, its write concern, the schema, the clocks.

`store.py` calls `check`. Every sentence says what to do; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import pymongo
from pymongo.errors import PyMongoError

from durable.clock import boottime, system_micros
from durable.model import Check
from durable.settings import SECOND, Micros

from . import schema
from .connection import Database

OLDEST: Final = (6, 0)
MOST_SKEW: Final = SECOND
LEAST_NODES: Final = 3
FAR_ABOVE: Final = 1.5
"""How many leases a transaction that nobody ends may stay open before the doctor speaks of it."""


async def check(database: Database) -> list[Check]:
    """Every check, the worst not first: doctor sorts."""
    home = await database.home()
    admin = home.client.admin
    sent = boottime()
    hello: Mapping[str, Any] = await admin.command("hello")
    received = boottime()
    found, vital = await schema.status(home.client.get_database(database.name), database.renames)
    return [
        _deployment(hello),
        await _version(admin),
        await _write_concern(admin),
        _schema(found, vital),
        _skew(hello, received - sent),
        await _changes(home),
        await _open_transactions(admin, database.settings.lease),
    ]


def _deployment(hello: Mapping[str, Any]) -> Check:
    if hello.get("msg") == "isdbgrid":
        text = "a sharded cluster: shard the collections by tenant_id, or the unique indexes do not hold"
        return Check(name="deployment", level="warn", text=text)
    if "setName" not in hello:
        text = "no replica set: start mongod with --replSet rs0 and run rs.initiate() once; one node is enough"
        return Check(name="deployment", level="refuse", text=text)
    nodes = len(hello.get("hosts", ()))
    if nodes < LEAST_NODES:
        text = f"replica set {hello['setName']} has {nodes} node(s): it survives a restart, not the loss of its disk; three do"
        return Check(name="deployment", level="warn", text=text)
    return Check(name="deployment", level="ok", text=f"replica set {hello['setName']} of {nodes} nodes")


async def _version(admin: Any) -> Check:
    info = await admin.command("buildInfo")
    version = info["version"]
    if tuple(info["versionArray"][:2]) < OLDEST:
        return Check(name="server", level="refuse", text=f"MongoDB {version} is older than 6.0; upgrade the server")
    return Check(name="server", level="ok", text=f"MongoDB {version}, PyMongo {pymongo.version}")


async def _write_concern(admin: Any) -> Check:
    try:
        default = await admin.command("getDefaultRWConcern")
    except PyMongoError as error:
        return Check(name="write concern", level="warn", text=f"the default of the deployment can not be read: {error}")
    concern = default.get("defaultWriteConcern", {})
    if concern and concern.get("w") != "majority":
        text = (
            f"the default of the deployment is {concern}: durable's own writes are w:majority all the same, but a submit in the"
            " application's transaction has that transaction's; give it WriteConcern('majority')"
        )
        return Check(name="write concern", level="warn", text=text)
    return Check(name="write concern", level="ok", text="w:majority, set by durable on each of its writes")


def _schema(found: Any, vital: list[str]) -> Check:
    if vital:
        return Check(
            name="schema", level="refuse", text=f"unique indexes are missing: {', '.join(vital)}; run `durable migrate`"
        )
    if found.found != found.wanted:
        text = f"the collections have version {found.found}, this code wants {found.wanted}; run `durable migrate`"
        return Check(name="schema", level="refuse", text=text)
    if found.missing:
        return Check(name="schema", level="warn", text=f"missing: {', '.join(found.missing)}; run `durable migrate`")
    return Check(name="schema", level="ok", text=f"version {found.found}")


def _skew(hello: Mapping[str, Any], took: int) -> Check:
    local: datetime = hello["localTime"]
    server = round(local.replace(tzinfo=UTC).timestamp() * SECOND)
    skew = abs(system_micros() - server)
    if skew > MOST_SKEW + took:
        text = f"the clock of this machine is {skew / SECOND:.1f} s off the server's: durable goes by the server's, logs may not"
        return Check(name="clock", level="warn", text=text)
    return Check(
        name="clock", level="ok", text=f"{skew / 1_000:.0f} ms between the clock of this machine and the server's"
    )


async def _changes(home: Any) -> Check:
    try:
        stream = await home.tables["durable_run"].watch([], max_await_time_ms=1)
        await stream.close()
    except PyMongoError as error:
        text = f"change streams are refused ({error}): other processes' work is found by polling only"
        return Check(name="changes", level="warn", text=text)
    return Check(name="changes", level="ok", text="change streams tell of other processes' work")


async def _open_transactions(admin: Any, lease: Micros) -> Check:
    """A process that is killed in a transaction keeps its documents locked until the server ends that. If that takes longer than a lease,
    what hangs on them waits longer than for a worker that died."""
    name = "open transactions"
    try:
        answer = await admin.command("getParameter", 1, transactionLifetimeLimitSeconds=1)
    except PyMongoError as error:
        text = f"transactionLifetimeLimitSeconds can not be read: {error}"
        return Check(name=name, level="warn", text=text)
    seconds = int(answer["transactionLifetimeLimitSeconds"])
    text = f"one that a killed process left open is ended after {seconds} s (transactionLifetimeLimitSeconds)"
    if seconds * SECOND > FAR_ABOVE * lease:
        least = max(1, -(-lease // SECOND))
        text += (
            f", a lease lasts {lease / SECOND:g} s: until then others wait for its documents. Where your own transactions are shorter:"
            f" db.adminCommand({{setParameter: 1, transactionLifetimeLimitSeconds: {least}}})"
        )
    return Check(name=name, level="ok", text=text)


__all__ = ["check"]
