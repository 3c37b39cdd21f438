"""Hits by size of a cache, from the blocks that are asked for: SHARDS with a fixed number of samples. Pure.

Of all keys those with the smallest hashes are followed (keys are digests, so any part of them is one). How many of
them were used between two uses of one, divided by the rate of sampling, is how many blocks a least-recently-used cache
must hold for a hit (Waldspurger et al., Efficient MRC Construction with SHARDS, FAST 2015). Old uses count ever less,
by uses and not by time: nobody asking changes nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, log2
from typing import Final

SAMPLES_MAX: Final = 4096
"""Errors of a few thousandths by the paper; 1 MB."""
WINDOW_BLOCKS: Final = 1 << 18
"""After so many blocks asked for what came before counts half."""
ASKED_BLOCKS_MIN: Final = 4096
"""Before so many blocks were asked for, nothing is reported."""
SAME_USE_S: Final = 2.0
"""A lookup and the load that follows it are one use."""
_HASH_BYTES: Final = 4
_BINS_PER_OCTAVE: Final = 8
_BINS: Final = 48 * _BINS_PER_OCTAVE
"""Distances up to 2^48 blocks."""


class ReuseCurve:
    """Distances of reuse in blocks, sampled."""

    def __init__(self, samples_max: int = SAMPLES_MAX) -> None:
        self._samples_max = samples_max
        self._limit = 1 << 8 * _HASH_BYTES
        """Keys whose hash is below it are followed."""
        self._last: dict[bytes, tuple[int, float]] = {}
        """Number of the last use, and second of the last one that was counted."""
        self._order: list[int] = []
        """Numbers of the last uses, ascending."""
        self._largest: list[tuple[int, bytes]] = []
        """Heap of followed keys, that with the largest hash first."""
        self._uses = 0
        self._bins = [0.0] * _BINS
        self.asked_blocks = 0.0
        """Blocks asked for, old ones less."""

    def note(self, digests: Sequence[bytes], now_s: float, *, is_asked: bool = True) -> None:
        """Take in blocks that were asked for, or only made."""
        for digest in digests:
            hash_ = int.from_bytes(digest[:_HASH_BYTES], "big")
            if hash_ < self._limit:
                self._use(digest, hash_, now_s, is_asked=is_asked)

    def hit_ratio(self, blocks: float) -> float:
        """Part of the blocks asked for that a cache of so many blocks would have had."""
        if blocks < 1 or not self.asked_blocks:
            return 0.0
        at = min(_BINS_PER_OCTAVE * log2(blocks), _BINS - 1.0)
        whole = int(at)
        return min(1.0, (sum(self._bins[:whole]) + (at - whole) * self._bins[whole]) / self.asked_blocks)

    def _use(self, digest: bytes, hash_: int, now_s: float, *, is_asked: bool) -> None:
        weight = (1 << 8 * _HASH_BYTES) / self._limit
        before = self._last.get(digest)
        counted_s = -inf if before is None else before[1]
        if before is None:
            heappush(self._largest, (-hash_, digest))
        else:
            at = bisect_left(self._order, before[0])
            distance = (len(self._order) - at) * weight
            del self._order[at]
            is_asked = is_asked and now_s - counted_s >= SAME_USE_S
            if is_asked:
                self._bins[min(int(_BINS_PER_OCTAVE * log2(distance)), _BINS - 1)] += weight
        self._uses += 1
        self._last[digest] = (self._uses, now_s if is_asked else counted_s)
        self._order.append(self._uses)
        if is_asked:
            self._count(weight)
        if len(self._order) > self._samples_max:
            self._sample_less()

    def _count(self, weight: float) -> None:
        self.asked_blocks += weight
        if self.asked_blocks > WINDOW_BLOCKS:
            self.asked_blocks /= 2
            self._bins = [count / 2 for count in self._bins]

    def _sample_less(self) -> None:
        """Follow fewer keys: the one with the largest hash goes, and all that share it."""
        self._limit = -self._largest[0][0]
        while self._largest and -self._largest[0][0] >= self._limit:
            _, digest = heappop(self._largest)
            number, _ = self._last.pop(digest)
            del self._order[bisect_left(self._order, number)]
