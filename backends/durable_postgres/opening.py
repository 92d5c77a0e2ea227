"""From a URL to how connections are made: what belongs to libpq goes there, what belongs to this backend is taken out and checked.

`__init__.py` calls `read`. Beside everything that libpq knows (`sslmode`, `connect_timeout`, several hosts, …) a URL may have:

- `pool_size`: connections of this process at the most (default: transaction slots + 6; less is refused, semantics 68);
- `prepare=off`: no prepared statements, for a PgBouncer older than 1.21 in transaction mode;
- `listen=off`: no LISTEN; waiting falls back to polling (67);
- `direct_url`: percent-encoded; a way around a pooler, for LISTEN and for migrations.

Nothing here connects.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from typing import Any, Final

import psycopg
from psycopg import conninfo

from durable.errors import ConfigurationError
from durable.settings import Settings

SPARE: Final = 6
"""Connections beside those of `ctx.transaction`: claim, append, settle, renewal, chores, and one to spare (68)."""
OWN: Final = frozenset({"pool_size", "prepare", "listen", "direct_url"})
# A peer that vanishes without a word is noticed in some 20 s: well within a lease.
DEFAULTS: Final[dict[str, Any]] = {
    "application_name": "durable",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
    "tcp_user_timeout": 20_000,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """How to connect."""

    conninfo: str
    direct: str
    """Past a pooler, where the URL names such a way."""
    pool_size: int
    prepare: bool
    listen: bool
    place: str
    """Host, port and database for messages: no user, no password."""


def read(url: str, settings: Settings) -> Address:
    """What the URL says. Raises ConfigurationError, never with a password in it."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise ConfigurationError(f"{parts.scheme!r} is not PostgreSQL's scheme", hint="postgresql://user@host/database")
    own: dict[str, str] = {}
    others: list[str] = []
    for pair in parts.query.split("&") if parts.query else ():
        name, _, value = pair.partition("=")
        if name in OWN:
            own[name] = urllib.parse.unquote(value)
        else:
            others.append(pair)
    plain = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path, "&".join(others), parts.fragment))
    direct = own.get("direct_url")
    least = settings.transaction_slots + SPARE
    size = _size(own.get("pool_size"), least)
    if size < least:
        raise ConfigurationError(
            f"pool_size={size} is too small: {settings.transaction_slots} transaction slots and {SPARE} more make {least}",
            hint=f"add pool_size={least} to the URL, or lower the setting transaction_slots",
        )
    text, place = _complete(plain, "the URL")
    return Address(
        conninfo=text,
        direct=text if direct is None else _complete(direct, "direct_url")[0],
        pool_size=size,
        prepare=_switch(own, "prepare"),
        listen=_switch(own, "listen"),
        place=place,
    )


def _size(text: str | None, least: int) -> int:
    if text is None:
        return least
    if not text.isascii() or not text.isdigit():
        raise ConfigurationError(f"pool_size={text!r} is not a number", hint=f"such as pool_size={least}")
    return int(text)


def _switch(own: dict[str, str], name: str) -> bool:
    value = own.get(name, "on")
    if value not in ("on", "off"):
        raise ConfigurationError(f"{name}={value!r} is neither on nor off")
    return value == "on"


def _complete(url: str, what: str) -> tuple[str, str]:
    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # its message repeats the URL, password included
        raise ConfigurationError(
            f"{what} has a part that libpq does not know or can not read",
            hint="postgresql://user:password@host:5432/database",
        ) from None
    defaults = {name: value for name, value in DEFAULTS.items() if name not in given}
    place = f"{given.get('host', 'the local socket')}:{given.get('port', 5432)}/{given.get('dbname', '')}"
    return conninfo.make_conninfo(url, **defaults), place


__all__ = ["Address", "read"]
