"""Bookkeeping for media without places: only bytes count, and a few blocks of one scope make an extent. Pure."""

from dataclasses import dataclass
from typing import Final

from kvstrata_agent.backends.base import SlotRef
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import TierFullError

_SLOTS_PER_SHELF: Final = 32
"""Blocks of one extent: small, so that emptying one frees little more than is needed."""


@dataclass(slots=True)
class _Shelf:
    scope: ScopeId
    given: int
    """Slots ever given; a full shelf gets none again."""
    sizes: dict[int, int]
    """Bytes of each live stamp."""


class Shelves:
    """Slots without places. The bytes in use never exceed the capacity."""

    def __init__(self, capacity_bytes: int, *, first_stamp: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._shelves: dict[int, _Shelf] = {}
        self._open: dict[ScopeId, int] = {}
        """Shelf of each scope that still gives slots."""
        self._next_shelf = 0
        self._next_stamp = first_stamp

    @property
    def room_bytes(self) -> int:
        """Bytes that can still be taken; negative after a shrink."""
        return self.capacity_bytes - self.used_bytes

    def take(self, scope: ScopeId, size_bytes: int) -> SlotRef:
        """Take room. Raises `TierFullError` with need and room; nothing was changed then."""
        if size_bytes > self.room_bytes:
            raise TierFullError(
                f"{size_bytes} B wanted, {max(0, self.room_bytes)} B of {self.capacity_bytes} B free", delay_s=0.1
            )
        number, shelf = self._shelf(scope)
        stamp, self._next_stamp = self._next_stamp, self._next_stamp + 1
        slot = SlotRef(number, shelf.given, size_bytes, stamp)
        shelf.given += 1
        self._put(shelf, slot)
        return slot

    def _shelf(self, scope: ScopeId) -> tuple[int, _Shelf]:
        number = self._open.get(scope)
        shelf = None if number is None else self._shelves.get(number)
        if number is None or shelf is None or shelf.given >= _SLOTS_PER_SHELF:
            number, self._next_shelf = self._next_shelf, self._next_shelf + 1
            shelf = self._shelves[number] = _Shelf(scope, 0, {})
            self._open[scope] = number
        return number, shelf

    def _put(self, shelf: _Shelf, slot: SlotRef) -> None:
        shelf.sizes[slot.stamp] = slot.size_bytes
        self.used_bytes += slot.size_bytes

    def adopt(self, scope: ScopeId, size_bytes: int, stamp: int) -> SlotRef:
        """Enter a block of an earlier run under its old stamp."""
        number, shelf = self._shelf(scope)
        slot = SlotRef(number, shelf.given, size_bytes, stamp)
        shelf.given += 1
        self._put(shelf, slot)
        return slot

    def is_live(self, slot: SlotRef) -> bool:
        """True while the slot is in use."""
        shelf = self._shelves.get(slot.extent)
        return shelf is not None and slot.stamp in shelf.sizes

    def give_back(self, slot: SlotRef) -> bool:
        """Free a slot; False when it was free already."""
        shelf = self._shelves.get(slot.extent)
        size_bytes = None if shelf is None else shelf.sizes.pop(slot.stamp, None)
        if shelf is None or size_bytes is None:
            return False
        self.used_bytes -= size_bytes
        if not shelf.sizes:
            del self._shelves[slot.extent]
        return True

    def relief(self, size_bytes: int) -> frozenset[int]:
        """Extents that, emptied, leave `size_bytes` free; smallest first. Empty when there is room."""
        need = size_bytes - self.room_bytes
        chosen: set[int] = set()
        for number, shelf in sorted(self._shelves.items(), key=lambda item: sum(item[1].sizes.values())):
            if need <= 0:
                break
            chosen.add(number)
            need -= sum(shelf.sizes.values())
        return frozenset(chosen)
