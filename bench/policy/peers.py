"""Policies of others in the replay, made from their descriptions: none of this is their authors' code.

Classic ones take leaves alone, from their tails, in the order that the policy gives; a run stands for its blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from heapq import heappop, heappush
from math import exp
from typing import TYPE_CHECKING, Final

from kvstrata_agent.replay.cache import Belady, LeafLru, MakePolicy, Outcome, Policy, Ranked, WholeRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata_agent.replay.cache import Cache
    from kvstrata_agent.replay.chains import Trace


_TIE: Final = 1e-9
"""Of a use: of equal ranks the one that is used longer ago leaves first."""


class Gdsf(Ranked):
    """GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998): uses, of blocks that all cost the same, above a clock."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._uses = [0] * len(cache.lengths)
        self._clock = 0.0

    def set_ranks(self, number: int, path: Sequence[int]) -> None:
        """Clock and uses; a head has at least as many as what continues it."""
        for run in path:
            self._uses[run] += 1
            self.rank[run] = self._clock + self._uses[run] + _TIE * number

    def victim(self) -> int:
        """The clock moves on to the rank of what leaves."""
        run = super().victim()
        self._clock = max(self._clock, self.rank[run])
        return run

    def gone(self, run: int) -> None:
        """Uses are counted while it is there."""
        self._uses[run] = 0


class Lists(WholeRuns):
    """Policies that keep runs in lists: they say in which order lists are searched for a leaf."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def stored(self, number: int, path: Sequence[int]) -> None:
        """Tail before head, so that of a chain the tail is the least recent."""
        for run in reversed(path):
            self.use(run, is_new=not self.holds(run))

    def holds(self, run: int) -> bool:
        """True when one of the lists has it."""
        raise NotImplementedError

    def use(self, run: int, *, is_new: bool) -> None:
        """A run is used; a new one has just come."""
        raise NotImplementedError

    def became_leaf(self, run: int) -> None:
        """Lists are searched for leaves when one is wanted."""

    def first_leaf(self, runs: OrderedDict[int, None]) -> int:
        """First leaf of a list; 0 where it has none."""
        return next((run for run in runs if self.cache.is_leaf(run)), 0)


class Arc(Lists):
    """ARC (Megiddo and Modha, FAST 2003): recent and frequent runs, and ghosts of both that move the share."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._blocks: Counter[str] = Counter()
        self._share = 0.0

    def holds(self, run: int) -> bool:
        """True when it is there."""
        return run in self._recent or run in self._frequent

    def use(self, run: int, *, is_new: bool) -> None:
        """The second use makes it frequent; that of a ghost moves the share of recent ones."""
        size, capacity = self.cache.lengths[run], self.cache.capacity_blocks
        if not is_new:
            if run in self._recent:
                del self._recent[run]
                self._blocks["recent"] -= size
                self._blocks["frequent"] += size
            self._frequent[run] = None
            self._frequent.move_to_end(run)
            return
        if run in self._recent_ghosts or run in self._frequent_ghosts:
            is_recent = run in self._recent_ghosts
            ghosts = self._recent_ghosts if is_recent else self._frequent_ghosts
            own, other = ("rg", "fg") if is_recent else ("fg", "rg")
            step = size * max(1.0, self._blocks[other] / max(1, self._blocks[own]))
            self._share = min(capacity, self._share + step) if is_recent else max(0.0, self._share - step)
            del ghosts[run]
            self._blocks[own] -= size
            self._frequent[run] = None
            self._blocks["frequent"] += size
        else:
            self._recent[run] = None
            self._blocks["recent"] += size
        for name, ghosts in (("rg", self._recent_ghosts), ("fg", self._frequent_ghosts)):
            while self._blocks[name] > capacity:
                old, _ = ghosts.popitem(last=False)
                self._blocks[name] -= self.cache.lengths[old]

    def victim(self) -> int:
        """From recent ones while they are over their share."""
        lists = (self._recent, self._frequent)
        first, second = lists if self._blocks["recent"] > self._share else reversed(lists)
        return self.first_leaf(first) or self.first_leaf(second)

    def gone(self, run: int) -> None:
        """It leaves a ghost."""
        size = self.cache.lengths[run]
        is_recent = run in self._recent
        del (self._recent if is_recent else self._frequent)[run]
        self._blocks["recent" if is_recent else "frequent"] -= size
        (self._recent_ghosts if is_recent else self._frequent_ghosts)[run] = None
        self._blocks["rg" if is_recent else "fg"] += size


