"""KVPoolNodes as node preparation reads them, the report that it writes into their status, and when. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from kvstrata_api import __version__, names, units
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models import conditions
from kvstrata_api.models import inventory as models
from kvstrata_api.models.conditions import Condition, is_true, parse_conditions
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.tiers import CxlMode
from kvstrata_api.units import PAGE_BYTES, parse_quantity
from kvstrata_kube.answers import Json
from kvstrata_node import dax_verdict
from kvstrata_node import pages_verdict as verdict
from kvstrata_node.dax_verdict import Verdict
from kvstrata_node.discovery import NodeFacts, PciGpu
from kvstrata_node.pages_plan import SIZES, PageDemand, PagePool, Pages

CONDITIONS: Final = frozenset({verdict.CONDITION, dax_verdict.CONDITION})
"""Types of the conditions that node preparation writes of a pool on its node while no agent does."""
_CAPACITY: Final = {f"hugepages-{size}": size_bytes for size, size_bytes in PAGE_BYTES.items() if size != "4Ki"}
"""Names of huge pages in `Node.status.capacity`."""
_TEXT_MAX: Final = 128
_OWN: Final = frozenset(dax_verdict.Reason)
"""An agent that is gone has left other reasons, of devices that nobody here knows."""
FREE_INTERVAL_S: Final = 60.0
"""Free pages are written at most so often when nothing else has changed: agents take and give them all the time."""


@dataclass(frozen=True, slots=True)
class PoolNode:
    """What one pool wants of this node, and the status of its KVPoolNode so far."""

    name: str
    node: str
    generation: int
    tiers: tuple[NodeTier, ...]
    has_agent: bool
    """True while an agent writes conditions HugepagesReserved and DevicePresent itself."""
    conditions: tuple[Condition, ...]
    """Those conditions, where there are some."""
    report: NodeReport | None


def parse(obj: Json) -> PoolNode:
    """Parse a KVPoolNode. Raises `ValueError` for what is none."""
    spec, status = obj["spec"], obj.get("status") or {}
    found = parse_conditions(status)
    return PoolNode(
        name=obj["metadata"]["name"],
        node=spec["nodeName"],
        generation=obj["metadata"].get("generation", 0),
        tiers=tuple(NodeTier.model_validate(tier) for tier in spec.get("tiers") or ()),
        has_agent=is_true(found, "AgentConnected"),
        conditions=tuple(c for c in found if c.type in CONDITIONS),
        report=stored_report(status),
    )


def stored_report(status: Mapping[str, Any]) -> NodeReport | None:
    """Parse the report in a stored status; None for none, and for one that cannot be read and is written again."""
    stored = status.get("node")
    try:
        return None if stored is None else NodeReport.model_validate(stored)
    except ValueError:
        return None


def advertised(node: Json) -> Mapping[int, int]:
    """Bytes of huge pages that a Node's kubelet advertises, by page size in bytes."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    return {size_bytes: _bytes(capacity.get(name, "0")) for name, size_bytes in _CAPACITY.items()}


def _bytes(quantity: str) -> int:
    try:
        return parse_quantity(quantity) if quantity != "0" else 0
    except InvalidInputError:
        return 0


@dataclass(frozen=True, slots=True)
class Observation:
    """What was found on the machine at one time, and what is wanted of it."""

    facts: NodeFacts
    gpus: tuple[PciGpu, ...]
    demand: PageDemand
    added: Pages
    advertised: Mapping[int, int] | None
    """Bytes of huge pages that the kubelet advertises, by page size; None while that is not known."""
    may_reserve: bool
    modes: Mapping[CxlMode, Verdict] = field(default_factory=dict)
    """Whether CXL tiers have their dax devices, by mode that is asked for."""


def report(seen: Observation) -> NodeReport:
    """Make the report of an observation; of lists that are too long the first entries."""
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


def _is_of_interest(size: str, seen: Observation) -> bool:
    page_bytes = PAGE_BYTES[size]
    return page_bytes in seen.demand.sizes() or any(
        p.page_bytes == page_bytes and p.total for p in seen.facts.hugepages
    )


def _size(size: str, seen: Observation) -> models.NodeHugePages:
    page_bytes = PAGE_BYTES[size]
    advertised = None if seen.advertised is None else seen.advertised.get(page_bytes, 0)
    reason, message = verdict.of_size(size, seen.demand, seen.facts, advertised, tried=seen.may_reserve)
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
                    wanted=seen.demand.pages.get(PagePool(p.node, page_bytes), 0),
                    added=min(p.total, seen.added.get(PagePool(p.node, page_bytes), 0)),
                )
                for p in there[: models.NUMA_NODES_MAX]
            ),
        }
    )


def without_free(report: NodeReport) -> NodeReport:
    """Return the report without what agents change all the time: it is not worth a write of its own at once."""
    sizes = (
        size.model_copy(update={"numa_nodes": tuple(n.model_copy(update={"free": 0}) for n in size.numa_nodes)})
        for size in report.huge_pages
    )
    return report.model_copy(update={"huge_pages": tuple(sizes)})


class Urgency(IntEnum):
    """How soon a KVPoolNode should be written."""

    NONE = 0
    FREE = 1
    FACTS = 2


def conditions_of(ours: PoolNode, report: NodeReport) -> tuple[Condition, ...]:
    """Conditions HugepagesReserved and DevicePresent of one pool while no agent is there to write them; else none.

    DevicePresent is of NVMe devices and GPUs too, so it is written only for tiers that want a dax device, or did.
    """
    if ours.has_agent:
        return ()
    pages = verdict.condition(verdict.of_tiers(ours.tiers, report.huge_pages), ours.generation)
    judged = dax_verdict.of_tiers(ours.tiers, report.cxl)
    before = next((c for c in ours.conditions if c.type == dax_verdict.CONDITION), None)
    if judged[0] is dax_verdict.Reason.NOT_REQUESTED and (before is None or before.reason not in _OWN):
        return (pages,)
    return pages, dax_verdict.condition(judged, ours.generation)


def urgency(ours: PoolNode, report: NodeReport) -> Urgency:
    """Compare what was found with what the API server holds."""
    wanted = conditions_of(ours, report)
    if not all(any(_is_unchanged(one, before) for before in ours.conditions) for one in wanted):
        return Urgency.FACTS
    if ours.report is None or without_free(ours.report) != without_free(report):
        return Urgency.FACTS
    return Urgency.NONE if ours.report == report else Urgency.FREE


def _is_unchanged(wanted: Condition, before: Condition) -> bool:
    return (wanted.type, wanted.status, wanted.reason, wanted.message) == (
        before.type,
        before.status,
        before.reason,
        before.message,
    )


def document(ours: PoolNode, report: NodeReport, now: str) -> Json:
    """Build the server-side apply document of one KVPoolNode's status."""
    status: Json = {"node": report.to_json()}
    wanted = conditions_of(ours, report)
    if wanted:
        known = [c for c in ours.conditions if any(c.type == one.type for one in wanted)]
        status["conditions"] = [c.to_json() for c in conditions.merge(known, wanted, now)]
    return {
        "apiVersion": names.API_VERSION,
        "kind": "KVPoolNode",
        "metadata": {"name": ours.name},
        "status": status,
    }
