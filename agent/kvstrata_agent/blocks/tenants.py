"""What is declared of the tenants of this node's pool, and what they hold of its tiers. No clock, no I/O.

Nothing may be evicted before the rules are known, which takes a complete view of all KVTenants: whoever is missing
would look like one without a guarantee.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata_agent.policy.quota import NO_BOUND, NO_RULES, AccountUsage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.policy.quota import Rules


class TenantBook:
    """Rules by tenant. Known to be none unless told otherwise, as where nobody declares any."""

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
