"""The key ring: what it encrypts comes back in its own place only, whatever happened to it meanwhile (semantics 72)."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable import codec, model
from durable.codec import KeyRing, encryption, plain
from durable.codec.encryption import origin_of, origin_of_coalesced, sealed, sealed_size
from durable.encrypted import EncryptedStore
from durable.errors import ConfigurationError, EncryptionError, MissingKey, SerializationError
from durable.protocol import Store

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
RING = KeyRing([OLD])
TENANT = uuid4()


def encrypt(text: str, ring: KeyRing = RING) -> str:
    return ring.encrypt(text, tenant=TENANT, origin="run", field="input")


def decrypt(text: str, ring: KeyRing = RING) -> str:
    return ring.decrypt(text, tenant=TENANT, origins=("run",), field="input")


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_what_is_encrypted_comes_back_and_is_json_text_of_a_known_size(text: str) -> None:
    stored = encrypt(text)
    assert decrypt(stored) == text
    assert sealed(stored)
    assert isinstance(json.loads(stored), str)
    assert stored.isascii()
    assert len(stored) <= sealed_size(len(text.encode()))
    assert len(text) < 8 or text not in stored


def test_the_same_text_is_never_encrypted_to_the_same() -> None:
    assert len({encrypt("text") for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "elsewhere",
    [{"tenant": None}, {"tenant": uuid4()}, {"field": "output"}, {"origins": ("another run",)}, {"origins": ()}],
    ids=["untagged", "another tenant", "another field", "another run", "nowhere"],
)
def test_a_text_that_was_moved_can_not_be_opened_there(elsewhere: dict[str, object]) -> None:
    place: dict[str, object] = {"tenant": TENANT, "origins": ("run",), "field": "input", **elsewhere}
    with pytest.raises(EncryptionError, match=r"moved|another place"):
        RING.decrypt(encrypt("text"), **place)  # type: ignore[arg-type]


def test_a_text_whose_origin_was_rewritten_can_not_be_opened() -> None:
    """An attacker who moves a text to another run would give it that run's id."""
    forged = encrypt("text").replace(":run:", ":other:")
    assert origin_of(forged) == "other"
    with pytest.raises(EncryptionError):
        RING.decrypt(forged, tenant=TENANT, origins=("other",), field="input")


def test_a_text_with_any_character_changed_is_refused_with_a_typed_error() -> None:
    stored = encrypt("text")
    for place in range(len(plain.SEALED), len(stored)):
        changed = f"{stored[:place]}{'A' if stored[place] != 'A' else 'B'}{stored[place + 1 :]}"
        with pytest.raises(EncryptionError):
            decrypt(changed)


def test_a_text_whose_last_character_was_changed_in_bits_that_say_nothing_is_refused_too() -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    for text in ('"t"', '"te"', '"tex"'):  # one of the three leaves no such bits
        stored = RING.encrypt(text, tenant=TENANT, origin="run", field="input")
        body = stored.rstrip('"').rstrip("=")
        changed = body[:-1] + alphabet[alphabet.index(body[-1]) ^ 1] + stored[len(body) :]
        with pytest.raises(EncryptionError):
            decrypt(changed)


@pytest.mark.parametrize("length", range(22, 80, 3))
def test_a_text_that_is_cut_short_is_refused_with_a_typed_error(length: int) -> None:
    with pytest.raises(EncryptionError):
        decrypt(encrypt("text")[:length] + '"')


def test_an_unknown_key_is_a_missing_key_that_is_named() -> None:
    with pytest.raises(MissingKey, match=RING.key_ids[0]) as caught:
        decrypt(encrypt("text"), KeyRing([NEW]))
    assert "DURABLE_ENCRYPTION_KEY" in caught.value.hint
    with pytest.raises(MissingKey):
        decrypt(encrypt("text"), KeyRing())


def test_a_form_of_a_later_version_is_not_taken_for_damage() -> None:
    with pytest.raises(MissingKey, match="form 2") as caught:
        decrypt(encrypt("text").replace("encrypted:1:", "encrypted:2:"))
    assert "upgrade" in caught.value.hint


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    both = KeyRing([NEW, OLD])
    assert decrypt(encrypt("old"), both) == "old"
    assert decrypt(encrypt("new", both), KeyRing([NEW])) == "new"
    with pytest.raises(MissingKey):
        decrypt(encrypt("new", both))


def test_keys_are_bytes_or_base64_text_one_or_several() -> None:
    text = base64.b64encode(OLD).decode()
    safe = base64.urlsafe_b64encode(b"\xfb" * 32).decode()
    assert KeyRing.of(OLD).key_ids == KeyRing.of(text).key_ids == KeyRing.of([f" {text}\n"]).key_ids
    assert KeyRing.of(f"{text}, {safe}").key_ids == KeyRing.of([OLD, b"\xfb" * 32]).key_ids
    assert len(KeyRing.of(f"{text},{safe}").key_ids) == 2


