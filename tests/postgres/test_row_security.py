"""Row-level security (rule 57): with the policies the database itself refuses another tenant's rows to a role that is bound to one.

The roles own nothing and are no superusers. Each of them reads and writes past the SDK, as somebody would who took over an application;
then the SDK does all that a tenant's application does, with a worker, under such a role.
"""

from __future__ import annotations

import asyncio
import os
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from servers.postgres import Database, server
from tenants.rows import checksum, of_tenant

import durable
from durable.model import ALL, Dependency, Names, NewRun, QueueRecord, new_run_id
from durable.settings import Settings
from durable.storekit import TABLES
from durable_postgres import backend

FILE = Path(__file__).parents[2] / "schemas" / "postgres-row-security.sql"
ACME, BETA = durable.tenant_id("acme"), durable.tenant_id("beta")
OWNED = [table for table in TABLES if table != "durable_schema_version"]
RUN = """
INSERT INTO durable_run (run_id, name, status, tenant_id, created_at, updated_at, seed, input)
VALUES ('x', 'n', 'pending', {tenant}, now(), now(), '', '1')
"""
declared = durable.Registry("row_security")
WORD = durable.Signal("word", str)


async def length(text: str) -> int:
    return len(text)


@durable.function(registry=declared, queue="shared")
async def child(ctx: durable.Context, text: str) -> int:
    return await ctx.step(length, text)


@durable.function(registry=declared)
async def secured(ctx: durable.Context, text: str) -> str:
    lengths = await ctx.map(child, [text, "abc"])
    told = await ctx.wait_signal(WORD)
    return f"{ctx.tenant} {lengths} {told}"


durable.function(name="secured")(secured.fn)


