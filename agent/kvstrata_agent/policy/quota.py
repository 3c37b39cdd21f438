"""Who makes room for whom in a tier that several tenants use, or in a bounded table, and how much is whose. Pure.

Laws: nobody but its owner is pushed below a guarantee; beyond guarantees room is shared by weight, so of two tenants
the one that holds more for its weight loses blocks first, its own ones; a tenant that is at or over its share never
takes room from one that is below its own; over a table's bound, the account that has most loses entries.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil
from typing import Final, Generic, TypeVar

from kvstrata_agent.policy.retention import KEEP, Retention

WEIGHT: Final = 100
"""Of whoever declares none."""


class OverQuota(StrEnum):
    """What happens at the hard quota; values of `KVTenant.spec.overQuota`."""

    EVICT = "Evict"
    """The tenant's least recently used blocks leave the tier, and are gone where no slower tier has them."""
    REJECT = "Reject"
    """New blocks are refused with an error."""
    DEMOTE = "Demote"
    """Its least recently used blocks go to a slower tier; what none of them takes stays, and new blocks go below."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Quota of one tenant in one tier of this node."""

    hard_bytes: int | None = None
    guaranteed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """What is declared of one tenant, as far as this node's pool goes."""

    weight: int = WEIGHT
    over_quota: OverQuota = OverQuota.EVICT
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """By name of the tier."""
    retention: Retention = KEEP


NO_RULES: Final = Rules()
NO_BOUND: Final = Bound()


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """What one account holds of one tier: a tenant, or a shared scope whose writers nobody remembers."""

    tenant: str
    used_bytes: int
    """Of all its slots, reserved and moving ones included."""
    guaranteed_bytes: int = 0
    weight: int = WEIGHT

    @property
    def surplus_bytes(self) -> int:
        """What may be evicted of it for others."""
        return max(0, self.used_bytes - self.guaranteed_bytes)


def over_hard_bytes(used_bytes: int, want_bytes: int, hard_bytes: int | None) -> int:
    """Bytes that a tenant has to give up before it may have `want_bytes` more; 0 when they fit."""
    return 0 if hard_bytes is None else max(0, used_bytes + want_bytes - hard_bytes)


def accounts_over_share(usages: Iterable[AccountUsage], writer: str, want_bytes: int) -> tuple[AccountUsage, ...]:
    """From whom to evict for `want_bytes` of `writer`, one after the other, the first the most over its share.

    What counts is what an account holds beyond its guarantee for its weight, and for the writer, what it would hold.
    Nobody comes after the writer: who holds less for its weight owes it nothing, even when the writer's own blocks
    cannot leave now.
    """
    known = {s.tenant: s for s in usages}
    own = known.get(writer, AccountUsage(writer, 0))
    own_ratio = max(0, own.used_bytes + want_bytes - own.guaranteed_bytes) / own.weight
    others = sorted(
        (
            s
            for s in known.values()
            if s.tenant != writer and s.surplus_bytes and s.surplus_bytes / s.weight >= own_ratio
        ),
        key=lambda s: (-s.surplus_bytes / s.weight, s.tenant),
    )
    if not own.used_bytes:
        return tuple(others)
    return (*(s for s in others if s.surplus_bytes / s.weight > own_ratio), own)


def surplus_to_evict(usages: Sequence[AccountUsage], need_bytes: int) -> dict[str, int]:
    """Bytes to evict from each account so that a tier has `need_bytes` more.

    Those furthest over their share give, down to one level for all, and nobody below its guarantee; so it falls short
    when guarantees take the rest.
    """
    if need_bytes <= 0:
        return {}
    level = _level([s for s in usages if s.surplus_bytes], need_bytes)
    due = {s.tenant: min(s.surplus_bytes, ceil(s.surplus_bytes - level * s.weight)) for s in usages}
    return {tenant: size_bytes for tenant, size_bytes in due.items() if size_bytes > 0}


def _level(usages: Sequence[AccountUsage], need_bytes: int) -> float:
    """Bytes for each unit of weight that everybody keeps beyond its guarantee."""
    surplus_bytes = weight = 0
    ranked = sorted(usages, key=lambda s: -s.surplus_bytes / s.weight)
    for i, usage in enumerate(ranked):
        surplus_bytes += usage.surplus_bytes
        weight += usage.weight
        level = (surplus_bytes - need_bytes) / weight
        following = ranked[i + 1].surplus_bytes / ranked[i + 1].weight if i + 1 < len(ranked) else 0.0
        if level >= following:
            return level
    return 0.0


K = TypeVar("K", bound=Hashable)


class FairOrder(Generic[K]):
    """Keys by account, in order of last use. Law: no account loses a key while another one has more."""

    def __init__(self) -> None:
        self._accounts: dict[str, OrderedDict[K, None]] = {}
        self._account_of: dict[K, str] = {}

    def __len__(self) -> int:
        return len(self._account_of)

    def use(self, account: str, key: K) -> None:
        """Note that a key was used just now, on this account."""
        self.drop(key)
        self._account_of[key] = account
        self._accounts.setdefault(account, OrderedDict())[key] = None

    def drop(self, key: K) -> None:
        """Forget a key. Idempotent."""
        account = self._account_of.pop(key, None)
        if account is not None:
            keys = self._accounts[account]
            del keys[key]
            if not keys:
                del self._accounts[account]

    def count(self, account: str) -> int:
        """How many keys an account has."""
        return len(self._accounts.get(account, ()))

    def largest_account(self) -> str:
        """Account that has most keys; there must be one."""
        return max(self._accounts, key=self.count)

    def of(self, account: str) -> Iterator[K]:
        """Keys of an account, least recently used first; not to be changed meanwhile."""
        return iter(self._accounts.get(account, ()))

    def next_to_evict(self) -> K:
        """Least recently used key of the account that has most; there must be one."""
        return next(self.of(self.largest_account()))
