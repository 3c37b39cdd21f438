"""The core against a reference model: never wrong bytes, never freed while leased, nothing left over after a sweep.

Tiny tiers, few keys, several connections: reserve, publish, acquire, release, pin, decode, evict, shrink, crash.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstrata_agent.blocks import node as node_module
from kvstrata_agent.blocks.request import RequestContext
from kvstrata_agent.blocks.reservations import RESERVATION_S, Reservation
from kvstrata_agent.cache.load import AcquireCall, Read
from kvstrata_agent.cache.store import EXISTED, PUBLISHED, REFUSED
from kvstrata_api.blocks import ScopeId
from kvstrata_api.checksum import checksum
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT_ID,
    OTHER_SCOPE,
    SCOPE,
    Clock,
    DictBackend,
    bytes_of,
    dict_tier,
    digest,
    secret,
)
from support.agent.session_rules import LOW_SLOTS, SLOTS, TENANT, SessionRules, owners, seldom
from support.runner.virtual_loop import VirtualLoop

pytestmark = pytest.mark.stateful

T = TypeVar("T")
CHAINS = 4
LEASE_S = 20.0

scopes = st.sampled_from([SCOPE, SCOPE, SCOPE, OTHER_SCOPE])
chains = st.tuples(st.integers(0, CHAINS - 1), st.sampled_from([8, 8, 6, 3, 1]))
"""Which chain, and how many of its eight blocks."""


def content(scope: ScopeId, number: int) -> bytes:
    return bytes_of(number * 2 + (scope == OTHER_SCOPE))


class AgentMachine(SessionRules, RuleBasedStateMachine):
    """Drives a core with two real tiers' worth of books: memory extents above, a dict below."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.clock = Clock()
        self.reads: dict[int, list[tuple[Read, ScopeId, int, float]]] = {1: [], 2: [], 3: []}
        self.reserved: dict[int, list[tuple[Reservation, ScopeId, int]]] = {1: [], 2: [], 3: []}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(node_module, "ERASED_AT_ONCE", 3)  # So that much happens before all of a scope is gone.
        self.written: set[tuple[ScopeId, int]] = set()
        """Blocks that were published at some time; only these may ever be read."""

    @initialize(compress=st.booleans())
    def start(self, *, compress: bool) -> None:
        self.mode = "Lossless" if compress else "None"
        self.run(self.make(dict_tier("nvme", LOW_SLOTS * BLOCK_BYTES, 1, 2), epoch=7))

    def forget_connections(self) -> None:
        super().forget_connections()
        for held in (self.reads, self.reserved):
            for mine in held.values():
                mine.clear()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In virtual time and without threads: what a busy machine delays must not change what happens."""
        return self.loop.run(work)

    def do(self, step: Callable[[], T]) -> T:
        """One step of the core, in its loop as always."""

        async def one() -> T:
            return step()

        return self.run(one())

    def place(self, owner: int, scope: ScopeId) -> RequestContext:
        session = self.session(f"s{owner}")
        return RequestContext(owner, TENANT, secret(scope), LAYOUT_ID, BLOCK_BYTES, session)

    @rule(owner=owners, scope=scopes, chain=chains, keeps=st.booleans())
    def turn(self, owner: int, scope: ScopeId, chain: tuple[int, int], *, keeps: bool) -> None:
        """What engines do all day: load what is there, store what is not."""
        self.acquire(owner, scope, chain)
        if not keeps:
            self.release(owner, len(self.reads[owner]))
        self.store(owner, scope, chain)

    @rule(owner=owners, scope=scopes, chain=chains)
    def store(self, owner: int, scope: ScopeId, chain: tuple[int, int]) -> None:
        self.publish(owner, len(self.reserved[owner]), is_honest=True)
        self.reserve(owner, scope, chain)
        self.publish(owner, 8, is_honest=True)

    @rule(owner=owners, scope=scopes, chain=chains)
    def reserve(self, owner: int, scope: ScopeId, chain: tuple[int, int]) -> None:
        numbers = [chain[0] * 8 + i for i in range(chain[1])]
        made, *_ = self.run(self.core.cache.writer.reserve(self.place(owner, scope), b"", [digest(n) for n in numbers]))
        for number, reservation in zip(numbers, made, strict=False):
            if reservation is not None:
                mappable = reservation.tier.backend.mappable
                assert mappable is not None
                mappable.view(reservation.slot)[:BLOCK_BYTES] = content(scope, number)
                self.reserved[owner].append((reservation, scope, number))

    @rule(owner=owners, is_honest=seldom.map(lambda lies: not lies), count=st.integers(1, 8))
    def publish(self, owner: int, count: int, *, is_honest: bool) -> None:
        batch, self.reserved[owner] = self.reserved[owner][:count], self.reserved[owner][count:]
        sums = []
        for reservation, scope, number in batch:
            block = content(scope, number) if is_honest else b"lies"
            sums.append(checksum(block, digest(number), self.core.node.epoch, reservation.slot.stamp))
        ids = [r.id for r, _, _ in batch]
        results = self.run(self.core.cache.writer.publish(owner, ids, sums))
        self.note("publish", owner, ids, sums, results)
        for result, (reservation, scope, number) in zip(results, batch, strict=True):
            is_late = reservation.expires_s <= self.clock()
            assert result in (REFUSED, PUBLISHED, EXISTED)
            assert not is_honest or is_late or result != REFUSED
            if result == PUBLISHED and is_honest:
                self.written.add((scope, number))
            elif result == PUBLISHED:
                self._find_out(owner, scope, number)

    def _find_out(self, owner: int, scope: ScopeId, number: int) -> None:
        """The agent has believed a lie: its first reader finds out, and the block goes. None reads an erased scope."""
        call = AcquireCall(self.place(owner, scope), [digest(number)], LEASE_S, 1.0)
        reads = self.core.cache.reader.acquire_now(call).reads
        if self.core.node.index.is_erased(scope):
            assert not reads
            return
        (read,) = reads
        assert self.do(lambda: self.core.cache.reader.inspect(owner, [read.lease.id])) == 1
        assert self.do(lambda: self.core.cache.release(owner, [read.lease.id])) == 1
        assert self.core.node.index.find(scope, digest(number)) is None

    @rule(owner=owners, count=st.integers(1, 8))
    def abandon(self, owner: int, count: int) -> None:
        batch, self.reserved[owner] = self.reserved[owner][:count], self.reserved[owner][count:]
        ids = [r.id for r, _, _ in batch]
        self.do(lambda: self.core.cache.abandon(owner, ids))
        self.note("abandon", owner, ids, [], b"")

    @rule(owner=owners, scope=scopes, chain=chains)
    def acquire(self, owner: int, scope: ScopeId, chain: tuple[int, int]) -> None:
        numbers = [chain[0] * 8 + i for i in range(chain[1])]
        place = self.place(owner, scope)
        reads = self.run(
            self.core.cache.reader.acquire(AcquireCall(place, [digest(n) for n in numbers], LEASE_S, 1.0))
        ).reads
        if place.session is not None:
            place.session.follow([r.lease.entry for r in reads])
        for read, number in zip(reads, numbers, strict=False):
            assert (scope, number) in self.written
            assert self.bytes_of(read) == content(scope, number)
            self.reads[owner].append((read, scope, number, self.clock() + LEASE_S))

    def bytes_of(self, read: Read) -> bytes:
        tier, slot, record = read.lease.residence
        mappable = tier.backend.mappable
        assert mappable is not None
        block = bytes(mappable.view(slot)[: record.raw_bytes])
        assert checksum(block, read.lease.entry.digest, self.core.node.epoch, slot.stamp) == record.checksum
        return block

    @rule(owner=owners, count=st.integers(1, 8))
    def release(self, owner: int, count: int) -> None:
        batch, self.reads[owner] = self.reads[owner][:count], self.reads[owner][count:]
        ids = [r.lease.id for r, _, _, _ in batch]
        valid = self.do(lambda: self.core.cache.release(owner, ids))
        assert valid == sum(1 for _, _, _, expires_s in batch if expires_s > self.clock())
        self.note("release", owner, ids, [], b"")

    @rule(owner=owners, happens=seldom)
    def crash(self, owner: int, *, happens: bool) -> None:
        if happens:
            self.end(owner)

    def end(self, owner: int) -> None:
        self.do(lambda: self.core.node.end_owner(owner))
        self.reads[owner], self.reserved[owner] = [], []

    @rule(seconds=st.sampled_from([1.0, 15.0, LEASE_S, RESERVATION_S]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.do(self.sweeper.expire)
        self.swept_s = self.clock()
        node = self.core.node
        assert all(r.expires_s > self.swept_s for r in node.reservations)
        assert all(lease.expires_s > self.swept_s for owner in (1, 2, 3) for lease in node.leases.owned(owner))

    @rule()
    def tend(self) -> None:
        self.run(self.sweeper._tend())

    @rule(owner=owners, scope=scopes, chain=chains)
    def pin(self, owner: int, scope: ScopeId, chain: tuple[int, int]) -> None:
        self.core.cache.pin(self.place(owner, scope), [digest(chain[0] * 8 + i) for i in range(chain[1])], 10.0)

    @rule(slots=st.sampled_from([SLOTS, SLOTS, SLOTS, 8, 4]))
    def resize(self, slots: int) -> None:
        tier = self.core.node.tier("dram")
        tier.closing = self.run(tier.backend.resize(slots * BLOCK_BYTES))

    @rule(count=st.sampled_from([0, 0, 1, 2, 5]))
    def break_the_disk(self, count: int) -> None:
        """The next writes fail, or every other one while several are under way."""
        tier = self.core.node.tier("nvme")
        assert isinstance(tier.backend, DictBackend)
        tier.backend.failing_writes = count
        tier.paused_until_s = 0.0

    @rule(which=st.integers(0, LOW_SLOTS), happens=seldom)
    def rot(self, which: int, *, happens: bool) -> None:
        stored = self.core.node.tier("nvme").backend.stored
        if happens and stored:
            stamp = sorted(stored)[which % len(stored)]
            stored[stamp] = b"\xff" + stored[stamp][1:]

    @rule(
        work=st.lists(
            st.tuples(st.sampled_from(["acquire", "acquire", "reserve", "tend", "erase"]), owners, scopes, chains),
            max_size=6,
        ),
        victim=owners,
        steps=st.integers(0, 30),
    )
    def storm(self, work: list[tuple[str, int, ScopeId, tuple[int, int]]], victim: int, steps: int) -> None:
        """Everything at once, and one connection dies in the middle, its requests with it."""
        self.run(self._storm(work, victim, steps))
        self.reads[victim], self.reserved[victim] = [], []

    async def _storm(self, work: list[tuple[str, int, ScopeId, tuple[int, int]]], victim: int, steps: int) -> None:
        tasks = [(owner, asyncio.ensure_future(self._one(*job))) for job in work for owner in [job[1]]]
        for _ in range(steps):
            await asyncio.sleep(0)
        for owner, task in tasks:
            if owner == victim:
                task.cancel()
        self.core.node.end_owner(victim)
        results = await asyncio.gather(*(t for _, t in tasks), return_exceptions=True)
        self.core.node.end_owner(victim)
        assert not [r for r in results if isinstance(r, Exception)]
        cache = self.core.cache
        while going := [*cache.promoter._tasks, *cache.remote._tasks, *cache.evictor._tasks]:
            await asyncio.wait(going)

    async def _one(self, what: str, owner: int, scope: ScopeId, chain: tuple[int, int]) -> None:
        numbers = [chain[0] * 8 + i for i in range(chain[1])]
        digests, place = [digest(n) for n in numbers], self.place(owner, scope)
        if what == "tend":
            await self.sweeper._tend()
        elif what == "erase":
            self.core.node.erase(scope)
            await self.core.cache.tenancy.drop_rest()
        elif what == "reserve":
            made, *_ = await self.core.cache.writer.reserve(place, b"", digests)
            self.core.cache.abandon(owner, [r.id for r in made if r is not None])
        else:
            reads = (await self.core.cache.reader.acquire(AcquireCall(place, digests, LEASE_S, 1.0))).reads
            for read, number in zip(reads, numbers, strict=False):
                assert self.bytes_of(read) == content(scope, number)
            self.core.cache.release(owner, [r.lease.id for r in reads])

    @rule(scope=scopes, happens=seldom)
    def erase(self, scope: ScopeId, *, happens: bool) -> None:
        if not happens:
            return
        self.do(lambda: self.core.node.drop_scope(scope))
        assert not self.core.node.index.blocks(scope)

    swept_s = 0.0

    @invariant()
    def leased_bytes_never_change(self) -> None:
        for held in self.reads.values():
            for read, scope, number, expires_s in held:
                if expires_s > self.swept_s:
                    assert self.bytes_of(read) == content(scope, number)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        node = self.core.node
        for tier in node.tiers:
            blocks = sum(r.slot.size_bytes for e in node.index for r in e.residences if r.tier is tier)
            waiting = sum(r.slot.size_bytes for r in node.reservations if r.tier is tier)
            condemned = sum(r.slot.size_bytes for c in node.deferred_frees.values() for r in c if r.tier is tier)
            assert tier.backend.used_bytes == blocks + waiting + condemned
        assert all(e.move is None for e in node.index)

    @invariant()
    def holds_are_what_the_tables_say(self) -> None:
        node = self.core.node
        assert sum(len(e.leases or ()) for e in node.index) <= len(node.leases)
        pending = sum(1 for e in node.index if not e.residences)
        assert pending <= len(node.reservations)

    @invariant()
    def what_may_leave_a_tier_is_queued_there(self) -> None:
        node = self.core.node
        for entry in node.index:
            for number, residence in enumerate(entry.residences):
                if number or not node.index.blockers(entry, entry.level):
                    assert node.contents(residence.tier).is_queued(entry), (entry, residence.tier.name)

    def teardown(self) -> None:
        if hasattr(self, "core"):
            for owner in (1, 2, 3):
                self.end(owner)
            self.clock.now_s += 3600.0
            self.do(self.sweeper.expire)
            node = self.core.node
            assert len(node.leases) == len(node.reservations) == len(node.pins) == 0
            assert not node.deferred_frees
            assert not any(e.is_held for e in node.index)
            for scope in (SCOPE, OTHER_SCOPE):
                self.do(partial(node.drop_scope, scope))
            self.run(self.core.cache.tenancy.drop_rest())
            assert not len(node.index)
            assert [t.backend.used_bytes for t in node.tiers] == [0, 0]
            self.run(self._stop())
        self.patch.undo()
        self.loop.close()

    async def _stop(self) -> None:
        await self.core.close()
        for tier in self.core.node.tiers:
            await tier.backend.close()


AgentMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAgentMachine = AgentMachine.TestCase
