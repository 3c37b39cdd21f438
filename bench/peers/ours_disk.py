"""Ours, as `bench.nvme` drives it: an agent's core with a HostDRAM tier above an NVMe tier, in this process.

`put` is the agent's own demotion: it plans which blocks leave memory, applies the pool's codec, writes records
where earlier sets lay and returns when all are durable. `get` brings them up as for a reader.
The sweeper runs beside, as in every agent. The only stand-in is the authenticator, which knows one scope.
"""

import argparse
import asyncio
import importlib.metadata
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from bench.encryption import BenchKeys
from bench.harness.agent_process import OneIdentity, make_node
from bench.harness.identity import POOL, SECRET
from bench.peers.disks import DiskBench
from bench.peers.loop import Bytes2D, Work, serve
from kvstrata_agent.app.main import tame_collector
from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.app.wiring import AgentParts
from kvstrata_agent.backends.base import Record
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.blocks.block import Entry, Residence
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.codec.registry import CodecRegistry
from kvstrata_api.blocks import KEY_BYTES, LAYOUT_ID_BYTES, BlockKey, LayoutId
from kvstrata_api.checksum import checksum
from kvstrata_api.models.pool import Encryption, EvictionPolicy, NvmeTier, PoolPolicy
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_api.units import MIB

CHAIN_BLOCKS: Final = 16
SETS: Final = 3.0
"""Capacity of the NVMe tier in sets: it turns over, and each set is written where earlier ones lay."""
HIGH_PERCENT, LOW_PERCENT = 60, 50
"""Watermarks: what the sweeper keeps free takes a set, as 7 % of a real disk take minutes of writes."""
GENERATION_SHIFT: Final = 64
DRAIN_ROUNDS_MAX: Final = 1000
LAYOUT: Final = LayoutId(bytes(LAYOUT_ID_BYTES))


