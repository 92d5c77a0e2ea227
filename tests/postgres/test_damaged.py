"""A damaged row is shown as what it is, and hides no other (semantics 9)."""

from __future__ import annotations

import pytest
from servers.postgres import Database

from durable.model import ALL, Status
from durable.testing.conformance.scenario import Scene


@pytest.mark.parametrize(
    ("change", "names"), [("status = 'lost'", "status"), ("tags = '[1]'", "tags"), ("input = NULL", "input")]
)
async def test_a_damaged_row_is_shown_as_damaged_and_hides_no_other(
    database: Database, scene: Scene, change: str, names: str
) -> None:
    runs = [await scene.start() for _ in range(5)]
    bad = runs[2].run_id
    with database.connect() as con:
        checks = con.execute(
            "SELECT conname FROM pg_constraint WHERE conrelid = 'durable_run'::regclass AND contype = 'c'"
        ).fetchall()
        for (check,) in checks:
            con.execute(f'ALTER TABLE durable_run DROP CONSTRAINT "{check}"')
        con.execute(f"UPDATE durable_run SET {change} WHERE run_id = '{bad}'")
    for limit in (1, 2, 100):
        assert [run.run_id for run in await scene.runs(limit=limit)] == [run.run_id for run in reversed(runs)]
    shown = await scene.get(bad)
    assert (shown.error, shown.error_kind) == (f"its stored row is damaged: {names} can not be read", "payload")
    assert shown.status is (Status.FAILED if names == "status" else Status.PENDING)
    pulses = await scene.store.pulse([run.run_id for run in runs], scope=ALL)
    assert [pulse and pulse.run_id for pulse in pulses] == [run.run_id for run in runs]
