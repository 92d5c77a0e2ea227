"""What lies in a database, read past the SDK: every row of every table, and those that mention a tenant or anything of it."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from typing import Any

import psycopg
import pymongo
from psycopg import sql
from psycopg.rows import dict_row

from durable.storekit import TABLES

Rows = list[tuple[str, str]]
"""(table, the row as text)."""


def everything(url: str) -> Rows:
    """All rows."""
    if url.startswith("sqlite"):
        found = _sqlite(url.removeprefix("sqlite:///"))
    elif url.startswith("postgres"):
        found = _postgres(url)
    else:
        found = _mongo(url)
    return sorted((table, json.dumps(row, default=repr, sort_keys=True)) for table, row in found)


def _sqlite(path: str) -> Iterable[tuple[str, dict[str, Any]]]:
    with sqlite3.connect(path) as con:
        con.row_factory = sqlite3.Row
        return [(table, dict(row)) for table in TABLES for row in con.execute(f"SELECT * FROM {table}")]


def _postgres(url: str) -> Iterable[tuple[str, dict[str, Any]]]:
    with psycopg.connect(url, row_factory=dict_row) as con:
        statements = [(table, sql.SQL("SELECT * FROM {}").format(sql.Identifier(table))) for table in TABLES]
        return [(table, row) for table, statement in statements for row in con.execute(statement)]


def _mongo(url: str) -> Iterable[tuple[str, dict[str, Any]]]:
    with pymongo.MongoClient[dict[str, Any]](url) as client:
        database = client.get_default_database()
        return [(table, row) for table in TABLES for row in database[table].find()]


def of_tenant(url: str, tenant: object) -> Rows:
    """All rows that mention a tenant's id, or the id of one of its runs."""
    rows = everything(url)
    runs = {
        json.loads(row).get("run_id") or json.loads(row)["_id"]
        for table, row in rows
        if table == "durable_run" and str(tenant) in row
    }
    return [(table, row) for table, row in rows if any(word in row for word in {str(tenant), *runs})]


def checksum(rows: Rows) -> str:
    """One text for all of them."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
