"""Who may read what, answered from the declared state: what `kvstrata who-can-read` prints. Pure.

Laws: the answers for all tenants, domains and shares together are exactly what agents grant (`trust.grants` with
`shares.accesses`) once the operator has published it; and whoever wants to read, or is wanted, by one side only is
named with the reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from kvstrata_api import shares, trust
from kvstrata_api.errors import InvalidInputError
from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.names import ScopeId
from kvstrata_api.shares import Declared

NOT_JOINED = "NotJoined"
"""The domain admits the tenant, which does not join."""
NOT_ADMITTED = "NotAdmitted"
"""The tenant joins, and the domain does not admit it."""
EXPIRED = "Expired"
NOT_GRANTED = "NotGranted"
"""The share's namespace does not belong to exactly one tenant."""


@dataclass(frozen=True, slots=True)
class Reader:
    """One tenant and one scope, and the answer."""

    tenant: str
    scope: ScopeId
    by: str
    """What allows it, or would."""
    until: str = ""
    """RFC 3339; empty: without end."""
    can_write: bool = False
    refusal: str = ""
    """Why it may not, CamelCase; empty: it may."""


def of_tenant(name: str, declared: Declared, now: datetime) -> tuple[Reader, ...]:
    """Readers of a tenant's blocks: in its own scope, in a domain that it publishes in, and in its shares.

    Raises `InvalidInputError` when there is no such tenant.
    """
    tenant = next((t for t in declared.tenants if t.metadata.name == name), None)
    if tenant is None:
        raise InvalidInputError(f"there is no KVTenant {name!r}")
    own = Reader(name, trust.tenant_scope(tenant), "its own scope", can_write=True)
    found = [own] if tenant.metadata.deletion_timestamp is None else []
    domain = trust.joined_domain(tenant, declared.domains)
    if domain is not None and trust.publishes(name, domain):
        found += _of_domain(domain, declared)
    for share in declared.shares:
        granting = shares.granting_tenant(share, declared)
        if granting is not None and granting.metadata.name == name:
            found += of_share(share, declared, now)
    return tuple(found)


def of_domain(name: str, declared: Declared) -> tuple[Reader, ...]:
    """Readers of a domain's scope. Raises `InvalidInputError` when there is no such domain."""
    domain = next((d for d in declared.domains if d.metadata.name == name), None)
    if domain is None:
        raise InvalidInputError(f"there is no KVTrustDomain {name!r}")
    return tuple(_of_domain(domain, declared))


def of_share(share: KVPrefixShare, declared: Declared, now: datetime) -> tuple[Reader, ...]:
    """Readers of a share's scope, the tenant that grants it included."""
    scope, end = shares.share_scope(share), share.spec.expires_at or ""
    granting = shares.granting_tenant(share, declared)
    if granting is None:
        named = (f"tenant {t.tenant}" if t.tenant else f"domain {t.domain}" for t in share.spec.to)
        return tuple(Reader(who.split(" ")[1], scope, who, end, refusal=NOT_GRANTED) for who in named)
    over = "" if shares.is_open(share, now) else EXPIRED
    excess = "" if shares.is_given(share, granting, declared, now) else shares.Refusal.TOO_MANY_SHARES
    writer = Reader(granting.metadata.name, scope, "grants it", end, can_write=not excess, refusal=over or excess)
    readings = shares.readings(share, granting, declared, now)
    return (writer, *(Reader(r.reader, scope, f"as {r.by}", end, refusal=over or r.refusal or "") for r in readings))


def of_digest(digest: str, declared: Declared, now: datetime) -> tuple[Reader, ...]:
    """Readers of a prefix by its digest in hex: those of every share that lists it."""
    listing = (s for s in declared.shares if any(p.digest == digest for p in s.spec.prefixes))
    return tuple(reader for share in listing for reader in of_share(share, declared, now))


def _of_domain(domain: KVTrustDomain, declared: Declared) -> Iterator[Reader]:
    """Everybody whom the domain admits or who joins it."""
    scope, by = trust.domain_scope(domain), f"domain {domain.metadata.name}"
    is_open = domain.spec.sharing == "All"
    joining = {t.metadata.name for t in declared.tenants if t.spec.trust_domain == domain.metadata.name}
    for name in sorted({*domain.spec.tenants, *joining}):
        tenant = next((t for t in declared.tenants if t.metadata.name == name), None)
        refusal = _refusal(tenant, domain) or ("" if is_open else f"Sharing{domain.spec.sharing}")
        yield Reader(name, scope, by, can_write=not refusal and trust.publishes(name, domain), refusal=refusal)


def _refusal(tenant: KVTenant | None, domain: KVTrustDomain) -> str:
    """Why a tenant is no member; empty when it is."""
    if tenant is None or tenant.metadata.deletion_timestamp is not None:
        return shares.Refusal.UNKNOWN_READER
    if tenant.spec.trust_domain != domain.metadata.name:
        return NOT_JOINED
    if tenant.metadata.name not in domain.spec.tenants:
        return NOT_ADMITTED
    return "" if domain.metadata.deletion_timestamp is None else "Deleting"
