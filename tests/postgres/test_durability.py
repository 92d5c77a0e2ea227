"""What is durable when it is answered, and what need not be (rules 42, 63): only claims, renewals and promotions commit asynchronously."""

from __future__ import annotations

from typing import Any

from postgres.conftest import Open
from postgres.test_faults import NoTime
from servers.postgres import Database

from durable.settings import SECOND
from durable.storekit import TABLES
from durable.testing.conformance.scenario import Scene
from durable.testing.conformance.test_lost_answers import WRITES

ASYNCHRONOUS = {"claim", "renew", "promote"}
WRITTEN = [table for table in TABLES if table != "durable_schema_version"]
# Each row that is written notes how its transaction will commit.
WITNESS = """
CREATE TABLE commits (how text);
CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO commits VALUES (current_setting('synchronous_commit')); RETURN NULL;
END $$;
"""
TRIGGER = "CREATE TRIGGER witness AFTER INSERT OR UPDATE OR DELETE ON {} FOR EACH ROW EXECUTE FUNCTION public.witness()"


def watched(database: Database) -> None:
    with database.connect() as con:
        con.execute(WITNESS)
        for table in WRITTEN:
            con.execute(TRIGGER.format(table))
        con.execute(f"ALTER DATABASE {database.name} SET synchronous_commit = off")


async def test_only_a_claim_a_renewal_and_a_promotion_may_be_lost_in_a_crash(database: Database, opened: Open) -> None:
    """Also where the default of the database is asynchronous: what is answered as done is on the disk."""
    watched(database)
    scene = Scene(await opened(), NoTime(database))  # type: ignore[arg-type]
    seen: dict[str, set[str]] = {}
    with database.connect() as con:
        for name, prepare in WRITES.items():
            call = await prepare(scene)
            con.execute("DELETE FROM commits")
            await call(scene.store)
            seen[name] = {str(how) for (how,) in con.execute("SELECT how FROM commits")}
            con.execute("; ".join(f"DELETE FROM {table}" for table in WRITTEN))
    assert seen == {name: {"off" if name in ASYNCHRONOUS else "on"} for name in WRITES}


async def test_the_users_transaction_is_durable_with_its_record(database: Database, opened: Open) -> None:
    watched(database)
    scene = Scene(await opened(), None)  # type: ignore[arg-type]
    held = await scene.take()
    how: list[str] = []

    async def pay(con: Any) -> Any:
        how.append((await (await con.execute("SHOW synchronous_commit")).fetchone())[0])
        return await scene.record(held.run.run_id, "pay")

    await scene.store.transaction(held.lease, pay, timeout=5 * SECOND)
    assert how == ["on"]
