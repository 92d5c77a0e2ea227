"""A function, its options and its arguments as a `NewRun`: what is stored when a run is started, by hand or by a schedule. Pure.

The client and the scheduler build runs here. Everything is encoded and checked before anything is written (semantics 42, 70); the
id and the seed are made here, so that a submit whose answer was lost can be repeated.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from .codec import Codec
from .errors import RegistrationError
from .function import SEED_BYTES, Function
from .model import Instant, NewRun, Schedule, new_run_id


def new_run(
    function: Function[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    codec: Codec,
    tenant: UUID | None,
) -> NewRun:
    """A run of `function`. Raises TypeError, SerializationError or PayloadTooLarge for arguments that can not be stored."""
    candidate: object = function
    if not isinstance(candidate, Function):
        raise RegistrationError(
            f"{candidate!r} is not a durable function",
            hint="decorate it: @durable.function; then pass the function itself",
        )
    return function.new_run(function.encode_arguments(codec, args, kwargs), tenant=tenant)


def scheduled_run(
    function: Function[..., Any], schedule: Schedule, slot: Instant | None, *, sequence: bool = False
) -> NewRun:
    """The run of a schedule's slot; without a slot one that was triggered by hand. `sequence`: one after the other."""
    declared, options = function.declared, function.options
    retry = options.retry if options.retry is not None else declared.retry
    return NewRun(
        run_id=new_run_id(),
        name=schedule.name,
        input=schedule.input,
        seed=os.urandom(SEED_BYTES),
        tenant=schedule.tenant,
        queue=schedule.queue,
        priority=declared.priority,
        delay=None if slot is None else _jitter(schedule, slot),
        idempotency_key=None if slot is None else f"~schedule:{schedule.schedule_id}:{slot}",
        sequence_key=f"~schedule:{schedule.schedule_id}" if sequence else None,
        max_attempts=retry.max_attempts,
        options=function.start_options(),
        version=declared.version,
        fingerprint=function.fingerprint,
        keep=declared.keep,
        schedule_id=schedule.schedule_id,
        scheduled_for=slot,
    )


def _jitter(schedule: Schedule, slot: Instant) -> int | None:
    """How much later than its instant the run may start: the same for one slot, whoever fires it."""
    if schedule.jitter <= 0:
        return None
    text = f"{schedule.tenant}:{schedule.schedule_id}:{slot}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % (schedule.jitter + 1)


__all__ = ["new_run", "scheduled_run"]
