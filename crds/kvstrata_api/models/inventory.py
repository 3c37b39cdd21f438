"""What one machine has for tiers, as node preparation reports it in `KVPoolNode.status.node`."""

from typing import Annotated, Final, Literal

from pydantic import Field

from kvstrata_api.models.base import ApiModel, Count, Text

NUMA_NODES_MAX: Final = 64
DEVICES_MAX: Final = 32
"""Of each kind; what there is beyond is not listed."""
MESSAGE_CHARS_MAX: Final = 1024

NumaNodeId = Annotated[int, Field(ge=0, le=4095)]
DeviceNode = Annotated[int, Field(ge=-1, le=4095, description="NUMA node that it is attached to; -1 when unknown.")]
DeviceText = Annotated[str, Field(max_length=128)]


class NodeNuma(ApiModel):
    """One NUMA node."""

    id: NumaNodeId = Field(description="Number of the NUMA node.")
    cpus: Count = Field(0, description="Processors; 0 for CXL and other far memory.")
    memory_bytes: Count = Field(0, description="Its memory.")


class NodePages(ApiModel):
    """Huge pages of one size on one NUMA node."""

    numa_node: NumaNodeId = Field(description="Number of the NUMA node.")
    total: Count = Field(0, description="Pages that the kernel has reserved, for whomever.")
    free: Count = Field(0, description="Of these, pages that nobody uses, to within an eighth.")
    wanted: Count = Field(0, description="Pages that tiers of all pools ask for here.")
    added: Count = Field(0, description="Pages that node preparation has added since the machine booted.")


class NodeHugePages(ApiModel):
    """Huge pages of one size."""

    page_size: Literal["2Mi", "1Gi"] = Field(
        description="Size of a page. 2Mi: the ordinary huge page. 1Gi: the large one, which machines reserve at boot."
    )
    reason: Text = Field(
        "",
        description="Reserved, or what is in the way: NotPrepared, Fragmented, InsufficientMemory, NeedsReboot, "
        "KubeletStale; NotRequested when no tier asks for this size.",
    )
    message: str = Field("", max_length=MESSAGE_CHARS_MAX, description="The same for people, with numbers.")
    numa_nodes: tuple[NodePages, ...] = Field(
        (), max_length=NUMA_NODES_MAX, description="Pages of this size by NUMA node."
    )


class NodeNvme(ApiModel):
    """One NVMe namespace."""

    name: DeviceText = Field(description="Name of the block device.")
    model: DeviceText = Field("", description="Model, as the device reports it.")
    size_bytes: Count = Field(0, description="Size.")
    numa_node: DeviceNode = -1


class NodeDax(ApiModel):
    """One dax device: CXL or persistent memory."""

    name: DeviceText = Field(description="Name of the device.")
    size_bytes: Count = Field(0, description="Size.")
    numa_node: DeviceNode = -1
    driver: DeviceText = Field(
        "", description="kmem: online as memory; device_dax: can be mapped; empty without a driver."
    )


class NodeCxl(ApiModel):
    """Whether CXL tiers in one mode have their dax devices."""

    mode: Literal["NumaNode", "DevDax"] = Field(
        description="Mode that tiers of some pool ask for. NumaNode: online as memory of a NUMA node. DevDax: a device "
        "that is mapped."
    )
    reason: Text = Field(
        "",
        description="Present, or what is in the way: WrongMode (a device has another driver and may not be changed), "
        "Busy (in use), NotPermitted (the kernel refuses), Absent.",
    )
    message: str = Field("", max_length=MESSAGE_CHARS_MAX, description="The same for people, with devices and sizes.")


class NodeGpu(ApiModel):
    """One GPU."""

    address: DeviceText = Field(description="PCI address.")
    model: DeviceText = Field("", description="Model, or vendor and device id where the driver does not report it.")
    numa_node: DeviceNode = -1


class NodeReport(ApiModel):
    """What the machine has. Written on change only."""

    version: Text = Field("", description="Version of node preparation.")
    memory_bytes: Count = Field(0, description="Physical memory.")
    numa: tuple[NodeNuma, ...] = Field((), max_length=NUMA_NODES_MAX, description="NUMA nodes.")
    huge_pages: tuple[NodeHugePages, ...] = Field((), max_length=2, description="Huge pages by size.")
    nvme: tuple[NodeNvme, ...] = Field((), max_length=DEVICES_MAX, description="NVMe namespaces.")
    dax: tuple[NodeDax, ...] = Field((), max_length=DEVICES_MAX, description="Dax devices.")
    cxl: tuple[NodeCxl, ...] = Field((), max_length=2, description="Dax devices of CXL tiers, by mode.")
    gpus: tuple[NodeGpu, ...] = Field((), max_length=DEVICES_MAX, description="GPUs.")