class Agent:
    """One core, driven from outside its event loop."""

    def __init__(self, directory: Path, *, mode: str, is_sealed: bool) -> None:
        """Use `directory` for the NVMe tier; `mode` is the pool's compression mode."""
        self._directory, self._mode, self._is_sealed = directory, mode, is_sealed
        self._loop = asyncio.new_event_loop()
        self._core: AgentParts | None = None
        self._entries: list[Entry] = []

    def versions(self) -> dict[str, str]:
        """Name and version of what is measured."""
        return {"kvstrata": importlib.metadata.version("kvstrata")}

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)

    def open(self, work: Work, source: Bytes2D, sink: Bytes2D) -> None:
        """Make the tiers."""
        self._run(self._end())
        self._work, self._source, self._sink = work, source, sink
        self._run(self._open())

    async def _open(self) -> None:
        set_bytes = self._work.blocks * self._work.block_bytes
        node = make_node(5 * set_bytes + 256 * MIB, "4Ki")  # Below the watermark with all that `_settle_memory` takes.
        node.spec = node.spec.model_copy(update={"policy": _policy(self._mode)})
        nvme = NvmeTier(path=str(self._directory / f"{self._work.block_bytes}"))
        capacity_bytes = int(SETS * set_bytes) + 64 * MIB
        backend = await open_nvme(nvme, POOL, "bench", capacity_bytes, keys=BenchKeys() if self._is_sealed else None)
        encryption = Encryption(type="AESGCM" if self._is_sealed else "None")
        spec = NodeTier(
            name="nvme", type=TierType.NVME, capacity_bytes=capacity_bytes, nvme=nvme, encryption=encryption
        )
        node.tiers.append(Tier(spec, 1, backend, 2))
        self._settle_memory(node.tiers[0])
        self._core = AgentParts(node, CodecRegistry())
        self._sweeping = asyncio.ensure_future(Sweeper(self._core.cache, OneIdentity()).run())

    def _settle_memory(self, dram: Tier) -> None:
        """Leave one slot of each extent taken, so that memory stays mapped, as it does in a tier that serves."""
        slots = [dram.allocate(SECRET.scope, "bench", self._work.block_bytes) for _ in range(2 * self._work.blocks)]
        kept = {slot.extent: slot for slot in slots}
        for slot in slots:
            if kept[slot.extent] is not slot:
                dram.free(slot, "bench")

    @property
    def _node(self) -> Node:
        assert self._core is not None
        return self._core.node

    def prepare(self, generation: int) -> None:
        """Lay a set of new blocks into the memory tier."""
        self._run(self._make_room())
        self._run(self._prepare(generation))

    async def _make_room(self) -> None:
        """What the sweeper does ahead of writers; the clock stands while the loop does."""
        assert self._core is not None
        while await self._core.cache.evictor.trim(self._node.tiers[1]):
            pass

    async def _prepare(self, generation: int) -> None:
        node, size_bytes = self._node, self._work.block_bytes
        dram = node.tiers[0]
        self._entries = []
        digests = [(generation << GENERATION_SHIFT | n).to_bytes(KEY_BYTES, "big") for n in range(len(self._source))]
        for first in range(0, len(digests), CHAIN_BLOCKS):
            chain = self._begun(digests[first : first + CHAIN_BLOCKS])
            for entry, block in zip(chain, self._source[first:], strict=False):
                slot = dram.allocate(SECRET.scope, "bench", size_bytes)
                assert dram.backend.mappable is not None
                with dram.backend.mappable.view(slot) as view:
                    view[:size_bytes] = block.data
                bound = checksum(block, entry.digest, node.epoch, slot.stamp)
                key = BlockKey(SECRET.scope, entry.digest)
                record = Record(key, entry.parent, LAYOUT, "raw", size_bytes, size_bytes, bound, node.epoch)
                node.add_copy(entry, Residence(dram, slot, record))
            node.returns.stored(None, chain)
            self._entries += chain

    def _begun(self, digests: Sequence[bytes]) -> list[Entry]:
        """A chain, as a store begins it."""
        made = self._node.index.begin_chain(SECRET.scope, digests, b"", LAYOUT, self._node.clock(), "bench")
        return [entry for entry in made if entry is not None]

    def put(self, _: int) -> dict[str, float]:
        """Demote the set, until the last record is durable and memory is free."""
        self._run(self._put())
        return {}

    async def _put(self) -> None:
        dram, nvme = self._node.tiers
        assert self._core is not None
        for _ in range(DRAIN_ROUNDS_MAX):
            if not await self._core.cache.evictor.drain(dram):
                break
        lost = sum(entry.residence(nvme) is None for entry in self._entries)
        assert not lost, f"{lost} of {len(self._entries)} blocks did not reach the disk: {nvme.backend.last_error}"

    def get(self, _: int) -> dict[str, float]:
        """Bring the set up."""
        self._run(self._get())
        return {}

    async def _get(self) -> None:
        assert self._core is not None
        promoter = self._core.cache.promoter
        promoter.start_promotions(self._entries)
        groups: dict[object, list[Entry]] = {}
        for entry in self._entries:
            groups.setdefault(entry.move, []).append(entry)
        await asyncio.gather(*(promoter.wait_together(group, "bench") for group in groups.values()))
        assert all(promoter.promoted(entry) for entry in self._entries), "all blocks are up"

    def show(self, _: int) -> None:
        """Copy what was loaded, and let memory go."""
        self._run(self._show())

    async def _show(self) -> None:
        dram = self._node.tiers[0]
        assert dram.backend.mappable is not None
        for entry, into in zip(self._entries, self._sink, strict=True):
            copy = entry.residence(dram)
            assert copy is not None
            with dram.backend.mappable.view(copy.slot) as view:
                into[:] = view[: self._work.block_bytes]
        for entry in reversed(self._entries):
            self._node.drop_copy(entry, dram)

    def lookup(self, _: int) -> int:
        """Blocks that are there."""
        return sum(bool(entry.residences) for entry in self._entries)

    def clear(self, _: int) -> None:
        """Nothing: the next set makes its room itself."""

    async def _end(self) -> None:
        core, self._core = self._core, None
        if core is None:
            return
        self._sweeping.cancel()
        await asyncio.wait([self._sweeping])
        await core.close()
        for tier in core.node.tiers:
            await tier.backend.close()

    def close(self) -> None:
        """Close the tiers."""
        self._run(self._end())
        self._loop.close()


def _policy(mode: str) -> PoolPolicy:
    eviction = EvictionPolicy(high_watermark_percent=HIGH_PERCENT, low_watermark_percent=LOW_PERCENT)
    return PoolPolicy.model_validate({"compression": {"mode": mode}, "eviction": eviction})


def main() -> None:
    """Parse the command line and answer verbs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="of the NVMe tier")
    parser.add_argument("--mode", default="None", choices=("None", "Lossless"), help="compression of the pool")
    parser.add_argument("--sealed", action="store_true", help="encrypt the NVMe tier")
    chosen = parser.parse_args()
    tame_collector()
    serve(lambda: Agent(chosen.directory, mode=chosen.mode, is_sealed=chosen.sealed), DiskBench)


if __name__ == "__main__":
    main()
