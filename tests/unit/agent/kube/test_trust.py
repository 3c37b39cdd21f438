"""Laws of grants: what the trust view lets whom do, with which keys, and until when."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_agent.kube import declared
from kvstrata_agent.kube.trust import MEMO_MAX
from kvstrata_api import trust
from kvstrata_api.blocks import ScopeId
from kvstrata_api.errors import (
    ApiServerAwayError,
    ForbiddenError,
    RetryableError,
)
from kvstrata_api.trust import Identity
from support.kube.trust import ENGINE, KEY, KEY2, Json, Trust, secret, tenant

pytestmark = pytest.mark.unit


def test_grants_are_those_of_the_pure_function_with_a_secret_each() -> None:
    domain = {"metadata": {"name": "d", "uid": "u9"}, "spec": {"tenants": ["a"], "sharing": "All", "keyVersion": 2}}
    domain["status"] = {"keyVersion": 2, "members": ["a"]}
    joined = tenant(trustDomain="d", serviceAccounts=[{"namespace": "team", "name": "engine"}])
    view = Trust([joined], [domain], [], [secret(v1=KEY), secret("domain", "d", "u9", v1=KEY, v2=KEY2)]).view

    granted = view.granted(ENGINE)
    assert granted.grants == trust.grants(declared.tenant(joined), [declared.trust_domain(domain)])
    assert [(s.scope, s.secret) for s in granted.secrets] == [("domain/d/u9/v2", KEY2), ("tenant/a/u1/v1", KEY)]


@pytest.mark.parametrize(
    ("secrets", "words"),
    [
        ([], "Secret kvstrata-system/kvstrata-scope.tenant.a is missing"),
        ([secret(uid="u0", v1=KEY)], "of an earlier tenant a"),
        ([secret(uid="", v1=KEY)], "of an earlier tenant a"),
        ([secret()], "has no key v1 of 32 bytes"),
        ([secret(v2=KEY)], "has no key v1 of 32 bytes"),
        ([secret(v1=b"short")], "has no key v1 of 32 bytes"),
    ],
)
def test_a_scope_without_its_key_is_waited_for_by_name(secrets: list[Json], words: str) -> None:
    with pytest.raises(RetryableError, match=words):
        Trust([tenant()], secrets=secrets).view.granted(ENGINE)


def test_a_key_that_is_no_base64_is_no_key() -> None:
    broken = secret()
    broken["data"] = {"v1": "***"}
    with pytest.raises(RetryableError, match="has no key v1"):
        Trust([tenant()], secrets=[broken]).view.granted(ENGINE)


def test_a_key_version_that_the_operator_moved_on_is_another_scope() -> None:
    joined = tenant(trustDomain="d", serviceAccounts=[{"namespace": "team", "name": "engine"}])
    spec = {"tenants": ["a"], "sharing": "All", "keyVersion": 2}
    domain = {"metadata": {"name": "d", "uid": "u9"}, "spec": spec, "status": {"keyVersion": 3, "members": ["a"]}}
    keys = secret("domain", "d", "u9", v2=KEY, v3=KEY2)

    granted = Trust([joined], [domain], [], [secret(v1=KEY), keys]).view.granted(ENGINE)
    assert [s.scope for s in granted.secrets] == ["domain/d/u9/v3", "tenant/a/u1/v1"]


def sharing(uid: str = "s1", **spec: Any) -> Json:
    """A share of tenant b's namespace to tenant a, which accepts it."""
    prefixes = [{"digest": "0" * 64, "tokenCount": 32}]
    body = {"poolRef": "p", "prefixes": prefixes, "to": [{"tenant": "a"}], **spec}
    return {"metadata": {"name": "prompt", "namespace": "b", "uid": uid}, "spec": body}


def reading(*secrets: Json, **spec: Any) -> Trust:
    """Tenant a, whose engine asks, and tenant b, which shares a prefix with it."""
    account = [{"namespace": "team", "name": "engine"}]
    granting = {"metadata": {"name": "b", "uid": "u2"}, "spec": {"serviceAccounts": [{"namespace": "b", "name": "x"}]}}
    reader = tenant(serviceAccounts=account, acceptSharesFrom=["b"])
    return Trust([reader, granting], [], [], [secret(v1=KEY), *secrets], [sharing(**spec)])


SHARE_KEY = secret("share", "b.prompt", "s1", v1=KEY2)


def scopes_of(trusted: Trust) -> list[str]:
    return [str(s.scope) for s in trusted.view.granted(ENGINE).secrets]


def test_a_reader_gets_the_secret_of_the_share_and_its_prefixes_and_no_right_to_write() -> None:
    granted = reading(SHARE_KEY).view.granted(ENGINE)

    assert [(s.scope, s.secret) for s in granted.secrets] == [
        ("share/b.prompt/s1/v1", KEY2),
        ("tenant/a/u1/v1", KEY),
    ]
    assert not granted.grants.access[0].can_write
    assert granted.grants.access[0].prefixes == ((bytes(32), 32),)
    assert granted.grants.write_scope == "tenant/a/u1/v1"


