"""Blocks of an earlier run as `Columns` of records: a million of them are entered in a second or two. Pure."""

import struct
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata_agent.backends.base import CODEC_BYTES_MAX, Columns, Record, SlotRef
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES
from kvstrata_api.checksum import CHECKSUM_BYTES

_COMMON: Final = ("epoch", "raw_bytes", "layout_id", "parent_length", "codec_length", "codec")
"""Fields of a record that many share: its kind."""
_FEW: Final = 16
"""Up to so many kinds of an extent are distinguished one by one, which takes a tenth of sorting."""


def fields_of(codec_bytes_max: int) -> np.dtype[np.void]:
    """Fields of a record whose medium has room for so long a name of its codec."""
    return np.dtype(
        [
            ("check", ">u8"), ("stamp", "<u8"), ("epoch", "<u8"), ("raw_bytes", "<u8"), ("stored_bytes", "<u8"),
            ("checksum", "u1", CHECKSUM_BYTES), ("layout_id", "u1", LAYOUT_ID_BYTES), ("digest", "u1", KEY_BYTES),
            ("parent", "u1", KEY_BYTES), ("parent_length", "u1"), ("codec_length", "u1"),
            ("codec", "u1", codec_bytes_max),
        ]
    )  # fmt: skip


def alike(records: NDArray[np.void]) -> tuple[list[int], NDArray[np.intp]]:
    """Position of a first record of each kind, and the kind of each record."""
    common = np.concatenate([_bytes_of(records, name) for name in _COMMON], axis=1)
    common = common.view(f"V{common.shape[1]}")[:, 0]
    firsts: list[int] = []
    of = np.full(len(records), -1, np.intp)
    while (of < 0).any():
        if len(firsts) == _FEW:
            _, found, of = np.unique(common, return_index=True, return_inverse=True)
            return found.tolist(), of.reshape(-1)
        firsts.append(int((of < 0).argmax()))
        of[common == common[firsts[-1]]] = len(firsts) - 1
    return firsts, of


def _bytes_of(records: NDArray[np.void], name: str) -> NDArray[np.uint8]:
    return np.ascontiguousarray(records[name]).view(np.uint8).reshape(len(records), -1)


_PACKED: Final = struct.Struct(f"<8xQQQQ16s16s20s20sBB{CODEC_BYTES_MAX}s")


def columns_of(extent: int, slot_bytes: int, found: Sequence[tuple[int, int, Record]]) -> Columns:
    """The same of slots, stamps and records of one scope, of which there is one at least."""
    packed = b"".join(
        _PACKED.pack(
            stamp, r.epoch, r.raw_bytes, r.stored_bytes, r.checksum, r.layout_id, r.key.digest, r.parent,
            len(r.parent), len(r.codec.encode()), r.codec.encode(),
        )
        for _, stamp, r in found
    )  # fmt: skip
    indices = np.array([index for index, _, _ in found], np.intp)
    return Columns(
        found[0][2].key.scope, extent, slot_bytes, indices, np.frombuffer(packed, fields_of(CODEC_BYTES_MAX))
    )


async def each(extents: AsyncIterator[Columns]) -> AsyncIterator[tuple[SlotRef, Record]]:
    """Blocks one by one."""
    async for columns in extents:
        for pair in columns.pairs():
            yield pair
