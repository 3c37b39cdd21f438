"""Moves blocks between the agent's memory and the caller's, and proves that they are what they claim to be."""

from kvstrata_api.checksum import bind, checksum
from kvstrata_client.verbs.results import Lease, Reservation
from kvstrata_native import copy_digest


def copy_verified(lease: Lease, into: memoryview) -> bool:
    """Copy a leased block and check the copy; False means a miss, and that `into` holds nothing of use.

    The copy is what is checked: bytes that change under us, because the lease had ended, cannot pass.
    """
    return copy_digest(into, lease.view, bind(lease.digest, lease.epoch, lease.stamp)) == lease.checksum


def is_intact(lease: Lease) -> bool:
    """Check a leased block where it lies, for a reader that uses it in place; False means a miss.

    It holds for as long as the lease lives, if nobody who may write the scope is hostile: `copy_verified` does not
    depend on that.
    """
    return checksum(lease.view, lease.digest, lease.epoch, lease.stamp) == lease.checksum


def fill(reservation: Reservation, block: memoryview) -> bytes:
    """Copy a block into its reserved slot; return the checksum to publish it with.

    The checksum is of the caller's bytes, not of the slot's: whoever else writes there spoils the block, but never
    gets a checksum for it.
    """
    assert reservation.view is not None, "a block that exists already is not written"
    return copy_digest(reservation.view, block, bind(reservation.digest, reservation.epoch, reservation.stamp))


def refill(lease: Lease, reservation: Reservation) -> bytes | None:
    """Copy a leased block into a slot of another scope; None when the copy is not what the lease promised.

    The new checksum comes first: a copy that is right after it was taken was right when it was taken.
    """
    view = reservation.view
    assert view is not None, "a block that exists already is not written"
    made = copy_digest(view, lease.view, bind(reservation.digest, reservation.epoch, reservation.stamp))
    return made if checksum(view, lease.digest, lease.epoch, lease.stamp) == lease.checksum else None
