"""What an agent and a pool say of huge pages where node preparation knows more."""

from dataclasses import replace

import pytest

from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.kube.report import Observed, TierObserved, build_status
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.conditions import find
from kvstrata_api.models.inventory import NodeCxl, NodeHugePages, NodeReport
from kvstrata_api.models.poolnode import KVPoolNode, KVPoolNodeSpec, NodeTier
from kvstrata_operator.observe.parse import parse_pool_node
from support.node.huge_pages import tier

pytestmark = pytest.mark.unit

SPEC = KVPoolNodeSpec(pool_ref="p", node_name="n", tiers=(tier(10),), revision="r")
SMALL = TierObserved(SPEC.tiers[0], "Ready", is_up=True, medium="memfd-4Ki", fallback="10 pages asked for, 0 free")


def said(seen: TierObserved, reason: str, message: str = "") -> tuple[str, str, str]:
    node = KVPoolNode(metadata=ObjectMeta(name="p.n"), spec=SPEC)
    known = NodeReport(huge_pages=(NodeHugePages(page_size="2Mi", reason=reason, message=message),))
    observed = Observed(node, 1, "1", (seen,), DirectoryState.ANSWERS, queried=0, hit=0, memory_bytes=1 << 34)
    found = find(build_status(replace(observed, node=known)).conditions, "HugepagesReserved")
    assert found is not None
    return found.status, found.reason, found.message


def test_an_agent_without_its_pages_says_what_is_in_the_way() -> None:
    assert said(SMALL, "Fragmented", "7 of 10") == (
        "False", "Fragmented", "tier dram: 10 pages asked for, 0 free; 7 of 10",
    )  # fmt: skip
    assert said(SMALL, "Reserved")[:2] == ("False", "NotReserved")
    assert said(SMALL, "SomethingNewer")[:2] == ("False", "NotReserved")


def test_an_agent_without_its_dax_device_says_why_it_has_another_mode() -> None:
    cxl = NodeTier.model_validate({"name": "cxl", "type": "CXL", "capacityBytes": 1 << 30, "cxl": {"mode": "NumaNode"}})
    seen = TierObserved(cxl, "Failed", is_up=False, error="no CPU-less NUMA node", is_absent=True)
    node = KVPoolNode(metadata=ObjectMeta(name="p.n"), spec=replace_tiers(cxl))
    observed = Observed(node, 1, "1", (seen,), DirectoryState.ANSWERS, queried=0, hit=0, memory_bytes=1 << 34)

    def reason(*known: NodeCxl) -> tuple[str, str]:
        found = find(build_status(replace(observed, node=NodeReport(cxl=known))).conditions, "DevicePresent")
        assert found is not None
        return found.reason, found.message

    assert reason() == ("DeviceMissing", "tier cxl: no CPU-less NUMA node")
    assert reason(NodeCxl(mode="NumaNode", reason="Busy", message="dax0.0 is open")) == (
        "Busy", "tier cxl: no CPU-less NUMA node; dax0.0 is open",
    )  # fmt: skip
    assert reason(NodeCxl(mode="DevDax", reason="Busy", message="dax0.0 is open"))[0] == "DeviceMissing"


def replace_tiers(tier: NodeTier) -> KVPoolNodeSpec:
    return SPEC.model_copy(update={"tiers": (tier,)})


def test_an_agent_that_has_its_pages_is_believed_more_than_the_kubelet() -> None:
    assert said(replace(SMALL, medium="memfd-2Mi"), "KubeletStale")[:2] == ("True", "Reserved")


def test_node_preparation_alone_is_no_agent_that_has_reported() -> None:
    raw = (
        b'{"metadata": {"name": "p.n"}, "spec": {"poolRef": "p", "nodeName": "n"}, "status": {"node": {}, '
        b'"conditions": [{"type": "HugepagesReserved", "status": "False", "reason": "KubeletStale"}]}}'
    )

    seen = parse_pool_node(raw)

    assert not seen.has_reported
    assert seen.conditions["HugepagesReserved"].reason == "KubeletStale"
