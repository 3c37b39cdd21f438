"""Tiers: their media, what answers a lookup, and how far one step of autoscaling goes. Pure."""

from enum import IntEnum, StrEnum
from typing import Final, Literal

Persistence = Literal["Auto", "AgentRestart", "None"]
"""What memory outlives: never a reboot, an agent's restart where that was asked for or is possible anyway."""

AUTOSCALE_STEP: Final = (5, 4)
"""A step up is a quarter more, a step down goes back by one: what one brings is what the other costs."""


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


MEDIA: Final = (
    "HBM: memory of the node's GPUs. HostDRAM: memory of the host. CXL: memory behind a CXL link. NVMe: files on local "
    "flash. RemoteFlash: files on a mount that nodes share. Object: an object store."
)
"""What each type is, for `kubectl explain`."""


class CxlMode(StrEnum):
    """How CXL memory is reached."""

    NUMA_NODE = "NumaNode"
    DEV_DAX = "DevDax"
    POOLED = "Pooled"
    EMULATED = "Emulated"


class Lookup(IntEnum):
    """What the agent knows about one block. The same answer serves absent and forbidden."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """Reserved by a writer that has not published yet."""
    RETRY = 3
    """Cannot be determined now, for instance while the directory is away."""


def step_up(size_bytes: int, grain_bytes: int) -> int:
    """A step up in whole grains, at least one of them."""
    up, down = AUTOSCALE_STEP
    return max(size_bytes * up // down // grain_bytes, size_bytes // grain_bytes + 1) * grain_bytes


def step_down(size_bytes: int, grain_bytes: int) -> int:
    """A step down in whole grains, never below one; never further than a step up brings back, grains apart."""
    up, down = AUTOSCALE_STEP
    return max(1, -(-size_bytes * down // up // grain_bytes)) * grain_bytes
