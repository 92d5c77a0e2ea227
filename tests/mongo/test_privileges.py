"""Who may do what (docs/mongodb.md): a server that asks for names, and users with the roles that the page gives them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator

import pytest
from servers.mongo import start_set

import durable
from durable.errors import StoreError
from durable.model import ALL

declared = durable.Registry("test_privileges")
PASSWORD = "p@ss:/word"
DATABASE = "shop"
ROLES = {
    "root": [{"role": "root", "db": "admin"}],
    "worker": [{"role": "readWrite", "db": DATABASE}],
    "doctor": [{"role": "readWrite", "db": DATABASE}, {"role": "clusterMonitor", "db": "admin"}],
    "reader": [{"role": "read", "db": DATABASE}],
}
Url = Callable[[str], str]


async def add(a: int, b: int) -> int:
    return a + b


@durable.function(registry=declared)
async def child(ctx: durable.Context, number: int) -> int:
    return await ctx.step(add, number, 1)


@durable.function(registry=declared)
async def parent(ctx: durable.Context, number: int) -> int:
    return await ctx.run(child, await ctx.step(add, number, 1))


@pytest.fixture(scope="module")
def url() -> Iterator[Url]:
    """The URL of a user."""
    made = start_set(1, guarded=True)
    assert made.members is not None
    (member,) = made.members.members
    with member.client() as client:  # the first user may be made without one
        client.admin.command("createUser", "root", pwd=PASSWORD, roles=ROLES["root"])

    def of(user: str, password: str = PASSWORD) -> str:
        head = f"mongodb://{user}:{urllib.parse.quote_plus(password)}@{member.host}"
        return f"{head}/{DATABASE}?replicaSet=durable&authSource=admin"

    with made.client(username="root", password=PASSWORD) as client:
        for user in ("worker", "doctor", "reader"):
            client.admin.command("createUser", user, pwd=PASSWORD, roles=ROLES[user])
    yield of
    made.members.remove()


async def test_read_write_on_the_database_is_enough_for_everything(url: Url) -> None:
    """Migrating, working, change streams, transactions, the purge, and the audit."""
    async with (
        durable.Client(url("worker"), auto_migrate=True, settings={"poll": "100ms"}) as client,
        durable.Worker(client, functions=declared),
    ):
        assert await client.run(parent.using(idempotency_key="once"), 1) == 3
        assert await client.store.purge(scope=ALL, limit=10, older_than=-1_000_000) == 2
        assert list(await client.all_tenants().audit()) == []
        levels = {check.name: check.level for check in await client.store.check()}
    assert levels == {
        **dict.fromkeys(("server", "schema", "clock", "changes"), "ok"),
        **dict.fromkeys(
            ("deployment", "write concern", "open transactions"), "warn"
        ),  # one node; the rest may not be read
    }


async def test_with_cluster_monitor_the_doctor_sees_the_default_write_concern_and_the_limit_of_transactions(
    url: Url,
) -> None:
    async with durable.Client(url("doctor"), auto_migrate=True) as client:
        levels = {check.name: check.level for check in await client.store.check()}
    assert (levels["write concern"], levels["open transactions"]) == ("ok", "ok")


async def test_a_user_who_may_only_read_is_told_what_is_missing(url: Url) -> None:
    async with durable.Client(url("worker"), auto_migrate=True):
        pass
    async with durable.Client(url("reader")) as client:
        with pytest.raises(StoreError, match="refuses access") as caught:
            await client.start(parent, 1)
    assert "readWrite" in caught.value.hint


async def test_a_wrong_password_is_refused_and_not_shown(url: Url) -> None:
    with pytest.raises(StoreError, match="refuses access") as caught:
        async with durable.Client(url("worker", "wr0ng")):
            pass
    assert "wr0ng" not in str(caught.value)
