"""Opening, the schema and the doctor (rules 65, 69): what is refused, what is repaired, and what is only told."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mongo.conftest import Open
from servers.mongo import Database, standalone
from servers.mongo_room import Room

from durable.errors import ConfigurationError, SchemaMismatch, StoreError, StoreUnavailable
from durable.model import Names
from durable.settings import Settings
from durable.testing.conformance.scenario import new_run
from durable_mongo import backend, schema

ROOT = Path(__file__).parents[2]
FIXED = {
    "durable_run": {
        *(
            "_id",
            "name",
            "status",
            "idempotency_key",
            "coalesce_key",
            "input",
            "output",
            "tenant_id",
            "attempts",
            "leased_until",
        ),
        *("created_at", "updated_at", "claim_token"),
    },
    "durable_step": {"_id", "run_id", "step_id", "result", "tenant_id", "created_at"},
}
"""Names that applications rely on."""


def test_the_published_schema_is_the_one_that_is_migrated() -> None:
    """`schemas/mongo.json` is made by the code that migrates (69)."""
    text = (ROOT / "schemas" / "mongo.json").read_text(encoding="utf-8")
    assert text == backend.schema(), "make it anew: durable schema --url mongodb:// > schemas/mongo.json"


async def test_an_application_that_makes_the_published_indexes_itself_has_what_migrate_makes(
    empty: Database, opened: Open
) -> None:
    published = json.loads(backend.schema())
    with empty.server.client() as client:
        db = client[empty.name]
        for name, indexes in published["collections"].items():
            db.create_collection(name)
            for index in indexes:
                options = {key: index[key] for key in ("unique", "partialFilterExpression") if key in index}
                db[name].create_index([tuple(pair) for pair in index["key"]], name=index["name"], **options)
        for row in published["durable_schema_version"]:
            db["durable_schema_version"].insert_one({**row, **({"store_id": "mine"} if row["_id"] == "store" else {})})
    store = await opened(url=empty.url)
    assert not (await store.schema_status()).missing


async def test_a_database_without_collections_is_refused_and_left_as_it_is(empty: Database, opened: Open) -> None:
    with pytest.raises(SchemaMismatch, match="no collections of durable"):
        await opened(url=empty.url)
    with empty.server.client() as client:
        assert client[empty.name].list_collection_names() == []


async def test_migrate_is_idempotent_and_safe_when_started_many_times_at_once(empty: Database, opened: Open) -> None:
    stores = await asyncio.gather(*(opened(url=empty.url, auto_migrate=True) for _ in range(4)))
    statuses = await asyncio.gather(*(store.migrate() for store in stores))
    assert {(status.found, tuple(status.missing)) for status in statuses} == {(1, ())}
    with empty.server.client() as client:
        assert client[empty.name]["durable_schema_version"].count_documents({}) == 2


KEY = [("tenant_id", 1), ("coalesce_key", 1)]
FILTER = {"coalesce_key": {"$gt": ""}, "status": "pending", "attempts": 0}
WRONG: dict[str, tuple[list[tuple[str, int]], dict[str, Any]] | None] = {
    "dropped": None,
    "without its filter": (KEY, {"unique": True}),
    "with a wider filter": (KEY, {"unique": True, "partialFilterExpression": {"coalesce_key": {"$gt": ""}}}),
    "with a filter of another value": (KEY, {"unique": True, "partialFilterExpression": {**FILTER, "attempts": 1}}),
    "not unique": (KEY, {"partialFilterExpression": FILTER}),
    "with its keys turned round": (KEY[::-1], {"unique": True, "partialFilterExpression": FILTER}),
}
"""Each would let one key mean two runs, or refuse what is no duplicate."""


def spoil(room: Room, how: str) -> None:
    """Put a wrong index in the place of the coalescing one."""
    room.db["durable_run"].drop_index("coalesce")
    if (wrong := WRONG[how]) is not None:
        room.db["durable_run"].create_index(wrong[0], name="coalesce", **wrong[1])


@pytest.mark.parametrize("how", WRONG)
async def test_a_missing_or_wrong_unique_index_refuses_every_handle_and_migrate_makes_it(
    room: Room, opened: Open, how: str
) -> None:
    spoil(room, how)
    with pytest.raises(SchemaMismatch, match=r"durable_run\.coalesce"):
        await opened()
    store = await opened(auto_migrate=True)
    assert not (await store.schema_status()).missing


async def test_the_right_index_under_another_name_is_built_anew_under_ours(room: Room, opened: Open) -> None:
    """The server refuses two of them (85), and hints name ours."""
    room.db["durable_run"].drop_index("coalesce")
    room.db["durable_run"].create_index(KEY, name="by_hand", unique=True, partialFilterExpression=FILTER)
    store = await opened(auto_migrate=True)
    assert not (await store.schema_status()).missing
    assert "by_hand" not in room.db["durable_run"].index_information()


async def test_migrate_check_names_a_wrong_filter_changes_nothing_and_exits_with_1(room: Room, opened: Open) -> None:
    async def run(*options: str) -> tuple[int | None, str]:
        command = (sys.executable, "-m", "durable", "migrate", *options, "--url", room.url)
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    spoil(room, "with a wider filter")
    before = room.db["durable_run"].index_information()["coalesce"]
    code, output = await run("--check")
    assert code == 1, output
    assert "durable_run.coalesce" in output
    assert room.db["durable_run"].index_information()["coalesce"] == before
    assert (await run())[0] == 0
    code, output = await run("--check")
    assert code == 0, output
    await opened()


async def test_a_missing_index_that_only_makes_things_slow_is_told_and_refuses_nobody(room: Room, opened: Open) -> None:
    room.db["durable_run"].drop_index("listing")
    store = await opened()
    assert list((await store.schema_status()).missing) == ["durable_run.listing"]
    assert [check.level for check in await store.check() if check.name == "schema"] == ["warn"]
    await store.migrate()
    assert [check.level for check in await store.check() if check.name == "schema"] == ["ok"]


async def test_a_newer_schema_is_refused_and_nothing_is_changed(room: Room, opened: Open) -> None:
    versions = room.db["durable_schema_version"]
    versions.insert_one({"_id": 99, "checksum": "from the future"})
    try:
        with pytest.raises(SchemaMismatch, match="99"):
            await opened(auto_migrate=True)
    finally:
        versions.delete_one({"_id": 99})


async def test_collections_may_have_other_names(empty: Database, opened: Open) -> None:
    names = Names(tables={"durable_run": "jobs", "durable_step": "jobs_step"})
    store = await opened(url=empty.url, names=names, auto_migrate=True)
    await store.enqueue([new_run()])
    with empty.server.client() as client:
        db = client[empty.name]
        assert db["jobs"].count_documents({}) == 1
        assert "durable_run" not in db.list_collection_names()


@contextmanager
def lost_sockets() -> Iterator[None]:
    """The driver drops a socket that was being connected when its client is closed; it is collected here, not in another test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


