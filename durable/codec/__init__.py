"""Values to JSON text and back, by annotation; errors as data; the envelope of a journal record.

The function and context modules encode arguments and results here, the engine writes envelopes, the client and the handles
decode. One encoder serves every store (semantics 22, 23, 70-72):

- `plain.py` writes the JSON text itself, in one form that every store gives back unchanged;
- `typed.py` brings an annotation (through pydantic) to what `plain.py` can write, and proves that it comes back;
- `payload.py` is the `Codec` (the size limit), the digest of a call and the envelope of a record;
- `signature.py` does it for the arguments of a callable;
- `failures.py` makes errors data, and data errors;
- `encryption.py` is the key ring that encrypts payload texts.

Nothing here does I/O, keeps a value it was given, or ever loads code named by stored bytes: no pickle, no import by name.
"""

from .encryption import KeyRing, Keys
from .failures import ErrorData, error, error_data, rebuild
from .payload import Codec, digest, error_envelope, open_envelope, read_envelope, value_envelope
from .signature import Signature, lasting
from .typed import UNTYPED

__all__ = [
    "UNTYPED",
    "Codec",
    "ErrorData",
    "KeyRing",
    "Keys",
    "Signature",
    "digest",
    "error",
    "error_data",
    "error_envelope",
    "lasting",
    "open_envelope",
    "read_envelope",
    "rebuild",
    "value_envelope",
]
