"""How a run landed, as an error for whoever waits for it, and as the envelope in which its parent's journal keeps it.

The handles of a client raise `run_error`; an activation records `end_envelope` when a child of its run has landed, and gets the same
error back from the record, live and in replay (semantics 18, 23). Nothing here looks at a store.
"""

from __future__ import annotations

from .codec import ErrorData, error_envelope, plain, rebuild, value_envelope
from .errors import DurableError, RunCancelled, RunFailed, RunForwardIncomplete, RunTimeout, SerializationError
from .model import ChildEnd, ErrorKind, Json, RunRecord, Status

_CLASSES: dict[Status, type[RunFailed | RunCancelled | RunTimeout | RunForwardIncomplete]] = {
    Status.FAILED: RunFailed,
    Status.CANCELLED: RunCancelled,
    Status.TIMED_OUT: RunTimeout,
    Status.FORWARD_INCOMPLETE: RunForwardIncomplete,
}
END = ":end"


def end_id(start_id: str) -> str:
    """The id of the record that holds how the child landed which that step started."""
    return start_id + END


def run_error(record: RunRecord) -> DurableError:
    """The error of a run that landed in any state but completed. Its cause is what the body raised, where that is known."""
    data = _data(record)
    error = _CLASSES[record.status](
        f"run {record.run_id} of {record.name} landed {record.status}: {_reason(record)}",
        run_id=record.run_id,
        error_kind=record.error_kind,
        traceback=data.traceback if data is not None else "",
    )
    if data is not None:
        error.__cause__ = rebuild(data)
    return error


def end_envelope(end: ChildEnd | RunRecord) -> Json:
    """What the journal of who waited keeps: the output as it was stored, or the error with its cause.

    Raises EncryptionError, MissingKey for an end that could not be opened (72)."""
    plain.refuse_unreadable(end.error_detail or "")
    if end.status is Status.COMPLETED:
        return value_envelope("null" if end.output is None else end.output)
    data = _data(end)
    cls = _CLASSES[end.status]
    fields = {
        "run_id": end.run_id,
        "error_kind": end.error_kind or "",
        "traceback": data.traceback if data is not None else "",
        "hint": "",
    }
    detail: dict[str, object] = {"fields": fields}
    if data is not None:
        detail["cause"] = plain.read(data.to_json())
    which = f", started as {end.step_id}," if isinstance(end, ChildEnd) else f" of {end.name}"
    message = f"run {end.run_id}{which} landed {end.status}: {_reason(end)}"
    return error_envelope(
        ErrorData(type_name=f"{cls.__module__}.{cls.__qualname__}", message=message, traceback="", detail=detail)
    )


def _reason(ended: RunRecord | ChildEnd) -> str:
    return ended.error or ended.error_kind or "no reason given"


def _data(ended: RunRecord | ChildEnd) -> ErrorData | None:
    if ended.error_detail is None:
        return None
    try:
        return ErrorData.from_json(ended.error_detail)
    except SerializationError:
        return ErrorData(type_name=ended.error_kind or ErrorKind.EXCEPTION, message=ended.error or "")


__all__ = ["END", "end_envelope", "end_id", "run_error"]
