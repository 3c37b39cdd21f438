"""I3: a decoding session's blocks are never evicted; a reader stopped past its lease fails loudly.

Two halves. In virtual time sessions open, fork, decode, idle and end on a node whose tiers are asked for more than they
hold; a model that knows nothing of the product's books says which blocks must be there. Then real engine processes are
stopped by SIGSTOP amid a read of a real agent's memory, their leases run out, and what they read changes under them.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from faults import i3_stopped
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.blocks import sessions
from kvstrata_agent.blocks.block import Entry
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.sessions import Session, SessionState
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.load import AcquireCall
from kvstrata_agent.cache.session_journal import SessionJournal
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    SCOPE,
    FakeAuthenticator,
    TestCodecs,
    bytes_of,
    dict_tier,
    digest,
    dram_tier,
    make_node,
    store_chain,
)
from support.agent.doubles import secret as secret_of
from support.runner.outcome import Outcome, Scale
from support.runner.virtual_loop import VirtualLoop

SLOTS: Final = 32
LOW_SLOTS: Final = 32
DEMAND: Final = 1.2
"""Blocks that live sessions want, over what all tiers hold."""
DEMAND_MAX: Final = 1.4
SESSIONS_MAX: Final = 24
ROUNDS: Final = 1000
GROWTH_MAX: Final = 4
WANT_MAX: Final = 16
"""Blocks that one session stores at most."""


def run(scale: Scale) -> Outcome:
    """Both halves, and their controls."""
    seeds = range(scale.first_seed, scale.first_seed + scale.of(100, 8))
    total = Tally()
    for seed in seeds:
        total.add(_run_seed(seed, scale.of(ROUNDS, 200)))
        if scale.is_full and seed % 10 == 9:
            sys.stderr.write(f"I3: {total.operations:,} block operations, {len(total.violations)} violations\n")
    stopped = i3_stopped.run(scale.of(40, 1))
    return Outcome(
        n=total.operations + stopped.readers,
        unit="block operations and stopped readers",
        violations=tuple(total.violations + stopped.violations),
        is_control_caught=_control() and stopped.is_control_caught,
        values={
            "demand_ratio": total.demand / max(1, total.rounds),
            "refused_blocks": float(total.refused),
            "evicted_blocks_of_others": float(total.evicted),
            "stopped_readers": float(stopped.readers),
        },
    )


class Tally:
    """What happened in the first half."""

    def __init__(self) -> None:
        self.operations = 0
        self.rounds = 0
        self.demand = 0.0
        self.refused = 0
        self.evicted = 0
        self.violations: list[str] = []

    def add(self, other: "Tally") -> None:
        """Add another run's."""
        self.operations += other.operations
        self.rounds += other.rounds
        self.demand += other.demand
        self.refused += other.refused
        self.evicted += other.evicted
        self.violations += other.violations


class _Watched(Node):
    """Tells of every copy that leaves by policy."""

    __slots__ = ("watch",)

    watch: Callable[[Entry, Tier], None]

    def evict(self, entries: Iterable[Entry], tier: Tier, reason: str) -> int:
        def watched() -> Iterator[Entry]:
            for entry in entries:
                self.watch(entry, tier)
                yield entry

        return Node.evict(self, watched(), tier, reason)


