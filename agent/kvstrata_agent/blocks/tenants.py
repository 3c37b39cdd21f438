"""What this node knows of tenants and scopes: declared rules, what they hold of its tiers, keys. No clock, no I/O.

Nothing may be evicted before the rules are known, which takes a complete view of all KVTenants: whoever is missing
would look like one without a guarantee.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata_agent.policy.quota import NO_BOUND, NO_RULES, AccountUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.policy.quota import Rules
    from kvstrata_api.blocks import ScopeId, ScopeSecret

LOST_AFTER_S: Final = 5.0
"""A Secret that is replaced is absent for a moment; the same time as blocks are given."""
SCOPES_MAX: Final = 16_384
"""Scopes that are remembered; for those beyond, locations stay in the directory until it hears of it from others."""


class TenantBook:
    """Rules by tenant. Known to be none unless set otherwise, as where nobody declares any."""

    def __init__(self, *, are_rules_known: bool = True) -> None:
        self.are_rules_known = are_rules_known
        self._rules: Mapping[str, Rules] = {}
        self._hard_bytes: dict[tuple[str, str], int] = {}
        """By tier and tenant."""

    def set_rules(self, rules: Mapping[str, Rules]) -> None:
        """Take in what a complete view declares."""
        self._rules = dict(rules)
        self._hard_bytes = {
            (tier, tenant): bound.hard_bytes
            for tenant, known in rules.items()
            for tier, bound in known.bounds.items()
            if bound.hard_bytes is not None
        }
        self.are_rules_known = True

    @property
    def rules(self) -> Mapping[str, Rules]:
        """Declared rules by tenant."""
        return self._rules

    def of(self, tenant: str) -> Rules:
        """Rules of an account; those of shared scopes have none of their own."""
        return self._rules.get(tenant, NO_RULES)

    def hard_bytes(self, tier: Tier, tenant: str) -> int | None:
        """Most that an account may take of a tier; None for no bound."""
        return self._hard_bytes.get((tier.name, tenant))

    def over_hard(self, tier: Tier) -> dict[str, int]:
        """Bytes by which tenants are over their hard quota: it was lowered, or an earlier run knew another one."""
        over = {
            tenant: tier.tenant_bytes.get(tenant, 0) - hard_bytes
            for (name, tenant), hard_bytes in self._hard_bytes.items()
            if name == tier.name
        }
        return {tenant: size_bytes for tenant, size_bytes in over.items() if size_bytes > 0}

    def usages(self, tier: Tier) -> list[AccountUsage]:
        """What everybody holds who holds something of a tier."""
        return [self._usage(tier, tenant, used) for tenant, used in tier.tenant_bytes.items()]

    def _usage(self, tier: Tier, tenant: str, used_bytes: int) -> AccountUsage:
        rules = self.of(tenant)
        bound = rules.bounds.get(tier.name, NO_BOUND)
        return AccountUsage(tenant, used_bytes, bound.guaranteed_bytes, rules.weight)


class ScopeMemory:
    """Keys of the scopes that this agent has blocks of, remembered for a little longer than `secret_of` has them.

    The key of an erased scope is needed twice more: to withdraw our announcements, and to name to the directory which
    of its scopes is gone.
    """

    def __init__(self, secret_of: Callable[[ScopeId], ScopeSecret | None]) -> None:
        self._secret_of = secret_of
        self._known: dict[ScopeId, ScopeSecret] = {}
        self._lost_since_s: dict[ScopeId, float] = {}

    def secret(self, scope: ScopeId) -> ScopeSecret | None:
        """Key of a scope, a lost one included; None when it was never known."""
        secret = self._secret_of(scope)
        if secret is not None and (scope in self._known or len(self._known) < SCOPES_MAX):
            self._known[scope] = secret
        return secret or self._known.get(scope)

    def is_lost(self, scope: ScopeId) -> bool:
        """True when the scope has no key now."""
        return self._secret_of(scope) is None

    def by_tag(self, tag: str) -> ScopeId | None:
        """Scope of a tag, among those that are remembered."""
        return next((scope for scope, secret in self._known.items() if secret.tag() == tag), None)

    def lost(self, held: Iterable[ScopeId], now_s: float) -> list[ScopeSecret]:
        """Keys that have been gone for `LOST_AFTER_S`; call it now and then. `held`: scopes that have blocks here."""
        for scope in held:
            self.secret(scope)
        gone = []
        for scope, secret in self._known.items():
            if not self.is_lost(scope):
                self._lost_since_s.pop(scope, None)
            elif now_s - self._lost_since_s.setdefault(scope, now_s) >= LOST_AFTER_S:
                gone.append(secret)
        return gone

    def forget(self, scope: ScopeId) -> None:
        """Forget a lost scope."""
        self._known.pop(scope, None)
        self._lost_since_s.pop(scope, None)