class House:
    """A database with policies, and the URLs of its roles."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.roles = {
            name: f"durable_rls_{name}_{os.getpid()}" for name in ("owner", "acme", "beta", "everybody", "stranger")
        }

    def url(self, role: str) -> str:
        parts = urllib.parse.urlsplit(self.database.url)
        return urllib.parse.urlunsplit(parts._replace(netloc=f"{self.roles[role]}@{parts.netloc.rpartition('@')[2]}"))

    def connect(self, role: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.url(role), autocommit=True)

    def client(self, role: str) -> durable.Client:
        return durable.Client(self.url(role), settings={"poll": "100ms", "poll_idle": "100ms", "park_after": "100ms"})


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    made = House(server().create())
    roles = {name: sql.Identifier(role) for name, role in made.roles.items()}
    with made.database.connect() as con:
        for name, role in roles.items():
            option = sql.SQL("BYPASSRLS" if name == "everybody" else "NOBYPASSRLS")
            con.execute(sql.SQL("CREATE ROLE {} LOGIN {}").format(role, option))
        con.execute(sql.SQL("GRANT CREATE, USAGE ON SCHEMA public TO {}").format(roles["owner"]))
    asyncio.run(_migrate(made.url("owner")))
    with made.connect("owner") as con:
        for _ in range(2):  # running it again changes nothing
            con.execute(f"BEGIN; {FILE.read_text()} COMMIT".encode())
        for name in ("acme", "beta", "everybody", "stranger"):
            tables = sql.SQL(", ").join(map(sql.Identifier, OWNED))
            con.execute(sql.SQL("GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO {}").format(tables, roles[name]))
            con.execute(sql.SQL("GRANT SELECT ON durable_schema_version TO {}").format(roles[name]))
            con.execute(
                sql.SQL(
                    "GRANT SELECT ON durable_v_runs, durable_v_steps, durable_v_functions, durable_v_queues TO {}"
                ).format(roles[name])
            )
            con.execute(sql.SQL("GRANT USAGE ON SEQUENCE durable_run_submitted_seq TO {}").format(roles[name]))
        for name, tenant in (("acme", ACME), ("beta", BETA)):
            con.execute(
                "INSERT INTO durable_tenant_role (role_name, tenant_id) VALUES (%s, %s)", (made.roles[name], tenant)
            )
    asyncio.run(_fill(made))
    yield made
    made.database.drop()
    with psycopg.connect(server().url, autocommit=True) as con:
        for role in roles.values():
            con.execute(sql.SQL("DROP ROLE {}").format(role))


async def _migrate(url: str) -> None:
    async with durable.Client(url, auto_migrate=True) as client:
        await client.migrate()


async def _fill(house: House) -> None:
    """Something in every table of each tenant and untagged, and limits of everybody."""
    async with house.client("everybody") as everybody:
        await everybody.all_tenants().queues.limit("shared", max_concurrency=20, rate="1000/s")
        for scope in (ACME, BETA, None):
            mine = everybody if scope is None else everybody.using(tenant=scope)
            await mine.schedules.put("nightly", secured.using(cron="0 0 1 1 *"), "x")
            await mine.queues.limit("shared", max_concurrency=9)
            run = await mine.start(secured.using(idempotency_key="k", queue="shared"), "secret")
            await mine.signal(run.id, WORD, "told")
            first = new_run(scope)
            await everybody.store.enqueue([first, new_run(scope, depends_on=(Dependency(run_id=first.run_id),))])
        async with durable.Worker(everybody, functions=declared, queues=["shared"], grace="2s"):
            async for run in everybody.all_tenants().runs(function="secured", limit=None):
                await run.result(timeout="60s")
    with psycopg.connect(house.database.url, autocommit=True) as con:
        for scope in (str(ACME), str(BETA), ""):
            con.execute("INSERT INTO durable_schedule_fire VALUES (%s, now(), 'r', now())", (f"{scope}:nightly",))
            con.execute(
                "INSERT INTO durable_permit SELECT %s, run_id, now() FROM durable_run WHERE coalesce(tenant_id::text, '') = %s LIMIT 1",
                (f"{scope}/queue:x" if scope else "queue:x", scope),
            )
            con.execute(
                "INSERT INTO durable_worker VALUES (%s, %s, true, 'h', 1, '{}', '[]', 'f', '{}', now(), now())",
                (f"w{scope}", scope or None),
            )


def new_run(tenant: uuid.UUID | None, **changes: object) -> NewRun:
    values = {"run_id": new_run_id(), "name": "later", "input": "1", "seed": b"s", "tenant": tenant, "queue": "nobody"}
    return NewRun(**{**values, **changes})  # type: ignore[arg-type]


def counts(house: House, role: str) -> dict[str, int]:
    with house.connect(role) as con:
        found = {}
        for table in OWNED:
            row = con.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))).fetchone()
            assert row is not None
            found[table] = int(str(row[0]))
        return found


def test_the_published_file_is_made_by_the_code() -> None:
    assert FILE.read_text() == backend.row_security(), (
        "make it anew: durable schema --row-security --url postgresql:// > schemas/postgres-row-security.sql"
    )


def test_the_policies_follow_the_configured_names() -> None:
    text = backend.row_security(Names(schema="own", tables={"durable_run": "jobs"}))
    assert '"own"."jobs"' in text
    assert "durable_run" not in text


def test_every_table_with_rows_of_tenants_has_a_policy(house: House) -> None:
    """A table that a later version adds must not be forgotten."""
    with house.connect("owner") as con:
        rows = con.execute("SELECT relname FROM pg_class WHERE relrowsecurity AND relkind = 'r'").fetchall()
    assert {str(name) for (name,) in rows} == set(OWNED)


def test_a_bound_role_sees_its_own_rows_and_a_stranger_none(house: House) -> None:
    whole, acme, beta = counts(house, "everybody"), counts(house, "acme"), counts(house, "beta")
    assert min(acme.values()) >= 1, acme
    assert acme == beta
    assert all(2 * acme[table] < whole[table] for table in OWNED if table not in ("durable_queue", "durable_permit"))
    assert counts(house, "stranger") == dict.fromkeys(OWNED, 0)
    with house.connect("acme") as con:
        dump = "\n".join(
            str(row)
            for table in OWNED
            for row in con.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(table)))
        )
        assert str(BETA) not in dump
        for view in ("durable_v_runs", "durable_v_steps"):
            tenants = con.execute(sql.SQL("SELECT DISTINCT tenant_id FROM {}").format(sql.Identifier(view))).fetchall()
            assert tenants == [(ACME,)], view
        assert con.execute("SELECT sum(completed) FROM durable_v_functions").fetchone() == (3,)


@pytest.mark.parametrize("table", OWNED)
@pytest.mark.parametrize("what", ["UPDATE {t} SET {c} = {c}", "DELETE FROM {t}"], ids=["changes", "deletes"])
def test_a_bound_role_changes_and_deletes_all_of_its_own_and_nothing_of_another(
    house: House, table: str, what: str
) -> None:
    """It tries all rows; the owner of the database looks which of them are not where they were, before it is taken back."""
    name, role = sql.Identifier(table), sql.Identifier(house.roles["acme"])
    with psycopg.connect(house.database.url) as con:
        columns = con.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(name)).description
        assert columns is not None
        runs = con.execute("SELECT run_id FROM durable_run WHERE tenant_id = %s", (ACME,)).fetchall()
        words = {str(ACME), *(str(run_id) for (run_id,) in runs)}
        before = places(con, table)
        own = {row for row in before.values() if any(word in row for word in words)}
        con.execute(sql.SQL("SET LOCAL SESSION AUTHORIZATION {}").format(role))
        con.execute(sql.SQL(what).format(t=name, c=sql.Identifier(columns[-1].name)))
        con.execute("RESET SESSION AUTHORIZATION")
        touched = {before[place] for place in before.keys() - places(con, table).keys()}
        con.rollback()
    if table == "durable_queue" and "UPDATE" in what:  # a row of everybody it may spend from
        touched = {row for row in touched if not row.startswith("(*:")}
    assert own
    assert touched == own


def places(con: psycopg.Connection[tuple[object, ...]], table: str) -> dict[str, str]:
    """Every row as text, by its place: one that was written again is elsewhere."""
    rows = con.execute(sql.SQL("SELECT ctid::text, t::text FROM {} AS t").format(sql.Identifier(table)))
    return {str(place): str(row) for place, row in rows}


def test_a_bound_role_can_not_write_rows_for_another(house: House) -> None:
    statements = [
        RUN.format(tenant="'{b}'"),
        RUN.format(tenant="NULL"),
        "INSERT INTO durable_key VALUES ('{b}:new', 'x')",
        "INSERT INTO durable_key VALUES (':new', 'x')",
        "INSERT INTO durable_schedule_fire VALUES ('{b}:nightly', now() + interval '1 h', 'x', now())",
        "INSERT INTO durable_queue (queue_id, scope_name, tenant_id, updated_at) VALUES ('{b}:queue:q', 'queue:q', '{b}', now())",
        "INSERT INTO durable_queue (queue_id, scope_name, updated_at) VALUES ('*:queue:new', 'queue:new', now())",
        "INSERT INTO durable_permit VALUES ('*/queue:shared', (SELECT run_id FROM durable_run WHERE tenant_id = '{b}' LIMIT 1), now())",
        "INSERT INTO durable_permit VALUES ('*/queue:shared', 'no such run', now())",
        "INSERT INTO durable_worker VALUES ('mine', NULL, false, 'h', 1, '{{}}', '[]', 'f', '{{}}', now(), now())",
        "UPDATE durable_run SET tenant_id = '{b}'",
        "UPDATE durable_queue SET max_concurrency = 1000000 WHERE queue_id = '*:queue:shared'",
        "INSERT INTO durable_tenant_role VALUES (session_user, '{b}')",
        "UPDATE durable_tenant_role SET tenant_id = '{b}'",
        "SELECT * FROM durable_tenant_role",
    ]
    before = checksum(of_tenant(house.database.url, BETA))
    with house.connect("acme") as con:
        con.execute("BEGIN")
        con.execute(RUN.format(tenant=f"'{ACME}'").encode())  # its own it can
        con.execute("ROLLBACK")
        for statement in statements:
            with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.NotNullViolation)):
                con.execute(statement.format(b=BETA).encode())
    assert checksum(of_tenant(house.database.url, BETA)) == before


@pytest.mark.timeout(120)
async def test_an_application_of_a_tenant_does_all_its_work_under_a_bound_role(house: House) -> None:
    """Start, map, signal, schedule, limits of its own and of everybody, listing, retry, purge, erase; with a worker of its own."""
    before = checksum(of_tenant(house.database.url, BETA))
    async with house.client("acme") as plain:
        mine = plain.using(tenant=ACME)
        async with durable.Worker(mine, functions=declared, queues=["shared"], grace="2s"):
            run = await mine.start(secured.using(queue="shared", idempotency_key="again", concurrency_key="c"), "four")
            await run.signal(WORD, "go")
            assert await run.result(timeout="60s") == f"{ACME} [4, 3] go"
            first = new_run(ACME, name="child", queue="shared", input='{"text":"x"}')
            await mine.store.enqueue([first, new_run(ACME, depends_on=(Dependency(run_id=first.run_id),))])
        await mine.queues.limit("own", max_concurrency=1)
        await mine.schedules.put("weekly", secured.using(cron="0 0 * * 0"), "x")
        assert {one.tenant async for one in mine.runs(limit=None)} == {ACME}
        assert [one.schedule_id for one in await mine.schedules.all() if one.schedule_id == "weekly"]
        findings = [one.invariant for one in await mine.audit()]
        assert findings == ["permit_in_flight"], "the permit that this module has put there by hand"
        with pytest.raises(durable.StoreError):
            await plain.start(secured, "untagged")  # whatever the code says, the database refuses
        with pytest.raises(durable.StoreError):
            await plain.using(tenant=BETA).start(secured, "another's")
        assert [one async for one in plain.all_tenants().runs(limit=None) if one.tenant != ACME] == []
        async for one in mine.runs(status=["pending", "suspended"], limit=None):
            await one.cancel()
        assert await mine.tenants.erase(ACME) > 3
    assert [
        table
        for table, row in of_tenant(house.database.url, ACME)
        if "durable_rls" not in row and table != "durable_worker"
    ] == []
    assert checksum(of_tenant(house.database.url, BETA)) == before


async def test_a_limit_of_everybody_holds_for_a_bound_role(house: House) -> None:
    store = await backend.open(house.url("everybody"), settings=Settings())
    bound = await backend.open(house.url("beta"), settings=Settings())
    try:
        await store.set_queue(QueueRecord(scope_name="queue:narrow", tenant=ALL, max_concurrency=1))
        await store.enqueue([new_run(tenant, queue="narrow") for tenant in (None, BETA, BETA)])
        first = await store.claim(_request("a", ALL))
        assert [one.run.tenant for one in first] == [None]
        assert list(await bound.claim(_request("b", BETA))) == [], "somebody else's run has the only place"
        await store.settle([(first[0].lease, durable.model.Completed(output="1"))])
        assert len(await bound.claim(_request("c", BETA))) == 1
        assert list(await bound.claim(_request("d", BETA))) == []
    finally:
        await bound.close()
        await store.close()


def _request(mark: str, scope: durable.model.Scope) -> durable.model.ClaimRequest:
    return durable.model.ClaimRequest(
        mark=mark, queues={"narrow": 9}, functions=[("later", None)], limit=9, lease=60_000_000, family="f", scope=scope
    )
