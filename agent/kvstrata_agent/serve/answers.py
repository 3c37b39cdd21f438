"""Slots and leases as clients are told of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstrata_api import wire

if TYPE_CHECKING:
    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.load import Read

NO_SLOT: Final = wire.Slot(0, 0, 0, 0)
"""Stands for a block that is there already, or on its way."""


def slot_of(reservation: int, tier: Tier, slot: SlotRef) -> wire.Slot:
    """A slot to be written under a reservation."""
    return wire.Slot(reservation, tier.extent_number(slot.extent), slot.offset, slot.stamp)


def leased_of(read: Read, parts: bytes) -> wire.Leased:
    """A leased block, with the joined checksums of its parts where they were asked for."""
    lease = read.lease
    tier, slot, record = lease.residence
    extent, checksum = tier.extent_number(slot.extent), record.checksum
    return wire.Leased(
        lease.id, extent, slot.offset, slot.stamp, checksum, read.source, record.epoch, parts, not checksum
    )
