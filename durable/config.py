"""Where the store is and how it is opened: arguments over the environment over a file over defaults.

`Client` and the command line ask `resolve`, then `open_store`. The environment: `DURABLE_URL`, `DURABLE_SCHEMA`,
`DURABLE_AUTO_MIGRATE`, `DURABLE_ENCRYPTION_KEY` and `DURABLE_<SETTING>` for each name of `settings.Settings`. The file:
`durable.toml` in the working directory or the nearest one above it, else `[tool.durable]` of the nearest `pyproject.toml`. Without
any of them the store is `sqlite:///durable.db` in the working directory: a file that stays, so that a newcomer's runs survive the
process.

The backend is found by the URL's scheme among the entry points `durable.backends`, first those of this package; nothing here imports
one by name. A password never appears in an error or a log, nor does a key; keys are not read from a file, which people commit.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from .codec import KeyRing, Keys
from .encrypted import EncryptedStore, room_for
from .errors import ConfigurationError
from .model import Instant, Names
from .protocol import Backend, Store
from .settings import Settings

DEFAULT_URL: Final = "sqlite:///durable.db"
DISTRIBUTION: Final = "durable-sdk"
ENTRY_POINTS: Final = "durable.backends"
_PREFIX: Final = "DURABLE_"
_SCHEMES: Final = {"postgres": "postgresql", "sqlite3": "sqlite", "mongodb+srv": "mongodb"}
_EXTRAS: Final = {"postgresql": "postgres", "mongodb": "mongo"}
_FILE_KEYS: Final = frozenset({"url", "schema", "tables", "auto_migrate", "settings"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How to open a store."""

    url: str
    settings: Settings
    names: Names
    auto_migrate: bool | None
    ring: KeyRing
    """The keys of the payloads (72)."""
    origin: str
    """Where the URL came from, for messages."""

    def __repr__(self) -> str:
        return f"Config(url={redacted(self.url)!r}, from {self.origin})"


def redacted(url: str) -> str:
    """The URL without its password: for messages, logs and listings."""
    try:
        parts = urllib.parse.urlsplit(url)
        password = parts.password
    except ValueError:
        return "<a URL that can not be read>"
    query = "&".join(
        f"{name}=***" if "password" in name.lower() or "secret" in name.lower() else part
        for part in parts.query.split("&")
        for name in [part.partition("=")[0]]
    )
    place = parts.netloc
    if password is not None:
        user, _, host = place.rpartition("@")
        place = f"{user.partition(':')[0]}:***@{host}"
    shown = urllib.parse.urlunsplit((parts.scheme, place, parts.path, query, ""))
    # urlunsplit drops the empty authority of sqlite:///file
    return url if not query and place == parts.netloc and not parts.fragment else shown


