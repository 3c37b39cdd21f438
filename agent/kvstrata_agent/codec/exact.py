"""The exact codecs: floating-point KV with its top bytes in fewer bits (`packed`), and the block as it is (`raw`).

Stored form of `packed`, little-endian: `version u8 | element bytes u8 | bits of a code u8 | zero (5 B) | raw bytes
u64`, then what `kvstrata_native.narrow` makes (docs/format.md).
"""

import struct
from typing import Final

from kvstrata_agent.codec.base import RAW, Encoded, Shape
from kvstrata_api.errors import BlockCorruptError
from kvstrata_native import copy, narrow, widen, width_of
from kvstrata_native.forms import ELEMENT_BYTES, WIDTH_LEAST, WIDTH_MOST

NAME: Final = "packed"

_HEADER: Final = struct.Struct("<BBB5sQ")
_VERSION: Final = 1
_ZERO: Final = bytes(5)


class PackedCodec:
    """Exponent packing of elements of 1, 2 and 4 bytes; others count as bytes. A `Codec` and its `Decoder`."""

    name = NAME

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:
        """Stored form, at most 1/128 and 16 B longer than `raw`."""
        element_bytes = shape.element_bytes if shape.element_bytes in ELEMENT_BYTES else 1
        width = width_of(raw, element_bytes)
        _HEADER.pack_into(into, 0, _VERSION, element_bytes, width, _ZERO, len(raw))
        with into[_HEADER.size :] as body:
            return Encoded(NAME, _HEADER.size + narrow(body, raw, element_bytes, width))

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Fill `into`, of exactly the raw size. Raises `BlockCorruptError` on stored bytes that do not fit."""
        element_bytes, width = _parse(stored, len(into))
        with stored[_HEADER.size :] as body:
            if not widen(into, body, element_bytes, width):
                raise BlockCorruptError(f"packed block of {len(stored)} B: strips do not fit {len(into)} B")


def _parse(stored: memoryview, raw_bytes: int) -> tuple[int, int]:
    """Element bytes and width of a stored form."""
    if len(stored) < _HEADER.size:
        raise BlockCorruptError(f"packed block of {len(stored)} B is shorter than its header")
    version, element_bytes, width, zero, size_bytes = _HEADER.unpack_from(stored)
    is_form = version == _VERSION and element_bytes in ELEMENT_BYTES and WIDTH_LEAST <= width <= WIDTH_MOST
    if not is_form or zero != _ZERO or size_bytes != raw_bytes:
        raise BlockCorruptError(
            f"packed block: version {version}, elements of {element_bytes} B, codes of {width} bits, "
            f"{size_bytes} B raw, {raw_bytes} B wanted"
        )
    return element_bytes, width


class RawCodec:
    """Identity. A `Codec` and its `Decoder`."""

    name = RAW

    def encode(self, raw: memoryview, shape: Shape, into: memoryview) -> Encoded:  # noqa: ARG002 - the contract's.
        """Copy `raw`."""
        with into[: len(raw)] as filled:
            copy(filled, raw)
        return Encoded(RAW, len(raw))

    def decode(self, stored: memoryview, into: memoryview) -> None:
        """Copy back. Raises `BlockCorruptError` when the sizes differ."""
        if len(stored) != len(into):
            raise BlockCorruptError(f"raw block of {len(stored)} B, {len(into)} B wanted")
        copy(into, stored)
