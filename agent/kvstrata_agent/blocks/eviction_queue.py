"""Blocks of one scope in one tier, oldest first: a heap whose order is put right when it is read. No I/O.

Use moves only a block's `used_at_s`; the heap learns of it when the block comes up. So a touch costs one
assignment, and only leaves are in the heap at all.
"""

import heapq
from typing import Final, Generic, Protocol, TypeVar

_SLACK: Final = 1024
"""Dead heap items that are put up with before the heap is made anew."""


class Aged(Protocol):
    """Anything with a time of last use."""

    @property
    def used_at_s(self) -> float:
        """Monotonic second of the last use; never moves back."""

    @property
    def born_s(self) -> float:
        """Monotonic second since which it exists: of two that were used at the same time the older one goes first."""


A = TypeVar("A", bound=Aged)


class LeafQueue(Generic[A]):
    """A priority queue by last use. Each block is in it once at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, int]] = []
        """Last use, birth and number of blocks that are queued, or were."""
        self._numbers: dict[A, int] = {}
        self._blocks: dict[int, A] = {}
        """Queued blocks by number, so that nothing here refers to one that was taken out."""
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, block: A) -> None:
        """Put a block in; nothing happens when it is there."""
        if block in self._numbers:
            return
        self._pushes += 1
        self._numbers[block] = self._pushes
        self._blocks[self._pushes] = block
        heapq.heappush(self._heap, (block.used_at_s, block.born_s, self._pushes))

    def discard(self, block: A) -> bool:
        """Take a block out; false when it is not there."""
        number = self._numbers.pop(block, None)
        if number is None:
            return False
        del self._blocks[number]
        if len(self._heap) > 2 * len(self._numbers) + _SLACK:
            self._heap = [(b.used_at_s, b.born_s, n) for n, b in self._blocks.items()]
            heapq.heapify(self._heap)
        return True

    def oldest(self) -> A | None:
        """Return the least recently used block and leave it in; None when the queue is empty."""
        while self._heap:
            used_at_s, born_s, number = self._heap[0]
            block = self._blocks.get(number)
            if block is None:
                heapq.heappop(self._heap)
            elif block.used_at_s > used_at_s:
                heapq.heapreplace(self._heap, (block.used_at_s, born_s, number))
            else:
                return block
        return None

    def pop(self) -> A | None:
        """Take the least recently used block out; None when the queue is empty."""
        block = self.oldest()
        if block is not None:
            _, _, number = heapq.heappop(self._heap)
            del self._blocks[number], self._numbers[block]
        return block
