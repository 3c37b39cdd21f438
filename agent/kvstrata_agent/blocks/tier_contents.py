"""The blocks that lie in a tier, by extent and as possible victims. No I/O.

Of each extent it has the entries of blocks in use, and the numbers of the rows of the others. Use moves only a block's
`used_at_s`; the heap of possible victims learns of it when the block comes up. So a touch costs one assignment, and
only leaves are in the heap at all.
"""

from __future__ import annotations

import heapq
from array import array
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from kvstrata_agent.blocks.block import account_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from random import Random

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.packed_blocks import PackedTable
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.policy.priority import PriorityClass
    from kvstrata_api.blocks import ScopeId


_SLACK: Final = 1024
"""Dead heap items that are put up with before the heap is rebuilt."""

_STALE_MAX: Final = 64
"""Numbers of rows that have left which are put up with, beside as many as there are rows."""


class Aged(Protocol):
    """Anything with an age."""

    @property
    def born_s(self) -> float:
        """Monotonic second since which it exists: of two that were used at the same time the older one goes first."""


A = TypeVar("A", bound=Aged)


class LeafQueue(Generic[A]):
    """Blocks in the order of last use, or drawn by chance. Each is in it once at most."""

    def __init__(self, use_s: Callable[[A], float]) -> None:
        """`use_s` tells the monotonic second of a block's last use, which moves back for no block that is queued."""
        self._use_s = use_s
        self._heap: list[tuple[float, float, int]] = []
        """Last use, birth and number of blocks that are queued, or were."""
        self._numbers: dict[A, int] = {}
        self._blocks: dict[int, A] = {}
        """Queued blocks by number, so that nothing here refers to one that was taken out."""
        self._pushes = 0
        self._drawn: list[int] = []
        """Numbers of blocks that are queued, or were, and that chance draws from."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, block: A) -> bool:
        return block in self._numbers

    def draw(self, count: int, random: Random) -> list[A]:
        """Blocks drawn by chance, one perhaps several times; all of them where there are no more than `count`."""
        blocks = self._blocks
        if len(blocks) <= count:
            return list(blocks.values())
        if len(self._drawn) > 2 * len(blocks):
            self._drawn = list(blocks)
        found: list[A] = []
        while len(found) < count:
            numbers = random.choices(self._drawn, k=count)
            found += [blocks[n] for n in numbers if n in blocks]
        return found[:count]

    def push(self, block: A) -> None:
        """Put a block in; nothing happens when it is there."""
        if block in self._numbers:
            return
        self._pushes += 1
        self._numbers[block] = self._pushes
        self._blocks[self._pushes] = block
        heapq.heappush(self._heap, (self._use_s(block), block.born_s, self._pushes))
        self._drawn.append(self._pushes)
        if len(self._drawn) > 2 * len(self._numbers) + _SLACK:
            self._drawn = list(self._blocks)

    def discard(self, block: A) -> bool:
        """Take a block out; false when it is not there."""
        number = self._numbers.pop(block, None)
        if number is None:
            return False
        del self._blocks[number]
        if len(self._heap) > 2 * len(self._numbers) + _SLACK:
            self._heap = [(self._use_s(b), b.born_s, n) for n, b in self._blocks.items()]
            heapq.heapify(self._heap)
        return True

    def oldest(self) -> A | None:
        """Return the least recently used block and leave it in; None when the queue is empty."""
        while self._heap:
            queued_s, born_s, number = self._heap[0]
            block = self._blocks.get(number)
            if block is None:
                heapq.heappop(self._heap)
            elif (use_s := self._use_s(block)) > queued_s:
                heapq.heapreplace(self._heap, (use_s, born_s, number))
            else:
                return block
        return None


class Packing(Protocol):
    """Where packed blocks are kept."""

    @property
    def packed(self) -> PackedTable:
        """The rows."""

    def unpack(self, number: int) -> Entry:
        """Make the entry of a row again."""

    def contents(self, tier: Tier) -> TierContents:
        """Return what lies in a tier."""


class ExtentBlocks:
    """Blocks of one extent, all of one scope. Iteration makes entries of all of them: for extents that are emptied."""

    __slots__ = ("_extent", "_numbers", "_packing", "_tier", "in_use", "packed", "scope")

    def __init__(self, tier: Tier, extent: int, scope: ScopeId) -> None:
        self._tier = tier
        self._extent = extent
        self.scope = scope
        self.in_use: set[Entry] = set()
        self.packed = 0
        """Blocks that are rows."""
        self._numbers: array[int] | None = None
        """Rows that lie here, or did."""
        self._packing: Packing | None = None

    def __len__(self) -> int:
        return len(self.in_use) + self.packed

    def __contains__(self, entry: Entry) -> bool:
        return entry in self.in_use

    def __iter__(self) -> Iterator[Entry]:
        self._unpack()
        return iter(self.in_use)

    def may_hold(self, tenant: str) -> bool:
        """False when the scope rules out that something here is the tenant's; blocks of shared scopes are anybody's."""
        account = account_of(self.scope)
        return account == tenant or "/" in account

    def pack(self, numbers: Sequence[int], packing: Packing) -> None:
        """Note rows of blocks that lie here and are no entries."""
        if self._numbers is None:
            self._numbers, self._packing = array("I"), packing
        elif len(self._numbers) > 2 * self.packed + _STALE_MAX:
            self._numbers = array("I", self._present())
        self._numbers.extend(numbers)
        self.packed += len(numbers)

    def _present(self) -> list[int]:
        """Rows that lie here now."""
        if self._packing is None or self._numbers is None or not self.packed:
            return []
        rows = self._packing.packed
        return [n for n in dict.fromkeys(self._numbers) if rows.lies_in(n, self._tier, self._extent)]

    def _unpack(self) -> None:
        for number in self._present():
            assert self._packing is not None, "who packed them is known"
            self._packing.unpack(number)

    def bytes_by_tenant(self) -> dict[str, int]:
        """Bytes of slots here by account."""
        found: dict[str, int] = {}
        for entry in self.in_use:
            residence = entry.residence(self._tier)
            if residence is not None:
                found[entry.tenant] = found.get(entry.tenant, 0) + residence.slot.size_bytes
        for number in self._present():
            assert self._packing is not None, "who packed them is known"
            kind = self._packing.packed.kind(number)
            found[kind.tenant] = found.get(kind.tenant, 0) + kind.slot_bytes
        return found


class QueueKey(NamedTuple):
    """What the possible victims in one queue have in common."""

    scope: ScopeId
    account: str
    priority: PriorityClass
    is_double: bool
    """Faster tiers have them too: each block of a chain may leave, and of the others only the ends of chains."""


class TierContents:
    """Which blocks lie in one tier. The index alone changes it; others read it."""

    __slots__ = ("_keys", "_tier", "blocks", "extents", "queues")

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.blocks = 0
        self.extents: dict[int, ExtentBlocks] = {}
        """Blocks by extent; extents without any are absent."""
        self.queues: dict[QueueKey, LeafQueue[Entry]] = {}
        """Possible victims; they are taken out by `withdraw` alone."""
        self._keys: dict[Entry, QueueKey] = {}
        """Of the queue that each of them is in."""

    @property
    def has_held(self) -> bool:
        """True while somebody leases, pins, decodes from or moves a block that lies here."""
        return any(entry.is_held for residents in self.extents.values() for entry in residents.in_use)

    def count(self, extents: Iterable[int]) -> int:
        """Blocks that lie in these extents."""
        return sum(len(self.extents.get(extent, ())) for extent in extents)

    def add(self, entry: Entry, slot: SlotRef) -> None:
        """Note that a block lies here, and may be a victim."""
        self.note(entry, slot)
        self.offer(entry)

    def note(self, entry: Entry, slot: SlotRef) -> None:
        """Note that a block lies here."""
        self.note_all(((entry, slot),))

    def note_all(self, placed: Sequence[tuple[Entry, SlotRef]]) -> None:
        """Note that blocks lie here."""
        for entry, slot in placed:
            self._residents(slot.extent, entry.scope).in_use.add(entry)
        self.blocks += len(placed)

    def _residents(self, extent: int, scope: ScopeId) -> ExtentBlocks:
        residents = self.extents.get(extent)
        if residents is None:
            residents = self.extents[extent] = ExtentBlocks(self._tier, extent, scope)
        return residents

    def note_packed(self, numbers: Sequence[int], extent: int, scope: ScopeId, packing: Packing) -> None:
        """Note that blocks lie here that are rows."""
        self._residents(extent, scope).pack(numbers, packing)
        self.blocks += len(numbers)

    def forget_entry(self, entry: Entry, extent: int) -> None:
        """Forget the entry of a block that lies here, because it becomes a row."""
        self.extents[extent].in_use.remove(entry)
        self.blocks -= 1

    def unpacked(self, entry: Entry, extent: int) -> None:
        """Note the entry of a block that was a row."""
        residents = self.extents[extent]
        residents.packed -= 1
        residents.in_use.add(entry)

    def remove(self, entry: Entry, slot: SlotRef) -> None:
        """Note that a block has left the slot."""
        residents = self.extents[slot.extent]
        residents.in_use.remove(entry)
        if not residents:
            del self.extents[slot.extent]
        self.blocks -= 1
        self.withdraw(entry)

    def withdraw(self, entry: Entry) -> bool:
        """Take a block out of the possible victims; false when it is none of them."""
        key = self._keys.pop(entry, None)
        if key is None:
            return False
        queue = self.queues[key]
        queue.discard(entry)
        if not queue:
            del self.queues[key]
        return True

    def is_queued(self, entry: Entry) -> bool:
        """True where a block is a possible victim."""
        return entry in self._keys

    def use_s(self, entry: Entry) -> float:
        """When a block was used last, as that counts here."""
        return entry.use_in_s(self._tier)

    def offer(self, entry: Entry) -> QueueKey:
        """Put a block among the possible victims; whether it is one is checked when it comes up."""
        is_double, known = entry.level < self._tier.level, self._keys.get(entry)
        if known is not None:
            if known.is_double == is_double:
                return known
            self.withdraw(entry)
        key = self._keys[entry] = QueueKey(entry.scope, entry.tenant, entry.priority, is_double)
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = LeafQueue(self.use_s)
        queue.push(entry)
        return key

    def victims_in(self, extents: Iterable[int], most: int) -> TierContents:
        """The possible victims of these extents, up to so many of them, as contents of their own."""
        found = TierContents(self._tier)
        here = (entry for extent in extents if (lies := self.extents.get(extent)) for entry in lies.in_use)
        for entry in islice((entry for entry in here if entry in self._keys), most):
            found.offer(entry)
        return found

    def age(self, entry: Entry) -> None:
        """Bring a block, whose last use was set back, to the front of the possible victims, if it is one of them."""
        key = self._keys.get(entry)
        if key is not None:
            self.queues[key].discard(entry)
            self.queues[key].push(entry)

    def residents(self) -> Iterator[Entry]:
        """All blocks that are here now, in no order, an extent at a time; they may be taken out meanwhile."""
        for extent in tuple(self.extents):
            yield from tuple(self.extents.get(extent, ()))
