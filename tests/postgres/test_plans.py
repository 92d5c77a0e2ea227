"""Plans (rule 10): every hot statement uses its index, and reads what it takes, whatever lies beside.

A database is filled by the server itself: `DURABLE_POSTGRES_PLAN_ROWS` (20,000; a nox session takes 200,000) runs each that are ready,
delayed and finished, a quarter as many suspended, as many ready ones of twenty functions more, mixed and one function after the other,
and as many of an unknown function in front. The server explains each statement of an operation while it is carried out
(auto_explain): the plans that are judged are those that ran, with the rows that they really read. No time is measured. The order of the
tests is the life of the runs that they take.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import psycopg
import pytest
from postgres.conftest import template
from servers.postgres import Database, server

from durable.model import (
    ALL,
    ClaimRequest,
    Completed,
    Failed,
    Lease,
    NewRecord,
    NewSignal,
    QueueRecord,
    RecordKind,
    Renewal,
    RunQuery,
    Suspended,
)
from durable.settings import SECOND, Settings
from durable.testing.conformance.scenario import failure, new_run
from durable_postgres import Store, backend
from durable_postgres.adapting import teach

ROWS = int(os.environ.get("DURABLE_POSTGRES_PLAN_ROWS", "20000"))
TAKEN = 50
TENANT = "9f3f2a52-5d2c-5a6e-8f5b-1f2f30d2c111"
LEASE = 60 * SECOND
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]
KINDS = {
    # what it is: (how many, name, priority, status, attempts, available_at, finished_at, purge_at)
    "unknown": (ROWS // 4, "'unknown'", 9, "pending", 0, "NULL", "NULL", "NULL"),
    "ready": (ROWS, "'f' || (i % 3)", 0, "pending", 0, "NULL", "NULL", "NULL"),
    "many": (ROWS // 4, "'g' || abs(hashint4(i)) % 20", 0, "pending", 0, "NULL", "NULL", "NULL"),
    "batches": (ROWS // 4, f"'h' || (i - 1) * 20 / {ROWS // 4}", 0, "pending", 0, "NULL", "NULL", "NULL"),
    "delayed": (ROWS, "'f' || (i % 3)", 0, "pending", 0, "now() + interval '1 h'", "NULL", "NULL"),
    "finished": (ROWS, "'f' || (i % 3)", 0, "completed", 1, "NULL", "now()", "now() + interval '1 day'"),
    "suspended": (ROWS // 4, "'f' || (i % 3)", 0, "suspended", 1, "now() + interval '1 day'", "NULL", "NULL"),
    "due": (200, "'f0'", 0, "pending", 0, "now() - i * interval '1 s'", "NULL", "NULL"),
    "purgeable": (200, "'f0'", 0, "failed", 1, "NULL", "now() - interval '2 day'", "now() - i * interval '1 s'"),
}
EXPLAIN = {
    "session_preload_libraries": "auto_explain",
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_analyze": "on",
    "auto_explain.log_buffers": "on",
    "auto_explain.log_format": "json",
    "auto_explain.log_level": "notice",
}


def fill(database: Database) -> None:
    with database.connect() as con:
        for kind, (count, name, priority, status, attempts, available, finished, purge) in KINDS.items():
            con.execute(f"""
                INSERT INTO durable_run (run_id, name, status, tenant_id, priority, attempts, available_at, created_at, updated_at,
                    started_at, finished_at, purge_at, seed, input, output, error, error_kind, wake_seq, max_attempts)
                SELECT '{kind}-' || i, {name}, '{status}', CASE WHEN i % 5 = 0 THEN uuid '{TENANT}' END, {priority}, {attempts},
                    {available}, now() - interval '1 day' + i * interval '1 ms', now(), NULL, {finished}, {purge}, '\\x00', '{{"a":1}}',
                    CASE WHEN '{status}' = 'completed' THEN jsonb '1' END, CASE WHEN '{status}' = 'failed' THEN 'broken' END,
                    CASE WHEN '{status}' = 'failed' THEN 'exception' END, 0, 1
                FROM generate_series(1, {count}) AS i""")
        con.execute("""
            INSERT INTO durable_step (run_id, step_id, kind, position, seen, digest, fence, created_at, result)
            SELECT run_id, 'a', 'step', 0, -1, 'd', 1, created_at, '{"v":1}' FROM durable_run WHERE attempts = 1""")
        con.execute("VACUUM ANALYZE")


@dataclasses.dataclass
class Seen:
    """What a statement did."""

    text: str
    indexes: set[str] = dataclasses.field(default_factory=set)
    sequential: set[str] = dataclasses.field(default_factory=set)
    searched: int = 0
    """Rows that a scan looked at to find those that it gave, in the table of runs; what is fetched by its id is no search. Of a scan
    that is done several times servers before 18 say a rounded average: a function more or less."""
    fetched: int = 0
    permits: int = 0
    """Rows of the table of permits, however they were found."""
    buffers: int = 0
    compiled: bool = False
    """Whether the server took a second to compile what runs for a millisecond."""


def judge(document: dict[str, Any]) -> Seen:
    seen = Seen(document["Query Text"], compiled="JIT" in document)
    seen.buffers = document["Plan"].get("Shared Hit Blocks", 0) + document["Plan"].get("Shared Read Blocks", 0)
    nodes = [document["Plan"]]
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        kind, table = node["Node Type"], node.get("Relation Name")
        index = node.get("Index Name")
        if kind == "Bitmap Heap Scan":
            index = node["Plans"][0].get("Index Name")
        if index is not None:
            seen.indexes.add(index)
        if kind == "Seq Scan":
            seen.sequential.add(str(table))
        if "Scan" in kind and kind != "Bitmap Index Scan" and table in ("durable_run", "durable_permit"):
            loops = node["Actual Loops"]
            read = (
                node["Actual Rows"]
                + node.get("Rows Removed by Filter", 0)
                + node.get("Rows Removed by Index Recheck", 0)
            ) * loops
            if table == "durable_permit":
                seen.permits += round(read)
            elif index == "durable_run_pkey":
                seen.fetched += round(read)
            else:
                seen.searched += round(read)
    return seen


class Eye:
    """A store whose statements explain themselves, whatever connection they go out on."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.loop = asyncio.new_event_loop()
        self.seen: list[Seen] = []
        self.leases: list[Lease] = []
        options = " ".join(f"-c {name}={value}" for name, value in EXPLAIN.items())
        url = f"{database.url}?options={urllib.parse.quote(options)}&listen=off"
        EYES[database.name] = self
        self.store: Store = self.do(backend.open(url, settings=Settings()))

    def do(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(work)  # type: ignore[arg-type]

    def notice(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        text = diagnostic.message_primary or ""
        if "plan:" in text:
            self.seen.append(judge(json.loads(text.partition("plan:")[2])))

    def close(self) -> None:
        self.do(self.store.close())
        self.loop.close()
        del EYES[self.database.name]
        self.database.drop()

    def look(self, work: Callable[[Eye], int]) -> tuple[int, list[Seen]]:
        """Rows taken, and what was done for it. Several times, so that prepared statements come to their lasting plan."""
        self.seen.clear()
        taken = work(self)
        assert self.seen, "the server explained nothing"
        return taken, list(self.seen)


EYES: dict[str, Eye] = {}
MARKS = itertools.count()
"""Of all eyes: a claim with the mark of another one would be answered with what that one holds."""


def watched(con: Any) -> None:
    """In the place of `adapting.teach`, which every connection of a store goes through."""
    teach(con)
    con.add_notice_handler(EYES[con.info.dbname].notice)


@pytest.fixture(scope="module")
def eye() -> Iterator[Eye]:
    database = server().create(template())
    fill(database)
    with mock.patch("durable_postgres.connection.teach", watched):
        made = Eye(database)
        yield made
        made.close()


def claim(eye: Eye, **changes: Any) -> int:
    values: dict[str, Any] = {"functions": [("f0", None)], "queues": {"default": TAKEN}, "limit": TAKEN, "scope": ALL}
    request = ClaimRequest(
        **{
            "mark": f"m{next(MARKS)}",
            "lease": LEASE,
            "family": "x",
            **values,
            **changes,
        }
    )
    claimed = eye.do(eye.store.claim(request))
    eye.leases += [one.lease for one in claimed]
    return len(claimed)


def claim_of_a_tenant(eye: Eye) -> int:
    return claim(eye, scope=uuid.UUID(TENANT))


def claim_of_three_functions(eye: Eye) -> int:
    return claim(eye, functions=[("f0", None), ("f1", None), ("f2", None)])


def claim_of_twenty_functions(eye: Eye) -> int:
    """All of which have a backlog."""
    return claim(eye, functions=[(f"g{number}", None) for number in range(20)])


def claim_of_twenty_functions_one_after_the_other(eye: Eye) -> int:
    """All of which have a backlog, and all that is taken is of the first one."""
    return claim(eye, functions=[(f"h{number}", None) for number in range(20)])


def claim_of_one_among_twenty(eye: Eye) -> int:
    """That has all of the backlog."""
    return claim(eye, functions=[("f0", None), *((f"idle{number}", None) for number in range(19))])


def claim_that_finds_nothing(eye: Eye) -> int:
    assert claim(eye, functions=[("nobody", None)]) == 0
    return 0


def append(eye: Eye) -> int:
    given: dict[str, Any] = {"kind": RecordKind.STEP, "position": 0, "seen": -1, "digest": "d", "result": '{"v":1}'}
    records = [(lease, NewRecord(step_id="a", **given)) for lease in eye.leases[:TAKEN]]
    answers = eye.do(eye.store.append(records))
    return sum(answer.state != "lost" for answer in answers)


def renew(eye: Eye) -> int:
    answers = eye.do(eye.store.renew([Renewal(lease=lease) for lease in eye.leases[:TAKEN]], lease=LEASE))
    assert {answer.state for answer in answers} == {"held"}
    return len(answers)


def inbox(eye: Eye) -> int:
    return len([one for one in eye.do(eye.store.inbox(eye.leases[:TAKEN])) if one is not None])


def suspend(eye: Eye) -> int:
    asleep = Suspended(until=None, waiting_for="{}", wake_seq=0)
    assert set(eye.do(eye.store.settle([(lease, asleep) for lease in eye.leases[:20]]))) == {"landed"}
    return 20


def send(eye: Eye) -> int:
    for lease in eye.leases[:20]:
        eye.do(eye.store.send(NewSignal(run_id=lease.run_id, name="go", payload="1", dedup_id="d"), scope=ALL))
    return 20


def cancel(eye: Eye) -> int:
    assert all(eye.do(eye.store.request_cancel([lease.run_id for lease in eye.leases[20:40]], scope=ALL)))
    return 20


def complete(eye: Eye) -> int:
    assert set(eye.do(eye.store.settle([(lease, Completed(output="1")) for lease in eye.leases[40:TAKEN]]))) == {
        "landed"
    }
    return TAKEN - 40


def fail(eye: Eye) -> int:
    leases = eye.leases[TAKEN : 2 * TAKEN]
    assert set(eye.do(eye.store.settle([(lease, Failed(failure=failure())) for lease in leases]))) == {"landed"}
    return TAKEN


def retry(eye: Eye) -> int:
    for lease in eye.leases[TAKEN : TAKEN + 10]:
        eye.do(eye.store.retry(lease.run_id, scope=ALL, attempts=1))
    return 10


def enqueue(eye: Eye) -> int:
    runs = [
        new_run(
            run_id=f"new-{number}",
            idempotency_key=f"k{number}",
            coalesce_key=f"k{number}",
            sequence_key=f"k{number}",
            name="g",
        )
        for number in range(TAKEN)
    ]
    return len(eye.do(eye.store.enqueue(runs)))


def coalesce(eye: Eye) -> int:
    runs = [new_run(coalesce_key=f"k{number}", name="g") for number in range(20)]
    assert {one.disposition for one in eye.do(eye.store.enqueue(runs))} == {"coalesced"}
    return 20


def promote(eye: Eye) -> int:
    return int(eye.do(eye.store.promote(scope=ALL, limit=100)).count)


def promote_nothing(eye: Eye) -> int:
    while eye.do(eye.store.promote(scope=ALL, limit=500)).count:
        eye.seen.clear()
    return 0


def sweep_nothing(eye: Eye) -> int:
    assert not eye.do(eye.store.sweep(scope=ALL, limit=100, max_reclaims=5)).returned
    return 0


def purge(eye: Eye) -> int:
    return int(eye.do(eye.store.purge(scope=ALL, limit=100)))


def mend(eye: Eye) -> int:
    eye.do(eye.store.mend(scope=ALL, limit=100))
    return 0


def due_schedules(eye: Eye) -> int:
    eye.do(eye.store.due_schedules(scope=ALL, limit=100))
    return 0


def get(eye: Eye) -> int:
    found = eye.do(eye.store.get([f"finished-{number}" for number in range(1, TAKEN + 1)], scope=ALL))
    assert None not in found
    return TAKEN


def pulse(eye: Eye) -> int:
    return len(eye.do(eye.store.pulse([f"suspended-{number}" for number in range(1, TAKEN + 1)], scope=ALL)))


def history(eye: Eye) -> int:
    return len(eye.do(eye.store.history("suspended-7", scope=ALL)))


def children(eye: Eye) -> int:
    assert list(eye.do(eye.store.children("suspended-7", scope=ALL))) == []
    return 0


def first_page(eye: Eye) -> int:
    return len(eye.do(eye.store.find(RunQuery(limit=50), scope=ALL)).runs)


def tenth_page(eye: Eye) -> int:
    cursor = None
    for _ in range(10):
        eye.seen.clear()
        page = eye.do(eye.store.find(RunQuery(limit=50, cursor=cursor), scope=ALL))
        cursor = page.cursor
    return len(page.runs)


def page_of_a_tenant(eye: Eye) -> int:
    return len(eye.do(eye.store.find(RunQuery(limit=50), scope=uuid.UUID(TENANT))).runs)


Hot = tuple[Callable[[Eye], int], int, str, float]
HOT: Sequence[Hot] = [
    # the operation, how many rows it takes, an index that it must use, rows searched for each of them
    (claim, TAKEN, "durable_run_ready", 1),
    (claim, TAKEN, "durable_run_ready", 1),
    (claim_of_three_functions, TAKEN, "durable_run_ready", 2),
    (claim_of_twenty_functions, TAKEN, "durable_run_ready", 2 + 20 / TAKEN),
    (claim_of_twenty_functions, TAKEN, "durable_run_ready", 2 + 20 / TAKEN),
    (claim_of_twenty_functions_one_after_the_other, TAKEN, "durable_run_ready", 2 + 6 * 20 / TAKEN),
    (claim_of_one_among_twenty, TAKEN, "durable_run_ready", 1),
    (claim_of_a_tenant, TAKEN, "durable_run_ready_tenant", 1),
    (claim_that_finds_nothing, 0, "durable_run_ready", 1),
    (append, TAKEN, "durable_run_pkey", 0),
    (append, TAKEN, "durable_step_pkey", 0),
    (renew, TAKEN, "durable_run_pkey", 0),
    (inbox, TAKEN, "durable_run_parents", 0),
    (suspend, 20, "durable_run_pkey", 0),
    (send, 20, "durable_run_pkey", 0),
    (cancel, 20, "durable_run_pkey", 0),
    (complete, TAKEN - 40, "durable_run_pkey", 0),
    (fail, TAKEN, "durable_run_pkey", 0),
    (retry, 10, "durable_run_pkey", 0),
    (enqueue, TAKEN, "durable_run_sequence", 0),
    (coalesce, 20, "durable_run_coalesce", 1),
    (promote, 100, "durable_run_due", 2),
    (promote_nothing, 0, "durable_run_due", 1),
    (sweep_nothing, 0, "durable_run_leases", 1),
    (purge, 100, "durable_run_purge", 2),
    (mend, 0, "durable_run_cancel_children", 1),
    (get, TAKEN, "durable_run_pkey", 0),
    (pulse, TAKEN, "durable_run_pkey", 0),
    (history, 1, "durable_step_pkey", 0),
    (children, 0, "durable_run_parents", 0),
    (first_page, TAKEN, "durable_run_listing", 1.1),
    (tenth_page, TAKEN, "durable_run_listing", 1.1),
    (page_of_a_tenant, TAKEN, "durable_run_listing_tenant", 1.1),
]
SLACK = 4
"""Rows that an operation may look at beside those that it takes: the next one due, the head of a sequence."""
SMALL = {
    "durable_queue",
    "durable_worker",
    "durable_schedule",
    "durable_permit",
    "durable_dependency",
    "durable_key",
    "durable_signal",
    "durable_schedule_fire",
}
"""Tables that have few rows here, so that the server rightly reads them whole."""


def test_hot_operations_use_their_index_and_read_what_they_take(eye: Eye) -> None:
    wrong: list[str] = []
    for operation, takes, index, most in HOT:
        name = operation.__name__
        taken, seen = eye.look(operation)
        searched, fetched = sum(one.searched for one in seen), sum(one.fetched for one in seen)
        indexes = {used for one in seen for used in one.indexes}
        buffers = sum(one.buffers for one in seen)
        print(
            f"{name:26} {taken:4} rows, searched {searched:5}, fetched {fetched:5}, buffers {buffers:6}, {len(seen)} statements"
        )
        if taken != takes:
            wrong.append(f"{name} took {taken} rows, not {takes}")
        if searched > most * taken + SLACK:
            wrong.append(f"{name} searched {searched} rows for {taken}")
        for one in seen:
            if one.sequential - SMALL:
                wrong.append(f"{name} reads all of {', '.join(one.sequential - SMALL)}: {one.text[:300]}")
            if one.compiled:
                wrong.append(f"{name} is compiled: {one.text[:300]}")
        if index not in indexes:
            wrong.append(f"{name} does not use {index}: {sorted(indexes)}")
    assert not wrong, "\n".join(wrong)


def test_a_claim_costs_the_same_with_everything_beside_it_as_on_an_empty_table(eye: Eye) -> None:
    """Buffers of a claim of the same size: the index is deeper by a level or two, and that is all (10)."""
    small = server().create(template())
    with small.connect() as con:
        con.execute("""
            INSERT INTO durable_run (run_id, name, status, created_at, updated_at, seed, input)
            SELECT 'r' || i, 'f0', 'pending', now(), now(), '\\x00', '1' FROM generate_series(1, 500) AS i""")
        con.execute("VACUUM ANALYZE")
    other = Eye(small)
    buffers: list[int] = []
    for one in (other, eye):
        one.look(claim)
        taken, seen = one.look(claim)
        assert taken == TAKEN
        buffers.append(sum(statement.buffers for statement in seen))
    other.close()
    print(
        f"buffers of a claim of {TAKEN}: {buffers[0]} on a table of its own, {buffers[1]} beside {ROWS:,} of each kind"
    )
    assert buffers[1] <= 1.5 * buffers[0]


def test_a_fair_claim_reads_the_tenants_and_what_it_takes(eye: Eye) -> None:
    """Last in this file: the row of the queue stays, and with it every claim is a careful one."""
    eye.do(eye.store.set_queue(QueueRecord(scope_name="queue:default", tenant=ALL, fair=True)))
    taken, seen = eye.look(claim)
    assert taken == TAKEN
    searched = sum(one.searched for one in seen)
    print(f"{searched} rows searched for {taken} in turn, beside {ROWS:,}")
    assert searched <= 8 * TAKEN
    assert "durable_run_ready_tenant" in {used for one in seen for used in one.indexes}
    assert [one.text for one in seen if one.sequential - SMALL] == []
