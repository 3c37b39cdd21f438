"""CXL memory as NUMA nodes without processors: one that firmware describes, and a region that kmem put online."""

from collections import Counter
from collections.abc import AsyncIterator

import pages
import pytest
import regions
from recorded import Record

from kvstrata_agent.backends.base import TierBackend
from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_api.models.pool import CxlTier
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import MIB
from kvstrata_node.discovery import NumaNode, discover
from support.backends.contract import CAPACITY_BYTES, content, get, put
from support.backends.mappable_contract import MappableContract

NUMA = CxlTier(mode=CxlMode.NUMA_NODE)


def node(number: int) -> NumaNode:
    return next(n for n in discover().cpuless if n.id == number)


def placed(backend: TierBackend, extents: set[int]) -> Counter[int]:
    """Pages that were touched, by node."""
    views = [backend.extent_view(extent) for extent in extents]  # type: ignore[attr-defined]
    found = sum((pages.nodes_of(view) for view in views), Counter[int]())
    return Counter({node: count for node, count in found.items() if node != pages.UNTOUCHED})


class TestNodeOfFirmware(MappableContract):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[TierBackend]:
        backend = open_cxl(NUMA, CAPACITY_BYTES, (node(1),))
        assert backend.capabilities.medium == "cxl-numa"
        yield backend
        await backend.close()


async def test_every_page_of_an_arena_lies_on_its_node(record_property: Record) -> None:
    backend = open_cxl(NUMA, CAPACITY_BYTES, (node(1),))
    stored = [await put(backend, n) for n in range(40)]

    found = placed(backend, {slot.extent for slot, _ in stored})

    record_property("pages", dict(found))
    assert set(found) == {1}
    await backend.close()


def test_kmem_puts_a_region_online_as_one_more_node(record_property: Record) -> None:
    (device,) = discover().dax
    regions.make_memory(device.name)

    regions.until(lambda: device.node in {n.id for n in discover().cpuless})
    found = node(device.node)
    record_property("node", found.id)
    record_property("bytes", found.memory_bytes)
    assert discover().dax[0].driver == "kmem"
    assert 128 * MIB <= found.memory_bytes <= 256 * MIB


async def test_an_arena_on_a_cxl_device_has_every_page_there_and_gives_its_bytes_back(record_property: Record) -> None:
    (device,) = discover().dax
    backend = open_cxl(NUMA, CAPACITY_BYTES, (node(device.node),))
    stored = [await put(backend, n) for n in range(20)]

    found = placed(backend, {slot.extent for slot, _ in stored})

    record_property("pages", dict(found))
    assert set(found) == {device.node}
    assert [await get(backend, *s) for s in stored] == [content(n) for n in range(20)]
    await backend.close()


async def test_several_nodes_share_the_pages_of_an_arena(record_property: Record) -> None:
    (device,) = discover().dax
    backend = open_cxl(NUMA, CAPACITY_BYTES, discover().cpuless)
    slot, _ = await put(backend, 1)

    found = placed(backend, {slot.extent})

    record_property("pages", dict(found))
    assert set(found) == {1, device.node}
    assert abs(found[1] - found[device.node]) <= 1
    await backend.close()
