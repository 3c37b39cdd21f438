"""Who grants a prefix share, who may read it and why somebody may not: pure functions of the declared state.

A share needs two sides. The granting tenant is the one that alone has identities in the share's namespace; it writes
the share's scope. A reader consents by its membership: it reads shares of publishers of its own trust domain, unless
that shares nothing; or by its own word, `spec.acceptSharesFrom`. Without its consent a share could feed it with blocks
of other bytes than the tokens make.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from itertools import islice
from typing import Final

from kvstrata_api.models.trust import KVPrefixShare, KVTenant, KVTrustDomain
from kvstrata_api.names import KEY_VERSION, NamedPrefix, ScopeId
from kvstrata_api.trust import Access, ScopeKind, is_member, publishes, scope_id

SHARES_MAX: Final = 64
"""Shares of a pool that one tenant's clients get, its own first, then by name: their prefixes have to fit one frame."""

_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)

Labels = Mapping[str, str]


class Refusal(StrEnum):
    """Why somebody whom a share names may not read it. Reasons of conditions and of `kvstrata who-can-read`."""

    UNKNOWN_READER = "UnknownReader"
    """There is no such tenant or domain, or it is being deleted."""
    NOT_ACCEPTED = "NotAccepted"
    """The reader neither accepts shares of the granting tenant nor has a publisher of its domain in it."""
    DOMAIN_PRIVATE = "DomainPrivate"
    """The domain's `sharing` is Private."""
    TOO_MANY_SHARES = "TooManyShares"
    """The reader gets `SHARES_MAX` other shares of the pool, which come before this one."""


@dataclass(frozen=True)
class Declared:
    """Everything that shares are decided from. What every decision looks up is indexed once."""

    tenants: Collection[KVTenant] = ()
    domains: Collection[KVTrustDomain] = ()
    shares: Collection[KVPrefixShare] = ()
    namespaces: Mapping[str, Labels] = field(default_factory=dict)
    """Labels of the shares' namespaces, by name."""

    @cached_property
    def by_name(self) -> dict[str, KVTenant]:
        """Tenants that are there to stay."""
        return {t.metadata.name: t for t in self.tenants if t.metadata.deletion_timestamp is None}

    @cached_property
    def domain_by_name(self) -> dict[str, KVTrustDomain]:
        """Domains, those included that are being deleted."""
        return {d.metadata.name: d for d in self.domains}

    @cached_property
    def members(self) -> dict[str, dict[str, KVTenant]]:
        """Tenants that both sides name, by domain and by name."""
        found: dict[str, dict[str, KVTenant]] = {}
        for name, tenant in self.by_name.items():
            domain = self.domain_by_name.get(tenant.spec.trust_domain or "")
            if domain is not None and is_member(tenant, domain):
                found.setdefault(domain.metadata.name, {})[name] = tenant
        return found

    def domain_of(self, tenant: KVTenant) -> KVTrustDomain | None:
        """Return what `trust.joined_domain` does."""
        name = tenant.spec.trust_domain or ""
        return self.domain_by_name[name] if tenant.metadata.name in self.members.get(name, {}) else None

    @cached_property
    def by_pool(self) -> dict[str, list[KVPrefixShare]]:
        """Shares of each pool."""
        found: dict[str, list[KVPrefixShare]] = {}
        for share in self.shares:
            found.setdefault(share.spec.pool_ref, []).append(share)
        return found

    @cached_property
    def given(self) -> dict[tuple[str, str], tuple[datetime, frozenset[str]]]:
        """Which shares a tenant gets of a pool, and for which moment that was found; filled by `is_given`."""
        return {}

    @cached_property
    def by_namespace(self) -> dict[str, list[KVTenant]]:
        """Those among them with identities in a namespace, by its labels or by the ServiceAccounts that they name."""
        found: dict[str, dict[str, KVTenant]] = {}
        for name, tenant in self.by_name.items():
            selector = tenant.spec.namespace_selector
            wanted = dict(selector.match_labels) if selector else {}
            selected = (n for n, labels in self.namespaces.items() if wanted and wanted.items() <= labels.items())
            for namespace in (*selected, *(a.namespace for a in tenant.spec.service_accounts)):
                found.setdefault(namespace, {})[name] = tenant
        return {namespace: list(tenants.values()) for namespace, tenants in found.items()}


@dataclass(frozen=True, slots=True)
class Reading:
    """One tenant that a share names, or a name that leads nowhere, and the answer."""

    reader: str
    """The tenant; the domain where that is the fault."""
    by: str
    """What names it: `tenant b` or `domain d`."""
    refusal: Refusal | None = None
    """None: it may read."""


def share_name(share: KVPrefixShare) -> str:
    """`<namespace>.<name>`: neither holds a dot, so the pair is unambiguous."""
    return f"{share.metadata.namespace}.{share.metadata.name}"


def share_scope(share: KVPrefixShare) -> ScopeId:
    """Scope of one share; its prefixes never change, so its key never moves on."""
    return scope_id(ScopeKind.SHARE, share_name(share), share.metadata.uid, KEY_VERSION)


def share_prefixes(share: KVPrefixShare) -> tuple[NamedPrefix, ...]:
    """What the share lists, as clients compare it."""
    return tuple(NamedPrefix(bytes.fromhex(p.digest), p.token_count) for p in share.spec.prefixes)


def share_end(share: KVPrefixShare) -> datetime | None:
    """When the share ends, in UTC, None for never; a time that cannot be read is long past.

    A time whose zone puts it outside the years 1 to 9999 of UTC is the first or the last one of them.
    """
    text = share.spec.expires_at
    if not text:
        return None
    try:
        end = datetime.fromisoformat(text.upper())
    except ValueError:
        return _FIRST
    try:
        return end.astimezone(UTC) if end.tzinfo else end.replace(tzinfo=UTC)
    except OverflowError:
        return _LAST if end.year == _LAST.year else _FIRST


