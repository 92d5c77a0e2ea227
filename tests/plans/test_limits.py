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


def start(scope: Microscope, mark: str, count: int = RUNS) -> None:
    tenants = (None, tenant_of(TENANT))
    runs = [
        NewRun(
            run_id=f"{mark}-{number}", name="f", input="1", seed=b"s", tenant=tenants[number % 2], concurrency_key="k"
        )
        for number in range(count)
    ]
    scope.do(scope.store.enqueue(runs))


def take(scope: Microscope, mark: str, count: int = RUNS) -> list[Claimed]:
    request = ClaimRequest(
        mark=mark,
        queues={"default": count},
        functions=[("f", None)],
        limit=count,
        lease=60 * SECOND,
        family="x",
        scope=ALL,
    )
    claimed = list(scope.do(scope.store.claim(request)))
    assert len(claimed) == count
    return claimed


def claim(scope: Microscope, mark: str) -> list[Claimed]:
    """Start and claim a hundred runs of a queue."""
    start(scope, mark)
    with scope.looking():
        return take(scope, mark)


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
    """One permit: written, with its three indexes, by the claim and deleted by the landing; in steps of SQLite's machine."""
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


@pytest.mark.parametrize("name", ["queue:default", "function:f", "key:default"])
def test_a_claim_of_one_run_reads_one_permit_however_many_are_in_flight(scope: Microscope, name: str) -> None:
    """The newest, which says how many there can be (73). A hundred claims of one run each beside 400 in flight, of which the oldest lands
    each time, in steps of SQLite's machine: as many as beside 4, and nothing is counted."""
    steps: dict[int, tuple[int, int]] = {}
    scope.do(scope.store.set_queue(QueueRecord(scope_name=name, tenant=ALL, max_concurrency=1_000)))
    for in_flight in (4, 400):
        mark = f"beside-{in_flight}"
        start(scope, mark, in_flight + RUNS)
        held = take(scope, mark, in_flight)
        claiming = settling = 0
        for number in range(RUNS):
            with scope.looking():
                held += take(scope, f"{mark}/{number}", 1)
            claiming += scope.steps
            assert not [text for text in scope.statements if "FROM durable_permit" in text and "count(" in text]
            settle(scope, [held.pop(0)])
            settling += scope.steps
        steps[in_flight] = claiming, settling
        settle(scope, held)
    print(steps)
    for few, many in zip(*steps.values(), strict=True):
        assert abs(many - few) <= 20 * RUNS, steps


def test_what_is_in_flight_is_counted_where_the_newest_permit_leaves_no_room(scope: Microscope) -> None:
    """One count of 500 for the next 500 starts under a limit of 1,000: an entry for each start."""
    scope.do(scope.store.set_queue(QueueRecord(scope_name="queue:default", tenant=ALL, max_concurrency=1_000)))
    start(scope, "many", 1_600)
    held = take(scope, "many", 500)
    counts: list[int] = []
    for number in range(1_100):
        with scope.looking():
            held += take(scope, f"many/{number}", 1)
        if any("FROM durable_permit" in text and "count(" in text for text in scope.statements):
            counts.append(number)
        settle(scope, [held.pop(0)])
    assert counts == [500, 1_000]
