"""What is said of huge pages, to whom, and when it is worth a write."""

from dataclasses import replace

import pytest

from kvstrata_api.models.conditions import Condition, Status
from kvstrata_api.models.inventory import NodeCxl, NodeReport
from kvstrata_api.models.poolnode import NodeTier
from kvstrata_api.units import PAGE_BYTES
from kvstrata_node import pool_node
from kvstrata_node.discovery import HugePages, PciGpu
from kvstrata_node.pages_plan import PageDemand, PagePool, wanted
from kvstrata_node.pages_verdict import Reason, of_size, of_tiers
from kvstrata_node.pool_node import Observation, PoolNode, Urgency, report
from support.node.huge_pages import GIB, PAGE, Kernel, tier

pytestmark = pytest.mark.unit

DEMAND = PageDemand({PagePool(0, PAGE): 10})


def judged(
    have: int, advertised: int | None, *, tried: bool = True, memory_bytes: int = 64 * GIB, demand: PageDemand = DEMAND
) -> tuple[Reason, str]:
    return of_size("2Mi", demand, Kernel({0: have}, memory_bytes=memory_bytes).facts(), advertised, tried=tried)


def test_each_obstacle_has_its_reason_and_says_what_to_do() -> None:
    assert judged(10, 10 * PAGE) == (Reason.RESERVED, "")
    assert judged(10, None) == (Reason.RESERVED, "")
    reason, why = judged(10, 4 * PAGE)
    assert reason is Reason.KUBELET_STALE
    assert "advertises 8Mi" in why
    assert "restart the kubelet" in why
    reason, why = judged(7, 0)
    assert reason is Reason.FRAGMENTED
    assert "NUMA node 0 has 7 of 10 pages of 2Mi" in why
    assert judged(7, 0, tried=False)[0] is Reason.NOT_PREPARED
    reason, why = judged(7, 0, memory_bytes=16 << 20)
    assert reason is Reason.INSUFFICIENT_MEMORY
    assert "90 %" in why
    assert judged(0, 0, demand=PageDemand()) == (Reason.NOT_REQUESTED, "")


def test_pods_of_others_count_where_a_tier_wants_pages() -> None:
    assert judged(12, 12 * PAGE, demand=replace(DEMAND, others={PAGE: 2}))[0] is Reason.RESERVED
    assert judged(11, 11 * PAGE, demand=replace(DEMAND, others={PAGE: 2}))[0] is Reason.FRAGMENTED


def test_large_pages_that_cannot_be_had_now_need_the_boot_command_line() -> None:
    demand = PageDemand({PagePool(0, GIB): 4})
    facts = Kernel({0: 0}).facts()

    reason, why = of_size("1Gi", demand, facts, 0, tried=True)
    assert reason is Reason.NEEDS_REBOOT
    assert "hugepagesz=1G" in why
    some = replace(facts, hugepages=(HugePages(0, GIB, 1, 1),))
    reason, why = of_size("1Gi", demand, some, 0, tried=True)
    assert reason is Reason.NEEDS_REBOOT
    assert "hugepagesz=1G hugepages=0:4" in why


def told(have: int, size: str = "2Mi", free: int | None = None) -> NodeReport:
    kernel = Kernel({0: have}, {0: have - (have if free is None else free)})
    gpus = (PciGpu("0000:01:00.0", "H200", 0),)
    demand = PageDemand(wanted([tier(10, size)], (0,)))
    advertised = {PAGE_BYTES[size]: have * PAGE_BYTES[size]}
    return report(Observation(kernel.facts(), gpus, demand, {PagePool(0, PAGE): 3}, advertised, may_reserve=True))


def asked(**changed: object) -> PoolNode:
    node = PoolNode("p.n", "n", 2, (tier(10),), has_agent=False, conditions=(), report=None)
    return replace(node, **changed)  # type: ignore[arg-type]


def stored(document: dict[str, object]) -> PoolNode:
    """The object as the API server has it after a write."""
    spec = {"nodeName": "n", "tiers": [tier(10).to_json()]}
    return pool_node.parse({"metadata": {"name": "p.n", "generation": 2}, "spec": spec, **document})


