"""Laws of KVOperations that erase a tenant: who asks, who has to confirm, and whose turn it is."""

import pytest

from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import Fleet, condition
from support.operator.operations_fleet import (
    TIMEOUT_S,
    cancel,
    running,
    state,
)

pytestmark = pytest.mark.unit


def erase(fleet: Fleet, name: str = "op") -> Ref:
    fleet.put(kinds.OPERATION, name, spec={"type": "Erase", "erase": {"tenant": "a"}, "timeoutSeconds": TIMEOUT_S})
    return Ref(kinds.OPERATION, name)


def confirm(fleet: Fleet) -> None:
    """Let all agents tell that they hold nothing of tenant `a` from before its key version."""
    tenant = fleet.of(kinds.TENANT)["a"]
    told = [{"uid": tenant["metadata"]["uid"], "keyVersion": tenant["status"]["keyVersion"]}]
    for body in fleet.of(kinds.POOL_NODE).values():
        body["status"]["erased"] = told


def test_an_erasure_is_the_tenants_own_and_complete_when_every_agent_has_confirmed() -> None:
    fleet = running()
    fleet.tenant("a")
    fleet.settle()
    ref = erase(fleet)
    fleet.settle()
    uid = fleet.objects[ref]["metadata"]["uid"]
    assert fleet.of(kinds.TENANT)["a"]["spec"]["eraseRequested"] == f"kvoperation-{uid}"
    assert state(fleet, ref) == "Progressing"
    assert "p.n0" in fleet.objects[ref]["status"]["failures"][0]["message"]

    confirm(fleet)
    fleet.settle()
    assert state(fleet, ref) == "Complete"
    assert fleet.of(kinds.TENANT)["a"]["status"]["keyVersion"] == 2


def test_erasures_of_one_tenant_wait_for_each_other_and_for_one_by_hand() -> None:
    fleet = running()
    fleet.tenant("a", eraseRequested="by-hand")
    fleet.settle()
    first, second = erase(fleet, "a1"), erase(fleet, "a2")
    done: list[tuple[str, str]] = []
    for _ in range(3):
        fleet.settle()
        done.append((fleet.of(kinds.TENANT)["a"]["spec"]["eraseRequested"], state(fleet, first)))
        confirm(fleet)
    fleet.settle()

    uids = [fleet.objects[ref]["metadata"]["uid"] for ref in (first, second)]
    assert [value for value, _ in done] == ["by-hand", f"kvoperation-{uids[0]}", f"kvoperation-{uids[1]}"]
    assert [state(fleet, ref) for ref in (first, second)] == ["Complete", "Complete"]


def test_an_erasure_of_nobody_waits_and_one_that_is_cancelled_asks_for_nothing() -> None:
    fleet = running()
    ref = erase(fleet)
    fleet.settle()
    assert condition(fleet.objects[ref], "Accepted") == ("False", "TenantNotFound")
    cancel(fleet, ref)
    fleet.tenant("a")
    fleet.settle()

    assert state(fleet, ref) == "Cancelled"
    assert "eraseRequested" not in fleet.of(kinds.TENANT)["a"]["spec"]
