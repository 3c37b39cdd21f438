"""A persistent CXL device: region, namespace, devdax, tier."""

import mmap
import os

import regions
from recorded import Record

from kvstrata_agent.backends.device.devdax import DRIVER, open_devdax
from kvstrata_api.units import MIB
from kvstrata_node.discovery import DaxDevice, discover
from support.backends.contract import CAPACITY_BYTES, content, get, put

MARK = b"kvstrata: these bytes were flushed to the device\n"


def mappable() -> list[DaxDevice]:
    return [d for d in discover().dax if d.driver == DRIVER]


def test_a_namespace_of_a_persistent_region_is_a_dax_device(record_property: Record) -> None:
    regions.make_region(regions.PERSISTENT_SERIAL, "pmem", 256 * MIB)
    name = regions.make_persistent_mappable()

    (device,) = mappable()
    record_property("device", repr(device))
    assert device.name == name
    assert 200 * MIB < device.size_bytes < 256 * MIB


async def test_bytes_of_the_tiers_own_mapping_survive_a_new_mapping_and_reach_the_device() -> None:
    (device,) = mappable()
    fd = os.open(f"/dev/{device.name}", os.O_RDWR)
    with mmap.mmap(fd, 4 * MIB) as mapped:
        mapped[3 * MIB : 3 * MIB + len(MARK)] = MARK
    backend = open_devdax(CAPACITY_BYTES, mappable())
    stored = [await put(backend, n) for n in range(8)]
    assert [await get(backend, *s) for s in stored] == [content(n) for n in range(8)]
    await backend.close()

    with mmap.mmap(fd, 4 * MIB) as mapped:
        assert mapped[3 * MIB : 3 * MIB + len(MARK)] == MARK
        assert bytes(content(7)[:64]) not in mapped[: 256 << 10]
    os.close(fd)
