"""Discovery over made-up machines, and the choice of page size."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.backends.memory.host_dram import allowed_pages, choose_pages, free_pages, placement_of
from kvstrata_agent.backends.memory.mapping import Placement
from kvstrata_node.discovery import DaxDevice, HugePages, NvmeDevice, discover, parse_cpulist, parse_meminfo

pytestmark = pytest.mark.unit

MIB = 1 << 20


def put(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets, one CXL node, one NVMe, one dax device with a driver and one without."""
    put(tmp_path, "proc/meminfo", "MemTotal:       1000 kB\nMemFree: 10 kB\n")
    for node, cpus, kib in ((0, "0-1,4", 400), (1, "2-3", 400), (10, "", 200)):
        base = f"sys/devices/system/node/node{node}"
        put(tmp_path, f"{base}/cpulist", f"{cpus}\n")
        put(tmp_path, f"{base}/meminfo", f"Node {node} MemTotal:      {kib} kB\n")
        put(tmp_path, f"{base}/hugepages/hugepages-2048kB/nr_hugepages", "8\n")
        put(tmp_path, f"{base}/hugepages/hugepages-2048kB/free_hugepages", f"{node}\n")
    put(tmp_path, "sys/block/nvme0n1/size", "2048\n")
    put(tmp_path, "sys/block/nvme0n1/device/model", "Fast 9000   \n")
    put(tmp_path, "sys/block/nvme0n1/device/device/numa_node", "1\n")
    put(tmp_path, "sys/block/sda/size", "9\n")
    put(tmp_path, "sys/bus/dax/devices/dax0.0/size", "4096\n")
    put(tmp_path, "sys/bus/dax/devices/dax0.0/target_node", "10\n")
    put(tmp_path, "sys/bus/dax/drivers/kmem/bind", "")
    (tmp_path / "sys/bus/dax/devices/dax0.0/driver").symlink_to(tmp_path / "sys/bus/dax/drivers/kmem")
    put(tmp_path, "sys/bus/dax/devices/dax1.0/size", "8192\n")
    return tmp_path


def test_a_machine_is_read_as_it_is(machine: Path) -> None:
    facts = discover(machine)

    assert facts.memory_bytes == 1000 * 1024
    assert facts.cpu_nodes == (0, 1)
    assert [n.id for n in facts.cpuless] == [10]
    assert facts.numa[0].cpus == (0, 1, 4)
    assert facts.hugepages[-1] == HugePages(10, 2 * MIB, 8, 10)
    assert facts.nvme == (NvmeDevice("nvme0n1", "Fast 9000", MIB, 1),)
    assert facts.dax == (DaxDevice("dax0.0", 4096, 10, "kmem"), DaxDevice("dax1.0", 8192, -1, ""))
    assert facts.gpus == ()


def test_hidden_paths_of_a_multipath_namespace_are_no_devices(
    machine: Path,
) -> None:
    put(machine, "sys/block/nvme1n1/size", "2048\n")
    put(machine, "sys/block/nvme1n1/hidden", "0\n")
    put(machine, "sys/block/nvme1n1/device/model", "Two Ports\n")
    put(machine, "sys/block/nvme1n1/device/nvme1/device/numa_node", "1\n")
    put(machine, "sys/block/nvme1c1n1/size", "2048\n")
    put(machine, "sys/block/nvme1c1n1/hidden", "1\n")

    assert discover(machine).nvme[1:] == (NvmeDevice("nvme1n1", "Two Ports", MIB, 1),)


def test_an_empty_machine_has_one_node_and_nothing_else(tmp_path: Path) -> None:
    facts = discover(tmp_path)

    assert [n.id for n in facts.numa] == [0]
    assert (facts.nvme, facts.dax, facts.hugepages, facts.gpus) == ((), (), (), ())


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert set(parse_cpulist(",".join(str(c) for c in sorted(cpus)))) == cpus


def test_cpu_ranges_include_both_ends() -> None:
    assert parse_cpulist("0-2,8\n") == (0, 1, 2, 8)
    assert parse_meminfo("nothing") == 0


@given(st.integers(1, 1 << 40), st.one_of(st.none(), st.integers(0, 1 << 20)))
def test_huge_pages_are_taken_only_when_the_whole_capacity_fits(capacity_bytes: int, free: int | None) -> None:
    choice = choose_pages("2Mi", capacity_bytes, free)
    fits = free is not None and 0 < capacity_bytes // (2 * MIB) <= free

    assert choice.name == ("2Mi" if fits else "4Ki")
    assert bool(choice.fallback) == (not fits)


@pytest.mark.parametrize(
    ("asked", "capacity_bytes", "free", "says"),
    [
        ("2Mi", 64 * MIB, 3, "sysctl vm.nr_hugepages=32"),
        ("2Mi", 64 * MIB, 3, "32 pages of 2Mi asked for, 3 free"),
        ("1Gi", 2 << 30, 0, "hugepages-1048576kB/nr_hugepages"),
        ("1Gi", 2 << 30, None, "boot with hugepagesz=1G"),
        ("2Mi", MIB, 9, "less than one page"),
    ],
)
def test_the_fallback_says_what_to_do(asked: str, capacity_bytes: int, free: int | None, says: str) -> None:
    assert says in choose_pages(asked, capacity_bytes, free).fallback


def test_promised_pages_are_not_free(tmp_path: Path) -> None:
    put(tmp_path, "kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "9\n")
    put(tmp_path, "kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "4\n")

    assert free_pages(2 * MIB, tmp_path) == 5
    assert free_pages(1 << 30, tmp_path) is None


def test_placement_follows_the_nodes() -> None:
    assert placement_of("Spread", (0,)) == Placement()
    assert placement_of("Spread", (0, 1)) == Placement((0, 1), is_interleaved=True)
    assert placement_of("Local", (0, 1)) == Placement((0,))


@pytest.mark.parametrize(
    ("file", "text", "pages"),
    [
        ("hugetlb.2MB.max", "0\n", 0),
        ("hugetlb.2MB.max", f"{6 * MIB}\n", 3),
        ("hugetlb.2MB.max", "max\n", None),
        ("hugetlb/hugetlb.2MB.limit_in_bytes", f"{6 * MIB}\n", 3),
        ("hugetlb.1GB.max", "0\n", None),
    ],
)
def test_pages_that_a_control_group_forbids_are_not_asked_for(
    tmp_path: Path, file: str, text: str, pages: int | None
) -> None:
    at = tmp_path / "fs/cgroup" / file
    at.parent.mkdir(parents=True)
    at.write_text(text)

    assert allowed_pages(2 * MIB, tmp_path) == pages
    is_enough = pages is None or pages >= 4
    assert choose_pages("2Mi", 8 * MIB, 100, pages).name == ("2Mi" if is_enough else "4Ki")


def test_a_pod_without_pages_is_told_so_even_where_the_machine_has_some() -> None:
    choice = choose_pages("2Mi", 8 * MIB, 100, 0)

    assert choice.fallback == "4 pages of 2Mi asked for, limits.hugepages-2Mi of the pod allows 0"
