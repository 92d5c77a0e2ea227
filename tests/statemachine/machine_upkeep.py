"""The other half of the rules: what acts on runs from outside, and time. See `machine.py`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from statemachine.driver import limit_of, now
from statemachine.machine import FEW, PICK, SCOPES, SECOND, TENANT, Machine

from durable import model as m
from durable.errors import Conflict, NotFound

ENDED = ("failed", "cancelled", "timed_out", "forward_incomplete")
SCHEDULES = st.sampled_from(["nightly", "hourly"])
TENANTS = st.sampled_from([None, TENANT])


class WholeMachine(Machine):
    # -- cancel, retry, fork ---------------------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.runs)
    @rule(picks=st.lists(PICK, min_size=1, max_size=2, unique=True), scope=SCOPES)
    def request_cancel(self, picks: list[int], scope: Any = m.ALL) -> None:
        self.ask([*dict.fromkeys(self.run_id(pick) for pick in picks), "nobody"], scope)

    def ask(self, ids: list[str], scope: Any) -> None:
        with self.watched("cancel"):
            wanted = self.oracle.request_cancel(ids, scope, "enough")
            given = list(now(self.store.request_cancel(ids, scope=scope, reason="enough")))
        assert given == wanted

    @precondition(lambda self: self.oracle.runs)
    @rule(pick=PICK, scope=SCOPES, extra=st.integers(0, 1), behind=st.sampled_from([0, 0, 0, 1]), anybody=st.booleans())
    def retry(self, pick: int, scope: Any = m.ALL, extra: int = 0, behind: int = 0, anybody: bool = False) -> None:
        run_id = self.run_id(pick) if anybody else self.chosen(pick, ENDED)
        self.retry_one(run_id, scope, extra, behind)

    def retry_one(self, run_id: str, scope: Any = m.ALL, extra: int = 0, behind: int = 0) -> None:
        how = {"attempts": self.oracle.runs[run_id].attempts - behind, "extra_attempts": extra}
        with self.watched("operator_retry"):
            wanted = self.answer(lambda: self.oracle.retry(run_id, scope, how["attempts"], extra))
            given = self.answer(lambda: now(self.store.retry(run_id, scope=scope, **how)).run_id)
        assert given == wanted

    def answer(self, call: Any) -> Any:
        """What a call gives, or the class of the error that it refuses with."""
        try:
            return call()
        except (Conflict, NotFound) as error:
            return type(error)

    @precondition(lambda self: self.oracle.runs)
    @rule(pick=PICK, scope=SCOPES, cut=st.integers(0, 3), by_name=st.booleans())
    def fork(self, pick: int, scope: Any = m.ALL, cut: int = 0, by_name: bool = False) -> None:
        run_id, new_run_id = self.run_id(pick), self.next("fork")
        placed = [record for record in self.oracle.journals[run_id] if record.position is not None]
        step: int | str = min(cut, len(placed))
        if by_name:
            step = placed[cut % len(placed)].step_id if placed else "nowhere"
        for _ in range(2):  # repeated after a lost answer it is the same run
            with self.watched("fork"):
                wanted = self.answer(lambda: self.oracle.fork(run_id, scope, new_run_id, step))
                given = self.answer(
                    lambda: now(self.store.fork(run_id, scope=scope, new_run_id=new_run_id, from_step=step)).run_id
                )
            assert given == wanted

    # -- the mailbox -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.oracle.runs)
    @rule(pick=PICK, scope=SCOPES, name=st.sampled_from(["go", "stop"]))
    def send(self, pick: int, scope: Any = m.ALL, name: str = "go") -> None:
        run_id = self.chosen(pick, ("pending", "running", "suspended"))
        self.signals.append(m.NewSignal(run_id=run_id, name=name, payload='{"x":1}', dedup_id=self.next("d")))
        self.send_one(self.signals[-1], scope)

    def send_again(self, pick: int) -> None:
        self.send_one(self.signals[pick % len(self.signals)], m.ALL)

    def send_one(self, signal: m.NewSignal, scope: Any) -> None:
        with self.watched("wake"):
            wanted = self.answer(lambda: self.oracle.send(signal, scope))
            given = self.answer(lambda: now(self.store.send(signal, scope=scope)))
        assert given == wanted

    @rule(what=st.sampled_from(["enqueue", "claim", "settle", "send"]), pick=PICK)
    def again(self, what: str, pick: int) -> None:
        """A call whose answer was lost is made again."""
        asked = {"enqueue": self.submitted, "claim": self.requests, "settle": self.outcomes, "send": self.signals}
        if asked[what]:
            getattr(self, f"{what}_again")(pick)

    # -- chores and time -------------------------------------------------------------------------------------------------

    @rule(limit=FEW, scope=SCOPES)
    def promote(self, limit: int, scope: Any = m.ALL) -> None:
        with self.watched("wake"):
            due = self.oracle.due(scope)
            answer = now(self.store.promote(scope=scope, limit=limit))
            shown = self.driver.rows()
            promoted = [row.run_id for row in due if shown[row.run_id].available_at is None]
            self.oracle.promote(scope, limit, promoted)
        assert answer.count == len(promoted)
        waiting = [row.available_at for row in self.oracle.runs.values() if row.available_at is not None]
        assert answer.next_due is None or waiting, "nothing is due any more"

    @rule(limit=FEW, scope=SCOPES, max_reclaims=st.integers(0, 3))
    def sweep(self, limit: int = 4, scope: Any = m.ALL, max_reclaims: int = 3) -> None:
        with self.watched("sweep"):
            returned, failed = self.oracle.sweep(scope, limit, max_reclaims)
            swept = now(self.store.sweep(scope=scope, limit=limit, max_reclaims=max_reclaims))
        assert (sorted(swept.returned), sorted(swept.failed)) == (sorted(returned), sorted(failed))

    @rule(scope=SCOPES)
    def mend(self, scope: Any = m.ALL) -> None:
        """Until there is nothing to mend: it comes to an end, and no run that has room is left behind."""
        with self.watched("cancel"):
            for _ in range(20):
                if now(self.store.mend(scope=scope, limit=100)) == 0:
                    break
            else:
                raise AssertionError("mend never comes to an end")
            self.oracle.mend(scope)
        if scope is m.ALL:
            self.driver.compare()
            for row in self.oracle.runs.values():
                if limit_of(row.blocked_on) and row.status == "pending" and not self.oracle.full(row):
                    scopes = set(self.oracle.scopes(row))
                    ready = [
                        other
                        for other in self.oracle.runs.values()
                        if other.status == "pending" and not other.blocked_on
                    ]
                    paused = any(self.oracle.rule(row, one).paused for one in scopes)
                    assert paused or any(scopes & set(self.oracle.scopes(other)) for other in ready), (
                        f"{row.run_id} is left behind"
                    )

    @rule(limit=FEW, older_than=st.sampled_from([None, None, 5 * SECOND]), scope=SCOPES)
    def purge(self, limit: int, older_than: int | None = None, scope: Any = m.ALL) -> None:
        count = now(self.store.purge(scope=scope, limit=limit, older_than=older_than))
        shown = self.driver.rows()
        purged = [run_id for run_id in self.oracle.runs if run_id not in shown]
        assert count == len(purged)
        self.oracle.purge(scope, limit, older_than, purged)
        self.driver.gone.update(purged)

    @rule(seconds=st.sampled_from([2, 2, 6, 12, 12, 30, 60, 500]))
    def tick(self, seconds: int) -> None:
        self.driver.time += seconds * SECOND

    # -- schedules and queues --------------------------------------------------------------------------------------------

    @rule(
        schedule_id=SCHEDULES,
        tenant=TENANTS,
        cron=st.sampled_from(["0 3 * * *", "0 4 * * *"]),
        late=st.sampled_from([0, 6]),
    )
    def put_schedule(self, schedule_id: str, tenant: Any, cron: str, late: int) -> None:
        instant = self.driver.time + late * SECOND
        spec = m.ScheduleSpec(
            schedule_id=schedule_id, name="f", cron=cron, tz="UTC", input=str(late), next_fire_at=instant
        )
        self.oracle.put_schedule(spec, tenant)
        shown = now(self.store.put_schedule(spec, scope=tenant))
        assert (shown.schedule_id, shown.next_fire_at) == (
            schedule_id,
            self.oracle.schedules[tenant, schedule_id].next_fire_at,
        )

    @rule(
        schedule_id=SCHEDULES,
        tenant=TENANTS,
        how=st.sampled_from(["pause", "resume", "resume later", "park", "remove"]),
    )
    def change_schedule(self, schedule_id: str, tenant: Any, how: str) -> None:
        later = self.driver.time + 20 * SECOND if how == "resume later" else None
        if how == "park":
            wanted = self.oracle.park_schedule(schedule_id, tenant, "gone")
            assert now(self.store.park_schedule(schedule_id, scope=tenant, reason="gone")) == wanted
        elif how == "remove":
            wanted = self.oracle.remove_schedule(schedule_id, tenant)
            assert now(self.store.remove_schedule(schedule_id, scope=tenant)) == wanted
        else:
            paused = how == "pause"
            wanted = self.oracle.pause_schedule(schedule_id, tenant, paused=paused, next_fire_at=later)
            pause = self.store.pause_schedule(schedule_id, scope=tenant, paused=paused, next_fire_at=later)
            assert now(pause) == wanted

    def due_schedules(self, scope: Any) -> None:
        instant, due = now(self.store.due_schedules(scope=scope, limit=100))
        assert instant == self.driver.time
        assert sorted(one.schedule_id for one in due) == self.oracle.due_schedules(scope)

    @precondition(lambda self: self.oracle.schedules)
    @rule(
        schedule_id=SCHEDULES,
        tenant=TENANTS,
        slots=st.integers(0, 2),
        wrong=st.sampled_from([0, 0, 0, 1]),
        park=st.booleans(),
    )
    def fire(self, schedule_id: str, tenant: Any, slots: int = 1, wrong: int = 0, park: bool = False) -> None:
        self.due_schedules(tenant)
        row = self.oracle.schedules.get((tenant, schedule_id))
        instant = (row and row.next_fire_at) or self.driver.time
        link = {"name": "f", "tenant": tenant, "schedule_id": schedule_id}
        runs = tuple(self.new(**link, scheduled_for=instant - slot * SECOND) for slot in range(slots))
        fire = {"schedule_id": schedule_id, "tenant": tenant, "expected": instant - wrong, "runs": runs}
        firing = m.Firing(
            **fire, next_fire_at=instant + SECOND, parked_reason="unreadable" if park and slots == 2 else None
        )
        for _ in range(2):  # the second one comes too late
            with self.watched("enqueue"):
                wanted = self.oracle.fire(firing)
                given = now(self.store.fire(firing))
            shown = None if given is None else [(one.run.run_id, one.disposition) for one in given]
            assert shown == wanted

    @rule(
        scope_name=st.sampled_from(["queue:default", "function:f", "key:default"]),
        tenant=TENANTS,
        most=st.sampled_from([None, 1, 2]),
        paused=st.sampled_from([False, False, True]),
    )
    def set_queue(self, scope_name: str, tenant: Any, most: int | None, paused: bool = False) -> None:
        held = paused and scope_name == "queue:default"
        queue = m.QueueRecord(scope_name=scope_name, tenant=tenant, max_concurrency=most, paused=held)
        self.oracle.set_queue(queue)
        now(self.store.set_queue(queue))
