"""bf16 in fewer bits: how elements share scales, and how long codes and scales are. No tier stores them yet.

A block is rows (tokens) of columns (channels). Elements share a scale in groups: runs of one row, or columns over some
rows. Codes stand in the order of the elements. Scales are bf16, in the order of the groups; behind those of INT4 stand
the groups' least values in the same order.

| kind | code | value |
|---|---|---|
| FP8 | e4m3 (448 is the largest) | code x scale |
| INT8 | two's complement, -127 to 127 | code x scale |
| INT4 | 0 to 15, the even element in the low half of a byte | code x scale + least |
"""

from enum import IntEnum
from typing import NamedTuple


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
