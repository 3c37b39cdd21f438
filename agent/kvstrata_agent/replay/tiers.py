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
from dataclasses import dataclass, replace
from heapq import heappop
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstrata_agent.policy.admission import WriteAdmission
from kvstrata_agent.policy.eviction import BATCH_PARTS
from kvstrata_agent.policy.expected_reuse import UNMARKED, ExpectedReuse, MarkTable, Victims
from kvstrata_agent.policy.pathology import TRIED_EVERY, Recent, Sign, findings, polluters
from kvstrata_agent.policy.placement import Price, TierFacts, by_reuse_interval
from kvstrata_agent.policy.reuse_curve import SAME_USE_S
from kvstrata_agent.replay.cache import Bag, Cache, LeafLru, Policy
from kvstrata_agent.replay.reuse_aware import Hints, facts

if TYPE_CHECKING:
    from kvstrata_agent.replay.chains import Trace

_BEFORE_ALL: Final = 1 << 40
"""More than there are requests."""
_JUDGE_S: Final = 1.0
"""Between two looks at what has left, as in an agent."""
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
        self._continued = [[0] * len(trace.lengths) for _ in capacities]
        """Runs behind each one that have blocks written into each tier."""
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

    def play(self, trace: Trace) -> list[int]:
        """Ask for each request's chain and use it, with no engine or queue between; returns blocks found by tier."""
        found = [0] * len(self.levels)
        for number, (path, at_s) in enumerate(zip(trace.paths, trace.at_s, strict=True)):
            self.asked(number, path, at_s)
            for source in self.sources(path):
                found[source.tier] += source.blocks
            self.used(number, path, at_s)
        return found

    def insert(self, path: Sequence[int]) -> None:
        """Put a chain into all levels."""
        for level in self.levels:
            level.insert(path)

    def shrink(self, tier: int) -> None:
        """Let blocks leave a level until it has no more than it may."""
        level, policy, kept = self.levels[tier], self.policies[tier], self.kept_blocks(tier)
        while (excess := self.used_blocks(tier) - kept) > 0:
            run = policy.victim()
            self.leave(tier, run, min(excess, policy.blocks_of(run), self._alone(tier, run) or level.held[run]))

    def kept_blocks(self, tier: int) -> int:
        """Blocks that a level has when all that leaves has left: one that is too full is emptied to its floor."""
        high = self.levels[tier].capacity_blocks
        return high if self.used_blocks(tier) <= high else self.floors[tier]

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
        before = self.stored[tier][run]
        self._stored_blocks[tier] += blocks - before
        self.stored[tier][run] = blocks
        if bool(blocks) != bool(before):
            self._continued[tier][self.levels[tier].parents[run]] += 1 if blocks else -1

    def is_continued(self, tier: int, run: int) -> bool:
        """True where blocks that are written in a tier are of no use without this run's last one."""
        return self._continued[tier][run] > 0

    def missing(self, tier: int, run: int, blocks: int) -> int:
        """Blocks, of those that leave a faster tier, that this one has no copy of."""
        return blocks - min(blocks, self._doubled(tier, run))

    def _doubled(self, tier: int, run: int) -> int:
        """Blocks of a run that are in a tier and in a faster one."""
        return max(0, self.stored[tier][run] - self._alone(tier, run))

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


class _Oldest(LeafLru):
    """The least recently used of one level, where what is only passing through goes first."""

    def __init__(self, level: Cache, owner: Ours) -> None:
        super().__init__(level)
        self._owner = owner

    def set_ranks(self, number: int, path: Sequence[int]) -> None:
        """By the number of the request; before all that were not sent down."""
        for run in path:
            self.rank[run] = number - (_BEFORE_ALL if self._owner.passing_blocks(self.cache, run) else 0)

    def stored(self, number: int, path: Sequence[int]) -> None:
        """All of the chain that faster tiers double may leave this one."""
        super().stored(number, path)
        for run in path[:-1]:
            self.became_leaf(run)

    def victim(self) -> int:
        """Of those that may leave, which are offered when they come to; of all leaves, where none may."""
        while self._heap:
            rank, run = self._heap[0]
            may_leave = self.rank[run] == rank and self._owner.may_leave(self.cache, run)
            if may_leave and (rank >= 0 or self._owner.passing_blocks(self.cache, run)):
                return run
            heappop(self._heap)
            if may_leave:  # What was only passing through has left.
                self.rank[run] += _BEFORE_ALL
                self.became_leaf(run)
        return min(self.cache.leaves, key=self.rank.__getitem__)

    def blocks_of(self, run: int) -> int:
        """What is only passing through, or all that is there."""
        return self._owner.passing_blocks(self.cache, run) or super().blocks_of(run)

    def became_leaf(self, run: int) -> None:
        """It may leave, if it is one."""
        if self._owner.may_leave(self.cache, run):
            self.queue(run, self.cache.leaves, self._owner.doubles(self.cache))


