"""The devdax tier on a file in place of the character device: the same mapping, without the distance."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import Record, SlotRef, TierBackend
from kvstrata_agent.backends.device.devdax import DRIVER, MAP_BYTES, DaxMemory, open_devdax
from kvstrata_agent.backends.device.device_tier import DeviceTier
from kvstrata_api.errors import BackendFailedError, InvalidInputError
from kvstrata_api.units import MIB
from kvstrata_node.discovery import DaxDevice
from support.backends import contract as backend_contract
from support.backends.contract import ANNA, BLOCK_BYTES, BOB, CAPACITY_BYTES, BackendContract, get, put

pytestmark = pytest.mark.contract

DEVICE_BYTES = 4 * MIB


def device(dev: Path, name: str = "dax0.0", size_bytes: int = DEVICE_BYTES) -> DaxDevice:
    """A file of foreign bytes with the device's name."""
    (dev / name).write_bytes(b"\xa5" * size_bytes)
    return DaxDevice(name, size_bytes, 1, DRIVER)


class TestDevDax(BackendContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[TierBackend]:
        backend = open_devdax(CAPACITY_BYTES, [device(tmp_path)], tmp_path)
        assert backend.capabilities.medium == "cxl-devdax"
        yield backend
        await backend.close()


async def test_what_blocks_leave_behind_is_cleared(tmp_path: Path) -> None:
    backend = open_devdax(CAPACITY_BYTES, [device(tmp_path)], tmp_path)
    stored = [await put(backend, number) for number in range(1, 21)]
    needle = bytes(backend_contract.content(7)[:64])
    assert needle in (tmp_path / "dax0.0").read_bytes()
    await backend.close()

    left = (tmp_path / "dax0.0").read_bytes()
    assert not any(bytes(backend_contract.content(number)[:64]) in left for number in range(1, 21))
    assert stored


async def test_a_memory_error_loses_its_extent_and_nothing_else(tmp_path: Path) -> None:
    backend = open_devdax(CAPACITY_BYTES, [device(tmp_path)], tmp_path)
    assert isinstance(backend, DeviceTier)
    assert isinstance(backend.memory, DaxMemory)
    stored: list[tuple[SlotRef, Record]] = []
    while len({slot.extent for slot, _ in stored}) < 2:
        stored.append(await put(backend, len(stored) + 1))
    first, last = stored[0], stored[-1]
    lost = backend.memory._regions[last[0].extent]
    os.truncate(tmp_path / "dax0.0", lost.offset)  # As poison does: a load there is a SIGBUS.

    with pytest.raises(BackendFailedError, match="memory error in extent"):
        await get(backend, *last)
    os.truncate(tmp_path / "dax0.0", DEVICE_BYTES)
    assert await get(backend, *first) == backend_contract.content(1)
    assert "memory error" in backend.last_error
    assert last[0].extent in backend.compact()
    backend.drop(last[0])
    for _ in range(40):
        slot, made = await put(backend, 99)
        assert slot.extent != last[0].extent
        assert await get(backend, slot, made) == backend_contract.content(99)
        backend.drop(slot)
    await backend.close()


async def test_extents_of_a_large_device_are_whole_pages_of_it(tmp_path: Path) -> None:
    """Of a page of 2 MiB the kernel lets nothing take the place of a part, as zeros do after a memory error."""
    path, size_bytes = tmp_path / "dax0.0", 200 * MIB
    path.touch()
    os.truncate(path, size_bytes)
    backend = open_devdax(size_bytes, [DaxDevice("dax0.0", size_bytes, 1, DRIVER)], tmp_path)
    assert isinstance(backend, DeviceTier)
    assert isinstance(backend.memory, DaxMemory)

    for scope in (ANNA, BOB):
        backend.reserve(scope, BLOCK_BYTES)
    regions = backend.memory._regions.values()
    assert len(regions) == 2
    assert all(region.offset % MAP_BYTES == region.size_bytes % MAP_BYTES == 0 for region in regions)
    await backend.close()


async def test_a_device_serves_one_process_and_says_why_it_does_not_serve_another(tmp_path: Path) -> None:
    devices = [device(tmp_path, "dax0.0", MIB * 2), device(tmp_path, "dax1.0")]
    backend = open_devdax(DEVICE_BYTES, devices, tmp_path)
    with pytest.raises(InvalidInputError, match=r"dax0.0 has 2097152 B; dax1.0: Resource temporarily unavailable"):
        open_devdax(DEVICE_BYTES, devices, tmp_path)
    await backend.close()
    again = open_devdax(DEVICE_BYTES, devices, tmp_path)
    slot = again.reserve(ANNA, BLOCK_BYTES)
    again.drop(slot)
    await again.close()
