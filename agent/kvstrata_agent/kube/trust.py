"""Who may do what, and what is declared of tenants: from the watched tenants, domains, shares, namespaces and Secrets.

No I/O: reads stores. Expiry needs nobody: once a share's time is over by our own clock, everything that was derived is
derived again.
"""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from kvstrata_agent.kube.declared import ScopeKeys
from kvstrata_agent.policy.quota import Bound, OverQuota, Rules
from kvstrata_agent.policy.retention import Retention
from kvstrata_api import names, shares, trust
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import ApiServerAwayError, ForbiddenError, RetryableError
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.names import KEY_VERSION
from kvstrata_api.trust import Access, Grants, Identity, ScopeKind, domain_key_version
from kvstrata_kube.typed_store import Known

SECRET_BYTES: Final = 32
MEMO_MAX: Final = 4096
"""Identities whose grants are remembered; all are forgotten whenever anything changes."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Grants of an identity with the secrets of its scopes, in the order of `grants.access`."""

    grants: Grants
    secrets: tuple[ScopeSecret, ...]


@dataclass(frozen=True, slots=True)
class TrustStores:
    """The watched inputs."""

    tenants: Known[KVTenant]
    domains: Known[KVTrustDomain]
    shares: Known[KVPrefixShare]
    namespaces: Known[Mapping[str, str]]
    """Labels by namespace name."""
    secrets: Known[ScopeKeys]

    @property
    def unsynced(self) -> list[str]:
        """Inputs that were not read to their end yet."""
        stores: dict[str, Known[Any]] = {
            "KVTenants": self.tenants,
            "KVTrustDomains": self.domains,
            "KVPrefixShares": self.shares,
            "Namespaces": self.namespaces,
            "scope Secrets": self.secrets,
        }
        return [name for name, store in stores.items() if not store.is_synced]


