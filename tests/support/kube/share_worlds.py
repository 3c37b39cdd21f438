"""Declared worlds of tenants, domains and one share, with any wishes of any side."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.shares import Declared

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TENANTS = ("a", "b", "c")
DOMAINS = ("d", "e")
Json = dict[str, Any]


def tenant(name: str, **spec: Any) -> KVTenant:
    spec.setdefault("serviceAccounts", [{"namespace": name, "name": "engine"}])
    return KVTenant.model_validate({"metadata": {"name": name, "uid": f"u-{name}"}, "spec": spec})


def domain(name: str, **spec: Any) -> KVTrustDomain:
    """One whose status names everybody, as the operator does of whoever it finds on both sides."""
    told = {"keyVersion": 1, "members": TENANTS}
    return KVTrustDomain.model_validate({"metadata": {"name": name, "uid": f"u-{name}"}, "spec": spec, "status": told})


def share(*to: Json, name: str = "s", namespace: str = "a", **spec: Any) -> KVPrefixShare:
    prefixes = [{"digest": "0" * 64, "tokenCount": 16}]
    body = {"poolRef": "p", "prefixes": prefixes, "to": list(to) or [{"tenant": "b"}], **spec}
    return KVPrefixShare.model_validate(
        {"metadata": {"name": name, "namespace": namespace, "uid": f"u-{name}"}, "spec": body}
    )


@st.composite
def worlds(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Declared:
    """Three tenants, two domains and a share of tenant a, with any wishes."""
    some = st.lists(st.sampled_from(TENANTS), unique=True)
    tenants = [
        tenant(n, acceptSharesFrom=draw(some), **({"trustDomain": t} if (t := draw(domain_or_none)) else {}))
        for n in TENANTS
    ]
    domains = [
        domain(
            n,
            tenants=(admitted := draw(some)),
            publishers=draw(st.lists(st.sampled_from(admitted), unique=True)) if admitted else [],
            sharing=draw(st.sampled_from(["Private", "ListedPrefixes", "All"])),
        )
        for n in DOMAINS
    ]
    targets = st.sampled_from([{"tenant": t} for t in TENANTS] + [{"domain": d} for d in DOMAINS])
    to = draw(st.lists(targets, min_size=1, max_size=4))
    return Declared(tenants, domains, [share(*to)], {})


domain_or_none = st.sampled_from([None, *DOMAINS])


def named(world: Declared, name: str) -> KVTenant:
    return next(t for t in world.tenants if t.metadata.name == name)
