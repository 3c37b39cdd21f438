"""Leases and pins: named entries with an expiry, each owned by one connection. No clock, no I/O.

A block's number of users is the size of a set of names, never a counter, so it cannot become negative or be
forgotten: what a dead connection held is found by its name. A name is never given out twice, so a message that comes
twice, late or from somebody else changes nothing and is counted apart.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstrata_agent.blocks.block import Entry, Residence
    from kvstrata_agent.blocks.tier import Tier

Hold = Literal["leases", "pins"]
"""Which set of the entry a table keeps."""

PAST_MAX: Final = 16_384
"""Ended leases whose end is remembered; a release of an older one counts as late."""


class Stray(StrEnum):
    """Why a release ended nothing."""

    DOUBLE = "double"
    """Released before."""
    LATE = "late"
    """The lease had run out or was taken back: what was read under it is void."""
    FOREIGN = "foreign"
    """Another connection's lease."""
    UNKNOWN = "unknown"
    """Never given out."""


class Lease(msgspec.Struct, frozen=True):
    """The right of one owner to read one slot until it ends it."""

    id: int
    owner: int
    entry: Entry
    residence: Residence
    expires_s: float
    """Monotonic second; at and after it the lease is void."""


@dataclass(frozen=True, slots=True)
class Released:
    """What one release did."""

    valid: tuple[Lease, ...]
    """Leases that lived until now: their slots were not used for anything else."""
    late: tuple[Lease, ...]
    """Leases that were past their time and had not been swept yet."""
    strays: Counter[Stray]


class LeaseTable:
    """All leases, or all pins, of this node."""

    def __init__(self, hold: Hold = "leases") -> None:
        self._hold = hold
        self._leases: dict[int, Lease] = {}
        self._owned: dict[int, set[int]] = {}
        self._past: OrderedDict[int, tuple[int, bool]] = OrderedDict()
        """Owner of an ended lease, and whether it was released in time."""
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(self, owner: int, entry: Entry, residence: Residence, expires_s: float) -> Lease:
        """Give out a lease. While it lives the block is no victim."""
        return self.grant_all(owner, ((entry, residence),), expires_s)[0]

    def grant_all(self, owner: int, copies: Sequence[tuple[Entry, Residence]], expires_s: float) -> list[Lease]:
        """Give out a lease of each copy; no block is a victim while one of its leases lives."""
        if not copies:
            return []
        hold, first = self._hold, self._last_id + 1
        self._last_id += len(copies)
        made = [Lease(i, owner, entry, residence, expires_s) for i, (entry, residence) in enumerate(copies, first)]
        numbers = range(first, first + len(made))
        for number, (entry, _) in zip(numbers, copies, strict=True):
            held: set[int] | None = getattr(entry, hold)
            if held is None:
                setattr(entry, hold, {number})
            else:
                held.add(number)
        self._leases.update(zip(numbers, made, strict=True))
        self._owned.setdefault(owner, set()).update(numbers)
        return made

    def find(self, owner: int, lease_id: int) -> Lease | None:
        """Return a live lease of this owner, or None."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.owner == owner else None

    def of(self, entry: Entry) -> list[Lease]:
        """Live leases of one block, in no order."""
        return [self._leases[i] for i in getattr(entry, self._hold) or ()]

    def release(self, owner: int, ids: Iterable[int], now_s: float) -> Released:
        """End leases because their reader is done. Idempotent: what ends nothing is only counted."""
        valid: list[Lease] = []
        late: list[Lease] = []
        strays: Counter[Stray] = Counter()
        leases = self._leases
        for lease_id in ids:
            lease = leases.get(lease_id)
            if lease is None or lease.owner != owner:
                strays[self._stray(owner, lease_id)] += 1
                continue
            is_valid = now_s < lease.expires_s
            (valid if is_valid else late).append(lease)
            self._end(lease, is_released=is_valid)
        if late:
            strays[Stray.LATE] += len(late)
        return Released(tuple(valid), tuple(late), strays)

    def renew(self, owner: int, ids: Sequence[int], now_s: float, expires_s: float) -> int:
        """Move the expiry of leases up to the first that does not live any more; returns how many lived."""
        for count, lease_id in enumerate(ids):
            lease = self.find(owner, lease_id)
            if lease is None or lease.expires_s <= now_s:
                return count
            self._leases[lease_id] = Lease(lease_id, owner, lease.entry, lease.residence, expires_s)
        return len(ids)

    def settle(self, entry: Entry, old: Residence, new: Residence) -> None:
        """A copy that grew is whole: its leases are of what it is now."""
        for lease in self.of(entry):
            if lease.residence is old:
                self._leases[lease.id] = msgspec.structs.replace(lease, residence=new)

    def end(self, owner: int, ids: Iterable[int]) -> list[Lease]:
        """Take leases of one owner back and return those that there were; others' and unknown ones are ignored."""
        ended = [lease for lease_id in dict.fromkeys(ids) if (lease := self.find(owner, lease_id)) is not None]
        for lease in ended:
            self._end(lease)
        return ended

    def end_owner(self, owner: int) -> list[Lease]:
        """End all leases of one owner."""
        return self.end(owner, tuple(self._owned.get(owner, ())))

    def end_tier(self, tier: Tier) -> list[Lease]:
        """Take back all leases in one tier, which is going away."""
        return self.end_where(lambda lease: lease.residence.tier is tier)

    def end_where(self, is_meant: Callable[[Lease], bool]) -> list[Lease]:
        """Take back all leases that are meant, whoever holds them."""
        ended = [lease for lease in self._leases.values() if is_meant(lease)]
        for lease in ended:
            self._end(lease)
        return ended

    def owned(self, owner: int) -> list[Lease]:
        """Live leases of one owner, in no order."""
        return [self._leases[i] for i in self._owned.get(owner, ())]

    def count(self, owner: int) -> int:
        """How many live leases one owner has."""
        return len(self._owned.get(owner, ()))

    def owners(self) -> set[int]:
        """Connections that hold something."""
        return set(self._owned)

    def sweep(self, now_s: float) -> list[Lease]:
        """End the leases that have expired."""
        expired = [lease for lease in self._leases.values() if lease.expires_s <= now_s]
        for lease in expired:
            self._end(lease)
        return expired

    def _stray(self, owner: int, lease_id: int) -> Stray:
        living = self._leases.get(lease_id)
        past_owner, was_released = self._past.get(lease_id, (owner, False))
        if not 0 < lease_id <= self._last_id:
            return Stray.UNKNOWN
        if (living.owner if living is not None else past_owner) != owner:
            return Stray.FOREIGN
        return Stray.DOUBLE if was_released else Stray.LATE

    def _end(self, lease: Lease, *, is_released: bool = False) -> None:
        if self._leases.pop(lease.id, None) is None:
            return
        held: set[int] = getattr(lease.entry, self._hold)
        held.discard(lease.id)
        if not held:
            setattr(lease.entry, self._hold, None)
        owned = self._owned[lease.owner]
        owned.discard(lease.id)
        if not owned:
            del self._owned[lease.owner]
        self._past[lease.id] = (lease.owner, is_released)
        if len(self._past) > PAST_MAX:
            self._past.popitem(last=False)