class S3Fifo(Lists):
    """S3-FIFO (Yang et al., SOSP 2023): a tenth for newcomers, ghosts of those that leave it, two bits of uses."""

    SMALL: Final = 0.1
    USES_MAX: Final = 3

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._ghost_blocks = self._small_blocks = 0
        self._uses = [0] * len(cache.lengths)

    def holds(self, run: int) -> bool:
        """True when it is there."""
        return run in self._small or run in self._main

    def use(self, run: int, *, is_new: bool) -> None:
        """Ghosts come back into the main list, others begin in the small one."""
        if not is_new:
            self._uses[run] = min(self.USES_MAX, self._uses[run] + 1)
            return
        self._uses[run] = 0
        if run in self._ghosts:
            del self._ghosts[run]
            self._ghost_blocks -= self.cache.lengths[run]
            self._main[run] = None
        else:
            self._small[run] = None
            self._small_blocks += self.cache.lengths[run]

    def victim(self) -> int:
        """From the small list while it is over its tenth; used ones move to the main list, or once around in it."""
        for _ in range(2 * (len(self._small) + len(self._main)) + 2):
            is_small = self._small_blocks > self.SMALL * self.cache.capacity_blocks
            run = (self.first_leaf(self._small) if is_small else 0) or self.first_leaf(self._main)
            run = run or self.first_leaf(self._small)
            if run in self._small and self._uses[run] > 1:
                del self._small[run]
                self._small_blocks -= self.cache.lengths[run]
                self._main[run] = None
            elif run in self._main and self._uses[run]:
                self._uses[run] -= 1
                self._main.move_to_end(run)
            else:
                return run
        return self.cache.leaves[0]

    def gone(self, run: int) -> None:
        """Out of the small list it leaves a ghost."""
        if run in self._small:
            del self._small[run]
            self._small_blocks -= self.cache.lengths[run]
            self._ghosts[run] = None
            self._ghost_blocks += self.cache.lengths[run]
            while self._ghost_blocks > self.cache.capacity_blocks:
                old, _ = self._ghosts.popitem(last=False)
                self._ghost_blocks -= self.cache.lengths[old]
        else:
            del self._main[run]


class Sieve(Lists):
    """SIEVE (Zhang et al., NSDI 2024): first in, first out, with a hand that spares what was used since it passed."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._spared: OrderedDict[int, None] = OrderedDict()
        """What the hand has passed in this round, in order; it is in front of the hand in the next one."""
        self._used = bytearray(len(cache.lengths))

    def holds(self, run: int) -> bool:
        """True when it is there."""
        return run in self._queue or run in self._spared

    def use(self, run: int, *, is_new: bool) -> None:
        """A use marks it; a new one comes last."""
        if is_new:
            self._queue[run] = None
        self._used[run] = not is_new

    def victim(self) -> int:
        """The hand passes what is no leaf, and what was used."""
        for _ in range(2):
            while self._queue:
                run = next(iter(self._queue))
                if self.cache.is_leaf(run) and not self._used[run]:
                    return run
                self._used[run] = 0
                del self._queue[run]
                self._spared[run] = None
            self._queue, self._spared = self._spared, OrderedDict()
        return self.cache.leaves[0]

    def gone(self, run: int) -> None:
        """Nothing is kept of it."""
        self._queue.pop(run, None)
        self._spared.pop(run, None)


class WTinyLfu(Lists):
    """W-TinyLFU (Einziger, Friedman and Manes, ACM ToS 2017): a window of 1 %, then whoever is used more often stays.

    Uses are counted exactly and halved when there have been ten for each block of the cache; the main part is one
    list in order of use, where the paper's has two.
    """

    WINDOW: Final = 0.01
    AGING: Final = 10

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._window: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._window_blocks = self._counted = 0
        self._uses: Counter[int] = Counter()

    def holds(self, run: int) -> bool:
        """True when it is there."""
        return run in self._window or run in self._main

    def use(self, run: int, *, is_new: bool) -> None:
        """Count it; it is the most recent of its list."""
        self._uses[run] += 1
        self._counted += self.cache.lengths[run]
        if self._counted > self.AGING * self.cache.capacity_blocks:
            self._counted //= 2
            self._uses = Counter({r: n // 2 for r, n in self._uses.items() if n > 1})
        if is_new:
            self._window[run] = None
            self._window_blocks += self.cache.lengths[run]
        else:
            (self._window if run in self._window else self._main).move_to_end(run)

    def victim(self) -> int:
        """What leaves the window goes unless it was used more often than the main part's victim."""
        while self._window_blocks > max(1, self.WINDOW * self.cache.capacity_blocks):
            candidate, victim = self.first_leaf(self._window), self.first_leaf(self._main)
            if not candidate:
                candidate = next(iter(self._window))  # No leaf: what continues it is in the main part.
            elif victim and self._uses[candidate] <= self._uses[victim]:
                return candidate
            del self._window[candidate]
            self._window_blocks -= self.cache.lengths[candidate]
            self._main[candidate] = None
            if victim and self.cache.is_leaf(victim):
                return victim
        return self.first_leaf(self._main) or self.first_leaf(self._window)

    def gone(self, run: int) -> None:
        """Its count stays."""
        if run in self._window:
            del self._window[run]
            self._window_blocks -= self.cache.lengths[run]
        else:
            self._main.pop(run, None)


