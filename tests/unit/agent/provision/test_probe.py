"""The probe of a tier whose medium fails: no write of it goes on once its slots are given back."""

import asyncio
from typing import cast

import pytest

from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_agent.policy.pathology import Sign, findings
from kvstrata_agent.provision.probe import probe
from kvstrata_agent.provision.provisioner import DOUBT_S
from kvstrata_api.errors import BackendFailedError
from kvstrata_api.models.pool import NvmeTier
from kvstrata_api.models.poolnode import NodeTier, TierProbe
from kvstrata_api.tiers import TierType
from support.agent.doubles import DictBackend
from support.agent.provisioned import Provisioned

pytestmark = pytest.mark.unit

BLOCK_BYTES = 4096


class Failing(DictBackend):
    """Its tenth write fails at once; those beside it take long."""

    late = 0
    """Writes that went on in a slot that was given back."""

    async def write(self, slot: SlotRef, record: Record, stored: memoryview) -> None:
        self.writes += 1
        if self.writes == 10:
            raise BackendFailedError("Input/output error")
        for _ in range(20 if self.writes > 5 else 0):
            await asyncio.sleep(0)
        self.late += slot.stamp not in self.live
        self.writes -= 1
        await super().write(slot, record, stored)


async def test_no_write_goes_on_in_a_slot_that_was_given_back() -> None:
    backend = Failing(1024 * BLOCK_BYTES)

    measured = await probe(cast("TierBackend", backend), BLOCK_BYTES)
    for _ in range(100):
        await asyncio.sleep(0)

    assert backend.writes >= 10
    assert backend.late == 0
    assert backend.used_bytes == 0
    assert measured.write_bytes_per_second >= 0


async def test_a_tier_from_which_nothing_is_fetched_is_measured_again_now_and_then() -> None:
    async def make(spec: NodeTier) -> TierBackend:
        return DictBackend(spec.capacity_bytes)

    at = Provisioned(make)
    disk = NodeTier(name="nvme", type=TierType.NVME, capacity_bytes=4 << 20, nvme=NvmeTier(path="/nowhere/nvme"))
    await at.provisioner.apply([disk])
    (tier,) = at.core.node.tiers
    assert tier.probe is not None
    busy = TierProbe(block_bytes=tier.probe.block_bytes, read_bytes_per_second=1, write_bytes_per_second=1)

    async def reprobed() -> bool:
        tier.probe = busy
        await at.provisioner.reprobe()
        return tier.probe is not busy

    assert not await reprobed(), "it is believed"
    at.core.node.signs.found = findings({Sign.WANTED: 1000, Sign.UNFETCHED: 990})
    assert await reprobed()
    assert not await reprobed(), "just measured"
    at.clock.now_s += DOUBT_S
    assert await reprobed()
    at.core.node.signs.found = ()
    at.clock.now_s += DOUBT_S
    assert not await reprobed(), "it is over"
    await at.close()
