"""A block that changes while it is stored has the checksum of what lies in its slot; pieces are as good as a whole."""

import itertools
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata_api.checksum import checksum
from kvstrata_client.verbs.copying import Pieces, copy_verified_each, cut, fill, fill_each
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
    (promised,) = fill_each([Reservation(1, KEY, 7, 3, 1, slot)], [pieces(sizes)])
    assert (bytes(slot), promised) == (whole, checksum(slot, KEY, 7, 3))

    other_sizes = data.draw(st.permutations(sizes))
    into = pieces(other_sizes, seed=2)
    assert copy_verified_each([lease(promised, slot)], [into]) == [True]
    assert b"".join(into) == whole

    slot[data.draw(st.integers(0, len(whole) - 1))] ^= 1
    assert copy_verified_each([lease(promised, slot)], [into]) == [False]


def test_of_several_blocks_those_that_differ_are_named_and_the_rest_is_copied() -> None:
    blocks = [pieces([300_000], seed) for seed in range(3)]
    slots = [memoryview(bytearray(300_000)) for _ in blocks]
    sums = fill_each([Reservation(i, KEY, 7, 3, 1, slot) for i, slot in enumerate(slots)], blocks)
    slots[1][-1] ^= 1
    into = [memoryview(bytearray(300_000)) for _ in blocks]

    sound = copy_verified_each([lease(*one) for one in zip(sums, slots, strict=True)], [(row,) for row in into])

    assert sound == [True, False, True]
    assert [bytes(into[0]), bytes(into[2])] == [bytes(blocks[0][0]), bytes(blocks[2][0])]


def test_copying_several_blocks_waits_for_pythons_lock_once() -> None:
    """A thread that keeps it gives it up each 50 ms here: 64 waits are 3 s, and one is none to speak of."""
    blocks = [(memoryview(bytearray(64 << 10)),) for _ in range(64)]
    slots = [memoryview(bytearray(64 << 10)) for _ in blocks]
    reservations = [Reservation(i, KEY, 7, 3, 1, slot) for i, slot in enumerate(slots)]
    stop, turns = threading.Event(), itertools.count()
    spinning = threading.Thread(target=lambda: all(not stop.is_set() for _ in turns))
    patience_s = sys.getswitchinterval()
    sys.setswitchinterval(0.05)
    spinning.start()
    try:
        began_s = time.perf_counter()
        fill_each(reservations, blocks)
        took_s = time.perf_counter() - began_s
    finally:
        stop.set()
        spinning.join()
        sys.setswitchinterval(patience_s)
    assert took_s < 1.0
