"""Forms of stored bytes, as the kernels write and read them. docs/format.md has the layouts. Pure.

**Narrowed**: top bytes of elements in fewer bits. An element is rotated left by one bit, which brings exponent (and the
start of the mantissa, where the exponent is shorter) to the top byte and the sign to the bottom: bf16
`seeeeeee emmmmmmm` becomes `eeeeeeee mmmmmmms`. The top bytes of 256 elements lie around one value. They are stored as
distances below a base, in a few bits each; those outside are stored by position and value.

**Packed**: bf16 in fewer bits. A block is rows (tokens) of columns (channels). Elements share a scale in groups: runs
of one row, or columns over some rows. Codes stand in the order of the elements. Scales are bf16, in the order of the
groups; behind those of INT4 stand the groups' least values in the same order.

| kind | code | value |
|---|---|---|
| FP8 | e4m3 (448 is the largest) | code x scale |
| INT8 | two's complement, -127 to 127 | code x scale |
| INT4 | 0 to 15, the even element in the low half of a byte | code x scale + least |

**Mixed**: blocks whose planes are stored in different forms. A plane is the K or the V of one head of one layer: rows
of columns in bf16. Its rung is its form; those further up the ladder take more bytes and lose less, mostly. A head of
four bytes for each plane gives rung and length; bodies follow, each padded to an even length: scales and then codes of
a packing, what `narrow` makes, or the plane. What `mix` says of a plane's error is never less than it is, and at most
`ERROR_ABOVE` more: where bounds tell whether it is permitted, it is not measured to the end.
"""

from enum import IntEnum
from mmap import mmap
from typing import Any, Final, NamedTuple, TypeAlias

import numpy.typing as npt

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap | npt.NDArray[Any]
"""What kernels read and fill: contiguous memory, of which they see the bytes."""

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

ERROR_ABOVE: Final = 0.008
"""What a stated error may lie above the plane's, times 1 + the error: twice the most that rounding to bf16 moves."""

HEAD_BYTES: Final = 4
PLANE_BYTES_MAX: Final = 0xFFFF00
"""Of one plane; its length has to fit into three bytes."""
RUN_MOST: Final = 1024
"""Columns of a plane that is rotated, at most."""
_RUN_LEAST: Final = 16
"""Elements of the kernels' widest vectors."""


