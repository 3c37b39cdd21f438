"""Top bytes of elements in fewer bits: what `narrow` stores. docs/format.md has the layout.

An element is rotated left by one bit, which brings exponent (and the start of the mantissa, where the exponent is
shorter) to the top byte and the sign to the bottom: bf16 `seeeeeee emmmmmmm` becomes `eeeeeeee mmmmmmms`. The top bytes
of 256 elements lie around one value. They are stored as distances below a base, in a few bits each; those outside
are stored by position and value.
"""

from typing import Final

STRIP: Final = 256
"""Elements that share a base; a position in a strip is one byte."""
ROWS: Final = 8
ROW: Final = STRIP // ROWS
"""Codes of one bit position lie in bytes of their own: element i is column i % 32 of row i / 32."""
WIDTH_LEAST: Final = 3
WIDTH_MOST: Final = 7
"""Bits of a code. 3 for bf16 and fp32; 6 for fp16 and e5m2, 7 for e4m3, whose top bytes hold mantissa as well."""
WIDER: Final = 128
"""In a strip's second byte: its codes are one bit wider than the block's. The rest is the number of positions."""
UNCODED: Final = 255
"""As a strip's second byte: its top bytes follow as they are."""
ELEMENT_BYTES: Final = (1, 2, 4)


def narrowed_bytes_max(size_bytes: int, element_bytes: int) -> int:
    """Room that `narrow` may need for so many bytes."""
    return size_bytes + 2 * (size_bytes // (element_bytes * STRIP))


def check(element_bytes: int, width: int) -> None:
    """Raise `ValueError` for elements and codes that there are none of."""
    if element_bytes not in ELEMENT_BYTES or not WIDTH_LEAST <= width <= WIDTH_MOST:
        raise ValueError(
            f"elements of {element_bytes} B, codes of {width} bits: must be 1, 2 or 4 B, "
            f"and {WIDTH_LEAST} to {WIDTH_MOST} bits"
        )
