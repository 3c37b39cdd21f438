"""Laws of tenants, domains, shares and their keys."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import names
from kvstrata_operator.observe import kinds
from kvstrata_operator.observe.kinds import Ref
from support.operator.fleet import SETTING, Fleet, condition

pytestmark = pytest.mark.unit


def secret(fleet: Fleet, kind: str, name: str) -> dict[str, Any]:
    return fleet.of(kinds.SECRET)[names.scope_secret_name(kind, name)]


def tenant(fleet: Fleet, name: str) -> dict[str, Any]:
    fleet.settle()
    return fleet.of(kinds.TENANT)[name]


def domain(fleet: Fleet, name: str = "d", **spec: Any) -> None:
    fleet.put(kinds.DOMAIN, name, spec=spec)


def test_a_tenant_gets_a_key_of_its_own_and_says_so() -> None:
    fleet = Fleet()
    fleet.tenant("a")
    body = tenant(fleet, "a")
    made = secret(fleet, "tenant", "a")

    assert condition(body, "Ready")[0] == "True"
    assert body["status"]["keyVersion"] == 1
    assert made["data"].keys() == {"v1"}
    assert made["metadata"]["labels"][names.LABEL_SCOPE] == "tenant"
    assert made["metadata"]["annotations"][names.ANNOTATION_OWNER_UID] == body["metadata"]["uid"]
    assert made["metadata"]["ownerReferences"][0]["uid"] == body["metadata"]["uid"]


def test_a_successor_of_the_same_name_never_gets_the_old_key() -> None:
    fleet = Fleet()
    fleet.tenant("a")
    fleet.settle()
    old = secret(fleet, "tenant", "a")["data"]["v1"]
    orphan = fleet.objects[Ref(kinds.SECRET, names.scope_secret_name("tenant", "a"), SETTING.namespace)]
    orphan["metadata"].pop("ownerReferences")  # As if the garbage collector were away.
    fleet.delete(Ref(kinds.TENANT, "a"))
    fleet.tenant("a")

    assert condition(tenant(fleet, "a"), "Ready")[0] == "True"
    assert secret(fleet, "tenant", "a")["data"]["v1"] != old


def test_a_foreign_secret_of_that_name_is_not_touched_and_the_tenant_says_so() -> None:
    fleet = Fleet()
    name = names.scope_secret_name("tenant", "a")
    fleet.put(kinds.SECRET, name, namespace=SETTING.namespace, data={"v1": "theirs"})
    fleet.tenant("a")

    assert condition(tenant(fleet, "a"), "Ready") == ("False", "KeyMissing")
    assert secret(fleet, "tenant", "a")["data"] == {"v1": "theirs"}


def test_deleting_a_tenant_shreds_its_key() -> None:
    fleet = Fleet()
    fleet.tenant("a")
    fleet.settle()
    fleet.delete(Ref(kinds.TENANT, "a"))
    fleet.settle()

    assert not fleet.of(kinds.SECRET)


@pytest.mark.parametrize(
    ("joins", "admits", "expected"),
    [
        ("d", ["a"], ("True", "Ready")),
        ("d", [], ("False", "NotAdmitted")),
        ("other", ["a"], ("False", "UnknownDomain")),
        (None, ["a"], ("True", "Ready")),
    ],
)
def test_a_domain_counts_when_both_sides_want_it(joins: str | None, admits: list[str], expected: Any) -> None:
    fleet = Fleet()
    fleet.tenant("a", **({"trustDomain": joins} if joins else {}))
    domain(fleet, tenants=admits)
    body = tenant(fleet, "a")
    is_member = expected[0] == "True" and joins == "d"

    assert condition(body, "Accepted")[0] == "True"
    assert condition(body, "Ready") == expected
    assert body["status"]["effectiveDomain"] == ("d" if is_member else "")
    assert fleet.of(kinds.DOMAIN)["d"]["status"]["members"] == (["a"] if is_member else [])


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ({"poolRef": "p", "tier": "dram", "hard": "1Gi"}, ("True", "Accepted")),
        ({"poolRef": "nope", "tier": "dram", "hard": "1Gi"}, ("False", "UnknownPool")),
        ({"poolRef": "p", "tier": "nope", "hard": "1Gi"}, ("False", "UnknownTier")),
    ],
)
def test_a_quota_must_speak_of_what_exists(quota: dict[str, str], expected: Any) -> None:
    fleet = Fleet()
    fleet.pool()
    fleet.tenant("a", quotas=[quota])

    assert condition(tenant(fleet, "a"), "Accepted") == expected


CLAIMS = st.lists(st.sampled_from(["x/one", "x/two", "y/one"]), unique=True, max_size=3)
SELECTORS = st.sampled_from([None, {"team": "x"}, {"team": "y"}])


@given(st.lists(st.tuples(CLAIMS, SELECTORS).filter(any), min_size=1, max_size=4))
def test_exactly_the_tenants_of_a_contested_identity_are_refused(wants: list[tuple[list[str], Any]]) -> None:
    fleet = Fleet()
    for namespace in ("x", "y"):
        fleet.put(kinds.NAMESPACE, namespace, labels={"team": namespace})
    reach: list[set[str]] = []
    for i, (accounts, selector) in enumerate(wants):
        refs = [dict(zip(("namespace", "name"), a.split("/"), strict=True)) for a in accounts]
        selects = {} if selector is None else {"namespaceSelector": {"matchLabels": selector}}
        fleet.tenant(f"t{i}", serviceAccounts=refs, **selects)
        all_of = {f"{ns}/{sa}" for ns in "xy" for sa in ("one", "two", "*") if selector == {"team": ns}}
        reach.append({*accounts, *all_of})
    fleet.settle()

    for i, mine in enumerate(reach):
        contested = any(mine & other for j, other in enumerate(reach) if i != j)
        accepted = condition(fleet.of(kinds.TENANT)[f"t{i}"], "Accepted")
        assert accepted == (("False", "IdentityConflict") if contested else ("True", "Accepted"))
