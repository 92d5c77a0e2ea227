"""The doctor on MongoDB (rules 65, 69): each of its checks, in every level that it has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from mongo.conftest import Open, fail
from servers.mongo_room import Room

from durable.model import Check
from durable_mongo import Store, checks

pytestmark = pytest.mark.usefixtures("healed")


async def found(store: Store, name: str) -> Check:
    """The one check of that name."""
    (check,) = [check for check in await store.check() if check.name == name]
    return check


async def test_a_set_of_one_that_has_all_it_needs_is_only_warned_of_its_size(opened: Open) -> None:
    levels = {check.name: check.level for check in await (await opened()).check()}
    assert levels.pop("deployment") == "warn"
    assert levels == dict.fromkeys(("server", "write concern", "schema", "clock", "changes", "open transactions"), "ok")


NODES = ["one:27017", "two:27017", "three:27017"]


@pytest.mark.parametrize(
    ("hello", "level", "text"),
    [
        ({}, "refuse", "--replSet"),
        ({"msg": "isdbgrid"}, "warn", "by tenant_id"),
        ({"setName": "rs0", "hosts": NODES[:1]}, "warn", "three do"),
        ({"setName": "rs0", "hosts": NODES[:2]}, "warn", "three do"),
        ({"setName": "rs0", "hosts": NODES}, "ok", "rs0"),
    ],
    ids=["standalone", "sharded", "one", "two", "three"],
)
def test_what_the_deployment_is(hello: dict[str, Any], level: str, text: str) -> None:
    check = checks._deployment(hello)
    assert check.level == level
    assert text in check.text


@pytest.mark.parametrize(("version", "level"), [("5.0.9", "refuse"), ("6.0.0", "ok"), ("10.1.2", "ok")])
async def test_the_version_of_the_server(version: str, level: str) -> None:
    class Admin:
        async def command(self, name: str) -> dict[str, Any]:
            assert name == "buildInfo"
            return {"version": version, "versionArray": [*map(int, version.split(".")), 0]}

    check = await checks._version(Admin())
    assert check.level == level
    assert version in check.text


async def test_a_default_of_w_1_is_told_for_it_counts_in_the_applications_transactions(
    opened: Open, room: Room
) -> None:
    store = await opened()
    admin = room.db.client.admin
    admin.command("setDefaultRWConcern", defaultWriteConcern={"w": 1})
    try:
        check = await found(store, "write concern")
    finally:
        admin.command("setDefaultRWConcern", defaultWriteConcern={"w": "majority"})
    assert check.level == "warn"
    assert "WriteConcern('majority')" in check.text
    assert (await found(store, "write concern")).level == "ok"


async def test_a_default_that_may_not_be_read_is_told(opened: Open, room: Room) -> None:
    store = await opened()
    fail(room, "getDefaultRWConcern", errorCode=13)
    check = await found(store, "write concern")
    assert check.level == "warn"
    assert "can not be read" in check.text


LIMIT = "transactionLifetimeLimitSeconds"


@pytest.mark.parametrize(
    ("seconds", "lease", "told"), [(60, "30s", 30), (60, "5s", 5), (45, "30s", None), (10, "30s", None)]
)
async def test_how_long_a_transaction_of_a_killed_process_stays_open_is_told_with_what_to_set(
    opened: Open, room: Room, seconds: int, lease: str, told: int | None
) -> None:
    """Nothing is wrong with it: it is the server's own default. Where it is far above a lease, there is something to gain."""
    admin = room.db.client.admin
    before = admin.command("getParameter", 1, **{LIMIT: 1})[LIMIT]
    store = await opened(settings={"lease": lease})
    admin.command("setParameter", 1, **{LIMIT: seconds})
    try:
        check = await found(store, "open transactions")
    finally:
        admin.command("setParameter", 1, **{LIMIT: before})
    assert check.level == "ok"
    assert f"after {seconds} s" in check.text
    assert (f"{LIMIT}: {told}}}" in check.text) is (told is not None)
    assert ("setParameter" in check.text) is (told is not None)


async def test_a_limit_of_open_transactions_that_may_not_be_read_is_told(opened: Open, room: Room) -> None:
    store = await opened()
    fail(room, "getParameter", errorCode=13)
    check = await found(store, "open transactions")
    assert (check.level, "can not be read" in check.text) == ("warn", True)


Damage = Callable[[Room], Any]
SCHEMAS: dict[str, tuple[str, str, Damage]] = {
    "slow": ("warn", "listing", lambda room: room.db["durable_run"].drop_index("listing")),
    "vital": ("refuse", "idempotency", lambda room: room.db["durable_run"].drop_index("idempotency")),
    "newer": ("refuse", "99", lambda room: room.db["durable_schema_version"].insert_one({"_id": 99, "checksum": "x"})),
}


@pytest.mark.parametrize("damage", SCHEMAS)
async def test_what_is_wrong_with_the_schema(opened: Open, room: Room, damage: str) -> None:
    level, text, do = SCHEMAS[damage]
    store = await opened()
    do(room)
    try:
        check = await found(store, "schema")
        assert check.level == level
        assert text in check.text
        assert "durable migrate" in check.text
    finally:
        room.db["durable_schema_version"].delete_one({"_id": 99})
        await store.migrate()
    assert (await found(store, "schema")).level == "ok"


@pytest.mark.parametrize("ahead", [-10, 10])
async def test_a_clock_that_is_off_is_told(opened: Open, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    store = await opened()
    monkeypatch.setattr(checks, "system_micros", lambda: round((datetime.now(UTC).timestamp() + ahead) * 1_000_000))
    check = await found(store, "clock")
    assert check.level == "warn"
    assert "s off" in check.text


async def test_change_streams_that_are_refused_are_told(opened: Open, room: Room) -> None:
    store = await opened("changes=off")
    fail(room, "aggregate", errorCode=13, times=5)
    check = await found(store, "changes")
    assert check.level == "warn"
    assert "polling" in check.text
