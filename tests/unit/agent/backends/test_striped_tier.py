"""Laws of a tier over several devices as the core sees it: a device that fails is named, and the tier goes on."""

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
from sim.volume import MemoryVolume

from kvstrata_agent.app.periodic import Sweeper
from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_agent.backends.file.devices import PAUSE_S, DirectoryRoom
from kvstrata_agent.backends.file.open_store import open_nvme
from kvstrata_agent.backends.file.record_store import RecordStore, open_store
from kvstrata_agent.backends.file.striped import DEVICE_BITS, StripedStore, open_striped
from kvstrata_agent.blocks.tier import Tier
from kvstrata_agent.provision.provisioner import RETRY_S
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.conditions import find
from kvstrata_api.models.pool import NvmeTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_telemetry.catalog import AGENT
from support.agent.doubles import SCOPE, FakeAuthenticator
from support.agent.provisioned import Provisioned
from support.backends.contract import BLOCK_BYTES, BOB, content, fill, get, put
from support.runner.virtual_loop import run_virtually

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


class Rack:
    """A tier over two devices in memory. The second may be absent, and is prepared before it is opened."""

    def __init__(self) -> None:
        self.volumes = [MemoryVolume(), MemoryVolume()]
        self.is_absent = False
        self.prepare: Callable[[MemoryVolume], object] = id

    async def _open(self, number: int, part_bytes: int) -> RecordStore:
        if number == 1 and self.is_absent:
            raise InvalidInputError("/b: not mounted")
        volume = self.volumes[number] = self.volumes[number].kill()
        if number == 1:
            self.prepare(volume)
        return await open_store(volume, part_bytes)

    async def tier(self) -> StripedStore:
        return await open_striped({"/a": partial(self._open, 0), "/b": partial(self._open, 1)}, 8 * MIB)

    async def killed(self, blocks: int, *, is_absent: bool = False) -> StripedStore:
        """The tier of the run after one that has stored so many blocks and written no index."""
        before = await self.tier()
        for n in range(blocks):
            await put(before, n)
        self.is_absent = is_absent
        tier = await self.tier()
        self.is_absent = False
        return tier


async def found(slots: AsyncIterator[tuple[SlotRef, Record]]) -> dict[int, tuple[SlotRef, Record]]:
    return {int.from_bytes(r.key.digest, "big"): (s, r) async for s, r in slots}


def on_second(extents: Iterable[int]) -> set[int]:
    return {extent for extent in extents if extent & (1 << DEVICE_BITS) - 1 == 1}


def test_a_late_device_takes_no_blocks_before_its_recovery_has_ended() -> None:
    async def scenario() -> None:
        rack = Rack()
        tier = await rack.killed(100, is_absent=True)
        await found(tier.recover())
        holds: list[asyncio.Event] = []
        rack.prepare = lambda volume: holds.append(volume.hold("read_pages"))
        recovery = asyncio.create_task(found(tier.recover_late()))
        await asyncio.sleep(1)
        assert rack.volumes[1].calls["read_pages"]

        assert not on_second(slot.extent for slot in fill(tier, BOB))
        assert not on_second(tier.extents_to_free(BOB, BLOCK_BYTES) | tier.compact())
        assert not on_second(await tier.resize(MIB))
        await tier.resize(8 * MIB)
        holds[0].set()
        late = await recovery

        assert len(late) == 50
        assert on_second([tier.reserve(BOB, BLOCK_BYTES).extent])
        for n, held in late.items():
            assert await get(tier, *held) == content(n)

    run_virtually(scenario())


def test_a_late_device_whose_recovery_fails_stays_absent_and_is_tried_again() -> None:
    async def scenario() -> None:
        rack = Rack()
        tier = await rack.killed(300, is_absent=True)
        await found(tier.recover())
        rack.prepare = lambda volume: volume.fail("read_pages", errno.ENODEV, skip=9)

        assert await found(tier.recover_late()) == {}
        assert rack.volumes[1].is_closed
        assert os.strerror(errno.ENODEV) in tier.devices[1].error
        assert not on_second([(await put(tier, 1000))[0].extent])

        rack.prepare = id
        assert len(await found(tier.recover_late())) == 150
        assert not any(d.error for d in tier.devices)

    run_virtually(scenario())


def test_a_device_whose_recovery_fails_takes_no_blocks_and_is_tried_again() -> None:
    async def scenario() -> None:
        rack = Rack()
        rack.prepare = lambda volume: volume.fail("read_pages", errno.ENODEV)
        tier = await rack.killed(100)

        assert len(await found(tier.recover())) == 50
        assert os.strerror(errno.ENODEV) in tier.devices[1].error
        await asyncio.sleep(PAUSE_S)
        assert not on_second(slot.extent for slot in fill(tier, BOB))

        rack.prepare = id
        assert len(await found(tier.recover_late())) == 50

    run_virtually(scenario())


def test_a_late_device_gets_what_the_others_were_granted_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rack = Rack()
        second_bytes = MIB
        monkeypatch.setattr(
            "kvstrata_agent.backends.file.striped.measure_room",
            lambda path: DirectoryRoom(ord(path.name), second_bytes if path.name == "b" else 1 << 40, 0),
        )
        tier = await rack.killed(0, is_absent=True)
        assert [d.capacity_bytes for d in tier.devices] == [7 * MIB, 0]
        second_bytes = 1 << 40

        await found(tier.recover_late())

        assert [d.capacity_bytes for d in tier.devices] == [4 * MIB, 4 * MIB]
        assert tier.capacity_bytes == 8 * MIB

    run_virtually(scenario())