def test_a_report_comes_back_as_it_was_written_and_is_not_written_again() -> None:
    seen = told(7)
    document = pool_node.document(asked(), seen, "2026-11-23T00:00:00Z")

    assert pool_node.urgency(asked(), seen) is Urgency.FACTS
    again = stored(document)
    assert again.report == seen
    assert again.conditions[0].reason == "Fragmented"
    assert pool_node.urgency(again, seen) is Urgency.NONE
    assert pool_node.urgency(again, told(10)) is Urgency.FACTS
    assert pool_node.urgency(again, told(7, free=2)) is Urgency.FREE


def test_a_condition_keeps_its_time_while_its_status_stays() -> None:
    before = stored(pool_node.document(asked(), told(7), "2026-11-23T00:00:00Z"))

    worse = pool_node.document(before, told(5), "2026-11-23T01:00:00Z")["status"]["conditions"]
    well = pool_node.document(before, told(10), "2026-11-23T01:00:00Z")["status"]["conditions"]

    assert worse[0]["lastTransitionTime"] == "2026-11-23T00:00:00Z"
    assert (well[0]["status"], well[0]["lastTransitionTime"]) == ("True", "2026-11-23T01:00:00Z")


def test_while_an_agent_is_there_the_condition_is_its_own() -> None:
    document = pool_node.document(asked(has_agent=True), told(7), "2026-11-23T00:00:00Z")

    assert "conditions" not in document["status"]
    assert document["status"]["node"]["hugePages"][0]["reason"] == "Fragmented"


CXL = NodeTier.model_validate({"name": "cxl", "type": "CXL", "capacityBytes": GIB, "cxl": {"mode": "DevDax"}})


def test_a_dax_device_that_is_missing_is_told_of_and_taken_back_where_a_tier_wants_one() -> None:
    busy = told(10).model_copy(update={"cxl": (NodeCxl(mode="DevDax", reason="Busy", message="open"),)})
    wants = asked(tiers=(CXL,))

    assert [c.type for c in pool_node.conditions_of(asked(), busy)] == ["HugepagesReserved"]
    document = pool_node.document(wants, busy, "2026-11-23T00:00:00Z")
    assert [(c["type"], c["status"], c["reason"]) for c in document["status"]["conditions"]] == [
        ("HugepagesReserved", "True", "NotRequested"),
        ("DevicePresent", "False", "Busy"),
    ]
    before = stored(document)
    assert before.report == busy
    assert pool_node.urgency(replace(before, tiers=(CXL,)), busy) is Urgency.NONE
    assert {c.type: c.reason for c in pool_node.conditions_of(before, busy)}["DevicePresent"] == "NotRequested"
    assert pool_node.urgency(before, busy) is Urgency.FACTS


def test_what_an_agent_that_is_gone_said_of_other_devices_stays() -> None:
    left = Condition(type="DevicePresent", status=Status.FALSE, reason="DeviceFailed")

    assert [c.type for c in pool_node.conditions_of(asked(conditions=(left,)), told(10))] == ["HugepagesReserved"]


def test_the_worst_size_of_a_pool_counts_and_sizes_of_other_pools_do_not() -> None:
    small = told(7).huge_pages[0]
    large = small.model_copy(update={"page_size": "1Gi", "reason": "NeedsReboot", "message": "boot"})
    both = (small, large)

    assert of_tiers([tier(10), tier(1, "1Gi")], both) == (Reason.NEEDS_REBOOT, "boot")
    assert of_tiers([tier(10)], both)[0] is Reason.FRAGMENTED
    assert of_tiers([tier(10, "4Ki")], both)[0] is Reason.NOT_REQUESTED


def test_what_a_kubelet_advertises_is_read_from_its_node() -> None:
    node = {"status": {"capacity": {"hugepages-2Mi": "20Mi", "hugepages-1Gi": "0", "cpu": "8"}}}

    assert pool_node.advertised(node) == {PAGE: 10 * PAGE, GIB: 0}
    assert pool_node.advertised({}) == {PAGE: 0, GIB: 0}