@pytest.mark.parametrize(
    "keys",
    [
        "",
        " ",
        [],
        "sesame open",
        b"short",
        b"",
        "c2hvcnQ=",
        [OLD, OLD],
        [OLD, b"x"],
        [7],
        7,
        {OLD},
        "é" * 32,
        f"{'A' * 43}=,",
    ],
)
def test_what_is_no_key_is_refused_and_never_shown(keys: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KeyRing.of(keys)  # type: ignore[arg-type]
    assert "base64" in caught.value.hint
    for secret in ("sesame", "short", "c2hvcnQ", "AAAA"):
        assert secret not in str(caught.value)


def test_a_ring_is_shown_by_the_ids_of_its_keys() -> None:
    assert re.fullmatch(r"KeyRing\([0-9a-f]{16}\)", repr(RING))
    assert not KeyRing()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    encryption._library.cache_clear()
    try:
        with pytest.raises(ConfigurationError) as caught:
            KeyRing([OLD])
    finally:
        encryption._library.cache_clear()
    assert "durable-sdk[encryption]" in caught.value.hint


@pytest.mark.parametrize("annotation", [codec.UNTYPED, str, str | None, bytes, object])
@pytest.mark.parametrize("error", [EncryptionError("it was changed"), MissingKey("no such key")])
def test_whoever_decodes_an_unopened_payload_gets_the_error_of_its_kind(
    annotation: object, error: EncryptionError
) -> None:
    mark = plain.unreadable(error)
    with pytest.raises(type(error), match=error.message) as caught:
        codec.Codec(1_000).decode(mark, annotation)
    assert type(caught.value) is type(error)
    with pytest.raises(type(error)):
        codec.read_envelope(mark)
    with pytest.raises(MissingKey):
        codec.read_envelope(encrypt("1"))


@pytest.mark.parametrize("annotation", [codec.UNTYPED, str])
@pytest.mark.parametrize("value", ["durable-encrypted:1:x", "durable-unreadable:x"])
def test_a_value_that_looks_like_an_encrypted_one_is_refused(annotation: object, value: str) -> None:
    with pytest.raises(SerializationError, match="marks encrypted payloads"):
        codec.Codec(1_000).encode(value, annotation)
    assert codec.Codec(1_000).encode([value], list[str])


def test_the_origin_of_a_coalesced_input_is_no_id_and_shows_no_key() -> None:
    assert origin_of_coalesced("customer 7").startswith("~")
    assert "customer" not in origin_of_coalesced("customer 7")
    assert origin_of_coalesced("a") != origin_of_coalesced("b")


# -- nothing is forgotten -----------------------------------------------------------------------------------------------------

PLAIN = {
    "NewRun.options",
    "RunRecord.options",
    "RunRecord.waiting_for",
    "Suspended.waiting_for",
    "WorkerRecord.settings",
}
"""JSON that stores or operators read: numbers of a policy, and names of what is waited for."""
ENCRYPTED = {
    "ChildEnd.error_detail",
    "ChildEnd.output",
    "Completed.output",
    "Failure.detail",
    "NewRecord.progress",
    "NewRecord.result",
    "NewRun.input",
    "NewSignal.payload",
    "Pulse.progress",
    "Renewal.progress",
    "RunRecord.error_detail",
    "RunRecord.input",
    "RunRecord.output",
    "RunRecord.progress",
    "Schedule.input",
    "ScheduleSpec.input",
    "Signal.payload",
    "StepRecord.result",
}
CARRIES_NO_PAYLOAD = {
    "audit", "check", "clock", "close", "count", "erase", "mend", "migrate", "notify", "park_schedule", "pause_schedule", "promote",
    "purge", "queues", "register", "remove_schedule", "schema_status", "set_queue", "stats", "sweep", "tenants", "unregister", "wait",
    "workers", "capabilities",
}  # fmt: skip


def test_every_json_field_of_the_vocabulary_is_encrypted_or_plain_for_a_reason() -> None:
    """A new field must be put into one of the two, and with it into `encrypted.py`."""
    found = {
        f"{kind.__name__}.{field.name}"
        for kind in vars(model).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
        if str(field.type).startswith("Json")
    }
    assert found == PLAIN | ENCRYPTED


def test_every_method_of_a_store_that_carries_payloads_goes_through_the_encryption() -> None:
    """What the encrypted store does not name reaches the store within as it is."""
    methods = {name for name in dir(Store) if not name.startswith("_")}
    own = {name for name in vars(EncryptedStore) if not name.startswith("_")}
    assert methods - own - {"settings"} == CARRIES_NO_PAYLOAD
    assert own - methods == set()