class _Least:
    """Victims of one level, by what all levels have learned."""

    def __init__(self, level: Cache, owner: Ours, seed: int) -> None:
        self._level = level
        self._owner = owner
        self._chosen = 0
        draw = random.Random(seed)

        def drawn(count: int) -> list[int]:
            kinds = (level.leaves, owner.doubles(level))
            return [run for runs in kinds for run in (runs if len(runs) <= count else draw.choices(runs, k=count))]

        def may_leave(run: int) -> bool:
            return level.is_leaf(run) or owner.is_double(level, run)

        self._victims: Victims[int, tuple[float, float]] = Victims(drawn, may_leave)

    def arrive(self, number: int, path: Sequence[int], matched_blocks: int) -> None:
        """Nothing: all levels learn together."""

    def stored(self, number: int, path: Sequence[int]) -> None:
        """The end of a chain competes with the rest."""
        self._victims.renew()
        self._offer(path[-1])

    def victim(self) -> int:
        """By the least worth."""
        self._chosen = self._victims.next(self._worth)
        return self._chosen

    def blocks_of(self, run: int) -> int:
        """The last block of a chain alone, and what is only passing through; then the rest of its run, judged again."""
        owner = self._owner
        is_tail = owner.reuse.is_tail(run)
        leaving = 1 if is_tail else owner.passing_blocks(self._level, run)
        if not 0 < leaving < self._level.held[run]:
            return sys.maxsize
        if is_tail:
            owner.reuse.cut(run)
        self._victims.taken()
        self._chosen = 0
        self._victims.offer(run, self._worth(run, leaving))
        return leaving

    def became_leaf(self, run: int) -> None:
        """It competes, again where only copies of it have left."""
        if run == self._chosen:
            self._victims.taken()
            self._chosen = 0
        self._offer(run)

    def gone(self, run: int) -> None:
        """What goes because it left a slower level is passed over later, as no leaf."""
        if run == self._chosen:
            self._victims.taken()
            self._chosen = 0
        self._owner.gone(self._level, run)

    def _offer(self, run: int) -> None:
        if self._level.is_leaf(run):
            self._victims.offer(run, self._worth(run))

    def _worth(self, run: int, leaving: int = 0) -> tuple[float, float]:
        """Of equals the least recently used goes first; of what is left when so many blocks have gone.

        What does not lie in the tier, or is on its way, is taken last, and what is only passing through first.
        """
        owner = self._owner
        if run == owner.arriving or not owner.lies_in(self._level, run):
            return inf, 0.0
        is_passing = owner.passing_blocks(self._level, run) > leaving
        return -1.0 if is_passing else owner.worth(run), owner.used_s[run]