def is_open(share: KVPrefixShare, now: datetime) -> bool:
    """True while the share is neither expired nor being deleted."""
    end = share_end(share)
    return share.metadata.deletion_timestamp is None and (end is None or now < end)


def next_end(shares: Iterable[KVPrefixShare], now: datetime) -> datetime | None:
    """Return the next moment at which a share expires."""
    return min((end for s in shares if (end := share_end(s)) is not None and end > now), default=None)


def claimants(namespace: str, declared: Declared) -> list[KVTenant]:
    """Tenants with identities in a namespace, by its labels or by the ServiceAccounts that they name."""
    return declared.by_namespace.get(namespace, [])


def granting_tenant(share: KVPrefixShare, declared: Declared) -> KVTenant | None:
    """Return the one tenant of the share's namespace; None when it has none or several (fail closed)."""
    found = claimants(share.metadata.namespace or "", declared)
    return found[0] if len(found) == 1 else None


def consents(reader: KVTenant, granting: KVTenant, declared: Declared) -> bool:
    """True when the reader wants shares of the granting tenant, by its own word or as a member of its domain."""
    if granting.metadata.name in reader.spec.accept_shares_from:
        return True
    domain = declared.domain_of(reader)
    if domain is None or domain.spec.sharing == "Private" or declared.domain_of(granting) is not domain:
        return False
    return publishes(granting.metadata.name, domain)


def readings(share: KVPrefixShare, granting: KVTenant, declared: Declared, now: datetime) -> tuple[Reading, ...]:
    """Decide for everybody whom the share names whether it may read; the granting tenant itself is left out."""
    found = [r for t in share.spec.to for r in _named(t.tenant, t.domain, granting, declared)]
    others = (r for r in dict.fromkeys(found) if r.reader != granting.metadata.name or r.refusal)
    return tuple(_within_limit(reading, share, declared, now) for reading in others)


def _within_limit(reading: Reading, share: KVPrefixShare, declared: Declared, now: datetime) -> Reading:
    if reading.refusal or is_given(share, declared.by_name[reading.reader], declared, now):
        return reading
    return replace(reading, refusal=Refusal.TOO_MANY_SHARES)


def is_given(share: KVPrefixShare, tenant: KVTenant, declared: Declared, now: datetime) -> bool:
    """Whether an open share that a tenant may read or write is one of those that its clients get: see `SHARES_MAX`."""
    pool = share.spec.pool_ref
    if len(declared.by_pool.get(pool, ())) <= SHARES_MAX or not is_open(share, now):
        return True
    key = (tenant.metadata.name, pool)
    moment, found = declared.given.get(key, (None, frozenset[str]()))
    if moment != now:
        found = frozenset(access.name for access in accesses(tenant, declared, pool, now))
        declared.given[key] = (now, found)
    return share_name(share) in found


def may_read(share: KVPrefixShare, reader: KVTenant, granting: KVTenant, declared: Declared) -> bool:
    """The result of `readings` for one tenant, without deciding for all the others."""
    domain = declared.domain_of(reader)
    open_name = domain.metadata.name if domain is not None and domain.spec.sharing != "Private" else None
    is_named = any(
        t.tenant == reader.metadata.name or (t.domain is not None and t.domain == open_name) for t in share.spec.to
    )
    is_there = reader.metadata.name in declared.by_name
    return is_named and is_there and consents(reader, granting, declared)


def accesses(tenant: KVTenant, declared: Declared, pool: str, now: datetime) -> tuple[Access, ...]:
    """What a tenant may do in the scopes of shares of one pool: write its own, read those of others."""
    found = sorted(_accesses(tenant, declared, pool, now), key=lambda a: (not a.can_write, a.name))
    return tuple(islice(found, SHARES_MAX))


def _accesses(tenant: KVTenant, declared: Declared, pool: str, now: datetime) -> Iterator[Access]:
    for share in declared.by_pool.get(pool, ()):
        if not is_open(share, now):
            continue
        granting = granting_tenant(share, declared)
        if granting is None:
            continue
        grants_it = granting.metadata.name == tenant.metadata.name
        if grants_it or may_read(share, tenant, granting, declared):
            scope, prefixes = share_scope(share), share_prefixes(share)
            yield Access(scope, ScopeKind.SHARE, share_name(share), can_write=grants_it, prefixes=prefixes)


def _named(tenant: str | None, domain: str | None, granting: KVTenant, declared: Declared) -> Iterator[Reading]:
    """Answers for one entry of `to`."""
    if tenant is not None:
        yield _answer(tenant, declared.by_name.get(tenant), f"tenant {tenant}", granting, declared)
        return
    found = declared.domain_by_name.get(domain or "")
    by = f"domain {domain}"
    if found is None or found.metadata.deletion_timestamp is not None:
        yield Reading(str(domain), by, Refusal.UNKNOWN_READER)
    elif found.spec.sharing == "Private":
        yield Reading(str(domain), by, Refusal.DOMAIN_PRIVATE)
    else:
        for name, member in declared.members.get(found.metadata.name, {}).items():
            yield _answer(name, member, by, granting, declared)


def _answer(name: str, reader: KVTenant | None, by: str, granting: KVTenant, declared: Declared) -> Reading:
    if reader is None:
        return Reading(name, by, Refusal.UNKNOWN_READER)
    is_willing = name == granting.metadata.name or consents(reader, granting, declared)
    return Reading(name, by, None if is_willing else Refusal.NOT_ACCEPTED)
