"""Memory that is short, bound to nodes, or not there at all."""

import os
from pathlib import Path

import pytest

from kvstrata_agent.backends.base import Capabilities
from kvstrata_agent.backends.device.devdax import open_devdax
from kvstrata_agent.backends.memory.arena import Arena
from kvstrata_agent.backends.memory.cxl import open_cxl
from kvstrata_agent.backends.memory.extent_store import VolatileStore
from kvstrata_agent.backends.memory.host_dram import make_bound
from kvstrata_agent.backends.memory.mapping import MappedExtent, Placement, make_memfd
from kvstrata_api.errors import BackendFailedError, InvalidInputError, KvStrataError, TierFullError, UnsupportedError
from kvstrata_api.models.pool import CxlEmulation, CxlTier
from kvstrata_api.tiers import CxlMode
from kvstrata_node.discovery import DaxDevice, NumaNode
from support.backends.contract import CAPACITY_BYTES, content, get, put_until_refused

pytestmark = pytest.mark.contract


async def test_memory_that_cannot_be_had_is_a_full_tier_that_keeps_its_books() -> None:
    left = 2

    def make(size_bytes: int) -> MappedExtent:
        nonlocal left
        if left == 0:
            raise TierFullError(f"extent of {size_bytes} B: Cannot allocate memory")
        left -= 1
        return make_memfd(size_bytes, 4096)

    capabilities = Capabilities(
        medium="test", is_memory=True, survives_restart=False, is_emulated=False, alignment_bytes=4096
    )
    arena = Arena(capabilities, CAPACITY_BYTES, VolatileStore(make), page_bytes=4096)
    stored, error = await put_until_refused(arena)
    assert isinstance(error, TierFullError)

    assert arena.used_bytes == sum(s.size_bytes for s, _ in stored)
    assert "Cannot allocate memory" in arena.last_error
    for n, (slot, made) in enumerate(stored):
        assert await get(arena, slot, made) == content(n)
    await arena.close()


def test_pages_are_bound_to_nodes_that_exist_and_refused_for_others() -> None:
    bound = make_bound(1 << 20, 4096, Placement((0,)))
    bound.populate()
    policies = Path("/proc/self/numa_maps").read_text().splitlines()
    mine = next(line for line in policies if line.startswith(f"{bound.address:x} "))
    bound.release()

    assert " bind:0 " in mine
    assert " N0=256 " in f"{mine} "
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BackendFailedError, match=r"mbind to nodes \[901\]"):
        make_bound(1 << 20, 4096, Placement((901,)))
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_cxl_that_is_not_there_says_what_to_do() -> None:
    numa = CxlTier(mode=CxlMode.NUMA_NODE)
    with pytest.raises(UnsupportedError, match="online the CXL region as system-ram"):
        open_cxl(numa, CAPACITY_BYTES, ())
    there = [DaxDevice("dax0.0", 1 << 30, 0, "kmem"), DaxDevice("dax1.0", 1 << 30, 0, "")]
    with pytest.raises(UnsupportedError, match=r"dax0\.0 has driver kmem; dax1\.0 has no driver; make one .*=devdax"):
        open_devdax(CAPACITY_BYTES, there)
    with pytest.raises(InvalidInputError, match=rf"{CAPACITY_BYTES} B asked for, nodes \(0,\) have 4096 B"):
        open_cxl(numa, CAPACITY_BYTES, (NumaNode(0, (), 4096),))
    with pytest.raises(InvalidInputError, match=r"cxl.emulated.path /proc/none"):
        open_cxl(CxlTier(mode=CxlMode.EMULATED, emulated=CxlEmulation(path="/proc/none")), CAPACITY_BYTES, ())


async def test_a_node_without_room_is_a_full_tier_that_says_which_and_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_cxl(CxlTier(), CAPACITY_BYTES, (NumaNode(0, (), 1 << 30),))
    monkeypatch.setattr("kvstrata_agent.backends.memory.numa.available_bytes", lambda *_: 4096)

    stored, error = await put_until_refused(backend)

    assert isinstance(error, TierFullError)
    assert "B wanted on NUMA node 0, 4096 B available there" in backend.last_error
    for n, (slot, made) in enumerate(stored):
        assert await get(backend, slot, made) == content(n)
    await backend.close()


def test_bound_memory_has_all_its_pages_before_anybody_touches_them() -> None:
    bound = make_bound(1 << 20, 4096, Placement((0,)))
    taken_bytes = os.fstat(bound.fd).st_blocks * 512
    bound.release()

    assert taken_bytes == 1 << 20


def test_pages_that_lie_elsewhere_are_no_cxl_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata_agent.backends.memory.cxl.nodes_of", lambda *_: frozenset({0, 3}))

    with pytest.raises(UnsupportedError, match=r"bound to nodes \(0,\) lie on \[3\]"):
        open_cxl(CxlTier(), CAPACITY_BYTES, (NumaNode(0, (), 1 << 30),))


def test_huge_pages_that_run_out_are_a_full_tier() -> None:
    with pytest.raises(KvStrataError, match=r"pages of 1073741824 B|pages of 2097152 B"):
        make_memfd(1 << 50, 2 << 20)
