"""A volatile CXL device as a character device: from the region to the tier."""

import mmap
import os
from collections.abc import AsyncIterator

import pytest
import regions
from recorded import Record

from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.device.devdax import DRIVER, open_devdax
from kvstrata_api.errors import InvalidInputError, UnsupportedError
from kvstrata_api.units import MIB
from kvstrata_node.discovery import DaxDevice, discover
from support.backends.contract import CAPACITY_BYTES, BackendContract, content, put

DEVICE = "dax0.0"


def test_a_new_region_is_a_dax_device_without_a_driver(record_property: Record) -> None:
    regions.make_region(regions.VOLATILE_SERIAL, "ram", 256 * MIB)
    regions.until(regions.dax_devices)

    (device,) = discover().dax
    record_property("node", device.node)
    assert device == DaxDevice(DEVICE, 256 * MIB, device.node, "")
    assert device.node not in {0, 1}


def test_a_device_without_a_driver_is_refused_with_its_name_and_what_to_do() -> None:
    (device,) = discover().dax

    with pytest.raises(UnsupportedError, match=r"dax0\.0 has no driver.*daxctl reconfigure-device --mode=devdax"):
        open_devdax(2 * MIB, [device])


def test_a_driver_that_went_away_meanwhile_is_the_kernels_error_with_the_devices_name() -> None:
    (device,) = discover().dax

    with pytest.raises(InvalidInputError, match=r"dax0\.0: No such (device or address|file or directory)"):
        open_devdax(2 * MIB, [DaxDevice(DEVICE, device.size_bytes, device.node, DRIVER)])


def test_with_its_driver_it_can_be_mapped_in_multiples_of_2_mib_only(record_property: Record) -> None:
    regions.make_mappable(DEVICE)

    (device,) = discover().dax
    assert device.driver == DRIVER
    fd = os.open(f"/dev/{DEVICE}", os.O_RDWR)
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(fd, 4096)
    mmap.mmap(fd, 2 * MIB).close()
    os.close(fd)


class TestDevDax(BackendContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        backend = open_devdax(CAPACITY_BYTES, discover().dax)
        assert backend.capabilities.medium == "cxl-devdax"
        assert not backend.capabilities.is_emulated
        yield backend
        await backend.close()


def _device_bytes(size_bytes: int = CAPACITY_BYTES) -> bytes:
    fd = os.open(f"/dev/{DEVICE}", os.O_RDWR)
    with mmap.mmap(fd, size_bytes) as mapped:
        os.close(fd)
        return mapped[:]


async def test_blocks_lie_on_the_device_while_they_live_and_are_cleared_with_the_tier() -> None:
    needle = bytes(content(7)[:64])
    backend = open_devdax(CAPACITY_BYTES, discover().dax)
    await put(backend, 7)
    assert needle in _device_bytes()

    await backend.close()

    assert needle not in _device_bytes()


async def test_a_device_in_use_is_refused_with_the_reason() -> None:
    backend = open_devdax(CAPACITY_BYTES, discover().dax)

    with pytest.raises(InvalidInputError, match=r"dax0\.0: Resource temporarily unavailable"):
        open_devdax(CAPACITY_BYTES, discover().dax)

    await backend.close()
