"""Reservations: slots given out for writing, 30 s to publish each, owned by one connection. No clock, no I/O.

A number is never given out twice, and what became of it is remembered for a while: a publication that comes twice is
answered twice with the same words and carried out once.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING, Final

import msgspec

from kvstrata_agent.policy.admission import must_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvstrata_agent.backends.base import SlotRef
    from kvstrata_agent.blocks.block import Entry
    from kvstrata_agent.blocks.request import RequestContext
    from kvstrata_agent.blocks.sessions import Session
    from kvstrata_agent.blocks.tier import Tier

RESERVATION_S: Final = 30.0
"""Time to publish (design: metadata.md); a copy of one block takes milliseconds, a swapped-out writer seconds."""

PAST_MAX: Final = 16_384
"""Publications whose result is remembered."""


class Reservation(msgspec.Struct, frozen=True):
    """One slot that its owner may write."""

    id: int
    owner: int
    entry: Entry
    """Pending entry that the publication turns into a block."""
    tier: Tier
    slot: SlotRef
    raw_bytes: int
    session: Session | None
    expires_s: float
    """Monotonic second; at and after it the slot is taken back."""


class ReservationTable:
    """All reservations of this node."""

    def __init__(self) -> None:
        self._reservations: dict[int, Reservation] = {}
        self._owned: dict[int, set[int]] = {}
        self._results: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Owner and result of what was published."""
        self._written: dict[int, int] = {}
        """Blocks that each owner has asked to publish."""
        self._erring: set[int] = set()
        """Owners that gave a wrong checksum once."""
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._reservations)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._reservations.values())

    def grant(self, place: RequestContext, entry: Entry, tier: Tier, slot: SlotRef, expires_s: float) -> Reservation:
        """Note that `slot` was given out."""
        return self.grant_all(place, [entry], tier, [slot], expires_s)[0]

    def grant_all(
        self, place: RequestContext, entries: Sequence[Entry], tier: Tier, slots: Sequence[SlotRef], expires_s: float
    ) -> list[Reservation]:
        """Note that each slot was given out for the entry at its place."""
        owner, raw_bytes, session = place.owner, place.raw_bytes, place.session
        first = self._last_id + 1
        made = [
            Reservation(i, owner, entry, tier, slot, raw_bytes, session, expires_s)
            for i, entry, slot in zip(count(first), entries, slots, strict=False)
        ]
        if made:
            self._last_id = made[-1].id
            self._reservations.update(zip(range(first, self._last_id + 1), made, strict=True))
            self._owned.setdefault(owner, set()).update(range(first, self._last_id + 1))
        return made

    def owned(self, owner: int) -> list[Reservation]:
        """Reservations of one owner, in no order."""
        return [self._reservations[i] for i in self._owned.get(owner, ())]

    def renew(self, owner: int, reservation_id: int, expires_s: float) -> bool:
        """Move the expiry of a reservation; false when its owner has none of that number."""
        held = self._reservations.get(reservation_id)
        if held is None or held.owner != owner:
            return False
        self._reservations[reservation_id] = msgspec.structs.replace(held, expires_s=expires_s)
        return True

    def take(self, owner: int, ids: Iterable[int]) -> list[Reservation | None]:
        """End reservations of one owner and return them; None for unknown, expired and others' ones."""
        table, ids = self._reservations, tuple(ids)
        taken: list[Reservation | None] = []
        for i in ids:
            found = table.get(i)
            if found is not None and found.owner == owner:
                del table[i]
                taken.append(found)
            else:
                taken.append(None)
        owned = self._owned.get(owner)
        if owned is not None:
            owned.difference_update(ids)
            if not owned:
                del self._owned[owner]
        return taken

    def take_written(self, owner: int, ids: Iterable[int]) -> tuple[list[Reservation | None], list[Reservation]]:
        """End reservations that are to be published; returns also those among them whose bytes are to be checked."""
        taken = self.take(owner, ids)
        has_erred, written = owner in self._erring, self._written.get(owner, 0)
        found = [r for r in taken if r is not None]
        self._written[owner] = written + len(found)
        return taken, [r for i, r in enumerate(found, written) if must_check(i, has_erred=has_erred)]

    def note_error(self, owner: int) -> None:
        """A checksum of this owner was wrong: all that it writes from now on is checked."""
        self._erring.add(owner)

    def open_ones(self, made: Sequence[Reservation | None]) -> Sequence[Reservation | None]:
        """Leading answers up to the first reservation that has ended, by expiry or with its tier."""
        gone = (i for i, r in enumerate(made) if r is not None and self._reservations.get(r.id) is not r)
        return made[: next(gone, len(made))]

    def settle(self, owner: int, results: Mapping[int, int]) -> None:
        """Remember what became of publications of this owner, by reservation."""
        self._results.update((i, (owner, result)) for i, result in results.items())
        while len(self._results) > PAST_MAX:
            self._results.popitem(last=False)

    def result(self, owner: int, reservation_id: int) -> int | None:
        """What became of an earlier publication of this owner; None when there was none, or it is too long ago."""
        settled_by, result = self._results.get(reservation_id, (owner, None))
        return result if settled_by == owner else None

    def take_owner(self, owner: int) -> list[Reservation]:
        """End all reservations of one owner, which has gone: what it wrote is not counted any more."""
        self._written.pop(owner, None)
        self._erring.discard(owner)
        taken = self.take(owner, tuple(self._owned.get(owner, ())))
        return [r for r in taken if r is not None]

    def take_tier(self, tier: Tier) -> list[Reservation]:
        """End all reservations in one tier."""
        return self.take_where(lambda r: r.tier is tier)

    def take_where(self, is_meant: Callable[[Reservation], bool]) -> list[Reservation]:
        """End all reservations that are meant, whoever owns them."""
        taken = [r for r in self._reservations.values() if is_meant(r)]
        for reservation in taken:
            self.take(reservation.owner, (reservation.id,))
        return taken

    def sweep(self, now_s: float) -> list[Reservation]:
        """End the reservations that have expired."""
        expired = [r for r in self._reservations.values() if r.expires_s <= now_s]
        for reservation in expired:
            self.take(reservation.owner, (reservation.id,))
        return expired
