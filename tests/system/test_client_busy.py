"""What clients hear of a congested path, through the real agent: a miss, and for how long."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstrata import AsyncClient, AsyncPrefixCache, PrefixCache
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.movement.path import Priority, QueuedMove
from kvstrata_agent.policy.recompute import REFUSED_S
from kvstrata_api.models.poolnode import TierProbe
from support.agent.doubles import BLOCK_BYTES, FakeAuthenticator, caller, dict_tier, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import BLOCKS, PATIENT_S, TOKENS, attached, content, keys_of, target

pytestmark = pytest.mark.system

RATE = 1 << 30


def tiers() -> list[Tier]:
    low = dict_tier("nvme", 64 * BLOCK_BYTES, 1, 2)
    low.probe = TierProbe(read_bytes_per_second=RATE, read_latency_microseconds=1)
    return [dram_tier(16 * BLOCK_BYTES), low]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentThread]:
    """All blocks lie below memory; computing them takes 128 ms, bringing them up some microseconds."""
    policy = {
        "admission": {"type": "Always"},
        "recompute": {"type": "CostModel", "prefillTokensPerSecond": 1000},
    }
    callers = FakeAuthenticator(a=caller("a"))
    with AgentThread(tmp_path / "agent.sock", tiers, callers, **policy) as running:
        with attached(running.socket) as client:
            assert PrefixCache(client).store(TOKENS, content()).published == BLOCKS
        running.wait(push_down(running))
        yield running


async def push_down(running: AgentThread) -> None:
    core = running.core
    while core.node.contents(core.node.tiers[0]).blocks:
        core.node.is_draining = True
        await core.cache.evictor.drain(core.node.tiers[0])
        core.node.is_draining = False


@contextmanager
def flooded(running: AgentThread, source: str, target: str) -> Iterator[None]:
    """Take a path for four seconds of its speed, and leave it at the end."""
    gate = running.core.cache.mover.scheduler.paths.between(source, target).limiter
    gate._width = 1
    turn = gate.enter(QueuedMove(Priority.ARCHIVE, "z", 100, 4 * RATE))
    running.wait(turn.__aenter__())
    try:
        yield
    finally:
        running.wait(turn.__aexit__(None, None, None))


def test_every_way_to_read_says_that_the_path_is_busy_and_then_not(agent: AgentThread) -> None:
    with attached(agent.socket, strict=True) as client:
        cache = PrefixCache(client)
        with flooded(agent, "nvme", "dram"):
            loaded = cache.load(TOKENS)
            assert (loaded.blocks, loaded.busy_s) == (0, 4.0)
            with cache.stream(TOKENS) as stream:
                assert (stream.blocks, stream.busy_s) == (0, 4.0)
            with client.acquire(keys_of(client)) as leases:
                assert (len(leases), leases.busy_s) == (0, 4.0)
        assert client.counters.busy == 3

        loaded = cache.load(TOKENS)
        assert (loaded.blocks, loaded.busy_s) == (BLOCKS, 0.0)
        assert client.counters.busy == 3


def test_the_asyncio_client_says_it_too(agent: AgentThread) -> None:
    async def run() -> None:
        async with AsyncClient(target(agent.socket)) as client:
            await client.wait_attached(PATIENT_S)
            assert (await AsyncPrefixCache(client).load(TOKENS)).busy_s == 4.0
            async with await client.acquire(keys_of(client)) as leases:
                assert (len(leases), leases.busy_s) == (0, 4.0)

    with flooded(agent, "nvme", "dram"):
        asyncio.run(run())


def test_a_store_says_that_blocks_wait_to_leave(agent: AgentThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata_agent.cache.store.RESERVE_WAIT_S", 0.05)
    with attached(agent.socket) as client:
        cache = PrefixCache(client)
        for first in (1000, 2000):
            assert cache.store(TOKENS + np.uint32(first), content()).busy_s == 0.0
        with flooded(agent, "dram", "nvme"):
            stored = cache.store(TOKENS + np.uint32(3000), content())
        assert stored.refused > 0
        assert stored.busy_s >= REFUSED_S
        assert cache.store(TOKENS + np.uint32(3000), content()).busy_s == 0.0
