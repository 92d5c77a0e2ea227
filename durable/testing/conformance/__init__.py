"""The conformance suite: what every backend must do, as plain pytest. A backend's author runs it from a test file of two parts.

    from durable.testing.conformance import *   # the tests and their fixtures

    @pytest.fixture
    async def backend_harness(...) -> AsyncIterator[Harness]:
        ...                                     # how to open a store, see `harness.Harness`

It needs pytest and pytest-asyncio in auto mode. Every test is named by a rule of the contract and notes its number; every sentence
of `durable.protocol` has one. It knows the protocol and nothing of any backend.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

MODULES = (
    "test_cancel",
    "test_children",
    "test_claiming",
    "test_coalescing",
    "test_enqueue_idempotency",
    "test_erasure",
    "test_everybody",
    "test_fairness",
    "test_fence",
    "test_flow_control",
    "test_fork",
    "test_graphs",
    "test_journal",
    "test_landing",
    "test_leases",
    "test_listing",
    "test_lost_answers",
    "test_mailbox",
    "test_payloads",
    "test_purge",
    "test_retry",
    "test_schedules",
    "test_settle",
    "test_suspension",
    "test_tenants",
    "test_transaction",
    "test_upkeep",
)
"""The rooms of the suite, each for some sections of the contract."""

FIXTURES = ("store", "scene", "scenes", "shared_scene", "faulty")


def collect(modules: Sequence[str] = MODULES) -> dict[str, Any]:
    """The tests of these rooms and the fixtures, by name. Two tests of one name would hide each other: refused."""
    pytest.register_assert_rewrite(f"{__name__}.scenario", *(f"{__name__}.{module}" for module in MODULES))
    fixtures = importlib.import_module(f"{__name__}.fixtures")
    found: dict[str, Any] = {name: getattr(fixtures, name) for name in FIXTURES}
    for module in modules:
        for name, value in vars(importlib.import_module(f"{__name__}.{module}")).items():
            if name.startswith("test_"):
                if name in found:
                    raise RuntimeError(f"two tests of the suite are called {name}; the second is in {module}")
                found[name] = value
    return found


globals().update(collect())  # what `import *` in a backend's test file finds
