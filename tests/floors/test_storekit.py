"""What backends share: what is stored, and what is refused."""

from __future__ import annotations

import dataclasses
import uuid

import pytest

from durable.errors import ConfigurationError, Conflict, SchemaMismatch
from durable.model import ALL, Names, RecordKind, StepRecord, tenant_id
from durable.storekit import (
    TABLES,
    Migration,
    Renames,
    cursor_of,
    cursor_values,
    given_key,
    maker,
    migrations_of,
    pending,
    statements,
    stored_key,
    tenant_of,
    tenant_text,
    within,
)

ACME = tenant_id("acme")


@pytest.mark.parametrize("key", ["k", "a:b", ":", "", "ключ"])
@pytest.mark.parametrize("tenant", [None, ACME])
def test_a_key_is_given_back_as_it_was_passed(key: str, tenant: uuid.UUID | None) -> None:
    assert given_key(stored_key(tenant, key)) == key


def test_two_tenants_never_meet_in_one_stored_key() -> None:
    other = tenant_id("other")
    keys = ["k", f"{ACME}:k", ":k"]
    stored = [stored_key(tenant, key) for tenant in (None, ACME, other) for key in keys]
    assert len(set(stored)) == len(stored)


def test_none_is_the_untagged_rows_and_never_everybody_s() -> None:
    assert [within(tenant, None) for tenant in (None, ACME)] == [True, False]
    assert [within(tenant, ACME) for tenant in (None, ACME)] == [False, True]
    assert [within(tenant, ALL) for tenant in (None, ACME)] == [True, True]


def test_a_tenant_s_text_is_lower_case_and_comes_back() -> None:
    assert tenant_text(ACME) == str(ACME).lower()
    assert tenant_of(tenant_text(ACME)) == ACME
    assert tenant_of(None) is tenant_text(None) is None


def test_a_cursor_comes_back() -> None:
    assert cursor_values(cursor_of(1_700_000_000_000_000, "run")) == (1_700_000_000_000_000, "run")


@pytest.mark.parametrize(
    "bad", ["", "x", "!!", "bnVsbA", "W10", "WzEsMl0", "WyJhIiwiYiJd", "WzFlMzAsImEiXQ", "a" * 5_000, "\udc80", "é"]
)
def test_a_cursor_that_is_not_ours_is_a_conflict(bad: str) -> None:
    with pytest.raises(Conflict) as error:
        cursor_values(bad)
    assert error.value.hint


def test_a_value_is_made_equal_to_the_one_of_its_constructor() -> None:
    record = StepRecord(
        step_id="a", kind=RecordKind.STEP, position=0, seen=-1, digest="d", result="1", at=1, started_at=None, fence=1
    )
    values = [getattr(record, field.name) for field in dataclasses.fields(record)]
    made = maker(StepRecord)(values)
    assert made == record
    assert hash(made) == hash(record)
    with pytest.raises(ValueError, match="9 fields for a StepRecord, which has 10"):
        maker(StepRecord)(values[:-1])


def test_renaming_follows_indexes_and_leaves_other_words_alone() -> None:
    renames = Renames(Names(tables={"durable_run": "jobs", "durable_schedule_fire": "slots"}))
    statement = "SELECT durable_run.x FROM durable_run INDEXED BY durable_run_due, durable_schedule, durable_schedule_fire, my_durable_x"
    assert renames(statement) == "SELECT jobs.x FROM jobs INDEXED BY jobs_due, durable_schedule, slots, my_durable_x"
    assert renames.table("durable_run") == "jobs"
    assert not Renames(Names())
    assert Renames(Names())(statement) == statement


@pytest.mark.parametrize(
    "tables",
    [
        {"runs": "x"},
        {"durable_run": "A"},
        {"durable_run": "1a"},
        {"durable_run": "a b"},
        {"durable_run": "durable_key"},
    ],
)
def test_a_table_name_that_can_not_work_is_a_configuration_error(tables: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError):
        Renames(Names(tables=tables))


def test_statements_are_split_at_line_ends_without_their_comments() -> None:
    text = "-- a; b\nCREATE TABLE a (\n  b TEXT, -- c; d\n  e TEXT\n);\n\nCREATE INDEX f ON a (b);"
    assert statements(text) == ["CREATE TABLE a ( b TEXT, e TEXT )", "CREATE INDEX f ON a (b)"]


def test_a_checksum_is_of_what_is_executed() -> None:
    first = Migration(version=1, name="0001_a", text="CREATE TABLE a (b TEXT);\n")
    same = Migration(version=1, name="0001_a", text="-- why\nCREATE TABLE a (b   TEXT);")
    other = Migration(version=1, name="0001_a", text="CREATE TABLE a (c TEXT);\n")
    assert first.checksum == same.checksum != other.checksum


def test_migrations_are_in_order_and_complete() -> None:
    found = migrations_of([("0002_b.sql", "B;"), ("0001_a.sql", "A;"), ("README.md", "")])
    assert [migration.name for migration in found] == ["0001_a", "0002_b"]
    with pytest.raises(ConfigurationError):
        migrations_of([("0001_a.sql", "A;"), ("0003_c.sql", "C;")])


def test_what_is_pending_follows_from_what_was_applied() -> None:
    wanted = migrations_of([("0001_a.sql", "A;"), ("0002_b.sql", "B;")])
    first = {1: wanted[0].checksum}
    assert list(pending({}, wanted)) == list(wanted)
    assert list(pending(first, wanted)) == [wanted[1]]
    assert list(pending({**first, 2: wanted[1].checksum}, wanted)) == []


@pytest.mark.parametrize("applied", [{1: "other"}, {3: "x"}])
def test_tables_newer_than_this_code_or_made_by_another_text_are_a_schema_mismatch(applied: dict[int, str]) -> None:
    with pytest.raises(SchemaMismatch) as error:
        pending(applied, migrations_of([("0001_a.sql", "A;"), ("0002_b.sql", "B;")]))
    assert error.value.hint


def test_every_table_can_be_renamed() -> None:
    renames = Renames(Names(tables={table: f"x_{table}" for table in TABLES}))
    assert [renames(table) for table in TABLES] == [f"x_{table}" for table in TABLES]
