"""Who may read and write which trust scope: a pure function of the declared state and one identity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvstrata_api.names import KEY_VERSION, ScopeId

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstrata_api.models.trust import KVTenant, KVTrustDomain
    from kvstrata_api.names import NamedPrefix


class ScopeKind(StrEnum):
    """What owns a scope."""

    TENANT = "tenant"
    DOMAIN = "domain"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller as TokenReview reported it."""

    namespace: str
    service_account: str
    pod_uid: str = ""
    """Uid of the pod that the token is bound to; empty for tokens of no pod."""


@dataclass(frozen=True, slots=True)
class Access:
    """What an identity may do in one scope."""

    scope: ScopeId
    kind: ScopeKind
    name: str
    """Name of the tenant or domain; `<namespace>.<name>` of a share."""
    can_write: bool
    prefixes: tuple[NamedPrefix, ...] = ()
    """The only prompts that a share's scope is for; empty for scopes of other kinds, which take any."""


@dataclass(frozen=True, slots=True)
class Grants:
    """Everything an identity may do. `access` lists shared scopes first: a lookup tries them in this order."""

    tenant: str
    access: tuple[Access, ...]
    write_scope: ScopeId
    """Where the identity's new blocks go."""
    priorities: tuple[str, ...] = ()
    """Priorities that its sessions may have; empty: any."""


def scope_id(kind: ScopeKind, name: str, uid: str, key_version: int) -> ScopeId:
    """Name a scope. Names hold no slash, so no two scopes have one name."""
    return ScopeId(f"{kind}/{name}/{uid}/v{key_version}")


def tenant_scope(tenant: KVTenant) -> ScopeId:
    """Scope of one tenant at its current key version; a tenant that was deleted and made again is another scope."""
    meta = tenant.metadata
    return scope_id(ScopeKind.TENANT, meta.name, meta.uid, max(KEY_VERSION, tenant.status.key_version))


def domain_scope(domain: KVTrustDomain) -> ScopeId:
    """Scope of one domain at its current key version."""
    return scope_id(ScopeKind.DOMAIN, domain.metadata.name, domain.metadata.uid, domain_key_version(domain))


def domain_key_version(domain: KVTrustDomain) -> int:
    """Current key version: the administrator raises it in the spec, the operator in the status when a member leaves.

    The higher one counts. A spec that has just been raised counts before its key exists: nobody may go on meanwhile.
    """
    return max(KEY_VERSION, domain.spec.key_version, domain.status.key_version)


def claims(tenant: KVTenant, identity: Identity, namespace_labels: Mapping[str, str]) -> bool:
    """True when the tenant names the identity's ServiceAccount or selects its namespace.

    A selector without labels selects nothing: an empty selector must not claim the whole cluster.
    """
    spec = tenant.spec
    named = any(r.namespace == identity.namespace and r.name == identity.service_account for r in spec.service_accounts)
    wanted = spec.namespace_selector.match_labels if spec.namespace_selector else {}
    return named or bool(wanted and wanted.items() <= dict(namespace_labels).items())


def tenant_of(identity: Identity, tenants: Iterable[KVTenant], namespace_labels: Mapping[str, str]) -> KVTenant | None:
    """Return the one tenant that claims the identity; None when nobody or more than one does (fail closed)."""
    found = [t for t in tenants if t.metadata.deletion_timestamp is None and claims(t, identity, namespace_labels)]
    return found[0] if len(found) == 1 else None


def is_member(tenant: KVTenant, domain: KVTrustDomain) -> bool:
    """True when the tenant joins the domain AND the domain admits the tenant, and both are there to stay."""
    joins = tenant.spec.trust_domain == domain.metadata.name
    stays = tenant.metadata.deletion_timestamp is None and domain.metadata.deletion_timestamp is None
    return stays and joins and tenant.metadata.name in domain.spec.tenants


def joined_domain(tenant: KVTenant, domains: Iterable[KVTrustDomain]) -> KVTrustDomain | None:
    """Return the domain that the tenant is a member of; one-sided wishes count for nothing."""
    return next((d for d in domains if is_member(tenant, d)), None)


def holds_key(tenant: str, domain: KVTrustDomain) -> bool:
    """True once the status names the member beside the key version that counts.

    The status is the memory for who has had a key: who is handed one before it is named could leave and keep it.
    """
    return tenant in domain.status.members and domain.status.key_version == domain_key_version(domain)


def publishes(tenant: str, domain: KVTrustDomain) -> bool:
    """True when a member may write what others of the domain read; without a list every member may."""
    return not domain.spec.publishers or tenant in domain.spec.publishers


def grants(tenant: KVTenant, domains: Iterable[KVTrustDomain], shares: Iterable[Access] = ()) -> Grants:
    """Scopes of a tenant: those of prefix shares (see `shares.accesses`), its domain's when that shares all, its own.

    New blocks go to the domain when the tenant publishes there, else to its own scope; a share is never the place for
    anything but its prefixes. The domain counts once the tenant may hold its key (see `holds_key`).
    """
    own = Access(tenant_scope(tenant), ScopeKind.TENANT, tenant.metadata.name, can_write=True)
    name, domain, priorities = tenant.metadata.name, joined_domain(tenant, domains), tenant.spec.priority_classes
    if domain is None or domain.spec.sharing != "All" or not holds_key(name, domain):
        return Grants(name, (*shares, own), own.scope, priorities)
    may_write = publishes(name, domain)
    shared = Access(domain_scope(domain), ScopeKind.DOMAIN, domain.metadata.name, can_write=may_write)
    return Grants(name, (*shares, shared, own), shared.scope if may_write else own.scope, priorities)
