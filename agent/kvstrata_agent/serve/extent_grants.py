"""Which extents a reply has to bring along, their descriptors, and who has them mapped for all that we know.

A mapping cannot be taken back. So an extent that was sent to somebody who has lost its scope since gets no block any
more: what is in it moves away, and with the last of it the mapping shows zeros. So it is with extents in devices, which
whoever opens them can write: they are lent for a tenant's own scope alone.

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

    from kvstrata_agent.backends.base import LendingBackend, MappableBackend, SlotRef
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
    ) -> tuple[int, tuple[wire.ExtentGrant, ...], tuple[wire.DeviceGrant, ...]]:
        """Return how many leading slots fit into one frame, and the extents among them that are new to the caller.

        Whoever may write a scope maps only the extents with its own tenant's blocks writable.
        """
        granted: list[wire.ExtentGrant] = []
        lent: list[wire.DeviceGrant] = []
        last: tuple[Tier | None, int] = (None, 0)
        for i, (tier, slot) in enumerate(slots):
            if (tier, slot.extent) == last:  # As nearly always: they were taken as a run.
                continue
            last = tier, slot.extent
            number, mappable, lending = tier.extent_number(slot.extent), tier.backend.mappable, tier.backend.lending
            if (number, True) in at.extents:
                continue
            if lending is not None:
                if len(granted) + len(lent) == wire.FDS_PER_FRAME_MAX:
                    return i, tuple(granted), tuple(lent)
                self._held(at, number, is_writable=True)
                size_bytes, device = lending.extent_bytes(slot.extent), lending.device_of(slot.extent)
                lent.append(wire.DeviceGrant(number, size_bytes, device))
                continue
            assert mappable is not None
            can_write = right.access.can_write and mappable.extent_writer(slot.extent) == at.tenant
            if not self._held(at, number, is_writable=can_write):
                continue
            if len(granted) + len(lent) == wire.FDS_PER_FRAME_MAX:
                at.extents.discard((number, can_write))
                return i, tuple(granted), tuple(lent)
            granted.append(wire.ExtentGrant(number, mappable.extent_bytes(slot.extent), can_write))
        return len(slots), tuple(granted), tuple(lent)

    def _held(self, at: Attachment, number: int, *, is_writable: bool) -> bool:
        """Note who is sent an extent; False when the connection has it already."""
        if not at.is_new(number, is_writable=is_writable):
            return False
        assert at.caller is not None
        self._holders.setdefault(number, set()).add(replace(at.caller.identity, pod_uid=""))
        return True

    def gone(self, at: Attachment, granted: Sequence[wire.ExtentGrant], *, has_devices: bool) -> tuple[int, ...]:
        """Extents that this connection still maps although they have gone; looked for when it is granted new ones.

        Without this a connection that lives for months would keep a descriptor for every extent there ever was. One
        that has devices open is told at once: their memory waits for it.
        """
        if not granted and not has_devices:
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
            backend, extent = self._find(number), number & _EXTENT_MASK
            if backend is None:
                del self._holders[number]
                continue
            scope = backend.extent_scope(extent)
            for holder in holders:
                if holder not in known:
                    known[holder] = scopes_of(holder)
                readable = known[holder]
                if readable is not None and scope not in readable:
                    backend.close_extent(extent)
                    break
        return None not in known.values()

    def _find(self, number: int) -> MappableBackend | LendingBackend | None:
        """Backend of an extent that exists."""
        tier = next((t for t in self._node.tiers if t.ordinal == number >> ORDINAL_SHIFT), None)
        backend = None if tier is None else tier.backend.mappable or tier.backend.lending
        if backend is None:
            return None
        try:
            return backend if backend.extent_bytes(number & _EXTENT_MASK) else None
        except KeyError:
            return None

    def closed(self, owner: int, extents: Sequence[int] | None = None) -> None:
        """Note that a connection has closed what it was lent: these extents, or all of them."""
        for tier in self._node.tiers:
            if tier.backend.lending is not None:
                mine = [e & _EXTENT_MASK for e in extents or () if e >> ORDINAL_SHIFT == tier.ordinal]
                tier.backend.lending.give_back(owner, None if extents is None else mine)

    def descriptors(
        self, owner: int, extents: Sequence[wire.ExtentGrant], devices: Sequence[wire.DeviceGrant] = ()
    ) -> list[int]:
        """Descriptors of granted extents. Raises `LeaseLostError` when one has gone with its tier."""
        found = []
        for grant in extents:
            tier = next((t for t in self._node.tiers if t.ordinal == grant.extent >> ORDINAL_SHIFT), None)
            if tier is None or tier.backend.mappable is None:
                raise LeaseLostError(f"extent {grant.extent} has gone with its tier")
            found.append(tier.backend.mappable.extent_fd(grant.extent & _EXTENT_MASK, is_writable=grant.is_writable))
        for lent in devices:
            backend = self._find(lent.extent)
            lending = backend.lending if backend is not None else None
            if lending is None:
                raise LeaseLostError(f"extent {lent.extent} of device {lent.device} has gone")
            found.append(lending.lend(lent.extent & _EXTENT_MASK, owner))
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
    extent, checksum, lending = tier.extent_number(slot.extent), record.checksum, tier.backend.lending
    total = lending.sum_of(slot) if lending is not None else b""
    return wire.Leased(
        lease.id, extent, slot.offset, slot.stamp, checksum, read.source, record.epoch, parts, not checksum, total
    )
