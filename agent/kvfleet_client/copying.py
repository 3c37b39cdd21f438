"""Moves blocks between the agent's memory and the caller's, and proves that they are what they claim to be."""

from typing import Final

import numpy as np
import xxhash

from kvfleet_api.checksum import checksum, hasher
from kvfleet_client.results import Lease, Reservation

CHUNK_BYTES: Final = 256 << 10
"""Copied and hashed in turn, so that the hash reads from the processor's cache: at 2 MiB per block 16.1 GB/s against
14.4 for a copy and then a hash, of 17.8 for the copy alone (AMD EPYC, 1 MiB of L2 per core)."""


def copy_verified(lease: Lease, into: memoryview) -> bool:
    """Copy a leased block and check the copy; False means a miss, and that `into` holds nothing of use.

    The copy is what is checked: bytes that change under us, because the lease had ended, cannot pass.
    """
    running = hasher(lease.digest, lease.epoch, lease.stamp)
    return _copy(lease.view, into, running) == lease.checksum


def fill(reservation: Reservation, block: memoryview) -> bytes:
    """Copy a block into its reserved slot; return the checksum to publish it with.

    The checksum is of the caller's bytes, not of the slot's: whoever else writes there spoils the block, but never
    gets a checksum for it.
    """
    assert reservation.view is not None, "a block that exists already is not written"
    running = hasher(reservation.digest, reservation.epoch, reservation.stamp)
    return _copy(block, reservation.view, running, is_source_hashed=True)


def refill(lease: Lease, reservation: Reservation) -> bytes | None:
    """Copy a leased block into a slot of another scope; None when the copy is not what the lease promised.

    The new checksum comes first: a copy that is right after it was taken was right when it was taken.
    """
    view = reservation.view
    assert view is not None, "a block that exists already is not written"
    made = _copy(lease.view, view, hasher(reservation.digest, reservation.epoch, reservation.stamp))
    return made if checksum(view, lease.digest, lease.epoch, lease.stamp) == lease.checksum else None


def _copy(source: memoryview, into: memoryview, running: xxhash.xxh3_128, *, is_source_hashed: bool = False) -> bytes:
    """Copy all of `source`; return the digest of what arrived, or of what was sent. Other threads run meanwhile."""
    assert len(source) == len(into), f"copy of {len(source)} B into {len(into)} B"
    from_array, to_array = np.frombuffer(source, np.uint8), np.frombuffer(into, np.uint8)
    for start in range(0, len(source), CHUNK_BYTES):
        sent, arrived = from_array[start : start + CHUNK_BYTES], to_array[start : start + CHUNK_BYTES]
        np.copyto(arrived, sent)
        running.update(sent.data if is_source_hashed else arrived.data)
    return bytes(running.digest())
