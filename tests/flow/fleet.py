"""Worker processes for the campaigns: started by a fork server, killed with SIGKILL, started again; and the log that they write.

Every line is one write on a file opened with O_APPEND: lines of many processes do not mix, and a kill can not undo one. It begins with
the time in microseconds by the machine's clock, and the process. `population.py` says what the processes do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self


class Line(NamedTuple):
    """One line of the log."""

    at: int
    pid: int
    words: list[str]


def hold_of(log: Path) -> Path:
    """While this file is there, bodies that hold permits stay in their step."""
    return log.with_suffix(".hold")


class Fleet:
    """So many processes of one main function, which gets the path of the log before its own arguments."""

    def __init__(
        self, folder: Path, count: int, main: Callable[..., None], *arguments: Any, held: bool = False
    ) -> None:
        self.log = folder / "fleet.log"
        self.log.touch()
        self.hold = hold_of(self.log)
        if held:
            self.hold.touch()
        self.main, self.arguments = main, (str(self.log), *arguments)
        self.context = multiprocessing.get_context("forkserver")
        # The fork server finds modules by the environment alone, and imports once what every process needs.
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*sys.path, os.environ.get("PYTHONPATH", "")]))
        self.context.set_forkserver_preload(["flow.population"])
        self.killed: dict[int, int] = {}
        self.processes = [self.start() for _ in range(count)]

    def start(self) -> Any:
        """Start one more."""
        process = self.context.Process(target=self.main, args=self.arguments, daemon=True)
        process.start()
        return process

    def kill(self, place: int) -> None:
        """SIGKILL the process at this place, and put another one there."""
        victim = self.processes[place]
        assert victim.is_alive(), f"a worker ended by itself, with {victim.exitcode}"
        victim.kill()
        victim.join()
        self.killed[victim.pid] = time.time_ns() // 1_000
        self.processes[place] = self.start()

    def stop(self) -> None:
        """End all of them in good order; one that does not is killed, which fails the test."""
        for process in self.processes:
            process.terminate()
        begun = {line.pid for line in self.lines()}
        codes = []
        for process in self.processes:
            process.join(60)
            if (
                process.exitcode != -signal.SIGTERM or process.pid in begun
            ):  # else it was told to end before it had begun
                codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        self.processes = []
        assert set(codes) <= {0}, f"workers ended with {codes} (None: it did not end)"

    def lines(self, word: str | None = None) -> list[Line]:
        """What was logged, in the order of writing; with `word` only the lines that begin with it."""
        found = []
        for text in self.log.read_text().splitlines():
            at, pid, *words = text.split(" ")
            if word is None or words[0] == word:
                found.append(Line(int(at), int(pid), words))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
