"""A prefix cache of so many blocks under one policy, over one trace. Pure.

A request looks its chain up, and hits are the blocks of the unbroken beginning that is there. Then the missing blocks
come in, and blocks leave until the rest fits: leaves alone, from their tails. Blocks that have just come may be what
leaves, so a policy can decline them.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, Protocol

from kvstrata_agent.replay.chains import Trace

_HEAP_SLACK: Final = 4
"""A heap with so many times more entries than there are leaves is made anew."""


class Bag:
    """Different runs in no order, from which any can be taken and drawn in no time."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self._at: dict[int, int] = {}

    def __contains__(self, run: int) -> bool:
        return run in self._at

    def add(self, run: int) -> None:
        """Put one in, unless it is there."""
        if run not in self._at:
            self._at[run] = len(self.items)
            self.items.append(run)

    def discard(self, run: int) -> None:
        """Take one out that is there."""
        at, last = self._at.pop(run), self.items.pop()
        if last != run:
            self.items[at] = last
            self._at[last] = at


class Cache:
    """What is there: so many blocks from the beginning of each run, and which runs nothing continues."""

    def __init__(self, trace: Trace, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.lengths = trace.lengths
        self.parents = trace.parents
        self.held = [0] * len(trace.lengths)
        """Blocks of each run that are there."""
        self.children = [0] * len(trace.lengths)
        """Runs behind each one that have blocks there."""
        self._leaves = Bag()
        self.leaves = self._leaves.items
        """Runs with blocks and nothing behind them, in no order."""
        self.used_blocks = 0

    def is_leaf(self, run: int) -> bool:
        """True when blocks of the run may leave."""
        return run in self._leaves

    def matched(self, path: Sequence[int]) -> int:
        """Blocks of the unbroken beginning that are there."""
        blocks = 0
        for run in path:
            held = self.held[run]
            blocks += held
            if held < self.lengths[run]:
                break
        return blocks

    def insert(self, path: Sequence[int]) -> None:
        """Put in all of a chain that is not there."""
        held, lengths, last = self.held, self.lengths, path[-1]
        for run in reversed(path):
            missing = lengths[run] - held[run]
            if held[run]:
                held[run] += missing
                self.used_blocks += missing
                if not missing:
                    break
                continue
            held[run] = missing
            self.used_blocks += missing
            parent = self.parents[run]
            self.children[parent] += 1
            if parent in self._leaves:
                self._leaves.discard(parent)
            if run == last:
                self._leaves.add(run)

    def cut(self, run: int, blocks: int) -> int:
        """Take up to so many blocks off the tail of a leaf; returns its parent if that is a leaf now, else 0."""
        assert run in self._leaves, run
        blocks = min(blocks, self.held[run])
        self.held[run] -= blocks
        self.used_blocks -= blocks
        if self.held[run]:
            return 0
        self._leaves.discard(run)
        parent = self.parents[run]
        self.children[parent] -= 1
        if parent and not self.children[parent] and self.held[parent]:
            self._leaves.add(parent)
            return parent
        return 0


class Policy(Protocol):
    """Which leaf goes. One object for one replay."""

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """A request has been looked up; nothing of it has come in yet."""

    def stored(self, number: int, path: Sequence[int]) -> None:
        """All of its chain is in, over the capacity for the moment."""

    def victim(self) -> int:
        """A leaf whose tail goes next."""

    def blocks_of(self, run: int) -> int:
        """How many blocks of the victim the decision is about."""

    def became_leaf(self, run: int) -> None:
        """What continued this run has gone."""

    def gone(self, run: int) -> None:
        """The last block of this run has gone."""


MakePolicy = Callable[[Trace, Cache], Policy]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hits of one replay."""

    hit_blocks: int
    asked_blocks: int
    evicted_blocks: int
    decisions: int

    @property
    def hit_percent(self) -> float:
        """Blocks found, of those asked for."""
        return 100.0 * self.hit_blocks / max(1, self.asked_blocks)


def replay(trace: Trace, capacity_blocks: int, make: MakePolicy, counted_from: int = 0) -> Outcome:
    """Run a trace through an empty cache; hits count from the request of this number on."""
    assert capacity_blocks > 0, capacity_blocks
    cache = Cache(trace, capacity_blocks)
    policy = make(trace, cache)
    hit_blocks = asked_blocks = evicted_blocks = decisions = 0
    for number, path in enumerate(trace.paths):
        matched = cache.matched(path)
        if number >= counted_from:
            hit_blocks += matched
            asked_blocks += sum(cache.lengths[run] for run in path)
        policy.arrive(number, path, matched)
        cache.insert(path)
        policy.stored(number, path)
        while (excess := cache.used_blocks - capacity_blocks) > 0:
            run = policy.victim()
            blocks = min(excess, policy.blocks_of(run), cache.held[run])
            parent = cache.cut(run, blocks)
            decisions += 1
            evicted_blocks += blocks
            if not cache.held[run]:
                policy.gone(run)
            if parent:
                policy.became_leaf(parent)
    return Outcome(hit_blocks, asked_blocks, evicted_blocks, decisions)


class WholeRuns:
    """What most policies have in common: a run's blocks are all alike."""

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """Nothing is done before the chain is in."""

    def blocks_of(self, run: int) -> int:
        """All that are there."""
        return sys.maxsize

    def gone(self, run: int) -> None:
        """Nothing is kept of it."""


class Ranked(WholeRuns):
    """A policy that gives each run a rank when it is used: the leaf with the lowest goes."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.rank = [0.0] * len(cache.lengths)
        self._heap: list[tuple[float, int]] = []

    def stored(self, number: int, path: Sequence[int]) -> None:
        """Rank the chain; its end is the one leaf among it."""
        self.set_ranks(number, path)
        self.became_leaf(path[-1])

    def set_ranks(self, number: int, path: Sequence[int]) -> None:
        """Give a rank to each run of a request; a parent's is never lower than its child's."""
        raise NotImplementedError

    def victim(self) -> int:
        """Lowest rank of all leaves; what was ranked anew since is passed over."""
        while True:
            rank, run = self._heap[0]
            if self.rank[run] == rank and self.cache.is_leaf(run):
                return run
            heappop(self._heap)

    def became_leaf(self, run: int) -> None:
        """Now it may be a victim."""
        if self.cache.is_leaf(run):
            self.queue(run, self.cache.leaves)

    def queue(self, run: int, *all_runs: Sequence[int]) -> None:
        """Put a run among the possible victims, which `all_runs` are: they rebuild a heap of many dead entries."""
        heappush(self._heap, (self.rank[run], run))
        if len(self._heap) > _HEAP_SLACK * sum(map(len, all_runs)) + 1024:
            self._heap = [(self.rank[one], one) for runs in all_runs for one in runs]
            heapify(self._heap)


class LeafLru(Ranked):
    """The leaf whose last use is longest ago; what arrives is never declined."""

    def set_ranks(self, number: int, path: Sequence[int]) -> None:
        """By the number of the request."""
        rank = self.rank
        for run in path:
            rank[run] = number


class Belady(Ranked):
    """The leaf whose next use is farthest, what arrives among them: no policy has more hits.

    A chain's head is used again no later than its tail, so leaf first forbids nothing; and discarding the farthest
    keeps as many intervals between uses as so many blocks can hold (Faigle and Nawijn, 1995, on intervals).
    """

    def __init__(self, trace: Trace, cache: Cache) -> None:
        super().__init__(cache)
        self._next = trace.next_uses()

    def set_ranks(self, number: int, path: Sequence[int]) -> None:
        """By the number of the next request that has the run."""
        for run, upcoming in zip(path, self._next[number], strict=True):
            self.rank[run] = -upcoming
