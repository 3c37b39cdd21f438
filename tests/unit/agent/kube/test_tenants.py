"""Laws of what an agent takes from KVTenants: whole views only, the last good word, and versions that move on."""

from typing import Any

import pytest

from kvstrata_agent.kube import declared
from kvstrata_agent.kube.trust import TenantView, TrustStores, TrustView
from kvstrata_agent.policy.quota import Bound, OverQuota, Rules
from kvstrata_agent.policy.retention import Retention
from kvstrata_api.blocks import ScopeId
from kvstrata_kube.typed_store import Known
from support.kube.doubles import ok

pytestmark = pytest.mark.unit

Json = dict[str, Any]


def tenant(name: str, version: int = 1, status: Json | None = None, **spec: Any) -> Json:
    identity = {"serviceAccounts": [{"namespace": name, "name": "engine"}]}
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "spec": identity | spec, "status": status or {}}


class Watched:
    """The stores of one agent, as the watches fill them."""

    def __init__(self) -> None:
        def nothing() -> None:
            self.trust.invalidate()

        self.tenants = Known("KVTenant", declared.tenant, nothing)
        self.domains = Known("KVTrustDomain", declared.trust_domain, nothing)
        self.shares = Known("KVPrefixShare", declared.prefix_share, nothing)
        stores = TrustStores(
            self.tenants,
            self.domains,
            self.shares,
            Known("Namespace", declared.namespace_labels, nothing),
            Known("Secret", declared.scope_keys, nothing),
        )
        self.trust = TrustView(stores, "kvstrata-system", "p")
        self.view = TenantView(stores, self.trust, "p")

    def listed(self, *objects: Json) -> None:
        self.tenants.take([self.tenants.read(ok(o).raw) for o in objects], "100")

    def seen(self, obj: Json) -> None:
        self.tenants.put(self.tenants.read(ok(obj).raw))


QUOTAS = [
    {"poolRef": "p", "tier": "dram", "hard": "4Ki", "guaranteed": "1Ki"},
    {"poolRef": "other", "tier": "dram", "hard": "8Ki"},
]


def test_a_part_of_the_tenants_gives_no_rules() -> None:
    watched = Watched()
    watched.seen(tenant("a", quotas=QUOTAS))
    assert watched.view.rules() is None
    watched.listed(tenant("a", quotas=QUOTAS), tenant("b"))

    assert watched.view.rules() == {"a": Rules(bounds={"dram": Bound(4096, 1024)}), "b": Rules()}


def test_everything_that_is_declared_is_taken() -> None:
    watched = Watched()
    kept = {"idleSeconds": 5, "maxSeconds": 9, "zeroize": True}
    watched.listed(tenant("a", weight=300, overQuota="Reject", retention=kept))

    assert watched.view.rules() == {"a": Rules(300, OverQuota.REJECT, {}, Retention(5, 9, is_zeroized=True))}


def test_a_tenant_that_cannot_be_read_keeps_its_rules_and_a_deleted_one_does_not() -> None:
    watched = Watched()
    watched.listed(tenant("a", quotas=QUOTAS), tenant("b", quotas=QUOTAS))
    before = watched.view.rules()
    assert before is not None
    watched.seen(tenant("a", 101, quotas=[{"poolRef": "p", "tier": "dram", "hard": "none"}]))
    assert watched.view.rules() == before
    watched.tenants.remove("/b", "uid-b")
    assert set(watched.view.rules() or {}) == {"a"}


def test_a_relist_takes_nothing_away_before_it_is_complete() -> None:
    watched = Watched()
    watched.listed(tenant("a", quotas=QUOTAS), tenant("b"))
    watched.seen(tenant("a", 102, quotas=QUOTAS))

    assert set(watched.view.rules() or {}) == {"a", "b"}


def test_a_scope_is_superseded_by_a_later_version_of_the_same_owner_only() -> None:
    watched = Watched()
    watched.listed(tenant("a", status={"keyVersion": 2}))
    superseded = watched.view.is_superseded

    assert superseded(ScopeId("tenant/a/uid-a/v1"))
    assert not superseded(ScopeId("tenant/a/uid-a/v2"))
    assert not superseded(ScopeId("tenant/a/another-uid/v1")), "whose owner is gone waits for the usual grace"
    assert not superseded(ScopeId("tenant/b/uid-b/v1"))
    assert not superseded(ScopeId("probe/start-up/0/v0"))


def test_a_shared_scope_may_have_blocks_of_its_members_and_of_whoever_grants_it() -> None:
    watched = Watched()
    watched.listed(tenant("a"), tenant("b"), tenant("c"))
    meta = {"name": "d", "uid": "uid-d", "resourceVersion": "1"}
    domain = {"metadata": meta, "spec": {"tenants": ["a"]}, "status": {"members": ["b"], "keyVersion": 1}}
    watched.domains.take([watched.domains.read(ok(domain).raw)], "100")
    share = {
        "metadata": {"name": "s", "namespace": "a", "uid": "uid-s", "resourceVersion": "1"},
        "spec": {"poolRef": "p", "prefixes": [{"digest": "0" * 64, "tokenCount": 16}], "to": [{"tenant": "b"}]},
    }
    watched.shares.take([watched.shares.read(ok(share).raw)], "100")
    may_write = watched.view.may_write

    assert [may_write(t, ScopeId("domain/d/uid-d/v1")) for t in "abc"] == [True, True, False]
    assert [may_write(t, ScopeId("share/a.s/uid-s/v1")) for t in "abc"] == [True, False, False]
    assert all(may_write("c", ScopeId(scope)) for scope in ("domain/x/u/v1", "share/a.x/u/v1")), "nobody can tell"


def test_an_erasure_waits_from_the_wish_to_the_operators_last_word() -> None:
    watched = Watched()
    watched.listed(tenant("a", eraseRequested="now", status={"keyVersion": 2, "lastErase": "before"}))
    assert list(watched.view.erasing()) == [("a", "uid-a", 2)]
    watched.seen(tenant("a", 101, eraseRequested="now", status={"keyVersion": 2, "lastErase": "now"}))
    assert list(watched.view.erasing()) == []


def test_usage_in_the_status_is_no_news_to_agents() -> None:
    watched = Watched()
    watched.listed(tenant("a", status={"keyVersion": 1}))
    before = watched.view.version
    row = {"poolRef": "p", "tier": "dram", "used": "1Gi"}
    watched.seen(tenant("a", 101, status={"keyVersion": 1, "usage": [row]}))

    assert watched.view.version == before
