"""A made-up machine with huge pages in a folder of files, and tiers that want some."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstrata_api.models.pool import HostDramTier
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import TierType
from kvstrata_node.discovery import HugePages, NodeFacts, NumaNode
from kvstrata_node.pages_plan import PagePool

MIB = 1 << 20
GIB = 1 << 30
PAGE = 2 * MIB
BOOT = "8a0e6c50-0000-4000-8000-000000000001"


def tier(pages: int, page_size: str = "2Mi", numa: str = "Spread", name: str = "dram") -> NodeTier:
    page_bytes = {"4Ki": 4096, "2Mi": PAGE, "1Gi": GIB}[page_size]
    dram = HostDramTier.model_validate({"page_size": page_size, "numa": numa})
    return NodeTier(name=name, type=TierType.HOST_DRAM, capacity_bytes=pages * page_bytes, host_dram=dram)


@dataclass
class Kernel:
    """Huge pages of 2 MiB by NUMA node, as the kernel keeps them: it grants what it finds and keeps what is in use."""

    total: dict[int, int]
    used: dict[int, int] = field(default_factory=dict)
    promised: int = 0
    found: dict[int, int] = field(default_factory=dict)
    """Pages that can be added at most; no entry: any number."""
    memory_bytes: int = 64 * GIB

    def facts(self) -> NodeFacts:
        return NodeFacts(
            memory_bytes=self.memory_bytes * len(self.total),
            numa=tuple(NumaNode(n, (n,), self.memory_bytes) for n in self.total),
            hugepages=tuple(HugePages(n, PAGE, t, t - self.used.get(n, 0)) for n, t in self.total.items()),
        )

    def set(self, place: PagePool, target: int) -> None:
        have = self.total[place.node]
        if target > have and place.node in self.found:
            target = min(target, have + self.found[place.node])
            self.found[place.node] -= target - have
        self.total[place.node] = max(target, self.used.get(place.node, 0))


def put(root: Path, path: str, text: Any) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{text}\n")


def make_machine(root: Path, nodes: int = 2, pages: int = 0, memory_kib: int = 64 << 20) -> Path:
    """Files of a machine; what is written to them stays, as if the kernel found every page."""
    put(root, "proc/meminfo", f"MemTotal: {nodes * memory_kib} kB")
    put(root, "proc/sys/kernel/random/boot_id", BOOT)
    put(root, "sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", 0)
    for node in range(nodes):
        base = f"sys/devices/system/node/node{node}"
        put(root, f"{base}/cpulist", node)
        put(root, f"{base}/meminfo", f"Node {node} MemTotal: {memory_kib} kB")
        put(root, f"{base}/compact", "")
        for name in ("nr_hugepages", "free_hugepages"):
            put(root, f"{base}/hugepages/hugepages-2048kB/{name}", pages)
    return root


def pages_file(root: Path, node: int = 0, name: str = "nr_hugepages") -> Path:
    return root / f"sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/{name}"


def pages_at(root: Path, node: int = 0) -> int:
    text = ""
    while not text:  # A writer of a plain file empties it first; sysfs, which it stands for, never shows that.
        text = pages_file(root, node).read_text()
    return int(text)
