"""What comes to a run from outside: due timers, signals, a cancel, a time-out. Chooses the earliest, and makes it a record.

The activation asks at the frontier only, when nothing that has a position is undelivered: a signal that is taken while another
record is on its way could be lost to a cancellation (pump step 4). Nothing here touches the body.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from .calls import Pending, Waiter
from .codec import plain, read_envelope, value_envelope
from .endings import END, end_envelope, end_id
from .errors import WorkerStopped
from .model import ChildEnd, Inbox, Instant, NewRecord, RecordKind, Signal, StepRecord
from .replay import CANCEL_ID, TIMEOUT_ID, Rest
from .settings import MINUTE, Micros

if TYPE_CHECKING:
    from .activation import Activation

_NOTHING = value_envelope("null")
WAKE_COST = 10
"""A run that waits for many children is not woken more often than so many times what a replay of it takes: a tenth of a core."""
LONGEST_WAKE_DELAY: Micros = MINUTE


class Event(NamedTuple):
    """Something from outside that can be recorded now; ordered by when it happened, then by which wait was made first."""

    at: Instant
    order: int
    waiter: Waiter | None
    signal: Signal | None
    kind: RecordKind
    child: ChildEnd | None = None


class Outside:
    """The world of one activation: its inbox, its clock, and what the engine asked for."""

    def __init__(self, host: Activation, inbox: Inbox | None) -> None:
        run = host.run_record
        self.host = host
        self.stale = False
        self.reading = False
        self.committing = False
        self.refused = run.cancel_refused_at is not None
        """Past the pivot: no cancel is delivered any more (46)."""
        self.cancel_reason = ""
        self._reason_read = False
        self.withheld = False
        """A cancel is next, and only what was said with it is still being read: no step is begun before it (43)."""
        self.timeout_kind = "timeout"
        self.timeout_message = ""
        self.tasks: set[asyncio.Task[None]] = set()
        self._inbox = inbox
        self._read_at: Instant = 0
        self._read_for: tuple[Instant, int] | None = None
        self._cancel_at: Instant | None = run.cancel_requested_at
        self._timeout_at: Instant | None = None
        self.expected: dict[str, Any] = {}
        """Open waits for the end of a child, by the id of that end."""
        self._listening: dict[str, list[Pending]] = {}
        self._taken: set[int] = set()
        if inbox is not None and inbox.cancel_requested:
            self._cancel_at = host.recorder.clock() if self._cancel_at is None else self._cancel_at
            self._told(inbox)

    @property
    def busy(self) -> bool:
        """An event is being written, or the inbox is being read."""
        return self.committing or self.reading

    @property
    def cancel_open(self) -> bool:
        """A cancel was asked for, and neither delivered nor refused."""
        return self._cancel_at is not None and not self.refused

    @property
    def wake_seq(self) -> int:
        """The counter that was read with what the body has been given (31)."""
        return self._inbox.wake_seq if self._inbox is not None else self.host.run_record.wake_seq

    def ask_cancel(self, reason: str) -> None:
        """The first ask counts."""
        if self._cancel_at is None:
            self._cancel_at = self.host.recorder.clock()
        self.cancel_reason = self.cancel_reason or reason

    def _told(self, inbox: Inbox) -> None:
        """Who asked said why."""
        self.cancel_reason = self.cancel_reason or inbox.cancel_reason
        self._reason_read = True

    def time_out(self, kind: str, message: str = "") -> None:
        """The first limit counts."""
        if self._timeout_at is None and self.host.interruption is None:
            self._timeout_at = self.host.recorder.clock()
            self.timeout_kind = kind
            self.timeout_message = message

    def listen(self, call: Waiter) -> None:
        """A call waits for a signal; those of one name get them in the order in which they were made (32)."""
        assert isinstance(call, Pending)
        assert call.signal is not None
        self._listening.setdefault(call.signal, []).append(call)

    def expect(self, waiter: Waiter) -> None:
        """The body waits for the end of a child."""
        self.expected[waiter.step_id] = waiter

    def delivered(self, record: StepRecord) -> None:
        """The record of a cancel or time-out was delivered: what it says holds, also in replay."""
        told: dict[str, str] = read_envelope(record.result)[1]
        word = told.get("reason", "")
        if record.step_id == CANCEL_ID:
            self.cancel_reason = word
        else:
            self.timeout_kind = word
            self.timeout_message = told.get("message", "")
        self._cancel_at = self._timeout_at = None  # a body is interrupted once

    # -- choosing -------------------------------------------------------------------------------------------------------------

    def choose(self) -> Event | None:
        """The earliest event that some wait, or the run itself, can be given now. Pure but for asking for the inbox."""
        host = self.host
        self.withheld = False
        if not host.waits and self._cancel_at is None and self._timeout_at is None:
            return None
        best: Event | None = None
        interruptible = host.interruption is None
        if self._cancel_at is not None and interruptible and not self.refused:
            best = Event(self._cancel_at, -2, None, None, RecordKind.CANCEL)
        if self._timeout_at is not None and interruptible:
            best = _earlier(best, Event(self._timeout_at, -1, None, None, RecordKind.TIMEOUT))
        first = host.earliest_wait()
        if first is not None and first.due is not None and first.due <= host.recorder.clock():
            best = _earlier(best, Event(first.due, first.order, first, None, first.kind))
        names = self._names() if self._listening else {}
        self.withheld = why = (
            best is not None and best.kind is RecordKind.CANCEL and not (self.cancel_reason or self._reason_read)
        )
        if not (names or self.expected or why):
            return best
        if why or self._inbox is None or self.stale or (best is not None and self._too_old_for(best)):
            # A signal that was stored before the instant wins, however late the run wakes (32): look before deciding.
            self.read(best)
            return None
        best = self._signal(names, best) if names else best
        return self._child(best) if self.expected else best

    def give_up(self) -> None:
        """The body spins: its time-out is the one event that it can still be given."""
        if self._timeout_at is not None and not self.committing and self.host.journal.settled:
            self.commit(Event(self._timeout_at, -1, None, None, RecordKind.TIMEOUT))

    def _names(self) -> dict[str, Pending]:
        """For each name that is waited for, the wait whose turn it is."""
        turns: dict[str, Pending] = {}
        for name, calls in list(self._listening.items()):
            while calls and self.host.waits.get(calls[0].step_id) is not calls[0]:
                calls.pop(0)
            if calls:
                turns[name] = calls[0]
            else:
                del self._listening[name]
        return turns

    def _signal(self, names: dict[str, Pending], best: Event | None) -> Event | None:
        assert self._inbox is not None
        given: set[str] = set()
        for signal in self._inbox.signals:
            call = names.get(signal.name)
            if call is None or signal.seq in self._taken or signal.name in given:
                continue
            given.add(signal.name)
            if call.due is None or signal.at < call.due:
                best = _earlier(best, Event(signal.at, call.order, call, signal, RecordKind.SIGNAL))
        return best

    def _child(self, best: Event | None) -> Event | None:
        """The first of the children that have landed whose end is waited for; the inbox has them in the order of landing."""
        assert self._inbox is not None
        recorded = self.host.journal.by_id
        for child in self._inbox.children:
            step_id = end_id(child.step_id)
            waiter = self.expected.get(step_id)
            if waiter is not None and step_id not in recorded:
                return _earlier(best, Event(child.at, waiter.order, waiter, None, RecordKind.CHILD, child))
        return best

    # -- writing and reading --------------------------------------------------------------------------------------------------

    def commit(self, event: Event) -> None:
        """Hand the event to the recorder. Until it is delivered no other is chosen."""
        self.committing = True
        self._spawn(self._write(event, self.host.journal.cursor))

    async def _write(self, event: Event, frontier: int) -> None:
        host = self.host
        position = -1
        try:
            if host.over or not host.journal.settled or host.journal.cursor != frontier:
                return  # a step was recorded before this task began: it is delivered first, and the choice is made again
            position = host.journal.assign()
            record = await host.recorder.append(self._record(event, position))
            if event.signal is not None:
                self._taken.add(event.signal.seq)
            host.journal.land(position, record)
        except asyncio.CancelledError:
            host.interrupt(WorkerStopped("an event was cancelled with the worker while it was being written"))
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's last word
            host.journal.give_up(position)
            host.interrupt(error)
        finally:
            self.committing = False
            host.wake()

    def _record(self, event: Event, position: int) -> NewRecord:
        waiter, signal = event.waiter, event.signal
        result = _NOTHING if signal is None else value_envelope(signal.payload)
        if event.child is not None:
            result = end_envelope(event.child)
        step_id = CANCEL_ID if event.kind is RecordKind.CANCEL else TIMEOUT_ID
        if waiter is None:
            told = {"reason": self.cancel_reason if event.kind is RecordKind.CANCEL else self.timeout_kind}
            if event.kind is RecordKind.TIMEOUT and self.timeout_message:
                told["message"] = self.timeout_message
            result = value_envelope(plain.write(told))
        return NewRecord(
            step_id=step_id if waiter is None else waiter.step_id,
            kind=event.kind,
            position=position,
            seen=self.host.journal.seen if waiter is None else waiter.seen,
            digest="" if waiter is None else waiter.digest,
            result=result,
            floor=max(self.host.body.now, event.at if signal is None and waiter is not None else 0),
            signal_seq=None if signal is None else signal.seq,
        )

    def _too_old_for(self, best: Event) -> bool:
        """Was the inbox read before this event? One look that began when the event was known is enough, whatever clocks say: its
        stamp may come from a clock that is ahead of ours."""
        return self._read_at < best.at and self._read_for != (best.at, best.order)

    def read(self, best: Event | None = None) -> None:
        """Read the inbox; at most one read at a time. `best`: the event before which it is read."""
        if not self.reading and not self.host.over:
            self.reading = True
            self._read_for = None if best is None else (best.at, best.order)
            self._spawn(self._read())

    async def _read(self) -> None:
        host = self.host
        try:
            self.stale = False
            asked = host.recorder.clock()
            inbox = await host.recorder.inbox()
            self._inbox, self._read_at = inbox, asked
            if inbox.cancel_requested and self._cancel_at is None and host.interruption is None:
                self._cancel_at = asked
            if self._cancel_at is not None:
                self._told(inbox)
        except asyncio.CancelledError:
            if not host.over:
                host.interrupt(WorkerStopped("the inbox could not be read: the worker stops"))
                raise
        except Exception as error:  # noqa: BLE001 - as above
            host.interrupt(error)
        finally:
            self.reading = False
            host.wake()

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = self.host.outer.create_task(coroutine)
        if not task.done():
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def stop(self) -> None:
        """The activation is over: a read is of no use any more; what is being written is waited for."""
        if self.reading and not self.committing:
            for task in list(self.tasks):
                task.cancel()

    def let_go(self) -> None:
        """The activation is over and no task is left: cut the circle of references with it."""
        del self.host

    # -- rest -------------------------------------------------------------------------------------------------------------------

    def rest(self, until: Instant | None) -> Rest:
        """The numbers with which the run can be suspended."""
        host = self.host
        waiting: dict[str, Any] = {}
        timers = sum(1 for waiter in host.waits.values() if waiter.kind is RecordKind.TIMER)
        if timers:
            waiting["timers"] = timers
        if signals := sorted(self._names()):
            waiting["signals"] = signals
        if self.expected:
            waiting["children"] = sorted(step_id.removesuffix(END) for step_id in self.expected)[:100]
        if retries := sorted(host.execution.backing_off):
            waiting["retries"] = retries[:100]
        after, delay, on_failure = self._wake_condition()
        return Rest(
            until=until,
            waiting_for=plain.write(waiting),
            wake_seq=self.wake_seq,
            wake_after=after,
            wake_delay=delay,
            wake_on_failure=on_failure,
            blocking=host.body.blocking,
        )

    def _wake_condition(self) -> tuple[int, Micros, bool]:
        """How many ends of children must come before the body can go on, after what delay, and whether a failure is enough (33)."""
        if not self.expected:
            return 0, 0, False
        groups = {id(waiter.group): waiter.group for waiter in self.expected.values()}
        needs = [(1, False) if group is None else group.needs() for group in groups.values()]
        after = min(count for count, _ in needs)
        delay = 0
        if after == 1 and len(self.expected) > 1:  # one end of many: gather them, the longer the dearer a wake is
            took = self.host.replay_took or 0
            delay = min(max(self.host.recorder.settings.wake_delay, took * WAKE_COST), LONGEST_WAKE_DELAY)
        return after, delay, any(at_once for _, at_once in needs)


def _earlier(one: Event | None, other: Event) -> Event:
    return other if one is None or (other.at, other.order) < (one.at, one.order) else one
