"""The agent's only use of a cipher: AES-256-GCM under the key of one record."""

import time
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstrata_api.units import MIB

_PIECE_BYTES: Final = MIB
"""Sealed at a time: the library holds the interpreter meanwhile, 0.1 ms at 10 GB/s."""


@dataclass(frozen=True, slots=True)
class RecordKey:
    """Key of one record: it seals each of its few parts once, under a nonce that is the part's number."""

    _key: bytes = field(repr=False)

    def seal_small(self, part: int, plain: bytes, bound: bytes) -> bytes:
        """Ciphertext and tag of some bytes; `bound` is authenticated with them."""
        return AESGCM(self._key).encrypt(_nonce(part), plain, bound)

    def open_small(self, part: int, sealed: bytes, bound: bytes) -> bytes | None:
        """What was sealed; None when it, or what it was bound to, is anything else."""
        try:
            return AESGCM(self._key).decrypt(_nonce(part), sealed, bound)
        except InvalidTag:
            return None

    def seal(self, part: int, plain: memoryview, into: memoryview, bound: bytes) -> bytes:
        """Fill `into`, as long as `plain`, with ciphertext; returns the tag. For threads: it lets others run."""
        sealing = Cipher(algorithms.AES256(self._key), modes.GCM(_nonce(part))).encryptor()
        sealing.authenticate_additional_data(bound)
        for at in range(0, len(plain), _PIECE_BYTES):
            if at:
                time.sleep(0)
            sealing.update_into(plain[at : at + _PIECE_BYTES], into[at : at + _PIECE_BYTES])
        sealing.finalize()
        return sealing.tag

    def open(self, part: int, sealed: memoryview, into: memoryview, bound: bytes, tag: bytes) -> bool:
        """Fill `into` with what was sealed; False, and zeros, when it, or what it was bound to, is anything else."""
        opening = Cipher(algorithms.AES256(self._key), modes.GCM(_nonce(part))).decryptor()
        opening.authenticate_additional_data(bound)
        for at in range(0, len(sealed), _PIECE_BYTES):
            if at:
                time.sleep(0)
            opening.update_into(sealed[at : at + _PIECE_BYTES], into[at : at + _PIECE_BYTES])
        try:
            opening.finalize_with_tag(tag)
        except InvalidTag:
            into[:] = bytes(len(into))  # Another record of the scope may have been there, in the clear by now.
            return False
        return True


def _nonce(part: int) -> bytes:
    return part.to_bytes(12, "big")
