"""What the conditions say of a tier that is not quite what was asked for."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.app.observe import MINUTE_S, LastMinute
from kvstrata_agent.cache.ports import DirectoryState
from kvstrata_agent.codec.lossy import Drift
from kvstrata_agent.kube.report import REFUSING_S, Observed, TierObserved, Urgency, build_status, urgency
from kvstrata_api.blocks import ScopeId
from kvstrata_api.models.base import ObjectMeta
from kvstrata_api.models.pool import HostDramTier
from kvstrata_api.models.poolnode import (
    SHARES_MAX,
    TENANTS_MAX,
    KVPoolNode,
    KVPoolNodeSpec,
    KVPoolNodeStatus,
    NodeTier,
    TenantLookups,
)
from kvstrata_api.tiers import TierType
from kvstrata_api.trust import Access, ScopeKind
from kvstrata_api.units import coarse
from support.agent.doubles import make_node

pytestmark = pytest.mark.unit


def conditions(page_size: str, medium: str, fallback: str, refusing_s: float = 0) -> dict[str, tuple[str, str, str]]:
    dram = HostDramTier.model_validate({"page_size": page_size, "persistence": "AgentRestart"})
    spec = NodeTier(name="dram", type=TierType.HOST_DRAM, capacity_bytes=1 << 30, host_dram=dram)
    tier = TierObserved(spec, "Ready", is_up=True, medium=medium, is_mappable=True, fallback=fallback)
    tier = replace(tier, refusing_s=refusing_s)
    node_spec = KVPoolNodeSpec(pool_ref="p", node_name="n", tiers=(spec,), revision="r")
    node = KVPoolNode(metadata=ObjectMeta(name="p.n", generation=1), spec=node_spec)
    seen = Observed(node, 1, "1", (tier,), DirectoryState.ANSWERS, queried=0, hit=0, memory_bytes=1 << 34)
    status = build_status(seen)
    assert status.tiers[0].last_error == fallback
    return {c.type: (c.status, c.reason, c.message) for c in status.conditions}


@pytest.mark.parametrize("medium", ["memfd-2Mi", "hugetlbfs-2Mi"])
def test_huge_pages_are_reserved_whatever_else_is_missing(medium: str) -> None:
    fallback = "memory ends with the agent: no hugetlbfs" if medium.startswith("memfd") else ""
    found = conditions("2Mi", medium, fallback)

    assert found["HugepagesReserved"][:2] == ("True", "Reserved")
    assert found["TierReady"] == ("True", "AllTiersReady", f"tier dram: {fallback}" if fallback else "")


@pytest.mark.parametrize("medium", ["memfd-4Ki", "tmpfs-4Ki"])
def test_small_pages_in_place_of_huge_ones_are_said(medium: str) -> None:
    assert conditions("2Mi", medium, "512 pages of 2Mi asked for")["HugepagesReserved"] == (
        "False", "NotReserved", "tier dram: 512 pages of 2Mi asked for",
    )  # fmt: skip
    assert conditions("4Ki", medium, "")["HugepagesReserved"][:2] == ("True", "NotRequested")


def test_a_store_that_goes_on_refusing_is_said_and_one_that_refuses_now_and_then_is_not() -> None:
    assert conditions("4Ki", "s3", "", REFUSING_S - 1)["StoresKeepUp"][:2] == ("True", "KeepUp")
    status, reason, message = conditions("4Ki", "s3", "", REFUSING_S)["StoresKeepUp"]

    assert (status, reason) == ("False", "Throttled")
    assert message.startswith("tier dram: the store refuses requests")


@pytest.mark.parametrize(
    ("drift", "says"),
    [
        (None, ("True", "NotCalibrated")),
        (Drift(0, 0.0, is_over=False), ("True", "NothingStored")),
        (Drift(70, 0.04, is_over=False), ("True", "Holds")),
        (Drift(70, 0.06, is_over=True), ("False", "Drifted")),
    ],
)
def test_a_calibration_that_no_longer_fits_is_a_condition(drift: Drift | None, says: tuple[str, str]) -> None:
    spec = KVPoolNodeSpec(pool_ref="p", node_name="n", tiers=(), revision="r")
    node = KVPoolNode(metadata=ObjectMeta(name="p.n", generation=1), spec=spec)
    seen = Observed(node, 1, "1", (), DirectoryState.ANSWERS, queried=0, hit=0, memory_bytes=1 << 34, drift=drift)

    found = {c.type: (c.status, c.reason) for c in build_status(seen).conditions}

    assert found["CalibrationCurrent"] == says


def test_hits_are_counted_of_the_shares_that_were_read_last_and_not_of_those_who_grant_them() -> None:
    counters = make_node([]).counters
    share = Access(ScopeId("share/a.s/kept/v1"), ScopeKind.SHARE, "a.s", can_write=False)
    counters.leased(share, 40)
    counters.leased(replace(share, can_write=True), 9)
    counters.leased(replace(share, kind=ScopeKind.DOMAIN), 9)
    for i in range(2 * SHARES_MAX):
        counters.leased(replace(share, scope=ScopeId(f"share/a.s/u{i}/v1")), 1)
        counters.leased(share, 1)

    assert len(counters.share_hits) == SHARES_MAX
    assert counters.share_hits["kept"] == 40 + 2 * SHARES_MAX
    assert f"u{2 * SHARES_MAX - 1}" in counters.share_hits


@given(st.integers(0, 1 << 60))
def test_a_coarse_count_is_no_more_than_an_eighth_below(count: int) -> None:
    assert count * 7 / 8 <= coarse(count) <= count
    assert coarse(coarse(count)) == coarse(count)


@given(st.lists(st.tuples(st.floats(0.1, 30.0), st.integers(0, 500)), min_size=1, max_size=40))
def test_the_growth_of_the_last_minute_is_what_came_since(steps: list[tuple[float, int]]) -> None:
    minute, now_s, count, seen = LastMinute(), 0.0, 0, list[tuple[float, int]]()
    for pause_s, more in steps:
        now_s, count = now_s + pause_s, count + more
        seen.append((now_s, count))
        grown = minute.growth(count, now_s)

        assert grown == count - min(c for at_s, c in seen if now_s - at_s <= MINUTE_S)


def status_of(**seen: Any) -> KVPoolNodeStatus:
    spec = KVPoolNodeSpec(pool_ref="p", node_name="n", tiers=(), revision="r")
    node = KVPoolNode(metadata=ObjectMeta(name="p.n", generation=1), spec=spec)
    return build_status(Observed(node, 1, "1", (), DirectoryState.ANSWERS, queried=0, hit=0, memory_bytes=1, **seen))


def test_what_rises_and_falls_is_written_when_it_doubled_or_halved_and_when_it_ended() -> None:
    stored = status_of(evicted_per_minute=100, directory_backlog=100).to_json()

    assert urgency(status_of(evicted_per_minute=120, directory_backlog=70), stored) is Urgency.NONE
    assert urgency(status_of(evicted_per_minute=200, directory_backlog=100), stored) is Urgency.COUNTERS
    assert urgency(status_of(evicted_per_minute=100), stored) is Urgency.COUNTERS


def test_what_tenants_asked_for_is_a_count_and_no_fact() -> None:
    asked = TenantLookups(tenant="a", queried=1000, hit=10, denied=1)
    stored = status_of(tenant_lookups=(asked,)).to_json()

    assert status_of(tenant_lookups=(asked,)).tenant_lookups[0].queried == coarse(1000)
    assert urgency(status_of(tenant_lookups=(asked.model_copy(update={"queried": 1001}),)), stored) is Urgency.NONE
    assert urgency(status_of(tenant_lookups=(asked.model_copy(update={"denied": 2}),)), stored) is Urgency.COUNTERS


def test_the_tenants_that_asked_last_are_counted() -> None:
    counters = make_node([]).counters
    for i in range(2 * TENANTS_MAX):
        counters.looked_up(f"t{i}", 3, 2)
        counters.looked_up("kept", 3, 1)
    counters.denied("kept", 5)

    assert len(counters.tenants) == TENANTS_MAX
    kept = counters.tenants["kept"]
    assert (kept.queried, kept.hit, kept.denied) == (6 * TENANTS_MAX, 2 * TENANTS_MAX, 5)
