"""Which extents a reply has to bring along, their descriptors, and who has them mapped for all that we know.

A mapping cannot be taken back. So an extent that was sent to somebody who has lost its scope since gets no block any
more: what is in it moves away, and with the last of it the mapping shows zeros.

Also slots and leases in the form that clients get. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvstrata_agent.blocks.tier import ORDINAL_SHIFT
from kvstrata_api import wire
from kvstrata_api.errors import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstrata_agent.backends.base import MappableBackend, SlotRef
    from kvstrata_agent.blocks.node import Node
    from kvstrata_agent.blocks.tier import Tier
    from kvstrata_agent.cache.load import Read
    from kvstrata_agent.serve.authorization import Attachment, ScopeRight
    from kvstrata_api.trust import Identity


_EXTENT_MASK: Final = (1 << ORDINAL_SHIFT) - 1


class ExtentGrants:
    """Grants extents to connections, each once, and read-only to all but their writer."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._holders: dict[int, set[Identity]] = {}
        """Who was ever sent an extent; connections end, mappings need not."""

    def fit(
        self, at: Attachment, right: ScopeRight, slots: Sequence[tuple[Tier, SlotRef]]
    ) -> tuple[int, tuple[wire.ExtentGrant, ...]]:
        """Return how many leading slots fit into one frame, and the extents among them that are new to the caller.

        Whoever may write a scope maps only the extents with its own tenant's blocks writable.
        """
        granted: list[wire.ExtentGrant] = []
        last: tuple[Tier | None, int] = (None, 0)
        for i, (tier, slot) in enumerate(slots):
            if (tier, slot.extent) == last:  # As nearly always: they were taken as a run.
                continue
            last = tier, slot.extent
            number, mappable = tier.extent_number(slot.extent), tier.backend.mappable
            if (number, True) in at.extents:
                continue
            assert mappable is not None
            can_write = right.access.can_write and mappable.extent_writer(slot.extent) == at.tenant
            if not at.is_new(number, is_writable=can_write):
                continue
            assert at.caller is not None
            self._holders.setdefault(number, set()).add(replace(at.caller.identity, pod_uid=""))
            if len(granted) == wire.FDS_PER_FRAME_MAX:
                at.extents.discard((number, can_write))
                return i, tuple(granted)
            granted.append(wire.ExtentGrant(number, mappable.extent_bytes(slot.extent), can_write))
        return len(slots), tuple(granted)

    def gone(self, at: Attachment, granted: Sequence[wire.ExtentGrant]) -> tuple[int, ...]:
        """Extents that this connection still maps although they have gone; looked for when it is granted new ones.

        Without this a connection that lives for months would keep a descriptor for every extent there ever was.
        """
        if not granted:
            return ()
        gone = {number for number, _ in at.extents if self._find(number) is None}
        at.extents = {(number, is_writable) for number, is_writable in at.extents if number not in gone}
        return tuple(sorted(gone))

    def recheck(self, scopes_of: Callable[[Identity], frozenset[str] | None]) -> bool:
        """Close extents that somebody holds who may not read their scope any more; call it when grants have changed.

        `scopes_of` returns what an identity may read now, None while that is unknown; False when one was unknown.
        """
        known: dict[Identity, frozenset[str] | None] = {}
        for number, holders in tuple(self._holders.items()):
            mappable, extent = self._find(number), number & _EXTENT_MASK
            if mappable is None:
                del self._holders[number]
                continue
            scope = mappable.extent_scope(extent)
            for holder in holders:
                if holder not in known:
                    known[holder] = scopes_of(holder)
                readable = known[holder]
                if readable is not None and scope not in readable:
                    mappable.close_extent(extent)
                    break
        return None not in known.values()

    def _find(self, number: int) -> MappableBackend | None:
        """Backend of an extent that exists."""
        tier = next((t for t in self._node.tiers if t.ordinal == number >> ORDINAL_SHIFT), None)
        if tier is None or tier.backend.mappable is None:
            return None
        try:
            return tier.backend.mappable if tier.backend.mappable.extent_bytes(number & _EXTENT_MASK) else None
        except KeyError:
            return None

    def descriptors(self, extents: Sequence[wire.ExtentGrant]) -> list[int]:
        """Descriptors of granted extents. Raises `LeaseLostError` when one has gone with its tier."""
        found = []
        for grant in extents:
            tier = next((t for t in self._node.tiers if t.ordinal == grant.extent >> ORDINAL_SHIFT), None)
            if tier is None or tier.backend.mappable is None:
                raise LeaseLostError(f"extent {grant.extent} has gone with its tier")
            found.append(tier.backend.mappable.extent_fd(grant.extent & _EXTENT_MASK, is_writable=grant.is_writable))
        return found


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