class _Pollution:
    """Whether nearly all that is stored leaves unread: `policy.pathology`, for runs of one tenant."""

    def __init__(self, runs: int) -> None:
        self.is_found = False
        self._read = [0] * runs
        """Blocks of each run's beginning that were read since they were stored."""
        self._born_s = [0.0] * runs
        """When the last ones of each run were stored."""
        self._recent: Recent[Sign] = Recent(0.0)
        self._judged_s = 0.0

    def judge(self, now_s: float) -> None:
        """By what has left."""
        if now_s - self._judged_s >= _JUDGE_S:
            self._judged_s, counts = now_s, self._recent.judged(now_s)
            settled, unread = {"": counts[Sign.SETTLED]}, {"": counts[Sign.UNREAD]}
            self.is_found = bool(polluters(findings(counts), settled, unread))

    def used(self, run: int, held: int, length: int, now_s: float) -> None:
        """Blocks of a run were read, and the rest stored."""
        if held > self._read[run] and now_s > self._born_s[run] + SAME_USE_S:
            self._recent.counts[Sign.SETTLED] += held - self._read[run]
            self._read[run] = held
        if held < length:
            self._born_s[run] = now_s

    def spares(self, run: int, held: int) -> bool:
        """True where the end of a run is not written."""
        return self.is_found and run % TRIED_EVERY != 0 and self._read[run] < held

    def left(self, run: int, held: int, kept: int, now_s: float, *, had_its_chance: bool) -> None:
        """The end of a run has left for good."""
        if had_its_chance and now_s > self._born_s[run] + SAME_USE_S:
            unread = max(0, held - max(kept, self._read[run]))
            self._recent.counts[Sign.SETTLED] += unread
            self._recent.counts[Sign.UNREAD] += unread
        self._read[run] = min(self._read[run], kept)


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
    full_part: float = 1.0
    """The level that engines save to has place for so many times what it may have."""
    step_tokens: int = 0
    """Saved at a time; 0: a prompt is, whatever its length."""

    def without_engine(self, step_tokens: int = 0) -> Rules:
        """The same where nothing is found in an engine's own memory."""
        return replace(self, engine_levels=0, memories=self.memories - self.engine_levels, step_tokens=step_tokens)


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
        """By the rules of a pool, and what the policy knows of requests."""
        self._is_lru = rules.eviction == "LeafLRU"
        self._cascades = rules.placement == "Cascade"
        self._sends_down = rules.has_admission
        self._passing: dict[int, tuple[Cache, int]] = {}
        """Runs whose end leaves a level first, as nobody used it since it came: the level, and blocks before that."""
        self._pollution = _Pollution(len(trace.lengths))
        self._is_declining = False
        """While what is not worth a write leaves."""
        self._full_part = rules.full_part
        self._step_blocks = rules.step_tokens // trace.block_tokens
        self._doubles = [Bag() for _ in capacities]
        """Runs that have blocks in each tier which are in a faster one as well, and some that had."""
        self.arriving = 0
        """Last run of what makes others leave; what continues it is on its way."""
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
        self._tiers = {id(level): tier for tier, level in enumerate(self.levels)}
        behind = slice(rules.engine_levels, None)
        self.floors[behind] = [max(1, int(blocks * rules.low_part)) for blocks in capacities[behind]]

    def policy(self, trace: Trace, level: Cache) -> Policy:
        """By worth at every level, or by last use."""
        return _Oldest(level, self) if self._is_lru else _Least(level, self, next(self._seeds))

    def asked(self, number: int, path: Sequence[int], now_s: float) -> None:
        """Learn from it; nothing is learned where the least recently used leaves."""
        super().asked(number, path, now_s)
        self._pollution.judge(now_s)
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
        last = self.levels[-1]
        for run in path:
            self._pollution.used(run, last.held[run], last.lengths[run], now_s)
            self._passing.pop(run, None)
        super().used(number, path, now_s)

    def insert(self, path: Sequence[int]) -> None:
        """What of a first turn lies above the high watermark of memory goes down (`policy.admission.passing_bytes`)."""
        known = self.levels[-1].held
        new = [(run, self.levels[0].lengths[run] - known[run]) for run in reversed(path)]
        super().insert(path)
        for tier in range(self._saved_levels, len(self.levels)):
            for run in path:
                self._note_double(tier, run)
        target = min(self._saved_levels, len(self.levels))
        level = self.levels[target - 1]
        excess = level.used_blocks - level.capacity_blocks
        self._make_way(target - 1, path[-1])
        if not (self._sends_down and self._is_first_turn and target < len(self.levels)):
            return
        for run, blocks in new:
            sent = min(excess, blocks)
            if sent <= 0:
                break
            excess -= sent
            if not self._declined(target, run, sent, stays=True):
                self._passing[run] = level, level.lengths[run] - sent
                self.keep(target, run, sent)

    def _make_way(self, tier: int, last: int) -> None:
        """Let others leave for part of what finds no free place, before the end of what comes is the first to leave.

        For a step of an engine room is made by eighths of the tier (`policy.eviction.BATCH_PARTS`). The first eighth
        may be the end of the step before; then what comes continues that. In the lowest tier what comes is declined
        where the rest is worth more.
        """
        if not self._is_lru and tier + 1 == len(self.levels):
            return
        level, policy = self.levels[tier], self.policies[tier]
        full = self._full_part * level.capacity_blocks
        others_part = max(0.0, 1 - full / BATCH_PARTS / self._step_blocks) if self._step_blocks else 0.0
        others = round(max(0.0, level.used_blocks - full) * others_part)
        self.arriving = last
        while others > 0 and (run := policy.victim()) != last and (alone := self._alone(tier, run)):
            before = level.used_blocks
            self.leave(tier, run, min(others, policy.blocks_of(run), alone))
            others -= before - level.used_blocks
        self.arriving = 0

    def note(self, tier: int, run: int, blocks: int) -> None:
        """What comes into a tier may leave it."""
        is_more = blocks > self.stored[tier][run]
        super().note(tier, run, blocks)
        if is_more:
            self._note_double(tier, run)
            self.policies[tier].became_leaf(run)

    def _note_double(self, tier: int, run: int) -> None:
        if tier >= self._saved_levels and self._doubled(tier, run) > 0:
            self._doubles[tier].add(run)

    def doubles(self, level: Cache) -> Sequence[int]:
        """Runs that have doubles in the tier of a level, and some that had."""
        return self._doubles[self._tiers[id(level)]].items

    def is_double(self, level: Cache, run: int) -> bool:
        """True where blocks of a run may leave the tier of a level whatever continues them: a faster one has them."""
        tier = self._tiers[id(level)]
        if run not in self._doubles[tier]:
            return False
        if self._doubled(tier, run) > 0:
            return True
        self._doubles[tier].discard(run)
        return False

    def may_leave(self, level: Cache, run: int) -> bool:
        """True where blocks of a run lie in the tier of a level and nothing there is in their way."""
        return (level.is_leaf(run) and self.lies_in(level, run)) or self.is_double(level, run)

    def lies_in(self, level: Cache, run: int) -> bool:
        """True where a run has blocks in the tier of a level, and not only in faster ones."""
        tier = self._tiers[id(level)]
        return tier < self._saved_levels or self.stored[tier][run] > 0

    def shrink(self, tier: int) -> None:
        """Out of slower tiers go copies that faster ones double like others, and nothing else goes with them."""
        if tier < self._saved_levels:
            super().shrink(tier)
            return
        level, policy, stored = self.levels[tier], self.policies[tier], self.stored[tier]
        kept = self.kept_blocks(tier)
        while (excess := self.used_blocks(tier) - kept) > 0:
            run = policy.victim()
            alone = self._alone(tier, run)
            if level.is_leaf(run) and (alone or not stored[run]):
                self.leave(tier, run, min(excess, policy.blocks_of(run), alone or level.held[run]))
            else:
                self.note(tier, run, stored[run] - min(excess, self._doubled(tier, run)))
                policy.became_leaf(run)

    def passing_blocks(self, level: Cache, run: int) -> int:
        """Blocks at the end of a run that leave this level before all else."""
        passed = self._passing.get(run)
        return max(0, level.held[run] - passed[1]) if passed and passed[0] is level else 0

    def target(self, tier: int, run: int) -> int:
        """By the reuse interval, or the next slower one."""
        if self._cascades or tier + 2 >= len(self.levels):
            return tier + 1
        found = by_reuse_interval([self._facts_of(i) for i in range(len(self.levels))], tier, self.worth(run)).target
        return tier + 1 if found is None else int(found)

    def _declined(self, tier: int, run: int, blocks: int, *, stays: bool = False) -> int:
        """Blocks of those leaving for a tier that are not worth a write, at their tail.

        Memory takes anything; other media what is likely to return, and what is continued by blocks that are there.
        What is declined and `stays` where it is counts when it leaves that.
        """
        is_costly = self._sends_down and self._memories <= tier < len(self.levels)
        missing = self.missing(tier, run, blocks) if is_costly else 0
        if not missing:
            return 0
        chance = None
        if self.admission is not None:
            chance = self.reuse.return_chance(run, self._table.marks.get(run, UNMARKED), self.now_s)
        takes = self.admission is None or chance is None or self.admission.takes(chance)
        is_spared = not takes or self._pollution.spares(run, self.levels[-1].held[run])
        is_declined = is_spared and not self.is_continued(tier, run)
        if self.admission is not None and chance is not None and not (is_declined and stays):
            self.admission.offered(run, missing, chance)
        return missing if is_declined else 0

    def _facts_of(self, tier: int) -> TierFacts:
        level = self.levels[tier]
        price = self._prices[tier].per_s if self.used_blocks(tier) >= level.capacity_blocks else 0.0
        return TierFacts(str(tier), tier, takes_writes=True, survives_restart=False, is_memory=False, price_per_s=price)

    def leave(self, tier: int, run: int, blocks: int) -> None:
        """What it is worth is the price of a place in the tier."""
        self._prices[tier].paid(self.worth(run))
        declined = self._declined(self.target(tier, run), run, blocks)
        if declined:
            self._is_declining = True
            self.drop(tier, len(self.levels), run, declined)
            self._is_declining = False
        if blocks > declined:
            super().leave(tier, run, blocks - declined)

    def cut(self, tier: int, run: int, kept: int) -> None:
        """Note what is read no more."""
        level = self.levels[tier]
        held = level.held[run]
        super().cut(tier, run, kept)
        if level is self.levels[-1] and level.held[run] < held:
            self._pollution.left(run, held, level.held[run], self.now_s, had_its_chance=not self._is_declining)

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
