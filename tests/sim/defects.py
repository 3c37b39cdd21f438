"""Defects that the simulator must find: each breaks one line of the product in this process, and mends it again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from kvstrata_agent.backends import slot_table as slots
from kvstrata_agent.blocks.block import GONE, Entry
from kvstrata_agent.blocks.leases import Lease, LeaseTable
from kvstrata_agent.blocks.node import Node
from kvstrata_agent.blocks.reservations import Reservation, ReservationTable
from kvstrata_agent.fleet.directory.announcer import Announcer
from kvstrata_agent.fleet.peers import transfer
from kvstrata_api.blocks import ScopeId
from kvstrata_client.prompt import load as loading
from kvstrata_client.verbs import copying
from kvstrata_client.verbs.results import Lease as ClientLease


def _copy_unverified(lease: ClientLease, into: memoryview) -> bool:
    into[:] = lease.view
    return True


def _copy_each_unverified(leases: Sequence[ClientLease], into: Sequence[copying.Pieces]) -> list[bool]:
    return [_copy_unverified(lease, row) for lease, (row,) in zip(leases, into, strict=True)]


def _believe(*_: object) -> transfer.Result:
    return transfer.Result.VERIFIED


def _is_held_but_by_leases(self: Entry) -> bool:
    return bool(self.pins or self.guards or self.move)


def _forget_block(self: LeaseTable, lease: Lease, **_: Any) -> None:
    if self._leases.pop(lease.id, None) is not None:
        self._owned[lease.owner].discard(lease.id)


def _sweep_early(self: LeaseTable, now_s: float) -> list[Lease]:
    early = [lease for lease in self._leases.values() if lease.expires_s <= now_s + 4.0]
    for lease in early:
        self._end(lease)
    return early


def _sweep_reservations_early(self: ReservationTable, now_s: float) -> list[Reservation]:
    early = [r for r in self._reservations.values() if r.expires_s <= now_s + 2.0]
    return [taken for r in early for taken in self.take(r.owner, (r.id,)) if taken is not None]


def _abandon_only(self: Node, reservations: Iterable[Reservation], _reason: str = "") -> int:
    count = 0
    for reservation in reservations:
        count += 1
        if not reservation.entry.residences and reservation.entry.level != GONE:
            self.index.forget(reservation.entry)
    return count


def _same_stamp(take: Callable[..., Any]) -> Callable[..., Any]:
    def taken(self: Any, extent: Any) -> Any:
        self._next_stamp = 7
        return take(self, extent)

    return taken


def _mark_present(mark: Callable[..., None]) -> Callable[..., None]:
    def marked(self: Announcer, scope: ScopeId, *digests: bytes) -> None:
        mark(self, scope, *[digest for digest in digests if self._index.blocks(scope).copy(digest) is not None])

    return marked


Change = tuple[Any, str, Any]
"""Where, which name, and what stands there instead."""

DEFECTS: Final[dict[str, tuple[str, tuple[Change, ...]]]] = {
    "the client skips its check": (
        "I1",
        ((copying, "copy_verified", _copy_unverified), (loading, "copy_verified_each", _copy_each_unverified)),
    ),
    "a peer's bytes are not checked": ("I1", ((transfer, "judge", _believe),)),
    "leased blocks are evicted": ("I2", ((Entry, "is_held", property(_is_held_but_by_leases)),)),
    "leases end before their time": ("I2", ((LeaseTable, "sweep", _sweep_early),)),
    "reservations end before their time": ("I2", ((ReservationTable, "sweep", _sweep_reservations_early),)),
    "the stamp does not move on": ("I2", ((slots.SlotTable, "_take", _same_stamp(slots.SlotTable._take)),)),
    "the end of a lease forgets its block": ("I4", ((LeaseTable, "_end", _forget_block),)),
    "slots of reservations are never given back": ("I5", ((Node, "abandon", _abandon_only),)),
    "a block that is gone is not withdrawn": ("directory", ((Announcer, "mark", _mark_present(Announcer.mark)),)),
}
"""By what is wrong: the invariant that it breaks, and what to change."""


@contextmanager
def broken(what: str) -> Iterator[str]:
    """Break the product; yields the invariant that must be seen to break."""
    invariant, changes = DEFECTS[what]
    sound = [(place, name, vars(place)[name]) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        yield invariant
    finally:
        for place, name, value in sound:
            setattr(place, name, value)
