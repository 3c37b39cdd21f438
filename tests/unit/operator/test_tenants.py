"""Laws of what tenants hold, of their quotas, and of the erasure of their blocks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import names
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import Fleet, condition

pytestmark = pytest.mark.unit

MIB = 1 << 20


def running(*nodes: str, **spec: Any) -> Fleet:
    """A pool on nodes with agents, and tenant `a`."""
    fleet = Fleet()
    fleet.pool()
    for node in nodes:
        fleet.node(node)
    fleet.tenant("a", **spec)
    fleet.settle()
    for node in nodes:
        fleet.report(f"p.{node}")
    fleet.settle()
    return fleet


def tenant(fleet: Fleet) -> dict[str, Any]:
    return fleet.of(kinds.TENANT)["a"]


def entries(fleet: Fleet) -> set[str]:
    return set(fleet.of(kinds.SECRET)[names.scope_secret_name("tenant", "a")]["data"])


def tell(fleet: Fleet, node: str, **status: Any) -> None:
    """Let an agent add to what its status says."""
    ref = Ref(kinds.POOL_NODE, f"p.{node}")
    fleet.objects[ref]["status"] |= status
    fleet._touch(ref)


def confirm(fleet: Fleet, node: str, version: int) -> None:
    tell(fleet, node, erased=[{"uid": tenant(fleet)["metadata"]["uid"], "keyVersion": version}])


def ask(fleet: Fleet, value: str) -> None:
    fleet.tenant("a", eraseRequested=value)


def test_an_erasure_moves_the_key_on_once_and_removes_the_old_one() -> None:
    fleet = running("n1")
    ask(fleet, "monday")
    fleet.settle()

    assert entries(fleet) == {"v2"}
    assert tenant(fleet)["status"]["keyVersion"] == 2
    assert condition(tenant(fleet), "EraseCompleted") == ("False", "InProgress")
    assert tenant(fleet)["status"]["lastErase"] == ""
    confirm(fleet, "n1", 2)
    fleet.settle()
    assert condition(tenant(fleet), "EraseCompleted") == ("True", "Erased")
    assert tenant(fleet)["status"]["lastErase"] == "monday"
    ask(fleet, "tuesday")
    fleet.settle()
    assert entries(fleet) == {"v3"}
    assert condition(tenant(fleet), "EraseCompleted") == ("False", "InProgress")


def test_the_new_key_is_there_before_the_status_tells_and_the_old_one_goes_after_it() -> None:
    fleet = running("n1")
    ask(fleet, "now")
    for action in fleet.orders():
        fleet.apply(action)

    assert entries(fleet) == {"v1", "v2"}
    assert tenant(fleet)["status"]["keyVersion"] == 1
    assert not fleet.orders(), "nothing is minted twice while the status is late"


def test_an_erasure_waits_for_every_connected_agent_and_names_the_others() -> None:
    fleet = running("n1", "n2", "n3")
    ask(fleet, "now")
    fleet.fall_silent("p.n3")
    fleet.settle()
    confirm(fleet, "n1", 2)
    fleet.settle()
    assert condition(tenant(fleet), "EraseCompleted") == ("False", "InProgress")
    confirm(fleet, "n2", 2)
    fleet.settle()
    found = next(c for c in tenant(fleet)["status"]["conditions"] if c["type"] == "EraseCompleted")

    assert (found["status"], found["reason"]) == ("True", "NodesAway")
    assert "p.n3" in found["message"]
    assert "p.n1" not in found["message"]


def test_a_confirmation_of_an_earlier_version_or_of_a_namesake_counts_for_nothing() -> None:
    fleet = running("n1")
    ask(fleet, "now")
    fleet.settle()
    confirm(fleet, "n1", 1)
    fleet.settle()
    assert condition(tenant(fleet), "EraseCompleted")[0] == "False"
    tell(fleet, "n1", erased=[{"uid": "of-a-namesake", "keyVersion": 9}])
    fleet.settle()
    assert condition(tenant(fleet), "EraseCompleted")[0] == "False"


def test_nothing_is_called_erased_before_it_is_known_which_agents_live() -> None:
    """An operator that starts has seen no Lease yet: that is no word about an agent."""
    fleet = running("n1")
    ask(fleet, "now")
    fleet.alive.clear()
    fleet.settle()
    assert condition(tenant(fleet), "EraseCompleted") == ("False", "InProgress")

    fleet.fall_silent("p.n1")
    fleet.settle()
    assert condition(tenant(fleet), "EraseCompleted") == ("True", "NodesAway")


def test_a_tenant_that_is_made_with_a_request_has_nothing_to_erase() -> None:
    fleet = running("n1", eraseRequested="before")
    assert entries(fleet) == {"v1"}
    confirm(fleet, "n1", 1)
    fleet.settle()

    assert condition(tenant(fleet), "EraseCompleted")[0] == "True"


def test_a_finished_erasure_is_told_in_the_same_words_for_ever() -> None:
    fleet = running("n1")
    ask(fleet, "now")
    fleet.settle()
    confirm(fleet, "n1", 2)
    fleet.settle()
    before = tenant(fleet)["status"]["conditions"]
    fleet.pass_time(1000.0)
    tell(fleet, "n1", erased=[])

    assert fleet.settle() == 0
    assert tenant(fleet)["status"]["conditions"] == before


@pytest.mark.slow
@given(st.lists(st.sampled_from(["a", "b", "confirm", "lose-status", "orders"]), max_size=12))
def test_a_key_version_never_comes_again(steps: list[str]) -> None:
    fleet = running("n1")
    keys: dict[str, str] = {}
    for step in steps:
        if step in ("a", "b"):
            ask(fleet, step)
        elif step == "confirm":
            confirm(fleet, "n1", tenant(fleet)["status"]["keyVersion"])
        elif step == "lose-status":
            tenant(fleet).pop("status", None)
            fleet._touch(Ref(kinds.TENANT, "a"))
        elif step == "orders":
            for action in fleet.orders():
                fleet.apply(action)
        if step != "orders":
            fleet.settle()
        for entry, key in fleet.of(kinds.SECRET)[names.scope_secret_name("tenant", "a")]["data"].items():
            assert keys.setdefault(entry, key) == key


def test_usage_is_summed_over_nodes_and_rounded() -> None:
    fleet = running("n1", "n2")
    for node, used in (("n1", 100 * MIB), ("n2", 28 * MIB)):
        tell(fleet, node, tenants=[{"tenant": "a", "tier": "dram", "usedBytes": used}])
    fleet.settle()

    assert tenant(fleet)["status"]["usage"] == [{"poolRef": "p", "tier": "dram", "used": "128Mi"}]


QUOTA = {"poolRef": "p", "tier": "dram", "hard": "8Gi", "guaranteed": "1Gi"}


def test_quota_use_hits_and_denials_are_summed_over_nodes_for_the_columns() -> None:
    fleet = running("n0", "n1", quotas=[{"poolRef": "p", "tier": "dram", "hard": "1Gi"}])
    for node, used in (("n0", 96 << 20), ("n1", 32 << 20)):
        held = [{"tenant": "a", "tier": "dram", "usedBytes": used}, {"tenant": "b", "tier": "dram", "usedBytes": 1}]
        asked = [{"tenant": "a", "queried": 100, "hit": 40, "denied": 3}, {"tenant": "b", "queried": 9}]
        tell(fleet, node, tenants=held, tenantLookups=asked)
    fleet.settle()
    status = tenant(fleet)["status"]

    assert {name: status[name] for name in ("quota", "used", "hitPercent", "denied")} == {
        "quota": "2Gi", "used": "128Mi", "hitPercent": 40, "denied": 6,
    }  # fmt: skip


def test_a_tenant_that_nobody_has_asked_for_has_no_hit_ratio_and_without_quotas_no_bound() -> None:
    fleet = running("n0")
    status = tenant(fleet)["status"]

    assert (status["quota"], status["used"], status.get("hitPercent"), status["denied"]) == ("", "0", None, 0)


def test_quotas_are_enforced_until_a_node_says_otherwise() -> None:
    fleet = running("n1", "n2", quotas=[QUOTA])
    assert condition(tenant(fleet), "QuotaEnforced") == ("True", "Enforced")
    assert condition(tenant(fleet), "OverQuota") == ("False", "WithinHard")
    tell(fleet, "n2", tenants=[{"tenant": "a", "tier": "dram", "usedBytes": 9 << 30, "overHard": True}])
    fleet.settle()

    assert condition(tenant(fleet), "QuotaEnforced") == ("False", "OverHard")
    assert condition(tenant(fleet), "OverQuota") == ("True", "OverHard")


def test_guarantees_that_a_node_cannot_keep_are_told_with_numbers() -> None:
    fleet = running("n1", quotas=[QUOTA | {"hard": "900Gi", "guaranteed": "800Gi"}])
    found = next(c for c in tenant(fleet)["status"]["conditions"] if c["type"] == "QuotaEnforced")

    assert (found["status"], found["reason"]) == ("False", "OverGuarantee")
    assert "800Gi" in found["message"]
    assert "n1" in found["message"]
