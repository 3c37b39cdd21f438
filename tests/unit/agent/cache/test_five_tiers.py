"""A pool with HBM (torch's double) > DRAM > CXL (a file, emulated) > NVMe > object store: what lies where."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.backends.registry import Place, make_backend
from kvstrata_agent.blocks.tier import Tier
from kvstrata_api import wire
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_node.discovery import discover
from support.agent.doubles import BLOCK_BYTES, SCOPE, bytes_of, digest
from support.agent.engine import Engine, close
from support.client.torch_device import DEVICE

pytestmark = pytest.mark.unit

HBM, DRAM, CXL, NVME = 8, 16, 16, 1024
"""Blocks of each tier; the object store has room for all."""
CHAIN = 4
LESSONS = 300
HOT, DECODING, COLD = 101, 201, 1001
"""First blocks of chains."""


async def five_tiers(tmp_path: Path) -> list[Tier]:
    file = {"mode": "Emulated", "emulated": {"path": str(tmp_path / "c")}, "persistence": "None"}
    declared = [
        {"name": "hbm", "type": "HBM", "hbm": {}, "capacityBytes": HBM * BLOCK_BYTES},
        {"name": "dram", "type": "HostDRAM", "hostDRAM": {"pageSize": "4Ki"}, "capacityBytes": DRAM * BLOCK_BYTES},
        {"name": "cxl", "type": "CXL", "cxl": file, "capacityBytes": CXL * BLOCK_BYTES},
        {"name": "nvme", "type": "NVMe", "nvme": {"path": str(tmp_path / "n")}, "capacityBytes": NVME * BLOCK_BYTES},
        {"name": "object", "type": "Object", "object": {"url": f"file://{tmp_path}/o"}, "capacityBytes": 1 << 30},
    ]
    for name in ("n", "o"):
        (tmp_path / name).mkdir()
    place = Place("pool", "node", discover(), hbm_device=DEVICE.type)
    specs = [NodeTier.model_validate(tier) for tier in declared]
    return [Tier(spec, level, await make_backend(spec, place), level + 1) for level, spec in enumerate(specs)]


def played(tmp_path: Path, play: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        eviction = {"type": "ReuseAware", "highWatermarkPercent": 95, "lowWatermarkPercent": 90}
        engine = await Engine(tiers=await five_tiers(tmp_path), eviction=eviction).attach()
        try:
            await play(engine)
        finally:
            await close(engine)

    asyncio.run(run())


async def ask_for(engine: Engine, first: int, count: int, session: str) -> None:
    await engine.ask(wire.Lookup(9, SCOPE, b"".join(map(digest, range(first, first + count))), session))


async def taught(engine: Engine) -> None:
    """Chat comes back with a longer prompt after 20 s; batch never does."""
    for i in range(LESSONS):
        first = 10_000 + 10 * i
        kind = "chat" if i % 2 else "batch"
        await engine.ask(wire.OpenSession(6, f"{kind}-{i}", "", kind))
        await ask_for(engine, first, CHAIN, f"{kind}-{i}")
        engine.clock.now_s += 20.0
        if kind == "chat":
            await ask_for(engine, first, CHAIN + 2, f"{kind}-{i}")
        engine.clock.now_s += 40.0
        await engine.attach()


async def store(engine: Engine, first: int, kind: str, count: int = CHAIN) -> None:
    session = f"{kind}-{first}"
    await engine.ask(wire.OpenSession(6, session, "", kind))
    await ask_for(engine, first, count, session)
    await engine.store(*range(first, first + count), session=session)
    engine.clock.now_s += 0.04


async def tend(engine: Engine, rounds: int = 3) -> None:
    for _ in range(rounds):
        await Sweeper(engine.core.cache, engine.authenticator)._tend()


def tiers_of(engine: Engine, first: int, count: int = CHAIN) -> list[tuple[str, ...]]:
    found = [engine.core.node.index.find(*engine.key(n)) for n in range(first, first + count)]
    return [tuple(r.tier.name for r in e.residences) if e is not None else () for e in found]


async def replayed(engine: Engine) -> None:
    """A chat and a session that decodes, among batches that fill every tier but the last."""
    await taught(engine)
    await store(engine, HOT, "chat")
    await store(engine, DECODING, "batch")
    await engine.ask(wire.TouchSession(7, f"batch-{DECODING}", "decoding"))
    await tend(engine)
    for i in range((NVME + CXL + DRAM) // CHAIN + 8):
        await store(engine, COLD + 10 * i, "batch")
        if i % 2 == 0:
            await tend(engine, 1)
    await tend(engine)


@pytest.mark.slow
def test_each_block_lies_where_its_use_pays(tmp_path: Path) -> None:
    async def play(engine: Engine) -> None:
        await replayed(engine)
        node = engine.core.node
        assert all(node.contents(tier).blocks for tier in node.tiers), [node.contents(t).blocks for t in node.tiers]
        assert all(tiers[0] == "hbm" for tiers in tiers_of(engine, DECODING)), "decoded from"
        *own, _ = tiers_of(engine, HOT)  # The last block is judged apart: the next turn rewrites it.
        assert all(tiers and tiers[0] == "hbm" for tiers in own), "comes back"
        cold = [t for i in range(200) for t in tiers_of(engine, COLD + 10 * i)]
        below = sum(1 for tiers in cold if tiers and tiers[0] in ("cxl", "nvme", "object"))
        assert below > 0.9 * len(cold)
        assert node.tier("cxl").backend.capabilities.is_emulated  # type: ignore[union-attr]

    played(tmp_path, play)


def test_what_was_raised_is_read_from_memory_that_engines_map(tmp_path: Path) -> None:
    async def play(engine: Engine) -> None:
        await store(engine, DECODING, "batch")
        await engine.ask(wire.TouchSession(7, f"batch-{DECODING}", "decoding"))
        await tend(engine)
        assert tiers_of(engine, DECODING) == [("hbm", "dram")] * CHAIN
        acquired = await engine.acquire(*range(DECODING, DECODING + CHAIN))
        assert len(acquired.blocks) == CHAIN
        await engine.release(acquired)

    played(tmp_path, play)


def test_what_only_hbm_has_is_brought_back_to_memory_that_engines_map(tmp_path: Path) -> None:
    async def play(engine: Engine) -> None:
        node = engine.core.node
        await store(engine, DECODING, "batch")
        await engine.ask(wire.TouchSession(7, f"batch-{DECODING}", "decoding"))
        await tend(engine)
        for number in range(DECODING, DECODING + CHAIN):
            entry = node.index.find(*engine.key(number))
            assert entry is not None
            node.drop_copy(entry, node.tiers[1])
        assert tiers_of(engine, DECODING) == [("hbm",)] * CHAIN
        acquired = await engine.acquire(*range(DECODING, DECODING + CHAIN), deadline_s=20.0)
        assert len(acquired.blocks) == CHAIN
        for number in range(DECODING, DECODING + CHAIN):
            entry = node.index.find(*engine.key(number))
            assert entry is not None
            copy = node.entry_copy(entry)
            assert copy is not None
            mapped = copy.tier.backend.mappable
            assert mapped is not None
            with mapped.view(copy.slot) as view:
                assert bytes(view[:BLOCK_BYTES]) == bytes_of(number)
        await engine.release(acquired)

    played(tmp_path, play)


def test_what_nobody_uses_again_is_not_raised(tmp_path: Path) -> None:
    async def play(engine: Engine) -> None:
        await store(engine, DECODING, "batch")
        for number in range(DECODING, DECODING + CHAIN):
            entry = engine.core.node.index.find(*engine.key(number))
            assert entry is not None
            entry.used_at_s = 0.0  # As when its session is over.
        await tend(engine)
        assert tiers_of(engine, DECODING) == [("dram",)] * CHAIN

    played(tmp_path, play)
