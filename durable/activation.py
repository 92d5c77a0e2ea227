"""One run of a body from the top: the pump between the journal, the body's loop and the recorder. The engine calls it.

See `replay` for the interface; this file appears with the pump.
"""

from __future__ import annotations

from .model import Claimed, Inbox, StepRecord
from .replay import Ending, Program, Recorder, Rest


class Activation:
    """Executes one claimed run; on the worker's loop; used once."""

    rest: Rest | None
    """Where the run rests now; None while it goes on."""

    def __init__(self, program: Program, claimed: Claimed, recorder: Recorder, inbox: Inbox | None = None) -> None:
        raise NotImplementedError

    @property
    def history(self) -> tuple[StepRecord, ...]:
        """The journal as it stands."""
        raise NotImplementedError

    async def run(self) -> Ending:
        """Run the body to its end, or until it is put aside."""
        raise NotImplementedError

    def ask_cancel(self, reason: str) -> None:
        """A cancel was asked for; it is delivered at the frontier (43). Ignored past the pivot."""
        raise NotImplementedError

    def time_out(self, kind: str) -> None:
        """The deadline or the cap of one execution has passed; delivered at the frontier."""
        raise NotImplementedError

    def news(self) -> None:
        """The inbox may have news: it is read again if the body waits for something that comes from there."""
        raise NotImplementedError

    async def set_aside(self) -> None:
        """Put the body aside (28a)."""
        raise NotImplementedError