class WorkloadAware(WholeRuns):
    """Workload-aware eviction (arXiv 2506.02634, section 5), from its description.

    For each category of requests (its type where the trace says, and its turn) an exponential distribution of times
    to reuse; the leaf with the least chance of reuse within what is left of a life goes, later blocks first. The
    longest leaf of each category is looked at, so a decision costs as much as there are categories.
    """

    LIFE_S: Final = 600.0
    """Modelled: the paper takes the life that blocks have in the cache."""
    TURNS_MAX: Final = 8

    def __init__(self, trace: Trace, cache: Cache) -> None:
        self._trace, self._cache = trace, cache
        self._now_s = 0.0
        self._category = [(0, "")] * len(cache.lengths)
        self._used_at_s = [0.0] * len(cache.lengths)
        self._queues: dict[tuple[int, str], list[tuple[float, int]]] = {}
        self._reused: Counter[tuple[int, str]] = Counter()
        self._seen: Counter[tuple[int, str]] = Counter()
        self._total_s: Counter[tuple[int, str]] = Counter()

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """Learn from the last use of the deepest block that is there."""
        self._now_s = self._trace.at_s[number]
        deepest = next((run for run in reversed(path) if self._cache.held[run]), 0)
        turn = 0
        if deepest:
            before = self._category[deepest]
            turn = min(self.TURNS_MAX, before[0] + 1)
            self._reused[before] += 1
            self._total_s[before] += self._now_s - self._used_at_s[deepest]  # type: ignore[assignment]
        category = (turn, self._trace.kinds[number])
        self._seen[category] += 1
        for run in path:
            self._category[run] = category
            self._used_at_s[run] = self._now_s

    def stored(self, number: int, path: Sequence[int]) -> None:
        """Its end is a leaf."""
        self.became_leaf(path[-1])

    def became_leaf(self, run: int) -> None:
        """In its category's order of use."""
        if self._cache.is_leaf(run):
            heappush(self._queues.setdefault(self._category[run], []), (self._used_at_s[run], run))

    def victim(self) -> int:
        """The first of a category's queue, of the category with the least chance."""
        best, chance = 0, float("inf")
        for category, queue in self._queues.items():
            while queue and not (
                self._cache.is_leaf(queue[0][1])
                and self._category[queue[0][1]] == category
                and self._used_at_s[queue[0][1]] == queue[0][0]
            ):
                heappop(queue)
            if queue:
                own = self._chance(category, self._now_s - queue[0][0])
                if own < chance:
                    best, chance = queue[0][1], own
        return best

    def _chance(self, category: tuple[int, str], age_s: float) -> float:
        """Of a use between an age and the end of a life."""
        reused = self._reused[category]
        mean_s = max(1e-3, self._total_s[category] / reused) if reused else self.LIFE_S
        return reused / max(1, self._seen[category]) * (exp(-age_s / mean_s) - exp(-(age_s + self.LIFE_S) / mean_s))


