"""Ports for the servers of tests, which are started on them later, and on the same ones again after a crash.

A port that the system gives away, and that is let go so that a server may have it, is one of those which every connection of a client
gets its own from: while the server is down, a client may be given it, even one that tries to reach that server. These lie below all of
them, and processes of tests that run side by side never have the same one.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

FIRST, LAST = 15_000, 30_000
_claims: list[IO[str]] = []
"""Locked files, one for each port: they are let go when this process ends, however it does."""


def free_port() -> int:
    """A port of 127.0.0.1 that is this process's until it ends."""
    folder = Path(tempfile.gettempdir()) / f"durable-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.sample(range(FIRST, LAST), LAST - FIRST):
        claim = (folder / str(port)).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:  # somebody has it
            claim.close()
        else:
            _claims.append(claim)
            return port
    raise RuntimeError(f"no port between {FIRST} and {LAST} is free")


__all__ = ["free_port"]
