"""What reuse implies for the size of each tier, for tiers that scale by themselves. Changes nothing.

Blocks lie in one tier after the other, as placement cascades, so a tier has the uses between what the faster ones hold
and what they hold together with it. A tier that compresses holds as many more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata_agent.policy.reuse_curve import ASKED_BLOCKS_MIN, ReuseCurve
from kvstrata_api import units
from kvstrata_api.models.poolnode import TierDemand
from kvstrata_api.tiers import AUTOSCALE_STEP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier


class Demand:
    """Follows uses while any tier of the pool scales."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._curve: ReuseCurve | None = None

    @property
    def is_followed(self) -> bool:
        """True while any tier scales by itself, so that uses have to be recorded."""
        return self._curve is not None

    def note(self, digests: Sequence[bytes], *, is_asked: bool) -> None:
        """Take in blocks that an engine asks for or brings."""
        if self._curve is not None:
            self._curve.note(digests, self._node.clock(), is_asked=is_asked)

    def of_tiers(self) -> dict[str, TierDemand]:
        """Demand by tier name; empty until enough was asked for."""
        if not any(tier.autoscale for tier in self._node.spec.tiers):
            self._curve = None
            return {}
        if self._curve is None:
            self._curve = ReuseCurve()
        curve, block_bytes = self._curve, self._node.block_bytes
        if not block_bytes or curve.asked_blocks < ASKED_BLOCKS_MIN:
            return {}
        held, found, above = self._held(), {}, 0.0
        up, down = AUTOSCALE_STEP
        for tier in self._node.tiers:
            blocks = tier.backend.capacity_bytes * _ratio(tier) / block_bytes
            here = curve.hit_ratio(above + blocks)
            found[tier.name] = TierDemand(
                gain_permille=_permille(curve.hit_ratio(above + blocks * up / down) - here),
                loss_permille=_permille(here - curve.hit_ratio(above + blocks * down / up)),
                held_bytes=-(-units.coarse(held.get(tier, 0)) * 8 // 7),
            )
            above += blocks
        return found

    def _held(self) -> dict[Tier, int]:
        """Bytes under leases by tier."""
        slots = {(lease.residence.tier, lease.residence.slot) for lease in self._node.leases}
        held: dict[Tier, int] = {}
        for tier, slot in slots:
            held[tier] = held.get(tier, 0) + slot.size_bytes
        return held


def _ratio(tier: Tier) -> float:
    return tier.raw_bytes_written / tier.stored_bytes_written if tier.stored_bytes_written else 1.0


def _permille(part: float) -> int:
    """Coarse above 15, so that a busy node does not write for every thousandth."""
    return units.coarse(round(1000 * max(0.0, min(1.0, part))))
