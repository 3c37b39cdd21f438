"""Blocks of a trace in the tiers of a machine: who leaves, where to, and what is written on the way. Pure.

Tiers are nested caches, as chains' heads are never in a slower tier than what continues them: level k holds what is in
tier k or in a faster one. A prefix that was used is in the fastest tier, and copies that it had in slower ones stay; so
what leaves a tier is written only once. An engine saves what it computes to the first tier behind its own, which has
all that the engine has; tiers behind that one have what was written into them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstrata_agent.policy.admission import WriteAdmission
from kvstrata_agent.policy.expected_reuse import UNMARKED, ExpectedReuse, MarkTable, Victims
from kvstrata_agent.policy.placement import Price, TierFacts, by_reuse_interval
from kvstrata_agent.replay.cache import Cache, LeafLru, Policy
from kvstrata_agent.replay.reuse_aware import Hints, facts

if TYPE_CHECKING:
    from kvstrata_agent.replay.chains import Trace

Write = Callable[[int, int], bool]
"""Writes so many blocks into a tier; False when too much waits to be written there, and they are lost."""


class Source(NamedTuple):
    """Neighbouring blocks of a chain that are in one tier."""

    tier: int
    blocks: int


class Tiers:
    """Levels with a policy each. Subclasses say which; `capacities` are those of the tiers, in blocks."""

    def __init__(self, trace: Trace, capacities: Sequence[int], write: Write, engine_levels: int = 1) -> None:
        self.levels = [Cache(trace, blocks) for blocks in capacities]
        self.floors = list(capacities)
        """Blocks that a level keeps once it had more than it may; fewer where a low watermark is below the high one."""
        self.policies = [self.policy(trace, level) for level in self.levels]
        self.write = write
        self.stored = [[0] * len(trace.lengths) for _ in capacities]
        """Blocks of each run that were written into each tier, and are in it or in a faster one."""
        self._stored_blocks = [0] * len(capacities)
        self._saved_levels = engine_levels + 1
        """The engine's own and the one that it saves to."""
        self.used_s = [0.0] * len(trace.lengths)
        """When each run was used last."""
        self.now_s = 0.0

    def policy(self, trace: Trace, level: Cache) -> Policy:
        """What decides at one level."""
        return LeafLru(level)

    def used_blocks(self, tier: int) -> int:
        """Blocks that are in a tier, copies of what faster ones have among them."""
        return self.levels[tier].used_blocks if tier < self._saved_levels else self._stored_blocks[tier]

    def asked(self, number: int, path: Sequence[int], now_s: float) -> None:
        """A request names its chain."""
        self.now_s = now_s

    def sources(self, path: Sequence[int]) -> list[Source]:
        """Where the unbroken beginning of a chain is."""
        found: list[Source] = []
        for run in path:
            before = 0
            for tier, level in enumerate(self.levels):
                blocks = level.held[run] - before
                if blocks > 0:
                    before += blocks
                    if found and found[-1].tier == tier:
                        found[-1] = Source(tier, found[-1].blocks + blocks)
                    else:
                        found.append(Source(tier, blocks))
            if before < self.levels[0].lengths[run]:
                break
        return found

    def used(self, number: int, path: Sequence[int], now_s: float) -> None:
        """The engine has all of a chain: it is in the fastest tier, and others leave until it fits."""
        self.now_s = now_s
        for run in path:
            self.used_s[run] = now_s
        self.insert(path)
        for policy in self.policies:
            policy.stored(number, path)
        saved = min(self._saved_levels, len(self.levels))
        for tier in (*reversed(range(saved)), *range(saved, len(self.levels))):
            self.shrink(tier)

    def insert(self, path: Sequence[int]) -> None:
        """Put a chain into all levels."""
        for level in self.levels:
            level.insert(path)

    def shrink(self, tier: int) -> None:
        """Let blocks leave a level until it has no more than it may."""
        level, policy = self.levels[tier], self.policies[tier]
        if self.used_blocks(tier) <= level.capacity_blocks:
            return
        while (excess := self.used_blocks(tier) - self.floors[tier]) > 0:
            run = policy.victim()
            self.leave(tier, run, min(excess, policy.blocks_of(run), self._alone(tier, run) or level.held[run]))

    def _alone(self, tier: int, run: int) -> int:
        """Blocks of a run that no faster tier has."""
        return self.levels[tier].held[run] - (self.levels[tier - 1].held[run] if tier else 0)

    def leave(self, tier: int, run: int, blocks: int) -> None:
        """Blocks of a leaf leave a level for a slower tier that takes them, or for good."""
        target = self.target(tier, run)
        while target < len(self.levels) and not self.keep(target, run, blocks):
            target += 1
        self.drop(tier, target, run, blocks)

    def drop(self, tier: int, target: int, run: int, blocks: int) -> None:
        """Take blocks that leave a level out of all that are faster than `target`."""
        kept = self.levels[tier].held[run] - blocks
        for level in reversed(range(target)):
            self.cut(level, run, kept)

    def keep(self, tier: int, run: int, blocks: int) -> bool:
        """Have blocks that leave a faster tier in this one: those that were not there are written."""
        missing = self.missing(tier, run, blocks)
        if missing and not (self.levels[tier].capacity_blocks and self.write(tier, missing)):
            return False
        self.note(tier, run, self.stored[tier][run] + missing)
        return True

    def note(self, tier: int, run: int, blocks: int) -> None:
        """So many blocks of a run are written in a tier now."""
        self._stored_blocks[tier] += blocks - self.stored[tier][run]
        self.stored[tier][run] = blocks

    def missing(self, tier: int, run: int, blocks: int) -> int:
        """Blocks, of those that leave a faster tier, that this one has no copy of."""
        return blocks - min(blocks, max(0, self.stored[tier][run] - self._alone(tier, run)))

    def target(self, tier: int, run: int) -> int:
        """Tier that a run goes to when it leaves one; the count of tiers for none."""
        return tier + 1

    def cut(self, tier: int, run: int, kept: int) -> None:
        """Take the tail of a run out of a level, where nothing continues it there."""
        level, policy = self.levels[tier], self.policies[tier]
        if level.held[run] <= kept or not level.is_leaf(run):
            return
        leaving = level.held[run] - kept
        left = self.stored[tier][run] - min(leaving, self._alone(tier, run))
        self.note(tier, run, max(0, min(left, kept)))
        parent = level.cut(run, leaving)
        if not level.held[run]:
            policy.gone(run)
        if parent:
            policy.became_leaf(parent)


