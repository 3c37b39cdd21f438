"""What this machine has for tiers: memory, huge pages, NUMA nodes, dax and NVMe devices, GPUs.

Parsing is pure; reading is a thin walk over sysfs and procfs below a root that tests can replace.
"""

import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_GPU_VENDORS: Final = frozenset({"0x10de", "0x1002"})
"""NVIDIA and AMD (pci-ids.ucw.cz); others have no HBM that a tier could lie in."""
_GPU_CLASSES: Final = ("0x0300", "0x0302", "0x0380", "0x1200")
"""Display, 3D, other display controller, processing accelerator (PCI code and id assignment specification)."""


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages of one size on one NUMA node."""

    node: int
    page_bytes: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node. A node without processors is CXL or other far memory."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class NvmeDevice:
    """One NVMe namespace."""

    name: str
    model: str
    size_bytes: int
    node: int
    """NUMA node that it is attached to; -1 when unknown."""


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """One dax device."""

    name: str
    size_bytes: int
    node: int
    driver: str
    """`kmem` when it is online as memory, `device_dax` when it can be mapped, empty without a driver."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PciGpu:
    """One GPU as the PCI bus shows it, with or without a driver."""

    address: str
    model: str
    """As its driver has it, else vendor and device id."""
    node: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Everything found. Empty tuples mean that there is none of a kind, or that it cannot be seen."""

    memory_bytes: int
    numa: tuple[NumaNode, ...]
    hugepages: tuple[HugePages, ...] = ()
    nvme: tuple[NvmeDevice, ...] = ()
    dax: tuple[DaxDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()

    @property
    def cpu_nodes(self) -> tuple[int, ...]:
        """NUMA nodes with processors and memory: where HostDRAM lies."""
        return tuple(n.id for n in self.numa if n.cpus and n.memory_bytes)

    @property
    def cpuless(self) -> tuple[NumaNode, ...]:
        """NUMA nodes with memory and no processors: where CXL memory shows up."""
        return tuple(n for n in self.numa if not n.cpus and n.memory_bytes)


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Read the kernel's list format: `0-2,8` is 0, 1, 2, 8; an empty list is no processor."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def parse_meminfo(text: str) -> int:
    """Bytes of `MemTotal` of /proc/meminfo or of a NUMA node's meminfo; 0 when it is absent."""
    match = re.search(r"MemTotal:\s+(\d+) kB", text)
    return int(match[1]) * 1024 if match else 0


def discover(root: Path = ROOT) -> NodeFacts:
    """Read the machine, CUDA devices included. Blocking; seconds with torch. See `read_machine`."""
    return replace(read_machine(root), gpus=read_gpus(root))


def read_machine(root: Path = ROOT) -> NodeFacts:
    """Read what the kernel shows. Never raises for what is missing. Blocking; some milliseconds."""
    numa = read_numa(root)
    memory_bytes = parse_meminfo(_text(root / "proc/meminfo"))
    return NodeFacts(
        memory_bytes=memory_bytes,
        numa=numa or (NumaNode(0, (0,), memory_bytes),),
        hugepages=read_hugepages(root),
        nvme=read_nvme(root),
        dax=read_dax(root),
    )


def read_numa(root: Path) -> tuple[NumaNode, ...]:
    """NUMA nodes with processors and memory."""
    return tuple(
        NumaNode(
            id=int(directory.name[4:]),
            cpus=parse_cpulist(_text(directory / "cpulist")),
            memory_bytes=parse_meminfo(_text(directory / "meminfo")),
        )
        for directory in _numbered(root / "sys/devices/system/node", "node")
    )


def read_hugepages(root: Path) -> tuple[HugePages, ...]:
    """Huge pages for each node and size."""
    found = []
    for directory in _numbered(root / "sys/devices/system/node", "node"):
        for size in sorted((directory / "hugepages").glob("hugepages-*kB")):
            page_bytes = int(size.name[len("hugepages-") : -2]) * 1024
            total, free = _number(size / "nr_hugepages"), _number(size / "free_hugepages")
            found.append(HugePages(int(directory.name[4:]), page_bytes, total, free))
    return tuple(found)


def read_nvme(root: Path) -> tuple[NvmeDevice, ...]:
    """NVMe namespaces with model, size and NUMA node.

    With native multipath (drivers/nvme/host/multipath.c) a namespace hangs below its subsystem, whose controllers know
    the node, and each path to it is one more block device, hidden, that cannot be opened.
    """
    found = []
    for device in sorted((root / "sys/block").glob("nvme*n*")):
        if _number(device / "hidden"):
            continue
        size_bytes = _number(device / "size") * 512  # sysfs counts sectors of 512 B on every device.
        places = (device / "device/device", *sorted((device / "device").glob("nvme*/device")))
        node = max((_number(place / "numa_node", missing=-1) for place in places), default=-1)
        found.append(NvmeDevice(device.name, _text(device / "device/model").strip(), size_bytes, node))
    return tuple(found)


def read_dax(root: Path) -> tuple[DaxDevice, ...]:
    """Dax devices with size, node and driver."""
    found = []
    for device in sorted((root / "sys/bus/dax/devices").glob("dax*")):
        driver = device / "driver"
        found.append(
            DaxDevice(
                name=device.name,
                size_bytes=_number(device / "size"),
                node=_number(device / "target_node", missing=-1),
                driver=driver.resolve().name if driver.exists() else "",
            )
        )
    return tuple(found)


def read_gpus(root: Path) -> tuple[Gpu, ...]:
    """CUDA devices as torch sees them; none without torch. Nodes without the driver are spared torch's import."""
    if not (root / "dev/nvidiactl").exists() or importlib.util.find_spec("torch") is None:
        return ()
    return tuple(Gpu(*device) for device in cuda_devices())


def read_pci_gpus(root: Path) -> tuple[PciGpu, ...]:
    """GPUs on the PCI bus: what has the class of a display or 3D controller and is of a maker of accelerators."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = _text(device / "vendor").strip(), _text(device / "class").strip()
        if vendor not in _GPU_VENDORS or not kind.startswith(_GPU_CLASSES):
            continue
        driver_text = _text(root / "proc/driver/nvidia/gpus" / device.name / "information")
        model = re.search(r"^Model:\s*(.+?)\s*$", driver_text, re.MULTILINE)
        ids = f"{vendor[2:]}:{_text(device / 'device').strip()[2:]}"
        found.append(PciGpu(device.name, model[1] if model else ids, _number(device / "numa_node", missing=-1)))
    return tuple(found)


def _numbered(parent: Path, prefix: str) -> list[Path]:
    found = [p for p in parent.glob(f"{prefix}*") if p.name[len(prefix) :].isdigit()]
    return sorted(found, key=lambda p: int(p.name[len(prefix) :]))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path, *, missing: int = 0) -> int:
    try:
        return int(_text(path).strip() or missing)
    except ValueError:
        return missing


def cuda_devices() -> list[tuple[int, str, int]]:
    """Index, name and bytes of memory of each CUDA device. Imports torch, which has to be installed."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(i, p.name, p.total_memory) for i, p in enumerate(found)]
