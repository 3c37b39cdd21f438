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
        self._heap: list[tuple[float, float, int, A]] = []
        self._queued: dict[A, int] = {}
        """Number of the heap item that counts."""
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._queued)

    def push(self, block: A) -> None:
        """Put a block in; nothing happens when it is there."""
        if block in self._queued:
            return
        self._pushes += 1
        self._queued[block] = self._pushes
        heapq.heappush(self._heap, (block.used_at_s, block.born_s, self._pushes, block))

    def discard(self, block: A) -> bool:
        """Take a block out; false when it is not there."""
        if self._queued.pop(block, None) is None:
            return False
        if len(self._heap) > 2 * len(self._queued) + _SLACK:
            self._heap = [(b.used_at_s, b.born_s, n, b) for b, n in self._queued.items()]
            heapq.heapify(self._heap)
        return True

    def oldest(self) -> A | None:
        """Return the least recently used block and leave it in; None when the queue is empty."""
        while self._heap:
            used_at_s, born_s, number, block = self._heap[0]
            if self._queued.get(block) != number:
                heapq.heappop(self._heap)
            elif block.used_at_s > used_at_s:
                heapq.heapreplace(self._heap, (block.used_at_s, born_s, number, block))
            else:
                return block
        return None

    def pop(self) -> A | None:
        """Take the least recently used block out; None when the queue is empty."""
        block = self.oldest()
        if block is not None:
            heapq.heappop(self._heap)
            del self._queued[block]
        return block
