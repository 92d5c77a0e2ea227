"""Every hot operation reads what it takes and no more: 700,000 rows beside it change neither its plan nor its work (10).

Two files are built once: a large one (200,000 ready, 200,000 delayed, 200,000 finished, 50,000 suspended, and 50,000 ready rows of an
unknown function in front) and one with 1,000 of each. Each operation runs on both. No plan may scan the table of runs, the index
that is named must be in a plan, and the steps of SQLite's machine are counted: per row taken, and against the small file. No time is
measured. The order of the tests is the life of the runs that they take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from plans.bulk import NOW, SECOND, TENANT, Microscope, build

from durable import model as m

TAKEN = 100
LEASE = 60 * SECOND
FUNCTIONS = [(f"f{number}", None) for number in range(3)]
STEPS_PER_ROW = 400
"""The bound of the design for a claim; what writes through many indexes is given its own below."""


class Eye:
    """One file under the microscope, with what the tests before have taken."""

    def __init__(self, path: Path) -> None:
        self.scope = Microscope(path)
        self.store, self.do = self.scope.store, self.scope.do
        self.leases: list[m.Lease] = []
        self.sent = 0

    def look(self, work: Callable[[Eye], Any]) -> tuple[int, int]:
        """(rows taken, steps of the machine)."""
        with self.scope.looking():
            taken = work(self)
        return taken, self.scope.steps


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Eye, Eye]]:
    folder = tmp_path_factory.mktemp("plans")
    build(folder / "large.db", 1)
    build(folder / "small.db", 1_000)
    large, small = Eye(folder / "large.db"), Eye(folder / "small.db")
    yield large, small
    small.scope.close()  # patches end in the order opposite to their beginning
    large.scope.close()


# -- the operations: each gives the number of rows that it took ---------------------------------------------------------------


def claim(eye: Eye) -> int:
    request = m.ClaimRequest(
        mark=f"mark{len(eye.leases)}",
        queues={"default": TAKEN},
        functions=FUNCTIONS,
        limit=TAKEN,
        lease=LEASE,
        family="x",
        scope=m.ALL,
    )
    claimed = eye.do(eye.store.claim(request))
    eye.leases += [one.lease for one in claimed]
    return len(claimed)


def claim_for_a_tenant(eye: Eye) -> int:
    request = m.ClaimRequest(
        mark="tenant's",
        queues={"default": TAKEN},
        functions=FUNCTIONS,
        limit=TAKEN,
        lease=LEASE,
        family="x",
        scope=_tenant(),
    )
    return len(eye.do(eye.store.claim(request)))


def claim_again(eye: Eye) -> int:
    request = m.ClaimRequest(
        mark="mark0", queues={"default": TAKEN}, functions=FUNCTIONS, limit=TAKEN, lease=LEASE, family="x", scope=m.ALL
    )
    return len(eye.do(eye.store.claim(request)))


def claim_in_turn(eye: Eye) -> int:
    """In a fair queue; the flag stays, and no claim comes behind it."""
    eye.do(eye.store.set_queue(m.QueueRecord(scope_name="queue:default", tenant=m.ALL, fair=True)))
    request = m.ClaimRequest(
        mark="in turn",
        queues={"default": TAKEN},
        functions=FUNCTIONS,
        limit=TAKEN,
        lease=LEASE,
        family="x",
        scope=m.ALL,
    )
    claimed = eye.do(eye.store.claim(request))
    assert {one.run.tenant for one in claimed} == {None, _tenant()}
    return len(claimed)


def claim_finds_nothing(eye: Eye) -> int:
    request = m.ClaimRequest(
        mark="none", queues={"default": 9}, functions=[("nobody", None)], limit=9, lease=LEASE, family="x", scope=m.ALL
    )
    assert eye.do(eye.store.claim(request)) == []
    return 1


def append(eye: Eye) -> int:
    given: dict[str, Any] = {"kind": m.RecordKind.STEP, "position": 0, "seen": -1, "digest": "d", "result": '{"v":1}'}
    return len(eye.do(eye.store.append([(lease, m.NewRecord(step_id="a", **given)) for lease in eye.leases[:TAKEN]])))


def renew(eye: Eye) -> int:
    answers = eye.do(eye.store.renew([m.Renewal(lease=lease) for lease in eye.leases[:TAKEN]], lease=LEASE))
    assert {one.state for one in answers} == {"held"}
    return len(answers)


def inbox(eye: Eye) -> int:
    return len([one for one in eye.do(eye.store.inbox(eye.leases[:TAKEN])) if one is not None])


def suspend(eye: Eye) -> int:
    asleep = m.Suspended(until=None, waiting_for="{}", wake_seq=0)
    answers = eye.do(eye.store.settle([(lease, asleep) for lease in eye.leases[:20]]))
    assert set(answers) == {"landed"}
    return len(answers)


def send(eye: Eye) -> int:
    for lease in eye.leases[:20]:
        signal = m.NewSignal(run_id=lease.run_id, name="go", payload="1", dedup_id="d")
        eye.do(eye.store.send(signal, scope=m.ALL))
    return 20


def cancel(eye: Eye) -> int:
    assert all(eye.do(eye.store.request_cancel([lease.run_id for lease in eye.leases[20:40]], scope=m.ALL)))
    return 20


def complete(eye: Eye) -> int:
    answers = eye.do(eye.store.settle([(lease, m.Completed(output="1")) for lease in eye.leases[40:TAKEN]]))
    assert set(answers) == {"landed"}
    return len(answers)


def fail(eye: Eye) -> int:
    failure = m.Failure(message="broken", positions=(0,))
    answers = eye.do(eye.store.settle([(lease, m.Failed(failure=failure)) for lease in eye.leases[TAKEN : 2 * TAKEN]]))
    assert set(answers) == {"landed"}
    return len(answers)


def retry(eye: Eye) -> int:
    for lease in eye.leases[TAKEN : TAKEN + 20]:
        eye.do(eye.store.retry(lease.run_id, scope=m.ALL, attempts=1))
    return 20


def fork(eye: Eye) -> int:
    for number, lease in enumerate(eye.leases[40:60]):
        eye.do(eye.store.fork(lease.run_id, scope=m.ALL, new_run_id=f"fork{number}", from_step=1))
    return 20


def enqueue(eye: Eye) -> int:
    runs = [
        m.NewRun(
            run_id=f"new-{number}",
            name="f0",
            input="1",
            seed=b"s",
            idempotency_key=f"key{number}",
            coalesce_key=f"key{number}",
            sequence_key=f"key{number}",
        )
        for number in range(TAKEN)
    ]
    return len(eye.do(eye.store.enqueue(runs)))


def coalesce(eye: Eye) -> int:
    runs = [
        m.NewRun(run_id=f"late-{number}", name="f0", input="1", seed=b"s", coalesce_key=f"key{number}")
        for number in range(20)
    ]
    assert {one.disposition for one in eye.do(eye.store.enqueue(runs))} == {"coalesced"}
    return 20


def promote_nothing(eye: Eye) -> int:
    assert eye.do(eye.store.promote(scope=m.ALL, limit=500)).count == 0
    return 1


def promote(eye: Eye) -> int:
    eye.scope.time = NOW + 3_700 * SECOND
    return int(eye.do(eye.store.promote(scope=m.ALL, limit=500)).count)


def sweep(eye: Eye) -> int:
    return len(eye.do(eye.store.sweep(scope=m.ALL, limit=TAKEN, max_reclaims=5)).returned)


def sweep_nothing(eye: Eye) -> int:
    while eye.do(eye.store.sweep(scope=m.ALL, limit=TAKEN, max_reclaims=5)).returned:
        pass
    with eye.scope.looking():
        eye.do(eye.store.sweep(scope=m.ALL, limit=TAKEN, max_reclaims=5))
    return 1


def purge_nothing(eye: Eye) -> int:
    assert eye.do(eye.store.purge(scope=m.ALL, limit=200)) == 0
    return 1


def purge(eye: Eye) -> int:
    eye.scope.time = NOW + 7_300 * SECOND
    return int(eye.do(eye.store.purge(scope=m.ALL, limit=200)))


def mend(eye: Eye) -> int:
    eye.do(eye.store.mend(scope=m.ALL, limit=100))
    return 1


def due_schedules(eye: Eye) -> int:
    eye.do(eye.store.due_schedules(scope=m.ALL, limit=100))
    return 1


def get(eye: Eye) -> int:
    found = eye.do(eye.store.get([f"finished-{number}" for number in range(900, 900 - TAKEN, -1)], scope=m.ALL))
    assert None not in found
    return len(found)


def pulse(eye: Eye) -> int:
    return len(eye.do(eye.store.pulse([f"suspended-{number}" for number in range(1, TAKEN + 1)], scope=m.ALL)))


def history(eye: Eye) -> int:
    return len(eye.do(eye.store.history("suspended-7", scope=m.ALL)))


def children(eye: Eye) -> int:
    assert list(eye.do(eye.store.children("suspended-7", scope=m.ALL))) == []
    return 1


def find_first_page(eye: Eye) -> int:
    return len(eye.do(eye.store.find(m.RunQuery(limit=50), scope=m.ALL)).runs)


def find_later_page(eye: Eye) -> int:
    cursor, runs = None, 0
    for _ in range(10):
        with eye.scope.looking():
            page = eye.do(eye.store.find(m.RunQuery(limit=50, cursor=cursor), scope=m.ALL))
        cursor, runs = page.cursor, len(page.runs)
    return runs


def find_of_a_tenant(eye: Eye) -> int:
    return len(eye.do(eye.store.find(m.RunQuery(limit=50), scope=_tenant())).runs)


def find_of_a_schedule(eye: Eye) -> int:
    eye.do(eye.store.find(m.RunQuery(limit=50, schedule_id="nightly"), scope=m.ALL))
    return 1


def find_of_a_parent(eye: Eye) -> int:
    eye.do(eye.store.find(m.RunQuery(limit=50, parent_run_id="suspended-7"), scope=m.ALL))
    return 1


def _tenant() -> Any:
    import uuid

    return uuid.UUID(TENANT)


HOT: Sequence[tuple[Callable[[Eye], int], str, int]] = [
    # the operation, an index that a plan of it must use, steps of the machine for each row that it takes
    (promote_nothing, "durable_run_due", 500),
    (purge_nothing, "durable_run_purge", 1_500),
    (claim, "durable_run_ready", STEPS_PER_ROW),
    (claim, "durable_run_ready", STEPS_PER_ROW),
    (claim_again, "durable_run_claims", STEPS_PER_ROW),
    (claim_for_a_tenant, "durable_run_ready_tenant", 500),
    (claim_finds_nothing, "durable_run_ready", 1_500),
    (claim_in_turn, "durable_run_ready_tenant", 1_200),
    (append, "durable_run_id", STEPS_PER_ROW),
    (renew, "durable_run_id", STEPS_PER_ROW),
    (inbox, "durable_run_parents", STEPS_PER_ROW),
    (suspend, "durable_run_id", 600),
    (send, "durable_signal", 600),
    (cancel, "durable_run_id", 600),
    (complete, "durable_run_id", 800),
    (fail, "durable_run_id", 800),
    (retry, "durable_run_id", 2_000),
    (fork, "durable_step", 2_000),
    (enqueue, "durable_run_sequence", 800),
    (coalesce, "durable_run_coalesce", 800),
    (promote, "durable_run_due", STEPS_PER_ROW),
    (sweep, "durable_run_leases", 800),
    (sweep_nothing, "durable_run_leases", 1_000),
    (purge, "durable_run_purge", 1_200),
    (mend, "durable_run", 5_000),
    (due_schedules, "durable_schedule_due", 500),
    (get, "durable_run_id", STEPS_PER_ROW),
    (pulse, "durable_run_id", STEPS_PER_ROW),
    (history, "durable_step", 1_000),
    (children, "durable_run_parents", 500),
    (find_first_page, "durable_run_listing", STEPS_PER_ROW),
    (find_later_page, "durable_run_listing", STEPS_PER_ROW),
    (find_of_a_tenant, "durable_run_listing_tenant", STEPS_PER_ROW),
    (find_of_a_schedule, "durable_run_schedule", 1_000),
    (find_of_a_parent, "durable_run_parents", 1_000),
]


def test_hot_operations_use_their_index_and_read_what_they_take(eyes: tuple[Eye, Eye]) -> None:
    large, small = eyes
    wrong: list[str] = []
    for operation, index, most in HOT:
        name = operation.__name__
        taken, steps = large.look(operation)
        plans = large.scope.plans()
        less, fewer = small.look(operation)
        print(f"{name:24} {taken:4} rows, {steps / max(taken, 1):7.0f} steps each; small: {fewer / max(less, 1):7.0f}")
        if not taken or taken != less:
            wrong.append(f"{name} took {taken} rows, in the small file {less}")
        if steps > most * taken:
            wrong.append(f"{name}: {steps} steps for {taken} rows are more than {most} each")
        if steps > 1.5 * fewer + 200:
            wrong.append(f"{name}: {steps} steps, in the small file {fewer}: the work grows with what lies beside")
        lines = [(text, line) for text, plan in plans.items() for line in plan]
        for text, line in lines:
            if re.search(
                r"\bSCAN (durable_run|durable_step|durable_signal|durable_key|r|s|c|o)\b(?! USING (COVERING )?INDEX)",
                line,
            ):
                wrong.append(f"{name} reads a whole table: {line}: {text[:300]}")
        if not any(index in line for _, line in lines) and index not in " ".join(plans):
            wrong.append(f"{name} does not use {index}: {[line for _, line in lines]}")
    assert not wrong, "\n".join(wrong)
