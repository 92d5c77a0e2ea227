"""Where something happens in the user's code, in words: the line of a call, and what a body at rest awaits.

The activation asks when it must tell somebody; nothing here runs while all is well.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_OURS = str(Path(__file__).parent)


def caller(depth: int) -> tuple[CodeType, int]:
    """The place `depth` frames above the caller of this."""
    frame = sys._getframe(depth + 1)
    return frame.f_code, frame.f_lineno


def called_at(place: tuple[CodeType, int] | None) -> str:
    """File, line and function; for a timer that asyncio made, only that."""
    if place is None:
        return "a timer of asyncio (sleep, timeout or wait_for)"
    code, line = place
    return f"{code.co_filename}:{line}, in {code.co_qualname}"


def what_it_awaits(body: Any) -> str:
    """For each unfinished branch the line at which it stands."""
    tasks = [task for task in (body.main, *body.tasks) if not task.done()] if hasattr(body, "tasks") else []
    told = [f"{task.scope.path or 'the body'} at {_suspended_at(task.get_coro())}" for task in tasks[:10]]
    return "; ".join(told) or "nothing at all"


def _suspended_at(coroutine: Any) -> str:
    frame: FrameType | None = None
    while coroutine is not None:
        found = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "ag_frame", None)
        if found is not None and not found.f_code.co_filename.startswith(_OURS):
            frame = found if frame is None or "/asyncio/" not in found.f_code.co_filename else frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)
    return (
        "its start" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"
    )
