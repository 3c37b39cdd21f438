"""What is declared of tenants beyond their rights: quotas, retention, erasure. No I/O: reads the watched stores."""

from collections.abc import Iterator, Mapping

from kvstrata_agent.kube.trust import TrustStores, TrustView
from kvstrata_agent.policy.quota import Bound, OverQuota, Rules
from kvstrata_agent.policy.retention import Retention
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.models.trust import KVTenant
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.trust import Access, ScopeKind, domain_key_version


class TenantView:
    """Implements `ports.Tenants` for one pool."""

    def __init__(self, stores: TrustStores, trust: TrustView, pool: str) -> None:
        self._stores = stores
        self._trust = trust
        self._pool = pool
        self._last_good: dict[str, Rules] = {}

    @property
    def version(self) -> int:
        """Moves on with every change."""
        return self._trust.version

    def rules(self) -> Mapping[str, Rules] | None:
        """Rules by tenant; None while not every KVTenant was read.

        A KVTenant that cannot be read keeps the rules that it had: it must not look like one without a guarantee.
        """
        tenants = self._stores.tenants
        if not tenants.is_synced:
            return None
        found = {}
        for key, seen in tenants.items.items():
            name = key.rpartition("/")[2]
            if seen.value is not None:
                found[name] = rules_of(seen.value, self._pool)
            elif name in self._last_good:
                found[name] = self._last_good[name]
        self._last_good = found
        return found

    def key_versions(self) -> Mapping[str, int]:
        """Key version in use by tenant."""
        return {t.metadata.name: _version_of(t) for t in self._stores.tenants}

    def is_superseded(self, scope: ScopeId) -> bool:
        """True when the scope's owner is there and its key has moved on, which is for good."""
        kind, name, uid, version = scope.split("/")
        if kind == ScopeKind.TENANT:
            tenant = self._stores.tenants.get(name)
            now = (tenant.metadata.uid, _version_of(tenant)) if tenant is not None else ("", 0)
        elif kind == ScopeKind.DOMAIN:
            domain = self._stores.domains.get(name)
            now = (domain.metadata.uid, domain_key_version(domain)) if domain is not None else ("", 0)
        else:
            return False
        return now[0] == uid and int(version.removeprefix("v")) < now[1]

    def may_write(self, tenant: str, scope: ScopeId) -> bool:
        """True when a shared scope may have blocks of a tenant, and where it cannot be told."""
        return self._trust.may_write(tenant, scope)

    def access(self, tenant: str) -> tuple[tuple[Access, ScopeSecret], ...]:
        """Scopes that a tenant's engines may use, shared ones first, with their keys; see `ports.Tenants`."""
        granted = self._trust.granted_to(tenant)
        return () if granted is None else tuple(zip(granted.grants.access, granted.secrets, strict=True))

    def erasing(self) -> Iterator[tuple[str, str, int]]:
        """Tenants whose erasure was asked for and is not confirmed yet: name, uid and the key version in use."""
        for tenant in self._stores.tenants:
            if tenant.spec.erase_requested and tenant.spec.erase_requested != tenant.status.last_erase:
                yield tenant.metadata.name, tenant.metadata.uid, _version_of(tenant)


def rules_of(tenant: KVTenant, pool: str) -> Rules:
    """What one tenant declares for one pool."""
    spec = tenant.spec
    bounds = {q.tier: Bound(q.hard, q.guaranteed or 0) for q in spec.quotas if q.pool_ref == pool}
    kept = spec.retention
    retention = Retention(kept.idle_seconds, kept.max_seconds, kept.zeroize)
    return Rules(spec.weight, OverQuota(spec.over_quota), bounds, retention)


def _version_of(tenant: KVTenant) -> int:
    return max(KEY_VERSION, tenant.status.key_version)