class TokenTypeAware(Ranked):
    """SAECache (arXiv 2605.18825), from its abstract: weights of kinds of tokens, learned from what eviction regrets.

    Kinds here are what a trace shows: what several chains share, what a chain had before, and what is new, each by
    the request's kind. A block's rank is its last use plus its kind's weight, in requests; a weight rises when an
    evicted block of its kind is asked for again, and falls when blocks of it leave unused.
    """

    GHOSTS_MAX: Final = 4096
    RATE: Final = 0.02

    def __init__(self, trace: Trace, cache: Cache) -> None:
        super().__init__(cache)
        self._kinds = trace.kinds
        self._kind = [""] * len(cache.lengths)
        self._weights: Counter[str] = Counter()
        self._ghosts: OrderedDict[int, str] = OrderedDict()
        self._matched = 0

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """Regret what was evicted too early."""
        self._matched = matched_blocks
        for run in path:
            kind = self._ghosts.pop(run, None)
            if kind is not None:
                self._weights[kind] += self.RATE * len(self.cache.leaves)  # type: ignore[assignment]

    def set_ranks(self, number: int, path: Sequence[int]) -> None:
        """Head, history or new; a parent's rank is never below its child's."""
        at, low = sum(self.cache.lengths[run] for run in path), float("-inf")
        for run in reversed(path):
            at -= self.cache.lengths[run]
            part = "shared" if self.cache.children[run] > 1 else "history" if at < self._matched else "new"
            self._kind[run] = f"{part} {self._kinds[number]}"
            low = max(low, number + self._weights[self._kind[run]])
            self.rank[run] = low

    def gone(self, run: int) -> None:
        """A ghost, and a little less weight."""
        kind = self._kind[run]
        self._weights[kind] -= self.RATE  # type: ignore[assignment]
        self._ghosts[run] = kind
        if len(self._ghosts) > self.GHOSTS_MAX:
            self._ghosts.popitem(last=False)


class TLru(WholeRuns):
    """Tail-optimized LRU (arXiv 2510.15152), from its description.

    Blocks that a next turn does not need for its time to the first token go first: those behind what must be there so
    that no more than a threshold has to be computed. Then the least recently used. The paper wants the threshold from
    the operator; here it is the median of what requests have brought that was new, as it goes along.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._last = [0] * len(cache.lengths)
        self._surplus: deque[tuple[int, int]] = deque()
        """Runs, each with the request that used it then."""
        self._lru = LeafLru(cache)
        self._recent_new: deque[int] = deque(maxlen=256)

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """What it brings that is new."""
        self._recent_new.append(sum(self._cache.lengths[run] for run in path) - matched_blocks)

    def stored(self, number: int, path: Sequence[int]) -> None:
        """Its last runs are surplus as far as they lie within the threshold."""
        self._lru.stored(number, path)
        for run in path:
            self._last[run] = number
        spare = sorted(self._recent_new)[len(self._recent_new) // 2]
        for run in reversed(path):
            spare -= self._cache.lengths[run]
            if spare < 0:
                break
            self._surplus.append((run, number))

    def became_leaf(self, run: int) -> None:
        """It can go now."""
        self._lru.became_leaf(run)

    def victim(self) -> int:
        """Surplus first, the oldest of it."""
        while self._surplus:
            run, number = self._surplus[0]
            if self._last[run] == number and self._cache.is_leaf(run):
                return run
            self._surplus.popleft()
        return self._lru.victim()


def plain_lru(trace: Trace, capacity_blocks: int) -> Outcome:
    """Least recently used first whatever continues it: of one use the head, which is used first, goes first.

    No policy of the leaf-first cache can do this, so it is a replay of its own. A run that has lost its head holds
    blocks that nobody can use until the head is back.
    """
    held: OrderedDict[int, int] = OrderedDict()
    used = hits = evicted = decisions = 0
    for path in trace.paths:
        for run in path:
            if held.get(run, 0) < trace.lengths[run]:
                break
            hits += trace.lengths[run]
        for run in path:
            used += trace.lengths[run] - held.pop(run, 0)
            held[run] = trace.lengths[run]
        while used > capacity_blocks:
            run, blocks = next(iter(held.items()))
            cut = min(blocks, used - capacity_blocks)
            used -= cut
            evicted += cut
            decisions += 1
            if cut == blocks:
                del held[run]
            else:
                held[run] = blocks - cut
    return Outcome(hits, trace.accesses, evicted, decisions)


def _with_cache(make: Callable[[Cache], Policy]) -> MakePolicy:
    return lambda _, cache: make(cache)


PEERS: Final[dict[str, MakePolicy]] = {
    "leaf-LRU": _with_cache(LeafLru),
    "ARC": _with_cache(Arc),
    "GDSF": _with_cache(Gdsf),
    "S3-FIFO": _with_cache(S3Fifo),
    "SIEVE": _with_cache(Sieve),
    "W-TinyLFU": _with_cache(WTinyLfu),
    "workload-aware": WorkloadAware,
    "token-type-aware": TokenTypeAware,
    "T-LRU": _with_cache(TLru),
}
"""All of them see blocks and times alone, but those that use the request's kind where a trace has it."""
TOLD_KINDS: Final = frozenset({"workload-aware", "token-type-aware"})
"""Those."""
LIMIT: Final[MakePolicy] = Belady
