"""An agent whose HBM tier lends: on the double unless a device is named, with a memory tier below."""

from kvstrata_agent.backends.device.hbm import HbmTier, open_queues
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.movement.path import Priority
from kvstrata_api.models.poolnode import NodeTier
from support.agent.doubles import BLOCK_BYTES, dram_tier
from support.agent.thread import AgentThread
from support.client.attached import PATIENT_S

HBM_BLOCKS = 64


def lending_tiers(
    device: str = "cpu", *, lends: bool = True, block_bytes: int = BLOCK_BYTES, dram_bytes: int = 1 << 22
) -> list[Tier]:
    """HBM above host memory."""
    size_bytes = HBM_BLOCKS * block_bytes
    hbm = {"reading": "InPlace" if lends else "Copied"}
    spec = NodeTier.model_validate({"name": "hbm", "type": "HBM", "hbm": hbm, "capacityBytes": size_bytes})
    dram = dram_tier(dram_bytes)
    dram.level = 1
    return [Tier(spec, 0, HbmTier(open_queues(device), size_bytes, threads=1, lends=lends), 7), dram]


def raise_all(agent: AgentThread) -> int:
    """Have every block in HBM and nowhere else; returns how many there are."""
    node, demoter = agent.core.node, agent.core.cache.evictor.demoter
    hbm, dram = node.tiers

    async def move() -> int:
        entries = [e for residents in tuple(node.contents(dram).extents.values()) for e in residents]
        for entry in entries:
            if entry.move is not None:  # The agent raises blocks by itself as well.
                await entry.move
            assert entry.residence(hbm) or await demoter.demote_to(entry, dram, hbm, Priority.ARCHIVE)
            node.drop_copy(entry, dram)
        return len(entries)

    return agent.wait(move())


def hbm_of(agent: AgentThread) -> HbmTier:
    """Its HBM tier."""
    backend = agent.core.node.tiers[0].backend
    assert isinstance(backend, HbmTier)
    return backend


def borrowed(agent: AgentThread) -> tuple[int, int]:
    """Extents of the HBM tier that clients have open, and how many were released and are open still.

    The tier's own thread notes what is lent and given back; it is asked there, behind all that was asked of it before.
    """
    hbm = hbm_of(agent)
    return hbm._thread.submit(lambda: (len(hbm.memory._borrowers), len(hbm.memory._lent))).result(PATIENT_S)
