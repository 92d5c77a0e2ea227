"""A scheduler process that is killed in front of its n-th write: a statement, a command, a commit, as each store sends them.

SQLite tells of every statement before it is executed, PyMongo of every command before it is sent; on PostgreSQL statements that go out
together are sent one by one here, so that the process can die between them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import Sequence
from typing import Any
from unittest import mock
from uuid import UUID

import psycopg
from flow.population import QUICK, tick
from pymongo import monitoring

import durable
from durable._engine.scheduler import Scheduling
from durable.events import Events
from durable.model import ScheduleSpec
from durable.settings import DAY
from durable_postgres.connection import Database
from durable_postgres.operation import Answer, Ask

WRITES = ("INSERT", "UPDATE", "DELETE", "COMMIT", "WITH")
COMMANDS = ("insert", "update", "delete", "findAndModify", "commitTransaction")


class Death:
    """Counts the writes once it is armed, and dies in front of the last."""

    def __init__(self, place: int) -> None:
        self.left: int | None = None
        self.place = place

    def arm(self) -> None:
        """From here on it counts."""
        self.left = self.place

    def write(self) -> None:
        """A write is about to be made."""
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left is not None:
            self.left -= 1

    def statement(self, text: str) -> None:
        """A statement is about to be executed."""
        if text.lstrip().upper().startswith(WRITES):
            self.write()

    # -- the three stores -----------------------------------------------------------------------------------------------------

    def connect(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        """In the place of `sqlite3.connect`."""
        con = _connect(*arguments, **options)
        con.set_trace_callback(self.statement)
        return con

    def ask(self) -> Any:
        """In the place of `Database.ask`."""

        async def one_by_one(
            database: Database, con: psycopg.AsyncConnection[Any], asks: Sequence[Ask], hints: Sequence[Ask] = ()
        ) -> list[Answer]:
            answers: list[Answer] = []
            for ask in (*asks, *hints):
                self.statement(ask.text)
                answers += await _ask(database, con, [ask])
            return answers[: len(asks)]

        return one_by_one

    def commands(self) -> monitoring.CommandListener:
        """For PyMongo."""
        death = self

        class Listener(monitoring.CommandListener):
            def started(self, event: monitoring.CommandStartedEvent) -> None:
                if event.command_name in COMMANDS:
                    death.write()

            def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

            def failed(self, event: monitoring.CommandFailedEvent) -> None: ...

        return Listener()


_connect, _ask = sqlite3.connect, Database.ask


def tenant_of(place: int) -> UUID:
    """Whose schedule it is that is fired by who dies there."""
    return durable.tenant_id(f"dying {place}")


def scheduling(client: durable.Client, tenant: UUID) -> Scheduling:
    """A scheduler of that tenant."""
    return Scheduling(
        client.store, scope=tenant, events=Events(), settings=client.settings, codec=client.codec, functions=[tick]
    )


def fire_and_die(log: str, url: str, place: int) -> None:
    """Register a schedule of which three slots are due, and fire it; die in front of its write number `place`, if there is one."""
    death = Death(place)
    monitoring.register(death.commands())

    async def main() -> None:
        async with durable.Client(url, settings=QUICK) as client:
            spec = ScheduleSpec(
                schedule_id="daily",
                name=tick.name,
                cron="0 0 * * *",
                tz="UTC",
                input=tick.encode_arguments(client.codec, (), {}),
                overlap="allow",
                catch_up="all",
                next_fire_at=client.store.clock() // DAY * DAY - 2 * DAY,
            )
            await client.store.put_schedule(spec, scope=tenant_of(place))
            one = scheduling(client, tenant_of(place))
            death.arm()
            await one.fire()
            death.left = None

    with mock.patch("sqlite3.connect", death.connect), mock.patch.object(Database, "ask", death.ask()):
        asyncio.run(main())
