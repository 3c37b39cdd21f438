"""Laws of trust: sharing needs both sides, and doubt denies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api import trust
from kvstrata_api.models.trust import KVTenant, KVTrustDomain, KVTrustDomainStatus

pytestmark = pytest.mark.unit

CALLER = trust.Identity("ns-a", "engine")


def tenant(name: str = "a", uid: str = "u1", **spec: object) -> KVTenant:
    return KVTenant.model_validate({"metadata": {"name": name, "uid": uid}, "spec": spec})


def domain(name: str = "d", uid: str = "u9", **spec: object) -> KVTrustDomain:
    """One whose status names a and b as holders of its first key."""
    told = {"keyVersion": 1, "members": ["a", "b"]}
    return KVTrustDomain.model_validate({"metadata": {"name": name, "uid": uid}, "spec": spec, "status": told})


@given(joins=st.booleans(), admits=st.booleans(), sharing=st.sampled_from(["Private", "ListedPrefixes", "All"]))
def test_a_domain_counts_only_with_both_consents_and_full_sharing(*, joins: bool, admits: bool, sharing: str) -> None:
    t = tenant(trustDomain="d") if joins else tenant()
    granted = trust.grants(t, [domain(tenants=["a"] if admits else ["b"], sharing=sharing)])

    shares = joins and admits and sharing == "All"
    assert [a.kind for a in granted.access] == (["domain", "tenant"] if shares else ["tenant"])
    assert granted.write_scope.startswith("domain/" if shares else "tenant/")


def test_a_member_that_is_no_publisher_reads_the_domain_and_writes_its_own_scope() -> None:
    granted = trust.grants(tenant(trustDomain="d"), [domain(tenants=["a", "b"], publishers=["b"], sharing="All")])

    assert [(a.kind, a.can_write) for a in granted.access] == [("domain", False), ("tenant", True)]
    assert granted.write_scope == granted.access[1].scope


@pytest.mark.parametrize(
    ("key_version", "status", "counts"),
    [
        (1, {"keyVersion": 1, "members": ["a"]}, True),
        (1, {"keyVersion": 3, "members": ["b", "a"]}, True),
        (1, {"keyVersion": 1, "members": ["b"]}, False),
        (2, {"keyVersion": 1, "members": ["a"]}, False),
        (1, {"keyVersion": 0, "members": ["a"]}, False),
        (1, {}, False),
    ],
)
def test_a_member_gets_no_key_before_the_status_names_it_beside_that_key(
    key_version: int, status: dict[str, object], *, counts: bool
) -> None:
    named = domain(tenants=["a", "b"], sharing="All", keyVersion=key_version)
    told = named.model_copy(update={"status": KVTrustDomainStatus.model_validate(status)})

    granted = trust.grants(tenant(trustDomain="d"), [told])
    assert [a.kind for a in granted.access] == (["domain", "tenant"] if counts else ["tenant"])
    assert granted.write_scope.startswith("domain/" if counts else "tenant/")


def test_a_tenant_made_again_is_another_scope() -> None:
    assert trust.tenant_scope(tenant(uid="u1")) != trust.tenant_scope(tenant(uid="u2"))


def test_a_new_key_version_is_another_scope() -> None:
    assert trust.domain_scope(domain(keyVersion=1)) != trust.domain_scope(domain(keyVersion=2))


def test_an_identity_claimed_twice_belongs_to_nobody() -> None:
    account = [{"namespace": "ns-a", "name": "engine"}]
    both = [tenant("a", serviceAccounts=account), tenant("b", serviceAccounts=account)]

    assert trust.tenant_of(CALLER, both[:1], {}) == both[0]
    assert trust.tenant_of(CALLER, both, {}) is None


@given(st.dictionaries(st.sampled_from("xyz"), st.sampled_from("12")))
def test_an_empty_selector_claims_nobody(labels: dict[str, str]) -> None:
    assert not trust.claims(tenant(namespaceSelector={}), CALLER, labels)
    assert not trust.claims(tenant(namespaceSelector={"matchLabels": {}}), CALLER, labels)


def test_a_selector_claims_a_namespace_that_has_all_its_labels() -> None:
    selective = tenant(namespaceSelector={"matchLabels": {"team": "a", "tier": "x"}})

    assert trust.claims(selective, CALLER, {"team": "a", "tier": "x", "more": "y"})
    assert not trust.claims(selective, CALLER, {"team": "a"})


def test_a_tenant_that_is_being_deleted_claims_nobody() -> None:
    dying = KVTenant.model_validate(
        {
            "metadata": {"name": "a", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"serviceAccounts": [{"namespace": "ns-a", "name": "engine"}]},
        }
    )

    assert trust.tenant_of(CALLER, [dying], {}) is None