@pytest.mark.parametrize(
    "others", [[], [secret("share", "b.prompt", "s0", v1=KEY2)], [secret("share", "b.prompt", "s1", v2=KEY2)]]
)
def test_a_share_without_its_key_is_left_out_and_keeps_nobody_waiting(others: list[Json]) -> None:
    assert scopes_of(reading(*others)) == ["tenant/a/u1/v1"]


def test_a_share_of_another_pool_grants_nothing_here() -> None:
    assert scopes_of(reading(SHARE_KEY, poolRef="q")) == ["tenant/a/u1/v1"]


def test_a_share_ends_by_our_own_clock_and_its_key_with_it() -> None:
    trusted = reading(SHARE_KEY, expiresAt="2026-01-01T00:00:10Z")
    scope = ScopeId("share/b.prompt/s1/v1")
    assert scope in scopes_of(trusted)
    assert trusted.view.secret(scope) is not None
    version = trusted.view.version

    trusted.now += timedelta(seconds=10)
    assert trusted.view.version > version
    assert scopes_of(trusted) == ["tenant/a/u1/v1"]
    assert trusted.view.secret(scope) is None
    assert trusted.view.version == trusted.view.version


def test_a_share_that_is_deleted_is_over_before_its_secret_goes() -> None:
    trusted = reading(SHARE_KEY)
    (seen,) = trusted.stores.shares.items.values()
    trusted.stores.shares.remove(seen.key, uid="")

    assert scopes_of(trusted) == ["tenant/a/u1/v1"]
    assert trusted.view.secret(ScopeId("share/b.prompt/s1/v1")) is None


def test_what_is_done_for_a_tenant_may_use_what_its_engines_may_and_nothing_without_one() -> None:
    trusted = reading(SHARE_KEY, expiresAt="2026-01-01T00:00:10Z")
    assert trusted.view.granted_to("a") == trusted.view.granted(ENGINE)
    trusted.now += timedelta(seconds=10)
    assert trusted.view.granted_to("a") == trusted.view.granted(ENGINE)
    assert trusted.view.granted_to("nobody") is None

    going = tenant()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert Trust([going], secrets=[secret(v1=KEY)]).view.granted_to("a") is None
    with pytest.raises(RetryableError, match="is missing"):
        Trust([tenant()]).view.granted_to("a")
    trusted.stores.domains.is_synced = False
    trusted.view.invalidate()
    with pytest.raises(ApiServerAwayError, match="KVTrustDomains not listed yet"):
        trusted.view.granted_to("a")


def test_nobody_is_let_in_before_everything_was_listed() -> None:
    trusted = Trust([tenant()], secrets=[secret(v1=KEY)])
    assert trusted.view.granted(ENGINE).grants.tenant == "a"
    trusted.stores.domains.is_synced = False
    trusted.view.invalidate()

    with pytest.raises(ApiServerAwayError, match="KVTrustDomains not listed yet"):
        trusted.view.granted(ENGINE)


@given(st.lists(st.booleans(), max_size=12))
def test_grants_follow_every_change_at_once(steps: list[bool]) -> None:
    trusted = Trust([], secrets=[secret(v1=KEY)])
    seen = trusted.stores.tenants.read(json.dumps(tenant()).encode())
    for is_there in steps:
        before = trusted.view.version
        had = trusted.stores.tenants.get("a") is not None
        if is_there:
            trusted.stores.tenants.put(seen)
        else:
            trusted.stores.tenants.remove(seen.key, uid="")
        assert (trusted.view.version > before) == (had != is_there)
        if is_there:
            assert trusted.view.granted(ENGINE).grants.tenant == "a"
        else:
            with pytest.raises(ForbiddenError, match="team/engine is claimed by no KVTenant"):
                trusted.view.granted(ENGINE)


def test_what_is_remembered_of_identities_is_bounded() -> None:
    claims_all = tenant(namespaceSelector={"matchLabels": {"k": "v"}})
    namespace = {"metadata": {"name": "team", "labels": {"k": "v"}}}
    view = Trust([claims_all], [], [namespace], [secret(v1=KEY)]).view
    for number in range(MEMO_MAX + 10):
        view.granted(Identity("team", f"sa-{number}"))

    assert len(view._memo) <= MEMO_MAX


def test_a_secret_is_found_by_the_name_of_its_scope_and_by_nothing_else() -> None:
    view = Trust([tenant()], secrets=[secret(v1=KEY)]).view

    found = view.secret(trust.tenant_scope(declared.tenant(tenant())))
    assert found is not None
    assert found.secret == KEY
    for scope in ("tenant/a/u2/v1", "tenant/a/u1/v2", "tenant/b/u1/v1", "domain/a/u1/v1", "", "a/b", "x/a/u1/v1"):
        assert view.secret(scope) is None  # type: ignore[arg-type]
