"""A block that changes while it is stored has the checksum of what lies in its slot; pieces are as good as a whole."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.checksum import checksum
from kvstrata_client.verbs.copying import Pieces, copy_verified_pieces, cut, fill, fill_from
from kvstrata_client.verbs.results import Lease, Reservation

pytestmark = pytest.mark.unit

BLOCK_BYTES = 16 << 20
ROUNDS = 12
KEY = bytes(range(20))


def test_a_callers_late_change_is_stored_or_not_and_never_half_of_it() -> None:
    block, stop = np.zeros(BLOCK_BYTES, np.uint8), threading.Event()

    def change() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 251
            block[::4096] = value  # Every page, over and over.

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for stamp in range(ROUNDS):
            slot = memoryview(bytearray(BLOCK_BYTES))
            assert fill(Reservation(1, KEY, 7, stamp, 1, slot), block.data) == checksum(slot, KEY, 7, stamp)
    finally:
        stop.set()
        changer.join()


def pieces(sizes: list[int], seed: int = 1) -> Pieces:
    """Memory in pieces that lie apart."""
    made = np.random.default_rng(seed).integers(0, 256, sum(sizes) + len(sizes), dtype=np.uint8)
    stops = np.cumsum([size + 1 for size in sizes])
    return tuple(made[stop - size - 1 : stop - 1].data for size, stop in zip(sizes, stops, strict=True))


def lease(promised: bytes, slot: memoryview) -> Lease:
    return Lease(1, KEY, 7, 3, promised, "dram", 1, slot)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50))
def test_memory_that_is_cut_is_the_same_memory_in_parts_of_one_size(sizes: list[int], step: int) -> None:
    memory = pieces(sizes)
    parts = cut(memory, step)

    assert [sum(map(len, part)) for part in parts[:-1]] == [step] * (len(parts) - 1)
    assert b"".join(b"".join(part) for part in parts) == b"".join(memory)
    parts[0][0][0] ^= 1
    assert memory[0][0] == parts[0][0][0], "no byte was copied"


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=8), st.data())
def test_a_block_in_pieces_is_stored_and_read_as_a_whole_one(sizes: list[int], data: st.DataObject) -> None:
    whole = b"".join(pieces(sizes))
    slot = memoryview(bytearray(len(whole)))
    promised = fill_from(Reservation(1, KEY, 7, 3, 1, slot), pieces(sizes))
    assert (bytes(slot), promised) == (whole, checksum(slot, KEY, 7, 3))

    other_sizes = data.draw(st.permutations(sizes))
    into = pieces(other_sizes, seed=2)
    assert copy_verified_pieces(lease(promised, slot), into)
    assert b"".join(into) == whole

    slot[data.draw(st.integers(0, len(whole) - 1))] ^= 1
    assert not copy_verified_pieces(lease(promised, slot), into)
