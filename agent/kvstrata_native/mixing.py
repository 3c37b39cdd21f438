"""Blocks whose planes are stored in different forms: what `mix` stores.

A plane is the K or the V of one head of one layer: rows (tokens) of columns (channels) in bf16. Its rung says how it is
stored; those further up the ladder take more bytes and lose less, mostly. A head of four bytes for each plane gives
rung and length; bodies follow, each padded to an even length: scales and then codes of a packing, what `narrow` makes,
or the plane.
"""

from enum import IntEnum
from typing import Final, NamedTuple

from kvstrata_native.packing import Kind, Packing
from kvstrata_native.tops import STRIP

HEAD_BYTES: Final = 4
PLANE_BYTES_MAX: Final = 0xFFFF00
"""Of one plane; its length has to fit into three bytes."""


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
RUN_MOST: Final = 1024
"""Columns of a plane that is rotated, at most."""
_RUN_LEAST: Final = 16
"""Elements of the kernels' widest vectors."""


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
    """Relative error that a plane may have, ||x - x'|| / ||x||; of no meaning to `unmix`."""
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
