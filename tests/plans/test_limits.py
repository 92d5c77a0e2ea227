"""What flow control costs (rules 10, 73): without a limit the same statements; far from a limit a row for each run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from plans.bulk import SECOND, TENANT, Microscope

from durable.model import ALL, Claimed, ClaimRequest, Completed, NewRun, QueueRecord
from durable.settings import Settings
from durable.storekit import tenant_of
from durable_sqlite import backend

RUNS = 100


@pytest.fixture
def scope(tmp_path: Path) -> Iterator[Microscope]:
    path = tmp_path / "limits.db"

    async def migrate() -> None:
        await (await backend.open(f"sqlite:///{path}", settings=Settings())).close()

    asyncio.run(migrate())
    made = Microscope(path)
    yield made
    made.close()


def claim(scope: Microscope, mark: str) -> list[Claimed]:
    """Start and claim a hundred runs of a queue."""
    tenants = (None, tenant_of(TENANT))
    runs = [
        NewRun(
            run_id=f"{mark}-{number}", name="f", input="1", seed=b"s", tenant=tenants[number % 2], concurrency_key="k"
        )
        for number in range(RUNS)
    ]
    scope.do(scope.store.enqueue(runs))
    request = ClaimRequest(
        mark=mark,
        queues={"default": RUNS},
        functions=[("f", None)],
        limit=RUNS,
        lease=60 * SECOND,
        family="x",
        scope=ALL,
    )
    with scope.looking():
        claimed = list(scope.do(scope.store.claim(request)))
    assert len(claimed) == RUNS
    return claimed


def forms(scope: Microscope) -> list[str]:
    """The statements, without their values."""
    return [re.sub(r"'(?:[^']|'')*'|\b\d+\b", "?", text) for text in scope.statements]


def settle(scope: Microscope, claimed: list[Claimed]) -> None:
    with scope.looking():
        scope.do(scope.store.settle([(one.lease, Completed(output="1")) for one in claimed]))


def test_a_queue_without_limits_executes_the_same_statements_whatever_is_limited_elsewhere(scope: Microscope) -> None:
    claimed = claim(scope, "before")
    before = forms(scope)
    settle(scope, claimed)
    settled = forms(scope)
    for name in ("queue:other", "key:other", "share:other", "function:other"):
        for tenant in (ALL, tenant_of(TENANT)):
            if name.startswith("share") and tenant is not ALL:
                continue
            scope.do(scope.store.set_queue(QueueRecord(scope_name=name, tenant=tenant, max_concurrency=1)))
    claimed = claim(scope, "after")
    assert forms(scope) == before
    settle(scope, claimed)
    assert forms(scope) == settled


def test_a_limit_that_is_not_reached_costs_a_run_a_row(scope: Microscope) -> None:
    """One permit: written, with its two indexes, by the claim and deleted by the landing; in steps of SQLite's machine. What is in
    flight is counted once for a claim and scope, not for each run."""
    steps: dict[str, tuple[int, int]] = {}
    for what, most in (("without", None), ("with", 10 * RUNS)):
        if most is not None:
            scope.do(scope.store.set_queue(QueueRecord(scope_name="queue:default", tenant=ALL, max_concurrency=most)))
        claimed = claim(scope, what)
        claiming = scope.steps
        settle(scope, claimed)
        steps[what] = claiming, scope.steps
    print(steps)
    for place, most_steps in enumerate((150, 50)):
        assert steps["with"][place] - steps["without"][place] <= most_steps * RUNS, steps
