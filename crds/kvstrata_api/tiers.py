"""Tier vocabulary: what stores a block, and what answers a lookup. Pure."""

from enum import IntEnum, StrEnum
from typing import Literal

Persistence = Literal["Auto", "AgentRestart", "None"]
"""What memory outlives: never a reboot, an agent's restart where that was asked for or is possible anyway."""


class TierType(StrEnum):
    """Medium of a tier, as written in `spec.tiers[].type`."""

    HBM = "HBM"
    HOST_DRAM = "HostDRAM"
    CXL = "CXL"
    NVME = "NVMe"
    REMOTE_FLASH = "RemoteFlash"
    OBJECT = "Object"

    @property
    def is_memory(self) -> bool:
        """True for media with load and store access, whose extents engines can map."""
        return self in (TierType.HOST_DRAM, TierType.CXL)

    @property
    def survives_restart(self) -> bool:
        """True for media whose blocks a restarted agent finds again."""
        return self in (TierType.NVME, TierType.REMOTE_FLASH, TierType.OBJECT)


class CxlMode(StrEnum):
    """How CXL memory is reached."""

    NUMA_NODE = "NumaNode"
    DEV_DAX = "DevDax"
    EMULATED = "Emulated"


class Lookup(IntEnum):
    """What the agent knows about one block. The same answer serves absent and forbidden."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """Reserved by a writer that has not published yet."""
    RETRY = 3
    """Cannot be told now, for instance while the directory is away."""
