"""The conformance suite: what every backend must do, as plain pytest. A backend's author runs it from a test file of two parts.

    from durable.testing.conformance import *   # the tests and their fixtures

    @pytest.fixture
    async def backend_harness(...) -> AsyncIterator[Harness]:
        ...                                     # how to open a store, see `harness.Harness`

It needs pytest and pytest-asyncio in auto mode. Every test is named by a rule of the contract and notes its number; every sentence
of `durable.protocol` has one. It knows the protocol and nothing of any backend.
"""

# ruff: noqa: F403, E402 - the star imports are the point, and they come after pytest has been told to rewrite them

import pytest as _pytest

MODULES = (
    "fixtures",
    "test_cancel",
    "test_children",
    "test_claiming",
    "test_coalescing",
    "test_enqueue_idempotency",
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
_pytest.register_assert_rewrite("durable.testing.conformance.scenario", *(f"{__name__}.{module}" for module in MODULES))

from .fixtures import *
from .test_cancel import *
from .test_children import *
from .test_claiming import *
from .test_coalescing import *
from .test_enqueue_idempotency import *
from .test_fence import *
from .test_flow_control import *
from .test_fork import *
from .test_graphs import *
from .test_journal import *
from .test_landing import *
from .test_leases import *
from .test_listing import *
from .test_lost_answers import *
from .test_mailbox import *
from .test_payloads import *
from .test_purge import *
from .test_retry import *
from .test_schedules import *
from .test_settle import *
from .test_suspension import *
from .test_tenants import *
from .test_transaction import *
from .test_upkeep import *
