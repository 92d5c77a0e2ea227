"""The rules of the state machine: the same operation to the store and to the oracle, both answers compared.

`test_statemachine.py` lets Hypothesis choose the operations; `test_found.py` and the directed cases call the same methods as straight
code. After every rule the whole visible state is compared, and which transitions were made, and through which door, is kept in
`REACHED`. It steers nothing by the store's answers but what the contract leaves to the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from statemachine.driver import Driver, limit_of, now
from statemachine.oracle import FIELDS, by_position

from durable import model as m
from durable.errors import Conflict

SECOND = 1_000_000
LEASE = 10 * SECOND + 1  # odd, where every move of the clock is even: no lease ends at the very instant of a sweep
TENANT = m.tenant_id("acme")
REACHED: set[tuple[m.Status | None, m.Status, str]] = set()
FUNCTIONS = [("f", None), ("f", "1"), ("g", None)]
SCENES = ("nothing held graph broken-graph late family lapsed poisoned asleep asked again ended stolen purged").split()
PICK = st.integers(0, 40)
FEW = st.integers(1, 4)
SCOPES = st.sampled_from([m.ALL, m.ALL, None, TENANT])
NEW = st.fixed_dictionaries(
    {"name": st.sampled_from("ffg"), "tenant": st.sampled_from([None, None, TENANT])},
    optional={
        "queue": st.sampled_from(["default", "other"]),
        "priority": st.integers(0, 2),
        "delay": st.sampled_from([0, 10 * SECOND, 60 * SECOND]),
        "idempotency_key": st.sampled_from(["k1", "k2"]),
        "coalesce_key": st.just("c"),
        "on_coalesce": st.sampled_from(["join", "replace"]),
        "max_delay": st.just(30 * SECOND),
        "sequence_key": st.just("s"),
        "concurrency_key": st.just("K"),
        "deadline_after": st.sampled_from([40 * SECOND, 400 * SECOND]),
        "version": st.just("1"),
        "keep": st.just(20 * SECOND),
        "max_attempts": st.just(3),
    },
)
KINDS = st.sampled_from(
    "step step step attempt timer signal start start child child cancel timeout pivot compensation undo again".split()
)
OUTCOMES = st.sampled_from(
    "completed completed failed failed cancelled timed_out forward_incomplete retry "
    "suspended suspended suspended handed_back mismatch".split()
)


class Machine(RuleBasedStateMachine):
    """The holder's half; the scenes also use the other one's `promote`, `sweep`, `send`, `ask` and `retry_one`."""

    promote: Any
    purge: Any
    sweep: Any
    send: Any
    ask: Any
    retry_one: Any

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.store, self.oracle = self.driver.store, self.driver.oracle
        self.submitted: list[m.NewRun] = []
        self.leases: list[m.Lease] = []
        self.outcomes: list[tuple[m.Lease, m.Outcome]] = []
        self.signals: list[m.NewSignal] = []
        self.requests: list[m.ClaimRequest] = []
        self.serial = self.steps = 0
        self.before: dict[str, m.Status] = {}

    def teardown(self) -> None:
        self.driver.close()

    @initialize(scene=st.sampled_from(SCENES))
    def scene(self, scene: str) -> None:
        """Where an example begins. Some states lie too deep to be found often; together the scenes make every transition."""
        if scene == "nothing":
            return
        if scene in ("graph", "broken-graph"):
            self.submit_graph(None, None)
        elif scene == "late":
            self.submit([self.new(name="f", deadline_after=4 * SECOND), self.new(name="f")])
            self.driver.time += 6 * SECOND
        elif scene == "purged":
            self.submit([self.new(name="f", idempotency_key=key, keep=20 * SECOND) for key in ("k1", "k2")])
        else:
            self.submit([self.new(name="f") for _ in range(4)])
        leases = self.claim_by(self.request(queues={"default": 9}))
        self.go_deeper(scene, leases)

    def go_deeper(self, scene: str, leases: list[m.Lease]) -> None:
        if scene == "stolen":
            self.driver.time += 12 * SECOND
            self.sweep()
            self.claim_by(self.request())
        elif scene == "purged":
            self.settle_all(leases, ["completed", "failed"])
            self.driver.time += 30 * SECOND
            self.purge(1)
            self.submit([self.new(name="f", idempotency_key="k1"), self.new(name="f", idempotency_key="k2")])
        elif scene == "broken-graph":
            self.settle_all(leases[-1:], ["failed"])
            self.retry_one(leases[-1].run_id)
        elif scene == "family":
            for lease in leases[:2] * 2:
                self.append_one(lease, "start")
            self.claim_by(self.request())
        elif scene in ("lapsed", "poisoned"):
            self.driver.time += 12 * SECOND
            self.sweep(max_reclaims=0 if scene == "poisoned" else 3)
        elif scene == "asleep":
            self.settle_all(leases, ["suspended"] * 4)
            self.send(0)
        elif scene == "asked":
            self.ask([lease.run_id for lease in leases], m.ALL)
            self.settle_all(leases, ["handed_back", "mismatch", "cancelled"])
            self.claim_by(self.request())
        elif scene == "again":
            self.settle_all(leases, ["failed", "cancelled", "timed_out", "forward_incomplete"])
            for lease in leases:
                self.retry_one(lease.run_id)
        elif scene == "ended":
            self.settle_all(leases, ["completed", "retry", "timed_out", "forward_incomplete"])

    def settle_all(self, leases: list[m.Lease], outcomes: list[str]) -> None:
        pairs = zip(leases, outcomes, strict=False)
        self.settle_by([(lease, self.outcome(lease, how, 0)) for lease, how in pairs])

    # -- tools -----------------------------------------------------------------------------------------------------------

    def next(self, letter: str) -> str:
        self.serial += 1
        return f"{letter}{self.serial:03}"

    def live(self) -> list[m.Lease]:
        return [lease for lease in self.leases if self.oracle.held(lease) is not None]

    def lease(self, pick: int) -> m.Lease:
        """Mostly one that is held; now and then one that is not."""
        live = self.live()
        some = self.leases if pick % 4 == 3 or not live else live
        return some[pick % len(some)]

    def run_id(self, pick: int) -> str:
        ids = sorted(self.oracle.runs)
        return ids[pick % len(ids)]

    def chosen(self, pick: int, statuses: Sequence[str]) -> str:
        """One in such a state, if there is one."""
        ids = sorted(run_id for run_id, row in self.oracle.runs.items() if row.status in statuses)
        return ids[pick % len(ids)] if ids else self.run_id(pick)

    @contextlib.contextmanager
    def watched(self, door: str) -> Iterator[None]:
        """Note every transition that the operation makes; `door` is its name for those that are its own."""
        self.before = {run_id: m.Status(row.status) for run_id, row in self.oracle.runs.items()}
        yield
        for run_id, row in self.oracle.runs.items():
            old, new = self.before.get(run_id), m.Status(row.status)
            if old is not new:
                doors = m.TRANSITIONS.get((old, new))
                assert doors, f"{run_id}: no transition leads from {old} to {new}"
                reached = "upstream" if row.error_kind == "upstream" and new == "cancelled" else door
                (reached,) = doors if len(doors) == 1 else [reached]
                assert reached in doors, f"{run_id}: from {old} to {new} by {reached}"
                REACHED.add((old, new, reached))

    @invariant()
    def both_show_the_same(self) -> None:
        self.steps += 1
        self.driver.compare(every_journal=self.steps % 10 == 0)

    # -- submit ----------------------------------------------------------------------------------------------------------

    @rule(items=st.lists(NEW, min_size=1, max_size=3))
    def enqueue(self, items: list[dict[str, Any]]) -> None:
        self.submit([self.new(**item) for item in items])

    def new(self, **values: Any) -> m.NewRun:
        run_id = self.next("r")
        return m.NewRun(run_id=run_id, input=json.dumps(run_id), seed=run_id.encode(), tags={"t": run_id[-1]}, **values)

    def submit(self, runs: list[m.NewRun]) -> list[str]:
        with self.watched("enqueue"):
            try:
                wanted: list[tuple[str, str]] | None = self.oracle.enqueue(runs)
            except Conflict:
                wanted = None
            try:
                given = [(one.run.run_id, one.disposition) for one in now(self.store.enqueue(runs))]
            except Conflict:
                assert wanted is None, "a Conflict that the contract does not name"
                return []
        assert given == wanted
        self.submitted += runs
        return [run_id for run_id, _ in given]

    def enqueue_again(self, pick: int) -> None:
        """A submit whose answer was lost; a run that was purged meanwhile is not asked for again."""
        new = self.submitted[pick % len(self.submitted)]
        if new.run_id in self.oracle.runs or (new.tenant, f"~join:{new.run_id}") in self.oracle.keys:
            self.submit([new])

    @rule(tenant=st.sampled_from([None, TENANT]), delay=st.sampled_from([None, 20 * SECOND]))
    def enqueue_graph(self, tenant: Any, delay: int | None) -> None:
        self.submit_graph(tenant, delay)

    def submit_graph(self, tenant: Any, delay: int | None) -> list[str]:
        """A graph with three nodes: the third behind the two others, the second behind the first."""
        graph = self.new(name="g", tenant=tenant)
        nodes: list[m.NewRun] = []
        for at, behind in enumerate([(), (0,), (0, 1)]):
            edges = tuple(m.Dependency(run_id=nodes[one].run_id, position=place) for place, one in enumerate(behind))
            link = {"parent_run_id": graph.run_id, "parent_step_id": f"node{at}", "depends_on": edges}
            nodes.append(self.new(name="f", tenant=tenant, delay=delay if at == 1 else None, **link))
        return self.submit([graph, *nodes])

    # -- claim -----------------------------------------------------------------------------------------------------------

    @rule(
        limit=FEW, functions=st.sampled_from([FUNCTIONS, FUNCTIONS, FUNCTIONS[:1]]), scope=SCOPES, alone=st.booleans()
    )
    def claim(self, limit: int = 4, functions: Any = FUNCTIONS, scope: Any = m.ALL, alone: bool = False) -> None:
        self.claim_by(self.request(limit=limit, functions=functions, scope=scope, alone=alone))

    @rule(family=st.sampled_from(["new", "newer"]), most=st.integers(1, 2), queue=st.sampled_from(["default", "other"]))
    def claim_otherwise(self, family: str, most: int, queue: str) -> None:
        """By a worker of another interpreter, or of one queue."""
        self.claim_by(self.request(family=family, queues={queue: most}))

    def request(self, **values: Any) -> m.ClaimRequest:
        given = {
            "queues": {"default": 3, "other": 3},
            "functions": FUNCTIONS,
            "limit": 4,
            "family": "new",
            "scope": m.ALL,
        }
        return m.ClaimRequest(mark=self.next("mark"), lease=LEASE, **{**given, **values})

    def claim_by(self, request: m.ClaimRequest) -> list[m.Lease]:
        self.promote(limit=1000, scope=m.ALL)  # whether a claim takes what is due but not promoted is left to the store
        with self.watched("claim"):
            pending = {run_id for run_id, row in self.oracle.runs.items() if row.status == "pending"}
            taken = now(self.store.claim(request))
            shown = self.driver.rows()
            ended = [run_id for run_id in sorted(pending) if shown[run_id].status in m.TERMINAL]
            held_up = [run_id for run_id in pending if limit_of(shown[run_id].blocked_on)]
            self.oracle.claim(request, [one.run.run_id for one in taken], ended, held_up)
        for one in taken:
            row = self.oracle.runs[one.run.run_id]
            fence = m.Lease(run_id=row.run_id, tenant=row.tenant, attempts=row.attempts, mark=request.mark)
            assert one.lease == fence, "the lease is the fence that the row now has"
            differs = [name for name in FIELDS if getattr(one.run, name) != getattr(shown[row.run_id], name)]
            assert not differs, f"a claim hands out {row.run_id} as it now stands: {differs}"
            assert list(one.history) == by_position(self.oracle.journals[row.run_id]), "and its journal"
        given = [one.lease for one in taken]
        self.leases += [lease for lease in given if lease not in self.leases]
        self.requests.append(request)
        return given

    def claim_again(self, pick: int) -> None:
        """A claim whose answer was lost. One that holds nothing any more is a new claim in all but its mark: not asked for."""
        request = self.requests[pick % len(self.requests)]
        if any(row.status == "running" and row.lease_owner == request.mark for row in self.oracle.runs.values()):
            self.claim_by(request)

    # -- the holder ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(picks=st.lists(PICK, min_size=1, max_size=2, unique=True), kind=KINDS, seen=PICK)
    def append(self, picks: list[int], kind: str, seen: int) -> None:
        leases = dict.fromkeys(self.lease(pick) for pick in picks)
        self.append_by([(lease, self.record(lease, kind, seen)) for lease in leases])

    def append_one(self, lease: m.Lease, kind: str, seen: int = 40) -> None:
        self.append_by([(lease, self.record(lease, kind, seen))])

    def append_by(self, entries: list[tuple[m.Lease, m.NewRecord]]) -> None:
        with self.watched("enqueue"):
            wanted = self.oracle.append(entries)
            given = now(self.store.append(entries))
        assert [(one.state, one.record) for one in given] == wanted

    def record(self, lease: m.Lease, kind: str, seen: int) -> m.NewRecord:
        journal = self.oracle.journals.get(lease.run_id, [])
        places = [record.position for record in journal if record.position is not None]
        last = max(places, default=-1)
        given: dict[str, Any] = {"step_id": self.next("s"), "kind": kind, "result": '{"v":1}', "position": last + 1}
        box = now(self.store.inbox([lease]))[0]
        row = self.oracle.runs.get(lease.run_id)
        if kind == "again" and journal:
            given |= {"step_id": journal[seen % len(journal)].step_id, "kind": "step"}
        elif kind == "signal" and box and box.signals:
            given["signal_seq"] = box.signals[0].seq
        elif kind == "child" and box and box.children:
            given["step_id"] = f"{box.children[0].step_id}:end"
        elif kind == "start" and row is not None:
            link = {"parent_run_id": lease.run_id, "parent_step_id": given["step_id"], "detached": seen % 5 == 0}
            given["children"] = (self.new(name="f", tenant=row.tenant, **link),)
        elif kind == "undo" and journal:
            given |= {"step_id": f"undo/{last + 1}", "kind": "step"}
        elif kind == "attempt":
            given |= {"step_id": f"{given['step_id']}@1", "position": None}
        elif kind not in ("timer", "cancel", "timeout", "pivot", "compensation"):
            given["kind"] = "step"
        given["kind"] = m.RecordKind(given["kind"])
        progress = json.dumps(self.serial) if seen % 3 == 0 else None
        floor = max((record.at for record in journal), default=0)
        return m.NewRecord(**given, seen=min(seen - 1, last), digest=given["step_id"], floor=floor, progress=progress)

    @precondition(lambda self: self.leases)
    @rule(entries=st.lists(st.tuples(PICK, OUTCOMES), min_size=1, max_size=3), detail=st.integers(0, 7))
    def settle(self, entries: list[tuple[int, str]], detail: int = 0) -> None:
        leases = {self.lease(pick): how for pick, how in entries}
        self.settle_by([(lease, self.outcome(lease, how, detail)) for lease, how in leases.items()])

    def settle_by(self, entries: list[tuple[m.Lease, m.Outcome]]) -> list[str]:
        doors = {m.Retry: "retry", m.HandedBack: "hand_back", m.Suspended: "suspend"}

        self.before = {run_id: m.Status(row.status) for run_id, row in self.oracle.runs.items()}
        wanted = self.oracle.settle(entries)
        for (lease, outcome), answer in zip(entries, wanted, strict=True):
            old = self.before.get(lease.run_id)
            if answer == "landed" and old == "running":
                new = m.Status(self.oracle.state_after(outcome))
                door = doors.get(type(outcome), "settle")
                assert door in m.TRANSITIONS[old, new]
                REACHED.add((old, new, door))
        for run_id, row in self.oracle.runs.items():
            old, new = self.before.get(run_id), m.Status(row.status)
            if old in ("suspended", "cancelled") and old is not new:
                door = "wake" if new == "pending" else "upstream"
                assert door in m.TRANSITIONS[old, new], f"{run_id} from {old} to {new}"
                REACHED.add((old, new, door))
        given: list[str] = [*now(self.store.settle(entries))]
        assert given == wanted
        self.outcomes += entries
        return given

    def settle_again(self, pick: int) -> None:
        """A settle whose answer was lost recognises itself."""
        self.settle_by([self.outcomes[-1 - pick % len(self.outcomes)]])

    def outcome(self, lease: m.Lease, how: str, detail: int) -> m.Outcome:
        row = self.oracle.runs.get(lease.run_id)
        journal = self.oracle.journals.get(lease.run_id, [])
        places = [record.position for record in journal if record.position is not None]
        failure = m.Failure(
            message=how, positions=tuple(places[detail % 4 :: 3]) if detail < 6 else (), detail='{"type":"E"}'
        )
        if how == "suspended":
            children = [c for c in self.oracle.runs.values() if c.parent_run_id == lease.run_id]
            children = [c for c in children if c.status not in m.TERMINAL and "@" not in c.parent_step_id]
            return m.Suspended(
                until=[None, self.driver.time + 20 * SECOND, self.driver.time - SECOND][detail % 3],
                waiting_for='{"signals":["go"]}',
                wake_seq=0 if row is None else row.wake_seq - (detail >= 6),
                wake_after=min(len(children), 1 + detail % 2),
                wake_delay=[0, 4 * SECOND][detail // 2 % 2],
                wake_on_failure=detail >= 4,
            )
        if how == "retry":
            return m.Retry(after=[0, 30 * SECOND][detail % 2], failure=failure)
        if how in ("handed_back", "mismatch"):
            mismatch = m.Failure(message=how, kind=m.ErrorKind.NON_DETERMINISM)
            return m.HandedBack(after=[0, 6 * SECOND][detail % 2], failure=mismatch if how == "mismatch" else None)
        ends: dict[str, m.Outcome] = {
            "failed": m.Failed(failure=failure),
            "cancelled": m.Cancelled(failure=failure),
            "timed_out": m.TimedOut(failure=failure),
            "forward_incomplete": m.ForwardIncomplete(failure=failure),
        }
        return ends.get(how, m.Completed(output=json.dumps(how)))

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, progress=st.sampled_from([None, '"half"']))
    def renew(self, pick: int, progress: str | None = None) -> None:
        renewals = [
            m.Renewal(lease=lease, progress=progress) for lease in dict.fromkeys([*self.live(), self.lease(pick)])
        ]
        wanted = self.oracle.renew(renewals, LEASE)
        assert list(now(self.store.renew(renewals, lease=LEASE))) == wanted

    @precondition(lambda self: self.leases)
    @rule()
    def inbox(self) -> None:
        wanted, given = self.oracle.inbox(self.leases), now(self.store.inbox(self.leases))
        for box, other in zip(given, wanted, strict=True):
            assert (box is None) == (other is None)
            if box is not None and other is not None:
                assert (box.wake_seq, box.cancel_requested) == (other.wake_seq, other.cancel_requested)
                assert list(box.signals) == list(other.signals)
                instants = [end.at for end in box.children]
                assert instants == sorted(instants), "children in the order of their landing"
                ends = {end.run_id: end for end in box.children}
                assert sorted(ends) == sorted(end.run_id for end in other.children)
                for end in other.children:  # the text of an end that the store itself makes is its own
                    texts: dict[str, Any] = {} if end.error else {"error": ends[end.run_id].error}
                    assert ends[end.run_id] == dataclasses.replace(end, **texts)
