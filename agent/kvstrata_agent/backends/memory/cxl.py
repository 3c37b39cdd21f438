"""CXL memory as a tier that engines map: CPU-less NUMA nodes, or an emulation that states so everywhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvstrata_agent.backends.base import Capabilities
from kvstrata_agent.backends.memory.arena import ALIGNMENT_BYTES, Arena
from kvstrata_agent.backends.memory.host_dram import bound_files, make_bound
from kvstrata_agent.backends.memory.mapping import Placement, make_file
from kvstrata_agent.backends.memory.numa import nodes_of
from kvstrata_agent.backends.memory.persistence import (
    NO_PERSISTENCE,
    PersistenceRoot,
    TierDirectories,
    choose_directories,
    choose_store,
)
from kvstrata_api.errors import InvalidInputError, KvStrataError, UnsupportedError
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.backends.memory.mapping import MappedExtent
    from kvstrata_api.models.pool import CxlTier
    from kvstrata_node.discovery import NumaNode

_PAGE_BYTES = PAGE_BYTES["4Ki"]


def open_cxl(
    tier: CxlTier, capacity_bytes: int, cpuless: Sequence[NumaNode], root: PersistenceRoot = NO_PERSISTENCE
) -> Arena:
    """Arena in CXL memory; `cpuless` are the NUMA nodes with memory and no processors.

    `root` is where its blocks can outlive this process.

    Mode DevDax is another kind of tier (`device/devdax.py`). Raises `UnsupportedError` when this node has no such
    memory, and `InvalidInputError` when there is less than asked for or the emulation's directory cannot be used.
    """
    if tier.mode is CxlMode.EMULATED:
        return _emulated(tier, capacity_bytes, root)
    return _numa(tier, capacity_bytes, cpuless, root)


def _numa(tier: CxlTier, capacity_bytes: int, cpuless: Sequence[NumaNode], root: PersistenceRoot) -> Arena:
    if not cpuless:
        raise UnsupportedError(
            "CXL mode NumaNode: this node has no CPU-less NUMA node; online the CXL region as system-ram, "
            "or use mode Emulated for a trial"
        )
    nodes = tuple(n.id for n in cpuless)
    there_bytes = sum(n.memory_bytes for n in cpuless)
    if capacity_bytes > there_bytes:  # Bound pages have nowhere else to go: the kernel would kill processes.
        raise InvalidInputError(f"CXL mode NumaNode: {capacity_bytes} B asked for, nodes {nodes} have {there_bytes} B")
    placement = Placement(nodes, is_interleaved=len(nodes) > 1)
    volatile = partial(make_bound, page_bytes=_PAGE_BYTES, placement=placement)
    _check_placement(volatile(_PAGE_BYTES * len(nodes)), nodes)
    files = partial(bound_files, page_bytes=_PAGE_BYTES, placement=placement)
    wanted = choose_directories(root, tier.persistence, _PAGE_BYTES)
    store, outcome = choose_store(root, wanted, capacity_bytes, files, volatile)
    can = _capabilities("cxl-numa", outcome, is_emulated=False)
    return Arena(can, capacity_bytes, store, page_bytes=_PAGE_BYTES)


def _check_placement(memory: MappedExtent, nodes: tuple[int, ...]) -> None:
    """A kernel that refuses the binding has raised; one that puts pages elsewhere is detected here."""
    memory.populate()
    try:
        strays = nodes_of(memory.address, memory.size_bytes) - set(nodes)
    finally:
        memory.release()
    if strays:
        raise UnsupportedError(f"CXL mode NumaNode: pages bound to nodes {nodes} lie on {sorted(strays)}")


def _emulated(tier: CxlTier, capacity_bytes: int, root: PersistenceRoot) -> Arena:
    emulation = tier.emulated
    if emulation is None:
        raise InvalidInputError("cxl.emulated: must be set when cxl.mode is Emulated")
    directory = Path(emulation.path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        make_file(directory, _PAGE_BYTES).release()
    except (OSError, KvStrataError) as e:
        raise InvalidInputError(f"cxl.emulated.path {directory}: {e}") from e
    wanted = choose_directories(root, tier.persistence, _PAGE_BYTES, directory)
    files, volatile = partial(partial, make_file), partial(make_file, directory)
    store, outcome = choose_store(root, wanted, capacity_bytes, files, volatile)
    return Arena(
        _capabilities("emulated-cxl", outcome, is_emulated=True),
        capacity_bytes,
        store,
        page_bytes=_PAGE_BYTES,
        extra_latency_s=emulation.latency_ns * 1e-9,
    )


def _capabilities(medium: str, outcome: TierDirectories, *, is_emulated: bool) -> Capabilities:
    return Capabilities(
        medium=medium,
        is_memory=True,
        survives_restart=False,
        is_emulated=is_emulated,
        alignment_bytes=ALIGNMENT_BYTES,
        fallback=outcome.reason,
        outlives_agent=outcome.memory_dir is not None,
    )
