"""Host memory as a tier: extents of 4Ki, 2Mi or 1Gi pages, bound to NUMA nodes where there are several.

They are files of a tmpfs or hugetlbfs where blocks are to outlive the agent, and memfds where they are not.

Choice of page size for a memory tier: what was asked for, or the honest reason why not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstrata_agent.backends.base import Capabilities
from kvstrata_agent.backends.memory.arena import ALIGNMENT_BYTES, Arena
from kvstrata_agent.backends.memory.mapping import MappedExtent, Placement, make_file, make_huge_file, make_memfd
from kvstrata_agent.backends.memory.numa import check_room
from kvstrata_agent.backends.memory.persistence import NO_PERSISTENCE, PersistenceRoot, choose_directories, choose_store
from kvstrata_api.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.backends.memory.extent_store import Maker
    from kvstrata_api.models.pool import HostDramTier


SYSFS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class PageChoice:
    """Page size to use; `fallback` states why it is not the one asked for and what to do."""

    name: str
    fallback: str = ""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return PAGE_BYTES[self.name]


def free_pages(page_bytes: int, sysfs: Path = SYSFS) -> int | None:
    """Huge pages that are neither in use nor promised; None when the kernel has no such size."""
    directory = sysfs / "kernel/mm/hugepages" / f"hugepages-{page_bytes >> 10}kB"
    try:
        counts = [int((directory / name).read_text()) for name in ("free_hugepages", "resv_hugepages")]
    except (OSError, ValueError):
        return None
    return counts[0] - counts[1]


def allowed_pages(page_bytes: int, sysfs: Path = SYSFS) -> int | None:
    """Huge pages that the control group of this process may have; None for no limit.

    A pod that asks for none has a limit of none, whatever the machine has: the kernel would kill it at the first touch.
    """
    name = f"hugetlb.{page_bytes >> 20}MB" if page_bytes < 1 << 30 else f"hugetlb.{page_bytes >> 30}GB"
    for path in (f"{name}.max", f"hugetlb/{name}.limit_in_bytes"):  # Control groups of version 2 and of version 1.
        try:
            text = (sysfs / "fs/cgroup" / path).read_text().strip()
        except OSError:
            continue
        return int(text) // page_bytes if text.isdigit() else None
    return None


def choose_pages(asked: str, capacity_bytes: int, free: int | None, allowed: int | None = None) -> PageChoice:
    """Take the page size asked for when all of the capacity fits into free pages of it, else 4Ki. Pure.

    `allowed` is how many the process may have, None for as many as there are.
    """
    page_bytes = PAGE_BYTES[asked]
    need = capacity_bytes // page_bytes
    if asked != "4Ki" and allowed is not None and allowed < need:
        limit = f"limits.hugepages-{asked}"
        return PageChoice("4Ki", f"{need} pages of {asked} asked for, {limit} of the pod allows {allowed}")
    if asked == "4Ki" or (free is not None and 0 < need <= free):
        return PageChoice(asked)
    return PageChoice("4Ki", _reason(asked, need, free))


def _reason(asked: str, need: int, free: int | None) -> str:
    if need == 0:
        return f"{asked} pages asked for, but the capacity is less than one page; raise it or ask for 4Ki"
    if free is None:
        return f"{asked} pages asked for, but this kernel has none; boot with hugepagesz={asked[:-1]} or ask for 4Ki"
    kib = PAGE_BYTES[asked] >> 10
    path = f"/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"
    how = f"sysctl vm.nr_hugepages={need}" if asked == "2Mi" else f"echo {need} > {path}"
    return f"{need} pages of {asked} asked for, {free} free; reserve them with `{how}`, or ask for 4Ki"


def make_bound(size_bytes: int, page_bytes: int, placement: Placement) -> MappedExtent:
    """Memory whose pages come from the nodes of `placement`: small ones now, huge ones once they are touched.

    Raises `TierFullError` where a node has no room.
    """
    is_small = page_bytes == PAGE_BYTES["4Ki"]
    if is_small:
        check_room(size_bytes, placement.nodes)
    memory = make_memfd(size_bytes, page_bytes)
    memory.bind(placement)
    if is_small and placement.nodes:
        memory.allocate()
    return memory


def bound_files(directory: Path, page_bytes: int, placement: Placement) -> Maker:
    """Return what makes unnamed files of a memory file system, bound like `make_bound`."""

    def make(size_bytes: int) -> MappedExtent:
        if page_bytes > PAGE_BYTES["4Ki"]:
            memory = make_huge_file(directory, size_bytes)
            memory.bind(placement)
            return memory
        check_room(size_bytes, placement.nodes)
        return make_file(directory, size_bytes, placement)

    return make


def placement_of(numa: str, nodes: Sequence[int]) -> Placement:
    """`Local` binds to the first node, `Spread` interleaves over all; one node needs no policy."""
    if len(nodes) < 2:
        return Placement()
    return Placement((nodes[0],)) if numa == "Local" else Placement(tuple(nodes), is_interleaved=True)


def open_host_dram(
    tier: HostDramTier, capacity_bytes: int, numa_nodes: Sequence[int], root: PersistenceRoot = NO_PERSISTENCE
) -> Arena:
    """Arena in host memory; `root` is where its blocks can outlive this process.

    Falls back to 4Ki pages, or to memory that ends with the process, with a reason in `capabilities.fallback`.
    Raises `InvalidInputError` when another process holds the tier's memory.
    """
    pages = _pages(tier, capacity_bytes, root)
    placement = placement_of(tier.numa, numa_nodes)
    wanted = choose_directories(root, tier.persistence, pages.page_bytes)
    store, outcome = choose_store(
        root, wanted, capacity_bytes,
        partial(bound_files, page_bytes=pages.page_bytes, placement=placement),
        partial(make_bound, page_bytes=pages.page_bytes, placement=placement),
    )  # fmt: skip
    outlives_agent = outcome.memory_dir is not None
    file_system = "tmpfs" if pages.page_bytes == PAGE_BYTES["4Ki"] else "hugetlbfs"
    capabilities = Capabilities(
        medium=f"{file_system if outlives_agent else 'memfd'}-{pages.name}",
        is_memory=True,
        survives_restart=False,
        is_emulated=False,
        alignment_bytes=ALIGNMENT_BYTES,
        fallback="; ".join(filter(None, (pages.fallback, outcome.reason))),
        outlives_agent=outlives_agent,
    )
    return Arena(capabilities, capacity_bytes, store, page_bytes=pages.page_bytes)


def _pages(tier: HostDramTier, capacity_bytes: int, root: PersistenceRoot) -> PageChoice:
    """Pages that extents of an earlier run take are as good as free."""
    asked = tier.page_size
    if asked == "4Ki":
        return PageChoice(asked)
    page_bytes = PAGE_BYTES[asked]
    free = free_pages(page_bytes)
    own = choose_directories(root, tier.persistence, page_bytes).own_bytes // page_bytes
    return choose_pages(asked, capacity_bytes, None if free is None else free + own, allowed_pages(page_bytes))
