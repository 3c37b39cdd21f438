"""Laws of a tier over several devices as the core sees it: a device that fails is named, and the tier goes on."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.provision.provisioner import RETRY_S
from kvstrata_api.models.conditions import find
from kvstrata_api.models.pool import NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_telemetry.catalog import AGENT
from support.agent.doubles import SCOPE, FakeAuthenticator
from support.agent.provisioned import Provisioned
from support.backends.contract import put

pytestmark = pytest.mark.unit

MIB = 1 << 20


class Node(Provisioned):
    """An agent's core whose tiers are real record stores in two directories."""

    def __init__(self, root: Path) -> None:
        self.paths = (root / "a", root / "b")
        super().__init__(self.make)
        nvme = NvmeTier(paths=tuple(map(str, self.paths)), io="Posix")
        self.spec = NodeTier(name="nvme", type=TierType.NVME, capacity_bytes=8 * MIB, nvme=nvme)

    async def make(self, spec: NodeTier) -> TierBackend:
        assert spec.nvme is not None
        return await open_nvme(spec.nvme, "pool", "node", spec.capacity_bytes)

    async def tier(self) -> Tier:
        await self.provisioner.apply([self.spec])
        (tier,) = self.core.node.tiers
        return tier


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.close()


def foreign(path: Path) -> None:
    path.mkdir()
    (path / "photos.zip").write_bytes(b"not ours")


async def test_a_device_that_cannot_be_opened_is_named_and_comes_back_by_itself(at: Node) -> None:
    before = await at.tier()
    for n in range(8):
        await put(before.backend, n, SCOPE)
    await at.provisioner.close()
    at.begin_anew()
    kept = at.paths[1].rename(at.paths[1].with_name("kept"))
    foreign(at.paths[1])
    tier = await at.tier()
    found = tier.recovered_blocks

    status = at.status()
    condition = find(status.conditions, "DevicePresent")
    assert condition is not None
    assert (condition.status, condition.reason) == ("False", "DeviceFailed")
    assert f"tier nvme: {at.paths[1]}: " in condition.message
    assert status.tiers[0].phase == "Degraded"
    assert str(at.paths[1]) in status.tiers[0].last_error
    assert [(d.name, bool(d.error)) for d in status.tiers[0].devices] == [
        (str(at.paths[0]), False),
        (str(at.paths[1]), True),
    ]
    assert find(status.conditions, "TierReady").status == "True"  # type: ignore[union-attr]
    assert 0 < found < 8

    shutil.rmtree(at.paths[1])
    kept.rename(at.paths[1])
    await at.provisioner.apply([at.spec])
    assert tier.recovered_blocks == found, "not before its time"
    at.clock.now_s += RETRY_S
    await at.provisioner.apply([at.spec])

    assert tier.recovered_blocks == at.core.node.contents(tier).blocks == 8
    assert at.status().tiers[0].phase == "Ready"
    assert find(at.status().conditions, "DevicePresent").status == "True"  # type: ignore[union-attr]


async def test_failures_of_one_of_several_devices_stop_nobody_and_those_of_all_stop_the_tier(at: Node) -> None:
    tier = await at.tier()
    part, other = tier.backend._parts  # type: ignore[attr-defined]
    part.health.write_failed("Input/output error", asyncio.get_running_loop().time())

    for _ in range(5):
        at.core.node.write_failed(tier, "Input/output error")
    assert tier.phase(at.clock.now_s) == "Degraded"
    assert tier.facts(at.clock.now_s).takes_writes

    other.health.write_failed("Input/output error", asyncio.get_running_loop().time())
    for _ in range(5):
        at.core.node.write_failed(tier, "Input/output error")
    assert tier.phase(at.clock.now_s) == "Failed"
    assert not tier.facts(at.clock.now_s).takes_writes


async def test_devices_are_counted_one_by_one(at: Node) -> None:
    tier = await at.tier()
    part, _ = tier.backend._parts  # type: ignore[attr-defined]
    part.health.write_failed("Input/output error", asyncio.get_running_loop().time())
    Sweeper(at.core.cache, FakeAuthenticator()).gauges()

    counters = at.core.node.counters
    up = {labels[-1]: child._value.get() for labels, child in counters._children.items() if "device_up" in labels[0]}

    assert up == {str(at.paths[0]): 0.0, str(at.paths[1]): 1.0}
    assert {m.name for m in AGENT} >= {"kvstrata_device_up", "kvstrata_device_used_bytes"}


async def test_faults_are_counted_from_0_so_that_the_first_one_is_an_increase(at: Node) -> None:
    tier = await at.tier()
    Sweeper(at.core.cache, FakeAuthenticator()).gauges()

    families = at.core.node.counters._instruments.registry.collect()
    faults = {"kvstrata_corrupt_blocks_total", "kvstrata_io_errors_total"}
    shown = [s for family in families for s in family.samples if s.name in faults and s.labels["tier"] == tier.name]
    assert {(s.labels.get("operation"), s.value) for s in shown} == {(None, 0.0), ("read", 0.0), ("write", 0.0)}


async def test_what_is_written_to_each_device_is_told_for_it(at: Node) -> None:
    tier = await at.tier()
    for n in range(8):
        await put(tier.backend, n, SCOPE)
    written = {device.name: device.written_bytes for device in tier.devices}
    tier.stored_bytes_written = sum(written.values())
    sweeper, counters = Sweeper(at.core.cache, FakeAuthenticator()), at.core.node.counters
    sweeper.gauges()
    sweeper.gauges()

    told = {labels[0]: {} for labels in counters._children if "written" in labels[0]}  # type: dict[str, dict[str, float]]
    for labels, child in counters._children.items():
        if labels[0] in told:
            told[labels[0]][labels[-1]] = child._value.get()
    devices, tiers = (told[name] for name in sorted(told))
    assert all(written.values())
    assert devices == written
    assert tiers == {tier.name: sum(written.values())}, "once, however often it is looked at"
