"""The options of a start, checked at once and turned into the units of the store (semantics 27, 34, 57).

`function.Function.using` passes what it was given through `checked`; the client reads the result. An option that can not work gets a
typed error with the reason before anything is written; nothing here knows a store or a run.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Literal

from .cron import Cron
from .errors import ConfigurationError, RegistrationError
from .instants import instant
from .model import Instant, Json
from .retry import Retry
from .settings import Micros, micros
from .steps import checked_name

LONGEST_KEY = 1_024


class _Absent:
    def __repr__(self) -> str:
        return "..."


ABSENT: Any = _Absent()
"""As declared."""


# -- options of a start -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What `.using(...)` was given, checked, in the units of the store. None: as declared, or none."""

    idempotency_key: str | None = None
    coalesce_key: str | None = None
    on_coalesce: Literal["join", "replace"] = "join"
    max_delay: Micros | None = None
    sequence_key: str | None = None
    concurrency_key: str | None = None
    queue: str | None = None
    priority: int | None = None
    delay: Micros | None = None
    start_at: Instant | None = None
    deadline_at: Instant | None = None
    deadline_after: Micros | None = None
    retry: Retry | None = None
    timeout: Micros | None = None
    unlimited: bool = False
    """`timeout=None` was said: no cap, whatever is declared."""
    keep: Micros | None = None
    cron: Cron | None = None
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    detached: bool = False

    def overrides(self) -> Json | None:
        """What the holder needs to know of this start that the declaration does not say: back-off and time limit."""
        found: dict[str, Any] = {}
        if self.retry is not None:
            found["retry"] = json.loads(self.retry.to_json())
        if self.timeout is not None or self.unlimited:
            found["timeout"] = self.timeout
        return json.dumps(found, separators=(",", ":")) if found else None


def checked_text(value: object, what: str, limit: int) -> str:
    """Text that every store can keep. Raises RegistrationError."""
    if not isinstance(value, str) or not value:
        raise RegistrationError(
            f"{what} is text and not empty, not {value!r}", hint=f"leave {what} out where there is none"
        )
    if len(value) > limit:
        raise RegistrationError(
            f"{what} has {len(value):,} characters, more than {limit:,}", hint="pass a digest of it"
        )
    if "\x00" in value:
        raise RegistrationError(f"{what} holds a NUL character, which no store can keep")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RegistrationError(f"{what} holds a lone surrogate, which no store can keep") from None
    return value


def given_text(value: object, what: str) -> str:
    """Text, such as the id of something that may be there or not. Raises ConfigurationError for anything else: what a store would read as
    a condition must not pass for an id."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} is text, not {value!r}")
    return value


def checked_key(value: object, what: str) -> str:
    """A key as rule 34 wants it. Raises RegistrationError: empty, over 1,024 characters, NUL, or beginning with `~`."""
    key = checked_text(value, what, LONGEST_KEY)
    if key.startswith("~"):
        raise RegistrationError(
            f"{what} {key[:80]!r} begins with '~': such keys are the engine's own",
            hint="choose another first character",
        )
    return key


def checked_priority(value: object) -> int:
    """A priority. Raises RegistrationError."""
    if isinstance(value, bool) or not isinstance(value, int) or not -32_768 <= value <= 32_767:
        raise RegistrationError(
            f"priority is a whole number from -32,768 to 32,767, not {value!r}", hint="higher goes first"
        )
    return value


def checked_retry(value: object) -> Retry:
    """A policy. Raises RegistrationError."""
    if not isinstance(value, Retry):
        raise RegistrationError(f"retry is a durable.Retry, not {value!r}", hint="retry=durable.Retry(3)")
    return value


def checked_cron(value: object) -> Cron:
    """A schedule. Raises RegistrationError."""
    if isinstance(value, str):
        return Cron(value)
    if not isinstance(value, Cron):
        raise RegistrationError(
            f"cron is an expression or a durable.Cron, not {value!r}", hint='cron="0 9 * * MON-FRI"'
        )
    return value


def _tags(value: Any) -> Mapping[str, str]:
    candidate: object = value
    if not isinstance(candidate, Mapping):
        raise RegistrationError(f"tags are a mapping of text to text, not {value!r}", hint='tags={"customer": "42"}')
    given: dict[object, object] = dict(value)
    return types.MappingProxyType(
        {
            checked_text(key, "the name of a tag", 255): checked_text(item, f"the tag {key!r}", LONGEST_KEY)
            for key, item in given.items()
        }
    )


def _chosen(value: object) -> str:
    if value not in ("join", "replace"):
        raise RegistrationError(f'on_coalesce is "join" or "replace", not {value!r}')
    return str(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise RegistrationError(f"detached is True or False, not {value!r}")
    return value


def _duration(what: str) -> Callable[[Any], Micros]:
    return lambda value: micros(value, what=what)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "idempotency_key": lambda value: checked_key(value, "idempotency_key"),
    "coalesce_key": lambda value: checked_key(value, "coalesce_key"),
    "sequence_key": lambda value: checked_key(value, "sequence_key"),
    "concurrency_key": lambda value: checked_key(value, "concurrency_key"),
    "on_coalesce": _chosen,
    "max_delay": _duration("max_delay"),
    "queue": lambda value: checked_name(value, "queue"),
    "priority": checked_priority,
    "delay": _duration("delay"),
    "retry": checked_retry,
    "keep": _duration("keep"),
    "cron": checked_cron,
    "tags": _tags,
    "detached": _flag,
}


def checked(given: dict[str, Any], before: Options) -> Options:
    """The options with what was given. Raises RegistrationError, ConfigurationError."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is ABSENT:
            continue
        if name == "at":
            values["start_at"] = instant(value, what="at")
        elif name == "timeout":
            values["unlimited"] = value is None
            values["timeout"] = None if value is None else checked_span(value, "timeout")
        elif name == "deadline":
            at = instant(value, what="deadline") if isinstance(value, datetime) else None
            values["deadline_at"], values["deadline_after"] = (
                at,
                None if at is not None else checked_span(value, "deadline"),
            )
        else:
            values[name] = _CHECKS[name](value)
    made = dataclasses.replace(before, **values)
    if made.max_delay is not None and made.coalesce_key is None:
        raise RegistrationError("max_delay without a coalesce_key means nothing", hint="pass both, or neither")
    return made


def checked_span(value: Any, what: str) -> Micros:
    """A duration that is not 0. Raises ConfigurationError."""
    amount = micros(value, what=what)
    if amount == 0:
        raise ConfigurationError(
            f"{what}: 0 leaves no time for anything", hint="leave it out, or pass None, for no limit"
        )
    return amount
