"""Who may read what: two tenants, one shared domain, and scopes whose keys move on or are shredded.

In a part of the seeds tenants have quotas, small enough to be reached all the time.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping

from kvstrata_agent.blocks.request import Caller
from kvstrata_agent.policy.quota import Bound, OverQuota, Rules
from kvstrata_api.blocks import ScopeId, ScopeSecret
from kvstrata_api.errors import UnauthenticatedError
from kvstrata_api.trust import Access, Grants, Identity, ScopeKind

TENANTS = ("a", "b")
TOKEN_S = 1e6
"""Tokens outlive every run."""
SLOT_BYTES = 4096
RECORD_BYTES = 2 * SLOT_BYTES
QUOTA_EVERY = 3
"""One seed in so many has quotas."""


class Tenancy:
    """The declared state that all agents follow."""

    def __init__(self, seed: int) -> None:
        self.rules = _rules(random.Random(seed)) if seed % QUOTA_EVERY == 0 else {}
        """Quotas by tenant."""
        self.versions = {"a": 1, "b": 1, "d": 1}
        """Key version of each tenant's scope and of the domain's."""
        self.grants_version = 1
        self.shredded_at_s: dict[str, float] = {}
        """Virtual second of the last time, by name."""

    def scope(self, name: str, version: int | None = None) -> ScopeId:
        """Scope of a tenant or of the domain `d`."""
        kind = "domain" if name == "d" else "tenant"
        return ScopeId(f"{kind}/{name}/uid-{name}/v{version or self.versions[name]}")

    def scopes(self) -> set[ScopeId]:
        """All that exist now."""
        return {self.scope(name) for name in self.versions}

    def shred(self, name: str, now_s: float) -> ScopeId:
        """Move a key on: the old scope's secret is gone for ever."""
        self.shredded_at_s[name] = now_s
        old = self.scope(name)
        self.versions[name] += 1
        self.grants_version += 1
        return old


def _rules(rng: random.Random) -> dict[str, Rules]:
    """One tenant that is held down, and one that is held harmless; drawn apart, so that runs without are as before."""
    held_down = {
        "dram": Bound(rng.randint(4, 10) * SLOT_BYTES),
        "nvme": Bound(rng.randint(4, 24) * RECORD_BYTES, 2 * RECORD_BYTES),
    }
    harmless = {"dram": Bound(None, rng.randint(2, 6) * SLOT_BYTES), "nvme": Bound(None, 8 * RECORD_BYTES)}
    return {
        "a": Rules(rng.choice((50, 100)), rng.choice(tuple(OverQuota)), held_down),
        "b": Rules(rng.choice((100, 300)), bounds=harmless),
    }


class SimTenants:
    """What is declared of tenants beyond their rights."""

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy

    @property
    def version(self) -> int:
        """Moves on with every change."""
        return self._tenancy.grants_version

    def rules(self) -> Mapping[str, Rules]:
        """All of them, always."""
        return self._tenancy.rules

    def key_versions(self) -> Mapping[str, int]:
        """Key versions in use."""
        return {name: self._tenancy.versions[name] for name in TENANTS}

    def is_superseded(self, scope: ScopeId) -> bool:
        """True when the scope's key has moved on."""
        _, name, _, version = scope.split("/")
        return int(version.removeprefix("v")) < self._tenancy.versions[name]

    def may_write(self, tenant: str, scope: ScopeId) -> bool:
        """Nobody shares a scope here."""
        return scope.split("/")[1] == tenant

    def access(self, tenant: str) -> tuple[tuple[Access, ScopeSecret], ...]:
        """What a tenant's engines may use; nobody asks for it here."""
        own = Access(self._tenancy.scope(tenant), ScopeKind.TENANT, tenant, can_write=True)
        return ((own, secret_of(own.scope)),)

    def erasing(self) -> Iterator[tuple[str, str, int]]:
        """Nobody waits for a confirmation."""
        return iter(())


def secret_of(scope: ScopeId) -> ScopeSecret:
    """Key material of a scope, made from its name."""
    return ScopeSecret(scope, hashlib.blake2b(scope.encode(), digest_size=32).digest())


class SimAuthenticator:
    """Turns tokens into callers; a token is the tenant's name."""

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._secrets: dict[ScopeId, ScopeSecret] = {}
        self._version = -1

    @property
    def grants_version(self) -> int:
        """Moves on with every change."""
        return self._tenancy.grants_version

    async def authenticate(self, token: str) -> Caller:
        """Check a token."""
        return self._caller(token)

    def authorize(self, identity: Identity) -> Caller:
        """Rights of an identity now."""
        return self._caller(identity.service_account)

    def _caller(self, tenant: str) -> Caller:
        if tenant not in TENANTS:
            raise UnauthenticatedError(f"nobody is called {tenant}")
        own, shared = self._tenancy.scope(tenant), self._tenancy.scope("d")
        access = (
            Access(shared, ScopeKind.DOMAIN, "d", can_write=True),
            Access(own, ScopeKind.TENANT, tenant, can_write=True),
        )
        grants = Grants(tenant, access, own)
        return Caller(Identity("ns", tenant), grants, (secret_of(shared), secret_of(own)), TOKEN_S)

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Key material of a scope that exists."""
        if self._version != self._tenancy.grants_version:
            self._version = self._tenancy.grants_version
            self._secrets = {s: secret_of(s) for s in self._tenancy.scopes()}
        return self._secrets.get(scope)

    async def verify_peer(self, token: str, agent: str) -> Identity:  # noqa: ARG002
        """Every agent is one of ours."""
        return Identity("kvstrata-system", token)