def resolve(
    url: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    schema: str | None = None,
    tables: Mapping[str, str] | None = None,
    auto_migrate: bool | None = None,
    encryption_key: Keys | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Config:
    """What applies. Raises ConfigurationError for what can not work, naming where it stands."""
    environment = os.environ if environment is None else environment
    written, place = _file(Path.cwd() if directory is None else directory)
    overrides: dict[str, Any] = dict(_section(written, "settings", place))
    overrides.update(_settings_of(environment))
    overrides.update(settings or {})
    origin = "the argument url"
    if url is None and (found := environment.get(_PREFIX + "URL")):
        url, origin = found, f"the environment variable {_PREFIX}URL"
    if url is None and "url" in written:
        url, origin = written["url"], place
    if url is None:
        url, origin = DEFAULT_URL, "the default"
    candidate: object = url
    if not isinstance(candidate, str) or not urllib.parse.urlsplit(candidate.partition("?")[0]).scheme:
        raise ConfigurationError(
            f"{origin}: {redacted(str(candidate))!r} is not a URL", hint=f"such as {DEFAULT_URL} or sqlite:///:memory:"
        )
    if schema is None:
        schema = environment.get(_PREFIX + "SCHEMA") or written.get("schema")
    if auto_migrate is None:
        auto_migrate = _flag(environment.get(_PREFIX + "AUTO_MIGRATE"), written.get("auto_migrate"), place)
    return Config(
        url=url,
        settings=Settings.of(overrides),
        names=Names(schema=schema, tables=dict(tables if tables is not None else _section(written, "tables", place))),
        auto_migrate=auto_migrate,
        ring=_ring(encryption_key, environment),
        origin=origin,
    )


def backend_for(url: str) -> Backend:
    """The backend of a URL's scheme. Raises ConfigurationError that says what to install."""
    scheme = urllib.parse.urlsplit(url.partition("?")[0]).scheme
    scheme = _SCHEMES.get(scheme, scheme)
    found = _own_backends()
    if scheme not in found:
        found |= {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    entry = found.get(scheme)
    if entry is None:
        extra = _EXTRAS.get(scheme)
        hint = (
            f"pip install 'durable-sdk[{extra}]'"
            if extra is not None
            else "installed: "
            + (", ".join(sorted(found)) or "none; install the package itself: pip install durable-sdk")
        )
        raise ConfigurationError(f"there is no backend for {scheme!r} URLs ({redacted(url)})", hint=hint)
    try:
        backend = entry.load()
    except ImportError as error:
        extra = _EXTRAS.get(scheme, scheme)
        raise ConfigurationError(
            f"the backend for {scheme!r} URLs can not be imported: {error}", hint=f"pip install 'durable-sdk[{extra}]'"
        ) from error
    if not isinstance(backend, Backend):
        raise ConfigurationError(f"the entry point {entry.value!r} is not a backend: it lacks open() or schema()")
    return backend


def _own_backends() -> dict[str, importlib.metadata.EntryPoint]:
    """Those of this distribution. To look through all that are installed takes longer than to connect."""
    try:
        own = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {entry.name: entry for entry in own.entry_points if entry.group == ENTRY_POINTS}


async def open_store(config: Config, *, clock: Callable[[], Instant] | None = None) -> Store:
    """Open what was resolved. Raises ConfigurationError, StoreUnavailable or SchemaMismatch."""
    backend = backend_for(config.url)
    store = await backend.open(
        config.url,
        settings=room_for(config.settings) if config.ring else config.settings,
        names=config.names,
        auto_migrate=config.auto_migrate,
        clock=clock,
    )
    return cast(Store, EncryptedStore(store, config.ring, config.settings))


# -- reading ------------------------------------------------------------------------------------------------------------------


def _file(start: Path) -> tuple[Mapping[str, Any], str]:
    """The settings of the nearest file, and its name for messages. An unreadable file is an error, never skipped."""
    start = start.resolve()
    for directory in (start, *start.parents):
        own = directory / "durable.toml"
        if own.is_file():
            return _checked(_read(own), str(own))
        project = directory / "pyproject.toml"
        if project.is_file():
            tool = _read(project).get("tool", {})
            if "durable" in tool:
                return _checked(tool["durable"], f"{project} [tool.durable]")
    return {}, "no file"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path} can not be read: {error}") from error


def _checked(written: object, place: str) -> tuple[Mapping[str, Any], str]:
    table = _table(written, place)
    unknown = sorted(set(table) - _FILE_KEYS)
    if unknown:
        raise ConfigurationError(
            f"{place}: unknown {', '.join(unknown)}", hint="known: " + ", ".join(sorted(_FILE_KEYS))
        )
    return table, place


def _section(written: Mapping[str, Any], name: str, place: str) -> Mapping[str, Any]:
    return _table(written.get(name, {}), f"{place}: {name}")


def _table(written: object, place: str) -> Mapping[str, Any]:
    if not isinstance(written, dict):
        raise ConfigurationError(f"{place} is not a table")
    return cast("dict[str, Any]", written)


def _ring(given: Keys | None, environment: Mapping[str, str]) -> KeyRing:
    """A variable that is set and empty is refused: a secret that did not arrive must not mean payloads in plain text."""
    if given is not None:
        return KeyRing.of(given)
    text = environment.get(_PREFIX + "ENCRYPTION_KEY")
    return KeyRing() if text is None else KeyRing.of(text, _PREFIX + "ENCRYPTION_KEY")


def _settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """`DURABLE_LEASE=10s`. Names that are no setting are left alone: the prefix is not ours alone."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        text = environment.get(_PREFIX + field.name.upper())
        if text:
            found[field.name] = text if field.type == "Micros" else _whole(text, _PREFIX + field.name.upper())
            if field.type == "Micros" and text.replace(".", "", 1).isdigit():
                found[field.name] = float(text)  # plain seconds
    return found


def _whole(text: str, name: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ConfigurationError(f"{name}: {text!r} is not a whole number") from None


def _flag(text: str | None, written: object, place: str) -> bool | None:
    if text:
        if text.lower() not in ("0", "1", "true", "false", "yes", "no"):
            raise ConfigurationError(f"{_PREFIX}AUTO_MIGRATE: {text!r} is neither true nor false")
        return text.lower() in ("1", "true", "yes")
    if written is None or isinstance(written, bool):
        return written
    raise ConfigurationError(f"{place}: auto_migrate is neither true nor false")


__all__ = ["DEFAULT_URL", "Config", "backend_for", "open_store", "redacted", "resolve"]
