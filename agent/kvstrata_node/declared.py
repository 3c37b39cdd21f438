"""What node preparation reads of KVPoolNodes and of its own Node. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.conditions import Condition, is_true, parse_conditions
from kvstrata_api.models.inventory import NodeReport
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.units import PAGE_BYTES, parse_quantity
from kvstrata_kube.answers import Json
from kvstrata_node import dax_verdict
from kvstrata_node import pages_verdict as verdict

CONDITIONS: Final = frozenset({verdict.CONDITION, dax_verdict.CONDITION})
"""What node preparation says of a pool on its node while no agent does."""
_CAPACITY: Final = {f"hugepages-{size}": size_bytes for size, size_bytes in PAGE_BYTES.items() if size != "4Ki"}
"""Names of huge pages in `Node.status.capacity`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One pool's wish of this node, and what its KVPoolNode says of it."""

    name: str
    node: str
    generation: int
    tiers: tuple[NodeTier, ...]
    has_agent: bool
    """True while an agent writes conditions HugepagesReserved and DevicePresent itself."""
    said: tuple[Condition, ...]
    """Those conditions, where there are some."""
    report: NodeReport | None


def pool_node(obj: Json) -> Asked:
    """Parse a KVPoolNode. Raises `ValueError` for what is none."""
    spec, status = obj["spec"], obj.get("status") or {}
    conditions = parse_conditions(status)
    return Asked(
        name=obj["metadata"]["name"],
        node=spec["nodeName"],
        generation=obj["metadata"].get("generation", 0),
        tiers=tuple(NodeTier.model_validate(tier) for tier in spec.get("tiers") or ()),
        has_agent=is_true(conditions, "AgentConnected"),
        said=tuple(c for c in conditions if c.type in CONDITIONS),
        report=stored_report(status),
    )


def stored_report(status: Mapping[str, Any]) -> NodeReport | None:
    """Parse the report in a stored status; None for none, and for one that cannot be read and is written anew."""
    stored = status.get("node")
    try:
        return None if stored is None else NodeReport.model_validate(stored)
    except ValueError:
        return None


def advertised(node: Json) -> Mapping[int, int]:
    """Bytes of huge pages that a Node's kubelet says it has, by page size in bytes."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    return {size_bytes: _bytes(capacity.get(name, "0")) for name, size_bytes in _CAPACITY.items()}


def _bytes(quantity: str) -> int:
    try:
        return parse_quantity(quantity) if quantity != "0" else 0
    except InvalidInputError:
        return 0
