"""The encryption codec: payload texts to sealed texts and back, by AES-256-GCM, under a ring of keys (semantics 72).

`config.py` makes a `KeyRing` of the configured keys; `encrypted.py` uses it between the engine and the store. A sealed text is
itself JSON text, a string, so that it passes through every store unchanged:

    "durable-encrypted:1:{key id}:{origin}:{nonce and ciphertext in base64}"

`origin` is what the text was made for: the id of a run, of a schedule, or the digest of a coalesce key. Tenant, origin and field
are associated data, so a text that was moved to another place can not be opened there. Each origin has a cipher key of its own,
derived from the configured one by HMAC-SHA256: a random nonce of 96 bits is then drawn for a few texts, not for all that a key ever
encrypts. The key id is a digest of the key, so two keys never share one. Nothing here does I/O or knows a store.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import json
import os
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias
from uuid import UUID

from durable.errors import ConfigurationError, EncryptionError, MissingKey

from . import plain

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Keys: TypeAlias = str | bytes | Sequence[str | bytes]
"""One key or several: 32 bytes, or their base64 text; a text may hold several with commas between."""

VERSION: Final = "1"
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
LONGEST_HEADER: Final = 1_024
"""Room for the mark, the key id and the origin."""

_HINT: Final = (
    'make one with: python -c "import base64, os; print(base64.b64encode(os.urandom(32)).decode())";'
    " several are joined by commas, the one that encrypts first"
)


def sealed(text: str | None) -> bool:
    """Whether a stored text is one that a key ring made."""
    return text is not None and text.startswith(plain.SEALED)


def sealed_size(size: int) -> int:
    """The most bytes that a text of `size` bytes has when it is sealed."""
    return LONGEST_HEADER + 4 * ((size + NONCE_BYTES + TAG_BYTES + 2) // 3)


def origin_of_coalesced(coalesce_key: str) -> str:
    """The origin of an input that may take the place of a waiting one (37): who waits is not known when it is encrypted, the key is.

    It begins with `~`, as no id does.
    """
    return f"~{hashlib.sha256(coalesce_key.encode()).hexdigest()[:32]}"


class KeyRing:
    """Keys of AES-256-GCM: the first one encrypts, all of them decrypt (semantics 72).

    To rotate: put the new key behind the old one everywhere, then in front of it, and take the old one out when no text of it is
    left. An empty ring encrypts nothing and opens nothing; it is what a process without a key has. Raises ConfigurationError for a
    key that is none, one given twice, and where the library `cryptography` is missing.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_key_id(key): key for key in keys}
        if len(self._keys) != len(keys):
            raise ConfigurationError("encryption_key: the same key is given twice", hint=_HINT)
        if any(len(key) != KEY_BYTES for key in keys):
            raise ConfigurationError(f"encryption_key: a key has {KEY_BYTES} bytes", hint=_HINT)
        self._first = next(iter(self._keys), None)
        self._cipher = functools.lru_cache(maxsize=1_024)(self._derive)
        if keys:
            _library()

    @classmethod
    def of(cls, keys: Keys, origin: str = "encryption_key") -> KeyRing:
        """The ring of configured keys. Raises ConfigurationError, which never shows a key, for anything that is none."""
        given: object = [keys] if isinstance(keys, str | bytes) else keys
        if not isinstance(given, Sequence):
            raise ConfigurationError(f"{origin}: {type(given).__name__} is no key and no sequence of keys", hint=_HINT)
        read = [part for one in given for part in (one.split(",") if isinstance(one, str) else [one])]
        if not read:
            raise ConfigurationError(f"{origin}: there is no key in it", hint=_HINT)
        return cls([_key(one, origin) for one in read])

    def __bool__(self) -> bool:
        return self._first is not None

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self._keys)})"

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of its keys; the first one encrypts. They may be shown."""
        return tuple(self._keys)

    def encrypt(self, text: str, *, tenant: UUID | None, origin: str, field: str) -> str:
        """The sealed text. Two calls never give the same one."""
        key_id = self._first
        assert key_id is not None, "an empty ring encrypts nothing"
        nonce = os.urandom(NONCE_BYTES)
        known = _associated(key_id, tenant, origin, field)
        secret = self._cipher(key_id, tenant, origin).encrypt(nonce, text.encode(), known)
        return plain.quote(f"{plain.SEALED[1:]}{VERSION}:{key_id}:{origin}:{base64.b64encode(nonce + secret).decode()}")

    def decrypt(self, text: str, *, tenant: UUID | None, origins: Container[str], field: str) -> str:
        """The text that was sealed for this place. Raises MissingKey where its key is not in the ring, EncryptionError for a
        text that was changed, or was made for another tenant, field, or origin than one of `origins`."""
        version, key_id, origin, secret = _parts(text)
        if version != VERSION:
            raise MissingKey(
                f"a payload ({field}) is encrypted in the form {version}, which this version of durable does not know",
                hint="upgrade durable-sdk here to the version that wrote it",
            )
        if key_id not in self._keys:
            raise MissingKey(
                f"a payload ({field}) is encrypted with the key {key_id}, which this process does not have"
            )
        if origin not in origins:
            raise EncryptionError(f"a payload ({field}) was encrypted for {origin} and stands at another place")
        known = _associated(key_id, tenant, origin, field)
        try:
            cipher = self._cipher(key_id, tenant, origin)
            return cipher.decrypt(secret[:NONCE_BYTES], secret[NONCE_BYTES:], known).decode()
        except (_library().InvalidTag, ValueError):  # a ValueError for a text that is cut short
            raise EncryptionError(
                f"a payload ({field}) was changed after it was encrypted, or moved here from another tenant or field"
            ) from None

    def _derive(self, key_id: str, tenant: UUID | None, origin: str) -> AESGCM:
        info = json.dumps(["durable payload 1", None if tenant is None else str(tenant), origin]).encode()
        return _library().AESGCM(hmac.digest(self._keys[key_id], info, "sha256"))


def origin_of(text: str) -> str:
    """What a sealed text was made for, by its own word: `decrypt` proves it. Raises EncryptionError for one that is damaged."""
    return _parts(text)[2]


def _parts(text: str) -> tuple[str, str, str, bytes]:
    """Version, key id, origin, and nonce with ciphertext. An origin may hold colons, the others do not."""
    try:
        _, version, key_id, rest = json.loads(text).split(":", 3)
        origin, _, secret = rest.rpartition(":")
        sealed = base64.b64decode(secret, validate=True)
        if (
            base64.b64encode(sealed).decode() != secret
        ):  # the last character has bits that say nothing: only zeros are ours
            raise ValueError("another spelling of the same bytes")
        return version, key_id, origin, sealed
    except (ValueError, TypeError, binascii.Error):
        raise EncryptionError("an encrypted payload is damaged: it has lost its form") from None


def _associated(key_id: str, tenant: UUID | None, origin: str, field: str) -> bytes:
    return json.dumps([key_id, None if tenant is None else str(tenant), origin, field]).encode()


def _key_id(key: bytes) -> str:
    return hashlib.sha256(b"durable key id 1" + key).hexdigest()[:16]


def _key(given: object, origin: str) -> bytes:
    if isinstance(given, bytes):
        key = given
    elif isinstance(given, str):
        try:
            key = base64.b64decode(given.strip().replace("-", "+").replace("_", "/"), validate=True)
        except (ValueError, binascii.Error):
            raise ConfigurationError(f"{origin}: a key that is not base64 text", hint=_HINT) from None
    else:
        raise ConfigurationError(f"{origin}: a key is base64 text or bytes, not {type(given).__name__}", hint=_HINT)
    if len(key) != KEY_BYTES:
        raise ConfigurationError(f"{origin}: a key has {KEY_BYTES} bytes, this one {len(key)}", hint=_HINT)
    return key


class _Library:
    """What is used of `cryptography`; imported with the first key, since only who encrypts needs it."""

    def __init__(self) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigurationError(
                f"encryption_key: the library cryptography can not be imported: {error}",
                hint="pip install 'durable-sdk[encryption]'",
            ) from error
        self.InvalidTag = InvalidTag
        self.AESGCM = AESGCM


@functools.cache
def _library() -> _Library:
    return _Library()


__all__ = ["KeyRing", "Keys", "origin_of", "origin_of_coalesced", "sealed", "sealed_size"]
