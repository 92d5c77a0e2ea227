"""The same driver on PostgreSQL, under a clock that the tests move: `now()` of its own schema, which is looked into before the server's.

Used by `test_statemachine_postgres.py` and by the races. The clock is a row; every statement of the store that says `now()` reads it.
"""

from __future__ import annotations

import functools
import urllib.parse
from typing import Any

import psycopg
from psycopg import sql
from servers.postgres import Database, server
from statemachine.driver import START, Driver, now
from statemachine.oracle_upkeep import Oracle

from durable.settings import Settings
from durable_postgres import backend

CLOCK = """
CREATE SCHEMA fake;
CREATE TABLE fake.clock (at timestamptz NOT NULL);
INSERT INTO fake.clock VALUES ('epoch');
CREATE FUNCTION fake.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT at FROM fake.clock';
"""
SET_CLOCK = "UPDATE fake.clock SET at = timestamptz 'epoch' + %s * interval '1 microsecond'"
TABLES = """
SELECT table_name FROM information_schema.tables
WHERE table_schema = 'public' AND table_type = 'BASE TABLE' AND table_name LIKE 'durable%' AND table_name <> 'durable_schema_version'
"""


def clocked(database: Database) -> str:
    """The URL of a database in which the fake clock goes before the server's."""
    with database.connect() as con:
        con.execute(CLOCK)
    return f"{database.url}?options={urllib.parse.quote('-c search_path=fake,pg_catalog')}"


@functools.cache
def _bench() -> tuple[str, psycopg.Connection[Any], sql.Composed]:
    database = server().create()
    url = clocked(database)
    now(now(backend.open(url, settings=Settings(), auto_migrate=True)).close())
    con = psycopg.connect(database.url, autocommit=True)
    tables = [name for (name,) in con.execute(TABLES)]
    return (
        url,
        con,
        sql.SQL("; ").join(sql.SQL("DELETE FROM public.{}").format(sql.Identifier(name)) for name in tables),
    )


class PostgresDriver(Driver):
    """A store on an emptied database."""

    def __init__(self) -> None:
        url, self.con, empty = _bench()
        self.con.execute(empty)
        self.time = START
        self.settings = Settings()
        self.store = now(backend.open(url, settings=self.settings))
        self.oracle = Oracle(lambda: self.time, self.settings.keep)
        self.gone = set()
        self.compared = {}

    @property
    def time(self) -> int:
        """The instant that the server takes for now."""
        return self._time

    @time.setter
    def time(self, instant: int) -> None:
        self._time = instant
        self.con.execute(SET_CLOCK, (instant,))
