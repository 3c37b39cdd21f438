"""Writes the form `lossless` as agents up to 0.1 did: nobody writes it any more, and everybody has to read it."""

import struct

import numpy as np
import zstandard

_WORDS = {2: "<u2", 4: "<u4"}


def lossless_form(raw: bytes, element_bytes: int) -> bytes:
    """Stored form of a block."""
    flat = np.frombuffer(raw, np.uint8)
    if element_bytes in _WORDS and flat.size and flat.size % element_bytes == 0:
        words = flat.view(_WORDS[element_bytes])
        turned = (words << 1 | words >> (8 * element_bytes - 1)).view(np.uint8).reshape(-1, element_bytes)
        top, rest = turned[:, -1].tobytes(), turned[:, :-1].tobytes()
    else:
        element_bytes, top, rest = 1, raw, b""
    coded = zstandard.ZstdCompressor(level=1).compress(top)
    if len(coded) >= len(top):
        return struct.pack("<BBHIQ", 1, 0, 0, 0, len(raw)) + raw
    return struct.pack("<BBHIQ", 1, element_bytes, 0, len(coded), len(raw)) + coded + rest
