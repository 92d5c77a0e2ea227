"""The whole error tree. Every error carries a `code` (stable, for machines) and a `hint` (what to do, for people).

    Exception
    └── DurableError
        ├── ConfigurationError        a URL, a setting or an extra that can not work
        ├── RegistrationError         a function, step, signal, queue or schedule that can not be declared so
        ├── Misuse                    something in a body that can not replay (I/O, a foreign wake-up, a direct call)
        ├── SerializationError        a value that can not be stored, or stored bytes that can not be read
        │   ├── PayloadTooLarge       over `max_payload`
        │   └── EncryptionError       an encrypted payload that was changed or moved
        │       └── MissingKey        one that is encrypted with a key which this process does not have
        ├── NonDeterminismError       the code asks for something else than the journal holds
        ├── SpinningError             a body that never comes to rest
        ├── StuckError                a body that waits for what nobody can deliver
        ├── StepFailed                a step's recorded failure whose class is not rebuilt (carries it as data)
        │   └── StepTimeout           also a TimeoutError
        ├── SignalTimeout             also a TimeoutError
        ├── RunFailed                 the awaited run landed failed
        ├── GraphFailed               nodes of a graph did not complete; what its run failed with
        ├── RunCancelled              the awaited run landed cancelled
        ├── RunTimeout                the awaited run landed timed_out; also a TimeoutError
        ├── RunForwardIncomplete      the awaited run passed its pivot and could not go forward
        ├── NotFound                  no such run or schedule for this tenant
        ├── Conflict                  the same key or id already means something else
        ├── LeaseLost                 this worker does not hold the run any more
        ├── WorkerStopped             this worker stopped before the call could finish; nothing is lost
        └── StoreError                the store answered with an error that we do not know better
            ├── StoreUnavailable      no answer, or not now: may be tried again
            └── SchemaMismatch        tables older or newer than this code, or not ours

Who may import this: everybody. It imports nothing of ours. Signals that steer a body (a run put aside, a worker that stops)
are not errors and derive from BaseException where they are used; nothing here does.
"""

from __future__ import annotations

from typing import ClassVar


class DurableError(Exception):
    """Base of every error of this project. `code` never changes between releases; `hint` says what to do."""

    code: ClassVar[str] = "durable"
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, /, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint: str = self.default_hint if hint is None else hint

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class ConfigurationError(DurableError):
    """A URL, a setting or a missing extra: nothing was opened, nothing was written."""

    code = "configuration"


class RegistrationError(DurableError):
    """A declaration that can not work (a name with `/ # : @`, two functions of one name). Raised where it is declared."""

    code = "registration"


class Misuse(DurableError):
    """A call that can not be replayed or does not belong where it stands. Raised where it is made; nothing was recorded."""

    code = "misuse"
    default_hint = "do it in a step: await ctx.step(fn, ...)"


class SerializationError(DurableError):
    """A value that JSON can not hold on every store. `path` names the place inside the value (semantics 22, 70, 71)."""

    code = "serialization"

    def __init__(self, message: str, /, *, path: str = "", hint: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message, hint=hint)
        self.path = path


class PayloadTooLarge(SerializationError):
    """The encoded value is longer than `max_payload` bytes (semantics 70)."""

    code = "payload_too_large"
    default_hint = "store the data elsewhere and pass its address, or raise the setting max_payload"


class EncryptionError(SerializationError):
    """An encrypted payload that can not be opened: it was changed, or stands at another place than it was made for (semantics 72).

    The run that needs it lands `failed`, kind `payload`; other runs are not touched.
    """

    code = "encryption"
    default_hint = (
        "somebody or something changed the stored rows: restore them from a backup, then retry the run;"
        " or fork it from the step before the damaged one"
    )


