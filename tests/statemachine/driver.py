"""A store on one event loop that stays, with a clock moved by hand, and the comparison of all that it shows with the oracle.

The state machine and the fixed cases use it. It calls the store through `durable/protocol.py` alone; only the name of the backend
stands here. It never changes a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from types import SimpleNamespace as Row
from typing import Any, TypeVar

from statemachine.oracle import by_position
from statemachine.oracle_upkeep import Oracle

from durable import model as m
from durable.protocol import Store
from durable.settings import Settings
from durable_sqlite import backend

T = TypeVar("T")
START = 1_700_000_000_000_000
ALWAYS = (
    "name status tenant input queue priority attempts failures created_at finished_at deadline_at purge_at "
    "cancel_requested_at cancel_refused_at idempotency_key coalesce_key sequence_key concurrency_key max_attempts options "
    "version fingerprint seed wake_seq parent_run_id parent_step_id detached schedule_id scheduled_for forked_from progress "
    "keep tags output leased_until compensating started_at mismatch_since"
).split()
_loop = asyncio.new_event_loop()


def now(work: Coroutine[Any, Any, T]) -> T:
    return _loop.run_until_complete(work)


class Driver:
    """The store under test beside its oracle."""

    def __init__(self) -> None:
        self.time = START
        self.settings = Settings()
        self.store: Store = now(backend.open("sqlite://:memory:", settings=self.settings, clock=lambda: self.time))
        self.oracle = Oracle(lambda: self.time, self.settings.keep)
        self.gone: set[str] = set()
        self.compared: Mapping[str, object] = {}

    def close(self) -> None:
        now(self.store.close())

    def rows(self) -> dict[str, m.RunRecord]:
        """All that the store has, by id."""
        page = now(self.store.find(m.RunQuery(limit=1000), scope=m.ALL))
        return {run.run_id: run for run in page.runs}

    def compare(self, *, every_journal: bool = False) -> None:
        """The whole visible state of both: runs, journals, pulses, schedules, queues; and a sound store.

        A journal is read where the run's row or the oracle's journal has changed since the last time; all of them with
        `every_journal`, now and then.
        """
        now(self._compare(every_journal))

    async def _compare(self, every_journal: bool) -> None:
        store, oracle = self.store, self.oracle
        ids = list(oracle.runs)
        page, got, pulses, schedules, queues, findings = await asyncio.gather(
            store.find(m.RunQuery(limit=1000), scope=m.ALL),
            store.get([*ids, *self.gone], scope=m.ALL),
            store.pulse(ids, scope=m.ALL),
            store.schedules(scope=m.ALL),
            store.queues(scope=m.ALL),
            store.audit(scope=m.ALL),
        )
        newest = sorted(oracle.runs.values(), key=lambda row: (row.created_at, row.run_id), reverse=True)
        listed, wanted = [run.run_id for run in page.runs], [row.run_id for row in newest]
        assert listed == wanted, f"the listing, newest first: {listed} != {wanted}"
        found = {run.run_id: run for run in page.runs}
        assert list(got) == [found.get(run_id) for run_id in [*ids, *self.gone]], "get and find show the same"
        for run_id, pulse in zip(ids, pulses, strict=True):
            run = found[run_id]
            shown = pulse and (
                pulse.run_id,
                pulse.status,
                pulse.attempts,
                pulse.wake_seq,
                pulse.updated_at,
                pulse.progress,
            )
            assert shown == (run_id, run.status, run.attempts, run.wake_seq, run.updated_at, run.progress), "the pulse"
            self._compare_run(run, oracle.runs[run_id])
        order = sorted(found.values(), key=lambda run: run.submitted)
        assert [run.run_id for run in order] == sorted(ids, key=lambda one: oracle.runs[one].order), (
            "the order of submission"
        )
        states = {run_id: (found[run_id], tuple(oracle.journals[run_id])) for run_id in ids}
        changed = [run_id for run_id in ids if every_journal or self.compared.get(run_id) != states[run_id]]
        histories = await asyncio.gather(*(store.history(run_id, scope=m.ALL) for run_id in changed))
        for run_id, history in zip(changed, histories, strict=True):
            assert list(history) == by_position(oracle.journals[run_id]), f"the journal of {run_id}"
        self.compared = states
        self._compare_schedules(schedules, queues)
        assert not list(findings), f"audit: {findings}"

    def _compare_run(self, run: m.RunRecord, row: Row) -> None:
        fields = list(ALWAYS)
        if run.status in m.TERMINAL:
            fields += ["error_kind", *(["error", "error_detail"] if row.error else [])]
        else:
            fields += ["reclaims"]
        fields += ["lease_owner"] if run.status == "running" else []
        fields += ["wake_after", "waiting_for", "available_at"] if run.status == "suspended" else []
        fields += ["replay_family"] if self.oracle.journals[run.run_id] else []
        for name in fields:
            assert getattr(run, name) == getattr(row, name), (
                f"{run.run_id}.{name}: {getattr(run, name)} != {getattr(row, name)}"
            )
        if run.status == "pending":
            ready = None if run.available_at is None or run.available_at <= self.time else run.available_at
            wanted = None if row.available_at is None or row.available_at <= self.time else row.available_at
            assert ready == wanted, f"{run.run_id}.available_at: {run.available_at} != {row.available_at}"
            row.available_at = run.available_at  # past or NULL: both are now
        if limit_of(run.blocked_on):
            scopes = [scope for scope in self.oracle.scopes(row) if (row.tenant, scope) in self.oracle.queues]
            assert scopes, f"{run.run_id} is blocked on {run.blocked_on}, where nothing is limited"
            row.blocked_on = run.blocked_on
        elif limit_of(row.blocked_on):
            row.blocked_on = "alone" if row.reclaims >= 2 else None
        assert run.blocked_on == row.blocked_on, f"{run.run_id}.blocked_on: {run.blocked_on} != {row.blocked_on}"

    def _compare_schedules(self, schedules: Sequence[m.Schedule], queues: Sequence[m.QueueRecord]) -> None:
        shown = {(one.tenant, one.schedule_id): one for one in schedules}
        assert shown.keys() == self.oracle.schedules.keys()
        for key, row in self.oracle.schedules.items():
            for name in vars(row):
                assert getattr(shown[key], name) == getattr(row, name), f"schedule {key}: {name}"
            last = self.oracle.runs.get(row.last_run_id or "")
            assert shown[key].last_run_live == (last is not None and last.status not in m.TERMINAL)
        assert {(one.tenant, one.scope_name): one for one in queues} == self.oracle.queues


def limit_of(blocked_on: str | None) -> bool:
    """Whether that is a limited scope: `queue:…`, `function:…` or `key:…`, with the tenant in front."""
    return (blocked_on or "").rpartition("/")[2].startswith(("queue:", "function:", "key:"))
