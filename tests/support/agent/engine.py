"""One attached connection that speaks to the verbs themselves, without a socket."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.cache.eviction_candidates import EvictionRequest, TierCandidates
from kvstrata_agent.cache.ports import Directory
from kvstrata_agent.serve.authorization import Attachment
from kvstrata_api import wire
from kvstrata_api.blocks import ScopeId
from kvstrata_api.checksum import checksum
from support.agent.doubles import (
    BLOCK_BYTES,
    LAYOUT,
    SCOPE,
    Clock,
    DictBackend,
    FakeAuthenticator,
    bytes_of,
    caller,
    dict_tier,
    digest,
    dram_tier,
    make_core,
)
from support.agent.thread import make_verbs

SLOTS = 16
LOW_SLOTS = 256


class Engine:
    """One attached connection of tenant `a`."""

    def __init__(
        self,
        directory: Directory | None = None,
        *,
        cxl_slots: int = 0,
        tiers: Sequence[Tier] | None = None,
        **policy: object,
    ) -> None:
        """With a second memory tier between the two, where it has slots; or with `tiers` instead."""
        self.clock = Clock()
        memory = [dram_tier(SLOTS * BLOCK_BYTES)]
        memory += [dram_tier(cxl_slots * BLOCK_BYTES, 1, 3, "cxl")] if cxl_slots else []
        low = dict_tier("nvme", LOW_SLOTS * BLOCK_BYTES, len(memory), 2)
        policy = {"admission": {"type": "Always"}} | policy
        self.core = make_core(tiers or [*memory, low], self.clock, policy=policy, directory=directory)
        self.authenticator = FakeAuthenticator(a=caller("a"))
        self.verbs = make_verbs(self.core, self.authenticator)
        self.at = Attachment(1)
        assert isinstance(low.backend, DictBackend)
        self.low = low.backend

    async def ask(self, request: wire.AnyRequest) -> Any:
        outcome = self.verbs.start(self.at, request)
        return await outcome if isinstance(outcome, Coroutine) else outcome

    async def attach(self) -> "Engine":
        assert isinstance(await self.ask(wire.Attach(1, "a", "pool", LAYOUT)), wire.Granted)
        return self

    async def store(self, *numbers: int, session: str = "") -> bytes:
        self.clock.now_s += 0.01
        parent = digest(numbers[0] - 1) if numbers[0] > 1 else b""
        packed = b"".join(map(digest, numbers))
        reserved = await self.ask(wire.Reserve(2, SCOPE, parent, packed, session))
        sums = []
        held = {r.id: r for r in self.core.node.reservations.owned(1)}
        for slot, number in zip(reserved.slots, numbers, strict=False):
            reservation = held[slot.reservation]
            assert reservation.tier.backend.mappable is not None
            reservation.tier.backend.mappable.view(reservation.slot)[:BLOCK_BYTES] = bytes_of(number)
            sums.append(checksum(bytes_of(number), digest(number), reserved.epoch, slot.stamp))
        published = await self.ask(wire.Publish(3, tuple(s.reservation for s in reserved.slots), tuple(sums)))
        results: bytes = published.results
        return results

    async def ask_to_store(self, number: int) -> Any:
        """Reserve a slot for one block at the root."""
        return await self.ask(wire.Reserve(2, SCOPE, b"", digest(number), ""))

    @staticmethod
    def key(number: int) -> tuple[ScopeId, bytes]:
        """Scope and digest of a block."""
        return SCOPE, digest(number)

    async def acquire(self, *numbers: int, **more: Any) -> Any:
        return await self.ask(wire.Acquire(4, SCOPE, b"".join(map(digest, numbers)), **more))

    async def release(self, acquired: wire.Acquired) -> int:
        done = await self.ask(wire.Release(5, tuple(b.lease for b in acquired.blocks)))
        count: int = done.count
        return count

    async def push_down(self) -> None:
        """Bring everything to the lower tier, as a squeeze does."""
        for _ in range(3):
            self.core.cache.evictor._node.is_draining = True
            for tier in self.core.node.tiers[:-1]:
                await self.core.cache.evictor.drain(tier)
            self.core.node.is_draining = False
        assert not any(self.core.node.contents(tier).blocks for tier in self.core.node.tiers[:-1])


async def steps_until(fact: Callable[[], bool]) -> None:
    """Let the loop go on until something is true, 30 s at most: steps are no bound, worker threads wait for a CPU."""
    ends_s = time.monotonic() + 30.0
    while time.monotonic() < ends_s:
        if fact():
            return
        await asyncio.sleep(0)
    pytest.fail("did not become true")


async def close_clean(engine: Engine) -> None:
    """End the connection, let all time pass, and see that nothing holds a block, a slot or a session any more."""
    node = engine.core.node
    engine.verbs.end(engine.at)
    engine.clock.now_s += 2e9
    Sweeper(engine.core.cache, engine.authenticator).expire()

    assert (len(node.leases), len(node.pins), len(node.reservations)) == (0, 0, 0)
    assert not any(s.owners for s in node.sessions)
    tier = node.tiers[0]
    while (entry := TierCandidates(node.index, tier, EvictionRequest(1, "room"), node.clock()).pop()) is not None:
        if not entry.is_held:
            node.drop_copy(entry, tier)
    assert node.contents(tier).blocks == sum(e.is_held for e in node.index if e.residence(tier))
    assert tier.backend.used_bytes <= SLOTS * BLOCK_BYTES
    await close(engine)


async def close(engine: Engine) -> None:
    await engine.core.close()
    for tier in engine.core.node.tiers:
        await tier.backend.close()