class MissingKey(EncryptionError):
    """A payload is encrypted with a key that this process does not have (semantics 72).

    Nothing is lost: a worker hands the run back, and one that has the key goes on with it.
    """

    code = "missing_key"
    default_hint = "add the key, behind the one that encrypts: encryption_key= or DURABLE_ENCRYPTION_KEY"


class NonDeterminismError(DurableError):
    """The code asks for something else than the journal holds (semantics 25). The journal was not touched."""

    code = "non_determinism"
    default_hint = (
        "put the old code back, declare the change with version= or ctx.patched(...), or cancel the run;"
        " until then it is handed back and tried again with a growing delay"
    )


class SpinningError(DurableError):
    """A body that ran 100,000 callbacks without coming to rest (a loop on asyncio.sleep(0))."""

    code = "spinning"
    default_hint = "wait for something durable (a step, ctx.sleep, a signal) instead of polling in the body"


class StuckError(DurableError):
    """A body at rest that waits for what nothing can deliver (semantics 30)."""

    code = "stuck"
    default_hint = "something in the body must set the event or fill the queue that it waits for"


class StepFailed(DurableError):
    """A step failed for good. Its error is data: `type_name`, `message`, `traceback` (semantics 23)."""

    code = "step_failed"

    def __init__(
        self, message: str, /, *, step_id: str = "", type_name: str = "", traceback: str = "", hint: str | None = None
    ) -> None:
        super().__init__(f"step {step_id}: {type_name}: {message}" if step_id else message, hint=hint)
        self.message = message
        self.step_id = step_id
        self.type_name = type_name
        self.traceback = traceback


class StepTimeout(StepFailed, TimeoutError):
    """A step ran longer than its `timeout`."""

    code = "step_timeout"


class SignalTimeout(DurableError, TimeoutError):
    """No signal came before the wait's instant (semantics 32)."""

    code = "signal_timeout"


class _RunEnded(DurableError):
    """What the four ends of an awaited run have in common."""

    def __init__(
        self,
        message: str,
        /,
        *,
        run_id: str = "",
        error_kind: str | None = None,
        traceback: str = "",
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.run_id = run_id
        self.error_kind = error_kind
        self.traceback = traceback


class RunFailed(_RunEnded):
    """The run landed `failed`; `error_kind` says why."""

    code = "run_failed"


class GraphFailed(DurableError):
    """Nodes of a graph did not complete; the message names them. It is what the run of the graph fails with (semantics 77)."""

    code = "graph_failed"
    default_hint = "retry the run of the graph: the nodes that failed, and those behind them, run again"


class RunCancelled(_RunEnded):
    """The run landed `cancelled`."""

    code = "run_cancelled"


class RunTimeout(_RunEnded, TimeoutError):
    """The run landed `timed_out` (its deadline or the cap of one execution). Waiting too long is a plain TimeoutError."""

    code = "run_timeout"


class RunForwardIncomplete(_RunEnded):
    """The run passed its pivot and could not go forward (semantics 49)."""

    code = "run_forward_incomplete"


class NotFound(DurableError):
    """No such run, schedule or signal for this tenant: another tenant's is the same as an unknown one (semantics 57)."""

    code = "not_found"


class Conflict(DurableError):
    """The key, the id or the state already means something else; nothing was changed."""

    code = "conflict"


class LeaseLost(DurableError):
    """This worker does not hold the run any more; nothing was written (semantics 3)."""

    code = "lease_lost"


class WorkerStopped(DurableError):
    """The worker or client was closed before the call ended; what was recorded stays recorded."""

    code = "worker_stopped"


class StoreError(DurableError):
    """The store answered with an error that is not known better. The cause is chained."""

    code = "store"


class StoreUnavailable(StoreError):
    """No answer, or not now. The write may or may not have happened: repeat it, every write can be repeated (semantics 42)."""

    code = "store_unavailable"


class SchemaMismatch(StoreError):
    """The tables are older or newer than this code, or not ours. Nothing was changed (semantics 69)."""

    code = "schema_mismatch"
