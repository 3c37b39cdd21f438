"""Laws of finding file systems that are memory."""

from pathlib import Path

import pytest

from kvstrata_agent.backends.memory.persistence import (
    Mount,
    PersistenceRoot,
    choose_directories,
    huge_mount,
    is_memory,
    parse_mounts,
    remove_abandoned,
)
from kvstrata_api.units import GIB, KIB, MIB

pytestmark = pytest.mark.unit

MOUNTS = r"""21 1 0:19 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 21 0:20 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=24684092k
23 22 0:21 / /dev/shm/disk rw - xfs /dev/vdb rw
24 21 0:22 / /mnt/huge\040pages rw - hugetlbfs none rw,pagesize=2M
25 21 0:23 / /mnt/gib rw - hugetlbfs none rw,pagesize=1024M
26 21 0:24 / /dev/hidden rw - ext4 /dev/vdc rw
27 21 0:25 / /dev/hidden rw - tmpfs tmpfs rw
broken line
"""
FOUND = parse_mounts(MOUNTS)


def test_the_deepest_mount_decides_and_the_last_one_on_a_path() -> None:
    assert is_memory(Path("/dev/shm/kvstrata"), FOUND)
    assert not is_memory(Path("/dev/shm/disk/kvstrata"), FOUND)
    assert not is_memory(Path("/var/lib/kvstrata"), FOUND)
    assert is_memory(Path("/dev/hidden/x"), FOUND)
    assert not is_memory(Path("/anywhere"), [])


def test_huge_pages_are_found_by_their_size() -> None:
    assert huge_mount(2 * MIB, FOUND) == Path("/mnt/huge pages")
    assert huge_mount(GIB, FOUND) == Path("/mnt/gib")
    assert huge_mount(16 * KIB, FOUND) is None


HOME = PersistenceRoot(Path("/dev/shm/kvstrata"), "pool", "node", FOUND, "dram")


def test_a_tier_has_its_own_directory_and_its_bytes_lie_where_its_pages_are() -> None:
    small, huge = choose_directories(HOME, "Auto", 4 * KIB), choose_directories(HOME, "Auto", 2 * MIB)
    emulated = choose_directories(HOME, "Auto", 4 * KIB, Path("/mnt/cxl"))

    assert small.ledger_dir == small.memory_dir == Path("/dev/shm/kvstrata/pool/dram/node")
    assert (huge.ledger_dir, huge.memory_dir) == (small.ledger_dir, Path("/mnt/huge pages/kvstrata/pool/dram/node"))
    assert emulated.memory_dir == Path("/mnt/cxl/kvstrata/pool/dram/node")


@pytest.mark.parametrize(
    ("home", "page_bytes", "reason"),
    [
        (PersistenceRoot(None, "pool", "node", FOUND, "dram"), 4 * KIB, "--memory-dir"),
        (PersistenceRoot(Path("/var/lib/kvstrata"), "pool", "node", FOUND, "dram"), 4 * KIB, "not on a tmpfs"),
        (HOME, 64 * KIB, "no hugetlbfs with pages of 65536 B"),
    ],
)
def test_who_asked_for_memory_that_lasts_is_told_why_it_does_not(
    home: PersistenceRoot, page_bytes: int, reason: str
) -> None:
    assert reason in choose_directories(home, "AgentRestart", page_bytes).reason
    assert choose_directories(home, "Auto", page_bytes).reason == ""
    assert choose_directories(home, "AgentRestart", page_bytes).memory_dir is None


def test_who_does_not_want_it_gets_memory_that_ends_with_the_agent() -> None:
    assert choose_directories(HOME, "None", 4 * KIB).ledger_dir is None


def test_nothing_is_removed_where_nothing_is(tmp_path: Path) -> None:
    assert remove_abandoned(PersistenceRoot(tmp_path, "pool", "node", [Mount(tmp_path, "tmpfs")]), frozenset()) == []