class WriteThrough(Tiers):
    """Everything is written to every tier as it is made, or never; each keeps what was used last."""

    def insert(self, path: Sequence[int]) -> None:
        """What is not in a tier is written."""
        super().insert(path)
        for tier in range(1, len(self.levels)):
            stored, lengths = self.stored[tier], self.levels[tier].lengths
            missing = {run: lengths[run] - stored[run] for run in path if stored[run] < lengths[run]}
            if missing and self.write(tier, sum(missing.values())):
                for run in missing:
                    self.note(tier, run, lengths[run])

    def keep(self, tier: int, run: int, blocks: int) -> bool:
        """It is in the slower tier already, or was lost on the way there."""
        return self.stored[tier][run] >= self.levels[tier].held[run]


class FixedTtl(Tiers):
    """What was not used for a fixed time leaves for the next tier, and others only where room is short."""

    def __init__(self, trace: Trace, capacities: Sequence[int], write: Write, ttl_s: Sequence[float]) -> None:
        super().__init__(trace, capacities, write)
        self._ttl_s = ttl_s

    def shrink(self, tier: int) -> None:
        """Let blocks leave for their age, then for room."""
        level, policy, oldest_s = self.levels[tier], self.policies[tier], self.now_s - self._ttl_s[tier]
        while level.leaves:
            run = policy.victim()
            if self.used_s[run] >= oldest_s:
                break
            self.leave(tier, run, level.held[run])
        super().shrink(tier)


class _Least:
    """Victims of one level, by what all levels have learned."""

    def __init__(self, level: Cache, owner: Ours, seed: int) -> None:
        self._level = level
        self._owner = owner
        self._chosen = 0
        draw = random.Random(seed)
        self._victims: Victims[int, float] = Victims(
            lambda n: level.leaves if len(level.leaves) <= n else draw.choices(level.leaves, k=n), level.is_leaf
        )

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """Nothing: all levels learn together."""

    def stored(self, number: int, path: Sequence[int]) -> None:
        """The end of a chain competes with the rest."""
        self._victims.renew()
        self._offer(path[-1])

    def victim(self) -> int:
        """By the least worth."""
        self._chosen = self._victims.next(self._owner.worth)
        return self._chosen

    def blocks_of(self, run: int) -> int:
        """The last block of a chain alone; then the rest of its run, judged anew."""
        if not self._owner.reuse.is_tail(run) or self._level.held[run] == 1:
            return sys.maxsize
        self._owner.reuse.cut(run)
        self._victims.taken()
        self._offer(run)
        return 1

    def became_leaf(self, run: int) -> None:
        """It competes."""
        self._offer(run)

    def gone(self, run: int) -> None:
        """What goes because it left a slower level is passed over later, as no leaf."""
        if run == self._chosen:
            self._victims.taken()
            self._chosen = 0
        self._owner.gone(self._level, run)

    def _offer(self, run: int) -> None:
        if self._level.is_leaf(run):
            self._victims.offer(run, self._owner.worth(run))


@dataclass(frozen=True, slots=True)
class Rules:
    """What a pool declares of its tiers (`policy.*`), and which of them are whose."""

    eviction: str = "ReuseAware"
    placement: str = "ReuseInterval"
    has_admission: bool = True
    """Without it everything is written to what is no memory."""
    memories: int = 2
    """The first so many levels are memory."""
    engine_levels: int = 1
    """The first so many are the engine's own, which has no watermarks."""
    low_part: float = 1.0
    """A level behind those that had more than it may keeps this part of that."""