class _Town:
    """Sessions of engines over one node, and the model: chains by session name, and who decodes."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.tally = Tally()
        self._seed = seed
        self._rng = random.Random(seed)
        self._chains: dict[str, list[int]] = {}
        self._decoding: set[str] = set()
        self._numbers = 0
        self._wants: dict[str, int] = {}
        """Blocks that each session is still going to store."""
        self._round = 0
        tiers = [dram_tier(SLOTS * BLOCK_BYTES), dict_tier("nvme", LOW_SLOTS * BLOCK_BYTES, 1, 2)]
        policy = {"admission": {"type": "Always"}, "compression": {"mode": "None"}}
        node = make_node(tiers, kind=_Watched, policy=policy)
        node.clock = loop.time
        assert isinstance(node, _Watched)
        node.watch = self._leaves
        self._core = AgentParts(node, TestCodecs(), journal=SessionJournal(wall=loop.time))
        self._sweeper = Sweeper(self._core.cache, FakeAuthenticator())

    async def live(self, rounds: int) -> Tally:
        """Let so many rounds pass; returns what happened."""
        steps = (self._decode, self._decode, self._decode, self._begin, self._rest, self._load, self._passers_by)
        for self._round in range(rounds):
            await self._rng.choice(steps)()
            await self._sweeper._tend()
            self._let_time_pass()
            self._look()
            self.tally.rounds += 1
            self.tally.demand += self._wanted() / (SLOTS + LOW_SLOTS)
        await self._core.close()
        for tier in self._core.node.tiers:
            await tier.backend.close()
        return self.tally

    async def _begin(self) -> None:
        """A new session, a fork of another one, or one that comes back."""
        if len(self._chains) >= SESSIONS_MAX or self._wanted() >= DEMAND_MAX * (SLOTS + LOW_SLOTS):
            return
        name = f"s{self._round}"
        origin = self._rng.choice(["", *self._chains])
        self._core.cache.life.open(1, "a", secret_of(SCOPE), name, parent=origin, priority="")
        self._chains[name] = [n for n in self._chains.get(origin, []) if self._entry(n)]
        self._wants[name] = self._rng.randint(GROWTH_MAX, WANT_MAX)
        self._enter(name, SessionState.DECODING)

    async def _decode(self) -> None:
        """A session grows at its end."""
        if not self._decoding:
            return await self._begin()
        name = self._rng.choice(sorted(self._decoding))
        chain = self._chains[name]
        grown = [self._next_number() for _ in range(self._rng.randint(1, GROWTH_MAX))]
        stored = await self._store(grown, chain[-1] if chain else None, name)
        chain += grown[:stored]
        self._wants[name] = max(0, self._wants[name] - stored)
        self.tally.refused += len(grown) - stored
        return None

    async def _rest(self) -> None:
        """A session turns idle, ends for good, or is archived, when sessions want more than there is."""
        if not self._chains or self._wanted() < DEMAND * (SLOTS + LOW_SLOTS):
            return
        name = self._rng.choice(sorted(self._chains))
        session = self._session(name)
        self._decoding.discard(name)
        if self._rng.random() < 0.5:
            self._core.cache.life.touch(session, SessionState.IDLE, 0, 0.0)
        else:
            self._core.cache.life.finish(session, archive=self._rng.random() < 0.3)
            del self._chains[name]

    def _wanted(self) -> int:
        """Blocks that live sessions have, and those that they still want; what forks share counts once."""
        return len(set[int]().union(*self._chains.values())) + sum(self._wants[name] for name in self._chains)

    async def _load(self) -> None:
        """A session comes back and reads what is left of its chain."""
        if not self._chains:
            return
        name = self._rng.choice(sorted(self._chains))
        chain = self._chains[name]
        left = next((i for i, n in enumerate(chain) if not self._entry(n)), len(chain))
        self._chains[name] = chain[:left]
        self._enter(name, SessionState.DECODING)
        place = self._place(name)
        reads = (
            await self._core.cache.reader.acquire(AcquireCall(place, [digest(n) for n in chain[:left]], 30.0, 5.0))
        ).reads
        for read, number in zip(reads, chain, strict=False):
            self._compare(read.lease.residence.slot.stamp, read.lease.entry, number)
        self._session(name).follow([r.lease.entry for r in reads])
        self._core.cache.release(1, [r.lease.id for r in reads])
        self.tally.operations += len(reads)

    async def _passers_by(self) -> None:
        """Others store what belongs to no session."""
        self.tally.operations += await self._store([self._next_number() for _ in range(GROWTH_MAX)], None, "")

    async def _store(self, numbers: list[int], parent: int | None, name: str) -> int:
        stored = await store_chain(self._core, self._place(name), numbers, parent)
        self.tally.operations += len(numbers)
        return stored

    def _leaves(self, entry: Entry, tier: Tier) -> None:
        """A copy is about to leave by policy: never the last one of a decoded block, nor one that memory builds on."""
        number = int.from_bytes(entry.digest, "big")
        self.tally.evicted += 1
        for name in self._decoding:
            chain = self._chains[name]
            if number not in chain:
                continue
            is_built_on = tier.level == 0 and all(map(self._is_up, chain[chain.index(number) :]))
            if len(entry.residences) == 1 or is_built_on:
                self._broken(f"block {number} leaves {tier.name} while {name} decodes from it")

    def _look(self) -> None:
        """Every block of every decoding session is there."""
        for name in self._decoding:
            missing = [n for n in self._chains[name] if not self._entry(n)]
            if missing:
                self._broken(f"session {name} decodes and has lost {missing}")

    def _compare(self, stamp: int, entry: Entry, number: int) -> None:
        copy = next(r for r in entry.residences if r.slot.stamp == stamp)
        assert copy.tier.backend.mappable is not None
        if bytes(copy.tier.backend.mappable.view(copy.slot)[:BLOCK_BYTES]) != bytes_of(number):
            self._broken(f"block {number} has other bytes")

    def _let_time_pass(self) -> None:
        for name in self._decoding:
            self._core.node.sessions.refresh(self._session(name), self._core.node.clock())
        self._sweeper.expire()

    def _broken(self, what: str) -> None:
        self.tally.violations.append(f"seed {self._seed}, round {self._round}: {what}")

    def _enter(self, name: str, state: SessionState) -> None:
        self._core.cache.life.touch(self._session(name), state, 0, 0.0)
        self._decoding.add(name)

    def _session(self, name: str) -> Session:
        session = self._core.cache.life.find("a", secret_of(SCOPE), name)
        assert session is not None
        return session

    def _place(self, name: str) -> RequestContext:
        return RequestContext(1, "a", secret_of(SCOPE), LAYOUT_ID, BLOCK_BYTES, self._session(name) if name else None)

    def _entry(self, number: int) -> bool:
        entry = self._core.node.index.find(SCOPE, digest(number))
        return entry is not None and bool(entry.residences)

    def _is_up(self, number: int) -> bool:
        entry = self._core.node.index.find(SCOPE, digest(number))
        return entry is not None and bool(entry.residences) and entry.residences[0].tier.level == 0

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers


def _run_seed(seed: int, rounds: int) -> Tally:
    loop = VirtualLoop()

    async def live() -> Tally:
        return await _Town(seed, loop).live(rounds)

    try:
        return loop.run(live(), limit_s=1e9)
    finally:
        loop.close()


def _control() -> bool:
    """A node whose sessions guard nothing must be seen."""
    right = sessions._add_guard
    sessions._add_guard = lambda entry, guard: None  # noqa: ARG005
    try:
        return bool(_run_seed(0, 150).violations)
    finally:
        sessions._add_guard = right
