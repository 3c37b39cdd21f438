"""Room on one NUMA node, by the kernel's figures, and where pages lie."""

import mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.memory.numa import available_bytes, check_room, nodes_of, parse_available, parse_watermarks
from kvstrata_api.errors import TierFullError

pytestmark = pytest.mark.unit

ZONES = """Node 0, zone    DMA32
  pages free     10
        boost    0
        min      1
        low      2
        high     3
Node 1, zone   Normal
  pages free     100
        min      4
        low      5
        high     6
        protection: (0, 0)
Node 1, zone  Movable
  pages free     100
        low      50
        high     60
Node 10, zone  Movable
        low      500
        high     600
"""
MEMINFO = """Node 1 MemTotal:       262144 kB
Node 1 MemFree:         {free} kB
Node 1 Active(file):    {active} kB
Node 1 Inactive(file):  {inactive} kB
Node 1 Shmem:           99999 kB
Node 1 SReclaimable:    {slabs} kB
"""
KIBS = st.integers(0, 1 << 20)


def machine(root: Path, free: int) -> Path:
    node = root / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "meminfo").write_text(MEMINFO.format(free=free, active=0, inactive=0, slabs=0))
    (root / "proc").mkdir()
    (root / "proc/zoneinfo").write_text(ZONES)
    return root


def test_watermarks_are_those_of_the_nodes_own_zones() -> None:
    assert parse_watermarks(ZONES, 1) == (55 * 4096, 66 * 4096)
    assert parse_watermarks(ZONES, 7) == (0, 0)


@given(KIBS, KIBS, KIBS, KIBS, KIBS, KIBS)
def test_what_is_available_is_never_more_than_what_is_free_or_cached(
    free: int, active: int, inactive: int, slabs: int, low: int, more: int
) -> None:
    meminfo = MEMINFO.format(free=free, active=active, inactive=inactive, slabs=slabs)

    available = parse_available(meminfo, (low * 1024, (low + more) * 1024))

    assert 0 <= available <= (free + active + inactive + slabs) * 1024
    assert available >= (free - low - more) * 1024


def test_shared_memory_of_others_is_not_room() -> None:
    meminfo = MEMINFO.format(free=100, active=40, inactive=20, slabs=0)

    assert parse_available(meminfo, (10 * 1024, 12 * 1024)) == (100 - 12 + 60 - 10) * 1024


def test_a_node_without_room_for_its_share_is_refused_with_both_figures(tmp_path: Path) -> None:
    root = machine(tmp_path, free=1024)
    there = available_bytes(1, root)
    assert there == (1024 << 10) - 66 * 4096

    check_room(there // 4096 * 4096, (1,), root)
    with pytest.raises(TierFullError, match=rf"{1 << 20} B wanted on NUMA node 1, {there} B available there"):
        check_room(1 << 20, (1,), root)


def test_each_of_several_nodes_needs_its_share_alone(tmp_path: Path) -> None:
    root = machine(tmp_path, free=1024)

    check_room(1 << 20, (1, 1), root)


def test_no_nodes_and_a_kernel_that_does_not_say_are_no_refusal(tmp_path: Path) -> None:
    assert available_bytes(1, tmp_path) is None
    check_room(1 << 60, (), tmp_path)
    check_room(1 << 60, (1,), tmp_path)


def test_pages_lie_somewhere_once_they_were_touched() -> None:
    with mmap.mmap(-1, 8 * 4096) as mapped:
        address = int(np.frombuffer(mapped, np.uint8).__array_interface__["data"][0])
        assert nodes_of(address, 8 * 4096) == frozenset()
        mapped[0] = 1
        assert len(nodes_of(address, 8 * 4096)) == 1
