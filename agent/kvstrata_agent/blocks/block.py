"""One block of this node, and its copies. No clock, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvstrata_agent.policy.priority import PriorityClass

if TYPE_CHECKING:
    import asyncio

    from kvstrata_agent.backends.base import Record, SlotRef
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_api.blocks import LayoutId, ScopeId

TIERS_MAX: Final = 8
"""`maxItems` of spec.tiers."""
GONE: Final = TIERS_MAX
"""Level of a block without any copy: slower than every tier."""


class Residence(NamedTuple):
    """One copy of a block. A tuple: there is one for each copy, and they are made on the hot path."""

    tier: Tier
    slot: SlotRef
    record: Record


class Entry(msgspec.Struct, eq=False):
    """One block. Compared by identity; an entry that was forgotten never comes back."""

    scope: ScopeId
    digest: bytes
    parent: bytes
    layout_id: LayoutId
    born_s: float
    """Monotonic second since which it exists, as far as this node knows."""
    used_at_s: float
    tenant: str = ""
    """Account that its slots are on: who wrote it or brought it here."""
    residences: tuple[Residence, ...] = ()
    """Fastest first; empty while a writer or a transfer fills the first one."""
    level: int = 0
    """Of the fastest copy; 0 while the block is pending, because it will appear in the fastest tier."""
    leases: set[int] | None = None
    pins: set[int] | None = None
    guards: set[str] | None = None
    """Decoding sessions whose head this is."""
    followers: set[tuple[str, str]] | None = None
    """Keys of all sessions whose head this is."""
    is_cut: bool = False
    """True where a session's window begins: those before it may leave while it stays. `Index.cut` alone changes it."""
    mark: int = 0
    """What is known of its uses, see `policy.expected_reuse`."""
    priority: PriorityClass = PriorityClass.STANDARD
    """Of the session that used it last. `Index.rank` alone changes it: victims are queued by it."""
    passed: tuple[Tier, float] | None = None
    """Tier that the block was not admitted to, and its last use at that time: see `use_in_s`."""
    move: asyncio.Future[bool] | None = None
    """Set while a copy of the block is being made; done with True when it was."""

    @property
    def is_published(self) -> bool:
        """True when the block has bytes that may be read."""
        return bool(self.residences)

    @property
    def is_held(self) -> bool:
        """True while somebody leases, pins, decodes from or moves the block."""
        return bool(self.leases or self.pins or self.guards or self.move)

    def use_in_s(self, tier: Tier) -> float:
        """When it was used last, as that counts in a tier: never, where it was not admitted and nobody used it since.

        So it is the first to leave there, and no other tier that takes it is any the wiser.
        """
        passed = self.passed
        is_passing = passed is not None and passed[0] is tier and passed[1] == self.used_at_s
        return 0.0 if is_passing else self.used_at_s

    def is_passing(self, tier: Tier) -> bool:
        """True where it is the first to leave for that."""
        return self.use_in_s(tier) < self.used_at_s

    def residence(self, tier: Tier) -> Residence | None:
        """Return the copy in one tier, or None."""
        for residence in self.residences:
            if residence.tier is tier:
                return residence
        return None


def account_of(scope: ScopeId) -> str:
    """Account of a scope's blocks whose writer is not known: the tenant, or `<kind>/<name>` of a shared scope.

    What a medium calls a scope may be none: that has an account as well.
    """
    kind, name, *_ = *scope.split("/"), ""
    return name if kind == "tenant" else f"{kind}/{name}"