async def test_a_standalone_server_is_refused_in_plain_words_and_they_make_it_a_set_of_one(opened: Open) -> None:
    """Nothing is written before; what the application has there stays (docs/mongodb.md)."""
    member = standalone()
    try:
        with member.client() as client:
            client["x"]["order"].insert_one({"_id": 1})
        with lost_sockets(), pytest.raises(StoreError, match="no replica set") as caught:
            await opened(url=f"mongodb://{member.host}/x", auto_migrate=True)
        assert "--replSet" in caught.value.hint
        assert "rs.initiate()" in caught.value.hint
        with member.client() as client:
            assert client["x"].list_collection_names() == ["order"]
        member.stop(hard=False)
        await asyncio.to_thread(member.start)
        with member.client() as client:
            members = [{"_id": 0, "host": member.host}]
            client.admin.command("replSetInitiate", {"_id": member.name, "members": members})
        store = await opened(url=f"mongodb://{member.host}/x?replicaSet={member.name}", auto_migrate=True)
        await store.enqueue([new_run()])
        with member.client() as client:
            assert client["x"]["order"].count_documents({}) == 1
        await store.close()
    finally:
        with lost_sockets():
            member.stop()


async def test_a_server_that_is_not_there_is_unavailable(opened: Open) -> None:
    with lost_sockets(), pytest.raises(StoreUnavailable):
        await opened(url="mongodb://127.0.0.1:1/x?serverSelectionTimeoutMS=200")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("mongodb://host", "names no database"),
        ("mongodb://host/", "names no database"),
        ("mongodb://host:port/x", "the driver reads"),
        ("mongodb://user:se@cret@host/x", "the driver reads"),
        ("mongodb://host/x?changes=maybe", "changes"),
        ("postgresql://host/x", "scheme"),
    ],
)
async def test_a_url_that_can_not_work_is_refused_without_its_password(opened: Open, url: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text) as caught:
        await opened(url=url)
    assert "cret" not in str(caught.value)


async def test_a_clock_can_not_be_given(room: Room) -> None:
    with pytest.raises(ConfigurationError):
        await backend.open(room.url, settings=Settings(), clock=lambda: 0)


async def test_a_payload_limit_that_no_document_holds_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigurationError, match="16 MB"):
        await opened(settings={"max_payload": 16 << 20})


async def test_writes_are_majority_whatever_the_url_says(opened: Open) -> None:
    """w:1, with or without j, loses acknowledged writes at a fail-over (65)."""
    store = await opened("w=1&journal=false&readPreference=secondaryPreferred")
    home = await store._database.home()
    handle = home.tables["durable_run"]
    assert handle.write_concern.document == {"w": "majority"}
    assert handle.read_preference.mongos_mode == "primary"


async def test_the_documents_have_the_names_that_applications_rely_on(opened: Open, room: Room) -> None:
    from durable.testing.conformance.scenario import Scene

    store = await opened()
    scene = Scene(store, None)  # type: ignore[arg-type]  # time does not pass
    held = await scene.take(idempotency_key="i", coalesce_key="c")
    await scene.append(held, "a")
    found: dict[str, Any] = {name: room.db[name].find_one({}) for name in FIXED}
    for name, fields in FIXED.items():
        assert fields - {"output"} <= set(found[name]), name
    assert found["durable_run"]["_id"] == held.run.run_id
    assert found["durable_run"]["tenant_id"] == ""
    assert found["durable_run"]["claim_token"] == held.lease.mark
    assert found["durable_run"]["idempotency_key"] == ":i"
    await scene.complete(held)
    assert room.db["durable_run"].find_one({})["output"] == '"done"'  # type: ignore[index]


def test_a_checksum_is_over_the_meaning() -> None:
    (first, *_) = schema.migrations()
    changed = json.loads(first.text)
    changed["collections"]["durable_run"][0]["for"] = "another reason"
    same = schema.Mongo(version=1, name=first.name, text=json.dumps(changed))
    assert same.checksum == first.checksum
    changed["collections"]["durable_run"][0].pop("unique")
    other = schema.Mongo(version=1, name=first.name, text=json.dumps(changed))
    assert other.checksum != first.checksum
