"""From what was found on a machine to `KVPoolNode.status.node`, and when that is worth a write. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstrata_api import __version__, units
from kvstrata_api.models import inventory as models
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import PAGE_BYTES
from kvstrata_node import pages_verdict as verdict
from kvstrata_node.dax_verdict import Verdict
from kvstrata_node.discovery import NodeFacts, PciGpu
from kvstrata_node.pages_plan import SIZES, Pages, Place, Wish

_TEXT_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class Looked:
    """One look at the machine, and what is wanted of it."""

    facts: NodeFacts
    gpus: tuple[PciGpu, ...]
    wish: Wish
    added: Pages
    advertised: Mapping[int, int] | None
    """Bytes of huge pages that the kubelet says the node has, by page size; None while that is not known."""
    may_reserve: bool
    modes: Mapping[CxlMode, Verdict] = field(default_factory=dict)
    """Whether CXL tiers have their dax devices, by mode that is asked for."""


def report(seen: Looked) -> NodeReport:
    """Write the report down; of lists that are too long the first entries."""
    facts = seen.facts
    return NodeReport(
        version=__version__,
        memory_bytes=facts.memory_bytes,
        numa=tuple(
            models.NodeNuma(id=n.id, cpus=len(n.cpus), memory_bytes=n.memory_bytes)
            for n in facts.numa[: models.NUMA_NODES_MAX]
        ),
        huge_pages=tuple(_size(size, seen) for size in SIZES if _is_of_interest(size, seen)),
        nvme=tuple(
            models.NodeNvme(name=d.name, model=d.model[:_TEXT_MAX], size_bytes=d.size_bytes, numa_node=d.node)
            for d in facts.nvme[: models.DEVICES_MAX]
        ),
        dax=tuple(
            models.NodeDax(name=d.name, size_bytes=d.size_bytes, numa_node=d.node, driver=d.driver)
            for d in facts.dax[: models.DEVICES_MAX]
        ),
        cxl=tuple(
            models.NodeCxl.model_validate(
                {"mode": mode, "reason": reason, "message": message[: models.MESSAGE_CHARS_MAX]}
            )
            for mode, (reason, message) in sorted(seen.modes.items())
        ),
        gpus=tuple(
            models.NodeGpu(address=g.address, model=g.model[:_TEXT_MAX], numa_node=g.node)
            for g in seen.gpus[: models.DEVICES_MAX]
        ),
    )


def _is_of_interest(size: str, seen: Looked) -> bool:
    page_bytes = PAGE_BYTES[size]
    return page_bytes in seen.wish.sizes() or any(p.page_bytes == page_bytes and p.total for p in seen.facts.hugepages)


def _size(size: str, seen: Looked) -> models.NodeHugePages:
    page_bytes = PAGE_BYTES[size]
    advertised = None if seen.advertised is None else seen.advertised.get(page_bytes, 0)
    reason, message = verdict.of_size(size, seen.wish, seen.facts, advertised, tried=seen.may_reserve)
    there = [p for p in seen.facts.hugepages if p.page_bytes == page_bytes]
    return models.NodeHugePages.model_validate(
        {
            "page_size": size,
            "reason": reason,
            "message": message[: models.MESSAGE_CHARS_MAX],
            "numa_nodes": tuple(
                models.NodePages(
                    numa_node=p.node,
                    total=p.total,
                    free=units.coarse(p.free),
                    wanted=seen.wish.pages.get(Place(p.node, page_bytes), 0),
                    added=min(p.total, seen.added.get(Place(p.node, page_bytes), 0)),
                )
                for p in there[: models.NUMA_NODES_MAX]
            ),
        }
    )


def without_free(told: NodeReport) -> NodeReport:
    """Return the report without what agents change all the time: it is not worth a write of its own at once."""
    sizes = (
        size.model_copy(update={"numa_nodes": tuple(n.model_copy(update={"free": 0}) for n in size.numa_nodes)})
        for size in told.huge_pages
    )
    return told.model_copy(update={"huge_pages": tuple(sizes)})