class Ours(Tiers):
    """The agent's own: what is worth least leaves, for the tier where it is still likely there when it returns."""

    def __init__(
        self,
        trace: Trace,
        capacities: Sequence[int],
        write: Write,
        hints: Hints = Hints.NONE,
        rules: Rules = Rules(),
    ) -> None:
        """By the rules of a pool, and what the policy is told of requests."""
        self._is_lru = rules.eviction == "LeafLRU"
        self._cascades = rules.placement == "Cascade"
        self._sends_down = rules.has_admission
        self._sessions: set[Hashable] = set()
        self._is_first_turn = True
        """Of the request that is under way, as far as the agent knows."""
        self._facts = facts(trace, hints)
        self._memories = rules.memories
        self._table: MarkTable[int] = MarkTable()
        self.reuse: ExpectedReuse[int] = ExpectedReuse(self._table)
        self._prices = [Price() for _ in capacities]
        self.admission: WriteAdmission[int] | None = None
        if rules.has_admission and not self._is_lru:
            self.admission = WriteAdmission()
        self._seeds = iter(range(1, 100))
        super().__init__(trace, capacities, write, rules.engine_levels)
        behind = slice(rules.engine_levels, None)
        self.floors[behind] = [max(1, int(blocks * rules.low_part)) for blocks in capacities[behind]]

    def policy(self, trace: Trace, level: Cache) -> Policy:
        """By worth at every level, or by last use."""
        return LeafLru(level) if self._is_lru else _Least(level, self, next(self._seeds))

    def asked(self, number: int, path: Sequence[int], now_s: float) -> None:
        """Learn from it; nothing is learned where the least recently used leaves."""
        super().asked(number, path, now_s)
        if self._is_lru:
            return
        lengths = self.levels[0].lengths
        sizes = [lengths[run] for run in path]
        if self.admission is not None:
            self.admission.asked(path, sum(sizes))
        self.reuse.begin(path, sizes, self._facts[number], now_s)

    def used(self, number: int, path: Sequence[int], now_s: float) -> None:
        """Note whether its session was here before, and go on."""
        session = self._facts[number].session
        self._is_first_turn = session is None or session not in self._sessions
        self._sessions.add(session)
        super().used(number, path, now_s)

    def insert(self, path: Sequence[int]) -> None:
        """What is new goes down at once where memory is above its high watermark (`policy.admission.admit`)."""
        known = self.levels[-1].held
        new = [(run, self.levels[0].lengths[run] - known[run]) for run in reversed(path)]
        super().insert(path)
        target = self._saved_levels
        if not (self._sends_down and self._is_first_turn and target < len(self.levels)):
            return
        level = self.levels[target - 1]
        excess = level.used_blocks - level.capacity_blocks
        for run, blocks in new:
            sent = min(excess, blocks)
            if sent <= 0:
                break
            excess -= sent
            if not self._declined(target, run, sent):
                self.keep(target, run, sent)

    def target(self, tier: int, run: int) -> int:
        """By the reuse interval, or the next slower one."""
        if self._cascades or tier + 2 >= len(self.levels):
            return tier + 1
        found = by_reuse_interval([self._facts_of(i) for i in range(len(self.levels))], tier, self.worth(run)).target
        return tier + 1 if found is None else int(found)

    def _declined(self, tier: int, run: int, blocks: int) -> int:
        """Blocks of those leaving for a tier that are not worth a write, at their tail.

        Memory takes anything; other media what is likely to return, and what is continued by blocks that are there.
        """
        missing = self.missing(tier, run, blocks) if self._memories <= tier < len(self.levels) else 0
        if self.admission is None or not missing:
            return 0
        chance = self.reuse.return_chance(run, self._table.marks.get(run, UNMARKED), self.now_s)
        if chance is None:
            return 0
        self.admission.offered(run, missing, chance)
        return 0 if self.admission.takes(chance) or not self.levels[tier].is_leaf(run) else missing

    def _facts_of(self, tier: int) -> TierFacts:
        level = self.levels[tier]
        price = self._prices[tier].per_s if self.used_blocks(tier) >= level.capacity_blocks else 0.0
        return TierFacts(str(tier), tier, takes_writes=True, survives_restart=False, is_memory=False, price_per_s=price)

    def leave(self, tier: int, run: int, blocks: int) -> None:
        """What it is worth is the price of a place in the tier."""
        self._prices[tier].paid(self.worth(run))
        declined = self._declined(self.target(tier, run), run, blocks)
        if declined:
            self.drop(tier, len(self.levels), run, declined)
        if blocks > declined:
            super().leave(tier, run, blocks - declined)

    def worth(self, run: int) -> float:
        """Of a run's blocks; of what nothing was learned about, by age alone."""
        if self._is_lru:
            return self.reuse.times.overall(self.now_s - self.used_s[run])
        return self.reuse.worth(run, self._table.marks.get(run, UNMARKED), self.now_s)

    def gone(self, level: Cache, run: int) -> None:
        """Nothing is kept of what has left the slowest tier."""
        if level is self.levels[-1]:
            self.reuse.cut(run)
            self._table.marks.pop(run, None)
