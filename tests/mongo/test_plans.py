"""Plans (rule 10): what a hot operation examines does not grow with what lies beside the documents that it takes.

The collections are filled by the server itself. `DURABLE_MONGO_PLAN_ROWS` (20,000 of each kind; the nox session takes 200,000) says how
much. The profiler counts: every command that an operation sends, keys and documents.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from servers.mongo_room import Room, rooms

from durable.model import (
    ALL,
    Claimed,
    ClaimRequest,
    Completed,
    HandedBack,
    NewRecord,
    QueueRecord,
    RecordKind,
    Renewal,
    RunQuery,
    Suspended,
    tenant_id,
)
from durable.settings import MINUTE, SECOND, Settings
from durable.storekit import cursor_of
from durable.testing.conformance.scenario import Scene, new_run
from durable_mongo import Store, backend
from durable_mongo.operation import CODEC

ROWS = int(os.environ.get("DURABLE_MONGO_PLAN_ROWS", "20000"))
TAKEN = 10
ROWS_OF_CLAIM = 5
ROWS_OF_SETTLE = 1
"""Rows of flow control that an operation may look at beside its runs, where there is a limit."""
NAMES = [f"f{number}" for number in range(20)]
LEASE = 30 * SECOND
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]


def fill(room: Room, kind: str, count: int, **fields: Any) -> None:
    """That many runs of a kind, made by the server from a counter."""
    base: dict[str, Any] = {
        "name": {"$concat": ["f", {"$toString": {"$mod": ["$n", len(NAMES)]}}]},
        "tenant_id": "",
        "queue": "default",
        "priority": {"$mod": ["$n", 3]},
        "submitted": {"$add": [1_000_000, "$n"]},
        "failures": 0,
        "reclaims": 0,
        "wake_seq": 0,
        "seed": {"$literal": b"s"},
        "input": "1",
        "created_at": {"$subtract": ["$$NOW", {"$multiply": [1_000, "$n"]}]},
        "updated_at": "$$NOW",
        "_id": {"$concat": [kind, "-", {"$toString": "$n"}]},
        **fields,
    }
    stages: list[dict[str, Any]] = [
        {"$documents": [{"x": {"$range": [0, count]}}]},
        {"$unwind": "$x"},
        {"$project": {"n": "$x"}},
        {"$replaceWith": base},
        {"$set": {"route": {"$ifNull": ["$route", {"$concat": ["$name", "/@"]}]}}},
        {"$merge": {"into": "durable_run"}},
    ]
    room.db.aggregate(stages)


@pytest.fixture(scope="module")
def crowd() -> Iterator[Room]:
    """A room in which everything lies about in numbers."""
    room = rooms(5)[4]
    room.empty()
    ready = {"status": "pending", "ready": True, "attempts": 0}
    later = {"$add": ["$$NOW", {"$add": [86_400_000, "$n"]}]}
    fill(room, "ready", ROWS, **ready)
    fill(room, "unknown", ROWS // 4, **ready, name="nobody_knows", priority=9)
    fill(room, "version", ROWS // 4, **ready, route="f1/other@", version="other", priority=9)
    fill(room, "delayed", ROWS, status="pending", attempts=0, available_at=later)
    fill(room, "suspended", ROWS // 4, status="suspended", attempts=1, available_at=later)
    fill(room, "running", ROWS // 10, status="running", attempts=1, leased_until=later, started_at="$$NOW",
         claim_token={"$concat": ["t", {"$toString": "$n"}]}, mark={"$concat": ["m", {"$toString": "$n"}]})  # fmt: skip
    ended = {
        "status": "completed",
        "attempts": 1,
        "output": "1",
        "finished_at": "$$NOW",
        "purge_at": later,
        "started_at": "$$NOW",
    }
    fill(room, "finished", ROWS, **ended)
    yield room
    room.empty()


@pytest.fixture
async def store(crowd: Room) -> AsyncIterator[Store]:
    store = await backend.open(
        f"{crowd.url}&changes=off" if "?" in crowd.url else f"{crowd.url}?changes=off", settings=Settings()
    )
    yield store
    await store.close()


async def examined(room: Room, work: Callable[[], Awaitable[Any]]) -> tuple[Any, int, int, list[str]]:
    """What it answered, the keys and documents that its commands looked at, and the plans that were no index scans."""
    room.db.command("profile", 0)
    room.db["system.profile"].drop()
    room.db.command("profile", 2)
    try:
        answer = await work()
    finally:
        room.db.command("profile", 0)
    keys = documents = 0
    scans: list[str] = []
    profile = room.db["system.profile"].with_options(codec_options=CODEC)  # dates beyond those of Python
    for row in profile.find({"ns": {"$regex": "durable_"}}):
        keys += int(row.get("keysExamined", 0))
        documents += int(row.get("docsExamined", 0))
        plan = str(row.get("planSummary", ""))
        if "COLLSCAN" in plan and "durable_run" in row["ns"]:
            scans.append(f"{row['op']} {row['command']}: {plan}")
    return answer, keys, documents, scans


def request(limit: int = TAKEN, **changes: Any) -> ClaimRequest:
    values: dict[str, Any] = {
        "mark": f"plan/{new_run().run_id}",
        "queues": {"default": limit},
        "functions": [(name, None) for name in NAMES],
        "limit": limit,
        "lease": LEASE,
        "family": "3.12",
        "scope": ALL,
    }
    return ClaimRequest(**{**values, **changes})


def frugal(keys: int, documents: int, scans: list[str], *, taken: int, trips: int, extra_keys: int = 0) -> None:
    """At most two documents for each that was taken and each command; keys besides for every route that was looked into."""
    assert scans == []
    assert documents <= 2 * taken * trips, f"{documents} documents for {taken}"
    assert keys <= 2 * taken * trips + extra_keys, f"{keys} keys for {taken}"


async def test_a_claim_examines_what_it_takes(crowd: Room, store: Store) -> None:
    """Heads, update and what it holds: three commands that each see the runs once."""
    claimed, keys, documents, scans = await examined(crowd, lambda: store.claim(request()))
    assert len(claimed) == TAKEN
    frugal(keys, documents, scans, taken=TAKEN, trips=3, extra_keys=3 * 2 * len(NAMES))


async def test_an_idle_claim_examines_nothing(crowd: Room, store: Store) -> None:
    """Whatever is delayed, finished or unknown to this worker."""
    idle = request(functions=[("absent", None), ("f1", "absent")], queues={"default": 5, "other": 5})
    claimed, keys, documents, scans = await examined(crowd, lambda: store.claim(idle))
    assert {one.run.name for one in claimed} <= {"f1"}
    nothing = request(functions=[("absent", None)])
    claimed, keys, documents, scans = await examined(crowd, lambda: store.claim(nothing))
    assert (list(claimed), documents, scans) == ([], 0, [])
    assert keys <= 10


async def held(store: Store, count: int) -> list[Claimed]:
    return list(await store.claim(request(count)))


async def test_an_append_examines_its_runs(crowd: Room, store: Store) -> None:
    runs = await held(store, TAKEN)
    records = [
        (one.lease, NewRecord(step_id="a", kind=RecordKind.STEP, position=0, seen=-1, digest="d", result="{}"))
        for one in runs
    ]
    answers, keys, documents, scans = await examined(crowd, lambda: store.append(records))
    assert {answer.state for answer in answers} == {"appended"}
    frugal(keys, documents, scans, taken=TAKEN, trips=1)


async def test_a_settle_examines_its_runs(crowd: Room, store: Store) -> None:
    runs = await held(store, 2 * TAKEN)
    outcomes = [
        (one.lease, Completed(output="1") if number % 2 else Suspended(until=None, waiting_for="{}", wake_seq=0))
        for number, one in enumerate(runs)
    ]
    answers, keys, documents, scans = await examined(crowd, lambda: store.settle(outcomes))
    assert set(answers) == {"landed"}
    frugal(keys, documents, scans, taken=2 * TAKEN, trips=1)


async def test_a_settle_with_a_parent_examines_its_runs_and_the_parent(crowd: Room, store: Store) -> None:
    scene = Scene(store, None)  # type: ignore[arg-type]
    family = await scene.with_children(3, parent={"queue": "family"})
    child = await scene.take_again(family.children[0])
    answers, keys, documents, scans = await examined(
        crowd, lambda: store.settle([(child.lease, Completed(output="1"))])
    )
    assert list(answers) == ["landed"]
    frugal(keys, documents, scans, taken=2, trips=4)


async def test_a_renewal_examines_its_runs(crowd: Room, store: Store) -> None:
    runs = await held(store, TAKEN)
    renewals = [Renewal(lease=one.lease) for one in runs]
    answers, keys, documents, scans = await examined(crowd, lambda: store.renew(renewals, lease=LEASE))
    assert {answer.state for answer in answers} == {"held"}
    frugal(keys, documents, scans, taken=TAKEN, trips=2)


async def test_a_promotion_and_a_sweep_examine_what_is_due(crowd: Room, store: Store) -> None:
    scene = Scene(store, None)  # type: ignore[arg-type]
    for _ in range(TAKEN):
        await scene.start(delay=MINUTE, queue="due")
    crowd.pass_time(2 * MINUTE, queue="due")
    promoted, keys, documents, scans = await examined(crowd, lambda: store.promote(scope=ALL, limit=TAKEN))
    assert promoted.count == TAKEN
    frugal(keys, documents, scans, taken=TAKEN, trips=2, extra_keys=4)
    assert len(await store.claim(request(TAKEN, queues={"due": TAKEN}, functions=[("work", None)]))) == TAKEN
    crowd.pass_time(2 * LEASE, queue="due")
    swept, keys, documents, scans = await examined(crowd, lambda: store.sweep(scope=ALL, limit=TAKEN, max_reclaims=5))
    assert len(swept.returned) == TAKEN
    frugal(keys, documents, scans, taken=TAKEN, trips=2, extra_keys=4)


async def test_a_duplicate_submit_examines_one_run(crowd: Room, store: Store) -> None:
    await store.enqueue([new_run(idempotency_key="i", coalesce_key="c", queue="keys")])
    for run in (new_run(idempotency_key="i", queue="keys"), new_run(coalesce_key="c", queue="keys")):
        answers, keys, documents, scans = await examined(crowd, lambda run=run: store.enqueue([run]))  # type: ignore[misc]
        assert answers[0].disposition in ("existing", "coalesced")
        frugal(keys, documents, scans, taken=2, trips=2)


async def test_a_signal_and_an_inbox_examine_one_run(crowd: Room, store: Store) -> None:
    scene = Scene(store, None)  # type: ignore[arg-type]
    one = await scene.take(queue="signals")
    _, keys, documents, scans = await examined(crowd, lambda: scene.send(one.run.run_id))
    frugal(keys, documents, scans, taken=1, trips=3)
    _, keys, documents, scans = await examined(crowd, lambda: scene.inbox(one))
    frugal(keys, documents, scans, taken=1, trips=3)


async def test_a_page_and_a_pulse_examine_what_they_show(crowd: Room, store: Store) -> None:
    page, keys, documents, scans = await examined(crowd, lambda: store.find(RunQuery(limit=TAKEN), scope=ALL))
    assert len(page.runs) == TAKEN
    frugal(keys, documents, scans, taken=TAKEN + 1, trips=1)
    ids = [run.run_id for run in page.runs]
    _, keys, documents, scans = await examined(crowd, lambda: store.pulse(ids, scope=ALL))
    frugal(keys, documents, scans, taken=TAKEN, trips=1)


async def test_the_last_page_looks_for_documents_without_a_date_and_examines_none(crowd: Room, store: Store) -> None:
    behind_all = cursor_of(SECOND, "")
    for scope in (ALL, None, tenant_id("nobody")):
        page, keys, documents, scans = await examined(
            crowd, lambda scope=scope: store.find(RunQuery(limit=TAKEN, cursor=behind_all), scope=scope)
        )  # type: ignore[misc]
        assert (list(page.runs), documents, scans) == ([], 0, [])
        assert keys <= 4


async def test_a_purge_and_the_nets_examine_what_they_take(crowd: Room, store: Store) -> None:
    count, _, documents, scans = await examined(crowd, lambda: store.purge(scope=ALL, limit=TAKEN))
    assert (count, scans) == (0, [])
    assert documents <= 4
    count, _keys, documents, scans = await examined(crowd, lambda: store.mend(scope=ALL, limit=TAKEN))
    assert (count, scans) == (0, [])
    assert documents <= 4


async def test_a_fair_claim_examines_the_tenants_and_what_it_takes(crowd: Room, store: Store) -> None:
    """Whatever the backlog of one of them."""
    ready = {"status": "pending", "ready": True, "attempts": 0, "queue": "fair"}
    tenants = [str(tenant_id(f"tenant {number}")) for number in range(4)]
    fill(crowd, "busy", ROWS, **ready, tenant_id=tenants[0], route="f1/@")
    for number, tenant in enumerate(tenants[1:]):
        fill(crowd, f"quiet{number}", 1, **ready, tenant_id=tenant, route="f1/@")
    await store.set_queue(QueueRecord(scope_name="queue:fair", tenant=ALL, fair=True))
    claimed, keys, documents, scans = await examined(crowd, lambda: store.claim(request(queues={"fair": TAKEN})))
    assert {str(one.run.tenant) for one in claimed} == set(tenants)
    assert len(claimed) == TAKEN
    frugal(keys, documents, scans, taken=TAKEN, trips=8, extra_keys=10 * 2 * len(NAMES))


async def test_a_limit_that_is_not_reached_examines_a_document_more_for_each_run(crowd: Room, store: Store) -> None:
    """A permit is a word in the run's own document, and the row of the scope says how many are out. A claim of a limited queue looks at a
    run once more, whatever is in flight; a settle of what holds permits looks at it as often as any other, once."""
    ready = {"status": "pending", "ready": True, "attempts": 0, "route": "f1/@"}
    for queue in ("free", "limited"):
        fill(crowd, queue, 8 * TAKEN, **ready, queue=queue)
    await store.set_queue(QueueRecord(scope_name="queue:limited", tenant=ALL, max_concurrency=10 * TAKEN))
    claims: dict[str, list[tuple[int, int]]] = {"free": [], "limited": []}
    settles: dict[str, list[int]] = {"free": [], "limited": []}
    for queue, claim in claims.items():
        mine: list[Claimed] = []
        asked = {"queues": {queue: TAKEN}, "functions": [("f1", None)]}
        for _ in range(3):
            claimed, keys, documents, scans = await examined(crowd, lambda asked=asked: store.claim(request(**asked)))  # type: ignore[misc]
            assert (len(claimed), scans) == (TAKEN, [])
            mine += claimed
            claim.append((keys, documents))
        for place, outcome in enumerate((Completed(output="1"), HandedBack())):
            entries = [(one.lease, outcome) for one in mine[place * TAKEN : (place + 1) * TAKEN]]
            answers, _, documents, scans = await examined(crowd, lambda entries=entries: store.settle(entries))  # type: ignore[misc]
            assert (set(answers), scans) == ({"landed"}, [])
            settles[queue].append(documents)
    print(claims, settles)
    for free, limited in zip(claims["free"], claims["limited"], strict=True):
        assert limited[1] <= free[1] + TAKEN + ROWS_OF_CLAIM
        assert limited[0] <= free[0] + TAKEN + 4 * ROWS_OF_CLAIM
    for one, other in zip(settles["free"], settles["limited"], strict=True):
        assert other <= one + ROWS_OF_SETTLE


async def test_a_claim_of_one_run_examines_a_document_more_however_many_are_in_flight(
    crowd: Room, store: Store
) -> None:
    """A hundred claims of one run each, and as many settles, beside 400 in flight under a limit of 1,000; against the same without one."""
    ready = {"status": "pending", "ready": True, "attempts": 0, "route": "f1/@"}
    cost: dict[str, list[tuple[int, int]]] = {}
    for queue in ("one by one", "one by one, limited"):
        fill(crowd, queue, 600, **ready, queue=queue)
        if queue.endswith("limited"):
            await store.set_queue(QueueRecord(scope_name=f"queue:{queue}", tenant=ALL, max_concurrency=1_000))
        held = list(await store.claim(request(400, queues={queue: 400}, functions=[("f1", None)])))
        assert len(held) == 400

        async def claims(queue: str = queue, held: list[Claimed] = held) -> None:
            for _ in range(TAKEN):
                held += await store.claim(request(1, queues={queue: 1}, functions=[("f1", None)]))

        async def settles(held: list[Claimed] = held) -> None:
            for _ in range(TAKEN):
                assert await store.settle([(held.pop(0).lease, Completed(output="1"))]) == ["landed"]

        cost[queue] = [(0, 0), (0, 0)]
        for _ in range(100 // TAKEN):  # what the profiler keeps is bounded
            for place, work in enumerate((claims, settles)):
                _, keys, documents, scans = await examined(crowd, work)
                assert scans == []
                cost[queue][place] = cost[queue][place][0] + keys, cost[queue][place][1] + documents
        assert len(held) == 400
    row = crowd.db["durable_queue"].find_one({"scope_name": "queue:one by one, limited"})
    assert row["in_flight"] == {"most": 400, "turn": row["turn"]}, "as many as there are: it goes up and down"
    print(cost)
    (free_claims, free_settles), (claims_of_limited, settles_of_limited) = cost.values()
    assert claims_of_limited[1] <= free_claims[1] + 100 * (1 + ROWS_OF_CLAIM)
    assert claims_of_limited[0] <= free_claims[0] + 100 * (1 + 4 * ROWS_OF_CLAIM)
    for one, other in zip(free_settles, settles_of_limited, strict=True):
        assert other <= one + 100 * ROWS_OF_SETTLE


async def test_a_claim_counts_no_further_than_the_limit(crowd: Room, store: Store) -> None:
    """A limit was lowered far below what is in flight."""
    fill(crowd, "lowered", 6 * TAKEN, status="pending", ready=True, attempts=0, route="f1/@", queue="lowered")
    await store.set_queue(QueueRecord(scope_name="queue:lowered", tenant=ALL, max_concurrency=5 * TAKEN))
    for _ in range(4):
        assert len(await store.claim(request(queues={"lowered": TAKEN}))) == TAKEN
    await store.set_queue(QueueRecord(scope_name="queue:lowered", tenant=ALL, max_concurrency=2))
    claimed, keys, documents, scans = await examined(crowd, lambda: store.claim(request(1, queues={"lowered": 1})))
    print(keys, documents)
    assert (len(claimed), scans) == (0, [])
    assert documents <= (2 + ROWS_OF_CLAIM) * 3 + 2 * 2 * TAKEN, (
        "the permits up to the limit, and the rows of the scope, in each of three looks: one finds the queue full, one holds back what"
        " else is ready, one finds nothing; and each of these runs is read and written once"
    )
