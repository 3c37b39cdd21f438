"""Which libraries programs and libraries ask for. Pure: bytes in, names out."""

import struct
from collections.abc import Iterable
from typing import Final

_DYNAMIC: Final = 2
_LOAD: Final = 1
_NEEDED: Final = 1
_STRINGS: Final = 5


def needed(content: bytes) -> tuple[str, ...]:
    """Names of the shared libraries that a 64-bit little-endian ELF file asks for; none for anything else."""
    if content[:6] != b"\x7fELF\x02\x01":
        return ()
    (at,) = struct.unpack_from("<Q", content, 32)
    size_bytes, count = struct.unpack_from("<HH", content, 54)
    segments = [struct.unpack_from("<IIQQQQ", content, at + i * size_bytes) for i in range(count)]
    loads = [(address, offset, length) for kind, _, offset, address, _, length in segments if kind == _LOAD]
    for kind, _, offset, _, _, length in segments:
        if kind == _DYNAMIC:
            return _names(content, struct.iter_unpack("<qQ", content[offset : offset + length // 16 * 16]), loads)
    return ()


def _names(content: bytes, entries: Iterable[tuple[int, ...]], loads: list[tuple[int, int, int]]) -> tuple[str, ...]:
    listed = list(entries)
    address = next((value for tag, value in listed if tag == _STRINGS), None)
    base = next((o + address - a for a, o, n in loads if address is not None and a <= address < a + n), None)
    if base is None:
        return ()
    starts = [base + value for tag, value in listed if tag == _NEEDED]
    return tuple(content[start : content.index(b"\0", start)].decode() for start in starts)
