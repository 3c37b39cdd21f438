"""Blocks of an earlier run as columns: a million of them are entered in a second or two. Pure."""

import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId, ScopeId
from kvstrata_api.checksum import CHECKSUM_BYTES


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


@dataclass(frozen=True, slots=True)
class Columns:
    """The blocks of one extent."""

    scope: ScopeId
    extent: int
    slot_bytes: int
    indices: NDArray[np.intp]
    """Slot of each block; last slots first, as children mostly lie behind their parents."""
    records: NDArray[np.void]
    """What is known of each: `fields_of` its medium."""

    def __len__(self) -> int:
        return len(self.indices)

    def slot(self, at: int) -> SlotRef:
        """Where a block lies."""
        stamp = int(self.records["stamp"][at])
        return SlotRef(self.extent, int(self.indices[at]) * self.slot_bytes, self.slot_bytes, stamp)

    def record(self, at: int) -> Record:
        """What is known of a block."""
        found = self.records[at]
        parent = found["parent"].tobytes()[: found["parent_length"]]
        codec = found["codec"].tobytes()[: found["codec_length"]].decode()
        key = BlockKey(self.scope, found["digest"].tobytes())
        layout_id, checksum = LayoutId(found["layout_id"].tobytes()), found["checksum"].tobytes()
        raw_bytes, stored_bytes, epoch = (int(found[name]) for name in ("raw_bytes", "stored_bytes", "epoch"))
        return Record(key, parent, layout_id, codec, raw_bytes, stored_bytes, checksum, epoch)

    def stamps(self, slots: int) -> NDArray[np.uint64]:
        """Stamp of each slot of the extent, 0 of one that holds no block."""
        stamps = np.zeros(slots, np.uint64)
        stamps[self.indices] = self.records["stamp"]
        return stamps

    def pairs(self) -> Iterator[tuple[SlotRef, Record]]:
        """Each block by itself."""
        return ((self.slot(at), self.record(at)) for at in range(len(self)))


_COMMON: Final = ("epoch", "raw_bytes", "layout_id", "parent_length", "codec_length", "codec")
"""Fields of a record that many share: its kind."""
_FEW: Final = 16
"""Up to so many kinds of an extent are told apart one by one, which takes a tenth of sorting."""


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


_CODEC_BYTES_MAX: Final = 32
_PACKED: Final = struct.Struct(f"<8xQQQQ16s16s20s20sBB{_CODEC_BYTES_MAX}s")


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
        found[0][2].key.scope, extent, slot_bytes, indices, np.frombuffer(packed, fields_of(_CODEC_BYTES_MAX))
    )


async def each(extents: AsyncIterator[Columns]) -> AsyncIterator[tuple[SlotRef, Record]]:
    """Blocks one by one."""
    async for columns in extents:
        for pair in columns.pairs():
            yield pair


@runtime_checkable
class ColumnarBackend(TierBackend, Protocol):
    """A medium that tells of what an earlier run has left an extent at a time."""

    def recover_columns(self) -> AsyncIterator[Columns]:
        """What `recover` tells block by block; one of the two is called, once."""