def narrowed_bytes_max(size_bytes: int, element_bytes: int) -> int:
    """Room that `narrow` may need for so many bytes."""
    return size_bytes + 2 * (size_bytes // (element_bytes * STRIP))


def check_narrowing(element_bytes: int, width: int) -> None:
    """Raise `ValueError` for elements and codes that there are none of."""
    if element_bytes not in ELEMENT_BYTES or not WIDTH_LEAST <= width <= WIDTH_MOST:
        raise ValueError(
            f"elements of {element_bytes} B, codes of {width} bits: must be 1, 2 or 4 B, "
            f"and {WIDTH_LEAST} to {WIDTH_MOST} bits"
        )


class Kind(IntEnum):
    """What a code is; the numbers are those of the kernels."""

    FP8 = 0
    INT8 = 1
    INT4 = 2


class Packing(NamedTuple):
    """One way to pack, as the kernels take it; they refuse one that is none."""

    kind: Kind
    columns: int
    """Elements of a row."""
    group: int
    """Elements that share a scale. In a row it divides the columns; the last group of a column may have fewer."""
    is_by_column: bool
    """Groups lie in columns (for keys, whose channels differ) and not in rows (for values)."""

    def codes_bytes(self, rows: int) -> int:
        """Bytes of the codes of so many rows."""
        return rows * self.columns // self.per_byte

    def scales_bytes(self, rows: int) -> int:
        """Bytes of the scales of so many rows."""
        return 2 * self.per_byte * self.groups(rows)

    def groups(self, rows: int) -> int:
        """Groups in so many rows."""
        return -(-rows // self.group) * self.columns if self.is_by_column else rows * self.columns // self.group

    @property
    def per_byte(self) -> int:
        """Codes in a byte, and numbers that a group has."""
        return 2 if self.kind == Kind.INT4 else 1

    @property
    def is_sound(self) -> bool:
        """Groups are whole, and so are the bytes of codes: those of INT4 come in pairs of one row or group."""
        if min(self.columns, self.group) <= 0:
            return False
        run = self.columns if self.is_by_column else self.group
        return run % self.per_byte == 0 and (self.is_by_column or self.columns % self.group == 0)


class Rung(IntEnum):
    """How a plane is stored. The numbers stand in records."""

    INT4_ROW = 0
    """A scale for each token."""
    INT4_COLUMN = 1
    """A scale for each channel, for keys: some of their channels are much larger than others."""
    FP8_ROW = 2
    INT8_ROW = 3
    INT8_COLUMN = 4
    EXACT = 5
    """Exponents in fewer bits."""
    AS_IT_IS = 6
    ROTATED_4 = 7
    """Channels are mixed; then a scale for each token, and 4 bits a code: a few large channels cost others little."""
    ROTATED_5 = 8
    ROTATED_6 = 9
    ROTATED_8 = 10


LADDER: Final = (
    Rung.INT4_ROW, Rung.ROTATED_4, Rung.ROTATED_5, Rung.INT4_COLUMN, Rung.ROTATED_6, Rung.INT8_ROW, Rung.FP8_ROW,
    Rung.ROTATED_8, Rung.INT8_COLUMN, Rung.EXACT, Rung.AS_IT_IS,
)  # fmt: skip
"""What is tried, in this order: of forms as long, the faster one first."""
ROTATED: Final = frozenset({Rung.ROTATED_4, Rung.ROTATED_5, Rung.ROTATED_6, Rung.ROTATED_8})
"""Left out unless a mixing asks for them."""
_KINDS: Final = (Kind.INT4, Kind.INT4, Kind.FP8, Kind.INT8, Kind.INT8)
_ROTATED_BITS: Final = {Rung.ROTATED_4: 4, Rung.ROTATED_5: 5, Rung.ROTATED_6: 6, Rung.ROTATED_8: 8}


class Rotation(NamedTuple):
    """Rows of runs that are mixed by a Hadamard matrix, in codes of some bits.

    Scales (bf16, one for each row) come first, then the rows' least values, then codes: bytes where they have 8 bits,
    else their low halves as those of INT4 and, for each further bit, a plane of one bit for each element, the first
    in the lowest bit of its byte. A value is H (code x scale + least) / run.
    """

    bits: int
    rows: int
    columns: int
    run: int
    """Channels that are mixed: the largest power of two that divides the columns."""

    @property
    def size_bytes(self) -> int:
        """Length of a plane."""
        return 4 * self.rows + self.rows * self.columns * self.bits // 8


class Mixing(NamedTuple):
    """The planes of a block, as the kernels take them; they refuse a block that has none such."""

    planes: int
    rows: int
    columns: int
    width: int
    """Bits of a code of exact planes, see `width_of`."""
    limit: float = 0.0
    """Relative error that a plane may have, ||x - x'|| / ||x||; of no meaning to `unmix`. With `inf` any, measured."""
    is_rotated: bool = False
    """Rotated planes are tried as well: shorter, and several times as long in the making. Of no meaning to `unmix`."""

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane."""
        return 2 * self.rows * self.columns

    @property
    def is_sound(self) -> bool:
        """There are planes, of whole pairs of codes, whose lengths fit into heads."""
        return min(self[:3]) > 0 and self.columns % 2 == 0 and self.plane_bytes <= PLANE_BYTES_MAX

    def rotation(self, rung: Rung) -> Rotation | None:
        """Rotation of a rung; None for rungs and columns that have none."""
        run = self.columns & -self.columns
        if rung not in _ROTATED_BITS or run < _RUN_LEAST or self.columns > RUN_MOST:
            return None
        return Rotation(_ROTATED_BITS[rung], self.rows, self.columns, run)

    def packing(self, rung: Rung) -> Packing:
        """Packing of a rung below `EXACT`."""
        is_by_column = rung in {Rung.INT4_COLUMN, Rung.INT8_COLUMN}
        return Packing(_KINDS[rung], self.columns, self.rows if is_by_column else self.columns, is_by_column)

    def packed_bytes(self, rung: Rung) -> int:
        """Length of a plane on a rung below `EXACT`."""
        packing = self.packing(rung)
        return packing.scales_bytes(self.rows) + packing.codes_bytes(self.rows)

    def room_bytes(self) -> int:
        """Room that `mix` may need."""
        return (HEAD_BYTES + self.plane_bytes) * self.planes + self.plane_bytes // STRIP
