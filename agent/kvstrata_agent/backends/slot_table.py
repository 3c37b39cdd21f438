"""Which scope holds which slots of which extents. Pure: no clock, no I/O; the media follow its decisions.

An extent belongs to one scope and one writer and has slots of one stride for all its life; its id is never used
again. So a client that kept an old mapping can never see another scope's bytes, one that may write can never reach
what another one wrote, and freeing an extent needs no compaction.
"""

import heapq
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstrata_agent.backends.base import SlotRef
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import TierFullError
from kvstrata_api.trust import ScopeKind

FREE: Final = 0
"""Stamp of a slot that nobody holds; real stamps start at 1."""

_SPARSE: Final = 4
"""An extent with at most one slot in four in use is worth emptying: three parts gained for one moved."""

NOBODY: Final = ""
"""Writer of extents that no client may write: what this node itself brings there."""

Class = tuple[ScopeId, str, int]
"""Scope, writer and stride in bytes: what an extent serves."""


@lru_cache(maxsize=4096)  # Asked for every slot.
def sole_writer(scope: ScopeId) -> str:
    """Return the tenant that alone reads and writes a scope; `NOBODY` for scopes that several tenants share."""
    kind, _, rest = scope.partition("/")
    return rest.partition("/")[0] if kind == ScopeKind.TENANT else NOBODY


