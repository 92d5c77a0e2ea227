"""The ports of test servers: given to one, and not given again."""

from __future__ import annotations

import socket

import pytest
from servers import ports


def test_a_port_is_given_to_one_alone_also_before_its_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "FIRST", port)
    monkeypatch.setattr(ports, "LAST", port + 1)
    with pytest.raises(RuntimeError, match=str(port)):
        ports.free_port()


def test_a_port_on_which_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", port)
        monkeypatch.setattr(ports, "LAST", port + 1)
        with pytest.raises(RuntimeError, match=str(port)):
            ports.free_port()
