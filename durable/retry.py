"""When a failed attempt is tried again, and after how long (semantics 24). Pure: the attempt and the random number are arguments.

The function decorator and steps carry a `Retry`, the engine asks it. It never sleeps, never looks at a clock and never counts:
attempts are counted where they are recorded.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, ClassVar

from .errors import (
    ConfigurationError,
    DurableError,
    LeaseLost,
    Misuse,
    NonDeterminismError,
    RegistrationError,
    SerializationError,
    WorkerStopped,
)
from .settings import Duration, Micros, micros

# Trying again can not help; they are tried again only for a policy that names one of our errors in `on`.
_PERMANENT = (
    ConfigurationError,
    LeaseLost,
    Misuse,
    NonDeterminismError,
    RegistrationError,
    SerializationError,
    WorkerStopped,
)
Kinds = type[Exception] | tuple[type[Exception], ...]


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Retry:
    """At most `max_attempts` attempts (None: endless), with waits of `initial * factor**n`, at most `maximum`.

    `jitter` is the share by which a wait may be shorter or longer (0.1: ±10 %; never past `maximum`). Only errors of `on`, and
    none of `give_up_on`, are tried again. `initial` and `maximum` are durations and are kept in microseconds.
    Raises ConfigurationError for numbers that make no policy, RegistrationError for `on` that names no exception classes.
    """

    max_attempts: int | None
    initial: Micros
    factor: float
    maximum: Micros
    jitter: float
    on: tuple[type[Exception], ...]
    give_up_on: tuple[type[Exception], ...]

    NEVER: ClassVar[Retry]
    """One attempt, whatever happens."""

    def __init__(
        self,
        max_attempts: int | None = 3,
        *,
        initial: Duration = "1s",
        factor: float = 2.0,
        maximum: Duration = "5m",
        jitter: float = 0.1,
        on: Kinds = Exception,
        give_up_on: Kinds = (),
    ) -> None:
        if max_attempts is not None and not (_whole(max_attempts) and max_attempts >= 1):
            raise ConfigurationError(f"Retry: max_attempts {max_attempts!r} is neither a whole number from 1 nor None")
        if not (_number(factor) and 1.0 <= factor < math.inf):
            raise ConfigurationError(f"Retry: factor {factor!r} is not a number from 1")
        if not (_number(jitter) and 0.0 <= jitter <= 1.0):
            raise ConfigurationError(f"Retry: jitter {jitter!r} is not between 0 and 1")
        first, longest = micros(initial, what="Retry: initial"), micros(maximum, what="Retry: maximum")
        if longest < first:
            raise ConfigurationError(f"Retry: maximum {maximum!r} is shorter than initial {initial!r}")
        fields = {
            "max_attempts": max_attempts,
            "initial": first,
            "factor": float(factor),
            "maximum": longest,
            "jitter": float(jitter),
            "on": _kinds("on", on),
            "give_up_on": _kinds("give_up_on", give_up_on),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def decides(self, exc: BaseException, attempt: int) -> bool:
        """True if attempt number `attempt` (from 1), which ended in `exc`, is followed by another one."""
        if self.max_attempts is not None and attempt >= self.max_attempts:
            return False
        if isinstance(exc, self.give_up_on) or not isinstance(exc, self.on):
            return False
        if isinstance(exc, _PERMANENT):
            return any(issubclass(kind, DurableError) and isinstance(exc, kind) for kind in self.on)
        return True

    def delay(self, attempt: int, *, random: float) -> Micros:
        """The wait after attempt number `attempt` (from 1) has failed; `random` is in [0, 1). Never overflows."""
        exponent = max(attempt, 1) - 1
        if self.initial == 0:
            return 0
        # factor**exponent would overflow long before the attempts of an endless policy end: compare the logarithms first
        if exponent * math.log(self.factor) >= math.log(self.maximum / self.initial):
            wait = float(self.maximum)
        else:
            wait = self.initial * self.factor**exponent
        return min(self.maximum, max(0, round(wait * (1.0 + self.jitter * (2.0 * random - 1.0)))))

    def to_json(self) -> str:
        """The numeric part, for a run that carries a policy of its own. The classes stay in the code."""
        numbers = {name: getattr(self, name) for name in ("max_attempts", "initial", "factor", "maximum", "jitter")}
        return json.dumps(numbers, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, like: Retry | None = None) -> Retry:
        """The policy of a stored numeric part, with the classes of `like`. Raises SerializationError for anything else."""
        try:
            raw: dict[str, Any] = json.loads(text)
            return cls(
                raw["max_attempts"],
                initial=raw["initial"] / 1_000_000,
                factor=raw["factor"],
                maximum=raw["maximum"] / 1_000_000,
                jitter=raw["jitter"],
                on=like.on if like else Exception,
                give_up_on=like.give_up_on if like else (),
            )
        except (ValueError, KeyError, TypeError, ConfigurationError) as error:
            raise SerializationError(f"a stored retry policy that is none: {error}") from None


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kinds(name: str, value: Kinds) -> tuple[type[Exception], ...]:
    kinds = value if isinstance(value, tuple) else (value,)
    for kind in kinds:
        candidate: object = kind
        if not (isinstance(candidate, type) and issubclass(candidate, Exception)):
            raise RegistrationError(f"Retry: {name} names {kind!r}, which is not a subclass of Exception")
    return kinds


Retry.NEVER = Retry(1)