class TrustView:
    """Answers from the last seen state; call `invalidate` whenever one of the stores changed."""

    def __init__(
        self, stores: TrustStores, namespace: str, pool: str, wall: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Answer for the shares of one pool. `wall` returns the time of the day, by which shares expire."""
        self._stores = stores
        self._namespace = namespace
        self._pool = pool
        self._wall = wall
        self._memo: dict[Identity, Granted] = {}
        self._version = 0
        self._declared: shares.Declared | None = None
        """What shares are decided from; None until it is asked for after a change."""
        self._ends_at: datetime | None = None
        """When the next share expires."""

    @property
    def version(self) -> int:
        """Moves on with every change of an input, and when a share expires."""
        self._expire()
        return self._version

    def invalidate(self) -> None:
        """Take note that an input changed."""
        self._version += 1
        self._memo.clear()
        self._declared = None
        self._ends_at = shares.next_end(self._stores.shares, self._wall())

    def _expire(self) -> None:
        """Take note of a share whose time is over."""
        if self._ends_at is not None and self._wall() >= self._ends_at:
            self.invalidate()

    def granted(self, identity: Identity) -> Granted:
        """Return what the identity may do now.

        Raises `ForbiddenError` when not exactly one tenant claims it, `RetryableError` when the Secret of one of
        its scopes is missing, and `ApiServerAwayError` while the inputs were never read.
        """
        self._expire()
        known = self._memo.get(identity)
        if known is None:
            known = self._derive(identity)
            if len(self._memo) >= MEMO_MAX:
                self._memo.clear()
            self._memo[identity] = known
        return known

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Return the key material of a scope by its name alone; None when there is none, or none that fits."""
        try:
            kind, name, uid, _ = scope.split("/")
            if kind == ScopeKind.SHARE and not self._is_open(name, uid):
                return None
            return self._secret(Access(scope, ScopeKind(kind), name, can_write=False))
        except (ValueError, RetryableError):
            return None

    def may_write(self, tenant: str, scope: ScopeId) -> bool:
        """True when a shared scope may have blocks of a tenant, and where that is unknown."""
        kind, name, _, _ = scope.split("/")
        if kind == ScopeKind.DOMAIN:
            domain = self._stores.domains.get(name)
            return domain is None or tenant in {*domain.spec.tenants, *domain.status.members}
        namespace, _, own_name = name.partition(".")
        share = self._stores.shares.get(own_name, namespace)
        granting = shares.granting_tenant(share, self._everything()) if share is not None else None
        return granting is None or granting.metadata.name == tenant

    def _is_open(self, name: str, uid: str) -> bool:
        """True while a share is there and has not expired: its blocks go with it, whoever deletes the Secret."""
        namespace, _, own_name = name.partition(".")
        share = self._stores.shares.get(own_name, namespace)
        return share is not None and share.metadata.uid == uid and shares.is_open(share, self._wall())

    def _derive(self, identity: Identity) -> Granted:
        """Compute what `granted` remembers."""
        if unsynced := self._stores.unsynced:
            raise ApiServerAwayError(f"{', '.join(unsynced)} not listed yet", delay_s=1.0)
        labels = self._stores.namespaces.get(identity.namespace) or {}
        tenant = trust.tenant_of(identity, self._stores.tenants, labels)
        if tenant is None:
            raise ForbiddenError(refusal(identity, self._stores.tenants, labels))
        return self._of(tenant)

    def granted_to(self, tenant: str) -> Granted | None:
        """Return what any engine of a tenant may do now; None when there is no such tenant.

        Raises `RetryableError` when the Secret of one of its scopes is missing, and `ApiServerAwayError` while the
        inputs were never read.
        """
        self._expire()
        if unsynced := self._stores.unsynced:
            raise ApiServerAwayError(f"{', '.join(unsynced)} not listed yet", delay_s=1.0)
        found = self._stores.tenants.get(tenant)
        if found is None or found.metadata.deletion_timestamp is not None:
            return None
        return self._of(found)

    def _of(self, tenant: KVTenant) -> Granted:
        """Grants of a tenant with the secrets of their scopes."""
        shared = shares.accesses(tenant, self._everything(), self._pool, self._wall())
        grants = trust.grants(tenant, self._stores.domains, filter(self._has_key, shared))
        return Granted(grants, tuple(self._secret(access) for access in grants.access))

    def _everything(self) -> shares.Declared:
        """Gather what shares are decided from, once after each change."""
        if self._declared is None:
            stores = self._stores
            homes = {share.metadata.namespace or "" for share in stores.shares}
            labels = {name: stores.namespaces.get(name) or {} for name in homes}
            self._declared = shares.Declared(tuple(stores.tenants), tuple(stores.domains), tuple(stores.shares), labels)
        return self._declared

    def _has_key(self, access: Access) -> bool:
        """True when a share can be used already: nobody is kept waiting for a share that was only just declared."""
        return self.secret(access.scope) is not None

    def _secret(self, access: Access) -> ScopeSecret:
        """Secret of one scope at its current key version."""
        name = names.scope_secret_name(access.kind, access.name)
        where = f"Secret {self._namespace}/{name}"
        keys = self._stores.secrets.get(name, self._namespace)
        if keys is None:
            raise RetryableError(f"{where} is missing; the operator writes it for every {access.kind}", delay_s=1.0)
        _, _, uid, version = access.scope.split("/")
        if keys.owner_uid != uid:
            raise RetryableError(f"{where} is of an earlier {access.kind} {access.name}", delay_s=1.0)
        return ScopeSecret(access.scope, _decode(where, version, keys.data.get(version)))


def refusal(identity: Identity, tenants: Known[KVTenant], labels: Mapping[str, str]) -> str:
    """Return why no tenant was found for an identity: nobody claims it, or several do."""
    who = f"ServiceAccount {identity.namespace}/{identity.service_account}"
    claimants = sorted(t.metadata.name for t in tenants if trust.claims(t, identity, labels))
    if len(claimants) > 1:
        return f"{who} is claimed by {len(claimants)} KVTenants ({', '.join(claimants[:3])}): exactly one may"
    return f"{who} is claimed by no KVTenant: exactly one has to"


def _decode(where: str, version: str, encoded: str | None) -> bytes:
    """Decode one key. Raises `RetryableError` when it is absent or malformed."""
    try:
        secret = base64.b64decode(encoded or "", validate=True)
    except binascii.Error:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise RetryableError(f"{where} has no key {version} of {SECRET_BYTES} bytes", delay_s=1.0)
    return secret


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
        """True when a shared scope may have blocks of a tenant, and where that is unknown."""
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