def round_up(size_bytes: int, step_bytes: int) -> int:
    """Smallest multiple of `step_bytes` that is not below `size_bytes`."""
    return -(-size_bytes // step_bytes) * step_bytes


def stride_of(size_bytes: int, alignment_bytes: int, class_bits: int) -> int:
    """Stride of the slots that serve `size_bytes`: at most 2^(1 - class_bits) longer than the aligned size.

    Few strides mean few half-empty extents where codecs make every block another size. `class_bits` of 0 keeps
    the aligned size as it is.
    """
    units = max(1, -(-size_bytes // alignment_bytes))
    drop = max(0, units.bit_length() - class_bits) if class_bits else 0
    return round_up(units, 1 << drop) * alignment_bytes


@dataclass(slots=True)
class Extent:
    """State of one extent. Owned by its `SlotTable`; others only read."""

    id: int
    scope: ScopeId
    writer: str
    """Tenant whose clients may write here; `NOBODY` for none."""
    stride_bytes: int
    size_bytes: int
    stamps: "array[int]"
    """Stamp of the present use of each slot, `FREE` when there is none."""
    live: int = 0
    """Slots in use."""
    fresh: int = 0
    """Slots from here on were never used."""
    freed: list[int] = field(default_factory=list)
    """Slots that were given back, as a heap: the first is taken, so that what comes together lies together."""
    is_closing: bool = False
    is_bad: bool = False
    """The medium failed here: never gives slots again."""
    is_listed: bool = False
    """True while the extent waits in its class's heap."""

    @property
    def serves(self) -> Class:
        """What its slots are for."""
        return self.scope, self.writer, self.stride_bytes

    @property
    def has_room(self) -> bool:
        """True when a slot can be taken."""
        return not self.is_closing and self.live < len(self.stamps)


@dataclass(frozen=True, slots=True)
class Opening:
    """Plan for a new extent: what goes away first, and what is made."""

    extent: Extent
    retired: tuple[Extent, ...]
    """Empty extents of other classes that gave up their room."""


class SlotTable:
    """Slots of one tier. The bytes of all extents never exceed the capacity, except while extents are closing."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        target_bytes: int,
        page_bytes: int,
        alignment_bytes: int,
        class_bits: int = 0,
        first_stamp: int = 1,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.target_bytes = target_bytes
        """Size that extents have where it holds one slot at least."""
        self.used_bytes = 0
        """Bytes of all slots in use."""
        self.held_bytes = 0
        """Bytes of all extents."""
        self.extents: dict[int, Extent] = {}
        self._page_bytes = page_bytes
        self._alignment_bytes = alignment_bytes
        self._class_bits = class_bits
        self.keeps_empty = False
        """True: all empty extents stay with their class until another one needs their room."""
        self._rooms: dict[Class, list[int]] = {}
        self._next_stamp = first_stamp
        self._next_extent = 0
        self._drops = 0
        """Slots given back since the last search for sparse extents."""

    def stride(self, size_bytes: int) -> int:
        """Bytes of the slot that would hold `size_bytes`."""
        return stride_of(size_bytes, self._alignment_bytes, self._class_bits)

    def take(self, scope: ScopeId, size_bytes: int, writer: str = NOBODY) -> SlotRef | None:
        """Take a slot in the oldest extent of its class that has room; None when there is none."""
        taken = self.take_run(scope, size_bytes, 1, writer)
        return taken[0] if taken else None

    def take_run(self, scope: ScopeId, size_bytes: int, count: int, writer: str = NOBODY) -> list[SlotRef]:
        """Take up to `count` slots in one extent, the oldest of its class with room; none when there is none."""
        extent = self._find(scope, size_bytes, writer)
        if extent is None:
            return []
        return [self._take(extent) for _ in range(min(count, len(extent.stamps) - extent.live))]

    def has_room(self, scope: ScopeId, size_bytes: int, writer: str = NOBODY) -> bool:
        """True when such a slot can be taken or an extent be opened for it."""
        least = round_up(self.stride(size_bytes), self._page_bytes)
        return self._find(scope, size_bytes, writer) is not None or self._openable_bytes() >= least

    def _find(self, scope: ScopeId, size_bytes: int, writer: str) -> Extent | None:
        heap = self._rooms.get((scope, writer, self.stride(size_bytes)))
        while heap:
            extent = self.extents.get(heap[0])
            if extent is not None and extent.has_room:
                return extent
            heapq.heappop(heap)
            if extent is not None:
                extent.is_listed = False
        return None

    def _openable_bytes(self) -> int:
        empty_bytes = sum(e.size_bytes for e in self.extents.values() if e.live == 0)
        return self.capacity_bytes - self.held_bytes + empty_bytes

    def _take(self, extent: Extent) -> SlotRef:
        if extent.freed:
            index = heapq.heappop(extent.freed)
        else:
            index = extent.fresh
            extent.fresh += 1
        stamp = self._next_stamp
        self._next_stamp += 1
        extent.stamps[index] = stamp
        extent.live += 1
        self.used_bytes += extent.stride_bytes
        return SlotRef(extent.id, index * extent.stride_bytes, extent.stride_bytes, stamp)

    def open(self, scope: ScopeId, size_bytes: int, writer: str = NOBODY) -> Opening:
        """Add an extent for slots of `size_bytes`, retiring empty extents of other classes when room is short.

        Raises `TierFullError` with need and room; nothing was changed then.
        """
        stride = self.stride(size_bytes)
        least = round_up(stride, self._page_bytes)
        retired = self._room_for(least)
        room = self.capacity_bytes - self.held_bytes
        wanted = round_up(max(1, self.target_bytes // stride) * stride, self._page_bytes)
        size = wanted if wanted <= room else max(least, room // stride * stride // self._page_bytes * self._page_bytes)
        extent = self._add(self._next_extent, (scope, writer, stride), size)
        return Opening(extent, retired)

    def _room_for(self, least_bytes: int) -> tuple[Extent, ...]:
        room = self.capacity_bytes - self.held_bytes
        chosen: list[Extent] = []
        for extent in self.extents.values():
            if room >= least_bytes:
                break
            if extent.live == 0:
                chosen.append(extent)
                room += extent.size_bytes
        if room < least_bytes:
            raise TierFullError(
                f"slot of {least_bytes} B wanted, {room} B of {self.capacity_bytes} B without an extent", delay_s=0.1
            )
        for extent in chosen:
            self.forget(extent.id)
        return tuple(chosen)

    def _add(self, extent_id: int, serves: Class, size_bytes: int) -> Extent:
        stamps = array("Q", bytes(8 * (size_bytes // serves[-1])))
        extent = Extent(extent_id, *serves, size_bytes, stamps)
        self.extents[extent_id] = extent
        self.held_bytes += size_bytes
        self._next_extent = max(self._next_extent, extent_id + 1)
        self._list(extent)
        return extent

    def adopt(self, extent_id: int, serves: Class, size_bytes: int, stamps: NDArray[np.uint64]) -> Extent:
        """Take over an extent that an earlier run left behind, with the stamp of each slot."""
        extent = self._add(extent_id, serves, size_bytes)
        assert len(stamps) == len(extent.stamps), "one for each slot"
        extent.stamps = array("Q", stamps.tobytes())
        free = np.flatnonzero(stamps == FREE)
        extent.live = len(stamps) - len(free)
        extent.fresh = len(stamps)
        extent.freed = free.tolist()
        self.used_bytes += extent.live * extent.stride_bytes
        self._next_stamp = max(self._next_stamp, int(stamps.max(initial=FREE)) + 1)
        return extent

    def forget(self, extent_id: int) -> Extent:
        """Remove an empty extent; its id is never used again."""
        extent = self.extents.pop(extent_id)
        assert extent.live == 0, f"extent {extent_id} still holds {extent.live} slots"
        self.held_bytes -= extent.size_bytes
        return extent

    @property
    def next_extent(self) -> int:
        """Id of the extent that is opened next; no id at or above it was ever used."""
        return self._next_extent

    def skip_extents(self, first: int) -> None:
        """Never use an id below `first` for a new extent."""
        self._next_extent = max(self._next_extent, first)

    def skip_stamps(self, first: int) -> int:
        """Never use a stamp below `first` from now on; returns the next one."""
        self._next_stamp = max(self._next_stamp, first)
        return self._next_stamp

    def is_empty(self, extent_id: int) -> bool:
        """True for an extent that is kept although nothing lies in it."""
        extent = self.extents.get(extent_id)
        return extent is not None and extent.live == 0

    def forget_empty(self) -> tuple[Extent, ...]:
        """Remove all empty extents: what their last blocks left there belongs to nobody any more."""
        empty = [e.id for e in self.extents.values() if e.live == 0]
        return tuple(self.forget(i) for i in empty)

    def _list(self, extent: Extent) -> None:
        if extent.is_listed or extent.is_closing:
            return
        extent.is_listed = True
        heapq.heappush(self._rooms.setdefault(extent.serves, []), extent.id)

    def is_live(self, slot: SlotRef) -> bool:
        """True while `slot` is the present use of its place."""
        extent = self.extents.get(slot.extent)
        return extent is not None and extent.stamps[slot.offset // extent.stride_bytes] == slot.stamp

    def drop(self, slot: SlotRef) -> Extent | None:
        """Give a slot back; a slot whose stamp has moved on is ignored. Return an extent to release, if any.

        An empty extent is released when it is closing, or when another one of its class has room, unless all are
        kept; the last empty one stays with its class until somebody else needs its room.
        """
        extent = self.extents.get(slot.extent)
        if extent is None:
            return None
        index = slot.offset // extent.stride_bytes
        if extent.stamps[index] != slot.stamp:
            return None
        extent.stamps[index] = FREE
        heapq.heappush(extent.freed, index)
        extent.live -= 1
        self.used_bytes -= extent.stride_bytes
        self._drops += 1
        is_spare = not self.keeps_empty and extent.live == 0 and self._has_other_room(extent)
        if extent.live == 0 and (extent.is_closing or is_spare):
            return self.forget(extent.id)
        self._list(extent)
        return None

    def _has_other_room(self, extent: Extent) -> bool:
        ids = self._rooms.get(extent.serves, ())
        others = (self.extents.get(i) for i in ids if i != extent.id)
        return any(o is not None and o.has_room for o in others)

    def close_extent(self, extent_id: int) -> Extent | None:
        """Give no more slots of an extent, for good; return it when it is empty and thus to be released now."""
        extent = self.extents.get(extent_id)
        if extent is None:
            return None
        extent.is_closing = extent.is_bad = True
        return self.forget(extent_id) if extent.live == 0 else None

    def resize(self, capacity_bytes: int) -> tuple[frozenset[int], tuple[Extent, ...]]:
        """Set the capacity. Return the extents that are closing now, and empty ones to release at once.

        Extents with the fewest live bytes close first, so that little has to move.
        """
        self.capacity_bytes = capacity_bytes
        order = sorted(self.extents.values(), key=lambda e: (not e.is_bad, e.live * e.stride_bytes, e.id))
        kept_bytes = self.held_bytes
        released: list[Extent] = []
        for extent in order:
            extent.is_closing = extent.is_bad or kept_bytes > capacity_bytes
            if not extent.is_closing:
                self._list(extent)
                continue
            kept_bytes -= extent.size_bytes
            if extent.live == 0:
                released.append(self.forget(extent.id))
        return frozenset(e.id for e in self.extents.values() if e.is_closing), tuple(released)

    def compact(self) -> frozenset[int]:
        """Close sparse extents whose blocks fit into others of their class, while room for new extents is short.

        Returns all extents that are closing and still hold blocks, bad ones included.
        """
        if self._drops and self.capacity_bytes - self.held_bytes < self.target_bytes:
            self._drops = 0
            free: dict[Class, int] = {}
            for extent in self.extents.values():
                if not extent.is_closing:
                    free[extent.serves] = free.get(extent.serves, 0) + len(extent.stamps) - extent.live
            for extent in sorted(self.extents.values(), key=lambda e: e.live):
                self._close_sparse(extent, free)
        return frozenset(e.id for e in self.extents.values() if e.is_closing)

    def _close_sparse(self, extent: Extent, free: dict[Class, int]) -> None:
        of = extent.serves
        slots = len(extent.stamps)
        is_sparse = 0 < extent.live <= slots // _SPARSE and not extent.is_closing
        if is_sparse and free[of] - (slots - extent.live) >= extent.live:
            extent.is_closing = True
            free[of] -= slots  # Its own free slots go, and its blocks take as many of the others'.

    def extents_to_free(self, size_bytes: int) -> frozenset[int]:
        """Extents that, once emptied, leave room for a slot of `size_bytes` in any scope; fewest live bytes first."""
        need = round_up(self.stride(size_bytes), self._page_bytes) - (self.capacity_bytes - self.held_bytes)
        chosen: set[int] = set()
        for extent in sorted(self.extents.values(), key=lambda e: (e.live * e.stride_bytes, e.id)):
            if need <= 0:
                break
            chosen.add(extent.id)
            need -= extent.size_bytes
        return frozenset(chosen)


def target_extent_bytes(capacity_bytes: int, *, parts: int, most_bytes: int, count_max: int) -> int:
    """Extent size for a capacity: a `parts`-th of it, at most `most_bytes` unless that made over `count_max` extents.

    Small capacities are cut finely so that several scopes fit; huge ones coarsely so that descriptors suffice.
    """
    return max(min(most_bytes, capacity_bytes // parts), capacity_bytes // count_max)
