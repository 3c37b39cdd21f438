"""Data keys of trust scopes, wrapped by the fleet's key-encryption keys (KEK): AES key wrap, RFC 3394. Pure.

A KEK Secret, or a file from a vault, holds one or several KEKs by number: `k<n>`, 32 bytes each. The highest wraps; all
unwrap. A wrapped data key is the text `k<n>:<base64>`, so that everybody sees which KEK is still needed.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from kvstrata_api.errors import InvalidInputError

DATA_KEY_BYTES: Final = 32
"""AES-256."""

KEK_BYTES: Final = 32
DATA_SUFFIX: Final = ".data"
"""Entry `v<n>.data` of a scope Secret is the wrapped data key of key version n."""

_NAME: Final = re.compile(r"k([1-9][0-9]{0,8})")


def data_entry(version: str) -> str:
    """Name the entry with the wrapped data key of a key version such as `v1`."""
    return version + DATA_SUFFIX


@dataclass(frozen=True, slots=True)
class Keks:
    """The key-encryption keys of a fleet by number; may be none."""

    keys: Mapping[int, bytes] = field(default_factory=dict, repr=False)

    @property
    def newest(self) -> int:
        """Number of the one that wraps; 0 when there is none."""
        return max(self.keys, default=0)

    def wrap(self, data_key: bytes | bytearray) -> str:
        """Wrap a data key with the newest KEK, which must exist."""
        assert len(data_key) == DATA_KEY_BYTES, "data keys have 32 bytes"
        wrapped = aes_key_wrap(self.keys[self.newest], bytes(data_key))
        return f"k{self.newest}:{base64.b64encode(wrapped).decode()}"

    def unwrap(self, wrapped: str) -> bytes | None:
        """Return a data key; None when its KEK is not among these, or is another one of the same number."""
        kek = self.keys.get(wrapped_by(wrapped))
        if kek is None:
            return None
        try:
            data_key = aes_key_unwrap(kek, base64.b64decode(wrapped.partition(":")[2], validate=True))
        except (InvalidUnwrap, binascii.Error, ValueError):
            return None
        return data_key if len(data_key) == DATA_KEY_BYTES else None


def wrapped_by(wrapped: str) -> int:
    """Return the number of the KEK that a data key is wrapped by; 0 for what is no wrapped key."""
    found = _NAME.fullmatch(wrapped.partition(":")[0])
    return int(found[1]) if found else 0


def keks_of_entries(entries: Mapping[str, bytes]) -> Keks:
    """Read the entries of a KEK Secret. Raises `InvalidInputError` for an entry that is no KEK."""
    keys: dict[int, bytes] = {}
    for name, key in entries.items():
        number = _NAME.fullmatch(name)
        if number is None or len(key) != KEK_BYTES:
            raise InvalidInputError(f"KEK entry {name!r} of {len(key)} B: k<n> of {KEK_BYTES} B is wanted")
        keys[int(number[1])] = key
    return Keks(keys)


def keks_of_text(text: str) -> Keks:
    """Read a KEK file: one line `k<n>:<base64 of 32 bytes>` each. Raises `InvalidInputError` for any other line."""
    return keks_of_entries(dict(_entries(line.strip() for line in text.splitlines())))


def _entries(lines: Iterable[str]) -> Iterable[tuple[str, bytes]]:
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        name, _, encoded = line.partition(":")
        try:
            yield name.strip(), base64.b64decode(encoded.strip(), validate=True)
        except ValueError:  # Of which `binascii.Error` is one, and what is not ASCII another.
            raise InvalidInputError(f"KEK file, line {number}: k<n>:<base64 of {KEK_BYTES} B> is wanted") from None
