"""Durable functions in plain Python: killed at any line, they resume where they stood.

These are the public names, and nothing else is: what a module below has beside them may change without notice.
"""

from __future__ import annotations

from . import cron
from ._engine.worker import Worker
from .blocking import SyncContext
from .children import ChildRun, SyncChildRun
from .client import Client
from .codec import error
from .context import Context
from .cron import Cron
from .errors import (
    ConfigurationError,
    Conflict,
    DurableError,
    EncryptionError,
    GraphFailed,
    LeaseLost,
    MissingKey,
    Misuse,
    NonDeterminismError,
    NotFound,
    PayloadTooLarge,
    RegistrationError,
    RunCancelled,
    RunFailed,
    RunForwardIncomplete,
    RunTimeout,
    SchemaMismatch,
    SerializationError,
    SignalTimeout,
    SpinningError,
    StepFailed,
    StepTimeout,
    StoreError,
    StoreUnavailable,
    StuckError,
    WorkerStopped,
)
from .function import Function, Registry, Step, function, step
from .graph import Graph, Node
from .handle import Approval, Progress, Run
from .model import Status, tenant_id
from .retry import Retry
from .saga import Saga, SyncSaga
from .signals import Signal
from .sync import SyncClient, SyncRun, run

__all__ = [
    "Approval",
    "ChildRun",
    "Client",
    "ConfigurationError",
    "Conflict",
    "Context",
    "Cron",
    "DurableError",
    "EncryptionError",
    "Function",
    "Graph",
    "GraphFailed",
    "LeaseLost",
    "MissingKey",
    "Misuse",
    "Node",
    "NonDeterminismError",
    "NotFound",
    "PayloadTooLarge",
    "Progress",
    "RegistrationError",
    "Registry",
    "Retry",
    "Run",
    "RunCancelled",
    "RunFailed",
    "RunForwardIncomplete",
    "RunTimeout",
    "Saga",
    "SchemaMismatch",
    "SerializationError",
    "Signal",
    "SignalTimeout",
    "SpinningError",
    "Status",
    "Step",
    "StepFailed",
    "StepTimeout",
    "StoreError",
    "StoreUnavailable",
    "StuckError",
    "SyncChildRun",
    "SyncClient",
    "SyncContext",
    "SyncRun",
    "SyncSaga",
    "Worker",
    "WorkerStopped",
    "cron",
    "error",
    "function",
    "run",
    "step",
    "tenant_id",
]
