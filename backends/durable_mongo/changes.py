"""How a run's document is changed: update pipelines, in which values are data and every change keeps `ready` true to the rest.

A run is in the index of claimable runs while it has `ready`: pending, not waiting for a time, not held back. It stands there under its
`route`: name, version and the replay family of its records. `change` ends with the stage that works both out, so that no operation can
forget it; while a run is running or over neither counts. Absent fields are absent, never null: partial indexes count on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

Stage = dict[str, Any]

ROUTE: Final = {
    "$concat": ["$name", "/", {"$ifNull": ["$version", ""]}, "@", {"$ifNull": ["$replay_family", ""]}],
}
READY: Final[Stage] = {
    "$set": {
        "route": ROUTE,
        "ready": {
            "$cond": [
                {
                    "$and": [
                        {"$eq": ["$status", "pending"]},
                        {"$eq": [{"$type": "$available_at"}, "missing"]},
                        {"$eq": [{"$type": "$blocked_on"}, "missing"]},
                    ]
                },
                True,
                "$$REMOVE",
            ]
        },
    }
}
LIVE: Final = ("pending", "running", "suspended")
ENDED: Final = ("completed", "failed", "cancelled", "timed_out", "forward_incomplete")
IS_LIVE: Final = {"$in": list(LIVE)}
IS_ENDED: Final = {"$in": list(ENDED)}


def change(
    *,
    put: Mapping[str, Any] | None = None,
    compute: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    ready: bool = True,
) -> list[Stage]:
    """A pipeline: `put` are values (None takes the field away), `compute` are expressions over the document as it was."""
    sets: dict[str, Any] = {name: {"$literal": value} for name, value in (put or {}).items() if value is not None}
    sets.update(compute or {})
    gone = [*drop, *(name for name, value in (put or {}).items() if value is None)]
    stages: list[Stage] = []
    if sets:
        stages.append({"$set": sets})
    if gone:
        stages.append({"$unset": gone})
    if ready:
        stages.append(READY)
    return stages


def plus(field: str, amount: Any) -> Stage:
    """A counter, increased."""
    return {"$add": [{"$ifNull": [f"${field}", 0]}, amount]}


def present(field: str) -> Stage:
    """Whether the document has the field, as an expression."""
    return {"$ne": [{"$type": f"${field}"}, "missing"]}


def only_if(condition: Any, then: Any, otherwise: Any = "$$REMOVE") -> Stage:
    """One or the other; by default the field goes."""
    return {"$cond": [condition, then, otherwise]}


__all__ = ["ENDED", "IS_ENDED", "IS_LIVE", "LIVE", "READY", "ROUTE", "Stage", "change", "only_if", "plus", "present"]
